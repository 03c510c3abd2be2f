"""``Contents``: what the loopback Hub stores, in the formats of Xet: files made of chunks, which lie in xorbs.

A xorb is a run of compressed chunks; a shard says of which chunks of which xorbs files consist. Hashes name them.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import lz4.frame  # type: ignore[import-untyped]
import numpy as np
import numpy.typing as npt
from blake3 import blake3

CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
FILE_KEY = bytes(32)
EMPTY = "0" * 64
"""Hash of an empty file."""
MEAN_BRANCHING = 4

HEADER_BYTES = 8
FOOTER_MARK = b"XETBLOB"
MAX_XORB_BYTES = 65 << 20
"""The client fills a xorb with 64 MiB of chunks; their headers and the footer come on top."""
READ_CHUNKS = 16
RAW, LZ4, GROUPED_LZ4 = 0, 1, 2

SHARD_TAG = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
ENTRY_BYTES = 48
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30

Chunk = tuple[bytes, int]
"""Hash and length of what is hashed."""


class DamagedError(ValueError):
    """An upload that is not what its name or its format says."""


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


def tree_hash(chunks: Sequence[Chunk]) -> bytes:
    """Root of the tree over chunks, one or more: the name of a xorb."""
    nodes = list(chunks)
    while len(nodes) > 1:
        merged, at = [], 0
        while at < len(nodes):
            end = min(at + 2 * MEAN_BRANCHING + 1, len(nodes))
            ends = (
                n + 1 for n in range(at + 2, end) if int.from_bytes(nodes[n][0][24:], "little") % MEAN_BRANCHING == 0
            )
            end = next(ends, end)
            lines = "".join(f"{text_of(digest)} : {length}\n" for digest, length in nodes[at:end])
            merged.append((blake3(lines.encode(), key=NODE_KEY).digest(), sum(length for _, length in nodes[at:end])))
            at = end
        nodes = merged
    return nodes[0][0]


def chunks_of(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Unpacked bytes of each chunk of a serialised run, and where its serialised bytes end. Raises DamagedError."""
    at = 0
    while at < len(data) and data[at : at + len(FOOTER_MARK)] != FOOTER_MARK:
        if at + HEADER_BYTES > len(data):
            raise DamagedError(f"chunk header at byte {at} is cut short")
        packed, rest = struct.unpack_from("<II", data, at)
        size, scheme, length = packed >> 8, rest & 0xFF, rest >> 8
        if packed & 0xFF or at + HEADER_BYTES + size > len(data):
            raise DamagedError(f"chunk at byte {at} is cut short or of an unknown version")
        body = data[at + HEADER_BYTES : at + HEADER_BYTES + size]
        at += HEADER_BYTES + size
        yield _unpacked(scheme, body, length), at


def _unpacked(scheme: int, data: bytes, length: int) -> bytes:
    if scheme not in (RAW, LZ4, GROUPED_LZ4):
        raise DamagedError(f"compression scheme {scheme} is unknown")
    if scheme != RAW:
        try:
            data = lz4.frame.decompress(data)
        except RuntimeError as error:
            raise DamagedError(f"chunk does not decompress: {error}") from error
    if scheme == GROUPED_LZ4:
        # Bytes are grouped by their place in each four.
        packed = np.frombuffer(data, np.uint8)
        restored = np.empty_like(packed)
        for place, group in enumerate(np.split(packed, np.cumsum([(len(packed) + 3 - n) // 4 for n in range(3)]))):
            restored[place::4] = group
        data = restored.tobytes()
    if len(data) != length:
        raise DamagedError(f"chunk has {len(data)} bytes, its header says {length}")
    return data


def files_of(shard: bytes) -> Iterator[tuple[str, list[Term]]]:
    """Name and terms of each file of an uploaded shard. Raises DamagedError."""
    if shard[:32] != SHARD_TAG:
        raise DamagedError("shard header has an unknown tag")
    at = ENTRY_BYTES
    try:
        while shard[at : at + 32] != BOOKEND:
            name = text_of(shard[at : at + 32])
            flags, count = struct.unpack_from("<II", shard, at + 32)
            terms = []
            for place in range(at + ENTRY_BYTES, at + (count + 1) * ENTRY_BYTES, ENTRY_BYTES):
                _, length, first, last = struct.unpack_from("<IIII", shard, place + 32)
                terms.append(Term(text_of(shard[place : place + 32]), first, last, length))
            yield name, terms
            at += ENTRY_BYTES * (1 + count * (2 if flags & WITH_VERIFICATION else 1) + bool(flags & WITH_METADATA))
    except struct.error as error:
        raise DamagedError("shard is cut short") from error


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
        """Whether it is new. Raises DamagedError: it is too large, it is no xorb, or it has another hash."""
        if len(data) > MAX_XORB_BYTES:
            raise DamagedError(f"xorb has {len(data)} bytes, at most {MAX_XORB_BYTES} are allowed")
        found = [(blake3(chunk, key=CHUNK_KEY).digest(), len(chunk), end) for chunk, end in chunks_of(data)]
        if not found or text_of(tree_hash([chunk[:2] for chunk in found])) != name:
            raise DamagedError(f"xorb {name} is empty, or has another hash")
        if name in self._chunks:
            return False
        self.path(name).write_bytes(data)
        self._chunks[name] = np.array([[end for *_, end in found], [length for _, length, _ in found]], np.int64)
        return True

    def add_file(self, hash: str, terms: list[Term]) -> bool:
        """Whether it is new. Raises DamagedError: a term names chunks that are not here."""
        for term in terms:
            lengths = self._chunks[term.xorb][1] if term.xorb in self._chunks else np.empty(0, np.int64)
            inside = term.first < term.last <= len(lengths)
            if not inside or int(lengths[term.first : term.last].sum()) != term.length:
                raise DamagedError(f"xorb {term.xorb} has no chunks {term.first}:{term.last} of {term.length} bytes")
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
