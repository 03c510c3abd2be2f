"""``Encoder``: choose the codec of a version, encode its changes, and measure the time."""

import time

import numpy as np

from trainer_side.diff.baseline import Baseline
from trainer_side.encode.codec_policy import CodecChoice, Work
from trainer_side.encode.upload_bandwidth import UploadBandwidth
from trainer_side.options import Options
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import BaseTensor, Bits, Positions, revert_distances
from vllm_delta_sync.tensors.changes import Changes, Sparse


class Encoder:
    """Encodes versions, one at a time. The baseline holds the bits after the changes, and must not change meanwhile.

    Args:
        baseline: of whole tensors, if the codec may be ``context``. table: the run's tensors.
        bandwidth: of the uploads so far. ranks: how many encode each version.
    """

    def __init__(
        self, baseline: Baseline, table: TensorTable, options: Options, bandwidth: UploadBandwidth, ranks: int
    ) -> None:
        self._baseline, self._table = baseline, table
        self._options = options
        self._bandwidth = bandwidth
        # Each rank gets an equal share of the maximum, since the number of objects of the others is still unknown.
        self._most_objects = limits.MAX_OBJECTS_PER_VERSION // ranks
        self._choice = CodecChoice(options.receiver_bytes_per_second)
        self._compiled: set[Codec] = set()

    def compile(self) -> None:
        """Compile the kernels of the first version; call it where no interrupt can hit the compiler."""
        self._compile(self._options.base_codec)

    def encode(self, changes: Changes, context: DeltaContext) -> tuple[Codec, list[bytes]]:
        """Return the codec chosen, and the version's objects: parts of at most ``shard_bytes`` when decoded."""
        codec, auto = self._options.base_codec, self._options.codec == "auto"
        if not changes.changed:
            return codec, []
        work = Work.of(changes, self._table)
        if auto:
            codec = self._choice.choose(context.version, work, self._bandwidth.bytes_per_second)
        # Compile before measuring: otherwise the time of the first version would include it.
        self._compile(codec)
        started = time.perf_counter()
        base_bits = BaseCopies(self._baseline, changes)
        coding = (codec, self._options.compression)
        parts = changes.parts(self._options.shard_bytes, self._most_objects)
        objects = [encode(part, self._table, *coding, context, base_bits) for part in parts]
        if auto and not changes.full:
            self._choice.learn(codec, work, sum(map(len, objects)), time.perf_counter() - started)
        return codec, objects

    def _compile(self, codec: Codec) -> None:
        if codec not in self._compiled:
            compile_codec(codec, self._table)
            self._compiled.add(codec)


class BaseCopies:
    """The base bits of changes that the baseline already holds: copies, one tensor at a time.

    A codec that needs base bits calls it with a tensor id; see ``tensors.bits``.
    """

    def __init__(self, baseline: Baseline, changes: Changes) -> None:
        self._baseline = baseline
        self._found: dict[int, tuple[Positions, Bits]] = {
            tensor: (positions, distances)
            for group in changes.sparse
            if group.relative
            for tensor, positions, distances in group.tensors()
        }
        self._last: tuple[int, Bits] | None = None

    def __call__(self, tensor: int) -> BaseTensor:
        if self._last is None or self._last[0] != tensor:
            # First release the previous tensor, so that two large ones are never held at once.
            self._last = None
            bits = np.array(self._baseline.read(tensor))
            revert_distances(self._baseline.table[tensor].element, bits, *self._found[tensor])
            self._last = tensor, bits
        return BaseTensor(self._last[1])


def compile_codec(codec: Codec, table: TensorTable) -> None:
    """Compile (or load from the cache) the kernels that encode changes of this table."""
    if codec not in RELATIVE_CODECS:
        return
    for dtype in {spec.element.uint: spec.dtype for spec in table}.values():
        tiny = TensorTable([TensorSpec("t", dtype, (4, 4))])
        element = tiny[0].element
        data = np.ones(2, element.uint)
        group = Sparse(dtype, np.zeros(1, np.uint32), np.full(1, 2), np.arange(2), data, relative=True)
        base_bits = BaseTensor(np.zeros(16, element.uint))
        changes = Changes([group], [], {0: Fingerprint()})
        encode(changes, tiny, codec, "zstd", DeltaContext("", 1, 0), {0: base_bits}.__getitem__)
