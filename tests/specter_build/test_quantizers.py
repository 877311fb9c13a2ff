"""Codes are the nearest there are, and the error of each weight is bounded by its group's scale.

Notation of the bounds: a group has ``2 ** bits`` levels, ``s`` is the scale that is stored and
``e`` the one that would fit exactly: (extreme weight) / ``-middle`` or (high - low) / ``top``.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import fields

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_build.quantize_draft import QuantizedLayer, draft_tensors, quantize_layer
from specter_build.quantizers import GridFormat, is_finite, round_to_nearest, squared_errors
from specter_build.recipe import DraftRecipe
from specter_runtime.errors import CheckpointError
from specter_runtime.experts import PROJECTIONS, ExpertKey, ExpertWeights
from specter_runtime.packed import BITS, PackedTensor, dequantize, packed_nbytes, unpack_codes

BFLOAT16_ROUNDING = 2.0**-8
"""Relative error of rounding to bfloat16: half the spacing 2**-7 of 8 significant bits."""

BFLOAT16_UNDERFLOW = 2.0**-134
"""Absolute error where bfloat16 is subnormal: half the spacing 2**-133."""

STEP_ROUNDING = 2.0**-14
"""Error, in steps, of finding a code in float32.

``weight / scale`` is at most 2**8 (1 + 2**-8) in magnitude and is off by 2**-24 of it; adding the
zero point gives at most 2**9, again off by 2**-24 of it: under 2**-15 + 2**-15.
"""


def quantize(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool) -> PackedTensor:
    """With the whole range of each group; clipped ranges have their own tests."""
    return round_to_nearest(weight, GridFormat(bits, group_size, symmetric))


quantization = st.tuples(st.sampled_from(BITS), st.sampled_from([8, 12, 32]), st.booleans())


@st.composite
def weights(draw: st.DrawFn, largest_exponent: int = 120) -> torch.Tensor:
    """Weights ``[N, M]`` whose groups differ in size: zero, constant, one-sided, tiny and huge.

    Exponents start where float32 is subnormal. ``M`` need not be a multiple of a group.
    """
    num_rows, num_columns = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    weight = torch.randn(num_rows, num_columns, dtype=torch.float64, generator=generator)
    kind = draw(st.sampled_from(["signed", "positive", "negative", "constant", "zero", "sparse"]))
    if kind in ("positive", "negative"):
        weight = weight.abs() * (1 if kind == "positive" else -1)
    elif kind == "constant":
        weight = torch.full_like(weight, float(weight[0, 0]))
    elif kind == "zero":
        weight.zero_()
    elif kind == "sparse":
        weight *= torch.rand(weight.shape, generator=generator) < 0.1
    exponents = torch.randint(-149, largest_exponent + 1, (num_rows, 1), generator=generator)
    wide = weight.clamp(-7, 7) * torch.pow(2.0, exponents.to(torch.float64))
    return wide.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def in_groups(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Float64 ``[N, groups, g]``, the last group filled with zeros."""
    padding = -weight.shape[1] % group_size
    padded = torch.nn.functional.pad(weight.to(torch.float64), (0, padding))
    return padded.view(weight.shape[0], -1, group_size)


def levels_of(packed: PackedTensor) -> torch.Tensor:
    """What each code of each group stands for, in float64: ``[N, groups, 2 ** bits]``."""
    codes = torch.arange(2**packed.bits, dtype=torch.float64)
    if packed.zero_points is None:
        zero_points = torch.full(packed.scales.shape, 2.0 ** (packed.bits - 1), dtype=torch.float64)
    else:
        zero_points = packed.zero_points.to(torch.float64)
    return packed.scales.to(torch.float64).unsqueeze(-1) * (codes - zero_points.unsqueeze(-1))


@settings(deadline=None, max_examples=60)
@given(weights(), quantization)
def test_each_weight_gets_the_nearest_level_of_its_group(
    weight: torch.Tensor, how: tuple[int, int, bool]
) -> None:
    bits, group_size, symmetric = how
    packed = quantize(weight, bits, group_size, symmetric)
    groups = in_groups(weight, group_size)
    error = (in_groups(dequantize(packed, torch.float64), group_size) - groups).abs()
    distances = (levels_of(packed).unsqueeze(-2) - groups.unsqueeze(-1)).abs()
    step = packed.scales.to(torch.float64).abs().unsqueeze(-1)
    # A code off by one costs what the weight was off the middle: twice the error of finding it.
    assert (error <= distances.amin(-1) + 2 * STEP_ROUNDING * step).all()


@settings(deadline=None, max_examples=60)
@given(weights(), st.sampled_from(BITS), st.sampled_from([8, 12, 32]))
def test_symmetric_error_is_bounded_by_the_scale(
    weight: torch.Tensor, bits: int, group_size: int
) -> None:
    """Half a step inside the levels; beyond them what the rounding of the scale leaves over.

    Levels are -middle s .. (middle - 1) s and weights lie within middle |e|. With
    delta = |s - e|: beyond the level of the extreme weight, at most middle |e| - middle |s|
    <= middle delta; beyond the last level of the other sign, at most middle |e| - (middle - 1) |s|
    <= |s| + middle delta.
    """
    middle = 2 ** (bits - 1)
    packed = quantize(weight, bits, group_size, True)
    groups = in_groups(weight, group_size)
    error = (in_groups(dequantize(packed, torch.float64), group_size) - groups).abs()
    scale = packed.scales.to(torch.float64).unsqueeze(-1)
    exact = groups.abs().amax(-1, keepdim=True) / middle
    delta = (exact * BFLOAT16_ROUNDING).clamp(min=BFLOAT16_UNDERFLOW)
    assert ((scale.abs() - exact).abs() <= delta).all()
    levels = levels_of(packed)
    low, high = levels.amin(-1, keepdim=True), levels.amax(-1, keepdim=True)
    is_inside = (low <= groups) & (groups <= high)
    extreme = groups.gather(-1, groups.abs().argmax(-1, keepdim=True))
    is_extreme_sign = groups * extreme > 0
    step = scale.abs()
    half = step * (0.5 + STEP_ROUNDING)
    bound = torch.where(is_extreme_sign, middle * delta, step + middle * delta)
    assert (error <= torch.where(is_inside, half, torch.maximum(half, bound))).all()


@settings(deadline=None, max_examples=60)
@given(weights(), st.sampled_from(BITS), st.sampled_from([8, 12, 32]))
def test_asymmetric_error_is_bounded_by_the_scale(
    weight: torch.Tensor, bits: int, group_size: int
) -> None:
    """Half a step inside the levels; beyond them half a step more than the scale leaves over.

    The levels span top s and weights span top e <= top s + top delta, delta = |s - e|. The zero
    point is rounded (half a step) and clamped to the levels, so at either end at most
    s / 2 + top delta is cut off.
    """
    top = 2**bits - 1
    packed = quantize(weight, bits, group_size, False)
    groups = in_groups(weight, group_size)
    error = (in_groups(dequantize(packed, torch.float64), group_size) - groups).abs()
    scale = packed.scales.to(torch.float64).unsqueeze(-1)
    low = groups.amin(-1, keepdim=True).clamp(max=0)
    high = groups.amax(-1, keepdim=True).clamp(min=0)
    exact = (high - low) / top
    # two roundings in float32 (difference and quotient, 2**-24 each) before the one to bfloat16
    delta = (exact * (BFLOAT16_ROUNDING + 2.0**-22)).clamp(min=BFLOAT16_UNDERFLOW + 2.0**-148)
    assert ((scale - exact).abs() <= delta).all()
    levels = levels_of(packed)
    is_inside = (levels.amin(-1, keepdim=True) <= groups) & (
        groups <= levels.amax(-1, keepdim=True)
    )
    half = scale * (0.5 + STEP_ROUNDING)
    assert (error <= torch.where(is_inside, half, half + top * delta)).all()


@settings(deadline=None, max_examples=40)
@given(weights(), st.sampled_from(BITS), st.sampled_from([8, 12, 32]))
def test_asymmetric_quantization_keeps_zero_exactly(
    weight: torch.Tensor, bits: int, group_size: int
) -> None:
    weight[:, ::3] = 0
    restored = dequantize(quantize(weight, bits, group_size, False), torch.float32)
    assert (restored[weight == 0] == 0).all()


@settings(deadline=None, max_examples=60)
@given(quantization, st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(-100, 100))
def test_weight_on_the_grid_is_reproduced_exactly(
    how: tuple[int, int, bool], seed: int, num_columns: int, exponent: int
) -> None:
    """Code times scale has 16 significant bits and is exact in float32, and so is its inverse."""
    bits, group_size, symmetric = how
    generator = torch.Generator().manual_seed(seed)
    num_groups = math.ceil(num_columns / group_size)
    shape = (2, num_groups * group_size)
    codes = torch.randint(0, 2**bits, shape, generator=generator).view(2, -1, group_size)
    codes[..., 0] = 0  # a group on the grid reaches its outermost levels
    codes[..., 1] = 2**bits - 1
    zero_point = (
        2 ** (bits - 1) if symmetric else int(torch.randint(0, 2**bits, (), generator=generator))
    )
    mantissas = torch.randint(128, 256, (2, num_groups, 1), generator=generator)
    scales = torch.ldexp(mantissas.to(torch.float32), torch.tensor(exponent - 7))
    weight = ((codes - zero_point) * scales).view(shape)
    last = num_columns - (num_groups - 1) * group_size
    if not symmetric and last < 2:  # the last group has lost its highest level
        num_columns += 1
    weight = weight[:, :num_columns]
    packed = quantize(weight, bits, group_size, symmetric)
    assert torch.equal(dequantize(packed, torch.float32), weight)
    assert torch.equal(packed.scales.to(torch.float32), scales.squeeze(-1))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_more_bits_are_never_worse_on_gaussian_weights(symmetric: bool, seed: int) -> None:
    """A bit more halves the step: the squared error of 6,144 weights falls about fourfold."""
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(seed))
    errors = [squared_errors(weight, quantize(weight, bits, 32, symmetric))[0] for bits in BITS]
    assert errors == sorted(errors, reverse=True)
    assert len(set(errors)) == len(errors)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("symmetric", [True, False])
def test_weight_that_is_no_number_is_refused(bad: float, symmetric: bool) -> None:
    weight = torch.ones(2, 9)
    weight[1, 8] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        quantize(weight, 4, 8, symmetric)


@pytest.mark.parametrize("symmetric", [True, False])
def test_finite_weights_become_finite_or_are_refused(symmetric: bool) -> None:
    """A scale rounded up times the outermost code, or high - low, can pass float32's largest."""
    largest = torch.finfo(torch.float32).max
    weight = torch.tensor([[largest, -largest, 0.0, 1.0]])
    with contextlib.suppress(ValueError):
        packed = quantize(weight, 4, 8, symmetric)
        assert torch.isfinite(dequantize(packed, torch.float32)).all()


@settings(deadline=None, max_examples=40)
@given(weights(), quantization)
def test_packed_weight_has_the_promised_form(
    weight: torch.Tensor, how: tuple[int, int, bool]
) -> None:
    bits, group_size, symmetric = how
    packed = quantize(weight, bits, group_size, symmetric)
    num_rows, num_columns = weight.shape
    groups = (num_rows, math.ceil(num_columns / group_size))
    assert packed.shape == (num_rows, num_columns)
    assert (packed.bits, packed.group_size) == (bits, group_size)
    assert (packed.scales.dtype, tuple(packed.scales.shape)) == (torch.bfloat16, groups)
    assert packed.nbytes == packed_nbytes(packed.shape, bits, group_size, symmetric)
    if symmetric:
        assert packed.zero_points is None
    else:
        assert packed.zero_points is not None
        assert (packed.zero_points.dtype, tuple(packed.zero_points.shape)) == (torch.uint8, groups)
        assert int(packed.zero_points.max()) < 2**bits
    assert int(unpack_codes(packed.codes, bits, num_columns).max()) < 2**bits


@settings(deadline=None, max_examples=40)
@given(weights(largest_exponent=20), quantization)
def test_squared_errors_equal_those_in_double_precision(
    weight: torch.Tensor, how: tuple[int, int, bool]
) -> None:
    """Each term is computed in float32, sums are in double precision.

    An error is a difference off by 2**-24 of itself, its square by 2 * 2**-24 + 2**-24 more: under
    2**-22. Squares below float32's smallest number, 2**-149, are lost.
    """
    packed = quantize(weight, *how)
    wide = weight.to(torch.float64)
    expected_error = (dequantize(packed, torch.float64) - wide).pow(2).sum()
    expected_total = wide.pow(2).sum()
    lost = weight.numel() * 2.0**-149
    error, total = squared_errors(weight, packed)
    assert error == pytest.approx(float(expected_error), rel=2.0**-22, abs=lost)
    assert total == pytest.approx(float(expected_total), rel=2.0**-22, abs=lost)


# ---- a whole layer --------------------------------------------------------------------------


def make_experts(num_experts: int) -> dict[ExpertKey, ExpertWeights]:
    generator = torch.Generator().manual_seed(0)
    return {
        ExpertKey(3, e): ExpertWeights(
            torch.randn(24, 20, generator=generator),
            torch.randn(24, 20, generator=generator),
            torch.randn(20, 24, generator=generator),
        )
        for e in range(num_experts)
    }


def quantize_experts(
    experts: Mapping[ExpertKey, ExpertWeights], bits: int, symmetric: bool = True
) -> QuantizedLayer:
    """All experts at one width, in groups of 16."""
    recipe = DraftRecipe.model_validate({"bits": bits, "group_size": 16, "symmetric": symmetric})
    return quantize_layer(experts, recipe, [bits] * len(experts), None)


def test_error_of_a_layer_is_relative_to_all_its_weights() -> None:
    experts = make_experts(3)
    quantized = quantize_experts(experts, 3)
    error = total = 0.0
    for key, expert in experts.items():
        restored = quantized.packed[key].to(torch.float64)
        for projection in ("gate_proj", "up_proj", "down_proj"):
            wide = getattr(expert, projection).to(torch.float64)
            error += float((getattr(restored, projection) - wide).pow(2).sum())
            total += float(wide.pow(2).sum())
    # both sums are off by less than 2**-22, see above
    assert quantized.relative_error == pytest.approx(error / total, rel=2.0**-21)


def test_layer_of_zeros_has_no_error() -> None:
    zeros = ExpertWeights(torch.zeros(8, 8), torch.zeros(8, 8), torch.zeros(8, 8))
    quantized = quantize_experts({ExpertKey(0, 0): zeros}, 4)
    assert quantized.relative_error == 0.0
    assert not quantized.packed[ExpertKey(0, 0)].to(torch.float32).gate_proj.any()


def test_layer_without_routed_experts_has_no_stand_ins() -> None:
    quantized = quantize_experts({}, 4)
    assert (quantized.packed, quantized.relative_error) == ({}, 0.0)


@pytest.mark.parametrize("name", [f.name for f in fields(ExpertWeights)])
@pytest.mark.parametrize("bits", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weight_that_is_no_number_is_refused_with_or_without_a_stand_in(
    name: str, bits: int, dtype: torch.dtype
) -> None:
    """A bias is not quantized, an expert of 0 bits is not at all: they are looked at as well."""
    biases = [torch.zeros(24), torch.zeros(24), torch.zeros(20)]
    expert = ExpertWeights(
        *(w.to(dtype) for w in (*make_experts(1)[ExpertKey(3, 0)].tensors().values(), *biases))
    )
    recipe = DraftRecipe.model_validate({"bits": 4, "group_size": 16})
    experts = {ExpertKey(3, 0): make_experts(1)[ExpertKey(3, 0)], ExpertKey(3, 1): expert}
    quantize_layer(experts, recipe, [4, bits], None)
    getattr(expert, name).view(-1)[-1] = -math.inf
    with pytest.raises(CheckpointError, match=f"layer 3, expert 1, {name}: .*NaN or infinity"):
        quantize_layer(experts, recipe, [4, bits], None)


@pytest.mark.parametrize(
    ("bad", "dtype"),
    [
        (math.nan, torch.float8_e4m3fn),  # it has no infinity
        *itertools.product(
            (math.nan, math.inf, -math.inf), (torch.float32, torch.bfloat16, torch.float16)
        ),
    ],
    ids=str,
)
def test_what_is_no_number_is_found_in_every_dtype(bad: float, dtype: torch.dtype) -> None:
    tensor = torch.linspace(-400, 400, 60).view(3, 20).to(dtype)
    assert is_finite(tensor)
    bits = tensor.to(torch.float32)
    bits[1, 7] = bad
    assert not is_finite(bits.to(dtype))


def test_weight_that_is_no_number_is_refused_by_layer_expert_and_projection() -> None:
    experts = make_experts(2)
    experts[ExpertKey(3, 1)].up_proj[5, 5] = math.nan
    with pytest.raises(CheckpointError, match=r"layer 3, expert 1, up_proj: .*NaN"):
        quantize_experts(experts, 4)


@pytest.mark.parametrize("symmetric", [True, False])
def test_draft_tensors_are_named_after_the_checkpoints(symmetric: bool) -> None:
    experts = make_experts(2)
    names = {key: {role: f"{role}.{key.expert}" for role in PROJECTIONS} for key in experts}
    packed = quantize_experts(experts, 4, symmetric).packed
    tensors = draft_tensors(packed, names)
    parts = ("codes", "scales") if symmetric else ("codes", "scales", "zero_points")
    assert tensors.keys() == {
        f"{name}.{part}" for n in names.values() for name in n.values() for part in parts
    }
    for key in experts:
        assert torch.equal(tensors[f"up_proj.{key.expert}.codes"], packed[key].up_proj.codes)
        assert torch.equal(tensors[f"down_proj.{key.expert}.scales"], packed[key].down_proj.scales)
