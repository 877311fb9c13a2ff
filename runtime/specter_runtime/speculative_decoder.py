"""The only loop: draft, prefetch, verify, accept, commit.

    last token ──> drafter.propose ──> drafted tokens ──> target.forward (K + 1 rows)
                        │ routings                              │ logits
                        v                                       v
                  prefetcher.observe ──> expert cache      acceptance ──> committed tokens
                                                                │
                                              kv_cache.truncate to the committed prefix

How far the draft runs ahead, the governor says before each window, and is told afterwards what the
window took. With 0 draft tokens the same loop is plain decoding with the same cache. The decoder
speaks token ids only.

Called by: session.  Next: governor, draft_engine, prefetcher, model, acceptance.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch

from specter_runtime.acceptance import Acceptance, accept_greedy, rejection_sample
from specter_runtime.config import GenerationLimits, SamplingConfig
from specter_runtime.draft_engine import Draft, Drafter
from specter_runtime.errors import SpecterError
from specter_runtime.experts import ExpertProvider, Routing
from specter_runtime.governor import Governor
from specter_runtime.kv_cache import KVCache
from specter_runtime.metrics import DecodeStats
from specter_runtime.model import MoETransformer
from specter_runtime.prefetcher import Prefetcher
from specter_runtime.row_pass import RowPass
from specter_runtime.sampling import draw, probabilities

PROMPT_CHUNK_TOKENS = 256
"""Prompt tokens computed in one block: enough to reuse each expert, little enough to hold."""


class SpeculativeDecoder:
    """Decodes one sequence at a time."""

    def __init__(
        self,
        model: MoETransformer,
        experts: ExpertProvider,
        drafter: Drafter,
        prefetcher: Prefetcher | None,
        kv_cache: KVCache,
        governor: Governor,
        sampling: SamplingConfig,
        row_pass: RowPass | None = None,
    ) -> None:
        """Bind the parts.

        Args:
            model: the target's network (and the draft's).
            experts: the target's experts.
            drafter: proposes tokens.
            prefetcher: told of the draft's routing; None moves nothing ahead.
            kv_cache: emptied at each ``generate``.
            governor: says how to look ahead, window by window.
            sampling: how tokens are drawn; unless greedily, the governor's choices must all draft
                the same number of tokens, or the text of a seed would depend on them.
            row_pass: a quicker way for single rows, over the same model, experts and KV cache.
        """
        self._model = model
        self._experts = experts
        self._drafter = drafter
        self._prefetcher = prefetcher
        self._kv_cache = kv_cache
        self._governor = governor
        self._sampling = sampling
        self._row_pass = row_pass
        self._generator = torch.Generator()
        self._last_token_id = 0
        self.stats = DecodeStats()

    def generate(self, prompt_ids: Sequence[int], limits: GenerationLimits) -> Iterator[list[int]]:
        """Yield committed tokens, pass by pass, up to an end token (included) or the limit."""
        self._generator.manual_seed(self._sampling.seed)
        self._kv_cache.truncate(0)
        self.stats = DecodeStats(num_prompt_tokens=len(prompt_ids))
        started = time.perf_counter()
        remaining = limits.max_new_tokens
        token_ids = [self._prefill(prompt_ids)]
        try:
            while True:
                token_ids = _until_end(token_ids[:remaining], limits)
                remaining -= len(token_ids)
                elapsed = time.perf_counter() - started
                self.stats.committed_seconds += [elapsed] * len(token_ids)
                yield token_ids
                if remaining == 0 or token_ids[-1] in limits.eos_token_ids:
                    return
                token_ids = self._governed_step(most_draft_tokens=remaining - 1)
        finally:
            self._end_window()

    def _governed_step(self, most_draft_tokens: int) -> list[int]:
        """One window, run as the governor says; it learns of all but those cut short."""
        way = self._governor.choose()
        num_draft_tokens = min(way.num_draft_tokens, most_draft_tokens)
        started = time.perf_counter()
        token_ids = self.step(num_draft_tokens, predicts=way.predicts)
        if num_draft_tokens == way.num_draft_tokens:
            self._governor.observe(way, time.perf_counter() - started, len(token_ids))
        self.stats.windows_by_lookahead[str(way)] += 1
        return token_ids

    def step(self, num_draft_tokens: int, *, predicts: bool = False) -> list[int]:
        """One window: returns the committed tokens, at least one.

        Args:
            num_draft_tokens: how many at most.
            predicts: whether, if none are drafted, predictors look ahead instead.
        """
        committed = self._kv_cache.length
        draft = self._propose(num_draft_tokens)
        self._kv_cache.truncate(committed)
        blocks = self._verify(draft.token_ids, self._prefetcher if predicts else None)
        self._end_window()
        acceptance = self._accept(draft, self._model.logits(blocks))
        self._kv_cache.truncate(committed + 1 + acceptance.num_accepted)
        self._last_token_id = acceptance.next_token_id
        self.stats.num_windows += 1
        self.stats.num_drafted += len(draft.token_ids)
        self.stats.num_accepted += acceptance.num_accepted
        return [*draft.token_ids[: acceptance.num_accepted], acceptance.next_token_id]

    def _verify(
        self, token_ids: Sequence[int], prefetcher: Prefetcher | None
    ) -> list[torch.Tensor]:
        """Run the last token and those drafted behind it; where there are none, predict."""
        if token_ids:
            prefetcher = None
        if prefetcher is not None:
            prefetcher.begin_pass()
        if self._row_pass is not None and not token_ids:
            blocks = self._row_pass.forward(self._last_token_id, prefetcher)
        else:
            blocks, _ = self._model.forward(
                [self._last_token_id, *token_ids],
                self._kv_cache,
                self._experts,
                rows_per_block=1,
                on_prediction=None if prefetcher is None else prefetcher.observe_prediction,
            )
        if prefetcher is not None:
            prefetcher.end_pass(len(self._model.config.moe_layers))
        return blocks

    def _prefill(self, prompt_ids: Sequence[int]) -> int:
        """Run the prompt, chunk by chunk; returns the first new token."""
        for start in range(0, len(prompt_ids), PROMPT_CHUNK_TOKENS):
            chunk = prompt_ids[start : start + PROMPT_CHUNK_TOKENS]
            blocks, _ = self._model.forward(
                chunk, self._kv_cache, self._experts, rows_per_block=PROMPT_CHUNK_TOKENS
            )
        logits = self._model.logits([blocks[-1][-1:]])
        self._last_token_id = self._accept(Draft([], None), logits).next_token_id
        return self._last_token_id

    def _propose(self, num_draft_tokens: int) -> Draft:
        if num_draft_tokens == 0:
            return Draft([], None)
        started = time.perf_counter()
        draft = self._drafter.propose(
            self._last_token_id,
            num_draft_tokens,
            self._kv_cache,
            self._sampling,
            self._generator,
            self._on_routings,
        )
        self.stats.draft_seconds += time.perf_counter() - started
        return draft

    def _on_routings(self, routings: list[Routing]) -> None:
        if self._prefetcher is not None:
            self._prefetcher.observe(routings)

    def _end_window(self) -> None:
        if self._prefetcher is not None:
            self._prefetcher.end_window()

    def _accept(
        self,
        draft: Draft,
        logits: torch.Tensor,  # [n + 1, V]
    ) -> Acceptance:
        if not torch.isfinite(logits[0]).all():
            raise SpecterError(
                f"the model's logits are not finite: it does not compute in {self._model.dtype}; "
                "choose another dtype"
            )
        if self._sampling.is_greedy:
            return accept_greedy(draft.token_ids, logits.argmax(dim=-1).tolist())
        target_probs = probabilities(logits, self._sampling)
        shape = (len(draft.token_ids) + 1,)
        uniforms = torch.rand(shape, dtype=torch.float64, generator=self._generator).tolist()
        if draft.probs is None:
            return Acceptance(0, draw(target_probs[0], uniforms[0]))
        return rejection_sample(draft.token_ids, draft.probs, target_probs, uniforms)


def _until_end(token_ids: list[int], limits: GenerationLimits) -> list[int]:
    """The tokens up to the first end token, included."""
    for i, token in enumerate(token_ids):
        if token in limits.eos_token_ids:
            return token_ids[: i + 1]
    return token_ids
