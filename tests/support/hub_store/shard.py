"""Shards: which runs of chunks make up a file."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from tests.support.hub_store.hashing import text_of
from tests.support.hub_store.xorb import DamagedError

TAG = b"HFRepoMetaData\0" + bytes.fromhex("556967456a7b815783a5bdd95ccdd14aa9")
ENTRY_BYTES = 48
HEADER_VERSION = 2
BOOKEND = b"\xff" * 32
WITH_VERIFICATION, WITH_METADATA = 1 << 31, 1 << 30


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
        if head[:32] == BOOKEND:
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
