"""Xorbs: runs of compressed chunks, as clients upload them and fetch ranges of them."""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lz4.frame  # type: ignore[import-untyped]
import numpy as np

from tests.support.hub_store.hashing import chunk_hash

HEADER_BYTES = 8
FOOTER_MARK = b"XETBLOB"
MAX_XORB_BYTES = 64 * 1024 * 1024
SLACK_BYTES = 1024 * 1024
"""The client fills a xorb with that many bytes of chunks; their headers and the footer come on top."""

CHUNK_BYTES = 64 * 1024
"""Length of the chunks into which the server itself cuts what came through the S3 gateway."""

READ_CHUNKS = 16
RAW, LZ4, GROUPED_LZ4 = 0, 1, 2

INDEX = np.dtype([("end", "<u4"), ("length", "<u4"), ("hash", "V32")])
"""Of each chunk: end of its serialised bytes in the xorb, length unpacked, hash."""

Index = np.ndarray[Any, Any]


class DamagedError(ValueError):
    """An upload that is not what its name or its format says."""


def raw_header(length: int) -> bytes:
    """Header of a chunk stored as it is."""
    return struct.pack("<I", length << 8) + struct.pack("<I", length << 8 | RAW)


def unpack(scheme: int, data: bytes, length: int) -> bytes:
    """Raises DamagedError: unknown scheme, or not ``length`` bytes."""
    if scheme == RAW:
        found = data
    elif scheme in (LZ4, GROUPED_LZ4):
        try:
            found = lz4.frame.decompress(data)
        except RuntimeError as error:
            raise DamagedError(f"chunk does not decompress: {error}") from error
        if scheme == GROUPED_LZ4:
            found = _ungrouped(found)
    else:
        raise DamagedError(f"compression scheme {scheme} is unknown")
    if len(found) != length:
        raise DamagedError(f"chunk has {len(found)} bytes, its header says {length}")
    return found


def _ungrouped(data: bytes) -> bytes:
    """Undo the grouping of bytes by their place in each four."""
    packed = np.frombuffer(data, np.uint8)
    restored = np.empty_like(packed)
    at = 0
    for place in range(4):
        count = (len(packed) + 3 - place) // 4
        restored[place::4] = packed[at : at + count]
        at += count
    return restored.tobytes()


def chunks_of(data: bytes | memoryview) -> Iterator[tuple[bytes, int]]:
    """Unpacked bytes of each chunk of a serialised run, and where its serialised bytes end.

    Raises:
        DamagedError: a header or a body is cut short, or does not unpack.
    """
    with memoryview(data) as view:
        yield from _chunks(view)


def _chunks(view: memoryview) -> Iterator[tuple[bytes, int]]:
    at = 0
    while at < len(view) and bytes(view[at : at + len(FOOTER_MARK)]) != FOOTER_MARK:
        if at + HEADER_BYTES > len(view):
            raise DamagedError(f"chunk header at byte {at} is cut short")
        packed, rest = struct.unpack_from("<II", view, at)
        size, scheme, length = packed >> 8, rest & 0xFF, rest >> 8
        if packed & 0xFF or at + HEADER_BYTES + size > len(view):
            raise DamagedError(f"chunk at byte {at} is cut short or of an unknown version")
        body = bytes(view[at + HEADER_BYTES : at + HEADER_BYTES + size])
        at += HEADER_BYTES + size
        yield unpack(scheme, body, length), at


def index_of(path: Path) -> Index:
    """Chunks of a whole xorb.

    Raises:
        DamagedError: it is not one.
    """
    if not path.stat().st_size:
        raise DamagedError("xorb is empty")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        with memoryview(mapped) as data:
            rows = [(end, len(chunk), chunk_hash(chunk)) for chunk, end in chunks_of(data)]
    return np.array(rows, INDEX)


def read_chunks(path: Path, index: Index, first: int, last: int) -> Iterator[bytes]:
    """Unpacked bytes of the chunks from ``first`` to before ``last``, in blocks of about 1 MiB."""
    with path.open("rb") as file:
        for at in range(first, last, READ_CHUNKS):
            until = min(at + READ_CHUNKS, last)
            start, end = span(index, at, until)
            data = os.pread(file.fileno(), end - start, start)
            yield b"".join(chunk for chunk, _ in chunks_of(data))


def span(index: Index, first: int, last: int) -> tuple[int, int]:
    """Serialised bytes of some chunks: start, and end (exclusive)."""
    return (int(index["end"][first - 1]) if first else 0), int(index["end"][last - 1])
