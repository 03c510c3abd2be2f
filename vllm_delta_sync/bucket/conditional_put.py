"""``create_if_absent`` and ``confirm_created``: create an object that no other writer has created.

Where create-if-absent does not hold (``Bucket.supports_conditional_put``), two writers may both succeed, and the object
written last remains. There an object counts as ours only if it reads back as ours after a settling time.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.errors import ConflictError, LimitError, NotFoundError, StoreError
from vllm_delta_sync.format import limits

SETTLING_SECONDS = 2.0
"""Settling time: longer than a write normally takes to become visible after the lookup that precedes it."""

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
        try:
            if reads_back(lambda: bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), data):
                return True
        except NotFoundError:
            raise error from None
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
