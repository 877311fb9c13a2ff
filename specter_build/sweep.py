"""What a token would take over budgets, links, draft tokens, bundles: a table, a page.

Bundles of one model that differ in the width of their drafts show what widths are worth: their
recall and acceptance were measured, not assumed.

Called by: cli.  Next: specter_runtime.simulated_bundle, svg_charts, html_page.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby, product
from typing import Any

from specter_build.html_page import Html, Section, page, paragraph, table
from specter_build.svg_charts import Series, line_chart
from specter_runtime.errors import CapacityError
from specter_runtime.hardware import Hardware
from specter_runtime.simulated_bundle import SimulatedBundle
from specter_runtime.units import format_bytes

MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation.

    Attributes:
        bundle: its name.
        bits: bits a weight of its draft.
        num_slots, tpot_seconds, bytes_per_token: None where the budget is too small.
    """

    bundle: str
    bits: float
    link_bytes_per_second: float
    num_draft_tokens: int
    memory_budget_bytes: int
    num_slots: int | None
    tpot_seconds: float | None
    bytes_per_token: float | None


def sweep(
    bundles: Mapping[str, SimulatedBundle],
    hardware: Hardware,
    budgets: Sequence[int],
    links: Sequence[float],
    numbers: Sequence[int],
    on_point: Callable[[Point], None],
) -> list[Point]:
    """Simulate all combinations.

    Args:
        bundles: by name.
        hardware: the machine.
        budgets: bytes of fast memory.
        links: bytes a second; if empty, the machine's own.
        numbers: of draft tokens.
        on_point: told of each as it comes.
    """
    points = []
    rates = links or [hardware.link_bytes_per_second]
    for (name, bundle), link, number, budget in product(bundles.items(), rates, numbers, budgets):
        arms = bundle.arms(number)
        arm = arms[f"a draft of {number}" if number else "specter"]
        machine = replace(hardware, link_bytes_per_second=float(link))
        try:
            num_slots, found = bundle.run(arm, machine, budget)
        except CapacityError:
            outcome: tuple[Any, ...] = (None, None, None)
        else:
            outcome = num_slots, found.tpot_seconds, found.bytes_per_token
        point = Point(name, bundle.draft_bits, float(link), number, budget, *outcome)
        on_point(point)
        points.append(point)
    return points


def to_row(point: Point) -> dict[str, str]:
    """A row of the table, as text."""

    def shown(value: float | None, scale: float, digits: int) -> str:
        return "-" if value is None else f"{value * scale:.{digits}f}"

    return {
        "bundle": point.bundle,
        "bits": f"{point.bits:.3g}",
        "link MB/s": shown(point.link_bytes_per_second, 1 / MEGABYTE, 0),
        "K": str(point.num_draft_tokens),
        "memory": format_bytes(point.memory_budget_bytes),
        "slots": shown(point.num_slots, 1, 0),
        "TPOT ms": shown(point.tpot_seconds, 1e3, 2),
        "MB a token": shown(point.bytes_per_token, 1 / MEGABYTE, 2),
    }


def to_records(points: Sequence[Point]) -> list[dict[str, Any]]:
    """For JSON; what the budget is too small for is null."""
    return [asdict(point) for point in points]


def to_page(points: Sequence[Point], hardware: Hardware) -> Html:
    """A page: a chart for each bundle and link, a line for each K, and all figures in a table."""
    sections = []
    for (bundle, link), group in groupby(
        points, key=lambda point: (point.bundle, point.link_bytes_per_second)
    ):
        title = f"{bundle}, link {link / MEGABYTE:.0f} MB/s"
        sections.append(Section(title, _chart(title, list(group)), "Left out: too small a budget."))
    rows = [to_row(point) for point in points]
    body = table("All points", list(rows[0]), [list(row.values()) for row in rows])
    sections.append(Section("All points", body, is_wide=True))
    lead = paragraph(f"Simulated time per output token on {hardware.name}.")
    return page("specter-simulate", sections, lead)


def _chart(title: str, points: Sequence[Point]) -> Html:
    """Time over memory."""
    lines: dict[int, list[tuple[float, float]]] = {}
    for point in sorted(points, key=lambda point: point.memory_budget_bytes):
        spots = lines.setdefault(point.num_draft_tokens, [])
        if point.tpot_seconds is not None:
            spots.append((point.memory_budget_bytes / MEGABYTE, point.tpot_seconds * 1e3))
    series = [
        Series("no draft" if number == 0 else f"K = {number}", spots)
        for number, spots in lines.items()
    ]
    return line_chart(title, series, "memory, MB", "ms a token", ends=(0.0, None))
