"""``RecentDeltas``: the newest versions' deltas once more in codec ``plain``, for merging them without base bits."""

import threading
from collections.abc import Sequence

from trainer_side.diff.memory_limits import MemoryLimits
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.tensors.changes import Changes

KEPT_VERSIONS = 2 * MERGE_WIDTH - 1
"""The versions of the newest aligned range, however many were published since it ended."""


class RecentDeltas:
    """Plain objects by version, about 1.5 bytes for each changed element; those that exceed ``loaded_bytes`` of
    ``MemoryLimits`` are dropped, oldest first. Thread-safe."""

    def __init__(self) -> None:
        self._objects: dict[int, list[bytes]] = {}
        self._lock = threading.Lock()

    def keep(self, context: DeltaContext, parts: Sequence[Changes], table: TensorTable) -> None:
        """Keep a version's changes in place of older ones. A version that was encoded before is replaced."""
        objects = [encode(part, table, "plain", "zstd", context) for part in parts]
        with self._lock:
            self._objects[context.version] = objects
            oldest = context.version - KEPT_VERSIONS
            self._objects = {version: found for version, found in self._objects.items() if version > oldest}
            most = MemoryLimits.of(table).loaded_bytes
            while sum(len(data) for found in self._objects.values() for data in found) > most:
                del self._objects[min(self._objects)]

    def of(self, version: int) -> list[bytes] | None:
        """Return a version's objects, or None if they are not kept."""
        with self._lock:
            return self._objects.get(version)
