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
from specter_runtime import kernels, prefetcher
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import PredictorKind, RuntimeConfig, SamplingConfig
from specter_runtime.errors import BundleError, SpecterError
from specter_runtime.expert_store import ExpertStore, ShardExpertStore
from specter_runtime.experts import ExpertKey
from specter_runtime.governor import Governor, Lookahead
from specter_runtime.manifest import MANIFEST_FILE, PLAN_FILE, draft_path, shard_path
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
                scarce = replace(config, memory_budget_bytes=budget, bound_by_slots=False)
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
    budget = least_budget(tiny_bundle, config)
    scarce = replace(config, memory_budget_bytes=budget, bound_by_slots=False)
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
    scarce = replace(config, memory_budget_bytes=budget, bound_by_slots=False)
    with Session.open(tiny_bundle, scarce, store) as session:
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
            budget = least_budget(root, config)
            config = replace(config, memory_budget_bytes=budget, bound_by_slots=False)
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
@pytest.mark.parametrize("predictor", ["fitted", "router"])
def test_a_predictor_moves_experts_and_changes_no_token(
    bundles: dict[str, Path],
    encoding: str,
    predictor: PredictorKind,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever is likelier than not is read, as if that paid for experts of a few kilobytes."""
    monkeypatch.setattr(prefetcher, "least_probability", lambda num_ahead, pace: 0.5)
    root = bundles[encoding]
    plain = RuntimeConfig(num_draft_tokens=0)
    plain = replace(plain, memory_budget_bytes=least_budget(root, plain) + 40_000)
    expected = generate(root, plain)
    with Session.open(root, replace(plain, predictor=predictor)) as session:
        assert list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False)) == expected
        assert session.stats.cache.prefetch_loads > 0
        assert session.stats.cache.useful_prefetches > 0
    with Session.open(root, plain) as session:
        list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
        assert session.stats.cache.prefetch_loads == 0


# ---- a draft of what is resident, and who decides how far it runs ahead -----------------------


@pytest.fixture(scope="module")
def bare_bundle(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``tiny_bundle`` without stand-ins, planned to be decoded without a draft. Read only."""
    root = Path(shutil.copytree(tiny_bundle, tmp_path_factory.mktemp("bare") / "bundle"))
    change_file(root, MANIFEST_FILE, lambda m: m["draft"].update(bits=[[0] * 8] * 3))
    for layer in range(3):
        (root / draft_path(layer)).unlink()
        change_file(root, MANIFEST_FILE, lambda m, i=layer: m["files"].pop(draft_path(i)))
    change_file(root, PLAN_FILE, lambda p: p.update(num_draft_tokens=0))
    return root


def with_slots(root: Path, config: RuntimeConfig, num_slots: int) -> RuntimeConfig:
    """The budget that leaves so many slots."""
    least = least_budget(root, config)
    top_k = load_bundle(root).manifest.model.num_experts_per_tok
    more = (num_slots - top_k) * shard_store(root).slot_bytes
    return replace(config, memory_budget_bytes=least + more)


@pytest.mark.parametrize("num_draft_tokens", [1, 3, 8])
def test_a_draft_without_stand_ins_costs_no_memory_and_changes_no_token(
    bare_bundle: Path, num_draft_tokens: int
) -> None:
    """From the fewest slots, where it misses and evicts as it goes, to a slot for every expert.

    With all of them there it is the target, to the bit: every token is accepted.
    """
    plain = RuntimeConfig(num_draft_tokens=0)
    expected = generate(bare_bundle, plain)
    rates = []
    for num_slots in (2, 5, 12, 24):
        drafting = RuntimeConfig(
            num_draft_tokens=num_draft_tokens, bound_by_slots=False, draft_stop=num_slots > 5
        )
        scarce = with_slots(bare_bundle, drafting, num_slots)
        with Session.open(bare_bundle, scarce) as session:
            assert session.memory.draft_bytes == 0
            assert session.memory.num_slots == num_slots
            tokens = list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
            assert tokens == expected
            stats = session.stats
            assert stats.num_drafted > 0
            assert (stats.cache.loads > 0) == (num_slots < 24)
            rates.append(stats.acceptance_rate)
    assert rates[-1] == 1.0
    assert rates[0] is not None
    assert rates[0] < 1.0


def test_a_draft_of_residents_is_better_than_its_stand_ins(tiny_bundle: Path) -> None:
    """With every expert cached the stand-ins are not used: all is accepted, which they are not."""
    config = with_slots(tiny_bundle, RuntimeConfig(num_draft_tokens=4), 24)
    with Session.open(tiny_bundle, config) as session:
        list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
        assert session.stats.acceptance_rate == 1.0
        sampling = SamplingConfig(temperature=1e-3)  # as good as greedy, by stand-ins alone
        list(session.generate_ids(PROMPT, NUM_TOKENS, sampling, stop_at_eos=False))
        assert session.stats.acceptance_rate is not None
        assert session.stats.acceptance_rate < 1.0


def test_late_reads_while_drafting_change_no_token(bare_bundle: Path) -> None:
    """What the draft is made of then depends on which reads have arrived."""
    expected = generate(bare_bundle, RuntimeConfig(num_draft_tokens=0))
    config = RuntimeConfig(num_draft_tokens=4, bound_by_slots=False, num_io_threads=4)
    for num_slots in (2, 6, 10):
        store = FaultyStore(shard_store(bare_bundle), "late")
        with Session.open(
            bare_bundle, with_slots(bare_bundle, config, num_slots), store
        ) as session:
            store.is_armed = True
            tokens = list(session.generate_ids(PROMPT, NUM_TOKENS, stop_at_eos=False))
        assert tokens == expected
        assert store.num_faults > 0


@pytest.mark.parametrize("bundle", ["tiny_bundle", "bare_bundle"])
def test_the_text_of_a_seed_depends_on_neither_cache_nor_governor(
    bundle: str, request: pytest.FixtureRequest
) -> None:
    root: Path = request.getfixturevalue(bundle)
    sampling = SamplingConfig(temperature=1.5, seed=3)
    texts = []
    for num_slots, governor in ((24, True), (12, True), (12, False)):
        config = RuntimeConfig(governor=governor, bound_by_slots=False)
        with Session.open(root, with_slots(root, config, num_slots)) as session:
            texts.append(list(session.generate_ids(PROMPT, 80, sampling, stop_at_eos=False)))
            ways = set(session.stats.windows_by_lookahead)
            if bundle == "tiny_bundle":
                assert ways == {"K = 4"}
            else:
                assert ways == {"K = 0"}
    assert texts[0] == texts[1] == texts[2]


def ways_of(root: Path, config: RuntimeConfig, num_tokens: int = 100) -> set[str]:
    """How windows ran, greedily; the tokens are the target's in any case."""
    with Session.open(root, config) as session:
        tokens = list(session.generate_ids(PROMPT, num_tokens, stop_at_eos=False))
        counts = session.stats.windows_by_lookahead
        assert counts.total() == session.stats.num_windows
        assert session.to_dict()["windows_by_lookahead"] == dict(counts)
    plain = RuntimeConfig(num_draft_tokens=0)
    with Session.open(root, plain) as session:
        assert list(session.generate_ids(PROMPT, num_tokens, stop_at_eos=False)) == tokens
        assert session.stats.windows_by_lookahead == {"K = 0": num_tokens - 1}
        assert session.stats.cache.prefetch_loads == 0
    return set(counts)


PLAIN, PREDICTS = "K = 0", "K = 0 + predictor"
ROOMY = 4 << 20
"""A budget with slots enough for windows of five tokens."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {PLAIN, "K = 4"}),
        ({"governor": False}, {"K = 4"}),
        ({"num_draft_tokens": 2}, {"K = 2"}),
        ({"num_draft_tokens": 0}, {PLAIN}),
        ({"num_draft_tokens": 0, "predictor": "fitted"}, {PREDICTS}),
        ({"num_draft_tokens": 0, "predictor": "router"}, {PREDICTS}),
        ({"num_draft_tokens": 0, "predictor": "fitted", "prefetch": False}, {PLAIN}),
        ({"predictor": "fitted"}, {PREDICTS, "K = 4"}),
        ({"prefetch": False, "draft_stop": False}, {PLAIN, "K = 4"}),
    ],
    ids=str,
)
def test_what_is_given_is_kept_and_what_is_left_open_is_governed(
    tiny_bundle: Path, options: dict[str, Any], expected: set[str]
) -> None:
    assert ways_of(tiny_bundle, RuntimeConfig(ROOMY, **options)) == expected


def test_where_the_plan_foresees_no_draft_none_is_tried_unless_asked_for(
    bare_bundle: Path, tiny_bundle: Path, tmp_path: Path
) -> None:
    """Of 24 experts, windows of 2, 3, 5 tokens need 10.5, 13.9 and 18.3; stand-ins stay on disk."""
    root = Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
    change_file(root, PLAN_FILE, lambda p: p.update(num_draft_tokens=0))
    for bundle in (bare_bundle, root):
        assert ways_of(bundle, with_slots(bundle, RuntimeConfig(), 24)) == {PLAIN}
        with Session.open(bundle) as session:
            assert (session.num_draft_tokens, session.memory.draft_bytes) == (0, 0)
    for num_slots, most in ((10, 0), (11, 1), (15, 2), (18, 3), (19, 4), (24, 4)):
        config = with_slots(bare_bundle, RuntimeConfig(num_draft_tokens=4), num_slots)
        with Session.open(bare_bundle, config) as session:
            assert session.num_draft_tokens == most
            assert session.memory.draft_bytes == 0
            assert session.memory.num_slots == num_slots
    assert ways_of(bare_bundle, RuntimeConfig(num_draft_tokens=4)) == {"K = 4"}


def test_more_draft_tokens_than_the_slots_allow_are_lowered_with_a_message(
    tiny_bundle: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RuntimeConfig(num_draft_tokens=16)
    for num_slots, most in ((24, 16), (19, 4), (12, 1)):
        caplog.clear()
        with Session.open(tiny_bundle, with_slots(tiny_bundle, config, num_slots)) as session:
            assert session.num_draft_tokens == most
            assert session.memory.draft_bytes > 0
        message = f"drafting {most} tokens a window instead of 16: with more, its experts would "
        expected = [] if most == 16 else [f"{message}outgrow {num_slots} slots"]
        assert caplog.messages == expected
    unbounded = with_slots(tiny_bundle, replace(config, bound_by_slots=False), 12)
    with Session.open(tiny_bundle, unbounded) as session:
        assert session.num_draft_tokens == 16
    auto = with_slots(tiny_bundle, RuntimeConfig(governor=False), 12)
    caplog.clear()
    with Session.open(tiny_bundle, auto) as session:  # the plan has 4
        assert session.num_draft_tokens == 1
    assert caplog.messages == []


def test_where_the_slots_allow_no_draft_its_memory_becomes_slots(tiny_bundle: Path) -> None:
    config = with_slots(tiny_bundle, RuntimeConfig(num_draft_tokens=4), 2)
    with Session.open(tiny_bundle, config) as session:
        assert session.num_draft_tokens == 0
        assert session.memory.draft_bytes == 0
        assert session.memory.num_slots > 2


def test_the_governor_remembers_from_one_generation_to_the_next(
    tiny_bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was tried at first is not tried again in every answer of a chat."""
    observe = Governor.observe

    def told(governor: Governor, way: Lookahead, seconds: float, num_tokens: int) -> None:
        observe(governor, way, num_tokens * (1.0 if str(way) == PLAIN else 1.4), num_tokens)

    monkeypatch.setattr(Governor, "observe", told)
    with Session.open(tiny_bundle, RuntimeConfig(ROOMY)) as session:
        counts = []
        for _ in range(3):
            list(session.generate_ids(PROMPT, 60, stop_at_eos=False))
            counts.append(session.stats.windows_by_lookahead)
    assert counts[0].keys() == {PLAIN, "K = 4"}
    assert all(later["K = 4"] < counts[0]["K = 4"] for later in counts[1:])
