"""A checkpoint is complete, once each, in the right shape and dtype, or it is refused by name."""

from __future__ import annotations

import contextlib
import json
import pickle
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import GraniteMoeConfig, GraniteMoeForCausalLM

from specter_build.checkpoint import INDEX_FILE, SINGLE_FILE, Checkpoint
from specter_runtime.errors import CheckpointError
from specter_runtime.experts import ExpertKey, expert_shapes
from tests.checkpoints import COMMON, FAMILIES, fuse_experts, make_checkpoint
from tests.specter_build.test_more_families import CASES, make_family

SMALL: Mapping[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
QUERY = "model.layers.1.self_attn.q_proj.weight"
EXPERT = "model.layers.1.mlp.experts.2.up_proj.weight"

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def single_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint in one file. Read only."""
    folder = tmp_path_factory.mktemp("single")
    make_checkpoint(folder, **SMALL)
    return folder


@pytest.fixture(scope="module")
def many_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same checkpoint in several files with an index. Read only."""
    folder = tmp_path_factory.mktemp("many")
    make_checkpoint(folder, max_shard_size="100KB", **SMALL)
    return folder


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with tied embeddings, its head not stored. Read only."""
    folder = tmp_path_factory.mktemp("tied")
    make_checkpoint(folder, tie_word_embeddings=True, **SMALL)
    return folder


@pytest.fixture
def single_copy(single_file: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(single_file, tmp_path / "checkpoint"))


@pytest.fixture
def many_copy(many_files: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(many_files, tmp_path / "checkpoint"))


@pytest.fixture
def tied_copy(tied: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tied, tmp_path / "checkpoint"))


def change_tensors(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def change_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def shard_of(folder: Path, name: str) -> Path:
    index = json.loads((folder / INDEX_FILE).read_text())
    return folder / index["weight_map"][name]


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    return str(caught.value)


def all_tensors(checkpoint: Checkpoint) -> Tensors:
    """Everything that a build reads, by bundle name."""
    tensors: Tensors = {}
    for layer in (None, *range(checkpoint.config.num_hidden_layers)):
        tensors |= checkpoint.dense_tensors(layer)
    for layer in checkpoint.config.moe_layers:
        for expert in range(checkpoint.config.num_experts):
            key = ExpertKey(layer, expert)
            stored, names = checkpoint.expert(key).tensors(), checkpoint.stored_names(key)
            tensors |= {name: stored[role] for role, name in names.items()}
    return tensors


def assert_same_bits(found: Tensors, expected: Tensors) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].shape == tensor.shape, name
        assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name


# ---- what is read ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_tensor_of_a_single_file_is_read_to_the_bit_in_its_dtype(
    tmp_path: Path, dtype: torch.dtype
) -> None:
    make_checkpoint(tmp_path, dtype=dtype, **SMALL)
    checkpoint = Checkpoint(tmp_path)
    assert_same_bits(all_tensors(checkpoint), load_file(tmp_path / SINGLE_FILE))
    assert (
        checkpoint.dense_dtype
        == checkpoint.expert_numbers.dtype
        == str(dtype).removeprefix("torch.")
    )
    assert checkpoint.nbytes == (tmp_path / SINGLE_FILE).stat().st_size


def test_shards_hold_the_same_checkpoint_as_the_single_file(
    single_file: Path, many_files: Path
) -> None:
    assert len(list(many_files.glob("*.safetensors"))) > 2
    checkpoint = Checkpoint(many_files)
    assert_same_bits(all_tensors(checkpoint), load_file(single_file / SINGLE_FILE))
    assert checkpoint.config == Checkpoint(single_file).config


def test_each_tensor_keeps_its_own_dtype(single_copy: Path) -> None:
    router = "model.layers.0.mlp.gate.weight"

    def to_bfloat16_but_router(tensors: Tensors) -> None:
        for name in tensors.keys() - {router}:
            tensors[name] = tensors[name].to(torch.bfloat16)

    change_tensors(single_copy / SINGLE_FILE, to_bfloat16_but_router)
    assert_same_bits(all_tensors(Checkpoint(single_copy)), load_file(single_copy / SINGLE_FILE))


@pytest.mark.parametrize("family", FAMILIES)
def test_both_expert_layouts_give_the_same_bits(tmp_path: Path, family: str) -> None:
    make_checkpoint(tmp_path, family, dtype=torch.bfloat16, **SMALL)
    apart = all_tensors(Checkpoint(tmp_path))
    fuse_experts(tmp_path)
    assert any(name.endswith("gate_up_proj") for name in load_file(tmp_path / SINGLE_FILE))
    assert_same_bits(all_tensors(Checkpoint(tmp_path)), apart)


def test_files_are_the_weights_and_what_the_bundle_takes_over(many_files: Path) -> None:
    names = {path.name for path in Checkpoint(many_files).files}
    shards = {path.name for path in many_files.glob("*.safetensors")}
    carried = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    assert names == shards | carried


def test_shard_that_the_index_does_not_name_is_not_read(many_copy: Path) -> None:
    (many_copy / "stray.safetensors").write_bytes(b"not safetensors at all")
    assert "stray.safetensors" not in {path.name for path in Checkpoint(many_copy).files}


def test_weights_in_both_forms_are_refused(many_files: Path, single_copy: Path) -> None:
    """transformers would take the single file, others the index: they may be of two versions."""
    assert SINGLE_FILE not in {path.name for path in many_files.iterdir()}
    for path in many_files.glob("model*"):
        shutil.copyfile(path, single_copy / path.name)
    message = refusal(single_copy)
    assert f"there are both {SINGLE_FILE} and {INDEX_FILE}" in message


def test_single_file_that_an_index_names_is_read_with_its_side_car(single_copy: Path) -> None:
    tensors = load_file(single_copy / SINGLE_FILE)
    save_file({QUERY: tensors[QUERY]}, single_copy / "side-car.safetensors")
    change_tensors(single_copy / SINGLE_FILE, lambda t: t.pop(QUERY))
    files = dict.fromkeys(tensors, SINGLE_FILE) | {QUERY: "side-car.safetensors"}
    (single_copy / INDEX_FILE).write_text(json.dumps({"weight_map": files}))
    assert_same_bits(all_tensors(Checkpoint(single_copy)), tensors)


def add_mtp_layer(folder: Path, names: Sequence[str] = ()) -> Sequence[str]:
    """Layers behind the last one, as DeepSeek-V3 and GLM-4.5 have them; of another dtype."""
    names = names or [
        f"model.layers.2.{name}" for name in ("eh_proj.weight", "mlp.experts.0.up_proj.weight")
    ]
    added = {name: torch.ones(4, 4, dtype=torch.float16) for name in names}
    change_tensors(folder / SINGLE_FILE, lambda tensors: tensors.update(added))
    return names


@pytest.mark.parametrize(
    "count", [{"num_nextn_predict_layers": 1}, {"num_mtp_modules": 3}, {"num_mtp_modules": 10**9}]
)
def test_tensors_of_multi_token_prediction_are_left_out_and_named(
    single_copy: Path, count: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    expected = load_file(single_copy / SINGLE_FILE)
    assert Checkpoint(single_copy).left_out == ()
    names = add_mtp_layer(single_copy)
    change_json(single_copy / "config.json", lambda c: c.update(count))
    with caplog.at_level("INFO"):
        checkpoint = Checkpoint(single_copy)
    assert checkpoint.left_out == tuple(sorted(names))
    assert_same_bits(all_tensors(checkpoint), expected)
    assert all(name in caplog.text for name in names)


@pytest.mark.parametrize("num_layers", [None, 0])
def test_layers_that_the_config_does_not_name_are_refused(
    single_copy: Path, num_layers: int | None
) -> None:
    names = add_mtp_layer(single_copy)
    change_json(
        single_copy / "config.json", lambda c: c.update(num_nextn_predict_layers=num_layers)
    )
    message = refusal(single_copy)
    assert all(repr(name) in message for name in names)


def test_multi_token_prediction_that_a_family_calls_by_other_names_is_left_out(
    tmp_path: Path,
) -> None:
    make_family(tmp_path, *CASES["ernie4_5_moe"])
    published = ("block.0.mlp.gate", "emb_norm.0", "hidden_norm.0", "linear_proj.0")
    names = [f"model.mtp_{name}.weight" for name in published]
    add_mtp_layer(tmp_path, names)
    assert Checkpoint(tmp_path).left_out == tuple(names)
    add_mtp_layer(tmp_path, ["model.mtp_other.0.weight"])
    assert "model.mtp_other.0.weight" in refusal(tmp_path)


@pytest.mark.parametrize("count", ["one", [1], -1, True, 1.0])
def test_a_count_of_predicting_layers_that_is_none_is_refused(
    single_copy: Path, count: object
) -> None:
    change_json(single_copy / "config.json", lambda c: c.update(num_nextn_predict_layers=count))
    assert f"config.json: num_nextn_predict_layers is {count!r}" in refusal(single_copy)


def test_buffers_of_old_exports_are_ignored(single_copy: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(single_copy / SINGLE_FILE, lambda t: t.update({name: torch.ones(12)}))
    assert name not in all_tensors(Checkpoint(single_copy))


# ---- tied and untied heads ------------------------------------------------------------------


def test_tied_head_need_not_be_stored(tied: Path) -> None:
    assert HEAD not in load_file(tied / SINGLE_FILE)
    assert HEAD not in all_tensors(Checkpoint(tied))


def test_tied_head_that_is_stored_and_equal_is_left_out(tied_copy: Path) -> None:
    change_tensors(
        tied_copy / SINGLE_FILE, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()})
    )
    assert HEAD not in all_tensors(Checkpoint(tied_copy))


@pytest.mark.parametrize(
    "head",
    [
        torch.ones(260, 32),
        torch.ones(261, 32),
        torch.ones(260, 32, dtype=torch.int8),
        torch.ones(260, 32).to(torch.float8_e4m3fn),
    ],
    ids=["other values", "other shape", "other dtype", "fp8"],
)
def test_tied_head_that_is_stored_and_different_is_refused(
    tied_copy: Path, head: torch.Tensor
) -> None:
    change_tensors(tied_copy / SINGLE_FILE, lambda tensors: tensors.update({HEAD: head}))
    message = refusal(tied_copy)
    for part in (SINGLE_FILE, repr(HEAD), repr(EMBEDDING), "tie_word_embeddings: true"):
        assert part in message


def test_absent_head_of_an_untied_model_is_refused_with_the_reason(single_copy: Path) -> None:
    change_tensors(single_copy / SINGLE_FILE, lambda tensors: tensors.pop(HEAD))
    message = refusal(single_copy)
    assert f"missing tensors: {HEAD!r}" in message
    assert "config.json says tie_word_embeddings: false" in message


# ---- tensors that are wrong -----------------------------------------------------------------

NAMELESS_EXPERT = EXPERT.replace("experts.2.", "experts.8.")

WRONG_TENSORS: Mapping[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "missing dense tensor": (lambda t: t.pop(QUERY), ["missing tensors", repr(QUERY)]),
    "missing expert": (lambda t: t.pop(EXPERT), ["missing tensors", repr(EXPERT)]),
    "unknown tensor": (
        lambda t: t.update(adapter=torch.ones(1)),
        ["tensors that the model does not have: 'adapter'"],
    ),
    "one expert too many": (
        lambda t: t.update({NAMELESS_EXPERT: t[EXPERT].clone()}),
        ["tensors that the model does not have", repr(NAMELESS_EXPERT)],
    ),
    "transposed dense tensor": (
        lambda t: t.update({"model.layers.0.self_attn.o_proj.weight": torch.ones(48, 32)}),
        [SINGLE_FILE, "'model.layers.0.self_attn.o_proj.weight' has shape [48, 32]", "[32, 48]"],
    ),
    "transposed expert": (
        lambda t: t.update({EXPERT: t[EXPERT].T.contiguous()}),
        [SINGLE_FILE, f"{EXPERT!r} has shape [32, 48], expected [48, 32]"],
    ),
    "flat norm": (
        lambda t: t.update({"model.norm.weight": torch.ones(1, 32)}),
        [SINGLE_FILE, "'model.norm.weight' has shape [1, 32], expected [32]"],
    ),
    "int8 dense tensor": (
        lambda t: t.update({QUERY: t[QUERY].to(torch.int8)}),
        [SINGLE_FILE, f"{QUERY!r} has dtype I8, supported are BF16, F16, F32"],
    ),
    "fp8 expert": (
        lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}),
        [SINGLE_FILE, f"{EXPERT!r} has dtype F8_E4M3, supported are BF16, F16, F32"],
    ),
    "double precision": (
        lambda t: t.update({QUERY: t[QUERY].to(torch.float64)}),
        [SINGLE_FILE, f"{QUERY!r} has dtype F64"],
    ),
    "experts of two dtypes": (
        lambda t: t.update({EXPERT: t[EXPERT].to(torch.bfloat16)}),
        ["matrices of routed experts have several dtypes: BF16, F32"],
    ),
    "both layouts at once": (
        lambda t: t.update(
            {
                "model.layers.1.mlp.experts.gate_up_proj": torch.ones(8, 96, 32),
                "model.layers.1.mlp.experts.down_proj": torch.ones(8, 32, 48),
            }
        ),
        ["tensors that the model does not have", "'model.layers.1.mlp.experts.0.down_proj.weight'"],
    ),
    "all problems at once": (
        lambda t: (t.pop(QUERY), t.update(adapter=torch.ones(1), **{EXPERT: torch.ones(2, 2)})),
        [repr(QUERY), "'adapter'", f"{EXPERT!r} has shape [2, 2]"],
    ),
}


@pytest.mark.parametrize(("change", "parts"), WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_wrong_tensor_is_refused_by_name(
    single_copy: Path, change: Callable[[Tensors], object], parts: list[str]
) -> None:
    change_tensors(single_copy / SINGLE_FILE, change)
    message = refusal(single_copy)
    assert str(single_copy) in message
    for part in parts:
        assert part in message


WRONG_FUSED: Mapping[str, tuple[Callable[[Tensors], object], list[str]]] = {
    "missing down projection": (
        lambda t: t.pop("model.layers.1.mlp.experts.down_proj"),
        ["missing tensors: 'model.layers.1.mlp.experts.down_proj'"],
    ),
    "missing gate and up projection": (
        lambda t: t.pop("model.layers.1.mlp.experts.gate_up_proj"),
        ["missing tensors", "'model.layers.1.mlp.experts.0.gate_proj.weight'"],
    ),
    "one expert too few": (
        lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": torch.ones(7, 96, 32)}),
        ["'model.layers.1.mlp.experts.gate_up_proj' has shape [7, 96, 32], expected [8, 96, 32]"],
    ),
    "transposed": (
        lambda t: t.update({"model.layers.1.mlp.experts.down_proj": torch.ones(8, 48, 32)}),
        ["'model.layers.1.mlp.experts.down_proj' has shape [8, 48, 32], expected [8, 32, 48]"],
    ),
    "int8": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.down_proj": torch.ones(8, 32, 48, dtype=torch.int8)}
        ),
        ["'model.layers.1.mlp.experts.down_proj' has dtype I8"],
    ),
    "two dtypes": (
        lambda t: t.update(
            {"model.layers.1.mlp.experts.down_proj": torch.ones(8, 32, 48, dtype=torch.float16)}
        ),
        ["matrices of routed experts have several dtypes: F16, F32"],
    ),
}


@pytest.mark.parametrize(("change", "parts"), WRONG_FUSED.values(), ids=WRONG_FUSED.keys())
def test_wrong_fused_tensor_is_refused_by_name(
    single_copy: Path, change: Callable[[Tensors], object], parts: list[str]
) -> None:
    fuse_experts(single_copy)
    change_tensors(single_copy / SINGLE_FILE, change)
    message = refusal(single_copy)
    for part in parts:
        assert part in message


def test_fused_experts_of_two_dtypes_are_refused_whatever_they_are_called(tmp_path: Path) -> None:
    """Granite's names hold no "experts"."""
    config = GraniteMoeConfig(**{**COMMON, **SMALL}, intermediate_size=48, num_local_experts=8)
    GraniteMoeForCausalLM(config).save_pretrained(tmp_path)
    assert Checkpoint(tmp_path).expert_numbers.dtype == "float32"
    name = "model.layers.1.block_sparse_moe.output_linear.weight"
    change_tensors(tmp_path / SINGLE_FILE, lambda t: t.update({name: t[name].to(torch.bfloat16)}))
    assert "matrices of routed experts have several dtypes: BF16, F32" in refusal(tmp_path)


def test_tensor_under_two_spellings_is_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "mixtral", **SMALL)
    names = ("model.layers.0.block_sparse_moe.gate.weight", "model.layers.0.mlp.gate.weight")
    change_tensors(
        tmp_path / SINGLE_FILE, lambda tensors: tensors.update({names[1]: tensors[names[0]] + 1})
    )
    assert f"tensors {names[0]!r}, {names[1]!r} are the same one, stored twice" in refusal(tmp_path)


# ---- files that are wrong -------------------------------------------------------------------


def test_tensor_in_two_shards_is_refused_with_both_places(many_copy: Path) -> None:
    home = shard_of(many_copy, QUERY)
    other = next(p for p in sorted(many_copy.glob("*.safetensors")) if p != home)
    query = load_file(home)[QUERY]
    change_tensors(other, lambda tensors: tensors.update({QUERY: query}))
    message = refusal(many_copy)
    assert QUERY in message
    assert other.name in message


def test_index_that_names_an_absent_file_is_refused_with_its_name(many_copy: Path) -> None:
    shard = shard_of(many_copy, QUERY)
    shard.unlink()
    message = refusal(many_copy)
    assert str(many_copy / INDEX_FILE) in message
    assert f"missing: {shard.name!r}" in message


def test_index_that_lists_a_tensor_which_is_not_there_is_refused(many_copy: Path) -> None:
    shard = shard_of(many_copy, QUERY)
    change_tensors(shard, lambda tensors: tensors.pop(QUERY))
    message = refusal(many_copy)
    assert "lists tensors that are not there" in message
    assert f"{QUERY} in {shard.name}" in message


def test_stored_tensor_that_the_index_does_not_list_is_refused(many_copy: Path) -> None:
    shard = shard_of(many_copy, QUERY)
    change_json(many_copy / INDEX_FILE, lambda index: index["weight_map"].pop(QUERY))
    assert f"does not list '{QUERY} in {shard.name}'" in refusal(many_copy)


@pytest.mark.parametrize(
    "name", ["../elsewhere.safetensors", "/etc/passwd", "sub/model.safetensors", ".."]
)
def test_index_that_leaves_the_folder_is_refused(many_copy: Path, name: str) -> None:
    change_json(many_copy / INDEX_FILE, lambda index: index["weight_map"].update({QUERY: name}))
    message = refusal(many_copy)
    assert str(many_copy / INDEX_FILE) in message
    assert repr(name) in message


@pytest.mark.parametrize("weight_map", [None, [], "model.safetensors", {QUERY: 1}])
def test_index_without_a_map_of_names_is_refused(many_copy: Path, weight_map: object) -> None:
    change_json(many_copy / INDEX_FILE, lambda index: index.update(weight_map=weight_map))
    assert f"{many_copy / INDEX_FILE}: 'weight_map' must map" in refusal(many_copy)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1],
        lambda data: data[: len(data) // 2],
        lambda data: data[:9],
        lambda data: data[:3],
        lambda data: b"",
        lambda data: data + b"\0",
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"!" + data[9:],
        lambda data: data.replace(b'"F32"', b'["F"]', 1),
    ],
    ids=[
        "a byte short",
        "half",
        "nine bytes",
        "three bytes",
        "empty",
        "a byte too long",
        "endless header",
        "header not JSON",
        "list as dtype",
    ],
)
def test_damaged_shard_is_refused_by_file(
    many_copy: Path, damage: Callable[[bytes], bytes]
) -> None:
    shard = shard_of(many_copy, QUERY)
    shard.write_bytes(damage(shard.read_bytes()))
    assert str(shard) in refusal(many_copy)


def test_pickles_are_named_and_never_read(single_copy: Path, tmp_path: Path) -> None:
    trap = tmp_path / "trap"

    class Trap:
        def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
            return Path.touch, (trap,)

    (single_copy / SINGLE_FILE).unlink()
    (single_copy / "pytorch_model.bin").write_bytes(pickle.dumps(Trap()))
    message = refusal(single_copy)
    assert f"no {SINGLE_FILE} and no {INDEX_FILE}" in message
    assert "'pytorch_model.bin', pickles are never read" in message
    assert not trap.exists()


def test_folder_without_weights_is_refused(single_copy: Path) -> None:
    (single_copy / SINGLE_FILE).unlink()
    assert f"{single_copy}: no {SINGLE_FILE} and no {INDEX_FILE}" in refusal(single_copy)


# ---- config.json ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "expected a JSON object, found list"),
        ("{}", "model_type None is not supported; known families are "),
        ('{"model_type": "llama"}', "model_type 'llama' is not supported"),
        ('{"model_type": ["mixtral"]}', "model_type ['mixtral'] is not supported"),
        ('{"model_type": "qwen3_moe"}', "hidden_size is missing"),
    ],
)
def test_malformed_config_is_refused_by_file(single_copy: Path, text: str, part: str) -> None:
    (single_copy / "config.json").write_bytes(text.encode("latin-1"))
    message = refusal(single_copy)
    assert str(single_copy / "config.json") in message
    assert part in message


def test_absent_config_is_refused_by_file(tmp_path: Path) -> None:
    assert f"{tmp_path / 'config.json'}: cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("fields", "part"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_local_experts": None}, "num_experts or num_local_experts or"),
        ({"hidden_size": "32"}, "hidden_size is '32', expected int"),
        ({"vocab_size": 260.0}, "vocab_size is 260.0, expected int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True, expected int"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected bool"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6', expected float"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0, must be positive"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0, must be positive"),
        (
            {"num_attention_heads": 0, "head_dim": None},
            "num_attention_heads is 0, must be positive",
        ),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads 2 is no multiple of num_key_value_heads 3",
        ),
        ({"head_dim": 23}, "head_dim 23"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 > 8 experts"),
        ({"mlp_only_layers": [0, 1]}, "no layer with routed experts"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
        ({"decoder_sparse_step": "2"}, "decoder_sparse_step"),
        ({"mlp_only_layers": [0], "intermediate_size": None}, "intermediate_size is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"quantization_config": "fp8"}, "quantization_config is 'fp8', expected an object"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "spiral"),
        ({"rope_parameters": {"rope_type": "llama3"}}, "'factor' is missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.0}}, "partial_rotary_factor 0.0"),
        ({"rope_parameters": ["default"]}, "rope_parameters"),
        ({"rope_parameters": None, "rope_theta": "1e6"}, "rope_theta"),
    ],
    ids=str,
)
def test_wrong_config_field_is_refused_by_name_and_value(
    single_copy: Path, fields: Mapping[str, Any], part: str
) -> None:
    change_json(single_copy / "config.json", lambda config: config.update(fields))
    message = refusal(single_copy)
    assert str(single_copy / "config.json") in message
    assert part in message


def test_rope_scaling_beside_rope_parameters_is_not_ignored(single_copy: Path) -> None:
    """Model cards say: add ``rope_scaling``. transformers then drops the ``rope_parameters`` that
    it wrote itself; taking the latter would give other frequencies without a word.
    """
    config = single_copy / "config.json"
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    change_json(config, lambda c: c.update(rope_scaling=scaling))
    assert "rope_parameters" in json.loads(config.read_text())
    with contextlib.suppress(CheckpointError):  # to refuse the contradiction is right as well
        both = Checkpoint(single_copy).config
        change_json(config, lambda c: c.pop("rope_parameters"))
        assert both == Checkpoint(single_copy).config


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
OLD_YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
SCALED: Mapping[str, Mapping[str, Any]] = {
    "rope_parameters": {"rope_parameters": {**YARN, "rope_theta": 777.0}},
    "rope_scaling": {"rope_parameters": None, "rope_theta": 777.0, "rope_scaling": YARN},
    "rope_scaling, type": {"rope_parameters": None, "rope_theta": 777.0, "rope_scaling": OLD_YARN},
    "both": {"rope_parameters": {"rope_theta": 777.0}, "rope_scaling": YARN},
}


@pytest.mark.parametrize("fields", SCALED.values(), ids=SCALED)
def test_yarn_is_the_same_in_every_spelling(single_copy: Path, fields: Mapping[str, Any]) -> None:
    config = single_copy / "config.json"
    plain = Checkpoint(single_copy).config.rope
    change_json(config, lambda c: c.update(SCALED["rope_parameters"]))
    expected = Checkpoint(single_copy).config.rope
    assert expected.attention_factor != plain.attention_factor == 1.0
    assert expected.inverse_frequencies != plain.inverse_frequencies
    change_json(config, lambda c: (c.pop("rope_parameters"), c.update(fields)))
    assert Checkpoint(single_copy).config.rope == expected


def test_config_that_disagrees_with_the_tensors_is_refused(single_copy: Path) -> None:
    change_json(single_copy / "config.json", lambda c: c.update(moe_intermediate_size=40))
    message = refusal(single_copy)
    assert f"{EXPERT!r} has shape [48, 32], expected [40, 32] from config.json" in message


def test_header_is_all_that_opening_reads(single_copy: Path) -> None:
    """A weight that is no number is found when it is quantized, not when headers are checked."""
    change_tensors(single_copy / SINGLE_FILE, lambda tensors: tensors[EXPERT].fill_(float("nan")))
    checkpoint = Checkpoint(single_copy)
    assert checkpoint.tensor(EXPERT).isnan().all()
    assert tuple(checkpoint.tensor(EXPERT).shape) == expert_shapes(checkpoint.config)["up_proj"]
    with safe_open(single_copy / SINGLE_FILE, framework="pt") as file:
        assert torch.equal(checkpoint.tensor(QUERY), file.get_tensor(QUERY))
