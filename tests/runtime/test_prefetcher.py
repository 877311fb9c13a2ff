"""From routings to prefetches: exactly these keys, with their layers, within the budget."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.metrics import CacheStats
from specter_runtime.predictor import Prediction
from specter_runtime.prefetcher import (
    MEMORY,
    NEVER,
    PRIOR_WEIGHT,
    SHARED,
    Pace,
    Prefetcher,
    least_probability,
    measure_pace,
)

EXPERT_BYTES = 1000


class RecordingCache:
    """The cache's side of the contract: a prefetch of what is held or queued reads nothing."""

    def __init__(self, held: Collection[ExpertKey] = ()) -> None:
        self.held = set(held)
        self.asked: list[tuple[ExpertKey, int]] = []
        self.read: list[ExpertKey] = []
        self.num_cancels = 0
        self.counters = CacheStats()

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        self.asked.append((key, deadline))
        if key in self.held:
            return False
        self.held.add(key)
        self.read.append(key)
        return True

    def stats(self) -> CacheStats:
        return self.counters.copy()

    def cancel_prefetches(self) -> None:
        self.num_cancels += 1


def make_prefetcher(cache: RecordingCache, budget_bytes: int) -> Prefetcher:
    return Prefetcher(cache, budget_bytes, EXPERT_BYTES, lambda: time.perf_counter())


def routing(layer: int, *rows: list[int]) -> Routing:
    """What a router chose for some tokens of a layer."""
    selected = torch.tensor(rows, dtype=torch.int64)
    return Routing(layer, selected, torch.full(selected.shape, 1 / selected.shape[1]))


def keys(*pairs: tuple[int, int]) -> list[ExpertKey]:
    return [ExpertKey(*pair) for pair in pairs]


def test_every_routed_expert_is_asked_for_with_its_layer_as_deadline() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    prefetcher.observe([routing(0, [5, 2]), routing(1, [2, 7]), routing(4, [1, 0])])
    expected = keys((0, 2), (0, 5), (1, 2), (1, 7), (4, 0), (4, 1))
    assert sorted(cache.asked) == [(key, key.layer) for key in expected]


def test_expert_that_several_tokens_share_is_read_once() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    prefetcher.observe([routing(3, [5, 2], [2, 5], [5, 6])])
    prefetcher.observe([routing(3, [2, 6])])
    assert sorted(cache.read) == keys((3, 2), (3, 5), (3, 6))
    assert {deadline for _, deadline in cache.asked} == {3}


@pytest.mark.parametrize(
    ("budget_bytes", "num_reads"),
    [(0, 0), (999, 0), (1000, 1), (1999, 1), (2000, 2), (6000, 6), (9000, 6)],
)
def test_reads_of_a_window_stay_within_the_byte_budget(budget_bytes: int, num_reads: int) -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, budget_bytes)
    for layer in range(3):  # token by token would count the same
        prefetcher.observe([routing(layer, [0, 1])])
    assert len(cache.read) == num_reads
    assert cache.read == keys(*((i, e) for i in range(3) for e in range(2)))[:num_reads]


def test_resident_experts_cost_no_budget_and_are_asked_for_to_be_protected() -> None:
    cache = RecordingCache(held=keys((0, 0), (0, 1), (1, 0)))
    prefetcher = make_prefetcher(cache, 2 * EXPERT_BYTES)
    prefetcher.observe([routing(0, [0, 1]), routing(1, [0, 1]), routing(2, [0, 1])])
    assert cache.read == keys((1, 1), (2, 0))
    assert set(keys((0, 0), (0, 1), (1, 0))) <= {key for key, _ in cache.asked}


def test_end_of_a_window_cancels_and_renews_the_budget() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 2 * EXPERT_BYTES)
    prefetcher.observe([routing(0, [0, 1, 2])])
    assert cache.num_cancels == 0
    prefetcher.end_window()
    assert cache.num_cancels == 1
    prefetcher.observe([routing(1, [0, 1, 2])])
    assert cache.read == keys((0, 0), (0, 1), (1, 0), (1, 1))


ROUTINGS = st.builds(
    routing,
    st.integers(0, 3),
    st.lists(st.integers(0, 5), min_size=2, max_size=2, unique=True),
)


@settings(deadline=None, max_examples=100)
@given(
    windows=st.lists(st.lists(st.lists(ROUTINGS, max_size=4), max_size=4), max_size=3),
    budget=st.integers(0, 30),
    held=st.sets(st.builds(ExpertKey, st.integers(0, 3), st.integers(0, 5))),
)
def test_only_routed_experts_are_asked_for_and_never_beyond_the_budget(
    windows: list[list[list[Routing]]], budget: int, held: set[ExpertKey]
) -> None:
    cache = RecordingCache(held)
    prefetcher = make_prefetcher(cache, budget * EXPERT_BYTES)
    for window in windows:
        before = (len(cache.asked), len(cache.read), set(cache.held))
        for routings in window:
            prefetcher.observe(routings)
        prefetcher.end_window()
        routed = {
            ExpertKey(r.layer, int(expert))
            for routings in window
            for r in routings
            for expert in r.selected_experts.flatten()
        }
        asked, read = cache.asked[before[0] :], cache.read[before[1] :]
        assert {key for key, _ in asked} <= routed
        assert all(deadline == key.layer for key, deadline in asked)
        assert len(read) == min(budget, len(routed - before[2]))


# ---- predictions ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_ahead", "pace", "expected"),
    [
        (1, Pace(0.0, 0.0, 0.0, 0.0), NEVER),  # nothing is known to be waited for
        (1, Pace(5.0, 0.0, 3.0, 0.5), NEVER),  # and if nothing is, there is nothing to gain
        (1, Pace(5.0, 2.0, 0.0, 1.0), 0.0),  # reads that take no time
        (1, Pace(5.0, 2.0, 3.0, 0.0), 1.2 / (1.2 + 1.2)),  # 0.6 x 2 to gain, 0.4 x 3 to lose
        (1, Pace(5.0, 2.0, 3.0, 0.6), 3.0 / (1.2 + 3.0)),  # a demand that waits 0.6 x 3 besides
        (1, Pace(1.0, 2.0, 3.0, 0.6), 3.0 / (0.6 + 3.0)),  # it comes but a second earlier
        (2, Pace(1.0, 2.0, 3.0, 0.6), 3.0 / (1.2 + 3.0)),  # or two
        (3, Pace(1.0, 2.0, 3.0, 0.6), 3.0 / (1.2 + 3.0)),  # but none waits longer than that
    ],
)
def test_a_read_ahead_is_weighed_against_a_read_in_vain(
    num_ahead: int, pace: Pace, expected: float
) -> None:
    assert SHARED == 0.4  # what the figures are made with
    assert least_probability(num_ahead, pace) == pytest.approx(expected, rel=1e-12)


def test_pace_is_taken_from_the_counters_of_a_pass() -> None:
    stats = CacheStats(misses=3, late_hits=1, loads=5, stall_seconds=0.8, link_busy_seconds=1.5)
    last = Pace(1.0, 1.0, 1.0, 1.0)
    found = measure_pace(stats, 2.0, 10, last)
    expected = [0.8 + 0.2 * now for now in (2.0 / 10, 0.8 / 4, 1.5 / 5, 1.5 / 2.0)]
    assert astuple(found) == pytest.approx(expected, rel=1e-12)
    idle = measure_pace(CacheStats(), 2.0, 10, last)
    assert (idle.wait_seconds, idle.read_seconds) == (1.0, 1.0)  # nothing new was learned
    assert idle.link_share == pytest.approx(0.8)


def run_pass(
    cache: RecordingCache,
    prefetcher: Prefetcher,
    likely: Sequence[tuple[int, float]] = (),
    num_useful: int = 0,
) -> None:
    """A pass through ten layers; it waits for a second, as long as a read, for each of four."""
    prefetcher.begin_pass()
    if likely:
        prefetcher.observe_prediction([Prediction(1, 1, likely)])
    cache.counters.misses += 4
    cache.counters.loads += 4
    cache.counters.stall_seconds += 4
    cache.counters.link_busy_seconds += 4
    cache.counters.useful_prefetches += num_useful
    prefetcher.end_pass(10)
    prefetcher.end_window()


@pytest.fixture
def pass_of_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=10).__next__)


@pytest.mark.usefixtures("pass_of_ten_seconds")
def test_what_is_likely_enough_is_asked_for_once_something_was_waited_for() -> None:
    """0.6 x 1 to gain and 0.8 x 1 to lose, in the long run: 4 in 7."""
    cache = RecordingCache(held=keys((1, 5)))
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    likely = [(4, 0.999), (5, 0.6), (6, 0.58), (7, 0.56)]
    run_pass(cache, prefetcher, likely)
    assert cache.asked == []
    for _ in range(100):  # the pace is known to 0.8 ** 100, the share to 1e-9 of 0.4
        run_pass(cache, prefetcher)
    assert prefetcher.least_probabilities(2) == pytest.approx([4 / 7, 4 / 7], rel=1e-8)
    run_pass(cache, prefetcher, likely)
    assert cache.asked == [(ExpertKey(1, 4), 1), (ExpertKey(1, 5), 1), (ExpertKey(1, 6), 1)]
    assert cache.read == keys((1, 4), (1, 6))


@pytest.mark.usefixtures("pass_of_ten_seconds")
def test_a_predictor_that_promises_too_much_is_believed_less() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    for _ in range(100):
        run_pass(cache, prefetcher)
    assert prefetcher.least_probabilities(1) == pytest.approx([4 / 7], rel=1e-8)
    expected = useful = PRIOR_WEIGHT
    for _ in range(30):  # two reads of probability 0.9, of which one is useful
        run_pass(cache, prefetcher, [(4, 0.9), (5, 0.9)], num_useful=1)
        expected = MEMORY * (expected - PRIOR_WEIGHT) + PRIOR_WEIGHT + 1.8
        useful = MEMORY * (useful - PRIOR_WEIGHT) + PRIOR_WEIGHT + 1
        least = 4 / 7 * expected / useful
        assert prefetcher.least_probabilities(1) == pytest.approx([least], rel=1e-8)
        cache.held.clear()
    assert 0.8 < least < 0.9
    run_pass(cache, prefetcher, [(4, 0.8)])
    assert cache.asked[-1] == (ExpertKey(1, 5), 1)
    for _ in range(800):  # what was lost is forgiven: 16 of a hundred million are left
        run_pass(cache, prefetcher)
    assert prefetcher.least_probabilities(1) == pytest.approx([4 / 7], rel=1e-6)
    for _ in range(100):  # more trust than in a prediction's own figures there is not
        run_pass(cache, prefetcher, num_useful=1)
    assert prefetcher.least_probabilities(1) == pytest.approx([4 / 7], rel=1e-8)


@pytest.mark.usefixtures("pass_of_ten_seconds")
def test_predictions_keep_to_the_budget_of_their_pass() -> None:
    cache = RecordingCache(held=keys((1, 5)))
    prefetcher = make_prefetcher(cache, 2 * EXPERT_BYTES)
    for _ in range(100):
        run_pass(cache, prefetcher)
    for _ in range(2):
        run_pass(cache, prefetcher, [(4, 0.99), (5, 0.99), (6, 0.99), (7, 0.99)])
        assert cache.read == keys((1, 4), (1, 6))
        cache.held -= set(cache.read)
        cache.read.clear()


@pytest.mark.usefixtures("pass_of_ten_seconds")
def test_a_pass_without_predictions_teaches_nothing() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    cache.counters.stall_seconds, cache.counters.misses = 1e9, 1
    prefetcher.begin_pass()
    prefetcher.end_pass(10)
    assert prefetcher.least_probabilities(1) == [NEVER]
