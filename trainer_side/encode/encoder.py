"""From changes to objects: choose the codec, give it the bits of before, and measure what it takes."""

import time

import numpy as np

from trainer_side.diff.baseline import Baseline
from trainer_side.encode.codec_policy import CodecChoice, Work
from trainer_side.encode.upload_bandwidth import UploadBandwidth
from trainer_side.options import Options
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.format.codecs import RELATIVE_CODECS, Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.bits import BaseTensor, Bits, Positions, revert_distances
from vllm_delta_sync.tensors.changes import Changes, Sparse


class Encoder:
    """Encodes versions, one at a time. The baseline holds the bits after the changes, and nobody changes it meanwhile.

    Args:
        link: what is known of uploads.
    """

    def __init__(self, baseline: Baseline, options: Options, link: UploadBandwidth) -> None:
        self._baseline = baseline
        self._options = options
        self._link = link
        self._choice = CodecChoice(options.receiver_bytes_per_second)
        self._compiled: set[Codec] = set()

    def begin(self) -> None:
        """Compile what the first version is going to run; not where an interrupt can hit it."""
        self._compile(self._options.base_codec)

    def encode(self, changes: Changes, context: DeltaContext) -> tuple[Codec, list[bytes]]:
        """The codec chosen, and the version's objects: parts of at most ``shard_bytes`` decoded."""
        codec, auto = self._options.base_codec, self._options.codec == "auto"
        if not changes.changed:
            return codec, []
        work = Work.of(changes, self._baseline.table)
        if auto:
            codec = self._choice.choose(context.version, work, self._link.bytes_per_second)
        # Before it is measured: the first version would seem to take as long as compiling does.
        self._compile(codec)
        began = time.perf_counter()
        old = BaseCopies(self._baseline, changes)
        coding = (codec, self._options.compression)
        parts = changes.parts(self._options.shard_bytes)
        objects = [encode(part, self._baseline.table, *coding, context, old) for part in parts]
        if auto and not changes.full:
            self._choice.learn(codec, work, sum(map(len, objects)), time.perf_counter() - began)
        return codec, objects

    def _compile(self, codec: Codec) -> None:
        if codec not in self._compiled:
            compile_codec(codec, self._baseline.table)
            self._compiled.add(codec)


class BaseCopies:
    """The bits that changes, which the baseline holds already, start from: copies, one tensor at a time.

    Calling it is what a codec does that needs them; see ``tensors.base_bits.Old``.
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
            # First let go of the one before: two of the largest would be held.
            self._last = None
            bits = np.array(self._baseline.peek(tensor))
            revert_distances(self._baseline.table[tensor].element, bits, *self._found[tensor])
            self._last = tensor, bits
        return BaseTensor(self._last[1])


def compile_codec(codec: Codec, table: TensorTable) -> None:
    """Compile (or load from the cache) what encoding changes of this table runs."""
    if codec not in RELATIVE_CODECS:
        return
    for dtype in {spec.element.uint: spec.dtype for spec in table}.values():
        tiny = TensorTable([TensorSpec("t", dtype, (4, 4))])
        element = tiny[0].element
        data = np.ones(2, element.uint)
        group = Sparse(dtype, np.zeros(1, np.uint32), np.full(1, 2), np.arange(2), data, relative=True)
        old = BaseTensor(np.zeros(16, element.uint))
        changes = Changes([group], [], {0: Fingerprint()})
        encode(changes, tiny, codec, "zstd", DeltaContext("", 1, 0), {0: old}.__getitem__)
