"""``CheckpointPublisher`` publishes checkpoint folders; ``CheckpointWatcher`` publishes those that appear.

A folder is read once it is complete, by ordinary reads into the memory of one tensor. A memory map would end the
process (SIGBUS) if the trainer truncates a file, or deletes it on a network file system.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Literal, Self

import numpy as np
import torch

from trainer_side.model.sources import CheckpointTensor, LiveTensors, check_name
from trainer_side.options import chosen_keys
from trainer_side.publisher import Publisher
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import (
    DataError,
    DeltaSyncError,
    FormatError,
    ModelError,
    NotFoundError,
    PublishError,
    StoreError,
    TensorMismatchError,
    UsageError,
)
from vllm_delta_sync.format.canonical_json import load_json
from vllm_delta_sync.format.limits import MAX_HEADER_BYTES, check_limit
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import TensorSpec
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.checkpoint import Checkpoint, model_files, weight_files
from vllm_delta_sync.tensors.torch_views import TORCH_DTYPES, tensor_from_bits
from vllm_delta_sync.trust import Keyring

__all__ = [
    "CheckpointFolder",
    "CheckpointPublisher",
    "CheckpointWatcher",
    "IncompleteCheckpointError",
    "PublishedCheckpoint",
]

logger = guarded_logger(__name__)

POLL_SECONDS = 5.0
SIDECAR = "checkpoint-time"
"""Sidecar of versions from folders without a step: time of the newest such folder, in nanoseconds, as text."""
TRAINER_STATE = "trainer_state.json"

Progress = Callable[[int, int], None]
"""Called with the bytes that are read, and the bytes of the checkpoint."""
FileState = tuple[int, int, int]
"""Inode, size and time of the last change of a file."""


class IncompleteCheckpointError(FormatError):
    """A checkpoint folder lacks a file or part of one, or was changed or deleted while it was read."""


class CheckpointFolder:
    """A complete Hugging Face safetensors checkpoint, to be read tensor by tensor.

    Attributes:
        path: the folder. specs: name → dtype and shape, of every tensor.
        bytes: of all tensors.
        step: the number at the end of the folder's name, else ``global_step`` of trainer_state.json; None without both.

    Raises:
        NotFoundError: no such folder, or no safetensors checkpoint in it.
        IncompleteCheckpointError: a file that the index names is missing or shorter than its header says.
        FormatError: a file is malformed. StoreError: it cannot be read.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            raise NotFoundError(f"checkpoint folder {str(path)!r} does not exist; give the path of a local one")
        self._states = {name: self._whole_file(name) for name in weight_files(self.path)}
        checkpoint = Checkpoint(self.path)
        self._entries = {
            name: sorted(container.entries.items(), key=lambda item: item[1].start)
            for name, container in checkpoint.files.items()
        }
        self.specs: dict[str, TensorSpec] = checkpoint.specs
        if not self.specs:
            raise NotFoundError(f"checkpoint {str(path)!r} has no tensor; give one with weights")
        for name in self.specs:
            check_name(name)
        self.bytes = sum(spec.nbytes for spec in self.specs.values())
        self.step = step_of(self.path)
        self.check_unchanged()

    def tensors(self, progress: Progress | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, tensor) in the order of the files; each tensor is valid until the next one is requested.

        Raises:
            IncompleteCheckpointError: the folder was changed or deleted since it was opened; raised at the end at the
                latest, so what was read is this checkpoint only if the iterator ends.
        """
        buffer = np.empty(max(spec.nbytes for spec in self.specs.values()), np.uint8)
        done = 0
        for file_name, entries in self._entries.items():
            with self._open(file_name) as file:
                # The tensors take the end of the file, without gaps.
                start = self._states[file_name][1] - max((entry.end for _, entry in entries), default=0)
                for name, entry in entries:
                    bits = buffer[: entry.end - entry.start]
                    self._read(file, start + entry.start, bits, file_name)
                    yield name, tensor_from_bits(bits.view(entry.dtype.uint), self.specs[name])
                    done += bits.size
                    if progress is not None:
                        progress(done, self.bytes)
        self.check_unchanged()

    def check_unchanged(self) -> None:
        """Raise IncompleteCheckpointError if a safetensors file was changed or deleted since the folder was opened."""
        for name, state in self._states.items():
            try:
                found = _state(os.stat(self.path / name))
            except OSError as error:
                raise self._vanished(name, error) from error
            if found != state:
                raise self._incomplete(f"{name} was changed while it was read")

    def _whole_file(self, name: str) -> FileState:
        """Return the state of a file; raise IncompleteCheckpointError if it is shorter than its header says."""
        try:
            with (self.path / name).open("rb") as file:
                state = _state(os.fstat(file.fileno()))
                declared = _declared_bytes(file, state[1], name)
        except FileNotFoundError as error:
            raise self._incomplete(f"{name} is missing") from error
        except OSError as error:
            raise StoreError(f"{str(self.path / name)!r} cannot be read: {error.strerror}") from error
        if state[1] < declared:
            raise self._incomplete(f"{name} has {state[1]:,} bytes of at least {declared:,}")
        return state

    def _open(self, name: str) -> BinaryIO:
        try:
            file = (self.path / name).open("rb")
        except OSError as error:
            raise self._vanished(name, error) from error
        if _state(os.fstat(file.fileno())) != self._states[name]:
            file.close()
            raise self._incomplete(f"{name} was changed while it was read")
        return file

    def _read(self, file: BinaryIO, start: int, bits: np.ndarray, name: str) -> None:
        try:
            file.seek(start)
            count = file.readinto(bits.data)  # type: ignore[attr-defined]
        except OSError as error:
            raise self._vanished(name, error) from error
        if count != bits.size:
            raise self._incomplete(f"{name} was truncated while it was read")

    def _vanished(self, name: str, error: OSError) -> "IncompleteCheckpointError":
        if isinstance(error, FileNotFoundError):
            return self._incomplete(f"{name} was deleted while it was read")
        return self._incomplete(f"{name} can no longer be read: {error.strerror}")

    def _incomplete(self, reason: str) -> "IncompleteCheckpointError":
        return IncompleteCheckpointError(f"checkpoint {str(self.path)!r} is not complete: {reason}")


def _state(found: os.stat_result) -> FileState:
    return found.st_ino, found.st_size, found.st_mtime_ns


def _declared_bytes(file: BinaryIO, size: int, name: str) -> int:
    """Return how long a safetensors file must be by its header; the least it must have if the header is cut off."""
    prefix = file.read(8)
    header_bytes = int.from_bytes(prefix, "little")
    if len(prefix) < 8:
        return 8
    check_limit(f"{name}: header size", header_bytes, MAX_HEADER_BYTES, "MAX_HEADER_BYTES")
    if size < 8 + header_bytes:
        return 8 + header_bytes
    header = load_json(file.read(header_bytes), f"{name} header")
    entries = header.values() if isinstance(header, dict) else ()
    try:
        ends = [int(entry["data_offsets"][1]) for entry in entries if "data_offsets" in entry]
    except (TypeError, ValueError, LookupError) as error:
        raise FormatError(f"{name}: data_offsets in its header are malformed") from error
    return 8 + header_bytes + max(ends, default=0)


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint folder, see ``CheckpointFolder.step``."""
    number = re.search(r"[0-9]+$", path.resolve().name)
    found: Any = None
    if number is not None:
        found = int(number[0])
    else:
        try:
            state = load_json((path / TRAINER_STATE).read_bytes(), TRAINER_STATE)
        except (OSError, FormatError):
            return None
        found = state.get("global_step") if isinstance(state, dict) else None
    return found if type(found) is int and 0 <= found < 2**53 else None


class _FolderTensors(LiveTensors):
    """The tensors of a checkpoint folder. Args: has_values: False if its values come with ``publish(weights=…)``."""

    def __init__(self, checkpoint: CheckpointFolder, has_values: bool, progress: Progress | None) -> None:
        self.tensors = {
            name: CheckpointTensor(name, spec.shape, TORCH_DTYPES[spec.dtype])
            for name, spec in checkpoint.specs.items()
        }
        self.aliases = {}
        self.has_values = has_values
        self._checkpoint, self._progress = checkpoint, progress

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._checkpoint.tensors(self._progress) if self.has_values else iter(())


@dataclass(frozen=True)
class PublishedCheckpoint:
    """What became of a checkpoint folder.

    Attributes:
        folder: its path. step: its step; None for an ``older`` one without a step of its own.
        outcome: ``published``; ``unchanged``: its weights equal those of the newest version; ``older``: its step is not
            after that of the newest version (only ``CheckpointWatcher``). The last two publish nothing.
        manifest: of the version that was published, otherwise of the newest version.
        seconds: that it took.
    """

    folder: Path
    step: int | None
    outcome: Literal["published", "unchanged", "older"]
    manifest: Manifest
    seconds: float = 0.0


class CheckpointPublisher:
    """Publishes checkpoint folders as versions of one run; the baseline is on disk (``Publisher(baseline="disk")``).

    The first checkpoint begins the run, as version 0, or takes the run over. Names, shapes and dtypes of its tensors
    are those of the run. With a base, version 0 of a new run is a reference to the base and the first checkpoint is
    version 1; floating-point tensors are rounded to the base's dtypes, and tensors that checkpoints lack keep the
    values of the base. All checkpoints of one publisher have the same tensors.

    Use it as a context manager, or ``close`` it. One thread at a time.

    Attributes:
        newest: manifest of the newest version; None if there is none yet.
    """

    def __init__(self, bucket: str, base: str | Path | None = None, **options: Any) -> None:
        """Read what the bucket holds; the first ``publish`` opens the run for writing.

        Args:
            bucket: URL of a run.
            base: checkpoint that servers start from: a folder, or a public model as ``org/name@revision``.
            options: of ``Publisher``, such as ``codec``, ``notice`` and ``signing_key``.

        Raises:
            As ``open_run``, except that there need not be a run.
        """
        self._url, self._base, self._options = bucket, base, options
        signing_key, trusted_keys = chosen_keys(options.get("signing_key"), options.get("trusted_keys"))
        self._keyring = Keyring.load(trusted_keys, signing_key)
        self._closing = ExitStack()
        self._publisher: Publisher | None = None
        self._specs: Mapping[str, TensorSpec] = {}
        self._run: Run | None = None
        self.newest: Manifest | None = None
        self._exists = True
        try:
            self.newest = self.run.reachable_head()[0]
        except NotFoundError:
            self._exists = False  # no run yet, or a start that ended before version 0

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
            step: its optimizer step; None means that of the folder, else one more than that of the newest version.
            sidecars: as ``Publisher.publish``; version 0 has none.

        Raises:
            TensorMismatchError: it has other tensors than the run. IncompleteCheckpointError: it is not complete, or
            was changed or deleted while it was read. Otherwise as ``CheckpointFolder``, ``Publisher`` and
            ``Publisher.publish``.
        """
        began = time.monotonic()
        if not isinstance(checkpoint, CheckpointFolder):
            checkpoint = CheckpointFolder(checkpoint)
        if step is None:
            step = checkpoint.step
        if step is None:
            step = 0 if self.newest is None else self.newest.step + 1
        if self._publisher is not None:
            _check_same_tensors(checkpoint, self._specs, "the checkpoint before it")
        try:
            published = False
            if self._publisher is None:
                self._publisher = self._open(checkpoint, step, progress)
                self._specs = checkpoint.specs
                # With a base, version 0 is the base.
                published = self._publisher.began and self._base is None
            publisher = self._publisher
            if not published:
                weights = checkpoint.tensors(progress)
                published = publisher.publish(step, True, weights, sidecars, skip_unchanged=True).version is not None
        except (UsageError, StoreError):
            # Other code that reads the folder does not know that it may be deleted.
            checkpoint.check_unchanged()
            raise
        publisher.flush()
        self.newest = self.run.manifest(publisher.version)
        outcome: Literal["published", "unchanged"] = "published" if published else "unchanged"
        return PublishedCheckpoint(checkpoint.path, step, outcome, self.newest, time.monotonic() - began)

    def close(self) -> None:
        """Finish the version in progress, and release everything. May be called twice.

        Raises:
            PublishError, ConflictError: the version could not be made durable.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closing.__exit__(kind, error, trace)

    def _open(self, checkpoint: CheckpointFolder, step: int, progress: Progress | None) -> Publisher:
        """Begin the run, with the checkpoint or the base as version 0, or take it over."""
        if self._exists and self._base is None:
            _check_same_tensors(checkpoint, {spec.name: spec for spec in self.run.table}, "the run")
        live = _FolderTensors(checkpoint, self._exists or self._base is None, progress)
        files = None if self._exists or not model_files(checkpoint.path) else checkpoint.path
        options = {"baseline": "disk", "first_step": step if self._base is None else 0, **self._options}
        publisher = self._closing.enter_context(Publisher(live, self._url, self._base, files=files, **options))
        if publisher.began:
            self._run = None  # it may be a start that ended before version 0
        return publisher


def _check_same_tensors(checkpoint: CheckpointFolder, specs: Mapping[str, TensorSpec], owner: str) -> None:
    """Raise TensorMismatchError unless a checkpoint has exactly these tensors. Args: owner: who has them."""
    what = f"checkpoint {str(checkpoint.path)!r}"
    remedy = "publish checkpoints of one model, or start a new run under a new URL"
    with_base = f"{remedy}; with a base, dtypes are rounded to the run's, and missing tensors keep its values"
    for name, spec in checkpoint.specs.items():
        known = specs.get(name)
        if known is None:
            raise TensorMismatchError(f"{what} has tensor {name[:120]!r}, which {owner} does not have; {remedy}")
        if known != spec:
            raise TensorMismatchError(
                f"{what}: tensor {name[:120]!r} is {spec.dtype} {list(spec.shape)}, but {known.dtype} "
                f"{list(known.shape)} in {owner}; {remedy if known.shape != spec.shape else with_base}"
            )
    missing = [name for name in specs if name not in checkpoint.specs]
    if missing:
        raise TensorMismatchError(
            f"{what} lacks tensor {missing[0][:120]!r}, which {owner} has ({len(missing)} in all); {with_base}"
        )


FolderState = tuple[tuple[str, FileState], ...]
"""Name and state of each file of a folder, by name."""


class CheckpointWatcher:
    """Publishes each complete checkpoint that appears as a subfolder of a folder, in the order of their steps.

    A checkpoint is complete when its safetensors files are, and no file in its folder has changed between two polls.
    Its step is ``CheckpointFolder.step``. Folders without one come after those that have one, in the order of their
    times, each with the step after the newest version's. Checkpoints whose step is not after the newest version's are
    not published, so a restart publishes nothing again.

    Attributes:
        refused: folder name → why its checkpoint cannot be published. Like one that is not complete, it is only logged,
            and tried again once a file in it changes.
    """

    def __init__(
        self, directory: str | Path, publisher: CheckpointPublisher, poll_seconds: float = POLL_SECONDS
    ) -> None:
        """Args: directory: holds the checkpoint folders.

        Raises:
            NotFoundError: there is no such folder.
        """
        self._directory, self._publisher, self._poll_seconds = Path(directory), publisher, poll_seconds
        if not self._directory.is_dir():
            raise NotFoundError(f"folder {str(directory)!r} does not exist; create it, or correct the path")
        self.refused: dict[str, str] = {}
        self._seen: dict[str, FolderState] = {}
        self._done: dict[str, FolderState] = {}
        self._at_start: set[str] | None = None
        self._recorded = self._time = self._recorded_time()

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
            time.sleep(self._poll_seconds)

    def _poll(self) -> Iterator[PublishedCheckpoint]:
        before, self._seen = self._seen, self._scan()
        self._done = {name: state for name, state in self._done.items() if name in self._seen}
        self.refused = {name: reason for name, reason in self.refused.items() if name in self._seen}
        if self._at_start is None:
            self._at_start = set(self._seen)
        ready: list[tuple[bool, int, int, str]] = []
        for name, state in self._seen.items():
            written = _written(state)
            if written is not None and before.get(name) == state and self._done.get(name) != state:
                step = step_of(self._directory / name)
                ready.append((step is None, step or 0, written, name))
        for without_step, step, written, name in sorted(ready):
            known = name in self._done
            result = self._publish(name, None if without_step else step, written)
            self._done[name] = self._seen[name]
            if result is not None and not (known and result.outcome == "older"):
                yield result

    def _publish(self, name: str, step: int | None, written: int) -> PublishedCheckpoint | None:
        """Publish a checkpoint that no longer changes; None if it is refused."""
        path, newest = self._directory / name, self._publisher.newest
        if newest is not None:
            at_start = self._at_start or ()
            if (name in at_start and written <= self._recorded) if step is None else step <= newest.step:
                return PublishedCheckpoint(path, step, "older", newest)
        newest_time = max(self._time, written if step is None else 0)
        sidecars = {SIDECAR: str(newest_time).encode()} if newest_time else None
        self.refused.pop(name, None)
        try:
            checkpoint = CheckpointFolder(path)
        except (DataError, ModelError, StoreError) as error:
            self._refuse(name, error)
            return None
        try:
            result = self._publisher.publish(checkpoint, step, sidecars)
        except (IncompleteCheckpointError, TensorMismatchError, ModelError) as error:
            self._refuse(name, error)
            return None
        self._time = newest_time
        return result

    def _refuse(self, name: str, error: DeltaSyncError) -> None:
        logger.warning("%s is not published: %s", name, error)
        if not isinstance(error, IncompleteCheckpointError | NotFoundError | StoreError):
            self.refused[name] = error.message

    def _scan(self) -> dict[str, FolderState]:
        """Return the state of each subfolder."""
        try:
            return {
                name: state
                for name in sorted(os.listdir(self._directory))
                if not name.startswith(".") and (state := _folder_state(self._directory / name)) is not None
            }
        except OSError as error:
            raise StoreError(f"folder {str(self._directory)!r} cannot be read: {error.strerror}") from error

    def _recorded_time(self) -> int:
        """Return the time that the newest version's sidecar records; 0 if there is none."""
        newest = self._publisher.newest
        if newest is None or all(item.name != SIDECAR for item in newest.sidecars):
            return 0
        text = self._publisher.run.sidecar(newest.version, SIDECAR).decode(errors="replace")
        return int(text) if re.fullmatch("[0-9]{1,30}", text) else 0


def _folder_state(path: Path) -> FolderState | None:
    """Return the state of a folder's files; None if it is no folder, or is deleted meanwhile."""
    try:
        files = [(entry.name, entry.stat()) for entry in os.scandir(path) if entry.is_file()]
    except (FileNotFoundError, NotADirectoryError):
        return None
    return tuple(sorted((name, _state(found)) for name, found in files))


def _written(state: FolderState) -> int | None:
    """Return when the newest safetensors file of a folder was written, in nanoseconds; None if it has none."""
    return max((modified for name, (_, _, modified) in state if name.endswith(".safetensors")), default=None)
