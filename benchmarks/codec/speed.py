"""How fast formats write and read, on one thread, in turns with plain passes over the same buffers."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.common.copying import compare_and_copy, memcpy
from benchmarks.common.formats import Format, Own, flats, table_of
from benchmarks.common.rows import Row, row
from benchmarks.common.timing import Method, peak_extra_bytes, time_all
from benchmarks.common.training_data import Pair, elements
from trainer_side.diff.buffers import HostBuffer
from trainer_side.diff.change_log import ChangeLog
from trainer_side.diff.engine import Detector


def own_speeds(bench: str, case: str, codecs: list[Own], pair: Pair, repeats: int) -> list[Row]:
    """Rows of our codecs and of the plain passes, all timed in turns."""
    total, changed = elements(pair)
    dense = 2 * total
    target, source = [bits.copy() for bits in flats(pair.old)], flats(pair.new)

    def reset() -> None:
        memcpy(target, flats(pair.old))

    passes = [
        Method("memcpy", lambda: memcpy(target, source), dense, reset),
        Method("compare_and_copy", lambda: compare_and_copy(target, source), dense, reset),
        Method("compare_and_copy, numpy", lambda: _numpy_pass(target, source), dense, reset),
    ]
    detecting = [_detection(pair, dense, torch.bfloat16), _detection(pair, dense, torch.float32)]
    methods: dict[str, tuple[Method, Method]] = {}
    for codec in codecs:
        codec.begin(pair.old)
        methods[codec.name] = _own_methods(codec, pair, dense)
    both = [method for two in methods.values() for method in two]
    time_all([*passes, *detecting, *both], lambda: None, repeats, 2 * repeats)
    rows = [row(bench, case, method.name, dense / method.seconds / 1e9, "GB/s") for method in (*passes, *detecting)]
    for name, (encode, decode) in methods.items():
        own = f"{case}, {name}"
        rows += [
            row(bench, own, "encode", dense / encode.seconds / 1e9, "GB/s"),
            row(bench, own, "decode", 1e9 * decode.seconds / changed, "ns/changed"),
            row(bench, own, "encode: disturbance", encode.disturbance, "x"),
        ]
        rows += [row(bench, own, "ratio", one.seconds / encode.seconds, "x", one.name) for one in passes]
        encode.prepare()
        rows.append(row(bench, own, "encode: extra memory", peak_extra_bytes(encode.run) / 1e6, "MB"))
        rows.append(row(bench, own, "decode: extra memory", peak_extra_bytes(decode.run) / 1e6, "MB"))
    return rows


def _detection(pair: Pair, dense: int, live: torch.dtype) -> Method:
    """What a publisher does in the training loop: round live tensors, compare, collect, bring the baseline up."""
    table, detector = table_of(pair.old), Detector()
    baseline = [bits.copy() for bits in flats(pair.old)]
    tensors = [torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16).to(live) for bits in pair.new.values()]

    def run() -> None:
        for spec, bits, tensor in zip(table, baseline, tensors, strict=True):
            detector.collect(spec, HostBuffer(bits), tensor, ChangeLog(spec.element))

    name = str(live).removeprefix("torch.")
    return Method(f"detect changes, {name}", run, dense, lambda: memcpy(baseline, flats(pair.old)))


def _own_methods(codec: Own, pair: Pair, dense: int) -> tuple[Method, Method]:
    data = codec.encode(pair.old, pair.new)
    encode = Method("encode", lambda: codec.encode(pair.old, pair.new), dense, lambda: codec.begin(pair.old))
    return encode, Method("decode", lambda: codec.decode(data, pair.old), len(data))


def _numpy_pass(target: list[np.ndarray], source: list[np.ndarray]) -> int:
    different = 0
    for one, other in zip(target, source, strict=True):
        different += int(np.count_nonzero(one != other))
        np.copyto(one, other)
    return different


def single_speed(bench: str, case: str, format: Format, pair: Pair) -> tuple[bytes, list[Row]]:
    """The object and rows of a format, each figure from one run: their order of magnitude is all that is asked."""
    total, changed = elements(pair)
    format.begin(pair.old)
    encoded = _Run(lambda: format.encode(pair.old, pair.new))
    decoded = _Run(lambda: format.decode(encoded.result, pair.old))
    check(format, pair, decoded.result)
    return encoded.result, [
        row(bench, case, "encode", 2 * total / encoded.seconds / 1e9, "GB/s"),
        row(bench, case, "decode", 1e9 * decoded.seconds / changed, "ns/changed"),
        row(bench, case, "encode: extra memory", encoded.bytes / 1e6, "MB"),
        row(bench, case, "decode: extra memory", decoded.bytes / 1e6, "MB"),
    ]


def check(format: Format, pair: Pair, decoded: Any) -> None:
    """Stop if what was decoded does not lead from the old weights to the new ones, bit for bit."""
    found = format.restore(decoded, pair.old)
    wrong = [name for name, bits in pair.new.items() if not np.array_equal(found[name], bits)]
    if wrong:
        raise SystemExit(f"{format.name} did not give back {wrong[0]!r} bit for bit")


class _Run:
    """One run of an action: its result, seconds, and peak of extra bytes."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action = action
        self.bytes = peak_extra_bytes(self._run)

    def _run(self) -> None:
        began = time.perf_counter()
        self.result = self._action()
        self.seconds = time.perf_counter() - began
