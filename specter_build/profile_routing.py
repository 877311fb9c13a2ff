"""Step: run the calibration tokens through one layer, as the target and as the draft.

Both streams see the same tokens; each keeps its own hidden states and its own keys and values, from
the first layer to the last. That is the draft at its worst: at run time it decodes behind the
target's keys and values and drifts for a few tokens only. Computed in float32 by the runtime's own
layers; routing of the target is what the runtime would choose.

Called by: pipeline.  Next: specter_runtime.model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from specter_runtime.config import ModelConfig
from specter_runtime.experts import ExpertProvider, Routing
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import RotaryEmbedding, normalize
from specter_runtime.model import DecoderLayer, bind, embed, head_logits

COMPUTE_DTYPE = torch.float32
PLAIN_DTYPE = torch.bfloat16
"""Of plain inputs, some of which are kept while later layers run."""
ROUTER_PROBS_DTYPE = torch.float16
"""Of the routers' probabilities, which are kept for replays."""
HEAD_ROWS = 512
"""Rows of logits held at a time."""


@dataclass(frozen=True, slots=True)
class HeadComparison:
    """Next-token predictions of target and draft at N x T positions.

    Attributes:
        agrees: bool ``[N, T]``: same argmax.
        overlap: float32 ``[N, T]``: sum over tokens of min(target, draft) probability, which is the
            acceptance rate of rejection sampling at temperature 1 (arXiv 2211.17192, theorem 3.5).
        confidence: float32 ``[N, T]``: the draft's probability of its argmax.
    """

    agrees: torch.Tensor
    overlap: torch.Tensor
    confidence: torch.Tensor


class LayerPass(NamedTuple):
    """What one layer makes of N x T rows.

    Attributes:
        hidden: ``[N, T, D]`` behind the layer.
        mlp_input: ``[N * T, D]``: what enters the router and the experts.
        plain_input: the same without the norm's weights, bfloat16: what predictors are fitted to.
        routing: of all rows; None if the layer is dense.
    """

    hidden: torch.Tensor
    mlp_input: torch.Tensor
    plain_input: torch.Tensor
    routing: Routing | None


class LayerRunner:
    """Runs single layers over calibration sequences, reusing one sequence's KV cache."""

    def __init__(
        self, config: ModelConfig, tensor_names: Mapping[str, str], sequence_length: int
    ) -> None:
        """Prepare for sequences of ``sequence_length`` tokens."""
        self._config = config
        self._names = tensor_names
        self._angles = RotaryEmbedding(config.rope).angles(0, sequence_length, COMPUTE_DTYPE)
        self._kv_cache = KVCache(config, sequence_length, COMPUTE_DTYPE, num_layers=1)

    def embed(self, token_ids: torch.Tensor, common: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Hidden states ``[N, T, D]`` of token ids ``[N, T]``."""
        return embed(token_ids, self._bind_common(common), self._config)

    def bind_layer(self, index: int, tensors: Mapping[str, torch.Tensor]) -> DecoderLayer:
        """A layer over its dense tensors."""
        bound = bind(self._config, index, tensors, self._names, COMPUTE_DTYPE)
        return DecoderLayer(self._config, index, 0, bound)

    def run(
        self,
        layer: DecoderLayer,
        hidden: torch.Tensor,  # [N, T, D]
        provider: ExpertProvider,
    ) -> LayerPass:
        """Run all sequences through a layer."""
        attended = torch.stack(
            [layer.attention(x, 0, self._angles, self._kv_cache) for x in hidden]
        ).flatten(0, 1)
        plain = layer.plain_input(attended).to(PLAIN_DTYPE)
        rows, routing = layer.mlp([attended], provider)
        if routing is not None and routing.router_probs is not None:  # is kept to the end
            routing = replace(routing, router_probs=routing.router_probs.to(ROUTER_PROBS_DTYPE))
        return LayerPass(rows[0].view(hidden.shape), layer.mlp_input(attended), plain, routing)

    def compare_heads(
        self,
        target: torch.Tensor,  # [N, T, D]
        draft: torch.Tensor,  # [N, T, D]
        common: Mapping[str, torch.Tensor],
    ) -> HeadComparison:
        """Apply the final norm and the head to both streams."""
        bound, config = self._bind_common(common), self._config
        agrees, overlaps, confidences = [], [], []
        streams = (torch.split(stream.flatten(0, 1), HEAD_ROWS) for stream in (target, draft))
        for rows in zip(*streams, strict=True):
            target_logits, draft_logits = (
                head_logits(normalize(x, bound, "norm", config.rms_norm_eps), bound, config)
                for x in rows
            )
            agrees.append(target_logits.argmax(-1) == draft_logits.argmax(-1))
            draft_probs = draft_logits.softmax(-1)
            overlaps.append(torch.minimum(target_logits.softmax(-1), draft_probs).sum(-1))
            confidences.append(draft_probs.amax(-1))
        found = (torch.cat(rows).view(target.shape[:2]) for rows in (agrees, overlaps, confidences))
        return HeadComparison(*found)

    def _bind_common(self, common: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return bind(self._config, None, common, self._names, COMPUTE_DTYPE)
