"""Size and speed of deltas on weights that training moved: our codecs, general tools, and the formats of others.

Sets of weights in bfloat16, each moved by one optimizer step. *fresh*, *settled* and *trained* are SmolLM2-135M, a real
language model, at learning rates 1e-6, 3e-6 and 1e-5 (``benchmarks.common.real_steps``). *policy* is a transformer of
3.2 M parameters, trained here: supervised, then by policy gradients, Adam on float32 masters. *synthetic* is 111 M
elements with the scales of trained tensors, moved by a step of Adam. These two are at learning rates that change about
1 and 10 % of the elements. ``--quick`` has these two only.

Every object was read back and gave the new weights bit for bit. Sizes are of whole objects, headers and fingerprints
included (on *policy* they are 0.1 B and more of each changed element, because it is small); for the formats of others,
which we wrote from their descriptions, without headers. Speeds are on one thread but for ``tiled, 2 threads``, since
``tiled`` codes large tensors on up to four; of others' formats, those of plain numpy, not of their code. Encoding
includes the comparison and, as in a publisher, starts from a baseline that already has the changes; decoding ends with
positions and distances, or with tensors.

- *bound*: the entropy of positions and of distances in units in the last place, each from one distribution for the
  whole model. ``tiled`` can be below it, because it knows the old weights; ``plain`` cannot know anything more.
  Others know which of two, three or four ranges of magnitudes the old weight is in, or its exponent.
- ``compare_and_copy``: one compiled pass that compares the two buffers, counts, and copies. A ratio of 0.5 means that
  finding, coding and copying what changed is half as fast.
- *detect changes* is what the training loop waits for: live tensors of that dtype are rounded to bfloat16 and compared
  with the baseline, which is brought up to them.
"""

from benchmarks.codec import charts
from benchmarks.codec.bounds import Bounds, bounds, histogram, tally
from benchmarks.codec.merging import merging
from benchmarks.codec.peers import PUBLISHED, PUBLISHED_RATIOS, peer_formats
from benchmarks.codec.previous import Previous
from benchmarks.codec.speed import check, own_speeds, single_speed
from benchmarks.codec.tables import tables
from benchmarks.common import real_steps, synthetic
from benchmarks.common.copying import one_thread
from benchmarks.common.formats import Format, Own, PatchFrom, RawZstd, XorZstd, own_codecs
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.training_data import Pair, policy_pairs, policy_sequence

__all__ = ["BENCH", "CHARTS", "main", "tables"]

BENCH = "codec"
CHARTS = {
    "codec_sizes.png": (
        "Bytes per changed element of SmolLM2-135M over the changed share, for each format",
        charts.sizes,
    ),
    "codec_exponents.png": (
        "Weights of SmolLM2-135M by magnitude, and the share of them that changed",
        charts.exponents,
    ),
    "codec_merging.png": ("Size and time of merged deltas over their number", charts.merging),
}
SHARES = (0.01, 0.1)
"""Of *policy* and *synthetic*. Others say little more, and the real model is measured at three rates."""
TIMED_RATES = (1e-6, 3e-6)
"""Of *settled*."""
THREADS = 2
REPEATS = 12


def dense_bytes(pair: Pair) -> int:
    """Bytes of all weights."""
    return sum(bits.nbytes for bits in pair.old.values())


def changed(pair: Pair) -> int:
    """Elements that differ."""
    return round(pair.share * dense_bytes(pair) / 2)


def share_case(data: str, share: float) -> str:
    """Such as ``policy dense 1%``."""
    return f"{data} dense {100 * share:g}%"


def rate_case(kind: str, rate: float) -> str:
    """Such as ``settled lr 1e-6``."""
    return f"{kind} lr {rate:.0e}".replace("e-0", "e-")


def describe(case: str, pair: Pair, limits: Bounds) -> list[Row]:
    """What the pair is, and how small it could get."""
    rows = [
        row(BENCH, case, "weights", dense_bytes(pair) / 1e6, "MB"),
        row(BENCH, case, "changed share", 100 * pair.share, "%"),
        row(BENCH, case, "learning rate", 1e6 * pair.lr, "1e-6"),
        row(BENCH, case, "bound: positions", limits.position, "B/changed"),
    ]
    for found in limits.thresholds:
        name = f"{len(found.powers)} threshold{'s' if len(found.powers) > 1 else ''}"
        rows.append(row(BENCH, case, f"bound: positions, {name}", found.position, "B/changed"))
        for number, power in enumerate(found.powers, 1):
            rows.append(row(BENCH, case, f"{name}, number {number}", power, "power of two"))
    rows += [
        row(BENCH, case, "bound: positions, old exponent", limits.position_given_exponent, "B/changed"),
        row(BENCH, case, "bound: values", limits.value, "B/changed"),
        row(BENCH, case, "bound: values, old exponent", limits.value_given_exponent, "B/changed"),
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
        row(BENCH, case, "object", size / 1e6, "MB"),
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


def compare_formats(case: str, pair: Pair, timed: bool, previous: Previous, repeats: int = REPEATS) -> list[Row]:
    """Every format on one pair."""
    counted = tally(pair)
    limits = bounds(counted)
    rows = describe(case, pair, limits)
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
        codecs = [*own_codecs(), Own("tiled", threads=THREADS)]
        rows += own_speeds(BENCH, case, codecs, pair, repeats)
    rows += previous.measure(BENCH, case, pair, repeats if timed else 1)
    for name, size in found.items():
        if name != "plain":
            rows.append(row(BENCH, f"{case}, plain", "ratio", size / found["plain"], "x", f"{name}, size"))
    for exponent in histogram(counted):
        name = f"{case}, 2^{exponent.power}"
        rows.append(row(BENCH, name, "weights", exponent.share, "%"))
        if exponent.changed:
            rows.append(row(BENCH, name, "changed", exponent.changed, "%"))
            rows.append(row(BENCH, name, "of all changes", exponent.of_changes, "%"))
    return rows


def compare_real_model(previous: Previous) -> list[Row]:
    """Every format on SmolLM2-135M, and merged deltas of a hundred of its versions."""
    rows: list[Row] = []
    for kind in real_steps.KINDS:
        if not real_steps.is_there(kind):
            print(f"{kind}: left out, because {real_steps.MASTERS} is missing: run make example-real first")
            continue
        for rate in real_steps.RATES:
            [pair] = real_steps.pairs(kind, (rate,), say=print)
            timed = kind == "settled" and rate in TIMED_RATES
            rows += compare_formats(rate_case(kind, rate), pair, timed, previous)
    case = rate_case("settled", real_steps.SEQUENCE_RATE)
    return rows + merging(BENCH, case, real_steps.sequence(say=print), own_codecs())


def published() -> list[Row]:
    """Others' own figures, as they gave them."""
    rows = []
    for figure in PUBLISHED:
        case = f"published, {figure.format} at {figure.share:g}%"
        rows.append(row(BENCH, case, figure.source, figure.bytes_per_changed, "B/changed"))
    for case, ratio in PUBLISHED_RATIOS.items():
        rows.append(row(BENCH, case, "ratio", ratio, "x", "dense bf16"))
    return rows


def warm_up() -> None:
    """Compile what is measured."""
    shapes = synthetic.transformer_shapes(layers=1, hidden=64, inner=128, vocabulary=128)
    for pair in synthetic.pairs(shapes, SHARES):
        for codec in own_codecs():
            checked(codec, pair)


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=5)
    one_thread()
    warm_up()
    previous = Previous()
    rows = [] if options.quick else compare_real_model(previous)
    shares = SHARES[:1] if options.quick else SHARES
    for pair in policy_pairs(options.quick, say=print):
        if pair.asked in shares:
            rows += compare_formats(share_case("policy", pair.asked), pair, False, previous)
    if options.quick:
        rows += merging(BENCH, share_case("policy", SHARES[0]), policy_sequence(quick=True), own_codecs())
    shapes = synthetic.QUICK_SHAPES if options.quick else synthetic.SHAPES
    for share, pair in zip(shares, synthetic.pairs(shapes, shares), strict=True):
        repeats = 2 if options.quick else REPEATS
        rows += compare_formats(share_case("synthetic", share), pair, True, previous, repeats)
    previous.close()
    write(options.json, rows + published())


if __name__ == "__main__":
    main()
