"""Where experts lie when they are not resident: the slow tier, here the disk.

A store reads and knows nothing of caching. Shards are read with direct I/O: one aligned read an
expert, past the page cache, so that a memory budget means what it says. A file system that refuses
direct I/O (tmpfs, some network mounts) is read buffered, and the log says so once.

Called by: expert_cache (from its I/O threads).  Next: bundle_loader.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import mmap
import os
from collections.abc import Callable
from pathlib import Path
from typing import Protocol, Self

from specter_runtime.bundle_loader import Bundle
from specter_runtime.errors import BundleError
from specter_runtime.experts import ExpertKey
from specter_runtime.shards import ALIGNMENT, align_up

logger = logging.getLogger(__name__)

DIRECT_IO_FLAG = getattr(os, "O_DIRECT", 0)
HUGE_PAGE_BYTES = 1 << 21
REFUSALS = (errno.EINVAL, errno.EOPNOTSUPP)


class ExpertStore(Protocol):
    """Reads one expert's bytes; safe to call from several threads."""

    @property
    def slot_bytes(self) -> int:
        """Room that ``read_into`` needs, a multiple of ``ALIGNMENT``."""
        ...

    def nbytes(self, key: ExpertKey) -> int:
        """Bytes of an expert, unpadded."""
        ...

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        """Fill the first ``nbytes(key)`` of ``buffer``.

        Args:
            key: which expert.
            buffer: writable, ``slot_bytes`` long, aligned to ``ALIGNMENT`` in memory.

        Raises:
            BundleError: the read failed or came back short; names the file.
        """
        ...


class ShardExpertStore:
    """Experts in shard files of a bundle.

    Threads: ``read_into`` may be called from any; the only shared state is the flag that direct
    I/O was refused, which only ever goes from True to False.
    """

    def __init__(
        self,
        shard_file: Callable[[ExpertKey], Path],
        nbytes: Callable[[ExpertKey], int],
        data_start: int,
        slot_bytes: int,
    ) -> None:
        """Create a store.

        Args:
            shard_file: where an expert's shard lies.
            nbytes: bytes of data in an expert's shard.
            data_start: offset of the data in every shard, a multiple of ``ALIGNMENT``.
            slot_bytes: of the largest shard's data, in whole blocks.
        """
        self._shard_file = shard_file
        self._data_start = data_start
        self._slot_bytes = slot_bytes
        self.nbytes = nbytes
        self.is_direct = DIRECT_IO_FLAG != 0

    @classmethod
    def of(cls, bundle: Bundle) -> Self:
        """The store of a bundle."""
        shards = bundle.manifest.experts
        return cls(
            bundle.shard_file,
            lambda key: bundle.shard_nbytes(key) - shards.data_start,
            shards.data_start,
            align_up(shards.nbytes),
        )

    @property
    def slot_bytes(self) -> int:
        """Whole blocks: a direct read asks for no less."""
        return self._slot_bytes

    def read_into(self, key: ExpertKey, buffer: memoryview) -> None:
        """See ``ExpertStore.read_into``."""
        path, expected = self._shard_file(key), self.nbytes(key)
        try:
            count = self._read(path, buffer[: align_up(expected)])
        except OSError as exc:
            raise BundleError(f"{path}: reading the expert failed: {exc.strerror}") from exc
        if count < expected:
            raise BundleError(
                f"{path}: short read: expected {expected} bytes at offset "
                f"{self._data_start}, got {count}; the file is damaged"
            )

    def _read(self, path: Path, buffer: memoryview) -> int:
        if self.is_direct:
            try:
                return _read_all(path, DIRECT_IO_FLAG, buffer, self._data_start)
            except OSError as exc:
                if exc.errno not in REFUSALS:
                    raise
                if self.is_direct:
                    self.is_direct = False
                    logger.warning(
                        "%s: the file system refuses direct I/O; reading through the page cache, "
                        "which is not part of the memory budget",
                        path,
                    )
        return _read_all(path, 0, buffer, self._data_start)


def _read_all(path: Path, flags: int, buffer: memoryview, offset: int) -> int:
    """Read until the buffer is full or the file ends; returns the bytes read."""
    fd = os.open(path, os.O_RDONLY | flags)
    try:
        done = 0
        while done < len(buffer):
            count = os.preadv(fd, [buffer[done:]], offset + done)
            done += count
            if count == 0 or (flags and count % ALIGNMENT):
                break  # end of file; a direct read comes back unaligned only there
        return done
    finally:
        os.close(fd)


def aligned_buffer(nbytes: int) -> memoryview:
    """Zeroed anonymous memory, page-aligned as direct I/O demands; freed with its last view.

    It is private, since of shared memory the kernel makes no huge pages; and it is left out of a
    forked child, or what a direct read brings meanwhile could land in the child alone (open(2)).
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags)
    advice = [getattr(mmap, "MADV_DONTFORK", None)]
    if nbytes >= HUGE_PAGE_BYTES:
        advice.append(getattr(mmap, "MADV_HUGEPAGE", None))
    for option in advice:
        if option is not None:
            with contextlib.suppress(OSError):  # a kernel that does not know it
                memory.madvise(option)
    return memoryview(memory)[:nbytes]
