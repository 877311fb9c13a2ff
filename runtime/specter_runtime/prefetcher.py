"""From what is foreseen to reads: what the window, or the next layers, will need.

Every expert that the draft's routers name is asked for with its layer as deadline; resident ones
are thereby protected until verification has passed that layer. The cache reads in deadline order.
At most ``budget_bytes`` are asked for in a window, so that a window whose experts outgrow the slots
does not evict what it is about to use.

Where nothing is drafted, a predictor may speak of the next layers. It errs, and a read in vain
keeps the link from what is needed. So only what is likely enough to be worth its read is read.

Called by: speculative_decoder, row_pass, simulator.  Next: expert_cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Protocol

from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.metrics import CacheStats
from specter_runtime.predictor import Prediction

NEVER = 2.0
"""More than any probability."""


SHARED = 0.4
"""Of the time of a read, what it takes from computing that goes on meanwhile: memory and processor
are shared. Measured on a virtual machine of two cores: 0.37, 0.3 for arithmetic without memory."""

MEMORY, PRIOR_WEIGHT = 0.98, 20.0
"""What counts of right predictions keep from pass to pass, and the count of right ones that they
begin with and, without reads, go back to."""


@dataclass(frozen=True, slots=True)
class Pace:
    """What the last passes took.

    Attributes:
        lead_seconds: from one routed layer to the next.
        wait_seconds: for an absent expert, from its demand on.
        read_seconds: of one expert.
        link_share: of the time in which the link was in use, 0 to 1.
    """

    lead_seconds: float
    wait_seconds: float
    read_seconds: float
    link_share: float


def least_probability(num_ahead: int, pace: Pace) -> float:
    """How likely an absent expert must be needed, for a read ahead of it to be worth it.

    If it is needed, the wait for it is shorter by the time by which the read began earlier, at most
    by the whole wait; ``SHARED`` of that is lost, since computing goes on meanwhile. If not, the
    read takes ``SHARED`` of its time from computing, and all of it from a demand that comes
    meanwhile, which one does with about the probability with which the link is in use. With p the
    probability, it pays if
    ``p (1 - SHARED) min(lead, wait) > (1 - p) (SHARED + link_share) read``.

    Args:
        num_ahead: how many layers before it is needed.
        pace: of the last passes.

    Returns:
        The p from which it pays; above 1 if it never does.
    """
    gain = (1 - SHARED) * min(num_ahead * pace.lead_seconds, pace.wait_seconds)
    loss = (SHARED + pace.link_share) * pace.read_seconds
    return loss / (gain + loss) if gain > 0 else NEVER


def measure_pace(stats: CacheStats, elapsed_seconds: float, num_layers: int, last: Pace) -> Pace:
    """The pace of a pass through ``num_layers`` from its counters; ``last`` where it had no reads.

    New measurements count a fifth, so that one slow read does not decide.
    """
    num_waits = stats.misses + stats.late_hits
    found = Pace(
        elapsed_seconds / num_layers,
        stats.stall_seconds / num_waits if num_waits else last.wait_seconds,
        stats.link_busy_seconds / stats.loads if stats.loads else last.read_seconds,
        min(1.0, stats.link_busy_seconds / elapsed_seconds),
    )
    pairs = zip(astuple(last), astuple(found), strict=True)
    return Pace(*(0.8 * before + 0.2 * now for before, now in pairs))


class PrefetchedCache(Protocol):
    """What reads ahead: the expert cache, or the simulator's."""

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        """See ``ExpertCache.prefetch``."""
        ...

    def cancel_prefetches(self) -> None:
        """See ``ExpertCache.cancel_prefetches``."""
        ...

    def stats(self) -> CacheStats:
        """See ``ExpertCache.stats``."""
        ...


class Prefetcher:
    """Feeds one cache from one draft, window by window, or from routers, layer by layer."""

    def __init__(
        self,
        cache: PrefetchedCache,
        budget_bytes: int,
        expert_bytes: int,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Serve ``cache``; queue at most ``budget_bytes`` of reads a window."""
        self._cache = cache
        self._clock = clock
        self._max_reads = budget_bytes // expert_bytes
        self._num_reads = 0
        self._begun: tuple[float, CacheStats] | None = None  # the pass: when, with what counters
        self._pace = Pace(0.0, 0.0, 0.0, 0.0)  # nothing is worth it until something was waited for
        self._expected = self._useful = PRIOR_WEIGHT  # of the reads that predictions asked for
        self._promised = 0.0  # what has been added to the former in this pass

    def observe(self, routings: Iterable[Routing]) -> None:
        """Ask for all experts that one drafted token was routed to."""
        for routing in routings:
            for expert in routing.expert_ids():
                if self._num_reads >= self._max_reads:
                    return
                self._num_reads += self._cache.prefetch(
                    ExpertKey(routing.layer, expert), deadline=routing.layer
                )

    def begin_pass(self) -> None:
        """A pass begins for which there will be predictions."""
        self._begun = self._clock(), self._cache.stats()

    def end_pass(self, num_layers: int) -> None:
        """It has ended: look at the clock, and at what it waited for in ``num_layers`` layers."""
        assert self._begun is not None, "begin_pass comes first"
        started, before = self._begun
        recent = self._cache.stats().since(before)
        self._pace = measure_pace(recent, self._clock() - started, num_layers, self._pace)
        prior = (1 - MEMORY) * PRIOR_WEIGHT
        self._useful = MEMORY * self._useful + prior + recent.useful_prefetches
        self._expected = MEMORY * self._expected + prior + self._promised
        self._promised = 0.0

    def least_probabilities(self, most_ahead: int) -> list[float]:
        """From which probability an expert is worth a read, 1 to ``most_ahead`` layers ahead.

        Where fewer of the reads have been useful than the predictor expected, as much more likely.
        """
        trust = min(1.0, self._useful / self._expected)
        return [least_probability(i, self._pace) / trust for i in range(1, most_ahead + 1)]

    def observe_prediction(self, predictions: Sequence[Prediction]) -> None:
        """Ask for those experts of later layers that are worth it; residents are protected."""
        least = self.least_probabilities(len(predictions))
        for layer, num_ahead, likely in predictions:
            for expert, probability in likely:
                if probability >= least[num_ahead - 1] and self._num_reads < self._max_reads:
                    is_asked = self._cache.prefetch(ExpertKey(layer, expert), deadline=layer)
                    self._num_reads += is_asked
                    self._promised += probability * is_asked

    def end_window(self) -> None:
        """Forget what was asked for; reads in flight still arrive."""
        self._cache.cancel_prefetches()
        self._num_reads = 0
