"""Made-up routes have the statistics that they are made for, counted here in the plainest way."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from specter_build import synthetic_routes
from specter_build.synthetic_routes import (
    NUM_BURN_IN,
    NUM_FITTED_LAYERS,
    NUM_FITTED_TOKENS,
    RoutingModel,
    RoutingStatistics,
    choose,
    fit,
    measure,
)


def lru_hit_rate(selected: np.ndarray, num_slots: int) -> float:
    """Of a list as cache, one a layer, demand by demand."""
    hits = demands = 0
    for layer in range(selected.shape[1]):
        cache: list[int] = []
        for token, chosen in enumerate(selected[:, layer].tolist()):
            for expert in chosen:
                if token >= NUM_BURN_IN:
                    hits += expert in cache
                    demands += 1
                if expert in cache:
                    cache.remove(expert)
                cache.append(expert)
                del cache[:-num_slots]
    return hits / demands


@pytest.fixture(scope="module")
def selected() -> np.ndarray:
    model = RoutingModel(16, 3, 0.3, 0.8)
    return choose(model.logits(200, 2, seed=1), 3)


def test_hit_rates_are_those_of_lru_caches(selected: np.ndarray) -> None:
    like = RoutingStatistics(lru_hits=dict.fromkeys((1, 3, 5, 8, 15, 16), 0.0))
    found = measure(selected, 16, like)
    for slots, hits in found.lru_hits.items():
        assert hits == pytest.approx(lru_hit_rate(selected, slots), abs=1e-12)


def test_unions_repetitions_and_hottest_are_counted(selected: np.ndarray) -> None:
    like = RoutingStatistics(unions={1: 0, 4: 0}, hottest_hits={0.25: 0})
    found = measure(selected, 16, like)
    rows = [[set(selected[t, i].tolist()) for t in range(200)] for i in range(2)]
    unions = [len(set().union(*row[t : t + 4])) for row in rows for t in range(0, 200, 4)]
    assert found.unions == {1: 3.0, 4: pytest.approx(np.mean(unions))}
    kept = [len(row[t] & row[t + 1]) / 3 for row in rows for t in range(199)]
    assert found.repeated == pytest.approx(np.mean(kept))
    counts = {(i, e): sum(e in row for row in rows[i][:100]) for i in range(2) for e in range(16)}
    hottest = sorted(counts, key=lambda key: (-counts[key], key))[:8]
    hits = sum(e in row for i, e in hottest for row in rows[i][100:])
    assert found.hottest_hits == {0.25: pytest.approx(hits / 600)}


def test_routes_are_choices_and_a_draft_of_them() -> None:
    num_tokens, num_layers, recall, acceptance = 400, 3, 0.8, 0.7
    model = RoutingModel(12, 4, 0.5, 0.9)
    text = model.routes(num_tokens, 10, num_layers, recall=recall, acceptance=acceptance, seed=3)
    assert text.drafted is not None
    assert text.agrees is not None
    for chosen in (text.selected, text.drafted):
        assert chosen.shape == (num_tokens, num_layers, 4)
        assert chosen.min() >= 0
        assert chosen.max() < 12
        assert (chosen.sort(-1).values.diff(dim=-1) > 0).all()  # all different
    hot = torch.zeros(2, num_tokens, num_layers, 12, dtype=torch.bool)
    hot[0].scatter_(-1, text.selected, True)
    hot[1].scatter_(-1, text.drafted, True)
    num_draws = num_tokens * num_layers * 4
    # Shares of independent draws: five standard deviations.
    found = float((hot[0] & hot[1]).sum()) / num_draws
    assert abs(found - recall) < 5 * math.sqrt(recall * (1 - recall) / num_draws)
    slack = 5 * math.sqrt(acceptance * (1 - acceptance) / num_tokens)
    assert abs(text.agrees.mean() - acceptance) < slack
    again = model.routes(num_tokens, 10, num_layers, recall=recall, acceptance=acceptance, seed=3)
    assert torch.equal(again.selected, text.selected)
    assert torch.equal(again.drafted, text.drafted)  # type: ignore[arg-type]
    other = model.routes(num_tokens, 10, num_layers, seed=4)
    assert not torch.equal(other.selected, text.selected)


def test_without_anything_that_stays_routing_is_uniform() -> None:
    """E[union] = E [1 - (1 - K / E)^t] for t tokens (EVICT, arXiv 2605.00342); a union is a count
    out of E = 64 with a deviation below sqrt(E) / 2, and there are 4 x 100 of them."""
    logits = RoutingModel(64, 6, 0.0, 0.0).logits(500, 4, seed=0)
    found = measure(choose(logits, 6), 64, RoutingStatistics(unions={5: 0.0}))
    expected = 64 * (1 - (1 - 6 / 64) ** 5)
    assert abs(found.unions[5] - expected) < 5 * math.sqrt(64) / 2 / math.sqrt(400)


def test_fit_finds_the_model_that_statistics_are_of() -> None:
    model = RoutingModel(8, 2, synthetic_routes.SHARES[6], synthetic_routes.CORRELATIONS[5])
    like = RoutingStatistics({2: 0, 4: 0, 6: 0}, {4: 0, 8: 0}, None, {0.25: 0})
    logits = model.logits(NUM_FITTED_TOKENS, NUM_FITTED_LAYERS, seed=0)
    published = measure(choose(logits, 2), 8, like)
    assert fit(8, 2, published) == (model, 0.0)


def test_where_nothing_is_published_routing_is_uniform() -> None:
    assert fit(8, 2, RoutingStatistics()) == (RoutingModel(8, 2, 0.0, 0.0), 0.0)
