"""A comparison for people and programs: text, Markdown, JSON, HTML. Pure.

Called by: cli.  Next: compare_reports, html_page.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import click

from specter_build.compare_reports import LEVEL, Comparison, Row, Verdict
from specter_build.html_page import Html, Look, Section, page, paragraph, table
from specter_build.read_report import Unit, kind_of
from specter_runtime.units import format_bytes

HEADINGS = ("figure", "A", "B", "change", "noise", "")
NOISE_MEANS = (
    "noise: changes of up to so much come from the draw of the calibration sequences; all of these "
    f"bounds hold together with a chance of {1 - LEVEL:.1%}."
)
STYLES: Mapping[Verdict, Mapping[str, Any]] = {
    Verdict.REGRESSION: {"fg": "red", "bold": True},
    Verdict.IMPROVEMENT: {"fg": "green"},
    Verdict.NOISE: {"dim": True},
}
LOOKS: Mapping[Verdict, Look] = {
    Verdict.REGRESSION: "bad",
    Verdict.IMPROVEMENT: "good",
    Verdict.NOISE: "faint",
}


def summary(comparison: Comparison) -> str:
    """How many figures changed in which way."""
    names = {
        Verdict.REGRESSION: ("regression", "regressions"),
        Verdict.IMPROVEMENT: ("improvement", "improvements"),
        Verdict.CHANGED: ("other change", "other changes"),
        Verdict.NOISE: ("change within noise", "changes within noise"),
        Verdict.SAME: ("figure unchanged", "figures unchanged"),
    }
    counts = {verdict: len(comparison.having(verdict)) for verdict in Verdict}
    return ", ".join(f"{counts[v] or 'no'} {names[v][counts[v] != 1]}" for v in Verdict)


def to_text(comparison: Comparison) -> str:
    """For a terminal; figures that did not change are counted only."""
    rows = comparison.having(*(verdict for verdict in Verdict if verdict is not Verdict.SAME))
    cells = [HEADINGS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["  ".join(_aligned(line, widths)).rstrip() for line in cells]
    styled = [
        click.style(line, **STYLES.get(row.verdict, {}))
        for row, line in zip(rows, lines[1:], strict=True)
    ]
    table = [lines[0], *styled, "", NOISE_MEANS] if rows else []
    return "\n".join(
        [
            f"A: {comparison.a}",
            f"B: {comparison.b}",
            *comparison.notes,
            "",
            *table,
            f"{summary(comparison)}.",
        ]
    )


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Numbers to the right, words to the left."""
    first, *numbers, last = zip(cells, widths, strict=True)
    return [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in numbers), last[0]]


def to_markdown(comparison: Comparison, fired: Mapping[str, str]) -> str:
    """For a comment on a pull request; changes within noise are folded away."""
    told = comparison.having(Verdict.REGRESSION, Verdict.IMPROVEMENT, Verdict.CHANGED)
    noise = comparison.having(Verdict.NOISE)
    parts = [
        f"### specter-compare: {summary(comparison)}",
        "\n".join(f"- **failed**: {_escaped(line)}" for line in _failures(fired)),
        _markdown_table(told),
        f"<details><summary>{len(noise)} within noise</summary>\n\n{_markdown_table(noise)}\n\n"
        "</details>"
        if noise
        else "",
        "\n".join(f"- {_escaped(note)}" for note in _remarks(comparison)),
    ]
    return "\n\n".join(part for part in parts if part)


def _markdown_table(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [HEADINGS, ("---", *["---:"] * 4, "---")]
    for row in rows:
        *cells, verdict = _cells(row)
        is_marked = row.verdict is Verdict.REGRESSION
        lines.append((*cells, f"**{verdict}**" if is_marked else verdict))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is."""
    return re.sub(r"([\\`*_\[\]|~#])", r"\\\1", html.escape(text, quote=False))


def to_html(comparison: Comparison, fired: Mapping[str, str]) -> str:
    """A page that stands alone."""
    rows = comparison.having(*(verdict for verdict in Verdict if verdict is not Verdict.SAME))
    lead = [f"{summary(comparison)}.", *(f"failed: {line}" for line in _failures(fired))]
    sections = []
    if rows:
        looks = [LOOKS.get(row.verdict, "") for row in rows]
        body = table("What changed from A to B", HEADINGS, list(map(_cells, rows)), looks)
        sections.append(Section("Changes", body, is_wide=True))
    remarks = Html("\n".join(map(paragraph, _remarks(comparison))))
    sections.append(Section("What was compared", remarks, is_wide=True))
    return page("specter-compare", sections, Html("\n".join(map(paragraph, lead))))


def to_record(comparison: Comparison, fired: Mapping[str, str]) -> dict[str, Any]:
    """For programs: every figure, also those that did not change; what is infinite is null."""
    return {
        "a": comparison.a,
        "b": comparison.b,
        "level": LEVEL,
        "rows": [
            {
                "figure": row.figure,
                "a": row.a,
                "b": row.b,
                "change": row.change,
                "relative_change": _finite(row.relative_change),
                "margin": _finite(row.margin),
                "verdict": str(row.verdict),
            }
            for row in comparison.rows
        ],
        "notes": list(comparison.notes),
        "failed": dict(fired),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _failures(fired: Mapping[str, str]) -> list[str]:
    return [f"{expression} ({found})" for expression, found in fired.items()]


def _remarks(comparison: Comparison) -> list[str]:
    """What stands below a table."""
    has_noise = any(row.margin is not None for row in comparison.rows)
    files = f"A: {comparison.a}; B: {comparison.b}."
    return [*([NOISE_MEANS] if has_noise else []), files, *comparison.notes]


def _cells(row: Row) -> tuple[str, ...]:
    """The columns of ``HEADINGS``."""
    unit = kind_of(row.figure).unit
    change = _amount(row.change, unit)
    change = change if change.startswith("-") else f"+{change}"
    if unit and math.isfinite(row.relative_change):
        change += f" ({row.relative_change:+.1%})"
    noise = "" if row.margin is None else f"± {_amount(row.margin, unit)}"
    verdict = "" if row.verdict is Verdict.CHANGED else str(row.verdict)
    return row.figure, _amount(row.a, unit), _amount(row.b, unit), change, noise, verdict


def _amount(value: float, unit: Unit) -> str:
    if unit == "bytes":
        return format_bytes(value)
    if unit == "count":
        return f"{value:.0f}"
    return f"{1000 * value:.3f} ms" if unit == "seconds" else f"{value:.4f}"
