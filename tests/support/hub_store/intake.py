"""Files that come in as plain bytes: cut into chunks and xorbs by the server, as the S3 gateway must."""

from pathlib import Path
from typing import BinaryIO

from tests.support.hub_store import hashing
from tests.support.hub_store.shard import Term
from tests.support.hub_store.store import EMPTY, Store
from tests.support.hub_store.xorb import CHUNK_BYTES, HEADER_BYTES, MAX_XORB_BYTES, raw_header

CHUNKS_PER_XORB = MAX_XORB_BYTES // (CHUNK_BYTES + HEADER_BYTES)


class Intake:
    """One file. Its chunks all have the same length, so its hash differs from that which a Xet client finds."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._left = bytearray()
        self._chunks: list[tuple[bytes, int]] = []
        self._terms: list[Term] = []
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._in_xorb = 0

    def write(self, data: bytes) -> None:
        self._left += data
        at = 0
        while len(self._left) - at >= CHUNK_BYTES:
            self._add(bytes(self._left[at : at + CHUNK_BYTES]))
            at += CHUNK_BYTES
        del self._left[:at]

    def finish(self, inner: str) -> str:
        """Give the content to a bucket; its hash."""
        if self._left:
            self._add(bytes(self._left))
        self._close()
        if not self._chunks:
            return EMPTY
        hash = hashing.text_of(hashing.file_hash(self._chunks))
        self._store.add_content(inner, hash, self._terms)
        return hash

    def discard(self) -> None:
        """Forget what came in: the client left."""
        if self._file is not None and self._path is not None:
            self._file.close()
            self._path.unlink(missing_ok=True)

    def _add(self, chunk: bytes) -> None:
        if self._in_xorb == CHUNKS_PER_XORB:
            self._close()
        if self._file is None:
            self._path = self._store.incoming()
            self._file = self._path.open("wb")
        self._file.write(raw_header(len(chunk)) + chunk)
        self._chunks.append((hashing.chunk_hash(chunk), len(chunk)))
        self._in_xorb += 1

    def _close(self) -> None:
        if self._file is None or self._path is None:
            return
        self._file.close()
        chunks = self._chunks[-self._in_xorb :]
        xorb = hashing.text_of(hashing.tree_hash(chunks))
        self._store.add_xorb(xorb, self._path)
        self._terms.append(Term(xorb, 0, len(chunks), sum(length for _, length in chunks)))
        self._file, self._path, self._in_xorb = None, None, 0
