"""Step: fit what foretells later layers' experts to what the calibration tokens showed.

A routed layer's hidden states, normed as before its router but without the norm's weights (its
*plain input*), are mapped linearly to the scores by which each of the next J routed layers chooses
its experts: ridge regression on the first sequences. On those that were left out one number is
fitted for each pair of layers, the scale at which the scores' distances from the border between
chosen and not chosen are the log-odds of being chosen (see ``predictor.probabilities``); weights
and bias are multiplied by it.

Called by: convert_layers.  Next: specter_runtime.predictor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn import functional

from specter_runtime.config import ModelConfig
from specter_runtime.layers import linear

RIDGE = 0.03
"""Added to the Gram matrix's diagonal, as a share of its mean. Measured on SmolMoE: 0.01 to 0.1
make no difference to the recall on text that was left out."""

LEAST_VARIANCE = 1e-6
"""Rows of plain inputs have a mean square of 1; where they vary less than this, the ridge does not
shrink with them."""

BLOCK_ROWS = 1024
"""Rows in float64 at a time."""

PRIOR_PRECISION = 1.0
"""Of the slope's normal prior around 0, with distances in units of their root mean square: next to
thousands of labels it is nothing, but labels that are separated without error need some bound."""

LEAST_SLOPE = 1e-3
"""In the same units: of scores that are worth no more than chance."""

SLOPE_TOLERANCE = 1e-9
MAX_STEPS = 100
"""Halving alone narrows any bracket to the tolerance in fewer."""


@dataclass(frozen=True, slots=True)
class Observation:
    """What one routed layer of the target showed on N x T calibration rows.

    Attributes:
        layer: the decoder layer.
        plain_input: bfloat16 ``[N * T, D]``.
        scores: float32 ``[N * T, E]``: those by which the experts were chosen.
        selected_experts: int64 ``[N * T, K]``.
        early_recall: by number of routed layers ahead, share of the chosen experts that this
            layer's router names from the plain input of the layer that far before it.
    """

    layer: int
    plain_input: torch.Tensor
    scores: torch.Tensor
    selected_experts: torch.Tensor
    early_recall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PredictorQuality:
    """Share of the chosen experts among the K best scores, on rows left out of the fit.

    Attributes:
        recall: of the fitted map, by number of routed layers ahead.
        early_recall: of the later layer's own router asked early, likewise.
    """

    recall: tuple[float, ...]
    early_recall: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class FittedPredictor:
    """A layer's predictor.

    Attributes:
        layer: the decoder layer.
        weight: bfloat16 ``[J, E, D]``.
        bias: float32 ``[J, E]``.
        quality: on the rows that were left out.
    """

    layer: int
    weight: torch.Tensor
    bias: torch.Tensor
    quality: PredictorQuality


class Ridge(NamedTuple):
    """A linear map in float64: ``target_mean + weight @ (input - input_mean)``.

    Attributes:
        weight: ``[O, D]``.
        input_mean: ``[D]``.
        target_mean: ``[O]``.
    """

    weight: torch.Tensor
    input_mean: torch.Tensor
    target_mean: torch.Tensor


def open_layers(config: ModelConfig, layers_ahead: int, next_layer: int) -> list[int]:
    """Routed layers below ``next_layer`` that later ones are still to be foretold from."""
    done = [layer for layer in config.moe_layers if layer < next_layer]
    if not layers_ahead or len(done) == len(config.moe_layers):
        return []
    return done[-layers_ahead:]


def num_fitting_rows(num_sequences: int, sequence_length: int) -> int:
    """Rows to fit to: seven eighths of the sequences, or of the rows of a single one.

    At least one sequence, or row, is left out, and at least one is not.
    """
    if num_sequences == 1:
        return max(1, sequence_length * 7 // 8)
    return num_sequences * 7 // 8 * sequence_length


def fit_nbytes(
    config: ModelConfig, layers_ahead: int, num_sequences: int, sequence_length: int
) -> int:
    """Bytes that fitting one layer's predictor takes, at most, beside the observations.

    In float64: Gram matrix, its factor and two copies ``[D, D]``; products with the scores, the
    map and two copies ``[D, J E]``; a block of rows, twice. Of the rows that are left out: inputs
    in float32; scores, distances, labels, probabilities and products ``[n, E]`` in float64.
    """
    num_rows = num_sequences * sequence_length
    held_out = num_rows - num_fitting_rows(num_sequences, sequence_length)
    width = config.hidden_size
    columns = width + layers_ahead * config.num_experts
    solving = 8 * columns * (4 * width + 2 * min(num_rows, BLOCK_ROWS))
    return solving + held_out * (4 * width + 8 * 8 * config.num_experts)


def choice_scores(
    rows: torch.Tensor,  # [T, D]
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
) -> torch.Tensor:
    """The scores by which a layer chooses experts for its MLP's input: float32 ``[T, E]``.

    The router's logits; where a bias corrects the choice, what it is added to, with it. Groups of
    experts are not looked at.
    """
    logits = linear(tensors, "router", rows.to(torch.float32))
    correction = tensors.get("correction_bias")
    if correction is None:
        return logits
    scores = logits.softmax(-1) if config.routing.scoring == "softmax" else logits.sigmoid()
    return scores + correction.flatten()


def observe_early(
    earlier: Sequence[Observation],
    tensors: Mapping[str, torch.Tensor],
    config: ModelConfig,
    selected_experts: torch.Tensor,  # [N * T, K]
    num_fitted: int,
) -> tuple[float, ...]:
    """How well a layer's router does on plain inputs of layers before it.

    Args:
        earlier: these layers, ascending.
        tensors: of the layer.
        config: of the model.
        selected_experts: that the layer chose.
        num_fitted: rows that do not count.

    Returns:
        The recall by distance, that of the nearest layer first.
    """
    weight, bias = (tensors.get(f"post_attention_layernorm{end}") for end in ("", "_bias"))
    assert weight is not None, "every layer has this norm"
    found = []
    for observation in reversed(earlier):
        rows = observation.plain_input[num_fitted:].to(torch.float32) * weight
        scores = choice_scores(rows if bias is None else rows + bias, tensors, config)
        found.append(recall(scores, selected_experts[num_fitted:]))
    return tuple(found)


def fit_predictor(
    source: Observation, targets: Sequence[Observation], num_fitted: int
) -> FittedPredictor:
    """Fit what foretells later layers from one.

    Args:
        source: the layer.
        targets: the J routed layers behind it, ascending.
        num_fitted: rows to fit the map to; the scales are fitted to the rest, and the recall is
            measured there.
    """
    inputs = source.plain_input
    ridge = fit_ridge(inputs[:num_fitted], [target.scores[:num_fitted] for target in targets])
    held_out = inputs[num_fitted:].to(torch.float32)
    maps = (part.chunk(len(targets)) for part in (ridge.weight, ridge.target_mean))
    weights, biases, recalls = [], [], []
    for target, weight, mean in zip(targets, *maps, strict=True):
        selected = target.selected_experts[num_fitted:]
        bias = mean - weight @ ridge.input_mean
        scores = functional.linear(held_out, weight.to(torch.float32), bias.to(torch.float32))
        slope = fit_slope(scores, selected)
        rounded = (slope * weight).to(torch.bfloat16)
        shift = (slope * mean - rounded.to(torch.float64) @ ridge.input_mean).to(torch.float32)
        scores = functional.linear(held_out, rounded.to(torch.float32), shift)
        weights.append(rounded)
        biases.append(shift)
        recalls.append(recall(scores, selected))
    early = [target.early_recall[i] for i, target in enumerate(targets)]
    quality = PredictorQuality(tuple(recalls), tuple(early))
    return FittedPredictor(source.layer, torch.stack(weights), torch.stack(biases), quality)


def fit_ridge(inputs: torch.Tensor, targets: Sequence[torch.Tensor]) -> Ridge:
    """The linear map with the least squared error, beside ``RIDGE`` times the weights' squares.

    Computed in float64, ``BLOCK_ROWS`` at a time.

    Args:
        inputs: ``[n, D]``, with a mean square of about 1.
        targets: each ``[n, E]``; their maps are stacked: O = J E.
    """
    parts = (torch.split(tensor, BLOCK_ROWS) for tensor in (inputs, *targets))
    blocks = [(rows, outs) for rows, *outs in zip(*parts, strict=True)]
    num_rows, width = inputs.shape
    input_mean = torch.zeros(width, dtype=torch.float64)
    target_mean = torch.zeros(sum(target.shape[1] for target in targets), dtype=torch.float64)
    for rows, outs in blocks:
        input_mean += rows.sum(0, dtype=torch.float64) / num_rows
        target_mean += torch.cat(outs, dim=-1).sum(0, dtype=torch.float64) / num_rows
    gram = torch.zeros(width, width, dtype=torch.float64)
    moments = torch.zeros(width, len(target_mean), dtype=torch.float64)
    for rows, outs in blocks:
        centered = rows.to(torch.float64) - input_mean
        gram.addmm_(centered.T, centered)
        moments.addmm_(centered.T, torch.cat(outs, dim=-1).to(torch.float64) - target_mean)
    diagonal = gram.diagonal()
    diagonal += RIDGE * max(float(diagonal.mean()), num_rows * LEAST_VARIANCE)
    weight = torch.cholesky_solve(moments, torch.linalg.cholesky(gram)).T
    return Ridge(weight, input_mean, target_mean)


def fit_slope(
    scores: torch.Tensor,  # [n, E]
    selected_experts: torch.Tensor,  # [n, K]
) -> float:
    """The slope a > 0 with which P(chosen) = sigmoid(a (score - border)) is the most probable.

    The border of a row lies half way between its K-th and its (K + 1)-th best score. Newton steps
    within a bracket, halved where a step would leave it: the derivative falls all the way.
    """
    num_chosen = selected_experts.shape[1]
    wide = scores.to(torch.float64)
    best = wide.topk(num_chosen + 1, dim=-1).values
    distance = wide - best[:, num_chosen - 1 :].mean(-1, keepdim=True)
    unit = float(distance.square().mean().sqrt())
    if unit == 0:  # no expert is foretold
        return 1.0
    distance = distance / unit
    chosen = torch.zeros_like(distance).scatter_(-1, selected_experts, 1.0)
    low, high = 0.0, float(distance.abs().sum()) / PRIOR_PRECISION
    slope = 0.0
    for _ in range(MAX_STEPS):
        probability = torch.sigmoid(slope * distance)
        rise = float(((chosen - probability) * distance).sum()) - PRIOR_PRECISION * slope
        if rise > 0:
            low = slope
        else:
            high = slope
        spread = probability * (1 - probability) * distance.square()
        step = rise / (float(spread.sum()) + PRIOR_PRECISION)
        nearer = slope + step if low < slope + step < high else (low + high) / 2
        if abs(nearer - slope) <= SLOPE_TOLERANCE * nearer:
            break
        slope = nearer
    return max(slope, LEAST_SLOPE) / unit


def recall(
    scores: torch.Tensor,  # [n, E]
    selected_experts: torch.Tensor,  # [n, K]
) -> float:
    """Share of the chosen experts among those with the K best scores."""
    best = scores.topk(selected_experts.shape[1], dim=-1).indices
    is_chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, selected_experts, True)
    return float(is_chosen.gather(-1, best).to(torch.float64).mean())
