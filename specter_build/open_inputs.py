"""Step: open and check everything that a build reads, before it writes a byte.

Recipe, checkpoint, tokenizer, calibration text, memory budget, disk: what can be wrong is found
here.

Called by: pipeline.  Next: checkpoint, calibration.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from specter_build.calibrated_quantizers import PACKAGES
from specter_build.calibration import CalibrationText, make_sequences, read_texts
from specter_build.checkpoint import CARRIED_FILES, Checkpoint
from specter_build.given_draft import BITS, GivenDraft
from specter_build.plan_placement import CANDIDATES
from specter_build.quantize_draft import check_method
from specter_build.quantizers import GridFormat
from specter_build.recipe import DraftRecipe, Recipe
from specter_runtime import __version__
from specter_runtime.bundle_loader import file_sha256
from specter_runtime.config import ModelConfig
from specter_runtime.errors import CapacityError, RecipeError
from specter_runtime.experts import expert_nbytes
from specter_runtime.manifest import FORMAT_VERSION, FileEntry
from specter_runtime.memory import MemoryUse, dense_nbytes, divide_budget, draft_nbytes
from specter_runtime.shards import ALIGNMENT, align_up
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import format_bytes


@dataclass(frozen=True, slots=True)
class Inputs:
    """Everything a build reads, opened and checked."""

    recipe: Recipe
    model_name: str
    checkpoint: Checkpoint
    tokenizer: Tokenizer
    calibration: CalibrationText
    sequences: torch.Tensor
    source_files: dict[str, FileEntry]
    dtype: str
    memory: dict[int, MemoryUse]
    given: GivenDraft | None = None

    @property
    def bits(self) -> tuple[tuple[int, ...], ...]:
        """Width of each stand-in by routed layer."""
        return self.recipe.draft.widths(self.checkpoint.config)

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the bundle."""
        sources = {name: entry.sha256 for name, entry in self.source_files.items()}
        parts = [__version__, FORMAT_VERSION, self.recipe.digest(), self.calibration.sha256]
        parts.append(self.model_name)
        content = json.dumps([*parts, sources, tool_versions(self.recipe.draft)], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()


def open_inputs(recipe: Recipe, folder: Path) -> Inputs:
    """Open and check everything that a build reads."""
    model_folder = resolve_model(recipe, folder)
    checkpoint = Checkpoint(model_folder)
    config = checkpoint.config
    check_method(recipe.draft, config)
    given = open_given(recipe.draft, folder, checkpoint)
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
    paths = {path.name: path for path in checkpoint.files}
    paths |= {f"draft/{path.name}": path for path in (given.files if given else ())}
    source_files = {
        name: FileEntry(path.stat().st_size, file_sha256(path)) for name, path in paths.items()
    }
    dtype = checkpoint.dense_dtype if recipe.plan.dtype == "auto" else recipe.plan.dtype
    memory = divide_memory(recipe, config, checkpoint.expert_dtype, dtype)
    is_local = (folder / recipe.model).is_dir()
    return Inputs(
        recipe=recipe,
        model_name=model_folder.name if is_local else recipe.model,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        calibration=calibration,
        sequences=sequences,
        source_files=source_files,
        dtype=dtype,
        memory=memory,
        given=given,
    )


def open_given(draft: DraftRecipe, folder: Path, checkpoint: Checkpoint) -> GivenDraft | None:
    """The quantized checkpoint that the recipe takes its draft from, if it does.

    Raises:
        RecipeError: there is no such folder.
        CheckpointError: it is not what the recipe says.
    """
    if draft.source is None:
        return None
    source = folder / draft.source
    if not source.is_dir():
        raise RecipeError(f"draft.from: {source} is no folder")
    form = GridFormat(BITS, draft.group_size, draft.symmetric)
    return GivenDraft(source.resolve(), checkpoint.config, checkpoint.expert_names, form)


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
    bits = recipe.draft.widths(config)
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
                expert_dtype=expert_dtype,
                max_context_tokens=recipe.plan.max_context_tokens,
                prompt_chunk_tokens=PROMPT_CHUNK_TOKENS,
                num_draft_tokens=candidate,
                slot_bytes=align_up(expert_nbytes(config, expert_dtype)),
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
    expert_dtype = inputs.checkpoint.expert_dtype
    stand_ins = draft_nbytes(config, inputs.bits, draft.group_size, draft.symmetric, expert_dtype)
    return shards + stand_ins + dense_nbytes(config, inputs.checkpoint.dense_dtype)


def check_disk(inputs: Inputs, destination: Path) -> None:
    """Refuse a build for which the disk has no room."""
    existing = next(parent for parent in destination.parents if parent.exists())
    needed, free = bundle_nbytes(inputs), shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"output: {destination} needs {format_bytes(needed)}, {format_bytes(free)} are free"
        )


def tool_versions(draft: DraftRecipe) -> dict[str, str]:
    """Versions of what shapes the bytes of a bundle."""
    names = ("torch", "tokenizers", "numpy", *(PACKAGES if draft.is_calibrated else ()))
    return {
        "specter": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }
