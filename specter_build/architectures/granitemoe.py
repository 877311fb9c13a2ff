"""Granite-MoE: softmax over the chosen experts only, multipliers here and there."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    BLOCK,
    COMMON_FIELDS,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    Architecture,
    Field,
    FusedLayout,
    kv_heads,
    norm_eps,
)

GRANITEMOE = Architecture(
    model_type="granitemoe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(None),
        *EXPERT_COUNTS,
        EXPERT_WIDTH_IS_WIDTH,
        *ATTENTION_BIAS,
        Field("attention_scaling", ("attention_multiplier",), float, default=1.0),
        Field("embedding_multiplier", ("embedding_multiplier",), float, default=1.0),
        Field("residual_multiplier", ("residual_multiplier",), float, default=1.0),
        Field("logits_scaling", ("logits_scaling",), float, default=1.0),
        norm_eps(1e-6),
    ),
    constants={"routing.scoring": "softmax_topk"},
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names={
        **COMMON_NAMES,
        "router": (BLOCK + "router.layer.weight", BLOCK + "router.weight"),
    },
    fused=(
        FusedLayout(BLOCK + "input_linear.weight", BLOCK + "output_linear.weight"),
        FusedLayout(BLOCK + "experts.gate_up_proj", BLOCK + "experts.down_proj"),
    ),
)
