"""A compressed-tensors checkpoint as the draft: written by compressed-tensors, read by us."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specter_build.checkpoint import Checkpoint
from specter_build.given_draft import GivenDraft
from specter_build.pipeline import build
from specter_build.quantizers import GridFormat
from specter_build.recipe import Recipe
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.errors import CheckpointError, RecipeError
from specter_runtime.experts import ExpertKey
from specter_runtime.packed import dequantize
from tests.checkpoints import make_checkpoint, recipe_dict

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("compressed_tensors") is None,
    reason="NOT TESTED: given drafts. compressed-tensors is not installed; pip install -e '.[dev]'",
)
GROUP_SIZE = 16
STEM = "model.layers.1.mlp.experts.3.up_proj"


def scheme_of(symmetric: bool) -> Any:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    weights = QuantizationArgs(
        num_bits=4, type="int", symmetric=symmetric, strategy="group", group_size=GROUP_SIZE
    )
    return QuantizationScheme(targets=["Linear"], weights=weights)


def write_quantized(
    source: Path,
    folder: Path,
    symmetric: bool = True,
    scale_dtype: torch.dtype = torch.bfloat16,
    gain: float = 1.0,
) -> dict[str, torch.Tensor]:
    """Quantize the routed experts of a checkpoint; returns what compressed-tensors makes of them.

    Args:
        source: the checkpoint.
        folder: where the quantized one goes.
        symmetric: of the quantization.
        scale_dtype: of the scales as stored.
        gain: multiplies all weights first.
    """
    from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization.utils import calculate_qparams

    scheme, tensors, expected = scheme_of(symmetric), {}, {}
    for name, weight in load_file(source / "model.safetensors").items():
        if ".experts." not in name:
            tensors[name] = weight
            continue
        groups = (weight * gain).view(weight.shape[0], -1, GROUP_SIZE)
        scales, zero_points = calculate_qparams(groups.amin(-1), groups.amax(-1), scheme.weights)
        state = {"weight": weight * gain, "weight_scale": scales.to(scale_dtype)}
        state["weight_zero_point"] = zero_points.to(torch.int8)
        packed = PackedQuantizationCompressor.compress(state, scheme)
        tensors |= {f"{name.removesuffix('weight')}{key}": t for key, t in packed.items()}
        wide = packed | {"weight_scale": packed["weight_scale"].to(torch.float32)}
        expected[name] = PackedQuantizationCompressor.decompress(wide, scheme)["weight"]
    shutil.copytree(source, folder)
    save_file({k: t.contiguous() for k, t in tensors.items()}, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"weights": scheme.weights.model_dump(mode="json")}},
    }
    (folder / "config.json").write_text(json.dumps(config))
    return expected


def recipe_of(checkpoint: Path, source: Path, output: Path, **keys: Any) -> Recipe:
    keys = {"method": "given", "from": str(source), "group_size": GROUP_SIZE} | keys
    return Recipe.model_validate(recipe_dict(checkpoint, output, draft=keys))


@pytest.mark.parametrize("symmetric", [True, False])
def test_given_weights_are_in_the_bundle_exactly(
    tiny_checkpoint: Path, tmp_path: Path, symmetric: bool
) -> None:
    expected = write_quantized(tiny_checkpoint, tmp_path / "w4a16", symmetric)
    recipe = recipe_of(
        tiny_checkpoint, tmp_path / "w4a16", tmp_path / "bundle", symmetric=symmetric
    )
    report = build(recipe, tmp_path).report
    assert report["draft"]["method"] == "given"
    assert report["draft"]["from"] == "w4a16"
    assert 0 < report["relative_quantization_error"] < 0.05
    bundle, checkpoint = load_bundle(tmp_path / "bundle"), Checkpoint(tiny_checkpoint)
    for key, expert in bundle.draft_experts().items():
        for role, name in checkpoint.matrix_names(key).items():
            part = dequantize(getattr(expert, role), torch.float32)
            assert torch.equal(part, expected[name]), name
    assert {"draft/config.json", "draft/model.safetensors"} < bundle.manifest.source_files.keys()


def open_given(checkpoint: Path, folder: Path, form: GridFormat | None = None) -> GivenDraft:
    opened = Checkpoint(checkpoint)
    form = form or GridFormat(4, GROUP_SIZE, True)
    return GivenDraft(folder, opened.config, opened.matrix_names, form)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (GridFormat(4, 32, True), "group_0: group_size is 16, expected 32"),
        (GridFormat(4, 16, False), "group_0: symmetric is True, expected False"),
    ],
)
def test_form_that_is_not_the_recipes_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, form: GridFormat, message: str
) -> None:
    write_quantized(tiny_checkpoint, tmp_path / "w4a16")
    with pytest.raises(CheckpointError, match=message):
        open_given(tiny_checkpoint, tmp_path / "w4a16", form)


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, changes: dict[str, torch.Tensor | None]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path) | changes
    save_file({name: t for name, t in tensors.items() if t is not None}, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rms_norm_eps": 1e-3}, "describes another model"),
        ({"quantization_config": None}, "no quantization by compressed-tensors"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            "no quantization by compressed-tensors",
        ),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "x"}},
            "quantization format 'x', expected 'pack-quantized'",
        ),
    ],
)
def test_config_that_does_not_fit_is_refused(
    tiny_checkpoint: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    write_quantized(tiny_checkpoint, tmp_path / "w4a16")
    edit_config(tmp_path / "w4a16", **changes)
    with pytest.raises(CheckpointError, match=message):
        open_given(tiny_checkpoint, tmp_path / "w4a16")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{STEM}.weight_scale": None}, f"{STEM}.weight_scale is missing"),
        (
            {f"{STEM}.weight_packed": torch.zeros(48, 7, dtype=torch.int32)},
            f"{STEM}.weight_packed has shape [48, 7], expected [48, 8]",
        ),
        (
            {f"{STEM}.weight_g_idx": torch.zeros(64, dtype=torch.int32)},
            f"{STEM}.weight_g_idx: groups in activation order are not supported",
        ),
    ],
)
def test_tensor_that_is_missing_or_does_not_fit_is_named(
    tiny_checkpoint: Path,
    tmp_path: Path,
    changes: dict[str, torch.Tensor | None],
    message: str,
) -> None:
    write_quantized(tiny_checkpoint, tmp_path / "w4a16")
    edit_tensors(tmp_path / "w4a16", changes)
    with pytest.raises(CheckpointError) as caught:
        open_given(tiny_checkpoint, tmp_path / "w4a16")
    assert message in str(caught.value)


def test_stored_shape_is_compared(tiny_checkpoint: Path, tmp_path: Path) -> None:
    write_quantized(tiny_checkpoint, tmp_path / "w4a16")
    edit_tensors(tmp_path / "w4a16", {f"{STEM}.weight_shape": torch.tensor([48, 63])})
    given = open_given(tiny_checkpoint, tmp_path / "w4a16")
    with pytest.raises(ValueError, match=r"up_proj: .*weight_shape is not \[48, 64\]"):
        given.parts(ExpertKey(1, 3))


def test_scales_that_bfloat16_does_not_hold_are_refused(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    write_quantized(tiny_checkpoint, tmp_path / "w4a16", scale_dtype=torch.float16)
    recipe = recipe_of(tiny_checkpoint, tmp_path / "w4a16", tmp_path / "bundle")
    message = r"layer 0, expert 0, gate_proj: .* bfloat16 does not hold exactly"
    with pytest.raises(CheckpointError, match=message):
        build(recipe, tmp_path)


@pytest.mark.parametrize("fault", ["other weights", "rescaled"])
def test_weights_that_are_not_the_targets_are_refused(
    tiny_checkpoint: Path, tmp_path: Path, fault: str
) -> None:
    source, gain = tiny_checkpoint, 1.5
    if fault == "other weights":
        source, gain = tmp_path / "other", 1.0
        make_checkpoint(source, seed=1)
    write_quantized(source, tmp_path / "w4a16", gain=gain)
    recipe = recipe_of(tiny_checkpoint, tmp_path / "w4a16", tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"layer 0, expert 0, gate_proj: .* far from the"):
        build(recipe, tmp_path)


def test_folder_that_is_not_there_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    recipe = recipe_of(tiny_checkpoint, tmp_path / "absent", tmp_path / "bundle")
    with pytest.raises(RecipeError, match=r"draft\.from: .*absent is no folder"):
        build(recipe, tmp_path)
