"""The law of eviction, restated by brute force."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.eviction import choose_victim
from specter_runtime.experts import ExpertKey

A, B, C, D = (ExpertKey(0, i) for i in range(4))
KEYS = st.builds(ExpertKey, st.integers(0, 2), st.integers(0, 3))


def brute_force(
    oldest_first: list[ExpertKey],
    pinned: set[ExpertKey],
    next_use: dict[ExpertKey, int],
    needed_at: int,
) -> ExpertKey | None:
    """Rank every resident that may go: unknown use first, then latest use, then least recent."""
    candidates = [
        (key in next_use, -next_use.get(key, 0), age, key)
        for age, key in enumerate(oldest_first)
        if key not in pinned and (key not in next_use or next_use[key] > needed_at)
    ]
    return min(candidates)[-1] if candidates else None


@settings(deadline=None, max_examples=250)
@given(
    oldest_first=st.lists(KEYS, unique=True, max_size=8),
    pinned=st.sets(KEYS, max_size=4),
    next_use=st.dictionaries(KEYS, st.integers(-1, 3), max_size=10),
    needed_at=st.integers(-1, 4),
)
def test_victim_is_that_of_the_brute_force_ranking(
    oldest_first: list[ExpertKey],
    pinned: set[ExpertKey],
    next_use: dict[ExpertKey, int],
    needed_at: int,
) -> None:
    victim = choose_victim(oldest_first, pinned, next_use, needed_at)
    assert victim == brute_force(oldest_first, pinned, next_use, needed_at)


@pytest.mark.parametrize(
    ("pinned", "next_use", "needed_at", "victim"),
    [
        ((), {}, -1, A),  # nothing known: the least recently used
        ((A, B), {}, -1, C),  # in use
        ((A, B, C, D), {}, -1, None),  # all in use
        ((), {A: 1, B: 5}, -1, C),  # known next uses are kept
        ((), {A: 1, B: 5, C: 3, D: 2}, -1, B),  # all known: the latest
        ((), {A: 1, B: 5, C: 5, D: 2}, -1, B),  # among the latest the least recently used
        ((B,), {A: 1, B: 5, C: 3, D: 2}, -1, C),
        ((), {A: 1, B: 5, C: 3, D: 2}, 4, B),
        ((), {A: 1, B: 5, C: 3, D: 2}, 5, None),  # nothing is needed later than the newcomer
        ((), {A: 1, B: 5, C: 3}, 5, D),
        ((D,), {A: 0, B: 0, C: 0}, 0, None),
        ((D,), {A: 0, B: 0, C: 0}, -1, A),  # a demand outranks every layer
        ((D,), {A: -1, B: -1, C: -1}, -1, None),  # but not what is needed at once, too
    ],
)
def test_known_cases(
    pinned: tuple[ExpertKey, ...],
    next_use: dict[ExpertKey, int],
    needed_at: int,
    victim: ExpertKey | None,
) -> None:
    assert choose_victim([A, B, C, D], pinned, next_use, needed_at) == victim


def test_nothing_resident_has_no_victim() -> None:
    assert choose_victim([], (), {}, -1) is None


def test_deciding_changes_nothing() -> None:
    residents, pinned, next_use = [A, B, C], {A}, {B: 2, C: 3}
    choose_victim(residents, pinned, next_use, 0)
    assert (residents, pinned, next_use) == ([A, B, C], {A}, {B: 2, C: 3})
