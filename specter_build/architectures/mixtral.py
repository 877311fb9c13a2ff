"""Mixtral: plain attention, top-k probabilities renormalized, experts called w1, w3 and w2."""

from specter_build.architectures.family import (
    COMMON_FIELDS,
    COMMON_NAMES,
    COMMON_SUPPORTED,
    FUSED_DOWN,
    FUSED_GATE_UP,
    Architecture,
    Field,
)

_BLOCK = "model.layers.{layer}.block_sparse_moe."

MIXTRAL = Architecture(
    model_type="mixtral",
    fields=(
        *COMMON_FIELDS,
        Field("head_dim", ("head_dim",), int, optional=True),
        Field("moe_intermediate_size", ("intermediate_size",), int),
        Field("rms_norm_eps", ("rms_norm_eps",), float, default=1e-5),
    ),
    constants={
        "norm_topk_prob": True,
        "attention_bias": False,
        "qk_norm": "none",
        "clip_qkv": None,
        "intermediate_size": None,
    },
    supported={**COMMON_SUPPORTED, "sliding_window": (None,)},
    default_rope_theta=1_000_000.0,
    tensor_names={
        **COMMON_NAMES,
        # transformers 5 calls the block "mlp" in memory, "block_sparse_moe" on disk
        "router": (_BLOCK + "gate.weight", *COMMON_NAMES["router"]),
        "gate_proj": (_BLOCK + "experts.{expert}.w1.weight", *COMMON_NAMES["gate_proj"]),
        "up_proj": (_BLOCK + "experts.{expert}.w3.weight", *COMMON_NAMES["up_proj"]),
        "down_proj": (_BLOCK + "experts.{expert}.w2.weight", *COMMON_NAMES["down_proj"]),
    },
    fused_gate_up=FUSED_GATE_UP,
    fused_down=FUSED_DOWN,
)
