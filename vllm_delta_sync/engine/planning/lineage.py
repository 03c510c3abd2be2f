"""Runs that branch from runs: version 0 of a branch is a version of its source, so a way may lead across both."""

from typing import NamedTuple

from vllm_delta_sync.bucket import StoreOptions, store_of
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import ChainError, DeltaSyncError, StoreError
from vllm_delta_sync.trust import Keyring

DEEPEST = 64
"""Branches of branches that are looked into."""


class RunVersion(NamedTuple):
    """A version of a run."""

    run: Run
    version: int


class RunSegment(NamedTuple):
    """From one version of a run to another."""

    run: Run
    first: int
    last: int


def line(run: Run, version: int) -> list[RunVersion]:
    """A version, and the versions of other runs that its run, and theirs, begin with: youngest first.

    Ends where a source is not there any more, has other tensors, or lies in another kind of store: where it lies is
    what the bucket's data say, and must not decide which protocol this server speaks. Among local directories any may
    be named: what is read there is a run, or refused.

    Raises:
        StoreError: the store failed. NotFoundError, FormatError, ChainError: a run has no good version 0.
    """
    found = [RunVersion(run, version)]
    while len(found) < DEEPEST:
        first = run.manifest(0)
        if first.base is None or first.base.run is None or first.base.version is None:
            break
        try:
            _check_store(run, first.base.location)
            source = run.open_source(first)
        except StoreError:
            raise
        except DeltaSyncError as error:
            logger.warning("the run that run %s branches from cannot be used: %s", run.info.run, error.message)
            break
        if source.table.digest != run.table.digest or any(source.info.run == known.run.info.run for known in found):
            source.close()
            break
        found.append(RunVersion(source, first.base.version))
        run = source
    return found


def _check_store(run: Run, location: str) -> None:
    own = store_of(run.bucket.url)
    if store_of(location) != own:
        raise ChainError(f"it is said to lie at {location[:200]!r}; from the store {own!r} no other one is opened")


def across(held: list[RunVersion], wanted: list[RunVersion]) -> list[RunSegment] | None:
    """How to get from the first point of one line to the first of another; None if they have nothing in common.

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
    if not held or not wanted or not _begin_alike(held[-1].run, wanted[-1].run):
        return None
    return [
        *(RunSegment(run, version, 0) for run, version in held),
        *(RunSegment(run, 0, version) for run, version in reversed(wanted)),
    ]


def _begin_alike(one: Run, other: Run) -> bool:
    """Whether two runs begin with the same weights, such as those of one public model."""
    if one.table.digest != other.table.digest:
        return False
    try:
        return one.manifest(0).fingerprint == other.manifest(0).fingerprint
    except StoreError:
        raise
    except DeltaSyncError:
        return False


def run_with_id(url: str, run_id: str, keyring: Keyring, store: StoreOptions | None = None) -> Run | None:
    """The run at a URL, if it is the one meant, can be read, and is signed as the keyring asks for."""
    try:
        run = open_run(url, keyring, store)
    except DeltaSyncError:
        return None
    if run.info.run != run_id:
        run.close()
        return None
    return run
