"""What the environment must say before torch loads, for time and memory to be as planned."""

from __future__ import annotations

import os

TORCH_ENVIRONMENT = {
    # Idle OpenMP threads would spin and starve the I/O threads.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Torch and oneDNN keep a compiled primitive and its scratch for every shape met. A prompt of a
    # new length is a new shape for every matrix, 15 MB that no budget counts; making one anew
    # takes microseconds. Both caches have to be small for either to let go.
    "LRU_CACHE_CAPACITY": "1",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "1",
}


def set_torch_environment() -> None:
    """Set what isn't set already; has no effect once torch has been imported."""
    for name, value in TORCH_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
