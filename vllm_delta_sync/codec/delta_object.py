"""The parts of a delta object that ``delta_writer`` and ``delta_reader`` share: metadata and blocks of tensors.

A block contains tensors of one dtype; a tensor never spans blocks. The entries of block k are named ``@k.…``.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import FormatError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.safetensors_file import Container, aligned
from vllm_delta_sync.format.table import DType, TensorTable, dtype_of

METADATA_KEY = "delta_sync"
FINGERPRINTS = "@fingerprints"

BLOCK_ELEMENTS = 16 * 1024 * 1024
"""A writer closes a block at this many elements, which bounds scratch memory on both sides."""
Kind = Literal["tiles", "full"]
KINDS = ("tiles", "full")
TILES_PARTS = ("ids", "counts", "tables", "streams")
"""Entries of a block of kind tiles."""
Arrays = dict[str, tuple[str, npt.NDArray[Any]]]
"""Container entries: name → (dtype name, bits)."""


@dataclass(frozen=True)
class DeltaContext:
    """The run and versions that an object belongs to; a reader refuses an object with others in its metadata.

    Attributes:
        changed: elements that all objects of its document carry, according to the document; None if unknown.
    """

    run: str
    version: int
    base_version: int
    changed: int | None = None


def required_features(codec: Codec, compression: Compression) -> list[str]:
    """Return the ``requires`` list of a delta's manifest."""
    return sorted({codec, *(("zstd",) if compression == "zstd" and codec in RELATIVE_CODECS else ())})


@dataclass(frozen=True)
class Block:
    """One block of an object: its number, its element type, and how it stores its tensors."""

    index: int
    element: DType
    kind: Kind

    @property
    def name(self) -> str:
        """Prefix of the names of its entries, before the dot."""
        return f"@{self.index}"


@dataclass
class BlockEntries:
    """The blocks of an object that is being written: its container entries, and the rows of its ``blocks`` metadata.

    Attributes:
        first: number of the first block.
    """

    first: int = 0
    arrays: Arrays = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, element: DType, kind: Kind, entries: Arrays) -> None:
        """Append a block; the names in ``entries`` lack the block's number."""
        block = Block(self.first + len(self.rows), element, kind)
        self.arrays |= {f"{block.name}.{part}": entry for part, entry in entries.items()}
        self.rows.append({"dtype": element.name, "kind": kind})


@dataclass(frozen=True)
class Directory:
    """Tensors of a block: (k,) uint32 ids, ascending; (k,) int64 elements carried and (k,) int64 total elements."""

    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    numels: npt.NDArray[np.int64]


def parse_blocks(rows: list[Any], what: str) -> list[Block]:
    """Parse the ``blocks`` metadata.

    Raises:
        FormatError, LimitError: too many blocks, or a block without a kind or a known dtype.
        UnsupportedError: a kind of a later release.
    """
    check_limit(f"{what}: blocks", len(rows), limits.MAX_BLOCK_COUNT, "MAX_BLOCK_COUNT")
    blocks = []
    for index, row in enumerate(rows):
        if not isinstance(row, dict) or not all(isinstance(row.get(member), str) for member in ("dtype", "kind")):
            raise FormatError(f"{what}: block {index} has no dtype or no kind")
        element, kind = dtype_of(row["dtype"], f"{what}: block {index}"), row["kind"]
        if kind not in KINDS:
            raise UnsupportedError(
                f"{what}: block {index} is of kind {kind[:40]!r}, not {', '.join(KINDS)}; upgrade to read it"
            )
        blocks.append(Block(index, element, cast(Kind, kind)))
    return blocks


def read_directory(container: Container, table: TensorTable, block: Block, what: str) -> Directory:
    """Read and check ``ids`` and, unless the block is full, ``counts``.

    Raises:
        FormatError: ids are not strictly ascending, or a count does not fit its tensor.
        TensorMismatchError: a tensor is not in the table, or has another dtype.
    """
    ids = _integers(container, f"{block.name}.ids", "U32", what)
    if not ids.size or np.any(ids[1:] <= ids[:-1]):
        raise FormatError(f"{what}: tensor ids are missing or not strictly ascending")
    if int(ids[-1]) >= len(table):
        raise TensorMismatchError(f"{what}: tensor id {int(ids[-1])} in a table of {len(table)} tensors")
    specs = [table[tensor] for tensor in ids.tolist()]
    for spec in specs:
        if spec.dtype != block.element.name:
            raise TensorMismatchError(
                f"{what}: tensor {spec.name!r} is {spec.dtype}, the block carries {block.element.name}"
            )
    numels = np.array([spec.numel for spec in specs], np.int64)
    if block.kind == "full":
        return Directory(ids, numels, numels)
    counts = _integers(container, f"{block.name}.counts", "U64", what)
    if ids.size != counts.size:
        raise FormatError(f"{what}: {counts.size} counts for {ids.size} tensors")
    bad = np.flatnonzero((counts < 1) | (counts > numels.astype(np.uint64)))
    if bad.size:
        spec = specs[bad[0]]
        raise FormatError(f"{what}: {int(counts[bad[0]])} changed elements in {spec.name!r} of {spec.numel}")
    return Directory(ids, counts.astype(np.int64), numels)


@dataclass(frozen=True)
class OpenedBlock:
    """A block whose directory has been read: the block, its tensors, and its name in errors."""

    block: Block
    directory: Directory
    what: str


def open_blocks(
    container: Container, table: TensorTable, blocks: Iterable[Block], most: int | None, what: str
) -> list[OpenedBlock]:
    """Read the directories of blocks.

    Args:
        most: limit for the elements of all blocks, since a small object may expand to a large one; None means no limit.

    Raises:
        FormatError, TensorMismatchError: see ``read_directory``; also if they carry more than ``most`` elements.
    """
    opened = []
    for block in blocks:
        where = f"{what}, block {block.index}"
        opened.append(OpenedBlock(block, read_directory(container, table, block, where), where))
    carried = sum(int(item.directory.counts.sum()) for item in opened)
    if most is not None and carried > most:
        raise FormatError(f"{what}: blocks carry {carried} elements, the manifest says {most}")
    return opened


def bytes_of(container: Container, name: str) -> npt.NDArray[np.uint8]:
    """Return a view of an entry of type U8; raises FormatError if it is missing or has another type."""
    bits = container.bits(name)
    if container.entries[name].dtype.name != "U8":
        raise FormatError(f"entry {name!r} is not U8")
    return cast("npt.NDArray[np.uint8]", bits)


def block_ranges(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Return the rows [first, last) of each block; a block is closed once it has ``most`` elements."""
    ranges = []
    first = filled = 0
    for row, size in enumerate(sizes.tolist()):
        filled += size
        if filled >= most:
            ranges.append((first, row + 1))
            first, filled = row + 1, 0
    if first < sizes.size:
        ranges.append((first, sizes.size))
    return ranges


def _integers(container: Container, name: str, dtype: str, what: str) -> npt.NDArray[Any]:
    bits = container.bits(name)
    if container.entries[name].dtype.name != dtype:
        raise FormatError(f"{what}: entry {name!r} is not {dtype}")
    return aligned(bits)


def batch_starts(sizes: npt.NDArray[np.int64], elements: int) -> npt.NDArray[np.int64]:
    """Return indices at which batches of about ``elements`` elements begin, in a sequence of tensors of these sizes."""
    number = (np.cumsum(sizes) - sizes) // elements
    return np.flatnonzero(np.diff(number, prepend=-1))
