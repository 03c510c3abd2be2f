"""``follow`` keeps a folder at a run's newest version, as an ordinary checkpoint, for engines other than vLLM.

``DIR/current`` is a symbolic link to the folder of one whole version, and switches to the next one in one step. A new
version is made beside the current one: files whose tensors did not change are hard links to the current ones, others
are copies in which the changes are applied. No file of a finished version is ever written to again, so engines may map
them.
"""

import errno
import os
import re
import shutil
import threading
import time
from collections.abc import Generator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.client import Run, Version, open_run
from vllm_delta_sync.durable_files import sync_path
from vllm_delta_sync.errors import DataError, DeltaSyncError, StoreError, UsageError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.checkpoint_files import SHARD_BYTES, WeightFiles, is_adapter
from vllm_delta_sync.maintenance.export import ExportRecord, read_record
from vllm_delta_sync.maintenance.follow_folder import OBJECTS, FollowedFolder, FollowedVersion
from vllm_delta_sync.maintenance.slime_folder import SlimeFolder
from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.objects import read_steps
from vllm_delta_sync.run.read_plan import ReadPlanner, plan_read
from vllm_delta_sync.run.restore import DECODED_ELEMENTS, Progress, apply_step, restore
from vllm_delta_sync.run.run_reader import MOVING
from vllm_delta_sync.settings import HEAD
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes
from vllm_delta_sync.tensors.checkpoint import ADAPTER_CONFIG_NAME, EXPORT_NAME, is_model_file
from vllm_delta_sync.tensors.state import HeldPieces, apply_changes
from vllm_delta_sync.trust import Keyring

logger = guarded_logger(__name__)

CURRENT_NAME = "current"
"""The symbolic link to the folder of the newest version."""
FOLDER_PREFIX = "version-"
_FOLDER = re.compile(rf"{FOLDER_PREFIX}[0-9]{{1,10}}-[0-9a-f]{{8}}(-[0-9]+)?")
_LINK = "link"

FORMATS = ("checkpoint", "slime", "slime-full")


def follow(
    url: str | Path,
    folder: str | Path,
    version: Version = None,
    *,
    once: bool = False,
    poll_seconds: float = 2.0,
    keep: int = 2,
    base: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    format: str = "checkpoint",
    keyring: Keyring | None = None,
    store: StoreOptions | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
) -> Generator[FollowedVersion, bool | None]:
    """Keep ``folder/current`` at a version of a run, and yield each version after the switch to it::

        for update in follow("s3://bucket/runs/a", "/models/a"):
            reload_engine(update.folder)

    The process can be killed at any moment: ``current`` is one whole version, bit for bit what was published, or does
    not exist yet. A version whose loop body did not end is yielded again by the next call, and so is one that was
    answered by ``send(False)``. Needs the disk space of ``keep`` + 1 versions and of what is downloaded for one, and
    the memory of a few tensors.

    A version that is missing, damaged, not signed by a trusted key or older than the current one is logged and not
    taken; so is a failure of the store. Both are tried again at the next poll.

    Args:
        url: of the run, as ``open_run``.
        folder: a new or empty one, or one that an earlier call made. Only one process may follow into it.
        version: None for the newest that is not quarantined; ``tag:NAME``, which is followed wherever it moves; or a
            number, after which the iteration ends.
        once: end when the folder is at the version, and raise what else would be logged.
        poll_seconds: time between polls of the bucket.
        keep: versions whose folders stay, the current one included; give an engine time to load one.
        base: as ``Run.snapshot``. shard_bytes: bytes of tensors in one file. keyring, store: as ``open_run``.
        format: ``checkpoint``; or folders as slime writes them, ``folder/weight_v000007``: with ``slime`` mostly deltas
            on the version before, with ``slime-full`` whole checkpoints (docs/folders.md). Their number is that of the
            version, and only goes up. From what stays, the newest ``keep`` versions can be rebuilt.
        progress: called with bytes done and bytes in total, for each version.
        stop: ends the iteration when it is set.

    Raises:
        UsageError: an argument is invalid, or the folder holds files that were not made by this function.
        ConflictError: another process follows into the folder. SettingsError: as ``open_run``.
    """
    if keep < 1:
        raise UsageError(f"keep is {keep}; give at least 1 version")
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; give at least 1 byte")
    if not 0 < poll_seconds < float("inf"):
        raise UsageError(f"poll_seconds is {poll_seconds}; give a number of seconds above 0")
    if format not in FORMATS:
        raise UsageError(f"format is {format!r}; give one of {', '.join(FORMATS)}")
    check_base_exists(base)
    if version == HEAD:
        version = None
    if isinstance(version, str) and version.startswith(MOVING):
        raise UsageError(f"version {version[:80]!r} moves with the head; follow the head, a tag or a number")
    arguments = (Path(folder), base, shard_bytes, keep, progress)
    place = _Folder(*arguments) if format == "checkpoint" else SlimeFolder(*arguments, whole=format == "slime-full")
    once = once or not (version is None or isinstance(version, str))
    stopped = threading.Event() if stop is None else stop

    # A generator of its own, so that the arguments are checked at the call rather than at the first version.
    def poll() -> Generator[FollowedVersion, bool | None]:
        with ExitStack() as stack:
            stack.enter_context(place.locked())
            run: Run | None = None
            refused = ""
            while not stopped.is_set():
                try:
                    if run is None:
                        run = stack.enter_context(open_run(url, keyring, store, place.objects))
                    if format != "checkpoint" and is_adapter(run):
                        raise UsageError(f"format is {format!r}, and {url!r} is the run of an adapter; use checkpoint")
                    update = place.update(run, version)
                    if update is not None:
                        handled = yield update
                        place.mark_handled(update, lasting=handled is not False)
                except (DataError, StoreError) as error:
                    if once:
                        raise
                    if refused != error.message:
                        logger.warning("%s stays as it is: %s: %s", place.path, error.kind, error.message)
                    refused = error.message
                else:
                    refused = ""
                    if once:
                        return
                stopped.wait(poll_seconds)

    return poll()


class _Folder(FollowedFolder):
    """A folder whose ``current`` links to one whole version."""

    foreign = "weight_v*"
    _measured: "_MeasuredFolder | None" = None

    def _is_whole(self, run: Run, folder: Path, record: ExportRecord) -> bool:
        return self._fingerprints(run, folder, record) is not None

    def _make(
        self, run: Run, current: tuple[Path, ExportRecord] | None, target: Manifest
    ) -> tuple[Path, int, list[str]]:
        made, read_bytes, linked = self._found_or_made(run, current, target)
        self._switch_to(made)
        self._remove([folder for folder in self._folders() if folder != made][self._keep - 1 :])
        return made, read_bytes, linked

    @property
    def _restart(self) -> str:
        return f"remove {str(self.path / CURRENT_NAME)!r}"

    def _current(self) -> tuple[Path, ExportRecord] | None:
        link = self.path / CURRENT_NAME
        try:
            folder = self.path / link.readlink().name
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            raise UsageError(f"{str(link)!r} is no symbolic link, so follow did not make it; move it away") from error
        record = read_record(folder)
        return None if record is None or not record.manifest else (folder, record)

    def _found_or_made(
        self, run: Run, current: tuple[Path, ExportRecord] | None, target: Manifest
    ) -> tuple[Path, int, list[str]]:
        """Return what ``_make`` does, before the switch."""
        for folder in self._folders():  # one that was made before: a tag has moved back, or a process was killed
            record = read_record(folder)
            if record is not None and record.manifest == target.digest and self._is_whole(run, folder, record):
                return folder, 0, []
        new = self._fresh()
        files = WeightFiles(run.table, self._shard_bytes, is_adapter(run))
        advanced = None if current is None else self._advance(run, *current, target, files, new)
        if advanced is not None:
            fingerprints, read_bytes, linked = advanced
        else:
            restored = restore(
                run, target, self._base, progress=self._progress, scratch=self._work, room=lambda _: files.create(new)
            )
            fingerprints, read_bytes, linked = restored.state.fingerprints, restored.plan.bytes, []
        if advanced is None or not self._completed:  # --base may have what the version before lacks
            self._write_model_files(run, new)
        files.finish(new)
        name, number = f"{FOLDER_PREFIX}{target.version}-{target.digest[:8]}", 1
        while (folder := self.path / (name if number == 1 else f"{name}-{number}")).exists():
            number += 1
        record = self._finish(new, target, folder)
        self._measured = _MeasuredFolder(folder, _file_states(folder, record), fingerprints)
        return folder, read_bytes, linked

    def _advance(
        self, run: Run, folder: Path, record: ExportRecord, target: Manifest, files: WeightFiles, new: Path
    ) -> tuple[list[Fingerprint], int, list[str]] | None:
        """Fill ``new`` from the current folder and the deltas between; None if that is not possible, or costs more."""
        fingerprints = self._fingerprints(run, folder, record)
        if fingerprints is None:
            return None
        try:
            planner = ReadPlanner(run)
            planner.add_manifests(target)
            steps = planner.path(record.version, target.version)
            size = sum(step.payload_bytes for step in steps)
            if size > run.table.full_bytes and plan_read(run, target).bytes < size:
                return None
            weights = _NextWeights(run.table, files, folder, new, list(fingerprints))
            done = 0
            for step, read in zip(steps, read_steps(steps, DECODED_ELEMENTS), strict=True):
                apply_step(step, weights, self._work, read=read)
                done += step.payload_bytes
                if self._progress is not None:
                    self._progress(done, size)
        except DataError as error:
            logger.info("version %d is read anew rather than from %s: %s", target.version, folder.name, error.message)
        else:
            if weights.fingerprint == target.model_fingerprint:
                return weights.fingerprints, size, weights.link_unchanged(record.files)
        self._fresh()
        return None

    def _fingerprints(self, run: Run, folder: Path, record: ExportRecord) -> list[Fingerprint] | None:
        """Return the fingerprint of each tensor in a version's folder; None if it is damaged, or lacks a file.

        They are measured once, then moved along with the changes, and measured again if a file was changed since.
        """
        try:
            states = _file_states(folder, record)
        except OSError as error:
            logger.warning("%s is not used: %s: %s", folder, error.filename, error.strerror)
            return None
        if self._measured is not None and (self._measured.folder, self._measured.states) == (folder, states):
            return self._measured.fingerprints
        try:
            found = WeightFiles(run.table, self._shard_bytes, is_adapter(run)).fingerprints(folder)
        except DeltaSyncError as error:
            logger.warning("%s is not used: %s", folder, error.message)
            return None
        if sum(found, Fingerprint()).hex() != record.fingerprint:
            logger.warning("%s is not used: its weights are not those of version %s", folder, record.version)
            return None
        self._measured = _MeasuredFolder(folder, states, found)
        return self._measured.fingerprints

    def _folders(self) -> list[Path]:
        """Return the folders of versions, the newest first."""
        found = [path for path in self.path.iterdir() if _FOLDER.fullmatch(path.name)]
        found = [path for path in found if path.is_dir() and not path.is_symlink()]
        return sorted(found, key=_switched_at, reverse=True)

    def _switch_to(self, folder: Path) -> None:
        # It is now the newest, also if the clock was set back.
        moment = max(time.time_ns(), *(_switched_at(path) + 1 for path in self._folders()))
        os.utime(folder / EXPORT_NAME, ns=(moment, moment))
        link = self._work / _LINK
        link.unlink(missing_ok=True)
        try:
            link.symlink_to(folder.name)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            no_links = "it takes no symbolic links, as FAT and SMB shares do not"
            raise OSError(error.errno, no_links) from error
        os.replace(link, self.path / CURRENT_NAME)
        sync_path(self.path)
        shutil.rmtree(self._work / OBJECTS, ignore_errors=True)


def _switched_at(folder: Path) -> int:
    """Return when ``current`` switched to a version last, in nanoseconds; 0 if its record is gone."""
    try:
        # Not the time of the folder: a converter writes its output there.
        return (folder / EXPORT_NAME).stat().st_mtime_ns
    except FileNotFoundError:
        return 0


_FileState = tuple[int, int, int]


class _MeasuredFolder(NamedTuple):
    """A version's folder: the state of its files when its tensors had these fingerprints, per tensor id."""

    folder: Path
    states: list[_FileState]
    fingerprints: list[Fingerprint]


def _file_states(folder: Path, record: ExportRecord) -> list[_FileState]:
    """Return inode, size and time of each file of a version but its record. Raises OSError: one is missing."""
    found = [(folder / name).stat() for name in record.files if name != EXPORT_NAME]
    return [(state.st_ino, state.st_size, state.st_mtime_ns) for state in found]


class _NextWeights:
    """The weights of the next version while steps are applied: a ``run.restore.StepTarget``.

    A file of the current version is copied when one of its tensors changes first.

    Args:
        files: of both versions. current, new: folders of both versions.
        fingerprints: of the current version, per tensor id; moved along.
    """

    def __init__(
        self, table: TensorTable, files: WeightFiles, current: Path, new: Path, fingerprints: list[Fingerprint]
    ) -> None:
        self.fingerprints = fingerprints
        self._table, self._files, self._current, self._new = table, files, current, new
        self._bits: dict[int, Bits] = {}
        for name in files.shards:
            self._bits.update(files.open(current, name))
        self._copied: set[str] = set()

    @property
    def fingerprint(self) -> Fingerprint:
        return sum(self.fingerprints, Fingerprint())

    def base_tensor(self, tensor: int) -> BaseTensor:
        return BaseTensor(self._bits[tensor])

    def apply(self, changes: Changes) -> None:
        apply_changes(changes, self._table, self._writable, self.fingerprints)

    def link_unchanged(self, names: list[str]) -> list[str]:
        """Give the new folder the files that did not change; return the names of the weight files among them.

        Args:
            names: of all files of the current version.
        """
        unchanged = [name for name in self._files.shards if name not in self._copied]
        small = [name for name in names if is_model_file(name) or name == ADAPTER_CONFIG_NAME]
        for name in [*unchanged, *small]:
            (self._new / name).parent.mkdir(exist_ok=True)
            try:
                os.link(self._current / name, self._new / name)
            except OSError:  # a file system without hard links
                shutil.copyfile(self._current / name, self._new / name)
        return unchanged

    def _writable(self, tensor: int) -> HeldPieces:
        name = self._files.shard_of[tensor]
        if name not in self._copied:
            (self._new / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(self._current / name, self._new / name)
            self._bits.update(self._files.open(self._new, name, writable=True))
            self._copied.add(name)
        return ((None, self._bits[tensor]),)
