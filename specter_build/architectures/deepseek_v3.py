"""DeepSeek-V3 and R1: latent attention, sigmoid routing with a correction bias within groups."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    DENSE_WIDTH,
    EXPERT_COUNTS,
    EXPERT_WIDTH,
    LATENT_FIELDS,
    Architecture,
    Field,
    grouped_routing,
    kv_heads,
    norm_eps,
)

DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    fields=(
        *COMMON_FIELDS,
        kv_heads(None),
        *EXPERT_COUNTS,
        *LATENT_FIELDS,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        *ATTENTION_BIAS,
        *grouped_routing(scaling=2.5, n_group=8, topk_group=4),
        Field("routing.norm_topk_prob", ("norm_topk_prob",), bool, default=True),
        Field(
            "shared_intermediate_size",
            ("n_shared_experts",),
            int,
            default=1,
            times="moe_intermediate_size",
        ),
        norm_eps(1e-6),
    ),
    constants={
        "routing.scoring": "sigmoid",
        "routing.correction_bias": "flat",
        "routing.norm_min": 1e-20,
    },
    supported={
        **COMMON_SUPPORTED,
        "topk_method": ("noaux_tc",),
        "scoring_func": ("sigmoid",),
        "moe_layer_freq": (1,),
    },
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused=COMMON_FUSED,
    rope_interleaved=True,
)
