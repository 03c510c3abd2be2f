"""``Changes``: the decoded changes between two versions, which encoders, decoders and receivers exchange."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.errors import ChainError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.dtypes import DTYPES, DType
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.bits import Bits, Positions


@dataclass
class Sparse:
    """Changed elements of some tensors of one dtype, concatenated in ascending order of tensor id.

    Attributes:
        dtype: safetensors name.
        ids: (k,) uint32 positions in the tensor table, strictly ascending.
        counts: (k,) int64 changed elements per tensor, each at least 1.
        positions: (n,) int64 flat indices in the full tensor, strictly ascending per tensor.
        data: (n,) unsigned of the dtype's width: ULP distances new − old if ``relative``, else new bits.
        relative: how to read ``data``.
    """

    dtype: str
    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    positions: Positions
    data: Bits
    relative: bool

    @classmethod
    def empty(cls, element: DType, relative: bool) -> "Sparse":
        """Return a group without tensors."""
        none = np.empty(0, np.int64)
        return cls(element.name, np.empty(0, np.uint32), none, none, np.empty(0, element.uint), relative)

    @property
    def element(self) -> DType:
        return DTYPES[self.dtype]

    def tensors(self) -> Iterator[tuple[int, Positions, Bits]]:
        """Yield (tensor id, positions, data) for each tensor, as views."""
        ends = np.cumsum(self.counts)
        for tensor, end, count in zip(self.ids.tolist(), ends.tolist(), self.counts.tolist(), strict=True):
            yield tensor, self.positions[end - count : end], self.data[end - count : end]

    def rows(self, first: int, last: int) -> "Sparse":
        """Return tensors ``first`` to ``last`` − 1 of the group, as views."""
        ids, counts, start = self.ids[first:last], self.counts[first:last], int(self.counts[:first].sum())
        elements = slice(start, start + int(counts.sum()))
        return replace(self, ids=ids, counts=counts, positions=self.positions[elements], data=self.data[elements])


@dataclass
class Full:
    """One tensor sent in full: its id and flat (numel,) bits."""

    id: int
    bits: Bits


@dataclass
class Changes:
    """Changes of some tensors, such as one delta object carries.

    Attributes:
        fingerprints: per tensor id, fingerprint after minus before, over the elements carried here.
    """

    sparse: list[Sparse] = field(default_factory=list)
    full: list[Full] = field(default_factory=list)
    fingerprints: dict[int, Fingerprint] = field(default_factory=dict)

    @property
    def changed(self) -> int:
        """Elements carried; tensors in full count with all elements."""
        return sum(group.positions.size for group in self.sparse) + sum(tensor.bits.size for tensor in self.full)

    @property
    def fingerprint(self) -> Fingerprint:
        """Sum of ``fingerprints``: change of the model's fingerprint."""
        return sum(self.fingerprints.values(), Fingerprint())

    @property
    def reversible(self) -> bool:
        """Whether all elements are distances, which can be reverted."""
        return not self.full and all(group.relative for group in self.sparse)

    def parts(self, most_bytes: int, most_parts: int = limits.MAX_OBJECTS_PER_VERSION) -> list["Changes"]:
        """Split the changes between tensors into parts of at most ``most_bytes`` decoded bytes; arrays are views.

        A larger tensor gets its own part. Tensor ids ascend within and across parts.

        Raises:
            LimitError: there are more than ``most_parts``.
        """
        sizes: Counter[int] = Counter({full.id: full.bits.nbytes for full in self.full})
        for group in self.sparse:
            width = group.positions.itemsize + group.data.itemsize
            sizes.update(dict(zip(group.ids.tolist(), (group.counts * width).tolist(), strict=True)))
        found = split_by_bytes(sizes, most_bytes, most_parts)
        return [self._only(tensors) for tensors in found] if len(found) > 1 else [self]

    def _only(self, tensors: set[int]) -> "Changes":
        """Return the changes of some tensors, whose rows are adjacent in every group."""
        sparse = []
        for group in self.sparse:
            chosen = [row for row, tensor in enumerate(group.ids.tolist()) if tensor in tensors]
            if chosen:
                sparse.append(group.rows(chosen[0], chosen[-1] + 1))
        full = [full for full in self.full if full.id in tensors]
        return Changes(sparse, full, {id: change for id, change in self.fingerprints.items() if id in tensors})

    def reversed(self) -> "Changes":
        """Return the changes that revert these; raises ChainError unless they are ``reversible``."""
        if not self.reversible:
            raise ChainError("changes that replace bits cannot be reverted: they do not contain the old bits")
        sparse = [replace(group, data=group.data.dtype.type(0) - group.data) for group in self.sparse]
        none = Fingerprint()
        return Changes(sparse, [], {tensor: none - change for tensor, change in self.fingerprints.items()})


def split_by_bytes(sizes: Mapping[int, int], most_bytes: int, most_parts: int) -> list[set[int]]:
    """Split tensor ids, ascending, into parts of at most ``most_bytes``; a larger tensor gets its own part.

    Args:
        sizes: tensor id → bytes.

    Raises:
        LimitError: there are more than ``most_parts``.
    """
    found: list[set[int]] = [set()]
    room = most_bytes
    for tensor in sorted(sizes):
        if found[-1] and sizes[tensor] > room:
            found.append(set())
            room = most_bytes
        found[-1].add(tensor)
        room -= sizes[tensor]
    limits.check_object_count(len(found), most_bytes, sum(sizes.values()), most_parts)
    return found
