"""demo.png: reward, payload and pause over the steps."""

from pathlib import Path

import numpy as np

from examples.demo.record import SMOOTH_STEPS, Record


def draw(record: Record, path: Path) -> None:
    """Write the picture; a record without steps makes an empty one."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    steps = [step["step"] for step in record.steps]
    figure, (top, middle, bottom) = pyplot.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    rewards = np.asarray(record.rewards())
    top.plot(steps, rewards, color="0.8", linewidth=1, label="one step")
    if len(rewards) >= SMOOTH_STEPS:
        smooth = np.convolve(rewards, np.ones(SMOOTH_STEPS) / SMOOTH_STEPS, mode="valid")
        top.plot(
            steps[SMOOTH_STEPS - 1 :],
            smooth,
            color="C0",
            linewidth=2,
            label=f"mean of {SMOOTH_STEPS} steps",
        )
    top.set(ylabel="reward", ylim=(0, 1), title="The server's policy learns to reverse words")
    top.legend(loc="upper left", frameon=False)
    middle.plot(steps, [step["payload_bytes"] / 1e3 for step in record.steps], color="C2")
    full = record.steps[0]["full_bytes"] / 1e3 if record.steps else 1.0
    middle.axhline(full, color="C3", linestyle="--", label=f"all weights: {full:,.0f} kB")
    middle.set(ylabel="payload [kB]", yscale="log")
    middle.set_yticks([100, 300, 1000, 3000, 10000], [100, 300, "1 000", "3 000", "10 000"])
    middle.minorticks_off()
    middle.legend(loc="center right", frameon=False)
    versions = sorted(record.pauses_ms)
    bottom.plot(versions, [record.pauses_ms[version] for version in versions], ".", color="C1", markersize=3)
    bottom.set(ylabel="generation paused [ms]", xlabel="step (one weight version each)", ylim=(0, None))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
