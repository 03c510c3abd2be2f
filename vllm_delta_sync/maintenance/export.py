"""``export`` writes a version as an ordinary checkpoint folder: safetensors, index, configuration and tokenizer.

``export`` rebuilds the weights directly in memory maps of the final files, with every check that readers make. The
folder holds a complete checkpoint or none: all files are made in its subfolder ``WORK_NAME`` and moved out at the end.
Fetched objects stay in the subfolder until then, so that a stopped export downloads nothing twice.
"""

import fcntl
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, Version
from vllm_delta_sync.durable_files import sync_folder
from vllm_delta_sync.errors import (
    ConflictError,
    DataError,
    DeltaSyncError,
    DigestError,
    LimitError,
    NotFoundError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import header_bytes, layout, shard_tables
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_base
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.model_files import fetch_run_file, write_file
from vllm_delta_sync.run.restore import Progress, restore
from vllm_delta_sync.run.roots import open_branch_source
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.checkpoint import (
    CONFIG_NAME,
    EXPORT_NAME,
    INDEX_NAME,
    SINGLE_NAME,
    Checkpoint,
    is_model_file,
    missing_files,
    model_files,
    resolve_base,
)

logger = guarded_logger(__name__)

SHARD_BYTES = 5 * 10**9
"""Default bytes of tensors in one file, the size that transformers long used."""
WORK_NAME = ".delta_sync_export"
"""Subfolder of an unfinished export. It exists only while an export runs, or after one was stopped."""
MADE_NAME, OBJECTS_NAME, LOCK_NAME = "new", "objects", "lock"
"""In the subfolder: the new files, the fetched objects, the lock of the running export."""
WEIGHTS_SUFFIX = ".safetensors"
_UNLIMITED = 2**62


@dataclass
class ExportReport:
    """Outcome of ``export``.

    Attributes:
        folder: of the checkpoint. version, step, manifest: the exported version, and the SHA-256 of its manifest.
        files: names of all files, sorted. bytes: of the weights.
        present: the folder already held these weights; they were only checked, and other files completed.
        missing: files that servers need and the folder lacks: ``config.json``, ``tokenizer``.
        looked_in: where configuration and tokenizer were searched, and why something there could not be read.
        notes: warnings, such as a damaged file of the run.
    """

    folder: Path
    version: int
    step: int
    manifest: str
    files: list[str]
    bytes: int
    present: bool = False
    missing: list[str] = field(default_factory=list)
    looked_in: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def export(
    run: Run,
    folder: str | Path,
    version: Version = None,
    base: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> ExportReport:
    """Write a version to a folder like ``save_pretrained`` of transformers, every tensor bit for bit.

    Takes the memory of a few tensors and, until it ends, the disk space of the checkpoint and of the objects read.
    After a stop or kill the folder holds what it held before, or no checkpoint; the next call downloads only what is
    missing. Replaces the files of an earlier export, and leaves files of other names alone.

    Args:
        folder: a new or empty one, or one that an earlier export wrote.
        version: a number, ``tag:NAME``, or None for the newest that is not quarantined.
        base: as ``Run.snapshot``; also the source of configuration and tokenizer if the run does not keep them.
        shard_bytes: bytes of tensors in one file; a larger tensor gets its own file.
        progress: called with bytes done and bytes in total.

    Raises:
        UsageError: the folder holds files that no export wrote, or is the base that the run refers to.
        ConflictError: another export is writing to the folder.
        NotFoundError: no such version, or every version is quarantined, or the base is not available.
        StoreError: the store failed, or there is no room. Otherwise as ``Run.snapshot``.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; give at least 1 byte")
    check_base(base)
    manifest, notes = _chosen(run, version)
    target = Path(folder)
    _refuse_base(run, target, base)
    weights = _WeightFiles(run.table, shard_bytes)
    with _work_folder(target, weights.names) as work:
        made = work / MADE_NAME
        if made.exists():
            shutil.rmtree(made)
        made.mkdir()
        report = ExportReport(
            target, manifest.version, manifest.step, manifest.digest, [], run.table.full_bytes, notes=notes
        )
        small = _model_files(run, base, report)
        written = _written(target)
        if written is not None and _holds(target, written, run, manifest, weights):
            logger.info("%s already holds the weights of version %d", target, manifest.version)
            report.present = True
            kept = {name for name in written["files"] if is_model_file(name) and (target / name).is_file()}
        else:
            # The same run, read through a cache that outlives this process.
            source = RunDocuments(run.bucket, run.keyring, ObjectCache(work / OBJECTS_NAME, _UNLIMITED))
            restore(source, manifest, base, progress=progress, scratch=work, room=partial(weights.room, made))
            weights.finish(made)
            kept = set()
        report.files = sorted({*weights.names, *small, *kept, EXPORT_NAME})
        others = {path.name for path in target.iterdir() if path.is_file()} - _exported_names(target, work)
        report.missing = missing_files({*report.files, *others})
        about = {
            "format_version": 1,
            "run": run.info.run,
            "version": manifest.version,
            "step": manifest.step,
            "manifest": manifest.digest,
            "fingerprint": manifest.fingerprint,
            "files": report.files,
        }
        for name, data in {**small, EXPORT_NAME: (json.dumps(about, indent=2) + "\n").encode()}.items():
            there = target / name
            if not (report.present and there.is_file() and there.read_bytes() == data):
                write_file(made / name, data)
        if report.present and (added := sorted(path.name for path in made.iterdir() if path.name != EXPORT_NAME)):
            notes.append(f"the folder already held the weights; wrote only {', '.join(added)}")
        _put_in_place(made, target, work, report.files)
    return report


def _chosen(run: Run, version: Version) -> tuple[Manifest, list[str]]:
    """Return the version to export, and notes about it."""
    manifest = run.resolve(version)
    if manifest.quarantine is None:
        return manifest, []
    reasons = "; ".join(manifest.quarantine.reasons)
    if version is not None:
        return manifest, [f"version {manifest.version} is quarantined: {reasons}"]
    if manifest.sound is None:
        raise NotFoundError(
            f"every version of run {run.info.run} is quarantined, the newest ({manifest.version}) because: {reasons}; "
            "name the version to export (--version)"
        )
    sound = run.manifest(manifest.sound)
    run.verifier.check_descends(manifest, sound)
    return sound, [f"skipped version {manifest.version}, which is quarantined: {reasons}"]


# The folder


def _refuse_base(run: RunDocuments, target: Path, base: str | Path | None) -> None:
    """Raise UsageError if the folder is the checkpoint that version 0 refers to, which would be overwritten."""
    try:
        recorded = run.manifest(0).base
    except DataError:
        recorded = None  # version 0 is lost or damaged, but an anchor may still lead to the version
    for checkpoint in (base, None if recorded is None or recorded.run is not None else recorded.location):
        if checkpoint is not None and target.is_dir() and Path(checkpoint).is_dir() and target.samefile(checkpoint):
            raise UsageError(f"--to {str(target)!r} is the checkpoint that the run builds on; name another folder")


@contextmanager
def _work_folder(target: Path, weights: Collection[str]) -> Iterator[Path]:
    """Lock and yield the work folder within ``target``; remove it at the end.

    Args:
        weights: names of the weight files to write, which must not exist as files of others.

    Raises:
        UsageError: ``target`` holds files that no export wrote. ConflictError: another export is writing there.
        StoreError: the folder cannot be written.
    """
    work = target / WORK_NAME
    try:
        new = not target.exists()
        _make_folder(target)
        if not work.exists():
            _refuse_foreign(target, work, weights)
        with _locked(work):
            try:
                # Check again under the lock: another export may just have finished here.
                _refuse_foreign(target, work, weights)
                yield work
            except BaseException:  # including interrupts
                _clear(work)
                if new and not any(target.iterdir()):
                    target.rmdir()
                raise
            _remove(work)
    except (NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"--to {str(target)!r} is a file, or lies below one; name a folder") from error
    except OSError as error:
        raise StoreError(f"folder {str(target)!r} cannot be written: {error.strerror or error}") from error


def _refuse_foreign(target: Path, work: Path, weights: Collection[str]) -> None:
    """Raise UsageError if the folder holds files that no export wrote; see ``_work_folder``."""
    found = sorted(path.name for path in target.iterdir() if path.name != WORK_NAME)
    ours = _exported_names(target, work)
    # Without a list in the folder, a list in the work folder shows that a stopped export was moving files.
    foreign = found if EXPORT_NAME not in found and not (work / EXPORT_NAME).exists() else []
    foreign += [name for name in found if name in {SINGLE_NAME, INDEX_NAME, *weights} - ours]
    if foreign:
        raise UsageError(
            f"--to {str(target)!r} holds {foreign[0]!r}, which delta-sync export did not write; name a new or empty "
            "folder"
        )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Make the work folder and lock it. Raises ConflictError: another export has locked it."""
    with ExitStack() as stack:
        while True:
            _make_folder(work)
            try:
                lock = stack.enter_context((work / LOCK_NAME).open("wb"))
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.path.samestat(os.fstat(lock.fileno()), (work / LOCK_NAME).stat()):
                    break
            except BlockingIOError as error:
                raise ConflictError(
                    f"another export is writing to {str(work.parent)!r}; wait until it ends, or stop it"
                ) from error
            except FileNotFoundError:
                continue  # an export that just ended removed the folder
        yield


def _make_folder(folder: Path) -> None:
    """Make a folder unless it exists. Raises OSError: it cannot be made, or the name is not a folder's."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except FileExistsError:
            # Also raised if another export removes the folder during the call.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    raise


def _clear(work: Path) -> None:
    """Keep, after a failure, only what the next call resumes from."""
    shutil.rmtree(work / MADE_NAME, ignore_errors=True)
    fetched = any(path.is_file() for path in (work / OBJECTS_NAME).rglob("*"))
    if not fetched and not (work / EXPORT_NAME).exists():
        _remove(work)


def _remove(work: Path) -> None:
    """Remove the work folder, the lock last."""
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != LOCK_NAME:
            path.unlink()
    (work / LOCK_NAME).unlink()
    try:
        work.rmdir()
    except OSError:
        pass  # another export has started there


def _written(folder: Path) -> dict[str, Any] | None:
    """Return the file list of an earlier export in the folder; None if there is none, or it is damaged."""
    try:
        value = json.loads((folder / EXPORT_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    names = value.get("files") if isinstance(value, dict) else None
    return value if isinstance(names, list) and all(map(_is_file_name, names)) else None


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _exported_names(*folders: Path) -> set[str]:
    """Return the names of the files that earlier exports wrote, from their lists in these folders."""
    return {name for written in map(_written, folders) if written is not None for name in written["files"]}


def _holds(target: Path, written: Mapping[str, Any], run: Run, manifest: Manifest, weights: "_WeightFiles") -> bool:
    """Return whether a folder holds the weights of a version in these files; compares the bits."""
    names = {name for name in written["files"] if name.endswith(WEIGHTS_SUFFIX) or name == INDEX_NAME}
    if written.get("manifest") != manifest.digest or names != set(weights.names):
        return False
    try:
        checkpoint = Checkpoint(target)
        prints = (fingerprint_tensor(spec.name, checkpoint.bits(spec.name)) for spec in run.table)
        complete = {spec.name: spec for spec in run.table} == checkpoint.specs
        return complete and sum(prints, Fingerprint()) == manifest.model_fingerprint
    except DeltaSyncError:
        return False


def _put_in_place(made: Path, target: Path, work: Path, names: list[str]) -> None:
    """Move the new files to their place, and delete files of earlier exports that are not in ``names``.

    If weights are moved, the files that identify a checkpoint are deleted first and moved last: if it is stopped in
    between, the folder holds no checkpoint.
    """
    before = _exported_names(target, work)
    moved = {path.name for path in made.iterdir()}
    deleted = before - set(names)
    if not moved and not deleted:
        return
    # From now on the old and the new files count as the export's, even if it is stopped.
    write_file(work / EXPORT_NAME, json.dumps({"files": sorted({*before, *names})}).encode())
    identifying = (SINGLE_NAME, INDEX_NAME, CONFIG_NAME, EXPORT_NAME)
    if any(name.endswith(WEIGHTS_SUFFIX) for name in moved):
        deleted |= moved.intersection(identifying)
    for name in sorted(deleted, key=lambda name: (name not in identifying, name)):
        (target / name).unlink(missing_ok=True)
    for name in sorted(moved, key=lambda name: (identifying.index(name) if name in identifying else -1, name)):
        os.replace(made / name, target / name)
    sync_folder(target)


# The weights


class _WeightFiles:
    """The safetensors files of the new checkpoint, filled through memory maps.

    Attributes:
        names: of the files, including the index if there are several.

    Raises:
        LimitError: ``shard_bytes`` is so small that there would be too many files.
    """

    def __init__(self, table: TensorTable, shard_bytes: int) -> None:
        shards = shard_tables(table, shard_bytes) or [table]
        count = len(shards)
        names = [f"model-{number:05d}-of-{count:05d}{WEIGHTS_SUFFIX}" for number in range(1, count + 1)]
        self._shards = dict(zip([SINGLE_NAME] if count == 1 else names, shards, strict=True))
        self.names = [*self._shards, *([INDEX_NAME] if count > 1 else [])]
        self._maps: dict[str, np.memmap] = {}

    def room(self, folder: Path, table: TensorTable) -> list[Bits]:
        """Create the files in ``folder`` with their headers; return the tensors' memory, as a ``tensors.state.Room``.

        Raises:
            StoreError: there is no room on the disk.
        """
        self._maps = {}
        tensors: dict[str, Bits] = {}
        for name, shard in self._shards.items():
            placed = layout({spec.name: (spec.element, spec.shape) for spec in shard})
            header = header_bytes(placed, {"format": "pt"})
            size = len(header) + shard.full_bytes
            try:
                # A second attempt gets new files, so that maps of the first attempt keep their pages.
                (folder / name).unlink(missing_ok=True)
                with (folder / name).open("wb+") as file:
                    # Reserve the space now: on a full disk, a later write to the map would kill the process.
                    os.posix_fallocate(file.fileno(), 0, size)
                    memory = np.memmap(file, np.uint8, mode="r+", shape=(size,))
            except OSError as error:
                raise StoreError(
                    f"no room for {size:,} bytes of weights in {str(folder)!r}: {error.strerror or error}; free "
                    "space there, or export to another disk"
                ) from error
            memory[: len(header)] = np.frombuffer(header, np.uint8)
            for spec in shard:
                start = len(header) + placed[spec.name].start
                tensors[spec.name] = memory[start : start + spec.nbytes].view(spec.element.uint)
            self._maps[name] = memory
        return [tensors[spec.name] for spec in table]

    def finish(self, folder: Path) -> None:
        """Sync the files to disk, and write the index if there are several. Raises StoreError."""
        try:
            for name, memory in self._maps.items():
                memory.flush()
                with (folder / name).open("rb") as file:
                    os.fsync(file.fileno())
        except OSError as error:
            raise StoreError(f"weights in {str(folder)!r} cannot be written: {error.strerror or error}") from error
        if INDEX_NAME in self.names:
            index = {
                "metadata": {"total_size": sum(shard.full_bytes for shard in self._shards.values())},
                "weight_map": {spec.name: name for name, shard in self._shards.items() for spec in shard},
            }
            write_file(folder / INDEX_NAME, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


# Configuration, tokenizer and generation settings


def _model_files(run: RunDocuments, base: str | Path | None, report: ExportReport) -> dict[str, bytes]:
    """Return name → content of the model's small files: those that the run keeps, and missing ones from its base.

    Args:
        report: records where files were searched and why something could not be read. That is no error, because
            weights without a configuration are useful too.
    """
    found: dict[str, bytes] = {}
    kept = [item for item in run.info.files if is_model_file(item.name)]
    report.looked_in.append(f"run {run.info.run}, which keeps {', '.join(item.name for item in kept) or 'no files'}")
    for item in kept:
        try:
            found[item.name] = fetch_run_file(run, item)
        except (NotFoundError, DigestError, LimitError) as error:
            report.notes.append(f"{item.name} of the run cannot be used: {error.message}")
    return _of_base(run, base, report) | found if missing_files(found) else found


def _of_base(run: RunDocuments, base: str | Path | None, report: ExportReport) -> dict[str, bytes]:
    """Return the small files of the given base, else of the recorded base; for a branch, those of its source run."""
    try:
        first = run.manifest(0)
        recorded = first.base
        if recorded is not None and recorded.run is not None:
            with open_branch_source(run, first, base) as (source, _, further):
                return _model_files(source, further, report)
        if base is not None:
            folder = resolve_base(base, weights=False).path
        elif recorded is None:
            return {}
        elif recorded.model is not None and not Path(recorded.location).is_dir():
            folder = resolve_base(f"{recorded.model}@{recorded.revision}", weights=False).path
        else:
            folder = Path(recorded.location)
            if not any((folder / name).is_file() for name in (SINGLE_NAME, INDEX_NAME)):
                # A run must not cause copies of arbitrary local folders: the base must be a checkpoint.
                report.looked_in.append(f"base {str(folder)!r}, which is not a checkpoint on this machine")
                return {}
        report.looked_in.append(f"base {str(folder)!r}")
        return {name: path.read_bytes() for name, path in model_files(folder).items()}
    except (DeltaSyncError, OSError) as error:
        report.looked_in.append(f"its base, which cannot be read: {error}")
        return {}
