"""``count_elements`` says how many elements of each tensor a delta object carries, from its header and directories."""

import math
from collections import Counter
from collections.abc import Callable

import numpy as np

from vllm_delta_sync.codec.delta_object import DeltaContext, open_blocks, parse_blocks
from vllm_delta_sync.codec.delta_reader import read_metadata
from vllm_delta_sync.codec.raw import VALUES
from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.format.table import TensorTable

FIRST_READ = 64 * 1024
"""Bytes to read first; in most objects the header and the directories lie within them."""


def count_elements(
    read: Callable[[int, int], bytes], size: int, table: TensorTable, context: DeltaContext, what: str
) -> Counter[int]:
    """Return tensor id → elements that a delta object carries. Its digest is not checked.

    Args:
        read: returns bytes of the object, from (offset, length). size: of the object, checked against a limit before.

    Raises:
        DeltaSyncError: it is damaged, or does not belong to the document; as ``delta_reader.decode``.
    """
    # Bytes that are not read stay zeros, which take no memory.
    data = np.zeros(size, np.uint8)

    def fill(start: int, end: int) -> None:
        found = read(start, end - start)
        if len(found) != end - start:
            raise FormatError(f"{what} has fewer than the {size} bytes that its document lists")
        data[start:end] = np.frombuffer(found, np.uint8)

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
    for name, entry in container.entries.items():
        # A tensor in full has its own name; codec ``raw`` adds to it.
        tensor = name if name in table else name.removesuffix(VALUES)
        if tensor in table:
            elements[table.index(tensor)] += math.prod(entry.shape)
    for item in open_blocks(container, table, blocks, context.changed, what):
        for tensor_id, count in zip(item.directory.ids.tolist(), item.directory.counts.tolist(), strict=True):
            elements[tensor_id] += count
    return elements
