"""The expert cache over a store that does what the test says, when the test says so.

Each expert's weights hold its own name in every element, so whoever reads them sees at once whether
they are another expert's, or half of two. A test that must wait for a thread waits for what the
thread does; ``PATIENCE_SECONDS`` passes only where a test fails.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from specter_runtime.errors import BundleError, CapacityError, SpecterError
from specter_runtime.eviction import LeastRecentlyUsed
from specter_runtime.expert_cache import ExpertCache
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import Batch, Expert, ExpertKey, ExpertWeights, Routing
from specter_runtime.shards import ALIGNMENT, align_up, write_tensors

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning"),
]

PATIENCE_SECONDS = 10.0
LONG_SECONDS = 30.0  # a load timeout that no test reaches
SHORT_SECONDS = 0.05  # a load timeout that a test waits for
EXPERT_BYTES = 96  # three matrices of four int64


def code(key: ExpertKey) -> int:
    """What every element of an expert's weights holds; never 0."""
    return 1000 * (key.layer + 1) + key.expert


def view(buffer: torch.Tensor, previous: Expert | None = None) -> ExpertWeights:
    numbers = buffer[:EXPERT_BYTES].view(torch.int64)
    return ExpertWeights(numbers[:4], numbers[4:8], numbers[8:])


def expert_bytes(key: ExpertKey) -> bytes:
    return code(key).to_bytes(8, "little") * 12


def check_weights(weights: ExpertWeights, key: ExpertKey) -> None:
    numbers = [*weights.gate_proj, *weights.up_proj, *weights.down_proj]
    assert [int(x) for x in numbers] == [code(key)] * 12, f"not the weights of {key}"


def wait_until(condition: Callable[[], bool], seconds: float = PATIENCE_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "what the test waited for never happened"
        time.sleep(0.0005)


class ScriptedStore:
    """Experts in memory. Reads of a held expert wait for ``release``; failing ones raise."""

    slot_bytes = ALIGNMENT

    def nbytes(self, key: ExpertKey) -> int:
        return EXPERT_BYTES

    def __init__(self, pause: Callable[[], None] = lambda: None) -> None:
        """``pause`` is called in the middle of every read."""
        self.started: list[ExpertKey] = []
        self._gates: dict[ExpertKey, threading.Event] = {}
        self._failures: dict[ExpertKey, list[Exception]] = defaultdict(list)
        self._pause = pause
        self._lock = threading.Lock()

    def hold(self, *keys: ExpertKey) -> None:
        """The next read of each of these, and all after it, wait until they are released."""
        for key in keys:
            self._gates[key] = threading.Event()

    def release(self, *keys: ExpertKey) -> None:
        """Let reads of these go on; of all, if none are named."""
        for key in keys or tuple(self._gates):
            self._gates.pop(key).set()

    def fail(self, key: ExpertKey, *errors: Exception) -> None:
        """The next reads of this expert raise these, one each."""
        self._failures[key] += errors

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        assert len(buffer) == self.slot_bytes
        with self._lock:
            self.started.append(key)
            gate = self._gates.get(key)
        if gate is not None:
            gate.wait()
        with self._lock:
            error = self._failures[key].pop(0) if self._failures[key] else None
        content = b"\xff" * EXPERT_BYTES if error else expert_bytes(key)
        buffer[: EXPERT_BYTES // 2] = content[: EXPERT_BYTES // 2]
        self._pause()
        if error:
            raise error
        buffer[EXPERT_BYTES // 2 : EXPERT_BYTES] = content[EXPERT_BYTES // 2 :]


class RecordingResidency:
    """Keeps book of what could be used past the cache; what is in use is not let go."""

    def __init__(self) -> None:
        self.there: set[ExpertKey] = set()
        self.in_use: set[ExpertKey] = set()

    def put(self, key: ExpertKey, expert: Expert) -> None:
        assert isinstance(expert, ExpertWeights)
        check_weights(expert, key)
        assert key not in self.there
        self.there.add(key)

    def release(self, key: ExpertKey) -> bool:
        assert key in self.there
        if key in self.in_use:
            return False
        self.there.remove(key)
        return True


def keys(layer: int, *experts: int) -> list[ExpertKey]:
    return [ExpertKey(layer, expert) for expert in experts]


A, B, C, D, E, F = keys(0, *range(6))
OpenCache = Callable[..., ExpertCache]


@pytest.fixture
def store() -> Iterator[ScriptedStore]:
    store = ScriptedStore()
    yield store
    store.release()


def least_recent() -> LeastRecentlyUsed:
    """Eviction whose victims can be told by looking."""
    return LeastRecentlyUsed(8, 16, ())


@pytest.fixture
def open_cache(store: ScriptedStore) -> Iterator[OpenCache]:
    """Opens caches over ``store`` (or another one), one I/O thread unless told; closes them."""
    caches: list[ExpertCache] = []

    def open_cache(
        num_slots: int,
        num_io_threads: int = 1,
        load_timeout_seconds: float = LONG_SECONDS,
        store: ExpertStore = store,
        view: Callable[[torch.Tensor, Expert | None], ExpertWeights] = view,
        overlap: bool = True,
        residency: RecordingResidency | None = None,
    ) -> ExpertCache:
        caches.append(
            ExpertCache(
                store,
                num_slots,
                view,
                least_recent(),
                num_io_threads,
                load_timeout_seconds,
                overlap=overlap,
                residency=residency,
            )
        )
        return caches[-1]

    yield open_cache
    store.release()
    for cache in caches:
        cache.close()


@pytest.fixture
def in_background(store: ScriptedStore) -> Iterator[ThreadPoolExecutor]:
    """One thread, to stand in the foreground's place while the test looks on."""
    with ThreadPoolExecutor(1) as pool:
        yield pool
        store.release()


def demand_of(
    cache: ExpertCache, layer: int, experts: Sequence[int]
) -> Generator[tuple[int, Expert], None, None]:
    """Demand experts; they come one by one, a batch's pins last until the next batch."""
    selected = torch.tensor([list(experts)], dtype=torch.int64)
    for batch in cache.experts(Routing(layer, selected, torch.ones(selected.shape))):
        yield from batch


def consume(cache: ExpertCache, layer: int, experts: Sequence[int]) -> list[int]:
    """Demand experts; check each one's weights when it comes and again before the next."""
    order = []
    for expert, weights in demand_of(cache, layer, experts):
        key = ExpertKey(layer, expert)
        check_weights(weights, key)
        time.sleep(0)  # let the I/O threads do their worst
        check_weights(weights, key)
        order.append(expert)
    return order


def residents(cache: ExpertCache, candidates: Sequence[ExpertKey]) -> list[ExpertKey]:
    return [key for key in candidates if cache.is_resident(key)]


def load(cache: ExpertCache, *keys: ExpertKey) -> None:
    """Make experts resident one after the other; the last one is the most recently used."""
    for key in keys:
        assert consume(cache, key.layer, [key.expert]) == [key.expert]


# ---- demands -------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_io_threads", [1, 2, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 3, 5, 8, 20])
def test_each_expert_comes_exactly_once_with_its_own_weights(
    open_cache: OpenCache, store: ScriptedStore, num_slots: int, num_io_threads: int
) -> None:
    cache = open_cache(num_slots, num_io_threads)
    chosen = ([3, 0, 4, 1, 2], [1], [], [2, 5])
    rounds = [(layer, experts) for experts in chosen for layer in (0, 1)]
    for layer, experts in rounds * 3:
        order = consume(cache, layer, experts)
        assert sorted(order) == sorted(experts)
    stats = cache.stats()
    num_demands = sum(len(experts) for _, experts in rounds) * 3
    assert stats.hits + stats.misses == num_demands
    assert stats.misses == stats.loads == len(store.started)
    assert stats.loaded_bytes == stats.loads * EXPERT_BYTES
    if num_slots == 20:
        assert stats.misses == 12  # there is room for all: each is read once
    assert stats.late_hits == stats.overdue_loads == stats.prefetch_loads == 0


@pytest.mark.parametrize("num_slots", [1, 2, 3, 4])
def test_never_more_experts_are_resident_than_there_are_slots(
    open_cache: OpenCache, num_slots: int
) -> None:
    cache = open_cache(num_slots, 2)
    everything = keys(0, *range(6)) + keys(1, *range(6))
    for layer in (0, 1, 0):
        for expert, weights in demand_of(cache, layer, range(6)):
            assert len(residents(cache, everything)) <= num_slots
            assert cache.is_resident(ExpertKey(layer, expert))
            check_weights(weights, ExpertKey(layer, expert))
        assert len(residents(cache, everything)) == num_slots
    assert cache.num_slots == num_slots
    assert cache.nbytes == num_slots * ALIGNMENT


def test_residents_come_before_anything_is_waited_for(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(4)
    load(cache, B, D)
    store.hold(A, C)
    demand = demand_of(cache, 0, [0, 1, 2, 3])
    assert [next(demand)[0], next(demand)[0]] == [1, 3]
    store.release()
    assert sorted(expert for expert, _ in demand) == [0, 2]


def resident_batch(cache: ExpertCache, layer: int, experts: Sequence[int]) -> Iterator[Batch]:
    selected = torch.tensor([list(experts)], dtype=torch.int64)
    return cache.residents(Routing(layer, selected, torch.ones(selected.shape)))


def test_residents_are_handed_out_without_a_demand(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    """Nothing is read or counted, and what was used last stays what was used last."""
    cache = open_cache(3)
    load(cache, A, B, C)
    before = cache.stats()
    [batch] = resident_batch(cache, 0, [3, 2, 0, 5])
    assert [expert for expert, _ in batch] == [0, 2]
    for expert, weights in batch:
        check_weights(weights, ExpertKey(0, expert))
    assert list(resident_batch(cache, 1, [0, 1])) == [[]]
    assert cache.stats() == before
    assert store.started == [A, B, C]
    load(cache, D)
    assert residents(cache, [A, B, C, D]) == [B, C, D]  # A was used first, whoever looked at it


def test_residents_stay_while_they_are_in_use_and_give_way_afterwards(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(2)
    load(cache, A, B)
    batches = resident_batch(cache, 0, [0, 1])
    batch = next(batches)
    cache.prefetch(C, deadline=0)
    cache.prefetch(D, deadline=0)
    time.sleep(SHORT_SECONDS)  # long enough for a read, were there a slot
    assert store.started == [A, B]
    for expert, weights in batch:
        check_weights(weights, ExpertKey(0, expert))
    assert next(batches, None) is None
    wait_until(lambda: residents(cache, [A, B, C, D]) == [C, D])


def test_a_draft_that_breaks_off_keeps_no_expert(open_cache: OpenCache) -> None:
    cache = open_cache(1)
    load(cache, A)
    batches = resident_batch(cache, 0, [0])
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    load(cache, B)
    assert residents(cache, [A, B]) == [B]


def test_who_uses_experts_past_the_cache_is_told_of_each_and_asked_before_it_goes(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    residency = RecordingResidency()
    cache = open_cache(num_slots=2, residency=residency)
    a, b, c, d = keys(0, 0, 1, 2, 3)
    store.hold(a)
    cache.prefetch(a, deadline=0)
    assert residency.there == set()
    store.release(a)
    load(cache, a)
    load(cache, b)
    assert residency.there == {a, b}
    residency.in_use = {a}  # the least recently used, which would have to go
    load(cache, c)
    assert residency.there == {a, c}
    assert residents(cache, [a, b, c]) == [a, c]
    residency.in_use = {a, c}
    cache.prefetch(d, deadline=5)
    residency.in_use = set()
    load(cache, b)  # there was no slot for it, but what was foreseen is not given up
    wait_until(lambda: cache.is_resident(d))
    assert residency.there == {b, d}


def test_what_was_used_past_the_cache_counts_as_hits_and_ends_what_was_foreseen(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    residency = RecordingResidency()
    cache = open_cache(num_slots=4, residency=residency)
    a, b, other, last = ExpertKey(1, 0), ExpertKey(2, 1), ExpertKey(2, 5), ExpertKey(3, 0)
    cache.prefetch(a, deadline=1)
    wait_until(lambda: cache.is_resident(a))
    load(cache, b, last)
    before = cache.stats()
    store.hold(ExpertKey(7, 0))
    cache.prefetch(ExpertKey(7, 0), deadline=0)  # holds up the only I/O thread
    wait_until(lambda: ExpertKey(7, 0) in store.started)
    cache.prefetch(other, deadline=2)  # foreseen wrongly, and not begun
    cache.observe_used(1, torch.tensor([[0], [1]]), torch.full((2, 16), 1 / 16))
    found = cache.stats().since(before)
    assert (found.hits, found.useful_prefetches, found.misses) == (2, 1, 0)
    store.release()
    wait_until(lambda: cache.is_resident(ExpertKey(7, 0)))
    assert other not in store.started
    load(cache, ExpertKey(6, 0))  # what was used last before that has become what goes
    assert residents(cache, [a, b, last]) == [a, b]
    cache.observe_used(3, torch.empty(0, 1, dtype=torch.int64), torch.empty(0, 16))
    assert cache.stats().hits == before.hits + 2


def test_absent_is_what_is_neither_there_nor_on_its_way(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(3)
    load(cache, A)
    store.hold(B)
    cache.prefetch(B, deadline=0)
    wait_until(lambda: B in store.started)  # in flight
    cache.prefetch(C, deadline=0)  # queued
    routings = [
        Routing(layer, torch.tensor([experts]), torch.ones(1, len(experts)))
        for layer, experts in ((0, [0, 1, 2, 3]), (1, [0, 1]))
    ]
    assert cache.num_absent(routings) == 3  # D, and both of layer 1
    assert cache.num_absent(routings[:1]) == 1
    assert cache.num_absent([]) == 0


def test_experts_come_as_they_arrive(open_cache: OpenCache, store: ScriptedStore) -> None:
    cache = open_cache(3, num_io_threads=3)
    store.hold(A, B)
    demand = demand_of(cache, 0, [0, 1, 2])
    assert next(demand)[0] == 2
    store.release(B)
    assert next(demand)[0] == 1
    store.release(A)
    assert next(demand)[0] == 0


def test_without_overlap_nothing_comes_before_everything_is_there(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(3, num_io_threads=2, overlap=False)
    load(cache, B)
    store.hold(A)
    demand = demand_of(cache, 0, [0, 1, 2])
    first = in_background.submit(next, demand)
    wait_until(lambda: cache.stats().loads == 2)
    assert not first.done()
    store.release(A)
    assert first.result(PATIENCE_SECONDS)[0] == 1
    assert sorted(expert for expert, _ in demand) == [0, 2]
    assert consume(cache, 1, range(5)) != []  # more than there are slots: as they arrive


def test_without_overlap_what_has_no_room_beside_residents_comes_as_it_arrives(
    open_cache: OpenCache,
) -> None:
    """A, B and C do not fit two slots together, B and C alone would."""
    cache = open_cache(2, overlap=False)
    load(cache, A)
    assert sorted(consume(cache, 0, [0, 1, 2])) == [0, 1, 2]
    assert cache.stats().overdue_loads == 0


def test_a_demand_that_is_still_queued_when_it_is_foreseen_stays_queued(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    """B is demanded behind a read that hangs, and given up; then foreseen; then not needed."""
    cache = open_cache(4)
    store.hold(A)
    store.fail(A, BundleError("broken"))
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    demand = demand_of(cache, 0, [1])
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(next, demand)
        wait_until(lambda: cache.stats().misses == 1)
        assert not cache.prefetch(B, deadline=0)
        other = demand_of(cache, 0, [2])
        with ThreadPoolExecutor(1) as second:
            second_asked = second.submit(next, other)
            wait_until(lambda: cache.stats().misses == 2)
            store.release()
            assert asked.result(PATIENCE_SECONDS)[0] == 1
            assert second_asked.result(PATIENCE_SECONDS)[0] == 2
    assert Counter(store.started) == {A: 1, B: 1, C: 1}
    assert cache.stats().overdue_loads == 0


def test_io_threads_read_at_the_same_time(open_cache: OpenCache, store: ScriptedStore) -> None:
    cache = open_cache(4, num_io_threads=3)
    store.hold(A, B, C, D)
    for key in (A, B, C, D):
        cache.prefetch(key, deadline=0)
    wait_until(lambda: len(store.started) == 3)
    store.release()
    wait_until(lambda: cache.stats().loads == 4)


def test_hits_late_hits_and_misses_are_counted_at_demand(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(6)
    load(cache, A)  # a miss
    cache.prefetch(B, deadline=0)
    wait_until(lambda: cache.is_resident(B))
    store.hold(C)
    cache.prefetch(C, deadline=0)
    wait_until(lambda: C in store.started)  # in flight
    cache.prefetch(D, deadline=0)  # queued
    cache.prefetch(E, deadline=1)  # queued, and not demanded before layer 1
    before = cache.stats()
    result = in_background.submit(consume, cache, 0, [0, 1, 2, 3, 5])
    wait_until(lambda: cache.stats().misses == 3)
    store.release(C)
    assert sorted(result.result(PATIENCE_SECONDS)) == [0, 1, 2, 3, 5]
    wait_until(lambda: cache.is_resident(E))
    stats = cache.stats()
    assert (before.hits, before.late_hits, before.misses) == (0, 0, 1)
    assert (stats.hits, stats.late_hits, stats.misses) == (2, 1, 3)
    assert stats.prefetch_loads == 3  # B, C, E: D's read was a demand's
    assert stats.useful_prefetches == 2  # B, C
    assert stats.loads == len(store.started) == 6
    assert stats.loaded_bytes == 6 * EXPERT_BYTES
    assert stats.overdue_loads == stats.failed_prefetches == 0
    assert consume(cache, 0, [4]) == [4]
    assert cache.stats().useful_prefetches == 3


def test_a_queued_prefetch_whose_layer_passes_without_a_demand_is_not_read(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(6)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    cache.prefetch(B, deadline=0)  # foreseen wrongly
    cache.prefetch(C, deadline=1)
    result = in_background.submit(consume, cache, 0, [3])
    wait_until(lambda: cache.stats().misses == 1)
    store.release(A)
    assert result.result(PATIENCE_SECONDS) == [3]
    wait_until(lambda: cache.is_resident(C))
    assert store.started == [A, D, C]
    assert cache.prefetch(B, deadline=2)  # nothing is left of it: it can be asked for again
    wait_until(lambda: cache.is_resident(B))


def test_prefetch_that_gave_way_unused_was_not_useful(open_cache: OpenCache) -> None:
    cache = open_cache(1)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: cache.is_resident(A))
    load(cache, B, A, A)  # A's own demand brought it back
    assert cache.stats().useful_prefetches == 0


def test_time_is_counted_only_while_something_is_waited_for_or_read(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(2)
    assert (cache.stats().stall_seconds, cache.stats().link_busy_seconds) == (0, 0)
    store.hold(A)
    result = in_background.submit(consume, cache, 0, [0])
    wait_until(lambda: A in store.started)
    assert 0 < cache.stats().link_busy_seconds < cache.stats().link_busy_seconds
    store.release(A)
    result.result(PATIENCE_SECONDS)
    wait_until(lambda: cache.stats().loads == 1)
    after = cache.stats()
    assert after.stall_seconds > 0
    load(cache, A)  # a hit
    assert cache.stats().since(after).stall_seconds == 0
    assert cache.stats().since(after).link_busy_seconds == 0


def test_cache_without_slots_is_refused(store: ScriptedStore) -> None:
    with pytest.raises(CapacityError, match="at least 1 slot, got 0"):
        ExpertCache(store, 0, view, least_recent())


# ---- experts in use ------------------------------------------------------------------------------


def test_expert_in_use_survives_demands_for_its_only_slot(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    """The next read waits for the slot: a moment is left in which a wrong one would begin."""
    cache = open_cache(1)
    for count, (expert, weights) in enumerate(demand_of(cache, 0, [0, 1, 2]), 1):
        moment = time.monotonic() + 0.02
        while time.monotonic() < moment and len(store.started) == count:
            time.sleep(0.001)
        check_weights(weights, ExpertKey(0, expert))
        assert cache.is_resident(ExpertKey(0, expert))
        assert len(store.started) == count


def test_expert_in_use_survives_prefetches(open_cache: OpenCache) -> None:
    cache = open_cache(2)
    demand = demand_of(cache, 0, [0])
    _, weights = next(demand)
    for key in keys(1, 0, 1, 2, 3):
        cache.prefetch(key, deadline=0)
        cache.cancel_prefetches()  # unprotected again: all compete for one slot
        cache.prefetch(key, deadline=0)
        wait_until(lambda key=key: cache.is_resident(key))
        check_weights(weights, A)
        assert cache.is_resident(A)
        cache.cancel_prefetches()
    assert list(demand) == []
    cache.prefetch(ExpertKey(1, 4), deadline=0)
    wait_until(lambda: cache.is_resident(ExpertKey(1, 4)))
    assert not cache.is_resident(ExpertKey(1, 3)) or not cache.is_resident(A)


def test_expert_waiting_to_be_used_survives_until_it_has_been(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    """Demanded residents are pinned all together, before the first of them is yielded."""
    cache = open_cache(2)
    load(cache, A, B)
    demand = demand_of(cache, 0, [0, 1, 2])
    assert next(demand)[0] == 0
    assert next(demand)[0] == 1
    assert residents(cache, [A, B, C]) == [A, B]
    assert next(demand)[0] == 2  # A and B are free now: C's read began, in A's slot
    assert residents(cache, [A, B, C]) == [B, C]
    assert Counter(store.started) == {A: 1, B: 1, C: 1}


@pytest.mark.parametrize("num_taken", [1, 2, 3])
def test_abandoned_demand_leaves_nothing_pinned(open_cache: OpenCache, num_taken: int) -> None:
    cache = open_cache(3)
    load(cache, A, B, C)
    demand = demand_of(cache, 0, [0, 1, 2])
    for _ in range(num_taken):
        next(demand)
    demand.close()
    load(cache, *keys(1, 0, 1, 2))
    assert residents(cache, [A, B, C]) == []
    assert cache.stats().overdue_loads == 0


def test_demand_that_was_never_begun_does_nothing(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(1)
    demand_of(cache, 0, [0]).close()
    load(cache, B)
    assert store.started == [B]
    assert cache.stats().misses == 1


def test_expert_still_queued_from_an_abandoned_demand_is_read_once_when_demanded_again(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(4)
    load(cache, A)
    store.hold(B)
    demand = demand_of(cache, 0, [0, 1, 2])
    assert next(demand)[0] == 0
    wait_until(lambda: B in store.started)
    demand.close()  # B is in flight, C queued
    result = in_background.submit(consume, cache, 0, [2])
    wait_until(lambda: cache.stats().misses == 4)
    store.release(B)
    assert result.result(PATIENCE_SECONDS) == [2]
    assert cache.prefetch(D, deadline=0)
    wait_until(lambda: cache.is_resident(D))  # the I/O thread is alive
    assert Counter(store.started) == {A: 1, B: 1, C: 1, D: 1}


# ---- order and protection ------------------------------------------------------------------------


def test_prefetches_are_read_by_deadline_then_in_the_order_asked(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(7)
    store.hold(A)
    cache.prefetch(A, deadline=9)
    wait_until(lambda: A in store.started)
    for key, deadline in ((B, 5), (E, 2), (D, 7), (C, 2), (F, 0)):
        assert cache.prefetch(key, deadline)
    store.release(A)
    wait_until(lambda: cache.stats().loads == 6)
    assert store.started == [A, F, E, C, B, D]


def test_demands_are_read_before_queued_prefetches(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(6)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    cache.prefetch(B, deadline=1)
    cache.prefetch(C, deadline=0)
    result = in_background.submit(consume, cache, 0, [3, 2])
    wait_until(lambda: cache.stats().misses == 2)
    store.release(A)
    assert sorted(result.result(PATIENCE_SECONDS)) == [2, 3]
    wait_until(lambda: cache.stats().loads == 4)
    assert store.started == [A, C, D, B]


def test_prefetch_says_whether_a_read_was_queued(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(3)
    load(cache, A)
    store.hold(B)
    assert cache.prefetch(B, deadline=1)
    wait_until(lambda: B in store.started)
    assert cache.prefetch(C, deadline=1)
    assert not cache.prefetch(A, deadline=1)  # resident
    assert not cache.prefetch(B, deadline=1)  # in flight
    assert not cache.prefetch(C, deadline=1)  # queued
    store.release(B)
    wait_until(lambda: cache.stats().loads == 3)
    assert store.started == [A, B, C]


def test_expert_without_known_use_gives_way_before_one_the_window_needs(
    open_cache: OpenCache,
) -> None:
    cache = open_cache(2)
    load(cache, A, B)
    cache.prefetch(A, deadline=5)  # resident, the older one: protected from now on
    cache.prefetch(C, deadline=7)
    wait_until(lambda: cache.is_resident(C))
    assert residents(cache, [A, B]) == [A]


def test_expert_needed_latest_gives_way_to_one_needed_sooner(open_cache: OpenCache) -> None:
    cache = open_cache(2)
    load(cache, A, B)
    cache.prefetch(A, deadline=5)
    cache.prefetch(B, deadline=6)
    cache.prefetch(C, deadline=4)
    wait_until(lambda: cache.is_resident(C))
    assert residents(cache, [A, B]) == [A]


def test_prefetch_does_not_displace_what_is_needed_sooner_until_that_layer_has_begun(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(2)
    load(cache, A, B)
    cache.prefetch(A, deadline=0)
    cache.prefetch(B, deadline=0)
    late = ExpertKey(3, 0)
    assert cache.prefetch(late, deadline=3)
    load(cache, ExpertKey(2, 0))  # wakes the I/O thread and gives way itself, at a layer between
    assert cache.is_resident(A) != cache.is_resident(B)  # a demand does displace
    survivor = A if cache.is_resident(A) else B
    wait_until(lambda: cache.is_resident(late))
    assert cache.is_resident(survivor)  # what went was the demand's expert, not needed again
    load(cache, B)  # layer 0: B's protection and A's end, ``late`` keeps its own
    load(cache, C)
    assert cache.is_resident(late)
    assert residents(cache, [A, B, C]) == [C]
    assert cache.stats().overdue_loads == 0


@pytest.mark.parametrize("end", ["layer", "window"])
def test_protection_ends_with_the_layer_and_with_the_window(
    open_cache: OpenCache, end: str
) -> None:
    cache = open_cache(2)
    load(cache, A, B)
    cache.prefetch(A, deadline=0)
    if end == "layer":
        assert consume(cache, 0, []) == []
    else:
        cache.cancel_prefetches()
    load(cache, ExpertKey(1, 0))
    assert residents(cache, [A, B]) == [B]  # the least recently used, as if never foreseen


def test_queued_prefetch_goes_on_when_protection_ends(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(1)
    load(cache, A)
    cache.prefetch(A, deadline=0)
    later = ExpertKey(1, 0)
    assert cache.prefetch(later, deadline=1)  # nothing may give way to it yet
    assert store.started == [A]
    load(cache, A)
    wait_until(lambda: cache.is_resident(later))
    assert consume(cache, 1, [0]) == [0]
    stats = cache.stats()
    assert (stats.hits, stats.useful_prefetches, stats.loads) == (2, 1, 2)


def test_cancelled_prefetches_are_not_read_and_those_in_flight_arrive(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(5)
    store.hold(A)
    for key in (A, B, C):
        cache.prefetch(key, deadline=0)
    wait_until(lambda: A in store.started)
    cache.cancel_prefetches()
    assert cache.prefetch(B, deadline=1)  # asked for anew: a read is queued again
    result = in_background.submit(consume, cache, 0, [3])
    wait_until(lambda: cache.stats().misses == 1)
    store.release(A)
    assert result.result(PATIENCE_SECONDS) == [3]
    wait_until(lambda: cache.stats().loads == 3)
    assert store.started == [A, D, B]
    load(cache, C)
    assert consume(cache, 0, [0]) == [0]
    assert cache.stats().useful_prefetches == 1


# ---- reads that fail, come late or never ---------------------------------------------------------


def test_prefetch_that_arrives_late_is_waited_for_and_read_once(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    cache = open_cache(2)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    result = in_background.submit(consume, cache, 0, [0])
    wait_until(lambda: cache.stats().late_hits == 1)
    assert not result.done()
    store.release(A)
    assert result.result(PATIENCE_SECONDS) == [0]
    assert store.started == [A]


@pytest.mark.parametrize("num_slots", [1, 2, 4])
@pytest.mark.parametrize("num_io_threads", [1, 2])
def test_prefetch_that_never_arrives_is_read_in_the_foreground(
    open_cache: OpenCache, store: ScriptedStore, num_slots: int, num_io_threads: int
) -> None:
    """The store holds the first read of A for good; the second one, past it, goes through."""
    cache = open_cache(num_slots, num_io_threads, SHORT_SECONDS)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    gate = store._gates.pop(A)
    try:
        for _ in range(2):
            assert sorted(consume(cache, 0, [0, 1, 2])) == [0, 1, 2]
            assert sorted(consume(cache, 1, [0])) == [0]
        stats = cache.stats()
        assert stats.overdue_loads >= 2  # A, both times
        assert stats.late_hits == 2
        assert stats.loaded_bytes == stats.loads * EXPERT_BYTES
    finally:
        gate.set()


def test_cache_recovers_when_reads_that_hung_come_back(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    """All I/O threads hang; the same queued experts are demanded again and again meanwhile."""
    cache = open_cache(4, 2, SHORT_SECONDS)
    store.hold(A, B)
    for key in (A, B):
        cache.prefetch(key, deadline=0)
    wait_until(lambda: {A, B} <= set(store.started))
    gates = [store._gates.pop(key) for key in (A, B)]
    try:
        for _ in range(3):
            assert sorted(consume(cache, 0, [0, 1, 2, 3])) == [0, 1, 2, 3]
    finally:
        for gate in gates:
            gate.set()
    others = keys(1, 0, 1)
    for key in others:  # both I/O threads read again
        store.hold(key)
        cache.prefetch(key, deadline=1)
    wait_until(lambda: set(others) <= set(store.started))
    store.release()
    wait_until(lambda: residents(cache, others) == others)
    assert sorted(consume(cache, 0, [0, 1, 2, 3])) == [0, 1, 2, 3]
    assert len(residents(cache, [A, B, C, D, *others])) == 4


def make_errors() -> list[Exception]:
    return [BundleError("shard 7: short read"), OSError(5, "I/O error 7"), RuntimeError("bug 7")]


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_failed_prefetch_is_tried_again_on_demand(
    open_cache: OpenCache, store: ScriptedStore, error: Exception
) -> None:
    cache = open_cache(2)
    store.fail(A, error)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: cache.stats().failed_prefetches == 1)
    assert not cache.is_resident(A)
    assert sorted(consume(cache, 0, [0, 1])) == [0, 1]
    stats = cache.stats()
    assert (stats.misses, stats.hits, stats.loads, stats.useful_prefetches) == (2, 0, 2, 0)
    assert stats.loaded_bytes == 2 * EXPERT_BYTES  # a read that failed brought nothing
    assert store.started == [A, A, B]


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_prefetch_that_fails_while_waited_for_is_tried_again(
    open_cache: OpenCache,
    store: ScriptedStore,
    in_background: ThreadPoolExecutor,
    error: Exception,
) -> None:
    cache = open_cache(1)
    store.hold(A)
    store.fail(A, error)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    result = in_background.submit(consume, cache, 0, [0, 1])
    wait_until(lambda: cache.stats().late_hits == 1)
    store.release(A)
    assert sorted(result.result(PATIENCE_SECONDS)) == [0, 1]
    assert Counter(store.started) == {A: 2, B: 1}
    assert cache.stats().failed_prefetches == 1


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_failed_demand_is_raised_in_the_foreground_and_the_cache_goes_on(
    open_cache: OpenCache, store: ScriptedStore, error: Exception
) -> None:
    cache = open_cache(2)
    load(cache, B)
    store.fail(A, error)
    demand = demand_of(cache, 0, [0, 1])
    assert next(demand)[0] == 1
    with pytest.raises(SpecterError, match="7") as caught:
        next(demand)
    if isinstance(error, SpecterError):
        assert caught.value is error
    else:
        assert "expert (0, 0)" in str(caught.value)
    assert not cache.is_resident(A)
    assert sorted(consume(cache, 0, [0, 1, 2])) == [0, 1, 2]
    load(cache, *keys(1, 0, 1))  # both slots are usable: nothing stayed pinned or was lost
    assert residents(cache, keys(1, 0, 1)) == keys(1, 0, 1)
    assert cache.stats().overdue_loads == cache.stats().failed_prefetches == 0


def test_expert_still_queued_behind_a_failed_demand_can_be_demanded_again(
    open_cache: OpenCache, store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    """A fails, the foreground raises while D waits behind B's read: D is then read once."""
    cache = open_cache(4, num_io_threads=2)
    store.hold(A, B, C)
    store.fail(A, BundleError("broken"))
    failing = in_background.submit(consume, cache, 0, [0, 1, 2, 3])
    wait_until(lambda: {A, B} <= set(store.started))
    store.release(A)
    with pytest.raises(BundleError, match="broken"):
        failing.result(PATIENCE_SECONDS)
    wait_until(lambda: C in store.started)  # both threads are busy, D is queued
    result = in_background.submit(consume, cache, 0, [3])
    wait_until(lambda: cache.stats().misses == 5)
    store.release()
    assert result.result(PATIENCE_SECONDS) == [3]
    others = keys(1, 0, 1)
    for key in others:  # both I/O threads are alive
        store.hold(key)
        cache.prefetch(key, deadline=1)
    wait_until(lambda: set(others) <= set(store.started))
    assert Counter(store.started)[D] == 1


def test_prefetch_and_its_retry_that_both_fail_raise_the_second_error(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(1)
    store.fail(A, BundleError("first"), BundleError("second"))
    cache.prefetch(A, deadline=0)
    wait_until(lambda: cache.stats().failed_prefetches == 1)
    with pytest.raises(BundleError, match="second"):
        consume(cache, 0, [0])
    assert consume(cache, 0, [0]) == [0]


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_failed_read_in_the_foreground_is_a_specter_error(
    open_cache: OpenCache, store: ScriptedStore, error: Exception
) -> None:
    cache = open_cache(2, 1, SHORT_SECONDS)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    gate = store._gates.pop(A)
    try:
        store.fail(A, error)
        with pytest.raises(SpecterError, match="7"):
            consume(cache, 0, [0])
    finally:
        gate.set()
    wait_until(lambda: cache.is_resident(A))
    assert consume(cache, 0, [0]) == [0]


def test_short_read_is_retried_after_a_prefetch_and_raised_after_a_demand(
    open_cache: OpenCache, tmp_path: Path
) -> None:
    """Over real files: one is cut short, and later whole again."""

    def write(key: ExpertKey) -> Path:
        data = torch.frombuffer(bytearray(expert_bytes(key)), dtype=torch.uint8)
        write_tensors(tmp_path / str(key.expert), {"data": data}, {})
        return tmp_path / str(key.expert)

    files = ShardExpertStore(
        lambda key: tmp_path / str(key.expert),
        lambda key: EXPERT_BYTES,
        ALIGNMENT,
        align_up(EXPERT_BYTES),
    )
    cache = open_cache(2, store=files)
    for key in (A, B):
        os.truncate(write(key), ALIGNMENT + EXPERT_BYTES - 1)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: cache.stats().failed_prefetches == 1)
    write(A)
    assert consume(cache, 0, [0]) == [0]
    with pytest.raises(BundleError, match="short read") as caught:
        consume(cache, 0, [0, 1])
    assert str(tmp_path / "1") in str(caught.value)
    write(B)
    assert consume(cache, 0, [0, 1]) == [0, 1]


# ---- warming and closing -------------------------------------------------------------------------


@pytest.mark.parametrize("num_io_threads", [1, 3])
def test_warm_loads_as_many_as_there_are_slots_the_first_ones(
    open_cache: OpenCache, store: ScriptedStore, num_io_threads: int
) -> None:
    cache = open_cache(3, num_io_threads)
    cache.warm([D, B, A, C, E])
    assert residents(cache, [A, B, C, D, E]) == [A, B, D]
    assert sorted(store.started) == [A, B, D]
    assert sorted(consume(cache, 0, [0, 1, 3])) == [0, 1, 3]
    stats = cache.stats()
    assert (stats.hits, stats.misses, stats.loads) == (3, 0, 3)
    assert stats.useful_prefetches == 0  # nothing was foreseen


def test_warmed_experts_give_way_like_any_other(open_cache: OpenCache) -> None:
    cache = open_cache(2)
    cache.warm([A, B])
    load(cache, C)
    assert residents(cache, [A, B, C]) == [B, C]


def test_warming_again_keeps_what_is_resident(open_cache: OpenCache, store: ScriptedStore) -> None:
    cache = open_cache(3)
    cache.warm([A, B])
    cache.warm([B, A, C])
    cache.warm([])
    assert store.started == [A, B, C]


def test_warmed_experts_are_resident_whatever_was_foreseen_before(open_cache: OpenCache) -> None:
    cache = open_cache(2)
    for key in keys(1, 0, 1):
        cache.prefetch(key, deadline=1)
        wait_until(lambda key=key: cache.is_resident(key))
    chosen = [A, ExpertKey(1, 0)]
    cache.warm(chosen)
    assert residents(cache, chosen) == chosen


@pytest.mark.parametrize("error", make_errors(), ids=lambda error: type(error).__name__)
def test_failed_warming_is_raised_when_all_reads_have_ended(
    open_cache: OpenCache, store: ScriptedStore, error: Exception
) -> None:
    cache = open_cache(3)
    store.fail(A, error)
    with pytest.raises(SpecterError, match="7"):
        cache.warm([A, B, C])
    assert store.started == [A, B, C]
    assert residents(cache, [A, B, C]) == [B, C]
    assert sorted(consume(cache, 0, [0, 1, 2])) == [0, 1, 2]


def test_experts_of_a_failed_warming_give_way_like_any_other(
    open_cache: OpenCache, store: ScriptedStore
) -> None:
    cache = open_cache(2)
    store.fail(B, BundleError("broken"))
    with pytest.raises(BundleError, match="broken"):
        cache.warm([A, B])
    load(cache, *keys(1, 0, 1))
    assert residents(cache, [A, *keys(1, 0, 1)]) == keys(1, 0, 1)


def io_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("specter-io-")}


@pytest.mark.parametrize("num_io_threads", [1, 4])
def test_close_ends_the_io_threads(store: ScriptedStore, num_io_threads: int) -> None:
    before = io_threads()
    cache = ExpertCache(store, 2, view, least_recent(), num_io_threads, LONG_SECONDS)
    assert len(io_threads() - before) == num_io_threads
    load(cache, A)
    cache.close()
    assert io_threads() <= before
    cache.close()  # once more does no harm


def test_close_drops_what_is_queued_and_waits_for_reads_in_flight(
    store: ScriptedStore, in_background: ThreadPoolExecutor
) -> None:
    before = io_threads()
    cache = ExpertCache(store, 4, view, least_recent(), 1, LONG_SECONDS)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    cache.prefetch(B, deadline=0)
    wait_until(lambda: A in store.started)
    closing = in_background.submit(cache.close)
    wait_until(lambda: cache._closed)
    assert not closing.done()
    store.release(A)
    closing.result(PATIENCE_SECONDS)
    assert io_threads() <= before
    assert store.started == [A]


def test_close_does_not_wait_for_ever_for_a_read_that_hangs(store: ScriptedStore) -> None:
    before = io_threads()
    cache = ExpertCache(store, 2, view, least_recent(), 1, SHORT_SECONDS)
    store.hold(A)
    cache.prefetch(A, deadline=0)
    wait_until(lambda: A in store.started)
    cache.close()
    assert len(io_threads() - before) == 1  # still in its read
    store.release(A)
    wait_until(lambda: io_threads() <= before)  # and then it ends


# ---- against a model -----------------------------------------------------------------------------

LAYERS, EXPERTS = 3, 3
ALL_KEYS = [ExpertKey(layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS)]
KEYS = st.sampled_from(ALL_KEYS)


class CacheMachine(RuleBasedStateMachine):
    """A cache with one I/O thread against lists and dicts; after every step both stand still.

    Where the I/O thread and the foreground run at the same time (several experts demanded, warming)
    which residents remain depends on who comes first; there the model takes over what the cache
    holds and checks only its number.
    """

    @initialize(num_slots=st.integers(1, 4))
    def open(self, num_slots: int) -> None:
        self.store = ScriptedStore()
        self.cache = ExpertCache(self.store, num_slots, view, least_recent(), 1, LONG_SECONDS)
        self.resident: set[ExpertKey] = set()
        self.last_use = dict.fromkeys(ALL_KEYS, 0)
        self.num_uses = 0
        self.next_use: dict[ExpertKey, int] = {}
        self.queue: list[tuple[int, int, ExpertKey]] = []
        self.unused: set[ExpertKey] = set()  # prefetched and resident, not demanded since
        self.counts: Counter[str] = Counter()

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def take_slot(self, needed_at: int) -> bool:
        """Make room for one more expert, by eviction if need be."""
        if len(self.resident) < self.cache.num_slots:
            return True
        oldest_first = sorted(self.resident, key=lambda key: (self.last_use[key], key))
        unknown = [key for key in oldest_first if key not in self.next_use]
        later = [key for key in oldest_first if self.next_use.get(key, -1) > needed_at]
        victim = unknown[0] if unknown else max(later, key=self.next_use.get, default=None)  # type: ignore[arg-type]
        if victim is None:
            return False
        self.resident.remove(victim)
        self.unused.discard(victim)
        return True

    def demand(self, layer: int, experts: list[int]) -> None:
        """Count a demand and end the layer's protection; no prefetch is queued by then."""
        self.cancel()
        self.next_use = {key: use for key, use in self.next_use.items() if use != layer}
        self.num_uses += 1
        for key in keys(layer, *experts):
            self.last_use[key] = self.num_uses
            self.counts["hits" if key in self.resident else "misses"] += 1
            self.counts["useful_prefetches"] += key in self.unused
            self.unused.discard(key)

    def look(self) -> None:
        """Take over which experts are resident."""
        self.resident = set(residents(self.cache, ALL_KEYS))
        self.unused &= self.resident

    def cancel(self) -> None:
        if self.queue:
            self.cancel_prefetches()

    @rule()
    def cancel_prefetches(self) -> None:
        self.cache.cancel_prefetches()
        self.queue.clear()
        self.next_use.clear()

    @rule(key=KEYS)
    def prefetch(self, key: ExpertKey) -> None:
        self.next_use.setdefault(key, key.layer)
        is_new = key not in self.resident and key not in (queued[2] for queued in self.queue)
        assert self.cache.prefetch(key, deadline=key.layer) == is_new
        if is_new:
            self.queue.append((key.layer, len(self.store.started) + len(self.queue), key))
        self.queue.sort()
        while self.queue and self.take_slot(self.queue[0][0]):
            loaded = self.queue.pop(0)[2]
            self.resident.add(loaded)
            self.unused.add(loaded)
            self.counts["prefetch_loads"] += 1
            self.counts["loads"] += 1
        wait_until(lambda: self.cache.stats().loads == self.counts["loads"])

    @rule(key=KEYS)
    def prefetch_that_fails(self, key: ExpertKey) -> None:
        if key in self.resident:
            return
        self.cancel()
        self.next_use.setdefault(key, key.layer)
        if not self.take_slot(key.layer):
            del self.next_use[key]
            return
        self.store.fail(key, BundleError("scripted"))
        assert self.cache.prefetch(key, deadline=key.layer)
        self.counts["prefetch_loads"] += 1
        self.counts["failed_prefetches"] += 1
        wait_until(lambda: self.cache.stats().failed_prefetches == self.counts["failed_prefetches"])

    @rule(key=KEYS)
    def demand_one(self, key: ExpertKey) -> None:
        self.demand(key.layer, [key.expert])
        if key not in self.resident:
            assert self.take_slot(-1)
            self.counts["loads"] += 1
        self.resident.add(key)
        assert consume(self.cache, key.layer, [key.expert]) == [key.expert]

    @rule(key=KEYS)
    def demand_that_fails(self, key: ExpertKey) -> None:
        if key in self.resident:
            return
        self.demand(key.layer, [key.expert])
        assert self.take_slot(-1)
        self.store.fail(key, BundleError("scripted"))
        self.counts["failed_demands"] += 1
        with pytest.raises(BundleError, match="scripted"):
            consume(self.cache, key.layer, [key.expert])

    @rule(
        layer=st.integers(0, LAYERS - 1),
        experts=st.lists(st.integers(0, EXPERTS - 1), min_size=2, unique=True),
    )
    def demand_several(self, layer: int, experts: list[int]) -> None:
        misses = [key for key in keys(layer, *experts) if key not in self.resident]
        self.demand(layer, experts)
        self.counts["loads"] += len(misses)
        filled = min(self.cache.num_slots, len(self.resident) + len(misses))
        order = consume(self.cache, layer, experts)
        assert sorted(order) == sorted(experts)
        hits = [expert for expert in experts if ExpertKey(layer, expert) not in misses]
        assert order[: len(hits)] == sorted(hits)
        self.look()
        assert len(self.resident) == filled
        assert ExpertKey(layer, order[-1]) in self.resident

    @rule(chosen=st.lists(KEYS, unique=True, max_size=5))
    def warm(self, chosen: list[ExpertKey]) -> None:
        self.cancel_prefetches()
        num_read = len(self.store.started)
        self.cache.warm(chosen)
        read = self.store.started[num_read:]
        self.counts["loads"] += len(read)
        self.counts["prefetch_loads"] += len(read)
        self.unused -= set(chosen[: self.cache.num_slots])
        self.look()
        assert set(chosen[: self.cache.num_slots]) <= self.resident

    @invariant()
    def cache_and_model_agree(self) -> None:
        if not hasattr(self, "cache"):
            return
        assert residents(self.cache, ALL_KEYS) == sorted(self.resident)
        assert len(self.resident) <= self.cache.num_slots
        stats = self.cache.stats()
        for name in ("hits", "misses", "loads", "prefetch_loads"):
            assert getattr(stats, name) == self.counts[name], name
        for name in ("useful_prefetches", "failed_prefetches"):
            assert getattr(stats, name) == self.counts[name], name
        assert stats.late_hits == stats.overdue_loads == 0
        assert stats.loaded_bytes == stats.loads * EXPERT_BYTES
        failed = self.counts["failed_prefetches"] + self.counts["failed_demands"]
        assert len(self.store.started) == stats.loads + failed


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(deadline=None, max_examples=40, stateful_step_count=30)


# ---- under stress --------------------------------------------------------------------------------


@pytest.fixture
def quick_switches() -> Iterator[None]:
    """Threads take turns a hundred times as often as usual."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(5e-5)
    yield
    sys.setswitchinterval(interval)


def consume_some(cache: ExpertCache, layer: int, experts: list[int], limit: int) -> str:
    """Demand experts and give up after ``limit`` of them; says how it ended."""
    demand = demand_of(cache, layer, experts)
    seen = []
    try:
        for expert, weights in demand:
            check_weights(weights, ExpertKey(layer, expert))
            seen.append(expert)
            if len(seen) >= limit:
                return "abandoned"
            check_weights(weights, ExpertKey(layer, expert))
    except BundleError:
        return "failed"
    finally:
        demand.close()
    assert sorted(seen) == sorted(experts)
    return "complete"


@pytest.mark.usefixtures("quick_switches")
@pytest.mark.parametrize("rough", [False, True], ids=["smooth", "rough"])
@pytest.mark.parametrize("num_io_threads", [1, 2, 4])
@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_nothing_is_lost_mixed_up_or_stuck_under_stress(
    open_cache: OpenCache, num_slots: int, num_io_threads: int, rough: bool
) -> None:
    """A lost wake-up or a dead I/O thread shows as an overdue load, an unhandled error, a time-out.

    Rough: reads fail, demands are abandoned and begun again at once, too.
    """
    dice = random.Random(num_slots * 100 + num_io_threads)
    read_dice = random.Random(7)

    def pause() -> None:
        time.sleep(read_dice.choice((0, 0, 0, 1e-4)))
        if rough and read_dice.random() < 0.05:
            raise BundleError("scripted")

    store = ScriptedStore(pause)
    cache = open_cache(num_slots, num_io_threads, store=store)
    num_layers, num_experts = 4, 6
    ends: Counter[str] = Counter()
    for _ in range(120):
        for _ in range(dice.randrange(12)):
            layer, expert = dice.randrange(num_layers), dice.randrange(num_experts)
            cache.prefetch(ExpertKey(layer, expert), deadline=layer)
        for layer in range(num_layers):
            experts = dice.sample(range(num_experts), dice.randrange(1, num_experts))
            limit = dice.randrange(1, 4) if rough and dice.random() < 0.3 else num_experts
            end = consume_some(cache, layer, experts, limit)
            ends[end] += 1
            if end != "complete":
                ends[consume_some(cache, layer, experts, num_experts)] += 1
        if dice.random() < 0.8:
            cache.cancel_prefetches()
    assert set(ends) == ({"complete", "abandoned", "failed"} if rough else {"complete"})
    stats = cache.stats()
    assert stats.overdue_loads == 0
    assert stats.loaded_bytes == stats.loads * EXPERT_BYTES
    everything = [ExpertKey(i, e) for i in range(num_layers) for e in range(num_experts)]
    assert len(residents(cache, everything)) <= num_slots
