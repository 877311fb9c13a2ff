"""Step: from a work folder to a bundle: everything hashed, manifest last, renamed into place.

A folder without a manifest is no bundle; the destination appears whole or not at all.

Called by: pipeline.  Next: specter_runtime.manifest.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specter_runtime.bundle_loader import file_sha256
from specter_runtime.errors import BundleError, RecipeError
from specter_runtime.manifest import MANIFEST_FILE, FileEntry, read_json

TIMINGS_FILE = "timings.json"
UNHASHED_FILES = (TIMINGS_FILE,)
PROGRESS = "progress"
"""Folder of the work folder that is no part of the bundle."""


def existing_digest(destination: Path) -> str | None:
    """The build digest of the bundle that lies at ``destination``; None if nothing lies there.

    Raises:
        RecipeError: something else lies there, which must not be overwritten.
    """
    if not destination.exists():
        return None
    if not (destination / MANIFEST_FILE).is_file():
        if destination.is_dir() and not any(destination.iterdir()):
            return None
        raise RecipeError(f"output: {destination} exists and is no bundle; it is left alone")
    return str(read_json(destination / MANIFEST_FILE).get("build_digest"))


@contextmanager
def work_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination`` to build in; what an earlier build left there is still there.

    It is removed when a finished bundle fails its audit: building it again would not help.

    Raises:
        RecipeError: another build of the same destination is running, or the folder cannot be made.
    """
    work = destination.with_name(f".{destination.name}.building")
    lock_path = destination.with_name(f".{destination.name}.lock")
    try:
        destination.parent.mkdir(parents=True, exist_ok=True)
        lock = lock_path.open("w")
    except OSError as exc:
        raise RecipeError(f"output: {destination.parent}: {exc.strerror}") from exc
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            raise RecipeError(f"output: {destination} is being built by another process") from exc
        work.mkdir(exist_ok=True)
        try:
            yield work
        except BundleError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        finally:
            lock_path.unlink(missing_ok=True)


def hash_files(work: Path) -> dict[str, FileEntry]:
    """Size and hash of every file under ``work`` that is hashed, by relative path."""
    paths = sorted(path for path in work.rglob("*") if path.is_file())
    names = [path.relative_to(work).as_posix() for path in paths]
    return {
        name: FileEntry(path.stat().st_size, file_sha256(path))
        for name, path in zip(names, paths, strict=True)
        if name not in (MANIFEST_FILE, *UNHASHED_FILES) and not name.startswith(f"{PROGRESS}/")
    }


def write_text(path: Path, text: str) -> None:
    """Write and flush to disk."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def move_into_place(work: Path, destination: Path) -> None:
    """Move a finished work folder to its destination, replacing an old bundle."""
    shutil.rmtree(work / PROGRESS, ignore_errors=True)
    old = destination.with_name(f".{destination.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if destination.exists():
        destination.rename(old)
    work.rename(destination)
    shutil.rmtree(old, ignore_errors=True)
    folder = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
