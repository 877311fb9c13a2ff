"""A self-contained HTML page: sections, figures of merit and tables, with all of its style.

No script, nothing from outside: a policy in the page's head forbids both, so that not even text
that slipped through unescaped could fetch anything. Light and dark follow the reader's system;
print is light. What is drawn takes its colours from the custom properties that are set here.

``Html`` is text that may stand in a page as it is; any other text goes through ``escape``. Pages
are also well-formed XML.

Called by: render_report, svg_charts, show_comparison.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NewType

Html = NewType("Html", str)
Look = Literal["", "bad", "good", "faint"]
"""Of a table's row: the last column says in words what this says in colour."""

_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Characters that XML 1.0 does not have, lone surrogates among them, which UTF-8 lacks too."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading with what stands below it, and a note on how to read that.

    Attributes:
        is_wide: takes the whole width of the page.
    """

    heading: str
    body: Html
    note: str = ""
    is_wide: bool = False


def page(title: str, sections: Sequence[Section], lead: Html = Html("")) -> Html:
    """The page; ``lead`` stands between title and sections."""
    cards = "\n".join(_card(section) for section in sections)
    return Html(
        f"""<!DOCTYPE html>
<html xmlns="http://www.w3.org/1999/xhtml" lang="en">
<head>
<meta charset="utf-8"/>
<meta http-equiv="Content-Security-Policy" content="{_POLICY}"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{escape(title)}</title>
<style>
{_STYLE}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{lead}
<div class="sections">
{cards}
</div>
</main>
</body>
</html>
"""
    )


def _card(section: Section) -> Html:
    note = f'<p class="note">{escape(section.note)}</p>\n' if section.note else ""
    wide = " wide" if section.is_wide else ""
    return Html(
        f'<section class="card{wide}">\n<h2>{escape(section.heading)}</h2>\n'
        f"{section.body}\n{note}</section>"
    )


def escape(text: str) -> Html:
    """Text as it may stand in elements and in quoted attributes."""
    return Html(html.escape(_NO_XML.sub("\N{REPLACEMENT CHARACTER}", text)))


def paragraph(text: str) -> Html:
    """A paragraph of plain text."""
    return Html(f"<p>{escape(text)}</p>")


def figures_of_merit(figures: Mapping[str, str]) -> Html:
    """A few values, large, each with its name."""
    items = "\n".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"
        for name, value in figures.items()
    )
    return Html(f'<dl class="figures">\n{items}\n</dl>')


def table(
    caption: str,
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    looks: Sequence[Look] = (),
) -> Html:
    """A table whose rows are named by their first cell; it scrolls where the page is narrow.

    Args:
        caption: what the table shows, for those who cannot see it.
        header: of each column.
        rows: their cells.
        looks: how each row stands out; none does if empty.

    Raises:
        ValueError: a row has more or fewer cells than the header.
    """
    if any(len(row) != len(header) for row in rows):
        raise ValueError(f"{caption}: every row must have {len(header)} cells")
    names = "".join(f'<th scope="col">{escape(name)}</th>' for name in header)
    plain: Look = ""
    body = "\n".join(
        f'<tr{_class(look)}><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row, look in zip(rows, looks or [plain] * len(rows), strict=True)
    )
    return Html(
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}">\n'
        f"<table>\n<thead><tr>{names}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _class(look: Look) -> str:
    return f' class="{look}"' if look else ""


_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# The series' colours are those of Okabe and Ito ("Color universal design", 2008), which people with
# any colour vision tell apart, darker or lighter: they have a contrast of 3 with the card (WCAG
# 1.4.11).
_STYLE = """\
:root {
  color-scheme: light dark;
  --page: #eef1f4; --card: #ffffff; --ink: #1b1f24; --muted: #57606a; --line: #d5dae0;
  --series-1: #0072b2; --series-2: #d55e00; --series-3: #008f68; --series-4: #b8568c;
  --series-5: #a87000; --series-6: #2f8fc4; --series-7: #7d858d;
}
@media screen and (prefers-color-scheme: dark) {
  :root {
    --page: #0f1216; --card: #191e24; --ink: #e6eaee; --muted: #9aa5b0; --line: #39424c;
    --series-1: #56b4e9; --series-2: #ff8f4d; --series-3: #2fcf9f; --series-4: #e79fc8;
    --series-5: #f0b93c; --series-6: #a9c8ff; --series-7: #8b949e;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 1rem/1.45 system-ui, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
main { max-width: 76rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.5rem; line-height: 1.2; margin: .5rem 0; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin: 0 0 .5rem; }
p { margin: .5rem 0; overflow-wrap: anywhere; }
.note { color: var(--muted); font-size: .875rem; margin-bottom: 0; }
.sections {
  display: grid; gap: 1rem; margin-top: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr));
}
.card {
  background: var(--card); border: 1px solid var(--line); border-radius: 6px; padding: .8rem;
  min-width: 0; break-inside: avoid;
}
.wide, .card:nth-child(odd):nth-last-child(2) { grid-column: 1 / -1; }
.wide { break-inside: auto; }
.figures { display: flex; flex-wrap: wrap; gap: .6rem; margin: 1rem 0 0; }
.figures div {
  background: var(--card); border: 1px solid var(--line); border-radius: 6px;
  padding: .4rem .8rem; flex: 1 1 9rem; break-inside: avoid;
}
.figures dt { color: var(--muted); font-size: .8rem; }
.figures dd { margin: 0; font-size: 1.25rem; font-variant-numeric: tabular-nums; }
svg { display: block; width: 100%; height: auto; print-color-adjust: exact;
  -webkit-print-color-adjust: exact; }
.legend {
  list-style: none; display: flex; flex-wrap: wrap; gap: .1rem 1rem; padding: 0; margin: .4rem 0 0;
  font-size: .875rem;
}
.legend li { display: flex; align-items: center; gap: .4rem; }
.legend svg { width: auto; height: .9rem; flex: none; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .85rem;
  font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .2rem .5rem; border-bottom: 1px solid var(--line);
  vertical-align: baseline; }
th { font-weight: 600; }
thead { display: table-header-group; }
thead th { vertical-align: bottom; }
tr { break-inside: avoid; }
.bad * { color: var(--series-2); font-weight: 600; }
.good * { color: var(--series-3); }
.faint * { color: var(--muted); }
@page { margin: 14mm; }
@media print {
  :root { color-scheme: light; --page: #ffffff; font-size: 11px; }
  body { font-size: 1rem; }
  main { max-width: none; padding: 0; }
  .sections { grid-template-columns: 1fr 1fr; gap: .6rem; }
  .scroll { overflow: visible; }
  th, td { padding: .1rem .3rem; }
}
"""
