"""Specter, what others do, and llama.cpp and accelerate themselves, side by side under memory caps.

    python benchmarks/make_gguf.py CHECKPOINT model.gguf
    python -m benchmarks.vs_peers PACKED RAW --gguf model.gguf --peer-python PYTHON
        --checkpoint CHECKPOINT --cap 1500MB --cap 2500MB --cap 4GB --resume results.jsonl

PACKED and RAW are bundles of CHECKPOINT that differ in ``shard_encoding``. All arms decode the same
prompts, handed over as token ids, from the same bfloat16 weights, greedily. Arms:

- ``specter``: the packed bundle as it is run when nothing is asked for.
- ``lru``: our runtime as Mixtral-Offloading does it: raw shards, LRU, on demand, nothing drafted, a
  layer computed when all its experts are there.
- ``lru+router``: the same, the next layer's router moving experts ahead while a layer is computed.
- ``llama.cpp``: through llama-cpp-python, for which ``--peer-python`` names an interpreter; the
  model is a mapped file, which the page cache keeps as much of as fits.
- ``accelerate``: transformers with all experts on disk, a layer's experts read whole.
- under ``--ablation-cap``, if it is one of the caps: ``specter`` with one part changed at a time.

Every measurement is a fresh process in a fresh memory group, whose limit is the cap (control groups
version 1, so it needs root), after the page cache has forgotten the model. Specter's budget is what
the cap leaves. ``specter`` and ``llama.cpp`` are also run with no cap and everything resident, from
their second pass over the prompts on. Arms that take seconds a token under a cap decode fewer there
(``--slow-tokens``, ``--slowest-tokens``): a time is a mean over the tokens behind the first. Arms
alternate, the order turns from repeat to repeat. accelerate rewrites the experts in a temporary
folder (``TMPDIR``), which should be on the same disk.

Prints a table a cap, the ablations, and one JSON object as the last line; columns as defined in
``peer_tables``. The link's rate is the best that was seen: two threads read random experts before
and after, two seconds at a time, and every run of ours is a sample, too. "Equal tokens" counts
leading tokens as Specter decodes them with all experts resident, in the worst prompt set: engines
differ in rounding, and behind a near tie texts part. Exits with 1 if an arm of ours decodes other
tokens (other kernels aside).

With ``--resume`` measurements are kept in a file, a line each, and not done again.
"""

from __future__ import annotations

import hashlib
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from benchmarks import capping
from benchmarks.peer_arms import ABLATIONS, ARMS, ARMS_BY_NAME, Arm
from benchmarks.peer_tables import Measurement, make_reference, make_rows, mean_over_sets, table
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.expert_store import ShardExpertStore, aligned_buffer
from specter_runtime.experts import ExpertKey
from specter_runtime.tokenizer import Tokenizer
from specter_runtime.units import parse_bytes

PROMPTS = Path(__file__).with_name("prompts.jsonl")
WORKER = Path(__file__).with_name("decode_worker.py")
NUM_THREADS = 2
LINK_THREADS = 2
LINK_SECONDS = 2.0
TIMEOUT_SECONDS = 3600.0
SLOWEST = ("accelerate", "torch's kernels")
COMPARED = ("lru", "llama.cpp")


@dataclass(frozen=True, slots=True)
class Step:
    """One measurement to be made."""

    repeat: int
    cap_bytes: int | None
    arm: Arm

    @property
    def key(self) -> tuple[Any, ...]:
        """What tells measurements apart in a file of results."""
        return (self.arm.name, self.cap_bytes, self.repeat)


@dataclass(frozen=True, slots=True)
class Setup:
    """What all measurements share.

    Attributes:
        models: paths by ``Arm.model``; an arm whose path is missing is left out.
        interpreters: by engine.
        bundles: their digests.
        prompts: token ids by prompt set.
        few_tokens: new tokens under a cap of those arms that do not decode ``max_new_tokens``.
    """

    models: Mapping[str, Path]
    interpreters: Mapping[str, Path]
    bundles: Sequence[str]
    prompts: Mapping[str, list[int]]
    max_new_tokens: int
    few_tokens: Mapping[str, int]

    def settings(self) -> dict[str, Any]:
        """What a file of results must agree with."""
        digest = hashlib.sha256(json.dumps(self.prompts, sort_keys=True).encode()).hexdigest()
        return {
            "bundles": list(self.bundles),
            "prompts_sha256": digest,
            "max_new_tokens": self.max_new_tokens,
            "few_tokens": dict(self.few_tokens),
        }

    def job(self, step: Step, scratch: Path) -> dict[str, Any]:
        """What ``decode_worker`` is told."""
        tokens = self.max_new_tokens
        if step.cap_bytes is not None:
            tokens = min(tokens, self.few_tokens.get(step.arm.name, tokens))
        return {
            "engine": step.arm.engine,
            "model": str(self.models[step.arm.model]),
            "options": dict(step.arm.options),
            "cap_bytes": step.cap_bytes,
            "prompts": self.prompts,
            "max_new_tokens": tokens,
            "num_threads": NUM_THREADS,
            "warm_up": step.cap_bytes is None,
            "scratch": str(scratch),
        }


class Results:
    """Measurements by step, and the link's rate, in memory and in a file of JSON lines."""

    def __init__(self, settings: dict[str, Any], path: Path | None) -> None:
        """Take over what the file holds.

        Raises:
            click.UsageError: the file's measurements were made with other settings.
        """
        self.runs: dict[tuple[Any, ...], dict[str, Any]] = {}
        self.link_rates: list[float] = []
        self._path = path
        if path is None or not path.exists():
            self._write({"settings": settings})
            return
        first, *lines = map(json.loads, path.read_text().splitlines())
        if first != {"settings": settings}:
            raise click.UsageError(f"{path} holds results of other settings: {first['settings']}")
        for line in lines:
            self._take(line)

    def add(self, record: dict[str, Any]) -> None:
        """Keep a measurement, or a rate of the link."""
        self._take(record)
        self._write(record)

    def _take(self, record: dict[str, Any]) -> None:
        if "link_bytes_per_second" in record:
            self.link_rates.append(record["link_bytes_per_second"])
        else:
            self.runs[record["arm"], record["cap_bytes"], record["repeat"]] = record

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps(record) + "\n")


@click.command()
@click.argument("packed", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("raw", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--cap", "caps", multiple=True, default=("1500MB", "2500MB", "4GB"), show_default=True
)
@click.option("--ablation-cap", default="2500MB", show_default=True, help="One of the caps.")
@click.option("--gguf", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--peer-python",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="An interpreter that has llama_cpp.",
)
@click.option(
    "--checkpoint",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="For accelerate.",
)
@click.option(
    "--arm", "arms", multiple=True, type=click.Choice(list(ARMS_BY_NAME)), help="Only these."
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option(
    "--slow-tokens",
    type=click.IntRange(min=2),
    default=16,
    show_default=True,
    help="Of llama.cpp under a cap.",
)
@click.option(
    "--slowest-tokens",
    type=click.IntRange(min=2),
    default=4,
    show_default=True,
    help=f"Of {' and '.join(SLOWEST)} under a cap.",
)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option(
    "--resume", type=click.Path(dir_okay=False, path_type=Path), help="File of measurements."
)
@click.option("--report-only", is_flag=True, help="Measure nothing, print what the file holds.")
def main(
    packed: Path,
    raw: Path,
    caps: tuple[str, ...],
    ablation_cap: str,
    gguf: Path | None,
    peer_python: Path | None,
    checkpoint: Path | None,
    arms: tuple[str, ...],
    max_new_tokens: int,
    slow_tokens: int,
    slowest_tokens: int,
    repeats: int,
    resume: Path | None,
    report_only: bool,
) -> None:
    """Measure and print."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # memory groups are removed then, too
    models = {
        "packed": packed,
        "raw": raw,
        "gguf": gguf if peer_python else None,
        "checkpoint": checkpoint,
    }
    setup = Setup(
        models={name: path for name, path in models.items() if path},
        interpreters={"llama.cpp": peer_python} if peer_python else {},
        bundles=[load_bundle(bundle).manifest.build_digest for bundle in (packed, raw)],
        prompts=read_prompts(packed),
        max_new_tokens=max_new_tokens,
        few_tokens={"llama.cpp": slow_tokens} | dict.fromkeys(SLOWEST, slowest_tokens),
    )
    chosen = [arm for arm in ARMS_BY_NAME.values() if not arms or arm.name in arms]
    for arm in chosen:
        if arm.model not in setup.models:
            click.echo(f"{arm.name} is left out: its options are not given", err=True)
    chosen = [arm for arm in chosen if arm.model in setup.models]
    steps = schedule(chosen, list(map(parse_bytes, caps)), parse_bytes(ablation_cap), repeats)
    if report_only and not (resume and resume.exists()):
        raise click.UsageError("--report-only needs the file of an earlier run as --resume")
    results = Results(setup.settings(), resume)
    if not report_only:
        capping.check_caps()
        measure_all(list(steps), setup, results)
    if not report(results, setup):
        sys.exit(1)


def read_prompts(bundle: Path) -> dict[str, list[int]]:
    """Token ids by prompt set."""
    tokenizer = Tokenizer(bundle)
    lines = map(json.loads, PROMPTS.read_text("utf-8").splitlines())
    return {line["set"]: tokenizer.encode(line["prompt"]) for line in lines}


def schedule(
    arms: Sequence[Arm], caps: Sequence[int], ablation_cap: int, repeats: int
) -> Iterator[Step]:
    """What to measure: repeat by repeat, with no cap first, in an order that turns every time."""
    for repeat in range(repeats):
        steps = [Step(repeat, None, arm) for arm in arms if arm.is_resident_too]
        steps += [
            Step(repeat, cap, arm)
            for cap in caps
            for arm in arms
            if cap == ablation_cap or arm not in ABLATIONS
        ]
        yield from steps if repeat % 2 == 0 else steps[::-1]


def measure_all(steps: Sequence[Step], setup: Setup, results: Results) -> None:
    """Measure what has not been, and the link before and after."""
    left = [step for step in steps if step.key not in results.runs]
    if not left:
        return
    bundles = [setup.models[name] for name in ("packed", "raw")]
    for bundle in bundles:
        results.add({"link_bytes_per_second": link_bytes_per_second(bundle)})
    for number, step in enumerate(left, start=1):
        started = time.perf_counter()
        record = measure(step, setup)
        seconds = time.perf_counter() - started
        click.echo(f"[{number}/{len(left)}, {seconds:.0f} s] {describe(step, record)}", err=True)
        if "failure" in record and step.arm.engine == "specter":
            raise click.ClickException(f"{step.arm.name}: {record['failure']}")
        results.add(record)
    for bundle in bundles:
        results.add({"link_bytes_per_second": link_bytes_per_second(bundle)})


def measure(step: Step, setup: Setup) -> dict[str, Any]:
    """One measurement."""
    capping.drop_page_cache(setup.models.values())
    interpreter = setup.interpreters.get(step.arm.engine, Path(sys.executable))
    with tempfile.TemporaryDirectory() as scratch:
        job = json.dumps(setup.job(step, Path(scratch)))
        found = capping.run_capped(
            [str(interpreter), str(WORKER), job],
            step.cap_bytes,
            step.arm.environment,
            TIMEOUT_SECONDS,
        )
    about = {"arm": step.arm.name, "engine": step.arm.engine}
    return {**about, "cap_bytes": step.cap_bytes, "repeat": step.repeat, **found}


def link_bytes_per_second(bundle: Path) -> float:
    """Rate at which threads read random experts as the cache reads them."""
    opened = load_bundle(bundle)
    store, model = ShardExpertStore.of(opened), opened.manifest.model
    keys = [ExpertKey(i, e) for i in model.moe_layers for e in range(model.num_experts)]
    started = time.perf_counter()

    def read(seed: int) -> int:
        choose, buffer, total = random.Random(seed), aligned_buffer(store.slot_bytes), 0
        while time.perf_counter() - started < LINK_SECONDS:
            key = choose.choice(keys)
            store.read_into(key, buffer)
            total += store.nbytes(key)
        return total

    with ThreadPoolExecutor(LINK_THREADS) as pool:
        total = sum(pool.map(read, range(LINK_THREADS)))
    if not store.is_direct:
        raise click.ClickException(f"{bundle}: the file system refuses direct I/O")
    return total / (time.perf_counter() - started)


def describe(step: Step, record: Measurement) -> str:
    """A line on what was found."""
    found = record.get("failure")
    if found is None:
        found = f"{mean_over_sets(record)['tpot_seconds'] * 1e3:.0f} ms a token"
    where = f"{step.arm.name}, {cap_name(step.cap_bytes)}, repeat {step.repeat + 1}"
    return f"{where}: {found}, peak {record['peak_bytes'] / 1e9:.2f} GB"


def cap_name(cap_bytes: int | None) -> str:
    """A cap, for people."""
    return "no cap" if cap_bytes is None else f"{cap_bytes / 1e9:.1f} GB"


def report(results: Results, setup: Setup) -> bool:
    """Print tables and JSON; returns whether our arms decoded the same tokens."""
    runs = list(results.runs.values())
    reference = make_reference(runs, results.link_rates)
    rows = make_rows(runs, list(ARMS_BY_NAME), reference)
    link = reference.link_bytes_per_second
    if link is not None:
        print(f"{setup.max_new_tokens} new tokens; link {link / 1e9:.2f} GB/s")
    summary = []
    for cap in dict.fromkeys(row.cap_bytes for row in rows):
        at_cap = {row.arm: row for row in rows if row.cap_bytes == cap}
        compared = {name: at_cap.get(name) for name in COMPARED}
        print(f"\n**{cap_name(cap)}**\n")
        print("\n".join(table([at_cap[a.name] for a in ARMS if a.name in at_cap], compared)))
        ablated = [at_cap[arm.name] for arm in ABLATIONS if arm.name in at_cap]
        if ablated:
            whole = {name: at_cap[name] for name in ("specter",) if name in at_cap}
            print(f"\n**{cap_name(cap)}: specter with one part changed**\n")
            print("\n".join(table([*whole.values(), *ablated], whole)))
        compared["specter"] = at_cap.get("specter")
        for row in at_cap.values():
            ratios = {name: row.ratio_to(other) for name, other in compared.items()}
            summary.append({**row.to_dict(), "times_faster_than": ratios})
    print(json.dumps({**setup.settings(), "link_bytes_per_second": link, "rows": summary}))
    others = [row for row in rows if ARMS_BY_NAME[row.arm].is_exact and not row.is_equal]
    for row in others:
        text = f"{row.arm}, {cap_name(row.cap_bytes)}: other tokens than with all experts resident"
        click.echo(text, err=True)
    return not others


if __name__ == "__main__":
    main()
