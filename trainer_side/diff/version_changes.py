"""``VersionChanges``: the changes of one version, of which each tensor is read only when it is encoded."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from vllm_delta_sync.codec.delta_object import BLOCK_ELEMENTS
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.bits import Bits, Positions
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse, split_by_bytes

Pieces = Callable[[], Iterator[tuple[Positions, Bits]]]
"""Yields the changed elements of a tensor, ascending, in pieces: positions (n,) int64, data (n,) as in ``Sparse``."""


@dataclass(frozen=True)
class SparseTensor:
    """Changed elements of a tensor: its id, their number, and what reads them."""

    id: int
    count: int
    pieces: Pieces


@dataclass(frozen=True)
class FullTensor:
    """A tensor that is sent in full: its id, and what reads its (numel,) bits."""

    id: int
    read: Callable[[], Bits]


@dataclass
class VersionChanges:
    """Changes in terms of a table; valid until the pending delta is reverted or the next one begins.

    Attributes:
        relative: the data of sparse tensors are ULP distances, else new bits.
        fingerprints: per tensor id, fingerprint after minus before.
    """

    table: TensorTable
    relative: bool = True
    sparse: list[SparseTensor] = field(default_factory=list)
    full: list[FullTensor] = field(default_factory=list)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)

    @property
    def changed(self) -> int:
        """Elements carried; tensors in full count with all elements."""
        return sum(self.counts.values()) + sum(self.table[tensor.id].numel for tensor in self.full)

    @property
    def counts(self) -> dict[int, int]:
        """Changed elements by id of sparse tensors."""
        return {tensor.id: tensor.count for tensor in self.sparse}

    @property
    def reversible(self) -> bool:
        """As ``Changes.reversible``."""
        return not self.full and (self.relative or not self.sparse)

    @property
    def decoded_bytes(self) -> int:
        """What ``load`` takes, with copies of the full tensors."""
        return sum(self._sizes().values())

    def load(self) -> Changes:
        """Return all changes in memory."""
        by_id = {tensor.id: tensor for tensor in self.sparse}
        groups = [self.group([by_id[id] for id in batch]) for batch in batches(self.counts, self.table)]
        return Changes(groups, [Full(tensor.id, tensor.read()) for tensor in self.full], self.fingerprints)

    def parts(self, most_bytes: int, most_parts: int) -> "list[VersionChanges]":
        """Split the changes as ``Changes.parts`` does."""
        found = split_by_bytes(self._sizes(), most_bytes, most_parts)
        return [self._only(tensors) for tensors in found]

    def _sizes(self) -> dict[int, int]:
        sizes = {tensor.id: self.table[tensor.id].nbytes for tensor in self.full}
        for tensor in self.sparse:
            sizes[tensor.id] = tensor.count * (8 + self.table[tensor.id].element.itemsize)
        return sizes

    def _only(self, tensors: set[int]) -> "VersionChanges":
        return VersionChanges(
            self.table,
            self.relative,
            [tensor for tensor in self.sparse if tensor.id in tensors],
            [tensor for tensor in self.full if tensor.id in tensors],
            {id: change for id, change in self.fingerprints.items() if id in tensors},
        )

    def group(self, tensors: list[SparseTensor]) -> Sparse:
        """Return the changes of some of the tensors, of one dtype, in memory."""
        spec = self.table[tensors[0].id]
        counts = np.array([tensor.count for tensor in tensors], np.int64)
        positions = np.empty(counts.sum(), np.int64)
        data = np.empty(positions.size, spec.element.uint)
        start = 0
        for tensor in tensors:
            for where, values in tensor.pieces():
                positions[start : start + where.size], data[start : start + where.size] = where, values
                start += where.size
        ids = np.array([tensor.id for tensor in tensors], np.uint32)
        return Sparse(spec.dtype, ids, counts, positions, data, self.relative)


def batches(sizes: Mapping[int, int], table: TensorTable) -> Iterator[list[int]]:
    """Yield tensor ids of one dtype, ascending, in batches of about a block: bounds what joining a batch copies.

    Args:
        sizes: tensor id → number of changed elements.
    """
    batch: list[int] = []
    size = 0
    for tensor in sorted(sizes, key=lambda tensor: (table[tensor].dtype, tensor)):
        if batch and (size + sizes[tensor] > BLOCK_ELEMENTS or table[tensor].dtype != table[batch[0]].dtype):
            yield batch
            batch, size = [], 0
        batch.append(tensor)
        size += sizes[tensor]
    if batch:
        yield batch
