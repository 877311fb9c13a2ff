"""The record that describes a family, and the parts most families share.

Called by: the family files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Field:
    """One ``ModelConfig`` field and where a ``config.json`` has it.

    Attributes:
        keys: spellings, first found wins (transformers renames fields between versions).
        default: what transformers assumes when the file is silent; None: it must be there.
        optional: whether None is a value.
    """

    name: str
    keys: tuple[str, ...]
    type: type
    default: Any = None
    optional: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    Attributes:
        fields: what is read from ``config.json``.
        constants: ``ModelConfig`` fields that the family fixes.
        supported: config key -> accepted values, for fields that change the result.
        tensor_names: role -> templates with ``{layer}`` and ``{expert}``; the first is the tensor's
            name in the bundle, the others are spellings that are read as well.
        fused_gate_up, fused_down: templates of the 3-D layout ``[E, 2 I, D]`` and ``[E, D, I]``.
        ignored: patterns of tensors that hold nothing (buffers of old exports).
    """

    model_type: str
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    supported: Mapping[str, tuple[Any, ...]]
    default_rope_theta: float
    tensor_names: Mapping[str, tuple[str, ...]]
    fused_gate_up: str
    fused_down: str
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)

    def bundle_names(self) -> dict[str, str]:
        """Role -> the one template that names the tensor in a bundle."""
        return {role: templates[0] for role, templates in self.tensor_names.items()}


COMMON_FIELDS = (
    Field("vocab_size", ("vocab_size",), int),
    Field("hidden_size", ("hidden_size",), int),
    Field("num_hidden_layers", ("num_hidden_layers",), int),
    Field("num_attention_heads", ("num_attention_heads",), int),
    Field("num_key_value_heads", ("num_key_value_heads",), int, optional=True),
    Field("num_experts", ("num_experts", "num_local_experts"), int),
    Field("num_experts_per_tok", ("num_experts_per_tok",), int),
    Field("max_position_embeddings", ("max_position_embeddings",), int),
    Field("tie_word_embeddings", ("tie_word_embeddings",), bool, default=False),
)

COMMON_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "quantization_config": (None,),
}

_LAYER = "model.layers.{layer}."

COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "lm_head": ("lm_head.weight",),
    "input_layernorm": (_LAYER + "input_layernorm.weight",),
    "post_attention_layernorm": (_LAYER + "post_attention_layernorm.weight",),
    "q_norm": (_LAYER + "self_attn.q_norm.weight",),
    "k_norm": (_LAYER + "self_attn.k_norm.weight",),
    "router": (_LAYER + "mlp.gate.weight",),
    "dense_gate_proj": (_LAYER + "mlp.gate_proj.weight",),
    "dense_up_proj": (_LAYER + "mlp.up_proj.weight",),
    "dense_down_proj": (_LAYER + "mlp.down_proj.weight",),
    "gate_proj": (_LAYER + "mlp.experts.{expert}.gate_proj.weight",),
    "up_proj": (_LAYER + "mlp.experts.{expert}.up_proj.weight",),
    "down_proj": (_LAYER + "mlp.experts.{expert}.down_proj.weight",),
    **{f"{p}_proj": (_LAYER + f"self_attn.{p}_proj.weight",) for p in "qkvo"},
    **{f"{p}_proj_bias": (_LAYER + f"self_attn.{p}_proj.bias",) for p in "qkvo"},
}

FUSED_GATE_UP = _LAYER + "mlp.experts.gate_up_proj"
FUSED_DOWN = _LAYER + "mlp.experts.down_proj"
