"""What is compared, in which order, and how a comparison goes on where it stopped."""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

import click
import pytest

from benchmarks import capping, decode_worker, vs_peers
from benchmarks.peer_arms import ABLATIONS, ARMS, ARMS_BY_NAME
from specter_runtime.config import RuntimeConfig

GB = 10**9


@pytest.fixture
def setup(tmp_path: Path) -> vs_peers.Setup:
    return vs_peers.Setup(
        models={"packed": tmp_path, "raw": tmp_path, "gguf": tmp_path, "checkpoint": tmp_path},
        interpreters={},
        bundles=["one", "other"],
        prompts={"chat": [1, 2], "code": [3]},
        max_new_tokens=32,
        few_tokens={"llama.cpp": 8},
    )


def test_options_are_fields_of_the_runtimes_configuration() -> None:
    fields = {field.name for field in dataclasses.fields(RuntimeConfig)}
    for arm in ARMS_BY_NAME.values():
        assert set(arm.options) <= fields, arm.name
        RuntimeConfig(**arm.options)


def test_ablations_change_something_and_have_names_of_their_own() -> None:
    assert len(ARMS_BY_NAME) == len(ARMS) + len(ABLATIONS)
    whole = ARMS_BY_NAME["specter"]
    for arm in ABLATIONS:
        changed = RuntimeConfig(**arm.options) != RuntimeConfig(**whole.options)
        assert changed + (arm.model != whole.model) + bool(arm.environment) == 1, arm.name


def test_engines_are_those_that_the_worker_has() -> None:
    assert {arm.engine for arm in ARMS_BY_NAME.values()} == set(decode_worker.ENGINES)


def test_worker_needs_nothing_but_the_standard_library_to_start() -> None:
    tree = ast.parse(Path(decode_worker.__file__).read_text())
    names = [
        name.split(".")[0]
        for node in tree.body
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert names
    assert set(names) <= sys.stdlib_module_names


def test_order_turns_and_nothing_is_measured_twice() -> None:
    arms = [ARMS_BY_NAME[name] for name in ("specter", "lru", "raw shards")]
    steps = list(vs_peers.schedule(arms, [GB, 2 * GB], 2 * GB, 2))
    first = [step.key[:2] for step in steps if step.repeat == 0]
    assert first == [
        ("specter", None),
        ("specter", GB),
        ("lru", GB),
        ("specter", 2 * GB),
        ("lru", 2 * GB),
        ("raw shards", 2 * GB),
    ]
    assert [step.key[:2] for step in steps if step.repeat == 1] == first[::-1]
    assert len({step.key for step in steps}) == len(steps)


def test_no_ablation_where_its_cap_is_not_measured() -> None:
    steps = vs_peers.schedule(list(ARMS_BY_NAME.values()), [GB], 2 * GB, 1)
    assert all(step.arm in ARMS for step in steps)


def test_slow_arms_decode_less_under_a_cap_only(setup: vs_peers.Setup, tmp_path: Path) -> None:
    def num_tokens(name: str, cap: int | None) -> int:
        job = setup.job(vs_peers.Step(0, cap, ARMS_BY_NAME[name]), tmp_path)
        assert job["warm_up"] is (cap is None)
        return int(job["max_new_tokens"])

    assert num_tokens("llama.cpp", GB) == 8
    assert num_tokens("llama.cpp", None) == 32
    assert num_tokens("specter", GB) == 32


def test_results_are_taken_up_where_they_stopped(setup: vs_peers.Setup, tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results = vs_peers.Results(setup.settings(), path)
    step = vs_peers.Step(1, None, ARMS_BY_NAME["specter"])
    results.add({"arm": "specter", "cap_bytes": None, "repeat": 1, "sets": {}})
    results.add({"link_bytes_per_second": 2.0})
    resumed = vs_peers.Results(setup.settings(), path)
    assert set(resumed.runs) == {step.key}
    assert resumed.link_rates == [2.0]
    other = dataclasses.replace(setup, max_new_tokens=33)
    with pytest.raises(click.UsageError, match="other settings"):
        vs_peers.Results(other.settings(), path)


def test_steps_are_timed_behind_the_first_token() -> None:
    fed: list[list[int]] = []

    def step(ids: list[int]) -> int:
        fed.append(ids)
        return 10 * len(fed)

    found = decode_worker.decode_stepwise(step, [1, 2, 3], 3)
    assert fed == [[1, 2, 3], [10], [20]]
    assert found["tokens"] == [10, 20, 30]
    assert found["tpot_seconds"] > 0
    numbers = decode_worker.measured([1, 2, 3], [5.0, 6.0, 9.0], 100, stall_seconds=1.0)
    assert numbers == {
        "tokens": [1, 2, 3],
        "tpot_seconds": 2.0,
        "bytes_per_token": 50.0,
        "stall_seconds_per_token": 0.5,
    }


def test_a_kill_for_memory_is_told_from_other_failures(tmp_path: Path) -> None:
    control = tmp_path / "memory.oom_control"
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 0\n")
    assert not capping.was_out_of_memory(tmp_path)
    control.write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 1\n")
    assert capping.was_out_of_memory(tmp_path)
