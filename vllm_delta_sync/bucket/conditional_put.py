"""Create an object that no other writer has created, and find out whether it is still ours.

Where create-if-absent does not hold (``Bucket.exclusive``), two writers may both believe that they were first, and the
object that was written last stays. There an object is ours only if it reads back as ours after a settling time.
"""

import time
from collections.abc import Callable
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.errors import ConflictError, LimitError, NotFoundError, StoreError
from vllm_delta_sync.format import limits

SETTLING_SECONDS = 2.0
"""Longer than a write takes to have its effect after the lookup before it, unless something is wrong."""

_Read = TypeVar("_Read")


def create_if_absent(bucket: Bucket, key: str, data: bytes) -> bool:
    """Put an object if the key is absent; False if another writer's object is there.

    Args:
        data: bytes that no other writer puts under this key, such as a document with a random id: after a put whose
            answer was lost they show that the object is ours.

    Raises:
        StoreError: the store failed; the object may be there or not.
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
    """Whether an object that was created just now is ours to stay. Takes a while where create-if-absent does not hold.

    Raises:
        StoreError: the object could not be read.
    """
    if bucket.supports_conditional_put:
        return True
    time.sleep(SETTLING_SECONDS)
    return has_content(bucket, key, data)


def has_content(bucket: Bucket, key: str, data: bytes, if_missing: bool = False) -> bool:
    """Whether an object has these bytes; ``lost`` if there is none. Raises StoreError."""
    try:
        return reads_back(lambda: bucket.get(key, max_bytes=max(len(data), limits.MAX_SIDE_BYTES)), data)
    except NotFoundError:
        return if_missing
    except LimitError:
        return False


def reads_back(read: Callable[[], _Read], expected: _Read) -> bool:
    """Whether a read gives what is expected. If not it is read again: bytes may flip on the way from the store."""
    return read() == expected or read() == expected
