"""trl.png: reward, staleness, bytes and pause, over the steps of a run."""

from pathlib import Path
from typing import Any

import numpy as np

from examples.demo.record import SMOOTH_STEPS
from examples.trl_async.record import Record
from trainer_side.result import METRICS


def draw(record: Record, path: Path) -> None:
    """Write the picture; a record without steps makes an empty one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, ((reward, staleness), (payload, pause)) = pyplot.subplots(
        2, 2, figsize=(11, 6.5), sharex=True, layout="constrained"
    )
    steps = np.asarray([step["step"] for step in record.steps])
    _curve(reward, steps, np.asarray(record.rewards()), "C0")
    reward.set(ylabel="reward", ylim=(0, 1), title="AsyncGRPOTrainer learns to reverse words")
    _curve(staleness, steps, np.asarray([step["lag"] for step in record.steps]), "C4", "by the server")
    _curve(staleness, steps, np.asarray([step["trl_lag"] for step in record.steps]), "C7", "by TRL's count")
    staleness.set(ylabel="staleness [versions]", ylim=(0, None), title="Age of the weights that sampled a batch")
    versions = sorted(record.syncs)
    sent = [record.syncs[version][f"{METRICS}payload_bytes"] / 1e3 for version in versions]
    payload.plot(versions, sent, color="C2")
    full = record.full_bytes_each / 1e3
    payload.axhline(full, color="C3", linestyle="--", label=f"all weights: {full:,.0f} kB")
    payload.set(ylabel="bytes of a weight sync [kB]", xlabel="version", ylim=(0, 1.1 * full))
    payload.legend(frameon=False, loc="center right")
    paused = sorted(record.pauses_ms)
    pause.plot(paused, [record.pauses_ms[version] for version in paused], ".", color="C1", markersize=3)
    pause.set(ylabel="generation paused [ms]", xlabel="version", ylim=(0, None))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _curve(axis: Any, steps: np.ndarray, values: np.ndarray, color: str, name: str = "") -> None:
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    if len(values) >= SMOOTH_STEPS:
        smooth = np.convolve(values, np.ones(SMOOTH_STEPS) / SMOOTH_STEPS, mode="valid")
        axis.plot(steps[SMOOTH_STEPS - 1 :], smooth, color=color, linewidth=2)
    if name:
        axis.plot([], [], color=color, linewidth=2, label=name)
        axis.legend(frameon=False)
