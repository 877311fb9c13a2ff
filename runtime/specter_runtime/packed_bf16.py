"""Lossless packing of bfloat16 matrices into 12 bits a weight.

Sign and fraction of a trained weight are noise; its exponent is not: a dozen values make up nearly
all. So sign and fraction are kept as a byte, the exponent becomes a 4-bit code, an index into a
table of the matrix's 15 commonest exponents; code 15 is an *escape*, whose exponent stands in a
list.

A row of ``M`` weights is cut into chunks of 32 columns (the last one filled up with zeros), 48
bytes each: 32 bytes of sign and fraction, then 16 bytes of two codes each. Within a chunk, column
``c`` is at the position ``POSITIONS[c]``, and its code in the low half (positions below 16) or the
high half of byte ``position % 16``: the order in which a vector decoder's unpacking comes out
sorted.

Every bit pattern survives, NaN payloads and subnormals included.

Called by: experts, bundle_loader.  Next: kernels (which decodes and multiplies faster).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

CHUNK = 32
CHUNK_BYTES = 48
ESCAPE = 15
TABLE_SIZE = 16
UNPACKED_TOGETHER = 1 << 17
"""Weights: what unpacking takes beside its result is some 40 times as many bytes."""
MAX_COLUMNS = 1 << 24  # an escape holds its column in 24 bits

ESCAPES_OUT_OF_ORDER = "the escapes of packed rows are not in order"
ESCAPE_OUTSIDE = "an escape of a packed row lies outside the matrix"

POSITIONS = tuple(
    (c % 8 // 4) * 16 + (c // 16) * 8 + (c % 4) * 2 + (c % 16 // 8) for c in range(CHUNK)
)


@dataclass(frozen=True, slots=True)
class PackedBfloat16:
    """A bfloat16 matrix ``[N, M]`` in 12 bits a weight.

    Attributes:
        codes: uint8 ``[N, ceil(M / 32) * 48]``.
        table: uint8 ``[16]``: exponents, commonest first; unused entries are 0.
        escape_starts: int32 ``[N + 1]``: where each row's escapes begin in ``escapes``.
        escapes: int32 ``[E]``: column in the lower 24 bits, ascending in a row, exponent in the
            upper 8.
        shape: ``(N, M)``.
    """

    codes: torch.Tensor
    table: torch.Tensor
    escape_starts: torch.Tensor
    escapes: torch.Tensor
    shape: tuple[int, int]

    def check(self) -> None:
        """Refuse parts that contradict each other.

        Raises:
            ValueError: saying which.
        """
        starts, escapes = self.escape_starts, self.escapes
        if starts[0] != 0 or starts[-1] != len(escapes) or bool((starts.diff() < 0).any()):
            raise ValueError(ESCAPES_OUT_OF_ORDER)
        columns = escapes & 0xFFFFFF
        if bool((columns >= self.shape[1]).any()):
            raise ValueError(ESCAPE_OUTSIDE)
        begins_row = torch.zeros(len(escapes) + 1, dtype=torch.bool)
        begins_row[starts.to(torch.int64)] = True
        if bool(((columns.diff() <= 0) & ~begins_row[1:-1]).any()):
            raise ValueError(ESCAPES_OUT_OF_ORDER)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        """The matrix, bit for bit where ``dtype`` is bfloat16."""
        num_rows, num_columns = self.shape
        out = torch.empty(self.shape, dtype=dtype)
        at_a_time = max(1, UNPACKED_TOGETHER // num_columns)
        for start in range(0, num_rows, at_a_time):
            rows = slice(start, min(start + at_a_time, num_rows))
            out[rows] = self._bits(rows).to(torch.int16).view(torch.bfloat16)
        return out

    def _bits(self, rows: slice) -> torch.Tensor:
        """Bit patterns of some rows: int32 ``[n, M]``."""
        num_rows, num_columns = rows.stop - rows.start, self.shape[1]
        chunks = self.codes[rows].view(num_rows, -1, CHUNK_BYTES)
        rest, pairs = chunks[..., :CHUNK], chunks[..., CHUNK:]
        places = torch.tensor(POSITIONS)
        codes = torch.cat((pairs & 0xF, pairs >> 4), dim=-1)[..., places]  # [n, chunks, 32]
        exponents = self.table[codes.to(torch.int32)].to(torch.int32)
        signs = rest[..., places].to(torch.int32)
        bits = (signs & 0x80) << 8 | exponents << 7 | signs & 0x7F
        bits = bits.view(num_rows, -1)[:, :num_columns].contiguous()
        starts = self.escape_starts[rows.start : rows.stop + 1].to(torch.int64)
        escapes = self.escapes[int(starts[0]) : int(starts[-1])]
        own_rows = torch.repeat_interleave(torch.arange(num_rows), starts.diff())
        columns, found = escapes & 0xFFFFFF, escapes >> 24 & 0xFF
        bits[own_rows, columns] = bits[own_rows, columns] & ~(0xFF << 7) | found << 7
        return bits


def forms(shape: tuple[int, int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of the parts of a packed matrix whose size does not depend on its values."""
    num_rows, num_columns = shape
    return {
        "codes": ((num_rows, -(-num_columns // CHUNK) * CHUNK_BYTES), torch.uint8),
        "table": ((TABLE_SIZE,), torch.uint8),
        "escape_starts": ((num_rows + 1,), torch.int32),
    }


def pack_bfloat16(weight: torch.Tensor) -> PackedBfloat16:
    """Pack a bfloat16 matrix ``[N, M]``, M < 2 ** 24."""
    num_rows, num_columns = weight.shape
    bits = weight.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF
    exponents = bits >> 7 & 0xFF
    counts = torch.bincount(exponents.flatten(), minlength=256)
    common = counts.argsort(descending=True, stable=True)[:ESCAPE]
    common = common[counts[common] > 0]
    table = torch.zeros(TABLE_SIZE, dtype=torch.uint8)
    table[: len(common)] = common.to(torch.uint8)
    code_of = torch.full((256,), ESCAPE, dtype=torch.uint8)
    code_of[common] = torch.arange(len(common), dtype=torch.uint8)
    codes = code_of[exponents]
    is_escape = codes == ESCAPE
    rows, columns = is_escape.nonzero(as_tuple=True)
    found = exponents[rows, columns]
    escapes = (columns.to(torch.int32) | found << 24).to(torch.int32)
    starts = torch.zeros(num_rows + 1, dtype=torch.int32)
    starts[1:] = is_escape.sum(1).cumsum(0)
    rest = (bits >> 8 & 0x80 | bits & 0x7F).to(torch.uint8)
    padding = (0, -num_columns % CHUNK)
    order = torch.tensor(POSITIONS).argsort()
    rest, codes = (
        torch.nn.functional.pad(t, padding).view(num_rows, -1, CHUNK)[..., order]
        for t in (rest, codes)
    )
    pairs = codes[..., :16] | codes[..., 16:] << 4
    packed = torch.cat((rest, pairs), dim=-1).view(num_rows, -1)
    return PackedBfloat16(packed, table, starts, escapes, (num_rows, num_columns))
