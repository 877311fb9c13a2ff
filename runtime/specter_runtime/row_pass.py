"""One row through all layers, in as few calls as the cache allows.

Decoding token by token, the kernels run layer after layer by themselves for as long as the experts
that are chosen are in the cache. They come back to have absent experts read, which they then wait
for, and for layers of a kind that they do not know. While a read is waited for, there is time to
look at what was predicted for later layers. Every number is the one that
``MoETransformer.forward`` finds for a block of one row.

Called by: speculative_decoder.  Next: kernels, model, expert_cache, prefetcher.
"""

from __future__ import annotations

from typing import Self

import torch

from specter_runtime import kernels
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.experts import Routing
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import Angles
from specter_runtime.model import MoETransformer
from specter_runtime.moe import mix_experts
from specter_runtime.prefetcher import Prefetcher

PATIENCE_SECONDS = 0.05
"""How long the kernels wait for a read before it is asked how it goes; most take a tenth of it."""


class RowPass:
    """The way of single rows through one model, its KV cache and its expert cache."""

    def __init__(
        self,
        model: MoETransformer,
        kv_cache: KVCache,
        cache: ExpertCache,
        residency: kernels.Residency,
    ) -> None:
        """Bind the parts.

        Args:
            model: of a dtype of ``kernels.HIDDEN_DTYPES``.
            kv_cache: of the same dtype.
            cache: the target's experts.
            residency: the same experts as the kernels see them, kept by ``cache``.
        """
        config = model.config
        self._model = model
        self._kv_cache = kv_cache
        self._cache = cache
        self._kernel = kernels.PassKernel(
            [layer.for_pass(*kv_cache.room(layer.cache_layer, 0)) for layer in model.layers],
            residency,
            config.num_experts_per_tok,
            config.hidden_size,
            model.dtype,
        )

    @classmethod
    def make(
        cls,
        model: MoETransformer,
        kv_cache: KVCache,
        cache: ExpertCache,
        residency: kernels.Residency | None,
    ) -> Self | None:
        """One, where there are kernels for it; else None."""
        if residency is None or model.dtype not in kernels.HIDDEN_DTYPES:
            return None
        return cls(model, kv_cache, cache, residency)

    def forward(self, token_id: int, prefetcher: Prefetcher | None) -> list[torch.Tensor]:
        """Run one token behind those in the KV cache; see ``MoETransformer.forward``.

        Args:
            token_id: the token.
            prefetcher: told of predictions where there is a wait; None: nobody predicts.
        """
        model, kernel, position = self._model, self._kernel, self._kv_cache.length
        self._kv_cache.room(0, position + 1)  # is there any?
        ((embedded,), _, (angles,)) = model.begin([token_id], position, rows_per_block=1)
        hidden = kernel.hidden.copy_(embedded)
        first, unseen, is_routed = 0, 0, False
        while first < len(model.layers):
            stopped, is_absent, waited = kernel.run(
                first,
                position,
                *angles,
                is_routed=is_routed,
                predicts=prefetcher is not None,
                patience_seconds=PATIENCE_SECONDS if is_routed else 0.0,
            )
            used = slice(unseen, stopped)
            self._cache.observe_used(
                unseen, kernel.selected_experts[used], kernel.router_probs[used], waited
            )
            is_overdue = is_routed and stopped == first
            is_routed = is_absent and self._cache.overlap and not is_overdue
            if is_routed:
                first, unseen = stopped, stopped + 1
                self._cache.hold(self._routing(stopped))
                self._look_ahead(stopped, prefetcher)
            else:
                first = unseen = stopped + 1
                if is_absent:
                    hidden.copy_(self._run_experts(stopped))
                elif stopped < len(model.layers):
                    hidden.copy_(self._run_layer(stopped, angles, prefetcher))
        self._kv_cache.advance(1)
        return model.end([hidden])

    def _run_experts(self, index: int) -> torch.Tensor:
        """What is behind a layer whose gate has been run."""
        kernel, limit = self._kernel, self._model.config.swiglu_limit
        (out,) = mix_experts([kernel.normed], [self._routing(index)], self._cache, limit)
        return self._model.layers[index].add(kernel.hidden, out)

    def _run_layer(self, index: int, angles: Angles, prefetcher: Prefetcher | None) -> torch.Tensor:
        """What is behind a layer of a kind that the kernels do not know."""
        layer, position = self._model.layers[index], self._kv_cache.length
        blocks = layer.attend([self._kernel.hidden], [position], [angles], self._kv_cache)
        observe = None if prefetcher is None else prefetcher.observe_prediction
        ((row,), _) = layer.mlp(blocks, self._cache, observe)
        return row

    def _routing(self, layer: int) -> Routing:
        kernel, own = self._kernel, slice(layer, layer + 1)
        return Routing(
            layer,
            kernel.selected_experts[own],
            kernel.routing_weights[own],
            kernel.router_probs[own],
        )

    def _look_ahead(self, layer: int, prefetcher: Prefetcher | None) -> None:
        predictor = self._model.layers[layer].predictor
        if prefetcher is not None and predictor is not None:
            own = layer, slice(len(predictor.layers))
            likely, found = self._kernel.likely[own], self._kernel.probabilities[own]
            prefetcher.observe_prediction(predictor.name(likely, found))
