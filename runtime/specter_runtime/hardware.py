"""What a machine does in how many seconds: the profile that the simulator computes with.

A profile is a JSON file with exactly the fields of ``Hardware``; some ship with the package.

Called by: cli, simulated_bundle.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from importlib import resources
from pathlib import Path

from specter_runtime.errors import SpecterError, name_list

PROFILES = "profiles"


@dataclass(frozen=True, slots=True)
class Hardware:
    """Rates and overheads of one machine.

    Attributes:
        name: what it is, for people.
        link_bytes_per_second: of all reads from the slow tier together.
        link_latency_seconds: of each read, before its bytes come.
        num_readers: reads under way at a time.
        memory_bytes_per_second: at which weights are read and multiplied.
        packed_bytes_per_second: the same of packed weights, in bytes of the packed form.
        multiplies_per_second: multiply-adds, where many rows share a weight.
        pass_overhead_seconds: of every pass of target or draft.
        layer_overhead_seconds: of every layer in a pass of several rows or of the draft.
        row_layer_overhead_seconds: of every layer in a target pass of one row.
        stop_overhead_seconds: of every layer of a row that has to ask for reads.
        full_stop_overhead_seconds: the same where all are awaited before anything is computed.
        computing_while_reading: share of its speed that computing keeps while a read is under way.
        reading_while_computing: share of its speed that the link keeps while something is computed.
    """

    name: str
    link_bytes_per_second: float
    link_latency_seconds: float
    num_readers: int
    memory_bytes_per_second: float
    packed_bytes_per_second: float
    multiplies_per_second: float
    pass_overhead_seconds: float
    layer_overhead_seconds: float
    row_layer_overhead_seconds: float
    stop_overhead_seconds: float
    full_stop_overhead_seconds: float
    computing_while_reading: float = 1.0
    reading_while_computing: float = 1.0

    def to_json(self) -> str:
        """Text of a profile."""
        return json.dumps(asdict(self), indent=1) + "\n"


def shipped() -> list[str]:
    """Names of the profiles that ship."""
    folder = resources.files("specter_runtime") / PROFILES
    return sorted(entry.name.removesuffix(".json") for entry in folder.iterdir())


def load_hardware(name: str) -> Hardware:
    """A profile that ships, by name, or one in a file.

    Raises:
        SpecterError: there is none, or it is malformed; names the file and the key.
    """
    path = Path(name)
    if name in shipped():
        text = (resources.files("specter_runtime") / PROFILES / f"{name}.json").read_text("utf-8")
    elif path.is_file():
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as exc:
            raise SpecterError(f"{path}: cannot be read: {exc}") from exc
    else:
        known = ", ".join(shipped())
        raise SpecterError(f"{name}: no such file, and no profile that ships; these do: {known}")
    return parse_hardware(text, name)


def parse_hardware(text: str, where: str) -> Hardware:
    """A profile from JSON.

    Raises:
        SpecterError: it is malformed; names ``where`` and the key.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as exc:
        raise SpecterError(f"{where}: not valid JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise SpecterError(f"{where}: expected a JSON object, found {type(raw).__name__}")
    names = [field.name for field in fields(Hardware)]
    unknown, missing = sorted(raw.keys() - set(names)), [n for n in names if n not in raw]
    if unknown or missing:
        what = f"unknown {name_list(unknown)}" if unknown else f"missing {name_list(missing)}"
        raise SpecterError(f"{where}: {what}; the keys of a profile are {', '.join(names)}")
    if not isinstance(raw["name"], str):
        raise SpecterError(f"{where}: name: expected text, found {raw['name']!r}")
    for name in names[1:]:
        _check_number(raw[name], name, where)
    return Hardware(**raw)


def _check_number(value: object, name: str, where: str) -> None:
    """Overheads may be 0, rates may not, shares are at most 1, readers are counted."""
    kinds = (int,) if name == "num_readers" else (int, float)
    is_share = name in ("computing_while_reading", "reading_while_computing")
    wanted = "a whole number" if kinds == (int,) else "a number"
    wanted += " of at least 0" if name.endswith("overhead_seconds") else " above 0"
    wanted = "a number above 0, at most 1" if is_share else wanted
    if name == "link_latency_seconds":
        wanted = "a number of at least 0"
    if type(value) in kinds and isinstance(value, (int, float)) and math.isfinite(value):
        least_ok = value >= 0 if "at least 0" in wanted else value > 0
        if least_ok and not (is_share and value > 1):
            return
    raise SpecterError(f"{where}: {name}: expected {wanted}, found {value!r:.40}")
