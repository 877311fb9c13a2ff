"""Step: one shard file an expert, in the checkpoint's precision.

An expert's tensors lie together as ``stored_forms`` orders them, behind a header padded to 4096
bytes.

Called by: pipeline.  Next: specter_runtime.shards.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from specter_runtime.experts import Expert, ExpertKey
from specter_runtime.manifest import shard_path
from specter_runtime.shards import write_tensors


def split_layer(
    root: Path,
    experts: Mapping[ExpertKey, Expert],
    names: Mapping[ExpertKey, Mapping[str, str]],
) -> None:
    """Write the shards of a layer under ``root``; ``names`` are by role, in shard order."""
    for key, expert in experts.items():
        path = root / shard_path(*key)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = expert.tensors()
        write_tensors(path, {name: tensors[role] for role, name in names[key].items()}, {})
