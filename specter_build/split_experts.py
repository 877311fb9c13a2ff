"""Step: one shard file an expert, in the checkpoint's precision.

Gate, up and down projection lie together in that order, behind a header padded to 4096 bytes.

Called by: pipeline.  Next: specter_runtime.shards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from specter_runtime.experts import PROJECTIONS, ExpertKey, ExpertWeights
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
        tensors = {
            name: getattr(weights, projection)
            for name, projection in zip(names[key], PROJECTIONS, strict=True)
        }
        write_tensors(path, tensors, {})
