"""Dense parts of a layer against float64 oracles; every tolerance follows from rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specter_build.architectures.rope import rope_frequencies
from specter_runtime.config import RopeConfig
from specter_runtime.layers import RotaryEmbedding, attend, rms_norm, rotate, swiglu
from tests import oracles
from tests.oracles import array, gamma

DTYPES = ("float32", "bfloat16")
HEAD_DIM = 16
SCALING = HEAD_DIM**-0.5


def rope(theta: float = 10_000.0) -> RotaryEmbedding:
    frequencies, factor, _ = rope_frequencies({"rope_theta": theta}, HEAD_DIM, 65_536)
    return RotaryEmbedding(RopeConfig(frequencies, factor))


def randn(*shape: int, dtype: str = "float32", seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * scale).to(getattr(torch, dtype))


# ---- RMS norm -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_rms_norm_equals_oracle(dtype: str, scale: float) -> None:
    width, eps = 48, 1e-6
    hidden, weight = randn(5, width, dtype=dtype, scale=scale), randn(width, dtype=dtype, seed=1)
    difference = array(rms_norm(hidden, weight, eps)) - (
        expected := oracles.rms_norm(array(hidden), array(weight), eps)
    )
    # The mean of squares is off by gamma(width + 1), its root by half of that; + eps, the inverse
    # root and the product are 4 roundings; then one to the dtype and one for the weight's product.
    bound = gamma(width / 2 + 5) + gamma(2, dtype)
    assert np.all(np.abs(difference) <= bound * np.abs(expected))


def test_rms_norm_of_zeros_is_zero() -> None:
    assert not rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6).any()


def test_rms_norm_rounds_before_the_weight_is_applied() -> None:
    # 1.5 / sqrt(mean(1.5 ** 2, 1)) needs rounding, and so does its product with the weight.
    hidden = torch.tensor([[1.5, 1.0]], dtype=torch.bfloat16)
    weight = torch.tensor([1.5078125, 1.0], dtype=torch.bfloat16)
    quotient = torch.tensor([1.5 / ((1.5**2 + 1) / 2) ** 0.5], dtype=torch.float32)
    rounded_first = (weight[:1] * quotient.to(torch.bfloat16)).item()
    rounded_last = (weight[:1].float() * quotient).to(torch.bfloat16).item()
    assert rounded_first != rounded_last  # the case can tell them apart
    assert rms_norm(hidden, weight, 0.0)[0, 0].item() == rounded_first


# ---- rotary embedding -----------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 1, 1000, 60_000])
@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
def test_rotation_equals_oracle(start: int, theta: float) -> None:
    heads = randn(3, 2, HEAD_DIM, seed=start)
    angles = rope(theta).angles(start, 3, torch.float32)
    positions = range(start, start + 3)
    expected = oracles.rotate(array(heads), positions, theta)
    # An inverse frequency is off by 2 roundings (exponent, quotient) and the power's own error: an
    # exponent below 1 that is off by a rounding changes theta ** exponent by ln(theta) of it, the
    # function itself adds 2. The angle is one more rounding; cosine and sine are off by the angle's
    # error and 2 of their own; two products and their sum, 2 more.
    position_error = gamma(5 + np.log(theta)) * np.array(positions)
    bound = position_error[:, None, None] + gamma(4)
    magnitude = np.abs(array(heads))
    pair = magnitude + np.roll(magnitude, HEAD_DIM // 2, axis=-1)
    assert np.all(
        np.abs(array(rotate(heads, angles, interleaved=False)) - expected) <= bound * pair
    )


def test_angles_do_not_depend_on_the_block_they_are_computed_in() -> None:
    rotary = rope()
    together = rotary.angles(7, 9, torch.bfloat16)
    for i in range(9):
        alone = rotary.angles(7 + i, 1, torch.bfloat16)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole[i : i + 1], part)


def test_interleaved_pairs_are_neighbours_and_come_out_half_split() -> None:
    heads = randn(3, 2, HEAD_DIM, seed=4)
    angles = rope().angles(5, 3, torch.float32)
    half_split = torch.cat((heads[..., 0::2], heads[..., 1::2]), dim=-1)
    assert torch.equal(
        rotate(heads, angles, interleaved=True), rotate(half_split, angles, interleaved=False)
    )


def test_dimensions_beyond_the_rotated_ones_pass() -> None:
    heads = randn(3, 2, HEAD_DIM + 8, seed=4)
    angles = rope().angles(5, 3, torch.float32)
    turned = rotate(heads, angles, interleaved=False)
    assert torch.equal(turned[..., HEAD_DIM:], heads[..., HEAD_DIM:])
    assert torch.equal(
        turned[..., :HEAD_DIM], rotate(heads[..., :HEAD_DIM], angles, interleaved=False)
    )


def test_position_zero_is_not_turned() -> None:
    heads = randn(1, 4, HEAD_DIM)
    angles = rope().angles(0, 1, torch.float32)
    assert torch.equal(rotate(heads, angles, interleaved=False), heads)


# ---- attention ------------------------------------------------------------------------------


def attention_inputs(
    num_new: int, num_seen: int, num_groups: int, dtype: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    width = HEAD_DIM
    return (
        randn(num_new, 6, width, dtype=dtype, seed=1),
        randn(num_seen, num_groups, width, dtype=dtype, seed=2),
        randn(num_seen, num_groups, width, dtype=dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_groups", [1, 2, 3, 6])
@pytest.mark.parametrize(("num_new", "num_seen"), [(1, 1), (1, 17), (5, 5), (4, 19)])
def test_attention_equals_oracle(num_new: int, num_seen: int, num_groups: int, dtype: str) -> None:
    queries, keys, values = inputs = attention_inputs(num_new, num_seen, num_groups, dtype)
    expected = oracles.attention(*map(array, inputs))
    # Products are summed in float32. A score is thus off by gamma(C) times |q| |k| and, scaled and
    # stored, by 2 roundings of itself; the exponential turns its absolute error into a relative
    # one, twice (numerator and denominator); exp, quotient and the output's own rounding are 4 more
    # in the dtype, the two sums over S positions 2 S in float32. All of it multiplies a mean of
    # values, bounded by the same mean of their magnitudes.
    longest = [np.linalg.norm(array(x), axis=-1).max() for x in (queries, keys)]
    norms = np.prod(longest) / np.sqrt(HEAD_DIM)
    score_error = (gamma(HEAD_DIM) + gamma(2, dtype)) * norms
    relative = 2 * score_error + gamma(4, dtype) + gamma(2 * num_seen)
    mean = oracles.attention(array(queries), array(keys), np.abs(array(values)))
    assert np.all(
        np.abs(array(attend(queries, keys, values, SCALING, None, None)) - expected)
        <= relative * mean
    )
    assert relative < (0.2 if dtype == "bfloat16" else 1e-4)  # else this could not fail


def test_a_row_does_not_see_later_positions() -> None:
    queries, keys, values = attention_inputs(4, 10, 3, "float32")
    before = attend(queries, keys, values, SCALING, None, None)
    keys[8:], values[8:] = 100.0, -100.0
    after = attend(queries, keys, values, SCALING, None, None)  # rows are positions 6 to 9
    assert torch.equal(before[:2], after[:2])
    assert not torch.equal(before[2:], after[2:])


@pytest.mark.parametrize("num_new", [1, 4])
def test_a_window_hides_what_lies_before_it(num_new: int) -> None:
    queries, keys, values = attention_inputs(num_new, 12, 3, "float32")
    windowed = attend(queries, keys, values, SCALING, 5, None)
    keys[: 12 - num_new - 4], values[: 12 - num_new - 4] = 100.0, -100.0
    assert torch.equal(attend(queries, keys, values, SCALING, 5, None), windowed)
    rows = [
        attend(
            queries[i : i + 1],
            keys[: 12 - num_new + i + 1],
            values[: 12 - num_new + i + 1],
            SCALING,
            5,
            None,
        )
        for i in range(num_new)
    ]
    # The same sums over 5 positions, in another order where a mask pads them: gamma(2 S + C) apart.
    bound = 2 * gamma(2 * 12 + HEAD_DIM) * values.abs().max().item()
    assert (torch.cat(rows) - windowed).abs().max() <= bound


def test_a_sink_takes_its_share_and_gives_nothing() -> None:
    queries, keys, values = attention_inputs(4, 9, 3, "float32")
    without = attend(queries, keys, values, SCALING, None, None)
    sinks = torch.full((6,), -1e4)  # a share of exp(-1e4): nothing
    # Softmax and sums in another order: gamma(2 S + C) of the largest value, twice.
    bound = 2 * gamma(2 * 9 + HEAD_DIM) * values.abs().max().item()
    none = attend(queries, keys, values, SCALING, None, sinks)
    assert (none - without).abs().max() <= bound
    all_of_it = attend(queries, keys, values, SCALING, None, torch.full((6,), 1e4))
    assert not all_of_it.any()


# ---- MLP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_swiglu_equals_oracle(dtype: str) -> None:
    inputs = [
        randn(5, 24, dtype=dtype),
        randn(40, 24, dtype=dtype, seed=1),
        randn(40, 24, dtype=dtype, seed=2),
        randn(24, 40, dtype=dtype, seed=3),
    ]
    expected = oracles.swiglu(*map(array, inputs))
    bound = oracles.swiglu_error(*map(array, inputs), dtype)
    assert np.all(np.abs(array(swiglu(*inputs)) - expected) <= bound)
    # Else this could not fail.
    assert bound.mean() < (0.3 if dtype == "bfloat16" else 1e-4) * np.abs(expected).mean()
