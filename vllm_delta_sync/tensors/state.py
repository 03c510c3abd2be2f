"""``ModelState`` holds all tensors of one version; ``apply_changes`` moves them, or parts of them, to another version.

Each move is checked by fingerprint.
"""

from collections.abc import Callable, Iterable, Sequence, Set

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import FingerprintError, TensorMismatchError
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Positions, Sparse, apply_distances

_ALIGNMENT = 64

AllocateBits = Callable[[TensorTable], Sequence[Bits]]
"""Allocates a model's bits: tensor table → per tensor id, flat (numel,) writable unsigned bits."""
HeldPieces = Sequence[tuple[Box | None, Bits]]
"""What is held of one tensor: boxes (None is the whole tensor), and the flat writable bits of each."""


def apply_changes(
    changes: Changes,
    table: TensorTable,
    pieces: Callable[[int], HeldPieces],
    fingerprints: list[Fingerprint] | dict[int, Fingerprint],
    incomplete: Set[int] = frozenset(),
) -> None:
    """Move what is held of some tensors to another version, in place.

    Args:
        pieces: tensor id → what is held of it; empty if nothing.
        fingerprints: of each whole tensor of which something is held, by id; moved by the declared changes.
        incomplete: ids of tensors whose pieces do not hold each element exactly once. Their changes can be measured
            only if the tensor is carried in full; others are taken as declared.

    Raises:
        FingerprintError: a tensor does not have the declared fingerprint; the bits are then unusable.
    """
    measured: dict[int, Fingerprint] = {}
    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            for box, bits in pieces(tensor):
                chosen: slice | npt.NDArray[np.bool_] = slice(None)
                local = positions
                if box is not None:
                    chosen, local = box.inside(positions)
                if tensor in incomplete:
                    write_elements(group, bits, local, data[chosen])
                    continue
                before = bits[local]
                write_elements(group, bits, local, data[chosen])
                change = fingerprint_change(table[tensor].name, positions[chosen], before, bits[local])
                measured[tensor] = measured.get(tensor, Fingerprint()) + change
    for full in changes.full:
        if not (held := pieces(full.id)):
            continue
        whole = full.bits
        for box, bits in held:
            if box is None:
                bits[:] = whole
                whole = bits
            else:
                bits.reshape(box.shape)[...] = box.view(whole)
        measured[full.id] = fingerprint_tensor(table[full.id].name, whole) - fingerprints[full.id]
    for tensor, declared in changes.fingerprints.items():
        found = measured.get(tensor)
        if found is None:
            if not pieces(tensor):
                continue
            found = declared if tensor in incomplete else None
        if found != declared:
            raise FingerprintError(
                f"tensor {table[tensor].name!r} does not have the declared fingerprint after the change: "
                "the object is damaged, or was made against other weights"
            )
        fingerprints[tensor] += declared


def write_elements(group: Sparse, bits: Bits, local: Positions, data: Bits) -> None:
    """Change the (n,) elements of ``bits`` at ``local`` in place by ``data`` of a group, distances or new bits."""
    if group.relative:
        apply_distances(group.element, bits, local, data)
    else:
        bits[local] = data


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
        return sum(self.fingerprints, Fingerprint())

    def base_tensor(self, tensor: int) -> BaseTensor:
        """Return a view of a tensor's current bits; a ``BaseLookup`` for a delta that builds on this version."""
        return BaseTensor(self.bits[tensor])

    def apply(self, changes: Changes) -> None:
        """Move to another version in place.

        Raises:
            FingerprintError: a tensor does not have the declared fingerprint; the state is then unusable.
        """
        apply_changes(changes, self.table, self._pieces, self.fingerprints)

    def _pieces(self, tensor: int) -> HeldPieces:
        return ((None, self.bits[tensor]),)


def slab_layout(specs: Iterable[TensorSpec]) -> tuple[list[int], int]:
    """Return where each tensor begins in one buffer that holds all of them, aligned, and the buffer's bytes."""
    starts, end = [], 0
    for spec in specs:
        end = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(end)
        end += spec.nbytes
    return starts, end


def contiguous_buffer(allocate: Callable[[int], np.ndarray]) -> AllocateBits:
    """Put all tensors, aligned, into one buffer. Args: allocate: number of bytes → (bytes,) uint8 array."""

    def place(table: TensorTable) -> list[Bits]:
        starts, end = slab_layout(table)
        memory = allocate(end)
        return [
            memory[start : start + spec.nbytes].view(spec.element.uint)
            for start, spec in zip(starts, table, strict=True)
        ]

    return place
