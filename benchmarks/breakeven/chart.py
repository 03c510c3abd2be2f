"""The chart of the break-even benchmark."""

from pathlib import Path

from benchmarks.common.charts import panels, plain_ticks, save, series
from benchmarks.common.rows import Row


def breakeven(rows: list[Row], path: Path) -> None:
    """Link speed below which a delta is faster than whole weights, over the changed share."""
    figure, [[axis]] = panels(1, 1, (9.5, 4.5), squeeze=False)
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
                              ("tiled beats plain below", "C2")):  # fmt: skip
            for points in series(rows, start + cores, metric).values():
                axis.plot(*zip(*points, strict=True), style, color=color, label=metric + cores)
    axis.set(xscale="log", yscale="log", ylim=(bottom, top), xlabel="changed [%]", ylabel="link [Gbit/s]")
    axis.set_title("Below a line the first of the two is faster (one core where not said)")
    plain_ticks(axis.xaxis, (0.5, 1, 2, 5, 10, 20, 40))
    plain_ticks(axis.yaxis, (0.01, 0.1, 1, 10, 100, 1000))
    axis.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    save(figure, path)
