"""What the loopback Hub holds, in one folder: buckets and files in SQLite, xorbs as files."""

import json
import os
import secrets
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from tests.support.hub_store import hashing
from tests.support.hub_store.shard import Term
from tests.support.hub_store.xorb import INDEX, MAX_XORB_BYTES, SLACK_BYTES, DamagedError, Index, index_of, read_chunks

EMPTY = hashing.text_of(hashing.NOTHING)
INDEXES_IN_MEMORY = 256

SCHEMA = """
CREATE TABLE IF NOT EXISTS settings (name TEXT PRIMARY KEY, value BLOB);
CREATE TABLE IF NOT EXISTS buckets (inner TEXT PRIMARY KEY, id TEXT UNIQUE, private INTEGER, created REAL);
CREATE TABLE IF NOT EXISTS files (bucket TEXT, path TEXT, hash TEXT, size INTEGER, mtime INTEGER, kind TEXT,
    uploaded REAL, PRIMARY KEY (bucket, path)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS contents (hash TEXT PRIMARY KEY, size INTEGER, terms TEXT);
CREATE TABLE IF NOT EXISTS held (bucket TEXT, hash TEXT, PRIMARY KEY (bucket, hash)) WITHOUT ROWID;
"""


class RefusedError(Exception):
    """A change to a bucket that cannot be made; the text says why."""


@dataclass(frozen=True)
class Bucket:
    """``inner``: names this life of the bucket; another when it is made again under the same ``id``."""

    inner: str
    id: str
    private: bool
    created: float


@dataclass(frozen=True)
class File:
    """``mtime``: milliseconds. ``uploaded``: seconds. ``kind``: content type."""

    path: str
    hash: str
    size: int
    mtime: int
    kind: str | None
    uploaded: float


@dataclass(frozen=True)
class Content:
    """A file's bytes: its size, and the runs of chunks it consists of."""

    hash: str
    size: int
    terms: tuple[Term, ...]


class Store:
    """Safe to use from several threads. Opening a folder again finds what was there.

    Args:
        folder: all state. quota: bytes of files per bucket, or None.
    """

    def __init__(self, folder: Path, quota: int | None = None) -> None:
        self.folder = folder
        self.quota = quota
        for name in ("xorbs", "incoming"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        self._lock = threading.RLock()
        self._base = sqlite3.connect(folder / "hub.sqlite", check_same_thread=False, isolation_level=None)
        self._base.executescript("PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;" + SCHEMA)
        self._base.execute("INSERT OR IGNORE INTO settings VALUES ('key', ?)", (secrets.token_bytes(32),))
        self.key: bytes = self._all("SELECT value FROM settings WHERE name='key'")[0][0]
        self.index = lru_cache(INDEXES_IN_MEMORY)(self._load_index)

    def close(self) -> None:
        with self._lock:
            self._base.close()

    def _all(self, query: str, values: Iterable[object] = ()) -> list[tuple]:
        with self._lock:
            return self._base.execute(query, tuple(values)).fetchall()

    # Buckets

    def create_bucket(self, id: str, private: bool = False) -> Bucket | None:
        """The new bucket; None: there is one of that name."""
        made = Bucket(secrets.token_hex(12), id, private, time.time())
        with self._lock:
            if self.bucket(id):
                return None
            self._all("INSERT INTO buckets VALUES (?, ?, ?, ?)", (made.inner, id, int(private), made.created))
        return made

    def bucket(self, id: str) -> Bucket | None:
        found = self._all("SELECT inner, id, private, created FROM buckets WHERE id=?", (id,))
        return Bucket(found[0][0], found[0][1], bool(found[0][2]), found[0][3]) if found else None

    def lives(self, inner: str) -> bool:
        return bool(self._all("SELECT 1 FROM buckets WHERE inner=?", (inner,)))

    def delete_bucket(self, bucket: Bucket) -> None:
        with self._lock:
            self._all("DELETE FROM buckets WHERE inner=?", (bucket.inner,))
            self._all("DELETE FROM files WHERE bucket=?", (bucket.inner,))
            self._all("DELETE FROM held WHERE bucket=?", (bucket.inner,))

    def totals(self, bucket: Bucket) -> tuple[int, int]:
        """Files, and their bytes."""
        found = self._all("SELECT COUNT(*), COALESCE(SUM(size), 0) FROM files WHERE bucket=?", (bucket.inner,))
        return found[0][0], found[0][1]

    def is_full(self, bucket: Bucket) -> bool:
        return self.quota is not None and self.totals(bucket)[1] >= self.quota

    # Files

    def file(self, bucket: Bucket, path: str) -> File | None:
        found = self._all(
            "SELECT path, hash, size, mtime, kind, uploaded FROM files WHERE bucket=? AND path=?",
            (bucket.inner, path),
        )
        return File(*found[0]) if found else None

    def files(self, bucket: Bucket, prefix: str = "", after: str = "", limit: int = -1) -> list[File]:
        """Files whose paths start with ``prefix`` and come after ``after``, in order of their bytes."""
        found = self._all(
            "SELECT path, hash, size, mtime, kind, uploaded FROM files WHERE bucket=? AND path > ?"
            " AND substr(path, 1, ?) = ? ORDER BY path LIMIT ?",
            (bucket.inner, after, len(prefix), prefix, limit),
        )
        return [File(*row) for row in found]

    def put_file(
        self, bucket: Bucket, path: str, hash: str, mtime: int, kind: str | None, absent: bool = False
    ) -> File | None:
        """Name a content the bucket holds. None: ``absent``, and there is a file already.

        Raises:
            RefusedError: content or bucket is unknown, the path is not allowed, or the bucket would be too large.
        """
        with self._lock:
            if not self.lives(bucket.inner):
                raise RefusedError("bucket is gone")
            _check_path(path)
            if not self.holds(bucket.inner, hash):
                raise RefusedError(f"xet hash {hash} was not uploaded")
            before = self.file(bucket, path)
            if absent and before:
                return None
            size = self.content(hash).size
            total = self.totals(bucket)[1] - (before.size if before else 0) + size
            if self.quota is not None and total > self.quota:
                raise RefusedError(f"storage quota exceeded: {total} of {self.quota} bytes")
            made = File(path, hash, size, mtime, kind, time.time())
            row = (bucket.inner, path, hash, size, mtime, kind, made.uploaded)
            self._all("INSERT OR REPLACE INTO files VALUES (?, ?, ?, ?, ?, ?, ?)", row)
            return made

    def delete_file(self, bucket: Bucket, path: str) -> bool:
        with self._lock:
            found = self.file(bucket, path) is not None
            self._all("DELETE FROM files WHERE bucket=? AND path=?", (bucket.inner, path))
            return found

    # Contents

    def holds(self, inner: str, hash: str) -> bool:
        """Whether a content was uploaded to a bucket, or copied into it."""
        return hash == EMPTY or bool(self._all("SELECT 1 FROM held WHERE bucket=? AND hash=?", (inner, hash)))

    def hold(self, inner: str, hash: str) -> None:
        self._all("INSERT OR IGNORE INTO held VALUES (?, ?)", (inner, hash))

    def content(self, hash: str) -> Content:
        """Raises KeyError: there is none."""
        if hash == EMPTY:
            return Content(hash, 0, ())
        found = self._all("SELECT size, terms FROM contents WHERE hash=?", (hash,))
        if not found:
            raise KeyError(hash)
        return Content(hash, found[0][0], tuple(Term(**term) for term in json.loads(found[0][1])))

    def add_content(self, inner: str, hash: str, terms: list[Term]) -> bool:
        """Whether it is new.

        Raises:
            DamagedError: a term names a xorb that is not here, or chunks that it does not have.
        """
        for term in terms:
            index = self.index(term.xorb)
            length = int(index["length"][term.first : term.last].sum())
            if not term.first < term.last <= len(index) or length != term.length:
                raise DamagedError(f"xorb {term.xorb} has no chunks {term.first}:{term.last} of {term.length} bytes")
        size = sum(term.length for term in terms)
        with self._lock:
            fresh = not self._all("SELECT 1 FROM contents WHERE hash=?", (hash,))
            written = json.dumps([asdict(term) for term in terms])
            self._all("INSERT OR IGNORE INTO contents VALUES (?, ?, ?)", (hash, size, written))
            self.hold(inner, hash)
        return fresh

    def read(self, content: Content, start: int, end: int) -> Iterator[bytes]:
        """Bytes ``start`` to before ``end`` of a file, in blocks."""
        skip, terms = self.cut(content, start, end)
        left = end - start
        for term in terms:
            for block in read_chunks(self.xorb_path(term.xorb), self.index(term.xorb), term.first, term.last):
                wanted = block[skip : skip + left]
                skip = max(0, skip - len(block))
                left -= len(wanted)
                if wanted:
                    yield wanted

    def cut(self, content: Content, start: int, end: int) -> tuple[int, list[Term]]:
        """Runs of whole chunks that cover bytes ``start`` to before ``end``, and how many of the first to skip."""
        kept: list[Term] = []
        skip = at = 0
        for term in content.terms:
            if at < end and at + term.length > start:
                lengths = self.index(term.xorb)["length"][term.first : term.last].astype(np.int64)
                ends = at + np.cumsum(lengths)
                first = int(np.searchsorted(ends, start, "right"))
                last = min(int(np.searchsorted(ends, end, "left")) + 1, len(ends))
                if not kept:
                    skip = start - int(ends[first] - lengths[first])
                kept.append(Term(term.xorb, term.first + first, term.first + last, int(lengths[first:last].sum())))
            at += term.length
        return skip, kept

    # Xorbs

    def xorb_path(self, xorb: str) -> Path:
        return self.folder / "xorbs" / xorb

    def has_xorb(self, xorb: str) -> bool:
        return self.xorb_path(xorb).with_suffix(".index").exists()

    def incoming(self) -> Path:
        """A path for bytes that are still coming in."""
        return self.folder / "incoming" / secrets.token_hex(12)

    def add_xorb(self, xorb: str, path: Path) -> bool:
        """Move an uploaded file in. Whether it is new.

        Raises:
            DamagedError: it is too large, it is no xorb, or it has another hash.
        """
        if path.stat().st_size > MAX_XORB_BYTES + SLACK_BYTES:
            raise DamagedError(f"xorb has {path.stat().st_size} bytes, at most {MAX_XORB_BYTES} are allowed")
        index = index_of(path)
        found = hashing.text_of(hashing.tree_hash([(bytes(row["hash"]), int(row["length"])) for row in index]))
        if found != xorb:
            raise DamagedError(f"xorb {xorb} has the hash {found}")
        with self._lock:
            if self.has_xorb(xorb):
                path.unlink()
                return False
            os.replace(path, self.xorb_path(xorb))
            written = path.with_suffix(".index")
            written.write_bytes(index.tobytes())
            os.replace(written, self.xorb_path(xorb).with_suffix(".index"))
        return True

    def _load_index(self, xorb: str) -> Index:
        """Raises DamagedError: there is no such xorb."""
        try:
            return np.frombuffer(self.xorb_path(xorb).with_suffix(".index").read_bytes(), INDEX)
        except FileNotFoundError as error:
            raise DamagedError(f"xorb {xorb} was not uploaded") from error


def _check_path(path: str) -> None:
    """The rules the Hub documents for keys. Raises RefusedError."""
    wrong = (
        not path
        or path[0] == "/"
        or path[-1] == "/"
        or "//" in path
        or "../" in path
        or path.startswith("./")
        or path.endswith("..")
        or "\\" in path
        or "\0" in path
    )
    if wrong:
        raise RefusedError(f"path {path!r} is not allowed")
