"""What a predictor makes of hidden states, and the next layer's router asked too early."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch

from specter_build.checkpoint import Checkpoint
from specter_runtime.layers import linear
from specter_runtime.predictor import NUM_BESIDE, Predictor, ask_routers_early, probabilities
from tests.models import open_model
from tests.specter_build.test_more_families import FIRST_OF_FAMILY, make


def test_likelihood_is_that_of_lying_beyond_the_border() -> None:
    best = torch.tensor([[3.0, 1.0, -1.0, -9.0]])  # of two chosen: the border is 0
    assert torch.equal(probabilities(best, 2), torch.sigmoid(best))
    assert torch.equal(probabilities(best + 100, 2), torch.sigmoid(best))


def test_predictions_name_the_likeliest_of_each_layer() -> None:
    weight = torch.eye(6)[None] * torch.tensor([1.0, 2.0])[:, None, None]  # [2, 6, 6]
    bias = torch.zeros(2, 6)
    bias[1, 5] = 20.0
    predictor = Predictor([3, 7], weight, bias, num_experts_per_tok=2)
    first, second = predictor.predict(torch.tensor([[5.0, 1.0, 4.0, 2.0, 3.0, 0.0]]))
    assert (first.layer, first.num_ahead) == (3, 1)
    assert [expert for expert, _ in first.likely] == [0, 2, 4, 3]
    assert len(first.likely) == 2 + NUM_BESIDE
    expected = torch.sigmoid(torch.tensor([1.5, 0.5, -0.5, -1.5])).tolist()
    assert [p for _, p in first.likely] == pytest.approx(expected, rel=1e-6)
    assert (second.layer, second.num_ahead) == (7, 2)
    assert [expert for expert, _ in second.likely] == [5, 0, 2, 4]


@pytest.mark.parametrize("family", ["mixtral", "phimoe", "gpt_oss", "qwen2_moe"])
def test_the_next_router_asked_early_gives_its_own_logits(tmp_path: Path, family: str) -> None:
    """Of the hidden states that it is given; with the biases of router and norm."""
    make(tmp_path, FIRST_OF_FAMILY[family])
    model, names = open_model(tmp_path), Checkpoint(tmp_path).family.bundle_names()
    predictors = ask_routers_early(model.config, model.dense_tensors, names)
    routed = model.config.moe_layers
    assert list(predictors) == list(routed[:-1])
    hidden = torch.randn(9, model.config.hidden_size, generator=torch.Generator().manual_seed(0))
    for layer, later in pairwise(routed):
        predictor = predictors[layer]
        assert predictor.layers == (later,)
        own, next_layer = model.model.layers[layer], model.model.layers[later]
        logits = linear(next_layer.tensors, "router", next_layer.mlp_input(hidden)).double()
        plain = own.plain_input(hidden).double()
        found = plain @ predictor.matrix.double().T + predictor.bias.double()
        # Each product is off by half a unit of bfloat16, sum and norms by less than another.
        magnitudes = plain.abs() @ predictor.matrix.double().abs().T
        assert ((found - logits).abs() <= 2.0**-8 * magnitudes + 1e-5).all()
        assert logits.std() > 20 * 2.0**-8 * magnitudes.mean()  # or another router would do
