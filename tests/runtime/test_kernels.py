"""The native kernels against float64 oracles, on every path that this machine has."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specter_build.architectures.rope import rope_frequencies
from specter_build.quantizers import GridFormat, round_to_nearest
from specter_runtime import kernels
from specter_runtime.config import ModelConfig, RopeConfig, RoutingConfig
from specter_runtime.experts import ExpertKey, ExpertWeights, PackedExpert, pack_expert
from specter_runtime.kernels import MAX_ROWS, NativeExpert, NativeMatrix
from specter_runtime.kv_cache import KVCache
from specter_runtime.layers import RotaryEmbedding
from specter_runtime.model import DecoderLayer, bind
from specter_runtime.moe import LEFT_OUT, combine, select_experts
from specter_runtime.packed import PackedTensor, dequantize
from specter_runtime.packed_bf16 import PackedBfloat16, pack_bfloat16
from specter_runtime.predictor import NUM_BESIDE, Predictor, probabilities
from specter_runtime.roles import dense_shapes
from tests import oracles
from tests.oracles import array, gamma

SHAPES = [(1, 1), (3, 31), (33, 32), (32, 33), (7, 77), (70, 256), (65, 100)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = [1, 2, 3, 5, 8, 31, MAX_ROWS]


@pytest.fixture(params=["widest", "generic"], autouse=True)
def path(request: pytest.FixtureRequest) -> Iterator[str]:
    """Each test runs with the machine's widest instructions and with plain C++."""
    native = kernels.library()
    if native is None:
        assert shutil.which("c++") is None, "there is a compiler, but the kernels were not built"
        pytest.skip("built without a C++ compiler")
    native.specter_force_generic(request.param == "generic")
    yield request.param
    native.specter_force_generic(0)
    kernels.set_threads(1)


def randn(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def spread(*shape: int, seed: int = 0) -> torch.Tensor:
    """bfloat16 weights of so many magnitudes that some need an escape."""
    exponents = torch.randint(-20, 3, shape, generator=torch.Generator().manual_seed(seed))
    return (randn(*shape, seed=seed + 1) * 2.0**exponents).bfloat16()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.int32), right.contiguous().view(torch.int32))


def test_the_path_in_use_has_a_name(path: str) -> None:
    assert kernels.name() == ("generic" if path == "generic" else kernels.name())
    assert kernels.name() in ("generic", "avx2")


# ---- products -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_equal_the_oracle(
    shape: tuple[int, int], dtype: torch.dtype, num_rows: int
) -> None:
    weight, bias = randn(*shape, seed=1).to(dtype), randn(shape[0], seed=2).to(dtype)
    rows = randn(num_rows, shape[1], seed=3)
    found = array(NativeMatrix.of(weight, bias).multiply(rows))
    expected = array(rows) @ array(weight).T + array(bias)
    # A column takes part in at most M fused steps, 5 additions of partial sums, 1 of the bias.
    sizes = np.abs(array(rows)) @ np.abs(array(weight)).T + np.abs(array(bias))
    assert np.all(np.abs(found - expected) <= gamma(shape[1] + 6) * sizes)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_packed_weights_give_the_bits_of_raw_ones(shape: tuple[int, int]) -> None:
    weight = spread(*shape)
    packed = pack_bfloat16(weight)
    rows = randn(MAX_ROWS, shape[1], seed=3)
    for num_rows in ROWS:
        raw = NativeMatrix.of(weight).multiply(rows[:num_rows])
        assert same_bits(NativeMatrix.of(packed).multiply(rows[:num_rows]), raw)
    assert shape[0] * shape[1] < 1000 or len(packed.escapes) > 0  # else half of this says nothing


@pytest.mark.parametrize("kind", ["raw", "packed", "float32"])
@pytest.mark.parametrize("shape", [(70, 256), (65, 100)], ids=str)
def test_a_row_does_not_depend_on_how_many_there_are_nor_on_threads(
    shape: tuple[int, int], kind: str
) -> None:
    weight: torch.Tensor | PackedBfloat16 = spread(*shape)
    if kind == "packed":
        weight = pack_bfloat16(spread(*shape))
    elif kind == "float32":
        weight = randn(*shape)
    rows = randn(MAX_ROWS, shape[1], seed=3)
    matrix = NativeMatrix.of(weight)
    alone = torch.cat([matrix.multiply(rows[i : i + 1]) for i in range(MAX_ROWS)])
    for num_threads in (1, 2, 3):
        kernels.set_threads(num_threads)
        for num_rows in range(1, MAX_ROWS + 1):
            assert same_bits(matrix.multiply(rows[:num_rows]), alone[:num_rows])
    assert same_bits(matrix.multiply(rows[:1].repeat(7, 1)), alone[:1].repeat(7, 1))


GROUPED = [(bits, size) for bits in (2, 3, 4, 8) for size in (8, 16, 32, 64)]


def quantized(shape: tuple[int, int], bits: int, group_size: int, symmetric: bool) -> PackedTensor:
    form = GridFormat(bits, group_size, symmetric)
    return round_to_nearest(randn(*shape, seed=bits), form)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize(("bits", "group_size"), GROUPED)
@pytest.mark.parametrize("shape", [(5, 8), (33, 96), (7, 104), (6, 77)], ids=str)
def test_groups_are_dequantized_to_the_bit_and_multiplied_as_such(
    shape: tuple[int, int], bits: int, group_size: int, symmetric: bool
) -> None:
    packed = quantized(shape, bits, group_size, symmetric)
    matrix, wide = NativeMatrix.of(packed), dequantize(packed, torch.float32)
    assert same_bits(matrix.widen(), wide)
    rows = randn(MAX_ROWS, shape[1], seed=3)
    for num_rows in (1, 2, 7, MAX_ROWS):
        found = matrix.multiply(rows[:num_rows])
        assert same_bits(found, NativeMatrix.of(wide).multiply(rows[:num_rows]))


def test_stand_ins_are_computed_by_the_kernels() -> None:
    shapes = {"gate_proj": (64, 48), "up_proj": (64, 48), "down_proj": (48, 64)}
    expert = PackedExpert(**{role: quantized(shape, 4, 16, True) for role, shape in shapes.items()})
    rows = randn(3, 48, seed=9)
    assert same_bits(compute(expert, rows), compute(expert.to(torch.float32), rows))
    odd = PackedExpert(**{role: quantized(shape, 4, 12, True) for role, shape in shapes.items()})
    assert kernels.prepare(odd) is odd  # a group of 12 codes is no whole number of eights


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the system does not fork")
def test_a_forked_child_computes_without_its_parents_threads() -> None:
    kernels.set_threads(2)
    matrix, rows = NativeMatrix.of(randn(300, 64)), randn(2, 64, seed=3)
    expected = matrix.multiply(rows)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)  # a child that waits for its parent's threads ends by this
        is_same = same_bits(matrix.multiply(rows), expected)
        kernels.set_threads(2)
        os._exit(0 if is_same and same_bits(matrix.multiply(rows), expected) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert same_bits(matrix.multiply(rows), expected)


def test_widening_is_exact_for_every_pattern() -> None:
    patterns = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    for columns in (256, 64):
        weight = patterns.view(-1, columns)
        for matrix in (NativeMatrix.of(weight), NativeMatrix.of(pack_bfloat16(weight))):
            assert same_bits(matrix.widen(), weight.to(torch.float32))
    halves = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(torch.float16)
    widened = NativeMatrix.of(halves.view(256, 256)).widen().flatten()
    expected = halves.to(torch.float32)
    assert torch.equal(widened.isnan(), expected.isnan())
    assert torch.equal(widened.nan_to_num(), expected.nan_to_num())


def test_weights_that_are_no_numbers_reach_the_result() -> None:
    weight = randn(4, 40).bfloat16()
    weight[1, 7], weight[2, 39] = float("nan"), float("inf")
    for matrix in (NativeMatrix.of(weight), NativeMatrix.of(pack_bfloat16(weight))):
        found = matrix.multiply(torch.ones(1, 40))[0]
        assert found.isnan().tolist() == [False, True, False, False]
        assert found[2].item() == float("inf")


# ---- experts ------------------------------------------------------------------------------------


def make_expert(width: int, inner: int, scale: float = 0.2) -> ExpertWeights:
    shapes = ((inner, width), (inner, width), (width, inner))
    return ExpertWeights(*(randn(*s, seed=i, scale=scale).bfloat16() for i, s in enumerate(shapes)))


def compute(expert: Any, rows: torch.Tensor, limit: float | None = None) -> torch.Tensor:
    prepared = kernels.prepare(expert)
    assert isinstance(prepared, NativeExpert)
    out = torch.full((len(rows), 1, rows.shape[1]), float("nan"))
    selected = torch.full((len(rows), 1), 7)
    kernels.compute_experts([(7, prepared)], rows, selected, out, limit)
    return out[:, 0]


@pytest.mark.parametrize("num_rows", ROWS)
@pytest.mark.parametrize(("width", "inner"), [(32, 64), (48, 40), (33, 129)])
def test_an_expert_equals_the_oracle(width: int, inner: int, num_rows: int) -> None:
    expert, rows = make_expert(width, inner), randn(num_rows, width, seed=9)
    weights = [array(m) for m in (expert.gate_proj, expert.up_proj, expert.down_proj)]
    found = array(compute(expert, rows))
    # swiglu_error counts 4 roundings for the activation. exp is within 2 units in the last place,
    # that is 4 roundings, instead of 1: 7 in all, for which twice its bound stands.
    bound = 2 * oracles.swiglu_error(array(rows), *weights)
    assert np.all(np.abs(found - oracles.swiglu(array(rows), *weights)) <= bound)


def test_large_gates_neither_overflow_nor_vanish() -> None:
    identity = torch.eye(4).bfloat16()
    expert = ExpertWeights(identity, identity, identity)
    rows = torch.tensor([[200.0, -200.0, 88.0, -88.0]])
    found = compute(expert, rows)[0]
    assert torch.isfinite(found).all()
    assert found[0].item() == pytest.approx(200.0**2)
    assert abs(found[1].item()) < 1e-30


def test_the_clamped_form_is_that_of_gpt_oss() -> None:
    expert, limit = make_expert(32, 48, scale=1.0), 1.5
    biases = [randn(n, seed=20 + n).bfloat16() for n in (48, 48, 32)]
    expert = replace(
        expert, gate_proj_bias=biases[0], up_proj_bias=biases[1], down_proj_bias=biases[2]
    )
    rows = randn(3, 32, seed=9)
    wide = [m.double() for m in expert.tensors().values()]
    gate = (rows.double() @ wide[0].T + wide[3]).clamp(max=limit)
    up = (rows.double() @ wide[1].T + wide[4]).clamp(-limit, limit)
    assert (gate == limit).any()
    assert (up.abs() == limit).any()
    inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    expected = array(inner @ wide[2].T + wide[5])
    # gate and up are off by gamma(34) of their terms' magnitudes, |inner'| < 3 for each; 10 more
    # roundings for the activation; then the sum over 48.
    terms = array(rows.abs().double() @ torch.maximum(wide[0].abs(), wide[1].abs()).T) + 4.0
    sizes = (
        3 * (1 + limit) * gamma(34) * terms
        + gamma(10) * np.abs(array(inner))
        + gamma(50) * np.abs(array(inner))
    ) @ np.abs(array(wide[2])).T
    found = array(compute(expert, rows, limit))
    assert np.all(np.abs(found - expected) <= sizes + gamma(2) * np.abs(expected))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_computed_together_come_out_as_each_by_itself(dtype: torch.dtype) -> None:
    """And go where they were chosen; what other experts were chosen for stays as it is."""
    rows = randn(6, 64, seed=9).to(dtype)
    experts = [make_expert(64, inner) for inner in (96, 40, 33)]
    forms = [experts[0], pack_expert(experts[1]), experts[2].to(torch.float32)]
    selected = torch.tensor([[5, 2], [1, 9], [9, 5], [2, 5], [5, 1], [9, 3]])
    prepared = [kernels.prepare(form) for form in forms]
    out = torch.full((6, 2, 64), 3.25)
    work = [(e, p) for e, p in zip((5, 2, 9), prepared, strict=True) if isinstance(p, NativeExpert)]
    kernels.compute_experts(work, rows, selected, out, None)
    alone = {e: compute(expert, rows) for e, expert in zip((5, 2, 9), experts, strict=True)}
    for row, chosen in enumerate(selected.tolist()):
        for rank, expert in enumerate(chosen):
            if expert in alone:
                assert same_bits(out[row, rank], alone[expert][row])
            else:
                assert (out[row, rank] == 3.25).all()


def test_packed_experts_give_the_bits_of_raw_ones() -> None:
    expert = ExpertWeights(spread(64, 48), spread(64, 48, seed=5), spread(48, 64, seed=7))
    rows = randn(4, 48, seed=9)
    assert same_bits(compute(pack_expert(expert), rows), compute(expert, rows))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_packed_experts_are_unpacked_to_the_bit(dtype: torch.dtype) -> None:
    expert = ExpertWeights(spread(64, 48), spread(64, 40, seed=5), spread(48, 64, seed=7))
    found = kernels.prepare(pack_expert(expert)).to(dtype)
    for role, matrix in expert.to(dtype).tensors().items():
        assert torch.equal(found.tensors()[role], matrix)
        assert found.tensors()[role].dtype == dtype


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_outputs_are_combined_in_the_order_of_their_experts(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs, weights = randn(4, 3, 40), randn(4, 3, seed=1).abs()
    selected = torch.tensor([[5, 0, 3], [1, 2, 3], [LEFT_OUT, 9, 4], [LEFT_OUT] * 3])
    outputs[2, 0], outputs[3] = float("nan"), float("nan")  # nobody wrote what is left out
    found = combine(outputs, weights, selected, dtype)
    total = weights[0, 1] * outputs[0, 1] + weights[0, 2] * outputs[0, 2]
    assert same_bits(found[0], (total + weights[0, 0] * outputs[0, 0]).to(dtype))
    monkeypatch.setattr(kernels, "library", lambda: None)
    assert same_bits(found, combine(outputs, weights, selected, dtype))
    assert not found[3].any()


# ---- attention ----------------------------------------------------------------------------------

PLAIN = ModelConfig(
    model_type="test",
    vocab_size=10,
    hidden_size=40,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=24,
    moe_intermediate_size=8,
    num_experts=4,
    num_experts_per_tok=2,
    rms_norm_eps=1e-5,
    max_position_embeddings=256,
    tie_word_embeddings=True,
    attention_scaling=0.2,
    rope=RopeConfig(rope_frequencies({"rope_theta": 1e4}, 24, 256)[0]),
    routing=RoutingConfig(),
)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"attention_bias": True, "attention_out_bias": True},
    "head norms": {"qk_norm": "head"},
    "full norms": {"qk_norm": "full"},
    "norms behind the rotation": {"qk_norm": "head", "qk_norm_after_rope": True},
    "clipped": {"clip_qkv": 0.7},
    "full norms, clipped": {"qk_norm": "full", "clip_qkv": 0.7},
    "sinks": {"attention_sinks": True},
    "window": {"sliding_window": 9, "sliding_layers": (0,)},
    "sinks and window": {
        "attention_sinks": True,
        "sliding_window": 9,
        "sliding_layers": (0,),
    },
    "layer norm": {"norm": "layer"},
    "partial rotation": {"rope": RopeConfig(PLAIN.rope.inverse_frequencies[:5])},
    "interleaved": {"rope": replace(PLAIN.rope, interleaved=True)},
    "one group": {"num_key_value_heads": 1},
    "odd heads": {"head_dim": 18, "rope": RopeConfig(PLAIN.rope.inverse_frequencies[:9])},
    "residual multiplier": {"residual_multiplier": 0.3},
}
CONTEXT = 40


def make_layer(config: ModelConfig, dtype: torch.dtype) -> DecoderLayer:
    shapes = dense_shapes(config, 0)
    tensors = {
        role: randn(*shape, seed=i, scale=0.3 if len(shape) == 2 else 1.0)
        for i, (role, shape) in enumerate(shapes.items())
    }
    return DecoderLayer(config, 0, 0, bind(config, 0, tensors, {r: r for r in tensors}, dtype))


def run_attention(
    layer: DecoderLayer, hidden: torch.Tensor, sizes: list[int]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Attention of consecutive blocks of these sizes; the cache behind them."""
    cache = KVCache(layer.config, CONTEXT, hidden.dtype)
    rotary, out, start = RotaryEmbedding(layer.config.rope), [], 0
    for size in sizes:
        angles = rotary.angles(start, size, torch.float32)
        out.append(layer.attention(hidden[start : start + size], start, angles, cache))
        start += size
    return torch.cat(out), list(cache.room(0, CONTEXT))


@pytest.mark.parametrize("option", OPTIONS)
def test_attention_equals_the_spelled_out_one(option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(PLAIN, **OPTIONS[option])
    hidden, ones = randn(CONTEXT, config.hidden_size), [1] * CONTEXT
    layer = make_layer(config, torch.float32)
    found, caches = run_attention(layer, hidden, ones)
    exact, exact_caches = run_attention(make_layer(config, torch.float64), hidden.double(), ones)
    monkeypatch.setattr(kernels, "library", lambda: None)
    torchs, torch_caches = run_attention(make_layer(config, torch.float32), hidden, ones)
    assert not same_bits(found, torchs)  # the kernels were asked
    # Two float32 evaluations of one formula in other orders; see test_more_families for the two.
    for ours, theirs, true in zip(
        (found, *caches), (torchs, *torch_caches), (exact, *exact_caches), strict=True
    ):
        their_error = float((theirs - true).pow(2).mean().sqrt())
        assert float((ours - true).pow(2).mean().sqrt()) < 2 * their_error
        assert their_error < 1e-6 * float(true.abs().max())  # else this could not fail


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_of_a_row_does_not_depend_on_the_rows_beside_it(
    option: str, dtype: torch.dtype
) -> None:
    config = replace(PLAIN, **OPTIONS[option])
    layer, hidden = make_layer(config, dtype), randn(CONTEXT, config.hidden_size).to(dtype)
    one_by_one, caches = run_attention(layer, hidden, [1] * CONTEXT)
    for sizes in ([5] * 8, [32, 8], [1, 2, 3, 4, 30]):
        kernels.set_threads(len(sizes) % 3 + 1)
        together, other_caches = run_attention(layer, hidden, sizes)
        assert torch.equal(together, one_by_one)
        for left, right in zip(caches, other_caches, strict=True):
            assert torch.equal(left, right)


@pytest.mark.parametrize("has_bias", [False, True])
def test_norms_equal_the_oracle(has_bias: bool) -> None:
    rows, weight, bias = randn(3, 50), randn(50, seed=1), randn(50, seed=2)
    found = array(kernels.normalize(rows, weight, bias if has_bias else None, 1e-5))
    if has_bias:
        wide = array(rows) - array(rows).mean(-1, keepdims=True)
        expected = oracles.rms_norm(wide, array(weight), 1e-5) + array(bias)
    else:
        expected = oracles.rms_norm(array(rows), array(weight), 1e-5)
    # Sums in float64; centering, scale, two products and the bias are rounded to float32.
    sizes = np.abs(array(rows)).max() * np.abs(array(weight)) * 2 + np.abs(array(bias))
    assert np.all(np.abs(found - expected) <= gamma(6) * sizes)


# ---- with and without ---------------------------------------------------------------------------


def test_the_kernels_can_be_turned_off() -> None:
    code = "from specter_runtime import kernels; print(kernels.name())"
    environment = {**os.environ, "SPECTER_KERNELS": "torch"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "torch"


GATES: dict[str, RoutingConfig] = {
    "softmax": RoutingConfig(),
    "renormalized": RoutingConfig(norm_topk_prob=True),
    "scaled": RoutingConfig(norm_topk_prob=True, norm_min=1e-9, routed_scaling_factor=2.5),
    "sigmoid": RoutingConfig("sigmoid", norm_topk_prob=True),
    "softmax of the chosen": RoutingConfig("softmax_topk"),
    "best groups": RoutingConfig("sigmoid", n_group=4, topk_group=2),
    "best groups by their best": RoutingConfig(n_group=4, topk_group=3, group_score="max"),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("gate", GATES)
def test_gate_is_norm_product_and_choice_one_after_the_other(
    gate: str, has_biases: bool, dtype: torch.dtype
) -> None:
    hidden, router = randn(32, 50).to(dtype), randn(12, 50, seed=3, scale=0.15)
    norm, bias = randn(50, seed=1), randn(50, seed=2) if has_biases else None
    router_bias, correction = ((randn(12, seed=seed) if has_biases else None) for seed in (4, 5))
    matrix, routing = NativeMatrix.of(router, router_bias), GATES[gate]
    kernel = kernels.GateKernel(matrix, norm, bias, correction, 1e-5, routing, 3)
    normed, selected, weights, probs, *_ = kernel.compute(hidden)
    expected = kernels.normalize(hidden.to(torch.float32), norm, bias, 1e-5).to(dtype)
    assert torch.equal(normed, expected)
    tensors = {} if correction is None else {"correction_bias": correction}
    logits = matrix.multiply(expected.to(torch.float32))
    exact = select_experts(logits.double(), tensors, routing, 3, 0)
    assert torch.equal(selected, exact.selected_experts)
    # exp is within 2 units in the last place of its rounded argument: logits below 40 in size turn
    # half a unit of theirs into at most 40 units of exp. Sums, quotients and products: 8 more. All
    # weights are positive sums of such terms, so relative errors do not grow.
    bound = 100 * 2.0**-24
    assert exact.router_probs is not None
    for found, true in ((probs, exact.router_probs), (weights, exact.routing_weights)):
        assert ((found - true).abs() <= bound * true).all()
    for row in range(32):
        alone = kernel.compute(hidden[row : row + 1])[:4]
        for part, own in zip(alone, (normed, selected, weights, probs), strict=True):
            assert torch.equal(part[0], own[row])


def test_gate_chooses_distinct_experts_whatever_the_logits() -> None:
    matrix = NativeMatrix.of(torch.full((6, 4), float("nan")))
    kernel = kernels.GateKernel(matrix, torch.ones(4), None, None, 1e-5, RoutingConfig(), 3)
    selected = kernel.compute(torch.ones(1, 4)).selected_experts
    assert len(set(selected[0].tolist())) == 3
    assert ((selected >= 0) & (selected < 6)).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_gate_asks_its_predictor_for_rows_normed_without_weights(has_bias: bool) -> None:
    num_experts, num_chosen, width = 12, 3, 50
    norm, bias = randn(width, seed=1), randn(width, seed=2) if has_bias else None
    predictor = Predictor(
        [4, 6],
        randn(2, num_experts, width, seed=3).to(torch.bfloat16),
        randn(2, num_experts, seed=4),
        num_chosen,
    )
    router = NativeMatrix.of(randn(num_experts, width, seed=5))
    kernel = kernels.GateKernel(
        router, norm, bias, None, 1e-5, RoutingConfig(), num_chosen, predictor
    )
    hidden = randn(8, width, scale=3.0)
    with_predictions, without = kernel.compute(hidden, predicts=True), kernel.compute(hidden)
    assert (without.likely.numel(), without.probabilities.numel()) == (0, 0)
    for left, right in zip(with_predictions[:4], without[:4], strict=True):
        assert torch.equal(left, right)
    likely, found = with_predictions.likely, with_predictions.probabilities
    assert likely.shape == found.shape == (8, 2, num_chosen + NUM_BESIDE)
    wide = hidden.double()
    if has_bias:
        wide = wide - wide.mean(dim=-1, keepdim=True)
    plain = wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-5)
    weight = predictor.matrix.double()
    scores = (plain @ weight.T + predictor.bias.double()).view(8, 2, num_experts)
    best, order = scores.topk(num_chosen + NUM_BESIDE, dim=-1)
    # A score adds up 51 products of a row that was rounded twice: off by gamma(53) of the sum of
    # magnitudes; a difference of two by twice that. No two scores are closer here.
    magnitudes = (plain.abs() @ weight.abs().T + predictor.bias.abs().double()).view(scores.shape)
    bound = 2 * 53 * 2.0**-24 * float(magnitudes.max())
    assert float(best.diff(dim=-1).abs().min()) > bound
    assert torch.equal(likely, order)
    # The sigmoid's slope is at most 1/4; exp, sum and quotient: 8 units more.
    assert (found - probabilities(best, num_chosen)).abs().max() <= bound / 4 + 8 * 2.0**-24


def native_expert(seed: int = 0) -> NativeExpert:
    matrices = (randn(8, 16, seed=seed), randn(8, 16, seed=seed + 1), randn(16, 8, seed=seed + 2))
    prepared = kernels.prepare(ExpertWeights(*matrices))
    assert isinstance(prepared, NativeExpert)
    return prepared


def test_residency_lets_go_of_what_is_not_in_use() -> None:
    residency, expert, key = kernels.Residency(2, 4), native_expert(), ExpertKey(1, 2)
    residency.put(key, expert)
    assert [i for i, address in enumerate(residency.experts) if address] == [6]
    residency.pins[6] = 1
    assert not residency.release(key)
    assert residency.experts[6] == ctypes.addressof(expert.struct)
    residency.pins[6] = 0
    assert residency.release(key)
    assert not any(residency.experts)
    residency.put(key, expert.expert)  # in a form that the kernels do not know
    assert not any(residency.experts)
