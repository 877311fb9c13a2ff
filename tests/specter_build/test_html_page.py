"""A page is well-formed, fetches nothing, and shows text as the text that it is."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from specter_build.html_page import Section, escape, figures_of_merit, page, paragraph, table

XHTML = "{http://www.w3.org/1999/xhtml}"
HOSTILE = "</title><script>alert('1')</script>\"&amp;<img src=//x onerror=y>\0\ud800\x1b"
SHOWN = HOSTILE.translate(dict.fromkeys(map(ord, "\0\ud800\x1b"), "\N{REPLACEMENT CHARACTER}"))
NUM_COLOURS = 7


def parse(html: str) -> ElementTree.Element:
    """The root; raises if it is no well-formed XML."""
    return ElementTree.fromstring(html.encode())


def test_text_is_shown_as_it_is_wherever_it_comes_from() -> None:
    body = table(HOSTILE, ["", HOSTILE], [[HOSTILE, HOSTILE]])
    lead = figures_of_merit({HOSTILE: HOSTILE})
    root = parse(page(HOSTILE, [Section(HOSTILE, body, HOSTILE)], lead))
    for tag, count in (("title", 1), ("h1", 1), ("h2", 1), ("dt", 1), ("dd", 1), ("td", 1)):
        assert [element.text for element in root.iter(f"{XHTML}{tag}")] == [SHOWN] * count
    assert [element.text for element in root.iter(f"{XHTML}th")] == [None, SHOWN, SHOWN]
    assert [element.text for element in root.iter(f"{XHTML}p")] == [SHOWN]
    assert not {f"{XHTML}script", f"{XHTML}img"} & {element.tag for element in root.iter()}
    labels = [element.get("aria-label") for element in root.iter(f"{XHTML}div")]
    assert SHOWN in labels


def test_sections_come_in_order_with_their_bodies() -> None:
    sections = [Section("one", paragraph("1 < 2")), Section("two", escape("b"), is_wide=True)]
    root = parse(page("title", sections))
    found = list(root.iter(f"{XHTML}section"))
    assert [section.findtext(f"{XHTML}h2") for section in found] == ["one", "two"]
    assert found[0].findtext(f"{XHTML}p") == "1 < 2"
    assert [section.get("class") for section in found] == ["card", "card wide"]


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="layers: every row must have 2 cells"):
        table("layers", ["layer", "recall"], [["0"]])


def test_rows_stand_out_as_told() -> None:
    root = ElementTree.fromstring(table("t", ["a"], [["1"], ["2"]], ["bad", ""]))
    assert [row.get("class") for row in root.iter("tr")] == [None, "bad", None]
    with pytest.raises(ValueError, match="zip"):
        table("t", ["a"], [["1"], ["2"]], ["bad"])


def test_page_forbids_scripts_and_whatever_is_outside() -> None:
    root = parse(page("title", []))
    policies = [
        element.get("content")
        for element in root.iter(f"{XHTML}meta")
        if element.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, as WCAG 2.2 defines it."""
    channels = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_stand_out_against_the_card(scheme: str) -> None:
    """WCAG 2.2: 3 for what is drawn, 4.5 for text."""
    light, _, rest = page("", []).partition("prefers-color-scheme: dark")
    colours = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", light))
    if scheme == "dark":
        dark = dict(re.findall(r"--([a-z0-9-]+): (#[0-9a-f]{6})", rest.partition("body {")[0]))
        assert dark.keys() == colours.keys()
        colours = dark
    for i in range(NUM_COLOURS):
        assert contrast(colours[f"series-{i + 1}"], colours["card"]) >= 3, i + 1
    for text in ("ink", "muted"):
        for ground in ("card", "page"):
            assert contrast(colours[text], colours[ground]) >= 4.5, (text, ground)
