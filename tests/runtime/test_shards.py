"""Safetensors files: golden bytes, what other readers see, and every way to be malformed."""

from __future__ import annotations

import ctypes
import json
import math
import mmap
import os
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specter_runtime.errors import BundleError, CheckpointError, SpecterError
from specter_runtime.shards import (
    ALIGNMENT,
    MAX_HEADER_BYTES,
    TORCH_DTYPES,
    Header,
    TensorEntry,
    read_header,
    read_tensors,
    write_tensors,
)

VALID: dict[str, Any] = {
    "a": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]},
    "b": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [3, 11]},
}
VALID_DATA = bytes(range(11))


def write_raw(path: Path, header: object, data: bytes = VALID_DATA) -> Path:
    """A file with this header (bytes, or anything JSON can write) and these data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def entry(dtype: object, shape: object, offsets: object) -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def random_bytes_tensor(dtype: torch.dtype, shape: tuple[int, ...], seed: int = 0) -> torch.Tensor:
    """Arbitrary bits of any dtype (of bool: 0 and 1)."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator).bool()
    count = math.prod(shape) * dtype.itemsize
    raw = torch.randint(0, 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes: NaN equals itself, -0 is not 0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


# ---- writing -------------------------------------------------------------------------------------


def test_golden_bytes_of_a_small_file(tmp_path: Path) -> None:
    path = tmp_path / "small.safetensors"
    tensors = {
        "b": torch.tensor([[1.0, -2.0]], dtype=torch.bfloat16),  # 0x3f80, 0xc000
        "a": torch.tensor([7, 8, 9], dtype=torch.uint8),
    }
    written = write_tensors(path, tensors, {"z": "1", "k": "v"})
    text = (
        b'{"__metadata__":{"k":"v","z":"1"},'
        b'"b":{"dtype":"BF16","shape":[1,2],"data_offsets":[0,4]},'
        b'"a":{"dtype":"U8","shape":[3],"data_offsets":[4,7]}}'
    )
    expected = b"\xf8\x0f" + bytes(6) + text + b" " * (4088 - len(text))
    expected += b"\x80\x3f\x00\xc0" + b"\x07\x08\x09"
    assert path.read_bytes() == expected
    assert written == 4096 + 7


@pytest.mark.parametrize("num_tensors", [0, 1, 55, 200])
def test_data_start_at_a_multiple_of_4096(tmp_path: Path, num_tensors: int) -> None:
    path = tmp_path / "file.safetensors"
    tensors = {f"tensor.{i}": torch.full((3,), i, dtype=torch.uint8) for i in range(num_tensors)}
    write_tensors(path, tensors, {})
    header = read_header(path, BundleError)
    assert ALIGNMENT == 4096
    assert header.data_start % 4096 == 0
    raw = path.read_bytes()
    assert raw[header.data_start :] == bytes(i for i in range(num_tensors) for _ in range(3))
    # No longer than needed: one block less would not have held the header.
    assert len(raw[8 : header.data_start].rstrip()) + 8 > header.data_start - 4096


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_every_dtype_is_read_back_by_the_safetensors_library_and_by_ours(
    tmp_path: Path, name: str
) -> None:
    dtype = TORCH_DTYPES[name]
    tensors = {
        "matrix": random_bytes_tensor(dtype, (5, 3), seed=1),
        "scalar": random_bytes_tensor(dtype, (), seed=2),
        "empty": torch.empty(0, 4, dtype=dtype),
        "transposed": random_bytes_tensor(dtype, (2, 7), seed=3).t(),
    }
    path = tmp_path / "file.safetensors"
    write_tensors(path, tensors, {"format": "pt"})
    header = read_header(path, BundleError)
    assert header.metadata == {"format": "pt"}
    assert {entry.dtype for entry in header.entries.values()} == {name}
    with safe_open(path, framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
    for loaded in (load_file(path), read_tensors(path, header)):
        assert loaded.keys() == tensors.keys()
        for key, tensor in tensors.items():
            assert same_bits(loaded[key], tensor), key


def test_files_of_the_safetensors_library_are_read(tmp_path: Path) -> None:
    path = tmp_path / "foreign.safetensors"
    tensors = {
        f"{name}.{size}": random_bytes_tensor(dtype, (size,), seed=size)
        for name, dtype in TORCH_DTYPES.items()
        for size in (1, 3)
    }
    save_file(tensors, path)
    loaded = read_tensors(path, read_header(path, CheckpointError))
    assert loaded.keys() == tensors.keys()
    assert all(same_bits(loaded[key], tensor) for key, tensor in tensors.items())


@pytest.mark.parametrize("padding", range(8))
def test_tensors_are_read_wherever_the_data_start(tmp_path: Path, padding: int) -> None:
    """The format demands no alignment: neither of the data nor of a tensor within them."""
    text = json.dumps(
        {"a": entry("U8", [3], [0, 3]), "b": entry("F64", [2], [3, 19])}, separators=(",", ":")
    )
    numbers = (1.5, -2.25)
    path = write_raw(
        tmp_path / "unaligned.safetensors",
        (text + " " * padding).encode(),
        b"\x01\x02\x03" + struct.pack("<2d", *numbers),
    )
    tensors = read_tensors(path, read_header(path, BundleError))
    assert tensors["a"].tolist() == [1, 2, 3]
    assert tuple(tensors["b"].tolist()) == numbers


def test_same_tensors_give_the_same_bytes_and_order_is_kept(tmp_path: Path) -> None:
    tensors = {key: random_bytes_tensor(torch.float32, (4,), seed=ord(key)) for key in "zab"}
    first, second = tmp_path / "first", tmp_path / "second"
    write_tensors(first, tensors, {"x": "1", "y": "2"})
    write_tensors(second, {k: t.clone() for k, t in tensors.items()}, {"y": "2", "x": "1"})
    assert first.read_bytes() == second.read_bytes()
    entries = read_header(first, BundleError).entries
    assert sorted(entries, key=lambda name: entries[name].start) == ["z", "a", "b"]


def test_read_tensors_own_their_memory(tmp_path: Path) -> None:
    """Nothing is mapped: what was read survives a change of the file."""
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.full((3,), 7, dtype=torch.uint8)}, {})
    tensors = read_tensors(path, read_header(path, BundleError))
    with path.open("r+b") as file:
        file.seek(ALIGNMENT)
        file.write(bytes(3))
    assert tensors["a"].tolist() == [7, 7, 7]


def num_cached_pages(path: Path) -> int:
    """Pages of a file that the page cache holds (mincore(2) of a mapping of it)."""
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        num_pages = -(-len(mapped) // mmap.PAGESIZE)
        states = (ctypes.c_ubyte * num_pages)()
        first = ctypes.c_char.from_buffer(mapped)
        length = ctypes.c_size_t(len(mapped))
        failed = ctypes.CDLL(None, use_errno=True).mincore(ctypes.byref(first), length, states)
        del first  # a mapping that something points into cannot be closed
    assert not failed, os.strerror(ctypes.get_errno())
    return sum(state & 1 for state in states)


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what its page cache holds")
def test_page_cache_keeps_nothing_of_what_was_read(tmp_path: Path) -> None:
    """Or a memory cap would count it twice. Pages are kept together, also those of two tensors."""
    path = tmp_path / "file.safetensors"
    sizes = (442_368, 55_296, 100_001) * 8
    write_tensors(path, {str(i): torch.ones(n, dtype=torch.uint8) for i, n in enumerate(sizes)}, {})
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    if num_cached_pages(path):
        pytest.skip("a file system whose files are the page cache")
    header = read_header(path, BundleError)
    assert num_cached_pages(path)
    read_tensors(path, header)
    assert num_cached_pages(path) == 0


def test_file_that_shrinks_after_its_header_was_read_is_an_early_end(tmp_path: Path) -> None:
    path = tmp_path / "file.safetensors"
    write_tensors(path, {"a": torch.zeros(100, dtype=torch.uint8)}, {})
    header = read_header(path, BundleError)
    with path.open("r+b") as file:
        file.truncate(ALIGNMENT + 60)
    with pytest.raises(EOFError, match="40 bytes early"):
        read_tensors(path, header)


# ---- reading headers -----------------------------------------------------------------------------


def test_offsets_of_a_header_are_absolute(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "file", {"__metadata__": {"k": "v"}} | VALID)
    start = path.stat().st_size - len(VALID_DATA)
    assert read_header(path, BundleError) == Header(
        entries={
            "a": TensorEntry("U8", (3,), start, start + 3),
            "b": TensorEntry("BF16", (2, 2), start + 3, start + 11),
        },
        metadata={"k": "v"},
        data_start=start,
        nbytes=start + 11,
    )


LONG = 10**4000  # an integer that JSON can read; its square is too long to be printed
MALFORMED_FILES: dict[str, tuple[bytes, str | None]] = {
    "empty": (b"", "too short"),
    "shorter than the length field": (bytes(7), "too short"),
    "header longer than the file": (struct.pack("<Q", 3) + b"{}", "does not fit"),
    "header length of 2**64 - 1": (b"\xff" * 8 + b"{}", "does not fit"),
    "no header": (bytes(8), "not JSON"),
    "not JSON": (struct.pack("<Q", 2) + b"{,", "not JSON"),
    "not UTF-8": (struct.pack("<Q", 4) + b'"\xff" ', "not JSON"),
    "integer of 5000 digits": (struct.pack("<Q", 5000) + b"1" * 5000, "not JSON"),
    "nested 50000 deep": (struct.pack("<Q", 50_000) + b"[" * 50_000, None),
    "list": (struct.pack("<Q", 2) + b"[]", "must be a JSON object, found list"),
    "null": (struct.pack("<Q", 4) + b"null", "must be a JSON object, found NoneType"),
}
MALFORMED_HEADERS: dict[str, tuple[object, str | None]] = {
    # header over VALID_DATA, what the message says of it (None: anything)
    "hole before the first": ({"a": entry("U8", [10], [1, 11])}, "hole or an overlap"),
    "hole between": (
        {"b": entry("U8", [3], [0, 3]), "a": entry("U8", [7], [4, 11])},
        "hole or an overlap",
    ),
    "overlap": (
        {"b": entry("U8", [4], [0, 4]), "a": entry("U8", [8], [3, 11])},
        "hole or an overlap",
    ),
    "same place twice": (
        {"b": entry("U8", [11], [0, 11]), "a": entry("U8", [11], [0, 11])},
        "hole or an overlap",
    ),
    "shape needs more bytes": ({"a": entry("BF16", [3, 2], [0, 11])}, "needs 12 bytes"),
    "shape needs fewer bytes": ({"a": entry("F32", [2], [0, 11])}, "needs 8 bytes"),
    "offsets reversed": ({"a": entry("U8", [11], [11, 0])}, "span -11"),
    "negative size": ({"a": entry("U8", [-11], [0, 11])}, "negative or non-integer"),
    "two negative sizes": ({"a": entry("U8", [-11, -1], [0, 11])}, "negative or non-integer"),
    "negative offset": ({"a": entry("U8", [12], [-1, 11])}, "negative or non-integer"),
    "bool as size": ({"a": entry("U8", [True, 11], [0, 11])}, "negative or non-integer"),
    "bool as offset": ({"a": entry("U8", [11], [False, 11])}, "negative or non-integer"),
    "float as size": ({"a": entry("U8", [11.0], [0, 11])}, "negative or non-integer"),
    "float as offset": ({"a": entry("U8", [11], [0, 11.0])}, "negative or non-integer"),
    "string as size": ({"a": entry("U8", ["11"], [0, 11])}, "negative or non-integer"),
    "null as size": ({"a": entry("U8", [None], [0, 11])}, "negative or non-integer"),
    "unknown dtype": ({"a": entry("U9", [11], [0, 11])}, "dtype 'U9'"),
    "dtype in lower case": ({"a": entry("u8", [11], [0, 11])}, "dtype 'u8'"),
    "null as dtype": ({"a": entry(None, [11], [0, 11])}, "dtype None"),
    "list as dtype": ({"a": entry(["U8"], [11], [0, 11])}, None),
    "object as dtype": ({"a": entry({}, [11], [0, 11])}, None),
    "no dtype": ({"a": {"shape": [11], "data_offsets": [0, 11]}}, "malformed header entry"),
    "no shape": ({"a": {"dtype": "U8", "data_offsets": [0, 11]}}, "malformed header entry"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [11]}}, "malformed header entry"),
    "one offset": ({"a": entry("U8", [11], [11])}, "malformed header entry"),
    "three offsets": ({"a": entry("U8", [11], [0, 11, 11])}, "malformed header entry"),
    "number as shape": ({"a": entry("U8", 11, [0, 11])}, "malformed header entry"),
    "number as offsets": ({"a": entry("U8", [11], 11)}, "malformed header entry"),
    "number as entry": ({"a": 11}, "malformed header entry"),
    "list as entry": ({"a": ["U8", [11], [0, 11]]}, "malformed header entry"),
    "string as shape": ({"a": entry("U8", "", [0, 1]), "b": entry("U8", [10], [1, 11])}, None),
    "object as shape": ({"a": entry("U8", {}, [0, 1]), "b": entry("U8", [10], [1, 11])}, None),
    "sizes whose product is too long to print": ({"a": entry("U8", [LONG, LONG], [0, 11])}, None),
}


@pytest.mark.parametrize("case", MALFORMED_FILES)
def test_malformed_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, message = MALFORMED_FILES[case]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=message) as caught:
        read_header(path, BundleError)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("case", MALFORMED_HEADERS)
def test_malformed_header_is_refused_with_file_and_tensor_named(tmp_path: Path, case: str) -> None:
    header, message = MALFORMED_HEADERS[case]
    path = write_raw(tmp_path / "broken.safetensors", header)
    with pytest.raises(BundleError, match=message) as caught:
        read_header(path, BundleError)
    assert str(path) in str(caught.value)
    assert "'a'" in str(caught.value)


@pytest.mark.parametrize("metadata", [["k"], {"k": 1}, {"k": None}, "text"])
def test_metadata_other_than_strings_are_refused(tmp_path: Path, metadata: object) -> None:
    path = write_raw(tmp_path / "broken.safetensors", {"__metadata__": metadata} | VALID)
    with pytest.raises(BundleError, match="__metadata__"):
        read_header(path, BundleError)


def test_name_given_twice_is_refused(tmp_path: Path) -> None:
    """The format forbids it: two readers could see two different tensors."""
    item = json.dumps(entry("U8", [11], [0, 11]))
    other = json.dumps(entry("I8", [11], [0, 11]))
    path = write_raw(tmp_path / "twice", f'{{"a": {item}, "a": {other}}}'.encode())
    with pytest.raises(BundleError, match="'a'"):
        read_header(path, BundleError)


@pytest.mark.parametrize("change", [-11, -1, 1, 4096])
def test_truncated_or_longer_file_is_refused(tmp_path: Path, change: int) -> None:
    data = VALID_DATA[:change] if change < 0 else VALID_DATA + bytes(change)
    path = write_raw(tmp_path / "broken.safetensors", VALID, data)
    with pytest.raises(BundleError, match="truncated or has bytes appended") as caught:
        read_header(path, BundleError)
    assert str(path) in str(caught.value)


def test_header_beyond_the_bound_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """A sparse file: nothing is allocated for it, on disk or in memory."""
    path = tmp_path / "huge.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", MAX_HEADER_BYTES + 1))
        file.truncate(2 * MAX_HEADER_BYTES)
    with pytest.raises(BundleError, match=f"header of {MAX_HEADER_BYTES + 1} bytes"):
        read_header(path, BundleError)


@pytest.mark.parametrize("error", [BundleError, CheckpointError])
def test_caller_chooses_the_error(tmp_path: Path, error: type[SpecterError]) -> None:
    for path in (tmp_path / "missing.safetensors", tmp_path):
        with pytest.raises(error, match="cannot be read") as caught:
            read_header(path, error)
        assert str(path) in str(caught.value)


# ---- reading anything ----------------------------------------------------------------------------

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)
SIZES = st.integers(-1, 12) | st.just(2**64) | JSON
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(TORCH_DTYPES)) | JSON,
        "shape": st.lists(SIZES, max_size=3) | JSON,
        "data_offsets": st.lists(SIZES, min_size=2, max_size=2) | JSON,
    }
)
HEADERS = st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), ENTRIES | JSON)
SETTINGS = settings(
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.function_scoped_fixture],  # the file is rewritten each time
)


class MarkedError(SpecterError):
    """Raised by nothing but the function under test."""


def read_or_refuse(path: Path) -> Header | None:
    """What ``read_header`` makes of a file; anything but its own error fails the test."""
    try:
        header = read_header(path, MarkedError)
    except MarkedError:
        return None
    spans = sorted((e.start, e.stop) for e in header.entries.values())
    ends = [header.data_start, *(stop for _, stop in spans)]
    assert [start for start, _ in spans] == ends[:-1]
    assert ends[-1] == header.nbytes == path.stat().st_size
    for item in header.entries.values():
        assert item.nbytes == math.prod(item.shape) * TORCH_DTYPES[item.dtype].itemsize
    return header


@SETTINGS
@given(st.binary(max_size=64))
@example(b"")
@example(struct.pack("<Q", 2) + b"{}")
def test_random_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "random"
    path.write_bytes(content)
    read_or_refuse(path)


@SETTINGS
@given(HEADERS, st.integers(0, 24))
def test_headers_of_any_json_are_read_or_refused(
    tmp_path: Path, header: dict[str, Any], data_bytes: int
) -> None:
    read_or_refuse(write_raw(tmp_path / "any", header, bytes(data_bytes)))


@SETTINGS
@given(st.data())
def test_mutated_files_are_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(write_raw(tmp_path / "valid", VALID).read_bytes())
    for _ in range(data.draw(st.integers(1, 4), label="mutations")):
        position = data.draw(st.integers(0, len(content)), label="position")
        removed = data.draw(st.integers(0, 3), label="removed")
        content[position : position + removed] = data.draw(st.binary(max_size=3), label="inserted")
    path = tmp_path / "mutated"
    path.write_bytes(content)
    read_or_refuse(path)
