"""Charts for the documents, drawn from rows."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.rows import Row

Chart = tuple[str, Callable[[list[Row], Path], None]]
"""What it shows, in words; and a function that draws it to a file."""
DPI = 100
OURS = {"packed": "C0", "context": "C2"}


def series(rows: list[Row], pattern: str, metric: str, peer: str | None = None) -> dict[str, list[tuple[float, float]]]:
    """Name → (x, value) ascending, of rows whose case matches a pattern with groups ``x`` and ``name``."""
    found: dict[str, list[tuple[float, float]]] = {}
    for item in rows:
        match = re.fullmatch(pattern, item["case"])
        if match and item["metric"] == metric and item.get("peer") == peer:
            name = match.groupdict().get("name") or metric
            found.setdefault(name, []).append((float(match["x"]), float(item["value"])))
    return {name: sorted(points) for name, points in found.items()}


def sizes(rows: list[Row], path: Path) -> None:
    """Bytes per changed element over the changed share: every format, and the bounds."""
    figure, panels = _figure(1, 2, (11, 4.5), sharey=True)
    ends = {name: points[-1][1] for data in ("synthetic", "real") for name, points in
            series(rows, rf"{data} dense (?P<x>[\d.]+)%, (?P<name>.+)", "size").items()}  # fmt: skip
    ranked = sorted(ends, key=lambda name: -ends[name])
    for axis, data in zip(panels, ("real", "synthetic"), strict=True):
        start = rf"{data} dense (?P<x>[\d.]+)%"
        formats = series(rows, start + ", (?P<name>.+)", "size")
        for place, name in enumerate(ranked):
            if name in formats:
                axis.plot(*zip(*formats[name], strict=True), label=name, **_style(name, place / len(ranked)))
        for metric, color in (("bound", "C0"), ("bound given old exponent", "C2")):
            for points in series(rows, start, metric).values():
                axis.plot(*zip(*points, strict=True), color=color, linestyle=":", label=metric)
        axis.set(xscale="log", yscale="log", xlabel="changed [%]", title=f"{data} weights")
        _plain_ticks(axis.xaxis, (0.5, 1, 2, 5, 10))
        _plain_ticks(axis.yaxis, (0.5, 0.7, 1, 1.5, 2, 3, 4, 6))
    panels[0].set_ylabel("bytes per changed element")
    panels[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    _save(figure, path)


def exponents(rows: list[Row], path: Path) -> None:
    """Share of all weights by power of two, and how many of each changed."""
    figure, [[axis]] = _figure(1, 1, (7, 4), squeeze=False)
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
    _save(figure, path)


def folding(rows: list[Row], path: Path) -> None:
    """Size of one folded delta beside the sum of the single ones, and what folding takes."""
    figure, (left, right) = _figure(1, 2, (9, 3.8))
    start = r"real dense 1%, (?P<x>\d+) folded"
    for name, points in series(rows, start + ", (?P<name>.+)", "object").items():
        ratios = dict(series(rows, start + ", (?P<name>.+)", "ratio", "sum of single deltas")[name])
        left.plot(*zip(*points, strict=True), "o-", color=OURS.get(name), label=f"{name}, folded")
        apart = [(count, size * ratios[count]) for count, size in points]
        left.plot(*zip(*apart, strict=True), "--", color=OURS.get(name), label=f"{name}, sum of single deltas")
    left.set(xscale="log", yscale="log", xlabel="deltas", ylabel="kB")
    left.legend(frameon=False, fontsize=8)
    for points in series(rows, start, "fold per change").values():
        right.plot(*zip(*points, strict=True), "o-", color="C1")
    right.set(xscale="log", xlabel="deltas", ylabel="ns to fold, per changed element", ylim=(0, None))
    for axis in (left, right):
        _plain_ticks(axis.xaxis, (1, 2, 4, 8, 16, 32, 64))
    _save(figure, path)


def scaling(rows: list[Row], path: Path) -> None:
    """Cost per element over the size of the model."""
    rows = [{**item, "case": _in_millions(item["case"])} for item in rows]
    figure, (left, right) = _figure(1, 2, (9, 3.8))
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
    _save(figure, path)


def breakeven(rows: list[Row], path: Path) -> None:
    """Link speed below which a delta is faster than whole weights, over the changed share."""
    figure, [[axis]] = _figure(1, 1, (9.5, 4.5), squeeze=False)
    bottom, top = 0.01, 1000.0
    start = r"dense (?P<x>[\d.]+)%"
    lines: dict[str, dict[float, float]] = {
        peer: dict(next(iter(series(rows, start, f"delta beats {peer} below").values()), []))
        for peer in ("direct", "full")
    }
    shares = sorted(lines["direct"])
    if shares:
        direct = [lines["direct"][share] for share in shares]
        full = [max(speed, lines["full"][share]) for share, speed in zip(shares, direct, strict=True)]
        axis.fill_between(shares, bottom, direct, color="C2", alpha=0.25, label="a delta")
        axis.fill_between(
            shares, direct, full, color="C1", alpha=0.2, label="neither: copy directly\n(over a bucket: a delta)"
        )
        axis.fill_between(shares, full, top, color="0.8", label="neither: copy directly\n(over a bucket: full)")
    for cores, style in (("", "-"), (", projected to 16 cores", "--")):
        for metric, color in (("delta beats direct below", "C3"), ("delta beats full below", "k"),
                              ("context beats packed below", "C2")):  # fmt: skip
            for points in series(rows, start + cores, metric).values():
                axis.plot(*zip(*points, strict=True), style, color=color, label=metric + cores)
    axis.set(xscale="log", yscale="log", ylim=(bottom, top), xlabel="changed [%]", ylabel="link [Gbit/s]")
    axis.set_title("Below a line the first of the two is faster (one core where not said)")
    _plain_ticks(axis.xaxis, (0.5, 1, 2, 5, 10, 20, 40))
    _plain_ticks(axis.yaxis, (0.01, 0.1, 1, 10, 100, 1000))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    _save(figure, path)


def _style(name: str, rank: float) -> dict[str, Any]:
    """Ours in colour and bold, the others in greys with markers of their own."""
    if name in OURS:
        return {"color": OURS[name], "marker": "o", "markersize": 5, "linewidth": 2.5, "zorder": 3}
    return {"color": str(0.25 + 0.5 * rank), "marker": "svD^<>pxP*"[int(10 * rank)], "markersize": 4, "linewidth": 1}


def _in_millions(case: str) -> str:
    return re.sub(r"^([\d.]+) B", lambda match: f"{1000 * float(match[1]):g} M", case)


def _figure(rows: int, columns: int, inches: tuple[float, float], **options: Any) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot.subplots(rows, columns, figsize=inches, layout="constrained", **options)


def _plain_ticks(axis: Any, values: tuple[float, ...]) -> None:
    from matplotlib.ticker import NullLocator

    axis.set_ticks(values, [f"{value:g}" for value in values])
    axis.set_minor_locator(NullLocator())


def _save(figure: Any, path: Path) -> None:
    from matplotlib import pyplot

    figure.savefig(path, dpi=DPI, metadata={"Software": None})
    pyplot.close(figure)
