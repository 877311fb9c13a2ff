"""Dividing a fast-memory budget: what must be resident, and how many expert slots are left.

Everything that Specter itself holds counts: dense weights, draft, predictor, KV cache, working
buffers, slots. The interpreter and the libraries (some 300 MB) do not: they are the same for any
model. Pure; the planner and the runtime use the same arithmetic.

Called by: session, specter_build.plan_placement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specter_runtime.config import DTYPE_BYTES, ExpertNumbers, ModelConfig
from specter_runtime.errors import CapacityError
from specter_runtime.experts import matrix_shapes
from specter_runtime.packed import packed_nbytes
from specter_runtime.roles import FLOAT32_ROLES, dense_shapes
from specter_runtime.units import format_bytes

MAX_DRAFT_TOKENS = 64
"""More are never drafted."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Resident bytes by kind."""

    budget_bytes: int
    dense_bytes: int
    draft_bytes: int
    predictor_bytes: int
    kv_cache_bytes: int
    buffer_bytes: int
    slot_bytes: int
    num_slots: int

    @property
    def used_bytes(self) -> int:
        """All of it; at most the budget."""
        fixed = self.dense_bytes + self.draft_bytes + self.predictor_bytes
        fixed += self.kv_cache_bytes + self.buffer_bytes
        return fixed + self.num_slots * self.slot_bytes


def max_draft_tokens(
    num_slots: int, num_layers: int, num_experts: int, num_experts_per_tok: int
) -> int:
    """Draft tokens K such that the experts of a window of K + 1 tokens fit the slots.

    A window whose experts outgrow the slots evicts what it is about to use. If a token uses expert
    e of a layer with probability q(e), n independent ones use it with 1 - (1 - q(e))^n. That is
    concave in q(e), and the q(e) of a layer sum to k = ``num_experts_per_tok``, so the expected
    union of a layer is the largest where all are k/E: it is at most E (1 - (1 - k/E)^n). Tokens
    that follow each other have more in common than independent ones.

    Returns:
        The largest K with ``num_layers`` E (1 - (1 - k/E)^(K + 1)) at most ``num_slots``, at least
        0. With a slot for every expert any K will do: ``MAX_DRAFT_TOKENS``.
    """
    share_left = 1 - num_experts_per_tok / num_experts  # of a layer's experts, by one token
    num_draft_tokens = 0
    while num_draft_tokens < MAX_DRAFT_TOKENS:
        union = num_layers * num_experts * (1 - share_left ** (num_draft_tokens + 2))
        if union > num_slots:
            break
        num_draft_tokens += 1
    return num_draft_tokens


def divide_budget(
    config: ModelConfig,
    *,
    memory_budget_bytes: int | None,
    draft_bits: Sequence[Sequence[int]],
    group_size: int,
    symmetric: bool,
    predictor_bytes: int,
    dtype: str,
    numbers: ExpertNumbers,
    max_context_tokens: int,
    prompt_chunk_tokens: int,
    num_draft_tokens: int,
    slot_bytes: int,
) -> MemoryUse:
    """Fill what the fixed parts leave with expert slots, at most one for each expert.

    Args:
        config: the model.
        memory_budget_bytes: everything together; None is the minimum.
        draft_bits: bit width of each expert by routed layer; empty when there is no draft.
        group_size: of the draft's quantization.
        symmetric: whether the draft stores no zero points.
        predictor_bytes: of all layers' predictors, see ``predictor_nbytes``.
        dtype: of activations, dense weights and KV cache.
        numbers: of the routed experts as the checkpoint has them.
        max_context_tokens: room in the KV cache.
        prompt_chunk_tokens: rows of the largest block.
        num_draft_tokens: drafted tokens per window.
        slot_bytes: one expert slot.

    Raises:
        CapacityError: fewer slots than one token's experts in a layer; states the minimum.
    """
    dense = dense_nbytes(config, dtype)
    draft = draft_nbytes(config, draft_bits, group_size, symmetric, numbers)
    kv_cache = config.kv_bytes_per_token(dtype) * max_context_tokens
    buffers = buffer_nbytes(
        config, dtype, max_context_tokens, prompt_chunk_tokens, num_draft_tokens + 1
    )
    fixed = dense + draft + predictor_bytes + kv_cache + buffers
    minimum = fixed + config.num_experts_per_tok * slot_bytes
    memory_budget_bytes = minimum if memory_budget_bytes is None else memory_budget_bytes
    if memory_budget_bytes < minimum:
        raise CapacityError(
            f"a memory budget of {format_bytes(memory_budget_bytes)} is too small; the minimum is "
            f"{format_bytes(minimum)} ({minimum} bytes): dense weights {format_bytes(dense)}, "
            f"draft {format_bytes(draft)}, predictor {format_bytes(predictor_bytes)}, KV cache for "
            f"{max_context_tokens} tokens {format_bytes(kv_cache)}, buffers "
            f"{format_bytes(buffers)}, and {config.num_experts_per_tok} experts of "
            f"{format_bytes(slot_bytes)}"
        )
    num_experts = len(config.moe_layers) * config.num_experts
    num_slots = min((memory_budget_bytes - fixed) // slot_bytes, num_experts)
    return MemoryUse(
        budget_bytes=memory_budget_bytes,
        dense_bytes=dense,
        draft_bytes=draft,
        predictor_bytes=predictor_bytes,
        kv_cache_bytes=kv_cache,
        buffer_bytes=buffers,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
    )


def dense_nbytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all resident full-precision tensors; routers are float32 whatever ``dtype`` is."""
    total = 0
    for layer in (None, *range(config.num_hidden_layers)):
        for role, shape in dense_shapes(config, layer).items():
            total += math.prod(shape) * (4 if role in FLOAT32_ROLES else DTYPE_BYTES[dtype])
    return total


def draft_nbytes(
    config: ModelConfig,
    bits: Sequence[Sequence[int]],
    group_size: int,
    symmetric: bool,
    numbers: ExpertNumbers,
) -> int:
    """Bytes of all stand-ins: quantized matrices, and biases as the checkpoint has them."""
    shapes = matrix_shapes(config).values()
    biases = 0
    if numbers.bias_dtype is not None:
        biases = sum(shape[0] for shape in shapes) * DTYPE_BYTES[numbers.bias_dtype]
    return sum(
        biases + sum(packed_nbytes(shape, width, group_size, symmetric) for shape in shapes)
        for row in bits
        for width in row
        if width
    )


def predictor_nbytes(config: ModelConfig, layers_ahead: int) -> int:
    """Bytes of all layers' predictors, in memory as on disk: bfloat16 weights, float32 biases.

    Each routed layer speaks of the next ``layers_ahead``, of fewer near the end; none where every
    token uses every expert.
    """
    if config.num_experts <= config.num_experts_per_tok:
        return 0
    num_layers = len(config.moe_layers)
    num_pairs = sum(min(layers_ahead, num_layers - 1 - i) for i in range(num_layers))
    return num_pairs * config.num_experts * (2 * config.hidden_size + 4)


def buffer_nbytes(
    config: ModelConfig,
    dtype: str,
    max_context_tokens: int,
    prompt_rows: int,
    window_rows: int,
) -> int:
    """Upper bound of what is held while computing, beside weights and caches.

    The largest of two moments. A prompt chunk of T rows: hidden states, their norm, the float32 sum
    of experts and its rounded copy (4 D wide), queries, keys and values twice (before and after
    rotation), routing, the chosen experts' inputs, inner rows and outputs in float32; a mask over
    the context, boolean and in the compute dtype (with attention sinks also float32 scores of all
    heads, twice); and one expert's gate, up and product. A window of K + 1 rows: float32 logits and
    their float64 probabilities, twice (draft and target), and for one row what top-k and top-p take
    (sorted values, order, sums and masks: 56 bytes a token). To either, one expert in the compute
    dtype: a stand-in and its float32 intermediate.
    """
    c, itemsize = config, DTYPE_BYTES[dtype]
    num_kv_heads, width = c.key_shape
    heads = c.num_attention_heads * max(width, c.head_dim) + 2 * num_kv_heads * width
    row_bytes = 4 * 4 * c.hidden_size + 2 * itemsize * heads + 8 * c.num_experts
    row_bytes += 4 * (2 * c.hidden_size + c.moe_intermediate_size) * c.num_experts_per_tok
    widths = (c.moe_intermediate_size, c.intermediate_size or 0, c.shared_intermediate_size)
    row_bytes += 3 * itemsize * max(widths)
    seen_bytes = 1 + itemsize + (2 * 4 * c.num_attention_heads if c.attention_sinks else 0)
    prompt = prompt_rows * (row_bytes + max_context_tokens * seen_bytes)
    window = (window_rows * (4 + 8) * 2 + 56) * c.vocab_size
    return max(prompt, window) + c.expert_num_weights * (itemsize + 4)
