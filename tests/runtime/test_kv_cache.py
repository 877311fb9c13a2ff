"""The KV cache against a list, and rollback: rejected tokens leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.config import DTYPE_BYTES
from specter_runtime.errors import CapacityError
from specter_runtime.kv_cache import KVCache
from tests.models import OpenModel, cache_contents, open_model, same_bits

PROMPT = [7, 3, 11]


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> OpenModel:
    return open_model(tiny_checkpoint)


def entries(tiny: OpenModel, num_tokens: int, seed: int) -> torch.Tensor:
    shape = (num_tokens, tiny.config.num_key_value_heads, tiny.config.head_dim)
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=25)
@given(
    operations=st.lists(
        st.tuples(st.sampled_from(["append", "truncate"]), st.integers(0, 6)), max_size=12
    )
)
def test_cache_holds_what_a_list_would_hold(
    tiny: OpenModel, operations: list[tuple[str, int]]
) -> None:
    cache, expected = tiny.cache(20), list[tuple[torch.Tensor, torch.Tensor]]()
    for step, (operation, amount) in enumerate(operations):
        if operation == "truncate":
            del expected[max(0, len(expected) - amount) :]
            cache.truncate(len(expected))
        elif len(expected) + amount <= 20:
            keys, values = entries(tiny, amount, step), entries(tiny, amount, step + 100)
            for layer in range(tiny.config.num_hidden_layers):
                cache.write(layer, cache.length, keys + layer, values - layer)
            cache.advance(amount)
            expected += zip(keys, values, strict=True)
    assert cache.length == len(expected)
    held = cache_contents(cache, tiny.config)
    for layer in range(tiny.config.num_hidden_layers):
        for position, (key, value) in enumerate(expected):
            assert torch.equal(held[2 * layer][position], key + layer)
            assert torch.equal(held[2 * layer + 1][position], value - layer)


def test_write_returns_everything_up_to_the_written_positions(tiny: OpenModel) -> None:
    cache = tiny.cache(8)
    first, second = entries(tiny, 3, seed=0), entries(tiny, 2, seed=1)
    cache.write(1, 0, first, -first)
    keys, values = cache.write(1, 3, second, -second)
    assert torch.equal(keys, torch.cat([first, second]))
    assert torch.equal(values, -keys)


def test_writing_does_not_move_the_length(tiny: OpenModel) -> None:
    cache = tiny.cache(4)
    cache.write(0, 0, entries(tiny, 2, 0), entries(tiny, 2, 1))
    assert cache.length == 0


def test_a_full_cache_refuses_and_names_room_and_need(tiny: OpenModel) -> None:
    cache = tiny.cache(4)
    tiny.rows([1, 2, 3, 4], cache)
    with pytest.raises(CapacityError, match="room for 4 tokens, 5 are needed"):
        tiny.rows([5], cache)
    assert cache.length == 4


@pytest.mark.parametrize("length", [-1, 4])
def test_truncating_to_a_length_that_is_not_held_is_an_error(tiny: OpenModel, length: int) -> None:
    cache = tiny.cache(8)
    tiny.rows(PROMPT, cache)
    with pytest.raises(ValueError, match=f"of 3 tokens to {length}"):
        cache.truncate(length)
    assert cache.length == 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nbytes_is_what_a_token_costs_times_the_room(tiny: OpenModel, dtype: str) -> None:
    cache = KVCache(tiny.config, 10, getattr(torch, dtype))
    c = tiny.config
    per_token = 2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * DTYPE_BYTES[dtype]
    assert cache.nbytes == 10 * per_token == 10 * c.kv_bytes_per_token(dtype)


def test_a_cache_of_one_layer_has_one_layer(tiny: OpenModel) -> None:
    cache = KVCache(tiny.config, 10, torch.float32, num_layers=1)
    assert cache.nbytes * tiny.config.num_hidden_layers == tiny.cache(10).nbytes


windows = st.lists(  # drafted tokens, and how many of them are accepted
    st.lists(st.integers(0, 255), max_size=4).flatmap(
        lambda drafted: st.tuples(st.just(drafted), st.integers(0, len(drafted)))
    ),
    min_size=1,
    max_size=4,
)


@settings(deadline=None, max_examples=8)
@given(windows=windows)
def test_after_any_accept_reject_sequence_the_cache_equals_that_of_a_fresh_run(
    tiny: OpenModel, windows: list[tuple[list[int], int]]
) -> None:
    cache = tiny.cache(64)
    tiny.rows(PROMPT, cache)
    committed, last = list(PROMPT), 200
    for drafted, num_accepted in windows:
        start = cache.length
        tiny.rows([last, *drafted], cache)  # what the draft leaves behind
        cache.truncate(start)
        tiny.rows([last, *drafted], cache)  # verification
        cache.truncate(start + 1 + num_accepted)
        committed += [last, *drafted[:num_accepted]]
        last = (last * 7 + 1) % 256
    fresh = tiny.cache(len(committed))
    for token in committed:
        tiny.rows([token], fresh)
    assert cache.length == fresh.length == len(committed)
    assert same_bits(cache_contents(cache, tiny.config), cache_contents(fresh, tiny.config))
