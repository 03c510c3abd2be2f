"""What it brings to merge k consecutive deltas into one: an element that changed twice is sent once."""

from functools import partial

import numpy as np

from benchmarks.common.formats import Own, baseline_of, find_changes, flats, merged, merged_objects, table_of
from benchmarks.common.rows import Row, best_seconds, row
from benchmarks.common.training_data import Sequence, Weights
from vllm_delta_sync.tensors.changes import Changes

REPEATS = 3


def powers(most: int) -> list[int]:
    """1, 2, 4 … up to ``most``."""
    return [1 << exponent for exponent in range(most.bit_length())]


def merging(bench: str, data: str, sequence: Sequence, codecs: list[Own]) -> list[Row]:
    """Rows for the first 1, 2, 4 … versions of a run: bytes beside the sum of the single deltas, and seconds.

    Args:
        data: the case of the versions.
    """
    table = table_of(sequence.base)
    codecs = [codec for codec in codecs if codec.name != "raw"]
    baseline = baseline_of(sequence.base)
    parts: list[Changes] = []
    single = {codec.name: [0] for codec in codecs}
    before = sequence.base
    for version in sequence.versions():
        changes = find_changes(baseline, flats(version), table)
        parts.append(changes)
        for codec in codecs:
            single[codec.name].append(single[codec.name][-1] + len(codec.write(changes, table, before)))
        before = version
    if not _leads_to(parts, sequence.base, before):
        raise SystemExit("the merged delta did not give the last version bit for bit")
    rows, plain = [], Own("plain")
    for count in powers(len(parts)):
        case = f"{data}, {count} merged"
        whole = merged(parts[:count], table)
        objects = [plain.write(part, table, sequence.base) for part in parts[:count]]
        taken = best_seconds(partial(merged_objects, objects, table), REPEATS)
        rows += [
            row(bench, case, "changed share", 100 * whole.changed / table.total, "%"),
            row(bench, case, "merge", 1e3 * taken, "ms"),
            row(
                bench, case, "merge per change", 1e9 * taken / sum(part.changed for part in parts[:count]), "ns/changed"
            ),
        ]
        for codec in codecs:
            size, apart = len(codec.write(whole, table, sequence.base)), single[codec.name][count]
            rows.append(row(bench, f"{case}, {codec.name}", "object", size / 1e3, "kB"))
            rows.append(row(bench, f"{case}, {codec.name}", "ratio", apart / size, "x", "sum of single deltas"))
    return rows


def _leads_to(parts: list[Changes], base: Weights, last: Weights) -> bool:
    found = Own("plain").restore(merged(parts, table_of(base)), base)
    return all(np.array_equal(found[name], bits) for name, bits in last.items())
