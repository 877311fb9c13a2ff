"""Foretelling later layers' experts from a layer's hidden states, where nothing is drafted.

The residual stream changes little from layer to layer, and what a layer adds to it can for the most
part be foretold from what it is given. So a linear map of a layer's hidden states that the build
has fitted to the scores by which the next layers choose names their experts before they are
reached. The next router itself, asked too early, is such a map too, and a worse one: arXiv
2312.17238, section 3.2.

Called by: model, kernels, bundle_loader, session, prefetcher.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch.nn import functional

from specter_runtime.config import ModelConfig

NUM_BESIDE = 2
"""Experts named beyond as many as a layer chooses."""


class Prediction(NamedTuple):
    """What is foretold of one later layer.

    Attributes:
        layer: the decoder layer that it speaks of.
        num_ahead: how many routed layers that is behind the one where it was made, at least 1.
        likely: its likeliest experts, each with the probability that it is chosen.
    """

    layer: int
    num_ahead: int
    likely: Sequence[tuple[int, float]]


PredictionObserver = Callable[[Sequence[Prediction]], None]


class Predictor:
    """What one layer knows of the J routed layers behind it."""

    def __init__(
        self,
        layers: Sequence[int],
        weight: torch.Tensor,  # [J, E, D]
        bias: torch.Tensor,  # [J, E]
        num_experts_per_tok: int,
    ) -> None:
        """Take over fitted weights.

        Args:
            layers: the J layers spoken of, ascending.
            weight: multiplies hidden states that are normed as before the router, but not weighted.
            bias: added to it; the sum is a score, of which ``probabilities`` makes sense.
            num_experts_per_tok: experts that a layer chooses; there are more than that.
        """
        self.layers = tuple(layers)
        self.matrix = weight.flatten(0, 1).contiguous()  # [J * E, D]
        self.bias = bias.flatten().to(torch.float32)
        self.num_likely = min(num_experts_per_tok + NUM_BESIDE, weight.shape[1])
        self._num_chosen = num_experts_per_tok

    def predict(self, plain: torch.Tensor) -> list[Prediction]:
        """For one row ``[1, D]`` of hidden states, normed without weights."""
        matrix = self.matrix.to(torch.float32)
        scores = functional.linear(plain.to(torch.float32), matrix, self.bias)
        scores = scores.view(len(self.layers), -1)
        best, likely = scores.topk(self.num_likely, dim=-1)
        return self.name(likely, probabilities(best, self._num_chosen))

    def name(
        self,
        likely: torch.Tensor,  # [J, C]
        found: torch.Tensor,  # [J, C]
    ) -> list[Prediction]:
        """Predictions from experts and their probabilities."""
        rows = zip(self.layers, likely.tolist(), found.tolist(), strict=True)
        return [
            Prediction(layer, ahead, list(zip(experts, probs, strict=True)))
            for ahead, (layer, experts, probs) in enumerate(rows, start=1)
        ]


def ask_routers_early(
    config: ModelConfig, tensors: Mapping[str, torch.Tensor], tensor_names: Mapping[str, str]
) -> dict[int, Predictor]:
    """Predictors by layer that are the next routed layer's own norm and router.

    With n the row that is normed without weights, the router's logits are
    ``W (g * n + b) + c = (W * g) n + (W b + c)``, where g and b are the norm's weight and bias and
    c is the router's. What else decides a choice (groups, correction biases) is left out.

    Args:
        config: the model.
        tensors: resident tensors by name.
        tensor_names: role -> name template, see ``manifest``.
    """
    if config.num_experts <= config.num_experts_per_tok:
        return {}

    def find(role: str, layer: int) -> torch.Tensor | None:
        template = tensor_names.get(role)
        found = None if template is None else tensors.get(template.format(layer=layer))
        return None if found is None else found.to(torch.float32)

    predictors = {}
    for layer, later in pairwise(config.moe_layers):
        router, scale = find("router", later), find("post_attention_layernorm", later)
        assert router is not None, "bundle_loader checks this"
        assert scale is not None, "likewise"
        bias = torch.zeros(len(router))
        shift = find("post_attention_layernorm_bias", later)
        bias += 0.0 if shift is None else router @ shift
        own_bias = find("router_bias", later)
        bias += 0.0 if own_bias is None else own_bias
        weight = (router * scale).to(torch.bfloat16)
        predictors[layer] = Predictor([later], weight[None], bias[None], config.num_experts_per_tok)
    return predictors


def probabilities(best: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """How likely experts are chosen, from scores ``[..., C]`` in descending order.

    ``sigmoid(score - border)``, the border half way between the last that would be chosen and the
    first that would not: the logistic model of an error in their difference, whose width the build
    has put into the scale of the scores.
    """
    border = best[..., num_chosen - 1 : num_chosen + 1].mean(dim=-1, keepdim=True)
    return torch.sigmoid(best - border)
