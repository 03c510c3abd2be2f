"""``ModelState``: all tensors of one version in memory; each move to another version is checked by fingerprint."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import BaseTensor, Bits, apply_distances
from vllm_delta_sync.tensors.changes import Changes, Sparse

_ALIGNMENT = 64

AllocateBits = Callable[[TensorTable], Sequence[Bits]]
"""Allocates a model's bits: tensor table → per tensor id, flat (numel,) writable unsigned bits."""


class ModelState:
    """A model as bit patterns.

    Attributes:
        table: the run's tensors.
        bits: per tensor id, flat (numel,) writable unsigned bits.
        fingerprints: per tensor id.

    Args:
        allocate: returns the memory for the bits; None means one array per tensor.

    Raises:
        TensorMismatchError: a tensor is missing, unknown or of another size. Also the errors of ``allocate``.
    """

    def __init__(
        self,
        table: TensorTable,
        tensors: Iterable[tuple[str, Bits]],
        allocate: AllocateBits | None = None,
    ) -> None:
        self.table = table
        places = None if allocate is None else allocate(table)
        found: dict[int, Bits] = {}
        for name, bits in tensors:
            spec = table.by_name(name)
            if bits.dtype != spec.element.uint or bits.size != spec.numel:
                raise TensorMismatchError(f"tensor {name!r} has {bits.size} elements of {bits.dtype}, not {spec}")
            tensor = table.index(name)
            if places is None:
                found[tensor] = np.array(bits)
            else:
                found[tensor] = places[tensor]
                found[tensor][:] = bits
        if len(found) != len(table):
            missing = next(spec.name for i, spec in enumerate(table) if i not in found)
            raise TensorMismatchError(f"tensor {missing!r} is missing")
        self.bits = [found[i] for i in range(len(table))]
        self.fingerprints = [fingerprint_tensor(spec.name, self.bits[i]) for i, spec in enumerate(table)]

    @property
    def fingerprint(self) -> Fingerprint:
        """Of the whole model."""
        total = Fingerprint()
        for value in self.fingerprints:
            total += value
        return total

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Return a view of a tensor's current bits; a ``BaseLookup`` for a delta that builds on this version."""
        return BaseTensor(self.bits[tensor])

    def apply(self, changes: Changes) -> None:
        """Move to another version in place.

        Raises:
            FingerprintError: a tensor does not have the declared fingerprint; the state is then unusable.
        """
        measured: dict[int, Fingerprint] = {}
        for group in changes.sparse:
            for tensor, change in self._apply_sparse(group):
                measured[tensor] = measured.get(tensor, Fingerprint()) + change
        for full in changes.full:
            before = self.fingerprints[full.id]
            self.bits[full.id][:] = full.bits
            measured[full.id] = fingerprint_tensor(self.table[full.id].name, self.bits[full.id]) - before
        for tensor, declared in changes.fingerprints.items():
            if measured.get(tensor) != declared:
                raise FingerprintError(
                    f"tensor {self.table[tensor].name!r} does not have the declared fingerprint after the change: "
                    "the object is damaged, or was made against other weights"
                )
            self.fingerprints[tensor] += declared

    def _apply_sparse(self, group: Sparse) -> Iterable[tuple[int, Fingerprint]]:
        for tensor, positions, data in group.tensors():
            bits = self.bits[tensor]
            before = bits[positions]
            if group.relative:
                apply_distances(group.element, bits, positions, data)
            else:
                bits[positions] = data
            yield tensor, fingerprint_change(self.table[tensor].name, positions, before, bits[positions])


def contiguous_buffer(allocate: Callable[[int], np.ndarray]) -> AllocateBits:
    """Put all tensors, aligned, into one buffer. Args: allocate: number of bytes → (bytes,) uint8 array."""

    def place(table: TensorTable) -> list[Bits]:
        starts = []
        end = 0
        for spec in table:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            starts.append(end)
            end += spec.nbytes
        memory = allocate(end)
        return [
            memory[start : start + spec.nbytes].view(spec.element.uint)
            for start, spec in zip(starts, table, strict=True)
        ]

    return place
