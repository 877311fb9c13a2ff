"""Decoding on a virtual clock: how long a token takes on a machine that need not be there.

Discrete-event: computing and reading go on side by side, each slowing the other as the hardware's
profile says. What to evict, what to read next, what to prefetch, when to stop a draft and whether
to draft is decided by the very code that decides at run time (``slot_table``, ``eviction``,
``prefetcher``, ``draft_engine.should_stop``, ``governor``); only reads and computing are replaced
by the seconds that they take. Routes are replayed as recorded: of a window whose draft was
rejected, the rows behind the rejection are taken to be routed as the text that was recorded.

Called by: simulated_bundle.
Next: slot_table, prefetcher, governor.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from specter_runtime.config import Eviction
from specter_runtime.draft_engine import should_stop
from specter_runtime.eviction import EVICTION_POLICIES
from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.governor import Governor, lookaheads
from specter_runtime.hardware import Hardware
from specter_runtime.metrics import CacheStats, DecodeStats
from specter_runtime.predictor import Prediction
from specter_runtime.prefetcher import Prefetcher
from specter_runtime.slot_table import NOW, Load, SlotTable
from specter_runtime.speculative_decoder import PROMPT_CHUNK_TOKENS

Known = TypeVar("Known")

Foresight = Literal["none", "draft", "router", "fitted", "oracle"]


@dataclass(frozen=True, slots=True)
class Shape:
    """What of a model takes time, in one form of its experts.

    Attributes:
        moe_layers: decoder layers with routed experts, ascending.
        num_experts: routed experts of a layer.
        dense_bytes: of each decoder layer's resident weights.
        common_bytes: of what every pass multiplies outside the layers: the head.
        shard_bytes: of an expert: they cross the link, and are what a row multiplies.
        slot_bytes: that an expert takes in its slot.
        is_packed: whether it is multiplied from packed bfloat16.
        stand_in_bytes: of an expert's stand-in; 0: there is none.
        expert_num_weights: of an expert.
        bytes_per_weight: of dense weights.
    """

    moe_layers: tuple[int, ...]
    num_experts: int
    dense_bytes: tuple[int, ...]
    common_bytes: int
    shard_bytes: int
    slot_bytes: int
    is_packed: bool
    stand_in_bytes: int
    expert_num_weights: int
    bytes_per_weight: int = 2


@dataclass(frozen=True, slots=True)
class Routes:
    """One text's routes, token by token; L routed layers, K experts a token of E.

    Attributes:
        num_prompt_tokens: leading tokens that are the prompt's; at least 1.
        selected: the target's, int64 ``[T, L, K]``.
        probs: its routers' probabilities, float32 ``[T, L, E]``; None: not recorded.
        drafted: the draft's choices, like ``selected``; None: there is no draft.
        agrees: bool ``[T]``: whether the draft's next token is the target's.
        confidence: float32 ``[T]``: the draft's probability of it.
    """

    num_prompt_tokens: int
    selected: torch.Tensor
    probs: torch.Tensor | None = None
    drafted: torch.Tensor | None = None
    agrees: npt.NDArray[np.bool_] | None = None
    confidence: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Policy:
    """One way to run; the attributes of ``RuntimeConfig`` that matter, and two that do not exist.

    Attributes:
        num_draft_tokens: K; 0 drafts nothing.
        is_governed: whether the governor may draft nothing instead.
        eviction: see ``RuntimeConfig``.
        overlap: see ``RuntimeConfig``.
        foresight: what moves experts ahead: ``draft``, a predictor (``router``, ``fitted``), or an
            ``oracle`` that knows all experts of a pass when it begins.
        recall: of a predictor, by number of layers ahead.
        wrong_share: of the experts that an oracle names, the share that is replaced by others.
        draft_stop: see ``RuntimeConfig``.
    """

    num_draft_tokens: int = 0
    is_governed: bool = True
    eviction: Eviction = "reuse"
    overlap: bool = True
    foresight: Foresight = "none"
    recall: tuple[float, ...] = ()
    wrong_share: float = 0.0
    draft_stop: bool = True


@dataclass(frozen=True, slots=True)
class Simulated:
    """What a policy comes to, per committed token behind each text's first.

    Attributes:
        tpot_seconds: time per output token.
        draft_seconds: of it, in drafting.
        stall_seconds: of it, waiting for experts in the target's passes.
        overhead_seconds: of it, neither computing nor waiting, in the target's passes.
        compute_seconds: of it, computing in the target's passes.
        bytes_per_token: over the link.
        link_busy_share: share of the time in which a read was under way.
        hit_rate: share of demands that were resident.
        mean_acceptance_length: committed tokens a target pass.
        windows_by_lookahead: how many windows ran in which way.
    """

    tpot_seconds: float
    draft_seconds: float
    stall_seconds: float
    overhead_seconds: float
    compute_seconds: float
    bytes_per_token: float
    link_busy_share: float
    hit_rate: float
    mean_acceptance_length: float
    windows_by_lookahead: dict[str, int]


@dataclass(slots=True)
class _Read:
    """A read under way: seconds until its bytes come, and bytes left."""

    load: Load
    slot: int
    latency_left: float
    bytes_left: float


class Machine:
    """The clock, the link and the slots. ``PrefetchedCache`` for the prefetcher.

    Attributes:
        now: virtual seconds.
        computing_seconds: of them, how many something was computed in.
        table: the slots.
    """

    def __init__(self, hardware: Hardware, shape: Shape, table: SlotTable) -> None:
        """Begin at 0 with nothing to read."""
        self.now = self.computing_seconds = 0.0
        self.table = table
        self._hardware = hardware
        self._shape = shape
        self._reads: list[_Read] = []

    def clock(self) -> float:
        """The time."""
        return self.now

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        """See ``SlotTable.prefetch``."""
        is_queued = self.table.prefetch(key, deadline)
        if is_queued:
            self.begin_reads()
        return is_queued

    def cancel_prefetches(self) -> None:
        """See ``SlotTable.cancel_prefetches``."""
        self.table.cancel_prefetches()

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        return self.table.stats.copy()

    def begin_reads(self) -> None:
        """Give idle readers what there is to read."""
        while len(self._reads) < self._hardware.num_readers:
            task = self.table.begin_read()
            if task is None:
                return
            latency = self._hardware.link_latency_seconds
            self._reads.append(_Read(*task, latency, float(self._shape.shard_bytes)))

    def compute(self, seconds: float) -> None:
        """Compute for what takes so long where nothing is read."""
        started = self.now
        while seconds > 0:
            speed = self._hardware.computing_while_reading if self._reads else 1.0
            left = seconds / speed
            event = self._next_event(self._hardware.reading_while_computing)
            self._advance(min(left, event), self._hardware.reading_while_computing)
            seconds = 0.0 if left <= event else seconds - event * speed
        self.computing_seconds += self.now - started

    def overhead(self, seconds: float) -> None:
        """Let time pass in which the link goes on undisturbed."""
        while seconds > 0:
            event = self._next_event(1.0)
            self._advance(min(seconds, event), 1.0)
            seconds = 0.0 if seconds <= event else seconds - event

    def wait(self) -> None:
        """Until a read ends; there must be one."""
        started, count = self.now, self.table.stats.loads
        while self.table.stats.loads == count:
            assert self._reads, "nothing is being read"
            self._advance(self._next_event(1.0), 1.0)
        self.table.stats.stall_seconds += self.now - started

    def _rate(self, speed: float) -> float:
        """Bytes a second of each read whose bytes come."""
        streaming = sum(read.latency_left <= 0 for read in self._reads)
        return speed * self._hardware.link_bytes_per_second / max(1, streaming)

    def _next_event(self, speed: float) -> float:
        """Seconds until a read's bytes begin to come or end; infinite without reads."""
        rate = self._rate(speed)
        ends = (
            read.latency_left if read.latency_left > 0 else read.bytes_left / rate
            for read in self._reads
        )
        return min(ends, default=float("inf"))

    def _advance(self, seconds: float, speed: float) -> None:
        rate = self._rate(speed)
        self.now += seconds
        if self._reads:
            self.table.stats.link_busy_seconds += seconds
        ended = []
        for read in self._reads:
            if read.latency_left > 0:
                left = read.latency_left - seconds
                read.latency_left = left if left > 1e-12 else 0.0
            else:
                read.bytes_left -= seconds * rate
                if read.bytes_left <= 1e-3:  # of millions: rounding
                    ended.append(read)
        for read in ended:
            self._reads.remove(read)
            self.table.end_read(read.load, read.slot, self._shape.shard_bytes)
        if ended:
            self.begin_reads()


class _Simulation:
    """One policy's run over some texts."""

    def __init__(
        self,
        shape: Shape,
        hardware: Hardware,
        policy: Policy,
        num_slots: int,
        num_chosen: int,
        hottest_first: Sequence[ExpertKey],
        seed: int,
    ) -> None:
        self._shape, self._hardware, self._policy = shape, hardware, policy
        layout = len(shape.dense_bytes), shape.num_experts
        self._table = SlotTable(
            num_slots, EVICTION_POLICIES[policy.eviction](*layout, hottest_first)
        )
        self._machine = Machine(hardware, shape, self._table)
        self._generator = np.random.default_rng(seed)
        self._prefetcher = None
        if policy.foresight != "none":
            budget = (num_slots - min(num_slots - 1, num_chosen)) * shape.slot_bytes
            clock = self._machine.clock
            self._prefetcher = Prefetcher(self._machine, budget, shape.slot_bytes, clock)
        self._governor = Governor(
            lookaheads(
                policy.num_draft_tokens,
                predicts=policy.foresight in ("router", "fitted"),
                governs_draft=policy.is_governed,
            )
        )
        self.draft_seconds = 0.0
        self.stats = DecodeStats()
        self._warm(list(hottest_first)[:num_slots])

    @property
    def now(self) -> float:
        """The time."""
        return self._machine.now

    @property
    def computing_seconds(self) -> float:
        """Of it, computing."""
        return self._machine.computing_seconds

    def counters(self) -> CacheStats:
        """A snapshot."""
        return self._table.stats.copy()

    def _warm(self, keys: Sequence[ExpertKey]) -> None:
        """What is loaded when a session opens; takes no time here."""
        for key in keys:
            self._table.prefetch(key, NOW)
        while (task := self._table.begin_read()) is not None:
            self._table.end_read(*task, self._shape.shard_bytes)
        self._table.forget_prefetched(keys)
        self._table.forget_next_uses()

    def prefill(self, text: Routes) -> None:
        """The prompt, chunk by chunk."""
        for start in range(0, text.num_prompt_tokens, PROMPT_CHUNK_TOKENS):
            stop = min(start + PROMPT_CHUNK_TOKENS, text.num_prompt_tokens)
            self._run_target(text, start, stop, predicts=False)

    def decode(self, text: Routes) -> None:
        """All tokens behind the prompt, window by window."""
        position, last = text.num_prompt_tokens, len(text.selected)
        while position < last:
            way = self._governor.choose()
            asked = min(way.num_draft_tokens, last - position - 1)
            started = self.now
            drafted = self._draft(text, position, asked)
            stop = position + drafted + 1
            self._run_target(text, position, stop, predicts=way.predicts and not drafted)
            accepted = 0
            while accepted < drafted and _known(text.agrees)[position + accepted]:
                accepted += 1
            if self._prefetcher is not None:
                self._prefetcher.end_window()
            if asked == way.num_draft_tokens:
                self._governor.observe(way, self.now - started, accepted + 1)
            self.stats.windows_by_lookahead[str(way)] += 1
            self.stats.num_windows += 1
            position += accepted + 1

    def _draft(self, text: Routes, position: int, most: int) -> int:
        """Draft up to so many tokens; how many there are in the end."""
        started, computed, count = self.now, self._machine.computing_seconds, 0
        while count < most:
            chosen = _known(text.drafted)[position + count]  # [L, K]
            rows = zip(self._shape.moe_layers, chosen[:, None], strict=True)
            routings = [Routing(layer, row, torch.ones(row.shape)) for layer, row in rows]
            self._run_draft(routings)
            if count and self._policy.draft_stop:
                probability = float(_known(text.confidence)[position + count - 1])
                keys = [key for routing in routings for key in _keys(routing)]
                if should_stop(probability, self._table.num_absent(keys), len(keys)):
                    count -= 1
                    break
            if self._prefetcher is not None and self._policy.foresight == "draft":
                self._prefetcher.observe(routings)
            count += 1
        self.draft_seconds += self.now - started
        self._machine.computing_seconds = computed  # the draft's is counted as drafting
        return count

    def _run_draft(self, routings: Sequence[Routing]) -> None:
        """One pass of the draft, each expert in the best form that there is."""
        machine, shape = self._machine, self._shape
        by_layer = {routing.layer: routing for routing in routings}
        machine.overhead(self._hardware.pass_overhead_seconds)
        for layer in range(len(shape.dense_bytes)):
            machine.overhead(self._hardware.layer_overhead_seconds)
            self._compute_dense(shape.dense_bytes[layer], 1)
            if layer in by_layer:
                keys = _keys(by_layer[layer])
                num_cached = sum(self._table.slot_of(key) is not None for key in keys)
                self._compute_experts([1] * num_cached)
                if shape.stand_in_bytes:
                    rate = self._hardware.packed_bytes_per_second
                    absent = len(keys) - num_cached
                    machine.compute(absent * shape.stand_in_bytes / rate)
        self._compute_dense(shape.common_bytes, 1)

    def _run_target(self, text: Routes, start: int, stop: int, *, predicts: bool) -> None:
        """One pass over the rows from ``start`` to ``stop``."""
        shape, hardware, num_rows = self._shape, self._hardware, stop - start
        is_row = num_rows == 1
        routings = _routings(shape.moe_layers, text, start, stop)
        if self._prefetcher is not None:
            if predicts:
                self._prefetcher.begin_pass()
            if self._policy.foresight == "oracle":
                wrong = self._policy.wrong_share
                self._prefetcher.observe([self._degraded(r, wrong) for r in routings])
        self._machine.overhead(hardware.pass_overhead_seconds)
        ahead = {routing.layer: i for i, routing in enumerate(routings)}
        for layer in range(len(shape.dense_bytes)):
            self._machine.overhead(
                hardware.row_layer_overhead_seconds if is_row else hardware.layer_overhead_seconds
            )
            self._compute_dense(shape.dense_bytes[layer], num_rows)
            if layer not in ahead:
                continue
            routing = routings[ahead[layer]]
            keys = _keys(routing)
            if is_row and all(self._table.slot_of(key) is not None for key in keys):
                self._use_row(routing)
                continue
            foretold = routings[ahead[layer] + 1 :] if predicts else []
            self._use(routing, keys, foretold, is_row=is_row)
        self._compute_dense(shape.common_bytes, num_rows)
        if self._prefetcher is not None and predicts:
            self._prefetcher.end_pass(len(shape.moe_layers))

    def _use_row(self, routing: Routing) -> None:
        """A row's experts, all of them there."""
        probs = routing.router_probs
        probs = torch.zeros(1, self._shape.num_experts) if probs is None else probs
        self._table.observe_used(routing.layer, routing.selected_experts.numpy(), probs.numpy())
        self._machine.begin_reads()
        self._compute_experts([1] * routing.selected_experts.shape[1])

    def _use(
        self,
        routing: Routing,
        keys: Sequence[ExpertKey],
        foretold: Sequence[Routing],
        *,
        is_row: bool,
    ) -> None:
        """A layer's experts by way of a demand; what is foretold is asked for while they come."""
        if is_row:
            hardware = self._hardware
            self._machine.overhead(
                hardware.stop_overhead_seconds
                if self._policy.overlap
                else hardware.full_stop_overhead_seconds
            )
        counts = torch.bincount(routing.selected_experts.flatten()).tolist()
        ready, waiting = self._table.demand(routing, keys)
        self._machine.begin_reads()
        self._look_ahead(foretold)
        while ready or waiting:
            if not ready or not self._policy.overlap:
                ready += self._arrivals(waiting, len(ready))
            self._compute_experts([counts[key.expert] for key in ready])
            self._table.unpin(ready)
            self._machine.begin_reads()
            waiting.difference_update(ready)
            ready = []

    def _arrivals(self, waiting: Collection[ExpertKey], num_ready: int) -> list[ExpertKey]:
        """Wait for one of the experts, or for all: see ``ExpertCache``."""
        wanted = len(waiting)
        if self._policy.overlap or num_ready + wanted > self._table.num_slots:
            wanted = min(1, wanted)
        while True:
            arrived = [key for key in sorted(waiting) if self._table.slot_of(key) is not None]
            if len(arrived) >= wanted:
                return arrived
            self._machine.wait()

    def _look_ahead(self, foretold: Sequence[Routing]) -> None:
        """Ask for what a predictor with the policy's recall says of the next layers."""
        if self._prefetcher is None or not foretold:
            return
        predictions = []
        for i, (routing, recall) in enumerate(
            zip(foretold, self._policy.recall, strict=False), start=1
        ):
            named = self._degraded(routing, 1 - recall).expert_ids()
            predictions.append(Prediction(routing.layer, i, [(e, recall) for e in named]))
        self._prefetcher.observe_prediction(predictions)

    def _degraded(self, routing: Routing, wrong_share: float) -> Routing:
        """The same with each expert replaced, with this probability, by one that is not chosen."""
        named = routing.expert_ids()
        others = [e for e in range(self._shape.num_experts) if e not in set(named)]
        is_wrong = self._generator.random(len(named)) < wrong_share
        count = min(int(is_wrong.sum()), len(others))
        wrong = self._generator.choice(others, count, replace=False).tolist() if count else []
        kept = [e for e, bad in zip(named, is_wrong, strict=True) if not bad]
        return replace(routing, selected_experts=torch.tensor([kept + wrong], dtype=torch.int64))

    def _compute_dense(self, nbytes: int, num_rows: int) -> None:
        hardware = self._hardware
        reading = nbytes / hardware.memory_bytes_per_second
        weights = nbytes / self._shape.bytes_per_weight
        multiplying = num_rows * weights / hardware.multiplies_per_second
        self._machine.compute(max(reading, multiplying))

    def _compute_experts(self, num_rows: Sequence[int]) -> None:
        """Experts that so many rows each have chosen."""
        shape, hardware = self._shape, self._hardware
        rate = hardware.memory_bytes_per_second
        if shape.is_packed:
            rate = hardware.packed_bytes_per_second
        reading = shape.shard_bytes / rate
        row = shape.expert_num_weights / hardware.multiplies_per_second
        self._machine.compute(sum(max(reading, rows * row) for rows in num_rows))


def _keys(routing: Routing) -> list[ExpertKey]:
    return [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]


def _known(value: Known | None) -> Known:
    assert value is not None, "routes without a draft are replayed without one"
    return value


def _routings(moe_layers: Sequence[int], text: Routes, start: int, stop: int) -> list[Routing]:
    """What each routed layer's router made of these rows."""
    found = []
    for i, layer in enumerate(moe_layers):
        selected = text.selected[start:stop, i]
        probs = None if text.probs is None else text.probs[start:stop, i]
        found.append(Routing(layer, selected, torch.ones(selected.shape), probs))
    return found


def simulate(
    shape: Shape,
    hardware: Hardware,
    policy: Policy,
    num_slots: int,
    texts: Sequence[Routes],
    hottest_first: Sequence[ExpertKey],
    seed: int = 0,
) -> Simulated:
    """Decode texts one after the other; what is cached stays, as in a session.

    Args:
        shape: the model.
        hardware: the machine.
        policy: how it is run.
        num_slots: slots of the cache, at least a token's experts of a layer.
        texts: recorded routes; prompts are run too, but do not count.
        hottest_first: experts by how often calibration used them; the first are there at the start.
        seed: of what predictors and oracles get wrong.
    """
    num_chosen = texts[0].selected.shape[2]
    run = _Simulation(shape, hardware, policy, num_slots, num_chosen, hottest_first, seed)
    seconds = computing = 0.0
    num_tokens, counted = 0, CacheStats()
    for text in texts:
        run.prefill(text)
        started, computed, before = run.now, run.computing_seconds, run.counters()
        run.decode(text)
        seconds += run.now - started
        computing += run.computing_seconds - computed
        num_tokens += len(text.selected) - text.num_prompt_tokens
        counted = counted.plus(run.counters().since(before))
    demands = counted.hits + counted.late_hits + counted.misses
    drafting, target = run.draft_seconds, seconds - run.draft_seconds
    return Simulated(
        tpot_seconds=seconds / num_tokens,
        draft_seconds=drafting / num_tokens,
        stall_seconds=counted.stall_seconds / num_tokens,
        overhead_seconds=(target - counted.stall_seconds - computing) / num_tokens,
        compute_seconds=computing / num_tokens,
        bytes_per_token=counted.loaded_bytes / num_tokens,
        link_busy_share=counted.link_busy_seconds / seconds,
        hit_rate=counted.hits / demands,
        mean_acceptance_length=num_tokens / run.stats.num_windows,
        windows_by_lookahead=dict(run.stats.windows_by_lookahead),
    )
