"""Qwen3-MoE (Qwen3-30B-A3B and kin): queries and keys normed per head, softmax before top-k."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    FUSED_DOWN,
    FUSED_GATE_UP,
    Architecture,
    Field,
)

QWEN3_MOE = Architecture(
    model_type="qwen3_moe",
    fields=(
        *COMMON_FIELDS,
        Field("head_dim", ("head_dim",), int, optional=True),
        Field("moe_intermediate_size", ("moe_intermediate_size",), int),
        Field("intermediate_size", ("intermediate_size",), int, optional=True),
        Field("norm_topk_prob", ("norm_topk_prob",), bool, default=False),
        Field("attention_bias", ("attention_bias",), bool, default=False),
        Field("rms_norm_eps", ("rms_norm_eps",), float, default=1e-6),
    ),
    constants={"qk_norm": "head", "clip_qkv": None},
    supported={**COMMON_SUPPORTED, "use_sliding_window": (False, None)},
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused_gate_up=FUSED_GATE_UP,
    fused_down=FUSED_DOWN,
)
