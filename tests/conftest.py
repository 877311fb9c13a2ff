"""Fixtures that cost seconds, made once a session, and one that runs commands. No network."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.torch_environment import TORCH_ENVIRONMENT
from tests.checkpoints import make_checkpoint, recipe_dict
from tests.commands import Command, Outcome

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


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Runs an entry point with arguments; a traceback would be an exception here."""
    for name in TORCH_ENVIRONMENT:
        monkeypatch.setenv(name, "1")  # else the command would set it for good

    def run(main: Callable[[], NoReturn], *arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["specter", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            main()
        captured = capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Outcome(caught.value.code, captured.out, captured.err)

    return run
