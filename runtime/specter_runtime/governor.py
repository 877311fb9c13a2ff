"""The wall-clock gate: of the ways to look ahead, the one that has proved the fastest. No clocks.

Ways to run a window compete by measured seconds per committed token, not looking ahead among them:
what loses is not used. Nothing is modelled: draft time, bandwidth, hits, acceptance and whatever
else the machine is busy with are all in that one number.

What a token takes changes with the text, often by more than the ways differ. So a way is judged by
the windows of the way in use around its own, and tried one window at a time, in between. How often,
its price says: trying what is almost as fast costs next to nothing, and is done every few windows;
what is three times as slow is tried so rarely that it makes a token slower by ``LOST_SHARE``.

Called by: speculative_decoder, session.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

FIRST_TRIES = 4
"""Windows of every way at first, every other window; clear losers have only two."""

LEAST_INTERVAL = 5
"""Windows from one try to the next, at least."""

LOST_SHARE = 0.01
"""Of the time, at most this share is lost by trying a way, beyond the first tries."""

MEMORY_TRIES = 8
"""Tries after which an older one counts for a third."""

PACE_WINDOWS = 6
"""Windows of the way in use that say what a token takes at present."""

OUTLIER = 3.0
"""No window counts as more than so many times what is usual: a hiccup says nothing."""

CLEAR_LOSS = 1.5
"""Times the cost of the way in use: more than what windows differ by chance."""

MARGIN = 0.03
"""By how much another way must be cheaper than the one in use to take its place."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """One way to run a window.

    Attributes:
        num_draft_tokens: tokens drafted, at most; 0 is plain decoding.
        predicts: where nothing is drafted, whether a predictor tells what to move ahead.
    """

    num_draft_tokens: int
    predicts: bool = False

    def __str__(self) -> str:
        """``K = 4``, ``K = 0``, ``K = 0 + predictor``."""
        suffix = " + predictor" if self.predicts and not self.num_draft_tokens else ""
        return f"K = {self.num_draft_tokens}{suffix}"


def lookaheads(num_draft_tokens: int, *, predicts: bool, governs_draft: bool) -> list[Lookahead]:
    """The ways that are open, plain ones first.

    Args:
        num_draft_tokens: how many are drafted.
        predicts: whether a predictor is asked in plain windows. It is not left open: what it has
            read in vain is paid for by the windows behind its own, so that these by themselves look
            better than it is. What is worth a read is decided read by read instead.
        governs_draft: whether drafting none is open too.
    """
    counts = (0, num_draft_tokens) if governs_draft and num_draft_tokens else (num_draft_tokens,)
    return [Lookahead(count, predicts) for count in counts]


@dataclass(slots=True)
class _Record:
    """What is known of a way that is not in use, in units of what a token takes in the one that is.

    Attributes:
        num_tries: how often it was tried, as far as it counts.
        last_try: window of the last try.
        cost: decayed mean of what a window takes.
        num_tokens: decayed mean of what a window commits.
    """

    num_tries: int = 0
    last_try: int = 0
    cost: float = 0.0
    num_tokens: float = 0.0

    @property
    def ratio(self) -> float:
        """Cost of a token; 1 if it was not tried."""
        return self.cost / self.num_tokens if self.num_tries else 1.0

    @property
    def interval(self) -> int:
        """Windows from one try to the next: what it loses is ``LOST_SHARE`` of their time."""
        lost = (self.ratio - 1) * max(self.num_tokens, 1.0)
        return max(LEAST_INTERVAL, math.ceil(lost / LOST_SHARE))

    def observe(self, cost: float, num_tokens: int) -> None:
        """Learn from a try."""
        if self.num_tries >= 2:
            cost = min(cost, OUTLIER * self.cost)
        self.num_tries += 1
        share = 1 / min(self.num_tries, MEMORY_TRIES)
        self.cost += share * (cost - self.cost)
        self.num_tokens += share * (num_tokens - self.num_tokens)


@dataclass(slots=True)
class _Pace:
    """Seconds and committed tokens of the last windows of the way in use."""

    windows: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=PACE_WINDOWS))

    @property
    def seconds_per_token(self) -> float:
        """What a token takes at present."""
        most = OUTLIER * statistics.median(seconds for seconds, _ in self.windows)
        seconds = sum(min(seconds, most) for seconds, _ in self.windows)
        return seconds / sum(num_tokens for _, num_tokens in self.windows)


class Governor:
    """Chooses a way for each window and is told what it took."""

    def __init__(self, ways: Sequence[Lookahead]) -> None:
        """Choose among ``ways``; the first is in use at first. One alone is always chosen."""
        self._best = ways[0]
        self._others = {way: _Record() for way in ways[1:]}
        self._pace = _Pace()
        self._now = 0
        self._last_try = 0

    def choose(self) -> Lookahead:
        """The way to run the next window."""
        if not self._pace.windows or self._last_try == self._now:  # there must be a measure
            return self._best
        young = [
            way
            for way, record in self._others.items()
            if record.num_tries < (2 if record.ratio > CLEAR_LOSS else FIRST_TRIES)
        ]
        if young:
            return min(young, key=lambda way: self._others[way].num_tries)
        wait = {way: self._now + 1 - r.last_try - r.interval for way, r in self._others.items()}
        longest = max(wait, key=wait.__getitem__, default=self._best)
        return longest if wait.get(longest, -1) >= 0 else self._best

    def observe(self, way: Lookahead, seconds: float, num_tokens: int) -> None:
        """Learn what a window took that ran in this way, and how many tokens it committed."""
        self._now += 1
        if way == self._best:
            self._pace.windows.append((seconds, num_tokens))
            return
        record = self._others[way]
        record.observe(seconds / self._pace.seconds_per_token, num_tokens)
        record.last_try = self._last_try = self._now
        if record.num_tries >= FIRST_TRIES and record.ratio < 1 - MARGIN:
            self._use(way, seconds, num_tokens)

    def _use(self, way: Lookahead, seconds: float, num_tokens: int) -> None:
        """Use another way; what is known of the rest is known in units of the old one's pace."""
        ratio = self._others.pop(way).ratio
        for record in self._others.values():
            record.cost /= ratio
        usual = statistics.mean(tokens for _, tokens in self._pace.windows)
        self._others[self._best] = _Record(FIRST_TRIES, self._now, usual / ratio, usual)
        self._best = way
        self._pace.windows.clear()
        self._pace.windows.append((seconds, num_tokens))
