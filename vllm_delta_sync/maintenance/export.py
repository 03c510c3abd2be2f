"""Export a version as an ordinary checkpoint folder: safetensors, index, configuration and tokenizer.

``export`` rebuilds the weights right where they are to stay, in memory maps of the files, with every check that
readers make. A folder shows either a whole checkpoint or none: all of it is made in a folder within, ``WORK_NAME``, and
moved from there at the end. What was fetched is kept there until then, so that an export that was stopped downloads
nothing twice.
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
from vllm_delta_sync.errors import (
    ConflictError,
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
from vllm_delta_sync.run.roots import origin
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
"""Bytes of tensors in one file, as transformers has long cut checkpoints."""
WORK_NAME = ".delta_sync_export"
"""Folder in which an export is made. It is there only while one runs, or after one that was stopped."""
MADE_NAME, OBJECTS_NAME, LOCK_NAME = "new", "objects", "lock"
"""What is in it: the files that are being made, the objects that were fetched, the lock of who is at work."""
WEIGHTS_SUFFIX = ".safetensors"
_UNLIMITED = 2**62


@dataclass
class ExportReport:
    """Outcome of ``export``.

    Attributes:
        folder: where the checkpoint is. version, step, manifest: what it holds, and the SHA-256 of its manifest.
        files: names of all files, sorted. bytes: of the weights.
        present: whether the folder held those weights already; they were only checked, and other files completed.
        missing: what no server starts without, and is not there: ``config.json``, ``tokenizer``.
        looked_in: where configuration and tokenizer were looked for, and why something there could not be read.
        notes: what is worth knowing and no error, such as a file of the run that is damaged.
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
    """Write a version to a folder, as ``save_pretrained`` of transformers would, every tensor bit for bit.

    Takes the memory of a few tensors, and while it runs the disk space of the checkpoint and of the objects that lead
    to it. Stopped at any moment, even killed, the folder holds what it held before, or no checkpoint; the next call
    downloads only what is missing. A folder that an earlier call has filled is replaced. Files of other names that
    others put there stay.

    Args:
        folder: where to; a new one, an empty one, or one that an earlier call has written.
        version: a number, ``tag:NAME``, or None for the newest that is not quarantined.
        base: as ``Run.snapshot``; and where configuration and tokenizer are looked for if the run does not keep them.
        shard_bytes: bytes of tensors in one file; a larger tensor has a file of its own.
        progress: called with bytes so far and in all.

    Raises:
        UsageError: the folder holds what no export has written, or is the base that the run refers to.
        ConflictError: another export writes there.
        NotFoundError: there is no such version, or none that is not quarantined, or the base is not at hand.
        StoreError: the store failed, or there is no room. Else as ``Run.snapshot``.
    """
    if shard_bytes < 1:
        raise UsageError(f"shard_bytes is {shard_bytes}; give a number of bytes from 1 on")
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
            logger.info("%s holds the weights of version %d already", target, manifest.version)
            report.present = True
            kept = {name for name in written["files"] if is_model_file(name) and (target / name).is_file()}
        else:
            # The same documents, read through a cache that outlives this process.
            source = RunDocuments(run.bucket, run.keyring, ObjectCache(work / OBJECTS_NAME, _UNLIMITED))
            restore(source, manifest, base, progress=progress, scratch=work, room=partial(weights.room, made))
            weights.finish(made)
            kept = set()
        report.files = sorted({*weights.names, *small, *kept, EXPORT_NAME})
        report.missing = missing_files({*report.files, *_others(target, work)})
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
            if not (report.present and _reads(target / name, data)):
                write_file(made / name, data)
        if report.present and (added := sorted(path.name for path in made.iterdir() if path.name != EXPORT_NAME)):
            notes.append(f"the folder held the weights already; {', '.join(added)} written anew")
        _put_in_place(made, target, work, report.files)
    return report


def _chosen(run: Run, version: Version) -> tuple[Manifest, list[str]]:
    """The version that is meant, and what is to be said of it."""
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
    run.authentic.descends(manifest, sound)
    return sound, [f"version {manifest.version} is quarantined, and left out: {reasons}"]


# The folder


def _refuse_base(run: RunDocuments, target: Path, base: str | Path | None) -> None:
    """Raise UsageError if the folder is the checkpoint that version 0 refers to: what is replaced would be lost."""
    try:
        recorded = run.manifest(0).base
    except StoreError:
        raise
    except DeltaSyncError:
        recorded = None  # lost or damaged: an anchor may lead to the version all the same
    for place in (base, None if recorded is None or recorded.run is not None else recorded.location):
        if place is not None and target.is_dir() and Path(place).is_dir() and target.samefile(place):
            raise UsageError(f"--to {str(target)!r} is the checkpoint that the run builds on; name another folder")


@contextmanager
def _work_folder(target: Path, weights: Collection[str]) -> Iterator[Path]:
    """The folder within ``target`` in which an export is made, for this process alone; removed once it is done.

    Args:
        weights: names of the files to come that nobody else may have put there.

    Raises:
        UsageError: ``target`` holds what no export has written. ConflictError: another export writes there.
        StoreError: it cannot be written.
    """
    work = target / WORK_NAME
    try:
        new = not target.exists()
        _make_folder(target)
        if not work.exists():
            _refuse_foreign(target, work, weights)
        with _locked(work):
            try:
                # Again where another export was just at work. Without the lock its files may seem to be nobody's.
                _refuse_foreign(target, work, weights)
                yield work
            except BaseException:  # an interrupt too
                _clear(work)
                if new and not any(target.iterdir()):
                    target.rmdir()
                raise
            _remove(work)
    except (NotADirectoryError, FileExistsError) as error:
        raise UsageError(f"--to {str(target)!r} is, or lies in, a file; name a folder") from error
    except OSError as error:
        raise StoreError(f"folder {str(target)!r} cannot be written: {error.strerror or error}") from error


def _refuse_foreign(target: Path, work: Path, weights: Collection[str]) -> None:
    """Raise UsageError if the folder holds what exports have not written; see ``_work_folder``."""
    found = sorted(path.name for path in target.iterdir() if path.name != WORK_NAME)
    ours = _ours(target, work)
    # Without its list the folder is ours if one was being filled as an export was stopped.
    foreign = found if EXPORT_NAME not in found and not (work / EXPORT_NAME).exists() else []
    foreign += [name for name in found if name in {SINGLE_NAME, INDEX_NAME, *weights} - ours]
    if foreign:
        raise UsageError(
            f"--to {str(target)!r} holds {foreign[0]!r}, which delta-sync export has not written; name a new or an "
            "empty folder"
        )


@contextmanager
def _locked(work: Path) -> Iterator[None]:
    """Make the work folder, and keep other exports out of it. Raises ConflictError: one is at work there."""
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
                    f"another export is writing to {str(work.parent)!r}; wait for it, or end it"
                ) from error
            except FileNotFoundError:
                continue  # an export that has just ended has removed it
        yield


def _make_folder(folder: Path) -> None:
    """Make a folder unless it is there. Raises OSError: it cannot be made, or something else has its name."""
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return
        except FileExistsError:
            # Raised too if another export removes the folder right after it was found to be there.
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(folder.lstat().st_mode):
                    raise


def _clear(work: Path) -> None:
    """After a failure: keep what the next call goes on from, and nothing else."""
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
        pass  # another export has begun there meanwhile


def _written(folder: Path) -> dict[str, Any] | None:
    """What an earlier export says about the folder; None if there was none, or it says nothing sensible."""
    try:
        value = json.loads((folder / EXPORT_NAME).read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    names = value.get("files") if isinstance(value, dict) else None
    return value if isinstance(names, list) and all(map(_is_file_name, names)) else None


def _is_file_name(name: object) -> bool:
    return isinstance(name, str) and name not in ("", ".", "..") and "/" not in name


def _ours(*folders: Path) -> set[str]:
    """Names of the files that earlier exports have written, by their lists in these folders."""
    return {name for told in map(_written, folders) if told is not None for name in told["files"]}


def _others(target: Path, work: Path) -> set[str]:
    """Names of the files that others have put there."""
    return {path.name for path in target.iterdir() if path.is_file()} - _ours(target, work)


def _reads(path: Path, data: bytes) -> bool:
    return path.is_file() and path.read_bytes() == data


def _holds(target: Path, written: Mapping[str, Any], run: Run, manifest: Manifest, weights: "_WeightFiles") -> bool:
    """Whether a folder holds the weights of a version in such files, by the bits that are in them."""
    names = {name for name in written["files"] if name.endswith(WEIGHTS_SUFFIX) or name == INDEX_NAME}
    if written.get("manifest") != manifest.digest or names != set(weights.names):
        return False
    try:
        there = Checkpoint(target)
        prints = (fingerprint_tensor(spec.name, there.bits(spec.name)) for spec in run.table)
        whole = {spec.name: spec for spec in run.table} == there.specs
        return whole and sum(prints, Fingerprint()) == manifest.model_fingerprint
    except DeltaSyncError:
        return False


def _put_in_place(made: Path, target: Path, work: Path, names: list[str]) -> None:
    """Move what was made to its place; what earlier exports have written there, and ``names`` lack, goes.

    Where weights are moved, what tells readers that there is a checkpoint goes first and comes last: stopped in
    between, the folder holds none.
    """
    before = _ours(target, work)
    moved = {path.name for path in made.iterdir()}
    gone = before - set(names)
    if not moved and not gone:
        return
    # From now on both lists are known to belong here, whatever happens.
    write_file(work / EXPORT_NAME, json.dumps({"files": sorted({*before, *names})}).encode())
    signs = (SINGLE_NAME, INDEX_NAME, CONFIG_NAME, EXPORT_NAME)
    if any(name.endswith(WEIGHTS_SUFFIX) for name in moved):
        gone |= moved.intersection(signs)
    for name in sorted(gone, key=lambda name: (name not in signs, name)):
        (target / name).unlink(missing_ok=True)
    for name in sorted(moved, key=lambda name: (signs.index(name) if name in signs else -1, name)):
        os.replace(made / name, target / name)
    folder = os.open(target, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# The weights


class _WeightFiles:
    """The safetensors files of a checkpoint that are being filled, as memory maps.

    Attributes:
        names: of the files, the index among them if there are several.

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
        """Where the tensors lie in the files of ``folder``, made with their headers: a ``tensors.state.Room``.

        Raises:
            StoreError: there is no room on the disk.
        """
        self._maps = {}
        places: dict[str, Bits] = {}
        for name, shard in self._shards.items():
            placed = layout({spec.name: (spec.element, spec.shape) for spec in shard})
            header = header_bytes(placed, {"format": "pt"})
            size = len(header) + shard.full_bytes
            try:
                # Anew, should another way to the version be tried: no map of the first attempt shall lose its pages.
                (folder / name).unlink(missing_ok=True)
                with (folder / name).open("wb+") as file:
                    # Room is asked for now: a page that cannot be written later would end the process.
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
                places[spec.name] = memory[start : start + spec.nbytes].view(spec.element.uint)
            self._maps[name] = memory
        return [places[spec.name] for spec in table]

    def finish(self, folder: Path) -> None:
        """Make the files durable, and write the index of several; raises StoreError."""
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
    """Name → content of the model's small files: those that the run keeps; where it lacks some, those of its base.

    Args:
        report: gets what was looked into, and why something there could not be read. That is no error: weights
            without a configuration are worth having too.
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
    """Those of the base that is given, else of the recorded one; for a branch those of the run that it comes from."""
    try:
        first = run.manifest(0)
        recorded = first.base
        if recorded is not None and recorded.run is not None:
            with origin(run, first, base) as (source, _, further):
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
                # Nothing is copied from a folder of this machine only because a run names it.
                report.looked_in.append(f"base {str(folder)!r}, which is no checkpoint on this machine")
                return {}
        report.looked_in.append(f"base {str(folder)!r}")
        return {name: path.read_bytes() for name, path in model_files(folder).items()}
    except (DeltaSyncError, OSError) as error:
        report.looked_in.append(f"its base, which cannot be read: {error}")
        return {}
