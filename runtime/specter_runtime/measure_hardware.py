"""This machine's profile, measured with the parts that decode: ``specter-bench``.

Each figure is measured as the simulator means it:

* link: what demands of all experts of a layer bring in the time in which anything is read, with as
  many readers as the runtime has, and with a single one. Threads that do nothing but read get less
  on a virtual machine whose idle processors have to be woken for each read;
* rates: many experts multiplied one after the other, raw and packed, for one row and for many;
* overhead of a layer: what a pass takes beside multiplying, its experts being there;
* overhead of a stop: what it takes longer where none of them is, though reads take no time;
* slowing: how much longer it takes while others read, and how much less they get done than alone.

Called by: cli.  Next: simulated_bundle, session, hardware.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Self

import torch

from specter_runtime import kernels
from specter_runtime.bundle_loader import Bundle, load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.errors import CapacityError
from specter_runtime.expert_store import ExpertStore, ShardExpertStore, aligned_buffer
from specter_runtime.experts import (
    Expert,
    ExpertKey,
    PackedExperts,
    Routing,
    pack_expert,
    view_expert,
)
from specter_runtime.hardware import Hardware
from specter_runtime.moe import mix_experts
from specter_runtime.session import Session, bundle_memory
from specter_runtime.simulated_bundle import shape_of
from specter_runtime.simulator import Shape

LINK_REPEATS = 5
READ_SECONDS = 2.0
"""For which shards are read while nothing is computed."""
KERNEL_BYTES = 1 << 28
"""Of the experts that are multiplied in turn: more than processors keep."""
MANY_ROWS = 32
REPEATS = 15
NUM_TOKENS = 9
"""Decoded in one go, behind a prompt of one token."""
NUM_DRAFT_TOKENS = 4

PLAIN = RuntimeConfig(num_draft_tokens=0, eviction="lru", predictor="none")
DRAFTS = replace(
    PLAIN,
    num_draft_tokens=NUM_DRAFT_TOKENS,
    bound_by_slots=False,
    draft_stop=False,
    prefetch=False,
)


def measure_hardware(root: Path, name: str, memory_budget_bytes: int | None = None) -> Hardware:
    """Measure with a bundle, at the number of threads that torch has been given.

    Args:
        root: the bundle.
        name: for the profile.
        memory_budget_bytes: in which a few tokens' experts are held; None: the plan's.

    Raises:
        BundleError: the bundle is damaged.
        CapacityError: the budget has no room for two tokens' experts.
    """
    bundle = load_bundle(root)
    torch.manual_seed(0)
    kernels.set_threads(torch.get_num_threads())
    scarce = _scarce_budget(bundle)
    link = _measure_link(root, scarce)
    rates = _measure_rates(bundle)
    passes = _measure_passes(root, bundle, memory_budget_bytes, scarce)
    shape = shape_of(bundle, is_raw=False)
    num_layers, num_moe_layers = len(shape.dense_bytes), len(shape.moe_layers)
    computing = _computing_seconds(shape, rates, bundle.manifest.model.num_experts_per_tok)
    overhead = max(0.0, passes.row - computing)
    computing = passes.row - overhead
    slowed = max(computing, passes.row_while_reading - overhead)
    # Only while something is computed is reading slowed; the share of its rate is a mean of both.
    share = min(1.0, passes.read_share)
    share = (share * passes.row_while_reading - overhead) / (passes.row_while_reading - overhead)
    return Hardware(
        name=name,
        link_bytes_per_second=link.bytes_per_second,
        link_latency_seconds=link.latency_seconds,
        num_readers=PLAIN.num_io_threads,
        memory_bytes_per_second=rates.memory,
        packed_bytes_per_second=rates.packed,
        multiplies_per_second=rates.multiplies,
        pass_overhead_seconds=0.0,  # it is in the layers'
        layer_overhead_seconds=max(0.0, passes.draft - computing) / num_layers,
        row_layer_overhead_seconds=overhead / num_layers,
        stop_overhead_seconds=max(0.0, passes.row_with_stops - passes.row) / num_moe_layers,
        full_stop_overhead_seconds=max(0.0, passes.row_with_full_stops - passes.row)
        / num_moe_layers,
        computing_while_reading=computing / slowed,
        reading_while_computing=max(share, 0.01),
    )


def _scarce_budget(bundle: Bundle) -> int:
    """With which an LRU cache misses whatever it is asked for, and yet is in no processor's cache.

    Two thirds of a token's experts, as far as they are not more than it takes: the rest of a pass
    has thrown an expert out before its layer is run again.
    """
    config, slot_bytes = bundle.manifest.model, ShardExpertStore.of(bundle).slot_bytes
    least = bundle_memory(bundle, PLAIN, None, slot_bytes).budget_bytes
    num_chosen = config.num_experts_per_tok
    wanted = min(2 * len(config.moe_layers) * num_chosen // 3, KERNEL_BYTES // slot_bytes)
    return least + max(0, wanted - num_chosen) * slot_bytes


# ---- the link -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Link:
    """Of reads of whole shards."""

    bytes_per_second: float
    latency_seconds: float


def _measure_link(root: Path, scarce_budget_bytes: int) -> _Link:
    """A reader by itself waits for each read to begin; several bridge each other's waits."""
    num_readers = PLAIN.num_io_threads
    rates: dict[int, list[float]] = {1: [], num_readers: []}
    for _ in range(LINK_REPEATS):
        for count, found in rates.items():
            config = replace(
                PLAIN, memory_budget_bytes=scarce_budget_bytes, num_io_threads=count, overlap=False
            )
            with Session.open(root, config) as session:
                _decode(session, NUM_TOKENS)
                nbytes, cache = session.memory.slot_bytes, session.stats.cache
                found.append(cache.loaded_bytes / cache.link_busy_seconds)
    alone, together = (statistics.median(found) for found in rates.values())
    return _Link(together, max(0.0, nbytes / alone - nbytes / together))


class _Readers:
    """Threads that read shards, one after the other, for as long as a block runs.

    Attributes:
        bytes_per_second: of all together, when it has ended.
    """

    def __init__(self, bundle: Bundle, num_readers: int) -> None:
        """Begin with the block."""
        self._store = ShardExpertStore.of(bundle)
        self._keys = _keys(bundle)
        self._has_ended = threading.Event()
        self._read_bytes = [0] * num_readers
        self._threads = [
            threading.Thread(target=self._read, args=(i,), daemon=True) for i in range(num_readers)
        ]
        self.bytes_per_second = 0.0

    def _read(self, index: int) -> None:
        buffer = aligned_buffer(self._store.slot_bytes)
        for key in cycle(self._keys[index :: len(self._threads)]):
            if self._has_ended.is_set():
                return
            self._store.read_into(key, buffer)
            self._read_bytes[index] += self._store.nbytes(key)

    def __enter__(self) -> Self:
        self._started = time.perf_counter()
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._has_ended.set()
        for thread in self._threads:
            thread.join()
        self.bytes_per_second = sum(self._read_bytes) / (time.perf_counter() - self._started)


def _keys(bundle: Bundle) -> list[ExpertKey]:
    """All experts, shuffled."""
    config = bundle.manifest.model
    keys = [ExpertKey(i, e) for i in config.moe_layers for e in range(config.num_experts)]
    return [keys[i] for i in torch.randperm(len(keys)).tolist()]


# ---- multiplying ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rates:
    """Bytes of raw and of packed weights a second for one row; multiply-adds for many."""

    memory: float
    packed: float
    multiplies: float


def _measure_rates(bundle: Bundle) -> _Rates:
    manifest, store = bundle.manifest, ShardExpertStore.of(bundle)
    config, stored = manifest.model, manifest.experts
    dtype: torch.dtype = getattr(torch, bundle.plan.dtype)
    raw_bytes = config.expert_num_weights * dtype.itemsize
    held = []
    for key in _keys(bundle)[: max(1, KERNEL_BYTES // raw_bytes)]:
        buffer = aligned_buffer(store.slot_bytes)
        store.read_into(key, buffer)
        tensor = torch.frombuffer(buffer, dtype=torch.uint8)
        held.append(view_expert(tensor, config, stored.numbers, stored.encoding))
    weights = [expert.to(dtype) for expert in held]
    raw = _seconds(weights, 1, config.hidden_size, dtype)
    many = _seconds(weights, MANY_ROWS, config.hidden_size, dtype)
    memory = raw_bytes / raw
    packed = memory  # of other numbers than bfloat16 there is no packed form
    if stored.encoding == "packed":
        packed = stored.nbytes / _seconds(held, 1, config.hidden_size, dtype)
    elif stored.numbers.dtype == "bfloat16":
        forms = [pack_expert(expert.to(torch.bfloat16)) for expert in held[:MANY_ROWS]]
        nbytes = sum(part.nbytes for part in forms[0].parts().values())
        packed = nbytes / _seconds(forms, 1, config.hidden_size, dtype)
    return _Rates(memory, packed, MANY_ROWS * config.expert_num_weights / many)


def _seconds(experts: Sequence[Expert], num_rows: int, width: int, dtype: torch.dtype) -> float:
    """To multiply so many rows by one of the experts, all of them being used in turn."""
    held = PackedExperts({ExpertKey(0, i): kernels.prepare(e) for i, e in enumerate(experts)})
    rows = torch.randn(num_rows, width).to(dtype)
    chosen = torch.arange(len(experts)).expand(num_rows, -1).contiguous()
    routing = Routing(0, chosen, torch.ones(chosen.shape))
    found = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        with torch.inference_mode():
            mix_experts([rows], [routing], held)
        found.append(time.perf_counter() - started)
    return statistics.median(found) / len(experts)


# ---- passes ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Passes:
    """Seconds of passes of one row, and what readers got done beside one kind of them.

    Attributes:
        row: with all experts there.
        row_with_stops: with none there, where reads take no time.
        row_with_full_stops: the same where all are awaited before anything is computed.
        row_while_reading: with all there, while others read.
        read_share: what they read meanwhile, of what they read by themselves.
        draft: of the draft, with all there.
    """

    row: float
    row_with_stops: float
    row_with_full_stops: float
    row_while_reading: float
    read_share: float
    draft: float


def _measure_passes(
    root: Path, bundle: Bundle, memory_budget_bytes: int | None, scarce_budget_bytes: int
) -> _Passes:
    num_readers = PLAIN.num_io_threads
    with Session.open(root, replace(PLAIN, memory_budget_bytes=memory_budget_bytes)) as session:
        num_tokens = _resident_tokens(session)
        row = _row_seconds(session, num_tokens)
        with _Readers(bundle, num_readers) as alone:
            time.sleep(READ_SECONDS)
        with _Readers(bundle, num_readers) as beside:
            row_while_reading = _row_seconds(session, num_tokens)
    with Session.open(root, replace(DRAFTS, memory_budget_bytes=memory_budget_bytes)) as session:
        draft = _draft_seconds(session, num_tokens)
    scarce = replace(PLAIN, memory_budget_bytes=scarce_budget_bytes)
    stops = []
    for overlap in (True, False):
        store = _NoReads(ShardExpertStore.of(bundle))
        with Session.open(root, replace(scarce, overlap=overlap), store) as session:
            stops.append(_row_seconds(session, num_tokens))
    share = beside.bytes_per_second / alone.bytes_per_second
    return _Passes(row, stops[0], stops[1], row_while_reading, share, draft)


def _resident_tokens(session: Session) -> int:
    """How many tokens can be decoded again and again without a read."""
    num_tokens = NUM_TOKENS
    while num_tokens > 1:
        for _ in range(2):
            _decode(session, num_tokens)
        if not session.stats.cache.loads:
            return num_tokens
        num_tokens = (num_tokens + 1) // 2
    raise CapacityError(
        f"{session.memory.num_slots} expert slots have no room for the experts of two tokens; "
        "measure with a larger --memory-budget"
    )


def _decode(session: Session, num_tokens: int) -> None:
    for _ in session.generate_ids([0], num_tokens, stop_at_eos=False):
        pass


def _row_seconds(session: Session, num_tokens: int) -> float:
    found = []
    for _ in range(REPEATS):
        _decode(session, num_tokens)
        assert session.stats.tpot_seconds is not None
        found.append(session.stats.tpot_seconds)
    return statistics.median(found)


def _draft_seconds(session: Session, num_tokens: int) -> float:
    found = []
    for _ in range(REPEATS):
        _decode(session, max(num_tokens, 3))  # the last token is not drafted
        found.append(session.stats.draft_seconds / session.stats.num_drafted)
    return statistics.median(found)


class _NoReads:
    """A store that reads into each buffer but once: later reads leave the expert that is there."""

    def __init__(self, store: ExpertStore) -> None:
        self._store = store
        self._filled: set[int] = set()
        self.slot_bytes = store.slot_bytes
        self.nbytes = store.nbytes

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        """See ``ExpertStore.read_into``."""
        address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
        if address not in self._filled:
            self._filled.add(address)
            self._store.read_into(key, buffer)


def _computing_seconds(shape: Shape, rates: _Rates, num_chosen: int) -> float:
    """What the simulator takes a row's multiplications for."""
    dense = (sum(shape.dense_bytes) + shape.common_bytes) / rates.memory
    rate = rates.packed if shape.is_packed else rates.memory
    return dense + len(shape.moe_layers) * num_chosen * shape.shard_bytes / rate
