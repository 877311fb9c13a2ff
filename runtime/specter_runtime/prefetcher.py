"""From what is foreseen to reads: what the window, or the next layer, will need.

Every expert that the draft's routers name is asked for with its layer as deadline; resident ones
are thereby protected until verification has passed that layer. The cache reads in deadline order.
At most ``budget_bytes`` are asked for in a window, so that a window whose experts outgrow the slots
does not evict what it is about to use.

Where nothing is drafted, the next layer's router can be asked what it would choose now. It errs,
the more the lower it ranks an expert, and a read in vain keeps the link from what is needed. So it
is counted how often each rank was right, and only what is worth its read is read.

Called by: speculative_decoder.  Next: expert_cache.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass

from specter_runtime.expert_cache import ExpertCache
from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.metrics import CacheStats

MEMORY = 0.995
"""What a count of right predictions keeps from one prediction to the next."""

PRIOR_PRECISION, PRIOR_WEIGHT = 0.7, 20.0
"""Taken for every rank before anything was counted, and how many predictions that stands for."""


class RankPrecision:
    """How often an absent expert that a router ranked so high was needed, lately."""

    def __init__(self) -> None:
        self._right: dict[int, float] = {}
        self._all: dict[int, float] = {}

    def observe(self, rank: int, was_needed: bool) -> None:
        """Count one prediction."""
        right = self._right.get(rank, PRIOR_PRECISION * PRIOR_WEIGHT)
        self._right[rank] = MEMORY * right + was_needed
        self._all[rank] = MEMORY * self._all.get(rank, PRIOR_WEIGHT) + 1

    def of(self, rank: int) -> float:
        """The share of those of this rank that were needed."""
        return self._right[rank] / self._all[rank] if rank in self._all else PRIOR_PRECISION


@dataclass(frozen=True, slots=True)
class Pace:
    """What the last passes took.

    Attributes:
        lead_seconds: from a prediction to the demand that it foresees.
        wait_seconds: for an absent expert, from its demand on.
        read_seconds: of one expert.
        link_share: of the time in which the link was in use, 0 to 1.
    """

    lead_seconds: float
    wait_seconds: float
    read_seconds: float
    link_share: float


def is_worth_reading(precision: float, pace: Pace) -> bool:
    """Whether to read an expert ahead that will be needed with the probability ``precision``.

    If it is needed, the wait for it is shorter by the time by which the read began earlier, at most
    by the whole wait. If not, a demand that comes meanwhile waits for the link for as long as a
    read takes; one does with about the probability with which the link is in use. It pays if
    ``p min(lead, wait) > (1 - p) read share``.
    """
    gain = precision * min(pace.lead_seconds, pace.wait_seconds)
    return gain > (1 - precision) * pace.read_seconds * pace.link_share


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


class Prefetcher:
    """Feeds one cache from one draft, window by window, or from routers, layer by layer."""

    def __init__(self, cache: ExpertCache, budget_bytes: int, expert_bytes: int) -> None:
        """Serve ``cache``; queue at most ``budget_bytes`` of reads a window."""
        self._cache = cache
        self._max_reads = budget_bytes // expert_bytes
        self._num_reads = 0
        self._precision = RankPrecision()
        self._predicted: list[tuple[int, ExpertKey]] = []  # rank; what was not resident
        self._stats = cache.stats()  # at the first prediction of the pass
        self._begun_seconds = 0.0  # of the pass, at its first prediction
        self._num_predictions = 0  # in this pass
        self._pace = Pace(0.0, 0.0, 0.0, 0.0)  # nothing is worth it until something was waited for

    def observe(self, routings: Iterable[Routing]) -> None:
        """Ask for all experts that one drafted token was routed to."""
        for routing in routings:
            for expert in routing.expert_ids():
                if self._num_reads >= self._max_reads:
                    return
                self._num_reads += self._cache.prefetch(
                    ExpertKey(routing.layer, expert), deadline=routing.layer
                )

    def observe_prediction(self, routing: Routing) -> None:
        """Ask for those experts of the next layer that are worth it, and protect residents."""
        if not self._num_predictions:
            self._begun_seconds = time.perf_counter()
            self._stats = self._cache.stats()  # passes without predictions do not count
        self._num_predictions += 1
        for row in routing.selected_experts.tolist():
            for rank, expert in enumerate(row):
                key = ExpertKey(routing.layer, expert)
                is_resident = self._cache.is_resident(key)
                if not is_resident:
                    self._predicted.append((rank, key))
                if is_resident or is_worth_reading(self._precision.of(rank), self._pace):
                    self._cache.prefetch(key, deadline=routing.layer)

    def learn(self, routings: Sequence[Routing]) -> None:
        """Compare what was predicted in a pass with what it needed, and look at the clock."""
        if not self._num_predictions:
            return
        needed = {ExpertKey(r.layer, expert) for r in routings for expert in r.expert_ids()}
        for rank, key in self._predicted:
            self._precision.observe(rank, key in needed)
        elapsed = time.perf_counter() - self._begun_seconds
        recent = self._cache.stats().since(self._stats)
        self._pace = measure_pace(recent, elapsed, self._num_predictions, self._pace)

    def end_window(self) -> None:
        """Forget what was asked for; reads in flight still arrive."""
        self._cache.cancel_prefetches()
        self._num_reads = self._num_predictions = 0
        self._predicted.clear()
