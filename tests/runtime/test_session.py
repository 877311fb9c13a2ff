"""A session's output depends on none of: K, budget, I/O threads, and how experts arrive."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer

from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime import kernels
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import RuntimeConfig
from specter_runtime.errors import BundleError, SpecterError
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import ExpertKey
from specter_runtime.manifest import MANIFEST_FILE, shard_path
from specter_runtime.session import Session, bundle_memory
from specter_runtime.shards import read_header
from tests.checkpoints import make_checkpoint, recipe_dict

PROMPT = list(b"def main(")
NUM_TOKENS = 24


def shard_store(root: Path) -> ShardExpertStore:
    bundle = load_bundle(root)
    return ShardExpertStore.of(bundle)


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

    def nbytes(self, key: ExpertKey) -> int:
        return self._store.nbytes(key)

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


# ---- packed shards, kernels, the next layer's router ----------------------------------------


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One bfloat16 checkpoint, its shards raw and packed."""
    folder = tmp_path_factory.mktemp("bundles")
    make_checkpoint(folder / "checkpoint", dtype=torch.bfloat16)
    (folder / "text.txt").write_text("def calibrate(text):\n    return text\n" * 8)
    for encoding in ("raw", "packed"):
        recipe = recipe_dict(
            folder / "checkpoint",
            folder / encoding,
            shard_encoding=encoding,
            calibration={"files": ["text.txt"], "num_sequences": 2, "sequence_length": 32},
        )
        build(Recipe.model_validate(recipe), folder)
    return {encoding: folder / encoding for encoding in ("raw", "packed")}


@pytest.mark.parametrize("computes", ["kernels", "torch"])
def test_packed_shards_change_no_token_whoever_computes(
    bundles: dict[str, Path], computes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if computes == "torch":
        monkeypatch.setattr(kernels, "library", lambda: None)
    expected = generate(bundles["raw"], RuntimeConfig(num_draft_tokens=0))
    assert len(set(expected)) > 4
    for encoding, root in bundles.items():
        for num_draft_tokens in (0, 3, 8):
            config = RuntimeConfig(num_draft_tokens=num_draft_tokens)
            config = replace(config, memory_budget_bytes=least_budget(root, config))
            assert generate(root, config) == expected, (encoding, num_draft_tokens)


def test_packed_shards_leave_room_for_more_slots(bundles: dict[str, Path]) -> None:
    raw, packed = (shard_store(bundles[encoding]).slot_bytes for encoding in ("raw", "packed"))
    assert packed <= 0.8 * raw  # 12 bits of 16, and whole blocks
    config = RuntimeConfig(num_draft_tokens=0)
    config = replace(config, memory_budget_bytes=least_budget(bundles["raw"], config) + 2 * raw)
    slots = []
    for root in (bundles["raw"], bundles["packed"]):
        with Session.open(root, config) as session:
            slots.append(session.memory.num_slots)
    assert slots[1] > slots[0]


def test_a_damaged_packed_shard_is_an_error_that_names_the_expert(
    bundles: dict[str, Path], tmp_path: Path
) -> None:
    root = tmp_path / "bundle"
    shutil.copytree(bundles["packed"], root)
    manifest = load_bundle(root).manifest
    for layer, expert in ((0, e) for e in range(manifest.model.num_experts)):
        path = root / shard_path(layer, expert)
        header = read_header(path, BundleError)
        (name,) = (
            name for name in header.entries if name.endswith("gate_proj.weight.escape_starts")
        )
        entry = header.entries[name]
        data = bytearray(path.read_bytes())
        data[entry.start + 4 : entry.start + 8] = b"\xff\xff\xff\x7f"
        path.write_bytes(data)
    with pytest.raises(SpecterError, match=r"expert \(0, \d\).*escapes of packed rows"):
        generate(root, RuntimeConfig(num_draft_tokens=0))


@pytest.mark.parametrize("encoding", ["raw", "packed"])
def test_the_next_layers_router_moves_experts_and_changes_no_token(
    bundles: dict[str, Path], encoding: str
) -> None:
    root = bundles[encoding]
    plain = RuntimeConfig(num_draft_tokens=0)
    plain = replace(plain, memory_budget_bytes=least_budget(root, plain) + 40_000)
    expected = generate(root, plain)
    with Session.open(root, replace(plain, predict_next_layer=True)) as session:
        assert list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False)) == expected
        assert session.stats.cache.prefetch_loads > 0
        assert session.stats.cache.useful_prefetches > 0
    with Session.open(root, plain) as session:
        list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
        assert session.stats.cache.prefetch_loads == 0
