"""Locate a version 0 that is not in the run: ``locate_base`` finds a checkpoint, ``open_branch_source`` a run.

Whatever is wrong with the data of either raises BaseUnavailableError, and is never taken for damage in the bucket.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from vllm_delta_sync.bucket import open_beside
from vllm_delta_sync.bucket.base import exists
from vllm_delta_sync.errors import BaseUnavailableError, ChainError, DataError, NotFoundError
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.checkpoint import names_model, resolve_base


class BaseMissingError(BaseUnavailableError):
    """Nothing is where the checkpoint or run that version 0 refers to is expected."""


@contextmanager
def errors_of_base(explanation: str, remedy: str) -> Iterator[None]:
    """Raise BaseUnavailableError for each DataError in the block: data that are missing, damaged or not as declared.

    Args:
        explanation: follows the error's message, and names the base. remedy: what to pass as base instead.
    """
    try:
        yield
    except BaseUnavailableError:
        raise
    except DataError as error:
        raise BaseUnavailableError(
            f"{error.message}: {explanation}; pass base= with {remedy} (--base on the command line)"
        ) from error


def locate_base(root: Manifest, base: str | Path | None = None) -> Path:
    """Find version 0's checkpoint directory: ``base`` if given, else the recorded one or public model.

    Raises:
        BaseMissingError: it is not here. StoreError, UsageError: the public model cannot be fetched.
    """
    place = Path("" if root.base is None else root.base.location)
    if base is None and root.base is not None and root.base.model is not None and not place.is_dir():
        base = f"{root.base.model}@{root.base.revision}"
    try:
        path = place if base is None else resolve_base(base).path
    except NotFoundError as error:
        raise BaseMissingError(
            f"version 0 refers to the checkpoint {str(base)!r}, which is not there: {error}; pass base= with its path "
            "(--base on the command line)"
        ) from error
    if not path.is_dir():
        raise BaseMissingError(
            f"version 0 refers to the checkpoint {str(path)!r}, which is not here; pass base= with its path "
            "(--base on the command line)"
        )
    return path


@contextmanager
def open_branch_source(
    run: RunReader, root: Manifest, base: str | Path | None
) -> Iterator[tuple[RunReader, Manifest, str | Path | None]]:
    """Open the source run of a branch: the run, its manifest that the branch began at, and the base to rebuild it with.

    The run is closed at the end of the block.

    Raises:
        BaseMissingError: the run is not there. BaseUnavailableError: another run is there; also what the block raises
            about data of the run. StoreError: the store of ``base`` failed.
    """
    recorded = root.base.location if root.base is not None else ""
    source_url = str(base) if base is not None and _is_run(run, base) else None
    fact = f"the run at {source_url or recorded!r}, which run {run.info.run} branches from, cannot be used"
    with errors_of_base(fact, "the URL of that run, or of an intact copy"), ExitStack() as stack:
        try:
            source = stack.enter_context(run.open_source(root, source_url))
        except NotFoundError as error:
            raise BaseMissingError(
                f"run {run.info.run} branches from a run at {recorded!r}, which is not there; pass base= with its URL "
                f"(--base on the command line): {error}"
            ) from error
        if source.table.digest != run.table.digest:
            raise ChainError(f"run {run.info.run} branches from run {source.info.run}, which has other tensors")
        version = root.base.version if root.base is not None and root.base.version is not None else 0
        yield source, source.manifest(version), base if source_url is None else None


def _is_run(run: RunReader, base: str | Path) -> bool:
    """Return whether a branch's base is a run, not a checkpoint. Raises StoreError, UsageError (not a URL)."""
    if names_model(base):
        return False
    # The name of a directory may look like a URL.
    with open_beside(run.bucket, Path(base).resolve() if Path(base).is_dir() else base) as bucket:
        return exists(bucket, RUN_KEY)
