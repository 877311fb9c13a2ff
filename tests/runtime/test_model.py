"""The network: rows come out the same to the bit however they are grouped, and what it binds.

Whether it computes the right thing is tested against transformers, family by family, in
``tests/specter_build/test_families.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specter_runtime import kernels
from specter_runtime.model import MoETransformer, dense_shapes
from tests.models import (
    OpenModel,
    ShuffledExperts,
    cache_contents,
    open_model,
    random_model,
    same_bits,
)
from tests.oracles import gamma

DTYPES = ("float32", "bfloat16")
MAX_POSITION, MAX_ROWS = 140, 17


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> dict[str, OpenModel]:
    """A model wide enough that kernels round differently for different numbers of rows."""
    folder = tmp_path_factory.mktemp("wide")
    random_model(
        folder,
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=8,
        head_dim=32,
        moe_intermediate_size=160,
        num_experts_per_tok=4,
        initializer_range=0.1,
    )
    return {dtype: open_model(folder, getattr(torch, dtype)) for dtype in DTYPES}


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def tokens(count: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (count,), generator=generator).tolist()


def run(
    opened: OpenModel, position: int, passes: list[list[int]], capacity: int, seed: int | None
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Hidden states and logits of the rows of all passes behind a prompt, and the KV cache."""
    cache = opened.cache(capacity)
    provider = opened.experts if seed is None else ShuffledExperts(opened.weights, seed)
    if position:
        opened.rows(tokens(position), cache, rows_per_block=position)
    outputs: list[torch.Tensor] = []
    for token_ids in passes:
        blocks, _ = opened.model.forward(token_ids, cache, provider, rows_per_block=1)
        outputs += [x for block in blocks for x in (block, opened.model.logits([block]))]
    return outputs, cache_contents(cache, opened.config)


def assert_rows_do_not_depend_on_grouping(
    opened: OpenModel, position: int, num_rows: int, rooms: tuple[int, int], seed: int
) -> None:
    row_ids = tokens(num_rows, seed + 1)
    needed = position + num_rows
    verified = run(opened, position, [row_ids], needed + rooms[0], seed)
    decoded = run(opened, position, [[token] for token in row_ids], needed + rooms[1], None)
    for ours, theirs in zip(verified, decoded, strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=4)
@given(
    position=st.integers(0, MAX_POSITION),
    num_rows=st.integers(1, MAX_ROWS),
    rooms=st.tuples(st.integers(0, 200), st.integers(0, 200)),
    seed=st.integers(0, 1000),
)
@example(position=MAX_POSITION, num_rows=MAX_ROWS, rooms=(0, 1), seed=0)
def test_verifying_rows_gives_the_bits_of_decoding_them_one_by_one(
    wide: dict[str, OpenModel],
    dtype: str,
    position: int,
    num_rows: int,
    rooms: tuple[int, int],
    seed: int,
) -> None:
    assert_rows_do_not_depend_on_grouping(wide[dtype], position, num_rows, rooms, seed)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_of_rows_gives_the_same_bits(wide: dict[str, OpenModel], dtype: str) -> None:
    opened, position = wide[dtype], 9
    row_ids = tokens(MAX_ROWS, seed=2)
    decoded, cache = run(opened, position, [[token] for token in row_ids], 64, None)
    for num_rows in range(1, MAX_ROWS + 1):
        capacity = position + num_rows
        verified, verified_cache = run(opened, position, [row_ids[:num_rows]], capacity, num_rows)
        assert same_bits(verified, decoded[: 2 * num_rows])
        assert same_bits(verified_cache, [held[:capacity] for held in cache])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_grouping_with_two_threads(
    wide: dict[str, OpenModel], dtype: str, two_threads: None
) -> None:
    assert_rows_do_not_depend_on_grouping(wide[dtype], 20, num_rows=5, rooms=(0, 77), seed=5)


@pytest.mark.parametrize("chunk", [1, 2, 7, 16])
def test_prompt_chunks_agree_with_one_block_up_to_rounding(
    wide: dict[str, OpenModel], chunk: int
) -> None:
    opened, token_ids = wide["float32"], tokens(32)
    whole = opened.rows(token_ids, opened.cache(32), rows_per_block=32)
    cache = opened.cache(32)
    parts = [
        opened.rows(token_ids[i : i + chunk], cache, rows_per_block=chunk)
        for i in range(0, 32, chunk)
    ]
    # Different kernels sum in different order. Per layer some 16 products in a row, the longest
    # over D terms: roundings of random sign add up to gamma(16 sqrt(D)) of a value's size, twice
    # (either run), and as much again in each layer; scores of this model are below 8 and carry
    # their error through the exponential that much enlarged.
    bound = 2 * 8 * opened.config.num_hidden_layers * gamma(16 * opened.config.hidden_size**0.5)
    assert (torch.cat(parts) - whole).abs().max() <= bound * whole.abs().max()
    assert bound < 0.01


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> OpenModel:
    return open_model(tiny_checkpoint)


def test_forward_reports_the_routing_of_every_row_and_layer(tiny: OpenModel) -> None:
    provider = ShuffledExperts(tiny.weights)
    blocks, routings = tiny.model.forward(tokens(5), tiny.cache(5), provider, rows_per_block=1)
    assert [block.shape for block in blocks] == [(1, tiny.config.hidden_size)] * 5
    assert [routing.layer for routing in routings] == list(tiny.config.moe_layers)
    assert {routing.selected_experts.shape for routing in routings} == {(5, 2)}
    assert provider.asked == [(routing.layer, routing.expert_ids()) for routing in routings]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [4, kernels.MAX_ROWS + 3])
def test_routing_does_not_depend_on_grouping(
    wide: dict[str, OpenModel], num_rows: int, dtype: str
) -> None:
    """Nor on whether all rows are more than the kernels take at a time."""
    opened, row_ids = wide[dtype], tokens(num_rows)
    model, experts, cache = opened.model, opened.experts, opened.cache(num_rows)
    _, together = model.forward(row_ids, opened.cache(num_rows), experts, rows_per_block=1)
    for row, token in enumerate(row_ids):
        _, alone = model.forward([token], cache, experts, rows_per_block=1)
        for whole, part in zip(together, alone, strict=True):
            assert torch.equal(whole.selected_experts[row : row + 1], part.selected_experts)
            assert torch.equal(whole.routing_weights[row : row + 1], part.routing_weights)


def test_forward_appends_to_the_cache(tiny: OpenModel) -> None:
    cache = tiny.cache(9)
    for count in (4, 2, 3):
        tiny.rows(tokens(count), cache, rows_per_block=2)
    assert cache.length == 9


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_hidden_states_and_cache_follow_the_dtype_routing_and_logits_stay_float32(
    tiny_checkpoint: Path, dtype: str
) -> None:
    opened = open_model(tiny_checkpoint, getattr(torch, dtype))
    cache = opened.cache(4)
    blocks, routings = opened.model.forward([1, 2], cache, opened.experts, rows_per_block=2)
    assert {x.dtype for x in (*blocks, *cache_contents(cache, opened.config))} == {
        opened.model.dtype
    }
    assert {routing.routing_weights.dtype for routing in routings} == {torch.float32}
    assert opened.model.logits(blocks).dtype == torch.float32


def test_a_missing_tensor_is_named(tiny: OpenModel) -> None:
    names = {role: role for role in dense_shapes(tiny.config, None)}
    with pytest.raises(KeyError, match="lm_head"):
        MoETransformer(
            tiny.config,
            {role: torch.zeros(1) for role in names if role != "lm_head"},
            names,
            torch.float32,
        )


def test_a_tied_head_is_the_embedding(tiny: OpenModel) -> None:
    config = replace(tiny.config, tie_word_embeddings=True, num_hidden_layers=0)
    assert "lm_head" not in dense_shapes(config, None)
    embedding = torch.randn(config.vocab_size, config.hidden_size)
    tensors = {"embed_tokens": embedding, "norm": torch.ones(config.hidden_size)}
    model = MoETransformer(config, tensors, {role: role for role in tensors}, torch.float32)
    hidden = torch.eye(config.hidden_size)
    assert torch.equal(model.logits([hidden]), hidden @ embedding.T)
