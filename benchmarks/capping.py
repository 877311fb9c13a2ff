"""Commands under a memory cap, by control groups version 1 (so it needs root).

Everything that a command touches counts towards the cap: interpreter, libraries, and the page cache
of the files that it reads. The kernel says how often the limit was hit.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

GROUPS = Path("/sys/fs/cgroup/memory")


def check_caps() -> None:
    """Refuse to go on where there are no memory groups to be made."""
    if not os.access(GROUPS, os.W_OK):
        raise click.ClickException(f"{GROUPS} cannot be written: caps need root and cgroup v1")


def run_capped(
    command: Sequence[str],
    cap_bytes: int | None,
    environment: Mapping[str, str],
    timeout_seconds: float,
) -> dict[str, Any]:
    """Run a command in a memory group of its own; None is no limit.

    Returns:
        What the JSON object in the last line of its output says, or ``failure``: why there is none;
        and ``peak_bytes`` and ``limit_hits`` of the group.
    """
    with memory_group(cap_bytes) as group:
        process = subprocess.Popen(
            ["bash", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(group), *command],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **environment},
        )
        found: dict[str, Any]
        try:
            output, _ = process.communicate(timeout=timeout_seconds)
        except subprocess.TimeoutExpired:
            found = {"failure": f"not done after {timeout_seconds:.0f} s"}
        else:
            if process.returncode == 0 and output:
                found = json.loads(output.splitlines()[-1])
            elif was_out_of_memory(group):
                found = {"failure": "out of memory"}
            else:
                found = {"failure": f"exit status {process.returncode}"}
        finally:
            process.kill()  # does nothing to one that has ended
            process.wait()  # a group with a process cannot be removed
        found["peak_bytes"] = int((group / "memory.max_usage_in_bytes").read_text())
        found["limit_hits"] = int((group / "memory.failcnt").read_text())
        return found


@contextmanager
def memory_group(cap_bytes: int | None) -> Iterator[Path]:
    """A fresh memory group with this limit, removed in the end."""
    group = GROUPS / f"specter-benchmark-{os.getpid()}"
    group.mkdir()
    try:
        if cap_bytes is not None:
            (group / "memory.limit_in_bytes").write_text(str(cap_bytes))
        yield group
    finally:
        group.rmdir()


def was_out_of_memory(group: Path) -> bool:
    """Whether the kernel killed a process of the group."""
    lines = (group / "memory.oom_control").read_text().splitlines()
    return int(dict(line.split() for line in lines).get("oom_kill", "0")) > 0


def drop_page_cache(paths: Iterable[Path]) -> None:
    """Forget what the page cache holds of these files, and of all files in these folders."""
    for path in paths:
        files = [path] if path.is_file() else (p for p in path.rglob("*") if p.is_file())
        for file in files:
            fd = os.open(file, os.O_RDONLY)
            try:
                os.fsync(fd)  # pages still to be written stay
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
