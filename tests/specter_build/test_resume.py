"""``specter-build`` killed at any moment and run again ends with the bytes of an unbroken build.

A child is forked, since a new interpreter costs seconds, and kills itself just before its n-th call
that changes a file or a folder: moments are counted, so no clock decides what is tested.
"""

from __future__ import annotations

import multiprocessing
import random
import shutil
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import specter_build.pipeline
import specter_build.recipe  # noqa: F401  # both: else every child would import them
from specter_build.cli import main_build
from tests.checkpoints import make_checkpoint, recipe_dict, write_recipe

SMALL: Mapping[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_experts": 3,
    "moe_intermediate_size": 8,
    "mlp_only_layers": [1],  # both kinds of layers
}
CHANGES = ("write", "fsync", "mkdir", "rename", "replace", "unlink", "rmdir")
"""Names of the calls that are counted; what is buffered and not yet flushed is lost."""

NUM_KILLS = 10
FORK = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Builder:
    """What children build, and what is to come out.

    Attributes:
        recipe: of the bundle.
        outdated: a bundle of another recipe.
        expected: the bundle of an unbroken build.
        num_calls: that the unbroken build made.
    """

    recipe: Path
    outdated: Path
    expected: Mapping[str, bytes]
    num_calls: int


def run(recipe: Path, output: Path, kill_at: int | None = None, *options: str) -> tuple[int, int]:
    """Exit code of a build that is killed before this call, and how many calls it came to."""
    calls = FORK.Value("q", 0)
    arguments = ["specter-build", str(recipe), "--out", str(output), *options]
    child = FORK.Process(target=_run_counted, args=(arguments, calls, kill_at))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode, calls.value


def _run_counted(arguments: list[str], calls: Any, kill_at: int | None) -> None:
    """What the child does."""

    def count(_frame: object, event: str, function: Callable[..., Any]) -> None:
        if event == "c_call" and function.__name__ in CHANGES:
            calls.value += 1
            if calls.value == kill_at:
                signal.raise_signal(signal.SIGKILL)

    sys.argv = arguments
    sys.setprofile(count)
    main_build()


def contents(root: Path) -> dict[str, bytes]:
    """All files but the one that differs between two builds."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "timings.json"
    }


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """A checkpoint, its recipe and bundles. Read only."""
    folder = tmp_path_factory.mktemp("resume")
    make_checkpoint(folder / "checkpoint", **SMALL)
    (folder / "text.txt").write_text("def calibrate(text):\n    return text\n" * 4)
    sections = {
        "calibration": {"files": ["text.txt"], "num_sequences": 2, "sequence_length": 16},
        "plan": {"max_context_tokens": 16},  # the audit decodes no more than that
    }
    recipe = recipe_dict(folder / "checkpoint", folder / "unused", **sections)
    path = write_recipe(folder / "recipe.yaml", recipe)
    outdated, unbroken = folder / "outdated" / "bundle", folder / "unbroken" / "bundle"
    assert run(path, outdated, None, "--set", "draft.bits=2")[0] == 0
    code, num_calls = run(path, unbroken)
    assert code == 0
    expected = contents(unbroken)
    assert expected.keys() == contents(outdated).keys()
    assert expected != contents(outdated)
    return Builder(path, outdated, expected, num_calls)


def test_build_killed_at_any_moment_ends_as_if_it_had_not_been(
    builder: Builder, tmp_path: Path
) -> None:
    """Ten builds, one killed in each tenth of its calls, then in what was left, then let be.

    Every other one replaces an older bundle.
    """
    rng = random.Random(0)
    num_unfinished = 0
    for tenth in range(NUM_KILLS):
        output = tmp_path / str(tenth) / "bundle"
        if tenth % 2:
            shutil.copytree(builder.outdated, output)
        first = rng.randrange(
            tenth * builder.num_calls // NUM_KILLS, (tenth + 1) * builder.num_calls // NUM_KILLS
        )
        moments = [first + 1, rng.randrange(builder.num_calls - first) + 1]
        for moment in moments:
            code, num_calls = run(builder.recipe, output, moment)
            was_killed = code == -signal.SIGKILL
            assert was_killed or (code == 0 and num_calls < moment), (moments, code)
            work = output.with_name(".bundle.building")
            is_unfinished = work.is_dir() and not (work / "manifest.json").exists()
            num_unfinished += was_killed and is_unfinished
        code, _ = run(builder.recipe, output)
        assert code == 0, moments
        assert contents(output) == builder.expected, moments
        assert [path.name for path in output.parent.iterdir()] == ["bundle"], moments
    assert num_unfinished >= NUM_KILLS
