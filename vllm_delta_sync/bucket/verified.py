"""Objects as a manifest lists them: nothing is handed out that has not their size and SHA-256."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.middleware import mirror
from vllm_delta_sync.bucket.middleware.ranged import CONNECTIONS, download, remove
from vllm_delta_sync.errors import DigestError, NotFoundError
from vllm_delta_sync.format.manifest import ObjectRef, Stored

_Read = TypeVar("_Read")


def fetch_object(bucket: Bucket, ref: Stored) -> bytes:
    """An object's bytes. Raises NotFoundError: it is gone. DigestError: it is not what is listed. StoreError."""
    data = bucket.get(ref.key, max_bytes=ref.bytes)
    check_object(ref, data)
    return data


def check_object(ref: Stored, data: bytes) -> None:
    """Raise DigestError unless ``data`` has the size and SHA-256 that the manifest lists."""
    if len(data) != ref.bytes:
        raise DigestError(
            f"object {ref.key} has {len(data)} bytes, the manifest says {ref.bytes}: truncated or replaced"
        )
    with time_hashing():
        digest = sha256(data).hexdigest()
    if digest != ref.sha256:
        raise damaged_object_error(ref, digest)


def check_stored_size(bucket: Bucket, ref: ObjectRef) -> None:
    """Raise DigestError unless the bucket has an object of the size that is listed; NotFoundError if it has none."""
    size = bucket.stat(ref.key).bytes
    if size != ref.bytes:
        raise DigestError(f"object {ref.key} has {size} bytes, {ref.bytes} are listed: truncated or replaced")


def has_object(bucket: Bucket, ref: Stored) -> bool:
    """Whether an object is there, at its size; its bytes are not read. Raises StoreError."""
    try:
        return bucket.stat(ref.key).bytes == ref.bytes
    except NotFoundError:
        return False


def download_object(
    bucket: Bucket, ref: ObjectRef, path: Path, read: Callable[[], _Read | None], journal: Path | None = None
) -> _Read:
    """Fetch an object into ``path`` by ranges, from a mirror if there is one; both files are left if that fails.

    Args:
        read: verifies what ``path`` holds, and returns what the caller wants of it; None: it is damaged.
        journal: see ``download``.

    Raises:
        DigestError: what the bucket holds is not what is listed; both files are removed. OSError: see ``download``, or
            raised by ``read``. Else as ``Bucket.get_range``.
    """
    connections = bucket.options.store_connections if isinstance(bucket, OpenedBucket) else CONNECTIONS
    with mirror.allow_mirrors() as used, bucket.transfer(ref.key):
        resumed = download(bucket, ref.key, ref.bytes, path, connections=connections, journal=journal)
    found = read()
    used.report_verified(found is not None)
    if found is None and (resumed or used.mirrors):
        # Which pieces are wrong cannot be told.
        if journal is not None:
            remove(journal)
        with bucket.transfer(ref.key):
            download(bucket, ref.key, ref.bytes, path, connections=connections, journal=journal)
        found = read()
    if found is None:
        if journal is not None:
            remove(journal)
        remove(path)
        raise damaged_object_error(ref)
    return found


def damaged_object_error(ref: Stored, digest: str | None = None) -> DigestError:
    """What to raise of an object whose bytes are not those listed."""
    found = "another SHA-256" if digest is None else f"SHA-256 {digest}"
    return DigestError(f"object {ref.key} has {found}: its bytes are damaged; fetch it again")


class _Spent(threading.local):
    seconds = 0.0


_spent = _Spent()


@contextmanager
def time_hashing() -> Iterator[None]:
    """What is done inside is computing a digest."""
    began = time.perf_counter()
    try:
        yield
    finally:
        _spent.seconds += time.perf_counter() - began


def hashing_seconds() -> float:
    """Seconds that this thread has spent inside ``hashing`` so far."""
    return _spent.seconds
