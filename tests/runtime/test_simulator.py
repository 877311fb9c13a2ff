"""The virtual clock against schedules worked out by hand, and laws that hold for any of them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.experts import ExpertKey
from specter_runtime.hardware import Hardware
from specter_runtime.simulator import Policy, Routes, Shape, Simulated, simulate

HARDWARE = Hardware(
    name="of round numbers",
    link_bytes_per_second=100.0,
    link_latency_seconds=1.0,
    num_readers=1,
    memory_bytes_per_second=1000.0,
    packed_bytes_per_second=500.0,
    multiplies_per_second=1e9,
    pass_overhead_seconds=0.0,
    layer_overhead_seconds=0.0,
    row_layer_overhead_seconds=0.0,
    stop_overhead_seconds=0.0,
    full_stop_overhead_seconds=0.0,
)
"""An expert of 1000 bytes is read in 1 + 10 seconds and computed in 1, a dense layer in 2."""

ON_DEMAND = Policy(eviction="lru", overlap=False)


def make_shape(num_layers: int = 1, num_experts: int = 4, **changes: Any) -> Shape:
    shape = Shape(
        moe_layers=tuple(range(num_layers)),
        num_experts=num_experts,
        dense_bytes=(2000,) * num_layers,
        common_bytes=0,
        shard_bytes=1000,
        slot_bytes=1000,
        is_packed=False,
        stand_in_bytes=0,
        expert_num_weights=500,
    )
    return replace(shape, **changes)


def make_text(rows: list[list[int]], num_prompt_tokens: int = 1, **draft: Any) -> Routes:
    """A text of a model of one layer."""
    return Routes(num_prompt_tokens, torch.tensor(rows)[:, None], **draft)


def all_keys(shape: Shape) -> list[ExpertKey]:
    return [ExpertKey(layer, e) for layer in shape.moe_layers for e in range(shape.num_experts)]


def run(text: Routes, num_slots: int, policy: Policy, **hardware: Any) -> Simulated:
    shape = make_shape()
    return simulate(
        shape, replace(HARDWARE, **hardware), policy, num_slots, [text], all_keys(shape)
    )


def test_with_everything_resident_a_token_takes_its_bytes_at_memory_speed() -> None:
    found = run(make_text([[0, 1], [1, 2], [2, 3]]), 4, Policy())
    assert found.tpot_seconds == pytest.approx(2 + 2 * 1)
    assert (found.stall_seconds, found.bytes_per_token, found.hit_rate) == (0, 0, 1)
    assert found.compute_seconds == pytest.approx(4)


def test_demands_without_overlap_are_waited_for_one_after_the_other() -> None:
    """Slots hold 0 and 1. The token needs 2 and 3: two reads of 11 s, then both are computed."""
    found = run(make_text([[0, 1], [2, 3]]), 2, ON_DEMAND)
    assert found.tpot_seconds == pytest.approx(2 + 2 * 11 + 2)
    assert found.stall_seconds == pytest.approx(22)
    assert found.bytes_per_token == 2000
    assert found.link_busy_share == pytest.approx(22 / 26)


def test_with_overlap_an_expert_is_computed_while_the_next_one_comes() -> None:
    """Read 2 (11 s), then read 3 (11 s) while 2 is computed (1 s): 10 s of that are waited for."""
    found = run(make_text([[0, 1], [2, 3]]), 2, replace(ON_DEMAND, overlap=True))
    assert found.tpot_seconds == pytest.approx(2 + 11 + 11 + 1)
    assert found.stall_seconds == pytest.approx(11 + 10)


def test_resident_experts_are_computed_while_the_absent_one_comes() -> None:
    found = run(make_text([[0, 1], [1, 2]]), 2, replace(ON_DEMAND, overlap=True))
    assert found.tpot_seconds == pytest.approx(2 + 11 + 1)
    assert found.stall_seconds == pytest.approx(10)


def test_two_readers_share_the_link_and_hide_latency() -> None:
    """Both wait 1 s at once, then 2000 bytes come at 100 a second."""
    found = run(make_text([[0, 1], [2, 3]]), 2, ON_DEMAND, num_readers=2)
    assert found.stall_seconds == pytest.approx(1 + 20)


def test_computing_and_reading_slow_each_other() -> None:
    """1 s of latency, in which half a second of the expert's one is computed; likewise the rest,
    while 1 s of reading at a quarter of the speed brings 25 bytes; 975 are waited for."""
    slow = {"computing_while_reading": 0.5, "reading_while_computing": 0.25}
    found = run(make_text([[0, 1], [1, 2]]), 2, replace(ON_DEMAND, overlap=True), **slow)
    assert found.stall_seconds == pytest.approx(9.75)
    assert found.tpot_seconds == pytest.approx(2 + 1 + 1 + 9.75 + 1)


def test_packed_experts_are_computed_at_their_own_rate() -> None:
    shape = make_shape(is_packed=True)
    text = [make_text([[0, 1], [1, 2]])]
    found = simulate(shape, HARDWARE, Policy(), 4, text, all_keys(shape))
    assert found.tpot_seconds == pytest.approx(2 + 2 * 2)


def test_many_rows_are_bound_by_arithmetic() -> None:
    """A window of 4 rows: experts 0 and 1 with 4 rows of 500 multiplications each at 500 a second,
    a dense layer of 1000 weights; a draft pass has one row."""
    always = np.ones(5, dtype=bool)
    draft = {"drafted": torch.tensor([[[0, 1]]] * 5), "agrees": always}
    text = make_text([[0, 1]] * 5, confidence=always.astype(np.float32), **draft)
    policy = Policy(num_draft_tokens=3, is_governed=False, foresight="draft")
    found = run(text, 4, policy, multiplies_per_second=500.0)
    assert found.mean_acceptance_length == 4
    assert found.compute_seconds == pytest.approx((4 * 2 + 2 * 4 * 1) / 4)
    assert found.draft_seconds == pytest.approx(3 * (2 + 2 * 1) / 4)


def test_rejected_drafts_cost_and_do_not_commit() -> None:
    never = np.zeros(5, dtype=bool)
    sure = np.ones(5, dtype=np.float32)
    text = make_text(
        [[0, 1]] * 5, drafted=torch.tensor([[[0, 1]]] * 5), agrees=never, confidence=sure
    )
    policy = Policy(num_draft_tokens=1, is_governed=False, foresight="draft")
    found = run(text, 4, policy)
    assert found.mean_acceptance_length == 1
    assert found.draft_seconds == pytest.approx(3 / 4 * 4)  # nothing is drafted behind the last


def test_drafts_stop_before_an_unlikely_token_of_new_experts() -> None:
    """Its pass is lost, and its experts are not read for it: the oracle of routes sees 2 and 3."""
    rows = [[0, 1], [0, 1], [2, 3]]
    text = make_text(
        rows,
        drafted=torch.tensor(rows)[:, None],
        agrees=np.ones(3, dtype=bool),
        confidence=np.full(3, 0.1, dtype=np.float32),
    )
    policy = Policy(num_draft_tokens=1, is_governed=False, foresight="draft")
    two = replace(policy, num_draft_tokens=2)
    stopped, going_on = (run(text, 2, replace(two, draft_stop=stops)) for stops in (True, False))
    assert stopped.mean_acceptance_length == going_on.mean_acceptance_length == 2
    longer = make_text(
        [*rows, [2, 3]],
        drafted=torch.tensor([*rows, [2, 3]])[:, None],
        agrees=np.ones(4, dtype=bool),
        confidence=np.full(4, 0.1, dtype=np.float32),
    )
    assert run(longer, 2, replace(two, draft_stop=False)).mean_acceptance_length == 3
    assert run(longer, 2, two).mean_acceptance_length < 3


def test_foreseen_experts_come_while_the_draft_runs() -> None:
    """Without a draft's foresight the verification waits for 2; with it, less long."""
    rows = [[0, 1], [0, 1], [1, 2]]
    text = make_text(
        rows,
        drafted=torch.tensor(rows)[:, None],
        agrees=np.ones(3, dtype=bool),
        confidence=np.ones(3, dtype=np.float32),
    )
    ahead = Policy(num_draft_tokens=1, is_governed=False, foresight="draft")
    found = run(text, 3, ahead)
    blind = run(text, 3, replace(ahead, foresight="none"))
    assert found.bytes_per_token <= blind.bytes_per_token
    assert found.stall_seconds <= blind.stall_seconds


def reference_lru(rows: list[list[int]], num_slots: int, num_experts: int) -> int:
    """Misses of a plain LRU cache behind the first row, one key at a time, written anew."""
    cache: OrderedDict[int, None] = OrderedDict()
    for expert in reversed(range(min(num_slots, num_experts))):
        cache[expert] = None  # the hottest counts as used last
    misses = 0
    for i, row in enumerate(rows):
        absent = [e for e in sorted(row) if e not in cache]
        for expert in row:
            if expert in cache:
                cache.move_to_end(expert)
        for expert in absent:
            misses += i > 0
            if len(cache) >= num_slots:
                cache.popitem(last=False)
            cache[expert] = None
        for expert in sorted(row):  # used at once: of equals the first by index goes first
            cache.move_to_end(expert)
    return misses


token_rows = st.lists(
    st.permutations(range(8)).map(lambda order: list(order[:2])), min_size=2, max_size=30
)


@settings(max_examples=60, deadline=None)
@given(rows=token_rows, num_slots=st.integers(2, 8))
def test_on_demand_lru_misses_what_a_textbook_lru_does(
    rows: list[list[int]], num_slots: int
) -> None:
    shape = make_shape(num_experts=8)
    found = simulate(shape, HARDWARE, ON_DEMAND, num_slots, [make_text(rows)], all_keys(shape))
    misses = reference_lru(rows, num_slots, 8)
    assert found.bytes_per_token * (len(rows) - 1) == pytest.approx(1000 * misses)
    # Nothing overlaps: a token takes its computing and each miss its whole read.
    assert found.tpot_seconds * (len(rows) - 1) == pytest.approx(4 * (len(rows) - 1) + 11 * misses)


@settings(max_examples=60, deadline=None)
@given(
    rows=token_rows,
    num_slots=st.integers(2, 8),
    foresight=st.sampled_from(["none", "oracle"]),
    overlap=st.booleans(),
    wrong_share=st.sampled_from([0.0, 0.5]),
    num_readers=st.integers(1, 3),
)
def test_time_is_the_sum_of_its_parts_and_bytes_cross_at_the_links_rate(
    rows: list[list[int]],
    num_slots: int,
    foresight: Any,
    overlap: bool,
    wrong_share: float,
    num_readers: int,
) -> None:
    shape = make_shape(num_experts=8)
    policy = Policy(foresight=foresight, overlap=overlap, wrong_share=wrong_share)
    hardware = replace(
        HARDWARE,
        num_readers=num_readers,
        computing_while_reading=0.6,
        reading_while_computing=0.8,
        stop_overhead_seconds=0.5,
        pass_overhead_seconds=0.25,
    )
    found = simulate(shape, hardware, policy, num_slots, [make_text(rows)], all_keys(shape))
    parts = found.compute_seconds + found.stall_seconds + found.overhead_seconds
    assert found.tpot_seconds == pytest.approx(parts + found.draft_seconds)
    busy = found.link_busy_share * found.tpot_seconds
    # What is under way when counting begins was begun before: at most a read for each reader.
    slack = num_readers * 1000 / (len(rows) - 1)
    assert found.bytes_per_token <= busy * 100 + slack + 1e-6
    assert found.compute_seconds >= 4 - 1e-9  # what reading does to it only adds
    assert found.overhead_seconds >= 0.25 - 1e-9


def test_a_better_oracle_is_never_slower_here() -> None:
    generator = np.random.default_rng(0)
    rows = [generator.permutation(8)[:2].tolist() for _ in range(60)]
    shape = make_shape(num_experts=8, dense_bytes=(20_000,))
    times = [
        simulate(
            shape,
            HARDWARE,
            Policy(foresight="oracle", wrong_share=wrong),
            4,
            [make_text(rows)],
            all_keys(shape),
        ).tpot_seconds
        for wrong in (0.0, 0.5, 1.0)
    ]
    assert times == sorted(times)
    plain = simulate(shape, HARDWARE, Policy(), 4, [make_text(rows)], all_keys(shape))
    assert times[0] < plain.tpot_seconds
