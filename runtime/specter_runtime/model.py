"""The network: one class for target and draft, which differ only in the expert provider.

Rows are computed in *blocks*. A prompt is one block a chunk; tokens that are decoded or verified
are blocks of **one row each**. Where torch computes, verifying K + 1 tokens therefore runs, row for
row, the very calls that decoding them one by one runs, with the same shapes. The kernels compute
each row by itself and may be given the rows of many blocks; whether they are asked depends on a
block, not on those beside it. So the results are equal to the bit by construction, in any dtype,
attention included. Experts are fetched once for all blocks.

The model knows nothing of text, files or threads.

Called by: session, row_pass, draft_engine, specter_build.profile_routing.
Next: layers, moe, kv_cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch.nn import functional

from specter_runtime import kernels
from specter_runtime.config import LatentConfig, ModelConfig
from specter_runtime.experts import PROJECTIONS, ExpertProvider, ExpertWeights, Routing
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import (
    Angles,
    LayerTensors,
    RotaryEmbedding,
    attend,
    linear,
    normalize,
    rms_norm,
    rotate,
    swiglu,
)
from specter_runtime.moe import merge, mix_experts, select_experts
from specter_runtime.predictor import Prediction, PredictionObserver, Predictor
from specter_runtime.roles import FLOAT32_ROLES, dense_shapes
from specter_runtime.scaled import FP8_SCALE_SUFFIX, Fp8Matrix

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention: the reference fixes it, whatever rms_norm_eps says."""


class DecoderLayer:
    """One layer: attention and a routed or dense MLP."""

    def __init__(
        self,
        config: ModelConfig,
        index: int,
        cache_layer: int,
        tensors: LayerTensors,
        predictor: Predictor | None = None,
    ) -> None:
        """Take over bound tensors.

        Args:
            config: of the model.
            index: of the layer.
            cache_layer: which layer of the KV cache it writes.
            tensors: role -> tensor in the compute dtype (see ``bind``).
            predictor: foretells later layers' experts.
        """
        self.config = config
        self.index = index
        self.cache_layer = cache_layer
        self.tensors = tensors
        self._kernel = _attention_kernel(config, index, tensors)
        self.predictor = predictor
        self._gate_kernel = _gate_kernel(config, tensors, predictor)
        self._swiglus = {
            prefix: kernels.prepare(
                ExpertWeights(*(tensors[f"{prefix}_{name}"] for name in PROJECTIONS))
            )
            for prefix in ("dense", "shared")
            if f"{prefix}_gate_proj" in tensors
        }

    def attend(
        self,
        blocks: Sequence[torch.Tensor],
        starts: Sequence[int],
        angles: Sequence[Angles],
        kv_cache: KVCache,
    ) -> list[torch.Tensor]:
        """Residual plus attention for consecutive blocks; see ``_each``."""
        num_rows = sum(block.shape[0] for block in blocks)
        if (
            len(blocks) > 1
            and self._kernel is not None
            and kernels.serves(blocks[0].dtype, num_rows)
        ):
            cos, sin = (torch.cat(parts) for parts in zip(*angles, strict=True))
            rows = self.attention(_join(blocks), starts[0], (cos, sin), kv_cache)
            return list(torch.split(rows, [block.shape[0] for block in blocks]))
        return [
            self.attention(block, start, block_angles, kv_cache)
            for block, start, block_angles in zip(blocks, starts, angles, strict=True)
        ]

    def attention(
        self, hidden: torch.Tensor, start: int, angles: Angles, kv_cache: KVCache
    ) -> torch.Tensor:
        """Residual plus attention for a block ``[T, D]`` at positions ``start ..``."""
        c, t = self.config, self.tensors
        if self._kernel is not None and kernels.serves(hidden.dtype, hidden.shape[0]):
            keys, values = kv_cache.room(self.cache_layer, start + hidden.shape[0])
            return self._kernel.compute(hidden, start, keys, values, *angles)
        normed = normalize(hidden, t, "input_layernorm", c.rms_norm_eps)
        if c.latent is None:
            attended = self._grouped_attention(normed, start, angles, kv_cache)
        else:
            attended = self._latent_attention(normed, start, angles, kv_cache, c.latent)
        out = linear(t, "o_proj", attended)
        return self.add(hidden, out)

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
        out = linear(t, f"{name}_proj", normed)
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
            flat_queries = linear(t, "q_proj", normed)
        else:
            low = linear(t, "q_a_proj", normed)
            low = rms_norm(low, t["q_a_norm"], LATENT_NORM_EPS)
            flat_queries = linear(t, "q_b_proj", low)
        queries = flat_queries.view(normed.shape[0], num_heads, -1)  # [T, H, nope + rope]
        rope_width = latent.qk_rope_head_dim
        plain, turned = queries[..., :-rope_width], queries[..., -rope_width:]
        compressed = linear(t, "kv_a_proj", normed)
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
        self,
        blocks: Sequence[torch.Tensor],
        provider: ExpertProvider,
        on_prediction: PredictionObserver | None = None,
    ) -> tuple[list[torch.Tensor], Routing | None]:
        """Residual plus MLP for all blocks; the routing of all their rows, None if dense.

        ``on_prediction`` is told of later layers before the experts are fetched, if there is but
        one row, and something that predicts.
        """
        c, t = self.config, self.tensors
        if self.index in c.dense_layers:
            normed = _each(self.mlp_input, blocks)
            outs = _each(lambda rows: self._swiglu("dense", rows), normed)
            return [self.add(x, out) for x, out in zip(blocks, outs, strict=True)], None
        normed, routings, predictions = self._route(blocks, predicts=on_prediction is not None)
        if on_prediction is not None and predictions:
            on_prediction(predictions)
        outs = mix_experts(normed, routings, provider, c.swiglu_limit)
        if c.shared_intermediate_size:
            shared = _each(lambda rows: self._swiglu("shared", rows), normed)
            if c.shared_gate:
                gates = [linear(t, "shared_expert_gate", rows) for rows in normed]  # [T, 1]
                pairs = zip(gates, shared, strict=True)
                shared = [torch.sigmoid(gate) * out for gate, out in pairs]
            outs = [out + own for out, own in zip(outs, shared, strict=True)]
        return [self.add(x, out) for x, out in zip(blocks, outs, strict=True)], merge(routings)

    def _route(
        self, blocks: Sequence[torch.Tensor], *, predicts: bool
    ) -> tuple[list[torch.Tensor], list[Routing], list[Prediction]]:
        """What the MLP is given of each block, the routing of each, and what they foretell."""
        c, t = self.config, self.tensors
        is_one_row = len(blocks) == 1 and blocks[0].shape[0] == 1
        predictor = self.predictor if predicts and is_one_row else None
        most = max(block.shape[0] for block in blocks)
        if self._gate_kernel is not None and kernels.serves(blocks[0].dtype, most):
            kernel, predicts = self._gate_kernel, predictor is not None
            found = [kernel.compute(block, predicts=predicts) for block in blocks]
            inputs = [gated.normed for gated in found]
            routings = [Routing(self.index, *gated[1:4]) for gated in found]
            if predictor is None:
                return inputs, routings, []
            return inputs, routings, predictor.name(found[0].likely[0], found[0].probabilities[0])
        inputs = _each(self.mlp_input, blocks)
        routings = [
            select_experts(
                linear(t, "router", rows.to(torch.float32)),
                t,
                c.routing,
                c.num_experts_per_tok,
                self.index,
            )
            for rows in inputs
        ]
        if predictor is None:
            return inputs, routings, []
        return inputs, routings, predictor.predict(self.plain_input(blocks[0]))

    def plain_input(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states ``[T, D]`` normed as for the router, without the norm's weights: float32.

        It is what predictors are fitted to.
        """
        wide, eps = hidden.to(torch.float32), self.config.rms_norm_eps
        ones = torch.ones(wide.shape[1])
        if "post_attention_layernorm_bias" in self.tensors:
            return functional.layer_norm(wide, ones.shape, eps=eps)
        return rms_norm(wide, ones, eps)

    def _swiglu(self, prefix: str, normed: torch.Tensor) -> torch.Tensor:
        expert, num_rows = self._swiglus[prefix], normed.shape[0]
        if isinstance(expert, kernels.NativeExpert) and kernels.serves(normed.dtype, num_rows):
            readable = normed if normed.dtype in kernels.HIDDEN_DTYPES else normed.to(torch.float32)
            alone, out = torch.zeros(num_rows, 1, dtype=torch.int64), torch.empty(normed.shape)
            kernels.compute_experts([(0, expert)], readable.contiguous(), alone, out, None)
            return out.to(normed.dtype)
        gate, up, down = (self.tensors[f"{prefix}_{name}"] for name in PROJECTIONS)
        return swiglu(normed, gate, up, down)

    def for_pass(self, keys: torch.Tensor, values: torch.Tensor) -> kernels.PassLayer:
        """What a pass of the kernels needs of this layer: nothing, if they cannot run all of it."""
        c = self.config
        is_known = self.index not in c.dense_layers and not c.shared_intermediate_size
        return kernels.PassLayer(
            self._kernel if is_known else None,
            self._gate_kernel if is_known else None,
            keys,
            values,
            c.residual_multiplier,
            c.swiglu_limit,
        )

    def add(self, residual: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """What the residual stream is behind an attention or MLP that gives ``out``."""
        multiplier = self.config.residual_multiplier
        return residual + (out if multiplier == 1.0 else out * multiplier)


def _gate_kernel(
    config: ModelConfig, tensors: LayerTensors, predictor: Predictor | None
) -> kernels.GateKernel | None:
    """What computes norm and router for a few rows; None where there is no such kernel."""
    dtype, routing = tensors["o_proj"].dtype, config.routing
    if "router" not in tensors or dtype not in kernels.HIDDEN_DTYPES or kernels.library() is None:
        return None
    if routing.scoring not in kernels.GATE_SCORINGS:
        return None
    norm = tensors.wide("post_attention_layernorm")
    assert norm is not None
    return kernels.GateKernel(
        tensors.matrix("router", "router_bias"),
        norm,
        tensors.wide("post_attention_layernorm_bias"),
        tensors.wide("correction_bias"),
        config.rms_norm_eps,
        routing,
        config.num_experts_per_tok,
        predictor,
    )


def _attention_kernel(
    config: ModelConfig, index: int, tensors: LayerTensors
) -> kernels.AttentionKernel | None:
    """What computes ``DecoderLayer.attention`` for a few rows; None without such a kernel."""
    c, dtype = config, tensors["o_proj"].dtype
    if c.latent is not None or dtype not in kernels.HIDDEN_DTYPES or kernels.library() is None:
        return None
    names = ("input_layernorm", "input_layernorm_bias", "q_norm", "k_norm", "sinks")
    return kernels.AttentionKernel(
        [tensors.matrix(f"{p}_proj", f"{p}_proj_bias") for p in "qkvo"],
        [tensors.wide(name) for name in names],
        dtype,
        num_heads=c.num_attention_heads,
        num_kv_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        num_pairs=len(c.rope.inverse_frequencies),
        norm_is_full=c.qk_norm == "full",
        norm_after_rope=c.qk_norm_after_rope,
        interleaved=c.rope.interleaved,
        window=(c.sliding_window or 0) if index in c.sliding_layers else 0,
        eps=c.rms_norm_eps,
        clip=c.clip_qkv or 0.0,
        scaling=c.attention_scaling,
        residual_multiplier=c.residual_multiplier,
    )


class MoETransformer:
    """A mixture-of-experts decoder over dense tensors; experts come from the provider."""

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, torch.Tensor],
        tensor_names: Mapping[str, str],
        dtype: torch.dtype,
        predictors: Mapping[int, Predictor] | None = None,
    ) -> None:
        """Bind tensors to their roles.

        Args:
            config: the model.
            tensors: Hugging Face name -> tensor, at least all resident ones with their scales.
            tensor_names: role -> name template, see ``manifest``.
            dtype: the compute dtype; routers stay in float32.
            predictors: by layer, where there are some.

        Raises:
            KeyError: a tensor is missing.
        """
        self.config = config
        self.dtype = dtype
        common = bind(config, None, tensors, tensor_names, dtype)
        self._common = common
        self._rotary = RotaryEmbedding(config.rope)
        self.layers = [
            DecoderLayer(
                config,
                i,
                i,
                bind(config, i, tensors, tensor_names, dtype),
                (predictors or {}).get(i),
            )
            for i in range(config.num_hidden_layers)
        ]

    def forward(
        self,
        token_ids: Sequence[int],
        kv_cache: KVCache,
        provider: ExpertProvider,
        *,
        rows_per_block: int,
        on_prediction: PredictionObserver | None = None,
    ) -> tuple[list[torch.Tensor], list[Routing]]:
        """Run T tokens behind those in the cache.

        Args:
            token_ids: the T tokens.
            kv_cache: its ``length`` is the position of the first; grows by T.
            provider: where experts come from.
            rows_per_block: 1 to decode or verify, more for a prompt.
            on_prediction: told of later layers, see ``DecoderLayer.mlp``.

        Returns:
            Final hidden states (blocks ``[rows, D]``, normed) and the routing of each routed layer.
        """
        blocks, starts, angles = self.begin(
            token_ids, kv_cache.length, rows_per_block=rows_per_block
        )
        routings: list[Routing] = []
        for layer in self.layers:
            blocks = layer.attend(blocks, starts, angles, kv_cache)
            blocks, routing = layer.mlp(blocks, provider, on_prediction)
            if routing is not None:
                routings.append(routing)
        kv_cache.advance(len(token_ids))
        return self.end(blocks), routings

    def begin(
        self, token_ids: Sequence[int], position: int, *, rows_per_block: int
    ) -> tuple[list[torch.Tensor], list[int], list[Angles]]:
        """Embedded blocks, their positions and angles, for tokens from ``position`` on."""
        ids = torch.tensor(token_ids)
        blocks = [
            embed(rows, self._common, self.config) for rows in torch.split(ids, rows_per_block)
        ]
        starts = [position + i * rows_per_block for i in range(len(blocks))]
        angles = [
            self._rotary.angles(start, len(block), self.dtype)
            for start, block in zip(starts, blocks, strict=True)
        ]
        return blocks, starts, angles

    def end(self, blocks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Final hidden states, normed."""
        eps = self.config.rms_norm_eps
        return _each(lambda rows: normalize(rows, self._common, "norm", eps), blocks)

    def logits(self, blocks: Sequence[torch.Tensor]) -> torch.Tensor:
        """Float32 logits ``[T, V]`` of normed hidden states, block by block."""
        return torch.cat(_each(lambda rows: head_logits(rows, self._common, self.config), blocks))


def _join(blocks: Sequence[torch.Tensor]) -> torch.Tensor:
    """All rows of all blocks."""
    return blocks[0] if len(blocks) == 1 else torch.cat(tuple(blocks))


def _each(
    function: Callable[[torch.Tensor], torch.Tensor], blocks: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """A function of rows, applied block by block.

    A few rows are put together where the kernels are there, which compute each by itself: the
    function may hold nothing else whose rounding depends on the number of rows.
    """
    sizes = [block.shape[0] for block in blocks]
    if len(blocks) > 1 and kernels.serves(blocks[0].dtype, sum(sizes)):
        return list(torch.split(function(_join(blocks)), sizes))
    return [function(block) for block in blocks]


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
    role = "lm_head" if "lm_head" in common else "embed_tokens"
    logits = linear(common, role, hidden).to(torch.float32)
    return logits if config.logits_scaling == 1.0 else logits / config.logits_scaling


def bind(
    config: ModelConfig,
    layer: int | None,
    tensors: Mapping[str, torch.Tensor],
    tensor_names: Mapping[str, str],
    dtype: torch.dtype,
) -> LayerTensors:
    """Role -> tensor of one layer (or of no layer) in the compute dtype, routing in float32."""
    bound = {}
    for role in dense_shapes(config, layer):
        name = tensor_names[role].format(layer=layer)
        stored: torch.Tensor | Fp8Matrix = tensors[name]
        scales = tensors.get(name + FP8_SCALE_SUFFIX)
        if scales is not None and config.fp8_block_size is not None:
            stored = Fp8Matrix(tensors[name], scales, config.fp8_block_size)
        bound[role] = stored.to(torch.float32 if role in FLOAT32_ROLES else dtype)
    return LayerTensors(bound)
