"""Safetensors files as Specter writes and checks them: aligned data, validated headers.

A Specter file is an ordinary safetensors file whose JSON header is padded with spaces (the format
allows it) so that the data starts at a multiple of ``ALIGNMENT`` bytes. An expert's gate, up and
down projection lie together in that order, so one aligned read brings an expert.

``read_header`` trusts nothing: lengths are bounded before they size an allocation, and offsets must
tile the data exactly. The MUSTs are listed in the README, section "Bundle format".

Called by: bundle_loader, specter_build.  Next: errors.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specter_runtime.errors import SpecterError

ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000  # the bound of the safetensors format itself

TORCH_DTYPES: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
SAFETENSORS_DTYPES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


def align_up(nbytes: int) -> int:
    """``nbytes`` rounded up to whole blocks of ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies: offsets are absolute within the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Header:
    """A validated safetensors header."""

    entries: dict[str, TensorEntry]
    metadata: dict[str, str]
    data_start: int
    nbytes: int


def read_header(path: Path, error: type[SpecterError]) -> Header:
    """Read and validate the header of a safetensors file.

    Args:
        path: the file.
        error: the class to raise, so that a checkpoint and a bundle keep their own errors.

    Raises:
        error: the file is truncated, malformed, has holes, or its length is not what the header
            declares. The message names the file and, where there is one, the tensor.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            if len(prefix) < 8:
                raise error(f"{path}: {size} bytes are too short for a safetensors file")
            (header_bytes,) = struct.unpack("<Q", prefix)
            if header_bytes > min(MAX_HEADER_BYTES, size - 8):
                raise error(
                    f"{path}: header of {header_bytes} bytes does not fit a file of {size} bytes; "
                    "the file is truncated or not safetensors"
                )
            text = file.read(header_bytes)
    except OSError as exc:
        raise error(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        raw = json.loads(text.decode("utf-8"), object_pairs_hook=_unique_names)
    except (ValueError, RecursionError) as exc:
        raise error(f"{path}: header is not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise error(f"{path}: header must be a JSON object, found {type(raw).__name__}")
    metadata = raw.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise error(f"{path}: __metadata__ must be an object of strings")
    data_start = 8 + header_bytes
    entries = {
        name: _parse_entry(path, name, item, data_start, error) for name, item in raw.items()
    }
    _check_tiling(path, entries, data_start, size, error)
    return Header(entries, metadata, data_start, size)


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object in which no name stands twice, as the format demands."""
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice")
    return result


def _parse_entry(
    path: Path, name: str, item: Any, data_start: int, error: type[SpecterError]
) -> TensorEntry:
    try:
        dtype, shape, (start, stop) = item["dtype"], item["shape"], item["data_offsets"]
        if not isinstance(shape, list):
            raise TypeError("shape")
        sizes = (*shape, start, stop)
    except (TypeError, KeyError, ValueError) as exc:
        raise error(f"{path}: tensor {name!r} has a malformed header entry") from exc
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n < 1 << 63 for n in sizes):
        raise error(f"{path}: tensor {name!r} has a negative or non-integer size or offset")
    if not isinstance(dtype, str) or dtype not in TORCH_DTYPES:
        known = ", ".join(TORCH_DTYPES)
        raise error(f"{path}: tensor {name!r} has dtype {dtype!r}; supported are {known}")
    # No more than offsets can span: a longer number could not even be printed.
    expected = min(math.prod(shape) * TORCH_DTYPES[dtype].itemsize, 1 << 63)
    if stop - start != expected:
        raise error(
            f"{path}: tensor {name!r} of shape {list(shape)} and dtype {dtype} needs {expected} "
            f"bytes, its offsets span {stop - start}"
        )
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _check_tiling(
    path: Path,
    entries: Mapping[str, TensorEntry],
    data_start: int,
    size: int,
    error: type[SpecterError],
) -> None:
    """The tensors must cover the data without hole or overlap, up to the end of the file."""
    position = data_start
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
        if entry.start != position:
            raise error(
                f"{path}: tensor {name!r} starts at byte {entry.start}, expected {position}: "
                "the data has a hole or an overlap"
            )
        position = entry.stop
    if position != size:
        raise error(
            f"{path}: the header declares {position} bytes, the file has {size}; "
            "it is truncated or has bytes appended"
        )


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors that are read when they are asked for; nothing is kept."""

    def __init__(self, names: Iterable[str], read: Callable[[str], torch.Tensor]) -> None:
        """Of these names, by this function."""
        self._names = dict.fromkeys(names)
        self._read = read

    def __getitem__(self, name: str) -> torch.Tensor:
        """Read one; raises ``KeyError`` for a name that is not there."""
        if name not in self._names:
            raise KeyError(name)
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        """The names in the order given."""
        return iter(self._names)

    def __len__(self) -> int:
        """How many there are."""
        return len(self._names)


def read_tensors(path: Path, header: Header) -> dict[str, torch.Tensor]:
    """Read all tensors, each into memory of its own (no memory map is left behind).

    Raises:
        OSError: as the operating system reports it.
        EOFError: the file ended early.
    """
    return {name: read_tensor(path, entry) for name, entry in header.entries.items()}


def read_tensor(path: Path, entry: TensorEntry) -> torch.Tensor:
    """Read one tensor; see ``read_tensors``. The page cache does not keep a second copy of it."""
    data = torch.empty(entry.nbytes, dtype=torch.uint8)
    view = memoryview(data.numpy())  # type: ignore[arg-type]  # numpy's stubs lack Buffer on 3.11
    with path.open("rb", buffering=0) as file:
        file.seek(entry.start)
        done = 0
        while done < len(view):
            count = file.readinto(view[done:])
            if not count:
                raise EOFError(f"{path}: ended {len(view) - done} bytes early")
            done += count
        if hasattr(os, "posix_fadvise"):
            # The kernel keeps pages together and drops a cluster only if the range has all of it:
            # from the file's start on, so that one which two tensors share goes with the second.
            os.posix_fadvise(file.fileno(), 0, align_up(entry.stop), os.POSIX_FADV_DONTNEED)
    return data.view(TORCH_DTYPES[entry.dtype]).view(entry.shape)


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in C order, without a copy where it is contiguous."""
    flat = tensor.detach().contiguous().view(-1)
    array = flat.view(torch.uint8).numpy()
    return memoryview(array)  # type: ignore[arg-type]  # numpy's stubs lack Buffer on 3.11


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]
) -> int:
    """Write a Specter safetensors file, tensors in the order given; returns the bytes written.

    The same tensors and metadata give the same bytes. The file is flushed to disk.
    """
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        nbytes = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": SAFETENSORS_DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [position, position + nbytes],
        }
        position += nbytes
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor_bytes(tensor))
        file.flush()
        os.fsync(file.fileno())
    return 8 + len(text) + position
