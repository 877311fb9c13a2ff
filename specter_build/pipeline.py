"""The build, from recipe to bundle: this file is its table of contents.

    recipe ──> checkpoint, calibration          everything is checked before a byte is written
                    │
                    v   one layer at a time
        profile_routing (target and draft) <── quantize_draft
                    │          split_experts
                    v
         report ──> plan_placement ──> write_bundle ──> audit

Called by: cli.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import resource
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from specter_runtime import __version__
from specter_runtime.bundle_loader import file_sha256
from specter_runtime.config import ModelConfig
from specter_runtime.errors import CapacityError, RecipeError
from specter_runtime.experts import ExpertKey, PackedExperts, ResidentExperts, expert_nbytes
from specter_runtime.manifest import (
    FORMAT,
    FORMAT_VERSION,
    MANIFEST_FILE,
    PLAN_FILE,
    DraftFormat,
    ExpertFormat,
    FileEntry,
    Manifest,
    Plan,
    draft_path,
    model_path,
)
from specter_runtime.memory import MemoryUse, dense_nbytes, divide_budget, draft_nbytes
from specter_runtime.shards import ALIGNMENT, write_tensors
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import format_bytes

from specter_build.audit import audit
from specter_build.calibration import CalibrationText, make_sequences, read_texts
from specter_build.checkpoint import CARRIED_FILES, Checkpoint
from specter_build.plan_placement import CANDIDATES, Evidence, plan_placement, slot_nbytes
from specter_build.profile_routing import COMPUTE_DTYPE, HeadComparison, LayerRunner
from specter_build.quantize_draft import draft_tensors, quantize_layer
from specter_build.recipe import Recipe
from specter_build.report import LayerProfile, make_report, summarize_layer
from specter_build.split_experts import split_layer
from specter_build.write_bundle import (
    TIMINGS_FILE,
    UNHASHED_FILES,
    existing_digest,
    hash_files,
    move_into_place,
    work_folder,
    write_text,
)

logger = logging.getLogger(__name__)

REPORT_FILE = "report.json"
ROUTES_FILE = "routes.safetensors"


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a build reads, opened and checked."""

    recipe: Recipe
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    calibration: CalibrationText
    sequences: torch.Tensor
    source_files: dict[str, FileEntry]
    dtype: str
    memory: dict[int, MemoryUse]

    @property
    def bits(self) -> tuple[tuple[int, ...], ...]:
        """Width of each stand-in by routed layer."""
        config = self.checkpoint.config
        return ((self.recipe.draft.bits,) * config.num_experts,) * len(config.moe_layers)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the bundle."""
        sources = {name: entry.sha256 for name, entry in self.source_files.items()}
        parts = [__version__, FORMAT_VERSION, self.recipe.digest(), self.calibration.sha256]
        content = json.dumps([*parts, sources, tool_versions()], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class BuildResult:
    """Where the bundle is, what its report says, and whether there was anything to do."""

    destination: Path
    report: dict[str, Any]
    plan: Plan
    was_built: bool


def build(recipe: Recipe, folder: Path) -> BuildResult:
    """Build the bundle that a recipe describes; does nothing if it is there already.

    Args:
        recipe: what to build.
        folder: what the recipe's relative paths are relative to.

    Raises:
        SpecterError: recipe, checkpoint, disk or memory will not do; nothing is left behind.
    """
    started = time.perf_counter()
    destination = (folder / recipe.output).resolve()
    built_digest = existing_digest(destination)
    inputs = open_inputs(recipe, folder)
    if built_digest == inputs.digest:
        report = json.loads((destination / REPORT_FILE).read_text("utf-8"))
        plan = Plan.from_dict(json.loads((destination / PLAN_FILE).read_text("utf-8")), PLAN_FILE)
        return BuildResult(destination, report, plan, was_built=False)
    check_disk(inputs, destination)
    with work_folder(destination) as work, torch.inference_mode():
        profiles, heads = convert_layers(inputs, work)
        report, plan = conclude(inputs, profiles, heads)
        write_records(inputs, work, profiles, heads, report, plan)
        timings = {
            "wall_seconds": time.perf_counter() - started,
            "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
        write_text(work / TIMINGS_FILE, _json(timings))
        write_text(work / MANIFEST_FILE, make_manifest(inputs, work).to_json())
        audit(work, inputs.checkpoint, inputs.sequences[0].tolist())
        move_into_place(work, destination)
    return BuildResult(destination, report, plan, was_built=True)


def open_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Open and check everything that a build reads."""
    model_folder = resolve_model(recipe, folder)
    checkpoint = Checkpoint(model_folder)
    config = checkpoint.config
    tokenizer = Tokenizer(model_folder)
    if tokenizer.vocab_size > config.vocab_size:
        raise RecipeError(
            f"{model_folder}: tokenizer.json has {tokenizer.vocab_size} ids, config.json has "
            f"vocab_size {config.vocab_size}; they do not belong together"
        )
    for name, length in (
        ("calibration.sequence_length", recipe.calibration.sequence_length),
        ("plan.max_context_tokens", recipe.plan.max_context_tokens),
    ):
        if length > config.max_position_embeddings:
            raise RecipeError(
                f"{name}: {length} is more than the model's max_position_embeddings, "
                f"{config.max_position_embeddings}"
            )
    calibration = read_texts(recipe.calibration, folder)
    eos = json.loads((model_folder / "config.json").read_text("utf-8")).get("eos_token_id")
    eos_token_id = eos[0] if isinstance(eos, list) else eos
    sequences = make_sequences(calibration.texts, tokenizer, recipe.calibration, eos_token_id)
    source_files = {
        path.name: FileEntry(path.stat().st_size, file_sha256(path)) for path in checkpoint.files
    }
    dtype = checkpoint.dense_dtype if recipe.plan.dtype == "auto" else recipe.plan.dtype
    memory = divide_memory(recipe, config, checkpoint.expert_dtype, dtype)
    return Inputs(
        recipe, checkpoint, tokenizer, calibration, sequences, source_files, dtype, memory
    )


def resolve_model(recipe: Recipe, folder: Path) -> Path:
    """The checkpoint's folder; a hub id is downloaded.

    Raises:
        RecipeError: it is neither a folder nor a hub id that can be had.
    """
    path = folder / recipe.model
    if path.is_dir():
        return path.resolve()
    if recipe.model.count("/") != 1 or recipe.model.startswith((".", "/")):
        raise RecipeError(f"model: {path} is no folder and {recipe.model!r} is no hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        patterns = ["*.safetensors", "*.safetensors.index.json", *CARRIED_FILES]
        return Path(
            snapshot_download(recipe.model, revision=recipe.revision, allow_patterns=patterns)
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as exc:
        raise RecipeError(
            f"model: {recipe.model!r} is no folder under {folder} and could not be downloaded from "
            f"the hub: {exc}"
        ) from exc


def divide_memory(
    recipe: Recipe, config: ModelConfig, expert_dtype: str, dtype: str
) -> dict[int, MemoryUse]:
    """Number of draft tokens -> division of the budget, for every candidate that fits.

    Raises:
        CapacityError: none fits; states the minimum.
    """
    asked = recipe.plan.num_draft_tokens
    bits = ((recipe.draft.bits,) * config.num_experts,) * len(config.moe_layers)
    divisions: dict[int, MemoryUse] = {}
    refusal: CapacityError | None = None
    for candidate in CANDIDATES if asked == "auto" else (asked,):
        try:
            divisions[candidate] = divide_budget(
                config,
                memory_budget_bytes=recipe.plan.memory_budget,
                draft_bits=bits if candidate else (),
                group_size=recipe.draft.group_size,
                symmetric=recipe.draft.symmetric,
                dtype=dtype,
                max_context_tokens=recipe.plan.max_context_tokens,
                prompt_chunk_tokens=PROMPT_CHUNK_TOKENS,
                num_draft_tokens=candidate,
                slot_bytes=slot_nbytes(config, expert_dtype),
            )
        except CapacityError as exc:
            refusal = refusal or exc
    if not divisions and refusal is not None:
        raise CapacityError(f"plan.memory_budget: {refusal}")
    return divisions


def bundle_nbytes(inputs: Inputs) -> int:
    """Bytes that the bundle will take, without headers and JSON."""
    config, draft = inputs.checkpoint.config, inputs.recipe.draft
    num_experts = len(config.moe_layers) * config.num_experts
    shards = num_experts * (expert_nbytes(config, inputs.checkpoint.expert_dtype) + ALIGNMENT)
    stand_ins = draft_nbytes(config, inputs.bits, draft.group_size, draft.symmetric)
    return shards + stand_ins + dense_nbytes(config, inputs.checkpoint.dense_dtype)


def check_disk(inputs: Inputs, destination: Path) -> None:
    """Refuse a build for which the disk has no room."""
    existing = next(parent for parent in destination.parents if parent.exists())
    needed, free = bundle_nbytes(inputs), shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"output: {destination} needs {format_bytes(needed)}, {format_bytes(free)} are free"
        )


def convert_layers(inputs: Inputs, work: Path) -> tuple[dict[int, LayerProfile], HeadComparison]:
    """Profile, quantize and split, one layer resident at a time."""
    checkpoint, config = inputs.checkpoint, inputs.checkpoint.config
    names = checkpoint.family.bundle_names()
    for sub_folder in ("model", "draft", "experts"):
        (work / sub_folder).mkdir()
    runner = LayerRunner(config, names, inputs.sequences.shape[1])
    common = checkpoint.dense_tensors(None)
    write_tensors(work / model_path(None), common, {})
    target = draft = runner.embed(inputs.sequences, common)
    profiles: dict[int, LayerProfile] = {}
    for index in range(config.num_hidden_layers):
        started = time.perf_counter()
        dense = checkpoint.dense_tensors(index)
        write_tensors(work / model_path(index), dense, {})
        layer = runner.bind_layer(index, dense)
        keys = [ExpertKey(index, e) for e in range(config.num_experts)]
        experts = {key: checkpoint.expert(key) for key in keys if index in config.moe_layers}
        quantized = quantize_layer(experts, inputs.recipe.draft)
        target, target_routing = runner.run(layer, target, ResidentExperts(experts))
        stand_ins = PackedExperts(quantized.packed, COMPUTE_DTYPE)
        draft, draft_routing = runner.run(layer, draft, stand_ins)
        if target_routing is not None and draft_routing is not None:
            expert_names = {key: checkpoint.expert_names(key) for key in experts}
            split_layer(work, experts, expert_names)
            tensors = draft_tensors(quantized.packed, expert_names)
            write_tensors(work / draft_path(index), tensors, {})
            profiles[index] = LayerProfile(target_routing, draft_routing, quantized.relative_error)
        elapsed = time.perf_counter() - started
        logger.info("layer %d of %d: %.1f s", index + 1, config.num_hidden_layers, elapsed)
    return profiles, runner.compare_heads(target, draft, common)


def conclude(
    inputs: Inputs, profiles: Mapping[int, LayerProfile], heads: HeadComparison
) -> tuple[dict[str, Any], Plan]:
    """Report and plan, from what calibration showed."""
    checkpoint, recipe, config = inputs.checkpoint, inputs.recipe, inputs.checkpoint.config
    draft, num_sequences = recipe.draft, len(inputs.sequences)
    layers = [summarize_layer(profile, num_sequences, config) for profile in profiles.values()]
    num_experts = len(config.moe_layers) * config.num_experts
    sizes = {
        "dense_bytes": dense_nbytes(config, checkpoint.dense_dtype),
        "draft_bytes": draft_nbytes(config, inputs.bits, draft.group_size, draft.symmetric),
        "shard_bytes": num_experts * expert_nbytes(config, checkpoint.expert_dtype),
    }
    calibration = {
        "sources": inputs.calibration.sources,
        "sha256": inputs.calibration.sha256,
        **recipe.calibration.model_dump(exclude={"files"}),
    }
    report = make_report(config, layers, heads, draft.model_dump(), sizes, calibration)
    shape = (num_sequences, -1, config.num_experts_per_tok)
    evidence = Evidence(
        routes={i: profile.target.selected_experts.view(shape) for i, profile in profiles.items()},
        counts={layer["layer"]: torch.tensor(layer["expert_counts"]) for layer in layers},
        acceptance_by_position=report["acceptance"]["by_position"],
        recall=report["recall"]["mean"],
    )
    context = recipe.plan.max_context_tokens
    plan = plan_placement(config, inputs.memory, evidence, recipe.hardware, inputs.dtype, context)
    report["memory"] = asdict(inputs.memory[plan.num_draft_tokens])
    return report, plan


def write_records(
    inputs: Inputs,
    work: Path,
    profiles: Mapping[int, LayerProfile],
    heads: HeadComparison,
    report: Mapping[str, Any],
    plan: Plan,
) -> None:
    """Routes, report, plan and the checkpoint's own files."""
    shape = (len(profiles), *inputs.sequences.shape, -1)
    routes = {
        "token_ids": inputs.sequences.to(torch.int32),
        "layers": torch.tensor(list(profiles), dtype=torch.int32),
        "draft_agrees": heads.agrees,
    }
    for name in ("target", "draft"):
        routings = [getattr(profile, name) for profile in profiles.values()]
        experts = torch.stack([r.selected_experts.to(torch.int16) for r in routings])
        weights = torch.stack([r.routing_weights.to(torch.float16) for r in routings])
        routes[f"{name}.selected_experts"] = experts.view(shape)  # [L, N, T, K]
        routes[f"{name}.routing_weights"] = weights.view(shape)
    write_tensors(work / ROUTES_FILE, routes, {})
    write_text(work / PLAN_FILE, plan.to_json())
    write_text(work / REPORT_FILE, _json(report))
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
            dtype=checkpoint.expert_dtype,
            encoding="raw",
            data_start=ALIGNMENT,
            nbytes=expert_nbytes(checkpoint.config, checkpoint.expert_dtype),
        ),
        files=hash_files(work),
        unhashed_files=UNHASHED_FILES,
        recipe=recipe.model_dump(mode="json", exclude={"output"}),
        build_digest=inputs.digest,
        seed=recipe.calibration.seed,
        tools=tool_versions(),
        source_files=inputs.source_files,
    )


def tool_versions() -> dict[str, str]:
    """Versions of what shapes the bytes of a bundle."""
    names = ("torch", "tokenizers", "numpy")
    return {
        "specter": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"
