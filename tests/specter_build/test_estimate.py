"""What a build will take: of this process's memory, whatever group it is in, and layer by layer."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specter_build import audit
from specter_build.checkpoint import Checkpoint
from specter_build.estimate import (
    AUDIT_TOKENS,
    INTERPRETER_BYTES,
    available_memory,
    build_nbytes,
    estimate,
)
from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.errors import CheckpointError, RecipeError
from specter_runtime.memory import dense_nbytes
from tests.checkpoints import make_checkpoint, recipe_dict

# ---- memory that there is -------------------------------------------------------------------

MIB = 2**20
MEMINFO = {"proc/meminfo": f"MemTotal: {900 * 1024} kB\nMemAvailable: {500 * 1024} kB\n"}


def in_group(folder: str, limit: int | str, usage: int, stat: str = "anon 1\n") -> dict[str, str]:
    """The files of a group of version 2."""
    files = {"memory.max": limit, "memory.current": usage, "memory.stat": stat}
    return {f"sys/fs/cgroup/{folder}{name}": f"{content}\n" for name, content in files.items()}


def in_group_1(folder: str, limit: int, usage: int, stat: str = "rss 1\n") -> dict[str, str]:
    """The files of a group of version 1."""
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "memory.stat")
    contents = (limit, usage, stat)
    return {
        f"sys/fs/cgroup/memory/{folder}{name}": f"{content}\n"
        for name, content in zip(names, contents, strict=True)
    }


def member(line: str) -> dict[str, str]:
    return {"proc/self/cgroup": f"1:name=systemd:/init.scope\n{line}\n"}


FILES = "anon 7\ninactive_file {}\nactive_file {}\n"
MACHINES: Mapping[str, tuple[Mapping[str, str], int]] = {
    "no groups": ({}, 500),
    "no limit": (in_group("", "max", 90 * MIB), 500),
    "container": (in_group("", 300 * MIB, 90 * MIB), 210),
    "limit above what is free": (in_group("", 800 * MIB, 90 * MIB), 500),
    "own group": (member("0::/a/b") | in_group("a/b/", 300 * MIB, 90 * MIB), 210),
    "group around it": (
        member("0::/a/b")
        | in_group("a/b/", "max", 20 * MIB)
        | in_group("a/", 300 * MIB, 200 * MIB),
        100,
    ),
    "another group": (member("0::/a/b") | in_group("c/", 300 * MIB, 290 * MIB), 500),
    "path of the host": (member("0::/docker/0a1b") | in_group("", 300 * MIB, 90 * MIB), 210),
    "files give way": (
        in_group("", 300 * MIB, 290 * MIB, FILES.format(150 * MIB, 50 * MIB)),
        210,
    ),
    "version 1, container": (in_group_1("", 300 * MIB, 90 * MIB), 210),
    "version 1, own group": (
        member("4:cpu,memory:/a/b") | in_group_1("a/b/", 300 * MIB, 90 * MIB),
        210,
    ),
    "version 1, group around it": (
        member("4:memory:/a/b")
        | in_group_1("a/b/", 2**63 - 4096, 90 * MIB)
        | in_group_1("a/", 200 * MIB, 90 * MIB),
        110,
    ),
    "version 1, files give way": (
        # those of the group alone, and, called total, with those of the groups within
        in_group_1(
            "",
            300 * MIB,
            290 * MIB,
            f"inactive_file 1\nactive_file 1\ntotal_inactive_file {20 * MIB}\n"
            f"total_active_file {30 * MIB}",
        ),
        60,
    ),
}


@pytest.mark.parametrize(("files", "expected_mib"), MACHINES.values(), ids=MACHINES)
def test_available_memory_is_that_of_the_machine_or_of_a_group(
    tmp_path: Path, files: Mapping[str, str], expected_mib: int
) -> None:
    for name, content in (MEMINFO | files).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert available_memory(tmp_path) == expected_mib * MIB


def test_unknown_memory_refuses_nothing(tmp_path: Path) -> None:
    assert available_memory(tmp_path) >= 2**62


# ---- memory that a build takes --------------------------------------------------------------

NUM_SEQUENCES, NUM_TOKENS, PER_TOKEN, NUM_LAYERS = 2, 32, 2, 6


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recipe, Path]:
    """A recipe of a model with several layers, and where its checkpoint is."""
    folder = tmp_path_factory.mktemp("deep")
    shape = {"hidden_size": 32, "num_attention_heads": 2, "num_experts": 4}
    make_checkpoint(
        folder / "checkpoint", num_hidden_layers=NUM_LAYERS, moe_intermediate_size=24, **shape
    )
    (folder / "text.txt").write_text("def calibrate(text):\n    return text\n" * 9)
    calibration = {
        "files": ["text.txt"],
        "num_sequences": NUM_SEQUENCES,
        "sequence_length": NUM_TOKENS,
    }
    plan = {"max_context_tokens": 16}
    recipe = recipe_dict(
        folder / "checkpoint", folder / "bundle", calibration=calibration, plan=plan
    )
    return Recipe.model_validate(recipe), folder


def bytes_in_tensors() -> int:
    """Of all tensors that are alive, each storage once."""
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor
    }
    return sum(storages.values())


def test_nothing_of_a_layer_outlives_it_but_its_routes_and_what_predictors_are_fitted_to(
    deep: tuple[Recipe, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that grew with depth would make the largest models those that cannot be built."""
    recipe, folder = deep
    tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    read = Checkpoint.tensor

    def tracked(checkpoint: Checkpoint, name: str) -> torch.Tensor:
        tensor = read(checkpoint, name)
        tensors.append((name, weakref.ref(tensor)))
        return tensor

    names: list[set[str]] = []
    sizes: list[int] = []

    def observe(_done: int, _total: int) -> None:
        names.append({name for name, tensor in tensors if tensor() is not None})
        sizes.append(bytes_in_tensors())

    monkeypatch.setattr(Checkpoint, "tensor", tracked)
    build(recipe.model_copy(update={"output": str(tmp_path / "bundle")}), folder, observe)
    common = set(Checkpoint(folder / "checkpoint").dense_names(None))
    assert names == [common] * (NUM_LAYERS + 1)
    # An int64 and a float32 a choice in either stream, a float16 an expert in the target's.
    routes = NUM_SEQUENCES * NUM_TOKENS * (2 * PER_TOKEN * (8 + 4) + 2 * 4)
    observed = NUM_SEQUENCES * NUM_TOKENS * (32 * 2 + 4 * 4)  # bfloat16 inputs, float32 scores
    num_kept = [1, 2, 2, 2, 2, 0]  # two layers ahead; behind the last there is nothing to foretell
    growth = [after - before for before, after in itertools.pairwise(sizes[1:])]
    assert growth == [
        routes + (after - before) * observed for before, after in itertools.pairwise(num_kept)
    ]


def test_estimate_grows_with_depth_by_routes_or_by_what_the_audit_holds(
    deep: tuple[Recipe, Path],
) -> None:
    recipe, folder = deep
    sizes = estimate(recipe, folder / "checkpoint")

    def at_depth(num_layers: int, dtype: str = "float32") -> int:
        config = replace(sizes.config, num_hidden_layers=num_layers)
        return build_nbytes(recipe, config, "float32", sizes.expert_numbers, dtype)

    routes = NUM_SEQUENCES * NUM_TOKENS * (2 * PER_TOKEN * (8 + 4) + 2 * 4)
    assert at_depth(NUM_LAYERS) == sizes.build_bytes
    deepest = replace(sizes.config, num_hidden_layers=10_000)
    held = dense_nbytes(deepest, "float32")
    assert at_depth(10_000) >= INTERPRETER_BYTES + held + 10_000 * routes
    calibration = recipe.calibration.model_copy(update={"num_sequences": 5000})
    recipe, routes = recipe.model_copy(update={"calibration": calibration}), 2500 * routes
    assert at_depth(NUM_LAYERS + 1) == at_depth(NUM_LAYERS) + routes
    half = dense_nbytes(deepest, "bfloat16")  # what is stored is not held beside it
    rest = at_depth(10_000, "bfloat16") - INTERPRETER_BYTES - half - 10_000 * routes
    assert 0 <= rest < half  # caches of a few tokens


def test_the_audit_holds_of_the_stored_tensors_those_that_it_computes_with(
    deep: tuple[Recipe, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint(deep[1] / "checkpoint")
    layers = (None, *range(NUM_LAYERS))
    dense = {name for layer in layers for name in checkpoint.dense_names(layer)}
    read = Checkpoint.tensor
    tensors: list[tuple[str, weakref.ref[torch.Tensor]]] = []
    routers = {name for name in dense if name.endswith("mlp.gate.weight")}  # float32 in any case
    held: list[set[str]] = []

    def tracked(opened: Checkpoint, name: str) -> torch.Tensor:
        held.append({name for name, tensor in tensors if tensor() is not None} - routers)
        tensor = read(opened, name)
        if name in dense:
            tensors.append((name, weakref.ref(tensor)))
        return tensor

    monkeypatch.setattr(Checkpoint, "tensor", tracked)
    audit.decode_target(checkpoint, [1, 2, 3], 2, "bfloat16")
    assert {name for name, _ in tensors} == dense
    assert max(map(len, held)) == 1  # the one before, until it is replaced


def test_a_config_that_is_no_object_is_refused(deep: tuple[Recipe, Path], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json: expected a JSON object, found list"):
        estimate(deep[0], tmp_path)


def test_audit_decodes_as_many_tokens_as_were_estimated() -> None:
    assert AUDIT_TOKENS == audit.PROMPT_TOKENS + audit.NUM_TOKENS


@pytest.mark.parametrize(
    ("asked", "dtype", "encoding"),
    [
        ("auto", torch.bfloat16, "packed"),
        ("auto", torch.float16, "raw"),
        ("auto", torch.float32, "raw"),
        ("raw", torch.bfloat16, "raw"),
        ("packed", torch.bfloat16, "packed"),
    ],
    ids=str,
)
def test_bfloat16_experts_are_packed_unless_the_recipe_says_raw(
    tmp_path: Path, asked: str, dtype: torch.dtype, encoding: str
) -> None:
    make_checkpoint(tmp_path, dtype=dtype)
    recipe = recipe_dict(tmp_path, tmp_path / "bundle", shard_encoding=asked)
    assert estimate(Recipe.model_validate(recipe), tmp_path).encoding == encoding


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_packing_what_is_not_bfloat16_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    make_checkpoint(tmp_path, dtype=dtype)
    recipe = recipe_dict(tmp_path, tmp_path / "bundle", shard_encoding="packed")
    with pytest.raises(RecipeError, match=r"shard_encoding: packed .* float\d\d; take raw"):
        estimate(Recipe.model_validate(recipe), tmp_path)
