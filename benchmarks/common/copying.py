"""What a delta has to beat: plain passes over two buffers, on one core."""

from functools import cache
from typing import Any

import numpy as np

from benchmarks.common.training_data import Bits


def one_thread() -> None:
    """Give every library that this process measures with one thread."""
    import numba
    import torch

    from vllm_delta_sync.codec.tiles import grid

    torch.set_num_threads(1)
    numba.set_num_threads(1)
    grid.THREADS = 1


def memcpy(target: list[Bits], source: list[Bits]) -> None:
    """Copy tensor by tensor."""
    for one, other in zip(target, source, strict=True):
        np.copyto(one, other)


def compare_and_copy(target: list[Bits], source: list[Bits]) -> int:
    """Copy ``source`` to ``target``, both flat, and count the elements that differed: one compiled pass."""
    kernel = _kernel()
    return sum(int(kernel(one, other)) for one, other in zip(target, source, strict=True))


@cache
def _kernel() -> Any:
    import numba

    @numba.njit("int64(uint16[::1], uint16[::1])", nogil=True, boundscheck=False)
    def run(target: Any, source: Any) -> int:
        different = 0
        for index in range(target.size):
            value = source[index]
            different += target[index] != value
            target[index] = value
        return different

    return run
