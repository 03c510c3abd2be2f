"""The chart of the budgets benchmark."""

from pathlib import Path

import numpy as np

from benchmarks.common.charts import panels, save, series
from benchmarks.common.rows import Row

WINDOW = 5
"""Steps of the moving mean of rewards."""


def budgets(rows: list[Row], path: Path) -> None:
    """Reward over bytes, reward over steps, and distance to the trainer's weights over steps."""
    figure, [[bytes_axis, reward_axis, distance_axis]] = panels(1, 3, (13, 4), squeeze=False)
    ended = {(item["case"], item["metric"]): item["value"] for item in rows if item["case"].endswith(" seeds")}
    step = r"(?P<name>.+), step (?P<x>\d+)"
    rewards, distances = series(rows, step, "reward"), series(rows, step, "distance")
    for number, (name, points) in enumerate(rewards.items()):
        color = f"C{number}"
        case = next(case for case, _ in ended if case.startswith(f"{name}, "))
        mean, least, most = (ended[case, metric] for metric in ("reward", "least reward", "most reward"))
        size = ended[case, "bytes per version"] / 1000
        bytes_axis.errorbar(size, mean, [[mean - least], [most - mean]], fmt="o", color=color, capsize=4, label=name)
        steps, values = zip(*points, strict=True)
        smooth = [np.mean(values[max(0, end - WINDOW) : end]) for end in range(1, len(values) + 1)]
        reward_axis.plot(steps, smooth, color=color)
        if any(value > 0 for _, value in distances[name]):
            distance_axis.plot(*zip(*distances[name], strict=True), color=color)
    bytes_axis.set(xlabel="kB per version", ylabel="reward", title="Reward of the last steps; range over seeds")
    bytes_axis.set_xlim(left=0)
    bytes_axis.legend(frameon=False, fontsize=8, loc="lower right")
    reward_axis.set(xlabel="step", ylabel="reward", title=f"Reward (mean of seeds and of {WINDOW} steps)")
    distance_axis.set(xlabel="step", ylabel="relative norm", title="Distance to the trainer's weights")
    save(figure, path)
