"""three-machines.png: reward, payload, time to fresh and staleness over the versions, and who was killed when."""

import statistics
from pathlib import Path

from examples.three_machines.record import Record

SMOOTH = 10


def draw(record: Record, path: Path) -> None:
    """Write the picture; a record without versions makes an empty one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panes = pyplot.subplots(4, 1, figsize=(9, 11), sharex=True, layout="constrained")
    top, bytes_, time_, age = panes
    numbers = [version.version for version in record.versions]
    rewards = [version.reward or 0.0 for version in record.versions]
    solved = [version.solved or 0.0 for version in record.versions]
    top.plot(numbers, rewards, color="0.8", linewidth=1, label="reward of one version's games")
    top.plot(numbers, smooth(rewards), color="C0", linewidth=2, label=f"mean of {SMOOTH}")
    top.plot(numbers, smooth(solved), color="C0", linewidth=1, linestyle=":", label="games solved")
    top.set(ylabel="reward", ylim=(0, 1), title="A word game, learnt by three machines that meet in a bucket only")
    bytes_.plot(numbers, [version.payload_bytes / 1e3 for version in record.versions], color="C2")
    full = record.versions[0].full_bytes / 1e3 if record.versions else 1.0
    bytes_.axhline(full, color="C3", linestyle="--", label=f"all weights: {full:,.0f} kB")
    bytes_.set(ylabel="payload [kB]", yscale="log")
    fresh = record.fresh()
    time_.plot(list(fresh), list(fresh.values()), ".", color="C1", markersize=4)
    if record.full is not None:
        time_.axhline(record.full.seconds, color="C3", linestyle="--", label="all weights over the same links")
    time_.set(ylabel="publish() to served [s]", ylim=(0, None))
    age.step(numbers, [version.staleness for version in record.versions], color="C4", where="mid", linewidth=1)
    limit = record.options.max_staleness
    age.axhline(limit, color="0.5", linestyle="--", label=f"at most {limit}")
    age.set(ylabel="staleness [versions]", xlabel="version", ylim=(-0.2, None))  # 0 apart from the axis
    for kill in record.kills:
        for pane in panes:
            pane.axvline(kill.version, color="0.6", linewidth=0.8)
        top.annotate(f"{kill.part} killed", (kill.version, 0.02), rotation=90, fontsize=8, ha="right", va="bottom")
    for pane in panes:
        pane.legend(loc="best", frameon=False, fontsize=8)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def smooth(values: list[float]) -> list[float]:
    """Mean of the last ``SMOOTH`` values at each place, of fewer at the beginning."""
    return [statistics.fmean(values[max(0, place + 1 - SMOOTH) : place + 1]) for place in range(len(values))]
