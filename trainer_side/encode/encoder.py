"""``Encoder``: encode the changes of a version as delta objects.

``RecentDeltas`` has those of the newest versions once more in codec ``plain``, for merging them without base bits."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from trainer_side.diff.memory_limits import MemoryLimits
from trainer_side.diff.pending_delta import VersionChanges
from trainer_side.options import PublisherOptions
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.merge_spool import DeltaSpool
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.tensors.changes import BaseLookup, BaseTensor, Changes, Full, Sparse

logger = guarded_logger(__name__)


KEPT_VERSIONS = 2 * MERGE_WIDTH - 1
"""The versions of the newest aligned range, however many were published since it ended."""


class RecentDeltas:
    """Plain objects by version, about 1.5 bytes for each changed element; those that exceed ``loaded_bytes`` of
    ``MemoryLimits`` are dropped, oldest first. One thread changes them, and others may read meanwhile."""

    def __init__(self) -> None:
        self._objects: dict[int, list[bytes]] = {}

    def keep(self, context: DeltaContext, parts: Sequence[Changes], table: TensorTable, most: int) -> None:
        """Keep a version's changes in place of older ones, of all ``most`` bytes. One encoded before is replaced."""
        oldest = context.version - KEPT_VERSIONS
        objects = {version: found for version, found in self._objects.items() if version > oldest}
        objects[context.version] = [encode(part, table, "plain", "zstd", context) for part in parts]
        while sum(len(data) for found in objects.values() for data in found) > most:
            del objects[min(objects)]
        self._objects = objects

    def drop(self, version: int) -> None:
        """Forget a version."""
        self._objects.pop(version, None)

    def of(self, version: int) -> list[bytes] | None:
        """Return a version's objects, or None if they are not kept."""
        return self._objects.get(version)


EncodedObject = tuple[ObjectRef, bytes | Path]
"""An object's reference, and its content: in memory, or a temporary file."""


class Encoder:
    """Encodes versions, one at a time. The baseline holds the bits after the changes, and must not change meanwhile.

    Args:
        read: returns the baseline's bits of a tensor, which have the changes. table: the run's tensors. memory: limits
            of this process. ranks: how many encode each version. recent: keeps plain copies; None where no merges are
            made.
    """

    def __init__(
        self,
        read: BaseLookup,
        table: TensorTable,
        memory: MemoryLimits,
        options: PublisherOptions,
        ranks: int,
        recent: RecentDeltas | None,
    ) -> None:
        self._read, self._table = read, table
        self._options = options
        self._recent = recent
        # Each rank gets an equal share of the maximum, since the number of objects of the others is still unknown.
        self._most_objects = limits.MAX_OBJECTS_PER_VERSION // ranks
        self._limits = memory
        self._folder: ProcessFolder | None = None

    def compile(self) -> None:
        """Compile (or load from the cache) the kernels of encoding; call it where no interrupt can hit the compiler."""
        codec = self._options.delta_codec
        if codec not in RELATIVE_CODECS:
            return
        for dtype in {spec.element.uint: spec.dtype for spec in self._table}.values():
            tiny = TensorTable([TensorSpec("t", dtype, (4, 4))])
            element = tiny[0].element
            data = np.ones(2, element.uint)
            group = Sparse(dtype, np.zeros(1, np.uint32), np.full(1, 2), np.arange(2), data, relative=True)
            base_bits = BaseTensor(np.zeros(16, element.uint))
            changes = Changes([group], [], {0: Fingerprint()})
            encode(changes, tiny, codec, "zstd", DeltaContext("", 1, 0), {0: base_bits}.__getitem__)
            coder.compile_encoder(element)

    def encode(self, changes: VersionChanges, context: DeltaContext) -> list[EncodedObject]:
        """Return the version's objects: parts of at most ``shard_bytes`` when decoded.

        The objects of a large version are files, which ``release`` removes.
        """
        self.release()
        self.forget(context.version)
        if not changes.changed:
            return []
        codec, compression = self._options.delta_codec, self._options.compression
        if changes.decoded_bytes > self._limits.loaded_bytes:
            try:
                return self._encode_in_pieces(changes, codec, context)
            except StoreError as error:
                self.release()
                logger.warning(
                    "version %d is encoded in memory, which takes %s bytes or more: %s",
                    context.version, f"{changes.decoded_bytes:,}", error,
                )  # fmt: skip
        parts = changes.load().parts(self._options.shard_bytes, self._most_objects)
        if self._recent is not None:
            self._recent.keep(context, parts, self._table, self._limits.loaded_bytes)
        encoded = (encode(part, self._table, codec, compression, context, self._read) for part in parts)
        return [(ObjectRef.of(data), data) for data in encoded]

    def forget(self, version: int) -> None:
        """Keep no plain copy of a version: it may become durable with other changes than were encoded for it."""
        if self._recent is not None:
            self._recent.drop(version)

    def release(self) -> None:
        """Remove the files of the objects encoded last."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.close()

    def _encode_in_pieces(self, changes: VersionChanges, codec: Codec, context: DeltaContext) -> list[EncodedObject]:
        """Encode a large version into files, with few changes in memory at a time.

        Raises:
            StoreError: the files cannot be written.
        """
        parts = changes.parts(self._options.shard_bytes, self._most_objects)
        self._folder = ProcessFolder()
        path, most, objects = self._folder.path, self._limits.block_elements, list[EncodedObject]()
        for number, part in enumerate(parts):
            coding = (self._options.compression, codec, self._read, most)
            with closing(DeltaSpool(path, self._table, context, *coding)) as spool:
                for tensor in sorted(part.sparse, key=lambda tensor: (self._table[tensor.id].dtype, tensor.id)):
                    if tensor.count > most:
                        spool.add_large(tensor.id, tensor.count, tensor.pieces)
                    else:
                        spool.add(part.group([tensor]))
                for full in part.full:
                    spool.add(Full(full.id, full.read()))
                file = path / str(number)
                objects.append((spool.finish(file, part.fingerprints), file))
        return objects
