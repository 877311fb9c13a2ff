"""Step: one shard file an expert, in the checkpoint's precision.

Gate, up and down projection lie together in that order, then biases where there are, behind a
header padded to 4096 bytes.

Called by: pipeline.  Next: specter_runtime.shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specter_runtime.experts import ExpertKey, ExpertWeights
from specter_runtime.manifest import shard_path
from specter_runtime.shards import write_tensors


def split_layer(
    root: Path,
    experts: Mapping[ExpertKey, ExpertWeights],
    names: Mapping[ExpertKey, Sequence[str]],
) -> None:
    """Write the shards of a layer under ``root``."""
    for key, weights in experts.items():
        path = root / shard_path(*key)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tensors(path, dict(zip(names[key], weights.tensors(), strict=True)), {})
