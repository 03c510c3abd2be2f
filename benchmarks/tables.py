"""Rows as Markdown tables."""

from collections.abc import Sequence

from benchmarks.rows import Row


def number(value: float) -> str:
    """Three significant digits, without an exponent."""
    text = f"{value:.3g}"
    return f"{float(text):,.0f}" if "e" in text or abs(value) >= 1000 else text


def value_of(rows: Sequence[Row], case: str, metric: str, peer: str | None = None) -> float:
    """The value of the one row with these.

    Raises:
        KeyError: there is none.
    """
    for item in rows:
        if item["case"] == case and item["metric"] == metric and item.get("peer") == peer:
            return float(item["value"])
    raise KeyError(f"no row {metric!r} of case {case!r}" + (f" against {peer!r}" if peer else ""))


def listing(rows: Sequence[Row]) -> list[str]:
    """A line for each row."""
    lines = ["| case | metric | value | unit | peer |", "|---|---|---:|---|---|"]
    return lines + [
        f"| {item['case']} | {item['metric']} | {item['value']:.4g} | {item['unit']} | {item.get('peer', '')} |"
        for item in rows
    ]


def grid(title: str, rows: Sequence[Row], columns: Sequence[str]) -> list[str]:
    """A line for each case, a column for each metric; a ratio's column is ``/ PEER``. Cases with none are left out."""
    units: dict[str, str] = {}
    cells: dict[str, dict[str, float]] = {}
    for item in rows:
        column = f"/ {item['peer']}" if "peer" in item else item["metric"]
        if column in columns:
            units[column] = item["unit"]
            cells.setdefault(item["case"], {})[column] = item["value"]
    shown = [column for column in columns if column in units]
    lines = [f"| {title} | " + " | ".join(f"{column} [{units[column]}]" for column in shown) + " |"]
    lines.append("|---" + "|---:" * len(shown) + "|")
    for case, found in cells.items():
        values = [number(found[column]) if column in found else "" for column in shown]
        lines.append(f"| {case} | " + " | ".join(values) + " |")
    return lines
