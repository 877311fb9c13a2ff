"""Step: the calibration report, as a dictionary of plain numbers. Pure.

Deterministic: wall time and peak memory are in ``timings.json``, the only file of a bundle that
differs between two builds of the same inputs. Means over positions are there by calibration
sequence, too, so that reports can be compared knowing how far figures vary.

Called by: pipeline.  Next: fidelity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from specter_build.fidelity import (
    WINDOWS,
    acceptance_by_position,
    expected_acceptance_length,
    lru_hit_curve,
    normalized_entropy,
    one_hot,
    routing_recall,
    usage_counts,
    weighted_recall,
    window_recall,
)
from specter_build.fit_predictor import PredictorQuality
from specter_build.profile_routing import HeadComparison
from specter_runtime.config import ModelConfig
from specter_runtime.experts import Routing
from specter_runtime.units import format_bytes

REPORT_VERSION = 2
NUM_POSITIONS = 16
DIGITS = 6
"""Behind the point, of figures by sequence."""


@dataclass(frozen=True, slots=True)
class LayerProfile:
    """What one routed layer showed.

    Attributes:
        target, draft: both streams' routing over N x T rows.
        relative_error: of quantization.
        fallback_experts: quantized by rtn, since too few calibration tokens reach them.
    """

    target: Routing
    draft: Routing
    relative_error: float
    fallback_experts: tuple[int, ...] = ()

    def recall(self) -> float:
        """Mean routing recall."""
        num_experts = int(self.target.selected_experts.max()) + 1
        num_experts = max(num_experts, int(self.draft.selected_experts.max()) + 1)
        hot = (one_hot(r.selected_experts[None], num_experts) for r in (self.target, self.draft))
        return float(routing_recall(*hot).mean())


def summarize_layer(
    profile: LayerProfile, num_sequences: int, config: ModelConfig
) -> dict[str, Any]:
    """All figures of one layer; ``by_sequence`` is for ``make_report``."""
    shape = (num_sequences, -1, config.num_experts_per_tok)
    routes = profile.target.selected_experts.view(shape)
    target = one_hot(routes, config.num_experts)
    draft = one_hot(profile.draft.selected_experts.view(shape), config.num_experts)
    recall = routing_recall(target, draft)
    weights = profile.target.routing_weights.view(shape)
    weighted = weighted_recall(routes, weights, draft)
    is_exact = (recall == 1).to(torch.float32)
    counts = usage_counts(target)
    by_sequence = {
        "recall.mean": recall.mean(-1),
        "recall.weighted": weighted.mean(-1),
        "recall.set_exact": is_exact.mean(-1),
    }
    windows = {}
    for window in WINDOWS:
        if window <= routes.shape[1]:
            recalls, unions = window_recall(target, draft, window)
            windows[str(window)] = {"recall": float(recalls.mean()), "union": float(unions.mean())}
            by_sequence[f"windows.{window}.recall"] = recalls
            by_sequence[f"windows.{window}.union"] = unions
    return {
        "layer": profile.target.layer,
        "recall": float(recall.mean()),
        "weighted_recall": float(weighted.mean()),
        "set_exact": float(is_exact.mean()),
        "windows": windows,
        "expert_counts": counts.tolist(),
        "normalized_entropy": normalized_entropy(counts),
        "never_reached": torch.where(counts == 0)[0].tolist(),
        "lru_hit_curve": lru_hit_curve(routes, config.num_experts),
        "relative_quantization_error": profile.relative_error,
        "fallback_experts": list(profile.fallback_experts),
        "by_sequence": {name: figures.tolist() for name, figures in by_sequence.items()},
    }


def summarize_predictors(
    predictors: Mapping[int, PredictorQuality], layers_ahead: int
) -> dict[str, Any]:
    """Recall of what foretells later layers' experts, by number of layers ahead: means and layers.

    Beside it ``early_router``, the recall of the later layer's own router asked early.
    """
    found = [predictors[layer] for layer in sorted(predictors)]
    return {
        "layers_ahead": layers_ahead,
        "recall": _means([quality.recall for quality in found]),
        "early_router": _means([quality.early_recall for quality in found]),
        "layers": [
            {
                "layer": layer,
                "recall": list(predictors[layer].recall),
                "early_router": list(predictors[layer].early_recall),
            }
            for layer in sorted(predictors)
        ],
    }


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    """Means by column; rows may end early."""
    columns = ([value for value in column if value is not None] for column in zip_longest(*rows))
    return [sum(column) / len(column) for column in columns]


def make_report(
    config: ModelConfig,
    left_out: Sequence[str],
    layers: list[dict[str, Any]],
    heads: HeadComparison,
    draft: Mapping[str, Any],
    bits: Sequence[Sequence[int]],
    sizes: Mapping[str, int],
    calibration: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole report but for ``predictor`` and for what the plan decides.

    Args:
        config: the model.
        left_out: names of the checkpoint's tensors that are in no bundle.
        layers: of ``summarize_layer``, in order.
        heads: next-token predictions of both streams.
        draft: the recipe's draft section.
        bits: width of each stand-in by routed layer.
        sizes: bytes of the bundle's parts.
        calibration: what the figures were measured on.
    """
    by_position = acceptance_by_position(heads.agrees, NUM_POSITIONS)
    num_weights = len(config.moe_layers) * config.num_experts * config.expert_num_weights

    def mean(name: str) -> float:
        return float(sum(layer[name] for layer in layers) / len(layers))

    windows = {
        window: {
            figure: sum(layer["windows"][window][figure] for layer in layers) / len(layers)
            for figure in ("recall", "union")
        }
        for window in layers[0]["windows"]
    }
    worst = min(layers, key=lambda layer: float(layer["recall"]))
    return {
        "report_version": REPORT_VERSION,
        "model_type": config.model_type,
        "calibration": dict(calibration),
        "draft": {
            **draft,
            "bits_per_weight": sizes["draft_bytes"] * 8 / num_weights,
            "num_experts_by_bits": _count_widths(bits),
            "fallback_experts": [
                [layer["layer"], expert] for layer in layers for expert in layer["fallback_experts"]
            ],
        },
        "recall": {
            "mean": mean("recall"),
            "worst": worst["recall"],
            "worst_layer": worst["layer"],
            "weighted": mean("weighted_recall"),
            "set_exact": mean("set_exact"),
        },
        "windows": windows,
        "acceptance": {
            "rate": float(heads.agrees.to(torch.float32).mean()),
            "sampled_rate": float(heads.overlap.mean()),
            "by_position": by_position,
            "expected_length": {
                str(k): expected_acceptance_length(by_position, k) for k in WINDOWS
            },
        },
        "normalized_entropy": mean("normalized_entropy"),
        "relative_quantization_error": mean("relative_quantization_error"),
        "num_experts_never_reached": sum(len(layer["never_reached"]) for layer in layers),
        "lru_hit_curve": [
            sum(hits) / len(layers)
            for hits in zip(*(layer["lru_hit_curve"] for layer in layers), strict=True)
        ],
        "sizes": dict(sizes),
        "left_out_tensors": list(left_out),
        "sequences": _by_sequence(layers, heads),
        "layers": [
            {name: value for name, value in layer.items() if name != "by_sequence"}
            | {"recall_by_sequence": _rounded(layer["by_sequence"]["recall.mean"])}
            for layer in layers
        ],
    }


def _by_sequence(
    layers: Sequence[Mapping[str, Any]], heads: HeadComparison
) -> dict[str, list[float]]:
    """Figures of the report that are means over sequences: their path in it -> by sequence."""
    figures = {
        name: _means([layer["by_sequence"][name] for layer in layers])
        for name in layers[0]["by_sequence"]
    }
    figures["acceptance.rate"] = heads.agrees.to(torch.float32).mean(-1).tolist()
    figures["acceptance.sampled_rate"] = heads.overlap.mean(-1).tolist()
    chances = [acceptance_by_position(agrees[None], NUM_POSITIONS) for agrees in heads.agrees]
    for k in WINDOWS:
        lengths = [expected_acceptance_length(by_position, k) for by_position in chances]
        figures[f"acceptance.expected_length.{k}"] = lengths
    return {name: _rounded(values) for name, values in figures.items()}


def _rounded(values: Sequence[float]) -> list[float]:
    """So that the report stays small."""
    return [round(value, DIGITS) for value in values]


def _count_widths(bits: Sequence[Sequence[int]]) -> dict[str, int]:
    """Number of experts of each width."""
    widths = [width for row in bits for width in row]
    return {str(width): widths.count(width) for width in sorted(set(widths))}


def describe(report: Mapping[str, Any], num_draft_tokens: int, timings: Mapping[str, float]) -> str:
    """The report in a few lines, for people."""
    recall, acceptance, memory = report["recall"], report["acceptance"], report["memory"]
    draft, sizes = report["draft"], report["sizes"]
    windows = ", ".join(
        f"{k}: {report['windows'][k]['recall']:.3f} ({report['windows'][k]['union']:.1f})"
        for k in sorted(report["windows"], key=int)
    )
    expected = acceptance["expected_length"]
    lengths = ", ".join(f"{k}: {expected[k]:.2f}" for k in sorted(expected, key=int))
    return "\n".join(
        [
            f"draft        {draft['method']} {'/'.join(draft['num_experts_by_bits'])} bits in "
            f"groups of {draft['group_size']}: {draft['bits_per_weight']:.2f} bits a weight, "
            f"relative error {report['relative_quantization_error']:.4f}"
            f"{_describe_fallback(draft)}",
            f"recall       mean {recall['mean']:.4f}, worst {recall['worst']:.4f} (layer "
            f"{recall['worst_layer']}), weighted {recall['weighted']:.4f}, "
            f"set-exact {recall['set_exact']:.4f}",
            f"windows      recall (union of experts) by tokens: {windows}",
            f"acceptance   greedy {acceptance['rate']:.4f}, sampled "
            f"{acceptance['sampled_rate']:.4f}; expected length by draft tokens: {lengths}",
            *_describe_predictor(report["predictor"]),
            f"experts      entropy {report['normalized_entropy']:.3f} of uniform, "
            f"{report['num_experts_never_reached']} never reached",
            f"sizes        dense {format_bytes(sizes['dense_bytes'])}, draft "
            f"{format_bytes(sizes['draft_bytes'])}, shards {format_bytes(sizes['shard_bytes'])}"
            f"{_describe_left_out(report['left_out_tensors'])}",
            f"plan         {memory['num_slots']} slots of {format_bytes(memory['slot_bytes'])} in "
            f"{format_bytes(memory['budget_bytes'])}, {num_draft_tokens} draft tokens",
            f"build        {timings['wall_seconds']:.1f} s, peak memory "
            f"{format_bytes(timings['peak_memory_bytes'])} with interpreter and libraries",
        ]
    )


def _describe_predictor(predictor: Mapping[str, Any]) -> list[str]:
    """How well it does, if there is one."""
    if not predictor["recall"]:
        return []
    found, early = (
        ", ".join(f"{recall:.4f}" for recall in predictor[name])
        for name in ("recall", "early_router")
    )
    return [f"predictor    recall by layers ahead: {found}; of the later router itself: {early}"]


def _describe_left_out(names: Sequence[str]) -> str:
    """How many tensors of the checkpoint are in no bundle, if any."""
    return f"; {len(names)} tensors of multi-token prediction left out" if names else ""


def _describe_fallback(draft: Mapping[str, Any]) -> str:
    """How many experts the method could not be used on, if any."""
    count = len(draft["fallback_experts"])
    return f"; {count} experts by rtn: calibration hardly reaches them" if count else ""
