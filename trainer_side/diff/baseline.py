"""The bits of the newest published version: what the next version is diffed against."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import numpy as np
import torch

from trainer_side.diff.buffers import BaselineBuffer, HostBuffer, Place, placed
from trainer_side.diff.reader import host_bits
from trainer_side.model.matching import check_fits, own_spec, target_names
from trainer_side.model.sources import LiveTensors, check_plain, pairs
from vllm_delta_sync.errors import FingerprintError, ModelError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.checkpoint import Checkpoint

logger = guarded_logger(__name__)


def new_run_tensors(
    live: LiveTensors, base: str | Path | None
) -> tuple[TensorTable, dict[str, list[str]], Checkpoint | None]:
    """Tensors of a new run, which of them each live tensor is, and the base; raises as ``Baseline.captured``."""
    if base is None:
        names = target_names(live, None, "")
        table = TensorTable(own_spec(tensor) for tensor in live.tensors.values())
        checkpoint = None
    else:
        checkpoint = Checkpoint(base)
        where = f"base {str(checkpoint.path)!r}; give the checkpoint that the model was loaded from, or none"
        names = target_names(live, checkpoint.specs, where)
        table = TensorTable(checkpoint.specs.values())
    if not len(table):
        raise ModelError("the model yields no tensor, and there is no base: nothing can be published")
    return table, names, checkpoint


def names_in_run(live: LiveTensors, table: TensorTable) -> dict[str, list[str]]:
    """Which tensors of a run each live tensor is; raises as ``Baseline.of_run``."""
    specs = {spec.name: spec for spec in table}
    try:
        return target_names(live, specs, "the run that is to be resumed")
    except TensorMismatchError as error:
        raise TensorMismatchError(
            f"{error.message}; publish the model that the run is of, or start a new run under a new URL"
        ) from error


class Baseline:
    """Bits per tensor of the run: as many bytes as the model has in the served dtypes.

    They are in host memory (pinned where the live tensor is on a CUDA device), or by ``place`` on the device of the
    live tensor, where each goes when it is compared first.

    Attributes:
        place: where bits lie whose live tensor is on a device; a tensor on the host is compared on the host.
        table: the run's tensors.
        feeds: live tensor name (aliases included) → ids of the tensors that get its values.
        fingerprints: per tensor id, of the newest durable version; empty before ``scan`` or ``take``.
        first_difference: with a base: the first tensor whose bits are not the base's, None if all are.
    """

    def __init__(self, table: TensorTable, names: Mapping[str, list[str]], checkpoint: Checkpoint | None) -> None:
        """No tensor has values yet, except those of the checkpoint; see ``captured`` and ``of_run``."""
        self.place: Place = "host"
        self.table = table
        self.feeds = {name: tuple(table.index(target) for target in targets) for name, targets in names.items()}
        self.first_difference: str | None = None
        self.fingerprints: list[Fingerprint] = []
        self._checkpoint = checkpoint
        self._held: list[BaselineBuffer | None] = [None] * len(table)
        self._turn = 0

    @classmethod
    def captured(cls, live: LiveTensors, base: str | Path | None = None) -> Self:
        """The live tensors of this moment, of a new run.

        Args:
            live: the model.
            base: checkpoint directory; decides names and dtypes, and holds what the model does not.

        Raises:
            NotFoundError, FormatError: the base cannot be read.
            TensorMismatchError: a live tensor is not in the base, or has another shape there.
            ModelError: a tensor cannot be published.
        """
        table, names, checkpoint = new_run_tensors(live, base)
        baseline = cls(table, names, checkpoint)
        baseline.capture(live)
        if checkpoint is not None:
            baseline._warn_of_kept("base")
            baseline._compare(checkpoint)
        return baseline

    @classmethod
    def of_run(cls, live: LiveTensors, table: TensorTable) -> Self:
        """Of a run that is there already, still without values.

        Raises:
            TensorMismatchError, ModelError: a live tensor does not fit into the run.
        """
        baseline = cls(table, names_in_run(live, table), None)
        baseline._warn_of_kept("run")
        return baseline

    def hold(self, tensor: int, device: torch.device) -> BaselineBuffer:
        """Bits of a tensor id, placed to be compared with a live tensor on ``device``; read from a base once.

        Raises:
            TensorMismatchError: nothing gave them. ModelError: the device's memory is full.
        """
        held = self._held[tensor] or HostBuffer(np.array(self.peek(tensor)))
        held = self._held[tensor] = placed(held, self.table[tensor].name, device, self.place)
        return held

    def held(self, tensor: int) -> BaselineBuffer:
        """Bits of a tensor id where they are; read from a base once."""
        return self._held[tensor] or self.hold(tensor, torch.device("cpu"))

    def bits(self, tensor: int) -> Bits:
        """(numel,) bits of a tensor id in host memory; the baseline itself if it lies there, else a copy."""
        return self.held(tensor).read()

    def peek(self, tensor: int) -> Bits:
        """The same bits, read only, without keeping those of the base in memory.

        Raises:
            TensorMismatchError: neither the model nor a base gave them.
        """
        held = self._held[tensor]
        if held is not None:
            return held.read()
        if self._checkpoint is None:
            raise TensorMismatchError(f"tensor {self.table[tensor].name!r} has no values")
        return self._checkpoint.bits(self.table[tensor].name)

    @property
    def fingerprint(self) -> Fingerprint:
        """Sum of ``fingerprints``."""
        return sum(self.fingerprints, Fingerprint())

    def scan(self) -> None:
        """Fingerprint every tensor, those of the base included."""
        self.fingerprints = [self._measure(tensor) for tensor in range(len(self.table))]

    def take(self, bits: Sequence[Bits], expected: Fingerprint) -> None:
        """Hold other bits, (numel,) per tensor id. They are moved where none is held; do not use them any more.

        Raises:
            FingerprintError: they do not have the expected fingerprint; nothing was taken.
        """
        fingerprints = self.measured(bits)
        reached = sum(fingerprints, Fingerprint())
        if reached != expected:
            raise FingerprintError(f"weights have fingerprint {reached.hex()}, the manifest says {expected.hex()}")
        self._replace(bits, fingerprints)

    def measured(self, bits: Sequence[Bits]) -> list[Fingerprint]:
        """Fingerprints of (numel,) bits per tensor id."""
        return [fingerprint_tensor(spec.name, bits[tensor]) for tensor, spec in enumerate(self.table)]

    def _replace(self, bits: Sequence[Bits], fingerprints: list[Fingerprint]) -> None:
        for tensor, held in enumerate(self._held):
            if held is None:
                self._held[tensor] = HostBuffer(_own(bits[tensor]))
            else:
                held.write(bits[tensor])
        self.fingerprints = fingerprints
        self._checkpoint = None

    def mend(self, tensors: Iterable[int], bits: Sequence[Bits]) -> None:
        """Take single tensors from (numel,) bits per tensor id, which are those of the version held.

        Raises:
            FingerprintError: a tensor there has another fingerprint than here; nothing was taken.
        """
        wanted = list(tensors)
        for tensor in wanted:
            spec = self.table[tensor]
            if fingerprint_tensor(spec.name, bits[tensor]) != self.fingerprints[tensor]:
                raise FingerprintError(f"tensor {spec.name!r} in the bucket is not the one that was published")
        for tensor in wanted:
            self.held(tensor).write(bits[tensor])

    def share(self, limit: int) -> list[int]:
        """The next tensors in turn, up to the one with which they have ``limit`` bytes, each at most once."""
        chosen: list[int] = []
        held = 0
        while held < limit and len(chosen) < len(self.table):
            chosen.append(self._turn)
            held += self.table[self._turn].nbytes
            self._turn = (self._turn + 1) % len(self.table)
        return chosen

    def damaged(self, tensors: Iterable[int], changes: Mapping[int, Fingerprint]) -> list[int]:
        """Those of ``tensors`` in memory whose bits are not what was published.

        Args:
            changes: tensor id → what an open patch has added to its fingerprint.
        """
        held = [tensor for tensor in tensors if self._held[tensor] is not None]
        nothing = Fingerprint()
        return [i for i in held if self._measure(i) != self.fingerprints[i] + changes.get(i, nothing)]

    def overwritten(self) -> list[str]:
        """Names of the tensors that are read from a checkpoint whose bits are no longer those that were published."""
        lent = [tensor for tensor, held in enumerate(self._held) if held is None]
        return [self.table[i].name for i in lent if self._measure(i) != self.fingerprints[i]]

    def tensors(self, table: TensorTable | None = None) -> Iterator[tuple[str, Bits]]:
        """(name, bits) of every tensor, or of those of a part of the table."""
        for spec in table or self.table:
            yield spec.name, self.peek(self.table.index(spec.name))

    def capture(self, live: LiveTensors, rest: Checkpoint | None = None) -> None:
        """Hold the live tensors of this moment; what the model does not hold comes from ``rest``, if that is given.

        Raises:
            TensorMismatchError: tied tensors differ, or the model is not the one it was.
        """
        captured: list[HostBuffer | None] = [None] * len(self.table)
        for name, tensor in live.read():
            for target in self.feeds[name]:
                spec = self.table[target]
                bits = host_bits(tensor, spec.dtype)
                held = captured[target]
                if held is None:
                    captured[target] = HostBuffer(bits)
                elif not np.array_equal(held.bits, bits):
                    raise TensorMismatchError(
                        f"tensor {name!r} is tied to {spec.name!r} but has other values; yield it once, or untie it"
                    )
        self._held = [*captured]
        if rest is not None:
            self._checkpoint = rest

    def absent(self) -> list[str]:
        """Names of the tensors that the model does not hold."""
        fed = {target for targets in self.feeds.values() for target in targets}
        return [spec.name for tensor, spec in enumerate(self.table) if tensor not in fed]

    def _warn_of_kept(self, whose: str) -> None:
        kept = self.absent()
        if kept:
            logger.warning(
                "%d of the %s's %d tensors are not in the model and keep the %s's values: %s%s",
                len(kept), whose, len(self.table), whose, ", ".join(kept[:5]), " …" if len(kept) > 5 else "",
            )  # fmt: skip

    def _compare(self, base: Checkpoint) -> None:
        for spec, held in zip(self.table, self._held, strict=True):
            if held is not None and not np.array_equal(held.read(), self._of_base(spec, base)):
                self.first_difference = spec.name
                return

    def _of_base(self, spec: TensorSpec, base: Checkpoint) -> Bits:
        return base.bits(spec.name)

    def sent_in_full(self, tensor: int) -> bool:
        """Whether a version may carry all bits of a tensor rather than what changed."""
        return True

    def _measure(self, tensor: int) -> Fingerprint:
        return fingerprint_tensor(self.table[tensor].name, self.peek(tensor))

    def current(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Turn (live name, tensor) into (live name, tensor id, detached tensor), one at a time.

        Raises:
            TensorMismatchError: a name that the run has not, a second time, or another shape or kind of dtype.
            ModelError: a tensor that cannot be read, see ``check_plain``. UsageError: not pairs.
        """
        seen: set[str] = set()
        for name, value in pairs(tensors):
            if name in seen:
                raise TensorMismatchError(f"tensor {name!r} is yielded twice; each name must occur once")
            seen.add(name)
            tensor = check_plain(name, value)
            for target in self.feeds.get(name) or (self.table.index(name),):
                check_fits(name, tensor, self.table[target])
                yield name, target, tensor


def _own(bits: Bits) -> Bits:
    """The array itself if it is plain memory that may be written, else a copy."""
    plain = type(bits) is np.ndarray and bits.base is None and bits.flags.writeable and bits.flags.c_contiguous
    return bits if plain else np.array(bits)
