"""The chart of the scaling benchmark."""

import re
from pathlib import Path

from benchmarks.common.charts import OURS, panels, save, series
from benchmarks.common.rows import Row


def scaling(rows: list[Row], path: Path) -> None:
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
