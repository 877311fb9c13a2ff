"""From the measurements of ``vs_peers`` to rows and Markdown tables: values in, values out.

A measurement is one arm under one cap in one repeat: what ``decode_worker`` printed for each prompt
set, and what its memory group counted. A row sums up an arm under a cap: medians over repeats of
the mean over prompt sets; spread is (max - min) / median. Its floor is what no policy can beat with
this engine and these bytes: the larger of a token's time with everything resident and of the time
that the link takes for the bytes that were loaded.

Called by: vs_peers.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Measurement = Mapping[str, Any]
UNKNOWN = "-"


@dataclass(frozen=True, slots=True)
class Reference:
    """What measurements are held against.

    Attributes:
        tokens: by prompt set, what our runtime decodes with all experts resident.
        compute_seconds: by engine and prompt set, a token's time with everything resident.
        link_bytes_per_second: what the disk brings; None if it was not measured.
    """

    tokens: Mapping[str, Sequence[int]]
    compute_seconds: Mapping[str, Mapping[str, float]]
    link_bytes_per_second: float | None


@dataclass(frozen=True, slots=True)
class Timing:
    """How long a token took, and where the time went; None where an engine does not say."""

    tpot_seconds: float
    spread: float
    bytes_per_token: float
    stall_seconds_per_token: float | None
    link_busy_share: float | None
    floor_seconds: float | None

    @property
    def distance(self) -> float | None:
        """Time as a multiple of the floor."""
        return self.tpot_seconds / self.floor_seconds if self.floor_seconds else None


@dataclass(frozen=True, slots=True)
class Output:
    """What was decoded of one prompt set: hashes, one if all repeats agree, and leading tokens."""

    tokens_sha256: tuple[str, ...]
    num_tokens: int
    num_equal: int


@dataclass(frozen=True, slots=True)
class Row:
    """One arm under one cap, over all repeats."""

    arm: str
    cap_bytes: int | None
    num_repeats: int
    peak_bytes: int
    limit_hits: int
    failure: str | None = None
    num_slots: int | None = None
    mean: Timing | None = None
    sets: Mapping[str, Timing] = field(default_factory=dict)
    outputs: Mapping[str, Output] = field(default_factory=dict)

    @property
    def is_equal(self) -> bool:
        """Whether every token is the one that our runtime decodes with all resident."""
        return all(output.num_equal == output.num_tokens for output in self.outputs.values())

    def ratio_to(self, other: Row | None) -> float | None:
        """How many times faster than another row this one is."""
        if other is None or other.mean is None or self.mean is None:
            return None
        return other.mean.tpot_seconds / self.mean.tpot_seconds

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        timings = {"mean": self.mean, **self.sets}
        distances = {name: timing.distance for name, timing in timings.items() if timing}
        return {**asdict(self), "distances": distances}


def make_reference(runs: Sequence[Measurement], link_rates: Sequence[float]) -> Reference:
    """From the measurements without a cap; the link's rate is the best that was ever seen."""
    resident: dict[str, list[Measurement]] = {}
    for run in runs:
        if run["cap_bytes"] is None and "failure" not in run:
            resident.setdefault(run["engine"], []).append(run)
    compute = {
        engine: {
            name: statistics.median(run["sets"][name]["tpot_seconds"] for run in found)
            for name in found[0]["sets"]
        }
        for engine, found in resident.items()
    }
    tokens = {
        name: cell["tokens"]
        for run in resident.get("specter", ())[:1]
        for name, cell in run["sets"].items()
    }
    return Reference(tokens, compute, max([*link_rates, *rates_seen(runs)], default=None))


def rates_seen(runs: Sequence[Measurement]) -> Iterator[float]:
    """What the link brought in each measurement while it was busy."""
    for run in runs:
        numbers = mean_over_sets(run) if "failure" not in run else {}
        if busy := numbers.get("link_busy_seconds_per_token"):
            yield numbers["bytes_per_token"] / busy


def make_rows(runs: Sequence[Measurement], arms: Sequence[str], reference: Reference) -> list[Row]:
    """No cap first, then from the smallest cap on; arms in the given order."""
    repeats: dict[tuple[int, str], list[Measurement]] = {}
    for run in runs:
        repeats.setdefault((run["cap_bytes"] or 0, run["arm"]), []).append(run)
    order = sorted(repeats, key=lambda key: (key[0], arms.index(key[1])))
    return [make_row(repeats[key], reference) for key in order]


def make_row(runs: Sequence[Measurement], reference: Reference) -> Row:
    """Sum up the repeats of one arm under one cap."""
    first = runs[0]
    counts = {
        "arm": first["arm"],
        "cap_bytes": first["cap_bytes"],
        "num_repeats": len(runs),
        "peak_bytes": max(run["peak_bytes"] for run in runs),
        "limit_hits": max(run["limit_hits"] for run in runs),
    }
    failures = [run["failure"] for run in runs if "failure" in run]
    if failures:
        return Row(**counts, failure=failures[0])
    compute = reference.compute_seconds.get(first["engine"], {})
    link = reference.link_bytes_per_second
    sets = {}
    for name in first["sets"]:
        cells = [run["sets"][name] for run in runs]
        nbytes = statistics.median(cell["bytes_per_token"] for cell in cells)
        sets[name] = make_timing(cells, floor_seconds(compute.get(name), nbytes, link))
    floors = [timing.floor_seconds for timing in sets.values() if timing.floor_seconds is not None]
    return Row(
        **counts,
        num_slots=first.get("num_slots"),
        mean=make_timing(
            [mean_over_sets(run) for run in runs], statistics.fmean(floors) if floors else None
        ),
        sets=sets,
        outputs={
            name: make_output([run["sets"][name]["tokens"] for run in runs], reference.tokens[name])
            for name in first["sets"]
            if name in reference.tokens
        },
    )


def mean_over_sets(run: Measurement) -> dict[str, float]:
    """Each number's mean over a measurement's prompt sets."""
    cells = list(run["sets"].values())
    names = [name for name in cells[0] if name != "tokens"]
    return {name: statistics.fmean(cell[name] for cell in cells) for name in names}


def make_timing(cells: Sequence[Mapping[str, Any]], floor: float | None) -> Timing:
    """Medians over repeats."""
    times = [cell["tpot_seconds"] for cell in cells]
    is_counted = "stall_seconds_per_token" in cells[0]
    return Timing(
        tpot_seconds=statistics.median(times),
        spread=spread(times),
        bytes_per_token=statistics.median(cell["bytes_per_token"] for cell in cells),
        stall_seconds_per_token=statistics.median(c["stall_seconds_per_token"] for c in cells)
        if is_counted
        else None,
        link_busy_share=statistics.median(
            c["link_busy_seconds_per_token"] / c["tpot_seconds"] for c in cells
        )
        if is_counted
        else None,
        floor_seconds=floor,
    )


def spread(values: Sequence[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


def floor_seconds(
    compute_seconds: float | None, bytes_per_token: float, link_bytes_per_second: float | None
) -> float | None:
    """max(compute, bytes / bandwidth) of what is known."""
    bounds = [] if compute_seconds is None else [compute_seconds]
    if link_bytes_per_second is not None:
        bounds.append(bytes_per_token / link_bytes_per_second)
    return max(bounds, default=None)


def make_output(repeats: Sequence[Sequence[int]], reference: Sequence[int]) -> Output:
    """Hashes and the least number of equal leading tokens."""
    hashes = [hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest() for tokens in repeats]
    return Output(
        tokens_sha256=tuple(dict.fromkeys(hashes)),
        num_tokens=len(repeats[0]),
        num_equal=min(num_equal_leading(tokens, reference) for tokens in repeats),
    )


def num_equal_leading(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens are equal before the first that is not."""
    pairs = list(zip(tokens, reference, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def table(rows: Sequence[Row], ratios: Mapping[str, Row | None]) -> list[str]:
    """Lines of a Markdown table; ``ratios`` names the rows that each is compared with."""
    sets = list(dict.fromkeys(name for row in rows for name in row.sets))
    columns = [(row.arm, columns_of(row, sets, ratios)) for row in rows]
    head = ["arm", *(columns[0][1] if columns else ())]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    return lines + [f"| {name} | " + " | ".join(cells.values()) + " |" for name, cells in columns]


def columns_of(row: Row, sets: Sequence[str], ratios: Mapping[str, Row | None]) -> dict[str, str]:
    """What is printed of a row behind its name, by the column's head."""

    def mean(attribute: str, scale: float, form: str = ".0f") -> str:
        return number(getattr(row.mean, attribute, None), scale, form)

    worst = min(row.outputs.values(), key=lambda out: out.num_equal - out.num_tokens, default=None)
    return {
        "slots": number(row.num_slots),
        **{
            f"{name} ms": number(row.sets[name].tpot_seconds if name in row.sets else None, 1e3)
            for name in sets
        },
        "mean ms": row.failure or mean("tpot_seconds", 1e3),
        "spread": mean("spread", 1, ".0%"),
        "MB a token": mean("bytes_per_token", 1e-6),
        "stall ms": mean("stall_seconds_per_token", 1e3),
        "link busy": mean("link_busy_share", 1, ".0%"),
        "floor ms": mean("floor_seconds", 1e3),
        "distance": mean("distance", 1, ".2f"),
        "peak GB": number(row.peak_bytes, 1e-9, ".2f"),
        "limit hits": str(row.limit_hits),
        "equal tokens": f"{worst.num_equal}/{worst.num_tokens}" if worst else UNKNOWN,
        **{f"x {name}": number(row.ratio_to(other), 1, ".2f") for name, other in ratios.items()},
    }


def number(value: float | None, scale: float = 1, form: str = ".0f") -> str:
    """A number in a cell."""
    return UNKNOWN if value is None else format(value * scale, form)
