"""The commit of a staged version on a plain module, against the physical limit: a bare sorted scatter.

One pass gathers old bits, adds, scatters and hashes. The peer writes precomputed bits at the same sorted positions of
the same memory with one compiled loop, and does nothing else. One thread.
"""

import numba
import numpy as np
import torch

from benchmarks.rows import Row, best_seconds, parse, row, write
from vllm_delta_sync.engine.commit import Undo, commit, revert
from vllm_delta_sync.engine.patch import stage
from vllm_delta_sync.engine.regions import Region
from vllm_delta_sync.engine.routes import Destination, Route, RouteMap
from vllm_delta_sync.wire.bits import apply_distances
from vllm_delta_sync.wire.changes import Changes, Sparse
from vllm_delta_sync.wire.dtypes import DTYPES
from vllm_delta_sync.wire.fingerprint import Fingerprint, fingerprint_change, fingerprint_tensor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

BENCH = "apply"
DENSITIES = {"dense 0.1%": 0.001, "dense 1%": 0.01, "dense 5%": 0.05, "dense 10%": 0.1}


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter(bits: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
    for i in range(positions.size):
        bits[positions[i]] = values[i]


def measure(case: str, density: float, elements: int, repeats: int) -> list[Row]:
    """Rows of one density on one bfloat16 tensor."""
    random = np.random.default_rng(0)
    spec, element = TensorSpec("weight", "BF16", (elements,)), DTYPES["BF16"]
    bits = random.integers(0, 1 << 15, elements, dtype=np.uint16)
    positions = np.flatnonzero(random.random(elements, dtype=np.float32) < density).astype(np.int64)
    distances = np.where(random.random(positions.size) < 0.5, 1, 0xFFFF).astype(np.uint16)
    new = bits.copy()
    apply_distances(element, new, positions, distances)
    values = new[positions]
    change = fingerprint_change("weight", positions, bits[positions], values)
    changes = Changes(
        [Sparse("BF16", np.zeros(1, np.uint32), np.array([positions.size]), positions, distances, True)],
        [],
        {0: change},
    )
    flat = torch.from_numpy(bits.view(np.int16))
    region = Region(0, (elements,), (1,))
    routes = RouteMap(TensorTable([spec]), [Destination("weight", torch.bfloat16, flat)], [[Route(0, region, region)]])
    held = [fingerprint_tensor("weight", bits)]
    staging = best_seconds(lambda: stage(1, changes, routes, held), repeats)
    patch = stage(1, changes, routes, held)
    undo = Undo()
    measured = Fingerprint()

    def run_commit() -> None:
        nonlocal undo, measured
        measured, undo = commit(patch, routes)

    def run_revert() -> None:
        if undo.sparse:
            revert(patch, routes, undo)

    committing = best_seconds(run_commit, repeats, run_revert)
    if measured != patch.declared:
        raise SystemExit("the commit did not change the weights as declared")
    reverting = best_seconds(run_revert, 1)
    bare = best_seconds(lambda: scatter(bits, positions, values), repeats)
    dense = best_seconds(lambda: np.copyto(bits, new), repeats)
    return [
        row(BENCH, case, "stage", 1e3 * staging, "ms"),
        row(BENCH, case, "commit", 1e3 * committing, "ms"),
        row(BENCH, case, "commit", 1e9 * committing / positions.size, "ns/changed"),
        row(BENCH, case, "revert", 1e3 * reverting, "ms"),
        row(BENCH, case, "bare scatter", 1e3 * bare, "ms"),
        row(BENCH, case, "memory copy of all", 1e3 * dense, "ms"),
        row(BENCH, case, "ratio", committing / bare, "x", "bare_scatter"),
        row(BENCH, case, "staged patch", patch.nbytes / positions.size, "B/changed"),
    ]


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments)
    torch.set_num_threads(1)
    elements, repeats = (4_000_000, 3) if options.quick else (300_000_000, 3)
    rows: list[Row] = []
    for case, density in DENSITIES.items():
        rows += measure(case, density, elements, repeats)
    write(options.json, rows)


if __name__ == "__main__":
    main()
