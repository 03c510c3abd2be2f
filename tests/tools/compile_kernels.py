"""Compiles the loops over elements into numba's cache, before workers of pytest would each compile the same.

``python -m tests.tools.compile_kernels`` sends changes of each width of element through every codec, the merge and the
commit. What it leaves out is compiled by the test that needs it.
"""

import numpy as np

from tests.support.merging import merged
from tests.support.samples import CONTEXT, changes_between, nudge, random_bits, state_of
from trainer_side.diff import engine
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.codec.merge import warm_up
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.engine.commit import apply
from vllm_delta_sync.format import fingerprint
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.table import DTYPES, DType, TensorSpec, TensorTable
from vllm_delta_sync.tensors.changes import BaseTensor

CODECS: list[tuple[Codec, Compression]] = [("plain", "zstd"), ("plain", "none"), ("raw", "none"), ("tiled", "zstd")]


def compile_for(element: DType) -> None:
    # The matrix is large enough for classes.
    table = TensorTable([TensorSpec("matrix", element.name, (256, 256)), TensorSpec("scalar", element.name, ())])
    engine.compile_kernels(table)
    apply.compile_kernels({element}, wide=True)
    warm_up([element])
    fingerprint.compile_kernels([element])
    old = random_bits(table, np.random.default_rng(5))

    def base(tensor: int) -> BaseTensor:
        return BaseTensor(old[tensor])

    # The share that changed decides how many threads code it.
    for share in (0.0, 0.01, 0.3, 1.0):
        new = nudge(old, np.random.default_rng(6), share)
        for codec, compression in CODECS:
            there, back = (changes_between(table, *pair, codec) for pair in ((old, new), (new, old)))
            data = encode(there, table, codec, compression, CONTEXT, base)
            state_of(table, old).apply(decode(data, table, CONTEXT, base))
            merged([there, back], table)


if __name__ == "__main__":
    for element in {element.uint: element for element in DTYPES.values()}.values():
        compile_for(element)
