"""Hunyuan (A13B): a shared expert of the experts' width, queries and keys normed after rotation."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    EXPERT_WIDTH_IS_WIDTH,
    HEAD_DIM,
    LAYER,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

HUNYUAN_V1_MOE = Architecture(
    model_type="hunyuan_v1_moe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(None),
        Field("num_experts", ("num_experts",), int),
        Field("num_experts_per_tok", ("moe_topk", "num_experts_per_tok"), int),
        HEAD_DIM,
        EXPERT_WIDTH_IS_WIDTH,
        Field("shared_intermediate_size", ("intermediate_size",), int),
        *ATTENTION_BIAS,
        norm_eps(1e-5),
    ),
    constants={"routing.norm_topk_prob": True, "qk_norm": "head", "qk_norm_after_rope": True},
    supported={**COMMON_SUPPORTED, "use_cla": (False, None), "use_qk_norm": (True, None)},
    default_rope_theta=10_000.0,
    tensor_names={
        **COMMON_NAMES,
        "q_norm": (LAYER + "self_attn.query_layernorm.weight",),
        "k_norm": (LAYER + "self_attn.key_layernorm.weight",),
        "router": (LAYER + "mlp.gate.wg.weight",),
        "shared_gate_proj": (LAYER + "mlp.shared_mlp.gate_proj.weight",),
        "shared_up_proj": (LAYER + "mlp.shared_mlp.up_proj.weight",),
        "shared_down_proj": (LAYER + "mlp.shared_mlp.down_proj.weight",),
    },
    fused=COMMON_FUSED,
)
