"""Step: one pass over the checkpoint: profile, quantize and split, one layer resident at a time.

    hidden states of target and draft ──> layer ──> hidden states, routes of both
                                           │
                       experts ──> stand-ins, shards
                       plain inputs, scores ──> predictors of layers before it

Called by: pipeline.  Next: profile_routing, quantize_draft, split_experts, fit_predictor, progress.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from specter_build.checkpoint import Checkpoint
from specter_build.fit_predictor import (
    Observation,
    PredictorQuality,
    choice_scores,
    fit_predictor,
    num_fitting_rows,
    observe_early,
    open_layers,
)
from specter_build.open_inputs import Inputs
from specter_build.plan_placement import hottest_first
from specter_build.profile_routing import HeadComparison, LayerPass, LayerRunner
from specter_build.progress import Progress
from specter_build.quantize_draft import ExpertInputs, draft_tensors, quantize_layer
from specter_build.quantizers import is_finite
from specter_build.report import LayerProfile
from specter_build.split_experts import split_layer
from specter_runtime.errors import CheckpointError, name_list
from specter_runtime.experts import ExpertKey, PackedExperts, ResidentExperts, Routing
from specter_runtime.manifest import PREDICTOR_FILE, draft_path, model_path
from specter_runtime.model import DecoderLayer
from specter_runtime.shards import write_tensors

logger = logging.getLogger(__name__)

LayerObserver = Callable[[int, int], None]
"""Told how many layers are done, of how many."""


def convert_layers(
    inputs: Inputs, work: Path, on_layer: LayerObserver
) -> tuple[dict[int, LayerProfile], HeadComparison, dict[int, PredictorQuality]]:
    """Convert all layers, or those that an earlier build of the same inputs has left to do.

    Args:
        inputs: what to convert.
        work: where files go.
        on_layer: told after each layer, and at the start if some are done already.

    Returns:
        The profile of each routed layer, the comparison of both streams' predictions, and the
        quality of each layer's predictor.
    """
    checkpoint, config = inputs.checkpoint, inputs.checkpoint.config
    progress = Progress(work, inputs.digest)
    for sub_folder in ("model", "draft", "experts"):
        (work / sub_folder).mkdir(exist_ok=True)
    runner = LayerRunner(config, checkpoint.family.bundle_names(), inputs.sequences.shape[1])
    common = _read_dense(checkpoint, None)
    hidden = progress.hidden()
    if hidden is None:
        write_tensors(work / model_path(None), common, {})
        embedded = runner.embed(inputs.sequences, common)
        hidden = (embedded, embedded)
    else:
        logger.info("going on from layer %d", progress.next_layer + 1)
    still_open = open_layers(config, inputs.layers_ahead, progress.next_layer)
    observations = progress.observations(still_open)
    on_layer(progress.next_layer, config.num_hidden_layers)
    for index in range(progress.next_layer, config.num_hidden_layers):
        started = time.perf_counter()
        hidden, profile = _convert_layer(inputs, work, runner, index, hidden, observations)
        _fit_predictors(inputs, progress, index, observations)
        progress.save(index, *hidden, profile, observations)
        recall = "" if profile is None else f", recall {profile.recall():.4f}"
        logger.info(
            "layer %d of %d: %.1f s%s",
            index + 1,
            config.num_hidden_layers,
            time.perf_counter() - started,
            recall,
        )
        on_layer(index + 1, config.num_hidden_layers)
    predictors, qualities = progress.predictors()
    if predictors:
        write_tensors(work / PREDICTOR_FILE, predictors, {})
    return progress.profiles, runner.compare_heads(*hidden, common), qualities


def _read_dense(checkpoint: Checkpoint, layer: int | None) -> dict[str, torch.Tensor]:
    """The resident tensors of a layer (or of no layer).

    Raises:
        CheckpointError: naming all that hold NaN or infinity.
    """
    tensors = checkpoint.dense_tensors(layer)
    wrong = [name for name, tensor in tensors.items() if not is_finite(tensor)]
    if wrong:
        raise CheckpointError(
            f"{checkpoint.folder}: tensors hold NaN or infinity: {name_list(wrong)}"
        )
    return tensors


def _convert_layer(
    inputs: Inputs,
    work: Path,
    runner: LayerRunner,
    index: int,
    hidden: tuple[torch.Tensor, torch.Tensor],
    observations: list[Observation],
) -> tuple[tuple[torch.Tensor, torch.Tensor], LayerProfile | None]:
    """Hidden states behind the layer and its profile (None if it is dense); writes its files.

    Where there are predictors to fit, the layer's observation joins those before it.
    """
    checkpoint, config = inputs.checkpoint, inputs.checkpoint.config
    dense = _read_dense(checkpoint, index)
    write_tensors(work / model_path(index), dense, {})
    layer = runner.bind_layer(index, dense)
    keys = [ExpertKey(index, e) for e in range(config.num_experts) if index in config.moe_layers]
    experts = {key: checkpoint.expert(key) for key in keys}
    target = runner.run(layer, hidden[0], ResidentExperts(experts))
    routing = target.routing
    if routing is None:
        return (target.hidden, runner.run(layer, hidden[1], ResidentExperts({})).hidden), None
    if inputs.layers_ahead:
        observations.append(_observe(inputs, layer, target, routing, observations))
    expert_inputs = ExpertInputs(target.mlp_input, routing, config.swiglu_limit)
    widths = inputs.bits[config.moe_layers.index(index)]
    quantized = quantize_layer(experts, inputs.recipe.draft, widths, expert_inputs, inputs.given)
    cached = {key: experts[key] for key in _planned_residents(inputs, routing)}
    draft_experts = PackedExperts({**cached, **quantized.packed})
    draft = runner.run(layer, hidden[1], draft_experts)
    assert draft.routing is not None, "a routed layer gives a routing"
    stored_names = {key: checkpoint.stored_names(key) for key in keys}
    split_layer(work, experts, stored_names, inputs.estimate.encoding)
    if quantized.packed:
        names = {key: checkpoint.matrix_names(key) for key in keys}
        write_tensors(work / draft_path(index), draft_tensors(quantized.packed, names), {})
    draft_routing = replace(draft.routing, router_probs=None)  # the target's are kept, for replays
    profile = LayerProfile(
        routing, draft_routing, quantized.relative_error, quantized.fallback_experts
    )
    return (target.hidden, draft.hidden), profile


def _observe(
    inputs: Inputs,
    layer: DecoderLayer,
    target: LayerPass,
    routing: Routing,
    earlier: Sequence[Observation],
) -> Observation:
    config, selected = inputs.checkpoint.config, routing.selected_experts
    num_fitted = num_fitting_rows(*inputs.sequences.shape)
    return Observation(
        layer.index,
        target.plain_input,
        choice_scores(target.mlp_input, layer.tensors, config),
        selected,
        observe_early(earlier, layer.tensors, config, selected, num_fitted),
    )


def _fit_predictors(
    inputs: Inputs, progress: Progress, index: int, observations: list[Observation]
) -> None:
    """Fit those of layers that waited for layer ``index``; takes their observations out."""
    still_open = open_layers(inputs.checkpoint.config, inputs.layers_ahead, index + 1)
    num_fitted = num_fitting_rows(*inputs.sequences.shape)
    while observations and observations[0].layer not in still_open:
        source = observations.pop(0)
        if observations:  # the last routed layer has none behind it
            targets = observations[: inputs.layers_ahead]
            progress.save_predictor(fit_predictor(source, targets, num_fitted))


def _planned_residents(inputs: Inputs, routing: Routing) -> list[ExpertKey]:
    """A layer's share of the slots, filled with what the target uses most of it.

    These serve the draft in full at run time. Where there are stand-ins, they are profiled instead:
    the report says what they are worth, and sampling drafts with them alone. The plan shares slots
    out over all layers by use, which is not known before the last one; here all have equally many.
    """
    config, memory = inputs.checkpoint.config, inputs.estimate.memory
    share = memory[max(memory)].num_slots // len(config.moe_layers)
    counts = torch.bincount(routing.selected_experts.flatten(), minlength=config.num_experts)
    return hottest_first({routing.layer: counts})[:share]
