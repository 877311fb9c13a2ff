"""GLM-4.5 and kin: sigmoid routing with a correction bias, a shared expert, partial rotary."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    DENSE_WIDTH,
    EXPERT_COUNTS,
    EXPERT_WIDTH,
    HEAD_DIM,
    Architecture,
    Field,
    grouped_routing,
    kv_heads,
    norm_eps,
)

GLM4_MOE = Architecture(
    model_type="glm4_moe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(8),
        *EXPERT_COUNTS,
        HEAD_DIM,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        *grouped_routing(scaling=1.0, n_group=1, topk_group=1),
        Field("routing.norm_topk_prob", ("norm_topk_prob",), bool, default=True),
        Field("attention_bias", ("attention_bias",), bool, default=False),
        Field("qk_norm", ("use_qk_norm",), bool, default=False),
        Field(
            "shared_intermediate_size",
            ("n_shared_experts",),
            int,
            default=1,
            times="moe_intermediate_size",
        ),
        norm_eps(1e-5),
    ),
    constants={
        "routing.scoring": "sigmoid",
        "routing.correction_bias": "flat",
        "routing.norm_min": 1e-20,
    },
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused=COMMON_FUSED,
    default_partial_rotary_factor=0.5,
)
