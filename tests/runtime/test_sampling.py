"""Logits to probabilities against an oracle; the draw against the inverse distribution function."""

from __future__ import annotations

import math
from itertools import accumulate

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from specter_runtime.config import SamplingConfig
from specter_runtime.sampling import draw, probabilities
from tests import oracles
from tests.oracles import gamma

SETTINGS = settings(deadline=None, max_examples=60)
BELOW_ONE = math.nextafter(1.0, 0.0)
SMALLEST = math.nextafter(0.0, 1.0)  # half of it rounds to itself or to 0

logit_rows = st.lists(
    st.one_of(st.integers(-3, 3).map(float), st.floats(-30, 30, width=32)), min_size=1, max_size=12
)
weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1.0)), min_size=1, max_size=8).filter(
    any
)

uniforms = st.floats(0.0, 1.0, exclude_max=True)


def one_row(logits: list[float], **sampling: float) -> list[float]:
    config = SamplingConfig(**{"temperature": 1.0, **sampling})  # type: ignore[arg-type]
    return probabilities(torch.tensor([logits]), config)[0].tolist()


# ---- probabilities --------------------------------------------------------------------------


@SETTINGS
@given(
    logits=logit_rows,
    temperature=st.floats(0.1, 20.0),  # no lower: exp(-60 / 0.1) is still a normal number
    top_k=st.integers(0, 14),
    top_p=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
)
def test_probabilities_equal_oracle(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    # A sum within rounding of top_p may fall on either side; 12 sums of 12 are off by less.
    assume(top_p == 1.0 or oracles.top_p_margin(logits, temperature, top_k, top_p) > 1e-12)
    expected = oracles.filtered_probabilities(logits, temperature, top_k, top_p)
    actual = one_row(logits, temperature=temperature, top_k=top_k, top_p=top_p)
    # A quotient is off by one rounding, a difference from the largest by two more; the exponential
    # makes a relative error of it, in numerator and denominator; exp, sum and quotient add up.
    largest = max(map(abs, logits)) / temperature
    relative = 2 * gamma(3, "float64") * 2 * largest + gamma(2 * len(logits) + 6, "float64")
    for probability, wanted in zip(actual, expected, strict=True):
        assert abs(probability - wanted) <= relative * wanted
        assert (probability == 0) == (wanted == 0)


def test_rows_are_independent() -> None:
    rows = [[0.0, 1.0, 2.0, -1.0], [5.0, 5.0, -5.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
    config = SamplingConfig(temperature=0.7, top_k=3, top_p=0.8)
    together = probabilities(torch.tensor(rows), config)
    for row, logits in zip(together, rows, strict=True):
        assert torch.equal(row, probabilities(torch.tensor([logits]), config)[0])


def test_probabilities_are_float64() -> None:
    assert probabilities(torch.zeros(2, 3), SamplingConfig(1.0)).dtype == torch.float64


def test_top_k_of_one_leaves_the_argmax() -> None:
    assert one_row([1.0, 3.0, 2.0], top_k=1) == [0, 1, 0]


def test_ties_at_the_edge_of_top_k_are_kept() -> None:
    assert one_row([2.0, 1.0, 2.0, 2.0, 0.0], top_k=2) == pytest.approx(
        [1 / 3, 0, 1 / 3, 1 / 3, 0], rel=gamma(8, "float64")
    )


@pytest.mark.parametrize("top_k", [0, 3, 4])
def test_top_k_of_zero_or_of_the_vocabulary_is_off(top_k: int) -> None:
    assert one_row([1.0, 3.0, 2.0], top_k=top_k) == one_row([1.0, 3.0, 2.0])


@pytest.mark.parametrize("top_p", [0.0, 1e-300, 0.3])
def test_a_small_top_p_leaves_the_most_probable_token(top_p: float) -> None:
    assert one_row([1.0, 3.0, 2.0], top_p=top_p) == [0, 1, 0]


def test_a_small_top_p_leaves_one_of_equal_tokens() -> None:
    assert one_row([1.0] * 4, top_p=0.2) == [1, 0, 0, 0]


def test_top_p_keeps_the_token_that_reaches_it() -> None:
    # Four equal tokens have exactly 1/4 each, and their sums are exact.
    assert one_row([0.0] * 4, top_p=0.5) == [0.5, 0.5, 0, 0]
    assert one_row([0.0] * 4, top_p=0.500001) == pytest.approx(
        [1 / 3, 1 / 3, 1 / 3, 0], rel=gamma(8, "float64")
    )


def test_top_p_is_taken_of_what_top_k_left() -> None:
    """Two of four equal tokens after top-k would be three if top-p were taken of all."""
    logits = [1.0, 1.0, 0.0, 0.0]
    of_all = sum(sorted(oracles.filtered_probabilities(logits, 1.0, 0, 1.0))[-2:])
    assert of_all < 0.75  # the first two do not reach it, unless top-k comes first
    assert one_row(logits, top_k=2, top_p=0.75) == [0.5, 0.5, 0, 0]


def test_temperature_comes_before_top_p() -> None:
    """At temperature 1/2 the first token alone has 0.88 of the mass; at 1 it would have 0.73."""
    assert one_row([1.0, 0.0], temperature=0.5, top_p=0.8) == [1, 0]


def test_a_low_temperature_approaches_the_argmax() -> None:
    assert one_row([1.0, 1.001, 0.0], temperature=1e-6) == [0, 1, 0]


# ---- draw -----------------------------------------------------------------------------------


@SETTINGS
@given(weights=weights, uniform=uniforms)
def test_draw_inverts_the_distribution_function(weights: list[float], uniform: float) -> None:
    sums = list(accumulate(weights))
    point = uniform * sums[-1]
    assume(min(abs(point - mass) for mass in sums) > 1e-12)  # where rounding decides
    expected = next(token for token, mass in enumerate(sums) if mass > point)
    assert draw(torch.tensor(weights, dtype=torch.float64), uniform) == expected


@SETTINGS
@given(
    weights=st.one_of(weights, st.lists(st.sampled_from([0.0, SMALLEST]), max_size=4).filter(any)),
    uniform=st.one_of(uniforms, st.sampled_from([0.0, SMALLEST, 0.5, BELOW_ONE])),
)
def test_a_token_of_probability_zero_is_never_drawn(weights: list[float], uniform: float) -> None:
    assert weights[draw(torch.tensor(weights, dtype=torch.float64), uniform)] > 0


@pytest.mark.parametrize(("uniform", "expected"), [(0.0, 1), (BELOW_ONE, 3)])
def test_the_ends_of_the_unit_interval_draw_the_first_and_last_possible_token(
    uniform: float, expected: int
) -> None:
    probs = torch.tensor([0.0, 0.3, 0.0, 0.7, 0.0], dtype=torch.float64)
    assert draw(probs, uniform) == expected


@SETTINGS
@given(weights=weights, uniform=uniforms, exponent=st.integers(-20, 20))
def test_weights_need_not_sum_to_one(weights: list[float], uniform: float, exponent: int) -> None:
    """A power of 2 changes no rounding."""
    probs = torch.tensor(weights, dtype=torch.float64)
    assert draw(probs, uniform) == draw(probs * 2.0**exponent, uniform)


def test_draw_of_the_uniforms_of_a_grid_has_the_frequencies_of_the_distribution() -> None:
    probs = torch.tensor([0.125, 0.0, 0.5, 0.25, 0.125], dtype=torch.float64)
    drawn = [draw(probs, i / 64) for i in range(64)]
    assert [drawn.count(token) for token in range(5)] == [8, 0, 32, 16, 8]
