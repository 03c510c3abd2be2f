"""Charts of the codec benchmark: sizes, changed exponents, merging."""

from pathlib import Path
from typing import Any

from benchmarks.common.charts import OURS, panels, plain_ticks, save, series
from benchmarks.common.rows import Row


def sizes(rows: list[Row], path: Path) -> None:
    """Bytes per changed element over the changed share: every format, and the bounds."""
    figure, axes = panels(1, 2, (11, 4.5), sharey=True)
    ends = {name: points[-1][1] for data in ("synthetic", "real") for name, points in
            series(rows, rf"{data} dense (?P<x>[\d.]+)%, (?P<name>.+)", "size").items()}  # fmt: skip
    ranked = sorted(ends, key=lambda name: -ends[name])
    for axis, data in zip(axes, ("real", "synthetic"), strict=True):
        start = rf"{data} dense (?P<x>[\d.]+)%"
        formats = series(rows, start + ", (?P<name>.+)", "size")
        for place, name in enumerate(ranked):
            if name in formats:
                axis.plot(*zip(*formats[name], strict=True), label=name, **_style(name, place / len(ranked)))
        for metric, color in (("bound", "C0"), ("bound given old exponent", "C2")):
            for points in series(rows, start, metric).values():
                axis.plot(*zip(*points, strict=True), color=color, linestyle=":", label=metric)
        axis.set(xscale="log", yscale="log", xlabel="changed [%]", title=f"{data} weights")
        plain_ticks(axis.xaxis, (0.5, 1, 2, 5, 10))
        plain_ticks(axis.yaxis, (0.5, 0.7, 1, 1.5, 2, 3, 4, 6))
    axes[0].set_ylabel("bytes per changed element")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    save(figure, path)


def exponents(rows: list[Row], path: Path) -> None:
    """Share of all weights by power of two, and how many of each changed."""
    figure, [[axis]] = panels(1, 1, (7, 4), squeeze=False)
    weights = series(rows, r"real dense (?P<name>[\d.]+)%, 2\^(?P<x>-?\d+)", "weights")
    if weights:
        axis.bar(*zip(*next(iter(weights.values())), strict=True), color="0.8", label="share of all weights")
    for data, style in (("real", "o-"), ("synthetic", "s--")):
        lines = series(rows, data + r" dense (?P<name>[\d.]+)%, 2\^(?P<x>-?\d+)", "changed")
        for place, (name, points) in enumerate(lines.items()):
            axis.plot(*zip(*points, strict=True), style, color=f"C{place}", markersize=4,
                      label=f"changed, {data} weights, {name} % in all")  # fmt: skip
    axis.set(yscale="log", ylim=(0.01, 150), xlabel="power of two of the old weight's magnitude", ylabel="%")
    axis.set_title("Small weights change, large ones hardly ever")
    axis.legend(frameon=False, fontsize=7, loc="upper right")
    save(figure, path)


def merging(rows: list[Row], path: Path) -> None:
    """Size of one merged delta beside the sum of the single ones, and what merging takes."""
    figure, (left, right) = panels(1, 2, (9, 3.8))
    start = r"real dense 1%, (?P<x>\d+) merged"
    for name, points in series(rows, start + ", (?P<name>.+)", "object").items():
        ratios = dict(series(rows, start + ", (?P<name>.+)", "ratio", "sum of single deltas")[name])
        left.plot(*zip(*points, strict=True), "o-", color=OURS.get(name), label=f"{name}, merged")
        apart = [(count, size * ratios[count]) for count, size in points]
        left.plot(*zip(*apart, strict=True), "--", color=OURS.get(name), label=f"{name}, sum of single deltas")
    left.set(xscale="log", yscale="log", xlabel="deltas", ylabel="kB")
    left.legend(frameon=False, fontsize=8)
    for points in series(rows, start, "merge per change").values():
        right.plot(*zip(*points, strict=True), "o-", color="C1")
    right.set(xscale="log", xlabel="deltas", ylabel="ns to merge, per changed element", ylim=(0, None))
    for axis in (left, right):
        plain_ticks(axis.xaxis, (1, 2, 4, 8, 16, 32, 64))
    save(figure, path)


def _style(name: str, rank: float) -> dict[str, Any]:
    """Ours in colour and bold, the others in greys with markers of their own."""
    if name in OURS:
        return {"color": OURS[name], "marker": "o", "markersize": 5, "linewidth": 2.5, "zorder": 3}
    return {"color": str(0.25 + 0.5 * rank), "marker": "svD^<>pxP*"[int(10 * rank)], "markersize": 4, "linewidth": 1}
