"""Small files written whole or not at all.

Called by: cli, specter_build.cli.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from specter_runtime.errors import SpecterError


def check_writable(path: Path) -> None:
    """Whether ``write_whole`` could write there, before the work that leads to it is done.

    Raises:
        SpecterError: it could not.
    """
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise SpecterError(f"{path}: cannot be written: {folder} is no folder to write in")


def write_whole(path: Path, text: str) -> None:
    """Write a file; what was there stays if that fails.

    Raises:
        SpecterError: it cannot be written.
    """
    try:
        handle, name = tempfile.mkstemp(dir=path.absolute().parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            Path(name).chmod(0o644)  # made for its owner alone
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink()
            raise
    except OSError as exc:
        raise SpecterError(f"{path}: cannot be written: {exc.strerror}") from exc
