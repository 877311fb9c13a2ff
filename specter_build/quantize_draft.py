"""Step: the routed experts of one layer become the draft's stand-ins. Nothing else is quantized.

Methods that look at data are given the rows that enter the layer's experts in the target's stream
and the target's routing: an expert is calibrated on the tokens that reach it, each counting by its
routing weight. Hessians are made and dropped expert by expert.

Called by: convert_layers.  Next: quantizers, calibrated_quantizers, given_draft.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace

import torch

from specter_build.calibrated_quantizers import hessian, load, quantize_gptq, search_awq_scales
from specter_build.given_draft import MAX_RELATIVE_ERROR, GivenDraft
from specter_build.quantizers import GridFormat, is_finite, round_to_nearest, squared_errors
from specter_build.recipe import DraftRecipe
from specter_runtime.config import ModelConfig
from specter_runtime.errors import CheckpointError, RecipeError
from specter_runtime.experts import (
    PROJECTIONS,
    ExpertKey,
    ExpertWeights,
    PackedExpert,
    Routing,
    StoredExpert,
)
from specter_runtime.layers import swiglu_inner
from specter_runtime.packed import PackedTensor


@dataclass(frozen=True, slots=True)
class ExpertInputs:
    """What enters a layer's experts.

    Attributes:
        rows: float32 ``[R, D]``.
        routing: which experts each row goes to; of the same R rows.
        swiglu_limit: the model's.
    """

    rows: torch.Tensor
    routing: Routing
    swiglu_limit: float | None

    def of_expert(self, expert: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows ``[n, D]`` that reach an expert and their routing weights ``[n, 1]``."""
        positions, ranks = torch.where(self.routing.selected_experts == expert)
        weights = self.routing.routing_weights[positions, ranks]
        return self.rows[positions], weights.unsqueeze(-1)


@dataclass(frozen=True, slots=True)
class QuantizedLayer:
    """The stand-ins of a layer.

    Attributes:
        packed: experts of 0 bits are absent.
        relative_error: squared error over squared weights, over all that was quantized (with awq:
            the rescaled weights).
        fallback_experts: quantized by rtn, since too few calibration tokens reach them.
    """

    packed: dict[ExpertKey, PackedExpert]
    relative_error: float
    fallback_experts: tuple[int, ...]


def check_method(recipe: DraftRecipe, config: ModelConfig) -> None:
    """Refuse a method that cannot work on a model, or whose library is not there.

    Raises:
        RecipeError: saying why.
    """
    if recipe.method == "awq":
        if config.swiglu_limit is not None:
            raise RecipeError(
                f"draft.method: awq cannot be applied to {config.model_type}: its clamped "
                "activation is not linear in up_proj, so no scale can be folded; use gptq or rtn"
            )
        if config.moe_intermediate_size % recipe.group_size:
            raise RecipeError(
                f"draft.group_size: awq needs one that divides moe_intermediate_size, "
                f"{config.moe_intermediate_size}; found {recipe.group_size}"
            )
    if recipe.is_calibrated:
        load(recipe.method)


def quantize_layer(
    experts: Mapping[ExpertKey, StoredExpert],
    recipe: DraftRecipe,
    widths: Sequence[int],
    inputs: ExpertInputs | None,
    given: GivenDraft | None = None,
) -> QuantizedLayer:
    """Quantize the experts of a layer.

    Args:
        experts: all of them.
        recipe: how.
        widths: bit width of each expert; 0 leaves it without a stand-in.
        inputs: for methods that are calibrated.
        given: where stand-ins are taken from, if they are not made.

    Raises:
        CheckpointError: an expert, or what calibration makes of it, holds NaN or infinity, or a
            given one is no quantization of it; names layer, expert and matrix.
    """
    packed: dict[ExpertKey, PackedExpert] = {}
    fallback: list[int] = []
    error = total = 0.0
    for key, stored in experts.items():
        bits = widths[key.expert]
        weights = stored.to(torch.float32)
        form = GridFormat(bits, recipe.group_size, recipe.symmetric, recipe.clip)
        try:
            _check_finite(weights)
            if not bits:
                continue
            if given is None:
                expert = _quantize_expert(key.expert, weights, form, recipe, inputs)
            else:
                expert = _QuantizedExpert(weights, _taken(weights, given.parts(key)))
        except ValueError as exc:
            raise CheckpointError(f"layer {key.layer}, expert {key.expert}, {exc}") from exc
        for projection, part in expert.parts.items():
            part_error, part_total = squared_errors(getattr(expert.weights, projection), part)
            error, total = error + part_error, total + part_total
        pairs = zip(expert.weights.biases, stored.biases, strict=True)
        biases = tuple(
            bias.to(asis.dtype) for bias, asis in pairs if bias is not None and asis is not None
        )
        packed[key] = PackedExpert(**expert.parts, biases=biases)
        if expert.is_fallback:
            fallback.append(key.expert)
    return QuantizedLayer(packed, error / total if total else 0.0, tuple(fallback))


@dataclass(frozen=True, slots=True)
class _QuantizedExpert:
    """Quantized matrices by name, and the weights that they stand for."""

    weights: ExpertWeights
    parts: dict[str, PackedTensor]
    is_fallback: bool = False


def _quantize_expert(
    expert: int,
    weights: ExpertWeights,
    form: GridFormat,
    recipe: DraftRecipe,
    inputs: ExpertInputs | None,
) -> _QuantizedExpert:
    """Quantize by the recipe's method, or by rtn where that is not possible."""
    if not recipe.is_calibrated or inputs is None:
        return _QuantizedExpert(weights, _rounded(weights, form))
    rows, row_weights = inputs.of_expert(expert)
    if len(rows) < recipe.required_tokens(len(weights.gate_proj)):
        return _QuantizedExpert(weights, _rounded(weights, form), is_fallback=True)
    matrices = (weights.gate_proj, weights.up_proj)
    inner = swiglu_inner(rows, *matrices, weights.biases, inputs.swiglu_limit)
    inner = inner * row_weights
    if recipe.method == "awq":
        rescaled = _rescaled(weights, inner, form)
        return _QuantizedExpert(rescaled, _rounded(rescaled, form))
    parts = _compensated(weights, rows * row_weights, inner, form)
    if parts is None:
        return _QuantizedExpert(weights, _rounded(weights, form), is_fallback=True)
    return _QuantizedExpert(weights, parts)


def _check_finite(weights: ExpertWeights) -> None:
    """Raise ``ValueError`` naming a matrix or bias that holds NaN or infinity."""
    for field in fields(weights):
        tensor = getattr(weights, field.name)
        if tensor is not None and not is_finite(tensor):
            raise ValueError(f"{field.name}: the weight holds NaN or infinity")


def _taken(weights: ExpertWeights, parts: dict[str, PackedTensor]) -> dict[str, PackedTensor]:
    """Given matrices, if they are quantizations of the target's."""
    for projection, part in parts.items():
        error, total = squared_errors(getattr(weights, projection), part)
        if not error <= MAX_RELATIVE_ERROR * total:
            raise ValueError(
                f"{projection}: the given draft's weights are far from the target's (squared error "
                f"{error / total if total else error:.2g} of the squared weights): of another "
                "model, or rescaled for norms that the target does not have, as awq does"
            )
    return parts


def _rounded(weights: ExpertWeights, form: GridFormat) -> dict[str, PackedTensor]:
    """All matrices rounded to nearest."""
    parts = {}
    for projection in PROJECTIONS:
        with _named(projection):
            parts[projection] = round_to_nearest(getattr(weights, projection), form)
    return parts


def _compensated(
    weights: ExpertWeights,
    rows: torch.Tensor,  # [n, D]
    inner: torch.Tensor,  # [n, I]
    form: GridFormat,
) -> dict[str, PackedTensor] | None:
    """All matrices by gptq; None if a Hessian cannot be factorized.

    gate_proj and up_proj have the same inputs, so the same Hessian: they are quantized as one
    matrix, whose rows do not depend on each other.
    """
    with _named("gate_proj and up_proj"):
        both = quantize_gptq(torch.cat([weights.gate_proj, weights.up_proj]), hessian(rows), form)
    with _named("down_proj"):
        down = quantize_gptq(weights.down_proj, hessian(inner), form)
    if both is None or down is None:
        return None
    middle, end = len(weights.gate_proj), both.shape[0]
    parts = both.rows(0, middle), both.rows(middle, end), down
    return dict(zip(PROJECTIONS, parts, strict=True))


def _rescaled(
    weights: ExpertWeights,
    inner: torch.Tensor,  # [n, I]
    form: GridFormat,
) -> ExpertWeights:
    """The same expert with factors moved from up_proj to down_proj."""
    with _named("up_proj and down_proj"):
        scales = search_awq_scales(weights.up_proj, weights.down_proj, inner, form)
    bias = weights.up_proj_bias
    return replace(
        weights,
        up_proj=weights.up_proj / scales.unsqueeze(1),
        down_proj=weights.down_proj * scales,
        up_proj_bias=None if bias is None else bias / scales,
    )


@contextmanager
def _named(matrix: str) -> Iterator[None]:
    """Put the matrix's name in front of what is wrong with it."""
    try:
        yield
    except ValueError as exc:
        raise ValueError(f"{matrix}: {exc}") from exc


def draft_tensors(
    packed: Mapping[ExpertKey, PackedExpert], names: Mapping[ExpertKey, Mapping[str, str]]
) -> dict[str, torch.Tensor]:
    """The tensors of a layer's draft file: ``NAME.codes``, ``.scales`` and ``.zero_points``."""
    tensors: dict[str, torch.Tensor] = {}
    for key, expert in packed.items():
        for projection in PROJECTIONS:
            name, part = names[key][projection], getattr(expert, projection)
            tensors[f"{name}.codes"] = part.codes
            tensors[f"{name}.scales"] = part.scales
            if part.zero_points is not None:
                tensors[f"{name}.zero_points"] = part.zero_points
        for projection, bias in zip(PROJECTIONS, expert.biases, strict=False):
            tensors[names[key][f"{projection}_bias"]] = bias
    return tensors
