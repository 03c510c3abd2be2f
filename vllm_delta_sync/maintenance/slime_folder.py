"""``SlimeFolder`` follows a run as slime's folders, ``DIR/weight_v000007/``, which SGLang, miles, Stitch and vime read.

The number is that of the version in the run. A folder appears whole under its name. The first one is a whole
checkpoint; so is one after a gap in the versions, or once the deltas since the last whole one have as many bytes as the
model, so that a new reader never reads more than twice the model. All others are deltas on the version before
(``codec.slime``).

The weights of the newest version are in memory, or in an unnamed file in the temporary directory, where each step is
applied in place. After a restart they are rebuilt from the run.
"""

import json
import os
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from vllm_delta_sync.client import Run, Version
from vllm_delta_sync.codec.slime import CHECKSUM, FOLDER, XOR, SlimeIndex, checksum, decode, encode_xor, folder_name
from vllm_delta_sync.errors import ChainError, DataError, FingerprintError, UnsupportedError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.checkpoint_files import WeightFiles
from vllm_delta_sync.maintenance.export import ExportRecord, read_record
from vllm_delta_sync.maintenance.follow_folder import OBJECTS, FollowedFolder
from vllm_delta_sync.run.model_files import write_file
from vllm_delta_sync.run.read_plan import ReadPlanner, Step
from vllm_delta_sync.run.restore import Progress, apply_step, restore
from vllm_delta_sync.tensors.changes import BaseTensor, Changes
from vllm_delta_sync.tensors.checkpoint import INDEX_NAME
from vllm_delta_sync.tensors.state import HeldPieces, ModelState, apply_changes

logger = guarded_logger(__name__)

FILE_BYTES = 256 * 1024**2
"""Of compressed changes in one file of a delta: readers hold whole files in memory."""
MAX_BEHIND = 64
"""Versions that are written one by one; further behind, the newest is written as a whole checkpoint."""


class SlimeFolder(FollowedFolder):
    """Args: whole: write each version as a whole checkpoint."""

    foreign = "current"

    def __init__(
        self, path: Path, base: str | Path | None, shard_bytes: int, keep: int, progress: Progress | None, whole: bool
    ) -> None:
        super().__init__(path, base, shard_bytes, keep, progress)
        self._whole = whole
        self._held: tuple[str, ModelState] | None = None  # digest of a manifest, and the weights of its version
        # Bytes of each folder that is a delta, 0 of a whole checkpoint: there may be thousands, which do not change.
        self._delta_bytes: dict[Path, int] = {}

    @property
    def _restart(self) -> str:
        return "follow into another folder: readers of this one take higher numbers only"

    def _check_continues(
        self, run: Run, folder: Path, record: ExportRecord, target: Manifest, version: Version
    ) -> None:
        super()._check_continues(run, folder, record, target, version)
        if target.version < record.version:
            raise ChainError(
                f"{version!r} leads back from version {record.version} to {target.version}, and readers of slime's "
                "folders take higher numbers only; publish the old weights again (Publisher.rebase), which gives them "
                "a new number, or follow into another folder"
            )

    def _make(
        self, run: Run, current: tuple[Path, ExportRecord] | None, target: Manifest
    ) -> tuple[Path, int, list[str]]:
        if any(spec.name.startswith(DRAFT_PREFIX) for spec in run.table):
            raise UnsupportedError(
                f"run {run.info.run} has the weights of a draft of its own, and slime's folders hold one model; follow "
                "it with --format checkpoint"
            )
        read_bytes = 0
        try:
            for step in [] if current is None else self._steps(run, current[1], target):
                read_bytes += self._write_delta(run, step)
        except DataError as error:
            logger.info("version %d is written as a whole checkpoint: %s", target.version, error.message)
        if (made := self._current()) is None or made[1].manifest != target.digest:
            read_bytes += self._write_whole(run, target, self._weights(run, target))
        shutil.rmtree(self._work / OBJECTS, ignore_errors=True)
        self._remove_old()
        return self.path / folder_name(target.version), read_bytes, []

    # What is there

    def _remove(self, folders: list[Path]) -> None:
        super()._remove(folders)
        for folder in folders:
            self._delta_bytes.pop(folder, None)

    def _folders(self) -> list[tuple[int, Path]]:
        """Return number and path of each version, the oldest first. A folder that has lost its index is none."""
        found = [(int(match[1]), path) for path in self.path.iterdir() if (match := FOLDER.fullmatch(path.name))]
        return sorted((number, path) for number, path in found if (path / INDEX_NAME).is_file())

    def _current(self) -> tuple[Path, ExportRecord] | None:
        for _, folder in reversed(self._folders()):
            if (record := read_record(folder)) is not None and record.manifest:
                return folder, record
        return None

    def _newest_whole(self, folders: list[tuple[int, Path]]) -> int:
        """Return the place of the newest whole checkpoint in a list of ``_folders``; 0 if there is none."""
        for _, folder in folders:
            if folder not in self._delta_bytes:
                self._delta_bytes[folder] = _delta_bytes(folder)
        return max((place for place, (_, folder) in enumerate(folders) if not self._delta_bytes[folder]), default=0)

    def _remove_old(self) -> None:
        """Remove what is not needed to rebuild the newest ``keep`` versions."""
        folders = self._folders()
        oldest = self._newest_whole(folders[: max(1, len(folders) - self._keep + 1)])
        self._remove([folder for _, folder in folders[:oldest]])

    # A version

    def _steps(self, run: Run, record: ExportRecord, target: Manifest) -> list[Step]:
        """Return one step for each version after the current one; none if the target has to be a whole checkpoint.

        Raises:
            DataError: a document is missing or damaged.
        """
        start, end = record.version, target.version
        if self._whole or end - start > MAX_BEHIND:
            return []
        if run.ancestors.digest(end, target.digest, start) != record.manifest:
            return []
        planner = ReadPlanner(run)
        planner.add_manifests(target)
        found: list[Step] = []
        for number in range(start + 1, end + 1):
            steps = planner.path(number - 1, number)
            # A version that the gate refused is never offered, and the next one holds its changes too.
            if len(steps) != 1 or (number < end and run.manifest(number).quarantine is not None):
                return []
            found += steps
        return found

    def _weights(self, run: Run, manifest: Manifest) -> tuple[ModelState, int]:
        """Return the weights of a version, and the bytes read for them."""
        held, self._held = self._held, None  # dropped if what follows fails, since it may be half applied
        if held is not None and held[0] == manifest.digest:
            return held[1], 0
        restored = restore(run, manifest, self._base, progress=self._progress)
        return restored.state, restored.plan.bytes

    def _write_delta(self, run: Run, step: Step) -> int:
        """Write the version that a step leads to, which follows the newest folder; return the bytes read."""
        manifest = run.manifest(step.end)
        state, read_bytes = self._weights(run, run.manifest(step.start))
        new = self._fresh()
        weights = _RecordedWeights(state, new)
        apply_step(step, weights, in_pieces=True)
        if state.fingerprint != manifest.model_fingerprint:
            raise FingerprintError(f"version {step.end} has another fingerprint than its manifest declares")
        read_bytes += step.payload_bytes
        size = weights.finish(step.start, step.end)
        folders = self._folders()
        since = sum(self._delta_bytes[folder] for _, folder in folders[self._newest_whole(folders) :])
        if since + size > run.table.full_bytes:
            return read_bytes + self._write_whole(run, manifest, (state, 0))
        self._publish(new, manifest, state)
        return read_bytes

    def _write_whole(self, run: Run, manifest: Manifest, weights: tuple[ModelState, int]) -> int:
        """Write a version as a whole checkpoint; return the bytes read for it."""
        state, read_bytes = weights
        new = self._fresh()
        files = WeightFiles(run.table, self._shard_bytes)
        for place, bits in zip(files.create(new), state.bits, strict=True):
            place[:] = bits
        files.finish(new)
        index = {
            # Stitch reads the version from here.
            "metadata": {"total_size": run.table.full_bytes, "version": f"{manifest.version:06d}"},
            "weight_map": {spec.name: files.shard_of[tensor] for tensor, spec in enumerate(run.table)},
        }
        write_file(new / INDEX_NAME, json.dumps(index, indent=2, sort_keys=True).encode())
        self._write_model_files(run, new)
        self._publish(new, manifest, state)
        return read_bytes

    def _publish(self, new: Path, manifest: Manifest, state: ModelState) -> None:
        """Give a finished folder its name."""
        folder = self.path / folder_name(manifest.version)
        self._remove([folder] if folder.exists() else [])  # what is left of one that has lost its index
        self._finish(new, manifest, folder)
        self._held = manifest.digest, state


class _RecordedWeights:
    """Weights that record each tensor that a step changes, as files of a delta: a ``run.restore.StepTarget``.

    Args:
        state: moved by the step. folder: gets the files.
    """

    def __init__(self, state: ModelState, folder: Path) -> None:
        self._state, self._folder = state, folder
        self._table: TensorTable = state.table
        self._before: tuple[int, np.ndarray] | None = None  # the tensor that is being changed, and its bytes before
        self._frames: dict[str, np.ndarray] = {}
        self._files: list[list[str]] = []

    @property
    def fingerprint(self) -> Fingerprint:
        return self._state.fingerprint

    def base_tensor(self, tensor: int) -> BaseTensor:
        return self._state.base_tensor(tensor)

    def apply(self, changes: Changes) -> None:
        apply_changes(changes, self._table, self._writable, self._state.fingerprints)
        self._end_tensor()
        # A tensor is in one call only.
        if sum(frame.size for frame in self._frames.values()) >= FILE_BYTES:
            self._write()

    def finish(self, base: int, version: int) -> int:
        """Write the last file and the index; return the bytes of all files."""
        if self._frames:
            self._write()
        places: dict[str, str] = {}
        for number, names in enumerate(self._files, 1):
            name = f"model-{number:05d}-of-{len(self._files):05d}.safetensors"
            os.rename(self._folder / _part(number), self._folder / name)
            places |= dict.fromkeys(names, name)
        write_file(self._folder / INDEX_NAME, SlimeIndex(version, base, XOR, CHECKSUM, places).to_bytes())
        return _size(self._folder)

    def _writable(self, tensor: int) -> HeldPieces:
        if self._before is None or self._before[0] != tensor:
            self._end_tensor()
            before = self._bytes(tensor).copy()
            if (frame := self._frames.get(self._table[tensor].name)) is not None:  # changed by another object, too
                before = decode(XOR, frame, before, self._table[tensor].name)
            self._before = tensor, before
        return ((None, self._state.bits[tensor]),)

    def _end_tensor(self) -> None:
        if self._before is not None:
            tensor, before = self._before
            name, self._before = self._table[tensor].name, None
            frame = encode_xor(before, self._bytes(tensor))
            self._frames.pop(name, None)
            if frame is not None:
                self._frames[name] = np.frombuffer(frame, np.uint8)

    def _bytes(self, tensor: int) -> np.ndarray:
        return self._state.bits[tensor].view(np.uint8)

    def _write(self) -> None:
        sums = {name: checksum(CHECKSUM, self._bytes(self._table.index(name))) for name in self._frames}
        self._files.append(sorted(self._frames))
        write_file(self._folder / _part(len(self._files)), save(self._frames, metadata=sums))
        self._frames = {}


def _part(number: int) -> str:
    return f"part-{number}"


def _delta_bytes(folder: Path) -> int:
    index = SlimeIndex.from_bytes((folder / INDEX_NAME).read_bytes(), INDEX_NAME)
    return 0 if index is None else _size(folder)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())
