"""Dividing the budget: never more than there is, the minimum exactly, sizes as they really are."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_build.quantize_draft import quantize_layer
from specter_build.recipe import DraftRecipe
from specter_runtime.acceptance import rejection_sample
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import DTYPE_BYTES, ExpertNumbers, ModelConfig, SamplingConfig
from specter_runtime.errors import CapacityError
from specter_runtime.experts import ExpertKey, ScaledExpert
from specter_runtime.kv_cache import KVCache
from specter_runtime.memory import (
    MAX_DRAFT_TOKENS,
    MemoryUse,
    dense_nbytes,
    divide_budget,
    draft_nbytes,
    max_draft_tokens,
    predictor_nbytes,
)
from specter_runtime.model import MoETransformer
from specter_runtime.sampling import probabilities
from specter_runtime.scaled import Fp8Matrix, Mxfp4Matrix
from tests.allocations import peak_allocated_bytes
from tests.checkpoints import FAMILIES
from tests.models import OpenModel, open_model, random_model

SETTINGS = settings(deadline=None, max_examples=40)
SLOT_BYTES = 40_960


@pytest.fixture(scope="module")
def tiny(tiny_checkpoint: Path) -> OpenModel:
    return open_model(tiny_checkpoint)


def arguments(config: ModelConfig, **changes: Any) -> dict[str, Any]:
    num_experts = config.num_experts
    return {
        "draft_bits": ((4,) * num_experts,) * len(config.moe_layers),
        "group_size": 16,
        "symmetric": True,
        "predictor_bytes": 5000,
        "dtype": "float32",
        "numbers": ExpertNumbers("float32"),
        "max_context_tokens": 128,
        "prompt_chunk_tokens": 64,
        "num_draft_tokens": 4,
        "slot_bytes": SLOT_BYTES,
        **changes,
    }


def smallest_accepted(config: ModelConfig, options: dict[str, Any]) -> int:
    """By bisection."""
    low, high = 0, 2**32
    while high - low > 1:
        middle = (low + high) // 2
        try:
            divide_budget(config, memory_budget_bytes=middle, **options)
        except CapacityError:
            low = middle
        else:
            high = middle
    return high


option_changes = st.fixed_dictionaries(
    {},
    optional={
        "draft_bits": st.sampled_from([(), ((2,) * 8,) * 3, ((0, 2, 3, 4, 8, 0, 0, 3),) * 3]),
        "group_size": st.sampled_from([8, 16, 1000]),
        "symmetric": st.booleans(),
        "predictor_bytes": st.integers(0, 10**6),
        "dtype": st.sampled_from(sorted(DTYPE_BYTES)),
        "max_context_tokens": st.integers(1, 100_000),
        "prompt_chunk_tokens": st.integers(1, 512),
        "num_draft_tokens": st.integers(0, 64),
        "slot_bytes": st.integers(1, 10**6),
    },
)


@SETTINGS
@given(changes=option_changes)
def test_the_minimum_in_the_message_is_the_smallest_budget_accepted(
    tiny: OpenModel, changes: dict[str, Any]
) -> None:
    options = arguments(tiny.config, **changes)
    with pytest.raises(CapacityError) as caught:
        divide_budget(tiny.config, memory_budget_bytes=0, **options)
    [stated] = re.findall(r"\((\d+) bytes\)", str(caught.value))
    assert int(stated) == smallest_accepted(tiny.config, options)
    use = divide_budget(tiny.config, memory_budget_bytes=int(stated), **options)
    assert use.num_slots == tiny.config.num_experts_per_tok


@SETTINGS
@given(changes=option_changes, above=st.integers(0, 2**24))
def test_what_is_used_never_exceeds_the_budget_and_leaves_no_room_for_a_slot(
    tiny: OpenModel, changes: dict[str, Any], above: int
) -> None:
    options = arguments(tiny.config, **changes)
    budget = smallest_accepted(tiny.config, options) + above
    use = divide_budget(tiny.config, memory_budget_bytes=budget, **options)
    all_experts = len(tiny.config.moe_layers) * tiny.config.num_experts
    assert parts_sum(use) == use.used_bytes <= budget == use.budget_bytes
    assert use.num_slots == all_experts or use.used_bytes + use.slot_bytes > budget
    assert tiny.config.num_experts_per_tok <= use.num_slots <= all_experts


def parts_sum(use: MemoryUse) -> int:
    fixed = use.dense_bytes + use.draft_bytes + use.predictor_bytes
    fixed += use.kv_cache_bytes + use.buffer_bytes
    return fixed + use.num_slots * use.slot_bytes


@SETTINGS
@given(changes=option_changes, above=st.integers(0, 2**22), more=st.integers(0, 2**22))
def test_more_memory_never_gives_fewer_slots(
    tiny: OpenModel, changes: dict[str, Any], above: int, more: int
) -> None:
    options = arguments(tiny.config, **changes)
    budget = smallest_accepted(tiny.config, options) + above
    few, many = (
        divide_budget(tiny.config, memory_budget_bytes=size, **options).num_slots
        for size in (budget, budget + more)
    )
    assert few <= many


@pytest.mark.parametrize(
    "more",
    [
        {"max_context_tokens": 129},
        {"num_draft_tokens": 4000},
        {"prompt_chunk_tokens": 4000},
        {"slot_bytes": SLOT_BYTES + 1},
        {"draft_bits": ((8,) * 8,) * 3},
        {"symmetric": False},
        {"predictor_bytes": 5001},
        {"group_size": 8},
    ],
)
def test_everything_that_is_held_costs(tiny: OpenModel, more: dict[str, Any]) -> None:
    less = smallest_accepted(tiny.config, arguments(tiny.config))
    assert smallest_accepted(tiny.config, arguments(tiny.config, **more)) > less


def test_without_a_draft_its_memory_becomes_slots(tiny: OpenModel) -> None:
    options = arguments(tiny.config)
    budget = smallest_accepted(tiny.config, options)
    bare = divide_budget(tiny.config, memory_budget_bytes=budget, **options | {"draft_bits": ()})
    assert bare.draft_bytes == 0
    assert bare.num_slots > tiny.config.num_experts_per_tok


# ---- sizes, against the real thing ----------------------------------------------------------

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in FAMILIES),
    ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_moe", {"mlp_only_layers": [1]}),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
def test_dense_bytes_are_those_of_the_real_tensors(
    tmp_path: Path, family: str, overrides: dict[str, Any], dtype: str
) -> None:
    opened = random_model(tmp_path, family, **overrides)
    routers = [t.nbytes for name, t in opened.dense_tensors.items() if name.endswith("gate.weight")]
    assert len(routers) == len(opened.config.moe_layers)
    everything = sum(tensor.nbytes for tensor in opened.dense_tensors.values())  # in float32
    others = (everything - sum(routers)) * DTYPE_BYTES[dtype] // 4
    assert dense_nbytes(opened.config, dtype) == others + sum(routers)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), [(2, 8), (3, 16), (4, 32), (8, 64)])
def test_draft_bytes_are_those_of_the_real_draft(
    tiny: OpenModel, bits: Any, group_size: int, symmetric: bool
) -> None:
    recipe = DraftRecipe(bits=bits, group_size=group_size, symmetric=symmetric)
    packed = quantize_layer(tiny.weights, recipe, [bits] * 8, None).packed
    left_out = {ExpertKey(0, 3), ExpertKey(2, 0)}
    draft = [expert for key, expert in packed.items() if key not in left_out]
    widths = [
        [0 if ExpertKey(layer, expert) in left_out else bits for expert in range(8)]
        for layer in range(3)
    ]
    assert draft_nbytes(
        tiny.config, widths, group_size, symmetric, ExpertNumbers("float32")
    ) == sum(expert.nbytes for expert in draft)


@pytest.mark.parametrize(
    ("layers_ahead", "num_pairs"),
    [
        (0, 0),
        (1, 2),  # 3 layers: the last one speaks of none
        (2, 2 + 1),
        (4, 2 + 1),
    ],
)
def test_predictors_speak_of_fewer_layers_near_the_end(
    tiny: OpenModel, layers_ahead: int, num_pairs: int
) -> None:
    nbytes = num_pairs * (8 * 64 * 2 + 8 * 4)  # 8 experts, hidden size 64
    assert predictor_nbytes(tiny.config, layers_ahead) == nbytes
    assert predictor_nbytes(replace(tiny.config, num_experts_per_tok=8), layers_ahead) == 0


def test_predictor_bytes_are_those_of_the_real_predictors(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    held = sum(own.matrix.nbytes + own.bias.nbytes for own in bundle.predictors().values())
    assert bundle.predictor_nbytes == held == predictor_nbytes(bundle.manifest.model, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_cache_bytes_are_those_of_the_real_cache(tiny: OpenModel, dtype: str) -> None:
    options = arguments(tiny.config, dtype=dtype, max_context_tokens=77)
    use = divide_budget(tiny.config, memory_budget_bytes=2**32, **options)
    assert use.kv_cache_bytes == KVCache(tiny.config, 77, getattr(torch, dtype)).nbytes


# ---- working buffers ------------------------------------------------------------------------

CONTEXT, CHUNK, WINDOW = 1200, 64, 5  # of a window of 5 rows, 4 are drafted
LARGE_VOCABULARY = 4000


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def roomy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    """A model with a long context and a vocabulary that outweighs its layers."""
    return random_model(
        tmp_path_factory.mktemp("roomy"),
        dtype=getattr(torch, request.param),
        vocab_size=LARGE_VOCABULARY,
        max_position_embeddings=CONTEXT,
        num_hidden_layers=1,
    )


def reserved_bytes(opened: OpenModel, num_draft_tokens: int) -> int:
    """What the budget sets aside for buffers."""
    options = arguments(
        opened.config,
        dtype=str(opened.model.dtype).removeprefix("torch."),
        max_context_tokens=CONTEXT,
        prompt_chunk_tokens=CHUNK,
        num_draft_tokens=num_draft_tokens,
    )
    return divide_budget(opened.config, memory_budget_bytes=2**32, **options).buffer_bytes


def test_a_prompt_chunk_at_the_end_of_the_context_fits_the_buffers(roomy: OpenModel) -> None:
    cache = roomy.cache(CONTEXT)

    def last_chunk() -> None:
        cache.truncate(0)
        cache.advance(CONTEXT - CHUNK)
        with torch.inference_mode():
            blocks, _ = roomy.model.forward([1] * CHUNK, cache, roomy.experts, rows_per_block=CHUNK)
            roomy.model.logits([blocks[-1][-1:]])

    peak, reserved = peak_allocated_bytes(last_chunk), reserved_bytes(roomy, num_draft_tokens=0)
    assert peak <= reserved


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_stored_tensors_are_not_held_beside_those_bound_of_them(
    tiny_bundle: Path, dtype: str
) -> None:
    bundle = load_bundle(tiny_bundle)  # in float32
    config, names = bundle.manifest.model, bundle.manifest.tensor_names
    bound = dense_nbytes(config, dtype) + 2**12  # and the rotary frequencies
    beside = 0 if dtype == "float32" else 2 * 4 * config.vocab_size * config.hidden_size
    assert dense_nbytes(config, "float32") > beside  # else this could not fail

    def load() -> None:
        MoETransformer(config, bundle.dense_tensors(), names, getattr(torch, dtype))

    assert peak_allocated_bytes(load) <= bound + beside


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", ["fp8", "mxfp4"])
def test_an_expert_as_stored_fits_the_buffers_when_it_is_decoded(
    kind: str, dtype: torch.dtype
) -> None:
    def matrix(num_rows: int, num_columns: int) -> Fp8Matrix | Mxfp4Matrix:
        if kind == "fp8":
            scales = torch.ones(num_rows // 128, num_columns // 128)
            return Fp8Matrix(
                torch.zeros(num_rows, num_columns).to(torch.float8_e4m3fn), scales, (128, 128)
            )
        blocks = torch.zeros(num_rows, num_columns // 32, 16, dtype=torch.uint8)
        return Mxfp4Matrix(blocks, torch.zeros(num_rows, num_columns // 32, dtype=torch.uint8))

    matrices = matrix(256, 512), matrix(256, 512), matrix(512, 256)
    expert = ScaledExpert(*matrices, (None, None, None))
    reserved = 3 * 256 * 512 * (dtype.itemsize + 4)  # as in ``buffer_nbytes``
    assert peak_allocated_bytes(lambda: expert.to(dtype)) <= reserved


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(None, id="greedy"),
        pytest.param(SamplingConfig(1.0), id="temperature"),
        pytest.param(SamplingConfig(1.0, top_k=40, top_p=0.9), id="top-k and top-p"),
    ],
)
def test_a_window_fits_the_buffers(roomy: OpenModel, sampling: SamplingConfig | None) -> None:
    cache = roomy.cache(CONTEXT)

    def window() -> None:
        cache.truncate(0)
        with torch.inference_mode():
            logits = roomy.rows(list(range(WINDOW)), cache)
            if sampling is None:
                logits.argmax(dim=-1)
                return
            target = probabilities(logits, sampling)
            draft = torch.stack([probabilities(row[None], sampling)[0] for row in logits[1:]])
            rejection_sample(list(range(WINDOW - 1)), draft, target, [0.5] * WINDOW)

    peak, reserved = peak_allocated_bytes(window), reserved_bytes(roomy, WINDOW - 1)
    assert peak <= reserved


# ---- draft tokens within the slots ----------------------------------------------------------


@pytest.mark.parametrize("num_tokens", [1, 2, 3])
def test_experts_of_independent_tokens_are_as_many_as_the_bound_takes_them_for(
    num_tokens: int,
) -> None:
    """All ways in which tokens can choose 2 of 4 experts, counted; skewed choices have fewer."""
    num_layers, num_experts, top_k = 3, 4, 2
    choices = list(itertools.combinations(range(num_experts), top_k))
    union, skewed, total = Fraction(0), Fraction(0), Fraction(0)
    for tokens in itertools.product(range(len(choices)), repeat=num_tokens):
        size = len({expert for i in tokens for expert in choices[i]})
        weight = math.prod(Fraction(i + 1, 21) for i in tokens)  # 21 = 1 + ... + 6
        union += Fraction(num_layers * size, len(choices) ** num_tokens)
        skewed += weight * num_layers * size
        total += weight
    assert total == 1
    assert skewed < union or num_tokens == 1
    for num_slots in range(num_layers * num_experts):
        allowed = max_draft_tokens(num_slots, num_layers, num_experts, top_k)
        fits = union <= num_slots
        assert (allowed >= num_tokens - 1) == fits or num_tokens == 1


@pytest.mark.parametrize(
    ("num_slots", "expected"),
    [
        (0, 0),
        (32, 0),  # 8 layers of 32 experts, top-4: one token's experts
        (59, 0),  # two tokens' are 60
        (60, 1),
        (84, 1),  # 84.5
        (85, 2),
        (124, 3),  # 124.7 of five tokens
        (125, 4),
        (255, 40),  # 256 (1 - (7/8)^41) = 254.9
        (256, MAX_DRAFT_TOKENS),
    ],
)
def test_draft_tokens_that_the_slots_allow(num_slots: int, expected: int) -> None:
    assert max_draft_tokens(num_slots, 8, 32, 4) == expected


def test_where_every_token_uses_every_expert_all_must_fit() -> None:
    assert max_draft_tokens(15, 4, 4, 4) == 0
    assert max_draft_tokens(16, 4, 4, 4) == MAX_DRAFT_TOKENS
