"""The plan: hottest experts first, the fastest way, never slower than without foresight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from specter_build.plan_placement import (
    MARGIN,
    Evidence,
    Way,
    choose,
    hottest_first,
    plan_placement,
    ways_to_run,
)
from specter_build.synthetic_routes import RoutingModel
from specter_runtime.config import PredictorKind
from specter_runtime.experts import ExpertKey
from specter_runtime.hardware import Hardware
from specter_runtime.manifest import Plan
from specter_runtime.memory import MemoryUse
from specter_runtime.simulator import Policy, Routes, Shape, simulate

DESK = Hardware(
    name="a desk",
    link_bytes_per_second=1e6,
    link_latency_seconds=0.0,
    num_readers=1,
    memory_bytes_per_second=1e9,
    packed_bytes_per_second=1e9,
    multiplies_per_second=1e9,
    pass_overhead_seconds=0.0,
    layer_overhead_seconds=0.0,
    row_layer_overhead_seconds=0.0,
    stop_overhead_seconds=0.0,
    full_stop_overhead_seconds=0.0,
)
DRAFTS = (0, 1, 2, 4, 8)
BUDGET = 10**6


def memory(num_slots: int) -> MemoryUse:
    return MemoryUse(
        budget_bytes=BUDGET,
        dense_bytes=0,
        draft_bytes=0,
        predictor_bytes=0,
        kv_cache_bytes=0,
        buffer_bytes=0,
        slot_bytes=4096,
        num_slots=num_slots,
    )


def make_shape(num_layers: int, num_experts: int, dense_bytes: int = 1000) -> Shape:
    return Shape(
        moe_layers=tuple(range(num_layers)),
        num_experts=num_experts,
        dense_bytes=(dense_bytes,) * num_layers,
        common_bytes=1000,
        shard_bytes=4000,
        slot_bytes=4096,
        is_packed=True,
        stand_in_bytes=1000,
        expert_num_weights=2000,
    )


def make_evidence(text: Routes, num_experts: int) -> Evidence:
    hot = torch.nn.functional.one_hot(text.selected, num_experts).sum((0, 2))  # [L, E]
    recall: dict[PredictorKind, Sequence[float]] = {"fitted": (0.9, 0.7), "router": (0.8,)}
    return Evidence([text], dict(enumerate(hot)), recall)


def make_plan(
    text: Routes,
    shape: Shape,
    hardware: Hardware,
    slots: Mapping[int, int],
    predictor_slots: int | None = None,
) -> Plan:
    evidence = make_evidence(text, shape.num_experts)
    by_predictor: dict[PredictorKind, MemoryUse] = {}
    if predictor_slots is not None:
        by_predictor = {"fitted": memory(predictor_slots), "router": memory(predictor_slots)}
    ways = ways_to_run({k: memory(n) for k, n in slots.items()}, by_predictor, evidence.recall)
    shapes = {False: replace(shape, stand_in_bytes=0), True: shape}
    return plan_placement(shapes, ways, evidence, hardware, "bfloat16", 256)


def case(seed: int) -> tuple[Routes, Shape, Hardware, dict[int, int], int]:
    """Routes, model, machine, slots by number of draft tokens, slots beside a predictor."""
    rng = np.random.default_rng(seed)
    num_experts, num_layers = int(rng.integers(4, 17)), int(rng.integers(1, 4))
    num_chosen = int(rng.integers(1, min(3, num_experts // 2) + 1))
    model = RoutingModel(num_experts, num_chosen, rng.random(), rng.random())
    text = model.routes(
        int(rng.integers(12, 25)),
        4,
        num_layers,
        recall=rng.uniform(0.5, 1),
        acceptance=rng.uniform(0.3, 1),
        seed=seed,
    )
    rates, overheads = 10 ** rng.uniform((5, 7, 7, 7), 11), 10 ** rng.uniform(-7, -2, 6)
    hardware = replace(
        DESK,
        link_bytes_per_second=rates[0],
        link_latency_seconds=overheads[0],
        num_readers=int(rng.integers(1, 4)),
        memory_bytes_per_second=rates[1],
        packed_bytes_per_second=rates[2],
        multiplies_per_second=rates[3],
        pass_overhead_seconds=overheads[1],
        layer_overhead_seconds=overheads[2],
        row_layer_overhead_seconds=overheads[3],
        stop_overhead_seconds=overheads[4],
        full_stop_overhead_seconds=overheads[5],
        computing_while_reading=rng.uniform(0.5, 1),
        reading_while_computing=rng.uniform(0.5, 1),
    )
    most = num_layers * num_experts
    without = int(rng.integers(num_chosen, most + 1))
    with_draft = int(rng.integers(num_chosen, without + 1))
    slots = {k: with_draft if k else without for k in DRAFTS}
    shape = make_shape(num_layers, num_experts, int(10 ** rng.uniform(3, 6)))
    return text, shape, hardware, slots, int(rng.integers(with_draft, without + 1))


def seconds_of(
    policy: Policy, num_slots: int, text: Routes, shape: Shape, hardware: Hardware
) -> float:
    """By the simulator, without the planner."""
    order = hottest_first(make_evidence(text, shape.num_experts).counts)
    drafts = policy.num_draft_tokens > 0
    shape = shape if drafts else replace(shape, stand_in_bytes=0)
    return simulate(shape, hardware, policy, num_slots, [text], order).tpot_seconds


# ---- initial residents ----------------------------------------------------------------------


@given(
    st.dictionaries(
        st.integers(0, 5), st.lists(st.integers(0, 9), min_size=4, max_size=4), min_size=1
    )
)
def test_hottest_come_first_and_every_expert_once(counts: Mapping[int, list[int]]) -> None:
    order = hottest_first({layer: torch.tensor(row) for layer, row in counts.items()})
    assert sorted(order) == [ExpertKey(layer, e) for layer in sorted(counts) for e in range(4)]
    heat = [counts[key.layer][key.expert] for key in order]
    assert heat == sorted(heat, reverse=True)
    for before, after in pairwise(order):
        if counts[before.layer][before.expert] == counts[after.layer][after.expert]:
            assert before < after  # ties by layer and index


def test_plan_lists_every_expert_once_hottest_first() -> None:
    selected = torch.tensor([[[3], [2]], [[3], [2]], [[1], [2]]])  # [T, L, K]
    plan = make_plan(Routes(1, selected), make_shape(2, 4), DESK, {0: 2})
    assert plan.initial_residents[:3] == ((1, 2), (0, 3), (0, 1))
    assert sorted(plan.initial_residents) == [(i, e) for i in range(2) for e in range(4)]


# ---- what is compared -----------------------------------------------------------------------


def test_every_way_there_is_room_for_is_compared() -> None:
    by_predictor: dict[PredictorKind, MemoryUse] = {"fitted": memory(3), "router": memory(5)}
    recall: dict[PredictorKind, Sequence[float]] = {"fitted": [0.9, 0.8], "router": []}
    ways = ways_to_run({0: memory(9), 1: memory(4), 16: memory(4)}, by_predictor, recall)
    assert list(ways) == [
        "no draft",
        "no draft, LRU eviction",
        "no draft, fitted predictor",
        "1 draft token",
        "16 draft tokens",
    ]
    assert [way.memory.num_slots for way in ways.values()] == [9, 9, 3, 4, 4]
    assert [way.is_plain for way in ways.values()] == [True, True, False, False, False]
    assert ways["no draft, fitted predictor"].policy.recall == (0.9, 0.8)


@pytest.mark.parametrize("fixed", [1, 4, 16])
def test_number_that_the_recipe_fixes_is_kept(fixed: int) -> None:
    text = RoutingModel(4, 1, 0.5, 0.5).routes(40, 4, 2, acceptance=0.0)
    plan = make_plan(text, make_shape(2, 4), DESK, {fixed: 3}, predictor_slots=3)
    assert (plan.num_draft_tokens, plan.num_slots) == (fixed, 3)
    assert len(plan.predicted) == 1


# ---- the choice -----------------------------------------------------------------------------


def make_ways(names: Sequence[str]) -> dict[str, Way]:
    """Ways that look ahead where their name says so."""
    return {
        name: Way(Policy(foresight="draft" if "ahead" in name else "none"), memory(1))
        for name in names
    }


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({"plain": 1.0, "other plain": 0.99, "ahead": 1.0}, "other plain"),
        ({"plain": 1.0, "other plain": 1.0, "ahead": 2.0}, "plain"),
        ({"plain": 1.0, "ahead": 1.001 - MARGIN}, "plain"),
        ({"plain": 1.0, "ahead": 0.999 - MARGIN}, "ahead"),
        ({"ahead": 3.0, "far ahead": 2.0}, "far ahead"),
    ],
)
def test_looking_ahead_has_to_be_clearly_faster(seconds: Mapping[str, float], chosen: str) -> None:
    assert choose(make_ways(list(seconds)), seconds) == chosen


@pytest.mark.parametrize("seed", range(200))
def test_plan_is_never_slower_than_the_best_plain_policy(seed: int) -> None:
    """And as brute force has it: of all ways the fastest, or a plain one that is nearly as fast."""
    text, shape, hardware, slots, predictor_slots = case(seed)
    plan = make_plan(text, shape, hardware, slots, predictor_slots)

    def seconds(policy: Policy, num_slots: int) -> float:
        return seconds_of(policy, num_slots, text, shape, hardware)

    plain = min(seconds(Policy(), slots[0]), seconds(Policy(eviction="lru"), slots[0]))
    planned = plan.predicted[plan.chosen]
    assert planned <= plain
    ahead = [
        seconds(Policy(foresight="fitted", recall=(0.9, 0.7)), predictor_slots),
        seconds(Policy(foresight="router", recall=(0.8,)), predictor_slots),
        *(seconds(Policy(k, is_governed=False, foresight="draft"), slots[k]) for k in DRAFTS if k),
    ]
    assert planned == (min(ahead) if min(ahead) < (1 - MARGIN) * plain else plain)


@pytest.mark.parametrize("seed", range(100))
def test_more_memory_is_never_worse_without_foresight(seed: int) -> None:
    """A larger cache holds what a smaller one does: both evictions rank experts alike in any size
    (Mattson et al., 1970). Sums of the same terms differ by their rounding: 1e-12 of them."""
    text, shape, hardware, slots, _ = case(seed)
    most = shape.num_experts * len(shape.moe_layers)
    times = [
        make_plan(text, shape, hardware, {0: n}).predicted
        for n in sorted({slots[1], slots[0], most})
    ]
    for less, more in pairwise(times):
        for name, seconds in less.items():
            assert more[name] <= seconds * (1 + 1e-12)


def test_draft_pays_where_windows_share_experts_that_tokens_must_fetch() -> None:
    """One layer, one slot, ever the same two experts: a token reads both of them, a window too."""
    selected = torch.tensor([[[0, 1]]]).expand(40, 1, 2)
    text = Routes(
        4, selected, None, selected, np.ones(40, dtype=bool), np.ones(40, dtype=np.float32)
    )
    plan = make_plan(text, make_shape(1, 4), DESK, dict.fromkeys(DRAFTS, 2))
    assert plan.num_draft_tokens == 0  # both fit
    away = torch.tensor([[[0, 1]], [[2, 3]]]).repeat(20, 1, 1)
    text = replace(text, selected=away, drafted=away)
    plan = make_plan(text, make_shape(1, 4), DESK, dict.fromkeys(DRAFTS, 2))
    assert plan.num_draft_tokens == 8
    assert plan.chosen == "8 draft tokens"


def test_draft_whose_slots_hold_all_experts_does_not_pay() -> None:
    away = torch.tensor([[[0, 1]], [[2, 3]]]).repeat(20, 1, 1)
    text = Routes(4, away, None, away, np.ones(40, dtype=bool), np.ones(40, dtype=np.float32))
    plan = make_plan(text, make_shape(1, 4), DESK, {k: 2 if k else 4 for k in DRAFTS})
    assert (plan.num_draft_tokens, plan.num_slots) == (0, 4)


def test_draft_that_is_never_accepted_is_never_chosen() -> None:
    away = torch.tensor([[[0, 1]], [[2, 3]]]).repeat(20, 1, 1)
    text = Routes(4, away, None, away, np.zeros(40, dtype=bool), np.ones(40, dtype=np.float32))
    plan = make_plan(text, make_shape(1, 4), DESK, dict.fromkeys(DRAFTS, 2))
    assert plan.num_draft_tokens == 0


def test_predictor_is_planned_where_it_pays() -> None:
    """Two layers whose computing leaves the link idle: foreseen reads go on meanwhile."""
    selected = torch.tensor([[[0], [0]], [[1], [1]]]).repeat(20, 1, 1)
    shape = make_shape(2, 4, dense_bytes=4_000_000)  # 4 ms a layer, as long as a read
    plan = make_plan(Routes(4, selected), shape, DESK, {0: 2}, predictor_slots=2)
    assert (plan.predictor, plan.eviction, plan.num_draft_tokens) == ("fitted", "reuse", 0)


def test_plan_says_what_it_was_made_for_and_why() -> None:
    away = torch.tensor([[[0, 1]], [[2, 3]]]).repeat(20, 1, 1)
    text = Routes(4, away, None, away, np.ones(40, dtype=bool), np.ones(40, dtype=np.float32))
    plan = make_plan(text, make_shape(1, 4), DESK, dict.fromkeys(DRAFTS, 2))
    assert (plan.memory_budget_bytes, plan.max_context_tokens, plan.dtype) == (
        BUDGET,
        256,
        "bfloat16",
    )
    assert plan.hardware["link_bytes_per_second"] == DESK.link_bytes_per_second
    assert "name" not in plan.hardware
    assert plan.reason.startswith("8 draft tokens: ")
    assert "not looking ahead, no draft: 8.0 ms" in plan.reason  # two reads of 4 ms
    assert plan.predicted["no draft"] == pytest.approx(8e-3, rel=0.01)  # multiplying: 14 us of 8 ms
