"""Packing codes: exact, against a bit-by-bit oracle and compressed-tensors' convention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.packed import (
    BITS,
    PackedTensor,
    dequantize,
    pack_codes,
    packed_nbytes,
    unpack_codes,
)

SETTINGS = settings(deadline=None, max_examples=60)


@st.composite
def code_matrices(draw: st.DrawFn) -> tuple[int, list[list[int]]]:
    """Bits and a matrix of codes that fit; 1 to 3 rows, 1 to 37 columns."""
    bits = draw(st.sampled_from(BITS))
    num_columns = draw(st.integers(1, 37))
    row = st.lists(st.integers(0, (1 << bits) - 1), min_size=num_columns, max_size=num_columns)
    return bits, draw(st.lists(row, min_size=1, max_size=3))


@st.composite
def packed_tensors(draw: st.DrawFn) -> tuple[PackedTensor, list[list[int]]]:
    """A packed matrix with a group that may be ragged, with or without zero points; its codes."""
    bits, codes = draw(code_matrices())
    num_rows, num_columns = len(codes), len(codes[0])
    group_size = draw(st.integers(1, num_columns + 3))
    num_groups = -(-num_columns // group_size)
    count = num_rows * num_groups
    # From 2**-20 to 2**20: far from where a product with a code could over- or underflow.
    scale = st.floats(2**-20, 2**20, width=32).flatmap(lambda x: st.sampled_from([x, -x]))
    scales = draw(st.lists(scale | st.just(0.0), min_size=count, max_size=count))
    zero_points = None
    if draw(st.booleans()):
        points = st.lists(st.integers(0, (1 << bits) - 1), min_size=count, max_size=count)
        zero_points = torch.tensor(draw(points), dtype=torch.uint8).view(num_rows, num_groups)
    packed = PackedTensor(
        codes=pack_codes(torch.tensor(codes, dtype=torch.uint8), bits),
        scales=torch.tensor(scales).to(torch.bfloat16).view(num_rows, num_groups),
        zero_points=zero_points,
        shape=(num_rows, num_columns),
        bits=bits,
        group_size=group_size,
    )
    return packed, codes


def bit_stream(row: list[int], bits: int) -> list[int]:
    """The bytes of one row, written bit by bit: bit j of code i is bit i * bits + j of the row."""
    padded = row + [0] * (-len(row) % 8)
    data = [0] * (len(padded) * bits // 8)
    for i, code in enumerate(padded):
        for j in range(bits):
            position = i * bits + j
            data[position // 8] |= (code >> j & 1) << (position % 8)
    return data


@SETTINGS
@given(code_matrices())
def test_packed_codes_are_the_little_endian_bit_stream(
    case: tuple[int, list[list[int]]],
) -> None:
    bits, codes = case
    packed = pack_codes(torch.tensor(codes, dtype=torch.uint8), bits)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [bit_stream(row, bits) for row in codes]


@SETTINGS
@given(code_matrices())
def test_unpacking_undoes_packing_for_every_width_and_tail(
    case: tuple[int, list[list[int]]],
) -> None:
    bits, codes = case
    packed = torch.tensor([bit_stream(row, bits) for row in codes], dtype=torch.uint8)
    unpacked = unpack_codes(packed, bits, len(codes[0]))
    assert unpacked.dtype == torch.uint8
    assert unpacked.tolist() == codes


@pytest.mark.parametrize("bits", BITS)
def test_layout_of_a_known_row(bits: int) -> None:
    """Codes 1, 2, 3 by hand; the five codes that pad the row to eight are zero."""
    known = {
        2: [0b00111001, 0],
        3: [0b11010001, 0, 0],  # 3 << 6 | 2 << 3 | 1: the third code crosses a byte
        4: [0x21, 0x03, 0, 0],
        8: [1, 2, 3, 0, 0, 0, 0, 0],
    }
    assert pack_codes(torch.tensor([[1, 2, 3]], dtype=torch.uint8), bits).tolist() == [known[bits]]


@pytest.mark.parametrize("bits", [4, 8])
def test_bytes_equal_the_int32_packing_of_compressed_tensors(bits: int) -> None:
    """ "pack-quantized": 32 // bits codes in an int32, first code lowest, rows padded with zeros.

    An int32 holds 4 codes of 8 bits, a row here is padded to 8: the two agree on whole eights.
    """
    per_word = 32 // bits
    for num_columns in (1, 7, 8, 9, 40) if bits == 4 else (8, 40):
        generator = torch.Generator().manual_seed(num_columns)
        codes = torch.randint(0, 1 << bits, (3, num_columns), generator=generator)
        num_words = -(-num_columns // per_word)
        words = np.zeros((3, num_words), dtype=np.uint32)
        for row, column in np.ndindex(3, num_columns):
            shift = bits * (column % per_word)
            words[row, column // per_word] |= np.uint32(int(codes[row, column]) << shift)
        expected = words.view(np.int32).astype("<i4").view(np.uint8)
        assert pack_codes(codes.to(torch.uint8), bits).tolist() == expected.tolist()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_code_that_does_not_fit_is_refused(bits: int) -> None:
    codes = torch.zeros(2, 9, dtype=torch.uint8)
    codes[1, 8] = (1 << bits) - 1
    pack_codes(codes, bits)
    codes[1, 8] += 1
    with pytest.raises(ValueError, match=f"code {1 << bits} does not fit into {bits} bits"):
        pack_codes(codes, bits)


@pytest.mark.parametrize("bits", BITS)
def test_packing_does_not_depend_on_the_layout_in_memory(bits: int) -> None:
    codes = torch.arange(16 * 8).remainder(1 << bits).to(torch.uint8).view(16, 8)
    transposed = codes.t()  # [8, 16], not contiguous
    assert torch.equal(pack_codes(transposed, bits), pack_codes(transposed.contiguous(), bits))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@SETTINGS
@given(packed_tensors())
def test_dequantized_weight_is_scale_times_code_minus_zero_point(
    dtype: torch.dtype, case: tuple[PackedTensor, list[list[int]]]
) -> None:
    """Exactly: a bfloat16 scale has 8 significant bits, |code - zero point| < 256 has 8; their
    product has at most 16, so float32 (24) holds it and only the rounding to ``dtype`` remains.
    """
    packed, codes = case
    expected = torch.zeros(packed.shape, dtype=torch.float64)
    for row, column in np.ndindex(*packed.shape):
        group = column // packed.group_size
        zero_point = 1 << (packed.bits - 1)
        if packed.zero_points is not None:
            zero_point = int(packed.zero_points[row, group])
        expected[row, column] = float(packed.scales[row, group]) * (codes[row][column] - zero_point)
    weight = dequantize(packed, dtype)
    assert weight.dtype == dtype
    assert torch.equal(weight, expected.to(torch.float32).to(dtype))


@SETTINGS
@given(packed_tensors())
def test_packed_nbytes_is_what_the_packed_tensor_holds(
    case: tuple[PackedTensor, list[list[int]]],
) -> None:
    packed, _ = case
    symmetric = packed.zero_points is None
    assert packed.nbytes == packed_nbytes(packed.shape, packed.bits, packed.group_size, symmetric)
    held = [packed.codes, packed.scales, *([] if symmetric else [packed.zero_points])]
    assert packed.nbytes == sum(t.numel() * t.element_size() for t in held if t is not None)
