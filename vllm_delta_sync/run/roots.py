"""Locate a version 0 that is not in the run: ``locate_base`` finds a checkpoint, ``open_branch_source`` a run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.bucket import open_beside
from vllm_delta_sync.errors import ChainError, NotFoundError
from vllm_delta_sync.format.manifest import RUN_KEY, Manifest
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.tensors.checkpoint import names_model, resolve_base


class BaseUnavailableError(NotFoundError):
    """The checkpoint or run that version 0 refers to is not there."""


def locate_base(root: Manifest, base: str | Path | None = None) -> Path:
    """Find version 0's checkpoint directory: ``base`` if given, else the recorded one or public model.

    Raises:
        BaseUnavailableError: it is not here. NotFoundError, StoreError, UsageError: the public model cannot be fetched.
    """
    if base is not None:
        path = resolve_base(base).path
    elif root.base is not None and root.base.model is not None and not Path(root.base.location).is_dir():
        path = resolve_base(f"{root.base.model}@{root.base.revision}").path
    else:
        path = Path("" if root.base is None else root.base.location)
    if not path.is_dir():
        raise BaseUnavailableError(
            f"version 0 refers to the checkpoint {str(path)!r}, which is not here; pass base= with its path "
            "(--base on the command line)"
        )
    return path


@contextmanager
def open_branch_source(
    run: RunDocuments, root: Manifest, base: str | Path | None
) -> Iterator[tuple[RunDocuments, Manifest, str | Path | None]]:
    """Open the source run of a branch: the run, its manifest that the branch began at, and the base to rebuild it with.

    The run is closed at the end of the block.

    Raises:
        BaseUnavailableError: the run is not there. ChainError: another run is there.
        StoreError: the store of ``base`` failed.
    """
    recorded = root.base.location if root.base is not None else ""
    source_url = str(base) if base is not None and _is_run(run, base) else None
    try:
        source = run.open_source(root, source_url)
    except NotFoundError as error:
        raise BaseUnavailableError(
            f"run {run.info.run} branches from a run at {recorded!r}, which is not there; pass base= with its URL "
            f"(--base on the command line): {error}"
        ) from error
    with source:
        if source.table.digest != run.table.digest:
            raise ChainError(f"run {run.info.run} branches from run {source.info.run}, which has other tensors")
        version = root.base.version if root.base is not None and root.base.version is not None else 0
        yield source, source.manifest(version), base if source_url is None else None


def _is_run(run: RunDocuments, base: str | Path) -> bool:
    """Return whether a branch's base is a run, not a checkpoint. Raises StoreError, UsageError (not a URL)."""
    if names_model(base):
        return False
    # The name of a directory may look like a URL.
    with open_beside(run.bucket, Path(base).resolve() if Path(base).is_dir() else base) as bucket:
        try:
            bucket.stat(RUN_KEY)
        except NotFoundError:
            return False
    return True
