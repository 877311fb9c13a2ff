"""MiniMax-M2: sigmoid routing with a correction bias, full-width query and key norms."""

from specter_build.architectures.family import (
    BLOCK_SPARSE_NAMES,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

MINIMAX_M2 = Architecture(
    model_type="minimax_m2",
    fields=(
        *COMMON_FIELDS,
        kv_heads(8),
        *EXPERT_COUNTS,
        Field("head_dim", ("head_dim",), int, default=128),
        EXPERT_WIDTH_IS_WIDTH,
        norm_eps(1e-6),
    ),
    constants={
        "qk_norm": "full",
        "routing.scoring": "sigmoid",
        "routing.correction_bias": "flat",
        "routing.norm_topk_prob": True,
    },
    supported={**COMMON_SUPPORTED, "use_qk_norm": (True,), "scoring_func": ("sigmoid",)},
    default_rope_theta=5_000_000.0,
    tensor_names=BLOCK_SPARSE_NAMES,
    fused=COMMON_FUSED,
)
