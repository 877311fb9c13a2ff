"""Matrices that a checkpoint itself stores in 8 or 4 bits with block scales: fp8 and mxfp4.

They are decoded as the reference does on machines without arithmetic for them: code times scale in
float32, rounded once to the compute dtype. Activations are not quantized.

Called by: experts, model.  Next: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

MXFP4_BLOCK = 32
"""Weights that share an exponent; two of them in a byte, the first in the low half."""

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Magnitudes of e2m1 by their three bits; the fourth is the sign. Source: OCP MX v1.0, 5.3.3."""

E8M0_BIAS = 127

FP8_SCALE_SUFFIX = "_scale_inv"
"""Behind the name of an fp8 matrix, the name of its scales, which multiply in spite of it."""

MXFP4_SUFFIXES = ("_blocks", "_scales")
"""Behind the name of an mxfp4 matrix, the names of its codes and of its exponents."""


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix ``[N, M]`` in e4m3 with one scale a block. Source: arXiv 2412.19437, section 3.3.

    Attributes:
        codes: float8_e4m3fn ``[N, M]``.
        scales: floats ``[ceil(N / rows), ceil(M / columns)]``; the last blocks may be cut off.
        block_size: rows and columns of a block.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    block_size: tuple[int, int]

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that the codes stand for."""
        rows, columns = self.block_size
        num_rows, num_columns = self.codes.shape
        scales = self.scales.to(torch.float32).repeat_interleave(columns, 1)[:, :num_columns]
        decoded = self.codes.to(torch.float32)
        for start, row_scales in zip(range(0, num_rows, rows), scales, strict=True):
            decoded[start : start + rows] *= row_scales
        return decoded.to(dtype)


@dataclass(frozen=True, slots=True)
class Mxfp4Matrix:
    """A matrix ``[N, M]`` in e2m1 with one power of two for 32 weights of a row (OCP MX v1.0).

    Attributes:
        blocks: uint8 ``[N, M / 32, 16]``.
        scales: uint8 ``[N, M / 32]``; the exponent is 127 less.
    """

    blocks: torch.Tensor
    scales: torch.Tensor

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix that the codes stand for; exact in bfloat16 and float32."""
        values = torch.tensor((*FP4_VALUES, *(-value for value in FP4_VALUES)))
        pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), dim=-1)  # [256, 2]
        codes = self.blocks.flatten().to(torch.int32)  # an index stands for two weights
        decoded = pairs.index_select(0, codes).view(*self.scales.shape, MXFP4_BLOCK)
        del codes
        decoded.ldexp_(self.scales.to(torch.int32).unsqueeze(-1) - E8M0_BIAS)
        return decoded.flatten(1).to(dtype)


def fp8_scale_shape(shape: tuple[int, int], block_size: tuple[int, int]) -> tuple[int, int]:
    """Shape of the scales of a matrix of this shape."""
    return -(-shape[0] // block_size[0]), -(-shape[1] // block_size[1])
