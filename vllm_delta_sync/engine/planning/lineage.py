"""Paths across branches: version 0 of a branch is a version of its source run, so deltas lead from one to the other."""

from typing import NamedTuple

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import DataError, DeltaSyncError, UsageError
from vllm_delta_sync.trust import Keyring

MAX_DEPTH = 64
"""Maximum depth of branches of branches that are followed to their source."""


class RunVersion(NamedTuple):
    """A version of a run."""

    run: Run
    version: int


class RunSegment(NamedTuple):
    """From one version of a run to another."""

    run: Run
    first: int
    last: int


def ancestry(run: Run, version: int) -> list[RunVersion]:
    """Return a version, and the versions of source runs that its run descends from, youngest first.

    Ends where a source is missing, has other tensors, or lies in another kind of store. The source's URL is untrusted
    data of the bucket and must not choose the protocol that this server speaks. It may name any local directory: what
    is read there is a run, or is refused.

    Raises:
        StoreError: the store failed. NotFoundError, FormatError, ChainError: a run has no good version 0.
    """
    found = [RunVersion(run, version)]
    while len(found) < MAX_DEPTH:
        first = run.manifest(0)
        if first.base is None or first.base.run is None or first.base.version is None:
            break
        try:
            source = run.open_source(first)
        except (DataError, UsageError) as error:
            logger.warning("cannot use the run that run %s branches from: %s", run.info.run, error.message)
            break
        if source.table.digest != run.table.digest or any(source.info.run == known.run.info.run for known in found):
            source.close()
            break
        found.append(RunVersion(source, first.base.version))
        run = source
    return found


def connect_runs(held: list[RunVersion], wanted: list[RunVersion]) -> list[RunSegment] | None:
    """Return the segments that lead from the first version of one ancestry to the first of another; None if none do.

    Raises:
        StoreError: the store failed.
    """
    for up, point in enumerate(held):
        for down, other in enumerate(wanted):
            if point.run.info.run == other.run.info.run:
                return [
                    *(RunSegment(run, version, 0) for run, version in held[:up]),
                    RunSegment(other.run, point.version, other.version),
                    *(RunSegment(run, 0, version) for run, version in reversed(wanted[:down])),
                ]
    if not held or not wanted or not _have_same_start(held[-1].run, wanted[-1].run):
        return None
    return [
        *(RunSegment(run, version, 0) for run, version in held),
        *(RunSegment(run, 0, version) for run, version in reversed(wanted)),
    ]


def _have_same_start(one: Run, other: Run) -> bool:
    """Return whether two runs begin with the same weights, for example of one public model."""
    if one.table.digest != other.table.digest:
        return False
    try:
        return one.manifest(0).fingerprint == other.manifest(0).fingerprint
    except DataError:
        return False


def open_expected_run(url: str, run_id: str, keyring: Keyring, store: StoreOptions | None = None) -> Run | None:
    """Return the run at a URL, if it has the id, is readable, and is signed as the keyring requires; else None."""
    try:
        run = open_run(url, keyring, store)
    except DeltaSyncError:
        return None
    if run.info.run != run_id:
        run.close()
        return None
    return run
