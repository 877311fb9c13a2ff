"""Step: open the finished bundle through the runtime and hold it against the checkpoint.

Every tensor's SHA-256 is compared, and 32 greedy tokens decoded from the bundle (with its plan's
lookahead) with those that the target decodes straight from the checkpoint.

Called by: pipeline.  Next: specter_runtime.session.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specter_build.checkpoint import Checkpoint
from specter_runtime.bundle_loader import Bundle, load_bundle
from specter_runtime.config import GenerationLimits, RuntimeConfig, SamplingConfig
from specter_runtime.draft_engine import SelfDrafter
from specter_runtime.errors import BundleError, name_list
from specter_runtime.expert_store import ShardExpertStore, aligned_buffer
from specter_runtime.experts import ExpertKey, view_expert
from specter_runtime.governor import Governor, Lookahead
from specter_runtime.kv_cache import KVCache
from specter_runtime.model import MoETransformer
from specter_runtime.session import Session, bundle_memory
from specter_runtime.shards import LazyTensors, align_up, tensor_bytes
from specter_runtime.speculative_decoder import SpeculativeDecoder

logger = logging.getLogger(__name__)

NUM_TOKENS = 32
PROMPT_TOKENS = 16


def audit(root: Path, checkpoint: Checkpoint, prompt_ids: Sequence[int], memory_bytes: int) -> None:
    """Check a bundle.

    Args:
        root: the bundle.
        checkpoint: what it was made of.
        prompt_ids: tokens to continue; the first ``PROMPT_TOKENS`` are used.
        memory_bytes: what decoding may take; if the draft does not fit, it is left out.

    Raises:
        BundleError: tensors or tokens differ; names them.
    """
    bundle = load_bundle(root, verify_hashes=True)
    wrong = _wrong_tensors(bundle, checkpoint)
    if wrong:
        raise BundleError(f"{root}: tensors differ from the checkpoint: {name_list(wrong)}")
    longest = bundle.plan.max_context_tokens
    prompt = list(prompt_ids[: min(PROMPT_TOKENS, longest // 2)])
    num_tokens = min(NUM_TOKENS, longest - len(prompt))
    decoded = _decode_bundle(bundle, prompt, num_tokens, memory_bytes)
    expected = decode_target(checkpoint, prompt, num_tokens, bundle.plan.dtype)
    if decoded != expected:
        raise BundleError(
            f"{root}: greedy tokens differ from the target's: {decoded}, expected {expected}"
        )


def _decode_bundle(
    bundle: Bundle, prompt_ids: Sequence[int], num_tokens: int, memory_bytes: int
) -> list[int]:
    """Greedy tokens of the bundle at its smallest budget, with lookahead if that fits."""
    config = RuntimeConfig(
        max_context_tokens=len(prompt_ids) + num_tokens,
        num_draft_tokens=bundle.plan.num_draft_tokens,
        bound_by_slots=False,
        draft_stop=False,
    )  # nothing that depends on time, nor on how small the budget is
    slot_bytes = align_up(bundle.manifest.experts.nbytes)
    memory = bundle_memory(bundle, config, None, slot_bytes)
    if memory.used_bytes > memory_bytes:
        logger.info("audit: the draft does not fit the build's memory, decoding without it")
        config = replace(config, num_draft_tokens=0)
        memory = bundle_memory(bundle, config, None, slot_bytes)
    with Session.open(
        bundle.root, replace(config, memory_budget_bytes=memory.budget_bytes)
    ) as session:
        return list(session.generate_ids(prompt_ids, num_tokens, stop_at_eos=False))


def _wrong_tensors(bundle: Bundle, checkpoint: Checkpoint) -> list[str]:
    """Names of tensors whose bytes in the bundle are not the checkpoint's."""
    expected = {
        name
        for layer in (None, *range(checkpoint.config.num_hidden_layers))
        for name in checkpoint.dense_names(layer)
    }
    found = set()
    wrong = []
    for name, tensor in bundle.dense_tensors().items():
        found.add(name)
        if name not in expected or _digest(tensor) != _digest(checkpoint.tensor(name)):
            wrong.append(name)
    wrong += sorted(expected - found)
    shards, store = bundle.manifest.experts, ShardExpertStore.of(bundle)
    buffer = aligned_buffer(store.slot_bytes)
    view = torch.frombuffer(buffer, dtype=torch.uint8)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.num_experts):
            key = ExpertKey(layer, expert)
            store.read_into(key, buffer)
            stored = view_expert(view, checkpoint.config, shards.numbers, shards.encoding)
            tensors = stored.tensors()
            wrong += [
                name
                for role, name in checkpoint.stored_names(key).items()
                if _digest(tensors[role]) != _digest(checkpoint.tensor(name))
            ]
    return wrong


def _digest(tensor: torch.Tensor) -> tuple[torch.dtype, torch.Size, str]:
    return tensor.dtype, tensor.shape, hashlib.sha256(tensor_bytes(tensor)).hexdigest()


def decode_target(
    checkpoint: Checkpoint, prompt_ids: Sequence[int], num_tokens: int, dtype: str
) -> list[int]:
    """Greedy tokens of the target, its experts read straight from the checkpoint."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    config = checkpoint.config
    layers = (None, *range(config.num_hidden_layers))
    names = itertools.chain.from_iterable(map(checkpoint.dense_names, layers))
    tensors = LazyTensors(names, checkpoint.tensor)
    model = MoETransformer(config, tensors, checkpoint.family.bundle_names(), torch_dtype)
    decoder = SpeculativeDecoder(
        model,
        checkpoint,
        SelfDrafter(model, checkpoint, ()),
        prefetcher=None,
        kv_cache=KVCache(config, len(prompt_ids) + num_tokens, torch_dtype),
        governor=Governor([Lookahead(0)]),
        sampling=SamplingConfig(),
    )
    with torch.inference_mode():
        passes = decoder.generate(prompt_ids, GenerationLimits(num_tokens))
        return [token for token_ids in passes for token in token_ids]
