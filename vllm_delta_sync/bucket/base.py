"""The contract of a bucket: the one place both sides share.

A bucket holds immutable-looking blobs under keys. Every implementation keeps the promises on :class:`Bucket`;
``tests/bucket/contract/`` checks them for each.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from vllm_delta_sync.errors import LimitError, UsageError
from vllm_delta_sync.urls import MAX_KEY_BYTES as MAX_KEY_BYTES
from vllm_delta_sync.urls import MAX_KEY_PART_BYTES as MAX_KEY_PART_BYTES
from vllm_delta_sync.urls import check_key as check_key
from vllm_delta_sync.urls import check_prefix as check_prefix


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What ``stat`` and ``list`` say of an object.

    ``bytes`` is its size; ``modified`` is when it was last put, in seconds since the epoch by the store's
    clock, to the second: of one object some stores say milliseconds in a listing and none otherwise.
    """

    key: str
    bytes: int
    modified: float


class Bucket(ABC):
    """A flat namespace of objects.

    **Keys** are ``part(/part)*`` of ``[A-Za-z0-9._-]``, no part ``.`` and none that ends in
    ``..`` (the Hub takes none), each part at most 255
    bytes, 512 in all. No key may be a folder of another (``a`` beside ``a/b``): some stores cannot hold
    both, and refuse the second one with UsageError; others do not notice.

    **Atomic.** A reader sees an object whole, old or new, or not at all; a writer that dies leaves nothing
    visible.

    **Durable.** When ``put`` returns, the object survives a crash of the process and of the machine.

    **Visible.** When ``put`` or ``delete`` returns, every later call of any reader anywhere sees its
    effect, ``list`` included. Calls that overlap with it see the state before or after.

    **Create-if-absent.** Of any number of writers racing with ``if_absent=True`` for one key exactly one
    returns; the others raise ConflictError. After a StoreError the object may or may not be there: a caller
    that tries again has to expect its own object, by reading it back on ConflictError. A store that cannot promise
    that says so in ``exclusive``; none but a directory promises it for more than 64 MB, which go up in parts.

    **Threads and processes.** Any number may use the same bucket, and threads the same instance, without
    locks.

    **Errors** of every method: UsageError for a key that is not well-formed; StoreError when the store
    cannot be reached, is full, or refuses; the message names key, place and mend. Nothing else escapes,
    except what the methods list themselves. Of StoreError, AccessError is for credentials that are refused, and
    UnavailableError for what is worth trying again at once.

    **Flow.** Bytes are told to ``flow.moved`` as they come and go, in the thread of the call.
    """

    url: str
    """What ``open_bucket`` takes to open the same bucket again. Holds no credentials: it is shown and written down."""

    supports_conditional_put: bool = True
    """Whether create-if-absent holds. Otherwise the key is looked up before and read back after the write, so two
    writers at one moment may both be told that they were first, and who comes last is the one that stays."""

    overwrite_seconds: float = 0.0
    """How far apart overwrites of one key have to be; the store refuses more of them as too many requests."""

    @abstractmethod
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        """Store an object, replacing what is there unless ``if_absent``.

        A ``Path`` is streamed with bounded memory; the file must not change meanwhile.

        Raises:
            ConflictError: ``if_absent`` and the key exists already; it is left as it was.
            UsageError: bad key, ``data`` names no readable file, or the key is a folder of another or the
            reverse.
        """

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object.

        Raises:
            NotFoundError: no such object.
            LimitError: larger than ``max_bytes``; nothing was read or allocated.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``, or as many of them as the object has.

        Past the end of the object that is ``b""``.

        Raises:
            NotFoundError: no such object.
            UsageError: ``start`` or ``length`` is negative.
        """

    @abstractmethod
    def get_file(self, key: str, path: Path) -> None:
        """Copy the object to a local file with bounded memory.

        ``path`` ends up with the whole object, replacing what is there, or stays as it was. The copy is a
        cache: it is not made durable.

        Raises:
            NotFoundError: no such object.
            StoreError: also when ``path`` cannot be written.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and time of an object.

        Raises:
            NotFoundError: no such object.
        """

    @abstractmethod
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``, ascending by key, without reading far ahead.

        ``prefix`` is the beginning of a key and need not end at a ``/``. Objects put or deleted while the
        iterator is in use may or may not show; all others show exactly once. A bucket that does not exist
        yet is empty.
        """

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; done when there is none."""

    @contextmanager
    def transfer(self, key: str) -> Iterator[None]:
        """Calls of ``get_range`` within the block fetch one large object together, and are shown as one thing."""
        yield

    def close(self) -> None:
        """Give back connections and threads; safe to call twice. No other method may be called afterwards."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def check_range(key: str, start: int, length: int) -> None:
    """Refuse a byte range with a negative bound.

    Raises:
        UsageError: naming key, start and length.
    """
    if start < 0 or length < 0:
        raise UsageError(f"range of {length} bytes at {start} of key {key!r} is not a range: neither may be negative")


def check_size(key: str, size: int, max_bytes: int | None) -> None:
    """Refuse an object that is larger than its reader wants to hold.

    Raises:
        LimitError: naming key, size and limit.
    """
    if max_bytes is not None and size > max_bytes:
        raise LimitError(f"object {key!r} has {size} bytes, more than the {max_bytes} allowed here; not read")
