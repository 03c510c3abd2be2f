"""How wide merged deltas should be: what they take to write and to read, from sizes alone: ``widths``."""

from benchmarks.common.formats import Own, baseline_of, find_changes, flats, merged, table_of
from benchmarks.common.rows import Row, row
from benchmarks.common.training_data import Sequence

WIDTHS = (2, 4, 8, 16)


def ranges(width: int, versions: int) -> list[tuple[int, int]]:
    """(first, last) of each merged delta of a run with so many versions: lengths are powers of ``width``, aligned."""
    found, size = [], width
    while size <= versions:
        found += [(first, first + size) for first in range(0, versions - size + 1, size)]
        size *= width
    return found


def way(start: int, head: int, known: set[tuple[int, int]]) -> list[tuple[int, int]]:
    """The longest range from each version on, as readers choose; one version's delta where there is none."""
    steps = []
    while start < head:
        last = max((last for first, last in known if first == start and last <= head), default=start + 1)
        steps.append((start, last))
        start = last
    return steps


def widths(bench: str, data: str, sequence: Sequence) -> list[Row]:
    """Rows for each width.

    Args:
        data: the case of the versions.
    """
    table, codec = table_of(sequence.base), Own("plain")
    baseline = baseline_of(sequence.base)
    parts = [find_changes(baseline, flats(version), table) for version in sequence.versions()]
    head = len(parts)
    needed = {pair for width in WIDTHS for pair in ranges(width, head)} | {(at, at + 1) for at in range(head)}
    sizes = {}
    for first, last in sorted(needed):
        whole = parts[first] if last == first + 1 else merged(parts[first:last], table)
        sizes[first, last] = len(codec.write(whole, table, sequence.base))
    single = sum(sizes[at, at + 1] for at in range(head))
    rows = []
    for width in WIDTHS:
        case, known = f"{data}, width {width}", set(ranges(width, head))
        ways = [way(start, head, known) for start in range(head)]
        read = sum(sizes[step] for steps in ways for step in steps) / len(ways)
        rows += [
            row(bench, case, "merged deltas", sum(sizes[pair] for pair in known) / 1e6, "MB"),
            row(bench, case, "merged deltas over deltas", sum(sizes[pair] for pair in known) / single, "x"),
            row(bench, case, "objects read, mean", sum(map(len, ways)) / len(ways), "objects"),
            row(bench, case, "objects read, most", max(map(len, ways)), "objects"),
            row(bench, case, "read, mean", read / 1e6, "MB"),
        ]
    return rows
