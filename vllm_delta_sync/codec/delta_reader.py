"""Read a delta object of a relative codec tensor by tensor, and fold any number of them in bounded memory.

The directory of an object (which tensors, how many elements) and its fingerprints are read and checked first. The
planes are decoded as the tensors are reached, from compressed bytes that stay in their memory map.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec import delta_object, merge, packed
from vllm_delta_sync.codec.blocks import Directory, OpenedBlock, open_blocks, parse_blocks
from vllm_delta_sync.codec.context.coder import ContextBlock
from vllm_delta_sync.codec.full_tensors import FullReader, LazyFulls
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.safetensors_file import Buffer, Container
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors.base_bits import BaseTensor, Old
from vllm_delta_sync.tensors.bits import Bits, apply_distances
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse

LAZY_ELEMENTS = 1024 * 1024
"""Tensors are taken in batches of about this many changed elements, those of all parts together."""


class LazyDelta:
    """One delta object, whose changed elements are taken in ascending order of tensor id, each once.

    Args:
        old: the bits at the base version, as they are when a tensor is taken. Codec ``context`` needs it to take
            anything, and says nothing before; the others do not look at it.

    Attributes:
        codec: of the object. version: that it leads to.
        directory: per dtype (ids, counts), (k,) uint32 and int64, ascending by id.
        full: tensors in full by id, decoded when they are asked for, a block at a time.
        fingerprints: declared changes, per tensor id.
        changed: elements carried, those of tensors in full too.

    Raises:
        UnsupportedError: the object has codec ``raw``.
        DeltaSyncError: as ``delta_object.decode``; what is wrong inside a plane is found when it is taken.
    """

    def __init__(
        self, data: Buffer, table: TensorTable, context: delta_object.DeltaContext, old: Old | None = None
    ) -> None:
        self.version = context.version
        what = self._what = f"delta object of version {context.version}"
        container = Container(data, what)
        metadata = delta_object._metadata(container, context, what)
        self.codec = metadata["codec"]
        if self.codec not in delta_object.RELATIVE:
            raise UnsupportedError(
                f"{what} has codec {self.codec!r}, which holds new values and no distances: only versions of codecs "
                f"{' and '.join(map(repr, delta_object.RELATIVE))} can be folded into an object"
            )
        blocks, compression = parse_blocks(metadata["blocks"], what), metadata["compression"]
        delta_object.check_entries(container, table, delta_object.entry_names(blocks), self.codec, what)
        named = [
            delta_object._named(container, table, name, what) for name in sorted(container.entries) if name in table
        ]
        opened = open_blocks(container, table, blocks, context.changed, what)
        touched = [int(tensor) for item in opened for tensor in item.directory.ids] + [tensor.id for tensor in named]
        if len(set(touched)) != len(touched):
            raise FormatError(f"{what}: a tensor is carried twice")
        self.fingerprints = delta_object._fingerprints(container, set(touched), what)
        whole = [item for item in opened if item.block.kind == "full"]
        self.full: Mapping[int, Full] = LazyFulls(named, [FullReader(container, item, compression) for item in whole])
        changed = [item for item in opened if item.block.kind != "full"]
        self._readers: list[packed.BlockReader | _ContextReader] = [
            packed.BlockReader(container, table, item, compression)
            if item.block.kind != "tiles"
            else _ContextReader(container, table, item, compression, old)
            for item in changed
        ]
        self.directory = {
            dtype: _merged([reader.directory for reader in self._readers if reader.block.element.name == dtype])
            for dtype in sorted({item.block.element.name for item in changed})
        }
        self.changed = sum(int(item.directory.counts.sum()) for item in opened)
        self.changed += sum(tensor.bits.size for tensor in named)

    def take(self, dtype: str, stop: int) -> list[Sparse]:
        """Changed elements of this dtype's tensors with an id below ``stop`` that were not taken yet.

        No tensor is in two of the groups.

        Raises:
            FormatError, LimitError: a plane or stream is damaged, or made against other bits.
            UnsupportedError: the object has codec ``context``, and there are no old bits.
        """
        found = []
        for reader in self._readers:
            last = int(np.searchsorted(reader.directory.ids, stop))
            if reader.block.element.name == dtype and last > reader.row:
                found.append(reader.take(last))
        return found

    def check(self) -> None:
        """Read what can be read without the bits at the base version, and was not read before: tables of blocks.

        Raises:
            FormatError, LimitError: one of them is malformed.
        """
        for reader in self._readers:
            if isinstance(reader, _ContextReader):
                reader.open()

    def pieces(self) -> Iterator[Changes]:
        """The whole object, piece by piece, see ``pieces_of``."""
        return pieces_of([self])


class _ContextReader:
    """One block of codec ``context``, see ``packed.BlockReader``. Its tables are held from the first tensor to the
    last, since an object may have thousands of blocks."""

    def __init__(
        self, container: Container, table: TensorTable, opened: OpenedBlock, compression: Compression, old: Old | None
    ) -> None:
        self.block, self.directory, self._what = opened.block, opened.directory, opened.what
        self._container, self._table, self._compression, self._old = container, table, compression, old
        self.row = 0
        self._tables: ContextBlock | None = None

    def open(self) -> ContextBlock:
        return ContextBlock.open(
            self._container, self._table, self.block, self.directory, self._compression, self._what
        )

    def take(self, last: int) -> Sparse:
        if self._old is None:
            raise UnsupportedError(
                f"{self._what} is of codec 'context', which is read with the weights of the base version at hand; "
                "there are none here"
            )
        first, self.row = self.row, last
        tables = self._tables or self.open()
        self._tables = tables if last < self.directory.ids.size else None
        return tables.take(first, last, self._old)


def pieces_of(parts: Sequence[LazyDelta]) -> Iterator[Changes]:
    """All that the objects of one document change, piece by piece: what ``decode`` gives of them, in the memory
    of a few tensors.

    A tensor is in one piece only. It is taken from all objects before the piece is handed out: who applies the pieces
    to the weights that the objects' ``old`` shows may do so one by one.

    Args:
        parts: no tensor that one of them carries in full is in another.

    Raises:
        FormatError, LimitError: a plane is damaged; pieces before it were handed out.
        UnsupportedError: see ``LazyDelta.take``.
    """
    for dtype in sorted({dtype for part in parts for dtype in part.directory}):
        end = max(int(part.directory[dtype][0][-1]) + 1 for part in parts if dtype in part.directory)
        for stop in _stops(parts, dtype, end):
            groups = [group for part in parts for group in part.take(dtype, stop)]
            touched = {int(tensor) for group in groups for tensor in group.ids}
            sums = {tensor: _declared(parts, tensor) for tensor in sorted(touched)}
            yield Changes(groups, [], sums)
    for part in parts:
        for tensor, full in part.full.items():
            yield Changes([], [full], {tensor: part.fingerprints[tensor]})


def _declared(parts: Sequence[LazyDelta], tensor: int) -> Fingerprint:
    return sum((part.fingerprints[tensor] for part in parts if tensor in part.fingerprints), Fingerprint())


def _merged(directories: list[Directory]) -> tuple[np.ndarray, np.ndarray]:
    ids, counts = (np.concatenate(rows) for rows in zip(*((d.ids, d.counts) for d in directories), strict=True))
    order = np.argsort(ids)
    return ids[order], counts[order]


class RollingBase:
    """Tensors on their way through the versions that are folded: the ``old`` of parts of codec ``context``.

    Args:
        old: the bits at the first version. They stay as they are: a tensor is copied before it moves.
    """

    def __init__(self, old: Old) -> None:
        self._old = old
        self._bits: dict[int, Bits] = {}

    def __call__(self, tensor: int) -> BaseTensor:
        bits = self._bits.get(tensor)
        return self._old(tensor) if bits is None else BaseTensor(bits)

    def move(self, group: Sparse, wanted: npt.NDArray[np.bool_]) -> None:
        """Apply distances to the tensors that are wanted; (tensors of the table,) mask."""
        for tensor, positions, distances in group.tensors():
            if wanted[tensor]:
                if tensor not in self._bits:
                    self._bits[tensor] = np.array(self._old(tensor).bits)
                apply_distances(group.element, self._bits[tensor], positions, distances)

    def replace(self, full: Full) -> None:
        self._bits[full.id] = np.array(full.bits)

    def forget(self) -> None:
        self._bits.clear()


def fold_lazily(
    parts: Sequence[LazyDelta], table: TensorTable, moving: RollingBase | None = None
) -> Iterator[Sparse | Full]:
    """What ``fold.fold`` makes of the parts, piece by piece: by dtype, tensors ascending, each in one piece only.

    Takes the memory of one batch of ``LAZY_ELEMENTS``, or of one tensor where that is more.

    Args:
        parts: in order of application; taken from the beginning to the end. Objects of one version may stand in any
            order, and share no tensor that one of them carries in full.
        moving: what the parts have as their ``old``, if one of them is of codec ``context``.

    Raises:
        FormatError, LimitError: a part is damaged. UnsupportedError: see ``LazyDelta.take``.
    """
    last_full, last_context = (np.full(len(table), -1, np.int64) for _ in range(2))
    for number, part in enumerate(parts):
        last_full[list(part.full)] = number
        if part.codec == "context":
            for ids, _ in part.directory.values():
                last_context[ids] = number
    in_full = np.flatnonzero(last_full >= 0)
    dtypes = {dtype for part in parts for dtype in part.directory} | {table[tensor].dtype for tensor in in_full}
    for dtype in sorted(dtypes):
        whole = np.array([tensor for tensor in in_full if table[tensor].dtype == dtype], np.int64)
        start = 0
        for stop in _stops(parts, dtype, len(table), None if moving is None else table):
            chosen = whole[(whole >= start) & (whole < stop)].tolist()
            layers = _taken(parts, dtype, stop, chosen, last_context, moving)
            if layers:
                yield from merge.fold_groups([group for _, group in layers], last_full)
            for tensor in chosen:
                yield _moved(parts[last_full[tensor]].full[tensor], int(last_full[tensor]), layers)
            start = stop


def _taken(
    parts: Sequence[LazyDelta],
    dtype: str,
    stop: int,
    whole: list[int],
    last_context: npt.NDArray[np.int64],
    moving: RollingBase | None,
) -> list[tuple[int, Sparse]]:
    """What all parts do to the tensors of a batch: (number of the part, changed elements).

    Args:
        whole: tensors of the batch that some part carries in full.
        last_context: (tensors of the table,) the last part of codec ``context`` that changes a tensor.
    """
    layers: list[tuple[int, Sparse]] = []
    first = taken = 0
    for number, part in enumerate(parts):
        layers += [(number, group) for group in part.take(dtype, stop)]
        if moving is None or (number + 1 < len(parts) and parts[number + 1].version == part.version):
            continue
        # Only now: all objects of a version start from the same bits.
        wanted = last_context > number
        for _, group in layers[taken:]:
            moving.move(group, wanted)
        for tensor in whole:
            for carrier in parts[first : number + 1]:
                if wanted[tensor] and tensor in carrier.full:
                    moving.replace(carrier.full[tensor])
        first, taken = number + 1, len(layers)
    if moving is not None:
        moving.forget()
    return layers


def _stops(parts: Sequence[LazyDelta], dtype: str, end: int, table: TensorTable | None = None) -> list[int]:
    """Ids at which batches of about LAZY_ELEMENTS end, changed ones or, with a table, all; the last one is ``end``."""
    rows = [part.directory[dtype] for part in parts if dtype in part.directory]
    if not rows:
        return [end]
    tensors, sizes = merge.sizes_by_tensor([ids for ids, _ in rows], [counts for _, counts in rows])
    if table is not None:
        sizes = np.maximum(sizes, [table[int(tensor)].numel for tensor in tensors])
    return [*tensors[merge.batch_starts(sizes, LAZY_ELEMENTS)[1:]].tolist(), end]


def _moved(full: Full, number: int, layers: list[tuple[int, Sparse]]) -> Full:
    """A tensor in full, with what later parts did to it: a copy, if they did anything."""
    rows = [
        (group, int(row)) for later, group in layers if later > number for row in np.flatnonzero(group.ids == full.id)
    ]
    bits = np.array(full.bits) if rows else full.bits
    for group, row in rows:
        merge.lay_over(bits, group, row)
    return Full(full.id, bits)
