"""Group-quantized matrices: integer codes of 2, 3, 4 or 8 bits and one scale per group.

A row of ``M`` weights is cut into groups of ``group_size`` along ``M`` (the last one may be
shorter). Weight = scale x (code - zero point); without stored zero points it is
``2 ** (bits - 1)`` for every group.

Codes of a row form one little-endian bit stream, first code in the lowest bits, padded with
zero codes to a multiple of 8 codes, so that 8 codes always fill ``bits`` bytes. For 4 and 8 bits
this equals the int32 packing of compressed-tensors ("pack-quantized") read as bytes.

Deciding which codes a weight gets is ``specter_build.quantizers``; this module only stores.

Called by: bundle_loader, experts.  Next: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

BITS = (2, 3, 4, 8)


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A quantized weight ``[N, M]``.

    Attributes:
        codes: uint8 ``[N, ceil(M / 8) * bits]``.
        scales: bfloat16 ``[N, ceil(M / group_size)]``.
        zero_points: uint8 of the same shape, or None when symmetric.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zero_points: torch.Tensor | None
    shape: tuple[int, int]
    bits: int
    group_size: int

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        zero = 0 if self.zero_points is None else self.zero_points.nbytes
        return self.codes.nbytes + self.scales.nbytes + zero

    def rows(self, start: int, stop: int) -> PackedTensor:
        """Rows ``start .. stop - 1`` as a weight of their own; shares memory."""
        part = slice(start, stop)
        zero_points = None if self.zero_points is None else self.zero_points[part]
        return replace(
            self,
            codes=self.codes[part],
            scales=self.scales[part],
            zero_points=zero_points,
            shape=(stop - start, self.shape[1]),
        )


def packed_nbytes(shape: tuple[int, int], bits: int, group_size: int, symmetric: bool) -> int:
    """Bytes of a ``PackedTensor`` of this form, without making one."""
    num_rows, num_columns = shape
    groups = -(-num_columns // group_size)
    return num_rows * (-(-num_columns // 8) * bits + groups * (2 if symmetric else 3))


def packed_forms(
    shape: tuple[int, int], bits: int, group_size: int
) -> tuple[tuple[tuple[int, int], torch.dtype], ...]:
    """Shape and dtype of codes, scales and zero points of a weight of this shape."""
    num_rows, num_columns = shape
    groups = (num_rows, -(-num_columns // group_size))
    codes = (num_rows, -(-num_columns // 8) * bits)
    return ((codes, torch.uint8), (groups, torch.bfloat16), (groups, torch.uint8))


def pack_codes(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Pack uint8 codes ``[N, M]`` below ``2 ** bits`` into a bit stream ``[N, ceil(M/8)*bits]``.

    Raises:
        ValueError: a code does not fit into ``bits`` bits.
    """
    if int(codes.max()) >> bits:
        raise ValueError(f"code {int(codes.max())} does not fit into {bits} bits")
    num_rows, num_columns = codes.shape
    padded = torch.nn.functional.pad(codes, (0, -num_columns % 8))
    if bits == 8:
        return padded.contiguous()
    shifts = torch.arange(8, dtype=torch.int64) * bits
    words = (padded.view(num_rows, -1, 8).to(torch.int64) << shifts).sum(-1, keepdim=True)
    byte_shifts = torch.arange(bits, dtype=torch.int64) * 8
    return ((words >> byte_shifts) & 0xFF).to(torch.uint8).view(num_rows, -1)


def unpack_codes(packed: torch.Tensor, bits: int, num_columns: int) -> torch.Tensor:
    """Undo ``pack_codes``: uint8 codes ``[N, num_columns]``."""
    if bits == 8:
        return packed[:, :num_columns]
    num_rows = packed.shape[0]
    if bits in (2, 4):  # codes do not cross bytes
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes = (packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
        return codes.view(num_rows, -1)[:, :num_columns]
    triples = packed.view(num_rows, -1, bits).to(torch.int32)
    words = triples[..., 0] | (triples[..., 1] << 8) | (triples[..., 2] << 16)
    codes = (words.unsqueeze(-1) >> (torch.arange(8, dtype=torch.int32) * bits)) & 0b111
    return codes.to(torch.uint8).view(num_rows, -1)[:, :num_columns]


def dequantize(packed: PackedTensor, dtype: torch.dtype) -> torch.Tensor:
    """The matrix ``[N, M]`` that the codes stand for; computed in float32, rounded to ``dtype``."""
    num_rows, num_columns = packed.shape
    codes = unpack_codes(packed.codes, packed.bits, num_columns)
    padding = -num_columns % packed.group_size
    if padding:
        codes = torch.nn.functional.pad(codes, (0, padding))
    grouped = codes.reshape(num_rows, -1, packed.group_size).to(torch.float32)  # [N, groups, g]
    if packed.zero_points is None:
        grouped -= float(1 << (packed.bits - 1))
    else:
        grouped -= packed.zero_points.unsqueeze(-1)
    grouped *= packed.scales.unsqueeze(-1)
    return grouped.view(num_rows, -1)[:, :num_columns].to(dtype)
