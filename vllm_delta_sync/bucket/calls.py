"""What several callers ask of a bucket: many small requests at once, and whether an object is there."""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from vllm_delta_sync.bucket.base import Bucket
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.wire.manifest import ObjectRef

PARALLEL = 16
"""Requests in flight: on a store far away each takes tens of milliseconds, most of them spent waiting."""

_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


def in_parallel(call: Callable[[_Item], _Answer], items: Iterable[_Item]) -> Iterator[_Answer]:
    """Yield ``call(item)`` in the order of the items; raises what the first call that fails raises."""
    pool = ThreadPoolExecutor(PARALLEL, thread_name_prefix="delta-sync-read")
    try:
        yield from pool.map(call, items)
    finally:
        # Calls that have not begun are of no use after an error or an interrupt.
        pool.shutdown(wait=True, cancel_futures=True)


def has_object(bucket: Bucket, ref: ObjectRef) -> bool:
    """Whether an object is there, at its size; its bytes are not read. Raises StoreError."""
    try:
        return bucket.stat(ref.key).bytes == ref.bytes
    except NotFoundError:
        return False
