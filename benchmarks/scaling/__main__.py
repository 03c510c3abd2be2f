"""What an element costs as models grow: comparing and encoding, and decoding, from 10 million to a billion elements.

Synthetic bfloat16 weights in matrices of 4096 × 4096, and one with fewer rows, about 1 % changed by one step of Adam.
One thread; processor caches are overwritten before each run, so that small models have no advantage. ``encode`` is per
element of the model and includes the comparison; ``decode`` is per changed element. Their ratios against the smallest
model say whether cost grows faster than the model: 1 means not at all.

Cases that begin with *projection* are not measurements: the largest measured size's cost per element, and its bytes,
times the number of elements, on one thread. Tensors are independent of each other, so threads and ranks divide it.

Cases that begin with *slice* are part of one rank of a known model, such as a decoder layer, measured on one thread of
a CPU. *projected rank* is a whole rank: for each metric, Σ over the model's slices of *measured × count*, the number of
times that the model has the slice. Weights are normal; 1 % of all elements changed, as a step of Adam changes them.

- ``proof``: fingerprints of all that a rank holds, as a start takes them after the trace.
- ``stage``: decodes what this rank holds, of the objects of all ranks, and routes it; without fetching and SHA-256.
- ``stage two``: two versions of codec ``plain``, merged.
- ``commit``: the part of a pause that grows with the model. ``undo log``: host memory that keeps a commit revertible.
- ``memory``: the patch (address, distance, half a hash: 14 bytes for each changed element of the rank), and what the
  slice that needs most was measured to need besides, in passing. Objects of more than 64 MB stay in their files.
  ``device``: the patch of weights on a device: position and distance, 6 bytes for each.
  ``fetch``: a version's bytes at 10 Gbit/s.
- *projected bucket*: 1,000 servers, nodes of 8 ranks, a version each minute. A version is cut into objects of 1 GiB
  decoded, and fetched in the pieces that the product uses; a poll takes the requests that one was counted to take,
  each ``poll_seconds`` (default). Without a cache each rank reads each object in one request.

``--part sizes`` or ``--part slices`` measures one part and keeps the other's rows in FILE.
"""

import gc
import json
import re
from pathlib import Path

from benchmarks.common import synthetic
from benchmarks.common.charts import OURS, panels, save, series
from benchmarks.common.copying import compare_and_copy, memcpy, one_thread
from benchmarks.common.formats import Own, flats, own_codecs
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import Place, pivot, value_of
from benchmarks.common.timing import Method, peak_extra_bytes, time_all
from benchmarks.common.training_data import Pair, elements
from benchmarks.scaling import ranks
from benchmarks.scaling.shapes import scaled_models

BENCH = "scaling"
SHARE = 0.01
SIDE = 4096
SIZES = (10_000_000, 30_000_000, 100_000_000, 300_000_000, 1_000_000_000)
QUICK_SIZES = (1_000_000, 4_000_000, 10_000_000)
QUICK_SHRINK = 16
"""Divides the sizes of known models."""
PROJECTED = {"7 B": 7e9, "32 B": 32e9, "70 B": 70e9, "235 B": 235e9, "1 T": 1e12}
COSTS = (("encode", "ns/element"), ("decode", "ns/changed"))


def shapes_of(total: int) -> synthetic.Shapes:
    """Square matrices of ``SIDE``, and one with the rest of the rows."""
    whole, rest = divmod(total, SIDE * SIDE)
    shapes: synthetic.Shapes = {f"layers.{layer:03}.weight": (SIDE, SIDE) for layer in range(whole)}
    if rest:
        shapes["rest.weight"] = (max(1, rest // SIDE), SIDE)
    return shapes


def name_of(total: float) -> str:
    """Such as ``10 M``."""
    return f"{total / 1e6:g} M" if total < 1e9 else f"{total / 1e9:g} B"


def measure(case: str, pair: Pair, codec: Own, repeats: int) -> list[Row]:
    """Rows of one size and codec."""
    total, changed = elements(pair)
    data = b""

    def encode() -> None:
        nonlocal data
        data = codec.encode(pair.old, pair.new)

    codec.begin(pair.old)
    encode()
    encoding = Method("encode", encode, 2 * total, lambda: codec.begin(pair.old))
    decoding = Method("decode", lambda: codec.decode(data, pair.old), len(data))
    time_all([encoding, decoding], lambda: None, repeats, 2 * repeats)
    found = [
        row(BENCH, case, "encode", 1e9 * encoding.seconds / total, "ns/element"),
        row(BENCH, case, "decode", 1e9 * decoding.seconds / changed, "ns/changed"),
        row(BENCH, case, "size", len(data) / changed, "B/changed"),
        row(BENCH, case, "encode: disturbance", encoding.disturbance, "x"),
    ]
    encoding.prepare()
    found.append(row(BENCH, case, "encode: extra memory", peak_extra_bytes(encode) / 1e6, "MB"))
    found.append(row(BENCH, case, "decode: extra memory", peak_extra_bytes(decoding.run) / 1e6, "MB"))
    return found


def plain_passes(case: str, pair: Pair, repeats: int) -> list[Row]:
    """Copying, and comparing and copying, the same buffers."""
    total, _ = elements(pair)
    target, source = [bits.copy() for bits in flats(pair.old)], flats(pair.new)
    methods = [
        Method("memcpy", lambda: memcpy(target, source), 2 * total, lambda: memcpy(target, flats(pair.old))),
        Method("compare_and_copy", lambda: compare_and_copy(target, source), 2 * total),
    ]
    methods[1].prepare = methods[0].prepare
    time_all(methods, lambda: None, repeats, 2 * repeats)
    return [row(BENCH, case, method.name, 1e9 * method.seconds / total, "ns/element") for method in methods]


def flatness(rows: list[Row], names: list[str], smallest: str, size: str) -> list[Row]:
    """Cost per element at ``size`` over that at the smallest model."""
    peer = f"{smallest} elements"
    return [
        row(BENCH, f"{size} dense 1%, {name}, {cost}", "ratio", there / here, "x", peer)
        for name in names
        for cost, _ in COSTS
        for here, there in [[value_of(rows, f"{one} dense 1%, {name}", cost) for one in (smallest, size)]]
    ]


def projection(rows: list[Row], names: list[str], largest: str) -> list[Row]:
    """Seconds and bytes for models that do not fit here."""
    found = []
    for size, total in PROJECTED.items():
        for name in names:
            case = f"projection: {size} dense 1%, {name}"
            encode, decode, bytes_ = (
                value_of(rows, f"{largest} dense 1%, {name}", metric) for metric in ("encode", "decode", "size")
            )
            found += [
                row(BENCH, case, "encode", 1e-9 * encode * total, "s"),
                row(BENCH, case, "decode", 1e-9 * decode * SHARE * total, "s"),
                row(BENCH, case, "object", 1e-9 * bytes_ * SHARE * total, "GB"),
            ]
    return found


def draw(rows: list[Row], path: Path) -> None:
    """Cost per element over the size of the model."""
    rows = [{**item, "case": _in_millions(item["case"])} for item in rows]
    figure, (left, right) = panels(1, 2, (9, 3.8))
    pattern = r"(?P<x>[\d.]+) M dense 1%"
    for axis, metric, unit in ((left, "encode", "ns per element"), (right, "decode", "ns per changed element")):
        for name, points in series(rows, pattern + ", (?P<name>[^,]+)", metric).items():
            axis.plot(*zip(*points, strict=True), "o-", color=OURS.get(name), label=name)
        axis.set(xscale="log", xlabel="million elements", ylabel=unit, ylim=(0, None), title=metric)
    for metric, style in (("memcpy", ":"), ("compare_and_copy", "--")):
        for points in series(rows, pattern, metric).values():
            left.plot(*zip(*points, strict=True), style, color="0.4", label=metric)
    left.set_title("compare and encode")
    left.legend(frameon=False, fontsize=8)
    save(figure, path)


def _in_millions(case: str) -> str:
    return re.sub(r"^([\d.]+) B", lambda match: f"{1000 * float(match[1]):g} M", case)


CHARTS = {"scaling.png": ("Cost per element over the size of the model", draw)}


def tables(rows: list[Row]) -> list[str]:
    """Markdown: measured costs, of every second size; docs/scale.md shows what is projected."""
    metrics = ("encode", "decode", "size", "memcpy", "compare_and_copy")

    def place(item: Row) -> Place:
        match = re.fullmatch(r"(10 M|100 M|1 B) dense 1%(?:, (\w+))?", item["case"])
        if match is None or item["metric"] not in metrics:
            return None
        return match[1], f"{match[2] + ' ' if match[2] else ''}{item['metric']} [{item['unit']}]"

    return pivot("elements", rows, place)


def measure_size(total: int, names: list[str], repeats: int) -> list[Row]:
    """Rows of one size of model."""
    [pair] = synthetic.pairs(shapes_of(total), (SHARE,))
    case = f"{name_of(total)} dense 1%"
    print(case, flush=True)
    found = [row(BENCH, case, "changed share", 100 * pair.share, "%"), *plain_passes(case, pair, repeats)]
    for name in names:
        gc.collect()
        found += measure(f"{case}, {name}", pair, Own(name), repeats)
    return found


def measure_sizes(quick: bool) -> list[Row]:
    """Rows of all sizes, and what follows for larger ones."""
    sizes, least = (QUICK_SIZES, 2) if quick else (SIZES, 3)
    names = [codec.name for codec in own_codecs() if codec.name != "raw"]
    # Once for nothing: so that no figure contains a compiler.
    measure_size(QUICK_SIZES[0], names, 1)
    rows: list[Row] = []
    for total in sizes:
        # What is over in milliseconds is more easily disturbed.
        rows += measure_size(total, names, max(least, min(5 * least, 300_000_000 // total)))
    for total in sizes[1:]:
        rows += flatness(rows, names, name_of(sizes[0]), name_of(total))
    return rows + projection(rows, names, name_of(sizes[-1]))


def measure_slices(quick: bool) -> list[Row]:
    """Rows of slices of known models, and what follows for their ranks."""
    small = scaled_models(QUICK_SHRINK)
    found = ranks.measure_ranks(small, (1, 2))
    return found if quick else ranks.measure_ranks(scaled_models(), (3, 6))


def blocks(rows: list[Row]) -> dict[str, list[str]]:
    """Tables for docs/scale.md."""
    return ranks.blocks(rows)


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, __doc__ or "", minutes=60)
    known.add_argument("--part", choices=PARTS, help="measure one part; keep what FILE has of the other")
    options = start(known, arguments)
    one_thread()
    rows: list[Row] = []
    note = None
    for name, measured in PARTS.items():
        if options.part in (None, name):
            rows += measured(options.quick)
        elif options.json.exists():
            kept = json.loads(options.json.read_text())
            note = kept.get("note") or f"Of {BENCH}, the {name} are of {kept['date']}, commit {kept['commit'][:7]}."
            rows += [item for item in kept["rows"] if item["case"].startswith(ranks.STARTS) == (name == "slices")]
    write(options.json, rows, note)


PARTS = {"sizes": measure_sizes, "slices": measure_slices}


if __name__ == "__main__":
    main()
