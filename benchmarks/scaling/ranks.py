"""What one rank of a large model costs: slices of the model are measured, and multiplied by how often it has them.

What is measured is the product's own code: its tracer finds the routes of a slice, and through them weights are
fingerprinted, objects are decoded and routed, and patches are applied.
"""

import gc
from collections.abc import Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numba
import numpy as np
import torch

from benchmarks.catchup.__main__ import Counting
from benchmarks.common.formats import CONTEXT
from benchmarks.common.rows import Row, row
from benchmarks.common.tables import number
from benchmarks.common.timing import Method, peak_extra_bytes, time_all
from benchmarks.scaling.shapes import RankSlice, ScaledModel, Slice
from trainer_side import Publisher
from trainer_side.options import SHARD_BYTES
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.ranged import piece_bytes
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec import delta_reader, delta_writer
from vllm_delta_sync.codec.merge import RollingBase
from vllm_delta_sync.engine.commit.apply import UndoEntry, apply_patch
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route_compiler import trace_routes
from vllm_delta_sync.engine.model.route_map import LiveBaseReader
from vllm_delta_sync.engine.staging.stage import PhaseTimer, build_patch
from vllm_delta_sync.errors import UnsupportedError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint, fingerprint_change
from vllm_delta_sync.format.table import DTYPES, TensorSpec, TensorTable
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.tensors.changes import BaseTensor, Bits, Changes, Positions, Sparse, apply_distances
from vllm_delta_sync.tensors.torch_views import bits_of, tensor_from_bits

BENCH = "scaling"
STARTS = SLICE, RANK, BUCKET = "slice: ", "projected rank: ", "projected bucket: "
ELEMENT = DTYPES["BF16"]
SHARE = 0.01
POOL_ELEMENTS, DRAWN_ELEMENTS = 1 << 24, 1 << 22
"""Different weights that there are; elements whose changes are drawn at a time."""
MOST_MOVE = 100.0
CODECS: tuple[Codec, ...] = ("tiled", "plain")
TIMES = ("proof", *(f"stage {codec}" for codec in CODECS), "stage two", "commit")
DECODED_BYTES = 10
"""Of a changed element: position and distance."""
RECEIVERS, NODE_RANKS, VERSION_SECONDS = 1000, 8, 60
LINK_BYTES = 10e9 / 8
"""Bytes per second that reach a node."""
REFUSED = "refused"


@numba.njit(cache=True, nogil=True)  # type: ignore[untyped-decorator]
def _draw(bits: np.ndarray, moves: np.ndarray, state: np.uint64, positions: np.ndarray, steps: np.ndarray) -> int:
    """Move elements by a random size around ``moves`` of their exponent, in ULP, rounded at a random phase."""
    count = 0
    for i in range(bits.size):
        state ^= state << np.uint64(13)
        state ^= state >> np.uint64(7)
        state ^= state << np.uint64(17)
        size = float((state >> np.uint64(8)) & np.uint64(0xFFFFFF)) / 0x1000000
        phase = float((state >> np.uint64(32)) & np.uint64(0xFFFFFF)) / 0x1000000
        step = int(2 * size * moves[(bits[i] >> 7) & 255] + phase)
        if step > 0:
            positions[count] = i
            steps[count] = step if (state >> np.uint64(63)) == np.uint64(0) else -step
            count += 1
    return count


class Weights:
    """Normal weights in bfloat16, and the changes that a step of Adam makes: all masters move about as far."""

    def __init__(self) -> None:
        self._pool = bits_of((0.02 * torch.randn(POOL_ELEMENTS, generator=torch.Generator().manual_seed(0))).bfloat16())
        exponents = np.bincount((self._pool >> 7) & 255, minlength=256) / self._pool.size
        low, high = 0.0, 1.0
        for _ in range(60):
            scale = (low + high) / 2
            self._moves = np.minimum(scale * 2.0 ** (127.0 - np.arange(256)), MOST_MOVE)
            # The chance that a move of up to twice this size, from a random phase, reaches the next number.
            chances = np.where(self._moves <= 0.5, self._moves, 1 - 0.25 / np.maximum(self._moves, 0.5))
            low, high = (scale, high) if float(exponents @ chances) < SHARE else (low, scale)

    def tensor(self, number: int, numel: int) -> Bits:
        """(numel,) bits of a tensor."""
        return np.resize(self._pool[number * 4096 % (POOL_ELEMENTS // 2) :], numel)

    def changes(self, table: TensorTable, bits: Sequence[Bits], seed: int) -> Changes:
        """What changes in tensors with these bits."""
        drawn, fingerprints = [], {}
        for tensor, old in enumerate(bits):
            where, steps = self._changes_of(old, seed * len(bits) + tensor)
            if where.size:
                before = old[where]
                after = before.copy()
                apply_distances(ELEMENT, after, np.arange(where.size), steps)
                fingerprints[tensor] = fingerprint_change(table[tensor].name, where, before, after)
                drawn.append((where, steps))
        ids, counts = np.array([*fingerprints], np.uint32), np.array([where.size for where, _ in drawn], np.int64)
        positions, distances = (np.concatenate(arrays) for arrays in zip(*drawn, strict=True))
        return Changes([Sparse(ELEMENT.name, ids, counts, positions, distances, True)], [], fingerprints)

    def _changes_of(self, bits: Bits, seed: int) -> tuple[Positions, Bits]:
        room = min(bits.size, DRAWN_ELEMENTS)
        positions, steps = np.empty(room, np.int64), np.empty(room, np.int16)
        found = []
        for start in range(0, bits.size, DRAWN_ELEMENTS):
            state = np.uint64((seed * 1_000_003 + start + 1) * 0x9E3779B97F4A7C15 % 2**64 | 1)
            count = _draw(bits[start : start + DRAWN_ELEMENTS], self._moves, state, positions, steps)
            found.append((positions[:count] + start, steps[:count].copy().view(np.uint16)))
        return np.concatenate([where for where, _ in found]), np.concatenate([moved for _, moved in found])


class SliceSubject:
    """A slice on one rank: its routes, and two versions of all ranks, the first one also as objects."""

    def __init__(self, part: Slice, ranks: int, weights: Weights) -> None:
        self.table = TensorTable(TensorSpec(piece.name, ELEMENT.name, piece.shape) for piece in part.pieces)
        elsewhere = {piece.name for piece in part.pieces if piece.cut == "elsewhere"}
        # What the rank does not hold has the same bits wherever the shape is the same, so that all of it fits.
        shared = {numel: weights.tensor(0, numel) for numel in {self.table.by_name(name).numel for name in elsewhere}}
        bits = [
            shared[spec.numel] if spec.name in elsewhere else weights.tensor(tensor, spec.numel)
            for tensor, spec in enumerate(self.table)
        ]
        model = RankSlice(part, ranks)
        model.load_weights((spec.name, tensor_from_bits(old, spec)) for spec, old in zip(self.table, bits, strict=True))
        self.routes = trace_routes(model, self.table)
        changes, second = (weights.changes(self.table, bits, seed) for seed in (1, 2))
        self.changed = changes.changed
        self.objects = {
            codec: delta_writer.encode(
                changes, self.table, codec, "zstd", CONTEXT, lambda tensor: BaseTensor(bits[tensor])
            )
            for codec in CODECS
        }
        self.second = delta_writer.encode(second, self.table, "plain", "zstd", CONTEXT)
        self.fingerprints = [Fingerprint()] * len(self.table)
        self.patch = self.stage("plain")
        try:
            self.stage("tiled")
        except UnsupportedError as error:
            # In quick runs most tensors have too few tiles for each rank to have some of its own.
            print(f"tiled: {error}", flush=True)
            del self.objects["tiled"]

    def prove(self) -> list[list[Fingerprint]]:
        """As ``RankWorker.identify`` does."""
        return self.routes.fingerprint_routes(range(len(self.table)))

    def stage(self, codec: Codec) -> StagedPatch:
        """As ``stage_update`` does with an object that was fetched and checked."""
        return self._stage([self.objects[codec]])

    def stage_two(self) -> StagedPatch:
        """As ``stage_update`` does with two versions of codec plain."""
        return self._stage([self.objects["plain"], self.second])

    def _stage(self, objects: list[bytes]) -> StagedPatch:
        base = RollingBase(LiveBaseReader(self.routes, lambda: None))
        steps = [[delta_reader.DeltaReader(data, self.table, CONTEXT, base)] for data in objects]
        return build_patch(1, steps, self.routes, self.fingerprints, base, PhaseTimer())

    def restore(self) -> None:
        """Take a commit back."""
        if self.patch.applied:
            apply_patch(self.patch, self.routes, reverse=True)

    def check(self) -> None:
        """All objects lead to one patch, which changes the weights as its commit says."""
        for other in map(self.stage, self.objects):
            for place in range(len(self.routes.destinations)):
                if not np.array_equal(_addresses(self.patch, place), _addresses(other, place)):
                    raise SystemExit("the codecs do not lead to the same patch")
        before, measured = self._total(), apply_patch(self.patch, self.routes)
        if sum(measured.values(), Fingerprint()) != self._total() - before:
            raise SystemExit("a commit did not change the weights as it says")
        self.restore()

    def _total(self) -> Fingerprint:
        return sum((value for found in self.prove() for value in found), Fingerprint())


def _addresses(patch: StagedPatch, destination: int) -> Positions:
    found = [sparse.positions for sparse in patch.sparse if sparse.destination == destination]
    return np.sort(np.concatenate([np.empty(0, np.int64), *found]))


def measure_slice(model: ScaledModel, part: Slice, weights: Weights, turns: tuple[int, int]) -> list[Row]:
    """Rows of one slice on one rank of a model. A codec that cannot carry it has none."""
    case = f"{SLICE}{model.name}: {part.name}"
    print(case, flush=True)
    subject = SliceSubject(part, model.ranks, weights)
    subject.check()
    methods = [
        Method("proof", subject.prove, 0),
        *(Method(f"stage {codec}", lambda codec=codec: subject.stage(codec), 0) for codec in subject.objects),  # type: ignore[misc]
        Method("stage two", subject.stage_two, 0),
        Method("commit", lambda: apply_patch(subject.patch, subject.routes), 0),
    ]
    time_all(methods, subject.restore, *turns)
    subject.restore()
    codec: Codec = "tiled" if "tiled" in subject.objects else "plain"
    extra = peak_extra_bytes(lambda: subject.stage(codec))
    sizes = {
        **{f"object {codec}": len(data) for codec, data in subject.objects.items()},
        "stage: peak": extra,
        "patch": subject.patch.nbytes,
        "device": (np.dtype(np.int32).itemsize + ELEMENT.itemsize) * subject.patch.elements,
        "undo log": UndoEntry(subject.patch, {}, subject.fingerprints, 0).nbytes,
    }
    return [
        row(BENCH, case, "count", part.count, "times"),
        row(BENCH, case, "all", part.numel, "elements"),
        row(BENCH, case, "held", part.held(model.ranks), "elements"),
        row(BENCH, case, "changed", subject.changed, "elements"),
        row(BENCH, case, "changed held", subject.patch.elements, "elements"),
        *(row(BENCH, case, method.name, method.seconds, "s") for method in methods),
        *(row(BENCH, case, name, size / 1e6, "MB") for name, size in sizes.items()),
        row(BENCH, case, "disturbance", max(method.disturbance for method in methods), "x"),
    ]


def project(model: ScaledModel, rows: Sequence[Row]) -> list[Row]:
    """A rank of the whole model, from the rows of its slices."""
    slices = [
        (part.count, {item["metric"]: item for item in rows if item["case"] == f"{SLICE}{model.name}: {part.name}"})
        for part in model.slices
    ]
    totals: dict[str, float] = {}
    for metric in slices[0][1]:
        # Of a codec that cannot carry one of the slices there is no total.
        if all(metric in known for _, known in slices):
            totals[metric] = sum(count * known[metric]["value"] for count, known in slices)
    totals["weights"] = 1e-6 * ELEMENT.itemsize * model.held
    # What is not the patch is gone before the next piece.
    workspace = max(known["stage: peak"]["value"] - known["patch"]["value"] for _, known in slices)
    totals["memory"] = totals["patch"] + workspace
    # In quick runs slices are so small that ranks cut tiles.
    sent = totals.get("object tiled", totals["object plain"])
    case, fetch = RANK + model.name, 1e6 * sent / LINK_BYTES
    names = [name for name in totals if name.startswith(("weights", "undo", "device", "memory", "object"))]
    return [
        *(row(BENCH, case, metric, totals[metric], "s") for metric in TIMES if metric in totals),
        row(BENCH, case, "fetch", fetch, "s"),
        *(row(BENCH, case, name, totals[name] / 1e3, "GB") for name in names),
    ]


def poll_requests() -> int:
    """What a receiver without news asks the bucket for, each time that it polls."""
    weights = {"weight": torch.ones(64, dtype=torch.bfloat16)}
    with TemporaryDirectory(prefix="delta-sync-scaling-") as folder:
        url = str(Path(folder) / "run")
        with Publisher(lambda: weights.items(), bucket=url, merge=False) as publisher:
            weights["weight"] += 1
            publisher.publish(step=1, wait=True)
        bucket = Counting(open_bucket(url))
        # What is on a disk is not asked for ahead.
        bucket.url = "s3://as-of-a-store/run"
        run = Run(bucket)
        known = run.head()
        bucket.requests = 0
        with run.prefetching(known.version):
            run.is_there()
            run.reachable_head(known)
        return bucket.requests


def load_of_bucket(model: ScaledModel, rows: Sequence[Row], polled: int) -> list[Row]:
    """Requests and bytes a second of ``RECEIVERS`` servers, a version every ``VERSION_SECONDS``."""
    known = {item["metric"]: item["value"] for item in rows if item["case"] == RANK + model.name}
    size = 1e9 * known.get("object tiled", known["object plain"])
    objects = -(-int(SHARE * model.numel * DECODED_BYTES) // SHARD_BYTES)
    pieces = objects * -(-int(size / objects) // piece_bytes(int(size / objects)))
    ranks, nodes = RECEIVERS * model.ranks, RECEIVERS * model.ranks / NODE_RANKS
    per_version = {
        "no cache": (ranks * objects, "requests/s"),
        "no cache: bytes": (1e-9 * ranks * size, "GB/s"),
        # A node looks an object up and fetches it in pieces; with a mirror only the look-up reaches the bucket.
        "node cache": (nodes * (objects + pieces), "requests/s"),
        "node cache: bytes": (1e-9 * nodes * size, "GB/s"),
        "mirror": (nodes * objects, "requests/s"),
    }
    polls = RECEIVERS * polled / Settings.model_fields["poll_seconds"].default
    case = BUCKET + model.name
    return [
        row(BENCH, case, "objects", objects, "objects"),
        row(BENCH, case, "polls", polls, "requests/s"),
        *(row(BENCH, case, way, value / VERSION_SECONDS, unit) for way, (value, unit) in per_version.items()),
    ]


def measure_ranks(models: Sequence[ScaledModel], turns: tuple[int, int]) -> list[Row]:
    """Rows of all slices, and what follows from them."""
    weights, rows = Weights(), []
    for model in models:
        for part in model.slices:
            rows += measure_slice(model, part, weights, turns)
            gc.collect()
        rows += project(model, rows)
    polled = poll_requests()
    return rows + [item for model in models for item in load_of_bucket(model, rows, polled)]


def blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Tables for docs/scale.md by name: ``slices``, ``ranks`` and ``bucket``."""
    ranks = {
        "weights": "weights", "undo log": "undo log, a version", "device": "on the device, calculated",
        "memory": "staging", "object tiled": "version, tiled", "object plain": "version, plain",
        "fetch": "fetch",
    }  # fmt: skip
    bucket = {
        "objects": "a version", "polls": "polls", "no cache": "no cache", "no cache: bytes": "no cache",
        "node cache": "node cache", "node cache: bytes": "node cache", "mirror": "node cache and mirror",
    }  # fmt: skip
    return {
        "slices": _slices(rows),
        "ranks": _columns("one rank of", RANK, rows, ranks),
        "bucket": _columns(f"{RECEIVERS:,} servers of", BUCKET, rows, bucket),
    }


def _slices(rows: Sequence[Row]) -> list[str]:
    lines = _head("measured slice", ["M elements of a rank, of all", *(f"{name} [s]" for name in TIMES)])
    for case in dict.fromkeys(item["case"] for item in rows if item["case"].startswith((SLICE, RANK))):
        known = {item["metric"]: item["value"] for item in rows if item["case"] == case}
        if case.startswith(RANK):
            sums = (f"**{number(known[name])}**" if name in known else REFUSED for name in TIMES)
            lines.append(f"| **{case.removeprefix(RANK)}: a rank, projected** | | {' | '.join(sums)} |")
            continue
        cells = [f"{number(known['held'] / 1e6)} of {number(known['all'] / 1e6)}"]
        for name in TIMES:
            seconds, count = known.get(name), known["count"]
            cells.append(REFUSED if seconds is None else f"{number(seconds)} × {count:g} = {number(count * seconds)}")
        lines.append(f"| {case.removeprefix(SLICE)} | {' | '.join(cells)} |")
    return lines


def _columns(corner: str, start: str, rows: Sequence[Row], titles: dict[str, str]) -> list[str]:
    shown = [item for item in rows if item["case"].startswith(start)]
    units = {item["metric"]: item["unit"] for item in shown}
    lines = _head(corner, [f"{title} [{units.get(name, 'GB')}]" for name, title in titles.items()])
    for case in dict.fromkeys(item["case"] for item in shown):
        known = {item["metric"]: item["value"] for item in shown if item["case"] == case}
        cells = (number(known[name]) if name in known else REFUSED for name in titles)
        lines.append(f"| {case.removeprefix(start)} | {' | '.join(cells)} |")
    return lines


def _head(corner: str, columns: Iterable[str]) -> list[str]:
    titles = [*columns]
    return [f"| {corner} | {' | '.join(titles)} |", "|---" + "|---:" * len(titles) + "|"]
