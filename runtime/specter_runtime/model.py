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

from specter_runtime.config import LatentConfig, ModelConfig
from specter_runtime.experts import PROJECTIONS, ExpertProvider
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import (
    Angles,
    RotaryEmbedding,
    attend,
    normalize,
    rms_norm,
    rotate,
    swiglu,
)
from specter_runtime.moe import Routing, mix_experts, route
from specter_runtime.roles import FLOAT32_ROLES, dense_shapes
from specter_runtime.scaled import FP8_SCALE_SUFFIX, Fp8Matrix

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention: the reference fixes it, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer: attention and a routed or dense MLP.

    Attributes:
        tensors: role -> tensor in the compute dtype (see ``bind``).
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
        normed = normalize(hidden, t, "input_layernorm", c.rms_norm_eps)
        if c.latent is None:
            attended = self._grouped_attention(normed, start, angles, kv_cache)
        else:
            attended = self._latent_attention(normed, start, angles, kv_cache, c.latent)
        out = functional.linear(attended, t["o_proj"], t.get("o_proj_bias"))
        return self._add(hidden, out)

    def _grouped_attention(
        self, normed: torch.Tensor, start: int, angles: Angles, kv_cache: KVCache
    ) -> torch.Tensor:
        """``[T, H * C]``."""
        c, t = self.config, self.tensors
        queries = self._project(normed, "q", c.num_attention_heads, angles)  # [T, H, C]
        keys = self._project(normed, "k", c.num_key_value_heads, angles)  # [T, G, C]
        values = self._project(normed, "v", c.num_key_value_heads, None)
        all_keys, all_values = kv_cache.write(self.cache_layer, start, keys, values)
        window = c.sliding_window if self.index in c.sliding_layers else None
        return attend(queries, all_keys, all_values, c.attention_scaling, window, t.get("sinks"))

    def _project(
        self, normed: torch.Tensor, name: str, num_heads: int, angles: Angles | None
    ) -> torch.Tensor:
        """Queries, keys or values ``[T, heads, C]``, normed, clipped and rotated."""
        c, t = self.config, self.tensors
        out = functional.linear(normed, t[f"{name}_proj"], t.get(f"{name}_proj_bias"))
        norm = t.get(f"{name}_norm")
        if norm is not None and c.qk_norm == "full":
            out = rms_norm(out, norm, c.rms_norm_eps)
        if c.clip_qkv is not None:
            out = out.clamp(-c.clip_qkv, c.clip_qkv)
        out = out.view(out.shape[0], num_heads, c.head_dim)
        per_head = norm if c.qk_norm == "head" else None
        if per_head is not None and not c.qk_norm_after_rope:
            out = rms_norm(out, per_head, c.rms_norm_eps)
        if angles is not None:
            out = rotate(out, angles, c.rope.interleaved)
        if per_head is not None and c.qk_norm_after_rope:
            out = rms_norm(out, per_head, c.rms_norm_eps)
        return out

    def _latent_attention(
        self,
        normed: torch.Tensor,
        start: int,
        angles: Angles,
        kv_cache: KVCache,
        latent: LatentConfig,
    ) -> torch.Tensor:
        """``[T, H * v_head_dim]``, computed on the latents themselves.

        The up-projections of keys and values are applied to queries and to the attended latent
        instead of to every cached position: attention with one key/value head whose key is
        (latent, rotated key) and whose value is the latent. Source: arXiv 2405.04434, 2.1.2.
        """
        c, t = self.config, self.tensors
        num_heads, rank = c.num_attention_heads, latent.kv_lora_rank
        if latent.q_lora_rank is None:
            flat_queries = functional.linear(normed, t["q_proj"])
        else:
            low = functional.linear(normed, t["q_a_proj"], t.get("q_a_proj_bias"))
            low = rms_norm(low, t["q_a_norm"], LATENT_NORM_EPS)
            flat_queries = functional.linear(low, t["q_b_proj"])
        queries = flat_queries.view(normed.shape[0], num_heads, -1)  # [T, H, nope + rope]
        rope_width = latent.qk_rope_head_dim
        plain, turned = queries[..., :-rope_width], queries[..., -rope_width:]
        compressed = functional.linear(normed, t["kv_a_proj"], t.get("kv_a_proj_bias"))
        latents, shared_key = compressed[..., :rank], compressed[..., rank:]
        latents = rms_norm(latents, t["kv_a_norm"], LATENT_NORM_EPS)
        shared_key = rotate(shared_key.unsqueeze(1), angles, c.rope.interleaved)  # [T, 1, rope]
        keys = torch.cat((latents.unsqueeze(1), shared_key), dim=-1)
        all_keys, _ = kv_cache.write(self.cache_layer, start, keys, keys[..., :0])
        up = t["kv_b_proj"].view(num_heads, -1, rank)  # [H, nope + v, rank]
        key_up, value_up = up[:, : latent.qk_nope_head_dim], up[:, latent.qk_nope_head_dim :]
        absorbed = torch.matmul(plain.transpose(0, 1), key_up).transpose(0, 1)  # [T, H, rank]
        full = torch.cat((absorbed, rotate(turned, angles, c.rope.interleaved)), dim=-1)
        attended = attend(full, all_keys, all_keys[..., :rank], c.attention_scaling, None, None)
        by_head = attended.view(-1, num_heads, rank).transpose(0, 1)  # [H, T, rank]
        values = torch.matmul(by_head, value_up.transpose(1, 2))  # [H, T, v]
        return values.transpose(0, 1).reshape(normed.shape[0], -1)

    def mlp_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """What router, experts or dense MLP are given of hidden states ``[T, D]``."""
        eps = self.config.rms_norm_eps
        return normalize(hidden, self.tensors, "post_attention_layernorm", eps)

    def mlp(
        self, blocks: Sequence[torch.Tensor], provider: ExpertProvider
    ) -> tuple[list[torch.Tensor], Routing | None]:
        """Residual plus MLP for all blocks; the routing of all their rows, None if dense."""
        c, t = self.config, self.tensors
        normed = [self.mlp_input(x) for x in blocks]
        if self.index in c.dense_layers:
            outs = [self._swiglu("dense", rows) for rows in normed]
            return [self._add(x, out) for x, out in zip(blocks, outs, strict=True)], None
        routings = [route(rows, t, c.routing, c.num_experts_per_tok, self.index) for rows in normed]
        outs = mix_experts(normed, routings, provider, c.swiglu_limit)
        if c.shared_intermediate_size:
            pairs = zip(outs, normed, strict=True)
            outs = [out + self._shared_expert(rows) for out, rows in pairs]
        merged = Routing(
            self.index,
            torch.cat([r.selected_experts for r in routings]),
            torch.cat([r.routing_weights for r in routings]),
        )
        return [self._add(x, out) for x, out in zip(blocks, outs, strict=True)], merged

    def _shared_expert(self, normed: torch.Tensor) -> torch.Tensor:
        out = self._swiglu("shared", normed)
        if not self.config.shared_gate:
            return out
        gate = functional.linear(normed, self.tensors["shared_expert_gate"])  # [T, 1]
        return torch.sigmoid(gate) * out

    def _swiglu(self, prefix: str, normed: torch.Tensor) -> torch.Tensor:
        gate, up, down = (self.tensors[f"{prefix}_{name}"] for name in PROJECTIONS)
        return swiglu(normed, gate, up, down)

    def _add(self, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        multiplier = self.config.residual_multiplier
        return residual + (out if multiplier == 1.0 else out * multiplier)


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
            tensors: Hugging Face name -> tensor, at least all resident ones with their scales.
            tensor_names: role -> name template, see ``manifest``.
            dtype: the compute dtype; routers stay in float32.

        Raises:
            KeyError: a tensor is missing.
        """
        self.config = config
        self.dtype = dtype
        common = bind(config, None, tensors, tensor_names, dtype)
        self._common = common
        self._rotary = RotaryEmbedding(config.rope)
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
        blocks = [
            embed(rows, self._common, self.config) for rows in torch.split(ids, rows_per_block)
        ]
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
        eps = self.config.rms_norm_eps
        return [normalize(block, self._common, "norm", eps) for block in blocks], routings

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 logits ``[T, V]`` of normed hidden states ``[T, D]``."""
        return head_logits(hidden, self._common, self.config)


def embed(
    token_ids: torch.Tensor,
    common: Mapping[str, torch.Tensor],
    config: ModelConfig,
) -> torch.Tensor:
    """Hidden states of token ids of any shape."""
    hidden = common["embed_tokens"][token_ids]
    return hidden if config.embedding_multiplier == 1.0 else hidden * config.embedding_multiplier


def head_logits(
    hidden: torch.Tensor,  # [T, D]
    common: Mapping[str, torch.Tensor],
    config: ModelConfig,
) -> torch.Tensor:
    """Float32 logits ``[T, V]`` of normed hidden states; the head is tied if there is none."""
    head = common.get("lm_head", common["embed_tokens"])
    logits = functional.linear(hidden, head, common.get("lm_head_bias")).to(torch.float32)
    return logits if config.logits_scaling == 1.0 else logits / config.logits_scaling


def bind(
    config: ModelConfig,
    layer: int | None,
    tensors: Mapping[str, torch.Tensor],
    tensor_names: Mapping[str, str],
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """Role -> tensor of one layer (or of no layer) in the compute dtype, routing in float32."""
    bound = {}
    for role in dense_shapes(config, layer):
        name = tensor_names[role].format(layer=layer)
        stored: torch.Tensor | Fp8Matrix = tensors[name]
        scales = tensors.get(name + FP8_SCALE_SUFFIX)
        if scales is not None and config.fp8_block_size is not None:
            stored = Fp8Matrix(tensors[name], scales, config.fp8_block_size)
        bound[role] = stored.to(torch.float32 if role in FLOAT32_ROLES else dtype)
    return bound
