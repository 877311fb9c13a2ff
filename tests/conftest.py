"""Fixtures that cost seconds, made once a session. No network, no downloads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specter_build.pipeline import build
from specter_build.recipe import Recipe
from tests.checkpoints import make_checkpoint, recipe_dict

# On tensors this small, threads only wait for each other: a build takes four times as long.
torch.set_num_threads(1)

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Qwen3-MoE checkpoint: 3 layers, 8 experts, top-2, float32. Read only."""
    folder = tmp_path_factory.mktemp("tiny-checkpoint")
    make_checkpoint(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle built from ``tiny_checkpoint`` with a 4-bit draft. Read only: copy to damage it."""
    output = tmp_path_factory.mktemp("tiny-bundle") / "bundle"
    build(Recipe.model_validate(recipe_dict(tiny_checkpoint, output)), output.parent)
    return output


@pytest.fixture(scope="session")
def demo_checkpoint() -> Path:
    """The trained demo checkpoint that is part of the repository."""
    return REPOSITORY / "artifacts" / "demo-moe"


@pytest.fixture(scope="session")
def demo_bundle(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of the demo checkpoint, calibrated briefly. Read only."""
    output = tmp_path_factory.mktemp("demo-bundle") / "bundle"
    recipe = recipe_dict(
        demo_checkpoint,
        output,
        draft={"bits": 4, "group_size": 32},
        calibration={"num_sequences": 4, "sequence_length": 128},
        plan={"memory_budget": "40MiB"},
    )
    build(Recipe.model_validate(recipe), output.parent)
    return output
