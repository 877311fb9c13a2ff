"""The wall-clock gate under scripted times: what it chooses, and what choosing costs."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import pairwise

import pytest

from specter_runtime.governor import (
    FIRST_TRIES,
    LEAST_INTERVAL,
    LOST_SHARE,
    MEMORY_TRIES,
    Governor,
    Lookahead,
    lookaheads,
)

PLAIN, PREDICTS, DRAFTS = Lookahead(0), Lookahead(0, predicts=True), Lookahead(4)
WAYS = [PLAIN, PREDICTS, DRAFTS]
FIRST_WINDOWS = 4 * FIRST_TRIES * len(WAYS)
"""By then every way was tried, beside the one in use, whatever took its place underway."""

Times = Callable[[int, Lookahead], tuple[float, int]]


def steady(costs: Mapping[Lookahead, float], num_tokens: int = 2) -> Times:
    """Every window commits as many tokens, each at its way's cost."""
    return lambda window, way: (costs[way] * num_tokens, num_tokens)


def run(governor: Governor, times: Times, num_windows: int) -> list[Lookahead]:
    chosen = []
    for window in range(num_windows):
        chosen.append(governor.choose())
        governor.observe(chosen[-1], *times(window, chosen[-1]))
    return chosen


@pytest.mark.parametrize("best", WAYS, ids=str)
@pytest.mark.parametrize("factor", [1.05, 1.2, 1.6, 10.0])
def test_the_cheapest_way_is_found_and_trying_others_costs_next_to_nothing(
    best: Lookahead, factor: float
) -> None:
    costs = {way: 1.0 if way == best else factor for way in WAYS}
    chosen = run(Governor(WAYS), steady(costs), 5000)
    later = chosen[FIRST_WINDOWS:]
    lost = sum(costs[way] - 1.0 for way in later) / len(later)
    # Each other way loses LOST_SHARE of the time in use; one more try of each is not yet paid for.
    assert lost <= (len(WAYS) - 1) * (LOST_SHARE + factor / len(later))
    assert Counter(later).most_common(1)[0][0] == best
    assert {*chosen} == {*WAYS}


def test_at_first_every_other_window_tries_another_way_and_clear_losers_twice() -> None:
    costs = {PLAIN: 1.0, PREDICTS: 1.1, DRAFTS: 2.0}
    chosen = run(Governor(WAYS), steady(costs), 13)
    tries = [PREDICTS, DRAFTS, PREDICTS, DRAFTS, PREDICTS, PREDICTS]
    assert chosen == [PLAIN, *(way for attempt in tries for way in (attempt, PLAIN))]


@pytest.mark.parametrize(("factor", "rest"), [(1.001, LEAST_INTERVAL), (1.2, 20), (3.0, 200)])
def test_the_more_a_way_loses_the_longer_it_rests(factor: float, rest: int) -> None:
    """From try to try; one more window where ``factor - 1`` rounds up."""
    chosen = run(Governor([PLAIN, DRAFTS]), steady({PLAIN: 1.0, DRAFTS: factor}, 1), 3000)
    tried = [i for i, way in enumerate(chosen) if way == DRAFTS and i > FIRST_WINDOWS]
    assert len(tried) > 10
    assert {later - earlier for earlier, later in pairwise(tried)} <= {rest, rest + 1}


def test_cost_is_time_per_committed_token_and_not_per_window() -> None:
    """Windows of a draft take three times as long and commit 1 or 7 tokens: 4 on average."""
    seen: Counter[Lookahead] = Counter()

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        seen[way] += 1
        return (3.0, 1 + 6 * (seen[way] % 2)) if way == DRAFTS else (1.0, 1)

    chosen = run(Governor([PLAIN, DRAFTS]), times, 200)
    assert Counter(chosen[-100:])[DRAFTS] >= 75


def test_one_outlier_does_not_decide() -> None:
    """The better way's third window takes a hundred times as long, as if the machine had slept."""
    seen: Counter[Lookahead] = Counter()

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        seen[way] += 1
        if way == PLAIN:
            return 1.5, 1
        return 100.0 if seen[way] == 3 else 1.0, 1

    chosen = run(Governor([PLAIN, DRAFTS]), times, 140)
    assert Counter(chosen[-50:])[DRAFTS] >= 40


def test_an_outlier_of_the_way_in_use_does_not_topple_it() -> None:
    times = steady({PLAIN: 1.0, PREDICTS: 1.3, DRAFTS: 1.4})
    governor = Governor(WAYS)
    run(governor, times, 60)
    for _ in range(3):
        governor.observe(PLAIN, 500.0, 2)
        assert Counter(run(governor, times, 40))[PLAIN] >= 36


def test_what_all_ways_share_topples_none() -> None:
    """A text of which every token takes longer, and longer still, whatever is done."""

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        pace = 1.0 + window / 50 + 2 * (window > 150)
        return pace * {PLAIN: 1.0, PREDICTS: 1.15, DRAFTS: 1.2}[way], 1

    chosen = run(Governor(WAYS), times, 400)
    assert Counter(chosen[FIRST_WINDOWS:])[PLAIN] >= 0.8 * (400 - FIRST_WINDOWS)
    assert Counter(chosen[-20:])[PLAIN] >= 16


@pytest.mark.parametrize("fast", [0.5, 0.8])
def test_another_way_takes_over_when_it_has_become_the_cheaper_one(fast: float) -> None:
    governor = Governor(WAYS)
    before = run(governor, steady({PLAIN: 1.0, PREDICTS: 1.1, DRAFTS: 1.2}), 100)
    assert Counter(before[-20:])[PLAIN] >= 14
    rest = int((1.2 - 1.0) * 2 / LOST_SHARE) + 1
    after = run(governor, steady({PLAIN: 1.0, PREDICTS: 1.1, DRAFTS: fast}), rest * MEMORY_TRIES)
    assert Counter(after[-20:])[DRAFTS] >= 12


def test_ways_that_differ_by_chance_only_do_not_alternate() -> None:
    noise = random.Random(1)

    def times(window: int, way: Lookahead) -> tuple[float, int]:
        return noise.uniform(0.97, 1.03), 1

    chosen = run(Governor(WAYS), times, 1000)
    assert Counter(chosen)[PLAIN] > 550  # of five windows at most two try the others


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
        (0, False, True, [PLAIN]),
        (0, True, True, [PREDICTS]),
        (4, False, False, [DRAFTS]),
        (4, False, True, [PLAIN, DRAFTS]),
        (4, True, True, [PREDICTS, Lookahead(4, predicts=True)]),
        (1, False, True, [PLAIN, Lookahead(1)]),
    ],
)
def test_open_ways(
    num_draft_tokens: int, predict: bool, governs_draft: bool, expected: list[Lookahead]
) -> None:
    found = lookaheads(num_draft_tokens, predicts=predict, governs_draft=governs_draft)
    assert found == expected


def test_ways_have_names_of_their_own() -> None:
    assert list(map(str, WAYS)) == ["K = 0", "K = 0 + predictor", "K = 4"]
