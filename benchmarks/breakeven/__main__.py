"""When a delta pays, and when not: link speed × changed share → delta, everything, or neither.

Costs are measured here, on one thread, on 111 M synthetic bfloat16 elements moved by Adam, and scaled to 1 GB of
weights. What a way takes is then computed, as the sum of its steps, none of them overlapped:

- *plain*, *tiled*: compare and encode, hash, up, down, hash, decode, add at the changed positions.
- *full*, through the same bucket: copy, hash, up, down, hash, copy.
- *direct*: whole weights over the same link once, and a copy. No bucket, no hash, no version that can be checked,
  fetched later, or taken back: what NCCL, CUDA IPC and RDMA do where trainer and servers reach each other.

So do **not** use this where the trainer reaches the servers over a link that is faster than *delta beats direct below*
(the same machine, or one fast fabric) and nobody needs versions: hand the weights over directly. And where a delta does
not beat *full*, publish anchors only. Steps at learning rates that change most elements are of that kind; a publisher
sends tensors whole wherever that is smaller, so it costs the comparison, not the bytes.

Lines for more than one core are *projected*: comparing, coding, hashing and copying divided by the number of cores.
"""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.common import synthetic
from benchmarks.common.charts import panels, plain_ticks, save, series
from benchmarks.common.copying import memcpy, one_thread
from benchmarks.common.formats import Own, flats, own_codecs
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import Place, number, pivot, value_of
from benchmarks.common.timing import Method, time_all
from benchmarks.common.training_data import SHARES, Pair, elements
from vllm_delta_sync.tensors.changes import Changes, apply_distances

BENCH = "breakeven"
MORE_SHARES = (*SHARES, 0.2, 0.4)
LINKS = (0.01, 0.1, 1.0, 10.0, 100.0, 400.0)
"""Gbit/s."""
CORES = (1, 16)
LEAST, MOST = 0.001, 1000.0
HASHED_BYTES = 1 << 27


@dataclass(frozen=True)
class Way:
    """What one way costs per GB of weights: seconds of one core, GB moved, and how often those cross the link."""

    name: str
    compute: float
    moved: float
    crossings: int

    def seconds(self, link: float, cores: int = 1) -> float:
        """Per GB of weights at ``link`` Gbit/s."""
        return self.compute / cores + 8 * self.crossings * self.moved / link


def beats_below(one: Way, other: Way, cores: int) -> float:
    """The link speed in Gbit/s below which ``one`` is faster; ``MOST`` and more, or ``LEAST`` and less, as those."""
    saved = 8 * (other.crossings * other.moved - one.crossings * one.moved)
    paid = (one.compute - other.compute) / cores
    if saved <= 0:
        return LEAST
    return min(MOST, max(LEAST, saved / paid)) if paid > 0 else MOST


def whole_ways(pair: Pair, repeats: int) -> dict[str, Way]:
    """``full`` and ``direct``, and ``hash`` as seconds per GB."""
    source = flats(pair.old)
    target = [bits.copy() for bits in source]
    block = np.zeros(HASHED_BYTES, np.uint8)
    copying = Method("copy", lambda: memcpy(target, source), 0)
    hashing = Method("hash", lambda: hashlib.sha256(block.data).digest(), 0)
    time_all([copying, hashing], lambda: None, repeats, 2 * repeats)
    total, _ = elements(pair)
    copy, hash_ = copying.seconds / (2e-9 * total), hashing.seconds / (1e-9 * HASHED_BYTES)
    return {
        "full": Way("full", 2 * copy + 2 * hash_, 1.0, 2),
        "direct": Way("direct", copy, 1.0, 1),
        "hash": Way("hash", hash_, 0.0, 0),
    }


def delta_way(name: str, pair: Pair, hash_seconds: float, repeats: int) -> Way:
    """One of our codecs."""
    codec = Own(name)
    codec.begin(pair.old)
    data = codec.encode(pair.old, pair.new)
    decoded = codec.decode(data, pair.old)
    encode = Method("encode", lambda: codec.encode(pair.old, pair.new), 0, prepare=lambda: codec.begin(pair.old))
    decode = Method("decode", lambda: codec.decode(data, pair.old), 0)
    served = [bits.copy() for bits in flats(pair.old)]
    scatter = Method("apply", lambda: apply(decoded, served), 0)
    time_all([encode, decode, scatter], lambda: None, repeats, 2 * repeats)
    total, _ = elements(pair)
    gigabytes = 2e-9 * total
    moved = 1e-9 * len(data) / gigabytes
    seconds = encode.seconds + decode.seconds + scatter.seconds
    return Way(name, seconds / gigabytes + 2 * hash_seconds * moved, moved, 2)


def apply(changes: Changes, bits: list[np.ndarray]) -> None:
    """Add distances, or replace whole tensors, in place."""
    for group in changes.sparse:
        for tensor, positions, distances in group.tensors():
            apply_distances(group.element, bits[tensor], positions, distances)
    for full in changes.full:
        np.copyto(bits[full.id], full.bits)


def rows_of(case: str, ways: list[Way]) -> list[Row]:
    """Costs, times over links, and where lines cross, for one changed share."""
    found = []
    for way in ways:
        found.append(row(BENCH, f"{case}, {way.name}", "compute", way.compute, "s/GB"))
        found.append(row(BENCH, f"{case}, {way.name}", "moved", way.moved, "GB/GB"))
    for link in LINKS:
        found += [row(BENCH, f"{case}, {link:g} Gbit/s", way.name, way.seconds(link), "s/GB") for way in ways]
    by_name = {way.name: way for way in ways}
    deltas = [way for way in ways if way.name not in ("full", "direct")]
    for cores in CORES:
        crossing = case if cores == 1 else f"{case}, projected to {cores} cores"
        for peer in ("direct", "full"):
            most = max(beats_below(way, by_name[peer], cores) for way in deltas)
            found.append(row(BENCH, crossing, f"delta beats {peer} below", most, "Gbit/s"))
        if "tiled" in by_name:
            speed = beats_below(by_name["tiled"], by_name["plain"], cores)
            found.append(row(BENCH, crossing, "tiled beats plain below", speed, "Gbit/s"))
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Link speed below which a delta is faster than whole weights, over the changed share."""
    figure, [[axis]] = panels(1, 1, (9.5, 4.5), squeeze=False)
    bottom, top = 0.01, 1000.0
    start = r"dense (?P<x>[\d.]+)%"
    lines: dict[str, dict[float, float]] = {
        peer: dict(next(iter(series(rows, start, f"delta beats {peer} below").values()), []))
        for peer in ("direct", "full")
    }
    shares = sorted(lines["direct"])
    if shares:
        direct = [lines["direct"][share] for share in shares]
        full = [max(speed, lines["full"][share]) for share, speed in zip(shares, direct, strict=True)]
        axis.fill_between(shares, bottom, direct, color="C2", alpha=0.25, label="a delta")
        axis.fill_between(
            shares, direct, full, color="C1", alpha=0.2, label="neither: copy directly\n(over a bucket: a delta)"
        )
        axis.fill_between(shares, full, top, color="0.8", label="neither: copy directly\n(over a bucket: full)")
    for cores, style in (("", "-"), (", projected to 16 cores", "--")):
        for metric, color in (("delta beats direct below", "C3"), ("delta beats full below", "k"),
                              ("tiled beats plain below", "C2")):  # fmt: skip
            for points in series(rows, start + cores, metric).values():
                axis.plot(*zip(*points, strict=True), style, color=color, label=metric + cores)
    axis.set(xscale="log", yscale="log", ylim=(bottom, top), xlabel="changed [%]", ylabel="link [Gbit/s]")
    axis.set_title("Below a line the first of the two is faster (one core where not said)")
    plain_ticks(axis.xaxis, (0.5, 1, 2, 5, 10, 20, 40))
    plain_ticks(axis.yaxis, (0.01, 0.1, 1, 10, 100, 1000))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, path)


CHARTS = {"breakeven.png": ("Link speed below which a delta pays, over the changed share", draw)}


def tables(rows: list[Row]) -> list[str]:
    """Markdown: seconds at 1 %. Where lines cross is in the picture, and in the results."""

    def seconds(item: Row) -> Place:
        match = re.fullmatch(r"dense 1%, (.+ Gbit/s)", item["case"])
        return (item["metric"], match[1]) if match else None

    return pivot("1 % changed: s per GB of weights, at", rows, seconds)


def blocks(rows: list[Row]) -> dict[str, list[str]]:
    """Tables for docs/when-not.md: the links below which a delta is sooner, and the seconds over some links at 1 %."""
    peers = {"direct": 1, "full": 2}

    def way(share: str, name: str) -> Way:
        compute, moved = (value_of(rows, f"dense {share}, {name}", metric) for metric in ("compute", "moved"))
        return Way(name, compute, moved, peers.get(name, 2))

    def below(share: str, codec: str, peer: str) -> str:
        speed = beats_below(way(share, codec), way(share, peer), 1)
        return "at every speed" if speed >= MOST else f"{number(speed)} Gbit/s"

    columns = [(codec, peer) for peer in peers for codec in ("plain", "tiled")]
    shares = [
        "| changed per version | "
        + " | ".join(f"`{codec}`: sooner than *{peer}* below" for codec, peer in columns)
        + " |",
        "|---" + "|---:" * len(columns) + "|",
    ]
    for item in rows:
        match = re.fullmatch(r"dense (.+)%, plain", item["case"])
        if match and item["metric"] == "compute":
            share = f"{match[1]}%"
            shares.append(f"| {match[1]} % | " + " | ".join(below(share, *column) for column in columns) + " |")

    def seconds(item: Row) -> Place:
        match = re.fullmatch(r"dense 1%, (.+) Gbit/s", item["case"])
        shown = match and 0.1 <= float(match[1]) <= 100 and item["metric"] != "full"
        return (f"{match[1]} Gbit/s", item["metric"]) if match and shown else None

    return {"shares": shares, "links": pivot("link", rows, seconds)}


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=10)
    one_thread()
    shapes = synthetic.QUICK_SHAPES if options.quick else synthetic.SHAPES
    shares, repeats = (MORE_SHARES[1:4:2], 1) if options.quick else (MORE_SHARES, 2)
    names = [codec.name for codec in own_codecs() if codec.name != "raw"]
    pairs = synthetic.pairs(shapes, shares)
    wholes = whole_ways(pairs[0], repeats)
    rows: list[Row] = []
    for share, pair in zip(shares, pairs, strict=True):
        case = f"dense {100 * share:g}%"
        print(case, flush=True)
        deltas = [delta_way(name, pair, wholes["hash"].compute, repeats) for name in names]
        rows += rows_of(case, [*deltas, wholes["full"], wholes["direct"]])
    write(options.json, rows)


if __name__ == "__main__":
    main()
