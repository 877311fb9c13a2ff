"""Quantizers that look at data, and widths by expert: against the papers, and through a build."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specter_build.calibrated_quantizers import (
    DAMPENING,
    hessian,
    quantize_gptq,
    search_awq_scales,
)
from specter_build.checkpoint import Checkpoint
from specter_build.estimate import build_nbytes
from specter_build.pipeline import build
from specter_build.quantize_draft import ExpertInputs, check_method, quantize_layer
from specter_build.quantizers import GridFormat, choose_grid, round_to_nearest, squared_errors
from specter_build.recipe import DraftRecipe, Recipe
from specter_runtime.bundle_loader import load_bundle
from specter_runtime.config import ExpertNumbers, ModelConfig
from specter_runtime.errors import CheckpointError, RecipeError
from specter_runtime.experts import ExpertKey, ExpertWeights, PackedExpert, Routing, matrix_shapes
from specter_runtime.layers import swiglu, swiglu_inner
from specter_runtime.memory import draft_nbytes
from specter_runtime.packed import PackedTensor, dequantize, packed_nbytes, unpack_codes
from tests.checkpoints import recipe_dict
from tests.models import same_bits
from tests.oracles import array, gamma, gptq_targets
from tests.runtime.test_memory import peak_allocated_bytes

needs_llmcompressor = pytest.mark.skipif(
    importlib.util.find_spec("llmcompressor") is None,
    reason="NOT TESTED: gptq and awq. llmcompressor is not installed; pip install -e '.[dev]'",
)
FORMATS = [GridFormat(bits, 16, symmetric) for bits in (2, 3, 4, 8) for symmetric in (True, False)]


def correlated_rows(num_rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """Inputs ``[n, M]`` whose channels differ in size and share a few directions."""
    generator = torch.Generator().manual_seed(seed)
    independent = torch.randn(num_rows, width, generator=generator)
    shared = torch.randn(num_rows, 4, generator=generator)
    mixed = independent + shared @ torch.randn(4, width, generator=generator) / 2
    return mixed * (0.5 + torch.rand(width, generator=generator))


def random_weight(num_rows: int, num_columns: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_columns, generator=generator) / num_columns**0.5


def output_error(weight: torch.Tensor, packed: PackedTensor, rows: torch.Tensor) -> float:
    """Squared error of the products with the rows."""
    difference = dequantize(packed, torch.float32).double() - weight.double()
    return float((rows.double() @ difference.T).pow(2).sum())


def wide_grid(packed: PackedTensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point of every weight ``[N, M]``, float64."""
    zero_points = packed.zero_points
    if zero_points is None:
        zero_points = torch.full_like(packed.scales, 1 << (packed.bits - 1))
    return tuple(  # type: ignore[return-value]
        part.double().repeat_interleave(packed.group_size, dim=1)[:, : packed.shape[1]]
        for part in (packed.scales, zero_points)
    )


# Ranges clipped to the least squared error


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_columns", [48, 40, 5])
def test_clipped_range_never_has_a_larger_squared_error(form: GridFormat, num_columns: int) -> None:
    """Group by group: the full range is one of the candidates.

    Candidates are compared by float32 sums of g squares of differences: off by at most gamma(g + 2)
    of the larger sum, on either side.
    """
    weight = random_weight(32, num_columns)
    plain = round_to_nearest(weight, form)
    clipped = round_to_nearest(weight, replace(form, clip="mse"))
    for start in range(0, num_columns, form.group_size):
        group = slice(start, start + form.group_size)
        errors = [
            (dequantize(packed, torch.float64)[:, group] - weight[:, group].double()).pow(2).sum(1)
            for packed in (plain, clipped)
        ]
        assert (errors[1] <= errors[0] * (1 + 2 * gamma(form.group_size + 2))).all()


@pytest.mark.parametrize("symmetric", [True, False])
def test_clipping_helps_a_group_with_an_outlier(symmetric: bool) -> None:
    """One weight of 1 among 31 of about 0.2: at 2 bits the full range rounds most of them to 0."""
    weight = random_weight(8, 32).sign() * 0.2
    weight[:, 0] = 1.0
    form = GridFormat(2, 32, symmetric)
    plain, _ = squared_errors(weight, round_to_nearest(weight, form))
    clipped, _ = squared_errors(weight, round_to_nearest(weight, replace(form, clip="mse")))
    assert clipped < plain


def test_clipped_grid_of_zeros_stays_zero() -> None:
    packed = round_to_nearest(torch.zeros(2, 32), GridFormat(3, 16, True, "mse"))
    assert not dequantize(packed, torch.float32).any()


# GPTQ


@needs_llmcompressor
@pytest.mark.parametrize("form", FORMATS)
def test_gptq_has_a_smaller_output_error_than_rounding_to_nearest(form: GridFormat) -> None:
    rows, weight = correlated_rows(512, 64), random_weight(48, 64)
    packed = quantize_gptq(weight, hessian(rows), form)
    assert packed is not None
    nearest = round_to_nearest(weight, form)
    assert output_error(weight, packed, rows) < 0.8 * output_error(weight, nearest, rows)


@needs_llmcompressor
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("num_columns", [160, 40])
def test_every_gptq_code_is_what_the_paper_rounds_to(form: GridFormat, num_columns: int) -> None:
    """160 columns are more than llm-compressor's block of 128, 40 leave a short last group.

    The oracle is given the codes chosen so far, so that a code at a rounding boundary does not
    change all that follow. What is compared is then a weight and a sum of at most M updates, each
    off by gamma(M + 4) of the magnitudes summed; and the updates are made of entries of the
    triangular factor of the inverse Hessian. Factorizing, inverting and factorizing again in
    float32 leaves these with a relative error of a few M times the condition number times the unit
    roundoff (Higham, Accuracy and Stability, theorems 10.3, 14.1 and 10.8; 4 covers the constants).
    """
    rows, weight = correlated_rows(8 * num_columns, num_columns), random_weight(24, num_columns)
    squares = hessian(rows)
    packed = quantize_gptq(weight, squares, form)
    assert packed is not None
    codes = array(unpack_codes(packed.codes, form.bits, num_columns))
    scales, zero_points = (part.numpy() for part in wide_grid(packed))
    targets, updates, sizes = gptq_targets(
        array(weight), array(squares), codes, scales, zero_points, DAMPENING
    )
    condition = np.linalg.cond(array(squares))
    tolerance = gamma(4 * num_columns) * condition * updates
    tolerance += gamma(num_columns + 4) * (updates + sizes)
    assert np.median(tolerance) < 0.1, "the bound is too loose to tell codes apart"
    distance = np.abs(targets.clip(0, (1 << form.bits) - 1) - codes)
    assert (distance <= 0.5 + tolerance).all()


@needs_llmcompressor
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("clip", ["none", "mse"])
def test_gptq_codes_stand_on_the_grid_that_is_stored(form: GridFormat, clip: Any) -> None:
    form = replace(form, clip=clip)
    weight = random_weight(16, 40)
    packed = quantize_gptq(weight, hessian(correlated_rows(200, 40)), form)
    assert packed is not None
    grid = choose_grid(weight, form)
    assert packed.scales.dtype == torch.bfloat16
    assert torch.equal(packed.scales, grid.scales)
    expected = None if form.symmetric else grid.zero_points.to(torch.uint8)
    assert (packed.zero_points is None) == (expected is None)
    assert expected is None or torch.equal(packed.zero_points, expected)  # type: ignore[arg-type]


@needs_llmcompressor
def test_gptq_rounds_weights_of_an_input_that_never_came() -> None:
    """llm-compressor on its own would set them to zero."""
    rows, weight, form = correlated_rows(200, 48), random_weight(16, 48), GridFormat(4, 16, True)
    rows[:, 7] = 0
    packed = quantize_gptq(weight, hessian(rows), form)
    assert packed is not None
    nearest = round_to_nearest(weight, form)
    same = dequantize(packed, torch.float32)[:, 7] == dequantize(nearest, torch.float32)[:, 7]
    assert same.all()


@needs_llmcompressor
def test_gptq_keeps_its_arguments_and_repeats_to_the_bit() -> None:
    rows, weight, form = correlated_rows(200, 48), random_weight(16, 48), GridFormat(3, 16, True)
    squares = hessian(rows)
    before = weight.clone(), squares.clone()
    first, second = (quantize_gptq(weight, squares, form) for _ in range(2))
    assert first is not None
    assert second is not None
    assert same_bits([weight, squares], list(before))
    assert same_bits([first.codes, first.scales], [second.codes, second.scales])


# One layer


CONFIG_LIMIT = 7.0


def random_expert(seed: int, width: int = 48, hidden: int = 32) -> ExpertWeights:
    return ExpertWeights(
        random_weight(width, hidden, seed),
        random_weight(width, hidden, seed + 100),
        random_weight(hidden, width, seed + 200),
    )


def layer_inputs(num_tokens: Sequence[int], swiglu_limit: float | None = None) -> ExpertInputs:
    """Rows of which ``num_tokens[e]`` go to expert e, with weights that differ."""
    chosen = torch.repeat_interleave(torch.arange(len(num_tokens)), torch.tensor(num_tokens))
    weights = torch.linspace(0.1, 1.0, len(chosen)).unsqueeze(-1)
    rows = correlated_rows(len(chosen), 32)
    return ExpertInputs(rows, Routing(2, chosen.unsqueeze(-1), weights), swiglu_limit)


def layer_of(num_experts: int) -> dict[ExpertKey, ExpertWeights]:
    return {ExpertKey(2, e): random_expert(e) for e in range(num_experts)}


def draft(**keys: Any) -> DraftRecipe:
    return DraftRecipe.model_validate({"bits": 3, "group_size": 16} | keys)


def tensors(expert: PackedExpert) -> list[torch.Tensor]:
    parts = (expert.gate_proj, expert.up_proj, expert.down_proj)
    return [tensor for part in parts for tensor in (part.codes, part.scales)]


@pytest.mark.parametrize("limit", [None, CONFIG_LIMIT])
@needs_llmcompressor
def test_each_matrix_is_calibrated_on_what_reaches_it(limit: float | None) -> None:
    """Rows of the expert, or their gated products, each times its routing weight; nothing else."""
    experts, inputs = layer_of(2), layer_inputs([200, 300], limit)
    layer = quantize_layer(experts, draft(method="gptq"), [3, 3], inputs)
    form = GridFormat(3, 16, True)
    for key, weights in experts.items():
        mine = inputs.routing.selected_experts[:, 0] == key.expert
        rows, row_weights = inputs.rows[mine], inputs.routing.routing_weights[mine]
        inner = swiglu_inner(rows, weights.gate_proj, weights.up_proj, limit=limit)
        for name, source in (("gate_proj", rows), ("up_proj", rows), ("down_proj", inner)):
            expected = quantize_gptq(getattr(weights, name), hessian(source * row_weights), form)
            assert expected is not None
            part = getattr(layer.packed[key], name)
            assert same_bits([part.codes, part.scales], [expected.codes, expected.scales])
    assert not layer.fallback_experts


@pytest.mark.parametrize("method", ["gptq", "awq"])
@needs_llmcompressor
def test_expert_that_too_few_tokens_reach_is_rounded_to_nearest_and_named(method: str) -> None:
    experts, inputs = layer_of(4), layer_inputs([100, 31, 0, 32])
    layer = quantize_layer(experts, draft(method=method, min_tokens=32), [3] * 4, inputs)
    rounded = quantize_layer(experts, draft(), [3] * 4, None)
    assert layer.fallback_experts == (1, 2)
    for key in experts:
        same = same_bits(tensors(layer.packed[key]), tensors(rounded.packed[key]))
        assert same == (key.expert in layer.fallback_experts)


@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@needs_llmcompressor
def test_input_that_is_not_finite_is_refused_by_layer_and_expert(method: str, value: float) -> None:
    experts, inputs = layer_of(2), layer_inputs([100, 100])
    inputs.rows[150, 3] = value
    with pytest.raises(CheckpointError, match=r"layer 2, expert 1, .*NaN or infinity"):
        quantize_layer(experts, draft(method=method), [3, 3], inputs)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq"])
@needs_llmcompressor
def test_weight_that_is_not_finite_is_refused_by_layer_expert_and_matrix(method: str) -> None:
    experts, inputs = layer_of(2), layer_inputs([100, 100])
    experts[ExpertKey(2, 1)].down_proj[3, 4] = float("nan")
    with pytest.raises(CheckpointError, match=r"layer 2, expert 1, .*down_proj: .*NaN or infinity"):
        quantize_layer(experts, draft(method=method), [3, 3], inputs)


def test_widths_are_those_asked_for_expert_by_expert() -> None:
    experts = layer_of(5)
    layer = quantize_layer(experts, draft(), [2, 0, 8, 3, 4], None)
    assert {key.expert: part.gate_proj.bits for key, part in layer.packed.items()} == {
        0: 2,
        2: 8,
        3: 3,
        4: 4,
    }
    for key, part in layer.packed.items():
        bits = part.gate_proj.bits
        expected = quantize_layer({key: experts[key]}, draft(bits=bits), [bits] * 5, None)
        assert same_bits(tensors(part), tensors(expected.packed[key]))


# AWQ


@needs_llmcompressor
def test_awq_moves_a_factor_from_up_to_down_and_nothing_else() -> None:
    """At 8 bits the expert still computes what it did: |error| is that of rounding to nearest."""
    weights = random_expert(0)
    inputs = layer_inputs([400])
    inner = swiglu_inner(inputs.rows, weights.gate_proj, weights.up_proj)
    form = GridFormat(8, 16, True)
    scales = search_awq_scales(weights.up_proj, weights.down_proj, inner, form)
    assert scales.shape == (48,)
    assert (scales > 0).all()
    assert scales.max() / scales.min() > 1.1, "a search that changes nothing shows nothing"
    expert = {ExpertKey(2, 0): weights}
    layer = quantize_layer(expert, draft(method="awq", bits=8), [8], inputs)
    plain = quantize_layer(expert, draft(bits=8), [8], None)
    outputs = [
        swiglu(inputs.rows, *(w.gate_proj, w.up_proj, w.down_proj))
        for w in (
            weights,
            layer.packed[ExpertKey(2, 0)].to(torch.float32),
            plain.packed[ExpertKey(2, 0)].to(torch.float32),
        )
    ]
    error, plain_error = (float((out - outputs[0]).norm()) for out in outputs[1:])
    assert error < 1.5 * plain_error
    same = (layer.packed[ExpertKey(2, 0)].gate_proj, plain.packed[ExpertKey(2, 0)].gate_proj)
    assert same_bits([same[0].codes, same[0].scales], [same[1].codes, same[1].scales])


@needs_llmcompressor
def test_awq_has_a_smaller_error_behind_down_proj_where_channels_differ() -> None:
    """A few channels thirty times as large as the others: what AWQ is for."""
    inner = correlated_rows(400, 48)
    inner[:, ::12] *= 30
    weights, form = random_expert(0), GridFormat(3, 16, True)
    scales = search_awq_scales(weights.up_proj, weights.down_proj, inner, form)
    plain = output_error(weights.down_proj, round_to_nearest(weights.down_proj, form), inner)
    scaled = round_to_nearest(weights.down_proj * scales, form)
    assert output_error(weights.down_proj * scales, scaled, inner / scales) < 0.8 * plain


def config_of(folder: Path, **changes: Any) -> ModelConfig:
    return replace(Checkpoint(folder).config, **changes)


def test_awq_is_refused_where_nothing_can_be_folded(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, swiglu_limit=CONFIG_LIMIT)
    with pytest.raises(RecipeError, match=r"draft\.method: awq .* not linear in up_proj"):
        check_method(draft(method="awq"), config)


def test_awq_is_refused_when_groups_do_not_divide(tiny_checkpoint: Path) -> None:
    with pytest.raises(RecipeError, match=r"draft\.group_size: .*moe_intermediate_size, 48"):
        check_method(draft(method="awq", group_size=32), config_of(tiny_checkpoint))


# Through a build


def recipe_of(checkpoint: Path, output: Path, **keys: Any) -> Recipe:
    return Recipe.model_validate(recipe_dict(checkpoint, output, draft=keys))


def bundle_bytes(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.name != "timings.json"
    }


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_missing_llmcompressor_is_told_before_any_work(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "llmcompressor"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "llmcompressor", None)  # type: ignore[arg-type]
    recipe = recipe_of(tiny_checkpoint, tmp_path / "bundle", method=method)
    with pytest.raises(RecipeError, match=r"pip install 'specter-moe\[quantize\]'"):
        build(recipe, tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("method", ["gptq", "awq"])
@needs_llmcompressor
def test_builds_repeat_to_the_byte_also_when_one_was_interrupted(
    tiny_checkpoint: Path, tmp_path: Path, method: str
) -> None:
    keys = {"method": method, "bits": 3, "min_tokens": 60}

    def stop(done: int, total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    bundles = []
    on_layers: list[Callable[[int, int], None]] = [lambda done, total: None, stop]
    for name, on_layer in zip("ab", on_layers, strict=True):
        output = tmp_path / name / "bundle"
        recipe = recipe_of(tiny_checkpoint, output, **keys)
        if on_layer is stop:
            with pytest.raises(KeyboardInterrupt):
                build(recipe, tmp_path, on_layer)
        result = build(recipe, tmp_path)
        assert result.was_built
        bundles.append(bundle_bytes(output))
    assert bundles[0] == bundles[1]
    report = json.loads(bundles[0]["report.json"])
    counts = {layer["layer"]: layer["expert_counts"] for layer in report["layers"]}
    rare = [[i, e] for i, row in counts.items() for e, count in enumerate(row) if count < 60]
    assert report["draft"]["fallback_experts"] == rare
    assert rare, "the case must have experts that fall back"


def test_mixed_widths_are_in_the_manifest_the_files_the_memory_and_the_report(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    overrides = [
        {"layers": [1], "experts": [0, 1, 2, 3, 4, 5, 6], "bits": 2},
        {"layers": "all", "experts": [7], "bits": 0},
        {"layers": [0, 2], "experts": [0, 5], "bits": 8},
    ]
    recipe = recipe_of(
        tiny_checkpoint, tmp_path / "bundle", bits={"default": 3, "overrides": overrides}
    )
    result = build(recipe, tmp_path)
    bundle = load_bundle(tmp_path / "bundle", verify_hashes=True)
    expected = ((8, 3, 3, 3, 3, 8, 3, 0), (2, 2, 2, 2, 2, 2, 2, 0), (8, 3, 3, 3, 3, 8, 3, 0))
    assert bundle.manifest.draft.bits == expected
    packed, config = bundle.draft_experts(), bundle.manifest.model
    assert {key: part.up_proj.bits for key, part in packed.items()} == {
        ExpertKey(layer, expert): bits
        for layer, row in enumerate(expected)
        for expert, bits in enumerate(row)
        if bits
    }
    nbytes = sum(
        packed_nbytes(shape, bits, 16, True)
        for row in expected
        for bits in row
        if bits
        for shape in matrix_shapes(config).values()
    )
    assert sum(part.nbytes for part in packed.values()) == nbytes
    assert draft_nbytes(config, expected, 16, True, ExpertNumbers("float32")) == nbytes
    assert result.report["sizes"]["draft_bytes"] == nbytes
    assert result.report["memory"]["draft_bytes"] == nbytes
    told = result.report["draft"]
    assert told["num_experts_by_bits"] == {"0": 3, "2": 7, "3": 10, "8": 4}
    num_weights = 24 * config.expert_num_weights
    assert told["bits_per_weight"] == pytest.approx(nbytes * 8 / num_weights, rel=1e-12)


def test_layer_without_any_stand_in_has_no_draft_file(
    tiny_checkpoint: Path, tmp_path: Path
) -> None:
    bits = {"default": 4, "overrides": [{"layers": [1], "experts": "all", "bits": 0}]}
    build(recipe_of(tiny_checkpoint, tmp_path / "bundle", bits=bits), tmp_path)
    names = sorted(path.name for path in (tmp_path / "bundle" / "draft").iterdir())
    assert names == ["layer-000.safetensors", "layer-002.safetensors"]
    assert {key.layer for key in load_bundle(tmp_path / "bundle").draft_experts()} == {0, 2}


@pytest.mark.parametrize(
    ("default", "overrides", "message"),
    [
        (4, [([3], "all", 2)], r"overrides\.0\.layers: 3 not found; the routed layers are 0\.\.2"),
        (4, [([-1], "all", 2)], r"overrides\.0\.layers: -1 not found"),
        (4, [([0], [8, 9], 2)], r"overrides\.0\.experts: 8, 9 not found; the model has 8 experts"),
        (4, [("all", [1], 2), ([2], [1], 8)], r"overrides\.1: expert 1 of layer 2 is named by "),
        (4, [("all", [1, 1], 2)], r"overrides\.0\.experts: a number stands twice"),
        (4, [("all", [1], 4)], r"overrides\.0: 4 bits are the default; it has no effect"),
    ],
)
def test_override_that_names_what_is_not_there_or_does_nothing_is_refused(
    tiny_checkpoint: Path,
    tmp_path: Path,
    default: int,
    overrides: list[tuple[Any, Any, int]],
    message: str,
) -> None:
    table = {
        "default": default,
        "overrides": [
            {"layers": layers, "experts": experts, "bits": bits}
            for layers, experts, bits in overrides
        ],
    }
    with pytest.raises(RecipeError, match=message):
        build(recipe_of(tiny_checkpoint, tmp_path / "bundle", bits=table), tmp_path)
    assert not list(tmp_path.iterdir())


def test_dense_layer_cannot_be_given_a_width(tiny_checkpoint: Path) -> None:
    config = config_of(tiny_checkpoint, dense_layers=(0,), num_hidden_layers=6)
    bits = {"default": 4, "overrides": [{"layers": [0], "experts": "all", "bits": 2}]}
    with pytest.raises(RecipeError, match=r"0 not found; the routed layers are 1\.\.5"):
        draft(bits=bits).widths(config)


@needs_llmcompressor
@pytest.mark.parametrize("method", ["gptq", "awq"])
@pytest.mark.parametrize(
    ("width", "inner", "num_tokens"), [(256, 128, 64), (128, 256, 64), (128, 128, 512)]
)
def test_calibrating_an_expert_takes_no_more_than_is_estimated(
    tiny_checkpoint: Path, method: str, width: int, inner: int, num_tokens: int
) -> None:
    config = config_of(tiny_checkpoint, hidden_size=width, moe_intermediate_size=inner)
    weights = ExpertWeights(
        *(random_weight(*shape, seed=i) for i, shape in enumerate(matrix_shapes(config).values()))
    )
    everywhere = Routing(0, torch.zeros(num_tokens, 1).long(), torch.ones(num_tokens, 1))
    inputs = ExpertInputs(correlated_rows(num_tokens, width), everywhere, None)
    draft = {"method": method, "bits": 4, "group_size": 16, "min_tokens": 1}
    calibration = {"num_sequences": 1, "sequence_length": num_tokens}
    recipe = Recipe.model_validate(
        recipe_dict(Path("model"), Path("bundle"), draft=draft, calibration=calibration)
    )
    rounded = Recipe.model_validate(
        recipe_dict(Path("model"), Path("bundle"), calibration=calibration)
    )
    estimated, without = (
        build_nbytes(asked, config, "float32", ExpertNumbers("float32"), "float32")
        for asked in (recipe, rounded)
    )
    calibrating = estimated - without + 5 * 4 * config.expert_num_weights // 3

    def quantize() -> None:
        layer = quantize_layer({ExpertKey(0, 0): weights}, recipe.draft, [4], inputs)
        assert layer.fallback_experts == ()

    assert peak_allocated_bytes(quantize) <= calibrating
