"""Qwen2-MoE (Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B): a gated shared expert beside the routed ones."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    DENSE_WIDTH,
    EXPERT_COUNTS,
    EXPERT_WIDTH,
    LAYER,
    NORM_TOPK_PROB,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

QWEN2_MOE = Architecture(
    model_type="qwen2_moe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(16),
        *EXPERT_COUNTS,
        EXPERT_WIDTH,
        DENSE_WIDTH,
        NORM_TOPK_PROB,
        Field("attention_bias", ("qkv_bias",), bool, default=True),
        Field("shared_intermediate_size", ("shared_expert_intermediate_size",), int, default=5632),
        norm_eps(1e-6),
    ),
    constants={"shared_gate": True},
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names={
        **COMMON_NAMES,
        "shared_gate_proj": (LAYER + "mlp.shared_expert.gate_proj.weight",),
        "shared_up_proj": (LAYER + "mlp.shared_expert.up_proj.weight",),
        "shared_down_proj": (LAYER + "mlp.shared_expert.down_proj.weight",),
        "shared_expert_gate": (LAYER + "mlp.shared_expert_gate.weight",),
    },
    fused=COMMON_FUSED,
)
