"""Charts of the codec benchmark, of the real model: sizes, changed exponents, merging."""

from pathlib import Path
from typing import Any

from benchmarks.common.charts import OURS, panels, plain_ticks, save, series
from benchmarks.common.rows import Row
from benchmarks.common.tables import value_of

BOUNDS = {"bound": "C0", "bound given old exponent": "C2"}
"""Bounds that the chart of sizes has, and their colours."""


def sizes(rows: list[Row], path: Path) -> None:
    """Bytes per changed element over the changed share: every format, and the bounds."""
    figure, axes = panels(1, 2, (11, 4.5), sharex=True, sharey=True)
    shares = {item["case"]: float(item["value"]) for item in rows if item["metric"] == "changed share"}
    found = {kind: _over_share(rows, kind, shares) for kind in ("settled", "fresh")}
    ends = {name: points[-1][1] for formats in found.values() for name, points in formats.items()}
    ranked = sorted(ends, key=lambda name: -ends[name])
    for axis, (kind, formats) in zip(axes, found.items(), strict=True):
        for place, name in enumerate(ranked):
            if name in BOUNDS and name in formats:
                axis.plot(*zip(*formats[name], strict=True), color=BOUNDS[name], linestyle=":", label=name)
            elif name in formats:
                axis.plot(*zip(*formats[name], strict=True), label=name, **_style(name, place / len(ranked)))
        axis.set(xscale="log", yscale="log", xlabel="changed [%]", title=f"SmolLM2-135M, {kind}")
        plain_ticks(axis.xaxis, (0.1, 0.2, 0.5, 1, 2))
        plain_ticks(axis.yaxis, (0.5, 0.7, 1, 1.5, 2, 3, 4, 6))
    axes[0].set_ylabel("bytes per changed element")
    axes[1].legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=8)
    save(figure, path)


def _over_share(rows: list[Row], kind: str, shares: dict[str, float]) -> dict[str, list[tuple[float, float]]]:
    """Format or bound → (changed share, bytes per changed element), ascending."""
    found: dict[str, list[tuple[float, float]]] = {}
    for item in rows:
        case, _, format = item["case"].partition(", ")
        name = format if item["metric"] == "size" else item["metric"]
        if case.startswith(f"{kind} lr ") and (item["metric"] == "size" or name in BOUNDS):
            found.setdefault(name, []).append((shares[case], float(item["value"])))
    return {name: sorted(points) for name, points in found.items()}


def exponents(rows: list[Row], path: Path) -> None:
    """Share of all weights by power of two, and how many of each changed."""
    figure, [[axis]] = panels(1, 1, (7, 4), squeeze=False)
    start = r"settled lr (?P<name>[\de-]+), 2\^(?P<x>-?\d+)"
    weights = series(rows, start, "weights")
    if weights:
        axis.bar(*zip(*next(iter(weights.values())), strict=True), color="0.8", label="share of all weights")
    for place, (name, points) in enumerate(series(rows, start, "changed").items()):
        share = value_of(rows, f"settled lr {name}", "changed share")
        axis.plot(*zip(*points, strict=True), "o-", color=f"C{place}", markersize=4,
                  label=f"changed at lr {name}, {share:.2g} % in all")  # fmt: skip
    axis.set(yscale="log", ylim=(0.01, 500), xlabel="power of two of the old weight's magnitude", ylabel="%")
    axis.set_title("Small weights change, large ones hardly ever (SmolLM2-135M, settled)")
    axis.legend(frameon=False, fontsize=7, loc="upper right")
    save(figure, path)


def merging(rows: list[Row], path: Path) -> None:
    """Size of one merged delta beside the sum of the single ones, and what merging takes."""
    figure, (left, right) = panels(1, 2, (9, 3.8))
    start = r"settled lr 1e-6, (?P<x>\d+) merged"
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
