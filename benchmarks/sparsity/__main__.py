"""Why few weights change: the size of an optimizer's updates against the rounding step of bf16, by exponent.

A master moves by an update; its bf16 rounding changes if a boundary between two cells lies in between. Masters that lie
anywhere in their cells cross one with probability min(1, update / rounding step), where the rounding step of a weight
in [2^e, 2^(e + 1)) is 2^(e - 7). ``predicted`` is the mean of that over all weights, from the updates as they were;
``predicted by the mean`` knows only the mean size of the updates and how many weights each exponent has.

- *settled* and *fresh*: SmolLM2-135M, eight steps of AdamW on text at each learning rate, from float32 masters that are
  spread uniformly in their bf16 cells, or that are the bf16 numbers themselves. The figures of a case are of its last
  step; ``step N`` has the earlier ones.
- *demo*: the reinforcement learning of ``examples/rl_loop.py`` after its warm-up, its policy sampling in this process.
- *what if*: the last step of the first case, predicted by the mean, with one thing changed. Masters in bf16, without
  float32 copies, lose updates smaller than half a rounding step, so only what ``moved outright`` is left.

No times are measured.
"""

import math
import re
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from benchmarks.budgets.__main__ import any_reward, train
from benchmarks.common import real_steps
from benchmarks.common.charts import panels, save, series
from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import Place, grid, pivot
from benchmarks.sparsity.movement import POWERS, ROUNDING_STEPS, Movement, observed
from examples import rl_loop

BENCH = "sparsity"
PAGE = "sparsity.md"
KINDS = ("settled", "fresh")
DEMO_STEPS, QUICK_STEPS = 30, 3
LEAST_WEIGHTS = 0.1
"""Percent of all weights below which an exponent has no row."""
NORMAL_DEVIATION = 0.02
FP8_FINER = 1 / 16
"""E4M3 has 3 bits of mantissa, bf16 has 7."""
WHAT_IF = "what if: "
COLUMNS = ("changed", "predicted", "predicted by the mean", "mean update", "moved outright")


def case_of(kind: str, lr: float) -> str:
    """Such as ``settled, lr 1e-6``."""
    return f"{kind}, lr {lr:.0e}".replace("e-0", "e-")


def summary(case: str, step: Movement) -> list[Row]:
    """What changed in a step, and what was to be expected."""
    return [
        row(BENCH, case, "changed", step.share(step.changed), "%"),
        row(BENCH, case, "predicted", step.share(step.expected), "%"),
        row(BENCH, case, "predicted by the mean", step.predict(step.mean_update), "%"),
        row(BENCH, case, "mean update", step.mean_update / step.lr, "of lr"),
        row(BENCH, case, "moved outright", step.share(step.outright), "%"),
    ]


def by_exponent(case: str, step: Movement) -> list[Row]:
    """The same for the weights in each [2^e, 2^(e + 1))."""
    rows = []
    for stored in np.flatnonzero(100 * step.weights >= LEAST_WEIGHTS * step.weights.sum()).tolist():
        named, count, size = f"{case}, 2^{POWERS[stored]}", step.weights[stored], ROUNDING_STEPS[stored]
        rows += [
            row(BENCH, named, "weights", 100 * count / step.weights.sum(), "%"),
            row(BENCH, named, "rounding step", 1e6 * size, "1e-6"),
            row(BENCH, named, "update", 1e6 * step.update[stored] / count, "1e-6"),
            row(BENCH, named, "predicted", 100 * step.expected[stored] / count, "%"),
            row(BENCH, named, "changed", 100 * step.changed[stored] / count, "%"),
            row(BENCH, named, "of all changes", 100 * step.changed[stored] / max(1, step.changed.sum()), "%"),
        ]
    return rows


def what_if(step: Movement) -> list[Row]:
    """The same step, with one thing changed."""
    edges = np.array([math.erf(2.0**power / NORMAL_DEVIATION / math.sqrt(2)) for power in (*POWERS, POWERS[-1] + 1)])
    normal = replace(step, weights=np.diff(edges))
    shares = {
        "nothing else": step.predict(step.mean_update),
        "updates as large as lr": step.predict(step.lr),
        "weights half as large": step.predict(step.mean_update, 2),
        "weights an eighth as large": step.predict(step.mean_update, 8),
        f"normal weights of standard deviation {NORMAL_DEVIATION:g}": normal.predict(step.mean_update),
        "fp8 (E4M3) instead of bf16": step.predict(step.mean_update, FP8_FINER),
        "masters in bf16": step.share(step.outright),
    }
    return [row(BENCH, f"{WHAT_IF}{case}", "changed", share, "%") for case, share in shares.items()]


def language_model(kind: str, lr: float) -> list[Movement]:
    """Steps of the real model, taken anew, because the cache of ``real_steps`` does not have the masters."""
    with observed() as steps:
        for _ in real_steps.train(kind, lr, real_steps.STEPS):
            pass
    return steps


def demo(quick: bool) -> list[Movement]:
    """Steps of the demo's loop."""
    policy = rl_loop.make_model(0)
    if not quick:
        rl_loop.warm_up(policy, 0)
    # A policy that has learned nothing needs a reward in which its answers differ.
    with mock.patch.object(rl_loop, "reward", any_reward if quick else rl_loop.reward), observed() as steps:
        train(policy, 0, QUICK_STEPS if quick else DEMO_STEPS, None)
    return steps


MARKERS = {"settled": "o", "fresh": "^", "demo": "s"}


def draw(rows: list[Row], path: Path) -> None:
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


CHARTS = {"sparsity.png": ("Size of updates, rounding steps, and the share of weights that changed", draw)}


def tables(rows: list[Row]) -> list[str]:
    """Markdown: a line for each case."""
    return grid("", [item for item in rows if re.fullmatch(r"\w+, lr [^,]+", item["case"])], COLUMNS)


def blocks(rows: list[Row]) -> dict[str, list[str]]:
    """Tables for docs/sparsity.md."""
    supposed = [
        {**item, "case": item["case"].removeprefix(WHAT_IF)} for item in rows if item["case"].startswith(WHAT_IF)
    ]
    return {"shares": tables(rows), "exponents": _exponents(rows), "what_if": grid("with", supposed, ("changed",))}


def _exponents(rows: list[Row]) -> list[str]:
    """Every second one of the first kind's first case, and beside it what changed in that of the second kind."""
    firsts: dict[str, str] = {}
    for item in rows:
        case, _, line = item["case"].rpartition(", ")
        if line.startswith("2^"):
            firsts.setdefault(case.partition(", ")[0], case)
    labels = {case: f"{kind}: " if number else "" for number, (kind, case) in enumerate(firsts.items()) if number < 2}

    def place(item: Row) -> Place:
        case, _, line = item["case"].rpartition(", ")
        if not line.startswith("2^") or case not in labels or (labels[case] and item["metric"] != "changed"):
            return None
        return None if int(line[2:]) % 2 == 0 else (line, f"{labels[case]}{item['metric']} [{item['unit']}]")

    return pivot("weights of", rows, place)


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=15)
    found: dict[str, list[Movement]] = {}
    if not options.quick:
        for kind in KINDS:
            found |= {case_of(kind, lr): language_model(kind, lr) for lr in real_steps.RATES}
    found[case_of("demo", rl_loop.RATE)] = demo(options.quick)
    rows: list[Row] = []
    for case, steps in found.items():
        rows += [*summary(case, steps[-1]), *by_exponent(case, steps[-1])]
        for number, step in enumerate(steps, 1):
            rows += summary(f"{case}, step {number}", step)
    write(options.json, rows + what_if(next(iter(found.values()))[-1]))


if __name__ == "__main__":
    main()
