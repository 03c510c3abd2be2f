"""Helpers for retention.json, which announces what a collection will remove; ``lasting_plan`` skips what it lists."""

from collections.abc import Iterable

from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.bucket.verified import has_object
from vllm_delta_sync.errors import DataError, NotFoundError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import Retention
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_of_key
from vllm_delta_sync.run.read_plan import Plan, plan_read
from vllm_delta_sync.run.run_reader import RunReader

SPELLED_RANGES = 8

Ranges = list[list[int]]


def ranges(versions: Iterable[int]) -> Ranges:
    """Return closed ranges of the numbers, ascending and not adjacent."""
    found: Ranges = []
    for version in sorted(set(versions)):
        if found and found[-1][1] == version - 1:
            found[-1][1] = version
        else:
            found.append([version, version])
    return found


def spelled(versions: Iterable[int]) -> str:
    """Return the versions as text, ``3, 5 to 9``; only the newest ranges, ``SPELLED_RANGES`` at most."""
    found = ranges(versions)
    words = [str(a) if a == b else f"{a} to {b}" for a, b in found[-SPELLED_RANGES:]]
    left_out = len(found) - len(words)
    return ", ".join(([f"… {left_out} ranges"] if left_out else []) + words)


def empty_record(run: RunReader) -> Retention:
    """Return the record of a run from which nothing was removed."""
    return Retention(run=run.info.run, gone=[], created_at=timestamp())


def lasting_plan(run: RunReader, target: Manifest) -> Plan:
    """Return a plan to rebuild a version from objects that are all stored and that no collection is removing.

    Raises:
        NotFoundError: there is no such plan. StoreError: the store failed.
    """
    record = run.retention() or empty_record(run)
    avoid = set(record.going)
    while True:
        try:
            found = plan_read(run, target, avoid)
            documents = [
                (found.root.key, found.root.document.objects),
                *((step.key, step.objects) for step in found.steps),
            ]
            bad = next((key for key, objects in documents if not _stays(run, record, key, objects)), None)
        except DataError as error:
            raise _lost(target, error.message) from error
        if bad is None:
            return found
        if bad in avoid:
            raise _lost(target, f"objects of {bad} are missing")
        avoid.add(bad)


def _lost(target: Manifest, reason: str) -> NotFoundError:
    return NotFoundError(
        f"version {target.version} cannot be rebuilt, now or after the collection that is running: {reason}; choose a "
        "version that is kept"
    )


def _stays(run: RunReader, record: Retention, key: str, objects: list[ObjectRef]) -> bool:
    version = version_of_key(key)
    if version is not None and record.is_gone(version):
        return False
    return all(in_parallel(lambda ref: has_object(run.bucket, ref), objects))
