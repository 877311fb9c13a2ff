"""Reading shards: direct where the file system allows, buffered where not, the same bytes."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specter_runtime.bundle_loader import load_bundle
from specter_runtime.errors import BundleError
from specter_runtime.expert_store import DIRECT_IO_FLAG, ShardExpertStore, aligned_buffer
from specter_runtime.experts import PROJECTIONS, ExpertKey
from specter_runtime.shards import ALIGNMENT, align_up, read_header, tensor_bytes, write_tensors

KEY = ExpertKey(1, 2)
SIZES = (4096, 8192, 4095, 4097, 10_000, 5)


def allows_direct_io(folder: Path) -> bool:
    """Whether the file system of ``folder`` reads a block directly; found out without our code."""
    path = folder / "probe"
    path.write_bytes(bytes(ALIGNMENT))
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECT)
    except (AttributeError, OSError):
        return False
    try:
        return os.preadv(fd, [aligned_buffer(ALIGNMENT)], 0) == ALIGNMENT
    except OSError:
        return False
    finally:
        os.close(fd)


def write_shard(folder: Path, nbytes: int) -> bytes:
    """A shard with ``nbytes`` of data at ``ALIGNMENT``; returns the data."""
    generator = torch.Generator().manual_seed(nbytes)
    data = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    write_tensors(folder / "shard", {"data": data}, {})
    return bytes(tensor_bytes(data))


def open_store(folder: Path, nbytes: int) -> ShardExpertStore:
    return ShardExpertStore(
        lambda key: folder / "shard", lambda key: nbytes, ALIGNMENT, align_up(nbytes)
    )


def read(store: ShardExpertStore, key: ExpertKey = KEY) -> bytes:
    """The expert's bytes, as read into a buffer that was not blank."""
    buffer = aligned_buffer(store.slot_bytes)
    buffer[:] = b"\xa5" * len(buffer)
    store.read_into(key, buffer)
    return bytes(buffer[: store.nbytes(KEY)])


class Opens:
    """Stands before ``os.open`` and remembers which reads were direct."""

    def __init__(self, before: Callable[[bool], None] = lambda direct: None) -> None:
        self.direct: list[bool] = []
        self._before = before
        self._open = os.open

    def __call__(self, path: Path, flags: int) -> int:
        direct = bool(flags & DIRECT_IO_FLAG)
        self.direct.append(direct)
        self._before(direct)
        return self._open(path, flags & ~DIRECT_IO_FLAG)


def refuse(direct: bool, number: int = errno.EINVAL) -> None:
    if direct:
        raise OSError(number, os.strerror(number))


@pytest.fixture
def direct_io_flag() -> None:
    """Skips where the platform has no direct I/O: nothing can be refused there."""
    if not DIRECT_IO_FLAG:
        pytest.skip("this platform has no direct I/O")


def test_store_reads_the_bytes_of_the_bundles_experts(tiny_bundle: Path) -> None:
    bundle = load_bundle(tiny_bundle)
    store = ShardExpertStore.of(bundle)
    for key in (ExpertKey(layer, expert) for layer in range(3) for expert in range(8)):
        shard = tiny_bundle / f"experts/layer-{key.layer:03d}/expert-{key.expert:03d}.safetensors"
        tensors = load_file(shard)
        names = [
            f"model.layers.{key.layer}.mlp.experts.{key.expert}.{role}.weight"
            for role in PROJECTIONS
        ]
        assert sorted(tensors) == sorted(names)
        assert read(store, key) == b"".join(bytes(tensor_bytes(tensors[name])) for name in names)
        assert read_header(shard, BundleError).data_start % ALIGNMENT == 0


@pytest.mark.parametrize("nbytes", SIZES)
def test_expert_of_any_size_is_read_whole(tmp_path: Path, nbytes: int) -> None:
    data = write_shard(tmp_path, nbytes)
    store = open_store(tmp_path, nbytes)
    assert store.nbytes(KEY) == nbytes
    assert store.slot_bytes == min(n for n in range(0, 20_000, 4096) if n >= nbytes)
    assert read(store) == data


def test_reads_are_direct_where_the_file_system_allows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not allows_direct_io(tmp_path):
        pytest.skip("the file system of the temporary folder refuses direct I/O")
    data = write_shard(tmp_path, 10_000)
    store = open_store(tmp_path, 10_000)
    flags: list[int] = []
    system_open = os.open
    monkeypatch.setattr(os, "open", lambda p, f: (flags.append(f), system_open(p, f))[1])
    assert read(store) == read(store) == data
    assert [bool(f & DIRECT_IO_FLAG) for f in flags] == [True, True]
    assert store.is_direct
    assert not caplog.records


@pytest.mark.usefixtures("direct_io_flag")
@pytest.mark.parametrize("number", [errno.EINVAL, errno.EOPNOTSUPP])
@pytest.mark.parametrize("nbytes", SIZES)
def test_refused_direct_io_falls_back_to_the_same_bytes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    nbytes: int,
    number: int,
) -> None:
    data = write_shard(tmp_path, nbytes)
    opens = Opens(lambda direct: refuse(direct, number))
    monkeypatch.setattr(os, "open", opens)
    store = open_store(tmp_path, nbytes)
    with caplog.at_level(logging.WARNING):
        assert read(store) == read(store) == data
    assert opens.direct == [True, False, False]  # it is not asked again
    assert not store.is_direct
    assert len(caplog.records) == 1
    assert str(tmp_path / "shard") in caplog.text
    assert "refuses direct I/O" in caplog.text


@pytest.mark.usefixtures("direct_io_flag")
def test_direct_io_that_is_refused_only_when_reading_falls_back_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = write_shard(tmp_path, 10_000)
    opens = Opens()
    system_preadv = os.preadv

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        refuse(opens.direct[-1])
        return system_preadv(fd, buffers, offset)

    monkeypatch.setattr(os, "open", opens)
    monkeypatch.setattr(os, "preadv", preadv)
    assert read(open_store(tmp_path, 10_000)) == data
    assert opens.direct == [True, False]


@pytest.mark.usefixtures("direct_io_flag")
def test_several_threads_refused_at_once_warn_exactly_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All threads have asked for direct I/O before the first is refused."""
    num_threads = 4
    together = threading.Barrier(num_threads)

    def before(direct: bool) -> None:
        if direct:
            together.wait(30)
        refuse(direct)

    data = write_shard(tmp_path, 10_000)
    monkeypatch.setattr(os, "open", Opens(before))
    store = open_store(tmp_path, 10_000)
    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(num_threads) as pool:
        results = list(pool.map(lambda _: read(store), range(num_threads)))
    assert results == [data] * num_threads
    assert len(caplog.records) == 1


def test_memory_file_system_is_read_whatever_it_supports(tmp_path: Path) -> None:
    """tmpfs refuses direct I/O on older kernels and accepts it on newer ones."""
    folder = Path("/dev/shm")
    if not os.access(folder, os.W_OK):
        pytest.skip("no /dev/shm here")
    shard = folder / f"specter-test-{os.getpid()}"
    try:
        data = write_shard(tmp_path, 10_000)
        shard.write_bytes((tmp_path / "shard").read_bytes())
        assert (
            read(
                ShardExpertStore(lambda key: shard, lambda key: 10_000, ALIGNMENT, align_up(10_000))
            )
            == data
        )
    finally:
        shard.unlink(missing_ok=True)


@pytest.mark.usefixtures("direct_io_flag")
def test_reads_that_come_in_pieces_are_put_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read may bring less than asked for; a direct one in whole blocks but for the file's end."""
    data = write_shard(tmp_path, 10_000)
    system_preadv = os.preadv
    opens = Opens()

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        piece = ALIGNMENT if opens.direct[-1] else 1000
        return system_preadv(fd, [buffers[0][:piece]], offset)

    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "open", opens)
    store = open_store(tmp_path, 10_000)
    assert read(store) == data
    store.is_direct = False
    assert read(store) == data
    assert opens.direct == [True, False]


@pytest.mark.parametrize("is_direct", [True, False])
@pytest.mark.parametrize("left", [9_999, 8_192, 4_096, 1, 0, -4_000])
def test_truncated_file_is_a_short_read_that_names_the_file(
    tmp_path: Path, is_direct: bool, left: int
) -> None:
    write_shard(tmp_path, 10_000)
    os.truncate(tmp_path / "shard", ALIGNMENT + left)
    store = open_store(tmp_path, 10_000)
    store.is_direct = store.is_direct and is_direct
    with pytest.raises(BundleError, match="short read") as caught:
        read(store)
    message = str(caught.value)
    assert str(tmp_path / "shard") in message
    assert f"expected 10000 bytes at offset 4096, got {max(left, 0)}" in message


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="No such file") as caught:
        read(open_store(tmp_path, 10_000))
    assert str(tmp_path / "shard") in str(caught.value)


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES])
def test_failing_read_names_the_file_and_does_not_end_direct_io(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_shard(tmp_path, 10_000)
    store = open_store(tmp_path, 10_000)
    before = store.is_direct

    def preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(BundleError, match=os.strerror(number)) as caught:
        read(store)
    assert str(tmp_path / "shard") in str(caught.value)
    assert store.is_direct == before


def test_no_file_stays_open(tmp_path: Path) -> None:
    folder = Path("/proc/self/fd")
    if not folder.exists():
        pytest.skip("no /proc here")
    write_shard(tmp_path, 10_000)
    before = sorted(folder.iterdir())
    read(open_store(tmp_path, 10_000))
    with pytest.raises(BundleError):
        read(open_store(tmp_path, 20_000))
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("nbytes", [1, 4095, 4096, 4097, 3 * 4096])
def test_aligned_buffer_is_zeroed_writable_and_on_a_page(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    assert len(buffer) == nbytes
    assert not buffer.readonly
    assert bytes(buffer) == bytes(nbytes)
    assert torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() % ALIGNMENT == 0
