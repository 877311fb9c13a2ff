"""The fast tier: a fixed number of expert slots, filled by I/O threads.

The target's ``ExpertProvider``. An expert is *resident* (in a slot, ready), *in flight* (being read
into a slot), *queued*, or on disk. A demand (``experts``) yields residents first and then the
others as they arrive; the prefetcher asks ahead (``prefetch``); the draft takes what is there
(``residents``). Demands go before prefetches, prefetches by deadline: the layer at which
verification will need them.

The cache needs one slot to make progress: what has been consumed is unpinned at once and gives way.
It never decides *what* to evict (``eviction.choose_victim``) nor *how* to read (``expert_store``).

Called by: moe (as provider), row_pass, draft_engine, prefetcher, session.
Next: eviction, expert_store.
"""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch

from specter_runtime.errors import CapacityError, SpecterError
from specter_runtime.eviction import UNKNOWN, EvictionPolicy, choose_victim
from specter_runtime.expert_store import ExpertStore, aligned_buffer
from specter_runtime.experts import Batch, Expert, ExpertKey, Routing
from specter_runtime.metrics import CacheStats

logger = logging.getLogger(__name__)

NOW = -1
"""Deadline of a demand: before every layer."""

LoadKind = Literal["demand", "prefetch"]


class Residency(Protocol):
    """Is told of each expert that can be used, and asked before one is evicted."""

    def put(self, key: ExpertKey, expert: Expert) -> None:
        """The expert is there until it is released."""
        ...

    def release(self, key: ExpertKey) -> bool:
        """The expert is to go; False if it is in use and must stay."""
        ...


@dataclass(slots=True)
class _Slot:
    """One expert's room in the arena."""

    buffer: memoryview
    tensor: torch.Tensor  # the same bytes
    expert: Expert | None = None  # what the last read brought


@dataclass(slots=True)
class _Load:
    """A read that is queued or in flight."""

    key: ExpertKey
    kind: LoadKind
    in_flight: bool = False


class ExpertCache:
    """Fixed expert slots over a store.

    Threads: ``experts``, ``hold``, ``observe_used``, ``residents``, ``prefetch``,
    ``cancel_prefetches`` and ``warm`` are for one foreground thread; the I/O threads run
    ``_serve``. All state is guarded by ``_lock``; buffers are written only by the thread whose load
    holds the slot, and read only while the key is pinned here, or in use by the residency's
    account. An I/O thread never raises: a failed load is kept and raised by the next demand of its
    key.
    """

    def __init__(
        self,
        store: ExpertStore,
        num_slots: int,
        view: Callable[[torch.Tensor, Expert | None], Expert],
        policy: EvictionPolicy,
        num_io_threads: int = 2,
        load_timeout_seconds: float = 10.0,
        *,
        overlap: bool = True,
        residency: Residency | None = None,
    ) -> None:
        """Allocate the arena and start the I/O threads.

        Args:
            store: where experts are read from.
            num_slots: experts that can be resident.
            view: sees what was read into a slot's uint8 tensor, without a copy; it is also given
                what it returned for this slot before. Raises if it is damaged.
            policy: what it is worth to keep each expert.
            num_io_threads: threads that read.
            load_timeout_seconds: how long a demand waits for a load in flight before it reads the
                expert itself.
            overlap: whether experts are handed out as they arrive. If not, all that one call asks
                for are awaited first, unless they outnumber the slots.
            residency: uses experts past this cache, without a lock (``observe_used`` tells of it).

        Raises:
            CapacityError: there is no slot.
        """
        if num_slots < 1:
            raise CapacityError(f"the expert cache needs at least 1 slot, got {num_slots}")
        self._store = store
        self._view = view
        self._policy = policy
        self.overlap = overlap
        self._residency = residency
        self._held: list[ExpertKey] = []
        self._load_timeout_seconds = load_timeout_seconds
        self.num_slots = num_slots
        arena = aligned_buffer(num_slots * store.slot_bytes)
        self._free = [self._slot(arena, i) for i in range(num_slots)]
        self._resident: dict[ExpertKey, _Slot] = {}
        shape = policy.values.shape  # [L, E], as that of the next three
        self._evictable = np.zeros(shape, dtype=bool)  # resident and not pinned
        self._pins = np.zeros(shape, dtype=np.int64)
        self._next_use = np.full(shape, UNKNOWN)  # layer at which the window needs it
        self._loads: dict[ExpertKey, _Load] = {}
        self._demands: deque[ExpertKey] = deque()
        self._prefetches: list[tuple[int, int, ExpertKey]] = []  # heap: deadline, order
        self._num_asked = 0
        self._due: dict[int, list[ExpertKey]] = {}  # what has a next use, by layer
        self._failures: dict[ExpertKey, tuple[LoadKind, SpecterError]] = {}
        self._prefetched: set[ExpertKey] = set()  # resident or in flight, not demanded since
        self._stats = CacheStats()
        self._num_reading = 0
        self._reading_since = 0.0
        self._closed = False
        self._lock = threading.Lock()
        self._work_queued = threading.Condition(self._lock)  # the I/O threads wait on it
        self._load_ended = threading.Condition(self._lock)  # the foreground waits on it
        self._threads = [
            threading.Thread(target=self._serve, name=f"specter-io-{i}", daemon=True)
            for i in range(num_io_threads)
        ]
        for thread in self._threads:
            thread.start()

    def _slot(self, arena: memoryview, index: int) -> _Slot:
        size = self._store.slot_bytes
        buffer = arena[index * size : (index + 1) * size]
        return _Slot(buffer, torch.frombuffer(buffer, dtype=torch.uint8))

    # ---- the foreground: demand -------------------------------------------------------------

    def experts(self, routing: Routing) -> Iterator[Batch]:
        """Yield each expert once: all residents together, then those that have arrived.

        Raises:
            SpecterError: an expert could not be read; names the file.
        """
        keys = [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]
        pinned = set(keys)
        ready, waiting = self._demand(routing, keys)
        try:
            while ready or waiting:
                if not ready or not self.overlap:
                    ready += self._await(waiting, len(ready))
                yield [(key.expert, weights) for key, weights in ready]
                done = [key for key, _ in ready]
                self._unpin(done)
                pinned.difference_update(done)
                waiting.difference_update(done)
                ready = []
        finally:
            self._unpin(pinned)

    def _demand(
        self, routing: Routing, keys: list[ExpertKey]
    ) -> tuple[list[tuple[ExpertKey, Expert]], set[ExpertKey]]:
        """Pin all ``keys``; split them into resident and awaited; queue what nobody reads yet."""
        ready: list[tuple[ExpertKey, Expert]] = []
        waiting: set[ExpertKey] = set()
        with self._lock:
            self._policy.observe(routing)
            self._pass_by(routing.layer, keys)
            for key in keys:
                self._pins[key] += 1
                self._evictable[key] = False
                slot = self._resident.get(key)
                load = self._loads.get(key)
                if slot is not None and slot.expert is not None:
                    self._stats.hits += 1
                    self._count_useful(key)
                    ready.append((key, slot.expert))
                elif load is not None and load.in_flight:
                    self._stats.late_hits += 1
                    self._count_useful(key)
                    waiting.add(key)
                else:
                    self._stats.misses += 1
                    waiting.add(key)
                    if load is None or load.kind == "prefetch":  # else queued by an earlier demand
                        self._queue_demand(key)
        return ready, waiting

    def _pass_by(self, layer: int, keys: Collection[ExpertKey]) -> None:
        """Forget what was foreseen of a layer that has come to need ``keys``."""
        for key in self._due.pop(layer, ()):
            self._next_use[key] = UNKNOWN
            load = self._loads.get(key)
            is_idle = load is not None and load.kind == "prefetch" and not load.in_flight
            if is_idle and key not in keys:
                del self._loads[key]  # was foreseen wrongly; its place in the heap is skipped

    def observe_used(
        self,
        first_layer: int,
        selected: torch.Tensor,  # int64 [L, K]
        probs: torch.Tensor,  # float32 [L, E]
        stall_seconds: float = 0.0,
    ) -> None:
        """Count what one token used of consecutive layers, all of it resident; let go of the rest.

        What ``hold`` kept is kept no longer; for some of it, ``stall_seconds`` have been waited.
        """
        if self._held:
            self._unpin(self._held)
            self._held = []
        if not len(selected) and not stall_seconds:
            return
        with self._lock:
            self._stats.stall_seconds += stall_seconds
            self._policy.observe_token(first_layer, selected.numpy(), probs.numpy())
            self._stats.hits += selected.numel()
            if self._prefetches:  # they may have been waiting for a slot
                self._work_queued.notify_all()
            if not self._due and not self._prefetched:
                return
            for layer, experts in enumerate(selected.tolist(), start=first_layer):
                keys = [ExpertKey(layer, expert) for expert in experts]
                self._pass_by(layer, keys)
                for key in keys:
                    self._count_useful(key)

    def hold(self, routing: Routing) -> None:
        """Demand experts for one who uses them past the cache; ``observe_used`` lets go of them."""
        self._held = [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]
        self._demand(routing, self._held)

    def _count_useful(self, key: ExpertKey) -> None:
        if key in self._prefetched:
            self._prefetched.discard(key)
            self._stats.useful_prefetches += 1

    def _queue_demand(self, key: ExpertKey) -> None:
        """Queue a read before all prefetches; a queued prefetch of the same expert becomes it."""
        self._add_load(key, "demand")
        self._demands.append(key)
        self._work_queued.notify()

    def _await(self, waiting: set[ExpertKey], num_ready: int) -> list[tuple[ExpertKey, Expert]]:
        """Block until some of the experts are resident; an overdue one is read right here.

        Without overlap, until all are, if there are slots for them beside those that are ready.
        """
        started = time.perf_counter()
        deadline = started + self._load_timeout_seconds
        num_awaited = len(waiting)
        if self.overlap or num_ready + num_awaited > self.num_slots:
            num_awaited = min(1, num_awaited)
        try:
            with self._lock:
                while True:
                    arrived = []
                    for key in waiting:
                        slot = self._resident.get(key)
                        if slot is not None and slot.expert is not None:
                            arrived.append((key, slot.expert))
                        elif key in self._failures:
                            self._raise_or_retry(key)
                    if len(arrived) >= num_awaited:
                        return arrived
                    remaining = deadline - time.perf_counter()
                    if remaining <= 0:
                        break
                    self._load_ended.wait(remaining)
            return [self._read_in_foreground(next(iter(waiting)))]
        finally:
            with self._lock:
                self._stats.stall_seconds += time.perf_counter() - started

    def _raise_or_retry(self, key: ExpertKey) -> None:
        """A demand's failure is the caller's; a prefetch's is tried once more, as a demand."""
        kind, failure = self._failures.pop(key)
        if kind == "demand":
            raise failure
        self._queue_demand(key)

    def _read_in_foreground(self, key: ExpertKey) -> tuple[ExpertKey, Expert]:
        """Read past a load that does not come: into memory of its own, used once, not cached."""
        buffer = aligned_buffer(self._store.slot_bytes)
        found = self._read(key, _Slot(buffer, torch.frombuffer(buffer, dtype=torch.uint8)))
        if isinstance(found, SpecterError):
            raise found
        with self._lock:
            self._stats.overdue_loads += 1
            self._stats.loads += 1
            self._stats.loaded_bytes += self._store.nbytes(key)
        return key, found

    def _unpin(self, keys: Iterable[ExpertKey]) -> None:
        with self._lock:
            for key in keys:
                self._pins[key] -= 1
                self._evictable[key] = key in self._resident and not self._pins[key]
            if self._demands or self._prefetches:  # they may have been waiting for a slot
                self._work_queued.notify_all()

    # ---- the foreground: what is there ------------------------------------------------------

    def residents(self, routing: Routing) -> Iterator[Batch]:
        """Yield those of the experts that are resident now, in one batch, as ``experts`` would.

        They stay until the iterator advances. This is no demand: nothing is read, counted or
        learnt of what the routers want, so a draft may be wrong without a cost.
        """
        keys = [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]
        found: list[tuple[ExpertKey, Expert]] = []
        with self._lock:
            for key in keys:
                slot = self._resident.get(key)
                if slot is not None and slot.expert is not None:
                    self._pins[key] += 1
                    self._evictable[key] = False
                    found.append((key, slot.expert))
        try:
            yield [(key.expert, weights) for key, weights in found]
        finally:
            self._unpin(key for key, _ in found)

    def num_absent(self, routings: Iterable[Routing]) -> int:
        """How many of the experts are neither resident nor on their way."""
        keys = [ExpertKey(r.layer, expert) for r in routings for expert in r.expert_ids()]
        with self._lock:
            return sum(key not in self._resident and key not in self._loads for key in keys)

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether the expert could be used at once."""
        with self._lock:
            return key in self._resident

    # ---- the foreground: looking ahead ------------------------------------------------------

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        """Ask for an expert before it is demanded; returns whether a read was queued.

        Until it is demanded or ``cancel_prefetches`` is called, the expert counts as needed at
        layer ``deadline`` and gives way only to what is needed earlier.
        """
        with self._lock:
            if self._next_use[key] == UNKNOWN:
                self._next_use[key] = deadline
                self._due.setdefault(deadline, []).append(key)
            if key in self._resident or key in self._loads:
                return False
            self._add_load(key, "prefetch")
            heapq.heappush(self._prefetches, (deadline, self._num_asked, key))
            self._num_asked += 1
            self._work_queued.notify()
            return True

    def cancel_prefetches(self) -> None:
        """Forget all lookahead; queued prefetches are dropped, those in flight arrive."""
        with self._lock:
            self._forget_next_uses()
            for _, _, key in self._prefetches:
                load = self._loads.get(key)
                if load is not None and load.kind == "prefetch" and not load.in_flight:
                    del self._loads[key]
            self._prefetches.clear()

    def warm(self, keys: Iterable[ExpertKey]) -> None:
        """Load experts and wait for them: the initial resident set.

        If no read ends within the load timeout, what has not come is left to demand.

        Raises:
            SpecterError: one of them could not be read.
        """
        keys = list(keys)[: self.num_slots]
        self.cancel_prefetches()
        for key in keys:
            self.prefetch(key, NOW)
        with self._lock:
            while any(key in self._loads for key in keys):
                if not self._load_ended.wait(self._load_timeout_seconds):
                    logger.warning("reading the initial experts takes too long; going on without")
                    break
            self._prefetched.difference_update(keys)
            self._forget_next_uses()
            failures = [self._failures.pop(key)[1] for key in keys if key in self._failures]
        if failures:
            raise failures[0]

    def _forget_next_uses(self) -> None:
        self._next_use.fill(UNKNOWN)
        self._due.clear()

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        with self._lock:
            stats = self._stats.copy()
            if self._num_reading:
                stats.link_busy_seconds += time.perf_counter() - self._reading_since
            return stats

    @property
    def nbytes(self) -> int:
        """Bytes of the arena."""
        return self.num_slots * self._store.slot_bytes

    def close(self) -> None:
        """Stop the I/O threads; reads in flight are waited for as long as one may take."""
        with self._lock:
            self._closed = True
            self._work_queued.notify_all()
        for thread in self._threads:
            thread.join(self._load_timeout_seconds)

    def _add_load(self, key: ExpertKey, kind: LoadKind) -> None:
        self._failures.pop(key, None)
        self._loads[key] = _Load(key, kind)

    # ---- the I/O threads --------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                task = self._next_task()
                while task is None and not self._closed:
                    self._work_queued.wait()
                    task = self._next_task()
                if task is None or self._closed:
                    return
                load, slot = task
                self._begin_read(load)
            found = self._read(load.key, slot)
            with self._lock:
                self._end_read(load, slot, found)
                self._load_ended.notify_all()

    def _read(self, key: ExpertKey, slot: _Slot) -> Expert | SpecterError:
        try:
            self._store.read_into(key, slot.buffer)
            return self._view(slot.tensor, slot.expert)
        except SpecterError as exc:
            return exc
        except Exception as exc:  # whatever it was, the foreground must learn of it
            return SpecterError(f"reading expert {tuple(key)} failed: {exc!r}")

    def _next_task(self) -> tuple[_Load, _Slot] | None:
        """The most urgent queued load for which there is a slot."""
        if self._demands:
            slot = self._take_slot(NOW)
            if slot is not None:
                return self._loads[self._demands.popleft()], slot
            return None
        while self._prefetches:
            deadline, _, key = self._prefetches[0]
            load = self._loads.get(key)
            if load is None or load.kind != "prefetch" or load.in_flight:
                heapq.heappop(self._prefetches)  # has become a demand since, or was cancelled
                continue
            slot = self._take_slot(deadline)
            if slot is None:
                return None
            heapq.heappop(self._prefetches)
            return load, slot
        return None

    def _take_slot(self, needed_at: int) -> _Slot | None:
        """A free slot, by eviction if need be; None when everything resident is needed sooner."""
        if self._free:
            return self._free.pop()
        values, evictable = self._policy.values, self._evictable
        victim = choose_victim(values, evictable, self._next_use, needed_at)
        while victim is not None and self._residency and not self._residency.release(victim):
            if evictable is self._evictable:
                evictable = evictable.copy()
            evictable[victim] = False  # for this once: it is in use
            victim = choose_victim(values, evictable, self._next_use, needed_at)
        if victim is None:
            return None
        self._evictable[victim] = False
        self._prefetched.discard(victim)
        return self._resident.pop(victim)

    def _begin_read(self, load: _Load) -> None:
        load.in_flight = True
        if load.kind == "prefetch":
            self._stats.prefetch_loads += 1
            self._prefetched.add(load.key)
        if self._num_reading == 0:
            self._reading_since = time.perf_counter()
        self._num_reading += 1

    def _end_read(self, load: _Load, slot: _Slot, found: Expert | SpecterError) -> None:
        self._num_reading -= 1
        if self._num_reading == 0:
            self._stats.link_busy_seconds += time.perf_counter() - self._reading_since
        del self._loads[load.key]
        if not isinstance(found, SpecterError):
            self._stats.loads += 1
            self._stats.loaded_bytes += self._store.nbytes(load.key)
            slot.expert = found
            self._resident[load.key] = slot
            self._evictable[load.key] = not self._pins[load.key]
            if self._residency is not None:
                self._residency.put(load.key, found)
            return
        self._free.append(slot)
        self._failures[load.key] = (load.kind, found)
        self._prefetched.discard(load.key)
        if load.kind == "prefetch":
            self._stats.failed_prefetches += 1
            logger.warning("a prefetch failed and will be tried again on demand: %s", found)
