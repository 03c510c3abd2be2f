"""Codec ``packed``: positions as byte gaps, values as ULP distances in byte planes, each plane entropy-coded.

A block holds the changed elements of consecutive tensors of one dtype; a tensor never spans blocks.
Entries of block k: ``@k.ids`` U32, ``@k.counts`` U64, ``@k.gaps``, ``@k.escapes``, ``@k.ulp.0`` … U8.
"""

from typing import Any

import numpy as np

from vllm_delta_sync.errors import FormatError, TensorMismatchError
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire.changes import Sparse
from vllm_delta_sync.wire.compression import Compression, compress, decompress
from vllm_delta_sync.wire.container import Container, aligned
from vllm_delta_sync.wire.dtypes import DType, dtype_of
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.table import TensorTable

BLOCK_ELEMENTS = 16 * 1024 * 1024
"""A writer closes a block once it holds this many elements: bounds scratch memory on both sides."""

Arrays = dict[str, tuple[str, np.ndarray]]


def encode(groups: list[Sparse], compression: Compression) -> tuple[Arrays, list[dict[str, Any]]]:
    """Container entries and the ``blocks`` metadata of relative groups."""
    arrays: Arrays = {}
    blocks: list[dict[str, Any]] = []
    for group in groups:
        for first, last in _block_ranges(group.counts):
            name = f"@{len(blocks)}"
            start = int(group.counts[:first].sum())
            stop = start + int(group.counts[first:last].sum())
            counts = group.counts[first:last]
            arrays[f"{name}.ids"] = ("U32", group.ids[first:last])
            arrays[f"{name}.counts"] = ("U64", counts.astype("<u8"))
            _encode_positions(arrays, name, group.positions[start:stop], counts, compression)
            planes = _planes(_zigzag(group.data[start:stop], group.element))
            for index, plane in enumerate(planes):
                arrays[f"{name}.ulp.{index}"] = ("U8", compress(plane, compression))
            blocks.append({"dtype": group.dtype})
    return arrays, blocks


def _block_ranges(counts: np.ndarray) -> list[tuple[int, int]]:
    ranges = []
    first = held = 0
    for position, count in enumerate(counts.tolist()):
        held += count
        if held >= BLOCK_ELEMENTS:
            ranges.append((first, position + 1))
            first, held = position + 1, 0
    if first < counts.size:
        ranges.append((first, counts.size))
    return ranges


def _encode_positions(
    arrays: Arrays, name: str, positions: np.ndarray, counts: np.ndarray, compression: Compression
) -> None:
    from vllm_delta_sync.wire import kernels

    gaps = np.empty(positions.size, np.uint8)
    escapes = np.empty(positions.size, "<u8")
    used = kernels.encode_gaps(positions, counts, gaps, escapes)
    arrays[f"{name}.gaps"] = ("U8", compress(gaps, compression))
    planes = np.ascontiguousarray(escapes[:used].view(np.uint8).reshape(used, 8).T).reshape(-1)
    arrays[f"{name}.escapes"] = ("U8", compress(planes, compression))


def _zigzag(distances: np.ndarray, element: DType) -> np.ndarray:
    """Two's complement to 0, −1, 1, −2 … → 0, 1, 2, 3 …, in the same width."""
    signed = distances.view(f"<i{element.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * element.itemsize - 1))).view(element.uint)


def _unzigzag(zigzag: np.ndarray, element: DType) -> np.ndarray:
    one = element.uint.type(1)
    return (zigzag >> one) ^ (element.uint.type(0) - (zigzag & one))


def _planes(values: np.ndarray) -> list[np.ndarray]:
    table = values.view(np.uint8).reshape(values.size, values.itemsize)
    return [np.ascontiguousarray(table[:, index]) for index in range(values.itemsize)]


def decode(
    container: Container,
    table: TensorTable,
    blocks: list[Any],
    compression: Compression,
    what: str,
    changed: int | None = None,
) -> list[Sparse]:
    """Read and check every block (errors: see ``delta.decode``).

    Args:
        changed: refuse more elements than these before any is decoded. A plane of equal bytes takes next to nothing in
            an object, and an element takes 10 bytes and more once it is decoded.
    """
    dtypes = block_dtypes(blocks, what)
    whats = [f"{what}, block {index}" for index in range(len(dtypes))]
    directories = [
        _directory(container, table, f"@{index}", dtype.name, whats[index]) for index, dtype in enumerate(dtypes)
    ]
    carried = sum(int(counts.sum()) for _, counts, _ in directories)
    if changed is not None and carried > changed:
        raise FormatError(f"{what}: blocks carry {carried} elements, the manifest says {changed}")
    return [
        _decode_block(container, table, index, dtype, directories[index], compression, whats[index])
        for index, dtype in enumerate(dtypes)
    ]


def block_dtypes(blocks: list[Any], what: str) -> list[DType]:
    """Element type of each block, from the ``blocks`` metadata.

    Raises:
        FormatError, LimitError: a block without a known dtype, or too many.
    """
    check_limit(f"{what}: blocks", len(blocks), limits.MAX_BLOCK_COUNT, "MAX_BLOCK_COUNT")
    dtypes = []
    for index, block in enumerate(blocks):
        if not isinstance(block, dict) or not isinstance(block.get("dtype"), str):
            raise FormatError(f"{what}: block {index} has no dtype")
        dtypes.append(dtype_of(block["dtype"], f"{what}: block {index}"))
    return dtypes


def _decode_block(
    container: Container,
    table: TensorTable,
    index: int,
    element: DType,
    directory: tuple[np.ndarray, np.ndarray, np.ndarray],
    compression: Compression,
    what: str,
) -> Sparse:
    name = f"@{index}"
    ids, counts, numels = directory
    total = int(counts.sum())
    gaps = aligned(decompress(_bytes(container, f"{name}.gaps"), total, compression, f"{what}: gaps"))
    escaped = int(np.count_nonzero(gaps == 255))
    planes = decompress(_bytes(container, f"{name}.escapes"), 8 * escaped, compression, f"{what}: escapes")
    escapes = np.ascontiguousarray(planes.reshape(8, escaped).T).reshape(-1).view("<u8")
    positions = _positions(gaps, escapes, counts, numels, table, ids, what)
    values = np.empty((total, element.itemsize), np.uint8)
    for byte in range(element.itemsize):
        plane = _bytes(container, f"{name}.ulp.{byte}")
        values[:, byte] = decompress(plane, total, compression, f"{what}: ulp plane {byte}")
    distances = _unzigzag(values.reshape(-1).view(element.uint), element)
    return Sparse(element.name, ids, counts, positions, distances, relative=True)


def _directory(
    container: Container, table: TensorTable, name: str, dtype: str, what: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    ids, counts = aligned(container.bits(f"{name}.ids")), aligned(container.bits(f"{name}.counts"))
    types = [container.entries[f"{name}.{part}"].dtype.name for part in ("ids", "counts")]
    if types != ["U32", "U64"] or ids.size != counts.size or not ids.size:
        raise FormatError(f"{what}: ids and counts are not U32 and U64 of one length, at least 1")
    if np.any(ids[1:] <= ids[:-1]):
        raise FormatError(f"{what}: tensor ids are not strictly ascending")
    if int(ids[-1]) >= len(table):
        raise TensorMismatchError(f"{what}: tensor id {int(ids[-1])} in a table of {len(table)} tensors")
    specs = [table[tensor] for tensor in ids.tolist()]
    for spec, count in zip(specs, counts.tolist(), strict=True):
        if spec.dtype != dtype:
            raise TensorMismatchError(f"{what}: tensor {spec.name!r} is {spec.dtype}, the block carries {dtype}")
        if not 1 <= count <= spec.numel:
            raise FormatError(f"{what}: {count} changed elements in {spec.name!r} of {spec.numel}")
    return ids, counts.astype(np.int64), np.array([spec.numel for spec in specs], np.int64)


def _positions(
    gaps: np.ndarray,
    escapes: np.ndarray,
    counts: np.ndarray,
    numels: np.ndarray,
    table: TensorTable,
    ids: np.ndarray,
    what: str,
) -> np.ndarray:
    from vllm_delta_sync.wire import kernels

    positions = np.empty(gaps.size, np.int64)
    bad = kernels.decode_gaps(gaps, escapes, counts, numels, positions)
    if bad == counts.size:
        raise FormatError(f"{what}: escapes do not match the gaps")
    if bad >= 0:
        spec = table[int(ids[bad])]
        raise FormatError(f"{what}: a position in {spec.name!r} lies outside its {spec.numel} elements")
    return positions


def _bytes(container: Container, name: str) -> np.ndarray:
    bits = container.bits(name)
    if container.entries[name].dtype.name != "U8":
        raise FormatError(f"entry {name!r} is not U8")
    return bits


def entry_names(dtypes: list[DType]) -> set[str]:
    """The entry names of blocks of these element types, no more and no fewer."""
    parts = ("ids", "counts", "gaps", "escapes")
    names = {f"@{index}.{part}" for index in range(len(dtypes)) for part in parts}
    return names | {f"@{index}.ulp.{byte}" for index, dtype in enumerate(dtypes) for byte in range(dtype.itemsize)}
