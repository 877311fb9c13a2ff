"""From a weight to codes: pure.

A *grid* is what a group's codes are multiples of: a scale and, where it is asymmetric, a zero
point. Choosing the grid and choosing the codes are two questions: ``round_to_nearest`` answers the
second in the obvious way, ``gptq`` in a better one, on the same grids.

Called by: quantize_draft, calibrated_quantizers.  Next: specter_runtime.packed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from specter_runtime.packed import PackedTensor, dequantize, pack_codes

Clip = Literal["none", "mse"]

CLIP_RATIOS = tuple(1 - step / 20 for step in range(13))
"""Shares of a group's range that ``mse`` tries, 1 first: 1.00, 0.95, ..., 0.40."""


@dataclass(frozen=True, slots=True)
class GridFormat:
    """How a weight is quantized, whatever its values are.

    Attributes:
        bits: of a code.
        group_size: weights of a row that share a grid.
        symmetric: whether the zero point is ``2 ** (bits - 1)`` for every group.
        clip: ``mse``: each group's range is shrunk to where its squared error is least.
    """

    bits: int
    group_size: int
    symmetric: bool
    clip: Clip = "none"


@dataclass(frozen=True, slots=True)
class Grid:
    """Grids of all groups of a weight ``[N, M]``.

    Attributes:
        scales: bfloat16 ``[N, groups]``.
        zero_points: float32 ``[N, groups]``, whole numbers from 0 to ``2 ** bits - 1``.
    """

    scales: torch.Tensor
    zero_points: torch.Tensor

    @property
    def divisors(self) -> torch.Tensor:
        """Scales in float32 with 1 for 0: in a group of zeros every code is the zero point."""
        wide = self.scales.to(torch.float32)
        return torch.where(wide == 0, torch.ones_like(wide), wide)


LARGEST_WEIGHT = torch.finfo(torch.float32).max / 4
"""A group's range is up to twice that, a grid rounded up a little more."""


def choose_grid(
    weight: torch.Tensor,  # [N, M]
    form: GridFormat,
) -> Grid:
    """The grid of each group.

    Symmetric: levels are ``scale x (-2**(bits-1) .. 2**(bits-1) - 1)``, one more below zero than
    above, so the scale carries a sign that puts the group's weight of largest magnitude on the
    outermost level. A weight of the other sign may be clipped, by one step at most.

    Asymmetric: levels span the group's minimum to its maximum, zero included, and zero is a level.

    With ``clip: mse`` the range is multiplied by that one of ``CLIP_RATIOS`` which, with codes
    rounded to nearest, makes the group's squared error least; the larger one where two are equal.

    The scale is rounded to bfloat16 before anything is measured with it.

    Raises:
        ValueError: the weight holds NaN, infinity, or values whose grid would overflow float32.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity")
    if weight.abs().max() > LARGEST_WEIGHT:
        raise ValueError(f"the weight holds values beyond {LARGEST_WEIGHT:.3g}")
    groups = _grouped(weight, form.group_size)
    best = _grid_of(groups, form, 1.0)
    if form.clip == "none":
        return best
    least = _group_errors(groups, best, form.bits)
    for ratio in CLIP_RATIOS[1:]:
        grid = _grid_of(groups, form, ratio)
        errors = _group_errors(groups, grid, form.bits)
        better = errors < least
        best = Grid(
            torch.where(better, grid.scales, best.scales),
            torch.where(better, grid.zero_points, best.zero_points),
        )
        least = torch.where(better, errors, least)
    return best


def round_to_nearest(
    weight: torch.Tensor,  # [N, M]
    form: GridFormat,
) -> PackedTensor:
    """Quantize each weight to the nearest level of its group's grid.

    Raises:
        ValueError: the weight holds NaN or infinity.
    """
    grid = choose_grid(weight, form)
    codes = _nearest_codes(_grouped(weight, form.group_size), grid, form.bits)
    return pack(codes.view(weight.shape[0], -1)[:, : weight.shape[1]], grid, form)


def pack(
    codes: torch.Tensor,  # [N, M]
    grid: Grid,
    form: GridFormat,
) -> PackedTensor:
    """Codes (whole numbers, any dtype) and their grid as they are stored."""
    num_rows, num_columns = codes.shape
    return PackedTensor(
        codes=pack_codes(codes.to(torch.uint8), form.bits),
        scales=grid.scales,
        zero_points=None if form.symmetric else grid.zero_points.to(torch.uint8),
        shape=(num_rows, num_columns),
        bits=form.bits,
        group_size=form.group_size,
    )


def squared_errors(weight: torch.Tensor, packed: PackedTensor) -> tuple[float, float]:
    """Sums over all weights of (error ** 2, weight ** 2)."""
    wide = weight.to(torch.float32)
    error = dequantize(packed, torch.float32) - wide
    return float(error.pow(2).sum(dtype=torch.float64)), float(wide.pow(2).sum(dtype=torch.float64))


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor of any float dtype holds neither NaN nor infinity."""
    wide = tensor.to(torch.bfloat16) if tensor.dtype.itemsize == 1 else tensor
    return all(bool(torch.isfinite(extreme)) for extreme in torch.aminmax(wide))


def _grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """Float32 ``[N, groups, group_size]``, the last group filled up with zeros."""
    padding = -weight.shape[1] % group_size
    padded = torch.nn.functional.pad(weight.to(torch.float32), (0, padding))
    return padded.view(weight.shape[0], -1, group_size)


def _grid_of(
    groups: torch.Tensor,  # [N, groups, g]
    form: GridFormat,
    ratio: float,
) -> Grid:
    """The grid whose levels span ``ratio`` of each group's range."""
    if form.symmetric:
        middle = 1 << (form.bits - 1)
        largest = groups.abs().argmax(dim=-1, keepdim=True)
        outermost = groups.gather(-1, largest).squeeze(-1) * ratio
        scales = (outermost / -middle).to(torch.bfloat16)
        return Grid(scales, torch.full_like(scales, middle, dtype=torch.float32))
    top = (1 << form.bits) - 1
    low = groups.amin(dim=-1).clamp(max=0) * ratio
    high = groups.amax(dim=-1).clamp(min=0) * ratio
    grid = Grid(((high - low) / top).to(torch.bfloat16), torch.zeros_like(low))
    return Grid(grid.scales, (-low / grid.divisors).round().clamp(0, top))


def _nearest_codes(
    groups: torch.Tensor,  # [N, groups, g]
    grid: Grid,
    bits: int,
) -> torch.Tensor:
    """Codes as whole float32 numbers ``[N, groups, g]``."""
    steps = groups / grid.divisors.unsqueeze(-1) + grid.zero_points.unsqueeze(-1)
    return steps.round().clamp(0, (1 << bits) - 1)


def _group_errors(groups: torch.Tensor, grid: Grid, bits: int) -> torch.Tensor:
    """Sum of squared errors of each group ``[N, groups]`` with codes rounded to nearest."""
    codes = _nearest_codes(groups, grid, bits)
    levels = (codes - grid.zero_points.unsqueeze(-1)) * grid.scales.unsqueeze(-1)
    return (levels - groups).pow(2).sum(-1)
