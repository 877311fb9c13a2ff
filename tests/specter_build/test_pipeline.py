"""A build is deterministic, does nothing twice, and publishes a whole bundle or none."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from huggingface_hub.utils import filter_repo_objects
from pydantic import BaseModel, ValidationError
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specter_build import convert_layers, estimate, pipeline, write_bundle
from specter_build.audit import audit
from specter_build.checkpoint import Checkpoint
from specter_build.estimate import Estimate
from specter_build.open_inputs import open_inputs
from specter_build.pipeline import BuildResult, build
from specter_build.quantizers import GridFormat, round_to_nearest
from specter_build.recipe import HardwareRecipe, Recipe
from specter_build.report import describe
from specter_build.split_experts import split_layer
from specter_build.write_bundle import work_folder
from specter_runtime import speculative_decoder
from specter_runtime.acceptance import Acceptance
from specter_runtime.bundle_loader import file_sha256, load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.errors import (
    BundleError,
    CapacityError,
    CheckpointError,
    RecipeError,
    SpecterError,
)
from specter_runtime.experts import PROJECTIONS, ExpertKey, PackedExperts
from specter_runtime.hardware import load_hardware
from specter_runtime.packed import dequantize
from specter_runtime.session import Session
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import format_bytes
from tests.checkpoints import make_checkpoint, recipe_dict
from tests.models import open_model

SMALL: Mapping[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "mlp_only_layers": [0],  # both kinds of layers
}
NUM_SEQUENCES, NUM_TOKENS, PER_TOKEN = 2, 32, 2
TIMINGS = "timings.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small checkpoint and a calibration text. Read only."""
    folder = tmp_path_factory.mktemp("pipeline")
    make_checkpoint(folder / "checkpoint", **SMALL)
    text = "".join(f"def f{i}(x):\n    return x + {i}\n" for i in range(9))
    (folder / "text.txt").write_text(text)
    return folder


def make_recipe(folder: Path, output: Path, **sections: Any) -> Recipe:
    calibration = {
        "files": [str(folder / "text.txt")],
        "num_sequences": NUM_SEQUENCES,
        "sequence_length": NUM_TOKENS,
    } | sections.pop("calibration", {})
    model = sections.pop("model", folder / "checkpoint")
    content = recipe_dict(model, output, calibration=calibration, **sections)
    return Recipe.model_validate(content)


@pytest.fixture(scope="module")
def built(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """The bundle of ``folder``'s checkpoint. Read only."""
    output = tmp_path_factory.mktemp("built") / "bundle"
    return build(make_recipe(folder, output), output.parent)


@pytest.fixture
def bundle_copy(built: BuildResult, tmp_path: Path) -> Path:
    """A copy to damage or replace."""
    return Path(shutil.copytree(built.destination, tmp_path / "out" / "bundle"))


def contents(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def change_times(root: Path) -> dict[str, int]:
    return {path.relative_to(root).as_posix(): path.stat().st_mtime_ns for path in root.rglob("*")}


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# ---- a draft without stand-ins --------------------------------------------------------------


@pytest.mark.parametrize("num_slots", [24, 12, 4])
def test_without_stand_ins_the_draft_is_profiled_over_each_layers_hottest_experts(
    tiny_checkpoint: Path, tmp_path: Path, num_slots: int
) -> None:
    """Routes of the draft against those of the whole model over the same experts, run at once."""
    output = tmp_path / "bundle"
    recipe = recipe_dict(tiny_checkpoint, output, draft={"bits": 0})
    least = estimate.estimate(Recipe.model_validate(recipe), tiny_checkpoint).memory[4]
    fixed = least.used_bytes - least.num_slots * least.slot_bytes
    recipe["plan"]["memory_budget"] = fixed + num_slots * least.slot_bytes
    result = build(Recipe.model_validate(recipe), tmp_path)
    bundle = load_bundle(output, verify_hashes=True)
    assert bundle.manifest.draft.bits == ((0,) * 8,) * 3
    assert names_in(output / "draft") == set()
    assert result.report["sizes"]["draft_bytes"] == result.report["memory"]["draft_bytes"] == 0
    assert (result.plan.num_slots, result.plan.num_draft_tokens) == (num_slots, 4)
    assert "rtn 0 bits" in describe(result.report, 4, result.timings)

    target = open_model(tiny_checkpoint)
    kept = {}
    for layer in result.report["layers"]:
        counts = layer["expert_counts"]
        hottest = sorted(range(8), key=lambda e: (-counts[e], e))[: num_slots // 3]
        kept |= {ExpertKey(layer["layer"], e): None for e in hottest}
    provider = PackedExperts({key: target.weights[key] for key in kept})
    routes = load_file(output / "routes.safetensors")
    agrees = []
    for i, ids in enumerate(routes["token_ids"].tolist()):
        blocks, routings = target.model.forward(
            ids, target.cache(len(ids)), provider, rows_per_block=len(ids)
        )
        logits = target.rows(ids, target.cache(len(ids)), rows_per_block=len(ids))
        agrees.append(target.model.logits(blocks).argmax(-1) == logits.argmax(-1))
        for layer, routing in enumerate(routings):
            found = routes["draft.selected_experts"][layer, i].to(torch.int64)
            assert torch.equal(found, routing.selected_experts)
    assert torch.equal(torch.stack(agrees), routes["draft_agrees"])
    rates = result.report["recall"]["mean"], result.report["acceptance"]["rate"]
    assert (rates == (1.0, 1.0)) == (num_slots == 24)
    with Session.open(output) as session:
        plain = RuntimeConfig(num_draft_tokens=0)
        tokens = list(session.generate_ids(list(b"def "), 40, stop_at_eos=False))
    with Session.open(output, plain) as session:
        assert list(session.generate_ids(list(b"def "), 40, stop_at_eos=False)) == tokens


# ---- determinism and idempotence ------------------------------------------------------------


def test_two_builds_give_the_same_bytes_wherever_they_lie(
    folder: Path, built: BuildResult, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "moved"
    shutil.copytree(folder, elsewhere)
    again = build(make_recipe(elsewhere, Path("deep/er")), elsewhere)
    assert again.destination == elsewhere / "deep" / "er"
    assert_same_bundle(again.destination, built.destination)


def test_building_again_touches_nothing_when_nothing_changed(
    folder: Path, bundle_copy: Path
) -> None:
    before = change_times(bundle_copy.parent)
    result = build(make_recipe(folder, bundle_copy), bundle_copy.parent)
    assert not result.was_built
    assert change_times(bundle_copy.parent) == before


def test_result_is_the_same_whether_it_was_built_or_found(
    folder: Path, built: BuildResult, bundle_copy: Path
) -> None:
    found = build(make_recipe(folder, bundle_copy), bundle_copy.parent)
    assert built.was_built
    assert found.destination == bundle_copy
    assert (found.report, found.plan) == (built.report, built.plan)
    assert found.timings == built.timings


@pytest.mark.parametrize(
    "damage",
    [
        lambda root: (root / "experts/layer-001/expert-003.safetensors").unlink(),
        lambda root: (root / "report.json").unlink(),
        lambda root: (root / "plan.json").write_text("{"),
    ],
    ids=["missing shard", "missing report", "truncated plan"],
)
def test_damaged_bundle_is_not_up_to_date(
    folder: Path, built: BuildResult, bundle_copy: Path, damage: Callable[[Path], object]
) -> None:
    damage(bundle_copy)
    result = build(make_recipe(folder, bundle_copy), bundle_copy.parent)
    assert result.was_built
    assert_same_bundle(bundle_copy, built.destination)


def test_changed_recipe_replaces_the_bundle(
    folder: Path, built: BuildResult, bundle_copy: Path
) -> None:
    stray = bundle_copy / "draft" / "of-an-older-version.safetensors"
    stray.write_bytes(b"")
    recipe = make_recipe(folder, bundle_copy, draft={"bits": 3})
    result = build(recipe, bundle_copy.parent)
    assert result.was_built
    assert result.report["draft"]["bits"] == 3
    assert not stray.exists()
    assert names_in(bundle_copy.parent) == {"bundle"}
    first, second = contents(built.destination), contents(bundle_copy)
    shards = [name for name in first if name.startswith(("experts/", "model/"))]
    assert len(shards) == 2 * 4 + 4
    assert all(first[name] == second[name] for name in shards)
    drafts = [name for name in first if name.startswith("draft/")]
    assert all(first[name] != second[name] for name in drafts)


def test_changed_calibration_text_or_weight_is_a_change(
    folder: Path, bundle_copy: Path, tmp_path: Path
) -> None:
    """Its recipe is the same: the digest covers what the files hold."""
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with (other / "text.txt").open("a") as file:
        file.write("\n")
    recipe = make_recipe(other, bundle_copy)
    assert recipe.digest() == make_recipe(folder, bundle_copy).digest()
    assert build(recipe, bundle_copy.parent).was_built
    weights = other / "checkpoint" / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, weights)
    result = build(recipe, bundle_copy.parent)
    assert result.was_built
    common = load_file(bundle_copy / "model" / "common.safetensors")
    assert torch.equal(common["model.norm.weight"], tensors["model.norm.weight"])


# ---- what must not be overwritten or left behind --------------------------------------------


def occupy_with_file(path: Path) -> None:
    path.write_text("precious")


def occupy_with_folder(path: Path) -> None:
    path.mkdir()
    (path / "precious.txt").write_text("precious")


def occupy_with_foreign_manifest(path: Path) -> None:
    """``manifest.json`` is also what web applications and browser extensions are described by."""
    occupy_with_folder(path)
    (path / "manifest.json").write_text('{"name": "app", "start_url": "."}')


def occupy_with_broken_manifest(path: Path) -> None:
    occupy_with_folder(path)
    (path / "manifest.json").write_text("{")


@pytest.mark.parametrize(
    "occupy",
    [
        occupy_with_file,
        occupy_with_folder,
        occupy_with_foreign_manifest,
        occupy_with_broken_manifest,
    ],
)
def test_output_that_is_no_bundle_is_refused_and_left_alone(
    folder: Path, tmp_path: Path, occupy: Callable[[Path], None]
) -> None:
    output = tmp_path / "precious"
    occupy(output)
    before = contents(tmp_path)
    with pytest.raises(SpecterError, match="precious"):
        build(make_recipe(folder, output), tmp_path)
    assert contents(tmp_path) == before


def test_checkpoint_is_never_its_own_output(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    before = contents(tmp_path)
    with pytest.raises(RecipeError, match="exists and is no bundle; it is left alone"):
        build(make_recipe(folder, checkpoint, model=checkpoint), tmp_path)
    assert contents(tmp_path) == before


def test_output_under_a_file_is_refused_by_path(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("precious")
    with pytest.raises(RecipeError, match=f"output: {tmp_path / 'file'}"):
        build(make_recipe(folder, tmp_path / "file" / "bundle"), tmp_path)
    assert (tmp_path / "file").read_text() == "precious"


def test_empty_folder_may_be_the_output(folder: Path, tmp_path: Path) -> None:
    output = tmp_path / "bundle"
    output.mkdir()
    assert build(make_recipe(folder, output), tmp_path).was_built
    assert names_in(tmp_path) == {"bundle"}


STEPS = ("convert_layers", "conclude", "write_records", "make_manifest", "audit", "move_into_place")


def fail(*_args: object, **_kwargs: object) -> None:
    raise RuntimeError("planted")


def make_outdated(bundle: Path) -> None:
    """As if the bundle had been built from other inputs."""
    change_json(bundle / "manifest.json", lambda manifest: manifest.update(build_digest="other"))


def assert_same_bundle(root: Path, expected: Path) -> None:
    """Equal to the byte but for timings, and nothing beside it."""
    first, second = contents(root), contents(expected)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] != second[name]] in ([], [TIMINGS])
    assert {path.name for path in root.parent.iterdir() if path.name.startswith(".")} == set()


@pytest.mark.parametrize(
    ("step", "is_first"),
    [*((step, True) for step in STEPS), ("convert_layers", False), ("move_into_place", False)],
)
def test_failing_step_publishes_nothing_and_the_next_build_ends_as_if_it_had_not_failed(
    folder: Path,
    built: BuildResult,
    bundle_copy: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: str,
    is_first: bool,
) -> None:
    make_outdated(bundle_copy)
    output = bundle_copy.with_name("new") if is_first else bundle_copy
    before = contents(bundle_copy)
    recipe = make_recipe(folder, output)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, step, fail)
        with pytest.raises(RuntimeError, match="planted"):
            build(recipe, output.parent)
    assert contents(bundle_copy) == before
    assert names_in(output.parent) <= {"bundle", f".{output.name}.building"}
    assert build(recipe, output.parent).was_built
    assert_same_bundle(output, built.destination)


def interrupt_before_the_shards_of_layer_2(root: Path, experts: Any, *arguments: Any) -> None:
    if min(experts).layer == 2:
        raise KeyboardInterrupt
    split_layer(root, experts, *arguments)


def interrupt_build(recipe: Recipe, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A build that is killed in its last layer, when target and draft have drifted apart."""
    with monkeypatch.context() as patch:
        patch.setattr(convert_layers, "split_layer", interrupt_before_the_shards_of_layer_2)
        with pytest.raises(KeyboardInterrupt):
            build(recipe, folder)


def test_interrupted_build_goes_on_from_its_last_finished_layer_to_the_same_bytes(
    folder: Path, built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(folder, tmp_path / "bundle")
    interrupt_build(recipe, tmp_path, monkeypatch)
    assert not (tmp_path / "bundle").exists()
    seen: list[tuple[int, int]] = []
    result = build(recipe, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(2, 3), (3, 3)]
    assert_same_bundle(result.destination, built.destination)


def test_what_an_interrupted_build_of_other_inputs_left_is_not_used(
    folder: Path, built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_recipe(folder, tmp_path / "bundle", calibration={"seed": 1})
    interrupt_build(other, tmp_path, monkeypatch)
    seen: list[tuple[int, int]] = []
    recipe = make_recipe(folder, tmp_path / "bundle")
    result = build(recipe, tmp_path, lambda done, total: seen.append((done, total)))
    assert seen == [(0, 3), (1, 3), (2, 3), (3, 3)]
    assert_same_bundle(result.destination, built.destination)


@pytest.mark.parametrize(
    ("name", "occurrence"),
    [
        ("model/common.safetensors", 1),
        ("model/layer-002.safetensors", 1),
        ("draft/layer-002.safetensors", 1),
        ("experts/layer-002/expert-001.safetensors", 1),
        ("progress/layer-002.safetensors", 1),
        ("progress/observation-001.safetensors", 1),
        ("progress/predictor-001.safetensors", 1),
        ("predictor.safetensors", 1),
        ("progress/hidden.safetensors", 1),
        ("progress/hidden.safetensors", 2),  # it replaces the first
        ("routes.safetensors", 1),
        ("plan.json", 1),
        ("manifest.json", 1),
    ],
)
def test_half_a_file_that_an_interrupted_build_left_is_not_used(
    folder: Path,
    built: BuildResult,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    occurrence: int,
) -> None:
    count = 0

    def interrupt_halfway(file: int) -> None:
        nonlocal count
        count += name in os.readlink(f"/proc/self/fd/{file}")
        if count == occurrence:
            os.ftruncate(file, os.fstat(file).st_size // 2)
            raise KeyboardInterrupt

    recipe = make_recipe(folder, tmp_path / "bundle")
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupt_halfway)
        with pytest.raises(KeyboardInterrupt):
            build(recipe, tmp_path)
    assert not (tmp_path / "bundle").exists()
    assert_same_bundle(build(recipe, tmp_path).destination, built.destination)


def remove_in_part(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whoever removes a folder is killed when its ``name`` is gone and the rest is still there."""

    def remove(path: Path, **options: Any) -> None:
        for file in path.glob(name):
            file.unlink()
            raise KeyboardInterrupt
        rmtree(path, **options)

    rmtree = shutil.rmtree
    monkeypatch.setattr(shutil, "rmtree", remove)


def test_build_that_was_killed_while_it_removed_its_progress_is_built_anew(
    folder: Path, built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(folder, tmp_path / "bundle")
    with monkeypatch.context() as patch:
        remove_in_part(patch, "layer-001.safetensors")
        with pytest.raises(KeyboardInterrupt):
            build(recipe, tmp_path)
    assert (tmp_path / ".bundle.building" / "progress" / "layer-002.safetensors").exists()
    assert_same_bundle(build(recipe, tmp_path).destination, built.destination)


def test_work_that_was_removed_in_part_for_other_inputs_is_done_anew(
    folder: Path, built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = make_recipe(folder, tmp_path / "bundle")
    interrupt_build(recipe, tmp_path, monkeypatch)
    other = make_recipe(folder, tmp_path / "bundle", calibration={"seed": 1})
    with monkeypatch.context() as patch:
        remove_in_part(patch, "layer-00*.safetensors")
        with pytest.raises(KeyboardInterrupt):
            build(other, tmp_path)
    assert (tmp_path / ".bundle.building" / "progress").is_dir()
    assert_same_bundle(build(recipe, tmp_path).destination, built.destination)


def test_what_a_build_killed_at_its_end_left_is_removed_by_the_next(
    folder: Path, bundle_copy: Path
) -> None:
    """The bundle is in place already: there is nothing to build, but an old one may lie about."""
    shutil.copytree(bundle_copy, bundle_copy.with_name(".bundle.old"))
    bundle_copy.with_name(".bundle.lock").write_text("")
    assert not build(make_recipe(folder, bundle_copy), bundle_copy.parent).was_built
    assert names_in(bundle_copy.parent) == {"bundle"}


def test_what_a_running_build_needs_is_not_removed(folder: Path, bundle_copy: Path) -> None:
    recipe = make_recipe(folder, bundle_copy)
    with work_folder(bundle_copy):
        bundle_copy.with_name(".bundle.old").mkdir()
        assert not build(recipe, bundle_copy.parent).was_built
        assert bundle_copy.with_name(".bundle.old").is_dir()


def test_old_bundle_survives_a_replacement_that_fails(
    folder: Path, bundle_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = contents(bundle_copy)
    rename = Path.rename

    def rename_all_but_the_new(path: Path, target: Path) -> Path:
        if Path(target) == bundle_copy and path.name.endswith(".building"):
            raise OSError(errno.EIO, "planted")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", rename_all_but_the_new)
    with pytest.raises((OSError, SpecterError), match="planted"):
        build(make_recipe(folder, bundle_copy, draft={"bits": 2}), bundle_copy.parent)
    assert contents(bundle_copy) == before


@pytest.mark.parametrize("at", [0.0, 0.3, 0.6, 0.9, 1.0])
def test_full_disk_in_the_middle_is_an_error_for_people_and_nothing_is_lost(
    folder: Path, built: BuildResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: float
) -> None:
    """At the first file that is written, at the last (the manifest), and at some between."""
    num_files = sum(1 for name in contents(built.destination) if name.endswith(".safetensors"))
    num_files += len(("plan", "report", "timings", "manifest"))
    num_files += 2 + 3  # progress: two routed layers, three hidden states
    failing, written = 1 + round(at * (num_files - 1)), 0

    def no_space(_file: int) -> None:
        nonlocal written
        written += 1
        if written == failing:
            raise OSError(errno.ENOSPC, "No space left on device")

    output = tmp_path / "out" / "bundle"
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", no_space)
        with pytest.raises(RecipeError, match=r"out/.*: No space left on device; the build goes"):
            build(make_recipe(folder, output), tmp_path)
    assert written == failing
    assert not output.exists()
    assert_same_bundle(build(make_recipe(folder, output), tmp_path).destination, built.destination)


def test_leftovers_of_a_killed_build_are_removed(folder: Path, tmp_path: Path) -> None:
    leftover = tmp_path / ".bundle.building"
    (leftover / "model").mkdir(parents=True)
    (leftover / "stray").write_text("half")
    (tmp_path / ".bundle.lock").write_text("")
    result = build(make_recipe(folder, tmp_path / "bundle"), tmp_path)
    assert names_in(tmp_path) == {"bundle"}
    assert "stray" not in names_in(result.destination)


def test_second_build_of_a_destination_is_refused_while_the_first_runs(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "bundle"
    with work_folder(output) as work:
        (work / "half").write_text("done")
        with pytest.raises(RecipeError, match="is being built by another process"):
            build(make_recipe(folder, output), tmp_path)
        assert names_in(work) == {"half"}
    assert build(make_recipe(folder, output), tmp_path).was_built


def test_lock_holds_when_the_build_before_ended_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build before removes its lock file: a lock on the removed file would exclude nobody."""
    output = tmp_path / "bundle"
    lock_file = tmp_path / ".bundle.lock"
    flock = fcntl.flock

    def flock_after_the_other_ended(lock: Any, operation: int) -> None:
        monkeypatch.setattr(write_bundle.fcntl, "flock", flock)
        lock_file.unlink(missing_ok=True)
        flock(lock, operation)

    monkeypatch.setattr(write_bundle.fcntl, "flock", flock_after_the_other_ended)
    with work_folder(output) as work:
        (work / "half").write_text("done")
        with pytest.raises(RecipeError, match="another process"), work_folder(output):
            pass
        assert names_in(work) == {"half"}


# ---- refused before anything is written -----------------------------------------------------


def refusal(
    folder: Path, tmp_path: Path, error: type[SpecterError] = RecipeError, **sections: Any
) -> str:
    """The message of a build that must write nothing, not even a folder."""
    output = tmp_path / "out" / "bundle"
    before = contents(tmp_path)
    with pytest.raises(error) as caught:
        build(make_recipe(folder, output, **sections), tmp_path)
    assert not output.parent.exists()
    assert contents(tmp_path) == before
    return str(caught.value)


def test_disk_without_room_is_refused_with_what_is_needed(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=1000))
    message = refusal(folder, tmp_path, CapacityError)
    assert f"output: {tmp_path / 'out' / 'bundle'} needs " in message
    assert "1000 B are free" in message


def test_what_an_interrupted_build_left_needs_no_room_again(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a build that fills more than half of a disk could never go on."""
    recipe = make_recipe(folder, tmp_path / "bundle")
    interrupt_build(recipe, tmp_path, monkeypatch)
    left = sum(map(len, contents(tmp_path / ".bundle.building").values()))
    sizes = open_inputs(recipe, tmp_path).estimate
    needed = sizes.bundle_bytes + sizes.progress_bytes - left
    assert 0 < needed < sizes.bundle_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=needed - 1))
    with pytest.raises(CapacityError, match=r"output: .* needs .* more"):
        build(recipe, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=needed))
    assert build(recipe, tmp_path).was_built


@pytest.mark.parametrize("layers_ahead", [0, 1, 2, 4])
@pytest.mark.parametrize("num_layers", [2, 5])
def test_progress_takes_the_room_that_was_checked(
    tmp_path: Path,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    num_layers: int,
    layers_ahead: int,
) -> None:
    """The most is there when the hidden states of a late layer take the place of those before.

    If that is the last one, everything is there at once; else what that one adds is not, but so is
    an observation that it has no more use for.
    """
    make_checkpoint(
        tmp_path / "model", **SMALL | {"num_hidden_layers": num_layers, "mlp_only_layers": []}
    )
    recipe = make_recipe(
        folder,
        tmp_path / "bundle",
        model=tmp_path / "model",
        predictor={"layers_ahead": layers_ahead},
    )
    few = {"next_layer", "relative_error", "fallback_experts", "recall", "early_recall"}
    sizes: list[int] = []
    replace = os.replace

    def measure(source: Path, target: Path) -> None:
        nbytes = 0
        for path in (tmp_path / ".bundle.building" / "progress").iterdir():
            if ".safetensors" in path.name:
                found = load_file(path)
                nbytes += sum(found[name].nbytes for name in found.keys() - few)
        sizes.append(nbytes)
        replace(source, target)

    monkeypatch.setattr(os, "replace", measure)
    build(recipe, tmp_path)
    assert len(sizes) == num_layers
    checked = open_inputs(recipe, tmp_path).estimate.progress_bytes
    observed = NUM_SEQUENCES * NUM_TOKENS * (2 * SMALL["hidden_size"] + 4 * SMALL["num_experts"])
    is_last = layers_ahead == 0 or layers_ahead >= num_layers - 1
    assert max(sizes) == checked if is_last else checked - observed < max(sizes) <= checked


def test_build_that_does_not_fit_in_memory_is_refused_with_both_sizes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(estimate, "available_memory", lambda: 100 * 2**20)
    message = refusal(folder, tmp_path, CapacityError)
    needed = open_inputs_unchecked(folder, tmp_path, monkeypatch).build_bytes
    assert f"needs up to {format_bytes(needed)} of memory, 100.0 MiB are available" in message


def open_inputs_unchecked(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Estimate:
    monkeypatch.setattr(estimate, "available_memory", lambda: 2**62)
    return open_inputs(make_recipe(folder, tmp_path / "bundle"), tmp_path).estimate


def test_what_is_needed_on_disk_is_the_tensors_and_some_of_the_headers(
    folder: Path, built: BuildResult
) -> None:
    files = contents(built.destination)
    tensors = stored_tensors(built.destination.rglob("layer-*.safetensors"))
    tensors |= stored_tensors(built.destination.rglob("expert-*.safetensors"))
    tensors |= load_file(built.destination / "model" / "common.safetensors")
    tensors |= load_file(built.destination / "predictor.safetensors")
    recipe = make_recipe(folder, built.destination)
    needed = open_inputs(recipe, built.destination.parent).estimate.bundle_bytes
    assert sum(tensor.nbytes for tensor in tensors.values()) <= needed
    assert needed <= sum(map(len, files.values()))


def test_memory_budget_without_room_is_refused_with_the_minimum(
    folder: Path, tmp_path: Path
) -> None:
    message = refusal(folder, tmp_path, CapacityError, plan={"memory_budget": "100KiB"})
    assert message.startswith("plan.memory_budget: a memory budget of 100.0 KiB is too small")
    minimum = int(message.split("(")[1].split(" bytes)")[0])
    recipe = make_recipe(folder, tmp_path / "bundle", plan={"memory_budget": minimum})
    (memory,) = open_inputs(recipe, tmp_path).estimate.memory.values()
    assert memory.num_slots == PER_TOKEN
    assert memory.used_bytes == minimum
    refusal(folder, tmp_path, CapacityError, plan={"memory_budget": minimum - 1})


def test_numbers_of_draft_tokens_that_do_not_fit_are_not_planned(
    folder: Path, tmp_path: Path
) -> None:
    """Without lookahead no draft is resident: its minimum is the least, and fits nothing else."""
    plan = {"memory_budget": "100KiB", "num_draft_tokens": "auto"}
    message = refusal(folder, tmp_path, CapacityError, plan=plan)
    plan["memory_budget"] = message.split("(")[1].split(" bytes)")[0]
    result = build(make_recipe(folder, tmp_path / "bundle", plan=plan), tmp_path)
    assert result.plan.predicted.keys() == {"no draft", "no draft, LRU eviction"}
    assert result.plan.num_draft_tokens == 0
    assert result.report["memory"]["draft_bytes"] == 0


@pytest.mark.parametrize(
    ("sections", "part"),
    [
        (
            {"calibration": {"sequence_length": 513}},
            "calibration.sequence_length: 513 is more than the model's max_position_embeddings",
        ),
        (
            {"plan": {"max_context_tokens": 513}},
            "plan.max_context_tokens: 513 is more than the model's max_position_embeddings",
        ),
        ({"calibration": {"num_sequences": 10**5}}, "calibration.num_sequences: 100000 sequences"),
        ({"calibration": {"files": ["absent.txt"]}}, "calibration.files: absent.txt: cannot be"),
        ({"model": "absent"}, "is no folder and 'absent' is no hub id"),
        ({"model": "./a/b"}, "is no folder and './a/b' is no hub id"),
    ],
)
def test_recipe_that_does_not_fit_the_model_is_refused_by_key(
    folder: Path, tmp_path: Path, sections: Mapping[str, Any], part: str
) -> None:
    assert part in refusal(folder, tmp_path, **sections)


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def add_tokens(tokenizer: dict[str, Any]) -> None:
    tokenizer["model"]["vocab"] |= {f"extra{i}": 258 + i for i in range(3)}


def add_far_token(tokenizer: dict[str, Any]) -> None:
    """No more ids than the model has, but one of them is beyond its embeddings."""
    tokenizer["model"]["vocab"]["d"] = 5000


@pytest.mark.parametrize("change", [add_tokens, add_far_token])
def test_tokenizer_with_ids_beyond_the_vocabulary_is_refused(
    folder: Path, tmp_path: Path, change: Callable[[dict[str, Any]], None]
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    change_json(checkpoint / "tokenizer.json", change)
    message = refusal(folder, tmp_path, model=checkpoint)
    assert "vocab_size 260" in message
    assert str(checkpoint) in message


@pytest.mark.parametrize("eos", [[], "end", 260, -1], ids=repr)
def test_end_token_that_is_none_of_the_vocabulary_is_refused(
    folder: Path, tmp_path: Path, eos: object
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    change_json(checkpoint / "config.json", lambda config: config.update(eos_token_id=eos))
    assert "eos_token_id" in refusal(folder, tmp_path, SpecterError, model=checkpoint)


def test_missing_tokenizer_is_refused_by_file(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    (checkpoint / "tokenizer.json").unlink()
    message = refusal(folder, tmp_path, SpecterError, model=checkpoint)
    assert str(checkpoint / "tokenizer.json") in message


def test_hub_id_is_downloaded_without_pickles_and_folders(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(name: str, **options: Any) -> str:
        asked.update(options, name=name)
        return str(folder / "checkpoint")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    recipe = make_recipe(folder, tmp_path, model="org/name").model_copy(update={"revision": "v1"})
    inputs = open_inputs(recipe, tmp_path)
    assert (asked["name"], asked["revision"]) == ("org/name", "v1")
    wanted = ["config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    others = ["pytorch_model.bin", "original/model.safetensors", "metal/model.bin", "a.pt"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects(wanted + others, **patterns)) == wanted
    assert inputs.checkpoint.folder == folder / "checkpoint"


def test_failed_download_is_refused_by_name(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def snapshot_download(name: str, **_options: Any) -> str:
        raise OSError("no route to host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    message = refusal(folder, tmp_path, model="org/name")
    assert "'org/name'" in message
    assert "no route to host" in message


def test_weight_that_is_no_number_is_refused_and_nothing_published(
    folder: Path, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, weights)
    output = tmp_path / "out" / "bundle"
    with pytest.raises(SpecterError, match="layer 1, expert 2, up_proj"):
        build(make_recipe(folder, output, model=checkpoint), tmp_path)
    assert not output.exists()


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.input_layernorm.weight",
        "model.layers.2.mlp.experts.3.down_proj.weight",
        "lm_head.weight",
    ],
)
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_tensor_that_is_no_number_is_refused_by_name_and_nothing_published(
    folder: Path, tmp_path: Path, name: str, value: float
) -> None:
    """A router of NaN would choose experts, too, and the audit would find the same ones."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    weights = checkpoint / "model.safetensors"
    tensors = load_file(weights)
    tensors[name].view(-1)[-1] = value
    save_file(tensors, weights)
    output = tmp_path / "out" / "bundle"
    part = "layer 2, expert 3, down_proj: .*" if ".experts." in name else f".*{re.escape(name)}"
    with pytest.raises(CheckpointError, match=f"NaN or infinity: {part}|{part}NaN or infinity"):
        build(make_recipe(folder, output, model=checkpoint), tmp_path)
    assert not output.exists()


def test_context_without_room_for_a_prompt_and_a_token_is_refused_by_key(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises((ValidationError, RecipeError), match="max_context_tokens"):
        build(make_recipe(folder, tmp_path / "bundle", plan={"max_context_tokens": 1}), tmp_path)


@pytest.mark.parametrize("context", [2, 16, 17])
def test_short_context_can_be_built(folder: Path, tmp_path: Path, context: int) -> None:
    recipe = make_recipe(folder, tmp_path / "bundle", plan={"max_context_tokens": context})
    assert build(recipe, tmp_path).was_built


# ---- what is in a bundle --------------------------------------------------------------------


def stored_tensors(files: Iterator[Path]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in files:
        found = load_file(path)
        assert not tensors.keys() & found.keys()
        tensors |= found
    return tensors


def test_bundle_holds_every_tensor_of_the_checkpoint_to_the_bit(
    folder: Path, built: BuildResult
) -> None:
    root = built.destination
    expected = load_file(folder / "checkpoint" / "model.safetensors")
    dense = stored_tensors((root / "model").iterdir())
    experts = stored_tensors((root / "experts").rglob("*.safetensors"))
    assert dense.keys() | experts.keys() == expected.keys()
    assert not dense.keys() & experts.keys()
    assert {name for name in expected if ".experts." in name} == experts.keys()
    for name, tensor in expected.items():
        found = (dense | experts)[name]
        assert found.dtype == tensor.dtype
        assert torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)), name


def test_predictor_is_a_file_only_where_there_is_something_to_foretell(
    folder: Path, built: BuildResult, tmp_path: Path
) -> None:
    assert "predictor.safetensors" in names_in(built.destination)
    make_checkpoint(tmp_path / "greedy", **SMALL | {"num_experts_per_tok": SMALL["num_experts"]})
    make_checkpoint(tmp_path / "single", **SMALL | {"mlp_only_layers": [0, 1]})
    for name, sections in {
        "asked for none": {"predictor": {"layers_ahead": 0}},
        "every expert is used": {"model": tmp_path / "greedy"},
        "one routed layer": {"model": tmp_path / "single"},
    }.items():
        result = build(make_recipe(folder, tmp_path / name, **sections), tmp_path)
        assert "predictor.safetensors" not in names_in(result.destination), name
        assert result.report["memory"]["predictor_bytes"] == 0
        assert result.report["predictor"]["layers"] == []
        assert "predictor" not in describe(result.report, 4, result.timings)
        bundle = load_bundle(result.destination)
        assert (bundle.predictors(), bundle.predictor_nbytes) == ({}, 0)


def test_draft_quantizes_routed_experts_and_nothing_else(folder: Path, built: BuildResult) -> None:
    drafted = stored_tensors((built.destination / "draft").iterdir())
    expected = load_file(folder / "checkpoint" / "model.safetensors")
    experts = {name for name in expected if ".experts." in name}
    assert drafted.keys() == {f"{name}.{part}" for name in experts for part in ("codes", "scales")}


def test_each_stand_in_is_made_of_its_own_expert(folder: Path, built: BuildResult) -> None:
    """The audit would not notice: a wrong draft is slow, not wrong."""
    expected = load_file(folder / "checkpoint" / "model.safetensors")
    stand_ins = load_bundle(built.destination).draft_experts()
    form = GridFormat(bits=4, group_size=16, symmetric=True)
    assert stand_ins.keys() == {ExpertKey(layer, expert) for layer in (1, 2) for expert in range(4)}
    for key, stand_in in stand_ins.items():
        for projection in PROJECTIONS:
            weight = expected[
                f"model.layers.{key.layer}.mlp.experts.{key.expert}.{projection}.weight"
            ]
            restored = dequantize(round_to_nearest(weight, form), torch.float32)
            found = dequantize(getattr(stand_in, projection), torch.float32)
            assert torch.equal(found, restored), (key, projection)


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.mark.parametrize("in_file", [True, False], ids=["file of its own", "tokenizer_config.json"])
def test_checkpoints_own_files_are_taken_over_unchanged(
    folder: Path, tmp_path: Path, in_file: bool
) -> None:
    """End tokens, and the chat template wherever the checkpoint has it."""
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    if in_file:
        (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    else:
        change = {"chat_template": TEMPLATE}
        change_json(checkpoint / "tokenizer_config.json", lambda c: c.update(change))
    root = build(make_recipe(folder, tmp_path / "bundle", model=checkpoint), tmp_path).destination
    names = {path.name for path in checkpoint.iterdir()} - {"model.safetensors"}
    assert names >= {"config.json", "generation_config.json", "tokenizer.json"}
    for name in names:
        assert (root / name).read_bytes() == (checkpoint / name).read_bytes()
    chat = [{"role": "user", "content": "ab"}]
    assert Tokenizer(root).encode_chat(chat) == Tokenizer(checkpoint).encode_chat(chat)
    assert Tokenizer(root).encode_chat(chat).count(256) == 1


def test_tensors_that_are_left_out_are_in_the_report(folder: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    shutil.copytree(folder / "checkpoint", checkpoint)
    name = "model.layers.3.eh_proj.weight"
    weights = checkpoint / "model.safetensors"
    save_file(load_file(weights) | {name: torch.ones(4, 4)}, weights)
    change_json(checkpoint / "config.json", lambda c: c.update(num_nextn_predict_layers=1))
    result = build(make_recipe(folder, tmp_path / "bundle", model=checkpoint), tmp_path)
    assert result.report["left_out_tensors"] == [name]
    assert "1 tensors of multi-token prediction" in describe(result.report, 4, result.timings)


def test_routes_are_those_that_transformers_takes(folder: Path, built: BuildResult) -> None:
    """Calibration that routed otherwise would look all right and be of another model."""
    routes = load_file(built.destination / "routes.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder / "checkpoint", dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(routes["token_ids"].to(torch.int64), output_router_logits=True)
    assert len(out.router_logits) == 2
    for logits, chosen in zip(out.router_logits, routes["target.selected_experts"], strict=True):
        ours = logits.view(NUM_SEQUENCES, NUM_TOKENS, -1).gather(-1, chosen.to(torch.int64))
        best = logits.view(NUM_SEQUENCES, NUM_TOKENS, -1).topk(PER_TOKEN).values
        # Equal but for rounding: two experts may change places when they are this near.
        assert torch.allclose(ours.sort(descending=True).values, best, rtol=0, atol=1e-3)
        assert best.std() > 0.1


Figure = Callable[[Path], object]


def file(name: str) -> Figure:
    return lambda root: (root / name).read_bytes()


def figure(name: str, *keys: str) -> Figure:
    def read(root: Path) -> object:
        value = json.loads((root / name).read_text())
        for key in keys:
            value = value[key]
        return value

    return read


DRAFT, ROUTES = file("draft/layer-001.safetensors"), file("routes.safetensors")
PREDICTED = figure("plan.json", "predicted")
EFFECTS: dict[str, tuple[Any, Figure]] = {
    "draft.bits": (3, DRAFT),
    "draft.group_size": (8, DRAFT),
    "draft.symmetric": (False, DRAFT),
    "draft.clip": ("mse", DRAFT),
    "calibration.files": (["other.txt"], ROUTES),
    "calibration.num_sequences": (3, ROUTES),
    "calibration.sequence_length": (16, ROUTES),
    "calibration.seed": (1, ROUTES),
    "predictor.layers_ahead": (0, figure("report.json", "predictor", "recall")),
    "plan.memory_budget": ("3MiB", figure("plan.json", "num_slots")),
    "plan.max_context_tokens": (128, figure("report.json", "memory", "kv_cache_bytes")),
    "plan.num_draft_tokens": (2, PREDICTED),
    "plan.dtype": ("bfloat16", figure("report.json", "memory", "dense_bytes")),
    "hardware.link_bytes_per_second": (1e6, PREDICTED),
    "hardware.link_latency_seconds": (1.0, PREDICTED),
    "hardware.memory_bytes_per_second": (1e8, PREDICTED),
    "hardware.pass_overhead_seconds": (1.0, PREDICTED),
}
"""Key -> another value, and what it changes; what is merely recorded of a recipe does not count."""

TESTED_ELSEWHERE = {"draft.method", "draft.min_tokens", "draft.source"}


@pytest.fixture(scope="module")
def scarce(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> BuildResult:
    """A bundle planned for room for five of its eight experts. Read only."""
    output = tmp_path_factory.mktemp("scarce") / "bundle"
    (memory,) = open_inputs(make_recipe(folder, output), output.parent).estimate.memory.values()
    budget = memory.used_bytes - (memory.num_slots - 5) * memory.slot_bytes
    return build(make_recipe(folder, output, plan={"memory_budget": budget}), output.parent)


@pytest.mark.parametrize("key", EFFECTS)
def test_every_key_of_a_recipe_has_an_effect(
    folder: Path, scarce: BuildResult, tmp_path: Path, key: str
) -> None:
    value, effect = EFFECTS[key]
    (tmp_path / "other.txt").write_text((folder / "text.txt").read_text().upper())
    section, name = key.split(".")
    sections: dict[str, Any] = {"plan": {"memory_budget": scarce.plan.memory_budget_bytes}}
    sections[section] = sections.get(section, {}) | {name: value}
    result = build(make_recipe(folder, tmp_path / "bundle", **sections), tmp_path)
    assert effect(result.destination) != effect(scarce.destination)


def test_hardware_may_be_a_profile_by_name_or_in_a_file(folder: Path, tmp_path: Path) -> None:
    shipped = build(make_recipe(folder, tmp_path / "a", hardware="laptop-nvme"), tmp_path)
    profile = replace(load_hardware("laptop-nvme"), link_bytes_per_second=1e6)
    (tmp_path / "mine.json").write_text(profile.to_json())
    recipe = make_recipe(folder, tmp_path / "b", hardware="mine.json")
    own = build(recipe, tmp_path)
    assert shipped.plan.hardware["link_bytes_per_second"] == 5e9
    assert own.plan.hardware["link_bytes_per_second"] == 1e6
    again = build(recipe, tmp_path)
    assert not again.was_built
    (tmp_path / "mine.json").write_text(replace(profile, num_readers=3).to_json())
    assert build(recipe, tmp_path).was_built  # what the file says counts, not how it is called


@pytest.mark.parametrize(
    ("hardware", "message"),
    [
        ("rtx-1", "hardware: .*rtx-1: no such file, and no profile that ships"),
        ("bad.json", "hardware: .*bad.json: missing 'name'"),
    ],
)
def test_profile_that_is_none_is_refused(
    folder: Path, tmp_path: Path, hardware: str, message: str
) -> None:
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(RecipeError, match=message):
        build(make_recipe(folder, tmp_path / "bundle", hardware=hardware), tmp_path)
    assert not (tmp_path / "bundle").exists()


def test_no_key_of_a_recipe_is_left_untested() -> None:
    forms = {section: field.annotation for section, field in Recipe.model_fields.items()}
    forms["hardware"] = HardwareRecipe  # a profile's name is tested on its own
    keys = {
        f"{section}.{name}"
        for section, form in forms.items()
        if isinstance(form, type) and issubclass(form, BaseModel)
        for name in form.model_fields
    }
    assert keys == {*EFFECTS, *TESTED_ELSEWHERE}


def test_manifest_lists_every_file_with_size_and_hash(built: BuildResult) -> None:
    root = built.destination
    manifest = json.loads((root / "manifest.json").read_text())
    assert manifest["files"].keys() == contents(root).keys() - {"manifest.json", TIMINGS}
    for name, entry in manifest["files"].items():
        assert entry == {
            "nbytes": (root / name).stat().st_size,
            "sha256": file_sha256(root / name),
        }
    assert manifest["unhashed_files"] == [TIMINGS]


def test_manifest_records_the_source_and_no_local_path(folder: Path, built: BuildResult) -> None:
    text = (built.destination / "manifest.json").read_text()
    assert str(folder) not in text
    assert str(built.destination.parent) not in text
    source = json.loads(text)["source_files"]["model.safetensors"]
    assert source["sha256"] == file_sha256(folder / "checkpoint" / "model.safetensors")


def test_routes_have_the_promised_shapes_and_types(built: BuildResult) -> None:
    with safe_open(built.destination / "routes.safetensors", framework="pt") as file:
        found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    tokens, routes = (NUM_SEQUENCES, NUM_TOKENS), (2, NUM_SEQUENCES, NUM_TOKENS, PER_TOKEN)
    assert {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items()} == {
        "token_ids": (torch.int32, tokens),
        "layers": (torch.int32, (2,)),
        "draft_agrees": (torch.bool, tokens),
        "draft_confidence": (torch.float16, tokens),
        "target.router_probs": (torch.float16, (2, *tokens, 4)),
        "target.selected_experts": (torch.int16, routes),
        "draft.selected_experts": (torch.int16, routes),
        "target.routing_weights": (torch.float16, routes),
        "draft.routing_weights": (torch.float16, routes),
    }
    assert found["layers"].tolist() == [1, 2]
    for stream in ("target", "draft"):
        experts = found[f"{stream}.selected_experts"]
        assert 0 <= int(experts.min()) <= int(experts.max()) < 4
        assert (experts[..., 0] != experts[..., 1]).all()


# ---- the audit ------------------------------------------------------------------------------


def rehash(root: Path, name: str) -> None:
    """Make the manifest agree with a file, as a faulty writer would."""
    entry = {"nbytes": (root / name).stat().st_size, "sha256": file_sha256(root / name)}
    change_json(root / "manifest.json", lambda manifest: manifest["files"].update({name: entry}))


def flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def run_audit(folder: Path, root: Path) -> None:
    audit(root, Checkpoint(folder / "checkpoint"), list(range(40, 60)), memory_bytes=2**30)


def test_audit_passes_a_good_bundle(folder: Path, built: BuildResult) -> None:
    run_audit(folder, built.destination)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        (
            "experts/layer-001/expert-002.safetensors",
            "model.layers.1.mlp.experts.2.down_proj.weight",
        ),
        ("model/layer-001.safetensors", "model.layers.1.mlp.gate.weight"),
        ("model/common.safetensors", "lm_head.weight"),
    ],
)
def test_audit_finds_a_flipped_bit_and_names_the_tensor(
    folder: Path, bundle_copy: Path, name: str, tensor: str
) -> None:
    flip_last_byte(bundle_copy / name)
    with pytest.raises(BundleError, match="contents differ from the manifest") as caught:
        run_audit(folder, bundle_copy)
    assert repr(name) in str(caught.value)
    rehash(bundle_copy, name)
    with pytest.raises(BundleError, match="tensors differ from the checkpoint") as caught:
        run_audit(folder, bundle_copy)
    assert repr(tensor) in str(caught.value)


@pytest.mark.parametrize(
    ("change", "tensor"),
    [
        (lambda tensors: tensors.pop("lm_head.weight"), "lm_head.weight"),
        (lambda tensors: tensors.update(extra=torch.ones(1)), "extra"),
    ],
    ids=["left out", "added"],
)
def test_audit_finds_a_dense_tensor_too_few_or_too_many(
    folder: Path,
    bundle_copy: Path,
    change: Callable[[dict[str, torch.Tensor]], object],
    tensor: str,
) -> None:
    name = "model/common.safetensors"
    tensors = load_file(bundle_copy / name)
    change(tensors)
    save_file(tensors, bundle_copy / name)
    rehash(bundle_copy, name)
    with pytest.raises(BundleError, match=tensor):
        run_audit(folder, bundle_copy)


def accept_everything(draft_token_ids: list[int], target_token_ids: list[int]) -> Acceptance:
    return Acceptance(len(draft_token_ids), target_token_ids[-1])


def test_audit_finds_wrong_tokens_and_nothing_is_published(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decoder that accepts what the draft says, whose 2-bit experts disagree with the target."""
    monkeypatch.setattr(speculative_decoder, "accept_greedy", accept_everything)
    output = tmp_path / "out" / "bundle"
    with pytest.raises(BundleError, match="greedy tokens differ from the target's"):
        build(make_recipe(folder, output, draft={"bits": 2}), tmp_path)
    assert names_in(output.parent) == set()
