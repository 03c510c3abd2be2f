"""Where version 0 lies if not in the run itself: in a checkpoint, or in the run that this one branches from."""

from pathlib import Path

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain.documents import RunDocuments
from vllm_delta_sync.checkpoint import resolve_base
from vllm_delta_sync.errors import ChainError, DeltaSyncError, NotFoundError
from vllm_delta_sync.wire.manifest import Manifest


class BaseError(NotFoundError):
    """The checkpoint or the run that version 0 refers to is not at hand."""


def branches(root: Manifest, beside: bool) -> bool:
    """Whether a plan's root is read from another run."""
    return not beside and root.kind != "anchor" and root.base is not None and root.base.run is not None


def locate_base(root: Manifest, base: str | Path | None = None) -> Path:
    """Directory of the checkpoint that version 0 refers to: the one given, else the recorded one or the public model.

    Raises:
        BaseError: it is not here. NotFoundError, StoreError, UsageError: the public model cannot be had.
    """
    if base is not None:
        path = resolve_base(base).path
    elif root.base is not None and root.base.model is not None and not Path(root.base.location).is_dir():
        path = resolve_base(f"{root.base.model}@{root.base.revision}").path
    else:
        path = Path("" if root.base is None else root.base.location)
    if not path.is_dir():
        raise BaseError(
            f"version 0 refers to the checkpoint {str(path)!r}, which is not here; pass base= with its path "
            "(--base on the command line)"
        )
    return path


def origin(
    run: RunDocuments, root: Manifest, base: str | Path | None
) -> tuple[RunDocuments, Manifest, str | Path | None]:
    """Where a branch begins: the run that it comes from, the version of it, and the base to rebuild that with.

    Raises:
        BaseError: the run is not there. ChainError: it is another one.
    """
    recorded = root.base.location if root.base is not None else ""
    try:
        source = run.origin(root, str(base) if base is not None and _is_run(base) else None)
    except NotFoundError as error:
        raise BaseError(
            f"run {run.info.run} branches from a run at {recorded!r}, which is not there; pass base= with its URL "
            f"(--base on the command line): {error}"
        ) from error
    if source.table.digest != run.table.digest:
        raise ChainError(f"run {run.info.run} branches from {source.info.run}, which has other tensors")
    version = root.base.version if root.base is not None and root.base.version is not None else 0
    further = None if base is None or _is_run(base) else base
    return source, source.manifest(version), further


def _is_run(base: str | Path) -> bool:
    """Whether somebody means a run, not a checkpoint directory."""
    try:
        open_bucket(base).stat("run.json")
    except DeltaSyncError:
        return False
    return True
