"""The bits of the newest published version, on the host: what the next version is diffed against."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch

from trainer_side.naming import CheckpointTensor, LiveTensors, check_plain, pairs
from vllm_delta_sync.checkpoint import Checkpoint
from vllm_delta_sync.errors import ModelError, TensorMismatchError
from vllm_delta_sync.torch_bits import TORCH_DTYPES, bits_of, dtype_name
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.dtypes import DTYPES
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

logger = logging.getLogger(__name__)


def host_bits(tensor: torch.Tensor, dtype: str) -> Bits:
    """Bit patterns of ``tensor`` rounded to ``dtype``, to nearest even.

    Args:
        tensor: of any shape, layout of strides, and device.
        dtype: safetensors name of the served dtype.

    Returns:
        (numel,) in row-major order. Shares memory with ``tensor`` where nothing had to be converted or
        copied: read it, never write it.
    """
    return bits_of(tensor.detach().to(TORCH_DTYPES[dtype]).contiguous().cpu())


class Baseline:
    """Bits per tensor of the run, host memory: as many bytes as the model has in the served dtypes.

    Attributes:
        table: the run's tensors.
        feeds: live tensor name (aliases included) → ids of the tensors that get its values.
        fingerprints: per tensor id, of version 0; empty before ``scan``.
        first_difference: with a base: the first tensor whose bits are not the base's, None if all are.
    """

    def __init__(self, live: LiveTensors, base: str | Path | None = None) -> None:
        """Capture the live tensors.

        Args:
            live: the model.
            base: checkpoint directory; decides names and dtypes, and holds what the model does not.

        Raises:
            NotFoundError, FormatError: the base cannot be read.
            TensorMismatchError: a live tensor is not in the base, or has another shape there.
            ModelError: a tensor cannot be published.
        """
        self._checkpoint = None if base is None else Checkpoint(base)
        names = _names(live, self._checkpoint)
        if self._checkpoint is None:
            self.table = TensorTable(_own_spec(tensor) for tensor in live.tensors.values())
        else:
            self.table = TensorTable(self._checkpoint.specs.values())
        if not len(self.table):
            raise ModelError("the model yields no tensor, and there is no base: nothing can be published")
        self.feeds = {name: tuple(self.table.index(target) for target in targets) for name, targets in names.items()}
        self._bits: list[Bits | None] = [None] * len(self.table)
        self.first_difference: str | None = None
        self._capture(live)
        self.fingerprints: list[Fingerprint] = []

    def bits(self, tensor: int) -> Bits:
        """Writable (numel,) bits of a tensor id; if the model did not give them, read from the base once."""
        bits = self._bits[tensor]
        if bits is None:
            bits = self._bits[tensor] = np.array(self.peek(tensor))
        return bits

    def peek(self, tensor: int) -> Bits:
        """The same bits, read only, without keeping those of the base in memory."""
        bits = self._bits[tensor]
        if bits is not None:
            return bits
        if self._checkpoint is None:
            raise TensorMismatchError(f"tensor {self.table[tensor].name!r} has no values")
        return self._checkpoint.bits(self.table[tensor].name)

    @property
    def fingerprint(self) -> Fingerprint:
        """Sum of ``fingerprints``."""
        return sum(self.fingerprints, Fingerprint())

    def scan(self) -> None:
        """Fingerprint every tensor, those of the base included."""
        self.fingerprints = [fingerprint_tensor(spec.name, self.peek(i)) for i, spec in enumerate(self.table)]

    def snapshot(self) -> Iterator[tuple[str, Bits]]:
        """(name, bits) of every tensor of the table."""
        for tensor, spec in enumerate(self.table):
            yield spec.name, self.peek(tensor)

    def _capture(self, live: LiveTensors) -> None:
        for name, tensor in live.read():
            for target in self.feeds[name]:
                spec = self.table[target]
                bits = host_bits(tensor, spec.dtype)
                held = self._bits[target]
                if held is None:
                    self._bits[target] = np.array(bits)
                elif not np.array_equal(held, bits):
                    raise TensorMismatchError(
                        f"tensor {name!r} is tied to {spec.name!r} but has other values; yield it once, or untie it"
                    )
        if self._checkpoint is not None:
            self._compare(self._checkpoint)

    def _compare(self, base: Checkpoint) -> None:
        kept = [spec.name for i, spec in enumerate(self.table) if self._bits[i] is None]
        if kept:
            logger.warning(
                "%d of the base's %d tensors are not in the model and keep the base's values: %s%s",
                len(kept), len(self.table), ", ".join(kept[:5]), " …" if len(kept) > 5 else "",
            )  # fmt: skip
        for spec, bits in zip(self.table, self._bits, strict=True):
            if bits is not None and not np.array_equal(bits, base.bits(spec.name)):
                self.first_difference = spec.name
                return

    def current(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, int, Bits]]:
        """Turn (live name, tensor) into (live name, tensor id, bits in the served dtype), one at a time.

        The bits are a private copy, good until the next are asked for.

        Raises:
            TensorMismatchError: a name that the run has not, a second time, or another shape or kind of dtype.
            ModelError: a tensor that cannot be read, see ``check_plain``. UsageError: not pairs.
        """
        seen: set[str] = set()
        scratch = np.empty(0, np.uint8)
        for name, value in pairs(tensors):
            if name in seen:
                raise TensorMismatchError(f"tensor {name!r} is yielded twice; each name must occur once")
            seen.add(name)
            tensor = check_plain(name, value)
            targets = self.feeds.get(name) or (self.table.index(name),)
            for target in targets:
                _check_fits(name, tensor, self.table[target])
                bits = host_bits(tensor, self.table[target].dtype)
                if bits.ctypes.data == tensor.data_ptr():
                    # Comparing reads more than once, and a trainer in another thread may write meanwhile.
                    if scratch.size < bits.nbytes:
                        scratch = np.empty(bits.nbytes, np.uint8)
                    private = scratch[: bits.nbytes].view(bits.dtype)
                    np.copyto(private, bits)
                    bits = private
                yield name, target, bits


def _names(live: LiveTensors, base: Checkpoint | None) -> dict[str, list[str]]:
    """Live name, aliases included → names in the run."""
    groups: dict[str, list[str]] = {name: [name] for name in live.tensors}
    for alias, owner in live.aliases.items():
        groups[owner].append(alias)
    names: dict[str, list[str]] = {}
    for owner, group in groups.items():
        targets = [owner] if base is None else [name for name in group if name in base.specs]
        if base is not None:
            _check_base(live.tensors[owner], targets, base)
        names.update(dict.fromkeys(group, targets))
    return names


def _check_base(tensor: CheckpointTensor, targets: list[str], base: Checkpoint) -> None:
    if not targets:
        raise TensorMismatchError(
            f"tensor {tensor.name!r} of the model is not among the {len(base.specs)} tensors of base "
            f"{str(base.path)!r}; give the checkpoint that the model was loaded from, or none"
        )
    for name in targets:
        spec = base.specs[name]
        if spec.shape != tensor.shape:
            raise TensorMismatchError(
                f"tensor {name!r} is {spec.dtype} {list(spec.shape)} in base {str(base.path)!r}, but "
                f"{tensor.dtype} {list(tensor.shape)} in the model"
            )
        _check_convertible(tensor.name, tensor.dtype, spec, f"in base {str(base.path)!r}")
        if spec.element.is_float and spec.element.itemsize == 1 and tensor.dtype != TORCH_DTYPES[spec.dtype]:
            raise ModelError(
                f"tensor {name!r} is {spec.dtype} in base {str(base.path)!r} and needs scales that "
                f"{tensor.dtype} weights do not give; use a base in full precision"
            )


def _check_fits(name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    if tuple(tensor.shape) != spec.shape:
        raise TensorMismatchError(
            f"tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, but {spec.name!r} is {spec.dtype} "
            f"{list(spec.shape)} in this run; start a new run"
        )
    _check_convertible(name, tensor.dtype, spec, "in this run")


def _check_convertible(name: str, dtype: torch.dtype, spec: TensorSpec, where: str) -> None:
    """Raise TensorMismatchError unless rounding takes ``dtype`` to the spec's: integers and scales would wrap."""
    given = dtype_name(dtype, name)
    if given == spec.dtype or (DTYPES[given].is_float and spec.element.is_float):
        return
    raise TensorMismatchError(
        f"tensor {name!r} is {dtype}, but {spec.name!r} is {spec.dtype} {where}, and only floating-point weights are "
        f"converted; give it as {TORCH_DTYPES[spec.dtype]}"
    )


def _own_spec(tensor: CheckpointTensor) -> TensorSpec:
    own = dtype_name(tensor.dtype, tensor.name)
    # torch calls the scales of F8_E8M0 floating-point, but no rounding takes them to the model's dtype.
    if tensor.configured is not None and DTYPES[own].is_float:
        own = dtype_name(tensor.configured, tensor.name)
    return TensorSpec(tensor.name, own, tensor.shape)
