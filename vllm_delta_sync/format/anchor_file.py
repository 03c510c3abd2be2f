"""Anchor objects: a full snapshot as an ordinary safetensors checkpoint shard, loadable by anyone."""

import os
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from vllm_delta_sync.errors import FormatError, StoreError, TensorMismatchError
from vllm_delta_sync.format.limits import check_object_count
from vllm_delta_sync.format.safetensors_file import Buffer, Container, header_bytes, layout
from vllm_delta_sync.format.table import TensorSpec, TensorTable


def write_anchor(path: Path, table: TensorTable, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Write every tensor of the table to one file, in whatever order they come; durable on return.

    Args:
        tensors: (checkpoint name, flat (numel,) unsigned bits) pairs; one at a time is held.

    Raises:
        TensorMismatchError: a tensor is unknown, twice, missing, or has another width or size than the table says.
        StoreError: the disk is full or not writable.
    """
    placed = layout({spec.name: (spec.element, spec.shape) for spec in table})
    header = header_bytes(placed, {"format": "pt"})
    pending = {spec.name for spec in table}
    try:
        with path.open("wb") as file:
            file.write(header)
            for name, bits in tensors:
                spec = table.by_name(name)
                if name not in pending or bits.dtype != spec.element.uint or bits.size != spec.numel:
                    raise TensorMismatchError(
                        f"tensor {name!r} has {bits.size} elements of {bits.dtype}; the table says {spec.numel} of "
                        f"{spec.dtype}, once"
                    )
                pending.discard(name)
                file.seek(len(header) + placed[name].start)
                file.write(np.ascontiguousarray(bits).view(np.uint8).data)
                # Let go of it before the next one is made.
                del bits
            file.truncate(len(header) + table.full_bytes)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise StoreError(f"anchor file {path.name!r} cannot be written: {error.strerror}; free space there") from error
    if pending:
        raise TensorMismatchError(f"tensor {min(pending)!r} is missing from the snapshot ({len(pending)} in all)")


def shard_tables(table: TensorTable, shard_bytes: int) -> list[TensorTable]:
    """Cut a table into pieces of at most ``shard_bytes``, in its order; a larger tensor is a piece of its own.

    Raises:
        LimitError: they are more than an anchor can list.
    """
    pieces: list[list[TensorSpec]] = []
    held = 0
    for spec in table:
        if not pieces or held + spec.nbytes > shard_bytes:
            pieces.append([])
            held = 0
        pieces[-1].append(spec)
        held += spec.nbytes
    check_object_count(len(pieces), shard_bytes, table.full_bytes)
    return [TensorTable(piece) for piece in pieces]


def read_anchor(data: Buffer, table: TensorTable, what: str) -> Container:
    """Parse an anchor shard and check that its tensors are the table's.

    Raises:
        FormatError, LimitError: malformed container.
        TensorMismatchError: an entry is not in the table, or has another dtype or shape.
    """
    container = Container(data, what)
    for name, entry in container.entries.items():
        spec = table.by_name(name)
        if entry.dtype.name != spec.dtype or entry.shape != spec.shape:
            raise TensorMismatchError(
                f"{what}: tensor {name!r} is {entry.dtype.name} {list(entry.shape)}, the run's table says "
                f"{spec.dtype} {list(spec.shape)}"
            )
    if not container.entries and len(table):
        raise FormatError(f"{what}: holds no tensor")
    return container
