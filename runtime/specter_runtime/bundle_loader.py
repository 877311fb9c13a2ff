"""Opening a bundle: check everything, then read.

Sizes of all files are always compared with the manifest; hashes on request (``verify_hashes``).
Resident tensors are read into memory of their own, never mapped, so that a memory cap cannot push
them out and every byte counted is a byte held.

Called by: session.  Next: shards, manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specter_runtime.errors import BundleError, name_list
from specter_runtime.experts import ExpertKey, PackedExpert, expert_shapes, matrix_shapes
from specter_runtime.manifest import (
    MANIFEST_FILE,
    PLAN_FILE,
    Manifest,
    Plan,
    draft_path,
    model_path,
    read_json,
    shard_path,
)
from specter_runtime.packed import BITS, PackedTensor
from specter_runtime.shards import ALIGNMENT, read_header, read_tensors

HASH_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True, slots=True)
class Bundle:
    """An opened bundle; tensors are read on demand."""

    root: Path
    manifest: Manifest
    plan: Plan

    def dense_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Resident full-precision tensors under their Hugging Face names, file by file."""
        layers = range(self.manifest.model.num_hidden_layers)
        for name in (model_path(None), *map(model_path, layers)):
            yield from self._tensors(name).items()

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

    def shard_file(self, key: ExpertKey) -> Path:
        """The file that holds an expert in the checkpoint's precision."""
        return self.root / shard_path(*key)

    def json_file(self, name: str) -> dict[str, Any]:
        """One of the checkpoint's own JSON files; empty if the bundle has none of that name."""
        return read_json(self.root / name) if name in self.manifest.files else {}

    def eos_token_ids(self) -> frozenset[int]:
        """Ids that end generation: from generation_config.json, else from config.json."""
        for name in ("generation_config.json", "config.json"):
            ids = self.json_file(name).get("eos_token_id")
            if ids is not None:
                return frozenset([ids] if isinstance(ids, int) else ids)
        return frozenset()

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
        try:
            return read_tensors(path, read_header(path, BundleError))
        except (OSError, EOFError) as exc:
            raise BundleError(f"{path}: cannot be read: {exc}") from exc

    def _packed_expert(
        self, tensors: dict[str, torch.Tensor], key: ExpertKey, bits: int
    ) -> PackedExpert:
        manifest, draft = self.manifest, self.manifest.draft
        names = {
            role: manifest.tensor_names[role].format(layer=key.layer, expert=key.expert)
            for role in expert_shapes(manifest.model)
        }
        parts = {}
        try:
            for role, shape in matrix_shapes(manifest.model).items():
                name = names[role]
                zero_points = None if draft.symmetric else tensors[f"{name}.zero_points"]
                codes, scales = tensors[f"{name}.codes"], tensors[f"{name}.scales"]
                parts[role] = PackedTensor(
                    codes, scales, zero_points, shape, bits, draft.group_size
                )
            biases = tuple(tensors[names[role]] for role in names if role not in parts)
        except KeyError as exc:
            raise BundleError(
                f"{self.root / draft_path(key.layer)}: tensor {exc.args[0]!r} is missing"
            ) from exc
        return PackedExpert(**parts, biases=biases)


def load_bundle(root: Path, *, verify_hashes: bool = False) -> Bundle:
    """Open a bundle.

    Raises:
        BundleError: the folder is no bundle, a file is missing or of another size than recorded,
            the manifest is malformed or of another version, or (``verify_hashes``) contents differ.
    """
    manifest_path = root / MANIFEST_FILE
    if not manifest_path.is_file():
        raise BundleError(
            f"{root}: no {MANIFEST_FILE}; not a bundle, or one whose build did not finish"
        )
    try:
        manifest = Manifest.from_dict(read_json(manifest_path), str(manifest_path))
        _check_files(root, manifest)
        plan_path = root / PLAN_FILE
        plan = Plan.from_dict(read_json(plan_path), str(plan_path))
        _check_consistency(root, manifest, plan)
    except (TypeError, ValueError, AttributeError, KeyError) as exc:
        raise BundleError(f"{root}: malformed manifest or plan: {exc!r}") from exc
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
    needed = [model_path(None), *map(model_path, range(model.num_hidden_layers)), PLAN_FILE]
    needed += [shard_path(i, e) for i in model.moe_layers for e in range(model.num_experts)]
    missing = [name for name in needed if name not in manifest.files]
    if missing:
        raise BundleError(f"{where}: 'files' does not list {name_list(missing)}")
    if [len(row) for row in manifest.draft.bits] != [model.num_experts] * len(model.moe_layers):
        raise BundleError(f"{where}: 'draft.bits' must have one number for every routed expert")
    if not {bits for row in manifest.draft.bits for bits in row} <= {0, *BITS}:
        raise BundleError(f"{where}: 'draft.bits' may hold 0 and {BITS} only")
    if manifest.experts.encoding != "raw":
        raise BundleError(
            f"{where}: shard encoding {manifest.experts.encoding!r} is unknown, expected 'raw'"
        )
    if manifest.experts.data_start % ALIGNMENT:
        raise BundleError(f"{where}: shard data must start at a multiple of {ALIGNMENT}")
    for layer, expert in plan.initial_residents:
        if layer not in model.moe_layers or not 0 <= expert < model.num_experts:
            raise BundleError(f"{root / PLAN_FILE}: no expert {expert} in layer {layer}")


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, hexadecimal, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(HASH_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
