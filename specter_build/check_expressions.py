"""What ``--fail-if`` asks of a comparison: ``FIGURE OP NUMBER``, or ``regression``. Pure.

The number is compared with the change from A to B: with a percent sign with that in percent of A.

Called by: cli.  Next: compare_reports.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from dataclasses import dataclass

from specter_build.compare_reports import Comparison, Verdict
from specter_runtime.errors import SpecterError, name_list

REGRESSION = "regression"
OPERATORS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}
GRAMMAR = re.compile(
    r"\s*(?P<figure>[a-z0-9_]+(?:\.[a-z0-9_]+)*)\s*(?P<operator>[<>]=?)\s*"
    r"(?P<number>[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:e[+-]?[0-9]+)?)\s*(?P<percent>%?)\s*",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Condition:
    """A change that is not to be.

    Attributes:
        text: as given.
        figure: path of it; None: any regression.
        operator: between change and number.
        number: of the figure's own units, or percent.
        is_relative: percent.
    """

    text: str
    figure: str | None
    operator: str = ">"
    number: float = 0.0
    is_relative: bool = False


def parse_condition(text: str) -> Condition:
    """Parse one expression.

    Raises:
        SpecterError: it is not one.
    """
    if text.strip() == REGRESSION:
        return Condition(text, None)
    match = GRAMMAR.fullmatch(text)
    if match is None or not math.isfinite(float(match["number"])):
        raise SpecterError(
            f"--fail-if {text!r}: expected FIGURE<NUMBER, with < <= > or >=, the number with or "
            f"without %, as in 'recall.mean<-0.01' or 'sizes.draft_bytes>+5%'; or '{REGRESSION}'"
        )
    number, is_relative = float(match["number"]), bool(match["percent"])
    return Condition(text, match["figure"], match["operator"], number, is_relative)


def check(condition: Condition, comparison: Comparison) -> str | None:
    """What makes a condition true, in words; None if it is not.

    Raises:
        SpecterError: its figure is not in the comparison.
    """
    if condition.figure is None:
        found = [row.figure for row in comparison.having(Verdict.REGRESSION)]
        return name_list(found, limit=5) if found else None
    rows = {row.figure: row for row in comparison.rows}
    row = rows.get(condition.figure)
    if row is None:
        near = difflib.get_close_matches(condition.figure, rows, n=3, cutoff=0.0)
        raise SpecterError(
            f"--fail-if {condition.text!r}: no figure {condition.figure!r} is compared here; the "
            f"nearest are {', '.join(near)}"
        )
    change = 100 * row.relative_change if condition.is_relative else row.change
    if not OPERATORS[condition.operator](change, condition.number):
        return None
    return f"{row.figure} {change:+.6g}{'%' if condition.is_relative else ''}"
