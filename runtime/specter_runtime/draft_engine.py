"""The draft: the target's own network over quantized experts, run a few tokens ahead.

It shares dense weights and KV cache with the target and leaves its temporary entries behind the
committed ones; the decoder truncates them.

Called by: speculative_decoder.  Next: model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import torch

from specter_runtime.config import SamplingConfig
from specter_runtime.experts import ExpertProvider, Routing
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.sampling import draw, probabilities

RoutingObserver = Callable[[list[Routing]], None]


@dataclass(frozen=True, slots=True)
class Draft:
    """Proposed tokens and, when sampling, the distributions ``[n, V]`` they were drawn from."""

    token_ids: list[int]
    probs: torch.Tensor | None


class Drafter(Protocol):
    """Proposes tokens behind the committed ones."""

    def propose(
        self,
        last_token_id: int,
        num_draft_tokens: int,
        kv_cache: KVCache,
        sampling: SamplingConfig,
        generator: torch.Generator,
        on_routings: RoutingObserver,
    ) -> Draft:
        """Draft up to ``num_draft_tokens`` tokens after ``last_token_id``.

        Args:
            last_token_id: the last committed token, not yet in the cache.
            num_draft_tokens: how many at most.
            kv_cache: committed entries; temporary ones may be left behind them.
            sampling: how tokens are drawn; the same for draft and target.
            generator: source of random numbers when sampling.
            on_routings: told each drafted token's routing as soon as it is known.
        """
        ...


class SelfDrafter:
    """Drafts with the target's own network over other experts."""

    def __init__(
        self, model: MoETransformer, provider: ExpertProvider, eos_token_ids: Collection[int]
    ) -> None:
        """Nothing is copied: ``model`` is the target's."""
        self._model = model
        self._provider = provider
        self._eos_token_ids = eos_token_ids

    def propose(
        self,
        last_token_id: int,
        num_draft_tokens: int,
        kv_cache: KVCache,
        sampling: SamplingConfig,
        generator: torch.Generator,
        on_routings: RoutingObserver,
    ) -> Draft:
        """See ``Drafter.propose``; ends early behind an end-of-sequence token."""
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        token = last_token_id
        while len(token_ids) < num_draft_tokens:
            blocks, routings = self._model.forward(
                [token], kv_cache, self._provider, rows_per_block=1
            )
            on_routings(routings)
            logits = self._model.logits(blocks)  # [1, V]
            if sampling.is_greedy:
                token = int(logits.argmax())
            else:
                probs.append(probabilities(logits, sampling)[0])
                uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
                token = draw(probs[-1], uniform)
            token_ids.append(token)
            if token in self._eos_token_ids:
                break
        return Draft(token_ids, torch.stack(probs) if probs else None)
