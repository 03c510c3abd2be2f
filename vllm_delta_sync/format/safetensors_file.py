"""``Container`` reads a safetensors file as hostile input; ``write_container`` and ``write_anchor`` write one.

The safetensors library can read these files. This module has its own reader because a bucket is not trusted: it refuses
duplicate keys, holes, overlaps and absurd sizes before it allocates, and does not copy buffers. It has its own writer
because digests and golden files need one canonical header, and because anchors are written tensor by tensor. An anchor
object is a full snapshot as an ordinary checkpoint shard.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FormatError, StoreError, TensorMismatchError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import load_json
from vllm_delta_sync.format.limits import check_limit, shown
from vllm_delta_sync.format.table import DType, TensorSpec, TensorTable, dtype_of

Buffer = bytes | bytearray | memoryview | np.ndarray
_LENGTH_BYTES = 8
_ALIGNMENT = 8


@dataclass(frozen=True)
class Entry:
    """One tensor of a container: dtype, shape, and its bytes [start, end) counted from the end of the header."""

    dtype: DType
    shape: tuple[int, ...]
    start: int
    end: int


def layout(entries: Mapping[str, tuple[DType, tuple[int, ...]]]) -> dict[str, Entry]:
    """Place entries without holes: widest elements first, then by name, so that every tensor is aligned."""
    placed: dict[str, Entry] = {}
    cursor = 0
    for name in sorted(entries, key=lambda name: (-entries[name][0].itemsize, name.encode())):
        dtype, shape = entries[name]
        end = cursor + math.prod(shape) * dtype.itemsize
        placed[name] = Entry(dtype, shape, cursor, end)
        cursor = end
    return placed


def header_bytes(placed: Mapping[str, Entry], metadata: Mapping[str, str]) -> bytes:
    """Return length prefix and JSON header, padded with spaces to a multiple of 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    for name, entry in placed.items():
        header[name] = {
            "dtype": entry.dtype.name,
            "shape": list(entry.shape),
            "data_offsets": [entry.start, entry.end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_container(arrays: Mapping[str, tuple[str, npt.NDArray[Any]]], metadata: Mapping[str, str]) -> bytes:
    """Serialize (dtype name, array) pairs; an array has any shape and holds bits of its dtype."""
    placed = layout({name: (dtype_of(dtype, name), array.shape) for name, (dtype, array) in arrays.items()})
    pieces: list[bytes | memoryview] = [header_bytes(placed, metadata)]
    pieces += [np.ascontiguousarray(arrays[name][1]).reshape(-1).view(np.uint8).data for name in placed]
    return b"".join(pieces)


class TruncatedFileError(FormatError):
    """A safetensors file ends before what it declares."""


class Container:
    """A parsed container over a buffer (bytes, or a memory map of a file).

    Attributes:
        metadata: the ``__metadata__`` strings.
        entries: by name.

    Raises:
        TruncatedFileError: it ends too early. FormatError: the header does not describe each byte that follows exactly
            once.
        LimitError: the header or a declared size is above its limit.
    """

    def __init__(self, buffer: Buffer, what: str = "container") -> None:
        view = (buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)).cast("B")
        self._what = what
        if len(view) < _LENGTH_BYTES:
            raise TruncatedFileError(f"{what}: {len(view)} bytes are too few for a safetensors file")
        header_size = int.from_bytes(view[:_LENGTH_BYTES], "little")
        check_limit(f"{what}: header size", header_size, limits.MAX_HEADER_BYTES, "MAX_HEADER_BYTES")
        if header_size > len(view) - _LENGTH_BYTES:
            raise TruncatedFileError(f"{what}: header of {header_size} bytes in a file of {len(view)}: truncated")
        if bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + 1]) != b"{":
            raise FormatError(f"{what}: header does not begin with an opening brace")
        header = load_json(bytes(view[_LENGTH_BYTES : _LENGTH_BYTES + header_size]), f"{what} header")
        if not isinstance(header, dict):
            raise FormatError(f"{what}: header is not a JSON object")
        self._data = view[_LENGTH_BYTES + header_size :]
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
            raise FormatError(f"{what}: __metadata__ is not a map of strings")
        self.metadata: dict[str, str] = metadata
        self.entries = {name: self._entry(name, value) for name, value in header.items()}
        self._check_no_gaps()

    def _entry(self, name: str, value: object) -> Entry:
        what = f"{self._what}: entry {name[:80]!r}"
        if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
            raise FormatError(f"{what} does not have exactly dtype, shape and data_offsets")
        dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
        if not isinstance(dtype, str) or not _integers(shape) or not _integers(offsets) or len(offsets) != 2:
            raise FormatError(f"{what}: dtype, shape or data_offsets has the wrong type")
        element = dtype_of(dtype, what)
        check_limit(f"{what}: dimensions", len(shape), limits.MAX_DIMENSIONS, "MAX_DIMENSIONS")
        for size in shape:
            check_limit(f"{what}: a dimension", size, limits.MAX_TENSOR_ELEMENTS, "MAX_TENSOR_ELEMENTS")
        start, end = offsets
        if not 0 <= start <= end <= len(self._data):
            raise (TruncatedFileError if 0 <= start <= end else FormatError)(
                f"{what}: data_offsets {shown(start)} to {shown(end)} lie outside the {len(self._data)} data bytes"
            )
        if math.prod(shape) * element.itemsize != end - start:
            raise FormatError(f"{what}: shape {shape} of {dtype} does not take {end - start} bytes")
        return Entry(element, tuple(shape), start, end)

    def _check_no_gaps(self) -> None:
        cursor = 0
        for name, entry in sorted(self.entries.items(), key=lambda item: (item[1].start, item[1].end)):
            if entry.start != cursor:
                raise FormatError(f"{self._what}: entry {name[:80]!r} starts at {entry.start}, not at {cursor}")
            cursor = entry.end
        if cursor != len(self._data):
            raise FormatError(f"{self._what}: {len(self._data) - cursor} bytes after the last entry")

    def check_entry(self, spec: TensorSpec) -> None:
        """Raise TensorMismatchError unless a tensor's entry, which there is, has its dtype and shape."""
        entry = self.entries[spec.name]
        if entry.dtype.name != spec.dtype or entry.shape != spec.shape:
            raise TensorMismatchError(
                f"{self._what}: tensor {spec.name!r} is {entry.dtype.name} {list(entry.shape)}, the run's table says "
                f"{spec.dtype} {list(spec.shape)}"
            )

    def bits(self, name: str) -> npt.NDArray[np.unsignedinteger]:
        """Return an entry as a flat array of bit patterns, without a copy; raises FormatError if there is none."""
        try:
            entry = self.entries[name]
        except KeyError:
            raise FormatError(f"{self._what}: entry {name[:80]!r} is missing") from None
        return np.frombuffer(self._data[entry.start : entry.end], dtype=entry.dtype.uint)


def _integers(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def aligned(bits: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``bits``, copied if its memory is not aligned to its elements; compiled loops need alignment."""
    return bits if bits.flags.aligned else bits.copy()


def write_anchor(path: Path, table: TensorTable, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write every tensor of the table to one file; durable on return.

    Args:
        tensors: (checkpoint name, flat (numel,) unsigned bits) pairs in any order; kept in memory one at a time.

    Raises:
        TensorMismatchError: a tensor is unknown, repeated, missing, or differs from the table in width or size.
        StoreError: the disk is full or not writable.
    """
    placed = layout({spec.name: (spec.element, spec.shape) for spec in table})
    header = header_bytes(placed, {"format": "pt"})
    pending = {spec.name for spec in table}
    try:
        with path.open("wb") as file:
            file.write(header)
            for name, bits in tensors:
                spec = table.by_name(name)
                if name not in pending or bits.dtype != spec.element.uint or bits.size != spec.numel:
                    raise TensorMismatchError(
                        f"tensor {name!r} has {bits.size} elements of {bits.dtype}; the table says {spec.numel} of "
                        f"{spec.dtype}, once"
                    )
                pending.discard(name)
                file.seek(len(header) + placed[name].start)
                file.write(np.ascontiguousarray(bits).view(np.uint8).data)
                # Free this tensor before the iterator makes the next one.
                del bits
            file.truncate(len(header) + table.full_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"anchor file {path.name!r} cannot be written: {error.strerror}; free space there") from error
    if pending:
        raise TensorMismatchError(f"tensor {min(pending)!r} is missing from the snapshot ({len(pending)} in all)")


def shard_tables(table: TensorTable, shard_bytes: int) -> list[TensorTable]:
    """Split a table, in order, into tables of at most ``shard_bytes``; a larger tensor gets its own table.

    Raises:
        LimitError: there are more shards than an anchor can list.
    """
    sizes = {tensor: spec.nbytes for tensor, spec in enumerate(table)}
    pieces = limits.split_by_bytes(sizes, shard_bytes, limits.MAX_OBJECTS_PER_VERSION)
    return [TensorTable(table[tensor] for tensor in piece) for piece in pieces if piece]


def read_anchor(data: Buffer, table: TensorTable, what: str) -> Container:
    """Parse an anchor shard and check its tensors against the table.

    Raises:
        FormatError, LimitError: malformed container.
        TensorMismatchError: an entry is not in the table, or has another dtype or shape.
    """
    container = Container(data, what)
    for name in container.entries:
        container.check_entry(table.by_name(name))
    if not container.entries and len(table):
        raise FormatError(f"{what}: holds no tensor")
    return container
