"""Which expert is in which slot, what is being read and what is to be read next. Pure.

The deciding half of the expert cache: pins, queues, next uses, eviction and counters, without
threads, buffers, files or clocks. ``ExpertCache`` drives it with real reads, the simulator with a
virtual clock; both get the same decisions from the same calls.

An expert is *resident* (in a slot, ready), *in flight* (being read into a slot), *queued*, or on
disk. Demands go before prefetches, prefetches by deadline: the layer that will need them.

Called by: expert_cache, simulator.  Next: eviction.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from specter_runtime.errors import CapacityError
from specter_runtime.eviction import UNKNOWN, EvictionPolicy, choose_victim
from specter_runtime.experts import ExpertKey, Routing
from specter_runtime.metrics import CacheStats

NOW = -1
"""Deadline of a demand: before every layer."""

LoadKind = Literal["demand", "prefetch"]


@dataclass(slots=True)
class Load:
    """A read that is queued or in flight."""

    key: ExpertKey
    kind: LoadKind
    in_flight: bool = False


class SlotTable:
    """The state of an expert cache. Not thread-safe: whoever drives it holds a lock.

    Attributes:
        num_slots: experts that can be resident.
        stats: counters; whoever drives it adds the seconds, which are not known here.
    """

    def __init__(
        self,
        num_slots: int,
        policy: EvictionPolicy,
        may_evict: Callable[[ExpertKey], bool] | None = None,
    ) -> None:
        """Begin with empty slots.

        Args:
            num_slots: experts that can be resident.
            policy: what it is worth to keep each expert.
            may_evict: asked before an expert goes; False if it is in use past this table. None: it
                never is.

        Raises:
            CapacityError: there is no slot.
        """
        if num_slots < 1:
            raise CapacityError(f"the expert cache needs at least 1 slot, got {num_slots}")
        self.num_slots = num_slots
        self.stats = CacheStats()
        self._policy = policy
        self._may_evict = may_evict
        self._free = list(range(num_slots))
        self._resident: dict[ExpertKey, int] = {}  # its slot
        shape = policy.values.shape  # [L, E], as that of the next three
        self._evictable = np.zeros(shape, dtype=bool)  # resident and not pinned
        self._pins = np.zeros(shape, dtype=np.int64)
        self._next_use = np.full(shape, UNKNOWN)  # layer at which the window needs it
        self._loads: dict[ExpertKey, Load] = {}
        self._demands: deque[ExpertKey] = deque()
        self._prefetches: list[tuple[int, int, ExpertKey]] = []  # heap: deadline, order
        self._num_asked = 0
        self._due: dict[int, list[ExpertKey]] = {}  # what has a next use, by layer
        self._prefetched: set[ExpertKey] = set()  # resident or in flight, not demanded since

    # ---- what is there ----------------------------------------------------------------------

    def slot_of(self, key: ExpertKey) -> int | None:
        """The slot of a resident expert."""
        return self._resident.get(key)

    def is_asked_for(self, key: ExpertKey) -> bool:
        """Whether the expert is queued or in flight."""
        return key in self._loads

    def residents(self) -> npt.NDArray[np.bool_]:
        """Which experts are resident: ``[L, E]``."""
        found = np.zeros(self._pins.shape, dtype=bool)
        for key in self._resident:
            found[key] = True
        return found

    def num_absent(self, keys: Iterable[ExpertKey]) -> int:
        """How many are neither resident nor on their way."""
        return sum(key not in self._resident and key not in self._loads for key in keys)

    def has_queued(self) -> bool:
        """Whether a read is queued; there may be no slot for it."""
        return bool(self._demands or self._prefetches)

    # ---- demands ----------------------------------------------------------------------------

    def demand(
        self, routing: Routing, keys: Collection[ExpertKey]
    ) -> tuple[list[ExpertKey], set[ExpertKey]]:
        """Pin ``keys``, all that a layer needs; queue what nobody reads yet.

        Returns:
            Those that are resident, in order, and the others.
        """
        ready: list[ExpertKey] = []
        waiting: set[ExpertKey] = set()
        self._policy.observe(routing)
        self._pass_by(routing.layer, keys)
        for key in keys:
            self.pin(key)
            load = self._loads.get(key)
            if key in self._resident:
                self.stats.hits += 1
                self._count_useful(key)
                ready.append(key)
            elif load is not None and load.in_flight:
                self.stats.late_hits += 1
                self._count_useful(key)
                waiting.add(key)
            else:
                self.stats.misses += 1
                waiting.add(key)
                if load is None or load.kind == "prefetch":  # else queued by an earlier demand
                    self.queue_demand(key)
        return ready, waiting

    def observe_used(
        self,
        first_layer: int,
        selected: npt.NDArray[np.int64],  # [L, K]
        probs: npt.NDArray[np.float32],  # [L, E]
    ) -> None:
        """Count what one token used of consecutive layers, all of it resident."""
        self._policy.observe_token(first_layer, selected, probs)
        self.stats.hits += selected.size
        if not self._due and not self._prefetched:
            return
        for layer, experts in enumerate(selected.tolist(), start=first_layer):
            keys = [ExpertKey(layer, expert) for expert in experts]
            self._pass_by(layer, keys)
            for key in keys:
                self._count_useful(key)

    def queue_demand(self, key: ExpertKey) -> None:
        """Queue a read before all prefetches; a queued prefetch of the same expert becomes it."""
        self._loads[key] = Load(key, "demand")
        self._demands.append(key)

    def pin(self, key: ExpertKey) -> None:
        """Keep an expert from being evicted until it is unpinned as often."""
        self._pins[key] += 1
        self._evictable[key] = False

    def unpin(self, keys: Iterable[ExpertKey]) -> None:
        """Undo one ``pin`` of each."""
        for key in keys:
            self._pins[key] -= 1
            self._evictable[key] = key in self._resident and not self._pins[key]

    def _pass_by(self, layer: int, keys: Collection[ExpertKey]) -> None:
        """Forget what was foreseen of a layer that has come to need ``keys``."""
        for key in self._due.pop(layer, ()):
            self._next_use[key] = UNKNOWN
            load = self._loads.get(key)
            is_idle = load is not None and load.kind == "prefetch" and not load.in_flight
            if is_idle and key not in keys:
                del self._loads[key]  # was foreseen wrongly; its place in the heap is skipped

    def _count_useful(self, key: ExpertKey) -> None:
        if key in self._prefetched:
            self._prefetched.discard(key)
            self.stats.useful_prefetches += 1

    # ---- looking ahead ----------------------------------------------------------------------

    def prefetch(self, key: ExpertKey, deadline: int) -> bool:
        """Ask for an expert before it is demanded; returns whether a read was queued.

        Until it is demanded or ``cancel_prefetches`` is called, the expert counts as needed at
        layer ``deadline`` and gives way only to what is needed earlier.
        """
        if self._next_use[key] == UNKNOWN:
            self._next_use[key] = deadline
            self._due.setdefault(deadline, []).append(key)
        if key in self._resident or key in self._loads:
            return False
        self._loads[key] = Load(key, "prefetch")
        heapq.heappush(self._prefetches, (deadline, self._num_asked, key))
        self._num_asked += 1
        return True

    def cancel_prefetches(self) -> None:
        """Forget all lookahead; queued prefetches are dropped, those in flight arrive."""
        self.forget_next_uses()
        for _, _, key in self._prefetches:
            load = self._loads.get(key)
            if load is not None and load.kind == "prefetch" and not load.in_flight:
                del self._loads[key]
        self._prefetches.clear()

    def forget_next_uses(self) -> None:
        """No resident is protected any more by what was foreseen."""
        self._next_use.fill(UNKNOWN)
        self._due.clear()

    def forget_prefetched(self, keys: Iterable[ExpertKey]) -> None:
        """Do not count these as prefetches when they are used."""
        self._prefetched.difference_update(keys)

    # ---- reads ------------------------------------------------------------------------------

    def begin_read(self) -> tuple[Load, int] | None:
        """Take the most urgent queued load for which there is a slot, and the slot."""
        task = self._next_task()
        if task is not None:
            load, _ = task
            load.in_flight = True
            if load.kind == "prefetch":
                self.stats.prefetch_loads += 1
                self._prefetched.add(load.key)
        return task

    def end_read(self, load: Load, slot: int, nbytes: int) -> None:
        """A read has brought its expert, ``nbytes`` long."""
        del self._loads[load.key]
        self.stats.loads += 1
        self.stats.loaded_bytes += nbytes
        self._resident[load.key] = slot
        self._evictable[load.key] = not self._pins[load.key]

    def fail_read(self, load: Load, slot: int) -> None:
        """A read has failed; its slot is free."""
        del self._loads[load.key]
        self._free.append(slot)
        self._prefetched.discard(load.key)
        if load.kind == "prefetch":
            self.stats.failed_prefetches += 1

    def _next_task(self) -> tuple[Load, int] | None:
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

    def _take_slot(self, needed_at: int) -> int | None:
        """A free slot, by eviction if need be; None when everything resident is needed sooner."""
        if self._free:
            return self._free.pop()
        values, evictable = self._policy.values, self._evictable
        victim = choose_victim(values, evictable, self._next_use, needed_at)
        while victim is not None and self._may_evict and not self._may_evict(victim):
            if evictable is self._evictable:
                evictable = evictable.copy()
            evictable[victim] = False  # for this once: it is in use
            victim = choose_victim(values, evictable, self._next_use, needed_at)
        if victim is None:
            return None
        self._evictable[victim] = False
        self._prefetched.discard(victim)
        return self._resident.pop(victim)
