"""Plain decoding under memory caps: packed against raw shards, with and without lookahead.

    python benchmarks/capped.py PACKED RAW --cap 2500MB --cap 1500MB

Two bundles of one checkpoint, which differ in ``shard_encoding``. Every run is a process of its own
in a memory group of its own (control groups version 1, so it needs root), whose limit is the cap:
everything counts, interpreter, libraries and page cache included, and the kernel says how often the
limit was hit. The budget handed to Specter is what the cap leaves when all libraries are loaded.
Arms alternate from repeat to repeat; all must decode the same tokens.

Prints a table a cap, and one JSON object as the last line. Times are medians over repeats of the
mean over prompt sets; spread is (max - min) / median. Before them, the time with all experts
resident and no cap.
"""

from __future__ import annotations

import hashlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: see specter_runtime.cli

import click

GROUPS = Path("/sys/fs/cgroup/memory")
MARGIN_BYTES = 96 << 20  # allocator slack and what torch takes for its first operators
PROMPTS = Path(__file__).with_name("prompts.jsonl")
ROOMY = 1 << 62


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to decode."""

    name: str
    is_packed: bool
    options: dict[str, Any]


ARMS = (
    Arm("packed, on demand", True, {}),
    Arm("packed, next layer's router", True, {"predict_next_layer": True}),
    Arm("raw, on demand", False, {}),
    Arm("raw, next layer's router", False, {"predict_next_layer": True}),
)


@click.command()
@click.argument("packed", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("raw", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--cap", "caps", multiple=True, default=("2500MB",), show_default=True)
@click.option("--max-new-tokens", default=128, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--worker", default=None, hidden=True, help="One run, as JSON.")
def main(
    packed: Path, raw: Path, caps: tuple[str, ...], max_new_tokens: int, repeats: int, worker: str
) -> None:
    """Measure and print."""
    if worker is not None:
        print(json.dumps(decode(json.loads(worker))))
        return
    if not os.access(GROUPS, os.W_OK):
        raise click.ClickException(f"{GROUPS} cannot be written: caps need root and cgroup v1")
    from specter_runtime.units import parse_bytes

    job = {"max_new_tokens": max_new_tokens}
    resident = run(job | {"bundle": str(packed), "options": {}, "cap_bytes": ROOMY})
    print(f"no cap, packed, all resident: {resident['tpot_seconds'] * 1e3:.0f} ms a token")
    results: list[dict[str, Any]] = []
    for cap in map(parse_bytes, caps):
        runs: dict[str, list[dict[str, Any]]] = {arm.name: [] for arm in ARMS}
        for repeat in range(repeats):
            for arm in ARMS if repeat % 2 == 0 else ARMS[::-1]:
                bundle = str(packed if arm.is_packed else raw)
                found = run(job | {"bundle": bundle, "options": arm.options, "cap_bytes": cap})
                if found["tokens_sha256"] != resident["tokens_sha256"]:
                    raise SystemExit(f"{arm.name} decoded other tokens than with all resident")
                runs[arm.name].append(found)
        results += report(cap, runs)
    print(json.dumps({"resident_tpot_seconds": resident["tpot_seconds"], "results": results}))


def run(job: dict[str, Any]) -> dict[str, Any]:
    """One process in a memory group of its own."""
    with memory_group(job["cap_bytes"]) as group:
        command = [sys.executable, __file__, job["bundle"], job["bundle"], "--worker"]
        command.append(json.dumps(job))
        done = subprocess.run(
            ["bash", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *command],
            check=True,
            stdout=subprocess.PIPE,
            text=True,
        )
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        found["peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
        found["limit_hits"] = int((group / "memory.failcnt").read_text())
        return found


@contextmanager
def memory_group(cap_bytes: int) -> Iterator[Path]:
    """A fresh memory group with this limit."""
    group = GROUPS / f"specter-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        if cap_bytes < ROOMY:
            (group / "memory.limit_in_bytes").write_text(str(cap_bytes))
        yield group
    finally:
        group.rmdir()


def decode(job: dict[str, Any]) -> dict[str, Any]:
    """Decode all prompts within the cap of the group that this process is in."""
    from specter_runtime.config import RuntimeConfig
    from specter_runtime.session import Session

    budget = ROOMY
    if job["cap_bytes"] < ROOMY:
        budget = job["cap_bytes"] - resident_bytes() - MARGIN_BYTES
    config = RuntimeConfig(budget, num_draft_tokens=0, max_context_tokens=512, **job["options"])
    sums = dict.fromkeys(("tpot_seconds", "stall_seconds", "loaded_bytes"), 0.0)
    texts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    digest = hashlib.sha256()
    with Session.open(Path(job["bundle"]), config) as session:
        for text in texts:
            ids = session.tokenizer.encode(text)
            out = list(session.generate_ids(ids, job["max_new_tokens"], stop_at_eos=False))
            stats = session.stats.to_dict()  # of the tokens behind the first
            sums["tpot_seconds"] += stats["tpot_seconds"] / len(texts)
            for name in ("stall_seconds", "loaded_bytes"):
                sums[name] += stats[name] / (len(out) - 1) / len(texts)
            digest.update(json.dumps(out).encode())
        slots = session.memory.num_slots
    return sums | {"tokens_sha256": digest.hexdigest(), "num_slots": slots}


def resident_bytes() -> int:
    """Bytes of this process that a memory group counts, shared libraries included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return int(fields["VmRSS"].split()[0]) * 1024


def report(cap: int, runs: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Print one cap's table; returns its rows."""
    print(f"\n**{cap / 1e9:.1f} GB**\n")
    print("| arm | slots | TPOT ms | spread | MB a token | stall ms | peak GB | limit hits |")
    print("|---|---|---|---|---|---|---|---|")
    rows = []
    for name, found in runs.items():
        times = [run["tpot_seconds"] for run in found]
        middle = statistics.median(times)
        nbytes = statistics.median(run["loaded_bytes"] for run in found)
        row = {
            "cap_bytes": cap,
            "arm": name,
            "num_slots": found[0]["num_slots"],
            "tpot_seconds": middle,
            "spread": (max(times) - min(times)) / middle,
            "bytes_per_token": nbytes,
            "stall_seconds": statistics.median(run["stall_seconds"] for run in found),
            "peak_bytes": max(run["peak_bytes"] for run in found),
            "limit_hits": max(run["limit_hits"] for run in found),
        }
        rows.append(row)
        print(
            f"| {name} | {row['num_slots']} | {middle * 1e3:.0f} | {row['spread']:.0%} "
            f"| {nbytes / 1e6:.0f} | {row['stall_seconds'] * 1e3:.0f} "
            f"| {row['peak_bytes'] / 1e9:.2f} | {row['limit_hits']} |"
        )
    return rows


if __name__ == "__main__":
    main()
