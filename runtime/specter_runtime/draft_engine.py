"""The draft: the target's own network over what experts there are, run a few tokens ahead.

It shares dense weights and KV cache with the target and leaves its temporary entries behind the
committed ones; the decoder truncates them. An expert serves it in the best form that is resident:
in full if it is in the cache, else by its quantized stand-in, else not at all.

Called by: speculative_decoder.  Next: model, expert_cache.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from specter_runtime.config import SamplingConfig
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.experts import Batch, Expert, ExpertKey, ExpertProvider, Routing
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.sampling import draw, probabilities

RoutingObserver = Callable[[list[Routing]], None]

MIN_PROBABILITY = 0.5
"""Below it, a drafted token is more likely to be rejected than to stand: what its row of the
verification costs is then more likely lost than spent in advance."""

MAX_NEW_SHARE = 0.25
"""Of the experts that a token is routed to, the share that may be new. Where most of a token's
experts are cached, which is where speculation can pay at all, a row that brings in more than a
quarter waits longer for the link than a token decoded without a draft."""


def should_stop(probability: float, num_new_experts: int, num_experts: int) -> bool:
    """Whether verifying a drafted token would cost more than it is likely to give.

    Both must hold, since each alone is harmless: an unlikely token whose experts are there costs a
    row of computation, and a likely one's experts are needed anyway, now or in the next window.

    Args:
        probability: what the draft gives the token.
        num_new_experts: those of its experts that are neither resident nor being read.
        num_experts: all that it is routed to, over all layers.
    """
    return probability < MIN_PROBABILITY and num_new_experts > MAX_NEW_SHARE * num_experts


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


class ResidentDraft:
    """What the cache holds in full, stand-ins for the rest.

    Without stand-ins it costs no memory. What it hands out depends on the state of the cache, hence
    on the timing of reads: it is for greedy decoding, whose output no draft can change.
    """

    def __init__(self, cache: ExpertCache, stand_ins: Mapping[ExpertKey, Expert]) -> None:
        """Serve from ``cache`` without asking it to read anything."""
        self._cache = cache
        self._stand_ins = stand_ins

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield the experts that can be had, all at once; the others are left out."""
        for batch in self._cache.residents(routing):
            served = {expert for expert, _ in batch}
            others = [expert for expert in routing.expert_ids() if expert not in served]
            found = [(e, self._stand_ins.get(ExpertKey(routing.layer, e))) for e in others]
            yield [*batch, *((expert, form) for expert, form in found if form is not None)]


class SelfDrafter:
    """Drafts with the target's own network over other experts."""

    def __init__(
        self,
        model: MoETransformer,
        provider: ExpertProvider,
        eos_token_ids: Collection[int],
        count_new_experts: Callable[[Sequence[Routing]], int] | None = None,
    ) -> None:
        """Nothing is copied.

        Args:
            model: the target's.
            provider: the draft's experts.
            eos_token_ids: nothing is drafted behind one of these.
            count_new_experts: how many of a token's experts would have to be read. If given, greedy
                drafts stop where ``should_stop`` says so.
        """
        self._model = model
        self._provider = provider
        self._eos_token_ids = eos_token_ids
        self._count_new_experts = count_new_experts

    def propose(
        self,
        last_token_id: int,
        num_draft_tokens: int,
        kv_cache: KVCache,
        sampling: SamplingConfig,
        generator: torch.Generator,
        on_routings: RoutingObserver,
    ) -> Draft:
        """See ``Drafter.propose``.

        Ends early behind an end-of-sequence token, and before a token that is not worth verifying:
        its routing is known only when it has been run, so that a pass is lost on it, but no reads.
        """
        token_ids: list[int] = []
        probs: list[torch.Tensor] = []
        token, probability = last_token_id, 1.0
        while len(token_ids) < num_draft_tokens:
            blocks, routings = self._model.forward(
                [token], kv_cache, self._provider, rows_per_block=1
            )
            if token_ids and self._is_not_worth_it(probability, routings):
                token_ids.pop()
                break
            on_routings(routings)
            logits = self._model.logits(blocks)  # [1, V]
            if sampling.is_greedy:
                token = int(logits.argmax())
                if self._count_new_experts is not None:
                    probability = float(logits.softmax(dim=-1)[0, token])
            else:
                probs.append(probabilities(logits, sampling)[0])
                uniform = float(torch.rand((), dtype=torch.float64, generator=generator))
                token = draw(probs[-1], uniform)
            token_ids.append(token)
            if token in self._eos_token_ids:
                break
        return Draft(token_ids, torch.stack(probs) if probs else None)

    def _is_not_worth_it(self, probability: float, routings: Sequence[Routing]) -> bool:
        """Whether to leave a token out; never when sampling, which leaves its probability at 1.

        Where a draft ends must not depend on what happens to be cached there: the text of a seed
        would.
        """
        if self._count_new_experts is None:
            return False
        num_experts = sum(len(routing.expert_ids()) for routing in routings)
        return should_stop(probability, self._count_new_experts(routings), num_experts)
