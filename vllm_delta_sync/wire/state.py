"""All tensors of one version in memory, moved from version to version with the fingerprint checked each time."""

from collections.abc import Iterable

import numpy as np

from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.wire.bits import Bits, apply_distances
from vllm_delta_sync.wire.changes import Changes, Sparse
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.wire.table import TensorTable


class ModelState:
    """A model as bit patterns.

    Attributes:
        table: the run's tensors.
        bits: per tensor id, flat (numel,) writable unsigned bits.
        fingerprints: per tensor id.

    Raises:
        TensorMismatchError: a tensor is missing, unknown or of another size.
    """

    def __init__(self, table: TensorTable, tensors: Iterable[tuple[str, Bits]]) -> None:
        self.table = table
        found: dict[int, Bits] = {}
        for name, bits in tensors:
            spec = table.by_name(name)
            if bits.dtype != spec.element.uint or bits.size != spec.numel:
                raise TensorMismatchError(f"tensor {name!r} has {bits.size} elements of {bits.dtype}, not {spec}")
            found[table.index(name)] = np.array(bits)
        if len(found) != len(table):
            missing = next(spec.name for i, spec in enumerate(table) if i not in found)
            raise TensorMismatchError(f"tensor {missing!r} is missing")
        self.bits = [found[i] for i in range(len(table))]
        self.fingerprints = [fingerprint_tensor(spec.name, self.bits[i]) for i, spec in enumerate(table)]

    @property
    def fingerprint(self) -> Fingerprint:
        total = Fingerprint()
        for value in self.fingerprints:
            total += value
        return total

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
