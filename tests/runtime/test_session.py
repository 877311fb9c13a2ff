"""A session's output depends on none of: K, budget, I/O threads, and how experts arrive."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer

from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.errors import BundleError
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import ExpertKey
from specter_runtime.manifest import MANIFEST_FILE
from specter_runtime.session import Session, bundle_memory

PROMPT = list(b"def main(")
NUM_TOKENS = 24


def shard_store(root: Path) -> ShardExpertStore:
    bundle = load_bundle(root)
    shards = bundle.manifest.experts
    return ShardExpertStore(bundle.shard_file, shards.data_start, shards.nbytes)


def least_budget(root: Path, config: RuntimeConfig) -> int:
    return bundle_memory(load_bundle(root), config, None, shard_store(root).slot_bytes).budget_bytes


def generate(root: Path, config: RuntimeConfig, store: ExpertStore | None = None) -> list[int]:
    with Session.open(root, config, store) as session:
        return list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_output_depends_on_neither_draft_nor_budget_nor_threads(
    tiny_bundle: Path, dtype: str
) -> None:
    plain = RuntimeConfig(num_draft_tokens=0, dtype=dtype)  # type: ignore[arg-type]
    expected = generate(tiny_bundle, plain)
    assert len(set(expected)) > 4
    slot = shard_store(tiny_bundle).slot_bytes
    for num_draft_tokens in (0, 1, 2, 4, 8, 16):
        for more_slots in (0, 3, 10):
            for num_io_threads in (1, 4):
                config = RuntimeConfig(
                    num_draft_tokens=num_draft_tokens,
                    dtype=dtype,  # type: ignore[arg-type]
                    num_io_threads=num_io_threads,
                )
                budget = least_budget(tiny_bundle, config) + more_slots * slot
                scarce = RuntimeConfig(
                    budget, num_draft_tokens, config.dtype, num_io_threads=num_io_threads
                )
                assert generate(tiny_bundle, scarce) == expected, scarce


def change_file(root: Path, name: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file of a bundle, and its size in the manifest."""
    content = json.loads((root / name).read_text())
    change(content)
    (root / name).write_text(json.dumps(content))
    if name != MANIFEST_FILE:
        nbytes = (root / name).stat().st_size
        change_file(root, MANIFEST_FILE, lambda m: m["files"][name].update(nbytes=nbytes))


@pytest.mark.parametrize("source", ["config.json", "generation_config.json", "tokenizer"])
@pytest.mark.parametrize("as_list", [True, False])
def test_generation_stops_at_an_end_token_that_any_file_names(
    tiny_bundle: Path, tmp_path: Path, source: str, as_list: bool
) -> None:
    expected = generate(tiny_bundle, RuntimeConfig())
    end = expected[NUM_TOKENS // 2]
    root = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    if source == "tokenizer":
        token = FastTokenizer.from_file(str(root / "tokenizer.json")).id_to_token(end)
        change_file(root, "tokenizer_config.json", lambda c: c.update(eos_token=token))
    else:
        ids = [end, 257] if as_list else end
        change_file(root, source, lambda c: c.update(eos_token_id=ids))
    with Session.open(root) as session:
        assert session.eos_token_ids == {257, end}
        tokens = list(session.generate_ids(PROMPT, NUM_TOKENS))
    assert tokens == expected[: expected.index(end) + 1]


class FaultyStore:
    """Reads shards, but does something else the first time an expert is read."""

    def __init__(self, store: ShardExpertStore, fault: str) -> None:
        self._store = store
        self._fault = fault
        self._seen: set[ExpertKey] = set()
        self._lock = threading.Lock()
        self.num_faults = 0
        self.is_armed = False
        self.released = threading.Event()

    @property
    def slot_bytes(self) -> int:
        return self._store.slot_bytes

    @property
    def expert_bytes(self) -> int:
        return self._store.expert_bytes

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        is_prefetch = threading.current_thread() is not threading.main_thread()
        with self._lock:
            is_first = self.is_armed and is_prefetch and key not in self._seen
            self._seen.add(key)
            self.num_faults += is_first
        if is_first and self._fault == "late":
            time.sleep(0.002)
        elif is_first and self._fault == "never":
            self.released.wait()
        elif is_first and self._fault == "error":
            raise BundleError(f"{key}: input/output error")
        elif is_first and self._fault == "short":
            buffer[:] = b"\xff" * len(buffer)  # what a torn read leaves behind
            raise BundleError(f"{key}: short read")
        self._store.read_into(key, buffer)


@pytest.mark.parametrize("fault", ["late", "never"])
def test_an_expert_that_comes_late_or_never_changes_no_token(tiny_bundle: Path, fault: str) -> None:
    config = RuntimeConfig(num_draft_tokens=4, load_timeout_seconds=0.05)
    expected = generate(tiny_bundle, RuntimeConfig(num_draft_tokens=0))
    store = FaultyStore(shard_store(tiny_bundle), fault)
    scarce = RuntimeConfig(least_budget(tiny_bundle, config), 4, load_timeout_seconds=0.05)
    with Session.open(tiny_bundle, scarce, store) as session:
        store.is_armed = True
        try:
            tokens = list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
        finally:
            store.released.set()
    assert tokens == expected
    assert store.num_faults > 0


@pytest.mark.parametrize("fault", ["error", "short"])
def test_a_failed_read_is_tried_again_or_reported_by_name(tiny_bundle: Path, fault: str) -> None:
    """A prefetch that fails is read again on demand; a demand that fails ends with its error."""
    expected = generate(tiny_bundle, RuntimeConfig(num_draft_tokens=0))
    config = RuntimeConfig(num_draft_tokens=4)
    budget = least_budget(tiny_bundle, config) + 4 * shard_store(tiny_bundle).slot_bytes
    store = FaultyStore(shard_store(tiny_bundle), fault)
    with Session.open(tiny_bundle, RuntimeConfig(budget, 4), store) as session:
        tokens: list[int] = []
        errors: list[str] = []
        store.is_armed = True
        while len(tokens) < NUM_TOKENS and len(errors) < 100:
            try:
                tokens = list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
            except BundleError as exc:
                errors.append(str(exc))  # each expert fails once: the session goes on
    assert all("ExpertKey(layer=" in error for error in errors)
    assert tokens == expected
    assert store.num_faults > 0
