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
        name: of the field; ``routing.bias`` is the field ``bias`` of ``RoutingConfig``.
        keys: spellings, first found wins (transformers renames fields between versions).
        default: what transformers assumes when the file is silent; None: it must be there.
        optional: whether None is a value.
        times: another field by which the value is multiplied.
    """

    name: str
    keys: tuple[str, ...]
    type: type
    default: Any = None
    optional: bool = False
    times: str | None = None


@dataclass(frozen=True, slots=True)
class FusedLayout:
    """Experts of a layer as 3-D tensors: gate and up ``[E, 2 I, D]``, down ``[E, D, I]``.

    Attributes:
        gate_up, down: name templates; biases are called the same with ``_bias`` behind.
        transposed: the last two axes are swapped.
        interleaved: gate and up rows alternate instead of following each other.
        mxfp4: stored as mxfp4 blocks and exponents, called the same with ``_blocks`` and
            ``_scales`` behind.
    """

    gate_up: str
    down: str
    transposed: bool = False
    interleaved: bool = False
    mxfp4: bool = False


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model family.

    Attributes:
        fields: what is read from ``config.json``.
        constants: ``ModelConfig`` fields that the family fixes.
        supported: config key -> accepted values, for fields that change the result.
        tensor_names: role -> templates with ``{layer}`` and ``{expert}``; the first is the tensor's
            name in the bundle, the others are spellings that are read as well.
        fused: layouts with 3-D tensors in which experts are found too.
        default_partial_rotary_factor: share of a head that is rotated if the config is silent.
        rope_interleaved: rotated pairs are neighbours; a config's ``rope_interleave`` overrides.
        alternating_windows: if the config has no ``layer_types``, every other layer has a window.
        ignored: patterns of tensors that hold nothing (buffers of old exports).
        mtp_tensors: patterns of tensors of multi-token prediction, beside layers behind the last.
    """

    model_type: str
    fields: tuple[Field, ...]
    constants: Mapping[str, Any]
    supported: Mapping[str, tuple[Any, ...]]
    default_rope_theta: float
    tensor_names: Mapping[str, tuple[str, ...]]
    fused: tuple[FusedLayout, ...]
    default_partial_rotary_factor: float = 1.0
    rope_interleaved: bool = False
    alternating_windows: bool = False
    ignored: tuple[str, ...] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",)
    mtp_tensors: tuple[str, ...] = ()

    def bundle_names(self) -> dict[str, str]:
        """Role -> the one template that names the tensor in a bundle."""
        return {role: templates[0] for role, templates in self.tensor_names.items()}


COMMON_FIELDS = (
    Field("vocab_size", ("vocab_size",), int),
    Field("hidden_size", ("hidden_size",), int),
    Field("num_hidden_layers", ("num_hidden_layers",), int),
    Field("num_attention_heads", ("num_attention_heads",), int),
    Field("max_position_embeddings", ("max_position_embeddings",), int),
    Field("tie_word_embeddings", ("tie_word_embeddings",), bool, default=False),
)

EXPERT_COUNTS = (
    Field("num_experts", ("num_experts", "num_local_experts", "n_routed_experts"), int),
    Field("num_experts_per_tok", ("num_experts_per_tok",), int),
)

HEAD_DIM = Field("head_dim", ("head_dim",), int, optional=True)
EXPERT_WIDTH = Field("moe_intermediate_size", ("moe_intermediate_size",), int)
EXPERT_WIDTH_IS_WIDTH = Field("moe_intermediate_size", ("intermediate_size",), int)
DENSE_WIDTH = Field("intermediate_size", ("intermediate_size",), int, optional=True)
NORM_TOPK_PROB = Field("routing.norm_topk_prob", ("norm_topk_prob",), bool, default=False)
ATTENTION_BIAS = (
    Field("attention_bias", ("attention_bias",), bool, default=False),
    Field("attention_out_bias", ("attention_bias",), bool, default=False),
)


LATENT_FIELDS = (
    Field("latent.q_lora_rank", ("q_lora_rank",), int, optional=True),
    Field("latent.kv_lora_rank", ("kv_lora_rank",), int),
    Field("latent.qk_nope_head_dim", ("qk_nope_head_dim",), int),
    Field("latent.qk_rope_head_dim", ("qk_rope_head_dim",), int),
    Field("latent.v_head_dim", ("v_head_dim",), int),
)


def grouped_routing(scaling: float, n_group: int, topk_group: int) -> tuple[Field, ...]:
    """Fields of group-limited routing with the family's defaults."""
    return (
        Field("routing.routed_scaling_factor", ("routed_scaling_factor",), float, scaling),
        Field("routing.n_group", ("n_group",), int, n_group),
        Field("routing.topk_group", ("topk_group",), int, topk_group),
    )


def kv_heads(default: int | None) -> Field:
    """Key/value heads; null means one for each query head, absence the family's default."""
    return Field("num_key_value_heads", ("num_key_value_heads",), int, default, optional=True)


def norm_eps(default: float) -> Field:
    """The norms' epsilon with the family's default."""
    return Field("rms_norm_eps", ("rms_norm_eps",), float, default=default)


COMMON_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
}

LAYER = "model.layers.{layer}."

COMMON_NAMES: Mapping[str, tuple[str, ...]] = {
    "embed_tokens": ("model.embed_tokens.weight",),
    "norm": ("model.norm.weight",),
    "norm_bias": ("model.norm.bias",),
    "lm_head": ("lm_head.weight",),
    "lm_head_bias": ("lm_head.bias",),
    "input_layernorm": (LAYER + "input_layernorm.weight",),
    "input_layernorm_bias": (LAYER + "input_layernorm.bias",),
    "post_attention_layernorm": (LAYER + "post_attention_layernorm.weight",),
    "post_attention_layernorm_bias": (LAYER + "post_attention_layernorm.bias",),
    "q_norm": (LAYER + "self_attn.q_norm.weight",),
    "k_norm": (LAYER + "self_attn.k_norm.weight",),
    "sinks": (LAYER + "self_attn.sinks",),
    "q_a_proj": (LAYER + "self_attn.q_a_proj.weight",),
    "q_a_proj_bias": (LAYER + "self_attn.q_a_proj.bias",),
    "q_a_norm": (LAYER + "self_attn.q_a_layernorm.weight",),
    "q_b_proj": (LAYER + "self_attn.q_b_proj.weight",),
    "kv_a_proj": (LAYER + "self_attn.kv_a_proj_with_mqa.weight",),
    "kv_a_proj_bias": (LAYER + "self_attn.kv_a_proj_with_mqa.bias",),
    "kv_a_norm": (LAYER + "self_attn.kv_a_layernorm.weight",),
    "kv_b_proj": (LAYER + "self_attn.kv_b_proj.weight",),
    "router": (LAYER + "mlp.gate.weight",),
    "correction_bias": (LAYER + "mlp.gate.e_score_correction_bias",),
    "shared_gate_proj": (LAYER + "mlp.shared_experts.gate_proj.weight",),
    "shared_up_proj": (LAYER + "mlp.shared_experts.up_proj.weight",),
    "shared_down_proj": (LAYER + "mlp.shared_experts.down_proj.weight",),
    "dense_gate_proj": (LAYER + "mlp.gate_proj.weight",),
    "dense_up_proj": (LAYER + "mlp.up_proj.weight",),
    "dense_down_proj": (LAYER + "mlp.down_proj.weight",),
    "gate_proj": (LAYER + "mlp.experts.{expert}.gate_proj.weight",),
    "up_proj": (LAYER + "mlp.experts.{expert}.up_proj.weight",),
    "down_proj": (LAYER + "mlp.experts.{expert}.down_proj.weight",),
    **{f"{p}_proj": (LAYER + f"self_attn.{p}_proj.weight",) for p in "qkvo"},
    **{f"{p}_proj_bias": (LAYER + f"self_attn.{p}_proj.bias",) for p in "qkvo"},
}

COMMON_FUSED = (FusedLayout(LAYER + "mlp.experts.gate_up_proj", LAYER + "mlp.experts.down_proj"),)

BLOCK = LAYER + "block_sparse_moe."

BLOCK_SPARSE_NAMES: Mapping[str, tuple[str, ...]] = {
    **COMMON_NAMES,
    # transformers 5 calls the block "mlp" in memory, "block_sparse_moe" on disk
    "router": (BLOCK + "gate.weight", LAYER + "mlp.router.weight", *COMMON_NAMES["router"]),
    "correction_bias": (BLOCK + "e_score_correction_bias", LAYER + "mlp.e_score_correction_bias"),
    "gate_proj": (BLOCK + "experts.{expert}.w1.weight", *COMMON_NAMES["gate_proj"]),
    "up_proj": (BLOCK + "experts.{expert}.w3.weight", *COMMON_NAMES["up_proj"]),
    "down_proj": (BLOCK + "experts.{expert}.w2.weight", *COMMON_NAMES["down_proj"]),
}
"""Mixtral's names, which other families took over."""
