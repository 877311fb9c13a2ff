"""Lossless packing of bfloat16: every bit pattern comes back, and damage is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime import kernels, packed_bf16
from specter_runtime.config import ExpertNumbers, ModelConfig
from specter_runtime.experts import (
    ExpertWeights,
    PackedWeights,
    escapes_start,
    expert_nbytes,
    pack_expert,
    packed_nbytes,
    view_expert,
)
from specter_runtime.packed_bf16 import CHUNK, ESCAPE, POSITIONS, PackedBfloat16, pack_bfloat16
from tests.checkpoints import make_checkpoint
from tests.models import open_model

NUMBERS = ExpertNumbers("bfloat16")


def bits_of(tensor: torch.Tensor) -> list[int]:
    return (tensor.contiguous().view(torch.int16).to(torch.int32) & 0xFFFF).flatten().tolist()


def from_bits(rows: list[list[int]]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)


def unpack_by_hand(packed: PackedBfloat16) -> list[int]:
    """Weight by weight, from the description of the format."""
    num_rows, num_columns = packed.shape
    codes, escapes = packed.codes.tolist(), packed.escapes.tolist()
    starts = packed.escape_starts.tolist()
    bits = []
    for row in range(num_rows):
        own = escapes[starts[row] : starts[row + 1]]
        exponents = {escape & 0xFFFFFF: escape >> 24 & 0xFF for escape in own}
        for column in range(num_columns):
            chunk = codes[row][column // CHUNK * 48 :][:48]
            position = POSITIONS[column % CHUNK]
            byte = chunk[32 + position % 16]
            code = byte & 0xF if position < 16 else byte >> 4
            exponent = exponents[column] if code == ESCAPE else int(packed.table[code])
            rest = chunk[position]
            bits.append((rest & 0x80) << 8 | exponent << 7 | rest & 0x7F)
    return bits


@pytest.mark.parametrize("num_columns", [256, 77, 1])
def test_every_bit_pattern_survives(num_columns: int) -> None:
    patterns = list(range(65_536)) + [0] * (-65_536 % num_columns)
    rows = [patterns[i : i + num_columns] for i in range(0, len(patterns), num_columns)]
    packed = pack_bfloat16(from_bits(rows))
    packed.check()
    assert bits_of(packed.to(torch.bfloat16)) == patterns
    assert unpack_by_hand(packed) == patterns
    assert len(packed.escapes) > 0.9 * 65_536  # all 256 exponents, of which 15 have a code


@given(
    st.integers(1, 70).flatmap(
        lambda n: st.lists(
            st.lists(st.integers(0, 0xFFFF), min_size=n, max_size=n), min_size=1, max_size=4
        )
    )
)
@settings(deadline=None, max_examples=60)
def test_packing_is_lossless(rows: list[list[int]]) -> None:
    packed = pack_bfloat16(from_bits(rows))
    packed.check()
    assert bits_of(packed.to(torch.bfloat16)) == [pattern for row in rows for pattern in row]
    assert unpack_by_hand(packed) == [pattern for row in rows for pattern in row]


def test_weights_like_trained_ones_take_twelve_bits() -> None:
    weight = torch.randn(256, 1536, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed = pack_bfloat16(weight)
    parts = (packed.codes, packed.table, packed.escape_starts, packed.escapes)
    assert 12.0 < sum(part.nbytes for part in parts) * 8 / weight.numel() < 12.1


def test_equal_matrices_are_packed_to_equal_bytes() -> None:
    weight = torch.randn(5, 40, generator=torch.Generator().manual_seed(0)).bfloat16()
    first, second = pack_bfloat16(weight), pack_bfloat16(weight.clone())
    for part in ("codes", "table", "escape_starts", "escapes"):
        assert torch.equal(getattr(first, part), getattr(second, part))


# ---- shards -------------------------------------------------------------------------------------


def as_shard(packed: PackedWeights) -> torch.Tensor:
    """The bytes of a packed shard."""
    return torch.cat(
        [part.contiguous().view(torch.uint8).flatten() for part in packed.parts().values()]
    )


@pytest.fixture(scope="module")
def expert(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ExpertWeights]:
    folder = tmp_path_factory.mktemp("checkpoint")
    make_checkpoint(folder, dtype=torch.bfloat16)
    opened = open_model(folder, torch.bfloat16)
    weights = next(iter(opened.weights.values()))
    assert isinstance(weights, ExpertWeights)
    weights.up_proj[3, :20] = 2.0 ** torch.arange(20.0) * 1e10  # exponents that no code is left for
    return opened.config, weights


def test_a_shard_is_seen_as_it_was_packed(expert: tuple[ModelConfig, ExpertWeights]) -> None:
    config, weights = expert
    packed = pack_expert(weights)
    shard = as_shard(packed)
    num_escapes = sum(
        len(matrix.escapes) for matrix in (packed.gate_proj, packed.up_proj, packed.down_proj)
    )
    assert num_escapes >= 5
    assert len(shard) == packed_nbytes(config, NUMBERS, num_escapes)
    assert len(shard) < expert_nbytes(config, NUMBERS)
    padded = torch.cat((shard, torch.zeros(4096, dtype=torch.uint8)))  # a slot is longer
    seen = view_expert(padded, config, NUMBERS, "packed")
    for role, tensor in seen.tensors().items():
        assert bits_of(tensor) == bits_of(weights.tensors()[role])


DAMAGES = pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: p.up_proj.escape_starts.fill_(-5), "are needed"),
        (lambda p: p.up_proj.escape_starts[2:4].fill_(10_000), "not in order"),
        (lambda p: p.up_proj.escape_starts[-1:].fill_(1 << 30), "are needed"),
        (lambda p: p.up_proj.escapes.fill_(4000), "outside the matrix"),
        (lambda p: p.up_proj.escapes.fill_(-1), "outside the matrix"),
        (lambda p: p.up_proj.escapes.fill_(0), "not in order"),
    ],
    ids=[
        *("negative starts", "starts out of order", "too many escapes", "column", "all ones"),
        "columns of a row out of order",
    ],
)


@DAMAGES
def test_damaged_shards_are_refused(
    expert: tuple[ModelConfig, ExpertWeights], damage: object, message: str
) -> None:
    config, weights = expert
    packed = pack_expert(weights)
    assert callable(damage)
    damage(packed)
    with pytest.raises(ValueError, match=message):
        view_expert(as_shard(packed), config, NUMBERS, "packed")


@pytest.mark.skipif(kernels.library() is None, reason="built without a C++ compiler")
@DAMAGES
def test_damage_in_a_slot_that_was_read_into_again_is_refused(
    expert: tuple[ModelConfig, ExpertWeights], damage: object, message: str
) -> None:
    config, weights = expert
    slot = as_shard(pack_expert(weights))
    seen = kernels.prepare(view_expert(slot, config, NUMBERS, "packed"))
    assert isinstance(seen, kernels.NativeExpert)
    seen.locate_escapes(slot, escapes_start(config))
    packed = pack_expert(weights)
    assert callable(damage)
    damage(packed)
    slot.copy_(as_shard(packed))
    with pytest.raises(ValueError, match=f"{message}|not in order"):
        seen.locate_escapes(slot, escapes_start(config))


def test_truncated_shards_are_refused(expert: tuple[ModelConfig, ExpertWeights]) -> None:
    config, weights = expert
    shard = as_shard(pack_expert(weights))
    for length in (0, 100, len(shard) // 2, len(shard) - 1):
        with pytest.raises(ValueError, match="are needed"):
            view_expert(shard[:length], config, NUMBERS, "packed")


def test_the_fixed_parts_have_the_announced_forms() -> None:
    packed = pack_bfloat16(torch.zeros(7, 50).bfloat16())
    for part, (shape, dtype) in packed_bf16.forms((7, 50)).items():
        tensor = getattr(packed, part)
        assert (tensor.shape, tensor.dtype) == (shape, dtype)
