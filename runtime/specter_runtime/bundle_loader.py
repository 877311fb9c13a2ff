"""Opening a bundle: check everything, then read.

Sizes of all files are always compared with the manifest; hashes on request (``verify_hashes``).
Resident tensors are read into memory of their own, never mapped, so that a memory cap cannot push
them out and every byte counted is a byte held.

Called by: session.  Next: shards, manifest, predictor.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specter_runtime.errors import BundleError, name_list
from specter_runtime.experts import (
    ExpertKey,
    PackedExpert,
    expert_nbytes,
    expert_shapes,
    matrix_shapes,
    packed_nbytes,
)
from specter_runtime.manifest import (
    MANIFEST_FILE,
    PLAN_FILE,
    PREDICTOR_FILE,
    Manifest,
    Plan,
    draft_path,
    model_path,
    predictor_names,
    read_json,
    shard_path,
)
from specter_runtime.packed import BITS, PackedTensor, packed_forms
from specter_runtime.predictor import Predictor
from specter_runtime.roles import dense_shapes
from specter_runtime.shards import (
    ALIGNMENT,
    LazyTensors,
    TensorEntry,
    read_header,
    read_tensor,
    read_tensors,
)

HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; tensors are read on demand."""

    root: Path
    manifest: Manifest
    plan: Plan

    def dense_tensors(self) -> Mapping[str, torch.Tensor]:
        """Resident full-precision tensors by their Hugging Face names, each read when asked for."""
        layers = range(self.manifest.model.num_hidden_layers)
        sources: dict[str, tuple[Path, TensorEntry]] = {}
        for name in (model_path(None), *map(model_path, layers)):
            path = self.root / name
            entries = read_header(path, BundleError).entries
            sources |= {tensor: (path, entry) for tensor, entry in entries.items()}

        def read(name: str) -> torch.Tensor:
            path, entry = sources[name]
            with _reading(path):
                return read_tensor(path, entry)

        return LazyTensors(sources, read)

    def draft_experts(self) -> dict[ExpertKey, PackedExpert]:
        """All stand-ins of the draft; experts of 0 bits are absent."""
        manifest, packed = self.manifest, {}
        for layer, bits_row in zip(manifest.model.moe_layers, manifest.draft.bits, strict=True):
            if any(bits_row):
                tensors = self._tensors(draft_path(layer))
                for expert, bits in enumerate(bits_row):
                    if bits:
                        key = ExpertKey(layer, expert)
                        packed[key] = self._packed_expert(tensors, key, bits)
        return packed

    def predictors(self) -> dict[int, Predictor]:
        """What foretells later layers' experts, by decoder layer; empty if the bundle has none.

        Raises:
            BundleError: a tensor is missing, one too many, of another form, or not finite.
        """
        if PREDICTOR_FILE not in self.manifest.files:
            return {}
        model, where = self.manifest.model, self.root / PREDICTOR_FILE
        tensors = self._tensors(PREDICTOR_FILE)
        sources = model.moe_layers[:-1] if model.num_experts > model.num_experts_per_tok else ()
        names = [name for layer in sources for name in predictor_names(layer)]
        unknown = sorted(tensors.keys() - set(names))
        if unknown:
            raise BundleError(
                f"{where}: tensor {unknown[0]!r} is unknown; there may be a weight and a bias for "
                f"each of the layers {list(sources)}"
            )
        found: dict[int, Predictor] = {}
        layers_ahead = 1
        for i, layer in enumerate(sources):
            weight_name, bias_name = predictor_names(layer)
            if i == 0 and weight_name in tensors and tensors[weight_name].ndim:
                layers_ahead = max(1, len(tensors[weight_name]))  # so many all the others have
            later = model.moe_layers[i + 1 : i + 1 + layers_ahead]
            shape = (len(later), model.num_experts)
            weight_shape = (*shape, model.hidden_size)
            weight = _checked(where, tensors, weight_name, weight_shape, torch.bfloat16)
            bias = _checked(where, tensors, bias_name, shape, torch.float32)
            for name in (weight_name, bias_name):
                if not tensors[name].isfinite().all():
                    raise BundleError(f"{where}: tensor {name!r} holds NaN or infinity")
            found[layer] = Predictor(later, weight, bias, model.num_experts_per_tok)
        return found

    @property
    def predictor_nbytes(self) -> int:
        """Bytes that ``predictors`` take; 0 if the bundle has none.

        Raises:
            BundleError: the file's header is damaged.
        """
        if PREDICTOR_FILE not in self.manifest.files:
            return 0
        entries = read_header(self.root / PREDICTOR_FILE, BundleError).entries
        return sum(entry.nbytes for entry in entries.values())

    def shard_file(self, key: ExpertKey) -> Path:
        """The file that holds an expert in the checkpoint's precision."""
        return self.root / shard_path(*key)

    def shard_nbytes(self, key: ExpertKey) -> int:
        """Bytes of that file."""
        return self.manifest.files[shard_path(*key)].nbytes

    def json_file(self, name: str) -> dict[str, Any]:
        """One of the checkpoint's own JSON files; empty if the bundle has none of that name."""
        return read_json(self.root / name) if name in self.manifest.files else {}

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end generation by generation_config.json or by config.json.

        All of them: checkpoints are about in which either file knows one that the other forgot.
        """
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            ids = self.json_file(name).get("eos_token_id")
            listed = ids if isinstance(ids, list) else [] if ids is None else [ids]
            if not all(type(token_id) is int for token_id in listed):
                raise BundleError(
                    f"{self.root / name}: eos_token_id must be an id or a list of ids, "
                    f"found {ids!r}"
                )
            found.update(listed)
        return frozenset(found)

    def verify_hashes(self) -> None:
        """Compare every hashed file with the manifest.

        Raises:
            BundleError: naming all files that differ.
        """
        wrong = [
            name
            for name, entry in self.manifest.files.items()
            if file_sha256(self.root / name) != entry.sha256
        ]
        if wrong:
            raise BundleError(f"{self.root}: contents differ from the manifest: {name_list(wrong)}")

    def _tensors(self, name: str) -> dict[str, torch.Tensor]:
        path = self.root / name
        with _reading(path):
            return read_tensors(path, read_header(path, BundleError))

    def _packed_expert(
        self, tensors: dict[str, torch.Tensor], key: ExpertKey, bits: int
    ) -> PackedExpert:
        manifest, draft = self.manifest, self.manifest.draft
        where = self.root / draft_path(key.layer)
        parts: dict[str, PackedTensor] = {}
        biases: list[torch.Tensor] = []
        suffixes = ("codes", "scales") if draft.symmetric else ("codes", "scales", "zero_points")
        matrices = matrix_shapes(manifest.model)
        for role, shape in expert_shapes(manifest.model).items():
            name = manifest.tensor_names[role].format(layer=key.layer, expert=key.expert)
            if role not in matrices:
                dtype: torch.dtype = getattr(torch, str(manifest.experts.numbers.bias_dtype))
                biases.append(_checked(where, tensors, name, shape, dtype))
                continue
            forms = packed_forms(matrices[role], bits, draft.group_size)
            found = [
                _checked(where, tensors, f"{name}.{suffix}", *form)
                for suffix, form in zip(suffixes, forms, strict=False)
            ]
            zero_points = None if draft.symmetric else found[2]
            parts[role] = PackedTensor(
                found[0], found[1], zero_points, matrices[role], bits, draft.group_size
            )
        return PackedExpert(**parts, biases=tuple(biases))


def _checked(
    where: Path,
    tensors: Mapping[str, torch.Tensor],
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> torch.Tensor:
    """A tensor of a file, if it is there and of this form."""
    tensor = tensors.get(name)
    if tensor is None:
        raise BundleError(f"{where}: tensor {name!r} is missing")
    if tensor.shape != shape or tensor.dtype != dtype:
        raise BundleError(
            f"{where}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, "
            f"expected {dtype} {list(shape)}"
        )
    return tensor


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Errors of reading a file become ``BundleError``."""
    try:
        yield
    except (OSError, EOFError) as exc:
        raise BundleError(f"{path}: cannot be read: {exc}") from exc


def load_bundle(root: Path, *, verify_hashes: bool = False) -> Bundle:
    """Open a bundle.

    Raises:
        BundleError: the folder is no bundle, a file is missing or of another size than recorded,
            the manifest is malformed or of another version, or (``verify_hashes``) contents differ.
    """
    manifest_path = root / MANIFEST_FILE
    try:
        is_bundle = manifest_path.is_file()
    except OSError as exc:  # e.g. a name that is too long
        raise BundleError(f"{root}: cannot be read: {exc.strerror}") from exc
    if not is_bundle:
        raise BundleError(
            f"{root}: no {MANIFEST_FILE}; not a bundle, or one whose build did not finish"
        )
    manifest = Manifest.from_dict(read_json(manifest_path), str(manifest_path))
    _check_files(root, manifest)
    plan_path = root / PLAN_FILE
    plan = Plan.from_dict(read_json(plan_path), str(plan_path))
    _check_consistency(root, manifest, plan)
    bundle = Bundle(root, manifest, plan)
    if verify_hashes:
        bundle.verify_hashes()
    return bundle


def _check_files(root: Path, manifest: Manifest) -> None:
    """Every file that the manifest names is there and has the recorded size."""
    problems = []
    for name, entry in manifest.files.items():
        try:
            nbytes = (root / name).stat().st_size
        except OSError:
            problems.append(f"{name} is missing")
        else:
            if nbytes != entry.nbytes:
                problems.append(f"{name} has {nbytes} bytes, expected {entry.nbytes}")
    if problems:
        raise BundleError(f"{root}: damaged or incomplete: {name_list(problems)}")


def _check_consistency(root: Path, manifest: Manifest, plan: Plan) -> None:
    """What the manifest says of the model, the draft and the shards fits together."""
    model, where = manifest.model, root / MANIFEST_FILE
    keys = [ExpertKey(i, e) for i in model.moe_layers for e in range(model.num_experts)]
    if [len(row) for row in manifest.draft.bits] != [model.num_experts] * len(model.moe_layers):
        raise BundleError(f"{where}: 'draft.bits' must have one number for every routed expert")
    if not {bits for row in manifest.draft.bits for bits in row} <= {0, *BITS}:
        raise BundleError(f"{where}: 'draft.bits' may hold 0 and {BITS} only")
    if manifest.draft.group_size < 1:
        raise BundleError(f"{where}: 'draft.group_size' must be positive")
    rows = zip(model.moe_layers, manifest.draft.bits, strict=True)
    needed = [model_path(None), *map(model_path, range(model.num_hidden_layers)), PLAN_FILE]
    needed += [draft_path(layer) for layer, row in rows if any(row)]
    needed += [shard_path(*key) for key in keys]
    missing = [name for name in needed if name not in manifest.files]
    if missing:
        raise BundleError(f"{where}: 'files' does not list {name_list(missing)}")
    _check_shards(where, manifest, keys)
    _check_names(where, manifest)
    for layer, expert in plan.initial_residents:
        if ExpertKey(layer, expert) not in set(keys):
            raise BundleError(f"{root / PLAN_FILE}: no expert {expert} in layer {layer}")


def _check_shards(where: Path, manifest: Manifest, keys: list[ExpertKey]) -> None:
    shards = manifest.experts
    if shards.encoding == "packed" and shards.numbers.dtype != "bfloat16":
        raise BundleError(f"{where}: experts in {shards.numbers.dtype} cannot be packed")
    if shards.data_start % ALIGNMENT:
        raise BundleError(f"{where}: shard data must start at a multiple of {ALIGNMENT}")
    numbers, model = shards.numbers, manifest.model
    for name, is_there, is_needed in (
        ("experts.numbers.bias_dtype", numbers.bias_dtype, model.expert_bias),
        ("experts.numbers.scale_dtype", numbers.scale_dtype, numbers.dtype == "float8_e4m3fn"),
    ):
        if (is_there is not None) != is_needed:
            raise BundleError(
                f"{where}: '{name}' is {is_there!r}, which does not go with experts in "
                f"{numbers.dtype}, {'with' if model.expert_bias else 'without'} biases"
            )
    if numbers.dtype == "float8_e4m3fn" and model.fp8_block_size is None:
        raise BundleError(f"{where}: experts in fp8 need 'model.fp8_block_size'")
    if model.fp8_block_size is not None and min(model.fp8_block_size) < 1:
        raise BundleError(f"{where}: 'model.fp8_block_size' must be positive")
    is_packed = shards.encoding == "packed"
    least = packed_nbytes(model, numbers, 0) if is_packed else expert_nbytes(model, numbers)
    if shards.nbytes < least or (shards.nbytes > least and not is_packed):
        raise BundleError(
            f"{where}: 'experts.nbytes' is {shards.nbytes}, the model's experts have {least}"
            + (" or more" if is_packed else "")
        )
    sizes = range(shards.data_start + least, shards.data_start + shards.nbytes + 1)
    names = [shard_path(*key) for key in keys]
    wrong = [name for name in names if manifest.files[name].nbytes not in sizes]
    if wrong:
        most = f" to {sizes[-1]}" if is_packed else ""
        raise BundleError(f"{where}: shards must have {sizes[0]}{most} bytes: {name_list(wrong)}")


def _check_names(where: Path, manifest: Manifest) -> None:
    """Every role that the model needs has a template that gives a name."""
    model = manifest.model
    roles: set[str] = set(expert_shapes(model))
    for layer in (None, *range(model.num_hidden_layers)):
        roles |= dense_shapes(model, layer).keys()
    for role in sorted(roles):
        template = manifest.tensor_names.get(role)
        try:
            if template is None:
                raise KeyError(role)
            template.format(layer=0, expert=0)
        except (KeyError, IndexError, ValueError) as exc:
            raise BundleError(
                f"{where}: 'tensor_names' has no usable template for {role!r}: {template!r}"
            ) from exc


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
