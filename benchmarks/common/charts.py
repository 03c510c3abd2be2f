"""What the charts of benchmarks share."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.common.rows import Row

Chart = tuple[str, Callable[[list[Row], Path], None]]
"""What it shows, in words; and a function that draws it to a file."""
DPI = 100
OURS = {"plain": "C0", "tiled": "C2"}


def series(rows: list[Row], pattern: str, metric: str, peer: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """Name → (x, value) ascending, of rows whose case matches a pattern with groups ``x`` and ``name``."""
    found: dict[str, list[tuple[float, float]]] = {}
    for item in rows:
        match = re.fullmatch(pattern, item["case"])
        if match and item["metric"] == metric and item.get("peer") == peer:
            name = match.groupdict().get("name") or metric
            found.setdefault(name, []).append((float(match["x"]), float(item["value"])))
    return {name: sorted(points) for name, points in found.items()}


def panels(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> Any:
    """Figure and axes, as ``pyplot.subplots`` gives them, without a display."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=inches, layout="constrained", **options)


def plain_ticks(axis: Any, values: tuple[float, ...]) -> None:
    """Ticks at these values, written without exponents."""
    from matplotlib.ticker import NullLocator

    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())


def save(figure: Any, path: Path) -> None:
    """Write a figure and forget it."""
    from matplotlib import pyplot

    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
