"""What is fuzzed: a small table, its old bits, and everything that reads a delta object of it."""

import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tests.support.samples import changes_between
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire import lazy
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.delta import DeltaContext, decode, encode
from vllm_delta_sync.wire.old import OldTensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable(
    [
        TensorSpec("bias", "BF16", (96,)),
        TensorSpec("experts", "BF16", (2, 24, 32)),
        TensorSpec("eight", "F8_E4M3", (32, 48)),
        TensorSpec("master", "F32", (16, 40)),
        TensorSpec("norm", "F16", (64,)),
        TensorSpec("weight", "BF16", (64, 80)),
    ]
)
SECONDS = 20
"""An input that takes longer hangs."""
WARM_UP_SECONDS = 900
"""The first inputs wait for compilers."""


def _bits(seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    found = []
    for spec in TABLE:
        wide = generator.normal(0, 0.02, spec.numel).astype(np.float32).view(np.uint32)
        found.append((wide >> np.uint32(32 - 8 * spec.element.itemsize)).astype(spec.element.uint))
    return found


OLD = _bits(0)


def old(tensor: int) -> OldTensor:
    return OldTensor(OLD[tensor])


def part(tensor: int) -> OldTensor:
    """The upper half of the rows of matrices; norms and biases whole."""
    shape = TABLE[tensor].shape
    if len(shape) == 1:
        return OldTensor(OLD[tensor])
    columns = shape[-1]
    return OldTensor(OLD[tensor], ((0, TABLE[tensor].numel // columns // 2, 0, columns),))


def context(changed: int | None = None) -> DeltaContext:
    return DeltaContext("5" * 32, 1, 0, changed)


def seeds() -> dict[str, bytes]:
    """Good objects by name: each codec, sparse and dense, with tensors in full."""
    found = {}
    for name, share in (("few", 0.02), ("some", 0.2), ("most", 0.9)):
        generator = np.random.default_rng(len(name))
        new = [bits.copy() for bits in OLD]
        for bits in new:
            chosen = generator.random(bits.size) < share
            bits[chosen] += generator.integers(1, 9, int(chosen.sum())).astype(bits.dtype)
        for codec in ("packed", "context", "raw"):
            for compression in ("none", "zstd") if codec != "raw" else ("none",):
                changes = changes_between(TABLE, OLD, new, "raw" if codec == "raw" else "packed", [4])
                data = encode(changes, TABLE, codec, compression, context(), old)  # type: ignore[arg-type]
                found[f"{codec}-{compression}-{name}"] = data
    return found


def read_all(data: bytes, seconds: int = WARM_UP_SECONDS) -> set[str]:
    """Read ``data`` in every way there is → kinds and messages of the refusals, without their numbers.

    Raises:
        RuntimeError: it takes longer than so many seconds, or gives what does not fit.
    """
    ways: list[Callable[[], Iterable[Changes]]] = [
        lambda: [decode(data, TABLE, context(20_000), old)],
        lambda: [decode(data, TABLE, context(20_000), part)],
        lambda: lazy.LazyDelta(data, TABLE, context(20_000), old).pieces(),
    ]
    refused = set()
    for way in ways:
        try:
            with _no_longer_than(seconds):
                for changes in way():
                    _check(changes)
        except DeltaSyncError as error:
            refused.add(f"{error.kind}: {''.join(c for c in str(error) if not c.isdigit())[:160]}")
    return refused


def _check(changes: Changes) -> None:
    """What was read fits the tensors: positions ascend inside them, and all arrays have one length."""
    for group in changes.sparse:
        if not (group.positions.size == group.data.size == int(group.counts.sum())):
            raise RuntimeError("arrays of a group differ in length")
        for tensor, positions, _ in group.tensors():
            inside = positions.size == 0 or (positions[0] >= 0 and positions[-1] < TABLE[tensor].numel)
            if not inside or np.any(positions[1:] <= positions[:-1]):
                raise RuntimeError(f"positions of {TABLE[tensor].name} leave it, or do not ascend")
    for full in changes.full:
        if full.bits.size != TABLE[full.id].numel:
            raise RuntimeError(f"{TABLE[full.id].name} in full has {full.bits.size} elements")


@contextmanager
def _no_longer_than(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise RuntimeError(f"an input takes more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
