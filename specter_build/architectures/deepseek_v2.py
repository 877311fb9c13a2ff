"""DeepSeek-V2: latent attention, softmax routing with the best groups by their best expert."""

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

DEEPSEEK_V2 = Architecture(
    model_type="deepseek_v2",
    fields=(
        *COMMON_FIELDS,
        kv_heads(None),
        *EXPERT_COUNTS,
        *LATENT_FIELDS,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        *ATTENTION_BIAS,
        *grouped_routing(scaling=1.0, n_group=1, topk_group=1),
        Field(
            "shared_intermediate_size",
            ("n_shared_experts",),
            int,
            default=2,
            times="moe_intermediate_size",
        ),
        norm_eps(1e-6),
    ),
    constants={"routing.group_score": "max"},
    supported={
        **COMMON_SUPPORTED,
        "norm_topk_prob": (False, None),
        "topk_method": ("greedy", "group_limited_greedy"),
        "scoring_func": ("softmax",),
        "moe_layer_freq": (1,),
    },
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused=COMMON_FUSED,
    rope_interleaved=True,
)
