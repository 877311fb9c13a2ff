"""An opened bundle, ready to decode: the object graph and nothing else.

``Session.open`` reads the resident tensors, divides the memory budget, fills the expert cache with
the plan's initial residents and wires the decoder; ``stream`` turns text into text.

Called by: cli, specter_build.audit.  Next: speculative_decoder.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

import torch

from specter_runtime import kernels
from specter_runtime.bundle_loader import Bundle, load_bundle
from specter_runtime.config import (
    Eviction,
    GenerationLimits,
    ModelConfig,
    RuntimeConfig,
    SamplingConfig,
)
from specter_runtime.draft_engine import SelfDrafter
from specter_runtime.errors import CapacityError, SpecterError
from specter_runtime.eviction import LeastRecentlyUsed, ReuseValues
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import Expert, ExpertKey, PackedExperts, SlotExpert, escapes_start
from specter_runtime.kv_cache import KVCache
from specter_runtime.manifest import ExpertFormat, Plan
from specter_runtime.memory import MemoryUse, divide_budget
from specter_runtime.metrics import DecodeStats
from specter_runtime.model import MoETransformer
from specter_runtime.prefetcher import Prefetcher
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS, SpeculativeDecoder
from specter_runtime.tokenizer import Tokenizer

EVICTION_POLICIES: dict[Eviction, type[ReuseValues] | type[LeastRecentlyUsed]] = {
    "reuse": ReuseValues,
    "lru": LeastRecentlyUsed,
}


@dataclass(slots=True)
class Session:
    """One bundle, one sequence at a time. Use as a context manager, or call ``close``.

    Attributes:
        memory: what is resident, by kind.
        stats: counters of the last generation.
    """

    bundle: Bundle
    tokenizer: Tokenizer
    config: ModelConfig
    memory: MemoryUse
    num_draft_tokens: int
    max_context_tokens: int
    is_direct_io: bool
    eos_token_ids: frozenset[int]
    stats: DecodeStats
    _model: MoETransformer
    _cache: ExpertCache
    _draft_experts: PackedExperts
    _kv_cache: KVCache
    _prefetcher: Prefetcher | None

    @classmethod
    def open(
        cls, root: Path, config: RuntimeConfig | None = None, store: ExpertStore | None = None
    ) -> Self:
        """Open a bundle.

        Args:
            root: the bundle's folder.
            config: how to run it; the plan decides what is left open.
            store: where experts are read from, instead of the bundle's shards.

        Raises:
            BundleError: the bundle is damaged.
            CapacityError: the memory budget is too small; states the minimum.
        """
        config = config or RuntimeConfig()
        bundle = load_bundle(root, verify_hashes=config.verify_hashes)
        manifest, plan, model_config = bundle.manifest, bundle.plan, bundle.manifest.model
        if config.num_threads is not None:
            torch.set_num_threads(config.num_threads)
        kernels.set_threads(torch.get_num_threads())
        store = store or ShardExpertStore.of(bundle)
        num_draft_tokens, dtype_name, context = _resolve(plan, config)
        dtype: torch.dtype = getattr(torch, dtype_name)
        budget = config.memory_budget_bytes
        budget = plan.memory_budget_bytes if budget is None else budget
        memory = bundle_memory(bundle, config, budget, store.slot_bytes)
        with torch.inference_mode():
            model = MoETransformer(
                model_config, bundle.dense_tensors(), manifest.tensor_names, dtype
            )
            stand_ins = bundle.draft_experts() if num_draft_tokens else {}
            draft_experts = PackedExperts(
                {key: kernels.prepare(expert) for key, expert in stand_ins.items()}
            )
        tokenizer = Tokenizer(root)
        eos_token_ids = bundle.eos_token_ids() | tokenizer.eos_token_ids
        kv_cache = KVCache(model_config, context, dtype)
        hottest_first = [ExpertKey(*pair) for pair in plan.initial_residents]
        policy = EVICTION_POLICIES[config.eviction](
            model_config.num_hidden_layers, model_config.num_experts, hottest_first
        )
        cache = ExpertCache(  # starts threads: nothing behind it may fail without closing it
            store,
            memory.num_slots,
            partial(_view, model_config, manifest.experts),
            policy,
            config.num_io_threads,
            config.load_timeout_seconds,
            overlap=config.overlap,
        )
        try:
            cache.warm(hottest_first)
        except BaseException:
            cache.close()
            raise
        prefetcher = None
        if config.prefetch if num_draft_tokens else config.predict_next_layer:
            reserve = min(memory.num_slots - 1, model_config.num_experts_per_tok)
            prefetcher = Prefetcher(
                cache, (memory.num_slots - reserve) * store.slot_bytes, store.slot_bytes
            )
        return cls(
            bundle=bundle,
            tokenizer=tokenizer,
            config=model_config,
            memory=memory,
            num_draft_tokens=num_draft_tokens,
            max_context_tokens=context,
            is_direct_io=isinstance(store, ShardExpertStore) and store.is_direct,
            eos_token_ids=eos_token_ids,
            stats=DecodeStats(),
            _model=model,
            _cache=cache,
            _draft_experts=draft_experts,
            _kv_cache=kv_cache,
            _prefetcher=prefetcher,
        )

    @torch.inference_mode()  # left at each yield: it does not leak into the caller
    def generate_ids(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
        *,
        stop_at_eos: bool = True,
    ) -> Iterator[int]:
        """Yield new token ids; an end token is the last one. ``stats`` is filled as it goes.

        Raises:
            CapacityError: prompt and new tokens do not fit the context.
            SpecterError: the prompt is empty or holds an id outside the vocabulary, or an expert
                could not be read.
        """
        self._check_prompt(prompt_ids, max_new_tokens)
        limits = GenerationLimits(
            max_new_tokens, self.eos_token_ids if stop_at_eos else frozenset()
        )
        decoder = SpeculativeDecoder(
            self._model,
            self._cache,
            SelfDrafter(self._model, self._draft_experts, limits.eos_token_ids),
            self._prefetcher,
            self._kv_cache,
            self.num_draft_tokens,
            sampling or SamplingConfig(),
        )
        before = None
        for token_ids in decoder.generate(prompt_ids, limits):
            before = before or self._cache.stats()  # the prompt's own loads are not counted
            self.stats = decoder.stats
            self.stats.cache = self._cache.stats().since(before)
            yield from token_ids

    def stream(
        self,
        prompt_ids: Sequence[int],
        max_new_tokens: int = 128,
        sampling: SamplingConfig | None = None,
    ) -> Iterator[str]:
        """Yield text as it is committed, whole characters only."""
        decode = self.tokenizer.decode_stream()
        for token_id in self.generate_ids(prompt_ids, max_new_tokens, sampling):
            text = decode(token_id)
            if text:
                yield text

    def _check_prompt(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        if not prompt_ids:
            raise SpecterError("the prompt is empty: there must be at least one token")
        if max_new_tokens < 1:
            raise SpecterError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
        needed = len(prompt_ids) + max_new_tokens
        if needed > self.max_context_tokens:
            raise CapacityError(
                f"prompt ({len(prompt_ids)} tokens) and {max_new_tokens} new tokens need a context "
                f"of {needed}, there is room for {self.max_context_tokens}; shorten the prompt, "
                "ask for fewer tokens or raise --max-context"
            )
        if not all(0 <= token < self.config.vocab_size for token in prompt_ids):
            raise SpecterError(
                f"the prompt holds a token id outside the vocabulary of {self.config.vocab_size}"
            )

    def to_dict(self) -> Mapping[str, object]:
        """How this session runs and what its last generation did, for JSON."""
        return {
            "num_draft_tokens_max": self.num_draft_tokens,
            "direct_io": self.is_direct_io,
            "kernels": kernels.name(),
            "memory": asdict(self.memory),
            **self.stats.to_dict(),
        }

    def close(self) -> None:
        """Stop the I/O threads."""
        self._cache.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def _view(
    config: ModelConfig, stored: ExpertFormat, buffer: torch.Tensor, previous: Expert | None
) -> Expert:
    """See a slot's bytes as an expert, ready for the kernels where there are some.

    What the kernels know of a slot stays true when it is read into again, but for the escapes of a
    packed expert, and the biases behind them.
    """
    if isinstance(previous, kernels.NativeExpert) and not config.expert_bias:
        if stored.encoding == "packed":
            previous.locate_escapes(buffer, escapes_start(config))
        return previous
    slot = SlotExpert(buffer, config, stored.numbers, stored.encoding)
    prepared = kernels.prepare(slot.view())
    if isinstance(prepared, kernels.NativeExpert):
        return replace(prepared, expert=slot)
    return prepared


def bundle_memory(
    bundle: Bundle, config: RuntimeConfig, memory_budget_bytes: int | None, slot_bytes: int
) -> MemoryUse:
    """How a budget is divided for a bundle run in this way; None is the least that will do.

    Raises:
        CapacityError: the budget is too small, or the context longer than the model's.
    """
    manifest = bundle.manifest
    num_draft_tokens, dtype, context = _resolve(bundle.plan, config)
    longest = manifest.model.max_position_embeddings
    if context > longest:
        raise CapacityError(
            f"a context of {context} tokens is more than the model's max_position_embeddings, "
            f"{longest}"
        )
    return divide_budget(
        manifest.model,
        memory_budget_bytes=memory_budget_bytes,
        draft_bits=manifest.draft.bits if num_draft_tokens else (),
        group_size=manifest.draft.group_size,
        symmetric=manifest.draft.symmetric,
        dtype=dtype,
        numbers=manifest.experts.numbers,
        max_context_tokens=context,
        prompt_chunk_tokens=PROMPT_CHUNK_TOKENS,
        num_draft_tokens=num_draft_tokens,
        slot_bytes=slot_bytes,
    )


def _resolve(plan: Plan, config: RuntimeConfig) -> tuple[int, str, int]:
    """Draft tokens, dtype and context: what the caller left open is the plan's."""
    num_draft_tokens = config.num_draft_tokens
    if num_draft_tokens is None:
        num_draft_tokens = plan.num_draft_tokens
    context = config.max_context_tokens
    context = plan.max_context_tokens if context is None else context
    return num_draft_tokens, config.dtype or plan.dtype, context
