"""OLMoE: queries and keys normed over the full projection, top-k probabilities kept as they are."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    FUSED_DOWN,
    FUSED_GATE_UP,
    Architecture,
    Field,
)

OLMOE = Architecture(
    model_type="olmoe",
    fields=(
        *COMMON_FIELDS,
        Field("moe_intermediate_size", ("intermediate_size",), int),
        Field("norm_topk_prob", ("norm_topk_prob",), bool, default=False),
        Field("attention_bias", ("attention_bias",), bool, default=False),
        Field("clip_qkv", ("clip_qkv",), float, optional=True),
        Field("rms_norm_eps", ("rms_norm_eps",), float, default=1e-5),
    ),
    constants={"qk_norm": "full", "intermediate_size": None},
    supported=COMMON_SUPPORTED,
    default_rope_theta=10_000.0,
    tensor_names=COMMON_NAMES,
    fused_gate_up=FUSED_GATE_UP,
    fused_down=FUSED_DOWN,
)
