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
    sizes.plot(*zip(*sorted({point for points in steps.values() for point in points}), strict=True), "k-",
               label="rounding step, 2^(e − 7)")  # fmt: skip
    colors: dict[str, str] = {}
    for name, points in changed.items():
        kind, _, rate = name.partition(", ")
        color = colors.setdefault(rate, f"C{len(colors)}")
        face = "none" if kind == "fresh" else color
        seen = [(power, share) for power, share in points if share]
        shares.plot(
            *zip(*seen, strict=True), MARKERS[kind], color=color, markerfacecolor=face, markersize=5, label=name
        )
        if kind != "fresh":
            shares.plot(*zip(*predicted[name], strict=True), "-", color=color, linewidth=1)
            sizes.plot(
                *zip(*updates[name], strict=True), MARKERS[kind], color=color, markersize=5, label=f"update: {name}"
            )
    sizes.set(yscale="log", ylabel="size [1e-6]", title="An update is as large for large weights as for small ones")
    shares.set(
        yscale="log", ylim=(0.005, 150), ylabel="changed [%]", title="What changes: predicted (lines) and measured"
    )
    for axis in (sizes, shares):
        axis.set(xlabel="power of two of the weight's magnitude, e")
    sizes.legend(frameon=False, fontsize=8)
    shares.legend(frameon=False, fontsize=8, loc="upper right", ncols=2)
    save(figure, path)
