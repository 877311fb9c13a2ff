"""Targets that are fp8 or mxfp4 themselves: decoded as transformers does, their bytes kept."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from specter_build.architectures import ARCHITECTURES, StoredQuantization, read_quantization
from specter_build.checkpoint import Checkpoint
from specter_build.estimate import estimate
from specter_build.pipeline import build
from specter_build.recipe import Recipe
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import ExpertNumbers, RuntimeConfig
from specter_runtime.errors import BundleError, CheckpointError
from specter_runtime.experts import ExpertKey
from specter_runtime.model import bind
from specter_runtime.scaled import Fp8Matrix, Mxfp4Matrix
from specter_runtime.session import Session
from tests import oracles
from tests.checkpoints import (
    FAMILIES,
    edit_config,
    make_checkpoint,
    recipe_dict,
    store_fp8,
    store_mxfp4,
)
from tests.models import open_model
from tests.oracles import array
from tests.specter_build.test_more_families import LATENT, WIDE, make_family

BLOCK = (16, 8)
NUM_ROWS, GREEDY_TOKENS = 40, 64


def fp8(folder: Path, family: str, scale_dtype: torch.dtype, **overrides: Any) -> None:
    if family in FAMILIES:
        make_checkpoint(folder, family)
    else:
        make_family(folder, family, overrides)
    store_fp8(folder, BLOCK, scale_dtype)


def plain_experts(folder: Path) -> None:
    """Attention and dense MLP in fp8, routed experts in float32."""
    make_checkpoint(folder)
    plain = load_file(folder / "model.safetensors")
    store_fp8(folder, BLOCK)
    stored = load_file(folder / "model.safetensors")
    tensors = {
        name: plain.get(name, tensor) if ".experts." in name else tensor
        for name, tensor in stored.items()
        if not (".experts." in name and name.endswith("_scale_inv"))
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantization = json.loads((folder / "config.json").read_text())["quantization_config"]
    quantization["modules_to_not_convert"] = [f"model.layers.{i}.mlp.experts" for i in range(3)]
    edit_config(folder, quantization_config=quantization)


def mxfp4(folder: Path) -> None:
    shape = {"num_local_experts": 4, "intermediate_size": 96, "head_dim": 16, "sliding_window": 20}
    make_family(folder, "gpt_oss", shape)
    store_mxfp4(folder)


CASES: dict[str, Callable[[Path], None]] = {
    "qwen3_moe, scales in bf16": lambda folder: fp8(folder, "qwen3_moe", torch.bfloat16),
    "mixtral": lambda folder: fp8(folder, "mixtral", torch.float32),
    "deepseek_v3": lambda folder: fp8(
        folder, "deepseek_v3", torch.float32, **LATENT, q_lora_rank=16, n_group=4, topk_group=2
    ),
    "glm4_moe": lambda folder: fp8(
        folder, "glm4_moe", torch.float32, **WIDE, n_routed_experts=8, head_dim=16
    ),
    "qwen3_moe, experts in float32": plain_experts,
    "gpt_oss, mxfp4": mxfp4,
}


@pytest.fixture(scope="module", params=CASES)
def quantized(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quantized")
    CASES[request.param](folder)
    return folder


def reference_model(folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """What transformers makes of the checkpoint where there is no arithmetic for its dtypes."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, experts_implementation="eager"
    )
    assert not any(p.dtype in (torch.uint8, torch.float8_e4m3fn) for p in model.parameters())
    return model.to(dtype).eval()


def root_mean_square(values: Any) -> float:
    return float(np.sqrt((values**2).mean()))


# ---- numbers ----------------------------------------------------------------------------------


def test_every_fp8_code_is_what_its_bits_say_times_its_blocks_scale() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    scales = torch.rand(6, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    decoded = Fp8Matrix(codes.view(torch.float8_e4m3fn), scales, (3, 7)).to(torch.float32)
    for i in range(16):
        for j in range(16):
            value, scale = oracles.e4m3(int(codes[i, j])), float(scales[i // 3, j // 7])
            expected = np.float32(value * scale)  # exact in float64: 4 and 24 significant bits
            assert decoded[i, j].item() == expected or np.isnan(expected) == decoded[i, j].isnan()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_fp4_code_is_exact_under_every_exponent(dtype: torch.dtype) -> None:
    # 255 is not a number (OCP MX v1.0, 5.4.1); 6 * 2 ** 125 is the last that does not overflow
    exponents = torch.arange(2, 253, dtype=torch.uint8)
    codes = torch.randint(
        0, 256, (251, 1, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )
    codes[:, 0, :8] = torch.tensor([0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE])  # all sixteen
    decoded = Mxfp4Matrix(codes, exponents.unsqueeze(1)).to(dtype)
    assert decoded.shape == (251, 32)
    for row, exponent in enumerate(exponents.tolist()):
        for column in range(32):
            byte = int(codes[row, 0, column // 2])
            value = oracles.e2m1(byte >> 4 if column % 2 else byte & 0xF)
            assert decoded[row, column].item() == value * oracles.e8m0(exponent)


# ---- against transformers -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dense_weights_and_experts_are_those_of_transformers(
    quantized: Path, dtype: torch.dtype
) -> None:
    reference = reference_model(quantized, dtype).state_dict()
    opened, checkpoint = open_model(quantized, dtype), Checkpoint(quantized)
    compared = 0
    for layer in checkpoint.config.moe_layers:
        gate_up = reference[f"model.layers.{layer}.mlp.experts.gate_up_proj"]
        down = reference[f"model.layers.{layer}.mlp.experts.down_proj"]
        for expert in range(checkpoint.config.num_experts):
            weights = opened.weights[ExpertKey(layer, expert)].to(dtype)
            theirs, their_down = gate_up[expert], down[expert]
            if checkpoint.config.model_type == "gpt_oss":
                theirs, their_down = theirs.T, their_down.T
                gate, up = theirs[::2], theirs[1::2]
            else:
                gate, up = theirs.chunk(2)
            assert torch.equal(weights.gate_proj, gate)
            assert torch.equal(weights.up_proj, up)
            assert torch.equal(weights.down_proj, their_down)
            compared += 1
    assert compared >= 8


def test_logits_equal_those_of_transformers_up_to_rounding(quantized: Path) -> None:
    reference = reference_model(quantized, torch.float32)
    token_ids = torch.randint(0, 256, (NUM_ROWS,), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        theirs = array(reference(token_ids[None]).logits[0])
        exact = array(reference.double()(token_ids[None]).logits[0])
    opened = open_model(quantized)
    # The weights are the same to the bit (above); see test_more_families for the factor of two.
    their_error = root_mean_square(theirs - exact)
    ours = array(opened.rows(token_ids.tolist(), opened.cache(NUM_ROWS)))
    assert root_mean_square(ours - exact) < 2 * their_error
    assert their_error < 1e-5 * root_mean_square(exact)  # else this could not fail


def test_a_bundle_keeps_the_bytes_and_decodes_transformers_greedy_tokens(
    quantized: Path, tmp_path: Path
) -> None:
    (tmp_path / "text.txt").write_text("def calibrate(text):\n    return text\n" * 8)
    recipe = recipe_dict(
        quantized,
        tmp_path / "bundle",
        calibration={"files": ["text.txt"], "num_sequences": 2, "sequence_length": 32},
        plan={"memory_budget": "8MiB", "dtype": "float32", "max_context_tokens": 128},
    )
    expected_size = estimate(Recipe.model_validate(recipe), quantized).bundle_bytes
    build(Recipe.model_validate(recipe), tmp_path)
    bundle, stored = load_bundle(tmp_path / "bundle"), load_file(quantized / "model.safetensors")
    sources = Checkpoint(quantized)
    found = dict(bundle.dense_tensors())
    sizes = bundle.json_file("report.json")["sizes"]
    assert sizes["dense_bytes"] == sum(tensor.nbytes for tensor in found.values())
    for layer in sources.config.moe_layers:
        for expert in range(sources.config.num_experts):
            found |= load_file(bundle.shard_file(ExpertKey(layer, expert)))
    if bundle.manifest.experts.numbers.dtype == "mxfp4":
        first = "model.layers.0.mlp.experts."
        for part, suffix in ((0, "gate_proj.weight"), (1, "up_proj.weight")):
            for kind in ("_blocks", "_scales"):
                fused = stored[f"{first}gate_up_proj{kind}"][3, part::2]
                assert torch.equal(found[f"{first}3.{suffix}{kind}"], fused)
    else:
        assert found.keys() == stored.keys()
        for name, tensor in stored.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8)), name
    # JSON and the headers' padding aside, what was announced
    names = [name for name in bundle.manifest.files if name.endswith(".safetensors")]
    names.remove("routes.safetensors")
    written = sum(bundle.manifest.files[name].nbytes for name in names)
    assert 0.95 * expected_size < written <= expected_size + 4096 * (len(names) + 1)
    prompt = list(b"def main(")
    with Session.open(tmp_path / "bundle") as session:
        memory = session.memory
    scarce = RuntimeConfig(
        memory_budget_bytes=memory.used_bytes - (memory.num_slots - 4) * memory.slot_bytes,
        num_draft_tokens=4,
        bound_by_slots=False,
    )
    with Session.open(tmp_path / "bundle", scarce) as session:
        tokens = list(session.generate_ids(prompt, GREEDY_TOKENS, stop_at_eos=False))
        assert session.num_draft_tokens == 4
        assert session.stats.cache.misses > 0
    with torch.no_grad():
        ids = torch.tensor([prompt + tokens])
        logits = reference_model(quantized, torch.float32)(ids).logits[0]
    assert tokens == logits.argmax(-1)[len(prompt) - 1 : -1].tolist()
    assert len(set(tokens)) > 4  # else there would be little to compare


def test_blocks_that_are_cut_off_at_the_edge_are_read(tmp_path: Path) -> None:
    # DeepSeek-V3 has such: 576 rows of kv_a_proj_with_mqa in blocks of 128. transformers cannot.
    make_checkpoint(tmp_path)
    plain = open_model(tmp_path)
    store_fp8(tmp_path, (40, 28))
    assert Checkpoint(tmp_path).config.fp8_block_size == (40, 28)
    opened = open_model(tmp_path)
    for key, weights in plain.weights.items():
        exact, decoded = weights.to(torch.float32), opened.weights[key].to(torch.float32)
        # 3 fraction bits: half a step is 2 ** -4 of the value, or half the smallest code, 2 ** -10
        # times the scale (at most largest weight / 448), where codes are subnormal.
        bound = exact.down_proj.abs() * 2**-4 + exact.down_proj.abs().max() / 448 * 2**-10
        assert bool(((decoded.down_proj - exact.down_proj).abs() <= bound * (1 + 2**-20)).all())
    name = "model.layers.1.self_attn.k_proj.weight"  # 48 rows of 64
    codes, scales = opened.dense_tensors[name], opened.dense_tensors[f"{name}_scale_inv"]
    assert (codes.shape, scales.shape) == ((48, 64), (2, 3))
    tensors = load_file(tmp_path / "model.safetensors")
    bound_dense = bind(
        opened.config, 1, tensors, ARCHITECTURES["qwen3_moe"].bundle_names(), torch.float32
    )
    bits = codes.view(torch.uint8)
    for i, j in itertools.product(range(48), range(64)):
        value = oracles.e4m3(int(bits[i, j])) * float(scales[i // 40, j // 28])
        assert bound_dense["k_proj"][i, j].item() == np.float32(value)


# ---- what is read -------------------------------------------------------------------------------

PUBLISHED: dict[str, tuple[str, dict[str, Any], StoredQuantization]] = {
    "DeepSeek-V3": (
        "deepseek_v3",
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        StoredQuantization("fp8", (128, 128)),
    ),
    "Qwen3-30B-A3B-FP8": (
        "qwen3_moe",
        {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
        StoredQuantization("fp8", (128, 128)),
    ),
    "MiniMax-M2": (
        "minimax_m2",
        {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        StoredQuantization("fp8", (128, 128)),
    ),
    "saved by transformers": (
        "deepseek_v3",
        {
            "activation_scheme": "dynamic",
            "act_per_tensor": False,
            "dequantize": False,
            "fmt": "e4m3",
            "modules_to_not_convert": None,
            "quant_method": "fp8",
            "scale_fmt": "float",
            "weight_block_size": [128, 128],
            "weight_per_tensor": False,
        },
        StoredQuantization("fp8", (128, 128)),
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
            "quant_method": "mxfp4",
        },
        StoredQuantization("mxfp4"),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read(name: str) -> None:
    family, quantization, expected = PUBLISHED[name]
    raw = {"quantization_config": quantization}
    assert read_quantization(raw, ARCHITECTURES[family]) == expected


# ---- what is refused ----------------------------------------------------------------------------


def edit_tensors(folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


SCALE = "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"


@pytest.mark.parametrize(
    ("edit", "messages"),
    [
        (lambda t: t.pop(SCALE), ["missing tensors", SCALE]),
        (lambda t: t.update({SCALE: t[SCALE][:1].clone()}), [SCALE, "has shape [1, 8]"]),
        (lambda t: t.update({SCALE: t[SCALE].half()}), ["scales of routed experts", "F16, F32"]),
        (
            lambda t: t.update({SCALE.removesuffix("_scale_inv"): torch.zeros(48, 64)}),
            ["tensors that the model does not have", SCALE],
        ),
        (
            lambda t: t.update({"lm_head.weight_scale_inv": torch.ones(1, 1)}),
            ["tensors that the model does not have", "lm_head.weight_scale_inv"],
        ),
    ],
    ids=["no scale", "wrong shape", "another dtype", "a plain matrix", "a scale too many"],
)
def test_scales_that_do_not_go_with_their_matrices_are_refused(
    tmp_path: Path, edit: Callable[[dict[str, torch.Tensor]], None], messages: list[str]
) -> None:
    make_checkpoint(tmp_path)
    store_fp8(tmp_path, BLOCK)
    edit_tensors(tmp_path, edit)
    with pytest.raises(CheckpointError) as raised:
        Checkpoint(tmp_path)
    for message in messages:
        assert message in str(raised.value)


def test_embeddings_in_fp8_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    store_fp8(tmp_path, BLOCK)
    name = "model.embed_tokens.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn)}))
    with pytest.raises(CheckpointError, match=f"'{name}' has dtype F8_E4M3, supported are BF16"):
        Checkpoint(tmp_path)


def test_fp8_matrices_that_the_config_knows_nothing_of_are_refused(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    store_fp8(tmp_path, BLOCK)
    edit_config(tmp_path, quantization_config=None)
    with pytest.raises(CheckpointError, match="has dtype F8_E4M3, supported are BF16"):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("family", "quantization", "message"),
    [
        ("qwen3_moe", {"quant_method": "fp8"}, "weight_block_size is None"),
        ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [128]}, r"is \[128\]"),
        ("qwen3_moe", {"quant_method": "fp8", "weight_block_size": [0, 1]}, r"is \[0, 1\]"),
        (
            "qwen3_moe",
            {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "static"},
            "quantization_config.activation_scheme is 'static'",
        ),
        (
            "qwen3_moe",
            {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e5m2"},
            "quantization_config.fmt is 'e5m2'",
        ),
        (
            "qwen3_moe",
            {"quant_method": "fp8", "weight_block_size": [8, 8], "kv_cache_scheme": {"bits": 8}},
            "quantization_config.kv_cache_scheme is",
        ),
        (
            "qwen3_moe",
            {"quant_method": "fp8", "weight_block_size": [8, 8], "weight_per_tensor": True},
            "quantization_config.weight_per_tensor is True",
        ),
        ("qwen3_moe", {"quant_method": "mxfp4"}, "quant_method 'mxfp4' is not supported for qwen3"),
        ("mixtral", {"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'"),
        ("mixtral", {"quant_method": "awq", "bits": 4}, "another tool's approximation"),
        ("mixtral", {"quant_method": "compressed-tensors"}, "can be the draft: name the original"),
    ],
)
def test_other_quantizations_of_a_target_are_refused_with_the_reason(
    tmp_path: Path, family: str, quantization: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path, family)
    edit_config(tmp_path, quantization_config=quantization)
    with pytest.raises(CheckpointError, match=message):
        Checkpoint(tmp_path)


def test_a_dry_run_from_the_config_alone_knows_the_shards_size(tmp_path: Path) -> None:
    mxfp4(tmp_path / "full")
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare/config.json").write_bytes((tmp_path / "full/config.json").read_bytes())
    edit_config(tmp_path / "bare", dtype="float32")
    recipe = recipe_dict(tmp_path / "full", tmp_path / "bundle", plan={"memory_budget": "16MiB"})
    full, bare = (
        estimate(Recipe.model_validate(recipe), tmp_path / name) for name in ("full", "bare")
    )
    assert full.expert_numbers == bare.expert_numbers == ExpertNumbers("mxfp4", None, "float32")
    assert full.memory == bare.memory


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_dtype": None}, "'experts.numbers.scale_dtype' is None"),
        ({"bias_dtype": "float32"}, "'experts.numbers.bias_dtype' is 'float32'"),
        ({"dtype": "bfloat16"}, "'experts.numbers.scale_dtype' is 'float32'"),
        ({}, "experts in fp8 need 'model.fp8_block_size'"),
    ],
    ids=str,
)
def test_a_manifest_whose_numbers_do_not_fit_together_is_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    make_checkpoint(tmp_path / "checkpoint")
    store_fp8(tmp_path / "checkpoint", BLOCK)
    (tmp_path / "text.txt").write_text("def calibrate(text):\n    return text\n" * 8)
    recipe = recipe_dict(
        tmp_path / "checkpoint",
        tmp_path / "bundle",
        calibration={"files": ["text.txt"], "num_sequences": 1, "sequence_length": 32},
    )
    build(Recipe.model_validate(recipe), tmp_path)
    path = tmp_path / "bundle/manifest.json"
    manifest = json.loads(path.read_text())
    manifest["experts"]["numbers"] |= change
    if not change:
        manifest["model"]["fp8_block_size"] = None
    path.write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=message):
        load_bundle(tmp_path / "bundle")
