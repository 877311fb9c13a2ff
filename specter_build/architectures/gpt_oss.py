"""gpt-oss: attention sinks, a window in every other layer, clamped SwiGLU, biases everywhere."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    HEAD_DIM,
    LAYER,
    Architecture,
    Field,
    FusedLayout,
    kv_heads,
    norm_eps,
)

GPT_OSS = Architecture(
    model_type="gpt_oss",
    fields=(
        *COMMON_FIELDS,
        kv_heads(8),
        *EXPERT_COUNTS,
        HEAD_DIM,
        EXPERT_WIDTH_IS_WIDTH,
        Field("attention_bias", ("attention_bias",), bool, default=True),
        Field("attention_out_bias", ("attention_bias",), bool, default=True),
        Field("sliding_window", ("sliding_window",), int, default=128),
        Field("swiglu_limit", ("swiglu_limit",), float, default=7.0),
        norm_eps(1e-5),
    ),
    constants={
        "attention_sinks": True,
        "expert_bias": True,
        "routing.scoring": "softmax_topk",
        "routing.bias": True,
    },
    supported=COMMON_SUPPORTED,
    default_rope_theta=150_000.0,
    tensor_names={
        **COMMON_NAMES,
        "router": (LAYER + "mlp.router.weight",),
        "router_bias": (LAYER + "mlp.router.bias",),
        "gate_proj_bias": (LAYER + "mlp.experts.{expert}.gate_proj.bias",),
        "up_proj_bias": (LAYER + "mlp.experts.{expert}.up_proj.bias",),
        "down_proj_bias": (LAYER + "mlp.experts.{expert}.down_proj.bias",),
    },
    fused=(
        FusedLayout(
            LAYER + "mlp.experts.gate_up_proj",
            LAYER + "mlp.experts.down_proj",
            transposed=True,
            interleaved=True,
        ),
        FusedLayout(
            LAYER + "mlp.experts.gate_up_proj",
            LAYER + "mlp.experts.down_proj",
            interleaved=True,
            mxfp4=True,
        ),
    ),
    alternating_windows=True,
)
