"""What foretells experts: the least squares of a textbook, odds that come true, a bundle's own."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specter_build.checkpoint import Checkpoint
from specter_build.fit_predictor import (
    BLOCK_ROWS,
    LEAST_SLOPE,
    RIDGE,
    SLOPE_TOLERANCE,
    Observation,
    choice_scores,
    fit_nbytes,
    fit_predictor,
    fit_ridge,
    fit_slope,
    num_fitting_rows,
    observe_early,
    open_layers,
    recall,
)
from specter_build.pipeline import build
from specter_build.profile_routing import LayerRunner
from specter_build.recipe import Recipe
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import ModelConfig, RoutingConfig
from specter_runtime.experts import ExpertKey, ResidentExperts
from specter_runtime.memory import predictor_nbytes
from specter_runtime.moe import select_experts
from specter_runtime.predictor import probabilities
from tests.allocations import peak_allocated_bytes
from tests.checkpoints import recipe_dict
from tests.models import open_model

# ---- the map ------------------------------------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num_rows", [5, 300, 2 * BLOCK_ROWS + 7])
def test_ridge_is_least_squares_over_rows_that_pull_weights_to_zero(num_rows: int) -> None:
    """The ridge's own rows, appended: sqrt(ridge) times the identity, to give 0."""
    inputs = normal(num_rows, 12) @ normal(12, 12, seed=1) + 3
    targets = [normal(num_rows, 4, seed=2), inputs[:, :3] * 2 + normal(num_rows, 3, seed=3)]
    found = fit_ridge(inputs, targets)

    x, y = inputs.double(), torch.cat(targets, dim=-1).double()
    x_mean, y_mean = x.mean(0), y.mean(0)
    strength = RIDGE * float((x - x_mean).square().sum(0).mean())
    rows = torch.cat((x - x_mean, math.sqrt(strength) * torch.eye(12, dtype=torch.float64)))
    outs = torch.cat((y - y_mean, torch.zeros(12, 7, dtype=torch.float64)))
    expected = torch.linalg.lstsq(rows, outs, driver="gelsd").solution.T
    # Normal equations lose condition(X'X) units of the last place, n D of them in sums; the trace
    # is 12 times the mean of the diagonal, so no eigenvalue is over 12 / RIDGE times the least.
    bound = 12 / RIDGE * (num_rows + 12) * 2.0**-53 * float(expected.abs().max())
    assert float((found.weight - expected).abs().max()) <= bound
    assert torch.allclose(found.input_mean, x_mean, rtol=num_rows * 2.0**-52, atol=0)


def test_ridge_of_one_input_by_hand() -> None:
    """Inputs -1 and 1, outputs 3 and 5: the slope 1 shrinks by the ridge, the mean does not."""
    found = fit_ridge(torch.tensor([[-1.0], [1.0]]), [torch.tensor([[3.0], [5.0]])])
    assert (found.input_mean.item(), found.target_mean.item()) == (0, 4)
    # 2 / (2 + RIDGE * 2), in which five operations round
    assert found.weight.item() == pytest.approx(1 / (1 + RIDGE), rel=5 * 2.0**-53)


@pytest.mark.parametrize("num_rows", [1, 4])
def test_inputs_that_do_not_vary_give_the_mean(num_rows: int) -> None:
    found = fit_ridge(torch.ones(num_rows, 3), [normal(num_rows, 2)])
    assert torch.equal(found.weight, torch.zeros(2, 3, dtype=torch.float64))


# ---- the odds -----------------------------------------------------------------------------------


def drawn_choices(num_rows: int, slope: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores, and a choice of one of two experts that follows the logistic model exactly.

    Of two scores +-s the border is 0, so P(first) = sigmoid(slope s) and P(second) is the rest.
    """
    generator = torch.Generator().manual_seed(5)
    half = torch.randn(num_rows, 1, generator=generator)
    is_second = torch.rand(num_rows, 1, generator=generator) > torch.sigmoid(slope * half)
    return torch.cat((half, -half), dim=-1), is_second.to(torch.int64)


@pytest.mark.parametrize("slope", [0.5, 2.0, 8.0])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_slope_of_choices_drawn_with_it_is_found_whatever_the_scale(
    slope: float, scale: float
) -> None:
    num_rows = 20_000
    scores, selected = drawn_choices(num_rows, slope)
    found = fit_slope(scores * scale, selected) * scale
    # Cramer-Rao: the variance is 1 / information, both columns of a row saying the same; 5 sigma.
    probability = torch.sigmoid(slope * scores[:, 0].double())
    information = float((probability * (1 - probability) * scores[:, 0].double().square()).sum())
    # The prior pulls by its precision times the slope, against 2 x information.
    pull = slope / (2 * information)
    assert abs(found - slope) <= 5 / math.sqrt(information) + 2 * pull


def test_probabilities_come_true_among_those_foretold_alike() -> None:
    """Of the choices that are foretold with about p, a share of p is right, bin by bin."""
    scores, selected = drawn_choices(50_000, slope=3.0)
    slope = fit_slope(scores, selected)
    best, experts = (slope * scores).topk(2, dim=-1)
    foretold = probabilities(best, 1)[:, 0].double()
    hit = (experts[:, :1] == selected)[:, 0].double()
    information = float((foretold * (1 - foretold) * scores[:, 0].double().square()).sum())
    # x sigmoid(x) (1 - sigmoid(x)) is 0.224 at most: so much of the slope's relative error shows
    shift = 0.224 * 5 / (slope * math.sqrt(information))
    edges = torch.linspace(0.5, 1.0, 6)
    for low, high in pairwise(edges.tolist()):
        inside = (foretold >= low) & (foretold < high)
        count = int(inside.sum())
        assert count > 1000
        mean = float(foretold[inside].mean())
        sigma = math.sqrt(mean * (1 - mean) / count)
        assert abs(float(hit[inside].mean()) - mean) <= 5 * sigma + shift


def test_choices_without_error_have_a_finite_slope_that_grows_with_their_number() -> None:
    found = []
    for num_rows in (10, 1000):
        scores = normal(num_rows, 6)
        found.append(fit_slope(scores, scores.topk(2, dim=-1).indices))
    assert 1 < found[0] < found[1] < math.inf


def test_scores_that_say_the_contrary_have_the_least_slope() -> None:
    scores = normal(100, 4)
    found = fit_slope(scores, scores.topk(2, dim=-1, largest=False).indices)
    distance = scores.double() - scores.double().topk(3).values[:, 1:].mean(-1, keepdim=True)
    unit = float(distance.square().mean().sqrt())
    assert found == pytest.approx(LEAST_SLOPE / unit, rel=1e-6)  # float32 scores
    assert fit_slope(torch.zeros(3, 4), torch.tensor([[0], [1], [2]])) == 1.0


def test_slope_is_where_the_likelihood_is_flat() -> None:
    """Against the derivative of the penalized likelihood, taken by torch."""
    scores, selected = normal(200, 6), normal(200, 6, seed=1).topk(2, dim=-1).indices
    scores.scatter_add_(-1, selected, torch.ones(200, 2))
    slope = torch.tensor(fit_slope(scores, selected), dtype=torch.float64, requires_grad=True)
    wide = scores.double()
    distance = wide - wide.topk(3, dim=-1).values[:, 1:].mean(-1, keepdim=True)
    chosen = torch.zeros(200, 6, dtype=torch.float64).scatter_(-1, selected, 1.0)
    unit = distance.square().mean().sqrt()
    loss = torch.nn.functional.binary_cross_entropy_with_logits(
        slope * distance, chosen, reduction="sum"
    )
    (loss + (slope * unit).square() / 2).backward()
    curvature = float((distance.square() / 4).sum() + unit.square())  # at most
    assert slope.grad is not None
    tolerance = 10 * SLOPE_TOLERANCE * float(slope.detach())
    assert abs(float(slope.grad)) <= curvature * tolerance


def test_recall_counts_the_chosen_among_the_best() -> None:
    scores = torch.tensor([[3.0, 2.0, 1.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    assert recall(scores, torch.tensor([[0, 1], [0, 3]])) == 3 / 4


# ---- rows and layers ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 10), 70),
        ((32, 512), 28 * 512),
        ((2, 10), 10),
        ((3, 10), 20),
        ((1, 16), 14),
        ((1, 2), 1),
    ],
)
def test_an_eighth_of_the_sequences_is_left_out(shape: tuple[int, int], expected: int) -> None:
    assert num_fitting_rows(*shape) == expected
    assert 0 < expected < math.prod(shape)


@pytest.fixture(scope="module")
def config(tiny_bundle: Path) -> ModelConfig:
    return load_bundle(tiny_bundle).manifest.model


def test_layers_stay_open_until_the_last_that_they_speak_of(config: ModelConfig) -> None:
    deep = replace(config, num_hidden_layers=6, dense_layers=(0, 2))  # routed: 1, 3, 4, 5
    at = range(7)
    assert [open_layers(deep, 2, n) for n in at] == [[], [], [1], [1], [1, 3], [3, 4], []]
    assert [open_layers(deep, 4, n) for n in at] == [[], [], [1], [1], [1, 3], [1, 3, 4], []]
    assert [open_layers(deep, 0, n) for n in at] == [[]] * 7


@pytest.mark.parametrize(
    ("scoring", "has_correction"),
    [
        ("softmax", False),
        ("softmax", True),
        ("sigmoid", False),
        ("sigmoid", True),
        ("softmax_topk", False),
    ],
)
def test_the_best_scores_are_those_of_the_experts_that_are_chosen(
    config: ModelConfig, scoring: Any, has_correction: bool
) -> None:
    own = replace(config, routing=RoutingConfig(scoring=scoring))
    tensors = {"router": normal(8, 64), "router_bias": normal(8, seed=1)}
    if has_correction:
        tensors["correction_bias"] = normal(1, 8, seed=2)
    rows = normal(50, 64, seed=3)
    logits = rows @ tensors["router"].T + tensors["router_bias"]
    chosen = select_experts(logits, tensors, own.routing, 2, 0).selected_experts
    assert recall(choice_scores(rows, tensors, own), chosen) == 1.0
    plain = select_experts(logits, {}, own.routing, 2, 0).selected_experts
    assert (recall(logits, chosen) == 1.0) == torch.equal(plain, chosen) != has_correction


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_router_asked_with_its_own_inputs_errs_by_their_rounding_only(
    config: ModelConfig, has_bias: bool
) -> None:
    """Plain inputs that bfloat16 holds exactly, so that nothing is rounded: the recall is 1."""
    rows = normal(40, 64).to(torch.bfloat16)
    tensors = {"router": normal(8, 64, seed=1), "post_attention_layernorm": normal(64, seed=2)}
    inputs = rows.to(torch.float32) * tensors["post_attention_layernorm"]
    if has_bias:
        tensors["post_attention_layernorm_bias"] = normal(64, seed=3)
        inputs = inputs + tensors["post_attention_layernorm_bias"]
    scores = choice_scores(inputs, tensors, config)
    chosen = scores.topk(2, dim=-1).indices
    other = normal(40, 64, seed=4).to(torch.bfloat16)
    earlier = [Observation(i, x, scores, chosen, ()) for i, x in enumerate((other, rows))]
    near, far = observe_early(earlier, tensors, config, chosen, 10)
    assert near == 1.0 > far


def test_fitted_map_is_scaled_rounded_and_keeps_the_mean(config: ModelConfig) -> None:
    plain = normal(800, 64).to(torch.bfloat16)
    scores = plain.float() @ normal(64, 16, seed=1) + normal(800, 16, seed=2) + 5
    chosen = [part.topk(2, dim=-1).indices for part in scores.split(8, dim=-1)]
    source = Observation(0, plain, scores[:, :8], chosen[0], ())
    targets = [
        Observation(i + 1, plain, part, own, (0.25, 0.5)[: i + 1])
        for i, (part, own) in enumerate(zip(scores.split(8, dim=-1), chosen, strict=True))
    ]
    fitted = fit_predictor(source, targets, 700)
    assert (fitted.layer, fitted.quality.early_recall) == (0, (0.25, 0.5))
    assert (fitted.weight.dtype, fitted.weight.shape) == (torch.bfloat16, (2, 8, 64))
    assert (fitted.bias.dtype, fitted.bias.shape) == (torch.float32, (2, 8))
    ridge = fit_ridge(plain[:700], [scores[:700, :8], scores[:700, 8:]])
    x, y = plain.double(), scores.double()
    for i in range(2):
        part = slice(8 * i, 8 * i + 8)
        map_weight, mean = ridge.weight[part], ridge.target_mean[part]
        plainly = (x[700:] - ridge.input_mean) @ map_weight.T + mean
        slope = fit_slope(plainly, chosen[i][700:])
        own = fitted.weight[i].double()
        # half a unit in the last of bfloat16's eight places; the slope is of float32 scores,
        # 64 products of which round, and varies no more than they do
        assert torch.all((own - slope * map_weight).abs() <= own.abs() * (2.0**-8 + 2.0**-14))
        at_mean = own @ ridge.input_mean + fitted.bias[i].double()
        assert torch.allclose(at_mean, slope * mean, rtol=2.0**-14, atol=0)
        found = x[700:] @ own.T + fitted.bias[i].double()
        assert fitted.quality.recall[i] == recall(found, chosen[i][700:]) > 0.8
    assert y.mean() > 4  # else a mean that is lost would not show


@pytest.mark.parametrize(
    ("shape", "width", "num_experts", "layers_ahead"),
    [((4, 64), 64, 8, 2), ((32, 64), 128, 64, 4), ((2, 600), 32, 128, 1), ((16, 16), 256, 4, 1)],
)
def test_fitting_takes_no_more_memory_than_is_set_aside_and_not_much_less(
    config: ModelConfig,
    shape: tuple[int, int],
    width: int,
    num_experts: int,
    layers_ahead: int,
) -> None:
    own, num_rows = replace(config, hidden_size=width, num_experts=num_experts), math.prod(shape)
    observations = []
    for layer in range(layers_ahead + 1):
        plain = normal(num_rows, width, seed=layer).to(torch.bfloat16)
        scores = normal(num_rows, num_experts, seed=layer)
        chosen = scores.topk(2, dim=-1).indices
        observations.append(Observation(layer, plain, scores, chosen, (0.5,) * layers_ahead))
    source, *targets = observations
    peak = peak_allocated_bytes(lambda: fit_predictor(source, targets, num_fitting_rows(*shape)))
    reserved = fit_nbytes(own, layers_ahead, *shape)
    assert reserved / 4 < peak <= reserved


# ---- a bundle -----------------------------------------------------------------------------------

NUM_SEQUENCES, NUM_TOKENS = 4, 64


@pytest.fixture(scope="module")
def streams(tiny_checkpoint: Path, tiny_bundle: Path) -> dict[int, tuple[torch.Tensor, ...]]:
    """Layer -> the target's plain inputs, logits and choices on the calibration set, run anew."""
    checkpoint, opened = Checkpoint(tiny_checkpoint), open_model(tiny_checkpoint)
    ids = load_file(tiny_bundle / "routes.safetensors")["token_ids"].to(torch.int64)
    names = checkpoint.family.bundle_names()
    runner = LayerRunner(checkpoint.config, names, NUM_TOKENS)
    hidden = runner.embed(ids, checkpoint.dense_tensors(None))
    found = {}
    for index in range(3):
        layer = runner.bind_layer(index, checkpoint.dense_tensors(index))
        keys = [ExpertKey(index, expert) for expert in range(8)]
        passed = runner.run(layer, hidden, ResidentExperts({k: opened.weights[k] for k in keys}))
        assert passed.routing is not None
        weight = layer.tensors["post_attention_layernorm"]
        logits = passed.mlp_input @ layer.tensors["router"].T
        plain = passed.mlp_input / weight
        # the norm's weight is multiplied and divided, then rounded to bfloat16
        assert torch.allclose(plain.bfloat16(), passed.plain_input, rtol=2.0**-7, atol=0)
        found[index] = passed.plain_input, logits, passed.routing.selected_experts
        hidden = passed.hidden
    return found


def test_predictors_of_a_bundle_are_fitted_to_its_layers(
    tiny_bundle: Path, streams: dict[int, tuple[torch.Tensor, ...]]
) -> None:
    """Anew from the target's own streams: each pair of layers, and what the report says of it."""
    report = json.loads((tiny_bundle / "report.json").read_text())["predictor"]
    predictors = load_bundle(tiny_bundle).predictors()
    num_fitted = 3 * NUM_TOKENS  # of 4 sequences, one is left out
    assert {layer: own.layers for layer, own in predictors.items()} == {0: (1, 2), 1: (2,)}
    assert [row["layer"] for row in report["layers"]] == [0, 1]
    assert report["layers_ahead"] == 2
    for row in report["layers"]:
        own = predictors[row["layer"]]
        plain = streams[row["layer"]][0]
        for i, later in enumerate(own.layers):
            _, logits, chosen = streams[later]
            ridge = fit_ridge(plain[:num_fitted], [logits[:num_fitted]])
            centered = plain.double() - ridge.input_mean
            scores = centered @ ridge.weight.T + ridge.target_mean
            slope = fit_slope(scores[num_fitted:], chosen[num_fitted:])
            weight = own.matrix.view(-1, 8, 64)[i].double()
            # logits are summed in another order here: 64 roundings of float32 beside bfloat16's
            near = slope * ridge.weight
            assert float((weight - near).abs().max()) <= 2.0**-8 * float(near.abs().max())
            assert row["recall"][i] == held_out_recall(own, i, plain[num_fitted:], chosen)
            best = scores[num_fitted:].topk(2, dim=-1).indices
            assert float(best.float().std()) > 0.5  # not the same experts for every token
    means = [
        sum(row["recall"][i] for row in report["layers"] if i < len(row["recall"]))
        / sum(i < len(row["recall"]) for row in report["layers"])
        for i in range(2)
    ]
    assert report["recall"] == means


def held_out_recall(own: Any, i: int, plain: torch.Tensor, chosen: torch.Tensor) -> float:
    """Expert by expert, of what ``predict`` says of each row."""
    hits = 0
    for row, experts in zip(plain, chosen[-len(plain) :].tolist(), strict=True):
        prediction = own.predict(row[None])[i]
        assert (prediction.layer, prediction.num_ahead) == (own.layers[i], i + 1)
        odds = [probability for _, probability in prediction.likely]
        assert odds == sorted(odds, reverse=True)
        assert odds[1] >= 0.5 >= odds[2]  # the border lies between the second and the third
        hits += len({expert for expert, _ in prediction.likely[:2]} & set(experts))
    return hits / (2 * len(plain))


def test_early_router_in_the_report_is_the_routers_own(
    tiny_bundle: Path, tiny_checkpoint: Path, streams: dict[int, tuple[torch.Tensor, ...]]
) -> None:
    report = json.loads((tiny_bundle / "report.json").read_text())["predictor"]
    tensors = load_file(tiny_checkpoint / "model.safetensors")
    for row in report["layers"]:
        plain = streams[row["layer"]][0][3 * NUM_TOKENS :].float()
        for i, found in enumerate(row["early_router"]):
            prefix = f"model.layers.{row['layer'] + i + 1}."
            rows = plain * tensors[f"{prefix}post_attention_layernorm.weight"]
            best = (rows @ tensors[f"{prefix}mlp.gate.weight"].T).topk(2, dim=-1).indices
            chosen = streams[row["layer"] + i + 1][2][3 * NUM_TOKENS :]
            hits = sum(
                len(set(a) & set(b)) for a, b in zip(best.tolist(), chosen.tolist(), strict=True)
            )
            assert found == hits / chosen.numel()


@pytest.mark.parametrize("layers_ahead", [1, 4])
def test_bundle_has_predictors_for_as_many_layers_as_asked(
    tiny_checkpoint: Path, tmp_path: Path, layers_ahead: int
) -> None:
    recipe = recipe_dict(
        tiny_checkpoint,
        tmp_path / "bundle",
        calibration={"num_sequences": 1, "sequence_length": 16},
        predictor={"layers_ahead": layers_ahead},
    )
    result = build(Recipe.model_validate(recipe), tmp_path)
    bundle = load_bundle(result.destination, verify_hashes=True)
    expected = {0: (1, 2)[:layers_ahead], 1: (2,)}
    assert {i: own.layers for i, own in bundle.predictors().items()} == expected
    assert predictor_nbytes(bundle.manifest.model, layers_ahead) == bundle.predictor_nbytes
