"""What the setting ``prefix_cache`` costs a busy server at a version per second, where requests share prompts.

A real ``delta-sync serve`` on one core for each value of the setting, one after the other, and clients in a process of
their own that keep so many streams going: greedy, of fixed length, with prompts of 512 tokens from a pool of four, as
in reinforcement learning, where each prompt is answered many times. With nothing else to do, all of a pool would stay
cached. Sizes, runs and clients are those of ``benchmarks.serving``.

Phases of equal length come in blocks of four: without versions, with one per second, with, without. ``speed`` is tokens
per second in the phases with versions, ``hits`` the share of the prompts' tokens that were found in the cache then. The
peer ``no_versions`` is the same server in the phases without; the peers ``reset`` and ``keep`` are the servers with
those settings, each against its own ``no_versions``: ours / peer, *higher is better*. ``±`` is half a 95 % interval
over the blocks. ``keep`` answers from what older weights have computed; it shows what there is to be gained at most.
"""

import argparse
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import numpy as np
from tqdm import tqdm

from benchmarks.common.estimate import estimate
from benchmarks.common.processes import cores
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import Place, pivot
from benchmarks.serving.__main__ import PATIENCE_SECONDS, clients, make_run, server, take
from benchmarks.serving.figures import Arrivals, Phase
from benchmarks.serving.run import SIZES, Size

BENCH = "caching"
SETTINGS = ("keep", "salt", "reset")
PROMPT_TOKENS, POOL = 512, 4
SETTLE_SECONDS = 3.0
HITS = re.compile(r"^vllm:prefix_cache_(hits|queries)_total\S* (\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class Plan:
    """How a size is measured: whole seconds of a phase, blocks of four phases, requests at a time, and tokens of each
    answer."""

    seconds: int
    blocks: int
    streams: int
    tokens: int

    @property
    def versions(self) -> int:
        """How many are taken: one per second in two phases of each block, and one before."""
        return 2 * self.seconds * self.blocks + 1


PLANS = {"demo": Plan(6, 4, 16, 64), "0.3B": Plan(10, 4, 4, 64)}
QUICK = {"demo": Plan(3, 2, 8, 32)}


@dataclass(frozen=True)
class Stretch:
    """A phase, and what the server counted in it: tokens of prompts that were looked for and found."""

    phase: Phase
    queries: float
    hits: float


def follow(client: httpx.Client, plan: Plan, progress: "tqdm[None]") -> list[Stretch]:
    """Go through the phases, with a version at the start of each second of those that have any."""
    stretches: list[Stretch] = []
    version = 1
    for has_versions in [False, True, True, False] * plan.blocks:
        counted, began = counters(client), time.monotonic()
        for second in range(plan.seconds):
            if has_versions:
                version += 1
                take(client, version)
            time.sleep(max(0.0, began + second + 1 - time.monotonic()))
        phase = Phase(has_versions, began, time.monotonic())
        now = counters(client)
        stretches.append(Stretch(phase, *(now[name] - counted[name] for name in ("queries", "hits"))))
        progress.update()
    return stretches


def counters(client: httpx.Client) -> dict[str, float]:
    """What vLLM has counted of its prefix cache so far, in tokens."""
    return {name: float(value) for name, value in HITS.findall(client.get("/metrics").text)}


def measure(size: str, setting: str, plan: Plan, folder: Path) -> tuple[Arrivals, list[Stretch]]:
    """One server, from its start to its end."""
    core, others = cores()
    options = ("--max-model-len", str(PROMPT_TOKENS + plan.tokens), "--prefix-cache", setting)
    with (
        server(folder, core, *options) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, verify=False) as client,
        tqdm(total=4 * plan.blocks, desc=f"{size}, {setting}", unit="phase") as progress,
    ):
        shape = Size(plan.streams, plan.tokens, SIZES[size].config)
        with clients(url, shape, folder, others, PROMPT_TOKENS, POOL) as file:
            take(client, 1)
            time.sleep(SETTLE_SECONDS)
            stretches = follow(client, plan, progress)
    return Arrivals(np.load(file)), stretches


def figures(size: str, setting: str, arrivals: Arrivals, stretches: Sequence[Stretch]) -> tuple[list[Row], float]:
    """Rows of a server, and its speed with versions against its speed without."""

    def speeds(with_versions: bool, among: Sequence[Stretch]) -> float:
        phases = [each.phase for each in among if each.phase.syncs is with_versions]
        return statistics.fmean(arrivals.speed(phase.start, phase.end) for phase in phases)

    case = f"{size}, {setting}"
    blocks = [stretches[first : first + 4] for first in range(0, len(stretches), 4)]
    ratio = estimate([speeds(True, block) / speeds(False, block) for block in blocks])
    rows = [
        row(BENCH, case, "speed", speeds(True, stretches), "tokens/s"),
        row(BENCH, case, "speed without versions", speeds(False, stretches), "tokens/s"),
        row(BENCH, case, "ratio", ratio.mean, "x", "no_versions"),
        row(BENCH, case, "±", ratio.half, "x"),
    ]
    for with_versions, name in ((True, "hits"), (False, "hits without versions")):
        chosen = [each for each in stretches if each.phase.syncs is with_versions]
        queries = sum(each.queries for each in chosen)
        rows.append(row(BENCH, case, name, 100 * sum(each.hits for each in chosen) / queries, "%"))
    return rows, ratio.mean


def tables(rows: Sequence[Row]) -> list[str]:
    """One table: a line for each size; of each setting, what it leaves of the speed, and what was found."""

    def place(item: Row) -> Place:
        size, _, setting = item["case"].partition(", ")
        name = f"/ {item['peer']}" if "peer" in item else item["metric"]
        return (size, f"{setting}: {name} [{item['unit']}]") if name in ("/ no_versions", "±", "hits") else None

    return pivot("a version per second", rows, place)


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    known = parser(BENCH, (__doc__ or "").partition("\n")[0], minutes=20)
    known.add_argument("--size", choices=sorted(PLANS), action="append", help="only this one; may be repeated")
    return start(known, arguments)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    plans = QUICK if options.quick else PLANS
    rows: list[Row] = []
    for size in options.size or plans:
        plan = plans.get(size, PLANS[size])
        with tempfile.TemporaryDirectory() as folder:
            make_run(size, plan.versions, Path(folder))
            found: dict[str, float] = {}
            for setting in SETTINGS:
                own, found[setting] = figures(size, setting, *measure(size, setting, plan, Path(folder)))
                rows += own
        for setting, peer in (("salt", "reset"), ("salt", "keep"), ("reset", "keep")):
            ratio = found[setting] / found[peer]
            rows.append(row(BENCH, f"{size}, {setting}", "ratio", ratio, "x", peer))
    write(options.json, rows)


if __name__ == "__main__":
    main()
