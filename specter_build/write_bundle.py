"""Step: from a work folder to a bundle: everything hashed, manifest last, renamed into place.

A folder without a manifest is no bundle; the destination appears whole or not at all.

Called by: pipeline.  Next: specter_runtime.manifest.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from specter_runtime.bundle_loader import file_sha256, load_bundle
from specter_runtime.errors import BundleError, RecipeError
from specter_runtime.manifest import FORMAT, MANIFEST_FILE, FileEntry, read_json

logger = logging.getLogger(__name__)

TIMINGS_FILE = "timings.json"
UNHASHED_FILES = (TIMINGS_FILE,)
PROGRESS = "progress"
"""Folder of the work folder that is no part of the bundle."""
PROGRESS_MARKER = f"{PROGRESS}/digest"
"""The file without which the rest of that folder counts for nothing."""


def existing_digest(destination: Path) -> str | None:
    """The build digest of the bundle at ``destination``; None if there is none, or a damaged one.

    Raises:
        RecipeError: something else lies there, which must not be overwritten.
    """
    if not destination.exists():
        return None
    if not (destination / MANIFEST_FILE).is_file():
        if destination.is_dir() and not any(destination.iterdir()):
            return None
        raise RecipeError(f"output: {destination} exists and is no bundle; it is left alone")
    manifest = read_json(destination / MANIFEST_FILE)
    if manifest.get("format") != FORMAT:
        raise RecipeError(f"output: {destination} exists and is no bundle; it is left alone")
    try:
        load_bundle(destination)
    except BundleError as exc:
        logger.warning("building anew what is damaged: %s", exc)
        return None
    return str(manifest.get("build_digest"))


def work_path(destination: Path) -> Path:
    """The hidden folder beside ``destination`` that a build works in."""
    return destination.with_name(f".{destination.name}.building")


@contextmanager
def work_folder(destination: Path) -> Iterator[Path]:
    """A folder beside ``destination`` to build in; what an earlier build left there is still there.

    It is removed when a finished bundle fails its audit: building it again would not help.

    Raises:
        RecipeError: another build of the same destination is running, or the folder cannot be made.
    """
    work = work_path(destination)
    lock_path = _lock_path(destination)
    with _lock(lock_path, destination):
        work.mkdir(exist_ok=True)
        try:
            yield work
        except BundleError:
            shutil.rmtree(work, ignore_errors=True)
            raise
        except OSError as exc:
            raise RecipeError(
                f"output: {work}: {exc.strerror}; the build goes on from here when run again"
            ) from exc
        finally:
            lock_path.unlink(missing_ok=True)


def remove_leftovers(destination: Path) -> None:
    """Remove what a build that was killed once its bundle was in place did not come to remove."""
    lock_path = _lock_path(destination)
    if not (lock_path.exists() or _old(destination).exists()):
        return
    with suppress(RecipeError), _lock(lock_path, destination):  # else it is in use
        shutil.rmtree(_old(destination), ignore_errors=True)
        lock_path.unlink(missing_ok=True)


def discard_progress(work: Path) -> None:
    """Remove what a work folder knows of finished layers.

    The marker goes first: killed in the middle, a build must not take what is left for the whole.
    """
    (work / PROGRESS_MARKER).unlink(missing_ok=True)
    shutil.rmtree(work / PROGRESS, ignore_errors=True)


def _old(destination: Path) -> Path:
    """Where the bundle that is being replaced waits."""
    return destination.with_name(f".{destination.name}.old")


def _lock_path(destination: Path) -> Path:
    return destination.with_name(f".{destination.name}.lock")


def _lock(path: Path, destination: Path) -> TextIO:
    """The locked lock file; closing it ends the lock."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = path.open("w")
        except OSError as exc:
            raise RecipeError(f"output: {path.parent}: {exc.strerror}") from exc
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            lock.close()
            raise RecipeError(f"output: {destination} is being built by another process") from exc
        if path.exists() and os.fstat(lock.fileno()).st_ino == path.stat().st_ino:
            return lock
        lock.close()  # the build that held it has ended and removed it: try the next file


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
    discard_progress(work)
    old = _old(destination)
    shutil.rmtree(old, ignore_errors=True)
    had_old = destination.exists()
    if had_old:
        destination.rename(old)
    try:
        work.rename(destination)
    except OSError:
        if had_old:
            old.rename(destination)
        raise
    shutil.rmtree(old, ignore_errors=True)
    folder = os.open(destination.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
