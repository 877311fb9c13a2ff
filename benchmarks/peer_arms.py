"""What ``vs_peers`` compares, as data: engines, bundles and options.

Called by: vs_peers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode.

    Attributes:
        model: which of the command's paths it runs.
        options: of ``RuntimeConfig``.
        environment: of its process, beside what it inherits.
        is_resident_too: whether it is also run with no cap.
    """

    name: str
    engine: str
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_resident_too: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether its tokens must be those of ``specter``."""
        return self.engine == "specter" and "SPECTER_KERNELS" not in self.environment


ON_DEMAND = {
    "num_draft_tokens": 0,
    "eviction": "lru",
    "overlap": False,
}
AHEAD = {"overlap": True, "predictor": "router"}
ARMS = (
    Arm("specter", "specter", "packed", is_resident_too=True),
    Arm("lru", "specter", "raw", ON_DEMAND),
    Arm("lru+router", "specter", "raw", ON_DEMAND | AHEAD),
    Arm("llama.cpp", "llama.cpp", "gguf", is_resident_too=True),
    Arm("accelerate", "accelerate", "checkpoint"),
)
ABLATIONS = (
    Arm("raw shards", "specter", "raw"),
    Arm("plain LRU", "specter", "packed", {"eviction": "lru"}),
    Arm("no overlap", "specter", "packed", {"overlap": False}),
    Arm("next layer's router", "specter", "packed", {"predictor": "router"}),
    Arm("fitted predictor", "specter", "packed", {"predictor": "fitted"}),
    Arm(
        "a draft of 2 tokens",
        "specter",
        "packed",
        {"num_draft_tokens": 2, "bound_by_slots": False},
    ),
    Arm("torch's kernels", "specter", "packed", environment={"SPECTER_KERNELS": "torch"}),
)
ARMS_BY_NAME = {arm.name: arm for arm in ARMS + ABLATIONS}
