"""The resident tensors of a model: which roles there are, in which shapes.

Called by: model, memory, bundle_loader, specter_build.checkpoint.
"""

from __future__ import annotations

from specter_runtime.config import LatentConfig, ModelConfig

FLOAT32_ROLES = frozenset({"router", "router_bias", "correction_bias"})
"""Tensors that keep float32 whatever the compute dtype is: routing must not be rounded."""


def dense_shapes(config: ModelConfig, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Roles and shapes of the resident tensors of a layer, or of no layer (``None``)."""
    c = config
    norms = ("norm",) if layer is None else ("input_layernorm", "post_attention_layernorm")
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(norms, (c.hidden_size,))
    if c.norm == "layer":
        shapes |= {f"{name}_bias": (c.hidden_size,) for name in norms}
    if layer is None:
        shapes["embed_tokens"] = (c.vocab_size, c.hidden_size)
        if not c.tie_word_embeddings:
            shapes["lm_head"] = (c.vocab_size, c.hidden_size)
        if c.lm_head_bias:
            shapes["lm_head_bias"] = (c.vocab_size,)
        return shapes
    shapes |= _attention_shapes(c) if c.latent is None else _latent_shapes(c, c.latent)
    if layer in c.dense_layers:
        return shapes | _swiglu_shapes("dense", c.intermediate_size or 0, c.hidden_size)
    shapes["router"] = (c.num_experts, c.hidden_size)
    if c.routing.bias:
        shapes["router_bias"] = (c.num_experts,)
    if c.routing.correction_bias != "none":
        row = (1,) if c.routing.correction_bias == "row" else ()
        shapes["correction_bias"] = (*row, c.num_experts)
    if c.shared_intermediate_size:
        shapes |= _swiglu_shapes("shared", c.shared_intermediate_size, c.hidden_size)
    if c.shared_gate:
        shapes["shared_expert_gate"] = (1, c.hidden_size)
    return shapes


def _attention_shapes(c: ModelConfig) -> dict[str, tuple[int, ...]]:
    query_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    sizes = {"q_proj": query_size, "k_proj": kv_size, "v_proj": kv_size}
    shapes: dict[str, tuple[int, ...]] = {
        **{name: (size, c.hidden_size) for name, size in sizes.items()},
        "o_proj": (c.hidden_size, query_size),
    }
    if c.attention_bias:
        shapes |= {f"{name}_bias": (size,) for name, size in sizes.items()}
    if c.attention_out_bias:
        shapes["o_proj_bias"] = (c.hidden_size,)
    if c.qk_norm != "none":
        per_head = c.qk_norm == "head"
        shapes["q_norm"] = (c.head_dim if per_head else query_size,)
        shapes["k_norm"] = (c.head_dim if per_head else kv_size,)
    if c.attention_sinks:
        shapes["sinks"] = (c.num_attention_heads,)
    return shapes


def _latent_shapes(c: ModelConfig, latent: LatentConfig) -> dict[str, tuple[int, ...]]:
    query_size = c.num_attention_heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    kv_size = latent.kv_lora_rank + latent.qk_rope_head_dim
    expanded = c.num_attention_heads * (latent.qk_nope_head_dim + latent.v_head_dim)
    shapes: dict[str, tuple[int, ...]] = {
        "kv_a_proj": (kv_size, c.hidden_size),
        "kv_a_norm": (latent.kv_lora_rank,),
        "kv_b_proj": (expanded, latent.kv_lora_rank),
        "o_proj": (c.hidden_size, c.num_attention_heads * latent.v_head_dim),
    }
    if latent.q_lora_rank is None:
        shapes["q_proj"] = (query_size, c.hidden_size)
    else:
        shapes["q_a_proj"] = (latent.q_lora_rank, c.hidden_size)
        shapes["q_a_norm"] = (latent.q_lora_rank,)
        shapes["q_b_proj"] = (query_size, latent.q_lora_rank)
        if c.attention_bias:
            shapes["q_a_proj_bias"] = (latent.q_lora_rank,)
    if c.attention_bias:
        shapes["kv_a_proj_bias"] = (kv_size,)
    if c.attention_out_bias:
        shapes["o_proj_bias"] = (c.hidden_size,)
    return shapes


def _swiglu_shapes(prefix: str, width: int, hidden_size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}_gate_proj": (width, hidden_size),
        f"{prefix}_up_proj": (width, hidden_size),
        f"{prefix}_down_proj": (hidden_size, width),
    }
