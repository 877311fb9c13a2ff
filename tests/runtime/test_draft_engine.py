"""What the draft is made of and where it stops; the loop around it is tested elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from specter_runtime.config import SamplingConfig
from specter_runtime.draft_engine import (
    MAX_NEW_SHARE,
    MIN_PROBABILITY,
    ResidentDraft,
    SelfDrafter,
    should_stop,
)
from specter_runtime.experts import Batch, Expert, ExpertKey, ExpertWeights, Routing
from specter_runtime.moe import mix_experts
from tests import oracles
from tests.models import OpenModel, random_model
from tests.oracles import array

GREEDY = SamplingConfig()
PROMPT = [7, 3, 11]
LAYER, NUM_EXPERTS, HIDDEN, WIDE = 2, 6, 8, 12


# ---- where it stops -------------------------------------------------------------------------


def test_a_draft_stops_only_before_an_unlikely_token_of_many_new_experts() -> None:
    likely, unlikely = MIN_PROBABILITY, MIN_PROBABILITY - 1e-6
    few, many = int(MAX_NEW_SHARE * 32), int(MAX_NEW_SHARE * 32) + 1
    assert should_stop(unlikely, many, 32)
    assert not should_stop(unlikely, few, 32)
    assert not should_stop(likely, many, 32)
    assert not should_stop(1.0, 32, 32)
    assert not should_stop(0.0, 0, 32)
    assert should_stop(0.0, 32, 32)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> OpenModel:
    return random_model(
        tmp_path_factory.mktemp("target"), num_hidden_layers=2, hidden_size=32, seed=3
    )


@dataclass
class Drafted:
    """Tokens, what the prefetcher was told of, and routings whose experts were counted."""

    token_ids: list[int]
    observed: list[list[Routing]]
    counted: list[Sequence[Routing]]


def drafted(
    target: OpenModel, num_new: Sequence[int], sampling: SamplingConfig = GREEDY
) -> Drafted:
    """Up to 6 tokens by the target itself; the n-th pass names ``num_new[n]`` new experts."""
    cache = target.cache(32)
    target.rows(PROMPT[:-1], cache, rows_per_block=2)
    observed: list[list[Routing]] = []
    counts = itertools.chain(num_new, itertools.repeat(0))
    counted: list[Sequence[Routing]] = []

    def count(routings: Sequence[Routing]) -> int:
        counted.append(routings)
        return next(counts)

    drafter = SelfDrafter(target.model, target.experts, (), count)
    draft = drafter.propose(
        PROMPT[-1], 6, cache, sampling, torch.Generator().manual_seed(0), observed.append
    )
    return Drafted(draft.token_ids, observed, counted)


def greedy_run(target: OpenModel) -> tuple[list[int], list[float]]:
    """Six greedy tokens behind the prompt and the probability of each."""
    cache = target.cache(32)
    logits = target.rows(PROMPT, cache, rows_per_block=len(PROMPT))[-1]
    tokens, probabilities = [], []
    for _ in range(6):
        tokens.append(int(logits.argmax()))
        numbers = np.exp(array(logits) - array(logits).max())
        probabilities.append(float(numbers.max() / numbers.sum()))
        logits = target.rows(tokens[-1:], cache)[-1]
    return tokens, probabilities


@pytest.mark.parametrize("position", range(5))
def test_a_token_that_is_not_worth_it_is_left_out_and_its_experts_are_not_asked_for(
    target: OpenModel, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its experts are new; the draft ends before it if it is unlikely, else goes on.

    Random models are sure of nothing: the threshold lies between what they give their tokens.
    """
    monkeypatch.setattr("specter_runtime.draft_engine.MIN_PROBABILITY", 0.15)
    tokens, probabilities = greedy_run(target)
    assert [p < 0.15 for p in probabilities] == [True, True, False, True, False, False]
    found = drafted(target, [0] * position + [4])  # of the pass over tokens[position]
    if probabilities[position] < 0.15:
        assert found.token_ids == tokens[:position]
        assert len(found.observed) == position + 1
        assert [r.layer for r in found.counted[-1]] == [0, 1]
    else:
        assert found.token_ids == tokens
        assert len(found.observed) == 6


def test_no_new_experts_no_stop(target: OpenModel) -> None:
    assert drafted(target, []).token_ids == greedy_run(target)[0]


def test_a_sampled_draft_does_not_stop(target: OpenModel) -> None:
    """Else the text of a seed would depend on what is cached."""
    found = drafted(target, [4] * 6, SamplingConfig(temperature=2.0))
    assert len(found.token_ids) == len(found.observed) == 6


# ---- what it is made of ---------------------------------------------------------------------


class Held:
    """The cache's side of the contract: some experts are resident; notes who holds them."""

    def __init__(self, weights: dict[ExpertKey, Expert], resident: set[int]) -> None:
        self.weights, self.resident, self.pinned = weights, resident, 0

    def residents(self, routing: Routing) -> Iterator[Batch]:
        self.pinned += 1
        try:
            yield [
                (e, self.weights[ExpertKey(routing.layer, e)])
                for e in routing.expert_ids()
                if e in self.resident
            ]
        finally:
            self.pinned -= 1


def experts(seed: int) -> dict[ExpertKey, Expert]:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((WIDE, HIDDEN), (WIDE, HIDDEN), (HIDDEN, WIDE))
    return {
        ExpertKey(LAYER, e): ExpertWeights(*(torch.randn(s, generator=generator) for s in shapes))
        for e in range(NUM_EXPERTS)
    }


@pytest.mark.parametrize(
    ("resident", "with_stand_in"),
    [
        (set(range(NUM_EXPERTS)), set(range(NUM_EXPERTS))),
        ({0, 3}, {1, 3, 4}),
        ({1, 5}, set()),
        (set(), {2, 4}),
        (set(), set()),
    ],
)
def test_residents_serve_in_full_the_others_by_stand_in_the_rest_not_at_all(
    resident: set[int], with_stand_in: set[int]
) -> None:
    full, packed = experts(1), experts(2)
    stand_ins = {key: expert for key, expert in packed.items() if key.expert in with_stand_in}
    held = Held(full, resident)
    provider = ResidentDraft(held, stand_ins)  # type: ignore[arg-type]
    selected = torch.tensor([[0, 1, 2], [3, 4, 5], [5, 1, 3]])
    weights = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.4, 0.2], [0.7, 0.2, 0.1]])
    routing = Routing(LAYER, selected, weights)
    rows = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3))
    [mixed] = mix_experts([rows], [routing], provider)
    assert held.pinned == 0
    served = [
        (full if e in resident else packed)[ExpertKey(LAYER, e)].to(torch.float32)
        for e in range(NUM_EXPERTS)
    ]
    left_out = frozenset(range(NUM_EXPERTS)) - resident - with_stand_in
    expected = oracles.mix_experts(
        array(rows),
        selected.numpy(),
        array(weights),
        [tuple(map(array, (w.gate_proj, w.up_proj, w.down_proj))) for w in served],
        left_out,
    )
    # float32 throughout: three products after each other, sums over 12 terms of magnitude below
    # 100, and 8 roundings for the activation and the mixture: gamma(3 * 12 + 8) * 100 < 3e-4.
    np.testing.assert_allclose(array(mixed), expected, rtol=0, atol=3e-4)
    kinds = {e: form for batch in provider.experts(routing) for e, form in batch}
    assert kinds.keys() == resident | with_stand_in
    for e, form in kinds.items():
        assert form is (full if e in resident else packed)[ExpertKey(LAYER, e)]


def test_the_draft_of_a_whole_model_without_experts_still_runs(target: OpenModel) -> None:
    """Attention and embeddings alone: a poor draft, not an error."""
    provider = ResidentDraft(Held({}, set()), {})  # type: ignore[arg-type]
    cache = target.cache(8)
    assert torch.isfinite(target.rows(PROMPT, cache, provider)).all()
