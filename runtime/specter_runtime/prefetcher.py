"""From the draft's routing to reads: what the window will need, within a byte budget.

Every expert that the draft's routers name is asked for with its layer as deadline; resident ones
are thereby protected until verification has passed that layer. The cache reads in deadline order.
At most ``budget_bytes`` are asked for in a window, so that a window whose experts outgrow the slots
does not evict what it is about to use.

Called by: speculative_decoder.  Next: expert_cache.
"""

from __future__ import annotations

from collections.abc import Iterable

from specter_runtime.expert_cache import ExpertCache
from specter_runtime.experts import ExpertKey, Routing


class Prefetcher:
    """Feeds one cache from one draft, window by window."""

    def __init__(self, cache: ExpertCache, budget_bytes: int, expert_bytes: int) -> None:
        """Serve ``cache``; queue at most ``budget_bytes`` of reads a window."""
        self._cache = cache
        self._max_reads = budget_bytes // expert_bytes
        self._num_reads = 0

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
        """Ask for the experts that the next layer will probably need."""
        for expert in routing.expert_ids():
            self._cache.prefetch(ExpertKey(routing.layer, expert), deadline=routing.layer)

    def end_window(self) -> None:
        """Forget what was asked for; reads in flight still arrive."""
        self._cache.cancel_prefetches()
        self._num_reads = 0
