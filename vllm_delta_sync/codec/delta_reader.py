"""``DeltaReader`` reads a delta object tensor by tensor, ``decode`` all of it; the bytes are treated as hostile input.

A reader first reads and checks the directories of all blocks (which tensors, how many elements). It decodes tensors
when they are asked for, from compressed bytes that stay in their memory map.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from vllm_delta_sync.codec import full, raw
from vllm_delta_sync.codec.delta_object import (
    FINGERPRINTS,
    METADATA_KEY,
    TILES_PARTS,
    DeltaContext,
    Directory,
    OpenedBlock,
    batch_starts,
    open_blocks,
    parse_blocks,
)
from vllm_delta_sync.codec.full import FullReader, LazyFullTensors
from vllm_delta_sync.codec.raw import RawReader
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.codec.tiles.coder import CodedTensor, TilesBlock
from vllm_delta_sync.codec.zstd import COMPRESSIONS, Compression
from vllm_delta_sync.errors import ChainError, FormatError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.format.base_document import check_format_version, load_canonical
from vllm_delta_sync.format.codecs import BASE_CODECS, CODECS, RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.safetensors_file import Buffer, Container, aligned
from vllm_delta_sync.format.table import DType, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, Changes, Full, Sparse

LAZY_ELEMENTS = 1024 * 1024
"""Tensors are read in batches of about this many changed elements, over all objects."""
BASE_ELEMENTS = 16 * 1024 * 1024
"""Where the old bits of a batch are kept, its tensors have about this many elements."""


def decode(data: Buffer, table: TensorTable, context: DeltaContext, old: BaseLookup | None = None) -> Changes:
    """Read a delta object at once; the result is safe to apply to the tensors of ``table``.

    Args:
        old: the bits at the base version; only codec ``tiled`` needs them. Where it has a part of a tensor, only that
            part is decoded.

    Raises:
        DeltaSyncError: as ``DeltaReader`` and ``DeltaReader.take``.
    """
    return DeltaReader(data, table, context, old).rest()


def compile_kernels(elements: Iterable[DType]) -> None:
    """Compile the loops that decode objects of any codec, for these element types, so that no ``decode`` waits."""
    chosen = list(elements)
    coder.compile_decoder(chosen)
    raw.compile_decoder()


def read_metadata(container: Container, context: DeltaContext, what: str) -> dict[str, Any]:
    """Return a delta object's checked metadata. Raises as ``decode``."""
    text = container.metadata.get(METADATA_KEY)
    if text is None:
        raise FormatError(f"{what}: metadata has no {METADATA_KEY!r}; this is not a delta object")
    value = load_canonical(text.encode(), f"{what} metadata")
    if not isinstance(value, dict):
        raise FormatError(f"{what}: metadata is not a JSON object")
    check_format_version(value, what)
    for name, kind in (
        ("run", str),
        ("version", int),
        ("base_version", int),
        ("codec", str),
        ("compression", str),
    ):
        if type(value.get(name)) is not kind:
            raise FormatError(f"{what}: field {name!r} is missing or not of type {kind.__name__}")
    if not isinstance(value.get("blocks"), list):
        raise FormatError(f"{what}: field 'blocks' is missing or not a list")
    for name in ("run", "version", "base_version"):
        if value[name] != getattr(context, name):
            raise ChainError(
                f"{what}: field {name!r} is {str(value[name])[:40]!r}, the manifest says {getattr(context, name)!r}"
            )
    codec, compression = value["codec"], value["compression"]
    if codec not in CODECS or compression not in COMPRESSIONS:
        raise UnsupportedError(
            f"{what}: codec {codec[:40]!r} with compression {compression[:40]!r} is unknown to this release; upgrade "
            "to read it"
        )
    if codec not in RELATIVE_CODECS and (compression != "none" or value["blocks"]):
        raise FormatError(f"{what}: codec {codec!r} has no compression and no blocks")
    return value


def _declared_fingerprints(
    container: Container, table: TensorTable, known: set[str], carried: list[int], codec: Codec, what: str
) -> dict[int, Fingerprint]:
    """Return the declared changes of fingerprint of an object's tensors; first checks what else the object has.

    Args:
        known: names of the entries of its codec. carried: ids of its tensors.

    Raises:
        FormatError: a tensor is carried twice; also malformed fingerprints.
        TensorMismatchError: an entry is neither a tensor of the table, nor known, nor the fingerprints.
    """
    tensors = {name for name in container.entries if name in table}
    if tensors & known:
        raise FormatError(f"{what}: a tensor of the table has the name of an entry of codec {codec!r}")
    unknown = set(container.entries) - known - tensors - {FINGERPRINTS}
    if unknown:
        raise TensorMismatchError(
            f"{what}: entry {min(unknown)[:120]!r} is neither a tensor of this run's table nor an entry of codec "
            f"{codec!r}; the object belongs to another model"
        )
    touched = sorted(set(carried))
    if len(touched) != len(carried):
        raise FormatError(f"{what}: a tensor is carried twice")
    lanes = container.bits(FINGERPRINTS)
    entry = container.entries[FINGERPRINTS]
    if entry.dtype.name != "U64" or entry.shape != (len(touched), 2):
        raise FormatError(
            f"{what}: fingerprints are {entry.dtype.name} {list(entry.shape)}; U64 and a pair for each of the "
            f"{len(touched)} tensors carried expected"
        )
    pairs = zip(touched, lanes.reshape(-1, 2).tolist(), strict=True)
    return {tensor: Fingerprint(low, high) for tensor, (low, high) in pairs}


def _named(container: Container, table: TensorTable) -> list[Full]:
    """Return the tensors in full that are entries under their own names."""
    names = [name for name in container.entries if name in table]
    for name in names:
        container.check_entry(table.by_name(name))
    return [Full(table.index(name), aligned(container.bits(name))) for name in names]


class DeltaReader:
    """A delta object whose tensors are decoded on demand, once each, in ascending order of id.

    Args:
        old: the bits at the base version, read when a tensor is taken; only codec ``tiled`` needs them. Where it has a
            part of a tensor, only that part is decoded.
        backwards: read the changes that lead back; ``old`` then only says which parts are wanted.

    Attributes:
        codec: of the object.
        directory: per dtype (ids, counts), (k,) uint32 and int64, ascending by id.
        full: tensors in full by id, decoded on access, a block at a time.
        fingerprints: declared changes, per tensor id.
        changed: elements carried, including those of tensors in full.

    Raises:
        FormatError, LimitError: malformed.
        UnsupportedError: a codec or compression of a later release.
        ChainError: the object belongs to another run, version or base version; or cannot be read backwards.
        TensorMismatchError: a tensor is not in the table, or has another dtype or shape.
    """

    def __init__(
        self,
        data: Buffer,
        table: TensorTable,
        context: DeltaContext,
        old: BaseLookup | None = None,
        backwards: bool = False,
    ) -> None:
        self._backwards = backwards
        what = f"delta object of version {context.version}"
        container = Container(data, what)
        metadata = read_metadata(container, context, what)
        self.codec: Codec = metadata["codec"]
        named = _named(container, table)
        whole: list[FullReader] = []
        self._readers: list[TilesReader | RawReader] = []
        if self.codec == "raw":
            self._readers += raw.open_readers(container, table, old, what)
            known = raw.entry_names(table, container)
        else:
            blocks, compression = parse_blocks(metadata["blocks"], what), metadata["compression"]
            for item in open_blocks(container, table, blocks, context.changed, what):
                if item.block.kind == "full":
                    whole.append(FullReader(container, item, compression))
                else:
                    self._readers.append(TilesReader(container, table, item, self.codec, compression, old, backwards))
            known = full.entry_names(block for block in blocks if block.kind == "full")
            known |= {f"{block.name}.{part}" for block in blocks if block.kind == "tiles" for part in TILES_PARTS}
        directories = [reader.directory for reader in self._readers] + [reader.directory for reader in whole]
        carried = [tensor.id for tensor in named]
        carried += [int(tensor) for directory in directories for tensor in directory.ids]
        self.fingerprints = _declared_fingerprints(container, table, known, carried, self.codec, what)
        self.full: Mapping[int, Full] = LazyFullTensors(named, whole)
        self.directory = {
            dtype: _merged([reader.directory for reader in self._readers if reader.dtype == dtype])
            for dtype in sorted({reader.dtype for reader in self._readers})
        }
        self.changed = sum(int(directory.counts.sum()) for directory in directories)
        self.changed += sum(tensor.bits.size for tensor in named)
        if backwards:
            if self.full or self.codec == "raw":
                raise ChainError(f"{what} replaces bits and cannot be reverted: it does not contain the old bits")
            self.fingerprints = {tensor: Fingerprint() - change for tensor, change in self.fingerprints.items()}

    def take(self, dtype: str, stop: int) -> list[Sparse]:
        """Return changed elements, not taken yet, of this dtype's tensors with an id below ``stop``.

        A tensor is in one group only. Tensors are left out of which ``old`` has no changed element.

        Raises:
            FormatError, LimitError: a plane or stream is damaged, or was made against other bits; positions outside
                their tensor.
            UnsupportedError: the object has codec ``tiled``, and there are no base bits.
        """
        found = []
        for reader in self._readers:
            last = int(np.searchsorted(reader.directory.ids, stop))
            if reader.dtype == dtype and last > reader.row:
                found.append(self._directed(reader.take(last)))
        return [group for group in found if group.ids.size]

    def coded(self, wanted: Callable[[int], bool]) -> Iterator[CodedTensor]:
        """Yield tensors as they are, to be decoded elsewhere; ``take`` decodes them unless ``old`` has no part of them.

        Args:
            wanted: says of a tensor's id whether to yield it, if it lies in tiles.

        Raises:
            FormatError, LimitError: a table is damaged.
        """
        for reader in self._readers:
            if isinstance(reader, TilesReader):
                yield from reader.coded(wanted)

    def rest(self) -> Changes:
        """Return what was not taken yet, at once. Raises as ``take``."""
        groups = [
            self._directed(reader.take(reader.directory.ids.size))
            for reader in self._readers
            if reader.row < reader.directory.ids.size
        ]
        return Changes([group for group in groups if group.ids.size], [*self.full.values()], self.fingerprints)

    def _directed(self, group: Sparse) -> Sparse:
        return replace(group, data=group.data.dtype.type(0) - group.data) if self._backwards else group

    def check(self) -> None:
        """Check the tables of blocks, which need no base bits and are otherwise read on demand.

        Raises:
            FormatError, LimitError: a table is malformed.
        """
        for reader in self._readers:
            if isinstance(reader, TilesReader):
                reader.open()


class TilesReader:
    """Reads a block of kind tiles, tensor by tensor in ascending order of id.

    Its tables stay in memory only from its first tensor to its last, since an object may have thousands of blocks.

    Attributes:
        dtype: of its tensors. directory: its tensors. row: index of the first tensor not taken yet.
    """

    def __init__(
        self,
        container: Container,
        table: TensorTable,
        opened: OpenedBlock,
        codec: Codec,
        compression: Compression,
        old: BaseLookup | None,
        backwards: bool,
    ) -> None:
        self._block, self.directory, self._what = opened.block, opened.directory, opened.what
        self.dtype = opened.block.element.name
        self._container, self._table, self._codec, self._compression = container, table, codec, compression
        # Backwards, ``old`` has the bits of the other version.
        self._old, self._has_bits = old, old is not None and not backwards
        self.row = 0
        self._tables: TilesBlock | None = None

    def open(self) -> TilesBlock:
        """Return the block with its tables. Raises FormatError or LimitError if they are malformed."""
        found = TilesBlock.open(
            self._container, self._table, self._block, self.directory, self._compression, self._what
        )
        if self._codec not in BASE_CODECS and not found.all_plain:
            raise FormatError(f"{self._what}: codec {self._codec!r} has a tile that is not plain")
        return found

    def coded(self, wanted: Callable[[int], bool]) -> Iterator[CodedTensor]:
        """Yield tensors as they are; see ``DeltaReader.coded``."""
        rows = [row for row, tensor in enumerate(self.directory.ids.tolist()) if wanted(tensor)]
        if rows:
            block = self.open()
            yield from map(block.coded, rows)

    def take(self, last: int) -> Sparse:
        """Return changed elements of the tensors from ``row`` up to row ``last``, excluded; at least one tensor.

        Raises:
            FormatError, LimitError: a table or stream is damaged, or was made against other bits.
            UnsupportedError: there are no base bits, or too few.
        """
        rows, self.row = range(self.row, last), last
        old = self._old
        found = ((row, None if old is None else old(int(self.directory.ids[row]))) for row in rows)
        # Of a model of experts a rank holds few tensors, and needs no tables of blocks without them.
        wanted = deque((row, base) for row, base in found if base is None or base.rectangles != ())
        if not wanted:
            self._tables = None if last == self.directory.ids.size else self._tables
            return Sparse.empty(self._block.element, relative=True)
        tables = self._tables or self.open()
        if not self._has_bits and not tables.all_plain:
            raise UnsupportedError(
                f"{self._what} has codec {self._codec!r} and can be decoded only with the weights of its base version, "
                "which are not available here"
            )
        self._tables = tables if last < self.directory.ids.size else None
        return tables.take(wanted)


def pieces_of(parts: Sequence[DeltaReader]) -> Iterator[Changes]:
    """Yield what ``decode`` returns for the objects of one document, piece by piece in the memory of few tensors.

    A tensor is in one piece only, and is read from all objects before that piece is yielded. So each piece may be
    applied at once, even to the weights that the objects' ``old`` reads.

    Args:
        parts: a tensor that one of them carries in full is in no other.

    Raises:
        FormatError, LimitError: a plane is damaged; earlier pieces were already yielded.
        UnsupportedError: see ``DeltaReader.take``.
    """
    for dtype in sorted({dtype for part in parts for dtype in part.directory}):
        end = max(int(part.directory[dtype][0][-1]) + 1 for part in parts if dtype in part.directory)
        start = 0
        for stop in batch_stops(parts, dtype, end):
            groups = [group for part in parts for group in part.take(dtype, stop)]
            # Also of tensors that change in other parts only than those that ``old`` has.
            carried = np.concatenate([part.directory[dtype][0] for part in parts if dtype in part.directory])
            touched = np.unique(carried[(carried >= start) & (carried < stop)]).tolist()
            yield Changes(groups, [], {tensor: _declared(parts, tensor) for tensor in touched})
            start = stop
    for part in parts:
        for tensor, found in part.full.items():
            yield Changes([], [found], {tensor: part.fingerprints[tensor]})


def _declared(parts: Sequence[DeltaReader], tensor: int) -> Fingerprint:
    return sum((part.fingerprints[tensor] for part in parts if tensor in part.fingerprints), Fingerprint())


def _merged(directories: list[Directory]) -> tuple[np.ndarray, np.ndarray]:
    ids, counts = (np.concatenate(rows) for rows in zip(*((d.ids, d.counts) for d in directories), strict=True))
    order = np.argsort(ids)
    return ids[order], counts[order]


def batch_stops(parts: Sequence[DeltaReader], dtype: str, end: int, table: TensorTable | None = None) -> list[int]:
    """Return the ids at which batches end; the last one is ``end``.

    A batch has about LAZY_ELEMENTS changed elements, and if ``table`` is given, BASE_ELEMENTS of its tensors.
    """
    rows = [part.directory[dtype] for part in parts if dtype in part.directory]
    if not rows:
        return [end]
    # The elements of each tensor in all parts.
    tensors, places = np.unique(np.concatenate([ids for ids, _ in rows]), return_inverse=True)
    sizes = np.zeros(tensors.size, np.int64)
    np.add.at(sizes, places, np.concatenate([counts for _, counts in rows]))
    if table is not None:
        numels = np.array([table[tensor].numel for tensor in tensors.tolist()], np.int64)
        sizes = np.maximum(sizes, numels * LAZY_ELEMENTS // BASE_ELEMENTS)
    return [*tensors[batch_starts(sizes, LAZY_ELEMENTS)[1:]].tolist(), end]
