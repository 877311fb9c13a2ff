"""Qwen3-MoE (Qwen3-30B-A3B and kin): queries and keys normed per head, softmax before top-k."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    DENSE_WIDTH,
    EXPERT_COUNTS,
    EXPERT_WIDTH,
    HEAD_DIM,
    NORM_TOPK_PROB,
    Architecture,
    kv_heads,
    norm_eps,
)

QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(4),
        *EXPERT_COUNTS,
        HEAD_DIM,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        NORM_TOPK_PROB,
        *ATTENTION_BIAS,
        norm_eps(1e-6),
    ),
    constants={"qk_norm": "head"},
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused=COMMON_FUSED,
)
