"""From routings to prefetches: exactly these keys, with their layers, within the budget."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection
from dataclasses import astuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.metrics import CacheStats
from specter_runtime.prefetcher import (
    MEMORY,
    PRIOR_PRECISION,
    PRIOR_WEIGHT,
    Pace,
    Prefetcher,
    RankPrecision,
    is_worth_reading,
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

    def is_resident(self, key: ExpertKey) -> bool:
        return key in self.held

    def stats(self) -> CacheStats:
        return self.counters.copy()

    def cancel_prefetches(self) -> None:
        self.num_cancels += 1


def make_prefetcher(cache: RecordingCache, budget_bytes: int) -> Prefetcher:
    return Prefetcher(cache, budget_bytes, EXPERT_BYTES)  # type: ignore[arg-type]


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


def test_precision_of_a_rank_is_the_decaying_share_of_right_predictions() -> None:
    precision, right, count = RankPrecision(), PRIOR_PRECISION * PRIOR_WEIGHT, PRIOR_WEIGHT
    assert precision.of(1) == PRIOR_PRECISION
    for i in range(50):
        precision.observe(1, was_needed=i % 3 == 0)
        right, count = MEMORY * right + (i % 3 == 0), MEMORY * count + 1
    assert precision.of(1) == pytest.approx(right / count, rel=1e-12)
    assert precision.of(0) == PRIOR_PRECISION  # ranks are counted by themselves
    for _ in range(3000):
        precision.observe(1, was_needed=True)
    assert precision.of(1) > 0.999


@pytest.mark.parametrize(
    ("precision", "pace", "expected"),
    [
        (0.9, Pace(0.0, 0.0, 0.0, 0.0), False),  # nothing is known to be waited for
        (0.01, Pace(5.0, 2.0, 3.0, 0.0), True),  # the link is idle
        (0.0, Pace(5.0, 2.0, 3.0, 0.0), False),  # but nobody wants it
        (0.5, Pace(5.0, 3.0, 3.0, 1.0), False),  # 1.5 gained, 1.5 lost
        (0.51, Pace(5.0, 3.0, 3.0, 1.0), True),
        (0.51, Pace(2.0, 3.0, 3.0, 1.0), False),  # it comes but two seconds earlier
        (0.51, Pace(5.0, 3.0, 3.0, 0.6), True),
        (1.0, Pace(1e-9, 1.0, 9.0, 1.0), True),  # is never read in vain
    ],
)
def test_a_read_ahead_is_weighed_against_a_read_in_vain(
    precision: float, pace: Pace, expected: bool
) -> None:
    assert is_worth_reading(precision, pace) == expected


def test_pace_is_taken_from_the_counters_of_a_pass() -> None:
    stats = CacheStats(misses=3, late_hits=1, loads=5, stall_seconds=0.8, link_busy_seconds=1.5)
    last = Pace(1.0, 1.0, 1.0, 1.0)
    found = measure_pace(stats, 2.0, 10, last)
    expected = [0.8 + 0.2 * now for now in (2.0 / 10, 0.8 / 4, 1.5 / 5, 1.5 / 2.0)]
    assert astuple(found) == pytest.approx(expected, rel=1e-12)
    idle = measure_pace(CacheStats(), 2.0, 10, last)
    assert (idle.wait_seconds, idle.read_seconds) == (1.0, 1.0)  # nothing new was learned
    assert idle.link_share == pytest.approx(0.8)


def predict(cache: RecordingCache, prefetcher: Prefetcher, needed: list[int]) -> list[ExpertKey]:
    """One pass in which layer 1 is foreseen to need 4, 5, 6 and 7; what was read for it."""
    cache.asked.clear()
    cache.read.clear()
    prefetcher.observe_prediction(routing(1, [4, 5, 6, 7]))
    cache.counters.misses += 4
    cache.counters.loads += 4
    cache.counters.stall_seconds += 4
    cache.counters.link_busy_seconds += 4
    prefetcher.learn([routing(0, [0]), routing(1, needed)])
    prefetcher.end_window()
    cache.held -= set(cache.read)
    return list(cache.read)


def test_only_ranks_that_have_proved_right_are_read_and_residents_are_protected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A pass takes 10 s; it waits for a second, as long as a read, for each of four experts."""
    monkeypatch.setattr(time, "perf_counter", itertools.count(step=10).__next__)
    cache = RecordingCache(held=keys((1, 5)))
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    assert predict(cache, prefetcher, [4, 5]) == []  # nothing was waited for as yet
    assert cache.asked == [(ExpertKey(1, 5), 1)]
    for _ in range(200):
        read = predict(cache, prefetcher, [4, 5])  # the first rank is right, the last two are not
        if read == keys((1, 4)):
            break
    assert read == keys((1, 4))
    assert cache.asked == [(ExpertKey(1, 4), 1), (ExpertKey(1, 5), 1)]


def test_a_pass_without_predictions_teaches_nothing() -> None:
    cache = RecordingCache()
    prefetcher = make_prefetcher(cache, 100 * EXPERT_BYTES)
    cache.counters.stall_seconds, cache.counters.misses = 1e9, 1
    prefetcher.learn([routing(0, [0])])
    prefetcher.observe_prediction(routing(1, [4]))
    assert cache.read == []
