"""The report of a tiny bundle: every promised figure, each consistent with what it is made of."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from safetensors.torch import load_file

from specter_build.profile_routing import HeadComparison
from specter_build.report import LayerProfile, describe, make_report, summarize_layer
from specter_runtime.config import ModelConfig
from specter_runtime.experts import Routing
from specter_runtime.manifest import Manifest

NUM_SEQUENCES, NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS, PER_TOKEN = 4, 64, 3, 8, 2
WINDOWS = ("1", "2", "4", "8", "16")

FLOAT32_MEAN = (NUM_SEQUENCES * NUM_TOKENS + 2) * 2.0**-24
"""Relative error of a float32 mean: one rounding an addition, one for each term's quotient."""

DOUBLE_MEAN = 8 * 2.0**-53
"""The same of a mean over the three layers in double precision."""

Json = dict[str, Any]


def refuse_constant(name: str) -> NoReturn:
    raise AssertionError(f"{name} is not JSON")


@pytest.fixture(scope="module")
def report(tiny_bundle: Path) -> Json:
    text = (tiny_bundle / "report.json").read_text("utf-8")
    return dict(json.loads(text, parse_constant=refuse_constant))


@pytest.fixture(scope="module")
def routes(tiny_bundle: Path) -> dict[str, torch.Tensor]:
    return load_file(tiny_bundle / "routes.safetensors")


@pytest.fixture(scope="module")
def config(tiny_bundle: Path) -> ModelConfig:
    path = tiny_bundle / "manifest.json"
    return Manifest.from_dict(json.loads(path.read_text("utf-8")), str(path)).model


def tensor_nbytes(*files: Path) -> int:
    return sum(tensor.nbytes for path in files for tensor in load_file(path).values())


def test_report_has_every_promised_field(report: Json) -> None:
    assert report.keys() == {
        "report_version",
        "model_type",
        "calibration",
        "draft",
        "recall",
        "windows",
        "acceptance",
        "normalized_entropy",
        "relative_quantization_error",
        "num_experts_never_reached",
        "lru_hit_curve",
        "sizes",
        "left_out_tensors",
        "layers",
        "memory",
        "model",
        "plan",
        "predictor",
        "sequences",
    }
    assert report["report_version"] == 2
    assert report["recall"].keys() == {"mean", "worst", "worst_layer", "weighted", "set_exact"}
    assert report["acceptance"].keys() == {"rate", "sampled_rate", "by_position", "expected_length"}
    assert report["sizes"].keys() == {"dense_bytes", "draft_bytes", "shard_bytes"}
    assert tuple(sorted(report["windows"], key=int)) == WINDOWS
    assert all(window.keys() == {"recall", "union"} for window in report["windows"].values())
    assert [layer["layer"] for layer in report["layers"]] == list(range(NUM_LAYERS))
    for layer in report["layers"]:
        assert layer.keys() == {
            "layer",
            "recall",
            "weighted_recall",
            "set_exact",
            "windows",
            "expert_counts",
            "normalized_entropy",
            "never_reached",
            "lru_hit_curve",
            "relative_quantization_error",
            "fallback_experts",
            "recall_by_sequence",
        }


def test_times_and_memory_of_the_build_are_beside_the_report(tiny_bundle: Path) -> None:
    timings = json.loads((tiny_bundle / "timings.json").read_text("utf-8"))
    assert timings.keys() == {"wall_seconds", "peak_memory_bytes"}
    assert timings["wall_seconds"] > 0
    assert timings["peak_memory_bytes"] > 0


def test_calibration_is_described(report: Json) -> None:
    calibration = report["calibration"]
    assert calibration.keys() == {
        "sources",
        "sha256",
        "tokens_sha256",
        "num_sequences",
        "sequence_length",
        "seed",
    }
    assert (calibration["num_sequences"], calibration["sequence_length"]) == (
        NUM_SEQUENCES,
        NUM_TOKENS,
    )
    assert len(calibration["sha256"]) == 64


def test_figures_of_the_whole_are_means_of_the_layers(report: Json) -> None:
    layers = report["layers"]
    whole = {
        "recall": report["recall"]["mean"],
        "weighted_recall": report["recall"]["weighted"],
        "set_exact": report["recall"]["set_exact"],
        "normalized_entropy": report["normalized_entropy"],
        "relative_quantization_error": report["relative_quantization_error"],
    }
    for name, value in whole.items():
        mean = math.fsum(layer[name] for layer in layers) / len(layers)
        assert value == pytest.approx(mean, rel=DOUBLE_MEAN), name
    for window in WINDOWS:
        for figure in ("recall", "union"):
            mean = math.fsum(x["windows"][window][figure] for x in layers) / len(layers)
            found = report["windows"][window][figure]
            assert found == pytest.approx(mean, rel=DOUBLE_MEAN), (window, figure)
    for capacity, hits in enumerate(report["lru_hit_curve"]):
        mean = math.fsum(layer["lru_hit_curve"][capacity] for layer in layers) / len(layers)
        assert hits == pytest.approx(mean, rel=DOUBLE_MEAN)


def test_worst_layer_is_the_one_with_the_least_recall(report: Json) -> None:
    recalls = [layer["recall"] for layer in report["layers"]]
    assert report["recall"]["worst"] == min(recalls)
    assert recalls[report["recall"]["worst_layer"]] == min(recalls)


def test_recall_is_that_of_the_recorded_routes(
    report: Json, routes: dict[str, torch.Tensor]
) -> None:
    target = routes["target.selected_experts"].tolist()
    draft = routes["draft.selected_experts"].tolist()
    for layer, found in enumerate(report["layers"]):
        shares = [
            len(set(wanted) & set(drafted)) / PER_TOKEN
            for wanted_row, drafted_row in zip(target[layer], draft[layer], strict=True)
            for wanted, drafted in zip(wanted_row, drafted_row, strict=True)
        ]
        mean = sum(shares) / len(shares)
        assert found["recall"] == pytest.approx(mean, rel=FLOAT32_MEAN)
        exact = shares.count(1.0) / len(shares)
        assert found["set_exact"] == pytest.approx(exact, rel=FLOAT32_MEAN)
        # one token is the smallest window, and its union is its own experts
        assert found["windows"]["1"]["recall"] == pytest.approx(mean, rel=2 * FLOAT32_MEAN)
        assert found["windows"]["1"]["union"] == PER_TOKEN


BY_SEQUENCE_ROUNDING = 0.5e-6
"""Figures by sequence have six digits behind the point."""


def at(report: Json, path: str) -> Any:
    """The figure that a path such as ``windows.4.union`` leads to."""
    return functools.reduce(lambda part, key: part[key], path.split("."), report)


def test_figures_by_sequence_average_to_those_of_the_whole(report: Json) -> None:
    windows = {f"windows.{w}.{figure}" for w in WINDOWS for figure in ("recall", "union")}
    lengths = {f"acceptance.expected_length.{window}" for window in WINDOWS}
    acceptance = {"acceptance.rate", "acceptance.sampled_rate"}
    recalls = {"recall.mean", "recall.weighted", "recall.set_exact"}
    assert report["sequences"].keys() == windows | lengths | acceptance | recalls
    pairs = [(values, at(report, path)) for path, values in report["sequences"].items()]
    pairs += [(layer["recall_by_sequence"], layer["recall"]) for layer in report["layers"]]
    for values, whole in pairs:
        assert len(values) == NUM_SEQUENCES
        # two float32 means, of a sequence and of everything
        error = BY_SEQUENCE_ROUNDING + 2 * FLOAT32_MEAN * whole
        assert math.fsum(values) / NUM_SEQUENCES == pytest.approx(whole, abs=error)


def test_figures_by_sequence_are_those_of_the_recorded_sequence(
    report: Json, routes: dict[str, torch.Tensor]
) -> None:
    target = routes["target.selected_experts"].tolist()
    draft = routes["draft.selected_experts"].tolist()
    for layer, found in enumerate(report["layers"]):
        for n, recall in enumerate(found["recall_by_sequence"]):
            pairs = zip(target[layer][n], draft[layer][n], strict=True)
            shared = sum(len(set(wanted) & set(drafted)) for wanted, drafted in pairs)
            error = BY_SEQUENCE_ROUNDING + FLOAT32_MEAN
            assert recall == pytest.approx(shared / NUM_TOKENS / PER_TOKEN, abs=error)
    for rate, agrees in zip(
        report["sequences"]["acceptance.rate"], routes["draft_agrees"].tolist(), strict=True
    ):
        error = BY_SEQUENCE_ROUNDING + FLOAT32_MEAN
        assert rate == pytest.approx(sum(agrees) / NUM_TOKENS, abs=error)


def test_report_names_the_model_and_the_tokens_by_their_bytes(
    tiny_bundle: Path, report: Json, routes: dict[str, torch.Tensor]
) -> None:
    tokens = b"".join(
        token.to_bytes(8, "little") for row in routes["token_ids"].tolist() for token in row
    )
    assert report["calibration"]["tokens_sha256"] == hashlib.sha256(tokens).hexdigest()
    manifest = json.loads((tiny_bundle / "manifest.json").read_text("utf-8"))
    hashes = {name: entry["sha256"] for name, entry in manifest["source_files"].items()}
    digest = hashlib.sha256(json.dumps(hashes, sort_keys=True).encode()).hexdigest()
    assert report["model"] == {"name": manifest["recipe"]["model"], "sha256": digest}


def test_counts_are_those_of_the_recorded_routes(
    report: Json, routes: dict[str, torch.Tensor]
) -> None:
    for layer, found in enumerate(report["layers"]):
        counts = found["expert_counts"]
        chosen = routes["target.selected_experts"][layer].flatten().tolist()
        assert counts == [chosen.count(expert) for expert in range(NUM_EXPERTS)]
        assert sum(counts) == NUM_SEQUENCES * NUM_TOKENS * PER_TOKEN
        assert found["never_reached"] == [e for e, count in enumerate(counts) if count == 0]
        assert 0 < found["normalized_entropy"] <= 1
    never = sum(len(layer["never_reached"]) for layer in report["layers"])
    assert report["num_experts_never_reached"] == never


def test_unions_grow_with_the_window_and_stay_within_the_experts(report: Json) -> None:
    unions = [report["windows"][window]["union"] for window in WINDOWS]
    assert unions == sorted(unions)
    assert unions[0] == PER_TOKEN
    assert unions[-1] <= NUM_EXPERTS


def test_hit_curve_rises_to_all_but_the_first_uses(
    report: Json, routes: dict[str, torch.Tensor]
) -> None:
    accesses = NUM_SEQUENCES * NUM_TOKENS * PER_TOKEN
    for layer, found in enumerate(report["layers"]):
        curve = found["lru_hit_curve"]
        assert len(curve) == NUM_EXPERTS
        assert curve == sorted(curve)
        sequences = routes["target.selected_experts"][layer].flatten(1).tolist()
        first_uses = sum(len(set(sequence)) for sequence in sequences)
        assert curve[-1] == (accesses - first_uses) / accesses


def test_acceptance_is_that_of_the_recorded_agreement(
    report: Json, routes: dict[str, torch.Tensor]
) -> None:
    acceptance, agrees = report["acceptance"], routes["draft_agrees"].tolist()
    rate = sum(map(sum, agrees)) / (NUM_SEQUENCES * NUM_TOKENS)
    assert acceptance["rate"] == pytest.approx(rate, rel=FLOAT32_MEAN)
    chances = acceptance["by_position"]
    assert len(chances) == 16
    assert chances[0] == acceptance["rate"]
    assert 0 <= acceptance["sampled_rate"] <= 1
    for window in WINDOWS:
        expected = 1 + math.fsum(chances[: int(window)])
        # 17 additions in double precision
        assert acceptance["expected_length"][window] == pytest.approx(expected, rel=17 * 2.0**-53)


def test_sizes_are_those_of_the_files(tiny_bundle: Path, report: Json) -> None:
    sizes = report["sizes"]
    assert sizes["dense_bytes"] == tensor_nbytes(*(tiny_bundle / "model").iterdir())
    assert sizes["draft_bytes"] == tensor_nbytes(*(tiny_bundle / "draft").iterdir())
    assert sizes["shard_bytes"] == tensor_nbytes(*(tiny_bundle / "experts").rglob("*.safetensors"))


def test_bits_per_weight_follow_from_codes_and_scales(report: Json) -> None:
    """4 bits a code and 16 bits a scale for 16 weights; rows of 64 and 48 have no ragged group."""
    assert report["draft"]["bits_per_weight"] == 4 + 16 / 16
    assert (report["draft"]["bits"], report["draft"]["group_size"]) == (4, 16)
    assert report["draft"]["num_experts_by_bits"] == {"4": NUM_LAYERS * NUM_EXPERTS}
    assert report["draft"]["fallback_experts"] == []


def test_memory_is_the_plans(tiny_bundle: Path, report: Json) -> None:
    plan = json.loads(
        (tiny_bundle / "plan.json").read_text("utf-8"), parse_constant=refuse_constant
    )
    memory = report["memory"]
    assert memory["num_slots"] == plan["num_slots"]
    num_draft_tokens = plan["num_draft_tokens"]
    assert report["plan"] == {
        "num_draft_tokens": num_draft_tokens,
        "seconds_per_token": plan["predicted"][plan["chosen"]],
        "chosen": plan["chosen"],
        "reason": plan["reason"],
        "hardware": plan["hardware"],
    }
    assert memory["budget_bytes"] == plan["memory_budget_bytes"]
    assert memory["draft_bytes"] == report["sizes"]["draft_bytes"]
    assert memory["predictor_bytes"] == 0  # with a draft, nothing else predicts
    kinds = ("dense", "draft", "predictor", "kv_cache", "buffer")
    used = sum(memory[f"{kind}_bytes"] for kind in kinds)
    assert used + memory["num_slots"] * memory["slot_bytes"] <= memory["budget_bytes"]


def test_summary_for_people_gives_the_main_figures(report: Json) -> None:
    text = describe(report, 4, {"wall_seconds": 1.25, "peak_memory_bytes": 2**30})
    for part in (
        "rtn 4 bits in groups of 16: 5.00 bits a weight",
        f"mean {report['recall']['mean']:.4f}",
        f"worst {report['recall']['worst']:.4f} (layer {report['recall']['worst_layer']})",
        f"greedy {report['acceptance']['rate']:.4f}",
        f"{report['memory']['num_slots']} slots",
        "4 draft tokens",
        f"recall by layers ahead: {report['predictor']['recall'][0]:.4f}, ",
    ):
        assert part in text


# ---- pure -----------------------------------------------------------------------------------


def make_routing(seed: int, layer: int) -> Routing:
    """Random distinct experts and positive weights for all tokens."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.rand(NUM_SEQUENCES * NUM_TOKENS, NUM_EXPERTS, generator=generator)
    weights, selected = scores.softmax(-1).topk(PER_TOKEN)
    return Routing(layer, selected, weights)


def report_of(target: Routing, draft: Routing, agrees: torch.Tensor, config: ModelConfig) -> Json:
    layer = summarize_layer(LayerProfile(target, draft, 0.25), NUM_SEQUENCES, config)
    heads = HeadComparison(agrees, agrees.to(torch.float32), torch.ones(agrees.shape))
    sizes = {"dense_bytes": 1, "draft_bytes": 2, "shard_bytes": 3}
    bits = [[4] * NUM_EXPERTS]
    return make_report(config, [], [layer], heads, {"bits": 4}, bits, sizes, {"seed": 0})


def test_draft_that_is_the_target_has_recall_one_and_is_always_accepted(
    config: ModelConfig,
) -> None:
    routing = make_routing(0, layer=1)
    everywhere = torch.ones(NUM_SEQUENCES, NUM_TOKENS, dtype=torch.bool)
    report = report_of(routing, routing, everywhere, config)
    recall = report["recall"]
    assert [recall[x] for x in ("mean", "worst", "weighted", "set_exact")] == [1.0] * 4
    assert recall["worst_layer"] == 1
    assert all(window["recall"] == 1.0 for window in report["windows"].values())
    assert report["acceptance"]["by_position"] == [1.0] * 16
    assert report["acceptance"]["expected_length"] == {k: 1.0 + int(k) for k in WINDOWS}
    assert report["acceptance"]["sampled_rate"] == 1.0


def test_draft_that_shares_no_expert_has_recall_zero(config: ModelConfig) -> None:
    shape = (NUM_SEQUENCES * NUM_TOKENS, 1)
    weights = torch.full((shape[0], 2), 0.5)
    target = Routing(0, torch.tensor([[0, 1]]).expand(shape[0], 2), weights)
    draft = Routing(0, torch.tensor([[2, 3]]).expand(shape[0], 2), weights)
    nowhere = torch.zeros(NUM_SEQUENCES, NUM_TOKENS, dtype=torch.bool)
    report = report_of(target, draft, nowhere, config)
    assert [report["recall"][x] for x in ("mean", "weighted", "set_exact")] == [0.0] * 3
    assert all(window == {"recall": 0.0, "union": 2.0} for window in report["windows"].values())
    assert report["acceptance"]["expected_length"] == dict.fromkeys(WINDOWS, 1.0)
    assert report["layers"][0]["never_reached"] == [2, 3, 4, 5, 6, 7]
    assert report["num_experts_never_reached"] == 6


def test_windows_longer_than_the_sequences_are_left_out(config: ModelConfig) -> None:
    """8 sequences of 32 tokens cut from the same rows, and 256 of one token."""
    profile = LayerProfile(make_routing(0, 0), make_routing(1, 0), 0.0)
    rows = NUM_SEQUENCES * NUM_TOKENS
    assert tuple(summarize_layer(profile, rows // 4, config)["windows"]) == WINDOWS[:3]
    assert tuple(summarize_layer(profile, rows, config)["windows"]) == WINDOWS[:1]
