"""The plan: hottest experts first, loads as a list would count them, K only where it pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_build.estimate import CANDIDATES
from specter_build.plan_placement import (
    Evidence,
    hottest_first,
    plan_placement,
    predict_tpot,
    replay_loads,
)
from specter_build.recipe import HardwareRecipe
from specter_runtime.config import ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.eviction import ReuseValues
from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.manifest import Plan
from specter_runtime.memory import MemoryUse, dense_nbytes

CONFIG = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=100,
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=1,
    rms_norm_eps=1e-6,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    attention_scaling=8**-0.5,
    rope=RopeConfig(inverse_frequencies=(1.0, 0.1, 0.01, 0.001)),
    routing=RoutingConfig(),
)
ALL_EXPERTS = [ExpertKey(layer, expert) for layer in range(2) for expert in range(4)]

Routes = Mapping[int, Sequence[Sequence[Sequence[int]]]]
"""Layer -> ``[N][T][K]``."""


def tensors(routes: Routes) -> dict[int, torch.Tensor]:
    return {layer: torch.tensor(rows) for layer, rows in routes.items()}


def make_evidence(
    routes: Routes, acceptance: Sequence[float] = (1.0,) * 16, recall: float = 1.0
) -> Evidence:
    counts = {
        layer: torch.bincount(rows.flatten(), minlength=CONFIG.num_experts)
        for layer, rows in tensors(routes).items()
    }
    return Evidence(tensors(routes), counts, list(acceptance), recall)


def memory(num_slots: int) -> MemoryUse:
    return MemoryUse(
        budget_bytes=10**6,
        dense_bytes=0,
        draft_bytes=0,
        predictor_bytes=0,
        kv_cache_bytes=0,
        buffer_bytes=0,
        slot_bytes=4096,
        num_slots=num_slots,
    )


def hardware(link: float, memory_rate: float = 1e9, **fields: float) -> HardwareRecipe:
    rates = {"link_bytes_per_second": link, "memory_bytes_per_second": memory_rate}
    return HardwareRecipe.model_validate(rates | fields)


def make_plan(
    evidence: Evidence, machine: HardwareRecipe, slots: Mapping[int, int] | None = None
) -> Plan:
    """The plan with one slot count for each candidate (8, all experts, unless given)."""
    divided = {k: memory(n) for k, n in (slots or dict.fromkeys(CANDIDATES, 8)).items()}
    return plan_placement(CONFIG, divided, evidence, machine, "bfloat16", 256)


def constant_routes(num_tokens: int) -> Routes:
    """Every token uses expert 0 of either layer."""
    return {layer: [[[0]] * num_tokens] for layer in range(2)}


@st.composite
def random_routes(draw: st.DrawFn) -> Routes:
    num_sequences, length = draw(st.integers(1, 2)), draw(st.integers(1, 8))
    token = st.lists(st.integers(0, 3), min_size=2, max_size=2, unique=True)
    sequence = st.lists(token, min_size=length, max_size=length)
    stream = st.lists(sequence, min_size=num_sequences, max_size=num_sequences)
    return {layer: draw(stream) for layer in range(2)}


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
    evidence = make_evidence({0: [[[3], [3], [1]]], 1: [[[2], [2], [2]]]})
    residents = make_plan(evidence, hardware(1e9)).initial_residents
    assert residents[:3] == ((1, 2), (0, 3), (0, 1))
    assert sorted(residents) == [tuple(key) for key in ALL_EXPERTS]


# ---- replay ---------------------------------------------------------------------------------


def list_loads(routes: Routes, initial: list[ExpertKey], num_slots: int, window: int) -> float:
    """A cache as a list; an expert is demanded once in a window, what is in use stays if it can."""
    flat = {layer: [token for seq in rows for token in seq] for layer, rows in routes.items()}
    num_tokens = len(next(iter(flat.values())))
    warms_up = window <= num_tokens // 2  # in the first half
    cache = initial[:num_slots] if warms_up else []
    policy = ReuseValues(2, 4, initial)
    loads, counted = 0, 0
    for start in range(0, num_tokens, window):
        loaded = 0
        for layer, tokens in flat.items():
            rows = torch.tensor(tokens[start : start + window])
            policy.observe(Routing(layer, rows, torch.ones(rows.shape)))
            used = [ExpertKey(layer, expert) for expert in sorted(set(rows.flatten().tolist()))]
            for key in [key for key in used if key not in cache]:
                loaded += 1
                if len(cache) == num_slots:
                    candidates = [k for k in cache if k not in used] or cache
                    cache.remove(min(candidates, key=lambda k: (policy.values[k], k)))
                cache.append(key)
        if not warms_up or start >= num_tokens // 2:
            loads += loaded
            counted += min(window, num_tokens - start)
    return loads * window / counted if counted else 0.0


@settings(deadline=None, max_examples=80)
@given(random_routes(), st.permutations(ALL_EXPERTS), st.integers(1, 8), st.integers(1, 4))
def test_replay_loads_what_a_list_as_cache_loads(
    routes: Routes, initial: list[ExpertKey], num_slots: int, window: int
) -> None:
    num_tokens = sum(len(sequence) for sequence in routes[0])
    window = min(window, num_tokens)
    found = replay_loads(tensors(routes), initial, num_slots, window)
    assert found == list_loads(routes, initial, num_slots, window)


def test_nothing_is_loaded_when_all_experts_are_resident() -> None:
    routes = {0: [[[0], [1], [2], [3]]], 1: [[[3], [2], [1], [0]]]}
    assert replay_loads(tensors(routes), ALL_EXPERTS, 8, 2) == 0


# ---- prediction -----------------------------------------------------------------------------


def test_plain_decoding_is_predicted_as_computation_and_exposed_reads() -> None:
    """One slot and two layers: both experts of every token are read."""
    machine = hardware(1e6, 2e6, link_latency_seconds=0.25, pass_overhead_seconds=0.125)
    weights = dense_nbytes(CONFIG, "bfloat16") + 2 * 2 * CONFIG.expert_num_weights
    expected = weights / 2e6 + 0.125 + 2 * (0.25 + 4096 / 1e6)
    initial = [ExpertKey(1, 1), *ALL_EXPERTS]
    evidence = make_evidence(constant_routes(8))
    found = predict_tpot(CONFIG, memory(1), evidence, machine, "bfloat16", 0, initial)
    assert found == pytest.approx(expected, rel=1e-14)  # a dozen operations in double precision


def test_only_what_the_draft_foresaw_in_time_is_hidden() -> None:
    """K = 1: a draft pass of r seconds hides at most r, and at most half of what it foresaw."""
    row_bytes = dense_nbytes(CONFIG, "bfloat16") + 2 * 2 * CONFIG.expert_num_weights
    initial = [ExpertKey(1, 1), *ALL_EXPERTS]
    for link, recall in ((4096 / 3.0, 1.0), (4096 * 1e3, 1.0), (4096 * 4.0, 0.5)):
        row = 1.0
        reads = 2 * 4096 / link  # two experts a window
        hidden = min(reads * recall / 2, row)
        expected = (row + 2 * row + reads - hidden) / 2
        evidence = make_evidence(constant_routes(8), recall=recall)
        machine = hardware(link, row_bytes)
        found = predict_tpot(CONFIG, memory(1), evidence, machine, "bfloat16", 1, initial)
        assert found == pytest.approx(expected, rel=1e-14)


# ---- the choice of K ------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    random_routes(),
    st.lists(st.floats(0, 1), min_size=16, max_size=16).map(lambda x: sorted(x, reverse=True)),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_lookahead_never_pays_when_the_link_is_infinitely_fast(
    routes: Routes, acceptance: list[float], recall: float, overhead: float
) -> None:
    """With r seconds a row, a window costs (2 K + 1) r and commits at most K + 1 tokens."""
    machine = hardware(1e300, pass_overhead_seconds=overhead)
    plan = make_plan(
        make_evidence(routes, acceptance, recall), machine, dict.fromkeys(CANDIDATES, 2)
    )
    assert plan.num_draft_tokens == 0


def test_lookahead_pays_where_a_window_loads_what_each_token_would() -> None:
    """One slot, two layers, a slow link: plain decoding reads two experts a token, a window too."""
    slots = dict.fromkeys(CANDIDATES, 1)
    plan = make_plan(make_evidence(constant_routes(64)), hardware(1e3), slots)
    assert plan.num_draft_tokens == 16
    assert plan.num_slots == 1


def test_lookahead_does_not_pay_when_the_slots_it_takes_hold_all_experts() -> None:
    slots = {k: 2 if k == 0 else 1 for k in CANDIDATES}
    plan = make_plan(make_evidence(constant_routes(64)), hardware(1e3), slots)
    assert plan.num_draft_tokens == 0
    assert plan.num_slots == 2


@pytest.mark.parametrize("num_tokens", [2048, 64, 4])
def test_draft_that_is_never_accepted_is_never_chosen(num_tokens: int) -> None:
    """Every window reads two experts and commits one token, whatever K is.

    What is resident at the start must not be credited to the few windows of a large K, nor may a
    window that is longer than all of calibration count as free.
    """
    evidence = make_evidence(constant_routes(num_tokens), acceptance=(0.0,) * 16, recall=0.0)
    plan = make_plan(evidence, hardware(1e3), dict.fromkeys(CANDIDATES, 1))
    assert plan.num_draft_tokens == 0


def test_equal_predictions_choose_the_fewest_draft_tokens() -> None:
    evidence = make_evidence(constant_routes(8), acceptance=(), recall=0.0)
    slots = {4: 8, 2: 8}
    row_is_free = hardware(1e300, 1e300)
    plan = make_plan(evidence, row_is_free, slots)
    assert plan.predicted["2"] <= plan.predicted["4"]
    assert plan.num_draft_tokens == 2


def test_predictions_are_given_for_every_candidate_and_the_least_is_chosen() -> None:
    plan = make_plan(make_evidence(constant_routes(64)), hardware(1e5))
    assert plan.predicted.keys() == {str(k) for k in CANDIDATES}
    assert plan.predicted[str(plan.num_draft_tokens)] == min(plan.predicted.values())
    assert all(seconds > 0 for seconds in plan.predicted.values())


@pytest.mark.parametrize("fixed", CANDIDATES)
def test_number_that_the_recipe_fixes_is_kept(fixed: int) -> None:
    plan = make_plan(make_evidence(constant_routes(64)), hardware(1e9), {fixed: 3})
    assert (plan.num_draft_tokens, plan.num_slots) == (fixed, 3)
    assert plan.predicted.keys() == {str(fixed)}


def test_plan_records_what_it_was_made_for() -> None:
    machine = hardware(1e9, link_latency_seconds=0.5)
    plan = make_plan(make_evidence(constant_routes(8)), machine)
    assert (plan.memory_budget_bytes, plan.max_context_tokens, plan.dtype) == (
        10**6,
        256,
        "bfloat16",
    )
    assert plan.hardware == {
        "link_bytes_per_second": 1e9,
        "link_latency_seconds": 0.5,
        "memory_bytes_per_second": 1e9,
        "pass_overhead_seconds": 0.0,
    }
