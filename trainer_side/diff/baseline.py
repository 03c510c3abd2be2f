"""``Baseline``: the bits of the newest published version, which the next version is compared with."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from trainer_side.diff.buffers import BaselineBuffer, BaselineLocation, DeviceBuffer, HostBuffer, HostSlab, move_buffer
from trainer_side.diff.memory_limits import MemoryLimits, MemoryUse
from trainer_side.diff.reader import host_bits
from trainer_side.model.live_tensors import LiveTensors, check_fits, own_spec, target_names
from vllm_delta_sync.errors import FingerprintError, FormatError, ModelError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.limits import CORRUPT
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.model_files import read_file
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.tensors.checkpoint import CONFIG_NAME, Checkpoint, read_small_file
from vllm_delta_sync.units import listed

logger = guarded_logger(__name__)


def new_run_tensors(
    live: LiveTensors, base: str | Path | None
) -> tuple[TensorTable, dict[str, list[str]], Checkpoint | None]:
    """Return a new run's tensors, live name → names in the run, and the base."""
    if base is None:
        names = target_names(live, None, "", bytes)
        specs = [own_spec(tensor) for name, tensor in live.tensors.items() if name not in live.excluded]
        remedy = "give it another name (rename=), or leave it out (exclude=)"
        checkpoint = None
    else:
        checkpoint = Checkpoint(base)
        try:
            names = target_names(live, checkpoint.specs, f"base {str(checkpoint.path)!r}", lambda: base_config(base))
        except TensorMismatchError as error:
            raise TensorMismatchError(
                f"{error.message}; give base= the checkpoint that the model was loaded from, and yield tensors under "
                "its names and in its shapes, without padding. If the model has tensors of its own that servers need, "
                "such as an untied output head or a resized embedding, leave base= out, and start servers with "
                "--load-format delta_sync; leave out those that servers do not need, such as a value head (of a "
                "module or gathered weights with exclude=)"
            ) from error
        specs = list(checkpoint.specs.values())
        remedy = f"give a base that has no such tensor in place of {str(checkpoint.path)!r}"
    try:
        table = TensorTable(specs)
    except FormatError as error:
        reason = error.message.removesuffix(CORRUPT)
        raise ModelError(f"no run can have this tensor: {reason}; {remedy}") from error
    live.unused = [name for name in live.excluded if not names[name]]
    if not len(table):
        raise ModelError("the model yields no tensor, and there is no base: nothing can be published")
    return table, names, checkpoint


def base_config(base: str | Path) -> bytes:
    """Return the config.json of a checkpoint directory, empty if it has none."""
    path = Path(base) / CONFIG_NAME
    return read_small_file(path) if os.path.lexists(path) else b""


def run_config(run: RunReader) -> bytes:
    """Return the config.json of a run, empty if it keeps none."""
    return read_file(run, CONFIG_NAME) if any(item.name == CONFIG_NAME for item in run.info.files) else b""


def names_in_run(live: LiveTensors, run: RunReader) -> dict[str, list[str]]:
    """Return live name → names in an existing run."""
    specs = {spec.name: spec for spec in run.table}
    try:
        names = target_names(live, specs, "the run that is to be resumed", lambda: run_config(run))
    except TensorMismatchError as error:
        raise TensorMismatchError(
            f"{error.message}; publish the model of this run, or start a new run under a new URL"
        ) from error
    live.unused = [name for name in live.excluded if not names[name]]
    return names


class Baseline:
    """Bits of each tensor of the run: as many bytes as the model has in the served dtypes.

    By ``location`` they are in host memory (in one piece, which is pinned if a live tensor is on a CUDA device), or in
    an unnamed temporary file that is mapped into memory, or on the device of the live tensor, where each moves at its
    first comparison.

    Attributes:
        location: where the bits are kept. ``device`` concerns live tensors on a device; others are on the host.
        table: the run's tensors. limits: of what a version may take beside the bits.
        targets_of: live tensor name (aliases included) → ids of the tensors that get its values.
        partial: ids of tensors of which other ranks hold the rest; no version carries them in full.
        suspect: the bits may be damaged, and are compared with what was published before the next comparison.
        cuda_devices: those that live tensors are on, as far as is known.
        fingerprints: per tensor id, of the newest durable version; empty before ``scan`` or ``replace``.
        first_difference: with a base: the first tensor whose bits differ from the base, None if none does.
    """

    def __init__(
        self,
        table: TensorTable,
        names: Mapping[str, list[str]],
        checkpoint: Checkpoint | None,
        partial: Collection[int] = (),
        location: BaselineLocation = "host",
    ) -> None:
        """Make a baseline without values, except those of the checkpoint; see ``captured`` and ``of_run``.

        Args:
            names: live tensor name → names in the table.
            partial: see the attribute.
        """
        self.location = location
        self.table = table
        self.targets_of = {name: tuple(table.index(target) for target in targets) for name, targets in names.items()}
        self.first_difference: str | None = None
        self.cuda_devices: set[torch.device] = set()
        self.suspect = False
        self.fingerprints: list[Fingerprint] = []
        self.partial = frozenset(partial)
        self.limits = MemoryLimits.of(table)
        self._checkpoint = checkpoint
        self._buffers: list[BaselineBuffer | None] = [None] * len(table)
        self._slab: HostSlab | None = None
        self._on_devices: set[int] = set()
        self._scrub_position = 0

    @classmethod
    def captured(cls, live: LiveTensors, base: str | Path | None = None, location: BaselineLocation = "host") -> Self:
        """Return the baseline of a new run, from the current values of the live tensors.

        Args:
            base: checkpoint directory; decides names and dtypes, and provides tensors that the model does not have.
        """
        table, names, checkpoint = new_run_tensors(live, base)
        baseline = cls(table, names, checkpoint, location=location)
        baseline.expect_on_devices(live)
        baseline.capture(live)
        if checkpoint is not None:
            baseline.warn_of_missing("base")
            baseline.compare(lambda tensor: checkpoint.bits(table[tensor].name), live.excluded)
        return baseline

    @classmethod
    def of_run(cls, live: LiveTensors, run: RunReader) -> Self:
        """Return the baseline of an existing run, still without values."""
        baseline = cls(run.table, names_in_run(live, run), None)
        baseline.expect_on_devices(live)
        baseline.warn_of_missing("run")
        return baseline

    def expect_on_devices(self, live: LiveTensors) -> None:
        """Learn which live tensors are on a device, to know before the first comparison what will be where."""
        there = [name for name, tensor in live.tensors.items() if tensor.device.type != "cpu"]
        self._on_devices = {tensor for name in there for tensor in self.targets_of.get(name, ())}
        self.cuda_devices = {live.tensors[name].device for name in there if live.tensors[name].device.type == "cuda"}

    def memory(self) -> MemoryUse:
        """Return the bytes of the bits, where they are once each tensor was compared."""
        host = device = 0
        for tensor, buffer in enumerate(self._buffers):
            if buffer is None or self._slab_place(tensor) is not None:
                continue
            moves = self.location == "device" and tensor in self._on_devices
            device += self.table[tensor].nbytes if moves or isinstance(buffer, DeviceBuffer) else 0
            host += 0 if moves or isinstance(buffer, DeviceBuffer) else self.table[tensor].nbytes
        slab = self._slab.nbytes if self._slab is not None else 0
        if self.location == "disk":
            return MemoryUse(host=host, device=device, disk=slab)
        pinned = self._slab is not None and (self._slab.pinned or (bool(self.cuda_devices) and self._slab.pinnable))
        return MemoryUse(host=host + (0 if pinned else slab), pinned=slab if pinned else 0, device=device)

    def buffer_on(self, tensor: int, device: torch.device) -> BaselineBuffer:
        """Return a tensor id's bits, moved to where a live tensor on ``device`` is compared; read from a base once."""
        buffer = self._buffers[tensor] or self._kept(tensor, self.read(tensor))
        if device.type == "cuda" and self.location == "host" and self._slab is not None:
            self._slab.pin(device)
        buffer = self._buffers[tensor] = move_buffer(buffer, self.table[tensor].name, device, self.location)
        return buffer

    def buffer(self, tensor: int) -> BaselineBuffer:
        """Return the bits of a tensor id at their present location; read from a base once."""
        return self._buffers[tensor] or self.buffer_on(tensor, torch.device("cpu"))

    def read(self, tensor: int) -> Bits:
        """Return (numel,) bits of a tensor id, read only; bits of a base are not kept in memory."""
        buffer = self._buffers[tensor]
        if buffer is not None:
            return buffer.read()
        if self._checkpoint is None:
            raise TensorMismatchError(f"tensor {self.table[tensor].name!r} has no values")
        return self._checkpoint.bits(self.table[tensor].name)

    def scan(self) -> None:
        """Fingerprint every tensor, those of the base included."""
        self.fingerprints = [self._measure(tensor) for tensor in range(len(self.table))]

    def replace(self, bits: list[Bits], expected: Fingerprint) -> None:
        """Replace all bits, by (numel,) bits per tensor id. Do not use the list afterwards: some arrays are kept.

        Raises:
            FingerprintError: they do not have the expected fingerprint; nothing was replaced.
        """
        fingerprints = self.fingerprints_of(bits)
        total = sum(fingerprints, Fingerprint())
        if total != expected:
            raise FingerprintError(f"weights have fingerprint {total.hex()}, the manifest says {expected.hex()}")
        self.write_all(bits, fingerprints)

    def fingerprints_of(self, bits: Sequence[Bits]) -> list[Fingerprint]:
        """Return the fingerprints of (numel,) bits per tensor id."""
        return [fingerprint_tensor(spec.name, bits[tensor]) for tensor, spec in enumerate(self.table)]

    def room(self, table: TensorTable) -> list[Bits]:
        """Return memory for the bits of a version, (numel,) per tensor, which ``replace`` then need not copy.

        For a baseline without values only. Args: table: of the run, or of the run that it branches from.
        """
        return [self._place(self.table.index(spec.name)) for spec in table]

    def write_all(self, bits: list[Bits], fingerprints: list[Fingerprint]) -> None:
        """As ``replace``, with fingerprints that the caller has checked."""
        for tensor, buffer in enumerate(self._buffers):
            if buffer is None:
                self._buffers[tensor] = self._kept(tensor, bits[tensor])
                # Otherwise a takeover would hold the model twice.
                bits[tensor] = np.empty(0, bits[tensor].dtype)
            else:
                buffer.write(bits[tensor])
        self.fingerprints = fingerprints
        self._checkpoint = None

    def repair(self, tensors: Iterable[int], bits: Sequence[Bits]) -> None:
        """Replace the bits of some tensors from (numel,) bits per tensor id of the current version.

        Raises:
            FingerprintError: a tensor there has another fingerprint than here; nothing was replaced.
        """
        wanted = list(tensors)
        for tensor in wanted:
            spec = self.table[tensor]
            if fingerprint_tensor(spec.name, bits[tensor]) != self.fingerprints[tensor]:
                raise FingerprintError(f"tensor {spec.name!r} in the bucket is not the one that was published")
        for tensor in wanted:
            self.buffer(tensor).write(bits[tensor])

    def next_scrub_slice(self, limit: int) -> list[int]:
        """Return the next tensors in rotation, until they have ``limit`` bytes; each at most once."""
        chosen: list[int] = []
        taken = 0
        while taken < limit and len(chosen) < len(self.table):
            chosen.append(self._scrub_position)
            taken += self.table[self._scrub_position].nbytes
            self._scrub_position = (self._scrub_position + 1) % len(self.table)
        return chosen

    def damaged(self, tensors: Iterable[int], changes: Mapping[int, Fingerprint]) -> list[int]:
        """Return those of ``tensors`` in memory whose bits differ from what was published.

        Args:
            changes: tensor id → what a pending delta has added to its fingerprint.
        """
        in_memory = [tensor for tensor in tensors if self._buffers[tensor] is not None]
        nothing = Fingerprint()
        return [i for i in in_memory if self._measure(i) != self.fingerprints[i] + changes.get(i, nothing)]

    def overwritten(self) -> list[str]:
        """Return the tensors read from a checkpoint whose file has changed since they were published."""
        from_checkpoint = [tensor for tensor, buffer in enumerate(self._buffers) if buffer is None]
        return [self.table[i].name for i in from_checkpoint if self._measure(i) != self.fingerprints[i]]

    def tensors(self, table: TensorTable | None = None) -> Iterator[tuple[str, Bits]]:
        """Yield (name, bits) of every tensor, or of those of a part of the table."""
        for spec in table or self.table:
            yield spec.name, self.read(self.table.index(spec.name))

    def capture(self, live: LiveTensors, fallback: Checkpoint | None = None) -> None:
        """Copy the current values of the live tensors; tensors that the model lacks come from ``fallback``."""
        captured: list[HostBuffer | None] = [None] * len(self.table)
        for name, tensor in live.read():
            for target in self.targets_of[name]:
                spec = self.table[target]
                buffer = captured[target]
                if buffer is None:
                    captured[target] = HostBuffer(host_bits(tensor, spec.dtype, self._place(target)))
                elif not np.array_equal(buffer.bits, host_bits(tensor, spec.dtype)):
                    raise TensorMismatchError(
                        f"tensor {name!r} is tied to {spec.name!r} but has other values; yield it once, untie it, or, "
                        "if one buffer is refilled for both, yield copies"
                    )
        self._buffers = [*captured]
        if fallback is not None:
            self._checkpoint = fallback

    def absent(self) -> list[str]:
        """Return the names of the run's tensors that the model does not have."""
        present = {target for targets in self.targets_of.values() for target in targets}
        return [spec.name for tensor, spec in enumerate(self.table) if tensor not in present]

    def warn_of_missing(self, source: str) -> None:
        """Log the run's tensors that the model does not have. Args: source: what provides them."""
        missing = self.absent()
        if missing:
            logger.warning(
                "%d of the %s's %d tensors are not in the model and keep the %s's values: %s",
                len(missing), source, len(self.table), source, listed(missing, 5),
            )  # fmt: skip

    def compare(self, base: Callable[[int], Bits], excluded: Iterable[str] = ()) -> None:
        """Set ``first_difference``.

        Args:
            base: returns the (numel,) bits that a tensor id has in the base.
            excluded: live names that must have these bits; see ``check_kept``.
        """
        kept = self._ids(excluded)
        self.check_kept([t for t in kept if not np.array_equal(self.read(t), base(t))], excluded)
        for tensor, buffer in enumerate(self._buffers):
            if buffer is not None and not np.array_equal(buffer.read(), base(tensor)):
                self.first_difference = self.table[tensor].name
                return

    def check_kept(self, changed: Iterable[int], excluded: Iterable[str]) -> None:
        """Raise TensorMismatchError if a changed tensor belongs to an excluded live name: servers keep the old bits."""
        for tensor in self._ids(excluded) & set(changed):
            raise TensorMismatchError(
                f"tensor {self.table[tensor].name!r} is left out by include= or exclude=, and its bits are not those "
                "that servers have; publish it too, or keep it as it is in the base (requires_grad_(False))"
            )

    def _ids(self, live_names: Iterable[str]) -> set[int]:
        return {tensor for name in live_names for tensor in self.targets_of.get(name, ())}

    def close(self) -> None:
        """Unpin host memory, which can still be read, and give up that of devices."""
        self._buffers = [None if isinstance(buffer, DeviceBuffer) else buffer for buffer in self._buffers]
        if self._slab is not None:
            self._slab.close()

    def _place(self, tensor: int) -> Bits:
        """Return the memory for the (numel,) bits of a tensor in host memory or on disk."""
        spec, place = self.table[tensor], self._slab_place(tensor)
        return np.empty(spec.numel, spec.element.uint) if place is None else place

    def _slab_place(self, tensor: int) -> Bits | None:
        """Return the place of a tensor in the slab; None if it gets memory of its own.

        With location ``device`` all do, which is free once the tensor has moved, and tensors that the model lacks: they
        are read from the base.
        """
        if self.location != "device" and self._slab is None:
            present = {target for targets in self.targets_of.values() for target in targets}
            on_disk = self.location == "disk"
            self._slab = HostSlab((self.table[i] for i in range(len(self.table)) if on_disk or i in present), on_disk)
        return None if self._slab is None else self._slab.places.get(self.table[tensor].name)

    def _kept(self, tensor: int, bits: Bits) -> HostBuffer:
        """Return a buffer with (numel,) bits: in their own memory if it is from ``room``, else a copy where needed."""
        place = self._slab_place(tensor)
        if place is None:
            return HostBuffer(_writable(bits))
        if place.ctypes.data != bits.ctypes.data:
            np.copyto(place, bits)
        return HostBuffer(place)

    def _measure(self, tensor: int) -> Fingerprint:
        return fingerprint_tensor(self.table[tensor].name, self.read(tensor))

    def match(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Turn (live name, detached tensor) into (live name, tensor id, detached tensor), one at a time."""
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen:
                raise TensorMismatchError(f"tensor {name!r} is yielded twice; each name must occur once")
            seen.add(name)
            targets = self.targets_of.get(name)
            if targets is None and name not in self.table:
                raise TensorMismatchError(
                    f"tensor {name[:120]!r} is not in this run's tensor table of {len(self.table)} tensors, such as "
                    f"{self.table[0].name!r}; yield it under its name in the checkpoint, or leave it out (for gathered "
                    "weights, rename= and exclude= do that)"
                )
            for target in (self.table.index(name),) if targets is None else targets:
                check_fits(name, tensor, self.table[target], "this run (a new one may have other shapes)")
                yield name, target, tensor


def _writable(bits: Bits) -> Bits:
    """Return the array itself if it is plain writable memory, else a copy."""
    plain = type(bits) is np.ndarray and bits.base is None and bits.flags.writeable and bits.flags.c_contiguous
    return bits if plain else np.array(bits)
