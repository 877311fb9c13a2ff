"""Charts are well-formed, drawn to scale, and show their values; what is missing is left out."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from itertools import pairwise
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specter_build.svg_charts import (
    MAX_MARKERS,
    WIDTH,
    Mark,
    Series,
    axis_ticks,
    bar_chart,
    heat_map,
    line_chart,
    precise,
    stacked_bar,
    tick_names,
)

SVG = "{http://www.w3.org/2000/svg}"
NAN, INFINITY = math.nan, math.inf
HOSTILE = "</svg><script>\"'&\0"
SHOWN = HOSTILE.replace("\0", "\N{REPLACEMENT CHARACTER}")

ROUNDED = 0.05
"""Coordinates have one digit behind the point: they are off by no more."""


def parse(chart: str) -> ElementTree.Element:
    """The chart under one root; raises if it is no well-formed XML."""
    return ElementTree.fromstring(f"<div>{chart}</div>")


def drawing(chart: str) -> ElementTree.Element:
    found = parse(chart).find(f"{SVG}svg")
    assert found is not None
    return found


def titles(chart: str) -> list[str | None]:
    return [title.text for title in parse(chart).iter(f"{SVG}title")]


def texts(chart: str) -> list[str | None]:
    return [text.text for text in parse(chart).iter(f"{SVG}text")]


def legend(chart: str) -> list[str | None]:
    return [name.text for name in parse(chart).iter("span")]


def spots(chart: str) -> list[tuple[float, float]]:
    """Where the markers are."""
    moves = [path.get("transform") for path in drawing(chart).iter(f"{SVG}path")]
    found = [re.fullmatch(r"translate\((\S+) (\S+)\)", move) for move in moves if move]
    return [(float(match[1]), float(match[2])) for match in found if match]


def heights(chart: str) -> dict[float, float]:
    """Where the grid lines are, by the number beside them."""
    found = {}
    elements = list(drawing(chart))
    for line, text in pairwise(elements):
        if line.get("stroke") == "var(--line)":
            level = re.fullmatch(r"M\S+ (\S+)H\S+", line.get("d", ""))
            assert level is not None
            assert text.text is not None
            found[float(text.text)] = float(level[1])
    return found


# ---- lines ----------------------------------------------------------------------------------


def test_points_lie_where_their_values_say_and_show_them() -> None:
    points = [(0, 0.25), (1, 1.0), (4, 0.0), (6, 0.625)]
    chart = line_chart("label", [Series("one", points)], "layer", "share", ends=(0.0, 1.0))
    levels = heights(chart)
    assert levels.keys() == {0.0, 0.2, 0.4, 0.6, 0.8, 1.0}
    found = spots(chart)
    for (x, y), (left, down) in zip(points, found, strict=True):
        across = found[0][0] + (found[-1][0] - found[0][0]) * x / 6
        assert left == pytest.approx(across, abs=2 * ROUNDED + 1e-9)
        height = levels[0.0] + (levels[1.0] - levels[0.0]) * y
        assert down == pytest.approx(height, abs=2 * ROUNDED + 1e-9)
    assert titles(chart) == [
        "one: layer 0, 0.25",
        "one: layer 1, 1",
        "one: layer 4, 0",
        "one: layer 6, 0.625",
    ]


def test_a_value_that_is_not_finite_leaves_a_gap() -> None:
    points = [(0, 1.0), (1, 2.0), (2, NAN), (3, 3.0), (4, INFINITY), (5, 5.0), (6, 4.0)]
    chart = line_chart("label", [Series("one", points)], "x", "y")
    lines = [path.get("d", "") for path in drawing(chart).iter(f"{SVG}path") if path.get("fill")]
    assert [re.sub("[^ML]", "", line) for line in lines] == ["MLMML"]
    assert len(spots(chart)) == 5
    assert len(titles(chart)) == 5


@pytest.mark.parametrize("points", [[], [(0.0, NAN)], [(0.0, INFINITY), (1.0, -INFINITY)]])
def test_lines_without_values_are_a_sentence(points: list[tuple[float, float]]) -> None:
    chart = line_chart("Recall by layer", [Series("one", points)], "x", "y")
    assert chart == "<p>Recall by layer: no values.</p>"
    assert line_chart("none", [], "x", "y") == "<p>none: no values.</p>"


@pytest.mark.parametrize("value", [0.0, 1.0, -3.5, 1e-9, 123456789.0])
def test_a_single_point_is_in_the_middle_of_an_axis_round_it(value: float) -> None:
    chart = line_chart("label", [Series("one", [(7, value)])], "x", "y")
    assert "7" in texts(chart)
    [(_, down)] = spots(chart)
    levels = sorted(heights(chart.replace("k<", "e3<").replace("M<", "e6<")).values())
    assert levels[0] < down < levels[-1]


def test_an_end_that_is_given_holds_even_if_all_values_are_there() -> None:
    ticks = axis_ticks([1.0, 1.0], (None, 1.0))
    assert ticks[-1] == 1.0
    assert ticks[0] < 1.0
    assert axis_ticks([0.0], (0.0, None))[0] == 0.0
    assert axis_ticks([0.25], (0.5, None))[0] == 0.5
    assert axis_ticks([0.3, 0.99], (0.25, 1.0))[0] == 0.25


def test_lines_differ_in_more_than_colour() -> None:
    series = [Series(f"line {i}", [(0, i), (1, i)]) for i in range(7)]
    groups = list(drawing(line_chart("label", series, "x", "y")).iter(f"{SVG}g"))
    lines = [group.findall(f"{SVG}path") for group in groups]
    dashes = {line[0].get("stroke-dasharray") for line in lines}
    assert len(dashes) == len({group.get("fill") for group in groups}) == 7
    assert len({line[1].get("d") for line in lines}) == 4


def test_legend_names_the_lines_in_order() -> None:
    chart = line_chart("label", [Series("a", [(0, 1)]), Series("b", [(0, 2)])], "x", "y")
    assert legend(chart) == ["a", "b"]


def test_many_points_have_values_but_no_visible_markers() -> None:
    few = line_chart("l", [Series("s", [(i, i) for i in range(MAX_MARKERS)])], "x", "y")
    many = line_chart("l", [Series("s", [(i, i) for i in range(MAX_MARKERS + 1)])], "x", "y")
    assert 'opacity="0"' not in few
    assert many.count('opacity="0"') == len(titles(many)) == MAX_MARKERS + 1


def test_marks_are_where_they_should_be_and_named() -> None:
    points = [(0, 0.5), (10, 0.9)]
    marks = [Mark("chosen", 5), Mark("least", 0, 0.5)]
    chart = line_chart("label", [Series("one", points)], "x", "y", marks=marks)
    (left, low), (right, _) = spots(chart)
    ring = drawing(chart).find(f"{SVG}circle")
    assert ring is not None
    assert (ring.get("cx"), ring.get("cy")) == (f"{left:.1f}", f"{low:.1f}")
    vertical = re.search(r'd="M(\S+) \S+V', chart)
    assert vertical is not None
    assert float(vertical[1]) == pytest.approx((left + right) / 2, abs=2 * ROUNDED + 1e-9)
    assert {"chosen", "least"} <= set(texts(chart))


def test_a_mark_beyond_the_points_widens_the_axis() -> None:
    chart = line_chart("l", [Series("s", [(0, 1), (1, 2)])], "x", "y", marks=[Mark("m", 2)])
    vertical = re.search(r'd="M(\S+) \S+V', chart)
    assert vertical is not None
    assert spots(chart)[-1][0] < float(vertical[1]) < WIDTH


# ---- bars -----------------------------------------------------------------------------------


def show(value: float) -> str:
    return f"{value:.2f} s"


def test_bars_are_as_long_as_their_values_say_and_show_them() -> None:
    bars = {"lru": 2.0, "a policy whose name is much too long for its place": 4.0, "none": 0.0}
    chart = bar_chart("label", bars, show, chosen="lru")
    widths = [float(bar.get("width", "")) for bar in drawing(chart).iter(f"{SVG}rect")]
    assert widths[0] == pytest.approx(widths[1] / 2, abs=1.5 * ROUNDED + 1e-9)
    assert widths[1] > 40
    assert widths[2] == 0
    long = "a policy whose name is much too long for its place"
    assert titles(chart) == ["lru: 2.00 s (chosen)", f"{long}: 4.00 s", "none: 0.00 s"]
    assert {"lru", "2.00 s (chosen)", "4.00 s", "none", "0.00 s"} <= set(texts(chart))
    [cut] = [text for text in texts(chart) if text and text.endswith("\N{HORIZONTAL ELLIPSIS}")]
    assert long.startswith(cut[:-1])
    faint = [bar.get("opacity") is not None for bar in drawing(chart).iter(f"{SVG}rect")]
    assert faint == [False, True, True]


def test_a_bar_without_a_value_says_so() -> None:
    chart = bar_chart("label", {"a": NAN, "b": 1.0}, show)
    assert titles(chart) == ["a: n/a", "b: 1.00 s"]
    widths = [float(bar.get("width", "")) for bar in drawing(chart).iter(f"{SVG}rect")]
    assert widths[0] == 0


def test_parts_fill_the_bar_in_proportion_and_are_numbered() -> None:
    parts = {"dense": 1.0, "draft": 3.0, "crumbs": 0.004, "gone": NAN}
    chart = stacked_bar("label", parts, show)
    rects = list(drawing(chart).iter(f"{SVG}rect"))
    widths = [float(rect.get("width", "")) for rect in rects]
    expected = [WIDTH * value / 4.004 for value in (1.0, 3.0, 0.004)]
    assert widths == pytest.approx([*expected, 0.0], abs=ROUNDED + 1e-9)
    starts = [float(rect.get("x", "")) for rect in rects]
    assert starts[:3] == pytest.approx([0, expected[0], expected[0] + expected[1]], abs=ROUNDED)
    assert legend(chart) == [
        "1 dense: 1.00 s, 25.0%",
        "2 draft: 3.00 s, 74.9%",
        "3 crumbs: 0.00 s, 0.1%",
        "4 gone: n/a",
    ]
    assert titles(chart) == [str(entry)[2:] for entry in legend(chart)]
    assert texts(chart) == ["1", "2"]


@pytest.mark.parametrize(
    "draw",
    [
        lambda value: bar_chart("label", {"a": value, "b": 1.0}, show),
        lambda value: stacked_bar("label", {"a": value, "b": 1.0}, show),
        lambda value: heat_map("label", {"0": [value, 1.0]}, "x", "y", "zero"),
    ],
)
def test_negative_lengths_are_refused(draw: Callable[[float], str]) -> None:
    with pytest.raises(ValueError, match=r"-0\.5 is negative"):
        draw(-0.5)


@pytest.mark.parametrize("value", [[], [NAN], [INFINITY, NAN]])
def test_bars_and_cells_without_values_are_a_sentence(value: list[float]) -> None:
    named = {str(i): x for i, x in enumerate(value)}
    sentence = "<p>label: no values.</p>"
    assert bar_chart("label", named, show) == sentence
    assert stacked_bar("label", named, show) == sentence
    assert heat_map("label", {"0": value}, "x", "y", "zero") == sentence
    assert stacked_bar("label", {"a": 0.0}, show) == sentence


# ---- cells ----------------------------------------------------------------------------------


def test_cells_are_the_fuller_the_larger_and_zeros_stand_apart() -> None:
    rows = {"3": [0, 1, 40], "5": [160, NAN, 80]}
    chart = heat_map("label", rows, "expert", "layer", "never reached")
    cells = list(drawing(chart).iter(f"{SVG}rect"))
    assert titles(chart) == [
        "layer 3, expert 0: 0",
        "layer 3, expert 1: 1",
        "layer 3, expert 2: 40",
        "layer 5, expert 0: 160",
        "layer 5, expert 2: 80",
    ]
    places = [(cell.get("x"), cell.get("y")) for cell in cells]
    assert places == [("0", "0"), ("1", "0"), ("2", "0"), ("0", "1"), ("2", "1")]
    assert [cell.get("fill") for cell in cells] == ["var(--series-2)"] + ["var(--series-1)"] * 4
    fills = [float(cell.get("fill-opacity", "nan")) for cell in cells[1:]]
    assert 0 < fills[0] < fills[1] < fills[3] < fills[2] == 1.0
    assert legend(chart) == ["never reached", "up to 160"]
    assert {"3", "5", "0", "1", "2", "layer", "expert"} == set(texts(chart))


def test_names_of_many_rows_do_not_touch() -> None:
    rows = {str(i): [1.0] * 256 for i in range(61)}
    chart = heat_map("label", rows, "expert", "layer", "zero")
    names = [text for text in drawing(chart).iter(f"{SVG}text") if text.get("text-anchor") == "end"]
    heights = sorted(float(text.get("y", "")) for text in names)[:-1]  # the last is the axis' name
    assert len(heights) > 10
    assert all(b - a >= 12 for a, b in pairwise(heights))


# ---- numbers and text -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (123456, "123456"),
        (0.98786926, "0.9879"),
        (1.0, "1"),
        (12345.678, "12346"),
        (0.00001234567, "1.235e-05"),
        (NAN, "n/a"),
        (-INFINITY, "n/a"),
    ],
)
def test_numbers_have_four_digits_and_whole_ones_all(value: float, text: str) -> None:
    assert precise(value) == text


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ([0, 1], ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ([0.9819, 1], ["0.980", "0.985", "0.990", "0.995", "1.000"]),
        ([0, 32], ["0", "10", "20", "30", "40"]),
        ([0, 9_999], ["0k", "2k", "4k", "6k", "8k", "10k"]),
        ([0, 7_000], ["0", "2000", "4000", "6000", "8000"]),
        ([0, 60_000], ["0k", "20k", "40k", "60k"]),
        ([0, 2_500_000], ["0.0M", "0.5M", "1.0M", "1.5M", "2.0M", "2.5M"]),
        ([-1, 1], ["-1.0", "-0.5", "0.0", "0.5", "1.0"]),
    ],
)
def test_ticks_are_round_numbers(values: list[float], names: list[str]) -> None:
    assert tick_names(axis_ticks(values)) == names


@given(
    st.floats(-1e9, 1e9).filter(lambda x: x == 0 or abs(x) > 1e-6),
    st.floats(1e-5, 1e3),
)
def test_ticks_hold_the_values_and_are_told_apart(low: float, relative: float) -> None:
    high = low + relative * (abs(low) or 1.0)
    ticks = axis_ticks([low, high])
    slack = 1e-8 * (ticks[1] - ticks[0])  # a billionth of a step, and the roundings of i * step
    assert ticks[0] <= low + slack
    assert ticks[-1] >= high - slack
    # A step is at least a fifth of the range, and 5 becomes 10 at most: 2 to 5 steps inside, and a
    # part of one at either end.
    assert 3 <= len(ticks) <= 7
    assert len(set(tick_names(ticks))) == len(ticks)


def test_hostile_names_are_text() -> None:
    charts = [
        line_chart(
            HOSTILE, [Series(HOSTILE, [(0, 1)])], HOSTILE, HOSTILE, marks=[Mark(HOSTILE, 0)]
        ),
        bar_chart(HOSTILE, {HOSTILE: 1.0}, lambda _: HOSTILE, chosen=HOSTILE),
        stacked_bar(HOSTILE, {HOSTILE: 1.0}, lambda _: HOSTILE),
        heat_map(HOSTILE, {HOSTILE: [1]}, HOSTILE, HOSTILE, HOSTILE),
        line_chart(HOSTILE, [], "x", "y"),
    ]
    for chart in charts[:-1]:
        assert drawing(chart).get("aria-label") == SHOWN
        tags = {element.tag.removeprefix(SVG) for element in parse(chart).iter()}
        known = {"div", "svg", "g", "path", "rect", "circle", "text", "title", "ul", "li", "span"}
        assert tags <= known
    assert parse(charts[-1]).findtext("p") == f"{SHOWN}: no values."
