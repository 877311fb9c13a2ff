"""Charts as inline SVG: lines, bars, a stacked bar, a heat map. Pure; text in, markup out.

Colours are the page's custom properties, so charts follow light, dark and print. Nothing is told
by colour alone: lines differ in dash and marker, parts of a bar are numbered, values can be read.
Whatever is drawn for a value has a ``<title>`` with the value, which browsers show on hovering.

A value that is not finite is left out: a gap in a line, "n/a" beside a bar, a blank cell. Where
no value is left, the chart is a sentence that says so. Negative lengths and shares raise
``ValueError``.

Called by: render_report.  Next: html_page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from specter_build.html_page import Html, escape, paragraph

WIDTH = 400
"""Units of a chart's width. Shown 360 pixels wide on a telephone, 12 units are legible type."""
FONT_SIZE = 12
CHARACTER = 7.0
"""Width of a character, on the safe side: digits are 0.5 to 0.58 of the size in common fonts."""
NUM_COLOURS = 7
MAX_MARKERS = 40
"""A line of more points has invisible markers, which show their values all the same."""

_DASHES = ("", "6 3", "2 3", "8 3 2 3", "12 4", "4 2 1 2", "1 2")
_MARKERS = (
    "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0 -6 0z",  # circle
    "M-2.8 -2.8h5.6v5.6h-5.6z",  # square
    "M0 -3.6L3.5 2.8H-3.5z",  # triangle
    "M0 -3.9L3.9 0L0 3.9L-3.9 0z",  # diamond
)


@dataclass(frozen=True, slots=True)
class Series:
    """A line: points (x, y) in ascending order of x."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Mark:
    """What to point out: a vertical line at ``x``; where there is ``y``, a ring round a point."""

    label: str
    x: float
    y: float | None = None


def line_chart(
    label: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    ends: tuple[float | None, float | None] = (None, None),
    marks: Sequence[Mark] = (),
) -> Html:
    """Lines over one pair of axes, with a legend; x are whole numbers.

    Args:
        label: what the chart shows, for those who cannot see it.
        series: the lines.
        x_label: of the horizontal axis.
        y_label: of the vertical axis.
        ends: of the vertical axis; where None, a round number beyond the values.
        marks: what to point out.
    """
    points = [point for one in series for point in one.points if math.isfinite(point[1])]
    if not points:
        return _empty(label)
    xs = [x for x, _ in points] + [mark.x for mark in marks]
    y_ticks = axis_ticks([*(y for _, y in points), *_room_below(points, marks)], ends)
    y_names = tick_names(y_ticks)
    plane = _Plane(
        left=max(map(len, y_names)) * CHARACTER + 10,
        x_range=(min(xs), max(xs)),
        y_range=(y_ticks[0], y_ticks[-1]),
    )
    parts = [
        _text(0, FONT_SIZE, y_label),
        _text(plane.right, plane.bottom + 34, x_label, anchor="end"),
        *(_level(plane, tick, name) for tick, name in zip(y_ticks, y_names, strict=True)),
        *_x_axis(plane),
        *(_vertical(plane, mark) for mark in marks if mark.y is None),
        *(_line(plane, i, one, x_label) for i, one in enumerate(series)),
        *(_ring(plane, mark, mark.y) for mark in marks if mark.y is not None),
    ]
    legend = _legend((_line_swatch(i), escape(one.name)) for i, one in enumerate(series))
    return Html(f"{_svg(label, plane.bottom + 40, parts)}\n{legend}")


def bar_chart(
    label: str,
    bars: Mapping[str, float],
    show: Callable[[float], str],
    chosen: str | None = None,
) -> Html:
    """Horizontal bars from zero, one below the other, each with its name and its value.

    Args:
        label: what the chart shows, for those who cannot see it.
        bars: name -> length.
        show: a length as text.
        chosen: the name of the bar that is pointed out.
    """
    top = _largest(bars.values())
    if top is None:
        return _empty(label)
    values = {
        name: (show(value) if math.isfinite(value) else "n/a")
        + (" (chosen)" if name == chosen else "")
        for name, value in bars.items()
    }
    left = min(max(map(len, bars)) * CHARACTER + 8, 0.45 * WIDTH)
    room = max(WIDTH - left - max(map(len, values.values())) * CHARACTER - 8, 40)
    row, parts = 24, []
    for i, (name, value) in enumerate(bars.items()):
        y = i * row
        length = room * value / top if math.isfinite(value) and top else 0.0
        opacity = "" if chosen is None or name == chosen else ' opacity="0.55"'
        short = _shortened(name, left - 8)
        parts.append(
            f"<g>{_title(f'{name}: {values[name]}')}"
            f"{_text(left - 8, y + 16, short, anchor='end')}"
            f'<rect x="{left:.1f}" y="{y + 3}" width="{length:.1f}" height="18" '
            f'fill="{_colour(0)}"{opacity}/>'
            f"{_text(left + length + 6, y + 16, values[name])}</g>"
        )
    axis = f'<path d="M{left:.1f} 0V{row * len(bars)}" stroke="currentColor"/>'
    return _svg(label, row * len(bars), [*parts, axis])


def stacked_bar(label: str, parts: Mapping[str, float], show: Callable[[float], str]) -> Html:
    """One horizontal bar made of parts, numbered, with a legend that gives names and values."""
    total = sum(value for value in parts.values() if math.isfinite(value))
    if not _largest(parts.values()):
        return _empty(label)
    drawn, items, x = [], [], 0.0
    for i, (name, value) in enumerate(parts.items()):
        share = value / total if math.isfinite(value) else 0.0
        width, number = share * WIDTH, str(i + 1)
        known = f"{show(value)}, {share:.1%}" if math.isfinite(value) else "n/a"
        drawn.append(
            f'<rect x="{x:.1f}" y="16" width="{width:.1f}" height="30" fill="{_colour(i)}" '
            f'stroke="var(--card)">{_title(f"{name}: {known}")}</rect>'
        )
        if width >= (len(number) + 1) * CHARACTER:
            drawn.append(_text(x + width / 2, FONT_SIZE, number, anchor="middle"))
        x += width
        items.append((_square_swatch(_colour(i)), escape(f"{number} {name}: {known}")))
    return Html(f"{_svg(label, 48, drawn)}\n{_legend(items)}")


def heat_map(
    label: str,
    rows: Mapping[str, Sequence[float]],
    x_label: str,
    y_label: str,
    zero_name: str,
) -> Html:
    """A cell for each count, the fuller the larger; zeros have a colour of their own.

    Fills go by the square root: where most counts are small beside the largest, they still differ.

    Args:
        label: what the chart shows, for those who cannot see it.
        rows: name -> counts, from the first column on.
        x_label: what a column is.
        y_label: what a row is.
        zero_name: what zeros are called in the legend.
    """
    top = _largest(value for row in rows.values() for value in row)
    if top is None:
        return _empty(label)
    num_columns = max(map(len, rows.values()))
    left = max(map(len, rows)) * CHARACTER + 8
    width, height = (WIDTH - left - 10) / num_columns, min(18.0, max(4.0, 260 / len(rows)))
    above = FONT_SIZE + 8
    parts = [_text(0, FONT_SIZE, y_label)]
    every = math.ceil(FONT_SIZE / height)
    for i, (name, row) in enumerate(rows.items()):
        if i % every == 0:
            middle = above + (i + 0.5) * height + 0.35 * FONT_SIZE
            parts.append(_text(left - 6, middle, name, anchor="end"))
        cells = (
            _cell(j, i, value, top, f"{y_label} {name}, {x_label} {j}: {precise(value)}")
            for j, value in enumerate(row)
            if math.isfinite(value)
        )
        parts.append(
            f'<g transform="translate({left:.2f} {above}) scale({width:.4f} {height:.4f})" '
            f'shape-rendering="crispEdges">{"".join(cells)}</g>'
        )
    below = above + len(rows) * height
    for tick in _whole_ticks(0, num_columns - 1, WIDTH - left):
        parts.append(_text(left + (tick + 0.5) * width, below + 15, precise(tick), anchor="middle"))
    parts.append(_text(WIDTH, below + 32, x_label, anchor="end"))
    legend = _legend(
        [
            (_square_swatch(_colour(1)), escape(zero_name)),
            (_scale_swatch(), escape(f"up to {precise(top)}")),
        ]
    )
    return Html(f"{_svg(label, below + 36, parts)}\n{legend}")


# ---- numbers --------------------------------------------------------------------------------


def precise(value: float) -> str:
    """A number with four digits; whole numbers with all of theirs."""
    if not math.isfinite(value):
        return "n/a"
    if isinstance(value, int) or abs(value) >= 1e4:
        return str(round(value))
    return f"{value:.4g}"


def axis_ticks(
    values: Sequence[float], ends: tuple[float | None, float | None] = (None, None)
) -> list[float]:
    """Round numbers from the lower end of an axis to the upper one, which are the first and last.

    Args:
        values: what the axis has to hold, at least one.
        ends: of the axis, ascending; where None, a round number beyond the values.
    """
    low, high = ends
    bottom = min(values) if low is None else low
    top = max(values) if high is None else high
    if bottom >= top:  # a single value, or none within an end that is given
        room = abs(top) / 10 or 1.0
        bottom = top - room if low is None else low
        top = max(bottom, top) + room if high is None else high
    step = _round_step((top - bottom) / 5)
    # A billionth: quotients of round numbers may come out a few roundings beyond a whole number.
    first, last = math.floor(bottom / step + 1e-9), math.ceil(top / step - 1e-9)
    ticks = [i * step for i in range(first, last + 1)]
    if low is not None and ticks[0] < low:
        ticks[0] = low
    if high is not None and ticks[-1] > high:
        ticks[-1] = high
    return ticks


def tick_names(ticks: Sequence[float]) -> list[str]:
    """Evenly written labels, with as many digits as tell ticks apart; k, M, G from 10,000 on."""
    top = max(map(abs, ticks))
    unit, suffix = next(
        (pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if top >= max(pair[0], 1e4)),
        (1.0, ""),
    )
    gap = min((b - a for a, b in pairwise(ticks)), default=1.0) / unit
    digits = max(0, -math.floor(math.log10(gap) + 1e-9))
    return [f"{tick / unit:.{digits}f}{suffix}" for tick in ticks]


def _round_step(least: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, ... and of their decimal fractions that is not less."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(m * power for m in (1, 2, 5, 10) if m * power >= least * (1 - 1e-9))


def _whole_ticks(low: float, high: float, room: float) -> list[int]:
    """Multiples of a round number whose labels have room."""
    most = max(1, room / (CHARACTER * (len(precise(round(high))) + 2)))
    step = max(1, round(_round_step((high - low) / most))) if high > low else 1
    first = math.ceil(low / step)
    return [i * step for i in range(first, math.floor(high / step) + 1)]


def _largest(values: Iterable[float]) -> float | None:
    """The largest finite one; None if there is none."""
    finite = [value for value in values if math.isfinite(value)]
    if any(value < 0 for value in finite):
        raise ValueError(f"{min(finite)} is negative: there is no such length")
    return max(finite, default=None)


# ---- pieces ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Plane:
    """Where a line chart's values lie in its drawing."""

    left: float
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    right: float = WIDTH - 10
    top: float = 24
    bottom: float = 214

    def x(self, value: float) -> float:
        """Left to right; in the middle if there is but one value."""
        low, high = self.x_range
        share = (value - low) / (high - low) if high > low else 0.5
        return self.left + 8 + share * (self.right - 8 - self.left - 8)

    def y(self, value: float) -> float:
        """Downwards, as SVG has it."""
        low, high = self.y_range
        return self.bottom - (value - low) / (high - low) * (self.bottom - self.top)


def _level(plane: _Plane, tick: float, name: str) -> str:
    """A horizontal grid line with its label."""
    y = plane.y(tick)
    return (
        f'<path d="M{plane.left:.1f} {y:.1f}H{plane.right}" stroke="var(--line)"/>'
        f"{_text(plane.left - 6, y + 4, name, anchor='end')}"
    )


def _x_axis(plane: _Plane) -> list[str]:
    """The axis with its labels."""
    ticks = _whole_ticks(*plane.x_range, plane.right - plane.left)
    return [
        f'<path d="M{plane.left:.1f} {plane.bottom}H{plane.right}" stroke="currentColor"/>',
        *(
            f'<path d="M{plane.x(tick):.1f} {plane.bottom}v4" stroke="currentColor"/>'
            f"{_text(plane.x(tick), plane.bottom + 17, precise(tick), anchor='middle')}"
            for tick in ticks
        ),
    ]


def _line(plane: _Plane, index: int, series: Series, x_label: str) -> str:
    """A series: its line, and a marker with a title at each point."""
    path, pen = [], "M"
    markers = []
    hidden = ' opacity="0"' if len(series.points) > MAX_MARKERS else ""
    for x, y in series.points:
        if not math.isfinite(y):
            pen = "M"
            continue
        spot = f"{plane.x(x):.1f} {plane.y(y):.1f}"
        path.append(f"{pen}{spot}")
        pen = "L"
        markers.append(
            f'<path d="{_marker(index)}" transform="translate({spot})"{hidden}>'
            f"{_title(f'{series.name}: {x_label} {precise(x)}, {precise(y)}')}</path>"
        )
    return (
        f'<g fill="{_colour(index)}"><path d="{"".join(path)}" fill="none" '
        f"{_stroke(index)}/>{''.join(markers)}</g>"
    )


def _vertical(plane: _Plane, mark: Mark) -> str:
    """A dotted line at a place of the horizontal axis."""
    x = plane.x(mark.x)
    is_left = x > (plane.left + plane.right) / 2  # where its label goes
    at, anchor = (x - 5, "end") if is_left else (x + 5, "start")
    return (
        f'<path d="M{x:.1f} {plane.top}V{plane.bottom}" stroke="currentColor" '
        f'stroke-dasharray="1 3" stroke-width="1.5"/>'
        f"{_text(at, plane.bottom - 8, mark.label, anchor=anchor)}"
    )


def _room_below(points: Sequence[tuple[float, float]], marks: Sequence[Mark]) -> list[float]:
    """Values that the axis has to hold for the labels below ringed points to have room."""
    top = max(y for _, y in points)
    return [mark.y - 0.16 * (top - mark.y) for mark in marks if mark.y is not None]


def _ring(plane: _Plane, mark: Mark, value: float) -> str:
    """A ring round a point, its label below, or above where there is no room."""
    x, y = plane.x(mark.x), plane.y(value)
    half = len(mark.label) * CHARACTER / 2
    middle = min(max(x, plane.left + half), plane.right - half)
    below = y + 20 if y + 24 < plane.bottom else y - 11
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6.5" fill="none" stroke="currentColor" '
        f'stroke-width="1.5"/>{_text(middle, below, mark.label, anchor="middle")}'
    )


def _cell(column: int, row: int, value: float, top: float, title: str) -> str:
    """One cell of a heat map, of size 1."""
    if value:
        fill = f'fill="{_colour(0)}" fill-opacity="{_fill(value / top)}"'
    else:
        fill = f'fill="{_colour(1)}"'
    return f'<rect x="{column}" y="{row}" width="1" height="1" {fill}>{_title(title)}</rect>'


def _fill(share: float) -> str:
    """Opacity of a count by its share of the largest."""
    return f"{0.06 + 0.94 * math.sqrt(share):.2f}"


def _legend(items: Iterable[tuple[str, Html]]) -> Html:
    """Swatches with their names."""
    entries = "".join(f"<li>{swatch}<span>{name}</span></li>" for swatch, name in items)
    return Html(f'<ul class="legend">{entries}</ul>')


def _line_swatch(index: int) -> str:
    """A piece of a line with its marker."""
    return (
        f'<svg viewBox="0 0 36 14" width="36" height="14" aria-hidden="true">'
        f'<path d="M0 7H36" fill="none" {_stroke(index)}/>'
        f'<path d="{_marker(index)}" transform="translate(18 7)" fill="{_colour(index)}"/></svg>'
    )


def _square_swatch(colour: str) -> str:
    """A filled square."""
    return (
        f'<svg viewBox="0 0 14 14" width="14" height="14" aria-hidden="true">'
        f'<rect width="14" height="14" fill="{colour}"/></svg>'
    )


def _scale_swatch() -> str:
    """The fills of a heat map, from nearly nothing in even steps to the largest count."""
    steps = "".join(
        f'<rect x="{14 * i}" width="14" height="14" fill="{_colour(0)}" '
        f'fill-opacity="{_fill(i / 5)}"/>'
        for i in range(6)
    )
    return f'<svg viewBox="0 0 84 14" width="84" height="14" aria-hidden="true">{steps}</svg>'


def _svg(label: str, height: float, parts: Iterable[str]) -> Html:
    """The drawing; one image to assistive technology."""
    body = "\n".join(parts)
    return Html(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-label="{escape(label)}" font-size="{FONT_SIZE}" fill="currentColor">\n{body}\n</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Text with a rim in the card's colour, so that it can be read across lines."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" stroke="var(--card)" '
        f'stroke-width="3" stroke-linejoin="round" paint-order="stroke">{escape(text)}</text>'
    )


def _shortened(text: str, room: float) -> str:
    """Text that fits, with a sign where it was cut."""
    most = int(room / CHARACTER)
    return text if len(text) <= most else text[: most - 1] + "\N{HORIZONTAL ELLIPSIS}"


def _title(text: str) -> str:
    return f"<title>{escape(text)}</title>"


def _colour(index: int) -> str:
    return f"var(--series-{index % NUM_COLOURS + 1})"


def _marker(index: int) -> str:
    return _MARKERS[index % len(_MARKERS)]


def _stroke(index: int) -> str:
    dash = _DASHES[index % len(_DASHES)]
    return f'stroke="{_colour(index)}" stroke-width="2"' + (
        f' stroke-dasharray="{dash}"' if dash else ""
    )


def _empty(label: str) -> Html:
    return paragraph(f"{label}: no values.")
