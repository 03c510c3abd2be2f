"""Helpers for retention.json, which announces what a collection will remove; ``lasting_plan`` skips what it lists."""

from collections.abc import Iterable

from vllm_delta_sync.bucket.verified import check_stored_size
from vllm_delta_sync.errors import DataError, FormatError, LostError, NotFoundError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import RETENTION_KEY, Retention
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, version_of_key
from vllm_delta_sync.run.read_plan import Plan, plan_read
from vllm_delta_sync.run.run_reader import RunReader, read_ahead

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
        NotFoundError: a collection removed what it needs. LostError: something else did. FormatError: it needs what is
            damaged. StoreError: the store failed.
    """
    record = run.retention() or empty_record(run)
    avoid = set(record.going)
    first: DataError | None = None
    while True:
        try:
            found = plan_read(run, target, avoid)
        except DataError as error:
            raise _lost(record, target, first or error) from error
        documents = [(found.root.key, found.root.document.objects), *((step.key, step.objects) for step in found.steps)]
        listed = [(key, ref) for key, objects in documents for ref in objects]
        answers = read_ahead(lambda item: _why_gone(run, record, *item), listed)
        bad = next(((key, why) for (key, _), why in zip(listed, answers, strict=True) if why is not None), None)
        if bad is None:
            return found
        key, why = bad
        first = first or why
        if key in avoid:
            raise _lost(record, target, first) from why
        avoid.add(key)


def _lost(record: Retention, target: Manifest, reason: DataError) -> DataError:
    damage = next((error for error in (reason, reason.__cause__) if isinstance(error, FormatError)), None)
    absent = NotFoundError if record.gave_up(target.version) else LostError
    kind = absent if damage is None else type(damage)
    return kind(f"version {target.version} cannot be rebuilt: {reason.message}; choose another version")


def _why_gone(run: RunReader, record: Retention, key: str, ref: ObjectRef) -> DataError | None:
    """Return why an object of a document is not stored, or does not stay; None if it is, and stays."""
    version = version_of_key(key)
    if version is not None and record.is_gone(version):
        return NotFoundError(f"{RETENTION_KEY} says that the objects of version {version} were removed, or will be")
    try:
        check_stored_size(run.bucket, ref)
    except DataError as error:
        return error
    return None
