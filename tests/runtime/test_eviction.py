"""The law of eviction, and what the policies make of experts, restated by brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.eviction import (
    DECAY,
    PROB_WEIGHT,
    UNKNOWN,
    EvictionPolicy,
    LeastRecentlyUsed,
    ReuseValues,
    choose_victim,
)
from specter_runtime.experts import ExpertKey, Routing

NUM_LAYERS, NUM_EXPERTS = 3, 4
ALL = [ExpertKey(layer, e) for layer in range(NUM_LAYERS) for e in range(NUM_EXPERTS)]
A, B, C, D = (ExpertKey(0, i) for i in range(4))
KEYS = st.sampled_from(ALL)


def decide(
    values: dict[ExpertKey, float],
    evictable: set[ExpertKey],
    next_use: dict[ExpertKey, int],
    needed_at: int,
) -> ExpertKey | None:
    """``choose_victim`` of what is spelled out as dicts and sets."""
    shape = (NUM_LAYERS, NUM_EXPERTS)
    arrays = np.zeros(shape), np.zeros(shape, dtype=bool), np.full(shape, UNKNOWN)
    for array, found in zip(
        arrays, (values, dict.fromkeys(evictable, True), next_use), strict=True
    ):
        for key, value in found.items():
            array[key] = value
    before = [array.copy() for array in arrays]
    victim = choose_victim(*arrays, needed_at)
    assert all(np.array_equal(*pair) for pair in zip(arrays, before, strict=True))
    return victim


def brute_force(
    values: dict[ExpertKey, float],
    evictable: set[ExpertKey],
    next_use: dict[ExpertKey, int],
    needed_at: int,
) -> ExpertKey | None:
    """Rank every resident that may go: unknown use first, then latest use, then least value."""
    candidates = [
        (key in next_use, -next_use.get(key, 0), values.get(key, 0.0), key)
        for key in evictable
        if key not in next_use or next_use[key] > needed_at
    ]
    return min(candidates)[-1] if candidates else None


@settings(deadline=None, max_examples=250)
@given(
    values=st.dictionaries(KEYS, st.sampled_from([-1.0, 0.5, 2.0]), max_size=10),
    evictable=st.sets(KEYS, max_size=8),
    next_use=st.dictionaries(KEYS, st.integers(-1, 3), max_size=10),
    needed_at=st.integers(-1, 4),
)
def test_victim_is_that_of_the_brute_force_ranking(
    values: dict[ExpertKey, float],
    evictable: set[ExpertKey],
    next_use: dict[ExpertKey, int],
    needed_at: int,
) -> None:
    arguments = values, evictable, next_use, needed_at
    assert decide(*arguments) == brute_force(*arguments)


@pytest.mark.parametrize(
    ("pinned", "next_use", "needed_at", "victim"),
    [
        ((), {}, -1, A),  # nothing known: the least value
        ((A, B), {}, -1, C),  # in use
        ((A, B, C, D), {}, -1, None),  # all in use
        ((), {A: 1, B: 5}, -1, C),  # known next uses are kept
        ((), {A: 1, B: 5, C: 3, D: 2}, -1, B),  # all known: the latest
        ((), {A: 1, B: 5, C: 5, D: 2}, -1, B),  # among the latest the least value
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
    values = {A: 0.0, B: 1.0, C: 2.0, D: 3.0}
    assert decide(values, {A, B, C, D} - set(pinned), next_use, needed_at) == victim


def test_nothing_resident_has_no_victim() -> None:
    assert decide({}, set(), {}, -1) is None


# ---- policies --------------------------------------------------------------------------------


def routing(layer: int, *chosen: list[int], probs: list[list[float]] | None = None) -> Routing:
    selected = torch.tensor(chosen)
    return Routing(
        layer,
        selected,
        torch.ones(selected.shape),
        None if probs is None else torch.tensor(probs, dtype=torch.float32),
    )


@pytest.mark.parametrize("policy", [ReuseValues, LeastRecentlyUsed])
def test_policies_begin_with_the_order_of_calibration(policy: type[EvictionPolicy]) -> None:
    values = policy(NUM_LAYERS, NUM_EXPERTS, [C, ExpertKey(2, 1), A]).values  # type: ignore[call-arg]
    assert values[C] > values[2, 1] > values[A] > values[B] == values[1, 3]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True), min_size=1))
def test_reuse_values_are_the_decaying_average_token_by_token(tokens: list[list[int]]) -> None:
    policy = ReuseValues(NUM_LAYERS, NUM_EXPERTS, ALL)
    expected = policy.values.copy()
    generator = torch.Generator().manual_seed(len(tokens))
    probs = torch.rand(len(tokens), NUM_EXPERTS, generator=generator).softmax(-1)
    for chosen, row in zip(tokens, probs, strict=True):
        for expert in range(NUM_EXPERTS):
            told = PROB_WEIGHT * float(row[expert]) + (expert in chosen)
            expected[1, expert] = DECAY * expected[1, expert] + (1 - DECAY) * told
    half = len(tokens) // 2  # whether tokens come together or one by one
    for rows in (slice(0, half), slice(half, None)):
        if tokens[rows]:
            policy.observe(routing(1, *tokens[rows], probs=probs[rows].tolist()))
    # float32 probabilities are exact in float64; each token takes three roundings of values below
    # 3, forgotten at the rate at which they are added.
    assert np.allclose(policy.values, expected, rtol=0, atol=100 * 3 * 2.0**-53)


def test_an_expert_that_narrowly_missed_is_worth_more_than_one_that_nobody_wants() -> None:
    policy = ReuseValues(1, 4, ())
    policy.observe(routing(0, [0], probs=[[0.5, 0.4, 0.1, 0.0]]))
    assert list(np.argsort(-policy.values[0])) == [0, 1, 2, 3]
    without = ReuseValues(1, 4, ())
    without.observe(routing(0, [0]))
    assert without.values[0, 0] > without.values[0, 1] == without.values[0, 3]


def test_least_recently_used_goes_by_the_last_use() -> None:
    policy = LeastRecentlyUsed(NUM_LAYERS, NUM_EXPERTS, ALL)
    for layer, chosen in ((0, [0, 1]), (1, [3]), (0, [1, 2])):
        policy.observe(routing(layer, chosen))
    values = policy.values
    assert values[0, 1] == values[0, 2] > values[1, 3] > values[0, 0] > values[0, 3] > values[2, 3]


@pytest.mark.parametrize("policy", [ReuseValues, LeastRecentlyUsed])
def test_a_token_of_several_layers_counts_as_layer_by_layer(policy: type[EvictionPolicy]) -> None:
    generator = torch.Generator().manual_seed(0)
    together, one_by_one = (
        policy(NUM_LAYERS, NUM_EXPERTS, ALL),
        policy(NUM_LAYERS, NUM_EXPERTS, ALL),
    )
    for first, count in ((0, 3), (1, 2), (2, 1), (0, 0), (0, 1)):
        probs = torch.rand(count, NUM_EXPERTS, generator=generator)
        selected = probs.topk(2, dim=-1).indices
        together.observe_token(first, selected.numpy(), probs.numpy())
        for i in range(count):
            own = slice(i, i + 1)
            one_by_one.observe(Routing(first + i, selected[own], selected[own].float(), probs[own]))
    # Each value is a sum of at most 11 positive terms, each rounded a few times, once to float32.
    np.testing.assert_allclose(together.values, one_by_one.values, rtol=2e-6)
