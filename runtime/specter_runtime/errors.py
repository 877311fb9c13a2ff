"""The errors Specter raises on purpose: one base class, a few children, no deeper.

A message has up to four parts: what was being done and to which file, tensor or key; what was
expected; what was found; what to do about it. The command line prints it without a traceback and
exits with code 2.

Called by: everything.
"""

from collections.abc import Sequence


class SpecterError(Exception):
    """Something the user can act on: bad input, a broken file, too little memory."""


class RecipeError(SpecterError):
    """A recipe is malformed; the message names the file and the key path."""


class CheckpointError(SpecterError):
    """A checkpoint is incomplete, inconsistent or of a kind that is not supported."""


class BundleError(SpecterError):
    """A bundle is incomplete, damaged or of another format version."""


class CapacityError(SpecterError):
    """A budget (memory, disk, context length) is too small; the message states the minimum."""


def name_list(names: Sequence[str], limit: int = 10) -> str:
    """Join names for a message: the first ``limit`` of them and a count of the rest."""
    shown = ", ".join(repr(name) for name in names[:limit])
    rest = len(names) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown
