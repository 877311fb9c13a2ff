"""manifest.json and plan.json: round trips, strictness, paths that stay inside."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_runtime.config import ExpertNumbers, ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.errors import BundleError
from specter_runtime.manifest import (
    DraftFormat,
    ExpertFormat,
    FileEntry,
    Manifest,
    Plan,
    check_inside,
    draft_path,
    model_path,
    read_json,
    shard_path,
)

MODEL = ModelConfig(
    model_type="qwen3_moe",
    vocab_size=260,
    hidden_size=64,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    moe_intermediate_size=48,
    num_experts=8,
    num_experts_per_tok=2,
    rms_norm_eps=1e-6,
    max_position_embeddings=512,
    tie_word_embeddings=False,
    attention_scaling=0.25,
    rope=RopeConfig((1.0, 0.5)),
    routing=RoutingConfig(norm_topk_prob=True),
    qk_norm="head",
    intermediate_size=96,
    dense_layers=(1,),
)
MANIFEST = Manifest(
    format="specter-bundle",
    format_version=1,
    model=MODEL,
    tensor_names={"gate_proj": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight"},
    checkpoint_dtype="bfloat16",
    draft=DraftFormat("rtn", 16, True, ((4, 3, 0, 8), (2, 2, 2, 2))),
    experts=ExpertFormat(ExpertNumbers("bfloat16"), "raw", 4096, 18432),
    files={"model/common.safetensors": FileEntry(4100, "0" * 64)},
    unhashed_files=("timings.json",),
    recipe={"draft": {"bits": 4}, "seeds": [1, None, 0.5]},
    build_digest="ab" * 32,
    seed=3,
    tools={"torch": "2.13.0"},
    source_files={"model.safetensors": FileEntry(10, "1" * 64)},
)
PLAN = Plan(
    format_version=1,
    memory_budget_bytes=2**21,
    max_context_tokens=256,
    dtype="bfloat16",
    num_slots=5,
    num_draft_tokens=4,
    initial_residents=((2, 7), (0, 1)),
    eviction="lru",
    predictor="fitted",
    predicted={"no draft": 0.25, "4 draft tokens": 0.125},
    chosen="4 draft tokens",
    reason="it is faster",
    hardware={"link_bytes_per_second": 1e9},
)
RECORDS: dict[str, Manifest | Plan] = {"manifest": MANIFEST, "plan": PLAN}
OBJECTS: list[tuple[str, tuple[str, ...]]] = [
    # every object whose keys are fixed: which record, where in it
    ("manifest", ()),
    ("manifest", ("model",)),
    ("manifest", ("draft",)),
    ("manifest", ("experts",)),
    ("manifest", ("files", "model/common.safetensors")),
    ("manifest", ("source_files", "model.safetensors")),
    ("plan", ()),
]
Edit = Callable[[dict[str, Any]], object]


def parse(name: str, raw: object) -> Manifest | Plan:
    return type(RECORDS[name]).from_dict(raw, f"BUNDLE/{name}.json")  # type: ignore[arg-type]


def edited(name: str, path: tuple[str, ...], edit: Edit) -> dict[str, Any]:
    """The record as JSON has it, the object at ``path`` changed by ``edit``."""
    raw: dict[str, Any] = json.loads(RECORDS[name].to_json())
    target = raw
    for key in path:
        target = target[key]
    edit(target)
    return raw


def refused(name: str, raw: object) -> str:
    """The message with which a record is refused; it names the file."""
    with pytest.raises(BundleError) as caught:
        parse(name, raw)
    assert str(caught.value).startswith(f"BUNDLE/{name}.json: ")
    return str(caught.value)


@pytest.mark.parametrize("name", RECORDS)
def test_record_survives_a_round_trip_through_json(name: str) -> None:
    text = RECORDS[name].to_json()
    again = parse(name, json.loads(text))
    assert again == RECORDS[name]
    assert again.to_json() == text


@pytest.mark.parametrize(("name", "file"), [("manifest", "manifest.json"), ("plan", "plan.json")])
def test_built_record_is_what_its_json_says(tiny_bundle: Path, name: str, file: str) -> None:
    text = (tiny_bundle / file).read_text()
    assert parse(name, json.loads(text)).to_json() == text


@pytest.mark.parametrize("name", RECORDS)
def test_json_does_not_depend_on_the_order_of_keys(name: str) -> None:
    text = RECORDS[name].to_json()
    backwards = json.loads(text, object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    assert list(backwards) != list(json.loads(text))
    assert parse(name, backwards).to_json() == text


@pytest.mark.parametrize(("name", "path"), OBJECTS)
def test_unknown_keys_are_refused_by_name(name: str, path: tuple[str, ...]) -> None:
    message = refused(name, edited(name, path, lambda o: o.update(zeal=1, quirk=2)))
    assert "unknown 'quirk', 'zeal'" in message
    assert all(key in message for key in path)


LATER = {("plan", key) for key in ("eviction", "predictor", "chosen", "reason")}
"""Keys that earlier bundles lack."""


def test_plan_of_an_earlier_bundle_runs_as_it_did() -> None:
    raw = json.loads(PLAN.to_json())
    for _, key in LATER:
        del raw[key]
    found = Plan.from_dict(raw, "plan.json")
    assert (found.eviction, found.predictor) == ("reuse", "none")
    later = replace(PLAN, eviction="reuse", predictor="none", chosen="4", reason="")
    assert found == later


@pytest.mark.parametrize(("name", "path"), OBJECTS)
def test_each_missing_key_is_refused_by_name(name: str, path: tuple[str, ...]) -> None:
    keys: list[str] = []
    edited(name, path, keys.extend)
    for key in [key for key in keys if (name, key) not in LATER]:
        message = refused(name, edited(name, path, lambda o, key=key: o.pop(key)))
        named = (f"'{key}'", key.replace("_", " "))  # a lacking version is reported as another one
        assert any(word in message.removeprefix(f"BUNDLE/{name}.json") for word in named)
        assert all(part in message for part in path)


@pytest.mark.parametrize(("name", "path"), [case for case in OBJECTS if case[1]])
@pytest.mark.parametrize("value", [[], "text", 3, None])
def test_object_of_another_kind_is_refused_by_name(
    name: str, path: tuple[str, ...], value: object
) -> None:
    message = refused(name, edited(name, path[:-1], lambda o: o.update({path[-1]: value})))
    assert "expected an object" in message
    assert all(part in message for part in path)


@pytest.mark.parametrize("value", ["other-bundle", "", None, 1])
def test_other_format_is_refused(value: object) -> None:
    message = refused("manifest", edited("manifest", (), lambda o: o.update(format=value)))
    assert repr(value) in message
    assert "'specter-bundle'" in message


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("value", [0, 2, "1", None])
def test_other_version_is_refused(name: str, value: object) -> None:
    message = refused(name, edited(name, (), lambda o: o.update(format_version=value)))
    assert "version" in message
    assert repr(value) in message


def test_other_version_is_reported_before_its_unknown_keys() -> None:
    raw = {"format": "specter-bundle", "format_version": 2, "novelty": {}}
    assert "format version 2" in refused("manifest", raw)


OUTSIDE = ("/etc/passwd", "..", "../x", "a/../../x", "a/..", "a\\b", "..\\x", "", ".", "//x")


@pytest.mark.parametrize("path", OUTSIDE)
@pytest.mark.parametrize("key", ["files", "unhashed_files"])
def test_path_that_leaves_the_bundle_is_refused(path: str, key: str) -> None:
    def add(raw: dict[str, Any]) -> None:
        if key == "files":
            raw[key][path] = {"nbytes": 1, "sha256": "0"}
        else:
            raw[key].append(path)

    message = refused("manifest", edited("manifest", (), add))
    assert f"path {path!r} leaves the bundle" in message


@settings(deadline=None)
@given(st.lists(st.sampled_from(["a", "..", ".", "", "b.c", "...", "~"]), max_size=5).map("/".join))
def test_path_let_through_never_resolves_outside(path: str) -> None:
    root = Path("/srv/bundle")
    try:
        check_inside(path, "where")
    except BundleError:
        return
    depth = 0
    for part in path.split("/"):
        depth += {"..": -1, ".": 0, "": 0}.get(part, 1)
        assert depth >= 0
    assert (root / path).is_relative_to(root)
    assert root / path != root


@pytest.mark.parametrize(
    "path", [shard_path(0, 0), shard_path(99, 1000), draft_path(7), model_path(None), model_path(3)]
)
def test_own_paths_stay_inside(path: str) -> None:
    check_inside(path, "where")


def test_own_paths_are_distinct() -> None:
    paths = [shard_path(i, e) for i in range(30) for e in range(30)]
    paths += [function(i) for function in (draft_path, model_path) for i in range(30)]
    paths.append(model_path(None))
    assert len(set(paths)) == len(paths)
    assert shard_path(2, 13) == "experts/layer-002/expert-013.safetensors"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b'{"a": 1,}', "not valid JSON"),
        (b"\xff\xfe", "not valid JSON"),
        (b'{"a": ' + b"1" * 5000 + b"}", "not valid JSON"),
        (b"[" * 50_000, "not valid JSON"),
        (b"[1]", "expected a JSON object, found list"),
        (b"null", "expected a JSON object, found NoneType"),
    ],
    ids=["empty", "comma", "not UTF-8", "long integer", "deeply nested", "list", "null"],
)
def test_file_that_is_no_json_object_is_refused_by_name(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "manifest.json"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=message) as caught:
        read_json(path)
    assert str(path) in str(caught.value)


def test_json_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    for path in (tmp_path / "missing.json", tmp_path):
        with pytest.raises(BundleError, match="cannot be read") as caught:
            read_json(path)
        assert str(path) in str(caught.value)
