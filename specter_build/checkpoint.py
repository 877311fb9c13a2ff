"""A Hugging Face checkpoint as a lazy mapping from tensor name to tensor.

Everything is checked when it is opened, from headers alone: every tensor that the model needs is
there exactly once, in the right shape and a supported dtype, and nothing is left over. Both layouts
of experts are read (one matrix a tensor; fused 3-D tensors) and look the same from outside: the
names are those that ``architectures`` gives for the bundle.

Called by: pipeline.  Next: architectures.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from specter_build.architectures import (
    Architecture,
    StoredQuantization,
    find_architecture,
    read_config,
    read_quantization,
)
from specter_build.architectures.family import FusedLayout
from specter_runtime.config import DType, ExpertNumbers, ModelConfig
from specter_runtime.errors import CheckpointError, name_list
from specter_runtime.experts import (
    PROJECTIONS,
    Batch,
    ExpertKey,
    Routing,
    StoredExpert,
    expert_shapes,
    make_expert,
    stored_forms,
)
from specter_runtime.roles import dense_shapes
from specter_runtime.scaled import (
    FP8_SCALE_SUFFIX,
    MXFP4_BLOCK,
    MXFP4_SUFFIXES,
    fp8_scale_shape,
)
from specter_runtime.shards import Header, TensorEntry, read_header

logger = logging.getLogger(__name__)

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SUPPORTED_DTYPES: dict[str, DType] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
FP8_DTYPE = "F8_E4M3"
CARRIED_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
"""Files that a bundle takes over as they are, where the checkpoint has them."""


_Rows = tuple[int, int | None, int]
"""Start, stop and step of rows within a fused matrix."""


@dataclass(frozen=True, slots=True)
class _Source:
    """Where a tensor's elements are: a stored tensor, or a slice of a fused one.

    Attributes:
        index: along the expert axis of a fused tensor; None for a whole tensor.
        rows: of the fused matrix (start, stop, step); None for all.
        transposed: the fused matrix is stored with its axes swapped.
    """

    file: Path
    stored_name: str
    dtype: str
    index: int | None = None
    rows: _Rows | None = None
    transposed: bool = False


class Checkpoint:
    """An opened checkpoint; tensors are read when asked for.

    Attributes:
        config: what the model is.
        dense_dtype: of the resident tensors as stored, those in fp8 aside.
        expert_numbers: how the routed experts are stored.
        left_out: names of tensors that no bundle has: those of multi-token prediction.
        files: every file of the checkpoint that the bundle depends on.
    """

    def __init__(self, folder: Path) -> None:
        """Open and check.

        Raises:
            CheckpointError: naming every file, tensor or field that is wrong.
        """
        config_path = folder / "config.json"
        raw = read_json_object(config_path)
        self.folder = folder
        self.family: Architecture = find_architecture(raw, str(config_path))
        self.config: ModelConfig = read_config(raw, str(config_path))
        self._headers = read_headers(folder)
        num_mtp_layers = _num_mtp_layers(raw, config_path)
        self._quantization = read_quantization(raw, self.family)
        resolver = _Resolver(
            folder, self.family, self.config, self._quantization, self._headers, num_mtp_layers
        )
        self._sources = resolver.resolve()
        self.left_out: tuple[str, ...] = resolver.left_out
        self._check_tied_head()
        self.expert_numbers = self._expert_numbers()
        self.dense_dtype = SUPPORTED_DTYPES[
            self._sources[self.family.bundle_names()["embed_tokens"]].dtype
        ]

    @property
    def files(self) -> list[Path]:
        """Weights and carried files, in a fixed order."""
        carried = [self.folder / name for name in CARRIED_FILES]
        return sorted(self._headers) + [path for path in carried if path.is_file()]

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(header.nbytes for header in self._headers.values())

    @property
    def dense_nbytes(self) -> int:
        """Bytes of all resident tensors as stored."""
        layers = (None, *range(self.config.num_hidden_layers))
        sources = [self._sources[name] for layer in layers for name in self.dense_names(layer)]
        return sum(self._headers[s.file].entries[s.stored_name].nbytes for s in sources)

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor by its bundle name, in its stored dtype."""
        source = self._sources[name]
        with safe_open(source.file, framework="pt") as file:
            if source.index is None:
                whole: torch.Tensor = file.get_tensor(source.stored_name)
                return whole.clone()
            part = file.get_slice(source.stored_name)
            fused: torch.Tensor = part[source.index]
            tensor = fused.T if source.transposed else fused
            if source.rows is not None:
                tensor = tensor[slice(*source.rows)]
            return tensor.contiguous().clone()

    def dense_names(self, layer: int | None) -> list[str]:
        """Names of the resident tensors of a layer, or of no layer (``None``), scales included."""
        names = self.family.bundle_names()
        matrices = [names[role].format(layer=layer) for role in dense_shapes(self.config, layer)]
        scales = [name + FP8_SCALE_SUFFIX for name in matrices]
        return matrices + [name for name in scales if name in self._sources]

    def dense_tensors(self, layer: int | None) -> dict[str, torch.Tensor]:
        """Read the resident tensors of a layer, or of no layer (``None``), as stored."""
        return {name: self.tensor(name) for name in self.dense_names(layer)}

    def matrix_names(self, key: ExpertKey) -> dict[str, str]:
        """Role -> name of an expert's matrices and biases, as a plain checkpoint calls them."""
        names = self.family.bundle_names()
        return {
            role: names[role].format(layer=key.layer, expert=key.expert)
            for role in expert_shapes(self.config)
        }

    def stored_names(self, key: ExpertKey) -> dict[str, str]:
        """Role -> name of an expert's tensors as they are stored, in shard order."""
        plain = self.matrix_names(key)
        code_suffix, scale_suffix = _suffixes(self._quantization)
        names = {}
        for role in stored_forms(self.config, self.expert_numbers):
            if role.endswith("_scales"):
                names[role] = plain[role.removesuffix("_scales")] + scale_suffix
            else:
                names[role] = plain[role] + (code_suffix if role in PROJECTIONS else "")
        return names

    def expert(self, key: ExpertKey) -> StoredExpert:
        """Read one expert as stored."""
        names = self.stored_names(key)
        return make_expert({role: self.tensor(name) for role, name in names.items()}, self.config)

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """The checkpoint as ``ExpertProvider``: reads each expert as it is asked for."""
        for expert in routing.expert_ids():
            yield [(expert, self.expert(ExpertKey(routing.layer, expert)))]

    def _expert_numbers(self) -> ExpertNumbers:
        """What the first expert is stored as; the resolver has seen to it that all are."""
        names = self.matrix_names(ExpertKey(self.config.moe_layers[0], 0))
        code_suffix, scale_suffix = _suffixes(self._quantization)
        code_dtype = self._sources[names["gate_proj"] + code_suffix].dtype
        bias = names.get("gate_proj_bias")
        bias_dtype = None if bias is None else SUPPORTED_DTYPES[self._sources[bias].dtype]
        if code_suffix:
            return ExpertNumbers("mxfp4", bias_dtype=bias_dtype)
        if code_dtype == FP8_DTYPE:
            scale = self._sources[names["gate_proj"] + scale_suffix]
            return ExpertNumbers("float8_e4m3fn", SUPPORTED_DTYPES[scale.dtype], bias_dtype)
        return ExpertNumbers(SUPPORTED_DTYPES[code_dtype], bias_dtype=bias_dtype)

    def _check_tied_head(self) -> None:
        """A tied head that is stored as well must be the embedding."""
        names = self.family.bundle_names()
        head, embedding = names["lm_head"], names["embed_tokens"]
        if self.config.tie_word_embeddings and head in self._sources:
            pair = self.tensor(head), self.tensor(embedding)
            if pair[0].dtype != pair[1].dtype or not torch.equal(*pair):
                raise CheckpointError(
                    f"{self._sources[head].file}: tensor {head!r} differs from {embedding!r}, but "
                    "config.json says tie_word_embeddings: true; one of them is wrong"
                )
            del self._sources[head]


def _num_mtp_layers(raw: Mapping[str, Any], path: Path) -> int:
    """Layers behind the last one; raises ``CheckpointError`` if that is no number."""
    for key in ("num_nextn_predict_layers", "num_mtp_modules"):
        value = raw.get(key)
        if value is not None:
            if type(value) is not int or value < 0:
                raise CheckpointError(
                    f"{path}: {key} is {value!r:.80}, expected a number of layers"
                )
            return value
    return 0


def _suffixes(quantization: StoredQuantization | None) -> tuple[str, str]:
    """What stands behind a matrix's name for its codes and for its scales."""
    if quantization is not None and quantization.method == "mxfp4":
        return MXFP4_SUFFIXES
    return "", FP8_SCALE_SUFFIX


class _Resolver:
    """Accounts for every tensor: what is needed against what is stored, by set difference."""

    def __init__(
        self,
        folder: Path,
        family: Architecture,
        config: ModelConfig,
        quantization: StoredQuantization | None,
        headers: Mapping[Path, Header],
        num_mtp_layers: int,
    ) -> None:
        self._quantization = quantization
        self._num_mtp_layers = num_mtp_layers
        self._folder = folder
        self._family = family
        self._config = config
        self._stored: dict[str, tuple[Path, TensorEntry]] = {}
        self._problems: list[str] = []
        for path, header in headers.items():
            for name, entry in header.entries.items():
                if name in self._stored:
                    self._problems.append(
                        f"tensor {name!r} is stored twice, in {self._stored[name][0].name} and "
                        f"{path.name}"
                    )
                self._stored[name] = (path, entry)
        self._used: set[str] = set()
        self._missing: list[str] = []
        self.left_out = tuple(sorted(filter(self._is_mtp, self._stored)))
        if self.left_out:
            logger.info("left out, multi-token prediction: %s", name_list(self.left_out))

    def resolve(self) -> dict[str, _Source]:
        """Bundle name -> source, for all tensors of the model."""
        sources: dict[str, _Source] = {}
        for layer in (None, *range(self._config.num_hidden_layers)):
            for role, shape in dense_shapes(self._config, layer).items():
                self._find(role, {"layer": layer}, shape, sources)
        for layer in self._config.moe_layers:
            fused = self._fused_layout(layer)
            if fused is not None:
                self._find_fused(layer, fused, sources)
                continue
            for expert in range(self._config.num_experts):
                for role, shape in expert_shapes(self._config).items():
                    self._find(role, {"layer": layer, "expert": expert}, shape, sources)
        head = self._family.bundle_names()["lm_head"]
        if head in self._stored and head not in sources:  # tied, but stored: compared later
            path, entry = self._stored[head]
            sources[head] = _Source(path, head, entry.dtype)
            self._used.add(head)
        self._raise_problems(sources)
        return sources

    def _find(
        self,
        role: str,
        indices: Mapping[str, int | None],
        shape: tuple[int, ...],
        sources: dict[str, _Source],
    ) -> None:
        spellings = [t.format(**indices) for t in self._family.tensor_names[role]]
        found = [name for name in spellings if name in self._stored]
        if not found:
            self._missing.append(spellings[0])
            return
        if len(found) > 1:
            self._problems.append(f"tensors {name_list(found)} are the same one, stored twice")
        is_matrix = len(shape) == 2 and role != "embed_tokens"  # rows of which are looked up
        block = self._config.fp8_block_size if is_matrix else None
        dtypes = (*SUPPORTED_DTYPES, FP8_DTYPE) if block else tuple(SUPPORTED_DTYPES)
        path, entry = self._check(found[0], shape, dtypes)
        sources[spellings[0]] = _Source(path, found[0], entry.dtype)
        if block is not None and entry.dtype == FP8_DTYPE:
            scale = found[0] + FP8_SCALE_SUFFIX
            if scale not in self._stored:
                self._missing.append(scale)
                return
            path, entry = self._check(scale, fp8_scale_shape((shape[0], shape[1]), block))
            sources[spellings[0] + FP8_SCALE_SUFFIX] = _Source(path, scale, entry.dtype)

    def _fused_layout(self, layer: int) -> FusedLayout | None:
        """The layout with 3-D tensors that this layer is stored in, if it is."""
        is_mxfp4 = self._quantization is not None and self._quantization.method == "mxfp4"
        layouts = [fused for fused in self._family.fused if fused.mxfp4 == is_mxfp4]
        for fused in layouts:
            if is_mxfp4 or fused.gate_up.format(layer=layer) in self._stored:
                return fused
        return None

    def _find_fused(self, layer: int, fused: FusedLayout, sources: dict[str, _Source]) -> None:
        c, wide = self._config, self._config.moe_intermediate_size
        gate: _Rows = (0, None, 2) if fused.interleaved else (0, wide, 1)
        up: _Rows = (1, None, 2) if fused.interleaved else (wide, None, 1)
        parts: list[tuple[str, tuple[int, int], dict[str, _Rows | None]]] = [
            (fused.gate_up, (2 * wide, c.hidden_size), {"gate_proj": gate, "up_proj": up}),
            (fused.down, (c.hidden_size, wide), {"down_proj": None}),
        ]
        for template, shape, roles in parts:
            name = template.format(layer=layer)
            if fused.mxfp4:
                self._slice_mxfp4(name, shape, roles, layer, sources)
            else:
                stored = shape[::-1] if fused.transposed else shape
                self._slice_fused(name, stored, roles, layer, sources, transposed=fused.transposed)
            if c.expert_bias:
                biases = {f"{role}_bias": rows for role, rows in roles.items()}
                self._slice_fused(f"{name}_bias", shape[:1], biases, layer, sources)

    def _slice_mxfp4(
        self,
        name: str,
        shape: tuple[int, int],
        roles: Mapping[str, _Rows | None],
        layer: int,
        sources: dict[str, _Source],
    ) -> None:
        """Find the codes and the exponents of a fused matrix."""
        if shape[1] % MXFP4_BLOCK:
            self._problems.append(f"{name}: rows of {shape[1]} are no multiple of {MXFP4_BLOCK}")
        blocks = (shape[0], shape[1] // MXFP4_BLOCK)
        for suffix, form in zip(MXFP4_SUFFIXES, ((*blocks, MXFP4_BLOCK // 2), blocks), strict=True):
            self._slice_fused(name + suffix, form, roles, layer, sources, suffix, dtypes=("U8",))

    def _slice_fused(
        self,
        stored_name: str,
        shape: tuple[int, ...],
        roles: Mapping[str, _Rows | None],
        layer: int,
        sources: dict[str, _Source],
        suffix: str = "",
        *,
        dtypes: tuple[str, ...] = tuple(SUPPORTED_DTYPES),
        transposed: bool = False,
    ) -> None:
        """Find one fused tensor ``[E, *shape]`` and enter its slices for all experts."""
        if stored_name not in self._stored:
            self._missing.append(stored_name)
            return
        path, entry = self._check(stored_name, (self._config.num_experts, *shape), dtypes)
        names = self._family.bundle_names()
        for role, rows in roles.items():
            for expert in range(self._config.num_experts):
                name = names[role].format(layer=layer, expert=expert) + suffix
                sources[name] = _Source(path, stored_name, entry.dtype, expert, rows, transposed)

    def _check(
        self,
        name: str,
        shape: tuple[int, ...],
        dtypes: tuple[str, ...] = tuple(SUPPORTED_DTYPES),
    ) -> tuple[Path, TensorEntry]:
        path, entry = self._stored[name]
        self._used.add(name)
        if entry.shape != shape:
            self._problems.append(
                f"{path.name}: tensor {name!r} has shape {list(entry.shape)}, "
                f"expected {list(shape)} from config.json"
            )
        if entry.dtype not in dtypes:
            self._problems.append(
                f"{path.name}: tensor {name!r} has dtype {entry.dtype}, "
                f"supported are {', '.join(dtypes)}"
            )
        return path, entry

    def _raise_problems(self, sources: Mapping[str, _Source]) -> None:
        ignored = [re.compile(pattern) for pattern in self._family.ignored]
        unexpected = sorted(
            name
            for name in self._stored.keys() - self._used - set(self.left_out)
            if not any(pattern.fullmatch(name) for pattern in ignored)
        )
        if self._missing:
            self._problems.append(f"missing tensors: {name_list(self._missing)}")
            if self._missing == ["lm_head.weight"]:
                self._problems.append("config.json says tie_word_embeddings: false")
        if unexpected:
            self._problems.append(f"tensors that the model does not have: {name_list(unexpected)}")
        self._check_one_dtype(sources)
        if self._problems:
            raise CheckpointError(f"{self._folder}: " + "; ".join(self._problems))

    def _is_mtp(self, name: str) -> bool:
        """Whether a tensor predicts further tokens, in layers behind the last one or by its name.

        Not used at run time.
        """
        layer = re.match(r"model\.layers\.(\d{1,9})\.", name)
        if layer and 0 <= int(layer[1]) - self._config.num_hidden_layers < self._num_mtp_layers:
            return True
        return any(re.fullmatch(pattern, name) for pattern in self._family.mtp_tensors)

    def _check_one_dtype(self, sources: Mapping[str, _Source]) -> None:
        """Experts of one checkpoint share a dtype: slots and shards have one size."""
        dtypes: dict[str, set[str]] = {}
        for name, source in sources.items():
            if ".experts." in name:
                is_scale = name.endswith((FP8_SCALE_SUFFIX, MXFP4_SUFFIXES[1]))
                kind = "scales" if is_scale else "biases" if name.endswith("bias") else "matrices"
                dtypes.setdefault(kind, set()).add(source.dtype)
        for kind, found in sorted(dtypes.items()):
            if len(found) > 1:
                self._problems.append(
                    f"{kind} of routed experts have several dtypes: {', '.join(sorted(found))}"
                )


def has_weights(folder: Path) -> bool:
    """Whether there are weight files to speak of, complete or not."""
    return any((folder / name).is_file() for name in (SINGLE_FILE, INDEX_FILE))


def read_headers(folder: Path) -> dict[Path, Header]:
    """Headers of all weight files, checked against the index where there is one."""
    index_path = folder / INDEX_FILE
    if not index_path.is_file():
        single = folder / SINGLE_FILE
        if single.is_file():
            return {single: read_header(single, CheckpointError)}
        others = sorted(p.name for p in folder.glob("*.bin")) + sorted(
            p.name for p in folder.glob("*.pt*")
        )
        found = f"; found {name_list(others)}, pickles are never read" if others else ""
        raise CheckpointError(f"{folder}: no {SINGLE_FILE} and no {INDEX_FILE}{found}")
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index_path}: 'weight_map' must map tensor names to file names")
    names = sorted(set(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise CheckpointError(f"{index_path}: files outside the folder: {name_list(outside)}")
    if (folder / SINGLE_FILE).is_file() and SINGLE_FILE not in names:
        raise CheckpointError(
            f"{folder}: there are both {SINGLE_FILE} and {INDEX_FILE}, which does not name it; "
            "remove the one that is not the model"
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{index_path}: names files that are missing: {name_list(absent)}")
    headers = {folder / name: read_header(folder / name, CheckpointError) for name in names}
    _check_index(index_path, weight_map, headers)
    return headers


def _check_index(
    index_path: Path, weight_map: Mapping[str, str], headers: Mapping[Path, Header]
) -> None:
    """Index and headers agree, in both directions."""
    stored = {(name, path.name) for path, header in headers.items() for name in header.entries}
    listed = set(weight_map.items())
    problems = []
    if listed - stored:
        names = [f"{name} in {file}" for name, file in sorted(listed - stored)]
        problems.append(f"lists tensors that are not there: {name_list(names)}")
    if stored - listed:
        names = [f"{name} in {file}" for name, file in sorted(stored - listed)]
        problems.append(f"does not list {name_list(names)}")
    if problems:
        raise CheckpointError(f"{index_path}: {'; '.join(problems)}")


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; raises ``CheckpointError`` naming the file."""
    try:
        raw = json.loads(path.read_text("utf-8"))
    except OSError as exc:
        raise CheckpointError(f"{path}: cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise CheckpointError(f"{path}: not valid JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(raw).__name__}")
    return raw
