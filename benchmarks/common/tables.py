"""Rows as Markdown tables: ``pivot`` and ``grid``."""

from collections.abc import Callable, Sequence

from benchmarks.common.rows import Row

Place = tuple[str, str] | None
"""Line and column of a row in a table; None: not in it."""


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text or abs(value) >= 1000 else text


def value_of(rows: Sequence[Row], case: str, metric: str, peer: str | None = None) -> float:
    """The value of the first row with these.

    Raises:
        KeyError: there is none.
    """
    for item in rows:
        if item["case"] == case and item["metric"] == metric and item.get("peer") == peer:
            return float(item["value"])
    raise KeyError(f"no row {metric!r} of case {case!r}" + (f" against {peer!r}" if peer else ""))


def pivot(
    corner: str, rows: Sequence[Row], place: Callable[[Row], Place], rank: Callable[[str], int] = lambda column: 0
) -> list[str]:
    """A table of the rows that ``place`` gives a line and a column, both in the order of their first row.

    ``rank`` sorts the columns before that.
    """
    cells: dict[str, dict[str, str]] = {}
    columns: dict[str, None] = {}
    for item in rows:
        found = place(item)
        if found is not None:
            line, column = found
            columns[column] = None
            cells.setdefault(line, {})[column] = number(item["value"])
    shown = sorted(columns, key=rank)
    lines = [f"| {corner} | " + " | ".join(shown) + " |", "|---" + "|---:" * len(shown) + "|"]
    return lines + [
        f"| {line} | " + " | ".join(known.get(column, "") for column in shown) + " |" for line, known in cells.items()
    ]


def grid(corner: str, rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """A line for each case, a column for each metric, in this order; a ratio's column is ``/ PEER``."""

    def place(item: Row) -> Place:
        name = f"/ {item['peer']}" if "peer" in item else item["metric"]
        return (item["case"], f"{name} [{item['unit']}]") if name in columns else None

    return pivot(corner, rows, place, lambda column: columns.index(column.rpartition(" [")[0]))
