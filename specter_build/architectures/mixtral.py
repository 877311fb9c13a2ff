"""Mixtral: plain attention, top-k probabilities renormalized, experts called w1, w3 and w2."""

from specter_build.architectures.family import (
    BLOCK_SPARSE_NAMES,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    HEAD_DIM,
    Architecture,
    kv_heads,
    norm_eps,
)

MIXTRAL = Architecture(
    model_type="mixtral",
    fields=(
        *COMMON_FIELDS,
        kv_heads(8),
        *EXPERT_COUNTS,
        HEAD_DIM,
        EXPERT_WIDTH_IS_WIDTH,
        norm_eps(1e-5),
    ),
    constants={"routing.norm_topk_prob": True},
    supported={**COMMON_SUPPORTED, "sliding_window": (None,)},
    default_rope_theta=1_000_000.0,
    tensor_names=BLOCK_SPARSE_NAMES,
    fused=COMMON_FUSED,
)
