"""Blocks of kind full: whole tensors as byte planes of their bits, each plane compressed by itself.

Entries of block k: ``@k.ids`` U32, ``@k.bits.0`` … U8.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np

from vllm_delta_sync.codec.delta_object import (
    BLOCK_ELEMENTS,
    Arrays,
    Block,
    BlockEntries,
    OpenedBlock,
    block_ranges,
    bytes_of,
)
from vllm_delta_sync.codec.zstd import Compression, compress, declared_size, decompress
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import DTYPES, TensorTable
from vllm_delta_sync.tensors.changes import Full


def encode(blocks: BlockEntries, tensors: Sequence[Full], table: TensorTable, compression: Compression) -> None:
    """Append tensors in full as blocks of kind full."""
    ordered = sorted(tensors, key=lambda tensor: (table[tensor.id].dtype, tensor.id))
    for dtype, run in groupby(ordered, key=lambda tensor: table[tensor.id].dtype):
        members, element = list(run), DTYPES[dtype]
        sizes = np.array([tensor.bits.size for tensor in members], np.int64)
        for start, stop in block_ranges(sizes, BLOCK_ELEMENTS):
            part = members[start:stop]
            entries: Arrays = {"ids": ("U32", np.array([tensor.id for tensor in part], "<u4"))}
            for byte in range(element.itemsize):
                pieces = [np.ascontiguousarray(tensor.bits).view(np.uint8)[byte :: element.itemsize] for tensor in part]
                plane = np.concatenate(pieces) if len(part) > 1 else np.ascontiguousarray(pieces[0])
                entries[f"bits.{byte}"] = ("U8", compress(plane, compression))
            blocks.add(element, "full", entries)


def entry_names(found: Iterable[Block]) -> set[str]:
    """Return exactly the entry names of these full blocks."""
    return {
        f"{block.name}.{part}"
        for block in found
        for part in ("ids", *(f"bits.{byte}" for byte in range(block.element.itemsize)))
    }


class FullReader:
    """Reads a block of kind full; its planes are checked and decoded by ``read``.

    Attributes:
        directory: its tensors.

    Raises:
        FormatError: a plane is missing.
    """

    def __init__(self, container: Container, opened: OpenedBlock, compression: Compression) -> None:
        block, what, self.directory = opened.block, opened.what, opened.directory
        self._element, self._compression = block.element, compression
        self._planes = [
            (bytes_of(container, f"{block.name}.bits.{byte}"), f"{what}: bits.{byte}")
            for byte in range(block.element.itemsize)
        ]

    def read(self) -> list[Full]:
        """Return all tensors, ascending by id.

        Raises:
            FormatError, LimitError: a plane is damaged or has the wrong size.
        """
        numels = self.directory.numels
        total = int(numels.sum())
        for data, what in self._planes:
            declared_size(data, self._compression, what, total)
        values = np.empty((total, self._element.itemsize), np.uint8)
        for byte, (data, what) in enumerate(self._planes):
            values[:, byte] = decompress(data, total, self._compression, what)
        bits = values.reshape(-1).view(self._element.uint)
        rows = zip(self.directory.ids.tolist(), np.cumsum(numels).tolist(), numels.tolist(), strict=True)
        return [Full(tensor, bits[end - numel : end]) for tensor, end, numel in rows]


class LazyFullTensors(Mapping[int, Full]):
    """Tensors in full by id. Blocks are decoded on access, and the last one is cached.

    Args:
        named: tensors stored under their own names, as views of the object's bytes.
    """

    def __init__(self, named: Iterable[Full], readers: Iterable[FullReader]) -> None:
        self._named = {tensor.id: tensor for tensor in named}
        self._readers = {int(tensor): reader for reader in readers for tensor in reader.directory.ids}
        self._last: tuple[FullReader | None, dict[int, Full]] = (None, {})

    def __len__(self) -> int:
        return len(self._named) + len(self._readers)

    def __iter__(self) -> Iterator[int]:
        yield from self._named
        yield from self._readers

    def __getitem__(self, tensor: int) -> Full:
        """Return the tensor; KeyError if it is not carried in full, FormatError if its block is damaged."""
        if tensor in self._named:
            return self._named[tensor]
        reader = self._readers[tensor]
        if self._last[0] is not reader:
            self._last = (None, {})
            self._last = (reader, {full.id: full for full in reader.read()})
        return self._last[1][tensor]
