"""``read_sizes`` says what each tensor takes of a delta object, from its header and directories alone."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from vllm_delta_sync.codec.delta_object import DeltaContext, open_blocks, parse_blocks
from vllm_delta_sync.codec.delta_reader import read_metadata
from vllm_delta_sync.codec.raw import INDICES, VALUES
from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorTable

FIRST_READ = 64 * 1024
"""Bytes to read first; in most objects the header and the directories lie within them."""


@dataclass(frozen=True)
class ObjectSizes:
    """What each tensor takes of a delta object.

    Attributes:
        elements, bytes: by tensor id. Tensors of one block are compressed together; each is counted with the share of
            the block's bytes that its elements have of the block's elements.
        read: bytes that were read.
    """

    elements: Counter[int]
    bytes: Counter[int]
    read: int


def read_sizes(
    read: Callable[[int, int], bytes], size: int, table: TensorTable, context: DeltaContext, what: str
) -> ObjectSizes:
    """Read the header and the directories of a delta object. Its digest is not checked.

    Args:
        read: returns bytes of the object, from (offset, length). size: of the object, checked against a limit before.

    Raises:
        DeltaSyncError: it is damaged, or does not belong to the document; as ``delta_reader.decode``.
    """
    # Bytes that are not read stay zeros, which take no memory.
    data = np.zeros(size, np.uint8)
    done = 0

    def fill(start: int, end: int) -> None:
        nonlocal done
        found = read(start, end - start)
        if len(found) != end - start:
            raise FormatError(f"{what} has fewer than the {size} bytes that its document lists")
        data[start:end] = np.frombuffer(found, np.uint8)
        done += len(found)

    first = min(size, FIRST_READ)
    fill(0, first)
    header = 8 + int.from_bytes(data[:8].tobytes(), "little")
    check_limit(f"{what}: header size", header - 8, limits.MAX_HEADER_BYTES, "MAX_HEADER_BYTES")
    if first < header <= size:
        fill(first, header)
    container = Container(data, what)
    blocks = parse_blocks(read_metadata(container, context, what)["blocks"], what)
    for name in (f"{block.name}.{part}" for block in blocks for part in ("ids", "counts")):
        entry = container.entries.get(name)
        if entry is not None and header + entry.end > max(first, header):
            fill(header + entry.start, header + entry.end)
    elements: Counter[int] = Counter()
    sizes: Counter[int] = Counter()
    of_block: Counter[str] = Counter()
    for name, entry in container.entries.items():
        of_block[name.partition(".")[0]] += entry.end - entry.start
        # A tensor in full has its own name; codec ``raw`` adds to it.
        in_full = name in table
        tensor = name if in_full else name.removesuffix(INDICES).removesuffix(VALUES)
        if tensor in table:
            sizes[table.index(tensor)] += entry.end - entry.start
            elements[table.index(tensor)] += math.prod(entry.shape) if in_full or name.endswith(VALUES) else 0
    for item in open_blocks(container, table, blocks, context.changed, what):
        counts = item.directory.counts.tolist()
        taken, passed, total = of_block[item.block.name], 0, sum(counts)
        for tensor_id, count in zip(item.directory.ids.tolist(), counts, strict=True):
            # Rounded so that the shares add up.
            sizes[tensor_id] += taken * (passed + count) // max(1, total) - taken * passed // max(1, total)
            elements[tensor_id] += count
            passed += count
    return ObjectSizes(elements, sizes, done)
