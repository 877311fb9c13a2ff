"""The network: one class for target and draft, which differ only in the expert provider.

Rows are computed in *blocks*. A prompt is one block a chunk; tokens that are decoded or verified
are blocks of **one row each**. Verifying K + 1 tokens therefore runs, row for row, the very calls
that decoding them one by one runs, with the same shapes: the results are equal to the bit by
construction, in any dtype, attention included. Only the experts are fetched once for all blocks.

The model knows nothing of text, files or threads.

Called by: session, draft_engine, specter_build.profile_routing.  Next: layers, moe, kv_cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from specter_runtime.config import ModelConfig
from specter_runtime.experts import ExpertProvider
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import Angles, RotaryEmbedding, attend, rms_norm, rotate, swiglu
from specter_runtime.moe import Routing, mix_experts, route
from specter_runtime.roles import FLOAT32_ROLES, dense_shapes


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and a routed or dense MLP.

    Attributes:
        tensors: role -> tensor in the compute dtype (the router in float32), see ``dense_shapes``.
        cache_layer: which layer of the KV cache it writes.
    """

    config: ModelConfig
    index: int
    cache_layer: int
    tensors: Mapping[str, torch.Tensor]

    def attention(
        self, hidden: torch.Tensor, start: int, angles: Angles, kv_cache: KVCache
    ) -> torch.Tensor:
        """Residual plus attention for a block ``[T, D]`` at positions ``start ..``."""
        c, t = self.config, self.tensors
        normed = rms_norm(hidden, t["input_layernorm"], c.rms_norm_eps)
        queries = self._project(normed, "q", c.num_attention_heads)  # [T, H, C]
        keys = self._project(normed, "k", c.num_key_value_heads)  # [T, G, C]
        values = self._project(normed, "v", c.num_key_value_heads)
        all_keys, all_values = kv_cache.write(self.cache_layer, start, rotate(keys, angles), values)
        attended = attend(rotate(queries, angles), all_keys, all_values)
        return hidden + functional.linear(attended, t["o_proj"], t.get("o_proj_bias"))

    def _project(self, normed: torch.Tensor, name: str, num_heads: int) -> torch.Tensor:
        """Queries, keys or values ``[T, heads, C]``, normed and clipped as the family does."""
        c, t = self.config, self.tensors
        out = functional.linear(normed, t[f"{name}_proj"], t.get(f"{name}_proj_bias"))
        norm = t.get(f"{name}_norm")
        if norm is not None and c.qk_norm == "full":
            out = rms_norm(out, norm, c.rms_norm_eps)
        if c.clip_qkv is not None:
            out = out.clamp(-c.clip_qkv, c.clip_qkv)
        out = out.view(out.shape[0], num_heads, c.head_dim)
        if norm is not None and c.qk_norm == "head":
            out = rms_norm(out, norm, c.rms_norm_eps)
        return out

    def mlp(
        self, blocks: Sequence[torch.Tensor], provider: ExpertProvider
    ) -> tuple[list[torch.Tensor], Routing | None]:
        """Residual plus MLP for all blocks; the routing of all their rows, None if dense."""
        c, t = self.config, self.tensors
        normed = [rms_norm(x, t["post_attention_layernorm"], c.rms_norm_eps) for x in blocks]
        if self.index in c.dense_layers:
            names = ("dense_gate_proj", "dense_up_proj", "dense_down_proj")
            weights = [t[name] for name in names]
            return [x + swiglu(n, *weights) for x, n in zip(blocks, normed, strict=True)], None
        routings = [
            route(n, t["router"], c.num_experts_per_tok, c.norm_topk_prob, self.index)
            for n in normed
        ]
        mixed = mix_experts(normed, routings, provider)
        merged = Routing(
            self.index,
            torch.cat([r.selected_experts for r in routings]),
            torch.cat([r.routing_weights for r in routings]),
        )
        return [x + m for x, m in zip(blocks, mixed, strict=True)], merged


class MoETransformer:
    """A mixture-of-experts decoder over dense tensors; experts come from the provider."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        tensor_names: Mapping[str, str],
        dtype: torch.dtype,
    ) -> None:
        """Bind tensors to their roles.

        Args:
            config: the model.
            tensors: Hugging Face name -> tensor, at least all resident ones.
            tensor_names: role -> name template, see ``manifest``.
            dtype: the compute dtype; routers stay in float32.

        Raises:
            KeyError: a tensor is missing.
        """
        self.config = config
        self.dtype = dtype
        common = bind(config, None, tensors, tensor_names, dtype)
        self._embed_tokens = common["embed_tokens"]
        self._norm = common["norm"]
        self._lm_head = common.get("lm_head", self._embed_tokens)
        self._rotary = RotaryEmbedding(config)
        self._layers = [
            DecoderLayer(config, i, i, bind(config, i, tensors, tensor_names, dtype))
            for i in range(config.num_hidden_layers)
        ]

    def forward(
        self,
        token_ids: Sequence[int],
        kv_cache: KVCache,
        provider: ExpertProvider,
        *,
        rows_per_block: int,
    ) -> tuple[list[torch.Tensor], list[Routing]]:
        """Run T tokens behind those in the cache.

        Args:
            token_ids: the T tokens.
            kv_cache: its ``length`` is the position of the first; grows by T.
            provider: where experts come from.
            rows_per_block: 1 to decode or verify, more for a prompt.

        Returns:
            Final hidden states (blocks ``[rows, D]``, normed) and the routing of each routed layer.
        """
        ids = torch.tensor(token_ids)
        blocks = [self._embed_tokens[rows] for rows in torch.split(ids, rows_per_block)]
        starts = [kv_cache.length + i * rows_per_block for i in range(len(blocks))]
        angles = [
            self._rotary.angles(start, len(block), self.dtype)
            for start, block in zip(starts, blocks, strict=True)
        ]
        routings: list[Routing] = []
        for layer in self._layers:
            blocks = [
                layer.attention(block, start, block_angles, kv_cache)
                for block, start, block_angles in zip(blocks, starts, angles, strict=True)
            ]
            blocks, routing = layer.mlp(blocks, provider)
            if routing is not None:
                routings.append(routing)
        kv_cache.advance(len(token_ids))
        return [self.final_norm(block) for block in blocks], routings

    def final_norm(self, hidden: torch.Tensor) -> torch.Tensor:
        """The norm before the head."""
        return rms_norm(hidden, self._norm, self.config.rms_norm_eps)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[T, V]`` of normed hidden states ``[T, D]``."""
        return functional.linear(hidden, self._lm_head).to(torch.float32)


def bind(
    config: ModelConfig,
    layer: int | None,
    tensors: Mapping[str, torch.Tensor],
    tensor_names: Mapping[str, str],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Role -> tensor of one layer (or of no layer) in the compute dtype, routers in float32."""
    return {
        role: tensors[tensor_names[role].format(layer=layer)].to(
            torch.float32 if role in FLOAT32_ROLES else dtype
        )
        for role in dense_shapes(config, layer)
    }
