"""``FollowedFolder`` is a folder that follows a run: the lock, what was handled, and which version may come next."""

import os
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, Version
from vllm_delta_sync.durable_files import locked_folder, sync_path, writing_to
from vllm_delta_sync.errors import ChainError, ForkError, ReplayError, StoreError, UsageError
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.checkpoint_files import files_in, missing_model_files, model_files_of_run
from vllm_delta_sync.maintenance.export import ExportRecord, choose_version
from vllm_delta_sync.run.model_files import write_file
from vllm_delta_sync.run.restore import Progress
from vllm_delta_sync.tensors.checkpoint import EXPORT_NAME

logger = guarded_logger(__name__)

WORK_NAME = ".delta_sync_follow"
"""Subfolder for what is not finished: the next version, fetched objects, removed versions, and the lock."""
NEXT, OBJECTS = "next", "objects"
_LOCK, _HANDLED, _REMOVED = "lock", "handled", "removed"
_UNLIMITED = 2**62


@dataclass(frozen=True)
class FollowedVersion:
    """A version that the folder has switched to.

    Attributes:
        folder: of the version; it stays the same when newer ones come, until ``keep`` newer versions exist.
        version, step, manifest: number, optimizer step, SHA-256 of the manifest.
        read_bytes: of the deltas or the anchor that it was made from; 0 if the folder was there already.
        linked: names of weight files that are hard links to those of the version before.
        seconds: from reading the head to the switch.
    """

    folder: Path
    version: int
    step: int
    manifest: str
    read_bytes: int
    linked: list[str]
    seconds: float


class FollowedFolder(ABC):
    """The folder that ``follow`` keeps.

    Args:
        base, shard_bytes, keep, progress: as ``follow``.

    Attributes:
        path: the folder. objects: keeps fetched objects until the version that needs them is made, across restarts.
        foreign: pattern of what a folder of another format holds.
    """

    foreign: ClassVar[str]

    def __init__(
        self, path: Path, base: str | Path | None, shard_bytes: int, keep: int, progress: Progress | None
    ) -> None:
        self.path = path
        self._work = path / WORK_NAME
        self.objects = ObjectCache(self._work / OBJECTS, _UNLIMITED)
        self._base, self._shard_bytes, self._keep, self._progress = base, shard_bytes, keep, progress
        self._last_handled: str | None = None
        self._completed = False  # whether this process has looked for the model's small files
        self._head: Manifest | None = None  # as of the last poll, if the head is followed

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Make the folder, and exclude other processes from it in the block.

        Raises:
            UsageError: it holds files of others. ConflictError: another process follows into it.
            StoreError: it cannot be made.
        """
        with ExitStack() as stack:
            with writing_to(self.path):
                self.path.mkdir(parents=True, exist_ok=True)
                if not self._work.exists() and (found := sorted(path.name for path in self.path.iterdir())):
                    raise UsageError(
                        f"--to {str(self.path)!r} holds {found[0]!r}, which delta-sync follow did not make; name a new "
                        "or empty folder"
                    )
                if (other := next(self.path.glob(self.foreign), None)) is not None:
                    raise UsageError(
                        f"--to {str(self.path)!r} holds {other.name!r}, of another --format; name a new or empty folder"
                    )
                taken = f"another process follows a run into {str(self.path)!r}; end it, or name another folder"
                stack.enter_context(locked_folder(self._work, _LOCK, taken))
            stack.callback(shutil.rmtree, self._work / NEXT, ignore_errors=True)
            yield

    def update(self, run: Run, version: Version) -> FollowedVersion | None:
        """Move the folder to a version; None if it is there, and the last switch to it was handled.

        Raises:
            DataError: the version is missing, damaged, or does not continue the current one.
            StoreError: the bucket or the disk failed.
        """
        began = time.monotonic()
        known = self._head
        with ExitStack() as stack:
            if version is None:  # as servers poll: what does not change is not read again
                stack.enter_context(run.prefetching(None if known is None else known.version))
            if not (run.is_there() if version is None else run.is_current()):
                raise ChainError(f"{run.bucket.url!r} holds another run than before; follow it into another folder")
            if version is None:
                self._head = run.head(known)
        target, _ = choose_version(run, version, self._head)
        try:
            current = self._current()
            if current is not None:
                folder, record = current
                self._check_continues(run, folder, record, target, version)
                if record.manifest == target.digest and self._is_whole(run, folder, record):
                    if self._handled() == target.digest:
                        return None
                    return FollowedVersion(folder, target.version, target.step, target.digest, 0, [], 0.0)
            made, read_bytes, linked = self._make(run, current, target)
        except OSError as error:
            raise StoreError(f"folder {str(self.path)!r} cannot be written: {error.strerror or error}") from error
        seconds = time.monotonic() - began
        return FollowedVersion(made, target.version, target.step, target.digest, read_bytes, linked, seconds)

    @property
    @abstractmethod
    def _restart(self) -> str:
        """What to do so that a version is taken that does not continue the current one."""

    @abstractmethod
    def _current(self) -> tuple[Path, ExportRecord] | None:
        """Return the folder of the current version, and the record there; None if there is none, or it is damaged."""

    def _is_whole(self, run: Run, folder: Path, record: ExportRecord) -> bool:
        """Return whether a version's folder still holds what was written to it."""
        return True

    @abstractmethod
    def _make(
        self, run: Run, current: tuple[Path, ExportRecord] | None, target: Manifest
    ) -> tuple[Path, int, list[str]]:
        """Make the folder of a version, and switch to it.

        Returns:
            The folder, the bytes of what was read for it, and the names of the weight files that are hard links.
        """

    def mark_handled(self, update: FollowedVersion, lasting: bool) -> None:
        """Remember that the caller has handled a version, so that it is not yielded again.

        Args:
            lasting: also after a restart.

        Raises:
            StoreError: the disk failed; the version is yielded again after a restart.
        """
        self._last_handled = update.manifest
        write_file(self._work / _HANDLED, update.manifest.encode() if lasting else b"")

    def _handled(self) -> str | None:
        if self._last_handled is not None:
            return self._last_handled
        try:
            return (self._work / _HANDLED).read_text()
        except FileNotFoundError:
            return None

    def _check_continues(
        self, run: Run, folder: Path, record: ExportRecord, target: Manifest, version: Version
    ) -> None:
        """Raise ChainError unless a version may follow the current one."""
        if record.run != run.info.run:
            raise ChainError(
                f"{str(self.path)!r} follows run {record.run}, and {run.bucket.url!r} holds run {run.info.run}; "
                "follow it into another folder"
            )
        if version is not None:  # a tag, or a number, may lead back
            return
        held, digest = record.version, record.manifest
        remedy = f"If this is on purpose, {self._restart}"
        if target.version < held:
            raise ReplayError(
                f"the newest version in the bucket is {target.version}, but {str(folder)!r} has version {held}: an "
                f"older state was restored, or newer versions are hidden. {remedy}"
            )
        if run.keyring.checks_signatures or target.version == held:
            there = run.ancestors.digest(target.version, target.digest, held)
            if there != digest:
                raise ForkError(
                    f"version {target.version} in the bucket descends from {there} as version {held}, but "
                    f"{str(folder)!r} has {digest}: there are two histories. {remedy}"
                )

    def _fresh(self) -> Path:
        """Return a new folder for the next version."""
        new = self._work / NEXT
        shutil.rmtree(new, ignore_errors=True)
        new.mkdir()
        return new

    def _write_model_files(self, run: Run, new: Path) -> None:
        """Write the small files that the model needs and the folder lacks; log once what is wrong with them."""
        there, looked_in, notes = files_in(new), list[str](), list[str]()
        if missing_model_files(run, there):
            for name, data in model_files_of_run(run, self._base, looked_in, notes).items():
                if name not in there:
                    write_file(new / name, data)
        if missing := missing_model_files(run, files_in(new)):
            notes.append(
                f"{str(self.path)!r} gets no {' and no '.join(missing)}, searched in {'; '.join(looked_in)}: without "
                "them the weights cannot be loaded as a model. Follow with a checkpoint that has them as base (--base)"
            )
        for note in notes if not self._completed else ():
            logger.warning("%s", note)
        self._completed = True

    def _finish(self, new: Path, manifest: Manifest, folder: Path) -> ExportRecord:
        """Add the record to the files of a version, and give the folder its name."""
        record = ExportRecord.of(manifest, sorted({*files_in(new), EXPORT_NAME}))
        write_file(new / EXPORT_NAME, record.to_bytes())
        sync_path(new)
        os.rename(new, folder)
        sync_path(self.path)
        return record

    def _remove(self, folders: list[Path]) -> None:
        """Remove folders of versions; each leaves its place in one step, so that no part of one is seen."""
        removed = self._work / _REMOVED
        for folder in folders:
            removed.mkdir(exist_ok=True)
            os.rename(folder, removed / folder.name)
        shutil.rmtree(removed, ignore_errors=True)
