"""Step: one shard file an expert, in the checkpoint's precision.

An expert's tensors lie together as ``stored_forms`` orders them, behind a header padded to 4096
bytes.

Called by: pipeline.  Next: specter_runtime.shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from specter_runtime.config import Encoding
from specter_runtime.experts import ExpertKey, ExpertWeights, StoredExpert, pack_expert
from specter_runtime.manifest import SHARD_PATTERN, shard_path
from specter_runtime.shards import ALIGNMENT, write_tensors


def split_layer(
    root: Path,
    experts: Mapping[ExpertKey, StoredExpert],
    names: Mapping[ExpertKey, Mapping[str, str]],
    encoding: Encoding,
) -> None:
    """Write the shards of a layer under ``root``; ``names`` are by role, in shard order."""
    for key, expert in experts.items():
        path = root / shard_path(*key)
        path.parent.mkdir(parents=True, exist_ok=True)
        if encoding == "packed":
            assert isinstance(expert, ExpertWeights), "the recipe has been checked"
            write_tensors(path, _packed_tensors(expert, names[key]), {})
        else:
            tensors = expert.tensors()
            write_tensors(path, {name: tensors[role] for role, name in names[key].items()}, {})


def shard_sizes(root: Path) -> list[int]:
    """Bytes of data in each shard under ``root``."""
    return [path.stat().st_size - ALIGNMENT for path in sorted(root.glob(SHARD_PATTERN))]


def _packed_tensors(expert: ExpertWeights, names: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Name -> tensor of a packed shard: ``NAME.codes``, ``.table`` and so on for a matrix NAME."""
    tensors = {}
    for role, tensor in pack_expert(expert).parts().items():
        matrix, dot, part = role.partition(".")
        tensors[names[matrix] + dot + part] = tensor
    return tensors
