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
from typing import Any

from specter_runtime.config import LatentConfig, ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.errors import BundleError, name_list

FORMAT = "specter-bundle"
FORMAT_VERSION = 1
MANIFEST_FILE = "manifest.json"
PLAN_FILE = "plan.json"


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
        encoding: ``raw``: the checkpoint's bytes.
        data_start: offset of the data in every shard; a multiple of 4096.
        nbytes: bytes of data in every shard.
    """

    dtype: str
    encoding: str
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
    checkpoint_dtype: str
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
        """Parse and check; raises ``BundleError`` naming ``where`` and the key."""
        if raw.get("format") != FORMAT:
            raise BundleError(f"{where}: 'format' is {raw.get('format')!r}, expected {FORMAT!r}")
        if raw.get("format_version") != FORMAT_VERSION:
            raise BundleError(
                f"{where}: format version {raw.get('format_version')!r}; this runtime reads "
                f"version {FORMAT_VERSION}. Build the bundle again with a matching specter-build."
            )
        parts = dict(_known_keys(cls, raw, where))
        model = _parse_model(parts["model"], f"{where}: model")
        draft = dict(_known_keys(DraftFormat, parts["draft"], f"{where}: draft"))
        draft["bits"] = tuple(tuple(row) for row in draft["bits"])
        parts["model"] = model
        parts["draft"] = DraftFormat(**draft)
        parts["experts"] = ExpertFormat(
            **_known_keys(ExpertFormat, parts["experts"], f"{where}: experts")
        )
        parts["unhashed_files"] = tuple(parts["unhashed_files"])
        for key in ("files", "source_files"):
            parts[key] = {
                name: FileEntry(**_known_keys(FileEntry, entry, f"{where}: {key}: {name}"))
                for name, entry in parts[key].items()
            }
        for name in (*parts["files"], *parts["unhashed_files"]):
            check_inside(name, where)
        return cls(**parts)


@dataclass(frozen=True, slots=True)
class Plan:
    """Placement for one budget on one hardware profile; the runtime scales it to another budget.

    Attributes:
        num_slots: expert slots that the budget leaves.
        initial_residents: (layer, expert), most useful first; the first ``num_slots`` are loaded
            at start.
        dtype: precision of activations, dense weights and KV cache that the budget was computed
            for.
        predicted: seconds per output token for each number of draft tokens, by the planner's
            roofline; what ``num_draft_tokens`` was chosen from.
        hardware: the profile.
    """

    format_version: int
    memory_budget_bytes: int
    max_context_tokens: int
    dtype: str
    num_slots: int
    num_draft_tokens: int
    initial_residents: tuple[tuple[int, int], ...]
    predicted: dict[str, float]
    hardware: dict[str, float]

    def to_json(self) -> str:
        """Canonical JSON text."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True) + "\n"

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], where: str) -> Plan:
        """Parse and check; raises ``BundleError`` naming ``where`` and the key."""
        parts = dict(_known_keys(cls, raw, where))
        parts["initial_residents"] = tuple(
            (int(layer), int(expert)) for layer, expert in parts["initial_residents"]
        )
        return cls(**parts)


def _parse_model(raw: Mapping[str, Any], where: str) -> ModelConfig:
    values = dict(_known_keys(ModelConfig, raw, where))
    for name in ("dense_layers", "sliding_layers"):
        values[name] = tuple(values[name])
    rope = dict(_known_keys(RopeConfig, values["rope"], f"{where}: rope"))
    rope["inverse_frequencies"] = tuple(rope["inverse_frequencies"])
    values["rope"] = RopeConfig(**rope)
    routing = _known_keys(RoutingConfig, values["routing"], f"{where}: routing")
    values["routing"] = RoutingConfig(**routing)
    if values["latent"] is not None:
        latent = _known_keys(LatentConfig, values["latent"], f"{where}: latent")
        values["latent"] = LatentConfig(**latent)
    return ModelConfig(**values)


def _known_keys(cls: type, raw: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """``raw`` if its keys are exactly the fields of ``cls``."""
    if not isinstance(raw, Mapping):
        raise BundleError(f"{where}: expected an object, found {type(raw).__name__}")
    expected = {f.name for f in dataclasses.fields(cls)}
    missing, unknown = sorted(expected - raw.keys()), sorted(raw.keys() - expected)
    if missing:
        raise BundleError(f"{where}: missing {name_list(missing)}")
    if unknown:
        raise BundleError(f"{where}: unknown {name_list(unknown)}")
    return raw


def check_inside(name: str, where: str) -> None:
    """Refuse a path that is absolute or leaves the bundle."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or not path.parts:
        raise BundleError(f"{where}: path {name!r} leaves the bundle")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ``BundleError`` naming the file."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise BundleError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise BundleError(f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise BundleError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw


def shard_path(layer: int, expert: int) -> str:
    """Where an expert's shard lies inside the bundle."""
    return f"experts/layer-{layer:03d}/expert-{expert:03d}.safetensors"


def draft_path(layer: int) -> str:
    """Where a layer's packed experts lie inside the bundle."""
    return f"draft/layer-{layer:03d}.safetensors"


def model_path(layer: int | None) -> str:
    """Where resident tensors lie: one file a layer, and one for what belongs to no layer."""
    return "model/common.safetensors" if layer is None else f"model/layer-{layer:03d}.safetensors"
