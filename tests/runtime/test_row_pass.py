"""A row's quick way through the layers: the bits of the slow way, whatever the cache holds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specter_build.checkpoint import Checkpoint
from specter_runtime import kernels, prefetcher
from specter_runtime.config import ExpertNumbers
from specter_runtime.eviction import ReuseValues
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.experts import (
    Expert,
    ExpertKey,
    expert_nbytes,
    stored_forms,
    view_expert,
)
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.predictor import Predictor
from specter_runtime.prefetcher import Prefetcher
from specter_runtime.row_pass import RowPass
from specter_runtime.shards import align_up, tensor_bytes
from tests.checkpoints import FAMILIES as SMALL_FAMILIES
from tests.models import OpenModel, cache_contents, open_model, random_model, same_bits
from tests.specter_build.test_more_families import FIRST_OF_FAMILY, make

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.skipif(kernels.library() is None, reason="there are no kernels"),
]

NUM_TOKENS = 24
PROMPT = [3, 1, 4, 1, 5]


class MemoryStore:
    """The model's experts, byte by byte: a slot that is read into changes under who uses it."""

    def __init__(self, model: OpenModel, numbers: ExpertNumbers) -> None:
        self._config, self._numbers = model.config, numbers
        forms = stored_forms(model.config, numbers)
        self._shards = {
            key: b"".join(bytes(tensor_bytes(expert.tensors()[role])) for role in forms)
            for key, expert in model.weights.items()
        }
        self.slot_bytes = align_up(expert_nbytes(model.config, numbers))

    def nbytes(self, key: ExpertKey) -> int:
        return len(self._shards[key])

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        shard = self._shards[key]
        buffer[: len(shard)] = shard

    def view(self, buffer: torch.Tensor, previous: Expert | None) -> Expert:
        return kernels.prepare(view_expert(buffer, self._config, self._numbers))


class OpenPass:
    """A model with predictors, a cache of some slots, and both ways through it."""

    def __init__(self, model: OpenModel, checkpoint: Checkpoint, num_slots: int) -> None:
        config, generator = model.config, torch.Generator().manual_seed(0)
        routed = config.moe_layers
        shape = (2, config.num_experts, config.hidden_size)
        predictors = {
            layer: Predictor(
                routed[i + 1 : i + 3],
                torch.randn(shape, generator=generator)[: len(routed[i + 1 : i + 3])],
                torch.zeros(2, config.num_experts)[: len(routed[i + 1 : i + 3])],
                config.num_experts_per_tok,
            )
            for i, layer in enumerate(routed[:-1])
        }
        self.model = MoETransformer(
            config,
            model.dense_tensors,
            checkpoint.family.bundle_names(),
            model.model.dtype,
            predictors,
        )
        store = MemoryStore(model, checkpoint.expert_numbers)
        self._residency = kernels.Residency(config.num_hidden_layers, config.num_experts)
        self.cache = ExpertCache(
            store,
            num_slots,
            store.view,
            ReuseValues(config.num_hidden_layers, config.num_experts, ()),
            residency=self._residency,
        )
        self.kv_cache = KVCache(config, NUM_TOKENS + len(PROMPT), self.model.dtype)
        self.prefetcher = Prefetcher(self.cache, 10 * store.slot_bytes, store.slot_bytes)
        self.bind()

    def bind(self) -> None:
        """Make the pass over the model as it is now."""
        row_pass = RowPass.make(self.model, self.kv_cache, self.cache, self._residency)
        assert row_pass is not None
        self.row_pass = row_pass

    def decode(self, *, predicts: bool) -> list[torch.Tensor]:
        """Final hidden states and the KV cache's contents."""
        self.model.forward(PROMPT, self.kv_cache, self.cache, rows_per_block=len(PROMPT))
        before = self.cache.stats()
        found = []
        for token in range(NUM_TOKENS):
            if predicts:
                self.prefetcher.begin_pass()
            (row,) = self.row_pass.forward(token, self.prefetcher if predicts else None)
            if predicts:
                self.prefetcher.end_pass(len(self.model.config.moe_layers))
            self.prefetcher.end_window()
            found.append(row.clone())
        self.counted = self.cache.stats().since(before)
        return found + cache_contents(self.kv_cache, self.model.config)


def expected_of(model: OpenModel) -> list[torch.Tensor]:
    """The same by way of ``MoETransformer.forward``, everything resident."""
    kv_cache = model.cache(NUM_TOKENS + len(PROMPT))
    model.rows(PROMPT, kv_cache, rows_per_block=len(PROMPT))
    found = []
    for token in range(NUM_TOKENS):
        (row,), _ = model.model.forward([token], kv_cache, model.experts, rows_per_block=1)
        found.append(row)
    return found + cache_contents(kv_cache, model.config)


FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "granitemoe")
CASES = [(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")]


@pytest.fixture
def opened(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[tuple[OpenModel, Checkpoint]]:
    family, dtype = request.param
    if family in SMALL_FAMILIES:
        model = random_model(tmp_path, family, getattr(torch, dtype), num_hidden_layers=4)
    else:
        make(tmp_path, FIRST_OF_FAMILY[family])
        model = open_model(tmp_path, getattr(torch, dtype))
    with torch.inference_mode():
        yield model, Checkpoint(tmp_path)


@pytest.mark.parametrize("opened", CASES, indirect=True, ids=" ".join)
@pytest.mark.parametrize("room", ["all", "half", "least"])
@pytest.mark.parametrize("predicts", [False, True])
def test_a_pass_gives_the_bits_of_the_model(
    opened: tuple[OpenModel, Checkpoint],
    room: str,
    predicts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With predictions: whatever is not quite unlikely is read, right or wrong."""
    monkeypatch.setattr(prefetcher, "least_probability", lambda num_ahead, pace: 0.3)
    model, checkpoint = opened
    config, count = model.config, len(model.weights)
    slots = {"all": count, "half": count // 2, "least": config.num_experts_per_tok}
    passed = OpenPass(model, checkpoint, slots[room])
    try:
        assert same_bits(passed.decode(predicts=predicts), expected_of(model))
    finally:
        passed.cache.close()
    num_choices = NUM_TOKENS * len(config.moe_layers) * config.num_experts_per_tok
    counted = passed.counted
    assert counted.hits + counted.late_hits + counted.misses == num_choices
    assert counted.misses > 0
    if room != "all":  # there, hardly anything is absent when it is foreseen
        assert (counted.prefetch_loads > 0) == predicts


@pytest.mark.parametrize("opened", [("mixtral", "bfloat16")], indirect=True, ids=" ".join)
@pytest.mark.parametrize("multiplier", [1.0, 0.22])
@pytest.mark.parametrize("unknown", [(), (0,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("predicts", [False, True])
def test_so_it_does_where_layers_are_unknown_and_what_they_add_is_scaled(
    opened: tuple[OpenModel, Checkpoint],
    multiplier: float,
    unknown: tuple[int, ...],
    predicts: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A layer without a kernel for its gate stands for all that the pass cannot run."""
    model, checkpoint = opened
    config, names = model.config, checkpoint.family.bundle_names()
    config = replace(config, residual_multiplier=multiplier)
    network = MoETransformer(config, model.dense_tensors, names, torch.bfloat16)
    model = replace(model, config=config, model=network)
    monkeypatch.setattr(prefetcher, "least_probability", lambda num_ahead, pace: 0.3)
    for layer in unknown:
        network.layers[layer]._gate_kernel = None
    expected = expected_of(model)
    passed = OpenPass(model, checkpoint, config.num_experts)
    for layer in unknown:
        passed.model.layers[layer]._gate_kernel = None
    passed.bind()
    try:
        assert same_bits(passed.decode(predicts=predicts), expected)
        assert (passed.counted.prefetch_loads > 0) == predicts
    finally:
        passed.cache.close()


@pytest.mark.parametrize("opened", [("qwen3_moe", "float32")], indirect=True, ids=" ".join)
def test_what_the_pass_uses_is_counted_and_learned(
    opened: tuple[OpenModel, Checkpoint],
) -> None:
    model, checkpoint = opened
    config = model.config
    passed = OpenPass(model, checkpoint, len(model.weights))
    try:
        passed.cache.warm(model.weights)
        passed.decode(predicts=False)
        before = passed.cache.stats()
        passed.kv_cache.truncate(0)
        passed.row_pass.forward(1, None)
        counted = passed.cache.stats().since(before)
    finally:
        passed.cache.close()
    assert counted.hits == config.num_hidden_layers * config.num_experts_per_tok
    assert (counted.late_hits, counted.misses, counted.loads) == (0, 0, 0)


@pytest.mark.parametrize("opened", [("qwen3_moe", "float32")], indirect=True, ids=" ".join)
def test_a_full_kv_cache_is_refused_before_anything_is_written(
    opened: tuple[OpenModel, Checkpoint],
) -> None:
    model, checkpoint = opened
    passed = OpenPass(model, checkpoint, len(model.weights))
    try:
        passed.decode(predicts=False)
        before = cache_contents(passed.kv_cache, model.config)
        with pytest.raises(Exception, match="room for 29 tokens, 30 are needed"):
            passed.row_pass.forward(1, None)
        assert same_bits(cache_contents(passed.kv_cache, model.config), before)
    finally:
        passed.cache.close()
