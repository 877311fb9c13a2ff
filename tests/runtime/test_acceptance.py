"""Acceptance: greedy cases; rejection sampling in closed form, against enumeration of the paper's.

``rejection_sample`` is a function of n + 1 uniforms. Its output distribution is integrated exactly:
each uniform's interval is split where the outcome changes, found by bisection down to 2**-48.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.acceptance import Acceptance, accept_greedy, rejection_sample
from tests import oracles
from tests.oracles import Distribution

BELOW_ONE = math.nextafter(1.0, 0.0)
RESOLUTION = 2.0**-48

# ---- greedy ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("drafted", "target", "expected"),
    [
        ([], [5], Acceptance(0, 5)),
        ([1, 2, 3], [1, 2, 3, 4], Acceptance(3, 4)),
        ([1, 2, 3], [9, 2, 3, 4], Acceptance(0, 9)),
        ([1, 2, 3], [1, 9, 3, 4], Acceptance(1, 9)),
        ([1, 2, 3], [1, 2, 9, 4], Acceptance(2, 9)),
        ([7, 7], [7, 8, 7], Acceptance(1, 8)),
    ],
)
def test_greedy_accepts_the_longest_prefix_that_is_the_targets_own(
    drafted: list[int], target: list[int], expected: Acceptance
) -> None:
    assert accept_greedy(drafted, target) == expected


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=6), st.integers(0, 2))
def test_greedy_commits_what_the_target_says_after_the_accepted_prefix(
    pairs: list[tuple[int, int]], last: int
) -> None:
    drafted, target = [d for d, _ in pairs], [*(t for _, t in pairs), last]
    acceptance = accept_greedy(drafted, target)
    committed = [*drafted[: acceptance.num_accepted], acceptance.next_token_id]
    assert committed == target[: len(committed)]
    rejected = drafted[acceptance.num_accepted :]
    assert not rejected or rejected[0] != target[acceptance.num_accepted]


# ---- rejection sampling, in closed form -----------------------------------------------------

Window = Callable[[Sequence[float]], Acceptance]
"""``rejection_sample`` of one drafted sequence as a function of its uniforms."""


def tensor(rows: Sequence[Sequence[float]], vocab_size: int) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64).reshape(len(rows), vocab_size)


def window_of(
    drafted: tuple[int, ...], draft: Distribution, target: Distribution, vocab_size: int
) -> Window:
    prefixes = [drafted[:i] for i in range(len(drafted) + 1)]
    draft_probs = tensor([draft(prefix) for prefix in prefixes[:-1]], vocab_size)
    target_probs = tensor([target(prefix) for prefix in prefixes], vocab_size)
    return lambda uniforms: rejection_sample(drafted, draft_probs, target_probs, uniforms)


def step_at(is_above: Callable[[float], bool]) -> float:
    """Where a monotone condition on [0, 1) turns true, to within ``RESOLUTION``; 1 if nowhere."""
    if is_above(0.0):
        return 0.0
    low, high = 0.0, 1.0
    while high - low > RESOLUTION:
        middle = (low + high) / 2
        low, high = (low, middle) if is_above(middle) else (middle, high)
    return high


def integrate(window: Window, num_drafted: int, vocab_size: int) -> dict[Acceptance, float]:
    """Probability of each outcome over independent uniforms, by splitting [0, 1) at the steps."""
    outcomes: dict[Acceptance, float] = {}
    reach = 1.0
    for i in range(num_drafted + 1):
        # The first i tokens are accepted at 0; token i is rejected just below 1, if it ever is.
        def at(uniform: float, last: float, i: int = i) -> Acceptance:
            decisions = [0.0] * i + [uniform] + [BELOW_ONE] * num_drafted
            return window([*decisions[:num_drafted], last])

        accept = step_at(lambda u, at=at, i=i: at(u, 0.5).num_accepted == i)
        rejected = accept < 1 or i == num_drafted
        edges = [0.0]
        for token in range(1, vocab_size) if rejected else ():
            edges.append(
                step_at(lambda u, at=at, token=token: at(BELOW_ONE, u).next_token_id >= token)
            )
        for token, (low, high) in enumerate(itertools.pairwise([*edges, 1.0])):
            if rejected and high > low:
                share = (1.0 if i == num_drafted else 1 - accept) * (high - low)
                outcomes[Acceptance(i, token)] = reach * share
        reach *= accept
        if reach == 0:
            break
    return outcomes


def measured_outcomes(
    draft: Distribution, target: Distribution, vocab_size: int, num_draft_tokens: int
) -> dict[tuple[int, ...], float]:
    """Probability of each sequence of committed tokens, of our code, all drafts taken together."""
    outcomes: dict[tuple[int, ...], float] = {}
    for drafted in itertools.product(range(vocab_size), repeat=num_draft_tokens):
        chance = oracles.sequence_probability(draft, drafted)
        if chance > 0:
            window = window_of(drafted, draft, target, vocab_size)
            for acceptance, share in integrate(window, num_draft_tokens, vocab_size).items():
                committed = (*drafted[: acceptance.num_accepted], acceptance.next_token_id)
                outcomes[committed] = outcomes.get(committed, 0.0) + chance * share
    return outcomes


def random_distribution(vocab_size: int, seed: int, share_of_zeros: float = 0.0) -> Distribution:
    """A distribution of its own after every prefix."""

    def distribution(prefix: tuple[int, ...]) -> Sequence[float]:
        source = random.Random(f"{seed} {prefix}")
        zeros = [source.random() < share_of_zeros for _ in range(vocab_size)]
        parts = [0.0 if zero else source.expovariate(1.0) for zero in zeros]
        parts = parts if any(parts) else [1.0, *parts[1:]]
        return [part / sum(parts) for part in parts]

    return distribution


def only(*tokens: int, vocab_size: int) -> Distribution:
    """Equal probability for ``tokens``, none for others, after every prefix."""
    return lambda _: [(i in tokens) / len(tokens) for i in range(vocab_size)]


CASES = {
    "dense": (random_distribution(4, 1), random_distribution(4, 2), 4),
    "three tokens": (random_distribution(3, 10), random_distribution(3, 11), 3),
    "sparse": (random_distribution(4, 3, 0.5), random_distribution(4, 4, 0.5), 4),
    "five tokens": (random_distribution(5, 5, 0.2), random_distribution(5, 6, 0.2), 5),
    "draft knows one token": (only(1, vocab_size=3), random_distribution(3, 7), 3),
    "target knows one token": (random_distribution(3, 8), only(2, vocab_size=3), 3),
    "disjoint": (only(0, 1, vocab_size=4), only(2, 3, vocab_size=4), 4),
    "identical": (random_distribution(3, 9), random_distribution(3, 9), 3),
}


def window_sizes(case: str) -> Sequence[int]:
    return (1, 2, 3) if CASES[case][2] == 3 else (1, 2)


def assert_equal_distributions(
    actual: dict[tuple[int, ...], float], expected: dict[tuple[int, ...], float]
) -> None:
    # Every step is off by RESOLUTION at most; an outcome's probability is a sum over drafts (whose
    # probabilities sum to 1) of products of at most 4 factors with two steps each, so it is off by
    # 8 of them and by rounding: 4e-14 together.
    tolerance = 8 * RESOLUTION + 1e-14
    for tokens in actual.keys() | expected.keys():
        assert abs(actual.get(tokens, 0.0) - expected.get(tokens, 0.0)) <= tolerance, tokens


@pytest.mark.parametrize(
    ("case", "num_draft_tokens"), [(case, n) for case in CASES for n in window_sizes(case)]
)
def test_rejection_sampling_has_the_targets_distribution(case: str, num_draft_tokens: int) -> None:
    draft, target, vocab_size = CASES[case]
    measured = measured_outcomes(draft, target, vocab_size, num_draft_tokens)
    assert_equal_distributions(
        measured, oracles.speculative_outcomes(draft, target, vocab_size, num_draft_tokens)
    )
    length = num_draft_tokens + 1
    assert_equal_distributions(
        oracles.continued(measured, target, vocab_size, length),
        {
            tokens: oracles.sequence_probability(target, tokens)
            for tokens in itertools.product(range(vocab_size), repeat=length)
        },
    )


def test_outcomes_are_a_product_of_steps_as_the_integration_assumes() -> None:
    """Any uniforms at all give the outcome that the steps, found one by one, foretell."""
    draft, target, vocab_size = CASES["dense"]
    drafted = (2, 0, 1)
    window = window_of(drafted, draft, target, vocab_size)
    source = random.Random(0)
    for _ in range(200):
        uniforms = [source.random() for _ in range(4)]
        rows = [(draft(drafted[:i]), target(drafted[:i])) for i in range(3)]
        ratios = [t[x] / d[x] for (d, t), x in zip(rows, drafted, strict=True)]
        rejections = [i for i in range(3) if uniforms[i] >= ratios[i]]
        num_accepted = min(rejections, default=3)
        weights = list(target(drafted[:num_accepted]))
        if rejections:
            draft_row = draft(drafted[:num_accepted])
            weights = [max(0.0, t - d) for t, d in zip(weights, draft_row, strict=True)]
        point = uniforms[-1] * sum(weights)
        sums = itertools.accumulate(weights)
        token = next(i for i, mass in enumerate(sums) if mass > point)
        assert window(uniforms) == Acceptance(num_accepted, token)


# ---- rejection sampling, at the edges -------------------------------------------------------


@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_identical_distributions_always_accept(uniform: float) -> None:
    row = [0.1, 0.2, 0.3, 0.4]
    for drafted in itertools.product(range(4), repeat=2):
        acceptance = rejection_sample(
            drafted, tensor([row] * 2, 4), tensor([row] * 3, 4), [uniform] * 3
        )
        assert acceptance.num_accepted == 2


@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_disjoint_distributions_never_accept(uniform: float) -> None:
    acceptance = rejection_sample(
        [0], tensor([[1.0, 0.0]], 2), tensor([[0.0, 1.0]] * 2, 2), [uniform] * 2
    )
    assert acceptance == Acceptance(0, 1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_a_token_that_the_target_gives_no_probability_is_never_committed(uniform: float) -> None:
    """Not even one that the draft gave none either: such a draft breaks the contract."""
    for draft_row in ([0.0, 1.0], [0.5, 0.5]):
        acceptance = rejection_sample(
            [0], tensor([draft_row], 2), tensor([[0.0, 1.0]] * 2, 2), [uniform] * 2
        )
        assert acceptance == Acceptance(0, 1)


@pytest.mark.parametrize("uniform", [0.0, 0.5, BELOW_ONE])
def test_a_rejected_token_is_not_recovered(uniform: float) -> None:
    """The excess of a token that was drafted too often is zero."""
    acceptance = rejection_sample(
        [1], tensor([[0.1, 0.8, 0.1]], 3), tensor([[0.3, 0.4, 0.3]] * 2, 3), [0.6, uniform]
    )
    assert acceptance.num_accepted == 0
    assert acceptance.next_token_id in (0, 2)


def test_no_draft_at_all_draws_from_the_target() -> None:
    rows = tensor([[0.25, 0.25, 0.5]], 3)
    outcomes = [rejection_sample([], tensor([], 3), rows, [i / 4]) for i in range(4)]
    assert outcomes == [Acceptance(0, token) for token in (0, 1, 2, 2)]


def test_a_rejection_without_excess_recovers_from_the_target() -> None:
    """Rounding can leave a draft row above the target's everywhere."""
    acceptance = rejection_sample(
        [0], tensor([[0.6, 0.5]], 2), tensor([[0.5, 0.5]] * 2, 2), [0.9, 0.75]
    )
    assert acceptance == Acceptance(0, 1)
