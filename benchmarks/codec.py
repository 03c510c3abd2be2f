"""Size and speed of the codecs on weights that Adam moved: bytes per changed element, encode, decode.

The weights are bfloat16 roundings of float32 masters drawn at the scale of a trained transformer (σ = 0.02) and moved
by steps of Adam's size, |step| ≈ lr, which is what makes most changes one unit in the last place. One thread.
"""

import numpy as np
import torch
import zstandard

from benchmarks.rows import Row, best_seconds, parse, row, write
from vllm_delta_sync.torch_bits import bits_of
from vllm_delta_sync.wire import delta
from vllm_delta_sync.wire.bits import diff
from vllm_delta_sync.wire.changes import Changes, Sparse
from vllm_delta_sync.wire.delta import DeltaContext
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

BENCH = "codec"
CONTEXT = DeltaContext("0" * 32, 1, 0)
LEARNING_RATES = {"lr 3e-7": 3e-7, "lr 1e-6": 1e-6, "lr 1e-5": 1e-5}


def weights(elements: int, lr: float) -> tuple[np.ndarray, np.ndarray]:
    """(old, new) bfloat16 bits, (elements,) uint16 each."""
    generator = torch.Generator().manual_seed(0)
    master = 0.02 * torch.randn(elements, generator=generator)
    step = lr * torch.randn(elements, generator=generator).clamp(-3, 3)
    return bits_of(master.bfloat16()), bits_of((master + step).bfloat16())


def measure(case: str, old: np.ndarray, new: np.ndarray, repeats: int) -> list[Row]:
    """Rows of one pair of versions."""
    spec = TensorSpec("weight", "BF16", (old.size,))
    table = TensorTable([spec])
    baseline = old.copy()
    positions, distances, change = diff("weight", spec.element, baseline, new)
    ids, counts = np.zeros(1, np.uint32), np.array([positions.size], np.int64)
    packed = Changes([Sparse("BF16", ids, counts, positions, distances, True)], [], {0: change})
    raw = Changes([Sparse("BF16", ids, counts, positions, new[positions], False)], [], {0: change})
    data = delta.encode(packed, table, "packed", "zstd", CONTEXT)
    plain = delta.encode(raw, table, "raw", "none", CONTEXT)
    rows = [row(BENCH, case, "changed share", 100 * positions.size / old.size, "%")]
    sizes = {
        "packed, zstd": len(data),
        "packed, none": len(delta.encode(packed, table, "packed", "none", CONTEXT)),
        "raw": len(plain),
        "raw + zstd": len(zstandard.ZstdCompressor(3).compress(plain)),
        "whole tensor": old.nbytes,
    }
    rows += [row(BENCH, case, f"{name}: bytes/changed", size / positions.size, "B") for name, size in sizes.items()]
    rows += [row(BENCH, case, "ratio", size / len(data), "x", f"{name} size") for name, size in sizes.items()]

    def reset() -> None:
        baseline[:] = old

    scratch = np.empty_like(old)
    copy = best_seconds(lambda: np.copyto(scratch, new), repeats)
    found = best_seconds(lambda: diff("weight", spec.element, baseline, new), repeats, reset)
    encoded = best_seconds(lambda: delta.encode(packed, table, "packed", "zstd", CONTEXT), repeats)
    decoded = best_seconds(lambda: delta.decode(data, table, CONTEXT), repeats)
    rows += [
        row(BENCH, case, "diff", old.nbytes / found / 1e9, "GB/s"),
        row(BENCH, case, "diff + encode", old.nbytes / (found + encoded) / 1e9, "GB/s"),
        row(BENCH, case, "ratio", copy / (found + encoded), "x", "memcpy speed (diff + encode)"),
        row(BENCH, case, "decode", 1e9 * decoded / positions.size, "ns/changed"),
    ]
    return rows


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments)
    torch.set_num_threads(1)
    elements, repeats = (2_000_000, 2) if options.quick else (100_000_000, 3)
    rows: list[Row] = []
    for case, lr in LEARNING_RATES.items():
        old, new = weights(elements, lr)
        rows += measure(case, old, new, repeats)
    write(options.json, rows)


if __name__ == "__main__":
    main()
