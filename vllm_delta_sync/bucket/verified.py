"""``fetch_object`` and ``download_object``: reads of objects that verify size and SHA-256 against the manifest."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket, remove_quietly
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.middleware.mirror import allow_mirrors
from vllm_delta_sync.bucket.ranged import CONNECTIONS, download
from vllm_delta_sync.errors import DigestError
from vllm_delta_sync.format.manifest import ObjectRef, Stored

_Read = TypeVar("_Read")


def fetch_object(bucket: Bucket, ref: Stored) -> bytes:
    """Return an object's bytes.

    Raises:
        NotFoundError: no such object. DigestError: size or SHA-256 differ from the manifest. StoreError.
    """
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
    """Raise DigestError unless the bucket's object has the listed size; also raises NotFoundError and StoreError."""
    size = bucket.stat(ref.key).bytes
    if size != ref.bytes:
        raise DigestError(f"object {ref.key} has {size} bytes, {ref.bytes} are listed: truncated or replaced")


def download_object(
    bucket: Bucket, ref: ObjectRef, path: Path, read: Callable[[], _Read | None], journal: Path | None = None
) -> _Read:
    """Fetch an object into ``path`` by ranges, from a mirror if there is one, and verify it.

    If the download fails, ``path`` and ``journal`` remain, so that a later call can resume.

    Args:
        read: verifies the content of ``path`` and returns what the caller needs of it; None if it is damaged.
        journal: see ``download``.

    Raises:
        DigestError: the bucket's object differs from the manifest; both files are removed.
        OSError: see ``download``, or raised by ``read``.
        DeltaSyncError: as ``Bucket.get_range``.
    """
    connections = bucket.options.store_connections if isinstance(bucket, OpenedBucket) else CONNECTIONS
    with allow_mirrors() as used, bucket.transfer(ref.key, ref.bytes):
        resumed = download(bucket, ref.key, ref.bytes, path, connections=connections, journal=journal)
    found = read()
    for mirror in used:
        mirror.report_verified(found is not None)
    if found is None and (resumed or used):
        # Any piece may be the wrong one, so download all of them again, and without the mirror.
        if journal is not None:
            remove_quietly(journal)
        with bucket.transfer(ref.key, ref.bytes):
            download(bucket, ref.key, ref.bytes, path, connections=connections, journal=journal)
        found = read()
    if found is None:
        if journal is not None:
            remove_quietly(journal)
        remove_quietly(path)
        raise damaged_object_error(ref)
    return found


def damaged_object_error(ref: Stored, digest: str | None = None) -> DigestError:
    """Return the error for an object whose SHA-256 differs from the manifest."""
    found = "another SHA-256" if digest is None else f"SHA-256 {digest}"
    return DigestError(f"object {ref.key} has {found}: its bytes are damaged; fetch it again")


class _HashingTime(threading.local):
    seconds = 0.0


_hashing_time = _HashingTime()


@contextmanager
def time_hashing() -> Iterator[None]:
    """Add the time of the block to ``hashing_seconds``; the block computes a digest while an object is read."""
    began = time.perf_counter()
    try:
        yield
    finally:
        count_hashing(time.perf_counter() - began)


def count_hashing(seconds: float) -> None:
    """Add to ``hashing_seconds``, such as what another thread has spent for this one."""
    _hashing_time.seconds += seconds


def hashing_seconds() -> float:
    """Return the seconds that this thread has spent in ``time_hashing`` so far."""
    return _hashing_time.seconds
