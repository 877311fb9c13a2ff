"""Is the simulator right? Policies run on this machine, and simulated with its measured profile.

    python -m benchmarks.simulated_vs_measured PACKED RAW

PACKED and RAW are bundles of one model whose shards are packed and raw. Every repeat measures the
machine's profile, then decodes the prompts by every policy at every budget, in an order that turns
every time. What is simulated is what was decoded: the same texts, routed as the target routes
them. Nothing is fitted to the measured times. Prints a table and, as the last line, JSON; times
are medians over repeats, of the profile field by field; the exit code is 1 if a ratio is off by
more than a tenth or an order is wrong. Memory budgets are Specter's own; nothing is capped.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from specter_runtime.torch_environment import TORCH_ENVIRONMENT

os.environ.update({**TORCH_ENVIRONMENT, **os.environ})  # before torch loads

import click
import torch

from benchmarks.decode import spread
from benchmarks.peer_arms import ARMS_BY_NAME
from benchmarks.vs_peers import NUM_THREADS, read_prompts
from specter_runtime.bundle_loader import Bundle, load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.expert_store import ShardExpertStore, aligned_buffer
from specter_runtime.experts import Batch, ExpertKey, Routing, view_expert
from specter_runtime.hardware import Hardware, load_hardware
from specter_runtime.kv_cache import KVCache
from specter_runtime.measure_hardware import measure_hardware
from specter_runtime.model import MoETransformer
from specter_runtime.session import Session
from specter_runtime.simulated_bundle import SimulatedBundle, shape_of
from specter_runtime.simulator import Routes, Simulated, simulate
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS
from specter_runtime.units import format_bytes, parse_bytes

POLICIES = ("specter", "plain LRU", "lru", "lru+router")
TOLERANCE = 0.1
"""What is asked of the simulator: issue of the planner, times within a tenth."""
MAX_CONTEXT_TOKENS = 512


@dataclass(slots=True)
class Cell:
    """One policy at one budget: what was measured, a value a repeat, and what was simulated."""

    budget_bytes: int
    policy: str
    num_slots: int = 0
    tpot_seconds: list[float] = field(default_factory=list)
    stall_seconds: list[float] = field(default_factory=list)
    bytes_per_token: list[float] = field(default_factory=list)
    simulated: Simulated | None = None

    @property
    def measured(self) -> float:
        """Median TPOT."""
        return statistics.median(self.tpot_seconds)

    @property
    def ratio(self) -> float:
        """Simulated to measured TPOT."""
        assert self.simulated is not None
        return self.simulated.tpot_seconds / self.measured


@click.command()
@click.argument("packed", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("raw", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option(
    "--memory-budget",
    "budgets",
    multiple=True,
    default=("1GB", "1900MB", "3GB"),
    show_default=True,
)
@click.option(
    "--policy", "policies", multiple=True, type=click.Choice(POLICIES), help="Only these."
)
@click.option("--max-new-tokens", type=click.IntRange(min=2), default=128, show_default=True)
@click.option("--repeats", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--hardware", help="A profile to simulate with, instead of a measured one.")
def main(
    packed: Path,
    raw: Path,
    budgets: tuple[str, ...],
    policies: tuple[str, ...],
    max_new_tokens: int,
    repeats: int,
    hardware: str | None,
) -> None:
    """Measure, simulate, print."""
    torch.set_num_threads(NUM_THREADS)
    roots = {"packed": packed, "raw": raw}
    prompts = read_prompts(packed)
    cells = [
        Cell(parse_bytes(budget), policy) for budget in budgets for policy in policies or POLICIES
    ]
    profiles: list[Hardware] = []
    texts: dict[str, list[list[int]]] = {}
    for repeat in range(repeats):
        if hardware is None:
            profiles.append(
                measure_hardware(packed, "this machine", max(map(parse_bytes, budgets)))
            )
        for cell in cells if repeat % 2 == 0 else cells[::-1]:
            decoded = measure(cell, roots, prompts, max_new_tokens)
            if texts.setdefault("decoded", decoded) != decoded:
                raise SystemExit(f"{cell.policy} decoded other tokens than {cells[0].policy}")
            click.echo(
                f"[{repeat + 1}/{repeats}] {format_bytes(cell.budget_bytes)}, {cell.policy}: "
                f"{cell.tpot_seconds[-1] * 1e3:.1f} ms",
                err=True,
            )
    profile = median_profile(profiles) if hardware is None else load_hardware(hardware)
    routes = record_routes(load_bundle(packed), prompts, texts["decoded"])
    bundle, simulated = load_bundle(packed), SimulatedBundle(packed)
    for cell in cells:
        cell.simulated = simulate_cell(cell, bundle, simulated, profile, routes)
    sys.exit(0 if report(cells, profile) else 1)


def config_of(cell: Cell) -> RuntimeConfig:
    """How a cell is run."""
    return RuntimeConfig(
        cell.budget_bytes,
        max_context_tokens=MAX_CONTEXT_TOKENS,
        num_threads=NUM_THREADS,
        **ARMS_BY_NAME[cell.policy].options,
    )


def measure(
    cell: Cell, roots: Mapping[str, Path], prompts: Mapping[str, list[int]], max_new_tokens: int
) -> list[list[int]]:
    """Decode all prompts in one session; returns the tokens."""
    outputs, seconds, stalls, num_bytes, num_tokens = [], 0.0, 0.0, 0, 0
    with Session.open(roots[ARMS_BY_NAME[cell.policy].model], config_of(cell)) as session:
        cell.num_slots = session.memory.num_slots
        for ids in prompts.values():
            outputs.append(list(session.generate_ids(ids, max_new_tokens, stop_at_eos=False)))
            stats = session.stats
            seconds += stats.committed_seconds[-1] - stats.committed_seconds[0]
            stalls += stats.cache.stall_seconds
            num_bytes += stats.cache.loaded_bytes
            num_tokens += stats.num_new_tokens - 1
    cell.tpot_seconds.append(seconds / num_tokens)
    cell.stall_seconds.append(stalls / num_tokens)
    cell.bytes_per_token.append(num_bytes / num_tokens)
    return outputs


def median_profile(profiles: Sequence[Hardware]) -> Hardware:
    """The median of each field."""
    records = [asdict(profile) for profile in profiles]
    medians = {
        name: statistics.median(record[name] for record in records)
        for name in records[0]
        if name not in ("name", "num_readers")
    }
    return Hardware(**{**records[0], **medians})


class StoredExperts:
    """Experts as their shards have them, read at every use."""

    def __init__(self, bundle: Bundle) -> None:
        self._store = ShardExpertStore.of(bundle)
        self._manifest = bundle.manifest

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield the experts one by one."""
        stored = self._manifest.experts
        for expert in routing.expert_ids():
            buffer = aligned_buffer(self._store.slot_bytes)
            self._store.read_into(ExpertKey(routing.layer, expert), buffer)
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            view = view_expert(tensor, self._manifest.model, stored.numbers, stored.encoding)
            yield [(expert, view)]


@torch.inference_mode()
def record_routes(
    bundle: Bundle, prompts: Mapping[str, list[int]], outputs: Sequence[list[int]]
) -> list[Routes]:
    """How the target routes prompts and what was decoded behind them.

    The last new token is never run.
    """
    manifest, dtype = bundle.manifest, getattr(torch, bundle.plan.dtype)
    model = MoETransformer(manifest.model, bundle.dense_tensors(), manifest.tensor_names, dtype)
    experts = StoredExperts(bundle)
    found = []
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        kv_cache = KVCache(manifest.model, MAX_CONTEXT_TOKENS, dtype)
        ids = prompt + output[:-1]
        chunks = [
            model.forward(
                ids[start : start + PROMPT_CHUNK_TOKENS],
                kv_cache,
                experts,
                rows_per_block=PROMPT_CHUNK_TOKENS,
            )[1]
            for start in range(0, len(ids), PROMPT_CHUNK_TOKENS)
        ]
        layers = list(zip(*chunks, strict=True))
        selected = [torch.cat([r.selected_experts for r in layer]) for layer in layers]
        probs = [
            torch.cat([r.router_probs for r in layer if r.router_probs is not None])
            for layer in layers
        ]
        found.append(Routes(len(prompt), torch.stack(selected, dim=1), torch.stack(probs, dim=1)))
    return found


def simulate_cell(
    cell: Cell,
    bundle: Bundle,
    simulated: SimulatedBundle,
    profile: Hardware,
    routes: Sequence[Routes],
) -> Simulated:
    """The same on the virtual clock."""
    arm = simulated.arms(num_draft_tokens=0)[cell.policy]
    shape = shape_of(bundle, is_raw=arm.is_raw)
    hottest = simulated.hottest_first
    return simulate(shape, profile, arm.policy, cell.num_slots, routes, hottest)


def report(cells: Sequence[Cell], profile: Hardware) -> bool:
    """Table and JSON; whether all is as it should be."""
    click.echo(profile.to_json())
    click.echo(
        "| budget | policy | slots | measured ms | spread | simulated ms | ratio | stall ms "
        "| simulated | MB a token | simulated |"
    )
    click.echo("|---" * 11 + "|")
    for cell in cells:
        found = cell.simulated
        assert found is not None
        click.echo(
            f"| {format_bytes(cell.budget_bytes)} | {cell.policy} | {cell.num_slots} "
            f"| {cell.measured * 1e3:.1f} | {spread(cell.tpot_seconds):.0%} "
            f"| {found.tpot_seconds * 1e3:.1f} | {cell.ratio:.2f} "
            f"| {statistics.median(cell.stall_seconds) * 1e3:.1f} "
            f"| {found.stall_seconds * 1e3:.1f} "
            f"| {statistics.median(cell.bytes_per_token) / 1e6:.1f} "
            f"| {found.bytes_per_token / 1e6:.1f} |"
        )
    wrong = [f"{a.policy} / {b.policy}" for a, b in out_of_order(cells)]
    off = [cell for cell in cells if abs(cell.ratio - 1) > TOLERANCE]
    click.echo(
        f"{len(cells) - len(off)} of {len(cells)} within {TOLERANCE:.0%}; "
        f"pairs in the wrong order: {', '.join(wrong) or 'none'}"
    )
    click.echo(json.dumps({"profile": asdict(profile), "cells": [to_record(c) for c in cells]}))
    return not off and not wrong


def out_of_order(cells: Sequence[Cell]) -> list[tuple[Cell, Cell]]:
    """Pairs at one budget that are simulated in the other order than they are measured.

    Pairs whose repeats overlap have no order that could be measured.
    """
    found = []
    for a, b in combinations(cells, 2):
        if a.budget_bytes != b.budget_bytes:
            continue
        slow, fast = (a, b) if a.measured > b.measured else (b, a)
        is_known = min(slow.tpot_seconds) > max(fast.tpot_seconds)
        if is_known and slow.ratio * slow.measured <= fast.ratio * fast.measured:
            found.append((slow, fast))
    return found


def to_record(cell: Cell) -> dict[str, Any]:
    """For JSON."""
    return {**asdict(cell), "ratio": cell.ratio}


if __name__ == "__main__":
    main()
