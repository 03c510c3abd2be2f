"""Catch up over n versions: merged deltas, against reading each delta and against a fresh anchor.

Two runs in a local directory, written by ``Publisher`` and completed by ``compact``. *settled* is SmolLM2-135M at
learning rate 1e-6, 100 versions (``benchmarks.common.real_steps``). *synthetic* is 3.1 M bfloat16 weights rounded from
float32 masters that Adam moves, about 1 % changed a version; its head is 13 versions past a multiple of 100, so that no
range happens to fit. ``--quick`` has *synthetic* only, smaller.

A reader that holds version head − n reads, verifies, decodes and applies whatever leads to the head, and ends bit for
bit there. *back* is the other way: a reader that holds the head needs version head − n, which distances of codec
``tiled`` do not lead back to, so it rebuilds it from an anchor or the base; servers do that only beyond their undo log.
Objects, bytes and requests are what the bucket was asked for; documents that are looked for and not there
count as requests. One thread; a local disk, where a request costs next to nothing: over a network each costs a round
trip.

*width* w: merged deltas that span w, w², w³ … versions; the runs have 4. Sizes of what a writer writes beside the
deltas, and what a reader that knows all versions reads, over all distances from the head.
"""

import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks.catchup.widths import widths
from benchmarks.common import real_model, real_steps
from benchmarks.common.noise import NoisyAdam
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import Place, number, pivot, value_of
from benchmarks.common.training_data import tensors_of
from trainer_side import Publisher
from vllm_delta_sync.bucket import Bucket, ObjectInfo, open_bucket
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.format.documents import MergedDelta
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX
from vllm_delta_sync.maintenance.compact import compact
from vllm_delta_sync.run.read_plan import ReadPlanner, Root
from vllm_delta_sync.run.restore import apply_step, load_root, restore

BENCH = "catchup"
TRIES = 3
SPANS = (1, 10, 100, 1000)
EXTRA = 13
REAL, REAL_SPANS = "settled lr 1e-6", (1, 10, 50, 100)
LEFT_OUT = ("synthetic: 1", "synthetic: 10", "synthetic: 100")
"""Lines that the page leaves out, which has to stay short."""


class Counting(Bucket):
    """A bucket that counts what it is asked for.

    Attributes:
        requests: calls. objects: objects read. bytes: read in all, documents included.
    """

    def __init__(self, inner: Bucket) -> None:
        self._inner, self.url = inner, inner.url
        self.requests = self.objects = self.bytes = 0

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        self._inner.put(key, data, if_absent=if_absent)

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        self.requests += 1
        data = self._inner.get(key, max_bytes=max_bytes)
        self._count(key, len(data))
        return data

    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.requests += 1
        data = self._inner.get_range(key, start, length)
        self._count(key, len(data))
        return data

    def stat(self, key: str) -> ObjectInfo:
        self.requests += 1
        return self._inner.stat(key)

    def _list(self, prefix: str) -> Iterator[ObjectInfo]:
        self.requests += 1
        return self._inner.list(prefix)

    def delete(self, key: str) -> None:
        self._inner.delete(key)

    def _count(self, key: str, size: int) -> None:
        self.objects += key.startswith(OBJECTS_PREFIX)
        self.bytes += size


class EachDelta(Run):
    """A reader that knows of no merged deltas."""

    def merged_delta(self, first: int, last: int) -> MergedDelta:
        raise NotFoundError(f"merged delta {first} to {last} is not looked for")


def publish(url: str, versions: int, tensors: int, shape: tuple[int, int]) -> None:
    """Write a synthetic run of so many versions after version 0, and nothing beside it."""
    generator = torch.Generator().manual_seed(0)
    adam = NoisyAdam(0.02 * torch.randn(shape, generator=generator) for _ in range(tensors))
    weights = {f"layers.{number}.weight": served for number, served in enumerate(adam.served)}
    with Publisher(weights, bucket=url, merge=False) as publisher:
        for step in range(1, versions + 1):
            adam.step()
            publisher.publish(step=step, wait=True)


def publish_real(url: str, versions: int) -> None:
    """Write a run of the real model, as ``publish``."""
    made = real_steps.sequence(versions, say=print)

    served = tensors_of({name: bits.copy() for name, bits in made.base.items()})
    with Publisher(served.items, bucket=url, merge=False) as publisher:
        for step, version in enumerate(made.versions(), 1):
            for name, tensor in tensors_of(version).items():
                served[name].copy_(tensor)
            publisher.publish(step=step, wait=True)


def measure_run(url: str, data: str, spans: Sequence[int]) -> list[Row]:
    """Complete a run, and measure each distance from its head.

    Args:
        data: what cases begin with.
    """
    run = open_run(url)
    deltas = [manifest for manifest in run.log() if manifest.kind == "delta"]
    case = f"{data}{len(deltas)} versions"
    share = sum(manifest.changed for manifest in deltas) / (len(deltas) * run.table.total)
    payload = sum(manifest.payload_bytes for manifest in deltas)
    report = compact(run, anchor="head")
    rows = [
        row(BENCH, case, "changed share", 100 * share, "%"),
        row(BENCH, case, "model", run.table.full_bytes / 1e6, "MB"),
        row(BENCH, case, "deltas", payload / 1e6, "MB"),
    ]
    merged = sum(run.merged_delta(*pair).payload_bytes for pair in run.merged_deltas())
    rows.append(row(BENCH, case, "merged deltas", merged / 1e6, "MB"))
    rows.append(row(BENCH, case, "making them", report.seconds, "s"))
    return [*rows, *(item for span in spans for item in measure(url, data, span))]


def measure(url: str, data: str, span: int) -> list[Row]:
    """Rows of one distance from the head."""
    bucket = Counting(open_bucket(url))
    runs = {
        "merged_deltas": Run(bucket),
        "each_delta": EachDelta(bucket),
        "fresh_anchor": Run(bucket),
        "back": Run(bucket),
    }
    head = runs["merged_deltas"].head()
    held = runs["merged_deltas"].manifest(head.version - span)

    def counted(ways: str) -> list[float]:
        run = runs[ways]
        if ways == "back":
            bucket.requests = bucket.objects = bucket.bytes = 0
            began = time.perf_counter()
            restore(run, held)
            return [bucket.objects, bucket.requests, bucket.bytes, time.perf_counter() - began]
        state = restore(run, held).state
        bucket.requests = bucket.objects = bucket.bytes = 0
        began = time.perf_counter()
        if ways == "fresh_anchor":
            state = load_root(run, Root(head, run.anchor(head.version)))
        else:
            planner = ReadPlanner(run)
            planner.add_manifests(held, head)
            for step in planner.path(held.version, head.version):
                apply_step(step, state)
        seconds = time.perf_counter() - began
        if state.fingerprint != head.model_fingerprint:
            raise SystemExit(f"{ways} over {span} versions did not lead to the head")
        return [bucket.objects, bucket.requests, bucket.bytes, seconds]

    rows: list[Row] = []
    found: dict[str, list[float]] = {}
    for ways in runs:
        tries = [counted(ways) for _ in range(TRIES)]
        found[ways] = min(tries, key=lambda values: values[-1])
    for ways, values in found.items():
        case = f"{data}{span} versions, {ways.replace('_', ' ')}"
        names = (("objects", "objects", 1), ("requests", "requests", 1), ("read", "MB", 1e6), ("time", "s", 1))
        for (name, unit, divisor), value in zip(names, values, strict=True):
            rows.append(row(BENCH, case, name, value / divisor, unit))
    for peer in ("each_delta", "fresh_anchor"):
        for place, name in ((0, "objects"), (1, "requests"), (2, "bytes"), (3, "time")):
            ratio = found[peer][place] / found["merged_deltas"][place]
            rows.append(row(BENCH, f"{data}{span} versions, {name}", "ratio", ratio, "x", peer))
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """What each way to catch up takes."""

    def place(item: Row) -> Place:
        behind, _, way = item["case"].partition(" versions, ")
        data, _, span = behind.rpartition(": ")
        line = f"{data or 'synthetic'}: {span}"
        known = bool(way) and "peer" not in item and item["metric"] != "requests" and line not in LEFT_OUT
        return (line, f"{way}: {item['metric']} [{item['unit']}]") if known else None

    shares = [f"{item['value']:.2f} %" for item in rows if item["metric"] == "changed share"]
    lines = [f"Changed in each version, in this order: {', '.join(shares)}. SmolLM2-135M was {real_model.ORIGIN}.", ""]
    return [*lines, *pivot("versions behind", rows, place)]


def blocks(rows: Sequence[Row]) -> dict[str, list[str]]:
    """The table for docs/how-it-works.md: what each way takes in the run of synthetic weights."""
    ways = ("merged deltas", "each delta", "fresh anchor")
    lines = ["| versions behind | " + " | ".join(ways) + " |", "|---:" * (len(ways) + 1) + "|"]
    for span in SPANS:
        if not any(item["case"] == f"{span} versions, each delta" for item in rows):
            continue  # of a quick run
        cells = []
        for way in ways:
            objects, read, seconds = (
                value_of(rows, f"{span} versions, {way}", metric) for metric in ("objects", "read", "time")
            )
            unit = "object" if objects == 1 else "objects"
            cells.append(f"{number(objects)} {unit}, {number(read)} MB, {number(1000 * seconds)} ms")
        lines.append(f"| {span} | " + " | ".join(cells) + " |")
    return {"behind": lines}


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=2)
    torch.set_num_threads(1)
    tensors, shape, spans = (4, (256, 512), SPANS[:3]) if options.quick else (12, (512, 512), SPANS)
    folder = Path(tempfile.mkdtemp(prefix="delta-sync-catchup-"))
    rows: list[Row] = []
    try:
        if not options.quick:
            publish_real(str(folder / "real"), REAL_SPANS[-1])
            rows += measure_run(str(folder / "real"), f"{REAL}: ", REAL_SPANS)
            rows += widths(BENCH, REAL, real_steps.sequence(REAL_SPANS[-1]))
        publish(str(folder / "run"), spans[-1] + EXTRA, tensors, shape)
        rows += measure_run(str(folder / "run"), "", spans)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write(options.json, rows)


if __name__ == "__main__":
    main()
