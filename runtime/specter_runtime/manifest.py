"""The bundle's two JSON records, ``manifest.json`` and ``plan.json``, as frozen dataclasses.

The reader owns the format: ``specter_build`` writes through these same classes. The files are
strict: an unknown or missing key is an error, since another version wrote it.

``tensor_names`` maps the roles that the model knows (``q_proj``, ``router``, ``gate_proj`` of an
expert, ...) to templates of the checkpoint's own tensor names, with ``{layer}`` and ``{expert}``.
A tensor's Hugging Face name is its only identity, in the bundle too.

Called by: bundle_loader, specter_build.write_bundle.  Next: config.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from types import UnionType
from typing import Any, Literal, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from specter_runtime.config import (
    DType,
    Encoding,
    Eviction,
    ExpertNumbers,
    ModelConfig,
    PredictorKind,
)
from specter_runtime.errors import BundleError, name_list

Record = TypeVar("Record")

FORMAT = "specter-bundle"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"
PREDICTOR_FILE = "predictor.safetensors"


@dataclass(frozen=True, slots=True)
class FileEntry:
    """Size and SHA-256 (hexadecimal) of one file of the bundle."""

    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class DraftFormat:
    """How the draft's experts are quantized.

    Attributes:
        method: name of the quantizer, for the record.
        bits: for each routed layer (ascending) the bit width of each expert; 0 = no stand-in.
    """

    method: str
    group_size: int
    symmetric: bool
    bits: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ExpertFormat:
    """How expert shards are stored.

    Attributes:
        numbers: as the checkpoint stores them.
        encoding: ``raw``: the checkpoint's bytes; ``packed``: see ``packed_bf16``.
        data_start: offset of the data in every shard; a multiple of 4096.
        nbytes: bytes of data in the largest shard; raw ones are all of one size.
    """

    numbers: ExpertNumbers
    encoding: Encoding
    data_start: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """Everything about a bundle but its tensors.

    Attributes:
        checkpoint_dtype: dtype of the resident tensors as stored.
        files: path inside the bundle -> size and hash, for every hashed file but this one.
        unhashed_files: files that may differ between two builds of the same inputs.
        build_digest: SHA-256 over recipe, calibration text, source files and builder version: two
            builds with the same digest have the same bytes.
    """

    format: str
    format_version: int
    model: ModelConfig
    tensor_names: dict[str, str]
    checkpoint_dtype: DType
    draft: DraftFormat
    experts: ExpertFormat
    files: dict[str, FileEntry]
    unhashed_files: tuple[str, ...]
    recipe: dict[str, Any]
    build_digest: str
    seed: int
    tools: dict[str, str]
    source_files: dict[str, FileEntry]

    def to_json(self) -> str:
        """Canonical JSON text: sorted keys, so that the same manifest gives the same bytes."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> Manifest:
        """Parse and check; raises ``BundleError`` naming ``where`` and the key.

        Earlier plans say nothing of eviction and predictor: theirs were what nobody could choose.
        """
        if raw.get("format") != FORMAT:
            raise BundleError(f"{where}: 'format' is {raw.get('format')!r}, expected {FORMAT!r}")
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{where}: format version {raw.get('format_version')!r}; this runtime reads "
                f"version {FORMAT_VERSION}. Build the bundle again with a matching specter-build."
            )
        manifest = parse_record(cls, raw, where)
        for name in (*manifest.files, *manifest.unhashed_files):
            check_inside(name, where)
        return manifest


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement for one budget on one hardware profile; the runtime scales it to another budget.

    Attributes:
        num_slots: expert slots that the budget leaves.
        initial_residents: (layer, expert), most useful first; the first ``num_slots`` are loaded
            at start.
        dtype: precision of activations, dense weights and KV cache that the budget was computed
            for.
        eviction: see ``RuntimeConfig``.
        predictor: see ``RuntimeConfig``.
        predicted: seconds per output token of each way to run the bundle that was simulated.
        chosen: which of them it is.
        reason: why, for people.
        hardware: numbers of the profile that they were simulated on.
    """

    format_version: int
    memory_budget_bytes: int
    max_context_tokens: int
    dtype: DType
    num_slots: int
    num_draft_tokens: int
    initial_residents: tuple[tuple[int, int], ...]
    eviction: Eviction
    predictor: PredictorKind
    predicted: dict[str, float]
    chosen: str
    reason: str
    hardware: dict[str, float]

    def to_json(self) -> str:
        """Canonical JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> Plan:
        """Parse and check; raises ``BundleError`` naming ``where`` and the key."""
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{where}: format version {raw.get('format_version')!r}, expected {FORMAT_VERSION}"
            )
        chosen = str(raw.get("num_draft_tokens"))
        earlier = {"eviction": "reuse", "predictor": "none", "chosen": chosen, "reason": ""}
        return parse_record(cls, {**earlier, **raw}, where)


def parse_record(cls: type[Record], raw: object, where: str) -> Record:
    """A frozen dataclass from JSON: exactly its keys, each of its declared type.

    Raises:
        BundleError: naming ``where``, the key path, what was expected and what was found.
    """
    if not isinstance(raw, Mapping):
        raise BundleError(f"{where}: expected an object, found {type(raw).__name__}")
    hints = get_type_hints(cls)
    expected = {f.name for f in dataclasses.fields(cast(Any, cls))}
    missing, unknown = sorted(expected - raw.keys()), sorted(raw.keys() - expected)
    if missing:
        raise BundleError(f"{where}: missing {name_list(missing)}; build the bundle again")
    if unknown:
        raise BundleError(f"{where}: unknown {name_list(unknown)}; build the bundle again")
    return cls(**{name: _convert(raw[name], hints[name], f"{where}: {name}") for name in expected})


def _convert(value: object, kind: Any, where: str) -> Any:
    """``value`` as a field of type ``kind``; lists become tuples, objects become records."""
    if kind is Any:
        return value
    if dataclasses.is_dataclass(kind):
        return parse_record(cast(type, kind), value, where)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (UnionType, Union):  # of one type and None, that is all there is
        return None if value is None else _convert(value, arguments[0], where)
    if origin is Literal and value in arguments and type(value) is type(arguments[0]):
        return value
    if origin is tuple and isinstance(value, list):
        kinds = arguments if arguments[-1] is not Ellipsis else arguments[:1] * len(value)
        if len(kinds) == len(value):
            pairs = enumerate(zip(value, kinds, strict=True))
            return tuple(_convert(item, kind, f"{where}[{i}]") for i, (item, kind) in pairs)
    if origin is dict and isinstance(value, Mapping):
        return {key: _convert(item, arguments[1], f"{where}: {key}") for key, item in value.items()}
    if kind is float and type(value) in (int, float):
        return float(cast(float, value))
    if origin is None and type(value) is kind:
        return value
    name = str(kind) if origin is not None else kind.__name__
    raise BundleError(f"{where}: expected {name}, found {value!r:.80}")


def check_inside(name: str, where: str) -> None:
    """Refuse a path that is absolute or leaves the bundle."""
    path = PurePosixPath(name)
    odd = any(character in name for character in "\\\0")
    if path.is_absolute() or ".." in path.parts or odd or not path.parts:
        raise BundleError(f"{where}: path {name!r} leaves the bundle")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ``BundleError`` naming the file."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise BundleError(f"{path}: cannot be read: {exc.strerror}") from exc
    except (ValueError, RecursionError) as exc:
        raise BundleError(f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


SHARD_PATTERN = "experts/layer-*/expert-*.safetensors"


def shard_path(layer: int, expert: int) -> str:
    """Where an expert's shard lies inside the bundle."""
    return f"experts/layer-{layer:03d}/expert-{expert:03d}.safetensors"


def draft_path(layer: int) -> str:
    """Where a layer's packed experts lie inside the bundle."""
    return f"draft/layer-{layer:03d}.safetensors"


def model_path(layer: int | None) -> str:
    """Where resident tensors lie: one file a layer, and one for what belongs to no layer."""
    return "model/common.safetensors" if layer is None else f"model/layer-{layer:03d}.safetensors"


def predictor_names(layer: int) -> tuple[str, str]:
    """Names of a layer's weight and bias in ``PREDICTOR_FILE``."""
    return f"layer-{layer:03d}.weight", f"layer-{layer:03d}.bias"
