"""Named limits that a reader enforces before it allocates memory. docs/FORMAT.md lists the same numbers."""

from collections.abc import Mapping

from vllm_delta_sync.errors import LimitError

FORMAT_VERSION = 2

MAX_HEADER_BYTES = 100 * 1024 * 1024
"""Safetensors header; the reference implementation has the same limit."""
MAX_JSON_BYTES = 64 * 1024 * 1024
"""run.json, tensors.json and manifests."""
MAX_HEAD_BYTES = 4096
MAX_JSON_DEPTH = 16
MAX_JSON_VALUES = 4_194_304
"""Commas and opening brackets of a document or header: a value of 3 bytes takes 100 bytes of memory and 2 µs."""
MAX_TENSORS = 4_000_000
MAX_TENSOR_NAME_BYTES = 512
MAX_DIMENSIONS = 16
MAX_TENSOR_ELEMENTS = 2**48
"""Keeps flat indices far inside int64, even multiplied by an element size."""
MAX_MODEL_BYTES = 2**50
MAX_OBJECTS_PER_VERSION = 65_536
MAX_SIDECARS = 16
"""Sidecars of one version."""
MAX_SIDECAR_BYTES = 16 * 1024 * 1024
MAX_RUN_FILES = 64
"""Small model files that run.json lists."""
MAX_RUN_FILE_BYTES = 64 * 1024 * 1024
"""One run file. The largest tokenizers of today have half as many bytes."""
MAX_RUN_FILES_BYTES = 256 * 1024 * 1024
"""All run files of a run."""
MAX_VERSION = 10**10 - 1
"""Ten digits: the width of a version in a key."""
MAX_BREAKS = 4096
"""Versions of a run that do not build on their predecessor."""
MAX_SIDE_BYTES = 65_536
"""Tags, claims and heartbeats."""
MAX_RANGES = 65_536
"""Ranges and keys that retention.json lists."""
MAX_RETENTION_BYTES = 8 * 1024 * 1024
"""retention.json, whose lists take 6 MB at most: no signature is checked before it is parsed."""
MAX_HEARTBEAT_PINS = 64
MAX_HEARTBEAT_SECONDS = 7 * 24 * 3600
MAX_HEARTBEAT_TEXT = 400
"""Characters of an error's message in a heartbeat."""
MAX_COLLECTION_SECONDS = 3600
"""Longest validity of a garbage collection's claim."""
MAX_BLOCK_COUNT = 1_000_000
MAX_ZSTD_WINDOW_LOG = 27
MAX_ZSTD_RATIO = 32_768
"""Content over frame size. A block of 128 KiB takes at least 4 bytes, so a larger ratio is false."""
MAX_EMPTY_FRAME_BYTES = 32
"""A zstd frame without content: at most 18 bytes of header, 3 of an empty block, 4 of checksum."""


def shown(value: int) -> str:
    """Return an untrusted number for a message; thousands of digits are abbreviated."""
    return str(value) if -(10**40) < value < 10**40 else f"a number of {value.bit_length()} bits"


def split_by_bytes(sizes: Mapping[int, int], most_bytes: int, most_parts: int) -> list[set[int]]:
    """Split tensor ids, ascending, into parts of at most ``most_bytes``; a larger tensor gets its own part.

    Args:
        sizes: tensor id → bytes.

    Raises:
        LimitError: there are more than ``most_parts``; the message names a ``shard_bytes`` that is large enough.
    """
    found: list[set[int]] = [set()]
    room = most_bytes
    for tensor in sorted(sizes):
        if found[-1] and sizes[tensor] > room:
            found.append(set())
            room = most_bytes
        found[-1].add(tensor)
        room -= sizes[tensor]
    if len(found) > most_parts:
        total = sum(sizes.values())
        # Two consecutive objects together always hold more than shard_bytes.
        enough = -(-2 * total // max(1, most_parts - 1))
        raise LimitError(
            f"shard_bytes is {most_bytes}: {total} bytes would make {len(found)} objects, and at most {most_parts} can "
            f"be listed (MAX_OBJECTS_PER_VERSION); set shard_bytes to {enough} or more"
        )
    return found


CORRUPT = "; the data is corrupt or hostile"


def check_limit(field: str, value: int, limit: int, limit_name: str) -> int:
    """Return ``value``; raise LimitError unless ``0 <= value <= limit``; its message ends with CORRUPT."""
    if not 0 <= value <= limit:
        raise LimitError(f"{field} is {shown(value)}, outside 0..{limit} ({limit_name}){CORRUPT}")
    return value
