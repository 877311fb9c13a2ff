"""The two commands as a user meets them: what goes where, exit codes, no traceback on bad input.

Most tests call the entry points in this process; what needs a process of its own (signals, a
closed pipe) starts one.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import specter_runtime.measure_hardware
from specter_build.cli import main_build, main_simulate
from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.bundle_loader import file_sha256
from specter_runtime.cli import main_bench, main_run
from specter_runtime.config import RuntimeConfig, SamplingConfig
from specter_runtime.hardware import load_hardware
from specter_runtime.session import Session
from specter_runtime.simulated_bundle import SimulatedBundle
from tests.checkpoints import make_checkpoint, recipe_dict, write_recipe
from tests.commands import Command, Outcome

PROMPT = "def f(x):"
NEW_TOKENS = 12
SMALL: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_experts": 4}


@pytest.fixture
def specter_run(command: Command) -> Command:
    return lambda *arguments: command(main_run, *arguments)


@pytest.fixture
def specter_simulate(command: Command) -> Command:
    return lambda *arguments: command(main_simulate, *arguments)


@pytest.fixture
def specter_build(command: Command) -> Command:
    return lambda *arguments: command(main_build, *arguments)


def text_of(bundle: Path) -> str:
    """What the model says, without the command line."""
    with Session.open(bundle, RuntimeConfig()) as session:
        ids = session.tokenizer.encode(PROMPT)
        return "".join(session.stream(ids, NEW_TOKENS, SamplingConfig()))


def num_tokens_of(bundle: Path) -> int:
    """How many tokens that takes: an end token may come before the limit."""
    with Session.open(bundle, RuntimeConfig()) as session:
        return len(list(session.generate_ids(session.tokenizer.encode(PROMPT), NEW_TOKENS)))


def refused(outcome: Outcome) -> str:
    """The message of bad input: exit code 2, nothing on stdout."""
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "Traceback" not in outcome.stderr
    return outcome.stderr


def start(main: str, *arguments: object, **options: Any) -> subprocess.Popen[bytes]:
    """A command in a process of its own, in binary mode."""
    module, function = main.split(":")
    code = f"import sys; from {module} import {function}; {function}()"
    # Windows of many threads would only fight for the cores that the tests have.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
        **options,
    )


def test_commands_are_installed_as_entry_points() -> None:
    scripts = {script.name: script.value for script in entry_points(group="console_scripts")}
    assert scripts["specter-run"] == "specter_runtime.cli:main_run"
    assert scripts["specter-build"] == "specter_build.cli:main_build"


# ---- specter-run: what goes where -----------------------------------------------------------


def test_text_alone_is_on_stdout(specter_run: Command, tiny_bundle: Path) -> None:
    outcome = specter_run(tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS)
    assert outcome.code == 0
    assert outcome.stdout == text_of(tiny_bundle) + "\n"
    assert outcome.stderr == ""


def test_stats_are_on_stderr_and_leave_stdout_as_it_was(
    specter_run: Command, tiny_bundle: Path
) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS)
    outcome = specter_run(tiny_bundle, *options, "--stats")
    assert (outcome.code, outcome.stdout) == (0, text_of(tiny_bundle) + "\n")
    for part in (
        f"{len(PROMPT)} in, {num_tokens_of(tiny_bundle)} out",
        "TTFT",
        "TPOT",
        "acceptance",
        "windows     K = 0: ",
        "hits",
        "late hits",
        "misses",
        "a token, busy",
        "stalled",
        "dense",
        "draft",
        "kv_cache",
        "slots of",
        "budget 3.0 MiB",
    ):
        assert part in outcome.stderr


def test_stats_of_a_single_token_have_no_rates(specter_run: Command, tiny_bundle: Path) -> None:
    outcome = specter_run(
        tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", 1, "--stats", "--json"
    )
    assert outcome.code == 0
    assert "TPOT        - ms" in outcome.stderr
    assert json.loads(outcome.stdout.splitlines()[-1])["tpot_seconds"] is None


PROMISED_KEYS = {
    "prompt",
    "text",
    "device",
    "num_prompt_tokens",
    "num_new_tokens",
    "ttft_seconds",
    "tpot_seconds",
    "acceptance_rate",
    "mean_acceptance_length",
    "num_drafted",
    "num_accepted",
    "windows_by_lookahead",
    "hits",
    "late_hits",
    "misses",
    "bytes_per_token",
    "stall_seconds",
    "link_busy_share",
    "memory",
}


def test_json_is_the_last_line_and_one_object(specter_run: Command, tiny_bundle: Path) -> None:
    outcome = specter_run(tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--json")
    text, last_line = outcome.stdout.removesuffix("\n").rsplit("\n", 1)
    result = json.loads(last_line)
    assert result.keys() >= PROMISED_KEYS
    assert (result["prompt"], result["text"], result["device"]) == (PROMPT, text, "cpu")
    assert text == text_of(tiny_bundle)
    assert result["num_prompt_tokens"] == len(PROMPT)
    assert result["num_new_tokens"] == num_tokens_of(tiny_bundle)
    assert 0 <= result["num_accepted"] <= result["num_drafted"]
    assert result["acceptance_rate"] == result["num_accepted"] / result["num_drafted"]
    assert outcome.stderr == ""


def test_prompt_may_come_from_a_file(
    specter_run: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    (tmp_path / "prompt.txt").write_text(PROMPT)
    outcome = specter_run(
        tiny_bundle, "--prompt-file", tmp_path / "prompt.txt", "--max-new-tokens", NEW_TOKENS
    )
    assert (outcome.code, outcome.stdout) == (0, text_of(tiny_bundle) + "\n")


@pytest.mark.parametrize("num_draft_tokens", [0, 3, "auto"])
def test_lookahead_and_budget_do_not_change_the_text(
    specter_run: Command, tiny_bundle: Path, num_draft_tokens: int | str
) -> None:
    outcome = specter_run(
        tiny_bundle,
        *("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS),
        *("--num-draft-tokens", num_draft_tokens, "--memory-budget", "2.5 MiB", "--verify"),
    )
    assert (outcome.code, outcome.stdout) == (0, text_of(tiny_bundle) + "\n")


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        (("--num-draft-tokens", 0), {"K = 0"}),
        (("--num-draft-tokens", 0, "--predictor", "fitted"), {"K = 0 + predictor"}),
        (
            ("--num-draft-tokens", 3, "--no-draft-stop", "--memory-budget", "4MiB"),
            {"K = 3"},
        ),
        (("--no-governor", "--memory-budget", "4MiB"), {"K = 4"}),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_options_say_what_is_left_to_the_governor(
    specter_run: Command, tiny_bundle: Path, options: tuple[object, ...], ways: set[str]
) -> None:
    outcome = specter_run(
        tiny_bundle, "--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, *options, "--json"
    )
    result = json.loads(outcome.stdout.splitlines()[-1])
    assert result["windows_by_lookahead"].keys() == ways
    assert sum(result["windows_by_lookahead"].values()) == result["num_windows"]
    assert result["text"] == text_of(tiny_bundle)


def test_seed_decides_what_is_sampled(specter_run: Command, tiny_bundle: Path) -> None:
    """At temperature 100 all 260 tokens are about equally likely: two seeds give the same first
    three (an end token aside) with a chance below (2 / 260) ** 3 < 1e-6.
    """
    options = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--temperature", 100)
    first, again, other = (
        specter_run(tiny_bundle, *options, "--seed", seed).stdout for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


# ---- specter-run: bad input -----------------------------------------------------------------


@pytest.mark.parametrize(
    "prompts",
    [(), ("--prompt", "a", "--chat"), ("--prompt", "a", "--prompt-file", __file__)],
    ids=["none", "prompt and chat", "prompt and file"],
)
def test_exactly_one_kind_of_prompt_is_taken(
    specter_run: Command, tiny_bundle: Path, prompts: tuple[str, ...]
) -> None:
    message = refused(specter_run(tiny_bundle, *prompts))
    assert "give exactly one of --prompt, --prompt-file and --chat" in message


@pytest.mark.parametrize("name", ["absent", "a-file", "a-folder"])
def test_what_is_no_bundle_is_refused_by_path(
    specter_run: Command, tmp_path: Path, name: str
) -> None:
    (tmp_path / "a-file").write_text("")
    (tmp_path / "a-folder").mkdir()
    message = refused(specter_run(tmp_path / name, "--prompt", PROMPT))
    assert f"error: {tmp_path / name}: no manifest.json; not a bundle" in message


def test_path_that_the_file_system_refuses_is_no_bundle(
    specter_run: Command, tmp_path: Path
) -> None:
    """As when a prompt is given where the bundle belongs."""
    name = "x" * 300  # longer than a file name may be
    assert name in refused(specter_run(tmp_path / name, "--prompt", PROMPT))


def test_damaged_bundle_is_refused_by_file(
    specter_run: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    shard = "experts/layer-000/expert-000.safetensors"
    content = bytearray((bundle / shard).read_bytes())
    content[-1] ^= 1
    (bundle / shard).write_bytes(content)
    assert shard in refused(specter_run(bundle, "--prompt", PROMPT, "--verify"))
    (bundle / shard).write_bytes(content[:-1])
    assert shard in refused(specter_run(bundle, "--prompt", PROMPT))


@pytest.mark.parametrize("budget", ["100KiB", "1", "0"])
def test_budget_without_room_is_refused_with_the_minimum(
    specter_run: Command, tiny_bundle: Path, budget: str
) -> None:
    message = refused(specter_run(tiny_bundle, "--prompt", PROMPT, "--memory-budget", budget))
    assert "error: a memory budget of" in message
    assert "the minimum is" in message


def test_minimum_that_is_stated_suffices_and_a_byte_less_does_not(
    specter_run: Command, tiny_bundle: Path
) -> None:
    options = ("--prompt", PROMPT, "--max-new-tokens", NEW_TOKENS, "--memory-budget")
    message = refused(specter_run(tiny_bundle, *options, "100KiB"))
    minimum = int(message.split("(")[1].split(" bytes)")[0])
    refused(specter_run(tiny_bundle, *options, minimum - 1))
    outcome = specter_run(tiny_bundle, *options, minimum)
    assert (outcome.code, outcome.stdout) == (0, text_of(tiny_bundle) + "\n")


@pytest.mark.parametrize(
    ("options", "part"),
    [
        (("--max-context", 16, "--max-new-tokens", 8), "need a context of 17, there is room for"),
        (("--max-new-tokens", 1000), "need a context of 1009, there is room for 256"),
        (("--max-context", 513), "more than the model's max_position_embeddings, 512"),
        (("--memory-budget", "4 cows"), "'4 cows' is not a size; write e.g. 4GiB"),
        (("--memory-budget", "-1"), "'-1' is not a size"),
        (("--num-draft-tokens", "65"), "neither 'auto' nor a number from 0 to 64"),
        (("--num-draft-tokens", "some"), "neither 'auto' nor a number from 0 to 64"),
        (("--max-new-tokens", 0), "--max-new-tokens"),
        (("--temperature", "-1"), "--temperature"),
        (("--temperature", "nan"), "--temperature"),
        (("--temperature", 1, "--top-p", 0), "--top-p"),
        (("--temperature", 1, "--top-p", "nan"), "--top-p"),
        (("--temperature", 1, "--seed", 2**70), "--seed"),
        (("--device", "tpu"), "--device"),
        (("--dtype", "int8"), "--dtype"),
        (("--io-threads", 0), "--io-threads"),
        (("--frobnicate",), "--frobnicate"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_wrong_option_is_refused(
    specter_run: Command, tiny_bundle: Path, options: tuple[object, ...], part: str
) -> None:
    assert part in refused(specter_run(tiny_bundle, "--prompt", PROMPT, *options))


def test_empty_prompt_is_refused(specter_run: Command, tiny_bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    for prompt in (("--prompt", ""), ("--prompt-file", tmp_path / "empty.txt")):
        assert "error: the prompt is empty" in refused(specter_run(tiny_bundle, *prompt))


def test_prompt_that_is_not_utf8_is_refused(
    specter_run: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    """A byte that is not UTF-8 comes from the command line as a lone surrogate."""
    (tmp_path / "prompt.txt").write_bytes(b"caf\xe9")
    assert "not UTF-8" in refused(
        specter_run(tiny_bundle, "--prompt-file", tmp_path / "prompt.txt")
    )
    assert "not UTF-8" in refused(specter_run(tiny_bundle, "--prompt", os.fsdecode(b"caf\xe9")))


# ---- specter-run: chat ----------------------------------------------------------------------

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)


@pytest.fixture(scope="module")
def chat_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_bundle`` with a chat template, as a checkpoint that has one would give. Read only."""
    bundle = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("chat") / "bundle"))
    template, manifest = bundle / "chat_template.jinja", bundle / "manifest.json"
    template.write_text(TEMPLATE)
    content = json.loads(manifest.read_text())
    entry = {"nbytes": template.stat().st_size, "sha256": file_sha256(template)}
    content["files"][template.name] = entry
    manifest.write_text(json.dumps(content))
    return bundle


def chat_answers(bundle: Path, *lines: str) -> list[str]:
    """What the model answers to each line, from the conversation written out by hand."""
    conversation, answers = "", []
    with Session.open(bundle, RuntimeConfig()) as session:
        for line in lines:
            conversation += f"user: {line}\n"
            ids = [256, *session.tokenizer.encode(conversation + "assistant: ")]
            answers.append("".join(session.stream(ids, NEW_TOKENS, SamplingConfig())))
            conversation += f"assistant: {answers[-1]}\n"
    return answers


def test_chat_answers_each_line_in_view_of_those_before(
    specter_run: Command, chat_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n\n  what? \n"))
    outcome = specter_run(chat_bundle, "--chat", "--max-new-tokens", NEW_TOKENS)
    assert outcome.code == 0
    answers = chat_answers(chat_bundle, "hello", "what?")
    assert outcome.stdout == "".join(f"{answer}\n" for answer in answers)
    assert outcome.stderr.startswith("> ")


def test_chat_without_a_template_is_refused(
    specter_run: Command, tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\n"))
    message = refused(specter_run(tiny_bundle, "--chat"))
    assert "the model has no chat template; use --prompt instead" in message


# ---- specter-run: a process of its own ------------------------------------------------------


@pytest.fixture(scope="module")
def endless_bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with a long context and no end token, to be interrupted. Read only."""
    folder = tmp_path_factory.mktemp("endless")
    length = 60_000
    make_checkpoint(
        folder / "checkpoint", max_position_embeddings=length, eos_token_id=None, **SMALL
    )
    plan = {"max_context_tokens": length, "memory_budget": "200MiB"}
    recipe = recipe_dict(
        folder / "checkpoint",
        folder / "bundle",
        calibration={"num_sequences": 1, "sequence_length": 32},
        plan=plan,
    )
    return build(Recipe.model_validate(recipe), folder).destination


@pytest.fixture
def endless_run(endless_bundle: Path) -> Iterator[subprocess.Popen[bytes]]:
    """``specter-run`` that would print for minutes, once it has begun to print."""
    process = start(
        "specter_runtime.cli:main_run",
        *(endless_bundle, "--prompt", PROMPT, "--max-new-tokens", 50_000),
    )
    assert process.stdout is not None
    assert process.stdout.read(1)
    yield process
    process.kill()
    process.communicate()


def test_interrupt_ends_with_code_130_and_no_traceback(
    endless_run: subprocess.Popen[bytes],
) -> None:
    endless_run.send_signal(signal.SIGINT)
    _, stderr = endless_run.communicate(timeout=60)
    assert endless_run.returncode == 130
    assert stderr.strip() == b""


def test_reader_that_goes_away_ends_the_run_quietly(endless_run: subprocess.Popen[bytes]) -> None:
    """As in ``specter-run ... | head -c 1``; it is not an error that a reader had enough."""
    assert endless_run.stdout is not None
    endless_run.stdout.close()
    assert endless_run.stderr is not None
    assert endless_run.stderr.read() == b""
    assert endless_run.wait(timeout=60) == 0


# ---- specter-build --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds in less time than ``tiny_checkpoint``. Read only."""
    folder = tmp_path_factory.mktemp("small")
    make_checkpoint(folder, **SMALL)
    return folder


@pytest.fixture
def recipe_file(small_checkpoint: Path, tmp_path: Path) -> Path:
    content = recipe_dict(small_checkpoint, Path("bundle"))
    content["calibration"] |= {"files": ["text.txt"], "num_sequences": 2, "sequence_length": 32}
    (tmp_path / "text.txt").write_text("def f(x):\n    return x + 1\n" * 4)
    return write_recipe(tmp_path / "recipe.yaml", content)


def test_build_prints_the_bundles_path_on_stdout_and_the_report_on_stderr(
    specter_build: Command, recipe_file: Path
) -> None:
    bundle = recipe_file.parent / "bundle"
    outcome = specter_build(recipe_file)
    assert (outcome.code, outcome.stdout) == (0, f"{bundle}\n")
    for part in ("recall", "acceptance", "bits a weight", "slots", "draft tokens", "peak memory"):
        assert part in outcome.stderr
    assert (bundle / "manifest.json").is_file()
    again = specter_build(recipe_file)
    assert (again.code, again.stdout) == (0, f"{bundle}\n")
    assert "up to date, nothing to do" in again.stderr


def test_options_override_the_recipe(specter_build: Command, recipe_file: Path) -> None:
    bundle = recipe_file.parent / "else where" / "back\\slash"
    outcome = specter_build(recipe_file, "--out", bundle, "--set", "draft.bits=2")
    assert (outcome.code, outcome.stdout) == (0, f"{bundle}\n")
    assert json.loads((bundle / "report.json").read_text())["draft"]["bits"] == 2


def test_relative_out_is_relative_to_the_working_folder(
    specter_build: Command, recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (recipe_file.parent / "here").mkdir()
    monkeypatch.chdir(recipe_file.parent / "here")
    outcome = specter_build("../recipe.yaml", "--out", "mine", "--dry-run")
    assert outcome.code == 0
    assert f" at {recipe_file.parent / 'here' / 'mine'}\n" in outcome.stderr


def test_dry_run_prints_sizes_and_writes_nothing(specter_build: Command, recipe_file: Path) -> None:
    before = sorted(recipe_file.parent.rglob("*"))
    outcome = specter_build(recipe_file, "--dry-run", "--set", "plan.num_draft_tokens=auto")
    assert (outcome.code, outcome.stdout) == (0, "")
    assert f" at {recipe_file.parent / 'bundle'}\n" in outcome.stderr
    for num_draft_tokens in (0, 1, 2, 4, 8, 16):
        assert f" {num_draft_tokens} draft tokens in 3.0 MiB: " in outcome.stderr
    for part in ("of memory", "slots of", "dense", "draft", "predictor", "KV cache", "buffers"):
        assert part in outcome.stderr
    assert sorted(recipe_file.parent.rglob("*")) == before


def test_dry_run_needs_no_weights(
    specter_build: Command, recipe_file: Path, small_checkpoint: Path
) -> None:
    (recipe_file.parent / "config-only").mkdir()
    shutil.copy(small_checkpoint / "config.json", recipe_file.parent / "config-only")
    with_weights, without = (
        specter_build(recipe_file, "--dry-run", "--set", f"model={model}")
        for model in (small_checkpoint, "config-only")
    )
    assert (without.code, without.stdout) == (0, "")
    remark = " (no weights here: sizes from config.json alone)"
    assert remark in without.stderr
    lines = without.stderr.replace(remark, "").splitlines(), with_weights.stderr.splitlines()
    for first, second in zip(*lines, strict=True):
        assert first.startswith("build") or first == second  # it tells the memory available


def test_dry_run_refuses_what_the_build_would_refuse(
    specter_build: Command, recipe_file: Path
) -> None:
    (recipe_file.parent / "bundle").mkdir()
    (recipe_file.parent / "bundle" / "precious.txt").write_text("")
    for options in ((), ("--dry-run",)):
        message = refused(specter_build(recipe_file, *options))
        assert "exists and is no bundle; it is left alone" in message


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("draft.bit=4", "draft.bit: unknown key; did you mean 'bits'?"),
        ("draft.bits=5", "draft.bits"),
        ("draft.bits", "expected key=value"),
        ("output=2024-13-45", "output"),
        ("model=absent", "is no folder and 'absent' is no hub id"),
        ("plan.memory_budget=1KiB", "the minimum is"),
        ("plan.max_context_tokens=513", "max_position_embeddings"),
        ("calibration.files=[absent.txt]", "absent.txt: cannot be read"),
    ],
)
def test_bad_recipe_is_refused_and_nothing_written(
    specter_build: Command, recipe_file: Path, override: str, part: str
) -> None:
    before = sorted(recipe_file.parent.rglob("*"))
    message = refused(specter_build(recipe_file, "--set", override))
    assert "error: " in message
    assert part in message
    assert sorted(recipe_file.parent.rglob("*")) == before


def test_absent_recipe_is_refused_by_path(specter_build: Command, tmp_path: Path) -> None:
    assert str(tmp_path / "absent.yaml") in refused(specter_build(tmp_path / "absent.yaml"))


# ---- specter-bench -----------------------------------------------------------------------------


def test_bench_writes_a_profile_that_simulate_takes(
    command: Command, tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(specter_runtime.measure_hardware, "REPEATS", 2)
    monkeypatch.setattr(specter_runtime.measure_hardware, "READ_SECONDS", 0.01)
    path = tmp_path / "mine.json"
    found = command(main_bench, tiny_bundle, "--measure-hardware", path, "--name", "A desk")
    assert (found.code, found.stderr) == (0, "")
    assert found.stdout == path.read_text("utf-8")
    assert json.loads(found.stdout)["name"] == "A desk"
    simulated = command(main_simulate, tiny_bundle, "--hardware", path)
    assert simulated.code == 0
    assert "on A desk" in simulated.stdout


def test_bench_that_fails_leaves_nothing(
    command: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    cases = (
        ((tiny_bundle, "--measure-hardware", tmp_path / "no" / "x.json"), "no folder to write in"),
        ((tmp_path, "--measure-hardware", tmp_path / "x.json"), "manifest.json"),
        (
            (tiny_bundle, "--measure-hardware", tmp_path / "x.json", "--memory-budget", "1kB"),
            "the minimum is",
        ),
        ((tiny_bundle,), "--measure-hardware"),
    )
    for arguments, message in cases:
        found = command(main_bench, *arguments)
        assert (found.code, found.stdout) == (2, "")
        assert message in found.stderr
        assert "Traceback" not in found.stderr
        assert list(tmp_path.iterdir()) == []


# ---- specter-simulate -----------------------------------------------------------------------


def test_simulate_prints_a_row_for_each_policy_and_the_same_as_json(
    specter_simulate: Command, tiny_bundle: Path
) -> None:
    found = specter_simulate(tiny_bundle, "--hardware", "laptop-nvme", "--json")
    assert found.code == 0, found
    lines = found.stdout.splitlines()
    ((_, rows),) = json.loads(lines[-1])["by_budget"].items()
    names = [row["policy"] for row in rows]
    assert {"specter", "plain LRU", "lru", "oracle", "oracle, 50% wrong", "a draft of 2"} <= {
        *names
    }
    shown = [line for line in lines if any(line.startswith(f"{name} ") for name in names)]
    assert len(shown) == len(rows)
    for line, row in zip(shown, rows, strict=True):
        assert line.split()[-1] == str(row["tokens a pass"])
        assert row["TPOT ms"] > 0


def test_sweep_is_every_combination_as_simulated_alone(
    specter_simulate: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    page = tmp_path / "sweep.html"
    least = SimulatedBundle(tiny_bundle).planned_budget_bytes
    found = specter_simulate(
        *(tiny_bundle, "--hardware", "laptop-nvme", "--sweep", "--json", "--html", page),
        *("--memory-budget", "1kB", "--memory-budget", least),
        *("--num-draft-tokens", 0, "--num-draft-tokens", 2, "--link", "100MB", "--link", "2GB"),
    )
    assert found.code == 0, found
    *lines, last = found.stdout.splitlines()
    points = json.loads(last)["points"]
    keys = ("link_bytes_per_second", "num_draft_tokens", "memory_budget_bytes")
    assert [tuple(point[key] for key in keys) for point in points] == [
        (link, k, budget) for link in (1e8, 2e9) for k in (0, 2) for budget in (1000, least)
    ]
    bundle, profile = SimulatedBundle(tiny_bundle), load_hardware("laptop-nvme")
    for point in points:
        if point["memory_budget_bytes"] == 1000:
            assert (point["num_slots"], point["tpot_seconds"]) == (None, None)
            continue
        k = point["num_draft_tokens"]
        arm = bundle.arms(k)["a draft of 2" if k else "specter"]
        link = replace(profile, link_bytes_per_second=point["link_bytes_per_second"])
        num_slots, alone = bundle.run(arm, link, least)
        assert (point["num_slots"], point["tpot_seconds"]) == (num_slots, alone.tpot_seconds)
    assert len(lines) == 1 + len(points)
    assert [line.split()[-2] == "-" for line in lines[1:]] == [True, False] * 4
    root = ElementTree.fromstring(page.read_text("utf-8"))
    headings = [element.text for element in root.iter("{http://www.w3.org/1999/xhtml}h2")]
    name = tiny_bundle.name
    assert headings == [f"{name}, link 100 MB/s", f"{name}, link 2000 MB/s", "All points"]


def test_sweep_options_without_a_sweep_are_refused(
    specter_simulate: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    page = tmp_path / "sweep.html"
    common = (tiny_bundle, "--hardware", "laptop-nvme")
    for options in (
        (*common, "--html", page),
        (*common, "--link", "1GB"),
        (tiny_bundle, *common),
        (*common, "--num-draft-tokens", 1, "--num-draft-tokens", 2),
        (tiny_bundle, *common, "--sweep"),
        (*common, "--sweep", "--html", tmp_path / "no" / "sweep.html"),
    ):
        found = specter_simulate(*options)
        assert (found.code, found.stdout) == (2, ""), options
        assert "Traceback" not in found.stderr
    assert not page.exists()


def test_simulate_names_what_is_wrong(
    specter_simulate: Command, tiny_bundle: Path, tmp_path: Path
) -> None:
    profile = tmp_path / "mine.json"
    profile.write_text("{}")
    cases = (
        ((tiny_bundle, "--hardware", "rtx-1"), "rtx-1: no such file"),
        ((tiny_bundle, "--hardware", profile), "mine.json: missing 'name'"),
        ((tiny_bundle, "--hardware", "rtx-4090", "--memory-budget", "1kB"), "the minimum is"),
        ((tmp_path, "--hardware", "rtx-4090"), "manifest.json"),
    )
    for arguments, message in cases:
        found = specter_simulate(*arguments)
        assert (found.code, found.stdout) == (2, "")
        assert message in found.stderr
        assert "Traceback" not in found.stderr
