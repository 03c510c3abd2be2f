"""``export`` writes a version as an ordinary checkpoint folder: safetensors, index, configuration and tokenizer.

``export`` rebuilds the weights directly in memory maps of the final files, with every check that readers make. The
folder holds a complete checkpoint or none: all files are made in its subfolder ``WORK_NAME`` and moved out at the end.
Fetched objects stay in the subfolder until then, so that a stopped export downloads nothing twice.
"""

import json
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Self

from pydantic import TypeAdapter

from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import Run, Version
from vllm_delta_sync.durable_files import locked_folder, sync_path, writing_to
from vllm_delta_sync.errors import DataError, DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.checkpoint_files import (
    DRAFT_FILE,
    SHARD_BYTES,
    WEIGHTS_SUFFIX,
    WeightFiles,
    files_in,
    is_adapter,
    missing_model_files,
    model_files_of_run,
)
from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.model_files import write_file
from vllm_delta_sync.run.restore import Progress, restore
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve
from vllm_delta_sync.tensors.checkpoint import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_NAME,
    CONFIG_NAME,
    EXPORT_NAME,
    INDEX_NAME,
    SINGLE_NAME,
)

logger = guarded_logger(__name__)

WORK_NAME = ".delta_sync_export"
"""Subfolder of an unfinished export. It exists only while an export runs, or after one was stopped."""
MADE_NAME, OBJECTS_NAME, LOCK_NAME = "new", "objects", "lock"
"""In the subfolder: the new files, the fetched objects, the lock of the running export."""
_UNLIMITED = 2**62


@dataclass(frozen=True)
class ExportRecord:
    """Content of ``EXPORT_NAME``: what an export wrote to a folder.

    Attributes:
        files: names of the files, sorted. run, version, step: what they hold; defaults while they are being moved.
        manifest: SHA-256 of the version's manifest. fingerprint: of the weights.
    """

    format_version: int = 1
    run: str = ""
    version: int = -1
    step: int = 0
    manifest: str = ""
    fingerprint: str = ""
    files: list[str] = field(kw_only=True)

    @classmethod
    def of(cls, manifest: Manifest, files: list[str]) -> Self:
        """Return the record of a version that is in these files."""
        identity = manifest.run, manifest.version, manifest.step, manifest.digest, manifest.fingerprint
        return cls(1, *identity, files=files)

    def to_bytes(self) -> bytes:
        return (json.dumps(asdict(self), indent=2) + "\n").encode()


_RECORD = TypeAdapter(ExportRecord)


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
    missing. Replaces the files of an earlier export, and leaves all other files alone, also a configuration
    that users put there.

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
    check_base_exists(base)
    manifest, notes = choose_version(run, version)
    target = Path(folder)
    _refuse_base(run, target, base)
    weights = WeightFiles(run.table, shard_bytes, adapter=is_adapter(run))
    with _work_folder(target, weights.names) as work:
        made = work / MADE_NAME
        if made.exists():
            shutil.rmtree(made)
        made.mkdir()
        report = ExportReport(
            target, manifest.version, manifest.step, manifest.digest, [], run.table.full_bytes, notes=notes
        )
        small = model_files_of_run(run, base, report.looked_in, report.notes)
        written = read_record(target)
        if written is not None and _holds(target, written, run, manifest, weights):
            logger.info("%s already holds the weights of version %d", target, manifest.version)
            report.present = True
            kept = {name for name in written.files if name not in weights.names and (target / name).is_file()}
        else:
            # The same run, read through a cache that outlives this process.
            source = RunReader(run.bucket, run.keyring, ObjectCache(work / OBJECTS_NAME, _UNLIMITED))
            restore(source, manifest, base, progress=progress, scratch=work, room=lambda _: weights.create(made))
            weights.finish(made)
            kept = set()
        others = {path.name for path in target.iterdir() if path.is_file()} - _exported_names(target, work)
        for name in sorted(others & small.keys()):
            notes.append(f"{name} in the folder was not written by an export, and stays as it is")
            del small[name]
        report.files = sorted({*weights.names, *small, *kept, EXPORT_NAME})
        report.missing = missing_model_files(run, {*report.files, *others})
        for name, data in {**small, EXPORT_NAME: ExportRecord.of(manifest, report.files).to_bytes()}.items():
            there = target / name
            if not (report.present and there.is_file() and there.read_bytes() == data):
                write_file(made / name, data)
        if report.present and (added := [name for name in files_in(made) if name != EXPORT_NAME]):
            notes.append(f"the folder already held the weights; wrote only {', '.join(added)}")
        _put_in_place(made, target, work, report.files)
    return report


def choose_version(run: Run, version: Version, head: Manifest | None = None) -> tuple[Manifest, list[str]]:
    """Return a version, by default the newest that servers serve, and notes about it.

    Args:
        head: the newest one, if it was read already and no version is named.

    Raises:
        NotFoundError: no such version; or none is named, and all are quarantined.
    """
    manifest = run.resolve(version) if head is None else head
    state = None
    if manifest.quarantine is not None:
        state = f"quarantined: {'; '.join(manifest.quarantine.reasons)}"
    elif (held := manifest.held_back) is not None:
        state = f"not the trainer's exact state, version {held.exact} is: {held.summary()}"
    policy = ServicePolicy(requested=None if version is None else manifest.version)
    newest = newest_to_serve(run, manifest, policy)
    if newest is None:
        raise NotFoundError(
            f"every version of run {run.info.run} is quarantined, the newest ({manifest.version}) is {state}; name "
            "one (--version)"
        )
    if newest == manifest.version:
        return manifest, [] if state is None else [f"version {manifest.version} is {state}"]
    sound = run.manifest(newest)
    run.check_descends(manifest, sound)
    return sound, [f"skipped version {manifest.version}, which is {state}"]


# The folder


def _refuse_base(run: RunReader, target: Path, base: str | Path | None) -> None:
    """Raise UsageError if the folder is the checkpoint that version 0 refers to, which would be overwritten."""
    try:
        recorded = run.manifest(0).base
    except DataError:
        recorded = None  # version 0 is lost or damaged, but an anchor may still lead to the version
    for checkpoint in (base, None if recorded is None or recorded.run is not None else recorded.location):
        if checkpoint is not None and all(map(os.path.isdir, (target, checkpoint))) and target.samefile(checkpoint):
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
    with writing_to(target):
        new = not target.exists()
        target.mkdir(parents=True, exist_ok=True)
        taken = f"another export is writing to {str(target)!r}; wait until it ends, or stop it"
        with locked_folder(work, LOCK_NAME, taken):
            try:
                _refuse_foreign(target, work, weights)
                yield work
            except BaseException:  # including interrupts
                _clear(work)
                if new and not any(target.iterdir()):
                    target.rmdir()
                raise
            _remove(work)


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


def read_record(folder: Path) -> ExportRecord | None:
    """Return the record of an earlier export in the folder; None if there is none, or it is damaged."""
    try:
        record = _RECORD.validate_json((folder / EXPORT_NAME).read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    good = (name == DRAFT_FILE or (name not in ("", ".", "..") and "/" not in name) for name in record.files)
    return record if all(good) else None


def _exported_names(*folders: Path) -> set[str]:
    """Return the names of the files that earlier exports wrote, from their lists in these folders."""
    return {name for written in map(read_record, folders) if written is not None for name in written.files}


def _holds(target: Path, written: ExportRecord, run: Run, manifest: Manifest, weights: WeightFiles) -> bool:
    """Return whether a folder holds the weights of a version in these files; compares the bits."""
    names = {name for name in written.files if name.endswith(WEIGHTS_SUFFIX) or name == INDEX_NAME}
    if written.manifest != manifest.digest or names != set(weights.names):
        return False
    try:
        return sum(weights.fingerprints(target), Fingerprint()) == manifest.model_fingerprint
    except DeltaSyncError:
        return False


def _put_in_place(made: Path, target: Path, work: Path, names: list[str]) -> None:
    """Move the new files to their place, and delete files of earlier exports that are not in ``names``.

    If weights are moved, the files that identify a checkpoint are deleted first and moved last: if it is stopped in
    between, the folder holds no checkpoint.
    """
    before = _exported_names(target, work)
    moved = set(files_in(made))
    deleted = before - set(names)
    if not moved and not deleted:
        return
    # From now on the old and the new files count as the export's, even if it is stopped.
    write_file(work / EXPORT_NAME, ExportRecord(files=sorted({*before, *names})).to_bytes())
    identifying = (ADAPTER_NAME, SINGLE_NAME, INDEX_NAME, ADAPTER_CONFIG_NAME, CONFIG_NAME, EXPORT_NAME)
    if any(name.endswith(WEIGHTS_SUFFIX) for name in moved):
        deleted |= moved.intersection(identifying)
    for name in sorted(deleted, key=lambda name: (name not in identifying, name)):
        (target / name).unlink(missing_ok=True)
    for name in sorted(moved, key=lambda name: (identifying.index(name) if name in identifying else -1, name)):
        (target / name).parent.mkdir(exist_ok=True)
        os.replace(made / name, target / name)
    if DRAFT_FILE in moved:
        sync_path((target / DRAFT_FILE).parent)
    sync_path(target)
