"""Plain decoding with an LRU cache against lookahead, at equal memory, side by side in one run.

    python benchmarks/decode.py artifacts/demo recipes/demo/prompts.jsonl

Arms: ``lru`` (K = 0: no draft, so its memory holds more expert slots) and ``specter`` (the plan's
or the given K, draft resident, prefetch). Every repeat runs every arm, in alternating order, on the
same prompts; outputs must be equal. Experts come from the disk by direct I/O in both arms. Prints a
table, and one JSON object as the last line; times are medians over repeats, spread is
(max - min) / median.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

from specter_runtime.torch_environment import TORCH_ENVIRONMENT

os.environ.update({**TORCH_ENVIRONMENT, **os.environ})  # before torch loads

import click

from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.expert_store import ShardExpertStore, aligned_buffer
from specter_runtime.experts import ExpertKey
from specter_runtime.session import Session
from specter_runtime.units import format_bytes, parse_bytes


@dataclass(slots=True)
class Arm:
    """One way to run the bundle, and what its repeats measured (one entry a repeat)."""

    name: str
    config: RuntimeConfig
    tpot_seconds: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    acceptance_rate: float | None = None
    hit_rate: float = 0.0
    num_slots: int = 0

    def summary(self) -> dict[str, float | str | int | None]:
        """Medians and spread, for JSON."""
        return {
            "arm": self.name,
            "tpot_seconds": statistics.median(self.tpot_seconds),
            "tpot_spread": spread(self.tpot_seconds),
            "bytes_per_token": statistics.median(self.bytes_per_token),
            "stall_seconds_per_token": statistics.median(self.stall_seconds),
            "acceptance_rate": self.acceptance_rate,
            "hit_rate": self.hit_rate,
            "num_slots": self.num_slots,
        }


@click.command()
@click.argument("bundle", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("prompts", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--memory-budget", default=None, help="E.g. 32MiB; default: the plan's.")
@click.option("--num-draft-tokens", type=int, default=None, help="Default: the plan's.")
@click.option("--max-new-tokens", default=64, show_default=True)
@click.option("--num-prompts", default=4, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--threads", default=1, show_default=True, help="One core is left to I/O.")
def main(
    bundle: Path,
    prompts: Path,
    memory_budget: str | None,
    num_draft_tokens: int | None,
    max_new_tokens: int,
    num_prompts: int,
    repeats: int,
    threads: int,
) -> None:
    """Measure and print."""
    plan = load_bundle(bundle).plan
    budget = plan.memory_budget_bytes if memory_budget is None else parse_bytes(memory_budget)
    k = plan.num_draft_tokens if num_draft_tokens is None else num_draft_tokens
    plain = RuntimeConfig(budget, num_draft_tokens=0, num_threads=threads, eviction="lru")
    drafts = RuntimeConfig(budget, num_draft_tokens=k, num_threads=threads, bound_by_slots=False)
    arms = [Arm("lru", plain), Arm("specter", drafts)]
    texts = [json.loads(line)["prompt"] for line in prompts.read_text().splitlines()][:num_prompts]
    outputs: dict[str, list[list[int]]] = {}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 == 0 else arms[::-1]:
            tokens = run(arm, bundle, texts, max_new_tokens)
            if outputs.setdefault("tokens", tokens) != tokens:
                raise SystemExit(f"arm {arm.name} decoded other tokens than {arms[0].name}")
    report(arms, budget, k, link_bytes_per_second(bundle))


def run(arm: Arm, bundle: Path, prompts: list[str], max_new_tokens: int) -> list[list[int]]:
    """One repeat of one arm; returns all tokens."""
    outputs, seconds, num_tokens, num_bytes, stalls = [], 0.0, 0, 0.0, 0.0
    hits = demands = 0
    with Session.open(bundle, arm.config) as session:
        arm.num_slots = session.memory.num_slots
        accepted = drafted = 0
        for prompt in prompts:
            ids = session.tokenizer.encode(prompt)
            outputs.append(list(session.generate_ids(ids, max_new_tokens, stop_at_eos=False)))
            stats = session.stats
            seconds += stats.committed_seconds[-1] - stats.committed_seconds[0]
            num_tokens += stats.num_new_tokens - 1
            num_bytes += stats.cache.loaded_bytes
            stalls += stats.cache.stall_seconds
            hits += stats.cache.hits
            demands += stats.cache.hits + stats.cache.late_hits + stats.cache.misses
            accepted += stats.num_accepted
            drafted += stats.num_drafted
    arm.tpot_seconds.append(seconds / num_tokens)
    arm.bytes_per_token.append(num_bytes / num_tokens)
    arm.stall_seconds.append(stalls / num_tokens)
    arm.acceptance_rate = accepted / drafted if drafted else None
    arm.hit_rate = hits / demands
    return outputs


def link_bytes_per_second(bundle: Path) -> float:
    """Rate at which one thread reads all shards, one by one, as the cache reads them."""
    opened = load_bundle(bundle)
    shards, model = opened.manifest.experts, opened.manifest.model
    store = ShardExpertStore.of(opened)
    buffer = aligned_buffer(store.slot_bytes)
    keys = [ExpertKey(i, e) for i in model.moe_layers for e in range(model.num_experts)]
    started = time.perf_counter()
    for key in keys:
        store.read_into(key, buffer)
    return len(keys) * shards.nbytes / (time.perf_counter() - started)


def report(arms: list[Arm], budget_bytes: int, k: int, link: float) -> None:
    """Table and JSON."""
    click.echo(
        f"memory {format_bytes(budget_bytes)} in both arms, K = {k}; link {link / 1e9:.2f} GB/s"
    )
    click.echo("| arm | slots | TPOT ms | spread | bytes a token | stall ms a token | hits |")
    click.echo("|---|---|---|---|---|---|---|")
    for arm in arms:
        click.echo(
            f"| {arm.name} | {arm.num_slots} | {statistics.median(arm.tpot_seconds) * 1e3:.1f} "
            f"| {spread(arm.tpot_seconds):.0%} "
            f"| {format_bytes(statistics.median(arm.bytes_per_token))} "
            f"| {statistics.median(arm.stall_seconds) * 1e3:.2f} | {arm.hit_rate:.1%} |"
        )
    ratio = statistics.median(arms[0].tpot_seconds) / statistics.median(arms[1].tpot_seconds)
    click.echo(f"speed of specter relative to lru: {ratio:.2f}")
    result = {"budget_bytes": budget_bytes, "num_draft_tokens": k, "speedup": ratio}
    click.echo(
        json.dumps(
            {**result, "link_bytes_per_second": link, "arms": [arm.summary() for arm in arms]}
        )
    )


def spread(values: list[float]) -> float:
    """(max - min) / median."""
    return (max(values) - min(values)) / statistics.median(values)


if __name__ == "__main__":
    main()
