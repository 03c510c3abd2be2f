"""The chart of the sparsity benchmark."""

from pathlib import Path

from benchmarks.common.charts import panels, save, series
from benchmarks.common.rows import Row

MARKERS = {"settled": "o", "fresh": "^", "demo": "s"}


def sparsity(rows: list[Row], path: Path) -> None:
    """By exponent: rounding steps beside the size of updates, and what share of the weights changed."""
    figure, (sizes, shares) = panels(1, 2, (13, 4.8))
    pattern = r"(?P<name>[^,]+, lr [^,]+), 2\^(?P<x>-?\d+)"
    updates, weights, changed, predicted, steps = (
        series(rows, pattern, metric) for metric in ("update", "weights", "changed", "predicted", "rounding step")
    )
    bars = shares.twinx()
    bars.set_zorder(shares.get_zorder() - 1)
    shares.patch.set_visible(False)
    bars.bar(*zip(*next(iter(weights.values())), strict=True), color="0.9")
    bars.set(ylabel="share of all weights [%] (bars: settled)", ylim=(0, 60))
    rounding = sorted({point for points in steps.values() for point in points})
    sizes.plot(*zip(*rounding, strict=True), "k-", label="rounding step, 2^(e − 7)")
    sizes.annotate("", (-5, 2**-12 / 1e-6), (-5, 1), arrowprops={"arrowstyle": "<->", "color": "0.4"})
    sizes.text(-4.8, 40, "244 updates of 1e-6", color="0.4", fontsize=8)
    colors: dict[str, str] = {}
    for name, points in changed.items():
        kind, _, rate = name.partition(", ")
        color = colors.setdefault(rate, f"C{len(colors)}")
        style = {"marker": MARKERS[kind], "color": color, "markersize": 5, "linewidth": 1}
        if kind == "fresh":
            seen = [(power, share) for power, share in points if share]
            shares.plot(*zip(*seen, strict=True), **style, linestyle=":", markerfacecolor="none", label=name)
        else:
            shares.plot(*zip(*points, strict=True), **style, linestyle="none", label=name)
            shares.plot(*zip(*predicted[name], strict=True), color=color, linewidth=1)
            sizes.plot(*zip(*updates[name], strict=True), **style, linestyle="none", label=f"update: {name}")
    sizes.set(yscale="log", ylabel="size [1e-6]", title="An update is as large for large weights as for small ones")
    shares.set(yscale="log", ylim=(0.005, 150), ylabel="changed [%]", title="Predicted (solid lines) and measured")
    for axis in (sizes, shares):
        axis.set(xlabel="power of two of the weight's magnitude, e")
    sizes.legend(frameon=False, fontsize=8)
    shares.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    save(figure, path)
