"""What is measured is what the profile says; how fast this machine is decides no test."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from specter_runtime import measure_hardware as measuring
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.errors import CapacityError
from specter_runtime.expert_store import ShardExpertStore, aligned_buffer
from specter_runtime.experts import ExpertKey
from specter_runtime.hardware import parse_hardware
from specter_runtime.measure_hardware import measure_hardware


@pytest.fixture(autouse=True)
def _few_repeats(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "REPEATS", 2)
    monkeypatch.setattr(measuring, "LINK_REPEATS", 2)
    monkeypatch.setattr(measuring, "READ_SECONDS", 0.01)


def test_profile_is_one(tiny_bundle: Path) -> None:
    found = measure_hardware(tiny_bundle, "here")
    assert parse_hardware(found.to_json(), "measured") == found
    assert found.name == "here"


def test_link_is_no_faster_than_its_reads(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleeping takes as long as asked for, or longer, on any machine."""
    seconds, read = 0.02, ShardExpertStore.read_into

    def slow(self: ShardExpertStore, key: ExpertKey, buffer: memoryview) -> None:
        time.sleep(seconds)
        read(self, key, buffer)

    monkeypatch.setattr(ShardExpertStore, "read_into", slow)
    found = measure_hardware(tiny_bundle, "here")
    nbytes = load_bundle(tiny_bundle).manifest.experts.nbytes
    # Busy are the readers also before the first and after the last read of several: the rate of a
    # stop's reads is at most that of readers who never wait.
    assert found.link_bytes_per_second <= found.num_readers * nbytes / seconds


def test_where_stops_are_measured_each_buffer_is_read_into_once(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    store = ShardExpertStore.of(bundle)
    counts: Counter[ExpertKey] = Counter()

    class Counted:
        slot_bytes = store.slot_bytes
        nbytes = staticmethod(store.nbytes)

        def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
            counts[key] += 1
            store.read_into(key, buffer)

    quick = measuring._NoReads(Counted())
    buffers = [aligned_buffer(store.slot_bytes) for _ in range(2)]
    layer = bundle.manifest.model.moe_layers[0]
    for expert in (0, 1, 2):
        quick.read_into(ExpertKey(layer, expert), buffers[expert % 2])
    assert counts == {ExpertKey(layer, 0): 1, ExpertKey(layer, 1): 1}
    held, fresh = (torch.frombuffer(b, dtype=torch.uint8) for b in buffers)
    assert held.any()
    assert fresh.any()


def test_too_few_slots_are_refused(tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    least = measuring.bundle_memory(
        load_bundle(tiny_bundle),
        measuring.PLAIN,
        None,
        ShardExpertStore.of(load_bundle(tiny_bundle)).slot_bytes,
    )
    with pytest.raises(CapacityError, match=r"expert slots have no room for .* --memory-budget"):
        measure_hardware(tiny_bundle, "here", least.budget_bytes)
