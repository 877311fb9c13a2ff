"""Step: decide how a budget is used: draft, eviction, predictor, slots, initial residents. Pure.

Every way to run the bundle is simulated with the slots that it leaves, on the routes that
calibration recorded and on the profile of a machine, by the code that decides at run time. Plain
ways do not look ahead; one that does must beat the best of them by more than what the simulator may
be wrong, or the best plain way is the plan.

Called by: pipeline.  Next: specter_runtime.simulator.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch

from specter_runtime.config import DType, Eviction, PredictorKind
from specter_runtime.experts import ExpertKey
from specter_runtime.hardware import Hardware
from specter_runtime.manifest import FORMAT_VERSION, Plan
from specter_runtime.memory import MemoryUse
from specter_runtime.simulator import Policy, Routes, Shape, Simulated, simulate

MARGIN = 0.03
"""By how much looking ahead must be faster, as the governor asks of it at run time."""

EVICTIONS: Mapping[Eviction, str] = {"reuse": "no draft", "lru": "no draft, LRU eviction"}
PREDICTORS: tuple[PredictorKind, ...] = ("fitted", "router")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What calibration found out, as far as the plan needs it.

    Attributes:
        texts: routes of the target and of the draft.
        counts: routed layer -> usage counts, int64 ``[E]``.
        recall: of each kind of predictor, by number of layers ahead; empty without predictors.
    """

    texts: Sequence[Routes]
    counts: Mapping[int, torch.Tensor]
    recall: Mapping[PredictorKind, Sequence[float]]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a bundle, and how it divides the memory."""

    policy: Policy
    memory: MemoryUse
    eviction: Eviction = "reuse"
    predictor: PredictorKind = "none"

    @property
    def is_plain(self) -> bool:
        """Whether nothing is moved ahead."""
        return self.policy.foresight == "none"


def hottest_first(counts: Mapping[int, torch.Tensor]) -> list[ExpertKey]:
    """All experts by how often calibration used them; ties by layer and index."""
    keys = [
        (-int(count), layer, expert)
        for layer, row in counts.items()
        for expert, count in enumerate(row.tolist())
    ]
    return [ExpertKey(layer, expert) for _, layer, expert in sorted(keys)]


def ways_to_run(
    memory_by_candidate: Mapping[int, MemoryUse],
    memory_by_predictor: Mapping[PredictorKind, MemoryUse],
    recall: Mapping[PredictorKind, Sequence[float]],
) -> dict[str, Way]:
    """What is compared, by name; the simplest first.

    Args:
        memory_by_candidate: number of draft tokens -> division of the budget (0 needs no draft and
            has more slots). One entry when the recipe fixes the number.
        memory_by_predictor: the same without a draft, for the predictors that there is room for.
        recall: see ``Evidence``.
    """
    found = {}
    if 0 in memory_by_candidate:
        for eviction, name in EVICTIONS.items():
            found[name] = Way(Policy(eviction=eviction), memory_by_candidate[0], eviction)
        for kind, memory in memory_by_predictor.items():
            if recall.get(kind):
                policy = Policy(foresight=kind, recall=tuple(recall[kind]))
                found[f"no draft, {kind} predictor"] = Way(policy, memory, predictor=kind)
    for k, memory in memory_by_candidate.items():
        if k:
            policy = Policy(k, is_governed=False, foresight="draft")
            found[f"{k} draft token{'s' if k > 1 else ''}"] = Way(policy, memory)
    return found


def choose(ways: Mapping[str, Way], seconds: Mapping[str, float]) -> str:
    """The best plain way, or what is faster by more than ``MARGIN``; of equals the first."""
    plain = [name for name, way in ways.items() if way.is_plain]
    best = min(ways, key=lambda name: seconds[name])
    if not plain:
        return best
    best_plain = min(plain, key=lambda name: seconds[name])
    return best if seconds[best] < (1 - MARGIN) * seconds[best_plain] else best_plain


def plan_placement(
    shapes: Mapping[bool, Shape],
    ways: Mapping[str, Way],
    evidence: Evidence,
    hardware: Hardware,
    dtype: DType,
    max_context_tokens: int,
) -> Plan:
    """The way with the least simulated time per output token.

    Args:
        shapes: of the model, by whether there is a draft.
        ways: see ``ways_to_run``.
        evidence: what calibration found out.
        hardware: the machine.
        dtype: precision of computation.
        max_context_tokens: room in the KV cache.
    """
    initial = hottest_first(evidence.counts)
    found = {
        name: simulate(
            shapes[way.policy.num_draft_tokens > 0],
            hardware,
            way.policy,
            way.memory.num_slots,
            evidence.texts,
            initial,
        )
        for name, way in ways.items()
    }
    seconds = {name: simulated.tpot_seconds for name, simulated in found.items()}
    chosen = choose(ways, seconds)
    way = ways[chosen]
    numbers = {key: float(value) for key, value in asdict(hardware).items() if key != "name"}
    return Plan(
        format_version=FORMAT_VERSION,
        memory_budget_bytes=way.memory.budget_bytes,
        max_context_tokens=max_context_tokens,
        dtype=dtype,
        num_slots=way.memory.num_slots,
        num_draft_tokens=way.policy.num_draft_tokens,
        initial_residents=tuple((key.layer, key.expert) for key in initial),
        eviction=way.eviction,
        predictor=way.predictor,
        predicted=seconds,
        chosen=chosen,
        reason=explain(chosen, ways, found),
        hardware=numbers,
    )


def explain(chosen: str, ways: Mapping[str, Way], found: Mapping[str, Simulated]) -> str:
    """Why, in a sentence: what the time goes to, and the best of the other kind beside it."""
    own = found[chosen]
    parts = {
        "drafting": own.draft_seconds,
        "computing": own.compute_seconds,
        "waiting for experts": own.stall_seconds,
        "overhead": own.overhead_seconds,
    }
    spent = ", ".join(f"{part * 1e3:.1f} {name}" for name, part in parts.items() if part)
    text = f"{chosen}: {own.tpot_seconds * 1e3:.1f} ms a token ({spent})"
    others = [name for name, way in ways.items() if way.is_plain != ways[chosen].is_plain]
    if not others:
        return text
    best = min(others, key=lambda name: found[name].tpot_seconds)
    kind = "looking ahead" if ways[chosen].is_plain else "not looking ahead"
    return f"{text}; {kind}, {best}: {found[best].tpot_seconds * 1e3:.1f} ms"
