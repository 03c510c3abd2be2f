"""Hashes of the Xet protocol: chunks, and the tree over them that names xorbs and files."""

from collections.abc import Sequence

from blake3 import blake3

CHUNK_KEY = bytes.fromhex("6697f5775b9550de3135cbaca597181c9de421109beb2b58b4d0b04b93adf229")
NODE_KEY = bytes.fromhex("017ec5c7a5472996fd946666b48a02e65ddd536f37c76dd2f86352e64a53713f")
FILE_KEY = bytes(32)
NOTHING = bytes(32)
"""Hash of an empty file, and of a tree without leaves."""

MEAN_BRANCHING = 4


def text_of(digest: bytes) -> str:
    """A hash as the protocol writes it: each 8 bytes as a little-endian number in hex."""
    return b"".join(digest[at : at + 8][::-1] for at in range(0, 32, 8)).hex()


def chunk_hash(data: bytes) -> bytes:
    return blake3(data, key=CHUNK_KEY).digest()


def tree_hash(chunks: Sequence[tuple[bytes, int]]) -> bytes:
    """Root of the tree over (hash, length in bytes) of chunks: the name of a xorb."""
    if not chunks:
        return NOTHING
    nodes = list(chunks)
    while len(nodes) > 1:
        merged = []
        at = 0
        while at < len(nodes):
            end = at + _group_length(nodes[at : at + 2 * MEAN_BRANCHING + 1])
            merged.append(_merge(nodes[at:end]))
            at = end
        nodes = merged
    return nodes[0][0]


def file_hash(chunks: Sequence[tuple[bytes, int]]) -> bytes:
    """The name of a file that consists of these chunks."""
    return blake3(tree_hash(chunks), key=FILE_KEY).digest() if chunks else NOTHING


def _group_length(nodes: Sequence[tuple[bytes, int]]) -> int:
    for at in range(2, len(nodes)):
        if int.from_bytes(nodes[at][0][24:], "little") % MEAN_BRANCHING == 0:
            return at + 1
    return len(nodes)


def _merge(nodes: Sequence[tuple[bytes, int]]) -> tuple[bytes, int]:
    lines = "".join(f"{text_of(digest)} : {length}\n" for digest, length in nodes)
    return blake3(lines.encode(), key=NODE_KEY).digest(), sum(length for _, length in nodes)
