"""All tensors of one version in memory, moved from version to version with the fingerprint checked each time."""

from collections.abc import Callable, Iterable

import numpy as np

from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.wire.bits import Bits, apply_distances
from vllm_delta_sync.wire.changes import Changes, Sparse
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.wire.old import OldTensor
from vllm_delta_sync.wire.table import TensorTable

_ALIGNMENT = 64


class ModelState:
    """A model as bit patterns.

    Attributes:
        table: the run's tensors.
        bits: per tensor id, flat (numel,) writable unsigned bits.
        fingerprints: per tensor id.

    Args:
        allocate: gives the memory that all bits lie in, a (bytes,) uint8 array; None: each tensor has its own.

    Raises:
        TensorMismatchError: a tensor is missing, unknown or of another size. Whatever ``allocate`` raises.
    """

    def __init__(
        self,
        table: TensorTable,
        tensors: Iterable[tuple[str, Bits]],
        allocate: Callable[[int], np.ndarray] | None = None,
    ) -> None:
        self.table = table
        room = None if allocate is None else _Room(allocate, table)
        found: dict[int, Bits] = {}
        for name, bits in tensors:
            spec = table.by_name(name)
            if bits.dtype != spec.element.uint or bits.size != spec.numel:
                raise TensorMismatchError(f"tensor {name!r} has {bits.size} elements of {bits.dtype}, not {spec}")
            tensor = table.index(name)
            found[tensor] = np.array(bits) if room is None else room.place(tensor, bits)
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

    def old(self, tensor: int) -> OldTensor:
        """A tensor as it is now, for a delta that builds on it (``Old``): a view."""
        return OldTensor(self.bits[tensor])

    def apply(self, changes: Changes) -> None:
        """Move to the next version in place.

        Raises:
            FingerprintError: a tensor did not come out as the object declares; the state is then unusable.
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
                    "the object was made against other weights, or is damaged"
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


class _Room:
    """One stretch of memory with a place for every tensor, each aligned to its elements."""

    def __init__(self, allocate: Callable[[int], np.ndarray], table: TensorTable) -> None:
        self._table = table
        self._starts = []
        end = 0
        for spec in table:
            end = -(-end // _ALIGNMENT) * _ALIGNMENT
            self._starts.append(end)
            end += spec.nbytes
        self._bytes = allocate(end)

    def place(self, tensor: int, bits: Bits) -> Bits:
        spec, start = self._table[tensor], self._starts[tensor]
        placed: Bits = self._bytes[start : start + spec.nbytes].view(spec.element.uint)
        placed[:] = bits
        return placed
