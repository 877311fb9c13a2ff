"""Step: the calibration report as a page for people, ``report.html``. Pure.

Reads the dictionary that ``report`` makes, or that ``report.json`` holds, and takes from it only
what it shows; without a plan, it does without what only the plan knows. Every value that is drawn
can be read in the drawing's titles or in the tables at the end.

Called by: pipeline.  Next: svg_charts, html_page.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specter_build.html_page import Html, Section, figures_of_merit, page, paragraph, table
from specter_build.svg_charts import (
    Mark,
    Series,
    bar_chart,
    heat_map,
    line_chart,
    precise,
    stacked_bar,
)
from specter_runtime.manifest import Plan
from specter_runtime.units import format_bytes

Report = Mapping[str, Any]


def render(report: Report, plan: Plan | None = None) -> str:
    """The whole page; the same inputs give the same text.

    Args:
        report: see ``report.make_report``.
        plan: of the same bundle.
    """
    sections = [
        recall_by_layer(report),
        recall_and_acceptance(report),
        expected_length(report),
        union_growth(report),
        expert_frequency(report),
        lru_hit_curve(report),
        memory_by_kind(report),
        *([predicted_tpot(plan)] if plan is not None else []),
        quantization_error(report),
        *predictor_recall(report),
        by_number_of_tokens(report),
        settings(report, plan),
        by_layer(report),
    ]
    lead = Html(f"{paragraph(_describe(report))}\n{figures_of_merit(_headline(report, plan))}")
    return page(f"Calibration report of {_name(report)}", sections, lead)


def _name(report: Report) -> str:
    """Of the model, as far as the report knows it."""
    return str(report.get("model", {}).get("name", report["model_type"]))


def _describe(report: Report) -> str:
    """What was measured, on what, in a sentence or two."""
    draft, calibration = report["draft"], report["calibration"]
    widths = "/".join(draft["num_experts_by_bits"])
    left_out = report["left_out_tensors"]
    return (
        f"The draft, {draft['method']} with {widths} bits in groups of {draft['group_size']}, "
        f"beside its target on {calibration['num_sequences']} sequences of "
        f"{calibration['sequence_length']} tokens."
        + (f" Not in the bundle: {', '.join(left_out)}." if left_out else "")
    )


def _headline(report: Report, plan: Plan | None) -> dict[str, str]:
    """The figures to see first."""
    recall, acceptance, memory = report["recall"], report["acceptance"], report["memory"]
    figures = {
        "mean recall": precise(recall["mean"]),
        f"worst recall (layer {recall['worst_layer']})": precise(recall["worst"]),
        "weighted recall": precise(recall["weighted"]),
        "set-exact": precise(recall["set_exact"]),
        "acceptance, greedy": precise(acceptance["rate"]),
        "acceptance, sampled": precise(acceptance["sampled_rate"]),
        "bits a weight of the draft": precise(report["draft"]["bits_per_weight"]),
        "quantization error": precise(report["relative_quantization_error"]),
        "entropy of uniform": precise(report["normalized_entropy"]),
        "experts never reached": precise(report["num_experts_never_reached"]),
        "memory budget": format_bytes(memory["budget_bytes"]),
        "expert slots": f"{memory['num_slots']} of {format_bytes(memory['slot_bytes'])}",
    }
    if plan is not None:
        figures["draft tokens"] = str(plan.num_draft_tokens)
    return figures


# ---- charts ---------------------------------------------------------------------------------


def recall_by_layer(report: Report) -> Section:
    """Recall of every routed layer, their mean, the worst of them."""
    recall = report["recall"]
    points = _by_layer(report, "recall")
    mean = [(x, recall["mean"]) for x in (points[0][0], points[-1][0])]
    chart = line_chart(
        "Routing recall by layer",
        [
            Series("recall", points),
            Series("weighted", _by_layer(report, "weighted_recall")),
            Series(f"mean recall {precise(recall['mean'])}", mean),
        ],
        "layer",
        "recall",
        ends=(None, 1.0),
        marks=[Mark(f"worst {precise(recall['worst'])}", recall["worst_layer"], recall["worst"])],
    )
    note = (
        "Share of the experts that the target chooses which the draft, given the same tokens, "
        "chooses too; weighted by their routing weights, it is the share of the weight. Layers "
        "without routed experts are left out."
    )
    return Section("Recall by layer", chart, note)


def recall_and_acceptance(report: Report) -> Section:
    """What becomes of both as more tokens are drafted."""
    chances = report["acceptance"]["by_position"]
    chart = line_chart(
        "Window recall and acceptance by number of tokens K",
        [
            Series("recall over a window of K tokens", _by_window(report, "recall")),
            Series("first K drafted tokens accepted", list(enumerate(chances, start=1))),
        ],
        "tokens K",
        "share",
        ends=(None, 1.0),
    )
    note = (
        "Recall of the union of experts that a window of K tokens needs, mean of the layers; and "
        "the chance that K tokens drafted greedily are all accepted."
    )
    return Section("Recall and acceptance by K", chart, note)


def expected_length(report: Report) -> Section:
    """Committed tokens by number of draft tokens."""
    lengths = _by_key(report["acceptance"]["expected_length"])
    chart = line_chart(
        "Expected acceptance length by number of draft tokens K",
        [
            Series("expected", lengths),
            Series("if all were accepted", [(k, k + 1) for k, _ in lengths]),
        ],
        "draft tokens K",
        "tokens committed a target pass",
        ends=(0.0, None),
    )
    note = "With the token that the target adds itself, recovered or bonus."
    return Section("Expected acceptance length", chart, note)


def union_growth(report: Report) -> Section:
    """How many experts of a layer a window of tokens needs."""
    mean = _by_window(report, "union")
    layers = [_by_window(layer, "union") for layer in report["layers"]]
    num_experts = len(report["layers"][0]["expert_counts"])
    per_token = mean[0][1] / mean[0][0]  # the shortest window is a single token
    chart = line_chart(
        "Experts of a layer that a window of tokens uses",
        [
            Series("mean of the layers", mean),
            Series("largest layer", [max(values) for values in zip(*layers, strict=True)]),
            Series("smallest layer", [min(values) for values in zip(*layers, strict=True)]),
            Series("if no two shared any", [(n, min(n * per_token, num_experts)) for n, _ in mean]),
        ],
        "tokens in the window",
        "experts",
        ends=(0.0, None),
    )
    note = (
        f"Different experts, of {num_experts}, that are used by any token of a window: what "
        "verifying it has to have in the cache."
    )
    return Section("Union growth", chart, note)


def expert_frequency(report: Report) -> Section:
    """Which experts calibration used, and which it never did."""
    chart = heat_map(
        "Tokens of the calibration set by layer and expert",
        {str(layer["layer"]): layer["expert_counts"] for layer in report["layers"]},
        "expert",
        "layer",
        "never reached",
    )
    note = "Tokens of the calibration set that use an expert."
    return Section("Expert frequency", chart, note)


def lru_hit_curve(report: Report) -> Section:
    """Hit rates of caches of all sizes, with the size that the budget leaves."""
    curves = [layer["lru_hit_curve"] for layer in report["layers"]]
    slots = report["memory"]["num_slots"] / len(curves)
    chart = line_chart(
        "Hit rate of a layer's LRU cache by number of its slots",
        [
            Series("mean of the layers", _from_one(report["lru_hit_curve"])),
            Series("best layer", _from_one([max(hits) for hits in zip(*curves, strict=True)])),
            Series("worst layer", _from_one([min(hits) for hits in zip(*curves, strict=True)])),
        ],
        "slots a layer",
        "hit rate",
        ends=(0.0, 1.0),
        marks=[Mark(f"chosen: {precise(slots)}", slots)],
    )
    note = (
        f"The budget leaves {report['memory']['num_slots']} slots, {precise(slots)} for each "
        "layer with routed experts. The curves are those of a plain LRU cache for each layer, "
        "empty at the start of each sequence; the runtime's slots are shared by all layers."
    )
    return Section("LRU hit curve", chart, note)


def memory_by_kind(report: Report) -> Section:
    """What the budget is spent on."""
    memory = report["memory"]
    slots = memory["num_slots"] * memory["slot_bytes"]
    kinds = {
        "dense weights": memory["dense_bytes"],
        "draft": memory["draft_bytes"],
        "predictor": memory.get("predictor_bytes", 0),
        "KV cache": memory["kv_cache_bytes"],
        "buffers": memory["buffer_bytes"],
        "expert slots": slots,
    }
    kinds["unused"] = memory["budget_bytes"] - sum(kinds.values())
    chart = stacked_bar("Fast memory by kind", kinds, format_bytes)
    note = f"Of a budget of {format_bytes(memory['budget_bytes'])}."
    return Section("Memory by kind", chart, note)


def predicted_tpot(plan: Plan) -> Section:
    """What the planner compared."""
    chart = bar_chart(
        "Predicted seconds per output token by policy",
        plan.predicted,
        _milliseconds,
        chosen=plan.chosen,
    )
    note = (
        f"Simulated on the machine's profile, on the routes of the calibration set. {plan.reason}."
    )
    return Section("Predicted TPOT by policy", chart, note)


def _milliseconds(seconds: float) -> str:
    return f"{precise(seconds * 1e3)} ms"


def quantization_error(report: Report) -> Section:
    """How far the draft's weights are from the target's."""
    mean = report["relative_quantization_error"]
    points = _by_layer(report, "relative_quantization_error")
    chart = line_chart(
        "Relative quantization error by layer",
        [
            Series("error", points),
            Series(f"mean {precise(mean)}", [(x, mean) for x in (points[0][0], points[-1][0])]),
        ],
        "layer",
        "squared error / squared weights",
        ends=(0.0, None),
    )
    return Section("Quantization error", chart, "Of the experts that have a stand-in.")


def predictor_recall(report: Report) -> list[Section]:
    """How well later layers' experts are foretold without a draft, if anything foretells them."""
    predictor = report.get("predictor", {})
    if not predictor.get("recall"):
        return []
    series = []
    for name, words in (("recall", "fitted"), ("early_router", "later router asked early")):
        for ahead in range(len(predictor[name])):
            points = [
                (float(layer["layer"]), layer[name][ahead])
                for layer in predictor["layers"]
                if ahead < len(layer[name])
            ]
            series.append(Series(f"{words}, {ahead + 1} ahead", points))
    chart = line_chart(
        "Recall of the predictor by layer", series, "layer", "recall", ends=(None, 1.0)
    )
    note = (
        "Share of a later layer's experts that are foretold from a layer's hidden states, where "
        "nothing is drafted; on calibration sequences that nothing was fitted to."
    )
    return [Section("Predictor", chart, note)]


# ---- tables ---------------------------------------------------------------------------------


def by_number_of_tokens(report: Report) -> Section:
    """The figures that depend on K."""
    acceptance, windows = report["acceptance"], report["windows"]
    chances = dict(enumerate(acceptance["by_position"], start=1))
    lengths = acceptance["expected_length"]
    rows = [
        [
            str(k),
            _cell(windows.get(str(k), {}).get("recall"), 4),
            _cell(windows.get(str(k), {}).get("union"), 2),
            _cell(chances.get(k), 4),
            _cell(lengths.get(str(k)), 2),
        ]
        for k in sorted({*chances, *map(int, windows), *map(int, lengths)})
    ]
    header = ["K", "window recall", "union of experts", "first K accepted", "expected length"]
    return Section("By number of tokens", table("Figures by number of tokens", header, rows))


def settings(report: Report, plan: Plan | None) -> Section:
    """What the figures depend on."""
    groups = {
        "model": {"model_type": report["model_type"]},
        "draft": report["draft"],
        "calibration": report["calibration"],
        "hardware": plan.hardware if plan is not None else {},
    }
    rows = [
        [group, name.replace("_", " "), _setting(value)]
        for group, values in groups.items()
        for name, value in sorted(values.items())
        if not isinstance(value, list | dict) and value is not None
    ]
    return Section("Settings", table("Settings", ["of", "setting", "value"], rows))


def _setting(value: object) -> str:
    """In full unless it is long, such as a hash: ``report.json`` has it in full."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = precise(value) if isinstance(value, float) else str(value)
    return text if len(text) <= 24 else f"{text[:16]}\N{HORIZONTAL ELLIPSIS}"


def by_layer(report: Report) -> Section:
    """The figures of each layer."""
    slots = report["memory"]["num_slots"] // len(report["layers"])
    header = ["layer", "recall", "weighted", "set-exact", "quantization error", "entropy"]
    header += ["never reached", "by rtn", f"LRU hits, {slots} slots"]
    longest = max(report["windows"], key=int)
    header += [f"union, {longest} tokens"]
    rows = [
        [
            str(layer["layer"]),
            *(_cell(layer[name], 4) for name in ("recall", "weighted_recall", "set_exact")),
            _cell(layer["relative_quantization_error"], 6),
            _cell(layer["normalized_entropy"], 4),
            str(len(layer["never_reached"])),
            str(len(layer["fallback_experts"])),
            _cell(layer["lru_hit_curve"][slots - 1] if slots else 0.0, 4),
            _cell(layer["windows"][longest]["union"], 2),
        ]
        for layer in report["layers"]
    ]
    body = table("Figures by layer", header, rows)
    note = (
        "Entropy is that of the experts' usage, relative to uniform usage. By rtn: experts that "
        "too few calibration tokens reach for the draft's method."
    )
    return Section("By layer", body, note, is_wide=True)


def _cell(value: float | None, digits: int) -> str:
    """A number of a column in which all have as many digits behind the point."""
    return "" if value is None else f"{value:.{digits}f}"


# ---- points ---------------------------------------------------------------------------------


def _by_layer(report: Report, name: str) -> list[tuple[float, float]]:
    return [(layer["layer"], layer[name]) for layer in report["layers"]]


def _by_window(record: Report, name: str) -> list[tuple[float, float]]:
    """A figure by window length, of the report or of a layer."""
    return _by_key({key: window[name] for key, window in record["windows"].items()})


def _by_key(figures: Mapping[str, float]) -> list[tuple[float, float]]:
    """JSON's keys are text: by their number."""
    return sorted((int(key), value) for key, value in figures.items())


def _from_one(values: Sequence[float]) -> list[tuple[float, float]]:
    return list(enumerate(values, start=1))
