"""From a weight to codes: pure.

Called by: quantize_draft.  Next: specter_runtime.packed.
"""

from __future__ import annotations

import torch

from specter_runtime.packed import PackedTensor, dequantize, pack_codes


def round_to_nearest(
    weight: torch.Tensor,  # [N, M]
    bits: int,
    group_size: int,
    symmetric: bool,
) -> PackedTensor:
    """Quantize each group of a row to the nearest of ``2 ** bits`` levels.

    Symmetric: levels are ``scale x (-2**(bits-1) .. 2**(bits-1) - 1)``, one more below zero than
    above, so the scale carries a sign that puts the group's weight of largest magnitude on the
    outermost level. A weight of the other sign may be clipped, by one step at most.

    Asymmetric: levels span the group's minimum to its maximum, zero included, and zero is a level.

    The scale is rounded to bfloat16 before codes are chosen, so codes fit the scale that is stored.

    Raises:
        ValueError: the weight holds NaN or infinity.
    """
    if not torch.isfinite(weight).all():
        raise ValueError("the weight holds NaN or infinity")
    num_rows, num_columns = weight.shape
    padding = -num_columns % group_size
    groups = torch.nn.functional.pad(weight.to(torch.float32), (0, padding))
    groups = groups.view(num_rows, -1, group_size)  # [N, groups, g]
    top = (1 << bits) - 1
    if symmetric:
        middle = 1 << (bits - 1)
        largest = groups.abs().argmax(dim=-1, keepdim=True)
        scales = (groups.gather(-1, largest) / -middle).to(torch.bfloat16)
        zero_points = torch.full_like(scales, middle, dtype=torch.float32)
    else:
        low = groups.amin(dim=-1, keepdim=True).clamp(max=0)
        high = groups.amax(dim=-1, keepdim=True).clamp(min=0)
        scales = ((high - low) / top).to(torch.bfloat16)
        zero_points = (-low / _nonzero(scales)).round().clamp(0, top)
    codes = (groups / _nonzero(scales) + zero_points).round().clamp(0, top).to(torch.uint8)
    codes = codes.view(num_rows, -1)[:, :num_columns]
    return PackedTensor(
        codes=pack_codes(codes, bits),
        scales=scales.squeeze(-1),
        zero_points=None if symmetric else zero_points.squeeze(-1).to(torch.uint8),
        shape=(num_rows, num_columns),
        bits=bits,
        group_size=group_size,
    )


def _nonzero(scales: torch.Tensor) -> torch.Tensor:
    """Scales in float32 with 1 for 0: in a group of zeros every code is the zero point."""
    wide = scales.to(torch.float32)
    return torch.where(wide == 0, torch.ones_like(wide), wide)


def squared_errors(weight: torch.Tensor, packed: PackedTensor) -> tuple[float, float]:
    """Sums over all weights of (error ** 2, weight ** 2)."""
    wide = weight.to(torch.float32)
    error = dequantize(packed, torch.float32) - wide
    return float(error.pow(2).sum(dtype=torch.float64)), float(wide.pow(2).sum(dtype=torch.float64))
