"""Read a delta object of codec ``packed`` tensor by tensor, and fold any number of them in bounded memory.

The directory of an object (which tensors, how many elements) and its fingerprints are read and checked first. The
planes are decoded as the tensors are reached, from compressed bytes that stay in their memory map.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from vllm_delta_sync.errors import FormatError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.wire import delta, fold, limits, packed
from vllm_delta_sync.wire.changes import Changes, Full, Sparse
from vllm_delta_sync.wire.compression import _MAGIC, Compression, decompress
from vllm_delta_sync.wire.container import Buffer, Container
from vllm_delta_sync.wire.dtypes import DType
from vllm_delta_sync.wire.limits import check_limit
from vllm_delta_sync.wire.table import TensorTable

LAZY_ELEMENTS = 1024 * 1024
"""Tensors are taken in batches of about this many changed elements, those of all parts together."""

_REPEATED = 1
"""Type of a zstd block that holds one byte, to be repeated."""


class LazyDelta:
    """One delta object, whose changed elements are taken in ascending order of tensor id, each once.

    Attributes:
        directory: per dtype (ids, counts), (k,) uint32 and int64, ascending by id.
        full: tensors in full by id; bits are views of the object's bytes.
        fingerprints: declared changes, per tensor id.
        changed: elements carried, those of tensors in full too.

    Raises:
        UnsupportedError: the object has another codec than ``packed``.
        DeltaSyncError: as ``delta.decode``; what is wrong inside a plane is found when it is taken.
    """

    def __init__(self, data: Buffer, table: TensorTable, context: delta.DeltaContext) -> None:
        what = self._what = f"delta object of version {context.version}"
        container = Container(data, what)
        metadata = delta._metadata(container, context, what)
        if metadata["codec"] != "packed":
            raise UnsupportedError(
                f"{what} has codec {metadata['codec']!r}, which holds new values and no distances: only versions of "
                "codec 'packed' can be folded into an object"
            )
        dtypes = packed.block_dtypes(metadata["blocks"], what)
        names = {name for name in container.entries if name in table}
        unknown = set(container.entries) - packed.entry_names(dtypes) - names - {delta._IDS, delta._VALUES}
        if unknown:
            raise TensorMismatchError(f"{what}: entry {min(unknown)[:120]!r} belongs to no tensor and no block")
        full = [delta._full(container, table, name, what) for name in sorted(names)]
        self.full = {tensor.id: tensor for tensor in full}
        self._blocks = [
            _Block(container, table, index, dtype, metadata["compression"], f"{what}, block {index}")
            for index, dtype in enumerate(dtypes)
        ]
        touched = [int(tensor) for block in self._blocks for tensor in block.ids] + list(self.full)
        if len(set(touched)) != len(touched):
            raise FormatError(f"{what}: a tensor is carried twice")
        self.fingerprints = delta._fingerprints(container, set(touched), what)
        self.directory = {
            dtype: _merged([block for block in self._blocks if block.element.name == dtype])
            for dtype in sorted({dtype.name for dtype in dtypes})
        }
        self.changed = sum(int(counts.sum()) for _, counts in self.directory.values())
        self.changed += sum(tensor.bits.size for tensor in full)

    def take(self, dtype: str, stop: int) -> list[Sparse]:
        """Changed elements of this dtype's tensors with an id below ``stop`` that were not taken yet.

        No tensor is in two of the groups.

        Raises:
            FormatError, LimitError: a plane is damaged.
        """
        taken = (block.take(stop) for block in self._blocks if block.element.name == dtype)
        return [group for group in taken if group is not None]

    def pieces(self) -> Iterator[Changes]:
        """The whole object, piece by piece: what ``delta.decode`` gives, in the memory of a few tensors.

        Raises:
            FormatError, LimitError: a plane is damaged; pieces before it were handed out.
        """
        for dtype, (ids, counts) in self.directory.items():
            stops = [*ids[fold.batch_starts(counts, LAZY_ELEMENTS)[1:]].tolist(), int(ids[-1]) + 1]
            for group in (group for stop in stops for group in self.take(dtype, stop)):
                fingerprints = {int(tensor): self.fingerprints[int(tensor)] for tensor in group.ids}
                yield Changes([group], [], fingerprints)
        for tensor, full in self.full.items():
            yield Changes([], [full], {tensor: self.fingerprints[tensor]})


def _merged(blocks: "list[_Block]") -> tuple[np.ndarray, np.ndarray]:
    ids, counts = (np.concatenate(rows) for rows in zip(*((b.ids, b.counts) for b in blocks), strict=True))
    order = np.argsort(ids)
    return ids[order], counts[order]


class _Plane:
    """Bytes handed out from the first to the last; (size,) uint8 once decompressed."""

    def __init__(self, data: np.ndarray, size: int, compression: Compression, what: str) -> None:
        self._what, self._data, self._cursor = what, data, 0
        self._reader: zstandard.ZstdDecompressionReader | None = None
        if compression == "none" or size == 0:
            self._data = decompress(data, size, compression, what)
        else:
            _check_frame(data, size, what)
            self._reader = zstandard.ZstdDecompressor().stream_reader(data.data)

    def take(self, count: int) -> np.ndarray:
        """The next ``count`` bytes."""
        if self._reader is None:
            self._cursor += count
            return self._data[self._cursor - count : self._cursor]
        taken = np.empty(count, np.uint8)
        filled = 0
        while filled < count:
            try:
                got = self._reader.readinto(taken[filled:].data)
            except zstandard.ZstdError as error:
                raise FormatError(f"{self._what} is not a valid zstd frame: {error}") from error
            if not got:
                raise FormatError(f"{self._what} ends {count - filled} bytes too early")
            filled += got
        return taken


@dataclass
class _Planes:
    """What a block is decoded from, while it is being taken."""

    gaps: _Plane
    values: list[_Plane]
    escapes: np.ndarray
    used: int = 0


class _Block:
    """One block: its directory, and how far it was taken."""

    def __init__(
        self,
        container: Container,
        table: TensorTable,
        index: int,
        element: DType,
        compression: Compression,
        what: str,
    ) -> None:
        self._container, self._table, self._name = container, table, f"@{index}"
        self._compression, self._what = compression, what
        self.element = element
        self.ids, self.counts, self._numels = packed._directory(container, table, self._name, element.name, what)
        self._row = 0
        self._planes: _Planes | None = None

    def take(self, stop: int) -> Sparse | None:
        """What is left of the tensors with an id below ``stop``; None if that is nothing."""
        last = int(np.searchsorted(self.ids, stop))
        if last <= self._row:
            return None
        rows, self._row = slice(self._row, last), last
        planes = self._planes = self._planes or self._open()
        ids, counts = self.ids[rows], self.counts[rows]
        total = int(counts.sum())
        gaps = planes.gaps.take(total)
        escaped = int(np.count_nonzero(gaps == 255))
        escapes = planes.escapes[planes.used : planes.used + escaped].astype("<u8")
        planes.used += escaped
        positions = packed._positions(gaps, escapes, counts, self._numels[rows], self._table, ids, self._what)
        values = np.empty((total, self.element.itemsize), np.uint8)
        for byte, plane in enumerate(planes.values):
            values[:, byte] = plane.take(total)
        distances = packed._unzigzag(values.reshape(-1).view(self.element.uint), self.element)
        if last == self.ids.size:
            self._planes = None
            if planes.used != planes.escapes.size:
                raise FormatError(f"{self._what}: escapes do not match the gaps")
        return Sparse(self.element.name, ids, counts, positions, distances, relative=True)

    def _open(self) -> _Planes:
        total = int(self.counts.sum())
        compression, what = self._compression, self._what

        def plane(part: str) -> _Plane:
            data = packed._bytes(self._container, f"{self._name}.{part}")
            return _Plane(data, total, compression, f"{what}: {part}")

        values = [plane(f"ulp.{byte}") for byte in range(self.element.itemsize)]
        return _Planes(plane("gaps"), values, self._escapes(total))

    def _escapes(self, total: int) -> np.ndarray:
        """All escapes of the block, as narrow as their values allow: most are far below 2^16."""
        what = f"{self._what}: escapes"
        data = packed._bytes(self._container, f"{self._name}.escapes")
        size = data.size if self._compression == "none" else _declared_size(data, what)
        if size % 8 or size > 8 * total:
            raise FormatError(f"{what} have {size} bytes, which is not 8 for each of at most {total} elements")
        planes = decompress(data, size, self._compression, what).reshape(8, size // 8)
        used = max((byte + 1 for byte in range(8) if planes[byte].any()), default=1)
        width = next(width for width in (1, 2, 4, 8) if width >= used)
        narrow: np.ndarray = np.ascontiguousarray(planes[:width].T).reshape(-1).view(f"<u{width}")
        return narrow


def _check_frame(data: np.ndarray, size: int, what: str) -> None:
    """Raise unless ``data`` looks like one whole zstd frame of ``size`` bytes within the limits of ``compression``."""
    declared = _declared_size(data, what)
    if declared != size:
        raise FormatError(f"{what} declares {declared} bytes, {size} expected")
    frame = zstandard.get_frame_parameters(data.data)
    check_limit(f"{what}: zstd window", frame.window_size, 1 << limits.MAX_ZSTD_WINDOW_LOG, "MAX_ZSTD_WINDOW_LOG")
    check_limit(f"{what}: declared size", size, data.size * limits.MAX_ZSTD_RATIO, "MAX_ZSTD_RATIO")
    # A stream does not tell what follows its frame, so blocks are counted: 3 bytes of last (1 bit), type (2), size.
    place, last = zstandard.frame_header_size(data.data), 0
    while not last and place + 3 <= data.size:
        header = int.from_bytes(data[place : place + 3].tobytes(), "little")
        last = header & 1
        place += 3 + (1 if header >> 1 & 3 == _REPEATED else header >> 3)
    if place + (4 if frame.has_checksum else 0) != data.size or not last:
        raise FormatError(f"{what} is not one whole zstd frame")


def _declared_size(data: np.ndarray, what: str) -> int:
    if data[:4].tobytes() != _MAGIC:
        raise FormatError(f"{what} are not a zstd frame: they begin with {data[:4].tobytes().hex()}")
    try:
        return zstandard.frame_content_size(data[:32].tobytes())
    except zstandard.ZstdError as error:
        raise FormatError(f"{what} are not a zstd frame: {error}") from error


def fold_lazily(parts: Sequence[LazyDelta], table: TensorTable) -> Iterator[Sparse | Full]:
    """What ``fold.fold`` makes of the parts, piece by piece: by dtype, tensors ascending, each in one piece only.

    Takes the memory of one batch of ``LAZY_ELEMENTS``, or of one tensor where that is more.

    Args:
        parts: in order of application; taken from the beginning to the end. Objects of one version may stand in any
            order, and share no tensor that one of them carries in full.

    Raises:
        FormatError, LimitError: a part is damaged.
    """
    last_full = np.full(len(table), -1, np.int64)
    for number, part in enumerate(parts):
        last_full[list(part.full)] = number
    in_full = np.flatnonzero(last_full >= 0)
    dtypes = {dtype for part in parts for dtype in part.directory} | {table[tensor].dtype for tensor in in_full}
    for dtype in sorted(dtypes):
        whole = np.array([tensor for tensor in in_full if table[tensor].dtype == dtype], np.int64)
        start = 0
        for stop in _stops(parts, dtype, len(table)):
            layers = [(number, group) for number, part in enumerate(parts) for group in part.take(dtype, stop)]
            if layers:
                yield from fold.fold_groups([group for _, group in layers], last_full)
            for tensor in whole[(whole >= start) & (whole < stop)].tolist():
                yield _moved(parts[last_full[tensor]].full[tensor], int(last_full[tensor]), layers)
            start = stop


def _stops(parts: Sequence[LazyDelta], dtype: str, end: int) -> list[int]:
    """Ids at which batches of about LAZY_ELEMENTS end; the last one is ``end``."""
    rows = [part.directory[dtype] for part in parts if dtype in part.directory]
    if not rows:
        return [end]
    tensors, sizes = fold.sizes_by_tensor([ids for ids, _ in rows], [counts for _, counts in rows])
    return [*tensors[fold.batch_starts(sizes, LAZY_ELEMENTS)[1:]].tolist(), end]


def _moved(full: Full, number: int, layers: list[tuple[int, Sparse]]) -> Full:
    """A tensor in full, with what later parts did to it: a copy, if they did anything."""
    rows = [
        (group, int(row)) for later, group in layers if later > number for row in np.flatnonzero(group.ids == full.id)
    ]
    bits = np.array(full.bits) if rows else full.bits
    for group, row in rows:
        fold.lay_over(bits, group, row)
    return Full(full.id, bits)
