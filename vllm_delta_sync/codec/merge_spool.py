"""``DeltaSpool`` writes a delta object piece by piece, with one block in memory.

Merged deltas and large versions are written this way; ``delta_writer.encode`` writes an object at once.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np

from vllm_delta_sync.codec import full, raw
from vllm_delta_sync.codec.delta_object import FINGERPRINTS, METADATA_KEY, BlockEntries, DeltaContext
from vllm_delta_sync.codec.delta_writer import encode_sparse, fingerprint_lanes, metadata_text
from vllm_delta_sync.codec.zstd import Compression, compress_pieces
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import ObjectRef, object_key
from vllm_delta_sync.format.safetensors_file import header_bytes, layout
from vllm_delta_sync.format.table import TensorSpec, TensorTable, dtype_of
from vllm_delta_sync.tensors.changes import BaseLookup, Bits, Full, Positions, Sparse

SPOOL_ELEMENTS = 2 * 1024 * 1024
"""A block is closed at this many elements; fewer than in a publisher's objects, to save scratch memory."""
COPY_BYTES = 4 * 1024 * 1024
PIECE_BYTES = 1024 * 1024
"""Bytes of a plane that are compressed at once."""


class DeltaSpool:
    """A delta object under construction.

    The pieces are in a scratch file in ``folder`` until ``finish`` copies them in the container's order. Nothing is
    fsynced, since the object is uploaded from here. ``close`` removes the scratch file, finished or not.

    Args:
        codec: of the pieces. old: the bits at the base version, which codec ``tiled`` needs.
        block_elements: a block is closed at this many elements; None for ``SPOOL_ELEMENTS``.

    Attributes:
        bytes: of the pieces so far. changed: elements. tensors: ids carried. full: number of them sent in full.
    """

    def __init__(
        self,
        folder: Path,
        table: TensorTable,
        context: DeltaContext,
        compression: Compression,
        codec: Codec = "plain",
        old: BaseLookup | None = None,
        block_elements: int | None = None,
    ) -> None:
        self._block_elements = SPOOL_ELEMENTS if block_elements is None else block_elements
        self._named = compression == "none" or codec not in RELATIVE_CODECS
        self._folder, self._table, self._context, self._compression = folder, table, context, compression
        self._codec, self._old = codec, old
        self.bytes = self.changed = self.full = 0
        self.tensors: set[int] = set()
        self._entries: dict[str, tuple[str, tuple[int, ...], int]] = {}
        self._blocks: list[dict[str, Any]] = []
        self._pending: list[Sparse] = []
        self._whole: list[Full] = []
        # Elements of each.
        self._pending_size = self._whole_size = 0
        self._path = folder / f"{os.urandom(8).hex()}.pieces"
        self._file: IO[bytes] = self._path.open("w+b")

    def add(self, piece: Sparse | Full) -> None:
        """Append changed elements or a tensor in full; a tensor may come only once.

        Raises:
            StoreError: the disk is full.
        """
        if isinstance(piece, Full):
            self._add_full(piece)
            return
        pending = self._pending
        # Ids ascend within a block, and it has one dtype.
        if pending and (pending[-1].dtype != piece.dtype or pending[-1].ids[-1] >= piece.ids[0]):
            self._flush()
        self._pending.append(piece)
        self.tensors.update(piece.ids.tolist())
        self.changed += piece.positions.size
        self._pending_size += piece.positions.size
        if self._pending_size >= self._block_elements:
            self._flush()

    def add_large(self, tensor: int, count: int, pieces: Callable[[], Iterable[tuple[Positions, Bits]]]) -> None:
        """Append the changed elements of one tensor, with a piece of it in memory; in codec ``tiled`` as ``plain``.

        Args:
            tensor: id. count: number of elements. pieces: returns positions (n,) int64, ascending, and data (n,) as in
                ``Sparse``; called up to twice.

        Raises:
            StoreError: the disk is full.
        """
        self._flush()
        spec = self._table[tensor]
        self.tensors.add(tensor)
        self.changed += count
        if self._codec == "raw":
            name, dtype = raw.index_type(spec)
            self._write_pieces(spec.name + raw.INDICES, name, (count,), (where.astype(dtype) for where, _ in pieces()))
            self._write_pieces(spec.name + raw.VALUES, spec.dtype, (count,), (values for _, values in pieces()))
            return
        from vllm_delta_sync.codec.tiles.coder import LargeTensor

        name, large = f"@{len(self._blocks)}", LargeTensor(spec, pieces)
        self._write(f"{name}.ids", "U32", (1,), np.array([tensor], "<u4"))
        self._write(f"{name}.counts", "U64", (1,), np.array([count], "<u8"))
        self._write_pieces(f"{name}.streams", "U8", None, large.streams())
        tables = large.tables(self._compression)
        self._write(f"{name}.tables", "U8", tables.shape, tables)
        self._blocks.append({"dtype": spec.dtype, "kind": "tiles"})

    def _add_full(self, tensor: Full) -> None:
        self.tensors.add(tensor.id)
        self.changed += tensor.bits.size
        self.full += 1
        spec = self._table[tensor.id]
        if self._named:
            self._write(spec.name, spec.dtype, spec.shape, tensor.bits)
            return
        if spec.numel > self._block_elements:
            self._flush_full()
            self._write_full(spec, tensor)
            return
        self._whole.append(tensor)
        self._whole_size += tensor.bits.size
        if self._whole_size >= self._block_elements:
            self._flush_full()

    def finish(self, path: Path, fingerprints: Mapping[int, Fingerprint]) -> ObjectRef:
        """Write the object to ``path`` and return its reference.

        Args:
            fingerprints: change per tensor id; only those of carried tensors are used.

        Raises:
            StoreError: the disk is full.
        """
        self._flush()
        self._flush_full()
        lanes = fingerprint_lanes({tensor: fingerprints[tensor] for tensor in self.tensors})
        self._write(FINGERPRINTS, "U64", lanes.shape, lanes)
        placed = layout({name: (dtype_of(dtype, name), shape) for name, (dtype, shape, _) in self._entries.items()})
        text = metadata_text(self._codec, self._compression, self._context, self._blocks)
        header = header_bytes(placed, {METADATA_KEY: text})
        digest = sha256(header)
        try:
            with path.open("wb") as file:
                file.write(header)
                for name, entry in placed.items():
                    self._file.seek(self._entries[name][2])
                    left = entry.end - entry.start
                    while left:
                        piece = self._file.read(min(left, COPY_BYTES))
                        if not piece:
                            raise StoreError(f"another process truncated scratch file {self._path.name!r}; try again")
                        digest.update(piece)
                        file.write(piece)
                        left -= len(piece)
                size = file.tell()
        except OSError as error:
            raise _full(self._folder, error) from error
        return ObjectRef(key=object_key(digest.hexdigest()), bytes=size, sha256=digest.hexdigest())

    def close(self) -> None:
        """Remove the scratch file; safe to call twice."""
        with suppress(OSError):  # flushing the buffer fails if the disk is full; the file is removed anyway
            self._file.close()
        self._path.unlink(missing_ok=True)

    def _flush(self) -> None:
        if not self._pending:
            return
        groups, self._pending, self._pending_size = self._pending, [], 0
        joined = groups[0]
        if len(groups) > 1:
            ids, counts, positions, data = (
                np.concatenate([getattr(group, part) for group in groups])
                for part in ("ids", "counts", "positions", "data")
            )
            joined = Sparse(joined.dtype, ids, counts, positions, data, joined.relative)
        blocks = BlockEntries(len(self._blocks))
        encode_sparse(blocks, [joined], self._table, self._codec, self._compression, self._old)
        self._write_blocks(blocks)

    def _flush_full(self) -> None:
        tensors, self._whole, self._whole_size = self._whole, [], 0
        blocks = BlockEntries(len(self._blocks))
        full.encode(blocks, tensors, self._table, self._compression)
        self._write_blocks(blocks)

    def _write_blocks(self, blocks: BlockEntries) -> None:
        for name, (dtype, array) in blocks.arrays.items():
            self._write(name, dtype, array.shape, array)
        self._blocks += blocks.rows

    def _write_full(self, spec: TensorSpec, tensor: Full) -> None:
        """Write a block of one tensor in full."""
        name = f"@{len(self._blocks)}"
        self._write(f"{name}.ids", "U32", (1,), np.array([tensor.id], "<u4"))
        for part, size, pieces in _byte_planes(tensor.bits):
            compressed = compress_pieces(pieces, size, self._compression)
            self._write_pieces(f"{name}.{part}", "U8", None, compressed)
        self._blocks.append({"dtype": spec.dtype, "kind": "full"})

    def _write(self, name: str, dtype: str, shape: tuple[int, ...], array: np.ndarray) -> None:
        self._write_pieces(name, dtype, shape, iter([array]))

    def _write_pieces(
        self, name: str, dtype: str, shape: tuple[int, ...] | None, pieces: Iterator[np.ndarray] | Iterator[bytes]
    ) -> None:
        """Write an entry. Args: shape: None for that of its bytes, which are then U8."""
        try:
            start = self._file.seek(0, os.SEEK_END)
            size = 0
            for piece in pieces:
                size += self._file.write(
                    np.ascontiguousarray(piece).view(np.uint8).data if isinstance(piece, np.ndarray) else piece
                )
            self._entries[name] = (dtype, (size,) if shape is None else shape, start)
            self.bytes += size
        except OSError as error:
            raise _full(self._folder, error) from error


def _byte_planes(bits: Bits) -> Iterator[tuple[str, int, Iterator[np.ndarray]]]:
    """Yield name, size and pieces of the planes of a tensor in full, as ``full.encode`` names them."""
    rows = np.ascontiguousarray(bits).view(np.uint8).reshape(bits.size, bits.itemsize)
    starts = range(0, bits.size, PIECE_BYTES)
    for byte in range(bits.itemsize):
        pieces = (np.ascontiguousarray(rows[start : start + PIECE_BYTES, byte]) for start in starts)
        yield f"bits.{byte}", bits.size, pieces


def _full(folder: Path, error: OSError) -> StoreError:
    return StoreError(f"scratch folder {str(folder)!r} cannot be written: {error.strerror}; free space there")
