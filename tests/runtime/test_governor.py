"""The wall-clock gate under scripted times: what it chooses, and what choosing costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from specter_runtime.governor import (
    EXPLORED_SHARE,
    FIRST_RUNS,
    RUN_WINDOWS,
    Governor,
    Lookahead,
    lookaheads,
)

PLAIN, PREDICTS, DRAFTS = Lookahead(0), Lookahead(0, predicts_next_layer=True), Lookahead(4)
WAYS = [PLAIN, PREDICTS, DRAFTS]
FIRST_WINDOWS = RUN_WINDOWS * FIRST_RUNS * len(WAYS)
"""At most: clear losers have only one run."""

Times = Callable[[int, Lookahead], tuple[float, int]]


def steady(costs: Mapping[Lookahead, float], num_tokens: int = 2) -> Times:
    """Every window commits as many tokens, each at its way's cost."""
    return lambda window, way: (costs[way] * num_tokens, num_tokens)


def run(governor: Governor, times: Times, num_windows: int, first: int = 0) -> list[Lookahead]:
    chosen = []
    for window in range(first, first + num_windows):
        chosen.append(governor.choose())
        governor.observe(chosen[-1], *times(window, chosen[-1]))
    return chosen


@pytest.mark.parametrize("best", WAYS, ids=str)
@pytest.mark.parametrize("factor", [1.2, 1.6, 10.0])
def test_the_cheapest_way_is_found_and_the_others_cost_next_to_nothing(
    best: Lookahead, factor: float
) -> None:
    """Behind the first windows, at no time more than the share that may be spent on others."""
    costs = {way: 1.0 if way == best else factor for way in WAYS}
    chosen = run(Governor(WAYS), steady(costs), 5000)
    later = chosen[FIRST_WINDOWS:]
    others = 0
    for i, way in enumerate(later):
        others += way != best
        assert others <= EXPLORED_SHARE * (i + 1) + RUN_WINDOWS * (len(WAYS) - 1)
    assert others < EXPLORED_SHARE * len(later)
    assert {*chosen} == {*WAYS}


def test_every_way_is_tried_twice_at_first_but_clear_losers_once() -> None:
    costs = {PLAIN: 1.0, PREDICTS: 1.1, DRAFTS: 2.0}
    chosen = run(Governor(WAYS), steady(costs), 40)
    order = [PLAIN] * 3 + [PREDICTS] * 3 + [DRAFTS] * 3 + [PLAIN] * 3 + [PREDICTS] * 3
    assert chosen == order + [PLAIN] * (40 - len(order))


def retries(chosen: list[Lookahead], way: Lookahead) -> list[int]:
    """Windows at which runs of a way begin."""
    pairs = zip([None, *chosen], chosen, strict=False)
    return [i for i, (before, now) in enumerate(pairs) if now == way != before]


@pytest.mark.parametrize(("factor", "growth"), [(1.3, 2), (3.0, 4)])
def test_the_longer_a_way_loses_the_longer_it_rests(factor: float, growth: int) -> None:
    ways = [PLAIN, DRAFTS]
    chosen = run(Governor(ways), steady({PLAIN: 1.0, DRAFTS: factor}), 20_000)
    begun = [i for i in retries(chosen, DRAFTS) if i >= FIRST_WINDOWS]
    least = RUN_WINDOWS / EXPLORED_SHARE
    rests = [later - earlier - RUN_WINDOWS for earlier, later in pairwise(begun)]
    assert rests == [least * growth**n for n in range(1, len(rests) + 1)]
    assert len(rests) >= 2


def test_cost_is_time_per_committed_token_and_not_per_window() -> None:
    """Windows of a draft take three times as long and commit 1 or 7 tokens: 4 on average."""

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        return (3.0, 1 + 6 * (window % 2)) if way == DRAFTS else (1.0, 1)

    chosen = run(Governor([PLAIN, DRAFTS]), times, 100)
    assert set(chosen[2 * RUN_WINDOWS * FIRST_RUNS :]) == {DRAFTS}


def test_one_outlier_in_a_run_does_not_decide() -> None:
    """The better way's second window takes a hundred times as long, as if the machine had slept."""
    seen: Counter[Lookahead] = Counter()

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        seen[way] += 1
        if way == PLAIN:
            return 1.5, 1
        return 100.0 if seen[way] == 2 else 1.0, 1

    chosen = run(Governor([PLAIN, DRAFTS]), times, 140)
    assert set(chosen[-50:]) == {DRAFTS}


def test_an_outlier_of_the_way_in_use_does_not_topple_it() -> None:
    times = steady({PLAIN: 1.0, PREDICTS: 1.3, DRAFTS: 1.4})
    governor = Governor(WAYS)
    run(governor, times, 60)
    for _ in range(3):
        governor.observe(PLAIN, 500.0, 2)
        assert set(run(governor, times, 9)) == {PLAIN}


def test_when_what_is_used_becomes_slow_another_takes_over() -> None:
    governor = Governor(WAYS)
    before = run(governor, steady({PLAIN: 1.0, PREDICTS: 2.0, DRAFTS: 1.2}), 100)
    assert before[-1] == PLAIN
    after = run(governor, steady({PLAIN: 2.0, PREDICTS: 2.0, DRAFTS: 1.2}), 30)
    assert set(after[-10:]) == {DRAFTS}


def test_when_another_becomes_fast_it_is_found_at_its_next_try() -> None:
    governor = Governor(WAYS)
    run(governor, steady({PLAIN: 1.0, PREDICTS: 1.2, DRAFTS: 3.0}), 100)
    least = int(RUN_WINDOWS * (len(WAYS) - 1) / EXPLORED_SHARE)
    after = run(governor, steady({PLAIN: 1.0, PREDICTS: 1.2, DRAFTS: 0.5}), least)
    assert after[-1] == DRAFTS


def test_ways_that_differ_by_less_than_the_margin_do_not_alternate() -> None:
    noise = random.Random(1)

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        return noise.uniform(0.97, 1.03), 1

    chosen = run(Governor(WAYS), times, 2000)
    assert set(chosen[FIRST_WINDOWS : FIRST_WINDOWS + 200]) == {PLAIN}


def test_a_single_way_is_always_chosen() -> None:
    assert set(run(Governor([DRAFTS]), steady({DRAFTS: 1.0}), 500)) == {DRAFTS}


def test_equal_times_make_equal_choices() -> None:
    noise = {way: random.Random(str(way)) for way in WAYS}
    table = {way: [noise[way].random() for _ in range(800)] for way in WAYS}
    first, second = (run(Governor(WAYS), lambda i, way: (table[way][i], 1), 800) for _ in range(2))
    assert first == second


@pytest.mark.parametrize(
    ("num_draft_tokens", "predict", "governs_draft", "expected"),
    [
        (0, False, False, [PLAIN]),
        (0, True, True, [PREDICTS]),
        (0, None, False, [PLAIN, PREDICTS]),
        (4, None, False, [DRAFTS]),
        (4, True, False, [Lookahead(4, predicts_next_layer=True)]),
        (4, False, True, [PLAIN, DRAFTS]),
        (4, True, True, [PREDICTS, Lookahead(4, predicts_next_layer=True)]),
        (4, None, True, WAYS),
        (1, None, True, [PLAIN, PREDICTS, Lookahead(1)]),
    ],
)
def test_open_ways(
    num_draft_tokens: int, predict: bool | None, governs_draft: bool, expected: list[Lookahead]
) -> None:
    assert lookaheads(num_draft_tokens, predict, governs_draft=governs_draft) == expected


def test_ways_have_names_of_their_own() -> None:
    assert list(map(str, WAYS)) == ["K = 0", "K = 0 + next layer", "K = 4"]
