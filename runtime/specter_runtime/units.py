"""Bytes for people and from people: GB is 10**9, GiB is 2**30.

Called by: cli, memory, specter_build.
"""

from __future__ import annotations

import re
from decimal import Decimal

UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_bytes(text: str | int) -> int:
    """Bytes of ``4GiB``, ``500 MB`` or a plain number.

    Raises:
        ValueError: it is not a size.
    """
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([kmg]i?)?b?", str(text).strip().lower())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write e.g. 4GiB, 500MB or a number of bytes")
    return int(Decimal(match[1]) * UNITS[match[2] or ""])


def format_bytes(nbytes: float) -> str:
    """Bytes in binary units."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
