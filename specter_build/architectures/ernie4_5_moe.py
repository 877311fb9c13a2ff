"""ERNIE-4.5: softmax routing with a correction bias, shared experts, interleaved rotary."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    DENSE_WIDTH,
    EXPERT_WIDTH,
    HEAD_DIM,
    LAYER,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

ERNIE4_5_MOE = Architecture(
    model_type="ernie4_5_moe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(4),
        Field("num_experts", ("moe_num_experts", "num_experts"), int),
        Field("num_experts_per_tok", ("moe_k", "num_experts_per_tok"), int),
        HEAD_DIM,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        Field("routing.norm_min", ("moe_norm_min",), float, default=1e-12),
        Field(
            "shared_intermediate_size",
            ("moe_num_shared_experts",),
            int,
            default=2,
            times="moe_intermediate_size",
        ),
        norm_eps(1e-5),
    ),
    constants={"routing.norm_topk_prob": True, "routing.correction_bias": "row"},
    supported={**COMMON_SUPPORTED, "use_bias": (False, None)},
    default_rope_theta=500_000.0,
    tensor_names={
        **COMMON_NAMES,
        "correction_bias": (
            LAYER + "mlp.moe_statics.e_score_correction_bias",
            LAYER + "mlp.gate.moe_statics.e_score_correction_bias",
        ),
    },
    fused=COMMON_FUSED,
    rope_interleaved=True,
    mtp_tensors=(r"model\.mtp_(block|emb_norm|hidden_norm|linear_proj)\.\d+\..*",),
)
