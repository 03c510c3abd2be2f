"""The measuring process of ``benchmarks.apply``, which starts it with pinned threads."""

import gc
import shutil
import tempfile
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path

import numba
import numpy as np
import torch
from vllm.model_executor.model_loader.checkpoint_weight_patch import load_checkpoint_weight_patches
from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

from benchmarks.apply.change import (
    NewVersion,
    bits_of,
    make_version,
    randomly_changed,
    read_checkpoint,
    save_tensors,
    table_of,
)
from benchmarks.apply.models import FULL, QUICK, Loader, digests, write_checkpoint
from benchmarks.apply.proof import measure_proof
from benchmarks.common import real_model, real_steps
from benchmarks.common.rows import Row, parser, row, write
from benchmarks.common.timing import Method, load_average, peak_extra_bytes, time_all
from benchmarks.common.training_data import tensors_of
from vllm_delta_sync.codec.delta_object import batch_starts
from vllm_delta_sync.codec.delta_reader import LAZY_ELEMENTS
from vllm_delta_sync.engine.commit.apply import apply_patch
from vllm_delta_sync.engine.model.patch import PatchBuilder, StagedPatch
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format import kernels
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_tensor
from vllm_delta_sync.tensors.changes import Changes

BENCH = "apply"
REAL = f"{real_model.CASE}, settled, lr 1e-6"
DENSITIES = {"0.1%": 0.001, "1%": 0.01, "5%": 0.05, "10%": 0.1}
QUICK_DENSITIES = {"1%": 0.01}
PATCHES, UNCHECKED = "load_checkpoint_weight_patches", "load_checkpoint_weight_patches, duplicates unchecked"
SCATTER, ONE_ARRAY, PREFETCHING = "bare_scatter", "bare_scatter into one array", "bare_scatter, prefetching"
BARE = (SCATTER, ONE_ARRAY, PREFETCHING)
AHEAD = 128
"""Elements that the prefetching scatter looks ahead: the best of 64, 128 and 256."""


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter(bits: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
    for i in range(positions.size):
        bits[positions[i]] = values[i]


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def scatter_prefetching(bits: np.ndarray, positions: np.ndarray, values: np.ndarray) -> None:
    near = max(0, positions.size - AHEAD)
    for i in range(near):
        kernels.prefetch(bits, np.uint64(positions[i + AHEAD]))
        bits[np.uint64(positions[i])] = values[i]
    for i in range(near, positions.size):
        bits[np.uint64(positions[i])] = values[i]


class Subject:
    """A model with its routes, and the weights it starts from.

    Attributes:
        name: of its cases. folder: checkpoint of the weights. work: an empty folder for more of them.
    """

    def __init__(self, name: str, folder: Path, work: Path) -> None:
        self.name, self.folder, self.work = name, folder, work
        self.loader = Loader(self.folder, work / "store")
        self.model = self.loader.load(self.folder)
        self.digests = digests(self.model)
        tensors = read_checkpoint(self.folder)
        self.table = table_of(tensors)
        self.held = [fingerprint_tensor(spec.name, bits_of(tensors[spec.name])) for spec in self.table]
        self.routes = trace_routes(self.model, self.table)

    @property
    def files(self) -> list[str]:
        """Where the old weights are."""
        return [str(path) for path in sorted(self.folder.glob("*.safetensors"))]

    def restore(self) -> None:
        """Put the old weights back."""
        self.load(safetensors_weights_iterator(self.files, False))

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The model's own loader, weights in the checkpoint's names."""
        self.model.load_weights(weights)


def measure(subject: Subject, tensors: dict[str, torch.Tensor], case: str, turns: tuple[int, int]) -> list[Row]:
    """Rows of one model that gets these tensors."""
    new = make_version(subject.table, subject.folder, tensors, subject.work / "new")
    expected = digests(subject.loader.load(new.folder))
    gc.collect()
    patch = routed(new.changes, subject.routes, subject.held)
    methods = _methods(subject, new, patch)
    extra = {method.name: _check(method, subject, expected) for method in methods}
    time_all(methods, subject.restore, *turns)
    subject.restore()
    # The model's size in one more array: not beside the new checkpoint.
    new.tensors.clear()
    new.patches.clear()
    methods += [_scatter_into_one(subject, patch)]
    time_all(methods[-1:], subject.restore, *turns)
    shutil.rmtree(new.folder)
    rows = _absolute_rows(case, methods, extra, new.changed)
    found = {method.name: method for method in methods}
    ours = found["commit"].seconds
    rows += [
        row(BENCH, case, "changed share", 100 * new.changed / subject.table.total, "%"),
        row(BENCH, case, "staged patch", patch.nbytes / new.changed, "B/changed"),
        row(BENCH, case, "load average", max(0.01, load_average()), "processes"),
        row(BENCH, case, "disturbance", max(method.disturbance for method in methods), "x"),
    ]
    rows += [
        row(BENCH, case, "ratio", found[peer].seconds / ours, "x", peer)
        for peer in (PATCHES, UNCHECKED, "load_weights", "load from file")
    ]
    return rows + [row(BENCH, case, "ratio", ours / found[peer].seconds, "x", peer) for peer in BARE]


def routed(changes: Changes, routes: RouteMap, held: list[Fingerprint]) -> StagedPatch:
    """Route changes of one dtype, as many at a time as are decoded at a time."""
    builder, [group] = PatchBuilder(1, routes, held, changes.fingerprints), changes.sparse
    for first, last in pairwise([*batch_starts(group.counts, LAZY_ELEMENTS).tolist(), group.ids.size]):
        builder.add(group.rows(first, last))
    return builder.finish()


def _methods(subject: Subject, new: NewVersion, patch: StagedPatch) -> list[Method]:
    """Ours and the peers. The model is at the old version, and is left there."""
    model, routes = subject.model, subject.routes
    group = new.changes.sparse[0]
    ours = group.positions.nbytes + group.data.nbytes
    peers = sum(item.values.nbytes + item.indices.nbytes for item in new.patches)
    bare = sum(sparse.positions.nbytes + sparse.data.nbytes for sparse in patch.sparse)
    checkpoint = sum(tensor.nbytes for tensor in new.tensors.values())

    def run_stage() -> StagedPatch:
        return routed(new.changes, routes, subject.held)

    def run_commit() -> None:
        if sum(apply_patch(patch, routes).values(), Fingerprint()) != patch.declared:
            raise SystemExit("the commit did not change the weights as declared")

    return [
        Method("commit", run_commit, ours, whole=lambda: apply_patch(run_stage(), routes)),
        Method("stage", run_stage, ours, arrives=False),
        Method("take back", lambda: apply_patch(patch, routes, True), ours, prepare=run_commit, arrives=False),
        Method(PATCHES, lambda: load_checkpoint_weight_patches(model, new.patches), peers),
        Method(
            UNCHECKED,
            lambda: load_checkpoint_weight_patches(model, new.patches, validate_unique_indices=False),
            peers,
        ),
        Method("load_weights", lambda: subject.load(new.tensors.items()), checkpoint),
        Method("load from file", lambda: subject.load(safetensors_weights_iterator(new.files, False)), 0),
        Method(SCATTER, _bare_scatter(scatter, patch, routes), bare),
        Method(PREFETCHING, _bare_scatter(scatter_prefetching, patch, routes), bare),
    ]


def _bare_scatter(loop: Callable[..., None], patch: StagedPatch, routes: RouteMap) -> Callable[[], None]:
    apply_patch(patch, routes)
    steps = []
    for sparse in patch.sparse:
        bits = routes.destinations[sparse.destination].bits
        steps.append((bits, sparse.positions, bits[sparse.positions]))
    apply_patch(patch, routes, reverse=True)

    def run() -> None:
        for bits, positions, values in steps:
            loop(bits, positions, values)

    return run


def _scatter_into_one(subject: Subject, patch: StagedPatch) -> Method:
    used = sorted({sparse.destination for sparse in patch.sparse})
    arrays = [subject.routes.destinations[number].bits for number in used]
    starts = dict(zip(used, np.cumsum([0] + [bits.size for bits in arrays]).tolist(), strict=False))
    array = np.concatenate(arrays)
    positions = np.concatenate(
        [sparse.positions + starts[sparse.destination] for sparse in patch.sparse], dtype=np.int32
    )
    values = array[positions] ^ np.uint16(1)
    return Method(ONE_ARRAY, lambda: scatter(array, positions, values), 0)


def _check(method: Method, subject: Subject, expected: dict[str, str]) -> int:
    """Run a method once, which also compiles what it needs, compare the weights, then measure its extra memory."""
    subject.restore()
    method.prepare()
    method.run()
    if digests(subject.model) != (expected if method.arrives else subject.digests):
        raise SystemExit(f"{method.name}: parameters are not bit-equal to those of a fresh load")
    subject.restore()
    method.prepare()
    return peak_extra_bytes(method.whole or method.run)


def _absolute_rows(case: str, methods: list[Method], extra: dict[str, int], changed: int) -> list[Row]:
    rows = [row(BENCH, case, "changed elements", changed, "elements")]
    for method in methods:
        rows.append(row(BENCH, case, method.name, 1e3 * method.seconds, "ms"))
        rows.append(row(BENCH, case, method.name, 1e9 * method.seconds / changed, "ns/changed"))
        if method.name in extra:
            rows.append(row(BENCH, case, f"{method.name}: input", method.inputs / 1e6, "MB"))
            rows.append(row(BENCH, case, f"{method.name}: extra memory", extra[method.name] / 1e6, "MB"))
    return rows


def real_subject(checkpoint: Path, work: Path) -> tuple[Subject, dict[str, torch.Tensor]]:
    """The real model before a step of a settled run, and its tensors after it."""
    [pair] = real_steps.pairs("settled", rates=(real_steps.SEQUENCE_RATE,))
    old, new = tensors_of(pair.old), tensors_of(pair.new)
    save_tensors(old, checkpoint, work / "old")
    return Subject(REAL, work / "old", work), new


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, __doc__ or "", minutes=5)
    real_model.add_flag(known)
    known.add_argument("--checkpoint", type=Path, help="of the real model; without it, that is left out")
    options = known.parse_args(arguments)
    torch.set_num_threads(1)
    rows: list[Row] = []
    densities, turns = (QUICK_DENSITIES, (3, 5)) if options.quick else (DENSITIES, (4, 8))
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        for shape in () if options.real else QUICK if options.quick else FULL:
            subject = Subject(shape.name, write_checkpoint(shape, work / shape.name / "old"), work / shape.name)
            rows += measure_proof(subject, turns, shape.experts == 0)
            for name, density in densities.items():
                tensors = randomly_changed(subject.folder, density)
                rows += measure(subject, tensors, f"{shape.name} {name}", turns)
            del subject
            gc.collect()
        if options.checkpoint is not None:
            rows += measure(*real_subject(options.checkpoint, work / "real"), REAL, turns)
    write(options.json, rows)


if __name__ == "__main__":
    main()
