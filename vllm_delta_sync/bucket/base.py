"""``Bucket``: the interface that publishers and receivers use to store objects under keys.

Every implementation keeps the promises listed on :class:`Bucket`; ``tests/bucket/contract/`` tests each of them.
"""

import io
import re
import stat
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn, Self, TypeVar

from vllm_delta_sync.errors import ConflictError, LimitError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, Stored
from vllm_delta_sync.urls import check_key, check_prefix

_OBJECT = re.compile(re.escape(OBJECTS_PREFIX) + r"([0-9a-f]{64})\.safetensors")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What ``stat`` and ``list`` return for an object.

    Attributes:
        bytes: size. modified: when the object was last put, in seconds since the epoch by the store's clock. Compare
            whole seconds only: some stores report milliseconds in ``list`` but not in ``stat``.
    """

    key: str
    bytes: int
    modified: float


class Bucket(ABC):
    """A flat namespace of objects.

    **Keys** are ``part(/part)*`` of ``[A-Za-z0-9._-]``. No part is ``.`` or ends in ``..`` (the Hub refuses those).
    A part has at most 255 bytes, a key at most 512. A key must not be a folder of another key (``a`` and ``a/b``):
    some stores cannot hold both and refuse the second with UsageError; others accept both.

    **Atomic.** A reader sees the whole old object, the whole new object, or none. A writer that dies leaves nothing
    visible.

    **Durable.** When ``put`` returns, the object survives a crash of the process and of the machine.

    **Visible.** When ``put`` or ``delete`` returns, every later call of every reader sees the effect, in ``list`` too.
    Overlapping calls see the state before or after.

    **Create-if-absent.** When writers race with ``if_absent=True`` for one key, exactly one returns; the others raise
    ConflictError. After a StoreError the object may or may not exist, so a caller that retries and gets ConflictError
    must read the object back: it may be the caller's own. A store that cannot promise this sets
    ``supports_conditional_put`` to False. Only a directory promises it for objects of more than 64 MB, which other
    stores upload in parts.

    **Threads and processes.** Any number of processes may use the same bucket, and any number of threads the same
    instance, without locks.

    **Errors** of every method: UsageError if a key is malformed; StoreError if the store cannot be reached, is full,
    or refuses the request. The message names the key, the bucket and the remedy. Methods raise nothing else except
    what they list. AccessError is a StoreError for refused credentials, UnavailableError one for failures that are
    worth an immediate retry.

    **Transfers.** Implementations pass transferred bytes to ``report_bytes``, in the thread of the
    call.
    """

    url: str
    """``open_bucket`` opens the same bucket from this URL. It holds no credentials, because it is shown and stored."""

    supports_conditional_put: bool = True
    """Whether create-if-absent holds. If not, the store looks the key up before the write and reads it back after, so
    two simultaneous writers may both succeed, and the last one's object remains."""

    overwrite_seconds: float = 0.0
    """Minimum time between overwrites of one key; the store refuses faster ones as too many requests."""

    @abstractmethod
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        """Store an object, replacing an existing one unless ``if_absent``.

        A ``Path`` is streamed with bounded memory; the file must not change during the call.

        Raises:
            ConflictError: ``if_absent`` is set and the key exists; the object is unchanged.
            UsageError: the key is malformed, ``data`` names no readable file, or one of this key and an existing key
                is a folder of the other.
        """

    @abstractmethod
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        """Return the whole object.

        Raises:
            NotFoundError: no such object.
            LimitError: the object is larger than ``max_bytes``; nothing was read or allocated.
        """

    @abstractmethod
    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Return ``length`` bytes from offset ``start``, fewer if the object ends before, ``b""`` past its end.

        Raises:
            NotFoundError: no such object.
            UsageError: ``start`` or ``length`` is negative.
        """

    @abstractmethod
    def stat(self, key: str) -> ObjectInfo:
        """Return size and modification time of an object.

        Raises:
            NotFoundError: no such object.
        """

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose key starts with ``prefix``, ascending by key, without reading far ahead.

        ``prefix`` need not end at a ``/``. Objects put or deleted during the iteration may or may not appear; all
        others appear exactly once. A bucket that does not exist yet is empty.
        """
        check_prefix(prefix)
        return self._list(prefix)

    @abstractmethod
    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        """As ``list``, of a valid prefix."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove an object; succeeds if there is none."""

    @contextmanager
    def transfer(self, key: str, size: int) -> Iterator[None]:
        """Show all calls of ``get_range`` in the block, which fetch one object of ``size`` bytes, as one transfer."""
        yield

    def close(self) -> None:
        """Release connections and threads; safe to call twice. Call no other method afterwards."""
        return None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class ReadOnlyBucket(Bucket):
    """Refuses what changes or lists a bucket with UsageError."""

    why_read_only: ClassVar[str]
    """The reason and the remedy, for the message."""

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._refuse(f"write key {key!r}")

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        self._refuse(f"list keys {prefix!r}")

    def delete(self, key: str) -> None:
        self._refuse(f"delete key {key!r}")

    def _refuse(self, action: str) -> NoReturn:
        raise UsageError(f"cannot {action} of {self.url}: {self.why_read_only}")


def is_key(key: str) -> bool:
    """Return whether ``check_key`` accepts a key."""
    try:
        check_key(key)
    except UsageError:
        return False
    return True


def exists(bucket: Bucket, key: str) -> bool:
    """Return whether there is such an object. Raises StoreError."""
    try:
        bucket.stat(key)
    except NotFoundError:
        return False
    return True


def has_object(bucket: Bucket, ref: Stored) -> bool:
    """Return whether an object exists with the listed size; does not read its bytes. Raises StoreError."""
    try:
        return bucket.stat(ref.key).bytes == ref.bytes
    except NotFoundError:
        return False


def digest_of(key: str) -> str | None:
    """Return the SHA-256 in the key of an immutable object; None for all other keys."""
    match = _OBJECT.fullmatch(key)
    return None if match is None else match[1]


def check_range(key: str, start: int, length: int) -> None:
    """Raise UsageError if a bound of a byte range is negative."""
    if start < 0 or length < 0:
        raise UsageError(f"range of {length} bytes at {start} of key {key!r} is not a range: neither may be negative")


def check_size(key: str, size: int, max_bytes: int | None) -> None:
    """Raise LimitError if an object is larger than the reader's limit."""
    if max_bytes is not None and size > max_bytes:
        raise LimitError(f"object {key!r} has {size} bytes, more than the {max_bytes} allowed here; not read")


def read_pieces(key: str, data: bytes | Path, size: int) -> Iterator[bytes]:
    """Yield the data of a put in pieces of ``size`` bytes.

    Raises:
        UsageError: the file cannot be read.
    """
    try:
        with io.BytesIO(data) if isinstance(data, bytes) else data.open("rb") as source:
            while piece := source.read(size):
                yield piece
    except OSError as error:
        raise unreadable_error(key, data, error) from error


def size_of_source(key: str, data: bytes | Path) -> int | None:
    """Return the size of the data of a put; None if it is not a regular file, such as a pipe.

    Raises:
        UsageError: the file cannot be read.
    """
    if isinstance(data, bytes):
        return len(data)
    try:
        found = data.stat()
    except OSError as error:
        raise unreadable_error(key, data, error) from error
    return found.st_size if stat.S_ISREG(found.st_mode) else None


def unreadable_error(key: str, data: bytes | Path, error: OSError) -> UsageError:
    """Return the error of ``put`` for a file that cannot be read."""
    return UsageError(f"cannot read {data!s} to put it under key {key!r}: {error.strerror}; check the path")


def conflict_error(url: str, key: str) -> ConflictError:
    """Return the error of ``put`` with ``if_absent`` for a key that exists in the bucket at ``url``."""
    return ConflictError(f"key {key!r} exists already in {url}; another writer was first")


def remove_quietly(path: Path) -> None:
    """Remove a file and ignore errors."""
    try:
        path.unlink()
    except OSError:
        pass  # renamed already, or the folder's own sweep removes it


TransferObserver = Callable[[int], object]
"""Counts bytes as transferred; a negative count takes back the bytes of a failed attempt.

Stores call ``report_bytes`` in their loops and do not know the observers, which middleware installs for one call
(progress, metrics, deadlines). Called from any thread of the call. May raise, in order to end the call."""

_observers: ContextVar[tuple[TransferObserver, ...]] = ContextVar("delta_sync_observers", default=())


def report_bytes(count: int) -> None:
    """Notify all observers that ``count`` bytes were transferred."""
    for observe in _observers.get():
        observe(count)


@contextmanager
def observed_by(observe: TransferObserver) -> Iterator[None]:
    """Notify ``observe`` too of the calls in the block."""
    token = _observers.set((*_observers.get(), observe))
    try:
        yield
    finally:
        _observers.reset(token)


SETTLING_SECONDS = 2.0
"""Where create-if-absent does not hold (``Bucket.supports_conditional_put``), two writers may both succeed, and the
object written last remains. There an object counts as ours only if it reads back as ours after so long: longer than a
write normally takes to become visible after the lookup that precedes it."""

_Read = TypeVar("_Read")


def create_if_absent(bucket: Bucket, key: str, data: bytes) -> bool:
    """Put an object if the key is absent; return False if another writer's object exists.

    Args:
        data: bytes that no other writer puts under this key, such as a document with a random id. If the store's
            answer is lost, they prove that the object is ours.

    Raises:
        StoreError: the store failed; the object may or may not exist.
    """
    try:
        bucket.put(key, data, if_absent=True)
    except (ConflictError, StoreError) as error:
        if has_content(bucket, key, data):
            return True
        if isinstance(error, StoreError):
            raise
        return False
    return True


def confirm_created(bucket: Bucket, key: str, data: bytes) -> bool:
    """Return whether an object that this writer has just created is still its own.

    Waits ``SETTLING_SECONDS`` if create-if-absent does not hold.

    Raises:
        StoreError: the object could not be read.
    """
    if bucket.supports_conditional_put:
        return True
    time.sleep(SETTLING_SECONDS)
    return has_content(bucket, key, data)


def has_content(bucket: Bucket, key: str, data: bytes, if_missing: bool = False) -> bool:
    """Return whether an object has these bytes, or ``if_missing`` if there is none. Raises StoreError."""
    try:
        return reads_back(lambda: bucket.get(key, max_bytes=max(len(data), limits.MAX_SIDE_BYTES)), data)
    except NotFoundError:
        return if_missing
    except LimitError:
        return False


def reads_back(read: Callable[[], _Read], expected: _Read) -> bool:
    """Return whether ``read`` returns what is expected; reads twice, because bytes may be damaged in transit."""
    return read() == expected or read() == expected
