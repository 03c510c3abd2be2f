"""Byte budgets in a reinforcement learning loop: the reward with 50, 25 and 10 % of the bytes, against the exact run.

The loop of ``examples/rl_loop.py``: policy, task, loss and optimizer, and a publisher that writes a version for each
step. Instead of a vLLM server a copy of the policy samples, in this process, with weights that it reads from the run:
it applies each delta, and holds bit for bit what was published. For each seed, the exact run comes first. The others
begin with the same weights, and a version may have at most that share of the exact run's mean bytes. Distance is
``relative_norm`` of the manifests: how far the weights that sample are from the trainer's, relative to their norm.

The reward is the mean of the last steps. A run has few steps, and few seeds: read it with its range over the seeds.
After the last step, ``publish(exact=True)`` sends what is held back; the benchmark fails unless the copy then holds
the trainer's bits.
"""

import copy
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.breakeven.__main__ import apply
from benchmarks.common.charts import panels, save, series
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import grid
from benchmarks.common.training import sample
from examples import rl_loop
from examples.rl_loop import Answer
from trainer_side import Budget, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.tensors.torch_views import bits_of

BENCH = "budgets"
SHARES = (0.5, 0.25, 0.1)
SEEDS = (0, 1, 2)
STEPS = 30
LAST = 10
"""Steps at the end whose rewards are averaged."""


class Sampler:
    """Stands in for a server: samples with the published weights, in bf16, which follow the publisher's run."""

    def __init__(self, model: torch.nn.Module, publisher: Publisher, seed: int) -> None:
        self._model, self._publisher = copy.deepcopy(model).to(torch.bfloat16), publisher
        self._run = open_run(publisher.url)
        parameters = dict(self._model.named_parameters())
        self._bits = [bits_of(parameters[spec.name]) for spec in self._run.table]
        self._generator = torch.Generator().manual_seed(seed)
        self.version = publisher.version

    def wait_version(self, version: int) -> None:
        """Apply the versions up to this one."""
        while self.version < version:
            self.version += 1
            apply(self._run.changes(self._run.manifest(self.version)), self._bits)

    def check(self, model: torch.nn.Module) -> None:
        """Raise unless the weights are these, bit for bit."""
        for name, parameter in model.named_parameters():
            if not np.array_equal(bits_of(parameter.to(torch.bfloat16)), bits_of(self._model.get_parameter(name))):
                raise RuntimeError(f"{name} differs from the trainer's after an exact version")

    def request(self, method: str, path: str) -> Any:
        """The status that the loop reads; what it waits for is served at once."""
        self._publisher.flush()
        self.wait_version(self._publisher.version)
        return {"last_error": None, "recent": [], "served": {"version": self.version}}

    def sample(self, prompts: Sequence[list[int]], temperature: float) -> list[Answer]:
        """An answer to each prompt, sampled at temperature 1 by the newest version."""
        self._publisher.flush()
        self.wait_version(self._publisher.version)
        answers = zip(*sample(self._model, prompts, self._generator), strict=True)
        return [Answer(tokens, logprobs, [self.version] * len(tokens)) for tokens, logprobs in answers]


def any_reward(word: str, tokens: list[int]) -> float:
    """For ``--quick``, whose policy has learned nothing: a reward that answers differ in."""
    return float(len(tokens) % 2)


def train(model: torch.nn.Module, seed: int, steps: int, max_bytes: int | None) -> tuple[list[Any], list[float]]:
    """Train a copy of the policy → the loop's figures for each step, and the distance of each version."""
    model = copy.deepcopy(model)
    torch.manual_seed(seed)
    random.seed(seed)
    budget = None if max_bytes is None else Budget(max_bytes=max_bytes)
    with tempfile.TemporaryDirectory() as folder:
        with Publisher(model, folder, codec="plain", budget=budget) as publisher:
            sampler = Sampler(model, publisher, seed)
            done, _ = rl_loop.train(model, publisher, sampler, steps, seed)  # type: ignore[arg-type]
            publisher.publish(step=steps + 1, exact=True)
            publisher.flush()
            sampler.wait_version(publisher.version)
            sampler.check(model)
        log = list(open_run(folder).log())[1 : steps + 1]
    held = [manifest.held_back for manifest in log]
    return done, [0.0 if item is None else item.relative_norm or 0.0 for item in held]


def measure(case: str, seed: int, steps: Sequence[Any], distances: Sequence[float]) -> list[Row]:
    """The rows of one run."""
    named = f"{case}, seed {seed}"
    last = steps[-LAST:]
    return [
        row(BENCH, named, "reward", float(np.mean([step["reward"] for step in last])), "of 1"),
        row(BENCH, named, "bytes per version", float(np.mean([step["payload_bytes"] for step in steps])), "B"),
        row(BENCH, named, "largest version", max(step["payload_bytes"] for step in steps), "B"),
        row(BENCH, named, "mean distance", float(np.mean(distances)), "of the norm"),
        row(BENCH, named, "last distance", distances[-1], "of the norm"),
    ]


def curves(case: str, runs: Sequence[tuple[Sequence[Any], Sequence[float]]]) -> list[Row]:
    """Reward and distance after each step, means over the runs of all seeds."""
    rows = []
    for index in range(len(runs[0][1])):
        named = f"{case}, step {index + 1}"
        reward = float(np.mean([steps[index]["reward"] for steps, _ in runs]))
        distance = float(np.mean([distances[index] for _, distances in runs]))
        rows += [row(BENCH, named, "reward", reward, "of 1"), row(BENCH, named, "distance", distance, "of the norm")]
    return rows


def summarise(rows: Sequence[Row], seeds: int) -> list[Row]:
    """Means over the seeds, and the range of the rewards."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for item in rows:
        case = item["case"].partition(", seed ")[0]
        found.setdefault((case, item["metric"], item["unit"]), []).append(item["value"])
    means = []
    for (case, metric, unit), values in found.items():
        named = f"{case}, {seeds} seeds"
        means.append(row(BENCH, named, metric, float(np.mean(values)), unit))
        if metric == "reward":
            means.append(row(BENCH, named, "least reward", min(values), unit))
            means.append(row(BENCH, named, "most reward", max(values), unit))
    return means


WINDOW = 5
"""Steps of the moving mean of rewards."""


def draw(rows: list[Row], path: Path) -> None:
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


CHARTS = {"budgets.png": ("Reward and distance to the trainer's weights, for each budget", draw)}


def tables(rows: list[Row]) -> list[str]:
    """Markdown: a line for each share, means over the seeds."""
    columns = ("reward", "least reward", "most reward", "bytes per version", "mean distance", "last distance")
    return grid("versions of", [item for item in rows if item["case"].endswith(" seeds")], columns)


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, __doc__ or "", minutes=20)
    known.add_argument("--steps", type=int, default=STEPS, help=f"of each run (default: {STEPS})")
    options = start(known, arguments)
    seeds, steps = (SEEDS[:1], 3) if options.quick else (SEEDS, options.steps)
    if options.quick:
        rl_loop.reward = any_reward
    rows: list[Row] = []
    runs: dict[str, list[tuple[list[Any], list[float]]]] = {}
    for seed in seeds:
        policy = rl_loop.make_model(seed)
        if not options.quick:
            rl_loop.warm_up(policy, seed)
        exact = train(policy, seed, steps, None)
        runs.setdefault("exact", []).append(exact)
        mean = float(np.mean([step["payload_bytes"] for step in exact[0]]))
        for share in SHARES[-1:] if options.quick else SHARES:
            found = train(policy, seed, steps, max(1, int(share * mean)))
            runs.setdefault(f"{100 * share:g} % of the bytes", []).append(found)
        for case, trained in runs.items():
            rows += measure(case, seed, *trained[-1])
            print(f"seed {seed}, {case}: reward {rows[-5]['value']:.3f}, {rows[-4]['value']:,.0f} B", flush=True)
    series = [item for case, trained in runs.items() for item in curves(case, trained)]
    write(options.json, [*rows, *summarise(rows, len(seeds)), *series])


if __name__ == "__main__":
    main()
