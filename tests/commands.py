"""What running a command comes to; the fixture ``command`` runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Outcome:
    code: int
    stdout: str
    stderr: str


Command = Callable[..., Outcome]
