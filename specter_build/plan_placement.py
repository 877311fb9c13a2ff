"""Step: decide slots, initial residents and the number of draft tokens for a budget. Pure.

The prediction is a roofline over a replay of the recorded routes: bytes over the link by a cache
of the planned size that evicts as the runtime does (but knows only who was chosen, not how nearly
others were), computation at memory speed. It ranks numbers
of draft tokens; it does not pretend to milliseconds.

Called by: pipeline.  Next: specter_runtime.memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specter_build.fidelity import expected_acceptance_length
from specter_build.recipe import HardwareRecipe
from specter_runtime.config import DTYPE_BYTES, DType, ModelConfig
from specter_runtime.eviction import UNKNOWN, ReuseValues, choose_victim
from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.manifest import FORMAT_VERSION, Plan
from specter_runtime.memory import MemoryUse, dense_nbytes

MAX_REPLAYED_TOKENS = 2048
"""Tokens of the calibration set that are replayed; enough for a hit rate, little enough to wait."""


@dataclass(frozen=True, slots=True)
class Evidence:
    """What calibration found out, as far as the plan needs it.

    Attributes:
        routes: routed layer -> the target's routes, int64 ``[N, T, K]``.
        counts: routed layer -> usage counts, int64 ``[E]``.
        acceptance_by_position: see ``fidelity``.
        recall: mean routing recall of the draft.
    """

    routes: Mapping[int, torch.Tensor]
    counts: Mapping[int, torch.Tensor]
    acceptance_by_position: Sequence[float]
    recall: float


def hottest_first(counts: Mapping[int, torch.Tensor]) -> list[ExpertKey]:
    """All experts by how often calibration used them; ties by layer and index."""
    keys = [
        (-int(count), layer, expert)
        for layer, row in counts.items()
        for expert, count in enumerate(row.tolist())
    ]
    return [ExpertKey(layer, expert) for _, layer, expert in sorted(keys)]


def replay_loads(
    routes: Mapping[int, torch.Tensor],
    initial: Sequence[ExpertKey],
    num_slots: int,
    window: int,
) -> float:
    """Experts loaded per window of ``window`` tokens by a cache; drives the runtime's rule.

    Args:
        routes: the target's routes.
        initial: all experts, hottest first; the first ``num_slots`` are resident at the start.
        num_slots: slots of the cache.
        window: tokens that are verified together: an expert is demanded once in a window.
    """
    layers = {layer: r.flatten(0, 1)[:MAX_REPLAYED_TOKENS] for layer, r in routes.items()}
    num_tokens = len(next(iter(layers.values())))
    warm_up = num_tokens // 2  # by then the cache holds what the text made it hold
    has_warm_up = window <= warm_up  # if not, all of it counts, from an empty cache
    loads = counted_tokens = 0
    shape = max(layers) + 1, 1 + max(key.expert for key in initial)
    policy = ReuseValues(*shape, initial)
    resident = np.zeros(shape, dtype=bool)
    next_use = np.full(shape, UNKNOWN)
    if has_warm_up:
        for key in initial[:num_slots]:
            resident[key] = True
    for start in range(0, num_tokens, window):
        stop = min(start + window, num_tokens)
        is_counted = start >= warm_up or not has_warm_up
        counted_tokens += (stop - start) * is_counted
        for layer, rows in layers.items():
            routing = Routing(layer, rows[start:stop], torch.ones(stop - start, rows.shape[1]))
            policy.observe(routing)
            used = np.zeros(shape, dtype=bool)
            used[layer, routing.expert_ids()] = True
            for expert in np.flatnonzero(used[layer] & ~resident[layer]):
                loads += is_counted
                if resident.sum() >= num_slots:
                    victim = choose_victim(policy.values, resident & ~used, next_use, -1)
                    victim = victim or choose_victim(policy.values, resident, next_use, -1)
                    assert victim is not None, "there is at least one slot"
                    resident[victim] = False
                resident[layer, expert] = True
    return loads * window / counted_tokens if counted_tokens else 0.0


def predict_tpot(
    config: ModelConfig,
    memory: MemoryUse,
    evidence: Evidence,
    hardware: HardwareRecipe,
    dtype: str,
    num_draft_tokens: int,
    initial: Sequence[ExpertKey],
) -> float:
    """Seconds per output token with K draft tokens.

    One window takes K draft passes, then K + 1 rows of the target (each row computed by itself, so
    rows cost alike) and the reads. Reads that the draft foresaw overlap its passes; the rest, at
    least the share that it did not foresee, is exposed.
    """
    k, hw = num_draft_tokens, hardware
    active = len(config.moe_layers) * config.num_experts_per_tok
    row = dense_nbytes(config, dtype) + active * config.expert_num_weights * DTYPE_BYTES[dtype]
    row_seconds = row / hw.memory_bytes_per_second + hw.pass_overhead_seconds
    draft_seconds = k * row_seconds  # an upper bound: stand-ins are fewer bytes
    loads = replay_loads(evidence.routes, initial, memory.num_slots, k + 1)
    read_seconds = hw.link_latency_seconds + memory.slot_bytes / hw.link_bytes_per_second
    link_seconds = loads * read_seconds
    foreseen = link_seconds * evidence.recall * k / (k + 1)  # the last row is not drafted
    exposed = link_seconds - min(foreseen, draft_seconds)
    window_seconds = draft_seconds + (k + 1) * row_seconds + exposed
    return window_seconds / expected_acceptance_length(evidence.acceptance_by_position, k)


def plan_placement(
    config: ModelConfig,
    memory_by_candidate: Mapping[int, MemoryUse],
    evidence: Evidence,
    hardware: HardwareRecipe,
    dtype: DType,
    max_context_tokens: int,
) -> Plan:
    """Choose the number of draft tokens with the least predicted TPOT; 0 competes like the others.

    Args:
        config: the model.
        memory_by_candidate: number of draft tokens -> division of the budget (0 needs no draft and
            has more slots). One entry when the recipe fixes the number.
        evidence: what calibration found out.
        hardware: what the machine is assumed to do.
        dtype: precision of computation.
        max_context_tokens: room in the KV cache.
    """
    initial = hottest_first(evidence.counts)
    predicted = {
        k: predict_tpot(config, memory, evidence, hardware, dtype, k, initial)
        for k, memory in memory_by_candidate.items()
    }
    best = min(predicted, key=lambda k: (predicted[k], k))
    memory = memory_by_candidate[best]
    return Plan(
        format_version=FORMAT_VERSION,
        memory_budget_bytes=memory.budget_bytes,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        num_slots=memory.num_slots,
        num_draft_tokens=best,
        initial_residents=tuple((key.layer, key.expert) for key in initial),
        predicted={str(k): seconds for k, seconds in predicted.items()},
        hardware=hardware.model_dump(),
    )
