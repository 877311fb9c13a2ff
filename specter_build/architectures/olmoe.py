"""OLMoE: queries and keys normed over the full projection, top-k probabilities kept as they are."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    NORM_TOPK_PROB,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

OLMOE = Architecture(
    model_type="olmoe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(None),
        *EXPERT_COUNTS,
        EXPERT_WIDTH_IS_WIDTH,
        NORM_TOPK_PROB,
        *ATTENTION_BIAS,
        Field("clip_qkv", ("clip_qkv",), float, optional=True),
        norm_eps(1e-5),
    ),
    constants={"qk_norm": "full"},
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused=COMMON_FUSED,
)
