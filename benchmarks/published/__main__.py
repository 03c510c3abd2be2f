"""Tables 2 and 3 of NeMo-DCR recomputed, beside ours: the sizes of its Table 2 leave positions out, ours include them.

The paper is arXiv 2610.08430. In its Table 2, 20 M standard normals (float32, torch seed 42) are rounded to bfloat16;
standard normals of seed 44 times *a* are added in float32, and the sum is rounded. *overwrite* and *XOR* are the 16-bit
words that changed, alone or xored with the old ones, under zstd level 1. Without positions they cannot be applied.
In its Table 3, elements at uniform positions in 24 Gaussian matrices of 768 × 2048 are multiplied by 1 ± 0.01; sizes
have positions. It does not say which seed and scale the matrices have; here they are standard normals of seed 0.

*XOR with positions* is their format as we wrote it from its description, without headers. For each tensor it has a zstd
frame of gaps and one of xored words, which gives the sizes of Table 3; with one frame over everything, as in
``benchmarks.codec`` (*XOR with positions, one frame*), they are 3 % larger. Ours are whole objects, positions, headers
and fingerprints included. Every object with positions was read back and gave the new weights bit for bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from benchmarks.codec.peers import Gaps, NemoXor, compressed, decompressed
from benchmarks.codec.speed import check
from benchmarks.common.formats import Format, Patch, join, own_codecs, split
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import Place, pivot
from benchmarks.common.training_data import Bits, Pair, Weights, changed_share
from vllm_delta_sync.tensors.torch_views import bits_of

BENCH = "published"
CHANGED, OVERWRITE, XOR = "changed", "overwrite, no positions", "XOR, no positions"
WITH_POSITIONS = "XOR with positions"
UNITS = {"Table 2": "MB", "Table 3": "B/changed"}
NORMALS, QUICK_NORMALS = 20_000_000, 200_000
MATRIX, MATRICES, QUICK_MATRICES = (768, 2048), 24, 1


class Figure(NamedTuple):
    """A figure that arXiv 2610.08430 gives; ``table`` is one of ``UNITS``, ``amount`` is *a* or the changed share."""

    table: str
    amount: float
    metric: str
    value: float


PAPER = (
    Figure("Table 2", 1e-4, CHANGED, 2.35),
    Figure("Table 2", 1e-4, OVERWRITE, 0.74),
    Figure("Table 2", 1e-4, XOR, 0.33),
    Figure("Table 2", 1e-3, CHANGED, 22.4),
    Figure("Table 2", 1e-3, OVERWRITE, 7.02),
    Figure("Table 2", 1e-3, XOR, 3.23),
    Figure("Table 2", 1e-2, CHANGED, 82.6),
    Figure("Table 2", 1e-2, OVERWRITE, 25.70),
    Figure("Table 2", 1e-2, XOR, 14.93),
    Figure("Table 3", 0.03, WITH_POSITIONS, 1.63),
    Figure("Table 3", 0.05, WITH_POSITIONS, 1.50),
)
COLUMNS = (CHANGED, OVERWRITE, XOR, WITH_POSITIONS, "plain with positions", "tiled with positions")
"""Those on the page, each behind the paper's own where it has one."""


class NemoDcr(Gaps):
    """NVIDIA NeMo-DCR's sparse refit: gaps of 16 bits or more, old xor new; a zstd frame for each, tensor by tensor."""

    xor = True

    def __init__(self) -> None:
        super().__init__(WITH_POSITIONS, compress=False)

    def encode(self, old: Weights, new: Weights) -> bytes:
        return join([np.frombuffer(compressed(part), np.uint8) for part in split(super().encode(old, new))])

    def decode(self, data: bytes, old: Weights) -> Patch:
        return super().decode(join([np.frombuffer(decompressed(part), np.uint8) for part in split(data)]), old)


def case_of(table: str, amount: float) -> str:
    """Such as ``Table 2, a = 0.001``."""
    return f"{table}, a = {amount:g}" if table == "Table 2" else f"{table}, {100 * amount:g}% changed"


def noisy(noise: float, count: int) -> Pair:
    """The weights of Table 2."""
    old = torch.randn(count, generator=torch.Generator().manual_seed(42)).bfloat16()
    added = torch.randn(count, generator=torch.Generator().manual_seed(44))
    new = torch.add(old.float(), added, alpha=noise).bfloat16()
    return pair_of({"weight": bits_of(old)}, {"weight": bits_of(new)})


def scaled(share: float, count: int) -> Pair:
    """The weights of Table 3."""
    generator = torch.Generator().manual_seed(0)
    old, new = {}, {}
    for number in range(count):
        matrix = torch.randn(MATRIX, generator=generator).bfloat16()
        factors = 1 + 0.01 * (2 * torch.randint(0, 2, MATRIX, generator=generator) - 1)
        hit = torch.rand(MATRIX, generator=generator) < share
        name = f"layers.{number:02}.weight"
        moved = torch.where(hit, (matrix.float() * factors).bfloat16(), matrix)
        old[name], new[name] = (bits_of(tensor).reshape(MATRIX) for tensor in (matrix, moved))
    return pair_of(old, new)


def pair_of(old: Weights, new: Weights) -> Pair:
    """Two versions that no optimizer step lies between."""
    return Pair(changed_share(old, new), 0.0, old, new)


def words(pair: Pair) -> tuple[Bits, Bits]:
    """The words that replace those that changed, and the same xored with the old ones."""
    old, new = (np.concatenate([bits.reshape(-1) for bits in weights.values()]) for weights in (pair.old, pair.new))
    changed = old != new
    return new[changed], new[changed] ^ old[changed]


def size_of(format: Format, pair: Pair) -> int:
    """Bytes of the object, which is read back."""
    format.begin(pair.old)
    data = format.encode(pair.old, pair.new)
    check(format, pair, format.decode(data, pair.old))
    return len(data)


def measure(table: str, amount: float, pair: Pair) -> Iterator[Row]:
    """Rows of one line of a table: the paper's figures, those recomputed, and ours."""
    case, unit = case_of(table, amount), UNITS[table]
    for figure in PAPER:
        if (figure.table, figure.amount) == (table, amount):
            yield row(BENCH, case, f"{figure.metric}: paper", figure.value, "%" if figure.metric == CHANGED else unit)
    yield row(BENCH, case, CHANGED, 100 * pair.share, "%")
    overwrite, xored = words(pair)
    per = 1e6 if unit == "MB" else xored.size
    if table == "Table 2":
        yield row(BENCH, case, OVERWRITE, len(compressed(overwrite.tobytes())) / per, unit)
        yield row(BENCH, case, XOR, len(compressed(xored.tobytes())) / per, unit)
    theirs = size_of(NemoDcr(), pair)
    yield row(BENCH, case, WITH_POSITIONS, theirs / per, unit)
    yield row(BENCH, case, f"{WITH_POSITIONS}, one frame", size_of(NemoXor(), pair) / per, unit)
    for codec in own_codecs():
        if codec.name != "raw":  # 6 B per element that changed, on any data
            size = size_of(codec, pair)
            yield row(BENCH, case, f"{codec.name} with positions", size / per, unit)
            yield row(BENCH, f"{case}, {codec.name}", "ratio", theirs / size, "x", WITH_POSITIONS)


def tables(rows: list[Row]) -> list[str]:
    """Both tables in one, theirs recomputed behind the paper's."""
    columns = [f"{name}{of}" for name in COLUMNS for of in (": paper", "")]

    def place(item: Row) -> Place:
        if item["metric"] not in columns:
            return None
        line = f"{item['case']} [{UNITS[item['case'].partition(',')[0]]}]"
        return line, item["metric"] + (" [%]" if item["unit"] == "%" else "")

    return pivot("sizes in", rows, place, lambda column: columns.index(column.removesuffix(" [%]")))


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=1)
    rows: list[Row] = []
    for table, amount in dict.fromkeys((figure.table, figure.amount) for figure in PAPER):
        print(case_of(table, amount), flush=True)
        if table == "Table 2":
            pair = noisy(amount, QUICK_NORMALS if options.quick else NORMALS)
        else:
            pair = scaled(amount, QUICK_MATRICES if options.quick else MATRICES)
        rows += measure(table, amount, pair)
    write(options.json, rows)


if __name__ == "__main__":
    main()
