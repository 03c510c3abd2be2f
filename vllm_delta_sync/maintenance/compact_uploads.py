"""What making folded ranges and anchors has in common: objects put so that they stay, and being stopped."""

from collections.abc import Callable, Sequence
from pathlib import Path

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.verified import has_object
from vllm_delta_sync.format.manifest import ObjectRef

OBJECT_BYTES = 1024**3
"""An object is closed once it has this many bytes; the next tensor begins another."""

Stop = Callable[[], bool]
Written = Sequence[tuple[ObjectRef, Path]]


class StoppedError(Exception):
    """The caller asked to stop; nothing was committed, and scratch files are gone.

    Not a DeltaSyncError: nothing is wrong, and nobody should look for another way.
    """


def never() -> bool:
    """Nobody asks to stop."""
    return False


def check_stop(stop: Stop) -> None:
    """Raise StoppedError if the caller wants to stop."""
    if stop():
        raise StoppedError("stopped before it was finished; nothing was committed, start it again any time")


def put_objects(bucket: Bucket, written: Written) -> None:
    """Put objects that no document names yet."""
    for ref, path in written:
        bucket.put(ref.key, path)


def put_missing(bucket: Bucket, written: Written) -> None:
    """Put those again that somebody removed before the document named them: they looked like nobody's."""
    for ref, path in written:
        if not has_object(bucket, ref):
            bucket.put(ref.key, path)
