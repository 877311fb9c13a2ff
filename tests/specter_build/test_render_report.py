"""The report's page: all figures are there to be read, nothing is fetched, and it can be seen."""

from __future__ import annotations

import copy
import io
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from specter_build.render_report import render
from specter_runtime.manifest import Plan
from specter_runtime.units import format_bytes
from tests.browser import Browser, find_chromium, open_browser

XHTML, SVG = "{http://www.w3.org/1999/xhtml}", "{http://www.w3.org/2000/svg}"
HOSTILE = (
    '</title></style><script src="//x">alert(1)</script><img src="http://x/y" onerror="z()">\0'
)
SHOWN = HOSTILE.replace("\0", "\N{REPLACEMENT CHARACTER}")

Json = dict[str, Any]


@pytest.fixture(scope="module")
def report(tiny_bundle: Path) -> Json:
    return dict(json.loads((tiny_bundle / "report.json").read_text("utf-8")))


@pytest.fixture(scope="module")
def plan(tiny_bundle: Path) -> Plan:
    return Plan.from_dict(json.loads((tiny_bundle / "plan.json").read_text("utf-8")), "plan.json")


@pytest.fixture(scope="module")
def page(tiny_bundle: Path) -> str:
    return (tiny_bundle / "report.html").read_text("utf-8")


@pytest.fixture(scope="module")
def root(page: str) -> ElementTree.Element:
    """Raises if the page is no well-formed XML."""
    return ElementTree.fromstring(page)


def make_large(report: Json) -> Json:
    """The report of a model of 58 layers of 256 experts behind three dense ones, no predictor."""
    large, chance = copy.deepcopy(report), random.Random(0)
    del large["predictor"]
    large["memory"] |= {"num_slots": 2000, "predictor_bytes": 0, "budget_bytes": 40 * 2**30}
    large["layers"] = []
    for number in range(3, 61):
        layer = copy.deepcopy(report["layers"][0])
        counts = [int(chance.paretovariate(1)) * chance.randint(0, 9) for _ in range(256)]
        layer |= {
            "layer": number,
            "recall": chance.uniform(0.9, 1),
            "weighted_recall": chance.uniform(0.95, 1),
            "relative_quantization_error": chance.uniform(0.01, 0.02),
            "expert_counts": counts,
            "never_reached": [expert for expert, count in enumerate(counts) if not count],
            "lru_hit_curve": [1 - 0.98 ** (slots + 1) for slots in range(256)],
        }
        large["layers"].append(layer)
    worst = min(large["layers"], key=lambda layer: float(layer["recall"]))
    large["recall"] |= {"worst": worst["recall"], "worst_layer": worst["layer"]}
    large["lru_hit_curve"] = large["layers"][0]["lru_hit_curve"]
    return large


def chart(root: ElementTree.Element, label: str) -> ElementTree.Element:
    [found] = [svg for svg in root.iter(f"{SVG}svg") if svg.get("aria-label") == label]
    return found


def titles(root: ElementTree.Element, label: str) -> list[str]:
    return [title.text or "" for title in chart(root, label).iter(f"{SVG}title")]


def lines(root: ElementTree.Element, label: str) -> dict[str, dict[float, float]]:
    """Name of each line -> x -> y, from the titles of its points."""
    found: dict[str, dict[float, float]] = {}
    for title in titles(root, label):
        match = re.fullmatch(r"(.*): .* (\S+), (\S+)", title)
        assert match is not None
        found.setdefault(match[1], {})[float(match[2])] = float(match[3])
    return found


def table(root: ElementTree.Element, label: str) -> list[dict[str, str]]:
    """The table's rows by the names of its columns."""
    [region] = [div for div in root.iter(f"{XHTML}div") if div.get("aria-label") == label]
    header, *rows = [[cell.text or "" for cell in row] for row in region.iter(f"{XHTML}tr")]
    return [dict(zip(header, row, strict=True)) for row in rows]


def assert_shown(shown: Mapping[float, float], values: Mapping[float, float]) -> None:
    """Four digits of every value: off by half of the fourth, and a rounding of the quotient."""
    assert shown.keys() == values.keys()
    for key, value in values.items():
        digit = 10.0 ** (math.floor(math.log10(abs(value))) - 3) if value else 0.0
        assert abs(shown[key] - value) <= 0.5 * digit * (1 + 1e-9), key


def by_key(figures: Mapping[str, float]) -> dict[float, float]:
    return {int(key): value for key, value in figures.items()}


def from_one(values: list[float]) -> dict[float, float]:
    return dict(enumerate(values, start=1))


# ---- the figures ----------------------------------------------------------------------------


def test_page_of_a_bundle_is_that_of_its_records(
    tiny_bundle: Path, report: Json, plan: Plan, page: str
) -> None:
    assert page == render(report, plan)
    assert "report.html" in json.loads((tiny_bundle / "manifest.json").read_text("utf-8"))["files"]


def test_recall_of_each_layer_is_drawn_with_the_mean_and_the_worst(
    root: ElementTree.Element, report: Json
) -> None:
    drawn = lines(root, "Routing recall by layer")
    layers = report["layers"]
    assert_shown(drawn["recall"], {layer["layer"]: layer["recall"] for layer in layers})
    weighted = {layer["layer"]: layer["weighted_recall"] for layer in layers}
    assert_shown(drawn["weighted"], weighted)
    mean = report["recall"]["mean"]
    assert_shown(drawn[f"mean recall {mean:.4g}"], {0: mean, 2: mean})
    drawing = chart(root, "Routing recall by layer")
    [ring] = drawing.iter(f"{SVG}circle")
    [worst] = [
        path.get("transform")
        for path in drawing.iter(f"{SVG}path")
        if path.findtext(f"{SVG}title", "").startswith(
            f"recall: layer {report['recall']['worst_layer']},"
        )
    ]
    assert worst == f"translate({ring.get('cx')} {ring.get('cy')})"
    assert f"worst {report['recall']['worst']:.4g}" in [
        text.text for text in drawing.iter(f"{SVG}text")
    ]


def test_what_depends_on_the_number_of_tokens_is_drawn(
    root: ElementTree.Element, report: Json
) -> None:
    windows, acceptance = report["windows"], report["acceptance"]
    drawn = lines(root, "Window recall and acceptance by number of tokens K")
    assert_shown(
        drawn["recall over a window of K tokens"],
        {int(k): window["recall"] for k, window in windows.items()},
    )
    assert_shown(drawn["first K drafted tokens accepted"], from_one(acceptance["by_position"]))
    drawn = lines(root, "Expected acceptance length by number of draft tokens K")
    assert_shown(drawn["expected"], by_key(acceptance["expected_length"]))
    assert drawn["if all were accepted"] == {k: k + 1 for k in (1, 2, 4, 8, 16)}
    drawn = lines(root, "Experts of a layer that a window of tokens uses")
    unions = {int(k): window["union"] for k, window in windows.items()}
    assert_shown(drawn["mean of the layers"], unions)
    by_layer = [by_key({k: w["union"] for k, w in x["windows"].items()}) for x in report["layers"]]
    assert_shown(drawn["largest layer"], {k: max(x[k] for x in by_layer) for k in unions})
    assert_shown(drawn["smallest layer"], {k: min(x[k] for x in by_layer) for k in unions})
    assert drawn["if no two shared any"] == {1: 2, 2: 4, 4: 8, 8: 8, 16: 8}  # top-2 of 8 experts


def test_every_experts_count_is_in_the_heat_map(root: ElementTree.Element, report: Json) -> None:
    assert titles(root, "Tokens of the calibration set by layer and expert") == [
        f"layer {layer['layer']}, expert {expert}: {count}"
        for layer in report["layers"]
        for expert, count in enumerate(layer["expert_counts"])
    ]


def test_hit_curve_is_drawn_with_the_chosen_capacity(
    root: ElementTree.Element, report: Json
) -> None:
    label = "Hit rate of a layer's LRU cache by number of its slots"
    drawn = lines(root, label)
    assert_shown(drawn["mean of the layers"], from_one(report["lru_hit_curve"]))
    curves = [layer["lru_hit_curve"] for layer in report["layers"]]
    assert_shown(drawn["best layer"], from_one([max(x) for x in zip(*curves, strict=True)]))
    assert_shown(drawn["worst layer"], from_one([min(x) for x in zip(*curves, strict=True)]))
    slots = report["memory"]["num_slots"] / len(report["layers"])
    texts = [text.text for text in chart(root, label).iter(f"{SVG}text")]
    assert f"chosen: {slots:.4g}" in texts


def test_memory_is_drawn_by_kind(root: ElementTree.Element, report: Json) -> None:
    memory = report["memory"]
    kinds = {
        "dense weights": memory["dense_bytes"],
        "draft": memory["draft_bytes"],
        "predictor": memory["predictor_bytes"],
        "KV cache": memory["kv_cache_bytes"],
        "buffers": memory["buffer_bytes"],
        "expert slots": memory["num_slots"] * memory["slot_bytes"],
    }
    kinds["unused"] = memory["budget_bytes"] - sum(kinds.values())
    assert titles(root, "Fast memory by kind") == [
        f"{kind}: {format_bytes(nbytes)}, {nbytes / memory['budget_bytes']:.1%}"
        for kind, nbytes in kinds.items()
    ]


def test_predicted_times_are_drawn_whatever_the_policies_are_called(
    report: Json, plan: Plan
) -> None:
    predicted = {"no draft": 0.25, "4 draft tokens": 0.0625, HOSTILE: 2.0}
    drawn = replace(plan, predicted=predicted, chosen="4 draft tokens", reason=HOSTILE)
    root = ElementTree.fromstring(render(report, drawn))
    assert titles(root, "Predicted seconds per output token by policy") == [
        "no draft: 250 ms",
        "4 draft tokens: 62.5 ms (chosen)",
        f"{SHOWN}: 2000 ms",
    ]


def test_quantization_error_is_drawn_by_layer(root: ElementTree.Element, report: Json) -> None:
    drawn = lines(root, "Relative quantization error by layer")
    name = "relative_quantization_error"
    assert_shown(drawn["error"], {layer["layer"]: layer[name] for layer in report["layers"]})
    assert_shown(drawn[f"mean {report[name]:.4g}"], {0: report[name], 2: report[name]})


def test_predictors_recall_is_drawn_by_layer_and_reach(
    root: ElementTree.Element, report: Json
) -> None:
    drawn = lines(root, "Recall of the predictor by layer")
    for name, words in (("recall", "fitted"), ("early_router", "later router asked early")):
        for ahead in range(2):
            values = {
                layer["layer"]: layer[name][ahead]
                for layer in report["predictor"]["layers"]
                if ahead < len(layer[name])
            }
            assert_shown(drawn[f"{words}, {ahead + 1} ahead"], values)


def test_tables_have_every_figure(root: ElementTree.Element, report: Json) -> None:
    rows = table(root, "Figures by number of tokens")
    acceptance = report["acceptance"]
    assert [row["K"] for row in rows] == [str(k + 1) for k in range(16)]
    for row, chance in zip(rows, acceptance["by_position"], strict=True):
        k, window = row["K"], report["windows"].get(row["K"])
        assert row["first K accepted"] == f"{chance:.4f}"
        assert row["window recall"] == (f"{window['recall']:.4f}" if window else "")
        assert row["union of experts"] == (f"{window['union']:.2f}" if window else "")
        length = acceptance["expected_length"].get(k)
        assert row["expected length"] == ("" if length is None else f"{length:.2f}")
    slots = report["memory"]["num_slots"] // 3
    assert table(root, "Figures by layer") == [
        {
            "layer": str(layer["layer"]),
            "recall": f"{layer['recall']:.4f}",
            "weighted": f"{layer['weighted_recall']:.4f}",
            "set-exact": f"{layer['set_exact']:.4f}",
            "quantization error": f"{layer['relative_quantization_error']:.6f}",
            "entropy": f"{layer['normalized_entropy']:.4f}",
            "never reached": str(len(layer["never_reached"])),
            "by rtn": str(len(layer["fallback_experts"])),
            f"LRU hits, {slots} slots": f"{layer['lru_hit_curve'][slots - 1]:.4f}",
            "union, 16 tokens": f"{layer['windows']['16']['union']:.2f}",
        }
        for layer in report["layers"]
    ]


def test_headline_and_settings_are_the_reports(
    root: ElementTree.Element, report: Json, plan: Plan
) -> None:
    names = [name.text for name in root.iter(f"{XHTML}dt")]
    figures = dict(zip(names, (value.text for value in root.iter(f"{XHTML}dd")), strict=True))
    recall, memory = report["recall"], report["memory"]
    assert figures == {
        "mean recall": f"{recall['mean']:.4g}",
        f"worst recall (layer {recall['worst_layer']})": f"{recall['worst']:.4g}",
        "weighted recall": f"{recall['weighted']:.4g}",
        "set-exact": f"{recall['set_exact']:.4g}",
        "acceptance, greedy": f"{report['acceptance']['rate']:.4g}",
        "acceptance, sampled": f"{report['acceptance']['sampled_rate']:.4g}",
        "bits a weight of the draft": f"{report['draft']['bits_per_weight']:.4g}",
        "quantization error": f"{report['relative_quantization_error']:.4g}",
        "entropy of uniform": f"{report['normalized_entropy']:.4g}",
        "experts never reached": str(report["num_experts_never_reached"]),
        "memory budget": "3.0 MiB",
        "expert slots": f"{memory['num_slots']} of {format_bytes(memory['slot_bytes'])}",
        "draft tokens": str(plan.num_draft_tokens),
    }
    settings = {(row["of"], row["setting"]): row["value"] for row in table(root, "Settings")}
    assert settings["draft", "method"] == "rtn"
    assert settings["draft", "group size"] == "16"
    assert settings["draft", "symmetric"] == "yes"
    assert settings["calibration", "num sequences"] == "4"
    sha256 = report["calibration"]["sha256"]
    assert settings["calibration", "sha256"] == f"{sha256[:16]}\N{HORIZONTAL ELLIPSIS}"
    assert settings["hardware", "link bytes per second"] == "1000000000"


# ---- other reports --------------------------------------------------------------------------


def test_report_alone_has_a_page_without_what_the_plan_knows(report: Json, page: str) -> None:
    alone = render(report)
    assert "Predicted TPOT" in page
    assert "Predicted TPOT" not in alone
    assert "<dt>draft tokens</dt>" not in alone


def test_large_model_without_predictor_has_a_page(report: Json) -> None:
    large = make_large(report)
    root = ElementTree.fromstring(render(large))
    cells = titles(root, "Tokens of the calibration set by layer and expert")
    assert len(cells) == 58 * 256
    assert cells[0].startswith("layer 3, expert 0: ")
    drawn = lines(root, "Routing recall by layer")
    assert_shown(drawn["recall"], {layer["layer"]: layer["recall"] for layer in large["layers"]})
    assert "Predictor" not in [heading.text for heading in root.iter(f"{XHTML}h2")]
    assert len(table(root, "Figures by layer")) == 58


def test_model_of_one_layer_and_one_window_has_a_page(report: Json) -> None:
    small = copy.deepcopy(report)
    small["layers"] = small["layers"][:1]
    small["memory"]["num_slots"] = 5
    for record in (small, small["layers"][0]):
        record["windows"] = {"1": record["windows"]["1"]}
    root = ElementTree.fromstring(render(small))
    assert_shown(
        lines(root, "Routing recall by layer")["recall"], {0: report["layers"][0]["recall"]}
    )


def test_hostile_names_are_text(report: Json, plan: Plan) -> None:
    hostile = copy.deepcopy(report) | {"model_type": HOSTILE, "left_out_tensors": [HOSTILE]}
    hostile["model"] = {"name": HOSTILE}
    hostile["draft"]["method"] = HOSTILE
    hostile["draft"]["num_experts_by_bits"] = {HOSTILE: 1}
    root = ElementTree.fromstring(render(hostile, plan))
    assert root.findtext(f".//{XHTML}h1") == f"Calibration report of {SHOWN}"
    assert f"Not in the bundle: {SHOWN}." in (root.findtext(f".//{XHTML}p") or "")
    assert_fetches_nothing(render(hostile, plan))


# ---- the page -------------------------------------------------------------------------------


class References(HTMLParser):
    """Elements that run or load something, and attributes that name it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.styles: list[str] = []
        self._is_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._is_style = tag == "style"
        if tag in {"script", "link", "img", "image", "use", "iframe", "object", "embed", "base"}:
            self.found.append(tag)
        for name, value in attrs:
            if name in {"src", "href", "xlink:href", "srcset", "data", "action"}:
                self.found.append(f"{name}={value}")
            if name.startswith("on"):
                self.found.append(name)
            if name == "style":
                self.styles.append(value or "")
            if value and "url(" in value:
                self.found.append(f"{name}={value}")

    def handle_data(self, data: str) -> None:
        if self._is_style:
            self.styles.append(data)

    def handle_endtag(self, tag: str) -> None:
        self._is_style = False


def assert_fetches_nothing(page: str) -> None:
    """As a browser reads it, which is not as XML."""
    references = References()
    references.feed(page)
    references.close()
    assert references.found == []
    assert references.styles
    for style in references.styles:
        assert not re.search(r"url\(|@import|http", style)


def test_page_runs_and_fetches_nothing(page: str) -> None:
    assert_fetches_nothing(page)


OVERLAPS = """(() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg[role=img]")) {
    const label = svg.getAttribute("aria-label"), frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll("text")].map(t => [t, t.getBoundingClientRect()]);
    texts.forEach(([text, a], i) => {
      if (a.left < frame.left - 1 || a.right > frame.right + 1 ||
          a.top < frame.top - 1 || a.bottom > frame.bottom + 1)
        found.push(`${label}: ${text.textContent} is cut off`);
      for (const [other, b] of texts.slice(i + 1))
        if (a.left < b.right - 1 && b.left < a.right - 1 &&
            a.top < b.bottom - SLACK && b.top < a.bottom - SLACK)
          found.push(`${label}: ${text.textContent} on ${other.textContent}`);
    });
  }
  return found;
})()"""
"""Texts of drawings that run into each other or out of the drawing; boxes are a line high, which is
more than the letters, so SLACK pixels of overlap above one another are none to the eye."""


@pytest.fixture(scope="module")
def chromium() -> str:
    path = find_chromium()
    if path is None:
        pytest.skip("there is no chromium to see the page in: apt-get install chromium")
    return path


def palette(page: str, scheme: str) -> dict[str, tuple[int, ...]]:
    """The page's colours by name, as they are in its style."""
    light, _, dark = page.partition("prefers-color-scheme: dark")
    style = light if scheme == "light" else dark.partition("body {")[0]
    colours = re.findall(r"--([a-z0-9-]+): #([0-9a-f]{6})", style)
    return {name: tuple(bytes.fromhex(colour)) for name, colour in colours}


def see(browser: Browser) -> Image.Image:
    return Image.open(io.BytesIO(browser.screenshot())).convert("RGB")


def test_page_is_seen_in_light_and_dark_and_printed(
    chromium: str, demo_bundle: Path, report: Json, tmp_path: Path
) -> None:
    """A real report, and one of a large model, in a wide window and on a telephone.

    All colours of the palette are on the page: the memory bar's legend has a square of each.
    """
    large = tmp_path / "large.html"
    large.write_text(render(make_large(report)), "utf-8")
    with open_browser(chromium) as browser:
        for path in (demo_bundle / "report.html", large):
            page = path.read_text("utf-8")
            for width in (1200, 420):
                for scheme in ("light", "dark"):
                    browser.open(path, width, scheme)
                    assert browser.requests() == [path.as_uri()]
                    assert browser.complaints() == []
                    assert browser.evaluate("document.documentElement.scrollWidth") <= width
                    assert browser.evaluate(OVERLAPS.replace("SLACK", "4")) == []
                    picture, colours = see(browser), palette(page, scheme)
                    assert picture.getpixel((0, 0)) == colours["page"]
                    counts = picture.getcolors(picture.width * picture.height) or []
                    seen = {colour for _, colour in counts}
                    assert {colours[f"series-{i}"] for i in range(1, 8)} <= seen
                    # Blends of nine colours where edges are smoothed: a blank page has one colour.
                    assert len(seen) > 100
            browser.open(path, 700, "dark", media="print")
            picture = see(browser)
            assert picture.getpixel((0, 0)) == (255, 255, 255)
            counts = picture.getcolors(picture.width * picture.height) or []
            light = palette(page, "light")
            assert {light[f"series-{i}"] for i in range(1, 8)} <= {colour for _, colour in counts}
            assert browser.evaluate("document.documentElement.scrollWidth") <= 700
            assert browser.evaluate(OVERLAPS.replace("SLACK", "4")) == []
            pdf = browser.print()
            assert pdf.startswith(b"%PDF-")
            assert 2 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6
