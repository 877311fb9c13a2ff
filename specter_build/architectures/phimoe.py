"""Phi-3.5-MoE: layer norms with biases, experts chosen one after another (sparsemixer)."""

from specter_build.architectures.family import (
    ATTENTION_BIAS,
    BLOCK_SPARSE_NAMES,
    COMMON_FIELDS,
    COMMON_FUSED,
    COMMON_SUPPORTED,
    EXPERT_COUNTS,
    EXPERT_WIDTH_IS_WIDTH,
    Architecture,
    Field,
    kv_heads,
    norm_eps,
)

PHIMOE = Architecture(
    model_type="phimoe",
    fields=(
        *COMMON_FIELDS,
        kv_heads(8),
        *EXPERT_COUNTS,
        EXPERT_WIDTH_IS_WIDTH,
        *ATTENTION_BIAS,
        Field("lm_head_bias", ("lm_head_bias",), bool, default=False),
        Field("routing.jitter_eps", ("router_jitter_noise",), float, default=0.01),
        norm_eps(1e-5),
    ),
    constants={"norm": "layer", "routing.scoring": "sparsemixer"},
    supported=COMMON_SUPPORTED,
    default_rope_theta=1_000_000.0,
    tensor_names=BLOCK_SPARSE_NAMES,
    fused=COMMON_FUSED,
)
