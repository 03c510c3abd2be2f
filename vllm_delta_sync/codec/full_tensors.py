"""Blocks of kind ``full``: whole tensors as byte planes of their bits, each plane entropy-coded.

Codecs ``packed`` and ``context`` share them. Entries of block k: ``@k.ids`` U32, ``@k.bits.0`` … U8.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from vllm_delta_sync.codec import blocks
from vllm_delta_sync.codec.blocks import Arrays, Block, OpenedBlock, block_ranges, bytes_of
from vllm_delta_sync.codec.zstd import Compression, compress, declared_size, decompress
from vllm_delta_sync.format.dtypes import DTYPES
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.changes import Full


def encode(
    tensors: Sequence[Full], table: TensorTable, compression: Compression, first: int
) -> tuple[Arrays, list[dict[str, Any]]]:
    """Container entries of some tensors, and their rows of ``blocks``.

    Args:
        first: number of the first block.
    """
    arrays: Arrays = {}
    rows: list[dict[str, Any]] = []
    ordered = sorted(tensors, key=lambda tensor: (table[tensor.id].dtype, tensor.id))
    for dtype, run in groupby(ordered, key=lambda tensor: table[tensor.id].dtype):
        members, width = list(run), DTYPES[dtype].itemsize
        sizes = np.array([tensor.bits.size for tensor in members], np.int64)
        for start, stop in block_ranges(sizes, blocks.BLOCK_ELEMENTS):
            block, held = Block(first + len(rows), DTYPES[dtype], "full"), members[start:stop]
            arrays[f"{block.name}.ids"] = ("U32", np.array([tensor.id for tensor in held], "<u4"))
            for byte in range(width):
                pieces = [np.ascontiguousarray(tensor.bits).view(np.uint8)[byte::width] for tensor in held]
                plane = np.concatenate(pieces) if len(held) > 1 else np.ascontiguousarray(pieces[0])
                arrays[f"{block.name}.bits.{byte}"] = ("U8", compress(plane, compression))
            rows.append(block.metadata)
    return arrays, rows


def entry_names(found: Iterable[Block]) -> set[str]:
    """The entry names of these blocks, no more and no fewer."""
    return {
        f"{block.name}.{part}"
        for block in found
        for part in ("ids", *(f"bits.{byte}" for byte in range(block.element.itemsize)))
    }


class FullReader:
    """One block of kind full, whose planes are looked at when it is read.

    Attributes:
        directory: which tensors it holds.

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
        """All tensors, ascending by id.

        Raises:
            FormatError, LimitError: a plane is damaged, or not of the size that it must have.
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


class LazyFulls(Mapping[int, Full]):
    """Tensors in full by id. Blocks are decoded when they are asked for, and the one asked for last is kept.

    Args:
        named: tensors that are views of the object's bytes.
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
        """The tensor; KeyError if it is not carried in full, FormatError if its block is damaged."""
        if tensor in self._named:
            return self._named[tensor]
        reader = self._readers[tensor]
        if self._last[0] is not reader:
            self._last = (None, {})
            self._last = (reader, {full.id: full for full in reader.read()})
        return self._last[1][tensor]
