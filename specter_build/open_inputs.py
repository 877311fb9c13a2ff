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
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

import specter_build
import specter_runtime
from specter_build.calibrated_quantizers import PACKAGES
from specter_build.calibration import CalibrationText, make_sequences, read_texts
from specter_build.checkpoint import CARRIED_FILES, Checkpoint
from specter_build.estimate import Estimate, check_memory, estimate_checkpoint
from specter_build.given_draft import BITS, GivenDraft
from specter_build.quantize_draft import check_method
from specter_build.quantizers import GridFormat
from specter_build.recipe import DraftRecipe, HardwareRecipe, Recipe
from specter_build.write_bundle import work_path
from specter_runtime import __version__
from specter_runtime.bundle_loader import file_sha256
from specter_runtime.errors import CapacityError, CheckpointError, RecipeError, SpecterError
from specter_runtime.hardware import Hardware, load_hardware, shipped
from specter_runtime.manifest import FORMAT_VERSION, FileEntry
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import format_bytes

GIVEN = "draft/"
"""Begins the names, among a build's source files, of those of a given draft."""


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
    estimate: Estimate
    hardware: Hardware
    given: GivenDraft | None = None

    @property
    def bits(self) -> tuple[tuple[int, ...], ...]:
        """Width of each stand-in by routed layer."""
        return self.recipe.draft.widths(self.checkpoint.config)

    @property
    def model_sha256(self) -> str:
        """SHA-256 over the checkpoint's files."""
        own = {n: e.sha256 for n, e in self.source_files.items() if not n.startswith(GIVEN)}
        return hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()

    @property
    def tokens_sha256(self) -> str:
        """SHA-256 over the calibration sequences, as little-endian 64-bit ids."""
        return hashlib.sha256(self.sequences.numpy().astype("<i8").tobytes()).hexdigest()

    @property
    def layers_ahead(self) -> int:
        """Routed layers that predictors speak of; 0: none are fitted.

        None are where every token uses every expert.
        """
        config = self.checkpoint.config
        is_choice = config.num_experts > config.num_experts_per_tok
        return self.recipe.predictor.layers_ahead if is_choice else 0

    @property
    def digest(self) -> str:
        """SHA-256 over everything that shapes the bundle."""
        sources = {name: entry.sha256 for name, entry in self.source_files.items()}
        parts = [code_sha256(), FORMAT_VERSION, self.recipe.digest(), self.calibration.sha256]
        parts += [self.model_name, asdict(self.hardware)]
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
    hardware = resolve_hardware(recipe, folder)
    sizes = estimate_checkpoint(recipe, checkpoint)
    check_memory(sizes.build_bytes)
    calibration = read_texts(recipe.calibration, folder)
    eos_token_id = _eos_token_id(model_folder / "config.json", config.vocab_size)
    sequences = make_sequences(calibration.texts, tokenizer, recipe.calibration, eos_token_id)
    paths = {path.name: path for path in checkpoint.files}
    paths |= {f"{GIVEN}{path.name}": path for path in (given.files if given else ())}
    source_files = {
        name: FileEntry(path.stat().st_size, file_sha256(path)) for name, path in paths.items()
    }
    is_local = (folder / recipe.model).is_dir()
    return Inputs(
        recipe=recipe,
        model_name=model_folder.name if is_local else recipe.model,
        checkpoint=checkpoint,
        tokenizer=tokenizer,
        calibration=calibration,
        sequences=sequences,
        source_files=source_files,
        estimate=sizes,
        hardware=hardware,
        given=given,
    )


def resolve_hardware(recipe: Recipe, folder: Path) -> Hardware:
    """The machine to plan for.

    Raises:
        RecipeError: there is no such profile, or it is malformed; names the file and the key.
    """
    if isinstance(recipe.hardware, HardwareRecipe):
        return recipe.hardware.profile()
    name = recipe.hardware
    try:
        return load_hardware(name if name in shipped() else str(folder / name))
    except SpecterError as exc:
        raise RecipeError(f"hardware: {exc}") from exc


def _eos_token_id(path: Path, vocab_size: int) -> int | None:
    """The first end token of a ``config.json``; None if it has none."""
    eos = json.loads(path.read_text("utf-8")).get("eos_token_id")
    listed = eos if isinstance(eos, list) else [] if eos is None else [eos]
    are_ids = all(type(token_id) is int and 0 <= token_id < vocab_size for token_id in listed)
    if eos == [] or not are_ids:
        raise CheckpointError(
            f"{path}: eos_token_id is {eos!r}, expected ids below vocab_size {vocab_size}"
        )
    return listed[0] if listed else None


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
    return GivenDraft(source.resolve(), checkpoint.config, checkpoint.matrix_names, form)


def resolve_model(recipe: Recipe, folder: Path) -> Path:
    """The checkpoint's folder; a hub id is downloaded.

    Raises:
        RecipeError: it is neither a folder nor a hub id that can be had.
    """
    path = folder / recipe.model
    if path.is_dir():
        return path.resolve()
    patterns = ["*.safetensors", "*.safetensors.index.json", *CARRIED_FILES]
    return _download(recipe, folder, patterns)


def _download(recipe: Recipe, folder: Path, patterns: list[str]) -> Path:
    """Files of a hub id, through the hub's own cache."""
    if recipe.model.count("/") != 1 or recipe.model.startswith((".", "/")):
        path = folder / recipe.model
        raise RecipeError(f"model: {path} is no folder and {recipe.model!r} is no hub id")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                recipe.model,
                revision=recipe.revision,
                allow_patterns=patterns,
                ignore_patterns=["*/*"],  # a star takes in folders: other formats
            )
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as exc:
        raise RecipeError(
            f"model: {recipe.model!r} is no folder under {folder} and could not be downloaded from "
            f"the hub: {exc}"
        ) from exc


def code_sha256() -> str:
    """SHA-256 over the source of both packages: another builder may build other bytes."""
    digest = hashlib.sha256()
    for module in (specter_build, specter_runtime):
        folder = Path(module.__path__[0])
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.relative_to(folder).as_posix().encode() + b"\0")
            digest.update(path.read_bytes())
    return digest.hexdigest()


def tool_versions(draft: DraftRecipe) -> dict[str, str]:
    """Versions of what shapes the bytes of a bundle."""
    names = ("torch", "tokenizers", "numpy", *(PACKAGES if draft.is_calibrated else ()))
    return {
        "specter": __version__,
        "python": platform.python_version(),
        **{name: version(name) for name in names},
    }


def model_folder_for_estimate(recipe: Recipe, folder: Path) -> Path:
    """The checkpoint's folder; of a hub id only ``config.json`` is downloaded."""
    path = folder / recipe.model
    return path if path.is_dir() else _download(recipe, folder, ["config.json"])


def check_disk(sizes: Estimate, destination: Path) -> None:
    """Refuse a build for which the disk has no room, beside what an earlier one has left."""
    existing = next(parent for parent in destination.parents if parent.exists())
    left = sum(path.stat().st_size for path in work_path(destination).rglob("*") if path.is_file())
    needed = sizes.bundle_bytes + sizes.progress_bytes - left
    free = shutil.disk_usage(existing).free
    if needed > free:
        raise CapacityError(
            f"output: {destination} needs {format_bytes(needed)} more, of which "
            f"{format_bytes(sizes.progress_bytes)} until the build has ended; "
            f"{format_bytes(free)} are free"
        )
