"""The resident tensors of a model: which roles there are, in which shapes.

Called by: model, memory, bundle_loader, specter_build.checkpoint.
"""

from __future__ import annotations

from specter_runtime.config import ModelConfig

FLOAT32_ROLES = frozenset({"router"})
"""Tensors that keep float32 whatever the compute dtype is: routing must not be rounded."""


def dense_shapes(config: ModelConfig, layer: int | None) -> dict[str, tuple[int, ...]]:
    """Roles and shapes of the resident tensors of a layer, or of no layer (``None``)."""
    c, hidden = config, (config.hidden_size,)
    if layer is None:
        vocabulary = (c.vocab_size, c.hidden_size)
        shapes: dict[str, tuple[int, ...]] = {"embed_tokens": vocabulary, "norm": hidden}
        return shapes if c.tie_word_embeddings else {**shapes, "lm_head": vocabulary}
    query_size, kv_size = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    shapes = {
        "input_layernorm": hidden,
        "q_proj": (query_size, c.hidden_size),
        "k_proj": (kv_size, c.hidden_size),
        "v_proj": (kv_size, c.hidden_size),
        "o_proj": (c.hidden_size, query_size),
        "post_attention_layernorm": hidden,
    }
    if c.attention_bias:
        shapes |= {"q_proj_bias": (query_size,), "k_proj_bias": (kv_size,)}
        shapes |= {"v_proj_bias": (kv_size,), "o_proj_bias": hidden}
    if c.qk_norm == "head":
        shapes |= {"q_norm": (c.head_dim,), "k_norm": (c.head_dim,)}
    elif c.qk_norm == "full":
        shapes |= {"q_norm": (query_size,), "k_norm": (kv_size,)}
    if layer in c.dense_layers:
        wide = (c.intermediate_size or 0, c.hidden_size)
        shapes |= {"dense_gate_proj": wide, "dense_up_proj": wide}
        shapes |= {"dense_down_proj": (wide[1], wide[0])}
    else:
        shapes["router"] = (c.num_experts, c.hidden_size)
    return shapes
