"""Each figure of the report against an obvious computation over lists and sets."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_build.fidelity import (
    acceptance_by_position,
    expected_acceptance_length,
    lru_hit_curve,
    normalized_entropy,
    one_hot,
    routing_recall,
    usage_counts,
    weighted_recall,
    window_recall,
    window_union,
)

ROUNDING = 2.0**-23
"""Twice the relative error of one float32 operation, 2**-24."""

MAX_SEQUENCES, MAX_TOKENS = 3, 9
MEAN_ROUNDING = (MAX_SEQUENCES * MAX_TOKENS + 2) * ROUNDING
"""A mean of n terms, each a rounded quotient: n - 1 additions, one division."""

Routes = list[list[list[int]]]


@st.composite
def routes_of(draw: st.DrawFn, num_streams: int = 1) -> tuple[int, list[Routes]]:
    """Number of experts and the routes of streams of one shape: ``[N][T][K]``, K distinct."""
    num_experts = draw(st.integers(1, 5))
    per_token = draw(st.integers(1, min(num_experts, 3)))
    choices = [list(choice) for choice in permutations(range(num_experts), per_token)]
    num_sequences = draw(st.integers(1, MAX_SEQUENCES))
    length = draw(st.integers(1, MAX_TOKENS))
    token = st.sampled_from(choices)
    sequence = st.lists(token, min_size=length, max_size=length)
    stream = st.lists(sequence, min_size=num_sequences, max_size=num_sequences)
    return num_experts, [draw(stream) for _ in range(num_streams)]


def hot(routes: Routes, num_experts: int) -> torch.Tensor:
    return one_hot(torch.tensor(routes), num_experts)


def windows_of(routes: Routes, window: int) -> Iterator[set[int]]:
    """The experts of each whole window."""
    for sequence in routes:
        for start in range(0, len(sequence) - window + 1, window):
            yield {expert for token in sequence[start : start + window] for expert in token}


fast = settings(deadline=None, max_examples=50)


@fast
@given(routes_of())
def test_one_hot_marks_exactly_the_chosen_experts(case: tuple[int, list[Routes]]) -> None:
    num_experts, (routes,) = case
    expected = [
        [[expert in token for expert in range(num_experts)] for token in sequence]
        for sequence in routes
    ]
    assert hot(routes, num_experts).tolist() == expected


@fast
@given(routes_of(num_streams=2))
def test_recall_is_the_share_of_the_targets_experts_that_the_draft_chose(
    case: tuple[int, list[Routes]],
) -> None:
    num_experts, (target, draft) = case
    found = routing_recall(hot(target, num_experts), hot(draft, num_experts)).tolist()
    for n, sequence in enumerate(target):
        for t, token in enumerate(sequence):
            expected = len(set(token) & set(draft[n][t])) / len(token)
            assert found[n][t] == pytest.approx(expected, rel=ROUNDING)


@fast
@given(routes_of(num_streams=2), st.integers(0, 2**32 - 1))
def test_weighted_recall_is_the_share_of_the_targets_weight_on_shared_experts(
    case: tuple[int, list[Routes]], seed: int
) -> None:
    num_experts, (target, draft) = case
    shape = torch.tensor(target).shape
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.01
    found = weighted_recall(torch.tensor(target), weights, hot(draft, num_experts)).tolist()
    for n, sequence in enumerate(target):
        for t, token in enumerate(sequence):
            parts = weights[n, t].tolist()
            shared = sum(w for e, w in zip(token, parts, strict=True) if e in draft[n][t])
            # two sums of at most 3 positive terms and a quotient
            assert found[n][t] == pytest.approx(shared / sum(parts), rel=6 * ROUNDING)


@fast
@given(routes_of(num_streams=2), st.integers(1, MAX_TOKENS))
def test_window_recall_is_that_of_the_unions(case: tuple[int, list[Routes]], window: int) -> None:
    num_experts, (target, draft) = case
    window = min(window, len(target[0]))
    recalls, unions = window_recall(hot(target, num_experts), hot(draft, num_experts), window)
    for n, streams in enumerate(zip(target, draft, strict=True)):
        pairs = list(zip(*(windows_of([stream], window) for stream in streams), strict=True))
        recall = sum(len(t & d) / len(t) for t, d in pairs) / len(pairs)
        union = sum(len(t) for t, _ in pairs) / len(pairs)
        assert recalls[n].item() == pytest.approx(recall, rel=MEAN_ROUNDING)
        assert unions[n].item() == pytest.approx(union, rel=MEAN_ROUNDING)


@fast
@given(routes_of(), st.integers(1, MAX_TOKENS))
def test_window_union_holds_the_experts_of_each_whole_window(
    case: tuple[int, list[Routes]], window: int
) -> None:
    num_experts, (routes,) = case
    window = min(window, len(routes[0]))
    unions = window_union(hot(routes, num_experts), window).flatten(0, 1)
    found = [{e for e in range(num_experts) if row[e]} for row in unions.tolist()]
    assert found == list(windows_of(routes, window))


@fast
@given(routes_of())
def test_draft_that_routes_like_the_target_has_recall_one(case: tuple[int, list[Routes]]) -> None:
    num_experts, (routes,) = case
    same = hot(routes, num_experts)
    weights = torch.ones(torch.tensor(routes).shape)
    assert (routing_recall(same, same) == 1).all()
    assert (weighted_recall(torch.tensor(routes), weights, same) == 1).all()
    assert (window_recall(same, same, 1)[0] == 1.0).all()


@st.composite
def agreements(draw: st.DrawFn) -> list[list[bool]]:
    length = draw(st.integers(1, MAX_TOKENS))
    sequence = st.lists(st.booleans(), min_size=length, max_size=length)
    return draw(st.lists(sequence, min_size=1, max_size=MAX_SEQUENCES))


@fast
@given(agreements(), st.integers(1, 12))
def test_acceptance_by_position_counts_runs_from_every_start(
    agrees: list[list[bool]], num_positions: int
) -> None:
    expected = []
    for run in range(1, min(num_positions, len(agrees[0])) + 1):
        starts = [
            all(sequence[start : start + run])
            for sequence in agrees
            for start in range(len(sequence) - run + 1)
        ]
        expected.append(sum(starts) / len(starts))
    # a sum of zeros and ones is exact, the quotient is rounded
    found = acceptance_by_position(torch.tensor(agrees), num_positions)
    assert found == pytest.approx(expected, rel=ROUNDING)


@given(st.lists(st.floats(0, 1), max_size=16), st.integers(0, 16))
def test_expected_length_is_one_and_the_chances_of_all_drafted_positions(
    chances: list[float], num_draft_tokens: int
) -> None:
    length = 1.0
    for position, chance in enumerate(chances, start=1):
        if position <= num_draft_tokens:
            length += chance
    # at most 17 additions in double precision, in either order
    assert expected_acceptance_length(chances, num_draft_tokens) == pytest.approx(
        length, rel=17 * 2.0**-52
    )


def test_expected_length_of_a_constant_chance_is_the_geometric_sum() -> None:
    chance, num_draft_tokens = 0.75, 5
    by_position = [chance**i for i in range(1, num_draft_tokens + 1)]
    expected = (1 - chance ** (num_draft_tokens + 1)) / (1 - chance)  # arXiv 2211.17192, eq. 1
    assert expected_acceptance_length(by_position, num_draft_tokens) == expected  # exact in binary


@fast
@given(routes_of())
def test_usage_counts_every_choice_once(case: tuple[int, list[Routes]]) -> None:
    num_experts, (routes,) = case
    flat = [expert for sequence in routes for token in sequence for expert in token]
    assert usage_counts(hot(routes, num_experts)).tolist() == [
        flat.count(expert) for expert in range(num_experts)
    ]


@fast
@given(st.lists(st.integers(0, 1000), min_size=2, max_size=12).filter(any))
def test_entropy_is_relative_to_uniform_usage(counts: list[int]) -> None:
    shares = [count / sum(counts) for count in counts if count]
    entropy = -sum(share * math.log(share) for share in shares) / math.log(len(counts))
    # 12 products and logarithms of double precision, each off by a few 2**-53
    assert normalized_entropy(torch.tensor(counts)) == pytest.approx(entropy, abs=1e-13)


@pytest.mark.parametrize(
    ("counts", "entropy"), [([3, 3, 3, 3], 1.0), ([0, 9, 0, 0], 0.0), ([5, 5, 0, 0], 0.5)]
)
def test_entropy_is_one_when_uniform_and_zero_for_a_single_expert(
    counts: list[int], entropy: float
) -> None:
    assert normalized_entropy(torch.tensor(counts)) == pytest.approx(entropy, abs=1e-15)


def lru_hits(routes: Routes, capacity: int) -> int:
    """A cache as a list, most recently used last, emptied for each sequence."""
    hits = 0
    for sequence in routes:
        cache: list[int] = []
        for token in sequence:
            for expert in token:
                if expert in cache:
                    hits += 1
                    cache.remove(expert)
                elif len(cache) == capacity:
                    cache.pop(0)
                cache.append(expert)
    return hits


@fast
@given(routes_of())
def test_lru_curve_is_what_a_cache_of_each_capacity_hits(case: tuple[int, list[Routes]]) -> None:
    num_experts, (routes,) = case
    accesses = sum(len(token) for sequence in routes for token in sequence)
    assert lru_hit_curve(torch.tensor(routes), num_experts) == [
        lru_hits(routes, capacity) / accesses for capacity in range(1, num_experts + 1)
    ]
