"""Shards: which runs of chunks make up a file (uploads), and which chunks a xorb has (answers)."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tests.support.hub_store.hashing import digest_of, text_of
from tests.support.hub_store.xorb import DamagedError, Index

TAG = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
ENTRY_BYTES = 48
HEADER_VERSION, FOOTER_VERSION, FOOTER_BYTES = 2, 1, 200
BOOKEND = b"\xff" * 32 + bytes(16)
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30
SHARD_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Term:
    """Chunks ``first`` to before ``last`` of a xorb; ``length``: their bytes unpacked."""

    xorb: str
    first: int
    last: int
    length: int


def parse_files(data: bytes) -> Iterator[tuple[str, list[Term]]]:
    """Name and terms of each file of an uploaded shard.

    Raises:
        DamagedError: it is no shard, or is cut short.
    """
    if data[:32] != TAG or struct.unpack_from("<Q", data, 32)[0] != HEADER_VERSION:
        raise DamagedError("shard header has an unknown tag or version")
    at = ENTRY_BYTES
    while True:
        head = data[at : at + ENTRY_BYTES]
        if len(head) < ENTRY_BYTES:
            raise DamagedError("shard ends without a bookend")
        if head[:32] == BOOKEND[:32]:
            return
        flags, count = struct.unpack_from("<II", head, 32)
        at += ENTRY_BYTES
        terms = [_term(data[at + n * ENTRY_BYTES : at + (n + 1) * ENTRY_BYTES]) for n in range(count)]
        at += ENTRY_BYTES * (count * (2 if flags & WITH_VERIFICATION else 1) + (1 if flags & WITH_METADATA else 0))
        yield text_of(head[:32]), terms


def _term(entry: bytes) -> Term:
    if len(entry) < ENTRY_BYTES:
        raise DamagedError("shard is cut short within a file")
    _, length, first, last = struct.unpack_from("<IIII", entry, 32)
    return Term(text_of(entry[:32]), first, last, length)


def describe_xorb(xorb: str, index: Index, now: float) -> bytes:
    """A shard with the chunks of one xorb, against which a client may deduplicate."""
    entries = np.zeros(len(index), [("hash", "V32"), ("start", "<u4"), ("length", "<u4"), ("unused", "V8")])
    entries["hash"], entries["length"] = index["hash"], index["length"]
    entries["start"] = np.cumsum(index["length"]) - index["length"]
    size = int(index["length"].sum())
    head = digest_of(xorb) + struct.pack("<IIII", 0, len(index), size, int(index["end"][-1]))
    files_at, xorbs_at = ENTRY_BYTES, 2 * ENTRY_BYTES
    body = TAG + struct.pack("<QQ", HEADER_VERSION, FOOTER_BYTES) + BOOKEND + head + entries.tobytes() + BOOKEND
    # Clients take the offsets of the (empty) lookup tables for the end of the xorbs, although they are not specified.
    footer = struct.pack("<QQQ", FOOTER_VERSION, files_at, xorbs_at) + struct.pack("<QQ", len(body), 0) * 3 + bytes(32)
    footer += struct.pack("<QQ", int(now), int(now) + SHARD_SECONDS) + bytes(72) + struct.pack("<Q", len(body))
    return body + footer
