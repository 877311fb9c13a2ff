"""Step: the routed experts of one layer become the draft's stand-ins. Nothing else is quantized.

Called by: pipeline.  Next: quantizers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from specter_build.quantizers import round_to_nearest, squared_errors
from specter_build.recipe import DraftRecipe
from specter_runtime.errors import CheckpointError
from specter_runtime.experts import PROJECTIONS, ExpertKey, ExpertWeights, PackedExpert


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """Stand-ins of a layer's experts and the relative squared error over all their weights."""

    packed: dict[ExpertKey, PackedExpert]
    relative_error: float


def quantize_layer(
    experts: Mapping[ExpertKey, ExpertWeights], recipe: DraftRecipe
) -> QuantizedLayer:
    """Quantize all experts of a layer.

    Raises:
        CheckpointError: an expert holds NaN or infinity; names it.
    """
    packed: dict[ExpertKey, PackedExpert] = {}
    error = total = 0.0
    for key, weights in experts.items():
        parts = {}
        for projection in PROJECTIONS:
            weight = getattr(weights, projection)
            try:
                parts[projection] = round_to_nearest(
                    weight, recipe.bits, recipe.group_size, recipe.symmetric
                )
            except ValueError as exc:
                raise CheckpointError(
                    f"layer {key.layer}, expert {key.expert}, {projection}: {exc}"
                ) from exc
            weight_error, weight_total = squared_errors(weight, parts[projection])
            error, total = error + weight_error, total + weight_total
        biases = tuple(bias for bias in weights.biases if bias is not None)
        packed[key] = PackedExpert(**parts, biases=biases)
    return QuantizedLayer(packed, error / total if total else 0.0)


def draft_tensors(
    packed: Mapping[ExpertKey, PackedExpert], names: Mapping[ExpertKey, Sequence[str]]
) -> dict[str, torch.Tensor]:
    """The tensors of a layer's draft file: ``NAME.codes``, ``.scales`` and ``.zero_points``."""
    tensors: dict[str, torch.Tensor] = {}
    for key, expert in packed.items():
        matrix_names, bias_names = names[key][:3], names[key][3:]
        for name, projection in zip(matrix_names, PROJECTIONS, strict=True):
            part = getattr(expert, projection)
            tensors[f"{name}.codes"] = part.codes
            tensors[f"{name}.scales"] = part.scales
            if part.zero_points is not None:
                tensors[f"{name}.zero_points"] = part.zero_points
        tensors |= dict(zip(bias_names, expert.biases, strict=True))
    return tensors
