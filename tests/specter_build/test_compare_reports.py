"""Comparing reports: what is more than noise is marked, what is not is not, differences are said.

Reports are made by hand, but for those at the end, which are of builds of the demo checkpoint.
"""

from __future__ import annotations

import copy
import itertools
import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import specter_build.compare_reports
from specter_build.check_expressions import check, parse_condition
from specter_build.cli import main_compare
from specter_build.compare_reports import (
    LEVEL,
    MIN_SEQUENCES,
    RESOLUTION,
    Comparison,
    Row,
    Verdict,
    compare,
    simultaneous_margins,
)
from specter_build.pipeline import build
from specter_build.read_report import FIGURES, HIGHER, VERSIONS, Kind, kind_of, parse_report
from specter_build.recipe import Recipe
from specter_build.report import REPORT_VERSION
from specter_build.show_comparison import to_html, to_markdown, to_record, to_text
from specter_runtime.errors import BundleError, SpecterError
from tests.checkpoints import recipe_dict
from tests.commands import Command

XHTML = "{http://www.w3.org/1999/xhtml}"

Json = dict[str, Any]
REPOSITORY = Path(__file__).resolve().parent.parent.parent
NUM_SEQUENCES, NUM_LAYERS = 16, 3
SPREAD = 0.01
"""Standard deviation of a figure over sequences."""


# ---- reports made by hand -------------------------------------------------------------------


def report_of(seed: int = 0, num_sequences: int = NUM_SEQUENCES, **shifts: float) -> Json:
    """A report whose figures vary by ``SPREAD`` over sequences.

    Args:
        seed: of these deviations and of the draw of the sequences.
        num_sequences: of the calibration set.
        shifts: section -> what is added to every figure in it that is a mean over sequences.
    """
    rng = np.random.default_rng(seed)

    def sample(mean: float, section: str) -> list[float]:
        values = rng.normal(mean + shifts.get(section, 0.0), SPREAD, num_sequences)
        return [round(value, 6) for value in values.tolist()]

    def mean_of(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values)

    recalls = [sample(0.9, f"layer_{layer}") for layer in range(NUM_LAYERS)]
    sequences = {
        "recall.mean": sample(0.9, "recall"),
        "recall.weighted": sample(0.9, "recall"),
        "recall.set_exact": sample(0.8, "recall"),
        "acceptance.rate": sample(0.9, "acceptance"),
        "acceptance.sampled_rate": sample(0.9, "acceptance"),
        "acceptance.expected_length.1": sample(1.9, "acceptance"),
        "windows.1.recall": sample(0.9, "windows"),
        "windows.1.union": [2.0] * num_sequences,
        "windows.16.recall": sample(0.9, "windows"),
        "windows.16.union": sample(5.0, "unions"),
    }
    means = {path: mean_of(values) for path, values in sequences.items()}
    worst = min(range(NUM_LAYERS), key=lambda layer: mean_of(recalls[layer]))
    report: Json = {
        "report_version": 2,
        "model_type": "qwen3_moe",
        "model": {"name": "tiny", "sha256": "a" * 64},
        "calibration": {
            "sources": ["text.jsonl"],
            "sha256": "b" * 64,
            "tokens_sha256": f"{seed:064x}",
            "num_sequences": num_sequences,
            "sequence_length": 64,
            "seed": seed,
        },
        "draft": {"method": "rtn", "bits": 4, "bits_per_weight": 4.5, "fallback_experts": []},
        "recall": {"worst": mean_of(recalls[worst]), "worst_layer": worst},
        "acceptance": {},
        "windows": {"16": {}, "1": {}},
        "layers": [
            {
                "layer": layer,
                "recall": mean_of(values),
                "recall_by_sequence": values,
                "expert_counts": [1] * 8,
            }
            for layer, values in enumerate(recalls)
        ],
        "plan": {
            "num_draft_tokens": 4,
            "seconds_per_token": 0.25,
            "hardware": {"link_bytes_per_second": 1e9},
        },
        "memory": {
            "num_slots": 100,
            "slot_bytes": 4096,
            "dense_bytes": 1000,
            "predictor_bytes": 100,
            "kv_cache_bytes": 2000,
            "buffer_bytes": 300,
            "budget_bytes": 10**6,
        },
        "sizes": {"dense_bytes": 1000, "draft_bytes": 20_000, "shard_bytes": 50_000},
        "predictor": {"recall": [0.8, 0.7]},
        "relative_quantization_error": 0.01,
        "normalized_entropy": 0.9,
        "num_experts_never_reached": 1,
        "sequences": sequences,
    }
    for path, value in means.items():
        put(report, path, value)
    return report


def put(report: Json, path: str, value: Any) -> None:
    """Set what a path leads to."""
    *parents, last = path.split(".")
    node = report
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value


def version_1(report: Json) -> Json:
    """The same report as the version before had it."""
    old = copy.deepcopy(report) | {"report_version": 1}
    for key in ("model", "plan", "sequences"):
        del old[key]
    del old["calibration"]["tokens_sha256"]
    for layer in old["layers"]:
        del layer["recall_by_sequence"]
    return old


def compared(a: Json, b: Json) -> Comparison:
    return compare(parse_report(a, "a.json"), parse_report(b, "b.json"))


def marked(comparison: Comparison) -> dict[str, Verdict]:
    rows = comparison.having(Verdict.REGRESSION, Verdict.IMPROVEMENT)
    return {row.figure: row.verdict for row in rows}


def row_of(comparison: Comparison, figure: str) -> Row:
    return next(row for row in comparison.rows if row.figure == figure)


def test_reports_that_are_written_are_reports_that_are_read() -> None:
    assert max(VERSIONS) == REPORT_VERSION


def test_report_does_not_differ_from_itself() -> None:
    comparison = compared(report_of(), report_of())
    assert {row.verdict for row in comparison.rows} == {Verdict.SAME}
    assert comparison.notes == (
        "Calibrated on the same 16 sequences of 64 tokens: compared sequence by sequence.",
    )


def test_regression_of_one_layer_is_marked_there_and_nowhere_else() -> None:
    a, b = report_of(), report_of(layer_1=-0.05)
    found = marked(compared(a, b))
    assert found.keys() >= {"layers.1.recall", "recall.worst"}
    assert found == dict.fromkeys(["recall.worst", "layers.1.recall"], Verdict.REGRESSION)
    found = marked(compared(b, a))
    assert found == dict.fromkeys(["recall.worst", "layers.1.recall"], Verdict.IMPROVEMENT)


def test_other_draw_of_sequences_is_noise() -> None:
    comparison = compared(report_of(0), report_of(1))
    assert marked(comparison) == {}
    noise = {row.figure for row in comparison.having(Verdict.NOISE)}
    assert noise >= {"recall.mean", "recall.worst", "layers.2.recall", "windows.16.union"}
    (note, *_) = comparison.notes
    assert note.startswith("Calibrated on two draws from the same text")


def test_pairing_finds_what_independent_samples_do_not() -> None:
    """A change by a tenth of the spread over sequences, the same in each of them."""
    shift = -0.1 * SPREAD
    assert marked(compared(report_of(0), report_of(0, recall=shift))).keys() == {
        "recall.mean",
        "recall.weighted",
        "recall.set_exact",
    }
    assert marked(compared(report_of(0), report_of(1, recall=shift))) == {}


def test_regression_is_found_between_independent_samples_of_different_size() -> None:
    comparison = compared(report_of(0), report_of(1, num_sequences=40, acceptance=-0.05))
    assert marked(comparison) == dict.fromkeys(
        ["acceptance.rate", "acceptance.sampled_rate", "acceptance.expected_length.1"],
        Verdict.REGRESSION,
    )


def paths_of_kind(*kinds: Kind) -> Iterator[str]:
    figures = parse_report(report_of(), "report.json").figures
    yield from (path for path in figures if kind_of(path).kind in kinds)


@pytest.mark.parametrize("path", list(paths_of_kind(*Kind)))
def test_every_figure_has_its_direction(path: str) -> None:
    """All of a figure is raised alike, so that nothing varies and any change is more than noise."""
    a, b = report_of(), report_of()
    delta = 1.0
    if path.startswith("layers."):
        layer = b["layers"][int(path.split(".")[1])]
        layer["recall"] += delta
        layer["recall_by_sequence"] = [x + delta for x in layer["recall_by_sequence"]]
    elif path == "recall.worst":
        layer = b["layers"][b["recall"]["worst_layer"]]
        layer["recall_by_sequence"] = [x + delta for x in layer["recall_by_sequence"]]
        b["recall"]["worst"] += delta
    elif path.startswith("predictor."):
        b["predictor"]["recall"][int(path.split(".")[2]) - 1] += delta
    else:
        put(b, path, parse_report(a, "").figures[path] + delta)
        if path in b["sequences"]:
            b["sequences"][path] = [x + delta for x in b["sequences"][path]]
    if path == "windows.1.union":  # experts a token uses: another structure, nothing to compare
        assert all(row.figure != path for row in compared(a, b).rows)
        return
    figure, verdict = kind_of(path), row_of(compared(a, b), path).verdict
    if figure.better == 0 or figure.kind is Kind.SAMPLE:
        assert verdict is Verdict.CHANGED
    else:
        better = figure.better == HIGHER
        assert verdict is (Verdict.IMPROVEMENT if better else Verdict.REGRESSION)


def test_directions_are_those_of_the_words() -> None:
    """Bytes and seconds cost, recall, acceptance and slots are what they are spent on."""
    for figure in FIGURES:
        costs = figure.unit in ("bytes", "seconds") and figure.path != "memory.budget_bytes"
        gains = "recall" in figure.path or figure.path.startswith("acceptance")
        gains |= figure.path == "memory.num_slots"
        assert figure.better == gains - costs, figure.path


def test_rows_are_sorted_by_verdict_then_importance() -> None:
    a, b = report_of(0), report_of(1, layer_0=-0.05, acceptance=0.05)
    b["sizes"]["draft_bytes"] += 1
    b["relative_quantization_error"] *= 2
    rows = compared(a, b).rows
    order = list(Verdict)
    verdicts = [order.index(row.verdict) for row in rows]
    assert verdicts == sorted(verdicts)
    for _, group in itertools.groupby(rows, key=lambda row: row.verdict):
        importance = [FIGURES.index(kind_of(row.figure)) for row in group]
        assert importance == sorted(importance)
    assert [row.figure for row in rows[:3]] == [
        "recall.worst",
        "layers.0.recall",
        "sizes.draft_bytes",
    ]


# ---- reports that are not of one kind -------------------------------------------------------


def test_version_1_is_compared_without_intervals() -> None:
    a, b = version_1(report_of()), report_of(layer_1=-0.5)
    b["calibration"]["tokens_sha256"] = "c" * 64
    b["sizes"]["draft_bytes"] -= 1
    for comparison in (compared(a, b), compared(a, version_1(b))):
        assert all(row.margin is None for row in comparison.rows)
        assert marked(comparison) == {"sizes.draft_bytes": Verdict.IMPROVEMENT}
        assert row_of(comparison, "layers.1.recall").verdict is Verdict.CHANGED
        assert "version 1 has no figures by sequence" in comparison.notes[0]
        assert "taken to be the same" in comparison.notes[1]
        assert "the same 16 sequences" in comparison.notes[2]


def test_sizes_of_another_model_are_not_marked() -> None:
    a, b = report_of(), report_of(layer_1=-0.05)
    b["model"]["sha256"] = "c" * 64
    b["sizes"]["draft_bytes"] *= 2
    b["memory"]["num_slots"] -= 1
    comparison = compared(a, b)
    assert comparison.notes[0].startswith("Different models, 'tiny' (aaaaaaaa) and 'tiny' (ccccc")
    assert marked(comparison).keys() == {"recall.worst", "layers.1.recall"}
    for figure in ("sizes.draft_bytes", "memory.num_slots"):
        assert row_of(comparison, figure).verdict is Verdict.CHANGED


def test_layers_of_a_model_of_another_structure_are_not_compared() -> None:
    a, b = report_of(), report_of(acceptance=-0.1)
    b["model"]["sha256"] = "c" * 64
    for layer in b["layers"]:
        layer["layer"] += 1
    b["recall"]["worst_layer"] += 1
    comparison = compared(a, b)
    figures = {row.figure for row in comparison.rows}
    assert {"recall.mean", "acceptance.rate", "sizes.draft_bytes"} < figures
    assert not any(re.match(r"layers|windows|recall\.set_exact", figure) for figure in figures)
    assert "acceptance.rate" in marked(comparison)
    assert any("by layer and window are left out" in note for note in comparison.notes)
    assert any(note.startswith("Not compared: 'layers.0.recall'") for note in comparison.notes)


@pytest.mark.parametrize("change", [{"sha256": "c" * 64}, {"sequence_length": 32}], ids=str)
def test_change_that_may_be_another_texts_is_not_marked(change: Json) -> None:
    a, b = report_of(0), report_of(1, layer_1=-0.5)
    b["calibration"] |= change
    b["sizes"]["shard_bytes"] += 1
    comparison = compared(a, b)
    assert marked(comparison) == {"sizes.shard_bytes": Verdict.REGRESSION}
    assert row_of(comparison, "layers.1.recall").verdict is Verdict.CHANGED
    assert row_of(comparison, "layers.0.recall").verdict is Verdict.NOISE
    assert comparison.notes[0].startswith("Calibrated on different texts or lengths")


def test_samples_of_unknown_noise_are_compared_on_the_same_tokens_only() -> None:
    paths = set(paths_of_kind(Kind.SAMPLE))
    assert {"predictor.recall.2", "normalized_entropy", "plan.seconds_per_token"} < paths
    same, other = compared(report_of(0), report_of(0)), compared(report_of(0), report_of(1))
    assert paths <= {row.figure for row in same.rows}
    assert paths.isdisjoint(row.figure for row in other.rows)


@pytest.mark.parametrize(
    ("path", "value"),
    [("memory.budget_bytes", 2), ("plan.num_draft_tokens", 2), ("plan.chosen", "no draft")],
)
def test_memory_of_another_plan_is_not_marked(path: str, value: Any) -> None:
    a, b = report_of(), report_of()
    put(b, path, value)
    b["memory"]["num_slots"] -= 50
    comparison = compared(a, b)
    assert marked(comparison) == {}
    assert row_of(comparison, "memory.num_slots").verdict is Verdict.CHANGED
    assert any("another budget or another way to run" in note for note in comparison.notes)


def test_time_on_other_hardware_is_not_compared() -> None:
    a, b = report_of(), report_of()
    put(b, "plan.hardware.link_bytes_per_second", 2e9)
    comparison = compared(a, b)
    assert all(row.figure != "plan.seconds_per_token" for row in comparison.rows)
    assert comparison.notes[1] == (
        "Planned for other hardware (link_bytes_per_second 1000000000.0 / 2000000000.0): seconds a "
        "token are not compared."
    )


def test_settings_of_drafts_that_differ_are_named() -> None:
    a, b = report_of(), report_of()
    b["draft"] |= {"bits": {"default": 4}, "bits_per_weight": 9, "clip": "mse"}
    assert compared(a, b).notes[1] == ('Drafts differ: bits 4 / {"default": 4}; clip null / "mse".')


def test_too_few_sequences_have_no_intervals() -> None:
    few = MIN_SEQUENCES - 1
    comparison = compared(report_of(0), report_of(1, num_sequences=few, layer_1=-0.5))
    assert marked(comparison) == {}
    assert all(row.margin is None for row in comparison.rows)
    assert any(note.startswith(f"{few} sequences are too few") for note in comparison.notes)
    enough = compared(report_of(0), report_of(1, num_sequences=MIN_SEQUENCES, layer_1=-0.5))
    assert "layers.1.recall" in marked(enough)


def test_figures_that_one_report_does_not_have_are_named() -> None:
    a, b = report_of(), report_of()
    b["predictor"]["recall"] = []
    del b["windows"]["16"]
    comparison = compared(a, b)
    assert comparison.notes[1] == (
        "Not compared: 'predictor.recall.1', 'predictor.recall.2', 'windows.16.recall', "
        "'windows.16.union'."
    )


# ---- bad input ------------------------------------------------------------------------------

NEEDED = (
    *("model_type", "model.name", "model.sha256", "calibration.sha256", "calibration.seed"),
    *("calibration.num_sequences", "calibration.tokens_sha256", "draft", "recall.mean"),
    *("recall.worst_layer", "acceptance.rate", "acceptance.expected_length", "windows.1.recall"),
    *("layers", "plan.num_draft_tokens", "plan.hardware", "memory.num_slots", "sizes.draft_bytes"),
    *("predictor", "relative_quantization_error", "sequences"),
)


def parent_of(report: Json, path: str) -> tuple[Any, str]:
    *parents, last = path.split(".")
    node: Any = report
    for key in parents:
        node = node[key]
    return node, last


@pytest.mark.parametrize("path", NEEDED)
def test_missing_key_is_named(path: str) -> None:
    report = report_of()
    node, last = parent_of(report, path)
    del node[last]
    with pytest.raises(BundleError) as caught:
        parse_report(report, "b.json")
    assert str(caught.value).startswith("b.json: ")
    assert last in str(caught.value)


@pytest.mark.parametrize(
    "value",
    [None, "0.9", True, math.nan, math.inf, 1e200, 10**400, [], {}],
    ids=lambda x: f"{x!r:.9}",
)
@pytest.mark.parametrize("path", ["recall.mean", "memory.num_slots", "plan.seconds_per_token"])
def test_figure_that_is_no_number_is_refused(path: str, value: Any) -> None:
    report = report_of()
    put(report, path, value)
    with pytest.raises(BundleError, match=rf"b\.json: '{path}': expected a finite number"):
        parse_report(report, "b.json")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("report_version", 3, "report_version is 3, expected 1 or 2"),
        ("report_version", "2", "report_version is '2', expected 1 or 2"),
        ("report_version", True, "report_version is True, expected 1 or 2"),
        ("layers", [], "'layers': expected objects, each with a 'layer' of its own, found None"),
        ("layers", [{"layer": 0}, {"layer": 0}], "'layers': expected objects, each with"),
        ("layers", [{"layer": 0}], "'layers.0.recall' is missing"),
        ("windows", [1], "'windows': expected an object, found [1]"),
        ("windows", {"x\x1b": {}}, "'windows': expected numbers as keys, found 'x\\x1b'"),
        ("recall.worst_layer", 9, "'layers.9.recall_by_sequence' is missing"),
        ("calibration.num_sequences", 17, "have [16] entries, expected 17"),
        ("calibration.num_sequences", "16", "calibration: num_sequences: expected int, found '16'"),
        ("draft", [4], "'draft': expected an object, found [4]"),
        ("predictor.recall", 1, "'predictor.recall': expected a list, found 1"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, message: str) -> None:
    report = report_of()
    put(report, path, value)
    with pytest.raises(BundleError) as caught:
        parse_report(report, "b.json")
    assert str(caught.value).startswith("b.json: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([0.9] * (NUM_SEQUENCES - 1), "entries, expected 16"),
        ([0.9] * (NUM_SEQUENCES - 1) + ["0.9"], "expected a finite number .* found '0.9'"),
        (0.9, "'sequences: recall.mean': expected a list, found 0.9"),
    ],
)
def test_figures_by_sequence_are_as_many_numbers_as_sequences(values: Any, message: str) -> None:
    report = report_of()
    report["sequences"]["recall.mean"] = values
    with pytest.raises(BundleError, match=message):
        parse_report(report, "b.json")


def places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something is in a JSON value; of a list, its first entry."""
    if isinstance(node, dict):
        children = list(node.items())
    else:
        children = list(enumerate(node[:1])) if isinstance(node, list) else []
    for key, child in children:
        yield (*path, key)
        yield from places(child, (*path, key))


def test_any_part_replaced_by_anything_is_compared_or_refused() -> None:
    """No other exception; what is compared makes valid JSON."""
    outcomes = set()
    for place in places(report_of()):
        for value in (None, -1, 1e308, "x", [], {}, [None], {"1": None}):
            report = report_of()
            node: Any = report
            for key in place[:-1]:
                node = node[key]
            node[place[-1]] = value
            try:
                comparison = compared(report_of(), report)
            except BundleError:
                outcomes.add("refused")
            else:
                json.dumps(to_record(comparison, {}), allow_nan=False)
                outcomes.add("compared")
    assert outcomes == {"refused", "compared"}


# ---- the bootstrap --------------------------------------------------------------------------


def exhaustive_ratios(groups: Sequence[np.ndarray]) -> list[float]:
    """The largest ratio among the figures for every pattern of signs, ascending."""
    found = []
    for signs in itertools.product((1.0, -1.0), repeat=sum(map(len, groups))):
        change, variance, start = 0.0, 0.0, 0
        for group in groups:
            turned = (group - group.mean(0)) * np.array(signs[start : start + len(group)])[:, None]
            start += len(group)
            change = change + turned.mean(0)
            variance = variance + turned.var(0, ddof=1) / len(group)
        found.append(float((np.abs(change) / np.sqrt(variance)).max()))
    return sorted(found)


@pytest.mark.parametrize("sizes", [(13,), (6, 7)], ids=["paired", "independent"])
def test_margins_are_those_of_all_patterns_of_signs(sizes: tuple[int, ...]) -> None:
    """The factor found lies between two quantiles of the factor's own distribution.

    Of 20,000 replicates, 20 exceed the factor that is found. Ratios that a share of 0.003 of all
    patterns exceeds are exceeded by 60 replicates, give or take 7.7: below the 20th largest by
    5 standard deviations. Ratios that a share of 0.0002 exceeds (at most one pattern of 8192) are
    exceeded by 4 on average, more than 20 times with a chance of 1e-9 (Poisson).
    """
    rng = np.random.default_rng(3)
    groups = [rng.normal(size=(size, 2)) * [1.0, 5.0] for size in sizes]
    ratios = exhaustive_ratios(groups)
    error = np.sqrt(sum(group.var(0, ddof=1) / len(group) for group in groups))
    factors = simultaneous_margins(groups) / error
    assert factors[0] == pytest.approx(factors[1], rel=1e-12)  # one factor; a few roundings
    low, high = (ratios[math.ceil((1 - share) * len(ratios)) - 1] for share in (0.003, 0.0002))
    rounding = 1e-12  # sums are in another order
    assert low * (1 - rounding) <= factors[0] <= high * (1 + rounding)


def test_what_does_not_vary_has_no_margin_and_does_not_widen_others() -> None:
    values = np.random.default_rng(0).normal(size=(20, 1))
    constant = np.full((20, 1), 0.987654)
    alone = simultaneous_margins([values])
    both = simultaneous_margins([np.hstack([values, constant])])
    assert both.tolist() == [pytest.approx(alone[0], rel=1e-12), 0.0]  # a few roundings
    assert simultaneous_margins([constant]).tolist() == [0.0]


@pytest.mark.parametrize("is_paired", [True, False], ids=["paired", "independent"])
@pytest.mark.parametrize("correlation", [0.0, 0.8])
def test_false_alarms_are_as_rare_as_the_level_says(
    monkeypatch: pytest.MonkeyPatch, is_paired: bool, correlation: float
) -> None:
    """Thirty figures of two samples of one distribution; at 5 %, where 400 comparisons tell much.

    If a comparison raises a false alarm with a chance of at most 0.05, their number exceeds 42 with
    a chance of 2e-5 (binomial: mean 20, standard deviation 4.4). Without one factor for all
    figures, independent ones would raise 1 - 0.95**30 = 79 %: 314. If the chance is at least 0.02,
    there are none with a chance of 3e-4: the margins are not merely wide.
    """
    monkeypatch.setattr(specter_build.compare_reports, "LEVEL", 0.05)
    monkeypatch.setattr(specter_build.compare_reports, "NUM_REPLICATES", 1000)
    rng = np.random.default_rng(11)

    def sample() -> np.ndarray:
        own, common = rng.normal(size=(NUM_SEQUENCES, 30)), rng.normal(size=(NUM_SEQUENCES, 1))
        return math.sqrt(1 - correlation) * own + math.sqrt(correlation) * common

    alarms = 0
    for _ in range(400):
        a, b = sample(), sample()
        margins = simultaneous_margins([b - a] if is_paired else [a, b])
        alarms += bool((np.abs((b - a).mean(0)) > margins).any())
    assert 1 <= alarms <= 42


# ---- --fail-if ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fires"),
    [
        ("recall.mean<-0.01", True),
        ("recall.mean<-0.03", False),
        ("recall.mean < 0", True),
        (" recall.mean>=-1 ", True),
        ("recall.mean>-1e-3", False),
        ("recall.mean<-1%", True),
        ("recall.mean<-2.5 %", False),
        ("sizes.draft_bytes>+5%", True),
        ("sizes.draft_bytes>1999", True),
        ("sizes.draft_bytes>2000", False),
        ("sizes.draft_bytes>=2000", True),
        ("sizes.draft_bytes<=2000", True),
        ("sizes.draft_bytes<2000", False),
        ("sizes.draft_bytes>10%", False),
        ("sizes.draft_bytes>=.1e2%", True),
        ("sizes.shard_bytes<0", False),
        ("sizes.shard_bytes<=0%", True),
        ("memory.predictor_bytes>1e9%", True),  # from nothing to something
        ("layers.1.recall<-1", False),
        ("regression", True),
    ],
)
def test_expression_fires_on_the_change_from_a_to_b(text: str, fires: bool) -> None:
    a, b = report_of(), report_of(recall=-0.02)
    a["memory"]["predictor_bytes"] = 0
    b["sizes"]["draft_bytes"] = 22_000  # 10 % more, exactly
    found = check(parse_condition(text), compared(a, b))
    assert (found is not None) == fires


def test_regression_fires_on_nothing_else() -> None:
    condition = parse_condition("regression")
    assert check(condition, compared(report_of(0), report_of(1))) is None
    assert check(condition, compared(report_of(0), report_of(0, layer_1=0.1))) is None
    found = check(condition, compared(report_of(0), report_of(0, layer_1=-0.1)))
    assert found == "'recall.worst', 'layers.1.recall'"


@pytest.mark.parametrize(
    "text",
    [
        *("", "recall.mean", "recall.mean<", "<1", "recall.mean=1", "recall.mean==1", "a<<1"),
        *("recall.mean<x", "recall.mean<nan", "recall.mean<inf", "recall.mean<1e999", "a<1%%"),
        *("recall.mean<1 2", "recall..mean<1", ".a<1", "a.<1", "recall.mean<0x1", "recall.mean<1;"),
        *("regressions", "regression>0\n<", "recall.mean<\u0661", "recall.mean<1_0", "a b<1"),
    ],
)
def test_expression_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SpecterError, match="expected FIGURE<NUMBER") as caught:
        parse_condition(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("recall.men<0", "recall.mean"),
        ("draft_bytes>5%", "sizes.draft_bytes"),
        ("layers.3.recall<0", "layers.2.recall"),
        ("windows.16.recal<0", "windows.16.recall"),
    ],
)
def test_figure_that_is_not_compared_is_an_error_that_names_the_nearest(
    text: str, nearest: str
) -> None:
    comparison = compared(report_of(), report_of())
    with pytest.raises(SpecterError, match=f"nearest are .*{nearest}"):
        check(parse_condition(text), comparison)


# ---- what is printed ------------------------------------------------------------------------


def example() -> Comparison:
    """A bit of everything."""
    a, b = report_of(0), report_of(1, layer_1=-0.05)
    b["sizes"]["draft_bytes"] -= 5000
    b["relative_quantization_error"] = 0.02
    b["draft"]["clip"] = "<b>|`*x*`"
    return compared(a, b)


def test_text_has_a_line_for_all_that_changed() -> None:
    text = to_text(example())
    plain = re.sub(r"\x1b\[\d+m", "", text)
    lines = {line.split()[0]: line.split() for line in plain.splitlines() if line.split()}
    assert lines["layers.1.recall"][-1] == "regression"
    assert lines["sizes.draft_bytes"][1:] == (
        ["19.5", "KiB", "14.6", "KiB", "-4.9", "KiB", "(-25.0%)", "improvement"]
    )
    assert lines["relative_quantization_error"][1:] == ["0.0100", "0.0200", "+0.0100"]
    assert lines["recall.mean"][-1] == "noise"
    assert "sizes.dense_bytes" not in lines
    assert "2 regressions, 1 improvement, 1 other change, " in plain
    dim = [line for line in text.splitlines() if line.startswith("\x1b[2m")]
    assert len(dim) == sum(line.endswith("noise") for line in plain.splitlines()) - 1  # the heading


def test_markdown_is_a_table_in_which_nothing_of_the_reports_is_markup() -> None:
    text = to_markdown(example(), {"recall.mean<0": "recall.mean -0.1"})
    head, table, folded = text.partition("| figure |")[0], *text.split("<details>", 1)
    assert "**failed**: recall.mean&lt;0 (recall.mean -0.1)" in head
    assert "| layers.1.recall |" in table
    assert "| **regression** |" in table
    assert "| recall.mean |" not in table
    assert "| recall.mean |" in folded
    assert "&lt;b&gt;\\|\\`\\*x\\*\\`" in folded
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert {len(re.findall(r"(?<!\\)\|", line)) for line in rows} == {7}


def test_page_says_what_the_text_says() -> None:
    root = ElementTree.fromstring(to_html(example(), {"recall.mean<0": "recall.mean -0.1"}))
    rows = {
        row.findtext(f"{XHTML}th"): (row.get("class"), row.findtext(f"{XHTML}td[5]"))
        for row in root.iter(f"{XHTML}tr")
    }
    assert rows["layers.1.recall"] == ("bad", "regression")
    assert rows["sizes.draft_bytes"] == ("good", "improvement")
    assert rows["recall.mean"] == ("faint", "noise")
    told = [element.text or "" for element in root.iter(f"{XHTML}p")]
    assert "failed: recall.mean<0 (recall.mean -0.1)" in told
    assert set(example().notes) <= set(told)


def test_record_has_every_figure() -> None:
    comparison = example()
    record = json.loads(json.dumps(to_record(comparison, {"x<1": "x 0"}), allow_nan=False))
    assert record["failed"] == {"x<1": "x 0"}
    assert record["level"] == LEVEL
    assert len(record["rows"]) == len(comparison.rows)
    rows = {row["figure"]: row for row in record["rows"]}
    assert rows["sizes.draft_bytes"] == {
        "figure": "sizes.draft_bytes",
        "a": 20_000,
        "b": 15_000,
        "change": -5000,
        "relative_change": -0.25,
        "margin": None,
        "verdict": "improvement",
    }
    assert rows["recall.mean"]["margin"] > RESOLUTION


# ---- the command ----------------------------------------------------------------------------


@pytest.fixture
def specter_compare(command: Command) -> Command:
    return lambda *arguments: command(main_compare, *arguments)


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    """Two reports, the second with a regression."""
    for name, report in {"a": report_of(0), "b": report_of(0, layer_1=-0.05)}.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(report))
    return tmp_path / "a.json", tmp_path / "b.json"


def test_command_is_an_entry_point() -> None:
    scripts = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["scripts"]
    assert scripts["specter-compare"] == "specter_build.cli:main_compare"


def test_changes_alone_are_no_failure(specter_compare: Command, files: tuple[Path, Path]) -> None:
    outcome = specter_compare(*files)
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "2 regressions" in outcome.stdout
    assert "\x1b" not in outcome.stdout  # no terminal


def test_expression_that_fires_is_code_1_and_named(
    specter_compare: Command, files: tuple[Path, Path]
) -> None:
    options = ("--fail-if", "recall.worst<-0.01", "--fail-if", "recall.mean<-0.01")
    outcome = specter_compare(*files, *options, "--fail-if", "regression")
    assert outcome.code == 1
    assert [line.split(" (")[0] for line in outcome.stderr.splitlines()] == [
        "failed: recall.worst<-0.01",
        "failed: regression",
    ]
    assert specter_compare(*files, "--fail-if", "recall.mean<-0.01").code == 0
    assert specter_compare(*reversed(files), "--fail-if", "regression").code == 0


def test_each_form_is_printed_alone(specter_compare: Command, files: tuple[Path, Path]) -> None:
    record = json.loads(specter_compare(*files, "--json", "--fail-if", "regression").stdout)
    assert record["failed"].keys() == {"regression"}
    assert specter_compare(*files, "--markdown").stdout.startswith("### specter-compare: 2 reg")


def test_page_is_written_beside_what_is_printed(
    specter_compare: Command, files: tuple[Path, Path], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    plain = specter_compare(*files)
    assert specter_compare(*files, "--html", page) == plain
    assert page.read_text().startswith("<!DOCTYPE html>")
    assert {path.name for path in tmp_path.iterdir()} == {"a.json", "b.json", "page.html"}


def test_bundles_are_compared_by_their_reports(specter_compare: Command, tiny_bundle: Path) -> None:
    outcome = specter_compare(tiny_bundle, tiny_bundle / "report.json", "--fail-if", "regression")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "no regressions, no improvements, no other changes, no changes" in outcome.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--fail-if", "recall.mean"), "--fail-if 'recall.mean': expected FIGURE<NUMBER"),
        (("--fail-if", "recal.mean<0"), "the nearest are recall.mean"),
        (("--html", "absent/page.html"), "absent/page.html: cannot be written: "),
        (("--csv",), "No such option"),
    ],
)
def test_bad_option_is_code_2_and_nothing_is_written(
    specter_compare: Command,
    files: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(files[0].parent)
    page = ("--html", "page.html") if "--html" not in options else ()
    outcome = specter_compare(*files, *page, *options)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr
    assert {path.name for path in files[0].parent.iterdir()} == {"a.json", "b.json"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "does not exist"),
        ("{", "b.json: not valid JSON"),
        ("[]", "b.json: expected a JSON object, found list"),
        ("{}", "b.json: report_version is None, expected 1 or 2"),
    ],
)
def test_file_that_is_no_report_is_code_2(
    specter_compare: Command, files: tuple[Path, Path], content: str | None, message: str
) -> None:
    a, b = files
    b.unlink() if content is None else b.write_text(content)
    outcome = specter_compare(a, b)
    assert (outcome.code, outcome.stdout) == (2, "")
    assert message in outcome.stderr


def test_folder_without_a_report_is_code_2(
    specter_compare: Command, files: tuple[Path, Path]
) -> None:
    outcome = specter_compare(files[0].parent, files[1])
    assert (outcome.code, outcome.stdout) == (2, "")
    assert "report.json: cannot be read: No such file or directory" in outcome.stderr


# ---- builds ---------------------------------------------------------------------------------

TWO_BITS_IN_LAYER_3 = {"default": 4, "overrides": [{"layers": [3], "experts": "all", "bits": 2}]}


@pytest.fixture(scope="module")
def builds(demo_checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Bundles of the demo checkpoint: two draws of calibration sequences, one with a fault."""
    folder = tmp_path_factory.mktemp("builds")
    for name, seed, bits in (
        ("seed 0", 0, 4),
        ("seed 1", 1, 4),
        ("fault", 0, TWO_BITS_IN_LAYER_3),
    ):
        recipe = recipe_dict(
            demo_checkpoint,
            folder / name,
            draft={"bits": bits, "group_size": 32},
            calibration={"num_sequences": 32, "sequence_length": 64, "seed": seed},
            plan={"memory_budget": "40MiB"},
        )
        build(Recipe.model_validate(recipe), folder)
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("before", ["seed 0", "seed 1"])
def test_layer_at_two_bits_is_a_regression(
    specter_compare: Command, builds: dict[str, Path], before: str
) -> None:
    """On the same sequences and on others."""
    options = ("--json", "--fail-if", "regression")
    outcome = specter_compare(builds[before], builds["fault"], *options)
    assert outcome.code == 1
    rows = json.loads(outcome.stdout)["rows"]
    regressions = {row["figure"] for row in rows if row["verdict"] == "regression"}
    assert {"recall.mean", "recall.set_exact", "acceptance.sampled_rate"} <= regressions
    improvements = {row["figure"] for row in rows if row["verdict"] == "improvement"}
    assert improvements == {"sizes.draft_bytes", "memory.num_slots"}
    unchanged = {row["figure"] for row in rows if row["verdict"] in ("same", "noise")}
    # layers are drafted from the first on; the fault shows behind layer 3
    assert {f"layers.{layer}.recall" for layer in range(4)} <= unchanged


def test_two_draws_of_calibration_sequences_are_no_regression(
    specter_compare: Command, builds: dict[str, Path]
) -> None:
    outcome = specter_compare(builds["seed 0"], builds["seed 1"], "--fail-if", "regression")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert "no regressions, no improvements, no other changes, 2" in outcome.stdout
