"""The wall-clock gate: of the ways to look ahead, the one that has proved the fastest. No clocks.

Ways to run a window compete by measured seconds per committed token, not looking ahead among them:
what loses is not used. Nothing is modelled: draft time, bandwidth, hits, acceptance and whatever
else the machine is busy with are all in that one number.

    first      every way runs RUN_WINDOWS windows; those that have not lost clearly, once more
    then       the best runs; each other one is tried again for RUN_WINDOWS windows, after a while
               that doubles each time it loses, and quadruples each time it loses clearly

Called by: speculative_decoder, session.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

RUN_WINDOWS = 3
"""Windows that a way is tried for at a time: the least of which one may be an outlier."""

FIRST_RUNS = 2
"""Runs that every way gets at first: the first one pays for the cache that the prompt has left."""

RECENT_WINDOWS = 16
"""Windows that a way's cost is taken from."""

OUTLIER = 3.0
"""No window counts as more than so many times the median: a hiccup of the machine tells nothing."""

CLEAR_LOSS = 1.5
"""Times the best way's cost: more than what a few windows differ from the next few by chance."""

MARGIN = 0.1
"""By how much another way must be cheaper than the one in use to take its place."""

EXPLORED_SHARE = 0.02
"""Of all windows but the first, at most this share is spent on trying again."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """One way to run a window.

    Attributes:
        num_draft_tokens: tokens drafted, at most; 0 is plain decoding.
        predicts_next_layer: where nothing is drafted, whether the next layer's router tells what
            to move ahead.
    """

    num_draft_tokens: int
    predicts_next_layer: bool = False

    def __str__(self) -> str:
        """``K = 4``, ``K = 0``, ``K = 0 + next layer``."""
        suffix = " + next layer" if self.predicts_next_layer and not self.num_draft_tokens else ""
        return f"K = {self.num_draft_tokens}{suffix}"


def lookaheads(
    num_draft_tokens: int, predict_next_layer: bool | None, *, governs_draft: bool
) -> list[Lookahead]:
    """The ways that are open, plain ones first.

    Args:
        num_draft_tokens: how many are drafted ...
        predict_next_layer: whether to, where nothing is; None leaves it open.
        governs_draft: ... or none, if that is left open.
    """
    ways = [Lookahead(num_draft_tokens, bool(predict_next_layer))] if num_draft_tokens else []
    if governs_draft or not num_draft_tokens:
        predictions = (False, True) if predict_next_layer is None else (predict_next_layer,)
        ways = [*(Lookahead(0, prediction) for prediction in predictions), *ways]
    return ways


@dataclass(slots=True)
class _Record:
    """What is known of one way.

    Attributes:
        windows: seconds and committed tokens of the last ones.
        num_runs: how often it was tried.
        interval: windows from its last try to the next.
        due: window at which it is to be tried again.
    """

    windows: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=RECENT_WINDOWS))
    num_runs: int = 0
    interval: int = 0
    due: int = 0

    @property
    def cost(self) -> float:
        """Seconds per committed token; infinite if it was not tried."""
        if not self.windows:
            return math.inf
        most = OUTLIER * statistics.median(seconds for seconds, _ in self.windows)
        seconds = sum(min(seconds, most) for seconds, _ in self.windows)
        return seconds / sum(num_tokens for _, num_tokens in self.windows)


class Governor:
    """Chooses a way for each window and is told what it took."""

    def __init__(self, ways: Sequence[Lookahead]) -> None:
        """Choose among ``ways``; they are tried in this order. One alone is always chosen."""
        self._records = {way: _Record() for way in ways}
        self._best = ways[0]
        self._trying = ways[0]
        self._num_left_to_try = RUN_WINDOWS
        self._now = 0
        self._least_interval = math.ceil(RUN_WINDOWS * (len(ways) - 1) / EXPLORED_SHARE)

    def choose(self) -> Lookahead:
        """The way to run the next window."""
        return self._trying if self._num_left_to_try else self._best

    def observe(self, way: Lookahead, seconds: float, num_tokens: int) -> None:
        """Learn what a window took that ran in this way, and how many tokens it committed."""
        record = self._records[way]
        record.windows.append((seconds, num_tokens))
        self._now += 1
        if self._num_left_to_try and way == self._trying:
            self._num_left_to_try -= 1
            if not self._num_left_to_try:
                self._end_run(record)
        if not self._num_left_to_try:
            self._let_the_best_take_over()
            self._begin_run()

    def _end_run(self, record: _Record) -> None:
        """Say when the way that was tried is due again."""
        record.num_runs += 1
        least = min(other.cost for other in self._records.values())
        has_lost_clearly = record.cost > CLEAR_LOSS * least
        if record.num_runs > FIRST_RUNS:
            record.interval *= 4 if has_lost_clearly else 2
        elif record.num_runs == FIRST_RUNS or has_lost_clearly:
            record.num_runs = FIRST_RUNS
            record.interval = self._least_interval
        record.due = self._now + record.interval

    def _let_the_best_take_over(self) -> None:
        """Use the cheapest way; the one that it replaces is due after the least interval."""
        costs = {way: record.cost for way, record in self._records.items()}
        cheapest = min(costs, key=costs.__getitem__)
        if costs[cheapest] < (1 - MARGIN) * costs[self._best]:
            replaced = self._records[self._best]
            if replaced.num_runs >= FIRST_RUNS:
                replaced.interval = self._least_interval
                replaced.due = self._now + replaced.interval
            self._best = cheapest

    def _begin_run(self) -> None:
        """Try what is due; of several, what has been tried least."""
        due = [
            way
            for way, record in self._records.items()
            if record.due <= self._now and (way != self._best or record.num_runs < FIRST_RUNS)
        ]
        if due:
            self._trying = min(due, key=lambda way: self._records[way].num_runs)
            self._num_left_to_try = RUN_WINDOWS
            if self._records[self._trying].num_runs >= FIRST_RUNS:
                self._records[self._trying].windows.clear()  # how it was is not how it is
