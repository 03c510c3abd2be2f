"""What a delta object consists of: the step that it belongs to, its metadata, and blocks of tensors.

``delta_writer`` and ``delta_reader`` share these definitions. A block holds tensors of one dtype; a tensor never spans
blocks. Block k has the entries ``@k.…``.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt

from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import FormatError, TensorMismatchError, UnsupportedError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.dtypes import DType, dtype_of
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.safetensors_file import Container, aligned
from vllm_delta_sync.format.table import TensorTable

Codec = Literal["packed", "context", "raw"]
CODECS = ("packed", "context", "raw")
RELATIVE = ("packed", "context")
"""Codecs that carry ULP distances; the other one carries new bits."""

METADATA_KEY = "delta_sync"
FINGERPRINTS = "@fingerprints"

BLOCK_ELEMENTS = 16 * 1024 * 1024
"""A writer closes a block once it holds this many elements: bounds scratch memory on both sides."""
Kind = Literal["sparse", "dense", "tiles", "full"]
KINDS = ("sparse", "dense", "tiles", "full")
TILES_PARTS = ("ids", "counts", "tables", "streams")
"""Entries of a block of kind tiles, which is codec ``context``'s."""
Arrays = dict[str, tuple[str, npt.NDArray[Any]]]
"""Container entries to be: name → (dtype name, bits)."""


@dataclass(frozen=True)
class DeltaContext:
    """Which step of which run an object belongs to; a reader refuses one that says otherwise.

    Attributes:
        changed: elements that its document says all its objects carry, None where nothing says so.
    """

    run: str
    version: int
    base_version: int
    changed: int | None = None


def required_features(codec: Codec, compression: Compression) -> list[str]:
    """The ``requires`` list of a delta manifest."""
    return sorted({codec, *(("zstd",) if compression == "zstd" and codec != "raw" else ())})


@dataclass(frozen=True)
class Block:
    """One block of an object: its number there, its element type, how it holds its tensors."""

    index: int
    element: DType
    kind: Kind

    @property
    def name(self) -> str:
        """What its entries' names begin with, before the dot."""
        return f"@{self.index}"

    @property
    def metadata(self) -> dict[str, Any]:
        """Its row of ``blocks``."""
        return {"dtype": self.element.name, "kind": self.kind}


@dataclass(frozen=True)
class Directory:
    """Which tensors a block holds: (k,) uint32 ids, ascending; (k,) int64 elements carried of each, and owned."""

    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    numels: npt.NDArray[np.int64]


def parse_blocks(rows: list[Any], what: str) -> list[Block]:
    """The ``blocks`` metadata.

    Raises:
        FormatError, LimitError: a block without a known dtype and a kind, or too many.
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
    """Read and check ``ids``, and ``counts`` where the block is not full.

    Raises:
        FormatError: not strictly ascending, or counts that the tensors have not.
        TensorMismatchError: a tensor that the table has not, or of another dtype.
    """
    ids = _integers(container, f"{block.name}.ids", "U32", what)
    if not ids.size or np.any(ids[1:] <= ids[:-1]):
        raise FormatError(f"{what}: there are no tensor ids, or they are not strictly ascending")
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
    """A block whose directory is read: the block, its tensors, and what errors call it."""

    block: Block
    directory: Directory
    what: str


def open_blocks(
    container: Container, table: TensorTable, blocks: Iterable[Block], most: int | None, what: str
) -> list[OpenedBlock]:
    """Read the directories of blocks.

    Args:
        most: elements that they may carry in all: a small object can stand for a large one.

    Raises:
        FormatError, TensorMismatchError: see ``read_directory``; also where they carry more than ``most``.
    """
    opened = []
    for block in blocks:
        where = f"{what}, block {block.index}"
        opened.append(OpenedBlock(block, read_directory(container, table, block, where), where))
    check_carried((item.directory for item in opened), most, what)
    return opened


def check_carried(directories: Iterable[Directory], most: int | None, what: str) -> None:
    """Raise FormatError if blocks carry more elements than ``most``."""
    carried = sum(int(directory.counts.sum()) for directory in directories)
    if most is not None and carried > most:
        raise FormatError(f"{what}: blocks carry {carried} elements, the manifest says {most}")


def bytes_of(container: Container, name: str) -> npt.NDArray[np.uint8]:
    """An entry of bytes, as a view.

    Raises:
        FormatError: it is missing, or of another type.
    """
    bits = container.bits(name)
    if container.entries[name].dtype.name != "U8":
        raise FormatError(f"entry {name!r} is not U8")
    return cast("npt.NDArray[np.uint8]", bits)


def block_ranges(sizes: npt.NDArray[np.int64], most: int) -> list[tuple[int, int]]:
    """Rows [first, last) of each block, closed once it holds ``most`` elements."""
    ranges = []
    first = held = 0
    for row, size in enumerate(sizes.tolist()):
        held += size
        if held >= most:
            ranges.append((first, row + 1))
            first, held = row + 1, 0
    if first < sizes.size:
        ranges.append((first, sizes.size))
    return ranges


def _integers(container: Container, name: str, dtype: str, what: str) -> npt.NDArray[Any]:
    bits = container.bits(name)
    if container.entries[name].dtype.name != dtype:
        raise FormatError(f"{what}: entry {name!r} is not {dtype}")
    return aligned(bits)


def sizes_by_tensor(
    ids: list[npt.NDArray[np.uint32]], counts: list[npt.NDArray[np.int64]]
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
    """(tensor ids, ascending, elements of all layers)."""
    tensors, rows = np.unique(np.concatenate(ids), return_inverse=True)
    sizes = np.zeros(tensors.size, np.int64)
    np.add.at(sizes, rows, np.concatenate(counts))
    return tensors, sizes


def batch_starts(sizes: npt.NDArray[np.int64], elements: int) -> npt.NDArray[np.int64]:
    """Where batches of about so many elements begin in a row of tensors of these sizes."""
    number = (np.cumsum(sizes) - sizes) // elements
    return np.flatnonzero(np.diff(number, prepend=-1))
