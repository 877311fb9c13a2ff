"""One routed layer: routing and mixing against oracles, and what must not change a bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime import kernels
from specter_runtime.config import RoutingConfig
from specter_runtime.experts import ExpertKey, ExpertWeights, ResidentExperts, Routing
from specter_runtime.moe import left_out_scale, mix_experts, select_experts
from tests import oracles
from tests.models import ShuffledExperts, same_bits
from tests.oracles import array, gamma

LAYER, NUM_EXPERTS, TOP_K, HIDDEN, WIDE = 3, 6, 3, 24, 20
SETTINGS = settings(deadline=None, max_examples=25)


def randn(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def route(
    hidden: torch.Tensor, router: torch.Tensor, top_k: int, norm_topk_prob: bool, layer: int
) -> Routing:
    """The routing that most families share."""
    config = RoutingConfig(norm_topk_prob=norm_topk_prob)
    logits = hidden.to(torch.float32) @ router.T
    return select_experts(logits, {}, config, top_k, layer)


def make_experts(dtype: torch.dtype = torch.float32) -> dict[ExpertKey, ExpertWeights]:
    return {
        ExpertKey(LAYER, expert): ExpertWeights(
            randn(WIDE, HIDDEN, seed=3 * expert, dtype=dtype),
            randn(WIDE, HIDDEN, seed=3 * expert + 1, dtype=dtype),
            randn(HIDDEN, WIDE, seed=3 * expert + 2, dtype=dtype),
        )
        for expert in range(NUM_EXPERTS)
    }


def make_block(
    num_rows: int, seed: int = 100, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, Routing]:
    hidden = randn(num_rows, HIDDEN, seed=seed, dtype=dtype)
    return hidden, route(hidden, randn(NUM_EXPERTS, HIDDEN, seed=99), TOP_K, True, LAYER)


def as_arrays(experts: dict[ExpertKey, ExpertWeights]) -> list[tuple[oracles.Array, ...]]:
    return [
        tuple(map(array, (weights.gate_proj, weights.up_proj, weights.down_proj)))
        for weights in experts.values()
    ]


# ---- routing --------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("num_experts_per_tok", [1, 2, NUM_EXPERTS])
def test_routing_equals_oracle(num_experts_per_tok: int, norm_topk_prob: bool) -> None:
    hidden, router = randn(7, HIDDEN, seed=1), randn(NUM_EXPERTS, HIDDEN, seed=2)
    routing = route(hidden, router, num_experts_per_tok, norm_topk_prob, LAYER)
    selected, weights = oracles.route(
        array(hidden), array(router), num_experts_per_tok, norm_topk_prob
    )
    assert routing.layer == LAYER
    np.testing.assert_array_equal(routing.selected_experts.numpy(), selected)
    # A logit is off by gamma(D) times the product of magnitudes; the exponential makes a relative
    # error of it, in numerator and denominator; exp, the sum over E, quotient, and the sum over K
    # and quotient of the renormalization are roundings. Renormalizing doubles what came before.
    sizes = np.abs(array(hidden)) @ np.abs(array(router)).T
    bound = 2 * (2 * gamma(HIDDEN) * sizes.max() + gamma(2 * NUM_EXPERTS + 6))
    np.testing.assert_allclose(routing.routing_weights.numpy(), weights, rtol=bound)
    assert bound < 1e-3


def test_weights_sum_to_one_only_when_renormalized() -> None:
    hidden, router = randn(7, HIDDEN, seed=1), 0.1 * randn(NUM_EXPERTS, HIDDEN, seed=2)
    renormalized, raw = (
        route(hidden, router, TOP_K, norm_topk_prob, LAYER).routing_weights.sum(-1)
        for norm_topk_prob in (True, False)
    )
    assert (renormalized - 1).abs().max() <= gamma(2 * TOP_K)  # K quotients, and their sum
    assert raw.max() < 0.95


def test_router_logits_are_not_rounded_to_bfloat16() -> None:
    """Two experts whose logits differ by less than bfloat16 can tell keep their order."""
    hidden = torch.ones(1, HIDDEN, dtype=torch.bfloat16)
    router = torch.full((NUM_EXPERTS, HIDDEN), 1.0)
    router[4] += 2**-12
    logits = hidden.float() @ router.T
    assert torch.equal(logits.to(torch.bfloat16).unique(), torch.tensor([24.0]).bfloat16())
    routing = route(hidden, router, 1, False, LAYER)
    assert routing.selected_experts.tolist() == [[4]]
    assert routing.routing_weights.dtype == torch.float32


def test_expert_ids_are_distinct_and_ascending() -> None:
    routing = Routing(0, torch.tensor([[5, 2], [2, 0], [5, 0]]), torch.ones(3, 2))
    assert routing.expert_ids() == [0, 2, 5]


# ---- mixing ---------------------------------------------------------------------------------


@pytest.mark.parametrize("left_out", [frozenset(), frozenset({1}), frozenset({0, 4, 5})])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mixture_equals_oracle(dtype: str, left_out: frozenset[int]) -> None:
    torch_dtype: torch.dtype = getattr(torch, dtype)
    experts = make_experts(torch_dtype)
    hidden, routing = make_block(9, dtype=torch_dtype)
    [mixed] = mix_experts([hidden], [routing], ShuffledExperts(experts, left_out=left_out))
    selected, weights = routing.selected_experts.numpy(), array(routing.routing_weights)
    arguments = (array(hidden), selected, weights, as_arrays(experts), left_out)
    expected = oracles.mix_experts(*arguments)
    # Each expert's output is off by its own bound; scaling its weight takes two sums over K, a
    # quotient and a product, adding it up K more roundings; the result is rounded to the dtype.
    # ``sizes`` is the mixture of the outputs' magnitudes.
    own = oracles.mix_experts(*arguments, lambda *x: oracles.swiglu_error(*x, dtype))
    sizes = oracles.mix_experts(*arguments, lambda *x: np.abs(oracles.swiglu(*x)))
    bound = 1.01 * own + gamma(3 * TOP_K + 3) * sizes + gamma(1, dtype) * np.abs(expected)
    assert mixed.dtype == torch_dtype
    assert np.all(np.abs(array(mixed) - expected) <= bound)
    assert bound.mean() < (0.3 if dtype == "bfloat16" else 1e-4) * np.abs(expected).mean()


@SETTINGS
@given(seed=st.integers(0, 2**32), block_sizes=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_arrival_order_does_not_change_a_bit(seed: int, block_sizes: list[int]) -> None:
    experts = make_experts()
    blocks, routings = zip(
        *(make_block(size, seed=i) for i, size in enumerate(block_sizes)), strict=True
    )
    in_order = mix_experts(blocks, routings, ResidentExperts(experts))
    shuffled = mix_experts(blocks, routings, ShuffledExperts(experts, seed))
    assert same_bits(in_order, shuffled)


def test_a_block_does_not_depend_on_the_blocks_beside_it() -> None:
    experts = make_experts()
    blocks, routings = zip(*(make_block(size, seed=size) for size in (1, 4, 2)), strict=True)
    together = mix_experts(blocks, routings, ResidentExperts(experts))
    alone = [
        mix_experts([block], [routing], ResidentExperts(experts))[0]
        for block, routing in zip(blocks, routings, strict=True)
    ]
    assert same_bits(together, alone)


def test_a_row_does_not_depend_on_how_many_rows_beside_it_chose_its_experts() -> None:
    experts = make_experts()
    num_rows = 8 * kernels.MAX_ROWS  # an expert is chosen by more than the kernels take of a prompt
    blocks, routings = zip(*(make_block(1, seed=seed) for seed in range(num_rows)), strict=True)
    chosen = torch.cat([routing.selected_experts for routing in routings]).flatten()
    assert chosen.bincount().max() > kernels.MAX_ROWS
    together = mix_experts(blocks, routings, ResidentExperts(experts))
    alone = [
        mix_experts([block], [routing], ResidentExperts(experts))[0]
        for block, routing in zip(blocks, routings, strict=True)
    ]
    assert same_bits(together, alone)


def test_each_expert_is_asked_for_once_for_all_blocks() -> None:
    provider = ShuffledExperts(make_experts())
    blocks, routings = zip(*(make_block(3, seed=seed) for seed in range(4)), strict=True)
    mix_experts(blocks, routings, provider)
    wanted = sorted({expert for routing in routings for expert in routing.expert_ids()})
    assert provider.asked == [(LAYER, wanted)]


def test_experts_that_nobody_chose_are_not_asked_for() -> None:
    hidden, _ = make_block(2)
    routing = Routing(LAYER, torch.tensor([[4, 1], [1, 4]]), torch.full((2, 2), 0.5))
    provider = ShuffledExperts(make_experts())
    mix_experts([hidden], [routing], provider)
    assert provider.asked == [(LAYER, [1, 4])]


def test_expert_outputs_are_summed_in_float32() -> None:
    """1 + 2**-9 - 1 is 2**-9 in float32; in bfloat16 the middle sum would round to 1."""
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    silu_of_one = float(torch.nn.functional.silu(one))
    experts = {
        ExpertKey(LAYER, expert): ExpertWeights(one, one, output * one)
        for expert, output in enumerate((1.0, 2.0**-9, -1.0))
    }
    routing = Routing(LAYER, torch.tensor([[0, 1, 2]]), torch.ones(1, 3))
    [mixed] = mix_experts([hidden], [routing], ResidentExperts(experts))
    assert mixed.item() == silu_of_one * 2.0**-9


# ---- leaving out ----------------------------------------------------------------------------


def test_a_row_none_of_whose_experts_is_served_gets_zeros() -> None:
    hidden, _ = make_block(2)
    routing = Routing(LAYER, torch.tensor([[0, 1], [2, 3]]), torch.full((2, 2), 0.5))
    [mixed] = mix_experts(
        [hidden], [routing], ShuffledExperts(make_experts(), left_out=frozenset({0, 1}))
    )
    assert torch.equal(mixed[0], torch.zeros(HIDDEN))
    assert mixed[1].any()


def test_no_expert_at_all_gives_zeros() -> None:
    hidden, routing = make_block(4)
    everyone = frozenset(range(NUM_EXPERTS))
    [mixed] = mix_experts([hidden], [routing], ShuffledExperts(make_experts(), left_out=everyone))
    assert torch.equal(mixed, torch.zeros(4, HIDDEN))


@SETTINGS
@given(served=st.sets(st.integers(0, NUM_EXPERTS - 1)), norm_topk_prob=st.booleans())
def test_what_is_left_of_a_row_is_scaled_to_the_rows_sum(
    served: set[int], norm_topk_prob: bool
) -> None:
    hidden = randn(8, HIDDEN, seed=5)
    routing = route(hidden, 0.1 * randn(NUM_EXPERTS, HIDDEN, seed=6), TOP_K, norm_topk_prob, LAYER)
    scales = array(left_out_scale(routing, served))[:, 0]
    weights, selected = array(routing.routing_weights), routing.selected_experts.numpy()
    for row, kept in enumerate(np.isin(selected, sorted(served))):
        expected = weights[row].sum() / weights[row][kept].sum() if kept.any() else 0.0
        # two sums over K and a quotient
        np.testing.assert_allclose(scales[row], expected, rtol=gamma(2 * TOP_K + 1))


# ---- other ways of routing ------------------------------------------------------------------


def test_softmax_over_the_chosen_equals_renormalized_softmax() -> None:
    hidden, router = randn(7, HIDDEN, seed=1), randn(NUM_EXPERTS, HIDDEN, seed=2)
    chosen = select_experts(hidden @ router.T, {}, RoutingConfig("softmax_topk"), TOP_K, LAYER)
    renormalized = route(hidden, router, TOP_K, True, LAYER)
    assert torch.equal(chosen.selected_experts, renormalized.selected_experts)
    # Exponentials of logits shifted by the same maximum, sums over K and over E, two quotients.
    bound = gamma(2 * (NUM_EXPERTS + TOP_K) + 8)
    np.testing.assert_allclose(
        array(chosen.routing_weights), array(renormalized.routing_weights), rtol=bound
    )


def test_a_correction_bias_chooses_but_does_not_weigh() -> None:
    hidden, router = randn(7, HIDDEN, seed=1), 0.1 * randn(NUM_EXPERTS, HIDDEN, seed=2)
    config = RoutingConfig("sigmoid", correction_bias="flat")
    bias = torch.tensor([0.0, 9.0, 0.0, 0.0, 9.0, 9.0])
    routing = select_experts(hidden @ router.T, {"correction_bias": bias}, config, 3, LAYER)
    assert all(set(row) == {1, 4, 5} for row in routing.selected_experts.tolist())
    scores = (hidden @ router.T).sigmoid().gather(-1, routing.selected_experts)
    assert torch.equal(routing.routing_weights, scores)


@pytest.mark.parametrize(("group_score", "expected"), [("max", {0, 1}), ("top2", {2, 3})])
def test_only_the_best_groups_are_chosen_from(group_score: str, expected: set[int]) -> None:
    """Groups (0, 1), (2, 3), (4, 5): the first has the best expert, the second the best two."""
    logits = torch.tensor([[3.0, -3.0, 2.0, 2.0, 1.0, 1.0]])
    config = RoutingConfig("sigmoid", n_group=3, topk_group=1, group_score=group_score)  # type: ignore[arg-type]
    routing = select_experts(logits, {}, config, 2, LAYER)
    assert set(routing.selected_experts[0].tolist()) == expected


def test_routed_weights_are_scaled_last() -> None:
    hidden, router = randn(7, HIDDEN, seed=1), randn(NUM_EXPERTS, HIDDEN, seed=2)
    config = RoutingConfig(norm_topk_prob=True, routed_scaling_factor=2.5)
    scaled = select_experts(hidden @ router.T, {}, config, TOP_K, LAYER)
    plain = route(hidden, router, TOP_K, True, LAYER)
    assert torch.equal(scaled.routing_weights, plain.routing_weights * 2.5)


def test_sparsemixer_weighs_each_choice_against_its_near_competitors() -> None:
    """Within 2 x 0.1 of 4, relative to the larger: 4 and 3.5; of 3.5 without 4: 3.5 and 3."""
    logits = torch.tensor([[4.0, 3.5, 3.0, -4.0]])
    config = RoutingConfig("sparsemixer", jitter_eps=0.1)
    routing = select_experts(logits, {}, config, 2, LAYER)
    assert routing.selected_experts.tolist() == [[0, 1]]
    expected = [1 / (1 + np.exp(-0.5)), 1 / (1 + np.exp(-0.5))]
    np.testing.assert_allclose(array(routing.routing_weights)[0], expected, rtol=gamma(8))
