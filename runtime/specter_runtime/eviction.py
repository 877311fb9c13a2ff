"""Which resident expert gives way: pure, no slots, no clocks.

Belady's rule as far as the lookahead can see: an expert that the current window still needs has a
known next use (its layer: verification walks the layers in order), all others have none. Among
those without, the one goes that is worth least to keep. What it is worth, a policy says:

* ``ReuseValues``: how much the routers have wanted it of late, chosen or not;
* ``LeastRecentlyUsed``: when it was used last.

Called by: slot_table, session, simulator, specter_build.plan_placement.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specter_runtime.config import Eviction
from specter_runtime.experts import ExpertKey, Routing

UNKNOWN = -2
"""In place of a next use: before ``NOW``, which is before layer 0."""

DECAY = 0.9
"""What a value keeps from token to token: about ten tokens back, an expert is half forgotten."""

PROB_WEIGHT = 2.0
"""What a router's probability counts beside having been chosen, which counts 1."""


class EvictionPolicy(Protocol):
    """What it is worth to keep each expert."""

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """``[L, E]``, for each decoder layer and expert; the least goes first."""
        ...

    def observe(self, routing: Routing) -> None:
        """Learn what a layer's experts were asked for; rows are tokens in their order."""
        ...

    def observe_token(
        self, first_layer: int, selected: npt.NDArray[np.int64], probs: npt.NDArray[np.float32]
    ) -> None:
        """Learn what one token asked of consecutive layers: ``[L, K]`` and ``[L, E]``."""
        ...


class ReuseValues:
    """A decaying average of what the router made of each expert, token by token.

    With every token that a layer routes, ``v <- DECAY v + (1 - DECAY)(PROB_WEIGHT p + c)``, where p
    is the router's probability and c is 1 if the expert was chosen. An expert that narrowly missed
    being chosen is likely to be chosen soon, which recency and frequency of use do not see. Compare
    the score-based cache of arXiv 2504.05897, section 4.3, which averages the best few scores.
    """

    def __init__(
        self, num_layers: int, num_experts: int, hottest_first: Iterable[ExpertKey]
    ) -> None:
        """Begin with what calibration knows.

        Args:
            num_layers: decoder layers.
            num_experts: routed experts of a layer.
            hottest_first: experts by how often calibration used them; their values begin as if
                use fell off evenly from twice the mean to nothing.
        """
        self._values = np.zeros((num_layers, num_experts))
        ranks = _ranks(hottest_first, num_layers, num_experts)
        self._values += 2 * (PROB_WEIGHT + 1) / num_experts * (1 - ranks / ranks.size)

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """See ``EvictionPolicy``."""
        return self._values

    def observe(self, routing: Routing) -> None:
        """See ``EvictionPolicy``."""
        own = self._values[routing.layer]
        selected = routing.selected_experts.numpy()  # [T, K]
        num_tokens = len(selected)
        weights = (1 - DECAY) * DECAY ** np.arange(num_tokens - 1, -1, -1)  # [T]
        own *= DECAY**num_tokens
        if routing.router_probs is not None:
            own += PROB_WEIGHT * (weights @ routing.router_probs.numpy())
        np.add.at(own, selected, np.broadcast_to(weights[:, None], selected.shape))

    def observe_token(
        self, first_layer: int, selected: npt.NDArray[np.int64], probs: npt.NDArray[np.float32]
    ) -> None:
        """See ``EvictionPolicy``."""
        own = self._values[first_layer : first_layer + len(selected)]
        own *= DECAY
        own += ((1 - DECAY) * PROB_WEIGHT) * probs
        own[np.arange(len(selected))[:, None], selected] += 1 - DECAY


class LeastRecentlyUsed:
    """When each expert was used last, in calls of ``observe``."""

    def __init__(
        self, num_layers: int, num_experts: int, hottest_first: Iterable[ExpertKey]
    ) -> None:
        """Begin with the order of ``hottest_first``, the hottest as if used last."""
        self._values = -_ranks(hottest_first, num_layers, num_experts)
        self._now = 0

    @property
    def values(self) -> npt.NDArray[np.float64]:
        """See ``EvictionPolicy``."""
        return self._values

    def observe(self, routing: Routing) -> None:
        """See ``EvictionPolicy``."""
        self._now += 1
        self._values[routing.layer, routing.selected_experts.numpy()] = self._now

    def observe_token(
        self, first_layer: int, selected: npt.NDArray[np.int64], probs: npt.NDArray[np.float32]
    ) -> None:
        """See ``EvictionPolicy``."""
        del probs
        steps = np.arange(len(selected))[:, None]
        self._values[first_layer + steps, selected] = self._now + 1 + steps
        self._now += len(selected)


EVICTION_POLICIES: dict[Eviction, type[ReuseValues] | type[LeastRecentlyUsed]] = {
    "reuse": ReuseValues,
    "lru": LeastRecentlyUsed,
}


def _ranks(
    hottest_first: Iterable[ExpertKey], num_layers: int, num_experts: int
) -> npt.NDArray[np.float64]:
    """Place of each expert in the order; those that are not in it come last, together."""
    ranks = np.full((num_layers, num_experts), float(num_layers * num_experts))
    for rank, key in enumerate(hottest_first):
        ranks[key] = rank
    return ranks


def choose_victim(
    values: npt.NDArray[np.float64],
    evictable: npt.NDArray[np.bool_],
    next_use: npt.NDArray[np.int64],
    needed_at: int,
) -> ExpertKey | None:
    """Choose the resident expert to evict for one that is needed at layer ``needed_at``.

    All arrays are ``[L, E]``.

    Args:
        values: what it is worth to keep each expert.
        evictable: which experts are resident and not in use.
        next_use: layer at which the current window uses an expert, or ``UNKNOWN``.
        needed_at: when the incoming expert is needed; a demand passes -1.

    Returns:
        Of the experts without a known next use the one with the least value; failing that, the one
        whose next use is latest and later than ``needed_at`` (of several the least value); failing
        that, None. Of equals the first by layer and index.
    """
    candidates = evictable & (next_use == UNKNOWN)
    if not candidates.any():
        later = np.where(evictable & (next_use > needed_at), next_use, UNKNOWN)
        candidates = (later == later.max()) & (later != UNKNOWN)
        if not candidates.any():
            return None
    index = int(np.where(candidates, values, np.inf).argmin())
    return ExpertKey(*divmod(index, values.shape[1]))
