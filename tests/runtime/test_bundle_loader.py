"""Opening bundles: what is damaged or inconsistent is refused by name, never by a traceback."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from specter_runtime.bundle_loader import Bundle, file_sha256, load_bundle
from specter_runtime.errors import BundleError
from specter_runtime.experts import PROJECTIONS, ExpertKey
from specter_runtime.shards import ALIGNMENT, tensor_bytes, write_tensors

SHARD = "experts/layer-001/expert-002.safetensors"
DRAFT = "draft/layer-001.safetensors"
Json = dict[str, Any]


@pytest.fixture
def bundle(tiny_bundle: Path, tmp_path: Path) -> Path:
    """A copy of the tiny bundle, free to damage."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))


def edit_json(path: Path, edit: Callable[[Json], object]) -> None:
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


def edit_manifest(root: Path, edit: Callable[[Json], object]) -> None:
    edit_json(root / "manifest.json", edit)


def record(root: Path, name: str) -> None:
    """Make the manifest agree with a file that a test has written."""
    path = root / name
    entry = {"nbytes": path.stat().st_size, "sha256": file_sha256(path)}
    edit_manifest(root, lambda raw: raw["files"].update({name: entry}))


def write_file(root: Path, name: str, content: bytes | str) -> None:
    """Write a file of the bundle and record it."""
    (root / name).write_bytes(content.encode() if isinstance(content, str) else content)
    record(root, name)


def set_value(root: Path, file: str, path: tuple[str | int, ...], value: object) -> None:
    """Replace one value of manifest.json or plan.json."""

    def edit(raw: Any) -> None:
        for key in path[:-1]:
            raw = raw[key]
        raw[path[-1]] = value

    edit_json(root / file, edit)
    if file != "manifest.json":
        record(root, file)


def refused(root: Path, *, verify_hashes: bool = False) -> str:
    """The message with which a bundle is refused; it names the folder."""
    with pytest.raises(BundleError) as caught:
        load_bundle(root, verify_hashes=verify_hashes)
    assert str(root) in str(caught.value)
    return str(caught.value)


def change_byte(path: Path, position: int = -1) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


# ---- files ---------------------------------------------------------------------------------------


def test_whole_bundle_opens_with_hashes_verified(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle, verify_hashes=True)
    assert bundle.root == tiny_bundle
    assert bundle.manifest.model.num_experts == 8
    assert bundle.plan.num_draft_tokens == 4


def test_folder_without_manifest_is_no_bundle(bundle: Path) -> None:
    (bundle / "manifest.json").unlink()
    assert "no manifest.json" in refused(bundle)


@pytest.mark.parametrize("name", ["missing", "manifest.json"])
def test_path_that_is_no_folder_is_no_bundle(bundle: Path, name: str) -> None:
    assert "no manifest.json" in refused(bundle / name)


@pytest.mark.parametrize("name", [SHARD, DRAFT, "plan.json", "tokenizer.json", "config.json"])
def test_missing_file_is_named(bundle: Path, name: str) -> None:
    (bundle / name).unlink()
    assert f"{name} is missing" in refused(bundle)


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize("name", [SHARD, DRAFT, "plan.json", "tokenizer.json"])
def test_file_of_another_size_is_named(bundle: Path, name: str, change: int) -> None:
    content = (bundle / name).read_bytes()
    (bundle / name).write_bytes(content[:change] if change < 0 else content + b"\n")
    expected = f"{name} has {len(content) + change} bytes, expected {len(content)}"
    assert expected in refused(bundle)


def test_all_damaged_files_are_named_at_once(bundle: Path) -> None:
    (bundle / SHARD).unlink()
    (bundle / DRAFT).write_bytes(b"")
    message = refused(bundle)
    assert SHARD in message
    assert DRAFT in message


@pytest.mark.parametrize("name", [SHARD, DRAFT, "model/common.safetensors", "tokenizer.json"])
def test_changed_byte_is_found_by_verifying_hashes_and_only_then(bundle: Path, name: str) -> None:
    change_byte(bundle / name)
    load_bundle(bundle)
    message = refused(bundle, verify_hashes=True)
    assert message.endswith(f"contents differ from the manifest: '{name}'")


def test_all_changed_files_are_named_at_once(bundle: Path) -> None:
    change_byte(bundle / SHARD)
    change_byte(bundle / DRAFT)
    message = refused(bundle, verify_hashes=True)
    assert SHARD in message
    assert DRAFT in message


def test_unhashed_file_may_differ(bundle: Path) -> None:
    change_byte(bundle / "timings.json")
    load_bundle(bundle, verify_hashes=True)


def test_hash_does_not_depend_on_the_pieces_it_is_read_in(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specter_runtime.bundle_loader.HASH_CHUNK_BYTES", 1000)
    load_bundle(bundle, verify_hashes=True)


# ---- manifest and plan ---------------------------------------------------------------------------


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 50_000])
@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_malformed_json_is_refused_with_the_file_named(
    bundle: Path, name: str, content: bytes
) -> None:
    (bundle / name).write_bytes(content)
    if name != "manifest.json":
        record(bundle, name)
    assert str(bundle / name) in refused(bundle)


@pytest.mark.parametrize("name", ["manifest.json", "plan.json"])
def test_other_version_is_refused_with_the_file_named(bundle: Path, name: str) -> None:
    set_value(bundle, name, ("format_version",), 2)
    message = refused(bundle)
    assert str(bundle / name) in message
    assert "version" in message


MANIFEST_VALUES: list[tuple[str | int, ...]] = [
    ("tensor_names",),
    ("tensor_names", "q_proj"),
    ("checkpoint_dtype",),
    ("draft",),
    ("draft", "method"),
    ("draft", "group_size"),
    ("draft", "symmetric"),
    ("draft", "bits"),
    ("draft", "bits", 0),
    ("draft", "bits", 0, 0),
    ("experts",),
    ("experts", "numbers"),
    ("experts", "numbers", "dtype"),
    ("experts", "encoding"),
    ("experts", "data_start"),
    ("experts", "nbytes"),
    ("files",),
    ("files", SHARD),
    ("files", SHARD, "nbytes"),
    ("files", SHARD, "sha256"),
    ("unhashed_files",),
    ("unhashed_files", 0),
    ("recipe",),
    ("build_digest",),
    ("seed",),
    ("tools",),
    ("source_files",),
    ("source_files", "model.safetensors"),
    ("source_files", "model.safetensors", "nbytes"),
    ("model",),
    ("model", "model_type"),
    ("model", "vocab_size"),
    ("model", "hidden_size"),
    ("model", "num_hidden_layers"),
    ("model", "num_attention_heads"),
    ("model", "num_key_value_heads"),
    ("model", "head_dim"),
    ("model", "moe_intermediate_size"),
    ("model", "num_experts"),
    ("model", "num_experts_per_tok"),
    ("model", "routing", "norm_topk_prob"),
    ("model", "rms_norm_eps"),
    ("model", "rope", "attention_factor"),
    ("model", "max_position_embeddings"),
    ("model", "tie_word_embeddings"),
    ("model", "attention_bias"),
    ("model", "qk_norm"),
    ("model", "clip_qkv"),
    ("model", "intermediate_size"),
    ("model", "dense_layers"),
]
PLAN_VALUES: list[tuple[str | int, ...]] = [
    ("memory_budget_bytes",),
    ("max_context_tokens",),
    ("dtype",),
    ("num_slots",),
    ("num_draft_tokens",),
    ("initial_residents",),
    ("initial_residents", 0),
    ("initial_residents", 0, 0),
    ("predicted",),
    ("hardware",),
]
WRONG_TYPES = [("manifest.json", path) for path in MANIFEST_VALUES]
WRONG_TYPES += [("plan.json", path) for path in PLAN_VALUES]


@pytest.mark.parametrize(
    ("file", "path"), WRONG_TYPES, ids=[".".join(map(str, path)) for _, path in WRONG_TYPES]
)
def test_value_of_another_type_is_refused(
    bundle: Path, file: str, path: tuple[str | int, ...]
) -> None:
    old: Any = json.loads((bundle / file).read_text())
    for key in path:
        old = old[key]
    set_value(bundle, file, path, 5 if isinstance(old, str | list | dict) else "text")
    refused(bundle)


@pytest.mark.parametrize(
    ("file", "path", "value"),
    [
        ("manifest.json", ("draft", "bits", 0, 0), [4]),
        ("manifest.json", ("model", "num_experts"), 8.0),
        ("manifest.json", ("files", SHARD, "nbytes"), None),
        ("plan.json", ("initial_residents", 0), [0]),
        ("plan.json", ("initial_residents", 0), [0, 1, 2]),
        ("plan.json", ("initial_residents", 0), [0, 0.5]),
        ("plan.json", ("initial_residents", 0), [float("inf"), 0]),
        ("plan.json", ("initial_residents", 0), [float("nan"), 0]),
        ("plan.json", ("num_draft_tokens",), None),
        ("plan.json", ("dtype",), "float7"),
    ],
)
def test_value_of_a_near_type_is_refused(
    bundle: Path, file: str, path: tuple[str | int, ...], value: object
) -> None:
    set_value(bundle, file, path, value)
    refused(bundle)


JSON = st.recursive(
    # No large integers: a number of layers or experts is walked through.
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(
    deadline=None,
    max_examples=80,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # restored after each example
)
@given(case=st.sampled_from(WRONG_TYPES), value=JSON)
def test_whatever_a_value_is_the_bundle_opens_or_is_refused(
    bundle: Path, case: tuple[str, tuple[str | int, ...]], value: object
) -> None:
    texts = {name: (bundle / name).read_text() for name in ("manifest.json", "plan.json")}
    set_value(bundle, *case, value)
    try:
        with suppress(BundleError):
            load_bundle(bundle)
    finally:
        for name, text in texts.items():
            (bundle / name).write_text(text)


@pytest.mark.parametrize("path", ["../outside", "/etc/hostname", "a\\b", "null\0byte"])
def test_file_outside_the_bundle_is_refused(bundle: Path, path: str) -> None:
    (bundle.parent / "outside").write_bytes(b"x")
    entry = {"nbytes": 1, "sha256": "0" * 64}
    edit_manifest(bundle, lambda raw: raw["files"].update({path: entry}))
    refused(bundle)


@pytest.mark.parametrize(
    "name", [SHARD, "plan.json", "model/common.safetensors", "model/layer-002.safetensors", DRAFT]
)
def test_manifest_that_does_not_list_a_needed_file_is_refused(bundle: Path, name: str) -> None:
    edit_manifest(bundle, lambda raw: raw["files"].pop(name))
    message = refused(bundle)
    assert str(bundle / "manifest.json") in message
    assert name in message


INCONSISTENT: dict[str, tuple[tuple[str | int, ...], object, str]] = {
    # value of the manifest, another one, what the message says
    "encoding": (("experts", "encoding"), "zstd", "'zstd'"),
    "draft bits 5": (("draft", "bits", 2, 3), 5, "'draft.bits' may hold"),
    "draft bits -4": (("draft", "bits", 2, 3), -4, "'draft.bits' may hold"),
    "draft bits of an expert too few": (("draft", "bits", 1), [4] * 7, "'draft.bits' must have"),
    "draft bits of an expert too many": (("draft", "bits", 1), [4] * 9, "'draft.bits' must have"),
    "draft bits of a layer too few": (("draft", "bits"), [[4] * 8] * 2, "'draft.bits' must have"),
    "draft group size 0": (("draft", "group_size"), 0, "group_size"),
    "unaligned shards": (("experts", "data_start"), 4097, "multiple of 4096"),
    "shards before the file": (("experts", "data_start"), -4096, ""),
    "shards start elsewhere": (("experts", "data_start"), 8192, ""),
    "experts too small for the model": (("experts", "nbytes"), 4096, ""),
    "expert dtype": (("experts", "numbers", "dtype"), "float7", "float7"),
    "expert dtype of another size": (("experts", "numbers", "dtype"), "bfloat16", ""),
    "block size of no rows": (("model", "fp8_block_size"), [0, 8], "fp8_block_size"),
}


@pytest.mark.parametrize("case", INCONSISTENT)
def test_manifest_that_contradicts_itself_is_refused(bundle: Path, case: str) -> None:
    path, value, message = INCONSISTENT[case]
    set_value(bundle, "manifest.json", path, value)
    assert message in refused(bundle)


@pytest.mark.parametrize("resident", [[3, 0], [-1, 0], [0, 8], [0, -1]])
def test_initial_resident_that_does_not_exist_is_refused(bundle: Path, resident: list[int]) -> None:
    set_value(bundle, "plan.json", ("initial_residents", 1), resident)
    message = refused(bundle)
    assert str(bundle / "plan.json") in message
    assert f"no expert {resident[1]} in layer {resident[0]}" in message


# ---- tensors -------------------------------------------------------------------------------------


def test_dense_tensors_are_those_of_the_model_files(tiny_bundle: Path) -> None:
    expected: dict[str, torch.Tensor] = {}
    for path in sorted((tiny_bundle / "model").glob("*.safetensors")):
        expected |= load_file(path)
    tensors = load_bundle(tiny_bundle).dense_tensors()
    assert sorted(tensors) == sorted(expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors.items())
    with pytest.raises(KeyError, match="absent"):
        tensors["absent"]


def test_resident_tensors_are_not_memory_mapped(bundle: Path) -> None:
    opened = load_bundle(bundle)
    tensors = dict(opened.dense_tensors())
    draft = opened.draft_experts()
    before = {name: bytes(tensor_bytes(tensor)) for name, tensor in tensors.items()}
    codes = {key: expert.down_proj.codes.clone() for key, expert in draft.items()}
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(bundle) not in maps.read_text()
    for path in (*(bundle / "model").iterdir(), *(bundle / "draft").iterdir()):
        with path.open("r+b") as file:  # in place: a mapping would see it
            file.seek(ALIGNMENT)
            file.write(bytes(path.stat().st_size - ALIGNMENT))
    assert before == {name: bytes(tensor_bytes(tensor)) for name, tensor in tensors.items()}
    assert all(torch.equal(draft[key].down_proj.codes, codes[key]) for key in codes)


def test_draft_experts_are_the_packed_tensors_under_their_own_names(tiny_bundle: Path) -> None:
    opened = load_bundle(tiny_bundle)
    experts = opened.draft_experts()
    assert set(experts) == {ExpertKey(i, e) for i in range(3) for e in range(8)}
    for key, packed in experts.items():
        tensors = load_file(tiny_bundle / f"draft/layer-{key.layer:03d}.safetensors")
        for role in PROJECTIONS:
            name = f"model.layers.{key.layer}.mlp.experts.{key.expert}.{role}.weight"
            part = getattr(packed, role)
            assert (part.bits, part.group_size, part.zero_points) == (4, 16, None)
            assert part.shape == ((64, 48) if role == "down_proj" else (48, 64))
            assert torch.equal(part.codes, tensors[f"{name}.codes"])
            assert torch.equal(part.scales, tensors[f"{name}.scales"])


def test_experts_of_zero_bits_have_no_stand_in_and_need_no_file(bundle: Path) -> None:
    def edit(raw: Json) -> None:
        raw["draft"]["bits"][0] = [0] * 8
        raw["draft"]["bits"][2][5] = 0
        del raw["files"]["draft/layer-000.safetensors"]

    edit_manifest(bundle, edit)
    (bundle / "draft/layer-000.safetensors").unlink()
    experts = load_bundle(bundle).draft_experts()
    assert set(experts) == {ExpertKey(i, e) for i in (1, 2) for e in range(8)} - {ExpertKey(2, 5)}


def rewrite_draft(root: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a draft file and record it."""
    tensors = {name: t.clone() for name, t in load_file(root / DRAFT).items()}  # not mapped
    edit(tensors)
    write_tensors(root / DRAFT, tensors, {})
    record(root, DRAFT)


def draft_refused(bundle: Bundle, file: str = DRAFT) -> str:
    """The message with which draft tensors are refused; it names their file."""
    with pytest.raises(BundleError) as caught:
        bundle.draft_experts()
    assert str(bundle.root / file) in str(caught.value)
    return str(caught.value)


NAME = "model.layers.1.mlp.experts.6.up_proj.weight"


@pytest.mark.parametrize("part", ["codes", "scales"])
def test_missing_draft_tensor_is_named(bundle: Path, part: str) -> None:
    rewrite_draft(bundle, lambda tensors: tensors.pop(f"{NAME}.{part}"))
    assert f"'{NAME}.{part}' is missing" in draft_refused(load_bundle(bundle))


def test_missing_zero_points_of_an_asymmetric_draft_are_named(bundle: Path) -> None:
    set_value(bundle, "manifest.json", ("draft", "symmetric"), False)
    message = draft_refused(load_bundle(bundle), "draft/layer-000.safetensors")
    assert ".zero_points' is missing" in message


@pytest.mark.parametrize(
    ("part", "tensor"),
    [
        ("codes", torch.zeros(48, 31, dtype=torch.uint8)),
        ("codes", torch.zeros(48, 32, dtype=torch.int8)),
        ("scales", torch.zeros(48, 3, dtype=torch.bfloat16)),
        ("scales", torch.zeros(48, 4, dtype=torch.float32)),
    ],
    ids=["codes of another shape", "signed codes", "a scale too few", "wide scales"],
)
def test_draft_tensor_of_another_form_is_named(
    bundle: Path, part: str, tensor: torch.Tensor
) -> None:
    rewrite_draft(bundle, lambda tensors: tensors.update({f"{NAME}.{part}": tensor}))
    assert f"{NAME}.{part}" in draft_refused(load_bundle(bundle))


@pytest.mark.parametrize("template", [None, "{nowhere}", "{", "{0}"])
def test_malformed_template_of_tensor_names_is_refused(bundle: Path, template: str | None) -> None:
    def edit(raw: Json) -> None:
        raw["tensor_names"]["up_proj"] = template
        if template is None:
            del raw["tensor_names"]["up_proj"]

    edit_manifest(bundle, edit)
    with pytest.raises(BundleError, match="up_proj"):
        load_bundle(bundle).draft_experts()


@pytest.mark.parametrize("read", [Bundle.draft_experts, lambda b: dict(b.dense_tensors())])
def test_damaged_tensor_file_is_refused_by_name(
    bundle: Path, read: Callable[[Bundle], object]
) -> None:
    for name in (DRAFT, "model/layer-001.safetensors"):
        write_file(bundle, name, b"not safetensors")
    with pytest.raises(BundleError, match=r"layer-001\.safetensors"):
        read(load_bundle(bundle))


def test_tensor_file_that_vanishes_after_opening_is_refused_by_name(bundle: Path) -> None:
    opened = load_bundle(bundle)
    (bundle / DRAFT).unlink()
    assert "cannot be read" in draft_refused(opened)


def test_shard_file_of_a_key(tiny_bundle: Path) -> None:
    assert load_bundle(tiny_bundle).shard_file(ExpertKey(1, 2)) == tiny_bundle / SHARD


# ---- predictors ----------------------------------------------------------------------------------

PREDICTOR = "predictor.safetensors"


def rewrite_predictor(root: Path, edit: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of the predictor's file and record it."""
    tensors = {name: t.clone() for name, t in load_file(root / PREDICTOR).items()}  # not mapped
    edit(tensors)
    write_tensors(root / PREDICTOR, tensors, {})
    record(root, PREDICTOR)


def test_predictors_are_the_tensors_of_their_file(tiny_bundle: Path) -> None:
    tensors = load_file(tiny_bundle / PREDICTOR)
    found = load_bundle(tiny_bundle).predictors()
    assert {layer: own.layers for layer, own in found.items()} == {0: (1, 2), 1: (2,)}
    assert tensors.keys() == {f"layer-00{i}.{part}" for i in (0, 1) for part in ("weight", "bias")}
    for layer, own in found.items():
        weight, bias = (tensors[f"layer-00{layer}.{part}"] for part in ("weight", "bias"))
        assert (own.matrix.dtype, own.bias.dtype) == (torch.bfloat16, torch.float32)
        assert torch.equal(own.matrix.view(-1, 8, 64), weight)
        assert torch.equal(own.bias.view(-1, 8), bias)


def test_bundle_without_a_predictor_is_a_bundle(bundle: Path) -> None:
    (bundle / PREDICTOR).unlink()
    edit_manifest(bundle, lambda raw: raw["files"].pop(PREDICTOR))
    opened = load_bundle(bundle, verify_hashes=True)
    assert (opened.predictors(), opened.predictor_nbytes) == ({}, 0)


def forms(*tensors: tuple[str, torch.dtype, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, dtype, shape in tensors}


WEIGHT_FORM = "expected torch.bfloat16 [1, 8, 64]"
OTHER_FORMS: dict[str, tuple[dict[str, torch.Tensor], str, str]] = {
    "wide weight": (
        forms(("layer-001.weight", torch.float32, (1, 8, 64))),
        "'layer-001.weight' is torch.float32 [1, 8, 64]",
        WEIGHT_FORM,
    ),
    "an expert too few": (
        forms(("layer-001.weight", torch.bfloat16, (1, 7, 64))),
        "'layer-001.weight' is torch.bfloat16 [1, 7, 64]",
        WEIGHT_FORM,
    ),
    "a layer that is not there": (
        forms(("layer-001.weight", torch.bfloat16, (2, 8, 64))),
        "'layer-001.weight' is torch.bfloat16 [2, 8, 64]",
        WEIGHT_FORM,
    ),
    "no layer at all": (
        forms(("layer-000.weight", torch.bfloat16, (0, 8, 64))),
        "'layer-000.weight' is torch.bfloat16 [0, 8, 64]",
        WEIGHT_FORM,
    ),
    "a number": (
        forms(("layer-000.weight", torch.bfloat16, ())),
        "'layer-000.weight' is torch.bfloat16 []",
        WEIGHT_FORM,
    ),
    "narrow bias": (
        forms(("layer-000.bias", torch.bfloat16, (2, 8))),
        "'layer-000.bias' is torch.bfloat16 [2, 8]",
        "expected torch.float32 [2, 8]",
    ),
    "bias of another layer": (
        forms(("layer-000.bias", torch.float32, (1, 8))),
        "'layer-000.bias' is torch.float32 [1, 8]",
        "expected torch.float32 [2, 8]",
    ),
    "last layer": (
        forms(("layer-002.bias", torch.float32, (0, 8))),
        "'layer-002.bias' is unknown",
        "layers [0, 1]",
    ),
    "another name": (
        forms(("layer-0.bias", torch.float32, (2, 8))),
        "'layer-0.bias' is unknown",
        "layers [0, 1]",
    ),
}


def predictor_refused(root: Path) -> str:
    with pytest.raises(BundleError) as caught:
        load_bundle(root).predictors()
    assert str(root / PREDICTOR) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(("tensors", "found", "expected"), OTHER_FORMS.values(), ids=OTHER_FORMS)
def test_predictor_of_another_form_is_refused_by_tensor(
    bundle: Path, tensors: dict[str, torch.Tensor], found: str, expected: str
) -> None:
    rewrite_predictor(bundle, lambda stored: stored.update(tensors))
    message = predictor_refused(bundle)
    assert found in message
    assert expected in message


@pytest.mark.parametrize(
    "name", [f"layer-00{i}.{part}" for i in (0, 1) for part in ("weight", "bias")]
)
def test_missing_predictor_tensor_is_named(bundle: Path, name: str) -> None:
    rewrite_predictor(bundle, lambda stored: stored.pop(name))
    assert f"tensor '{name}' is missing" in predictor_refused(bundle)


@pytest.mark.parametrize("name", ["layer-000.weight", "layer-001.bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_predictor_that_is_not_finite_is_refused(bundle: Path, name: str, value: float) -> None:
    rewrite_predictor(bundle, lambda stored: stored[name].view(-1)[1:2].fill_(value))
    assert f"tensor '{name}' holds NaN or infinity" in predictor_refused(bundle)


def test_predictor_of_a_model_that_uses_every_expert_is_refused(bundle: Path) -> None:
    set_value(bundle, "manifest.json", ("model", "num_experts_per_tok"), 8)
    assert "'layer-000.bias' is unknown" in predictor_refused(bundle)


def test_damaged_predictor_file_is_refused_by_name(bundle: Path) -> None:
    write_file(bundle, PREDICTOR, b"not safetensors")
    predictor_refused(bundle)
    with pytest.raises(BundleError, match=PREDICTOR):
        _ = load_bundle(bundle).predictor_nbytes


# ---- end-of-sequence ids -------------------------------------------------------------------------


NO_FILE = object()


def write_eos(root: Path, name: str, eos: object) -> None:
    """A config with this ``eos_token_id``; ``...``: without the key; ``NO_FILE``: no config."""
    if eos is NO_FILE:
        (root / name).unlink()
        edit_manifest(root, lambda raw: raw["files"].pop(name))
    else:
        write_file(root, name, json.dumps({} if eos is ... else {"eos_token_id": eos}))


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        (7, 7, {7}),
        (7, 9, {7, 9}),
        ([7, 8], 9, {7, 8, 9}),
        (7, [7, 9], {7, 9}),
        ([8], [9, 10], {8, 9, 10}),
        (0, 9, {0, 9}),
        ([], 9, {9}),
        (None, 9, {9}),
        (..., 9, {9}),
        (NO_FILE, 9, {9}),
        (..., [9, 10], {9, 10}),
        (..., 0, {0}),
        (..., ..., set()),
        (None, None, set()),
        (NO_FILE, NO_FILE, set()),
    ],
)
def test_eos_ids_are_all_that_either_config_names(
    bundle: Path, generation: object, config: object, expected: set[int]
) -> None:
    write_eos(bundle, "generation_config.json", generation)
    write_eos(bundle, "config.json", config)
    assert load_bundle(bundle).eos_token_ids() == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", [1.5, "7", {"id": 7}, [7, "8"], [[7]], True])
def test_eos_id_of_another_type_is_refused_with_the_file_named(
    bundle: Path, name: str, eos: object
) -> None:
    write_eos(bundle, "generation_config.json", 7)
    write_eos(bundle, name, eos)
    with pytest.raises(BundleError, match=rf"/{re.escape(name)}: eos_token_id"):
        load_bundle(bundle).eos_token_ids()


def test_malformed_config_of_the_checkpoint_is_refused_with_the_file_named(bundle: Path) -> None:
    write_file(bundle, "generation_config.json", "{")
    with pytest.raises(BundleError, match=r"generation_config\.json: not valid JSON"):
        load_bundle(bundle).eos_token_ids()


def test_config_that_the_manifest_does_not_list_is_not_read(bundle: Path) -> None:
    (bundle / "chat_config.json").write_text('{"eos_token_id": 1}')
    assert load_bundle(bundle).json_file("chat_config.json") == {}
