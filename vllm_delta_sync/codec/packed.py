"""Codec ``packed``: positions as byte gaps or bit masks, ULP distances as two-bit codes and, if larger, extra bytes.

Every plane is entropy-coded separately. Entries of a sparse or dense block k: ``@k.ids`` U32, ``@k.counts`` U64;
``@k.gaps``, ``@k.low`` and ``@k.escapes``, or ``@k.mask``; ``@k.codes``, ``@k.small``, ``@k.wide.0`` … U8. A block of
kind full has whole tensors as byte planes of their bits, also in codec ``context``: ``@k.ids`` U32, ``@k.bits.0`` … U8.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby

import numpy as np

from vllm_delta_sync.codec.delta_object import (
    BLOCK_ELEMENTS,
    Arrays,
    Block,
    BlockEntries,
    Directory,
    Kind,
    OpenedBlock,
    block_ranges,
    bytes_of,
)
from vllm_delta_sync.codec.zstd import Compression, Plane, compress, declared_size, decompress
from vllm_delta_sync.errors import FormatError, LimitError
from vllm_delta_sync.format.dtypes import DTYPES, DType
from vllm_delta_sync.format.limits import MAX_DENSE_RATIO
from vllm_delta_sync.format.safetensors_file import Container, aligned
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import Full, Sparse

DENSE_RATIO = 4
"""A writer uses a mask if more than one in this many elements of a tensor changed; it is smaller then."""

GAP_BITS = 6
"""Maximum length in bits of the mean gap without its low bits; then at most one gap in fifty exceeds a byte."""


def encode(blocks: BlockEntries, groups: list[Sparse], table: TensorTable, compression: Compression) -> None:
    """Append relative groups as blocks of kind sparse and dense."""
    for group in groups:
        numels = np.array([table[tensor].numel for tensor in group.ids.tolist()], np.int64)
        dense = group.counts * DENSE_RATIO > numels
        kinds: list[tuple[Kind, np.ndarray]] = [("sparse", ~dense), ("dense", dense)]
        for kind, chosen in kinds:
            part, sizes = select_tensors(group, chosen), numels[chosen]
            for first, last in block_ranges(part.counts, BLOCK_ELEMENTS):
                entries = _encode_block(part.rows(first, last), sizes[first:last], kind, compression)
                blocks.add(group.element, kind, entries)


def select_tensors(group: Sparse, chosen: np.ndarray) -> Sparse:
    """Return the tensors of a group that the mask ``chosen``, (k,) bool, selects."""
    if chosen.all():
        return group
    elements = np.repeat(chosen, group.counts)
    return replace(
        group,
        ids=group.ids[chosen],
        counts=group.counts[chosen],
        positions=group.positions[elements],
        data=group.data[elements],
    )


def _encode_block(group: Sparse, numels: np.ndarray, kind: Kind, compression: Compression) -> Arrays:
    find_planes = _mask_planes if kind == "dense" else _gap_planes
    planes = find_planes(group.positions, Directory(group.ids, group.counts, numels))
    planes |= value_planes(group.data, group.counts)
    entries: Arrays = {"ids": ("U32", group.ids.astype("<u4")), "counts": ("U64", group.counts.astype("<u8"))}
    return entries | {part: ("U8", compress(plane, compression)) for part, plane in planes.items()}


def _gap_planes(positions: np.ndarray, directory: Directory) -> dict[str, np.ndarray]:
    from vllm_delta_sync.codec import packed_kernels

    counts, shifts = directory.counts, gap_shifts(directory)
    gaps, low = np.empty(positions.size, np.uint8), np.zeros(_low_bytes(counts, shifts), np.uint8)
    escapes = np.empty(positions.size, "<u8")
    used = packed_kernels.encode_gaps(positions, counts, shifts, gaps, low, escapes)
    return {"gaps": gaps, "low": low, "escapes": _planes_of(escapes[:used])}


def _planes_of(escapes: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(escapes.view(np.uint8).reshape(escapes.size, 8).T).reshape(-1)


def gap_shifts(directory: Directory) -> np.ndarray:
    """Return (k,) int64: how many low bits of a tensor's gaps are stored apart, so that few exceed a byte."""
    mean = directory.numels // directory.counts
    # Integers up to 53 bits are exact as floats, and their exponent is their length in bits.
    return np.maximum(np.frexp(mean.astype(np.float64))[1].astype(np.int64) - GAP_BITS, 0)


def _mask_planes(positions: np.ndarray, directory: Directory) -> dict[str, np.ndarray]:
    from vllm_delta_sync.codec import packed_kernels

    mask = np.zeros(_mask_bytes(directory.numels), np.uint8)
    packed_kernels.encode_mask(positions, directory.counts, directory.numels, mask)
    return {"mask": mask}


def value_planes(distances: np.ndarray, counts: np.ndarray) -> dict[str, np.ndarray]:
    """Return the uncompressed planes of the (n,) ULP distances of tensors with (k,) int64 ``counts``."""
    from vllm_delta_sync.codec import packed_kernels

    width = distances.itemsize
    codes, small = np.empty(_code_bytes(counts), np.uint8), np.empty(distances.size, np.uint8)
    wide = np.empty(distances.size, distances.dtype)
    smalls, wides = packed_kernels.encode_values(distances, counts, codes, small, wide)
    table = wide[:wides].view(np.uint8).reshape(wides, width)
    planes = {f"wide.{byte}": np.ascontiguousarray(table[:, byte]) for byte in range(width)}
    return {"codes": codes, "small": small[:smalls]} | planes


def write_planes(
    spec: TensorSpec,
    count: int,
    pieces: Iterable[tuple[np.ndarray, np.ndarray]],
    write: Callable[[str, np.ndarray], None],
) -> Kind:
    """Write the uncompressed planes of a block that has one tensor, as ``encode`` makes them, piece by piece.

    Args:
        count: number of changed elements, at least 1. pieces: (n,) int64 positions and (n,) ULP distances, ascending.
        write: called with the name of a plane and the (m,) uint8 that follow in it; with every plane at least once.

    Returns:
        The block's kind.
    """
    from vllm_delta_sync.codec import packed_kernels

    dense = count * DENSE_RATIO > spec.numel
    directory = Directory(np.zeros(1, np.uint32), np.array([count]), np.array([spec.numel]))
    shifts = gap_shifts(directory)
    mask = np.zeros(_mask_bytes(directory.numels) if dense else 0, np.uint8)
    low = np.zeros(0 if dense else _low_bytes(directory.counts, shifts), np.uint8)
    escapes: list[np.ndarray] = []
    done, following = 0, np.int64(0)
    for positions, distances in _in_whole_bytes(pieces):
        size = np.array([positions.size])
        if dense:
            packed_kernels.encode_mask(positions, size, directory.numels, mask)
        else:
            gaps, over = np.empty(positions.size, np.uint8), np.empty(positions.size, "<u8")
            begin = done * int(shifts[0]) >> 3
            used = packed_kernels.encode_gaps(positions - following, size, shifts, gaps, low[begin:], over)
            following = positions[-1] + 1
            write("gaps", gaps)
            escapes.append(over[:used].copy())
        for part, plane in value_planes(distances, size).items():
            write(part, plane)
        done += positions.size
    if dense:
        write("mask", mask)
        return "dense"
    write("low", low)
    write("escapes", _planes_of(np.concatenate(escapes)))
    return "sparse"


def _in_whole_bytes(pieces: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut the pieces anew, so that all but the last one end where each plane ends a byte: after 8 elements."""
    left = None
    for piece in pieces:
        positions, data = piece if left is None else map(np.concatenate, zip(left, piece, strict=True))
        cut = positions.size & ~7
        if cut:
            yield positions[:cut], data[:cut]
        left = positions[cut:], data[cut:]
    if left is not None and left[0].size:
        yield left


def _low_bytes(counts: np.ndarray, shifts: np.ndarray) -> int:
    return int(((counts * shifts + 7) >> 3).sum())


def _mask_bytes(numels: np.ndarray) -> int:
    return int(((numels + 7) >> 3).sum())


def _code_bytes(counts: np.ndarray) -> int:
    return int(((counts + 3) >> 2).sum())


def zigzag(distances: np.ndarray, element: DType) -> np.ndarray:
    """Map two's complement 0, −1, 1, −2 … → 0, 1, 2, 3 …, in the same width."""
    signed = distances.view(f"<i{element.itemsize}")
    return ((signed << 1) ^ (signed >> (8 * element.itemsize - 1))).view(element.uint)


def entry_names(blocks: Iterable[Block]) -> set[str]:
    """Return exactly the entry names of these sparse or dense blocks."""
    names = set()
    for block in blocks:
        where = ["mask"] if block.kind == "dense" else ["gaps", "low", "escapes"]
        wide = [f"wide.{byte}" for byte in range(block.element.itemsize)]
        names |= {f"{block.name}.{part}" for part in ("ids", "counts", *where, "codes", "small", *wide)}
    return names


@dataclass
class _Planes:
    """The planes of a block that is being read. ``where``: gaps of a sparse block, mask of a dense one."""

    where: Plane
    codes: Plane
    small: Plane
    wide: list[Plane]
    low: Plane | None = None
    escapes: np.ndarray = field(default_factory=lambda: np.empty(0, "<u8"))
    used: int = 0


class BlockReader:
    """Reads a block of kind sparse or dense, tensor by tensor in ascending order of id.

    Attributes:
        block: its number, element type and kind. directory: its tensors. row: index of the first tensor not taken yet.

    Raises:
        LimitError: the block is dense, but has few changed elements of a tensor.
    """

    def __init__(self, container: Container, table: TensorTable, opened: OpenedBlock, compression: Compression) -> None:
        self.block, self.directory, self._what = opened.block, opened.directory, opened.what
        self._container, self._table, self._compression = container, table, compression
        counts, numels = self.directory.counts, self.directory.numels
        thin = np.flatnonzero(counts < numels // MAX_DENSE_RATIO)
        if self.block.kind == "dense" and thin.size:
            row = int(thin[0])
            raise LimitError(
                f"{self._what} is dense, but has {counts[row]} of the {numels[row]} elements of "
                f"{self._name(self.directory.ids, row)}: fewer than one in {MAX_DENSE_RATIO} (MAX_DENSE_RATIO)"
            )
        self.row = 0
        self._planes: _Planes | None = None

    def take(self, last: int) -> Sparse:
        """Return changed elements of the tensors from ``row`` up to row ``last``, excluded; at least one tensor.

        Raises:
            FormatError, LimitError: a plane is damaged.
        """
        from vllm_delta_sync.codec import packed_kernels
        from vllm_delta_sync.format.kernels import read_only

        rows, self.row = slice(self.row, last), last
        planes = self._planes = self._planes or self._open()
        directory, element = self.directory, self.block.element
        ids, counts = directory.ids[rows], directory.counts[rows]
        positions = self._positions(planes, Directory(ids, counts, directory.numels[rows]))
        codes = read_only(aligned(planes.codes.take(_code_bytes(counts))))
        smalls, wides, bad = packed_kernels.count_codes(codes, counts)
        if bad >= 0:
            raise FormatError(f"{self._what}: codes continue after the last element of {self._name(ids, bad)}")
        small, table = planes.small.take(smalls), np.empty((wides, element.itemsize), np.uint8)
        for byte, plane in enumerate(planes.wide):
            table[:, byte] = plane.take(wides)
        distances = np.empty(positions.size, element.uint)
        wide = table.reshape(-1).view(element.uint)
        packed_kernels.decode_values(codes, counts, read_only(small), wide, distances)
        if last == directory.ids.size:
            self._close(planes)
        return Sparse(element.name, ids, counts, positions, distances, relative=True)

    def _positions(self, planes: _Planes, directory: Directory) -> np.ndarray:
        positions = np.empty(int(directory.counts.sum()), np.int64)
        if planes.low is None:
            self._unmask(planes.where, directory, positions)
        else:
            self._sum_gaps(planes, planes.low, directory, positions)
        return positions

    def _unmask(self, plane: Plane, directory: Directory, positions: np.ndarray) -> None:
        from vllm_delta_sync.codec import packed_kernels
        from vllm_delta_sync.format.kernels import read_only

        counts, numels = directory.counts, directory.numels
        bad = packed_kernels.decode_mask(read_only(plane.take(_mask_bytes(numels))), counts, numels, positions)
        if bad >= 0:
            raise FormatError(
                f"{self._what}: mask of {self._name(directory.ids, bad)} does not select {int(counts[bad])} of its "
                f"{int(numels[bad])} elements"
            )

    def _sum_gaps(self, planes: _Planes, low: Plane, directory: Directory, positions: np.ndarray) -> None:
        from vllm_delta_sync.codec import packed_kernels
        from vllm_delta_sync.format.kernels import read_only

        counts, numels, shifts = directory.counts, directory.numels, gap_shifts(directory)
        gaps, least = planes.where.take(positions.size), low.take(_low_bytes(counts, shifts))
        escaped = int(np.count_nonzero(gaps == 255))
        escapes = planes.escapes[planes.used : planes.used + escaped]
        planes.used += escaped
        planes_read = map(read_only, (gaps, least, escapes))
        bad = packed_kernels.decode_gaps(*planes_read, counts, shifts, numels, positions)
        if bad == counts.size:
            raise FormatError(f"{self._what}: escapes do not match the gaps")
        if bad >= 0:
            raise FormatError(
                f"{self._what}: a position in {self._name(directory.ids, bad)} lies outside its {int(numels[bad])} "
                "elements, or low bits continue after the last one"
            )

    def _name(self, ids: np.ndarray, row: int) -> str:
        return repr(self._table[int(ids[row])].name)

    def _data(self, part: str) -> tuple[np.ndarray, str]:
        return bytes_of(self._container, f"{self.block.name}.{part}"), f"{self._what}: {part}"

    def _plane(self, part: str, size: int | None = None) -> Plane:
        """Return a plane of ``size`` bytes; if None, of at most one byte per element."""
        data, what = self._data(part)
        plane, total = Plane(data, self._compression, what, size), int(self.directory.counts.sum())
        if size is None and plane.size > total:
            raise FormatError(f"{what} has {plane.size} bytes, but the block has {total} elements")
        return plane

    def _open(self) -> _Planes:
        directory = self.directory
        total = int(directory.counts.sum())
        dense = self.block.kind == "dense"
        planes = _Planes(
            where=self._plane("mask", _mask_bytes(directory.numels)) if dense else self._plane("gaps", total),
            codes=self._plane("codes", _code_bytes(directory.counts)),
            small=self._plane("small"),
            wide=[self._plane(f"wide.{byte}") for byte in range(self.block.element.itemsize)],
        )
        if not dense:
            planes.low = self._plane("low", _low_bytes(directory.counts, gap_shifts(directory)))
            planes.escapes = self._escapes(total)
        return planes

    def _escapes(self, total: int) -> np.ndarray:
        """Return all escapes of the block."""
        data, what = self._data("escapes")
        size = declared_size(data, self._compression, what)
        if size % 8 or size > 8 * total:
            raise FormatError(f"{what} have {size} bytes, expected 8 for each of at most {total} elements")
        planes = decompress(data, size, self._compression, what).reshape(8, size // 8)
        return np.ascontiguousarray(planes.T).reshape(-1).view("<u8")

    def _close(self, planes: _Planes) -> None:
        self._planes = None
        if planes.used != planes.escapes.size:
            raise FormatError(f"{self._what}: escapes do not match the gaps")
        if any(plane.left for plane in (planes.small, *planes.wide)):
            raise FormatError(f"{self._what}: more small or wide distances than codes")


def compile_decoder(elements: Iterable[DType]) -> None:
    """Compile the loops of ``BlockReader``, for these element types, now."""
    from vllm_delta_sync.codec import packed_kernels
    from vllm_delta_sync.format.kernels import read_only

    plane, numbers = read_only(np.empty(0, np.uint8)), np.empty(0, np.int64)
    packed_kernels.frame_end(plane, 0)
    packed_kernels.decode_gaps(plane, plane, read_only(np.empty(0, "<u8")), *[numbers] * 4)
    packed_kernels.decode_mask(plane, *[numbers] * 3)
    packed_kernels.count_codes(plane, numbers)
    for element in elements:
        bits = np.empty(0, element.uint)
        packed_kernels.decode_values(plane, numbers, plane, bits, bits)


def encode_full(blocks: BlockEntries, tensors: Sequence[Full], table: TensorTable, compression: Compression) -> None:
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


def full_entry_names(found: Iterable[Block]) -> set[str]:
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
