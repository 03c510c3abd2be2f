"""``Contents``: what the loopback Hub stores, in the formats of Xet: files made of chunks, which lie in xorbs.

A xorb is a run of compressed chunks; a shard says of which chunks of which xorbs files consist. Hashes name them; that
they are right is the concern of hf_xet, whose uploads these are.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt

EMPTY = "0" * 64
"""Hash of an empty file."""

HEADER_BYTES = 8
FOOTER_MARK = b"XETBLOB"
READ_CHUNKS = 16
RAW, LZ4, GROUPED_LZ4 = 0, 1, 2

ENTRY_BYTES = 48
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Term:
    """Chunks ``first`` to before ``last`` of a xorb; ``length``: their bytes unpacked."""

    xorb: str
    first: int
    last: int
    length: int


def text_of(digest: bytes) -> str:
    """A hash as the protocol writes it: each 8 bytes as a little-endian number in hex."""
    return b"".join(digest[at : at + 8][::-1] for at in range(0, 32, 8)).hex()


def chunks_of(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Unpacked bytes of each chunk of a serialised run, and where its serialised bytes end."""
    at = 0
    while at < len(data) and data[at : at + len(FOOTER_MARK)] != FOOTER_MARK:
        packed, rest = struct.unpack_from("<II", data, at)
        size, scheme, length = packed >> 8, rest & 0xFF, rest >> 8
        chunk = _unpacked(scheme, data[at + HEADER_BYTES : at + HEADER_BYTES + size])
        assert len(chunk) == length
        at += HEADER_BYTES + size
        yield chunk, at


def _unpacked(scheme: int, data: bytes) -> bytes:
    assert scheme in (RAW, LZ4, GROUPED_LZ4)
    if scheme == RAW:
        return data
    data = lz4.frame.decompress(data)
    if scheme == LZ4:
        return data
    # Bytes are grouped by their place in each four.
    packed = np.frombuffer(data, np.uint8)
    restored = np.empty_like(packed)
    for place, group in enumerate(np.split(packed, np.cumsum([(len(packed) + 3 - n) // 4 for n in range(3)]))):
        restored[place::4] = group
    return restored.tobytes()


def files_of(shard: bytes) -> Iterator[tuple[str, list[Term]]]:
    """Name and terms of each file of an uploaded shard."""
    at = ENTRY_BYTES
    while shard[at : at + 32] != BOOKEND:
        name = text_of(shard[at : at + 32])
        flags, count = struct.unpack_from("<II", shard, at + 32)
        terms = []
        for place in range(at + ENTRY_BYTES, at + (count + 1) * ENTRY_BYTES, ENTRY_BYTES):
            _, length, first, last = struct.unpack_from("<IIII", shard, place + 32)
            terms.append(Term(text_of(shard[place : place + 32]), first, last, length))
        yield name, terms
        at += ENTRY_BYTES * (1 + count * (2 if flags & WITH_VERIFICATION else 1) + bool(flags & WITH_METADATA))


class Contents:
    """Xorbs, as files of a folder, and files as terms.

    Attributes:
        files: terms by hash.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._chunks: dict[str, npt.NDArray[np.int64]] = {}
        """Of each xorb: (2, chunks), ends of its chunks as they are stored, and their lengths unpacked."""
        self.files: dict[str, list[Term]] = {EMPTY: []}

    def path(self, xorb: str) -> Path:
        return self._folder / xorb

    def size(self, hash: str) -> int:
        return sum(term.length for term in self.files[hash])

    def add_xorb(self, name: str, data: bytes) -> bool:
        """Whether it is new."""
        if name in self._chunks:
            return False
        self.path(name).write_bytes(data)
        self._chunks[name] = np.array([(end, len(chunk)) for chunk, end in chunks_of(data)], np.int64).T
        return True

    def add_file(self, hash: str, terms: list[Term]) -> bool:
        """Whether it is new."""
        fresh = hash not in self.files
        self.files.setdefault(hash, terms)
        return fresh

    def span(self, xorb: str, first: int, last: int) -> tuple[int, int]:
        """Stored bytes of some chunks: start, and end (exclusive)."""
        ends = self._chunks[xorb][0]
        return int(ends[first - 1]) if first else 0, int(ends[last - 1])

    def cut(self, hash: str, start: int, end: int) -> tuple[int, list[Term]]:
        """Runs of whole chunks that cover bytes ``start`` to before ``end``, and how many of the first to skip."""
        kept: list[Term] = []
        skip = at = 0
        for term in self.files[hash]:
            if at < end and at + term.length > start:
                lengths = self._chunks[term.xorb][1][term.first : term.last]
                ends = at + np.cumsum(lengths)
                first = int(np.searchsorted(ends, start, "right"))
                last = min(int(np.searchsorted(ends, end, "left")) + 1, len(ends))
                if not kept:
                    skip = start - int(ends[first] - lengths[first])
                kept.append(Term(term.xorb, term.first + first, term.first + last, int(lengths[first:last].sum())))
            at += term.length
        return skip, kept

    def read(self, hash: str, start: int, end: int) -> Iterator[bytes]:
        """Bytes ``start`` to before ``end`` of a file, in blocks."""
        skip, terms = self.cut(hash, start, end)
        left = end - start
        for term in terms:
            with self.path(term.xorb).open("rb") as file:
                for first in range(term.first, term.last, READ_CHUNKS):
                    begin, stop = self.span(term.xorb, first, min(first + READ_CHUNKS, term.last))
                    file.seek(begin)
                    block = b"".join(chunk for chunk, _ in chunks_of(file.read(stop - begin)))
                    wanted = block[skip : skip + left]
                    skip, left = max(0, skip - len(block)), left - len(wanted)
                    if wanted:
                        yield wanted
