"""The fast tier: a fixed number of expert slots, filled by I/O threads.

The target's ``ExpertProvider``. An expert is *resident* (in a slot, ready), *in flight* (being read
into a slot), *queued*, or on disk. A demand (``experts``) yields residents first and then the
others as they arrive; the prefetcher asks ahead (``prefetch``); the draft takes what is there
(``residents``). Demands go before prefetches, prefetches by deadline: the layer at which
verification will need them.

The cache needs one slot to make progress: what has been consumed is unpinned at once and gives way.
It decides nothing: *what* to evict and read next is up to ``slot_table``, *how* to read to
``expert_store``.

Called by: moe (as provider), row_pass, draft_engine, prefetcher, session.
Next: slot_table, expert_store.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from specter_runtime.errors import SpecterError
from specter_runtime.eviction import EvictionPolicy
from specter_runtime.expert_store import ExpertStore, aligned_buffer
from specter_runtime.experts import Batch, Expert, ExpertKey, Routing
from specter_runtime.metrics import CacheStats
from specter_runtime.slot_table import NOW, Load, LoadKind, SlotTable

logger = logging.getLogger(__name__)


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
        self._table = SlotTable(num_slots, policy, None if residency is None else residency.release)
        self._store = store
        self._view = view
        self.overlap = overlap
        self._residency = residency
        self._held: list[ExpertKey] = []
        self._load_timeout_seconds = load_timeout_seconds
        self.num_slots = num_slots
        arena = aligned_buffer(num_slots * store.slot_bytes)
        self._slots = [self._slot(arena, i) for i in range(num_slots)]
        self._failures: dict[ExpertKey, tuple[LoadKind, SpecterError]] = {}
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
        with self._lock:
            ready, waiting = self._table.demand(routing, keys)
            for key in waiting:
                self._forget_failure(key)
                self._work_queued.notify()
            return self._found(ready), waiting

    def _found(self, keys: Iterable[ExpertKey]) -> list[tuple[ExpertKey, Expert]]:
        """Those of the experts that are resident."""
        found = []
        for key in keys:
            slot = self._table.slot_of(key)
            if slot is not None:
                expert = self._slots[slot].expert
                assert expert is not None, "a read has filled the slot of a resident expert"
                found.append((key, expert))
        return found

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
            self._table.stats.stall_seconds += stall_seconds
            self._table.observe_used(first_layer, selected.numpy(), probs.numpy())
            if self._table.has_queued():  # it may have been waiting for a slot
                self._work_queued.notify_all()

    def hold(self, routing: Routing) -> None:
        """Demand experts for one who uses them past the cache; ``observe_used`` lets go of them."""
        self._held = [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]
        self._demand(routing, self._held)

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
                    for key in waiting:
                        if key in self._failures:
                            self._raise_or_retry(key)
                    arrived = self._found(waiting)
                    if len(arrived) >= num_awaited:
                        return arrived
                    remaining = deadline - time.perf_counter()
                    if remaining <= 0:
                        break
                    self._load_ended.wait(remaining)
            return [self._read_in_foreground(next(iter(waiting)))]
        finally:
            with self._lock:
                self._table.stats.stall_seconds += time.perf_counter() - started

    def _raise_or_retry(self, key: ExpertKey) -> None:
        """A demand's failure is the caller's; a prefetch's is tried once more, as a demand."""
        kind, failure = self._failures.pop(key)
        if kind == "demand":
            raise failure
        self._table.queue_demand(key)
        self._work_queued.notify()

    def _forget_failure(self, key: ExpertKey) -> None:
        """It is read anew."""
        self._failures.pop(key, None)

    def _read_in_foreground(self, key: ExpertKey) -> tuple[ExpertKey, Expert]:
        """Read past a load that does not come: into memory of its own, used once, not cached."""
        buffer = aligned_buffer(self._store.slot_bytes)
        found = self._read(key, _Slot(buffer, torch.frombuffer(buffer, dtype=torch.uint8)))
        if isinstance(found, SpecterError):
            raise found
        with self._lock:
            self._table.stats.overdue_loads += 1
            self._table.stats.loads += 1
            self._table.stats.loaded_bytes += self._store.nbytes(key)
        return key, found

    def _unpin(self, keys: Iterable[ExpertKey]) -> None:
        with self._lock:
            self._table.unpin(keys)
            if self._table.has_queued():  # it may have been waiting for a slot
                self._work_queued.notify_all()

    # ---- the foreground: what is there ------------------------------------------------------

    def residents(self, routing: Routing) -> Iterator[Batch]:
        """Yield those of the experts that are resident now, in one batch, as ``experts`` would.

        They stay until the iterator advances. This is no demand: nothing is read, counted or
        learnt of what the routers want, so a draft may be wrong without a cost.
        """
        keys = [ExpertKey(routing.layer, expert) for expert in routing.expert_ids()]
        with self._lock:
            found = self._found(keys)
            for key, _ in found:
                self._table.pin(key)
        try:
            yield [(key.expert, weights) for key, weights in found]
        finally:
            self._unpin(key for key, _ in found)

    def num_absent(self, routings: Iterable[Routing]) -> int:
        """How many of the experts are neither resident nor on their way."""
        keys = [ExpertKey(r.layer, expert) for r in routings for expert in r.expert_ids()]
        with self._lock:
            return self._table.num_absent(keys)

    def is_resident(self, key: ExpertKey) -> bool:
        """Whether the expert could be used at once."""
        with self._lock:
            return self._table.slot_of(key) is not None

    # ---- the foreground: looking ahead ------------------------------------------------------

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        """Ask for an expert before it is demanded; returns whether a read was queued.

        Until it is demanded or ``cancel_prefetches`` is called, the expert counts as needed at
        layer ``deadline`` and gives way only to what is needed earlier.
        """
        with self._lock:
            if not self._table.prefetch(key, deadline):
                return False
            self._forget_failure(key)
            self._work_queued.notify()
            return True

    def cancel_prefetches(self) -> None:
        """Forget all lookahead; queued prefetches are dropped, those in flight arrive."""
        with self._lock:
            self._table.cancel_prefetches()

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
            while any(map(self._table.is_asked_for, keys)):
                if not self._load_ended.wait(self._load_timeout_seconds):
                    logger.warning("reading the initial experts takes too long; going on without")
                    break
            self._table.forget_prefetched(keys)
            self._table.forget_next_uses()
            failures = [self._failures.pop(key)[1] for key in keys if key in self._failures]
        if failures:
            raise failures[0]

    def stats(self) -> CacheStats:
        """A snapshot of the counters."""
        with self._lock:
            stats = self._table.stats.copy()
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

    # ---- the I/O threads --------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                task = None if self._closed else self._table.begin_read()
                while task is None and not self._closed:
                    self._work_queued.wait()
                    task = None if self._closed else self._table.begin_read()
                if task is None:
                    return
                load, slot = task
                if self._num_reading == 0:
                    self._reading_since = time.perf_counter()
                self._num_reading += 1
            found = self._read(load.key, self._slots[slot])
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

    def _end_read(self, load: Load, slot: int, found: Expert | SpecterError) -> None:
        self._num_reading -= 1
        if self._num_reading == 0:
            self._table.stats.link_busy_seconds += time.perf_counter() - self._reading_since
        if not isinstance(found, SpecterError):
            self._slots[slot].expert = found
            self._table.end_read(load, slot, self._store.nbytes(load.key))
            if self._residency is not None:
                self._residency.put(load.key, found)
            return
        self._table.fail_read(load, slot)
        self._failures[load.key] = (load.kind, found)
        if load.kind == "prefetch":
            logger.warning("a prefetch failed and will be tried again on demand: %s", found)
