"""Size and speed of deltas on weights that training moved: our codecs, general tools, and the formats of others.

Two sets of weights in bfloat16, each moved by one optimizer step at learning rates that change about 0.5, 1, 2, 5 and
10 % of the elements. *real* is a transformer of 3.2 M parameters, trained here: supervised, then by policy gradients,
Adam on float32 masters. *synthetic* is 111 M elements with the scales of trained tensors, moved by a step of Adam; at
that size times mean something. *Qwen3-0.6B* has that model's shapes and the same kind of weights.

Every object was read back and gave the new weights bit for bit. Sizes are of whole objects, headers and fingerprints
included (on *real* they are 0.1 B and more of each changed element, because it is small); for the formats of others,
which we wrote from their descriptions, without headers. Speeds are on one thread but for ``context, 2 threads``, since
``context`` codes large tensors on up to four; of others' formats, those of plain numpy, not of their code. Encoding
includes the comparison; decoding ends with positions and distances, or with tensors.

- *bound*: the entropy of positions and of distances in units in the last place, each from one distribution for the
  whole model. ``context`` can be below it, because it knows the old exponents; ``packed`` cannot know anything more.
- ``compare_and_copy``: one compiled pass that compares the two buffers, counts, and copies. A ratio of 0.5 means that
  finding, coding and copying what changed is half as fast.
- *detect changes* is what the training loop waits for: live tensors of that dtype are rounded to bfloat16 and compared
  with the baseline, which is brought up to them.
"""

from collections.abc import Sequence

from benchmarks.codec import charts
from benchmarks.codec.bounds import Bounds, bounds, histogram
from benchmarks.codec.merging import merging
from benchmarks.codec.peers import PUBLISHED, peer_formats
from benchmarks.codec.speed import check, own_speeds, single_speed
from benchmarks.codec.tables import tables
from benchmarks.common import synthetic
from benchmarks.common.copying import one_thread
from benchmarks.common.formats import Format, Own, PatchFrom, RawZstd, XorZstd, own_codecs
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.training_data import SHARES, Pair, real_pairs, real_sequence

__all__ = ["BENCH", "CHARTS", "main", "tables"]

BENCH = "codec"
CHARTS = {
    "codec_sizes.png": ("Bytes per changed element over the changed share, for each format", charts.sizes),
    "codec_exponents.png": ("Weights by magnitude, and the share of them that changed", charts.exponents),
    "codec_merging.png": ("Size and time of merged deltas over their number", charts.merging),
}
REAL, SYNTHETIC, QWEN = "real", "synthetic", "Qwen3-0.6B"
QWEN_SHARES = (0.005, 0.01)
THREADS = 2


def dense_bytes(pair: Pair) -> int:
    """Bytes of all weights."""
    return sum(bits.nbytes for bits in pair.old.values())


def changed(pair: Pair) -> int:
    """Elements that differ."""
    return round(pair.share * dense_bytes(pair) / 2)


def case_of(data: str, share: float) -> str:
    """Such as ``real dense 1%``."""
    return f"{data} dense {100 * share:g}%"


def describe(case: str, pair: Pair, limits: Bounds) -> list[Row]:
    """What the pair is, and how small it could get."""
    rows = [
        row(BENCH, case, "weights", dense_bytes(pair) / 1e6, "MB"),
        row(BENCH, case, "changed share", 100 * pair.share, "%"),
        row(BENCH, case, "learning rate", 1e6 * pair.lr, "1e-6"),
        row(BENCH, case, "bound: positions", limits.position, "B/changed"),
        row(BENCH, case, "bound: values", limits.value, "B/changed"),
        row(BENCH, case, "bound", limits.independent, "B/changed"),
        row(BENCH, case, "bound given old exponent", limits.given_exponent, "B/changed"),
    ]
    if limits.with_mask is not None:
        rows.append(row(BENCH, case, "bound given exponent, last mask", limits.with_mask, "B/changed"))
    return rows


def sizes(case: str, pair: Pair, size: int, limit: float) -> list[Row]:
    """Rows of one object; ``case`` names the format."""
    per_changed = size / changed(pair)
    return [
        row(BENCH, case, "size", per_changed, "B/changed"),
        row(BENCH, case, "ratio", dense_bytes(pair) / size, "x", "dense bf16"),
        row(BENCH, case, "ratio", per_changed / limit, "x", "bound"),
    ]


def checked(format: Format, pair: Pair) -> bytes:
    """The object, after reading it back."""
    format.begin(pair.old)
    data = format.encode(pair.old, pair.new)
    check(format, pair, format.decode(data, pair.old))
    return data


def all_formats() -> list[Format]:
    """Ours first."""
    return [*own_codecs(), RawZstd(), XorZstd(), PatchFrom(), *peer_formats()]


def compare_formats(data: str, pairs: Sequence[tuple[float, Pair]], timed: bool, repeats: int) -> list[Row]:
    """Every format on every pair of one set of weights."""
    rows: list[Row] = []
    for share, pair in pairs:
        case = case_of(data, share)
        limits = bounds(pair)
        rows += describe(case, pair, limits)
        found: dict[str, int] = {}
        for format in all_formats():
            print(f"{case}: {format.name}", flush=True)
            name = f"{case}, {format.name}"
            speeds: list[Row] = []
            if timed and (not isinstance(format, Own) or isinstance(format, RawZstd)):
                written, speeds = single_speed(BENCH, name, format, pair)
            else:
                written = checked(format, pair)
            found[format.name] = len(written)
            rows += [*sizes(name, pair, len(written), limits.independent), *speeds]
        if timed:
            codecs = [*own_codecs(), Own("context", threads=THREADS)]
            rows += own_speeds(BENCH, case, codecs, pair, repeats)
        for name, size in found.items():
            if name != "packed":
                rows.append(row(BENCH, f"{case}, packed", "ratio", size / found["packed"], "x", f"{name}, size"))
        for exponent in histogram(pair) if share in (SHARES[1], SHARES[-1]) else ():
            name = f"{case}, 2^{exponent.power}"
            rows.append(row(BENCH, name, "weights", exponent.share, "%"))
            if exponent.changed:
                rows.append(row(BENCH, name, "changed", exponent.changed, "%"))
                rows.append(row(BENCH, name, "of all changes", exponent.of_changes, "%"))
    return rows


def qwen(shares: Sequence[float]) -> list[Row]:
    """The model of the Hugging Face post, by shape: sizes of ours beside what they reported."""
    rows: list[Row] = []
    for share, pair in zip(shares, synthetic.pairs(synthetic.qwen3_0_6b(), shares), strict=True):
        case = case_of(QWEN, share)
        rows.append(row(BENCH, case, "weights", dense_bytes(pair) / 1e6, "MB"))
        rows.append(row(BENCH, case, "changed share", 100 * pair.share, "%"))
        for codec in own_codecs():
            print(f"{case}: {codec.name}", flush=True)
            size = len(checked(codec, pair))
            rows.append(row(BENCH, f"{case}, {codec.name}", "object", size / 1e6, "MB"))
            rows.append(row(BENCH, f"{case}, {codec.name}", "size", size / changed(pair), "B/changed"))
            rows.append(row(BENCH, f"{case}, {codec.name}", "ratio", dense_bytes(pair) / size, "x", "dense bf16"))
    for bound, megabytes in (("object, least", 20.0), ("object, most", 35.0)):
        rows.append(row(BENCH, f"{QWEN}, as Hugging Face published", bound, megabytes, "MB"))
    return rows


def published() -> list[Row]:
    """Others' own figures, as they gave them."""
    rows = []
    for figure in PUBLISHED:
        case = f"published, {figure.format} at {figure.share:g}%"
        rows.append(row(BENCH, case, figure.source, figure.bytes_per_changed, "B/changed"))
    return rows


def warm_up() -> None:
    """Compile what is measured."""
    shapes = synthetic.transformer_shapes(layers=1, hidden=64, inner=128, vocabulary=128)
    for pair in synthetic.pairs(shapes, SHARES[:2]):
        for codec in own_codecs():
            checked(codec, pair)


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=30)
    one_thread()
    warm_up()
    real = [(pair.asked, pair) for pair in real_pairs(options.quick, say=print)]
    rows = compare_formats(REAL, real, timed=False, repeats=0)
    rows += merging(BENCH, real_sequence(options.quick), own_codecs())
    shapes, shares = (synthetic.QUICK_SHAPES, SHARES[1:2]) if options.quick else (synthetic.SHAPES, SHARES)
    made = zip(shares, synthetic.pairs(shapes, shares), strict=True)
    rows += compare_formats(SYNTHETIC, list(made), timed=True, repeats=2 if options.quick else 12)
    rows += [] if options.quick else qwen(QWEN_SHARES)
    write(options.json, rows + published())


if __name__ == "__main__":
    main()
