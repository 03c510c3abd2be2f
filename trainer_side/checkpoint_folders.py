"""``CheckpointPublisher`` publishes checkpoint folders; ``CheckpointWatcher`` publishes those that appear.

``trainer_side.checkpoint_layouts`` finds them below the folder that a trainer writes to.

A folder is read once it is complete, by ordinary reads into the memory of one tensor. A memory map would end the
process (SIGBUS) if the trainer truncates a file, or deletes it on a network file system.
"""

import json
import os
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, ValidationError

from trainer_side.checkpoint_layouts import FileState, FoundCheckpoint, check_folder, find_checkpoints, locate, step_of
from trainer_side.model.live_tensors import HEAD, CheckpointTensor, LiveTensors
from trainer_side.options import PublisherOptions, set_log_format
from trainer_side.publisher import Publisher
from trainer_side.slime_deltas import check_frames, delta_index, new_tensors
from trainer_side.takeover import check_expected_run
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.codec.slime import folder_name
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DataError,
    DeltaSyncError,
    FormatError,
    GateError,
    ModelError,
    NotFoundError,
    PublishError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.safetensors_file import TruncatedFileError
from vllm_delta_sync.format.table import DTYPES, TensorSpec
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.run_stats import unix_time
from vllm_delta_sync.run.run_reader import read_ahead
from vllm_delta_sync.tensors.checkpoint import (
    CONFIG_NAME,
    Checkpoint,
    name_prefix,
    resolve_base,
    weight_files,
)
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, tensor_from_bits

__all__ = [
    "CheckpointFolder",
    "CheckpointPublisher",
    "CheckpointWatcher",
    "IncompleteCheckpointError",
    "PublishedCheckpoint",
    "UnreadableCheckpointError",
]

logger = guarded_logger(__name__)

POLL_SECONDS = 5.0
SLEEP_SECONDS = 0.2
"""Longest time until a watcher sees that it was stopped."""
SIDECAR = "checkpoint-folders"
"""Sidecar of the versions that a watcher publishes: which folders it has published, see ``_Record``."""
MAX_PUBLISHED = 1000
"""Published checkpoints whose contents the sidecar remembers, and published folders that are gone. A folder may come
back, as one on a network file system, so it is not forgotten at once."""

Progress = Callable[[int, int], None]
"""Called with the bytes that are read, and the bytes of the checkpoint."""


class IncompleteCheckpointError(FormatError):
    """A checkpoint folder lacks a file or part of one, or was changed or deleted while it was read."""


class UnreadableCheckpointError(StoreError):
    """A file of a checkpoint folder cannot be read, though it is there; that may pass, as on a network file system."""


class CheckpointFolder:
    """A complete Hugging Face safetensors checkpoint, or a delta that slime wrote, to be read tensor by tensor.

    Attributes:
        path: the folder. specs: name → dtype and shape, of every tensor.
        delta: what its index says, if it is a delta; the tensors are then the frames of those that changed, as bytes.
        sums: of a delta: name → declared checksum.
        bytes: of all tensors.
        step: see ``checkpoint_layouts.step_of``; None if nothing tells it.
        fingerprint: of all its tensors, once ``tensors`` has yielded them all; None before, and of a delta.

    Raises:
        NotFoundError: no such folder, or no safetensors checkpoint in it.
        IncompleteCheckpointError: a file that the index names is missing or shorter than its header says.
        FormatError: a file is malformed. StoreError, UnreadableCheckpointError: it cannot be read.
        UnsupportedError: as ``delta_index``.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_folder(self.path)
        self._states = {name: self._state_of(name) for name in weight_files(self.path)}
        try:
            checkpoint = Checkpoint(self.path)
        except TruncatedFileError as error:
            raise self._incomplete(error.message) from error
        if checkpoint.files.keys() != self._states.keys():
            raise self._incomplete("its index was changed while it was read")
        self._entries = {
            name: sorted(container.entries.items(), key=lambda item: item[1].start)
            for name, container in checkpoint.files.items()
        }
        self.specs: dict[str, TensorSpec] = checkpoint.specs
        self.delta = delta_index(self.path)
        self.sums: dict[str, str] = {}
        if self.delta is not None:
            found = {name: file for file, container in checkpoint.files.items() for name in container.entries}
            check_frames(self.delta, found, self.specs, self.path)
            self.sums = {name: text for each in checkpoint.files.values() for name, text in each.metadata.items()}
        elif not self.specs:
            raise NotFoundError(f"checkpoint {str(path)!r} has no tensor; give one with weights")
        self.bytes = sum(spec.nbytes for spec in self.specs.values())
        self.step = step_of(self.path) if self.delta is None else self.delta.version
        self.fingerprint: str | None = None
        self.check_unchanged()

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of the files; each tensor is valid until the next one is requested.

        Raises:
            IncompleteCheckpointError: the folder was changed or deleted since it was opened; raised at the end at the
                latest, so what was read is this checkpoint only if the iterator ends.
            UnreadableCheckpointError: a file cannot be read.
        """
        buffer = np.empty(max((spec.nbytes for spec in self.specs.values()), default=0), np.uint8)
        done, fingerprint = 0, Fingerprint()
        for file_name, entries in self._entries.items():
            with self._open(file_name) as file:
                # The tensors take the end of the file, without gaps.
                start = self._states[file_name].size - max((entry.end for _, entry in entries), default=0)
                for name_there, entry in entries:
                    name = name_prefix(file_name) + name_there
                    bits = buffer[: entry.end - entry.start]
                    self._read(file, start + entry.start, bits, file_name)
                    fingerprint += fingerprint_tensor(name, bits.view(entry.dtype.uint))
                    yield name, tensor_from_bits(bits.view(entry.dtype.uint), self.specs[name])
                    done += bits.size
                    if progress is not None:
                        progress(done, self.bytes)
        self.check_unchanged()
        self.fingerprint = fingerprint.hex() if self.delta is None else None

    def read_fingerprint(self) -> str:
        """Return the fingerprint of all tensors, for which they are read once. Raises as ``tensors``."""
        if self.fingerprint is None:
            for _ in self.tensors():
                pass
        return str(self.fingerprint)

    def check_unchanged(self) -> None:
        """Check that the safetensors files are those that were opened.

        Raises:
            IncompleteCheckpointError: one was changed or deleted. UnreadableCheckpointError: one cannot be read.
        """
        for name, state in self._states.items():
            with self._reading(name):
                found = FileState.of(os.stat(self.path / name))
            if found != state:
                raise self._incomplete(f"{name} was changed while it was read")

    def _state_of(self, name: str) -> FileState:
        with self._reading(name, "is missing"):
            return FileState.of(os.stat(self.path / name))

    def _open(self, name: str) -> BinaryIO:
        with self._reading(name):
            file = (self.path / name).open("rb")
        if FileState.of(os.fstat(file.fileno())) != self._states[name]:
            file.close()
            raise self._incomplete(f"{name} was changed while it was read")
        return file

    def _read(self, file: BinaryIO, start: int, bits: np.ndarray, name: str) -> None:
        with self._reading(name):
            file.seek(start)
            count = file.readinto(bits.data)  # type: ignore[attr-defined]
        if count != bits.size:
            raise self._incomplete(f"{name} was truncated while it was read")

    @contextmanager
    def _reading(self, name: str, if_gone: str = "was deleted while it was read") -> Iterator[None]:
        """Raise IncompleteCheckpointError if a file is gone, UnreadableCheckpointError if it cannot be read."""
        try:
            yield
        except FileNotFoundError as error:
            raise self._incomplete(f"{name} {if_gone}") from error
        except OSError as error:
            raise UnreadableCheckpointError(f"{str(self.path / name)!r} cannot be read: {error.strerror}") from error

    def _incomplete(self, reason: str) -> "IncompleteCheckpointError":
        return IncompleteCheckpointError(f"checkpoint {str(self.path)!r} is not complete: {reason}")


class _FolderTensors(LiveTensors):
    """The tensors of a checkpoint folder.

    Args:
        specs: of the tensors. has_values: False if their values come with ``publish(weights=…)``.
    """

    def __init__(
        self,
        checkpoint: CheckpointFolder,
        specs: Mapping[str, TensorSpec],
        has_values: bool,
        progress: Progress | None,
    ) -> None:
        self.tensors = {
            name: CheckpointTensor(name, spec.shape, TORCH_DTYPES[spec.dtype]) for name, spec in specs.items()
        }
        self.aliases = {}
        self.has_values = has_values
        self.folder = checkpoint.path
        self._checkpoint, self._progress = checkpoint, progress

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._checkpoint.tensors(self._progress) if self.has_values else iter(())


@dataclass(frozen=True)
class PublishedCheckpoint:
    """What became of a checkpoint folder.

    Attributes:
        folder: its path; the folder of its weights may lie below it.
        step: its step.
        outcome: ``published``; ``unchanged``: its weights equal those of the newest version; ``older`` (only
            ``CheckpointWatcher``): it was published before, or a later checkpoint was. The last two publish nothing.
        manifest: of the version that was published, otherwise of the newest version.
        seconds: that it took.
        reason: why nothing was published; empty if it was.
    """

    folder: Path
    step: int
    outcome: Literal["published", "unchanged", "older"]
    manifest: Manifest
    seconds: float = 0.0
    reason: str = ""


_NOT_FOR_FOLDERS = {
    "every": "each checkpoint is published",
    "budget": "what it would hold back of the last checkpoint could never follow",
    **dict.fromkeys(
        ("include", "exclude", "rename", "parts"), "all tensors of a folder are published, under its names"
    ),
}


class CheckpointPublisher:
    """Publishes checkpoint folders as versions of one run; the baseline is on disk (``Publisher(baseline="disk")``).

    The first checkpoint begins the run, as version 0, or takes the run over. Names, shapes and dtypes of its tensors
    are those of the run. With a base, version 0 of a new run is a reference to the base and the first checkpoint is
    version 1; floating-point tensors are rounded to the base's dtypes, and tensors that checkpoints lack keep the
    values of the base. All checkpoints of one publisher have the same tensors. A delta that slime wrote is published if
    it builds on the checkpoint that the newest version has, or on the base, as slime's version 0.

    Use it as a context manager, or ``close`` it. One thread at a time.

    Attributes:
        newest: manifest of the newest version; None if there is none yet. base: as given.
    """

    def __init__(self, bucket: str | Path, base: str | Path | None = None, **options: Any) -> None:
        """Read what the bucket holds; the first ``publish`` opens the run for writing.

        Args:
            bucket: URL of a run.
            base: checkpoint that servers start from: a folder, or a public model as ``org/name@revision``.
            options: of ``Publisher``, such as ``codec``, ``notice`` and ``signing_key``, but not ``every``, ``budget``
                and what chooses tensors.

        Raises:
            UsageError: one of these is given. As ``open_run``, except that there need not be a run; and as
            ``Publisher`` for ``expect_run``.
        """
        set_log_format()  # folders are named in the log before there is a Publisher
        for name, reason in _NOT_FOR_FOLDERS.items():
            if name in options:
                raise UsageError(f"{name}= is given, but {reason}; leave it out")
        self._url, self.base, self._options = bucket, base, {"baseline": "disk", **options}
        checked = PublisherOptions(bucket, base, **self._options)
        checked.load_keys()
        self._keyring = checked.keyring
        self._closing = ExitStack()
        self._publisher: Publisher | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._run: Run | None = None
        self.newest: Manifest | None = None
        self._also_at: set[int] = set()  # steps of checkpoints that equal the newest version
        self._exists = True
        try:
            self.newest = self.run.reachable_head()[0]
        except NotFoundError:
            self._exists = False  # no run yet, or a start that ended before version 0
        expected, found = checked.expect_run, self.run.info.run if self._exists else None
        if expected is not None and expected != found:
            # Folders that are older than the newest version are left out without opening a publisher.
            self._closing.close()
            check_expected_run(str(bucket), found, expected)

    @property
    def run(self) -> Run:
        """The run, for reading. Raises NotFoundError: there is none yet."""
        if self._run is None:
            self._run = self._closing.enter_context(open_run(self._url, self._keyring))
        return self._run

    def publish(
        self,
        checkpoint: CheckpointFolder | str | Path,
        step: int | None = None,
        sidecars: Mapping[str, bytes] | None = None,
        progress: Progress | None = None,
    ) -> PublishedCheckpoint:
        """Publish one checkpoint, and return when the version is durable. After an error nothing of it is published.

        Args:
            checkpoint: its folder, or one with a single checkpoint below it, such as ``global_step_10`` of verl.
            step: its optimizer step; None means that of the folder, and 0 for the first checkpoint of a new run without
                one.
            sidecars: as ``Publisher.publish``; version 0 has none.

        Raises:
            UsageError: nothing tells its step, or the folder holds several checkpoints. TensorMismatchError: it has
            other tensors than the run. IncompleteCheckpointError: it is not complete, or was changed or deleted while
            it was read. UnreadableCheckpointError: it cannot be read. Otherwise as ``CheckpointFolder``, ``Publisher``
            and ``Publisher.publish``.
        """
        began = time.monotonic()
        if not isinstance(checkpoint, CheckpointFolder):
            checkpoint = CheckpointFolder(locate(Path(checkpoint)))
        if step is None:
            step = checkpoint.step
        if step is None:
            if self.newest is not None:
                raise UsageError(
                    f"the step of checkpoint {str(checkpoint.path)!r} is unknown: its name is not like checkpoint-100, "
                    f"step_100, global_step_100, iter_100 or epoch_3; give it with --step (step=), version "
                    f"{self.newest.version} has step {self.newest.step}"
                )
            step = 0
        delta = checkpoint.delta
        if delta is not None:
            self.check_base(checkpoint)
            if step != delta.version:
                raise UsageError(f"step {step} is not that of {str(checkpoint.path)!r}, {delta.version}; leave it out")
        elif self._publisher is not None:
            _check_same_tensors(checkpoint, self._specs, "the checkpoint before it", self.base is not None)
        try:
            published = False
            if self._publisher is None:
                specs = checkpoint.specs if delta is None else self._known_specs(checkpoint)
                self._publisher = self._open(checkpoint, specs, step, progress)
                self._specs = specs
                # With a base, version 0 is the base.
                published = self._publisher.began and self.base is None
            publisher = self._publisher
            if not published:
                weights = checkpoint.tensors(progress)
                if delta is not None:
                    weights = new_tensors(delta, weights, checkpoint.sums, publisher.table, publisher.published_bits)
                # The next delta builds on this one, also if it changes nothing.
                result = publisher.publish(step, True, weights, sidecars, skip_unchanged=delta is None)
                published = result.version is not None
        except (UsageError, StoreError):
            # Other code that reads the folder does not know that it may be deleted.
            checkpoint.check_unchanged()
            raise
        publisher.flush()
        self.newest = self.run.manifest(publisher.version)
        self._also_at = set() if published else {*self._also_at, step}
        seconds = time.monotonic() - began
        if published:
            return PublishedCheckpoint(checkpoint.path, step, "published", self.newest, seconds)
        reason = f"its weights are those of version {self.newest.version}"
        return PublishedCheckpoint(checkpoint.path, step, "unchanged", self.newest, seconds, reason)

    @property
    def is_open(self) -> bool:
        """Whether the run is open for writing."""
        return self._publisher is not None

    def check_base(self, checkpoint: CheckpointFolder) -> None:
        """Raise ChainError if a checkpoint is a delta that does not build on the newest version."""
        delta = checkpoint.delta
        if delta is None:
            return
        what = f"delta {str(checkpoint.path)!r} builds on version {delta.base} of its trainer"
        if self.newest is None and self.base is None:
            raise ChainError(f"{what}, and there is no run yet: give the trainer's --hf-checkpoint as --base")
        if delta.base not in ({0} if self.newest is None else {self.newest.step, *self._also_at}):
            newest = "there is only the base" if self.newest is None else f"the newest one has step {self.newest.step}"
            raise ChainError(
                f"{what}, which is not the newest of the run: {newest}. If {folder_name(delta.base)} is missing, put "
                "it back, or have a whole checkpoint written (--update-weight-mode full); if the trainer began again "
                "at its --hf-checkpoint, publish into a new run"
            )

    def close(self) -> None:
        """Finish the version in progress, and release everything. May be called twice.

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self._closing.__exit__(*raised)

    def _is_current(self) -> bool:
        """Return whether the run is still there: it may be long since it was read."""
        try:
            return self.run.is_current()
        except NotFoundError:
            return False

    def _known_specs(self, delta: CheckpointFolder) -> Mapping[str, TensorSpec]:
        """Return the tensors of the run, or of the base that it will begin with; a head only if the delta has one."""
        if self._exists or self.base is None:
            known = {spec.name: spec for spec in self.run.table}
        else:
            known = Checkpoint(resolve_base(self.base).path).specs
        return {name: spec for name, spec in known.items() if name in delta.specs or not name.endswith(HEAD)}

    def _open(
        self, checkpoint: CheckpointFolder, specs: Mapping[str, TensorSpec], step: int, progress: Progress | None
    ) -> Publisher:
        """Begin the run, with the checkpoint or the base as version 0, or take it over. Args: specs: its tensors.

        Raises:
            ConflictError: the run is gone, and what was read of it fits no other. Otherwise as
                ``Publisher``.
        """
        if self._exists and not self._is_current():
            raise ConflictError(
                f"run {self.run.info.run} at {self.run.bucket.url} was removed or replaced; start again, which "
                "continues what is there then, or begins a run"
            )
        if self._exists and self.base is None and checkpoint.delta is None:
            _check_same_tensors(checkpoint, {spec.name: spec for spec in self.run.table}, "the run")
        has_values = checkpoint.delta is None and (self._exists or self.base is None)
        live = _FolderTensors(checkpoint, specs, has_values, progress)
        options = {"first_step": step if self.base is None else 0, **self._options}
        publisher = self._closing.enter_context(Publisher(live, self._url, self.base, **options))
        if publisher.began:
            self._run = None  # it may be a start that ended before version 0
        return publisher


def _check_same_tensors(
    checkpoint: CheckpointFolder, specs: Mapping[str, TensorSpec], owner: str, rounds: bool = False
) -> None:
    """Raise TensorMismatchError unless a checkpoint has exactly these tensors.

    Args:
        owner: who has them. rounds: whether floating-point tensors may have other dtypes, because a base decides.
    """
    what = f"checkpoint {str(checkpoint.path)!r}"
    remedy = "publish checkpoints of one model, or start a new run under a new URL"
    with_base = "; with a base, dtypes are rounded to the run's, and missing tensors keep its values"
    with_base = remedy + ("" if rounds else with_base)
    for name, spec in checkpoint.specs.items():
        known = specs.get(name)
        if known is None:
            raise TensorMismatchError(f"{what} has tensor {name[:120]!r}, which {owner} does not have; {remedy}")
        rounded = rounds and known.shape == spec.shape and DTYPES[known.dtype].is_float and DTYPES[spec.dtype].is_float
        if known != spec and not rounded:
            raise TensorMismatchError(
                f"{what}: tensor {name[:120]!r} is {spec.dtype} {list(spec.shape)}, but {known.dtype} "
                f"{list(known.shape)} in {owner}; {remedy if known.shape != spec.shape else with_base}"
            )
    missing = [name for name in specs if name not in checkpoint.specs]
    if missing:
        raise TensorMismatchError(
            f"{what} lacks tensor {missing[0][:120]!r}, which {owner} has ({len(missing)} in all); {with_base}"
        )


class _Record(BaseModel):
    """What a watcher has published, as its versions' sidecar keeps it.

    Attributes:
        written: when the folder of the newest version was written, in nanoseconds by the clock of its file system.
        folders: path below the watched folder → digest of the names, sizes and times of its files.
        published: fingerprints of published checkpoints, the newest last.
    """

    model_config = ConfigDict(strict=True)
    written: int = 0
    folders: dict[str, str] = {}
    published: list[str] = []

    def with_folder(
        self, found: FoundCheckpoint, fingerprint: str | None, is_newest: bool, present: Collection[str]
    ) -> "_Record":
        """Return the record with one more folder.

        Args:
            fingerprint: None if it is not known (yet). present: folders that are there now.
        """
        known = [each for each in self.published if each != fingerprint]
        folders = {name: digest for name, digest in self.folders.items() if name != found.name}
        for name in [name for name in folders if name not in present][:-MAX_PUBLISHED]:
            del folders[name]
        return _Record(
            written=found.written[1] if is_newest else self.written,
            folders={**folders, found.name: _digest(found)},
            published=[*known, fingerprint][-MAX_PUBLISHED:] if fingerprint is not None else known,
        )


def _step(found: FoundCheckpoint) -> int:
    """Return the step of a checkpoint that has one."""
    return found.step or 0


def _digest(found: FoundCheckpoint) -> str:
    """Return a digest of names, sizes and times of a checkpoint's files; not of inodes, which a remount may change."""
    files = [(name, state.size, state.modified) for name, state in found.state]
    return sha256(json.dumps(files).encode()).hexdigest()[:32]


class CheckpointWatcher:
    """Publishes each complete checkpoint that appears below a folder, in the order of their steps.

    Which folders are checkpoints, and their steps: ``trainer_side.checkpoint_layouts``. A checkpoint is complete when
    its safetensors files are, and no file in its folder has changed between two polls.

    A trainer that starts again from an earlier step is followed: a checkpoint with a step up to that of the newest
    version is published if it was written after the newest version's checkpoint and its weights were not published
    before. Checkpoints are then published in the order of their times. A restart publishes nothing again.

    Attributes:
        refused: folder → why its checkpoint cannot be published, such as other tensors than those of the run.
        left_out: folder → why it is none, not complete, or not readable. Both are only logged, once. A folder is looked
            at again when a file in it changes; one that cannot be read, at each poll.
    """

    def __init__(
        self, directory: str | Path, publisher: CheckpointPublisher, poll_seconds: float = POLL_SECONDS
    ) -> None:
        """Args: directory: holds the checkpoint folders.

        Raises:
            NotFoundError: there is no such folder.
        """
        self._directory, self._publisher, self._poll_seconds = Path(directory), publisher, poll_seconds
        if not os.path.isdir(self._directory):
            raise NotFoundError(
                f"folder {str(directory)!r} does not exist, or this user may not enter it; create it, or correct the "
                "path"
            )
        self.refused: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self._seen: dict[str, FoundCheckpoint] = {}
        self._done: dict[str, FoundCheckpoint] = {}
        self._unreadable: dict[str, FoundCheckpoint] = {}
        self._waiting: set[str] = set()  # deltas whose base is not published
        self._stopped = False
        self._record = self._read_record()

    def watch(self, once: bool = False) -> Iterator[PublishedCheckpoint]:
        """Publish checkpoints, and yield what became of each.

        Failures of the store, and folders that cannot be published, are logged; the former are retried at the next
        poll. It is safe to interrupt, as ``Publisher`` is.

        Args:
            once: publish what is complete now, and return; failures of the store are then raised.

        Raises:
            ConflictError: another writer has taken the run over. Otherwise as ``Publisher``.
        """
        polls, problem = 0, ""
        while True:
            next_poll = time.monotonic() + self._poll_seconds
            try:
                yield from self._poll()
                problem = ""
            except (StoreError, PublishError) as error:
                if once:
                    raise
                if error.message != problem:
                    logger.warning("trying again every %g s: %s", self._poll_seconds, error)
                problem = error.message
            polls += 1
            if once and polls == 2:
                return
            while time.monotonic() < next_poll and not (self._stopped and not once and not self.unfinished()):
                time.sleep(min(SLEEP_SECONDS, max(0.0, next_poll - time.monotonic())))
            if self._stopped and not once and not self.unfinished():
                return

    def stop(self) -> None:
        """Let ``watch`` return once every folder that it sees now is published or left out; also in signal handlers."""
        self._stopped = True

    def unfinished(self) -> list[str]:
        """Return the folders that are neither published nor left out as they are now."""
        try:
            found = self._scan()
        except StoreError:
            found = self._seen
        return [name for name, each in found.items() if each not in (self._done.get(name), self._unreadable.get(name))]

    def _poll(self) -> Iterator[PublishedCheckpoint]:
        before, self._seen = self._seen, self._scan()
        for known in (self._done, self._unreadable, self.refused, self.left_out):
            for name in known.keys() - self._seen.keys():
                del known[name]
        settled = [each for name, each in self._seen.items() if before.get(name) == each != self._done.get(name)]
        ready = []
        for found in settled:
            if found.reason or found.step is None:
                self._leave_out(found, self._why_not(found))
            else:
                ready.append(found)
        newest = self._publisher.newest
        earlier = [newest is not None and _step(each) <= newest.step for each in ready if not self._why_older(each)]
        ready.sort(key=lambda each: (each.written[1] if any(earlier) else _step(each), each.name))
        for found in ready:
            if reason := self._why_not(found):
                self._leave_out(found, reason)
                continue
            was_done = found.name in self._done
            self._unreadable.pop(found.name, None)
            result = self._publish(found)
            if result is not None:
                self.refused.pop(found.name, None)
                self.left_out.pop(found.name, None)
            if found.name not in self._unreadable:
                self._done[found.name] = found
            if result is not None and result.outcome != "older":
                for name in self._waiting:
                    self._done.pop(name, None)
                self._waiting.clear()
            if result is not None and not (was_done and result.outcome == "older"):
                yield result

    def _why_not(self, found: FoundCheckpoint) -> str:
        """Return why a folder is not published, whatever its weights are; empty if it may be."""
        if found.reason:
            return found.reason
        if found.step is None:
            return (
                "no step is in its name (checkpoint-100, step_100, global_step_100, iter_100, epoch_3); publish it "
                f"with --from {self._directory / found.name} --step N"
            )
        if self._publisher.newest is None and self._publisher.base is None and not (found.path / CONFIG_NAME).exists():
            return (
                f"it has no {CONFIG_NAME}, so no server could start from it; give the checkpoint that training began "
                "with as --base, or publish it with --from"
            )
        return ""

    def _why_older(self, found: FoundCheckpoint) -> str:
        """Return why a complete checkpoint does not follow the newest version; empty if its weights may be new."""
        newest = self._publisher.newest
        if newest is None:
            return ""
        if self._record.folders.get(found.name) == _digest(found):
            return f"it was published before, and version {newest.version} (step {newest.step}) is newer"
        if _step(found) > newest.step:
            return ""
        written = self._record.written or int((unix_time(newest.created_at) or 0) * 1e9)
        if found.written[0] <= written:
            return f"version {newest.version} (step {newest.step}) is as new or newer"
        return ""

    def _publish(self, found: FoundCheckpoint) -> PublishedCheckpoint | None:
        """Publish a checkpoint that no longer changes; None if it cannot be."""
        path, step, newest = self._directory / found.name, _step(found), self._publisher.newest
        if newest is not None and (reason := self._why_older(found)):
            return PublishedCheckpoint(path, step, "older", newest, reason=reason)
        try:
            checkpoint = CheckpointFolder(found.path)
            self._check_base(found, checkpoint)
            # By an earlier version: the publisher compares with the newest.
            earlier = self._record.published[:-1]
            may_repeat = newest is not None and step <= newest.step and checkpoint.delta is None
            is_known = may_repeat and checkpoint.read_fingerprint() in earlier
        except (DataError, ModelError, StoreError) as error:
            if isinstance(error, ChainError):
                self._waiting.add(found.name)
            self._refuse(found, error)
            return None
        if newest is not None and is_known:
            self._record = self._record.with_folder(found, None, is_newest=False, present=self._seen)
            reason = f"its weights were published before version {newest.version} (step {newest.step})"
            return PublishedCheckpoint(path, step, "older", newest, reason=reason)
        record = self._record.with_folder(found, checkpoint.fingerprint, is_newest=True, present=self._seen)
        try:
            result = self._publisher.publish(checkpoint, step, {SIDECAR: record.model_dump_json().encode()})
        except (
            GateError, IncompleteCheckpointError, UnreadableCheckpointError, TensorMismatchError, ModelError
        ) as error:  # fmt: skip
            self._refuse(found, error)
            return None
        except DataError as error:
            if checkpoint.delta is None or not self._publisher.is_open:
                raise  # of the run
            self._refuse(found, error)
            return None
        self._record = self._record.with_folder(found, checkpoint.fingerprint, is_newest=True, present=self._seen)
        return replace(result, folder=path)

    def _check_base(self, found: FoundCheckpoint, checkpoint: CheckpointFolder) -> None:
        """Raise ChainError if a checkpoint is a delta whose base is not the newest version, as it was published."""
        self._publisher.check_base(checkpoint)
        if checkpoint.delta is None:
            return
        base = self._seen.get(str(Path(found.name).with_name(folder_name(checkpoint.delta.base))))
        if base is not None and self._record.folders.get(base.name, known := _digest(base)) != known:
            raise ChainError(
                f"delta {str(found.path)!r} builds on {base.name}, which was written again after it was published: the "
                "trainer began again; publish into a new run"
            )

    def _refuse(self, found: FoundCheckpoint, error: DeltaSyncError) -> None:
        if isinstance(error, IncompleteCheckpointError | NotFoundError | StoreError):
            self._leave_out(found, error.message, isinstance(error, StoreError))
            return
        logger.warning("%s is not published: %s", found.name, error)
        self.refused[found.name] = error.message
        self.left_out.pop(found.name, None)

    def _leave_out(self, found: FoundCheckpoint, reason: str, again: bool = False) -> None:
        """Args: again: whether it is tried at the next poll, even if no file has changed."""
        if self.left_out.get(found.name) != reason:
            logger.warning("%s is not published: %s", found.name, reason)
        self.left_out[found.name] = reason
        self.refused.pop(found.name, None)
        (self._unreadable if again else self._done)[found.name] = found

    def _scan(self) -> dict[str, FoundCheckpoint]:
        return {found.name: found for found in find_checkpoints(self._directory)}

    def _read_record(self) -> _Record:
        """Return the record in the sidecar of the newest version that has one, with that version and those after it."""
        newest, record = self._publisher.newest, _Record()
        if newest is None:
            return record
        run, oldest = self._publisher.run, max(0, newest.version - MAX_PUBLISHED)
        # Without a base the fingerprint of a version is that of its checkpoint.
        fingerprints: list[str] = []
        try:
            for manifest in read_ahead(run.manifest, range(newest.version, oldest - 1, -1)):
                fingerprints.insert(0, manifest.fingerprint)
                if any(item.name == SIDECAR for item in manifest.sidecars):
                    record = _Record.model_validate_json(run.sidecar(manifest.version, SIDECAR))
                    break
        except (DataError, ValidationError) as error:
            logger.warning("which folders were published is not known: %s", error)
        written = record.written if len(fingerprints) == 1 else 0
        return record.model_copy(update={"written": written, "published": [*record.published, *fingerprints]})
