"""The build, from recipe to bundle: this file is its table of contents.

    recipe ──> open_inputs                      everything is checked before a byte is written
                    │
                    v   convert_layers: one layer at a time, resumable
        profile_routing (target and draft) <── quantize_draft
                    │          split_experts, fit_predictor
                    v
         report ──> plan_placement ──> render_report ──> write_bundle ──> audit

Called by: cli.  Next: open_inputs, convert_layers.
"""

from __future__ import annotations

import json
import logging
import resource
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from specter_build.audit import audit
from specter_build.checkpoint import CARRIED_FILES
from specter_build.convert_layers import LayerObserver, convert_layers
from specter_build.estimate import divide_for_predictors, divide_memory
from specter_build.fit_predictor import PredictorQuality
from specter_build.open_inputs import Inputs, check_disk, open_inputs, tool_versions
from specter_build.plan_placement import Evidence, plan_placement, ways_to_run
from specter_build.profile_routing import HeadComparison
from specter_build.read_report import REPORT_FILE
from specter_build.recipe import Recipe
from specter_build.render_report import render
from specter_build.report import LayerProfile, make_report, summarize_layer, summarize_predictors
from specter_build.split_experts import shard_sizes
from specter_build.write_bundle import (
    TIMINGS_FILE,
    UNHASHED_FILES,
    existing_digest,
    hash_files,
    move_into_place,
    remove_leftovers,
    work_folder,
    write_text,
)
from specter_runtime.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PLAN_FILE,
    DraftFormat,
    ExpertFormat,
    Manifest,
    Plan,
    read_json,
)
from specter_runtime.memory import draft_nbytes
from specter_runtime.shards import ALIGNMENT, align_up, write_tensors
from specter_runtime.simulated_bundle import ROUTES_FILE, make_shape, make_texts

logger = logging.getLogger(__name__)

REPORT_PAGE_FILE = "report.html"


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where the bundle is, what its records say, and whether there was anything to do."""

    destination: Path
    report: dict[str, Any]
    plan: Plan
    timings: dict[str, float]
    was_built: bool


def build(
    recipe: Recipe, folder: Path, on_layer: LayerObserver = lambda done, total: None
) -> BuildResult:
    """Build the bundle that a recipe describes; does nothing if it is there already.

    A build that was killed, or that failed underway, leaves a hidden work folder beside its
    destination from which the next build of the same inputs goes on.

    Args:
        recipe: what to build.
        folder: what the recipe's relative paths are relative to.
        on_layer: told of each finished layer.

    Raises:
        SpecterError: recipe, checkpoint, disk or memory will not do.
    """
    started = time.perf_counter()
    destination = (folder / recipe.output).resolve()
    built_digest = existing_digest(destination)
    inputs = open_inputs(recipe, folder)
    if built_digest == inputs.digest and (destination / TIMINGS_FILE).is_file():
        plan = Plan.from_dict(read_json(destination / PLAN_FILE), PLAN_FILE)
        report, timings = (read_json(destination / name) for name in (REPORT_FILE, TIMINGS_FILE))
        remove_leftovers(destination)
        return BuildResult(destination, report, plan, timings, was_built=False)
    check_disk(inputs.estimate, destination)
    with work_folder(destination) as work, torch.inference_mode():
        profiles, heads, predictors = convert_layers(inputs, work, on_layer)
        routes = record_routes(inputs, profiles, heads)
        report, plan = conclude(inputs, profiles, heads, predictors, routes, shard_sizes(work))
        write_records(inputs, work, routes, report, plan)
        timings = {
            "wall_seconds": time.perf_counter() - started,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        write_text(work / TIMINGS_FILE, _json(timings))
        write_text(work / MANIFEST_FILE, make_manifest(inputs, work).to_json())
        audit(work, inputs.checkpoint, inputs.sequences[0].tolist(), inputs.estimate.build_bytes)
        move_into_place(work, destination)
    return BuildResult(destination, report, plan, timings, was_built=True)


def conclude(
    inputs: Inputs,
    profiles: Mapping[int, LayerProfile],
    heads: HeadComparison,
    predictors: Mapping[int, PredictorQuality],
    routes: Mapping[str, torch.Tensor],
    shard_bytes: Sequence[int],
) -> tuple[dict[str, Any], Plan]:
    """Report and plan, from what calibration showed and how large each shard's data came out.

    ``routes`` are those of ``record_routes``.
    """
    checkpoint, recipe, config = inputs.checkpoint, inputs.recipe, inputs.checkpoint.config
    draft, num_sequences = recipe.draft, len(inputs.sequences)
    layers = [summarize_layer(profile, num_sequences, config) for profile in profiles.values()]
    numbers, slot_bytes = checkpoint.expert_numbers, align_up(max(shard_bytes))
    division = recipe, config, numbers, inputs.estimate.dtype, slot_bytes
    sizes = {
        "dense_bytes": checkpoint.dense_nbytes,
        "draft_bytes": draft_nbytes(
            config, inputs.bits, draft.group_size, draft.symmetric, checkpoint.expert_numbers
        ),
        "shard_bytes": sum(shard_bytes),
    }
    calibration = {
        "sources": inputs.calibration.sources,
        "sha256": inputs.calibration.sha256,
        "tokens_sha256": inputs.tokens_sha256,
        **recipe.calibration.model_dump(exclude={"files"}),
    }
    asked = recipe.settings()["draft"]
    if draft.is_calibrated:
        asked["min_tokens"] = draft.required_tokens(config.moe_intermediate_size)
    report = make_report(
        config, checkpoint.left_out, layers, heads, asked, inputs.bits, sizes, calibration
    )
    report["model"] = {"name": inputs.model_name, "sha256": inputs.model_sha256}
    report["predictor"] = summarize_predictors(predictors, inputs.layers_ahead)
    evidence = Evidence(
        texts=make_texts(routes),
        counts={layer["layer"]: torch.tensor(layer["expert_counts"]) for layer in layers},
        recall={
            "fitted": report["predictor"]["recall"],
            "router": report["predictor"]["early_router"][:1],
        },
    )
    make = partial(
        make_shape,
        config,
        inputs.estimate.dtype,
        max(shard_bytes),
        is_packed=inputs.estimate.encoding == "packed",
    )
    ways = ways_to_run(divide_memory(*division), divide_for_predictors(*division), evidence.recall)
    plan = plan_placement(
        {False: make(0), True: make(sizes["draft_bytes"])},
        ways,
        evidence,
        inputs.hardware,
        inputs.estimate.dtype,
        recipe.plan.max_context_tokens,
    )
    report["memory"] = asdict(ways[plan.chosen].memory)
    report["plan"] = {
        "num_draft_tokens": plan.num_draft_tokens,
        "seconds_per_token": plan.predicted[plan.chosen],
        "chosen": plan.chosen,
        "reason": plan.reason,
        "hardware": plan.hardware,
    }
    return report, plan


def record_routes(
    inputs: Inputs, profiles: Mapping[int, LayerProfile], heads: HeadComparison
) -> dict[str, torch.Tensor]:
    """Both models' routes, by the names of the tensors that the bundle has them in."""
    shape = (len(profiles), *inputs.sequences.shape, -1)
    routes = {
        "token_ids": inputs.sequences.to(torch.int32),
        "layers": torch.tensor(list(profiles), dtype=torch.int32),
        "draft_agrees": heads.agrees,
        "draft_confidence": heads.confidence.to(torch.float16),
    }
    for name in ("target", "draft"):
        routings = [getattr(profile, name) for profile in profiles.values()]
        experts = torch.stack([r.selected_experts.to(torch.int16) for r in routings])
        weights = torch.stack([r.routing_weights.to(torch.float16) for r in routings])
        routes[f"{name}.selected_experts"] = experts.view(shape)  # [L, N, T, K]
        routes[f"{name}.routing_weights"] = weights.view(shape)
    probs = [p.target.router_probs for p in profiles.values() if p.target.router_probs is not None]
    routes["target.router_probs"] = torch.stack(probs).view(shape)  # [L, N, T, E]
    return routes


def write_records(
    inputs: Inputs,
    work: Path,
    routes: Mapping[str, torch.Tensor],
    report: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Routes, report, plan, the report's page and the checkpoint's own files."""
    write_tensors(work / ROUTES_FILE, routes, {})
    write_text(work / PLAN_FILE, plan.to_json())
    write_text(work / REPORT_FILE, _json(report))
    write_text(work / REPORT_PAGE_FILE, render(report, plan))
    for name in CARRIED_FILES:
        if (inputs.checkpoint.folder / name).is_file():
            shutil.copyfile(inputs.checkpoint.folder / name, work / name)


def make_manifest(inputs: Inputs, work: Path) -> Manifest:
    """The manifest over all files of the work folder."""
    checkpoint, recipe = inputs.checkpoint, inputs.recipe
    return Manifest(
        format=FORMAT,
        format_version=FORMAT_VERSION,
        model=checkpoint.config,
        tensor_names=checkpoint.family.bundle_names(),
        checkpoint_dtype=checkpoint.dense_dtype,
        draft=DraftFormat(
            method=recipe.draft.method,
            group_size=recipe.draft.group_size,
            symmetric=recipe.draft.symmetric,
            bits=inputs.bits,
        ),
        experts=ExpertFormat(
            numbers=checkpoint.expert_numbers,
            encoding=inputs.estimate.encoding,
            data_start=ALIGNMENT,
            nbytes=max(shard_sizes(work)),
        ),
        files=hash_files(work),
        unhashed_files=UNHASHED_FILES,
        recipe={"model": inputs.model_name, **recipe.settings()},
        build_digest=inputs.digest,
        seed=recipe.calibration.seed,
        tools=tool_versions(recipe.draft),
        source_files=inputs.source_files,
    )


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
