"""What a delta can be written as: ours, through the public functions of ``codec``, and what everybody has at hand.

A format turns two versions of a model into bytes, comparison included, and back into what changed. Formats of other
projects are in ``peer_formats``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import zstandard

from benchmarks.common.training_data import Bits, Weights
from trainer_side.diff.buffers import HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.engine import Detector, SmallTensor, SmallTensors
from trainer_side.diff.pending_delta import SparseTensor, VersionChanges
from vllm_delta_sync.codec import delta_reader, delta_writer
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.merge import merge
from vllm_delta_sync.codec.tiles import grid
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.format import codecs
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseLookup, BaseTensor, Changes, Sparse, apply_distances

CONTEXT = DeltaContext("0" * 32, 1, 0)
DTYPE = "BF16"


@dataclass(frozen=True)
class Update:
    """What happens to one tensor: ``bits`` replace those at flat ``positions``, or are xored into them.

    Attributes:
        positions: (n,) int64 ascending, None for all elements.
    """

    positions: npt.NDArray[np.int64] | None
    bits: Bits
    is_xor: bool = False


Patch = dict[str, Update]


class Format(ABC):
    """One way to write a delta."""

    name: str

    def begin(self, old: Weights) -> None:  # noqa: B027
        """Make ready what ``encode`` needs and is no part of it; most need nothing."""

    @abstractmethod
    def encode(self, old: Weights, new: Weights) -> bytes:
        """Compare and write."""

    @abstractmethod
    def decode(self, data: bytes, old: Weights) -> Any:
        """Read what changed: positions and values, or whole tensors."""

    def restore(self, decoded: Any, old: Weights) -> Weights:
        """The new version, from the old one and what was decoded."""
        return restored(decoded, old)


def restored(patch: Patch, old: Weights) -> Weights:
    """A copy of ``old`` with the updates of ``patch``."""
    new = {name: bits.copy() for name, bits in old.items()}
    for name, update in patch.items():
        flat = new[name].reshape(-1)
        where = slice(None) if update.positions is None else update.positions
        flat[where] = flat[where] ^ update.bits if update.is_xor else update.bits
    return new


def join(parts: list[np.ndarray]) -> bytes:
    """Arrays one after the other, behind a list of their lengths."""
    sizes = np.array([len(parts), *(part.nbytes for part in parts)], "<u4")
    return b"".join([sizes.tobytes(), *(np.ascontiguousarray(part).tobytes() for part in parts)])


def split(data: bytes) -> list[bytes]:
    """Inverse of ``join``, as bytes."""
    view = memoryview(data)
    count = int(np.frombuffer(view[:4], "<u4")[0])
    sizes = np.frombuffer(view[4 : 4 * (count + 1)], "<u4").astype(np.int64)
    ends = 4 * (count + 1) + np.cumsum(sizes)
    return [bytes(view[end - size : end]) for size, end in zip(sizes.tolist(), ends.tolist(), strict=True)]


def table_of(weights: Weights) -> TensorTable:
    """The tensor table of a model whose names ascend."""
    return TensorTable([TensorSpec(name, DTYPE, bits.shape) for name, bits in weights.items()])


def baseline_of(weights: Weights) -> list[HostBuffer]:
    """A copy in the form in which a publisher keeps its baseline."""
    return [HostBuffer(bits.copy()) for bits in flats(weights)]


def find_changes(baseline: list[HostBuffer], new: list[Bits], table: TensorTable, relative: bool = True) -> Changes:
    """Compare flat tensors and bring ``baseline`` up to ``new``, with a publisher's parts."""
    detector, logs, fingerprints = Detector(), {}, {}
    batches = [SmallTensors()]
    for tensor, spec in enumerate(table):
        live = torch.from_numpy(new[tensor].view(np.int16)).view(torch.bfloat16).view(spec.shape)
        small = SmallTensor.of(spec, baseline[tensor], live)
        if small is None:
            logs[tensor] = ChangeLog(spec.element)
            fingerprints[tensor] = detector.collect(spec, baseline[tensor], live, logs[tensor])
            continue
        if not batches[-1].takes(small):
            batches.append(SmallTensors())
        batches[-1].append(tensor, small)
    for batch in batches:
        if batch.ids:
            found = [ChangeLog(small.spec.element) for small in batch.tensors]
            logs |= zip(batch.ids, found, strict=True)
            fingerprints |= zip(batch.ids, detector.collect_each(batch.tensors, found), strict=True)
    logs = {tensor: logs[tensor] for tensor in sorted(logs) if logs[tensor].size}
    fingerprints = {tensor: fingerprints[tensor] for tensor in logs}
    sparse = [SparseTensor(tensor, log.size, log.pieces) for tensor, log in logs.items()]
    changes = VersionChanges(table, sparse=sparse, fingerprints=fingerprints).load()
    if not relative:
        for number, group in enumerate(changes.sparse):
            bits = [new[tensor][positions] for tensor, positions, _ in group.tensors()]
            changes.sparse[number] = replace(group, data=np.concatenate(bits), relative=False)
    return changes


def merged(parts: Iterable[Changes], table: TensorTable) -> Changes:
    """Merge the changes of consecutive versions, none of which has a tensor in full, by way of their plain objects."""
    objects = [delta_writer.encode(part, table, "plain", "zstd", CONTEXT) for part in parts]
    return merged_objects(objects, table)


def merged_objects(objects: Iterable[bytes], table: TensorTable) -> Changes:
    """Merge the plain objects of consecutive versions, none of which has a tensor in full."""
    steps = [[delta_reader.DeltaReader(data, table, CONTEXT)] for data in objects]
    sums: dict[int, Fingerprint] = {}
    for [reader] in steps:
        for tensor, change in reader.fingerprints.items():
            sums[tensor] = sums.get(tensor, Fingerprint()) + change
    groups = [piece for piece in merge(steps, table) if isinstance(piece, Sparse)]
    carried = {tensor for group in groups for tensor in group.ids.tolist()}
    return Changes(groups, [], {tensor: sums[tensor] for tensor in sorted(carried)})


def flats(weights: Weights) -> list[Bits]:
    """Flat views of all tensors, in order of their ids."""
    return [bits.reshape(-1) for bits in weights.values()]


class Own(Format):
    """A codec of this project. What needs the old bits gets them.

    Args:
        threads: of codec ``tiled``; the others have one.
    """

    def __init__(self, codec: str, compression: Compression = "zstd", threads: int = 1) -> None:
        self.name = codec if compression == "zstd" or codec == "raw" else f"{codec}, {compression}"
        self.name += f", {threads} threads" if threads > 1 else ""
        self._codec, self._compression, self._threads = codec, compression, threads
        self._baseline: list[HostBuffer] = []

    def begin(self, old: Weights) -> None:
        if not self._baseline:
            self._baseline = baseline_of(old)
        for held, bits in zip(self._baseline, flats(old), strict=True):
            held.write(bits)

    def compare(self, new: Weights, table: TensorTable) -> Changes:
        """The first half of ``encode``."""
        return find_changes(self._baseline, flats(new), table, relative=self._codec != "raw")

    def write(self, changes: Changes, table: TensorTable, old: Weights) -> bytes:
        """Write changes of the weights ``old``."""
        return self._write(changes, table, self._old(old))

    def encode(self, old: Weights, new: Weights) -> bytes:
        """Compare and write as a publisher does, whose baseline has the changes by then."""
        table = table_of(old)
        changes = self.compare(new, table)
        return self._write(changes, table, lambda tensor: BaseTensor(self._baseline[tensor].bits, after=True))

    def _write(self, changes: Changes, table: TensorTable, old: BaseLookup) -> bytes:
        compression: Compression = "none" if self._codec == "raw" else self._compression
        codec = cast(codecs.Codec, self._codec)
        with mock.patch.object(grid, "THREADS", self._threads):
            return delta_writer.encode(changes, table, codec, compression, CONTEXT, old)

    def decode(self, data: bytes, old: Weights) -> Changes:
        with mock.patch.object(grid, "THREADS", self._threads):
            return delta_reader.decode(data, table_of(old), CONTEXT, self._old(old))

    def restore(self, decoded: Changes, old: Weights) -> Weights:
        new = {name: bits.copy() for name, bits in old.items()}
        bits = flats(new)
        for group in decoded.sparse:
            for tensor, positions, data in group.tensors():
                if group.relative:
                    apply_distances(group.element, bits[tensor], positions, data)
                else:
                    bits[tensor][positions] = data
        for full in decoded.full:
            np.copyto(bits[full.id], full.bits)
        return new

    def _old(self, old: Weights) -> BaseLookup:
        bits = flats(old)
        return lambda tensor: BaseTensor(bits[tensor])


class RawZstd(Own):
    """The raw object, compressed as a whole."""

    def __init__(self) -> None:
        super().__init__("raw")
        self.name = "raw + zstd -3"

    def encode(self, old: Weights, new: Weights) -> bytes:
        return zstandard.ZstdCompressor(3).compress(super().encode(old, new))

    def decode(self, data: bytes, old: Weights) -> Changes:
        return super().decode(zstandard.ZstdDecompressor().decompress(data), old)


class XorZstd(Format):
    """All tensors xored with the old ones, laid end to end, compressed as a whole."""

    name = "xor + zstd -3"

    def encode(self, old: Weights, new: Weights) -> bytes:
        planes = np.concatenate([(new[name] ^ old[name]).reshape(-1) for name in old])
        return zstandard.ZstdCompressor(3).compress(planes.data)

    def decode(self, data: bytes, old: Weights) -> Patch:
        planes = np.frombuffer(zstandard.ZstdDecompressor().decompress(data), np.uint16)
        return _cut(planes, old, is_xor=True)


class PatchFrom(Format):
    """``zstd -3 --patch-from``: the new model compressed with the old one as a dictionary.

    In pieces of 8 MB, each with the same piece of the old model, because zstd's fast strategies see no more than 16 MB
    of a dictionary; and with tables that hold all of it. As the command line sets them, they find a small part.
    """

    name = "zstd --patch-from"
    _PIECE, _TABLES = 1 << 22, 22

    def encode(self, old: Weights, new: Weights) -> bytes:
        parameters = zstandard.ZstdCompressionParameters.from_level(
            3, window_log=25, hash_log=self._TABLES, chain_log=self._TABLES
        )
        frames = []
        for base, target in zip(self._pieces(old), self._pieces(new), strict=True):
            compressor = zstandard.ZstdCompressor(compression_params=parameters, dict_data=_dictionary(base))
            frames.append(np.frombuffer(compressor.compress(target.data), np.uint8))
        return join(frames)

    def decode(self, data: bytes, old: Weights) -> Patch:
        pieces = [
            zstandard.ZstdDecompressor(dict_data=_dictionary(base)).decompress(frame)
            for base, frame in zip(self._pieces(old), split(data), strict=True)
        ]
        return _cut(np.frombuffer(b"".join(pieces), np.uint16), old, is_xor=False)

    def _pieces(self, weights: Weights) -> list[Bits]:
        joined = np.concatenate(flats(weights))
        return [joined[start : start + self._PIECE] for start in range(0, joined.size, self._PIECE)]


def _dictionary(base: Bits) -> Any:
    return zstandard.ZstdCompressionDict(base.tobytes(), dict_type=zstandard.DICT_TYPE_RAWCONTENT)


def _cut(joined: Bits, old: Weights, is_xor: bool) -> Patch:
    ends = np.cumsum([bits.size for bits in old.values()])
    return {
        name: Update(None, joined[end - bits.size : end], is_xor)
        for (name, bits), end in zip(old.items(), ends.tolist(), strict=True)
    }


def own_codecs() -> list[Own]:
    """Every codec that this project has, ``raw`` last."""
    return [Own(codec) for codec in sorted(codecs.CODECS, key=lambda codec: (codec == "raw", codec != "plain"))]
