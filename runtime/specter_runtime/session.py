"""An opened bundle, ready to decode: the object graph and nothing else.

``Session.open`` reads the resident tensors, divides the memory budget, fills the expert cache with
the plan's initial residents and wires the decoder; ``stream`` turns text into text.

Called by: cli, specter_build.audit.  Next: speculative_decoder.
"""

from __future__ import annotations

import logging
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
    GenerationLimits,
    ModelConfig,
    PredictorKind,
    RuntimeConfig,
    SamplingConfig,
)
from specter_runtime.draft_engine import ResidentDraft, SelfDrafter
from specter_runtime.errors import CapacityError, SpecterError
from specter_runtime.eviction import EVICTION_POLICIES
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import Expert, ExpertKey, PackedExperts, SlotExpert, escapes_start
from specter_runtime.governor import Governor, lookaheads
from specter_runtime.kv_cache import KVCache
from specter_runtime.manifest import ExpertFormat, Plan
from specter_runtime.memory import MemoryUse, divide_budget, max_draft_tokens, predictor_nbytes
from specter_runtime.metrics import DecodeStats
from specter_runtime.model import MoETransformer
from specter_runtime.predictor import Predictor, ask_routers_early
from specter_runtime.prefetcher import Prefetcher
from specter_runtime.row_pass import RowPass
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS, SpeculativeDecoder
from specter_runtime.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Session:
    """One bundle, one sequence at a time. Use as a context manager, or call ``close``.

    Attributes:
        memory: what is resident, by kind.
        num_draft_tokens: drafted per window, at most.
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
    _stand_ins: Mapping[ExpertKey, Expert]
    _kv_cache: KVCache
    _row_pass: RowPass | None
    _prefetcher: Prefetcher | None
    _draft_stop: bool
    _greedy_governor: Governor
    _sampling_governor: Governor

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
        dtype_name, context = _resolve(plan, config)
        dtype: torch.dtype = getattr(torch, dtype_name)
        budget = config.memory_budget_bytes
        budget = plan.memory_budget_bytes if budget is None else budget
        drafting = _decide_drafting(bundle, config, budget, store.slot_bytes)
        memory = drafting.memory
        with torch.inference_mode():
            predictors = _predictors(bundle, config)
            model = MoETransformer(
                model_config, bundle.dense_tensors(), manifest.tensor_names, dtype, predictors
            )
            packed = bundle.draft_experts() if drafting.num_tokens else {}
            stand_ins = {key: kernels.prepare(expert) for key, expert in packed.items()}
        tokenizer = Tokenizer(root)
        eos_token_ids = bundle.eos_token_ids() | tokenizer.eos_token_ids
        kv_cache = KVCache(model_config, context, dtype)
        hottest_first = [ExpertKey(*pair) for pair in plan.initial_residents]
        policy = EVICTION_POLICIES[config.eviction or plan.eviction](
            model_config.num_hidden_layers, model_config.num_experts, hottest_first
        )
        residency = None
        if kernels.library() is not None:
            residency = kernels.Residency(model_config.num_hidden_layers, model_config.num_experts)
        cache = ExpertCache(  # starts threads: nothing behind it may fail without closing it
            store,
            memory.num_slots,
            partial(_view, model_config, manifest.experts),
            policy,
            config.num_io_threads,
            config.load_timeout_seconds,
            overlap=config.overlap,
            residency=residency,
        )
        try:
            cache.warm(hottest_first)
        except BaseException:
            cache.close()
            raise
        prefetcher = None
        if config.prefetch and (drafting.num_tokens or predictors):
            reserve = min(memory.num_slots - 1, model_config.num_experts_per_tok)
            prefetcher = Prefetcher(
                cache, (memory.num_slots - reserve) * store.slot_bytes, store.slot_bytes
            )
        predicts = bool(predictors) and prefetcher is not None
        return cls(
            bundle=bundle,
            tokenizer=tokenizer,
            config=model_config,
            memory=memory,
            num_draft_tokens=drafting.num_tokens,
            max_context_tokens=context,
            is_direct_io=isinstance(store, ShardExpertStore) and store.is_direct,
            eos_token_ids=eos_token_ids,
            stats=DecodeStats(),
            _model=model,
            _cache=cache,
            _stand_ins=stand_ins,
            _kv_cache=kv_cache,
            _row_pass=RowPass.make(model, kv_cache, cache, residency),
            _prefetcher=prefetcher,
            _draft_stop=config.draft_stop,
            _greedy_governor=Governor(
                lookaheads(
                    drafting.num_tokens,
                    predicts=predicts,
                    governs_draft=drafting.is_governed,
                )
            ),
            # The text of a seed depends on the number of draft tokens: it stays what it was set to.
            _sampling_governor=Governor(
                lookaheads(
                    drafting.num_tokens if stand_ins else 0,
                    predicts=predicts,
                    governs_draft=False,
                )
            ),
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
        decoder = self._decoder(sampling or SamplingConfig(), limits)
        before = None
        for token_ids in decoder.generate(prompt_ids, limits):
            before = before or self._cache.stats()  # the prompt's own loads are not counted
            self.stats = decoder.stats
            self.stats.cache = self._cache.stats().since(before)
            yield from token_ids

    def _decoder(self, sampling: SamplingConfig, limits: GenerationLimits) -> SpeculativeDecoder:
        """The loop over this session's parts.

        When sampling, the draft may not depend on what happens to be cached, or the text of a seed
        would: it is made of stand-ins alone (without any there is none) and never stopped.
        """
        if sampling.is_greedy:
            drafter = SelfDrafter(
                self._model,
                ResidentDraft(self._cache, self._stand_ins),
                limits.eos_token_ids,
                self._cache.num_absent if self._draft_stop else None,
            )
        else:
            drafter = SelfDrafter(self._model, PackedExperts(self._stand_ins), limits.eos_token_ids)
        return SpeculativeDecoder(
            self._model,
            self._cache,
            drafter,
            self._prefetcher,
            self._kv_cache,
            self._greedy_governor if sampling.is_greedy else self._sampling_governor,
            sampling,
            self._row_pass,
        )

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


def _predictor_kind(bundle: Bundle, config: RuntimeConfig) -> PredictorKind:
    """As asked for or planned; where nothing is to be prefetched, nothing predicts."""
    if not config.prefetch:
        return "none"
    return config.predictor or bundle.plan.predictor


def _predictors(bundle: Bundle, config: RuntimeConfig) -> dict[int, Predictor]:
    """What foretells later layers' experts, by layer; none where nobody would be asked."""
    kind = _predictor_kind(bundle, config)
    if kind == "none":
        return {}
    if kind == "fitted":
        return bundle.predictors()
    manifest = bundle.manifest
    return ask_routers_early(manifest.model, bundle.dense_tensors(), manifest.tensor_names)


def _predictor_nbytes(bundle: Bundle, config: RuntimeConfig) -> int:
    """What those take."""
    kind = _predictor_kind(bundle, config)
    if kind == "none":
        return 0
    if kind == "fitted":
        return bundle.predictor_nbytes
    return predictor_nbytes(bundle.manifest.model, layers_ahead=1)


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


@dataclass(frozen=True, slots=True)
class _Drafting:
    """How far a draft may run ahead, and the division of memory that goes with it.

    Attributes:
        memory: with stand-ins if ``num_tokens`` is not 0.
        num_tokens: as asked for or planned, within the slots.
        is_governed: whether none may be drafted instead.
    """

    memory: MemoryUse
    num_tokens: int
    is_governed: bool


def bundle_memory(
    bundle: Bundle, config: RuntimeConfig, memory_budget_bytes: int | None, slot_bytes: int
) -> MemoryUse:
    """How a budget is divided for a bundle run in this way; None is the least that will do.

    Raises:
        CapacityError: the budget is too small, or the context longer than the model's.
    """
    if memory_budget_bytes is None:
        return _divide(bundle, config, None, slot_bytes, _wanted_tokens(bundle, config))
    return _decide_drafting(bundle, config, memory_budget_bytes, slot_bytes).memory


def _wanted_tokens(bundle: Bundle, config: RuntimeConfig) -> int:
    asked = config.num_draft_tokens
    return bundle.plan.num_draft_tokens if asked is None else asked


def _decide_drafting(
    bundle: Bundle, config: RuntimeConfig, memory_budget_bytes: int, slot_bytes: int
) -> _Drafting:
    """See ``bundle_memory``; where the slots allow no draft, none is held in memory."""
    divide = partial(_divide, bundle, config, memory_budget_bytes, slot_bytes)
    asked, wanted = config.num_draft_tokens, _wanted_tokens(bundle, config)
    memory = divide(wanted)
    planned = min(wanted, _bound(bundle, config, memory))
    if planned < wanted and asked is not None:
        logger.warning(
            "drafting %d tokens a window instead of %d: with more, its experts would outgrow "
            "%d slots",
            planned,
            wanted,
            memory.num_slots,
        )
    if wanted and not planned:
        memory = divide(0)
    is_governed = asked is None and config.governor
    return _Drafting(memory, planned, is_governed)


def _bound(bundle: Bundle, config: RuntimeConfig, memory: MemoryUse) -> int:
    model = bundle.manifest.model
    slots = memory.num_slots if config.bound_by_slots else len(model.moe_layers) * model.num_experts
    return max_draft_tokens(
        slots, len(model.moe_layers), model.num_experts, model.num_experts_per_tok
    )


def _divide(
    bundle: Bundle,
    config: RuntimeConfig,
    memory_budget_bytes: int | None,
    slot_bytes: int,
    num_draft_tokens: int,
) -> MemoryUse:
    """The division of a budget for windows of so many draft tokens; for 0, without stand-ins."""
    manifest = bundle.manifest
    dtype, context = _resolve(bundle.plan, config)
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
        predictor_bytes=_predictor_nbytes(bundle, config),
        dtype=dtype,
        numbers=manifest.experts.numbers,
        max_context_tokens=context,
        prompt_chunk_tokens=PROMPT_CHUNK_TOKENS,
        num_draft_tokens=num_draft_tokens,
        slot_bytes=slot_bytes,
    )


def _resolve(plan: Plan, config: RuntimeConfig) -> tuple[str, int]:
    """Dtype and context: what the caller left open is the plan's."""
    context = config.max_context_tokens
    context = plan.max_context_tokens if context is None else context
    return config.dtype or plan.dtype, context
