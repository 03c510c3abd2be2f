"""What following a run costs a server that is busy: tokens per second lost to a sync every few seconds.

A real ``delta-sync serve`` on one core, and clients in a process of their own that keep so many streams going: greedy,
of fixed length, by the OpenAI route. The machine's cores are shared between server and clients, so speeds are low;
what counts is the ratio. Sizes are ``demo`` (a toy of 3.2 M parameters) and ``0.3B``, both with
random weights in bfloat16; every version is one more step of Adam that changes about 1 % of the elements.

The run is written before the server starts, and the server takes a version only when it is told to (policy
``manual``, ``POST /delta_sync/sync``): so the cost is the receiver's, and no trainer's. Following instead of being
told costs one look into the bucket more, every ``poll_seconds``.

Phases as long as the time between two syncs, with a sync in the middle of each that has one, come in blocks of four:
without, with, with, without; so a steady drift of the machine cancels within a block. ``lost`` is the share of the
tokens that a block's middle two lack against its outer two, the mean of all blocks; ``lost ±`` is half its 95 %
interval. ``lost per sync`` is another way to the same: the time that generation would need for the tokens that are
missing from 0.25 s before a sync to 0.75 s after it, at the speed of the rest of that phase; ``pause`` is the part of
it in which generation stands still, and the rest goes into computing the running requests' keys and values anew
(setting ``prefix_cache``: ``reset``) and into staging, which shares the core. ``lost, by syncs`` is this over the time
between two. ``speed while staging`` is that from when a sync was asked for to its pause. Gaps are between neighbouring
pieces of one answer, as a client sees them. The peer ``no_sync`` is the same server in the phases without: ours / peer,
so for speed *higher is better*, for gaps *lower is better*.
"""

import argparse
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.common.processes import SERVE_ARGUMENTS, Child, cores, free_port, server_environment
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import grid
from benchmarks.serving.figures import (
    AFTER_SECONDS,
    Arrivals,
    Phase,
    Sync,
    lost_by_blocks,
    lost_by_syncs,
    speed_while_staging,
)
from benchmarks.serving.load import STREAMING
from benchmarks.serving.run import SIZES, Size

BENCH = "serving"
START_SECONDS = 240.0
SETTLE_SECONDS = 3.0
PATIENCE_SECONDS = 120.0
LOAD_SECONDS = 30.0
STAGING = ("fetch", "verify", "decode", "route", "rescan")


@dataclass(frozen=True)
class Plan:
    """How a size is measured: seconds between two syncs, which is the length of a phase; blocks of four phases."""

    every: float
    blocks: int

    @property
    def versions(self) -> int:
        """How many are taken: two in each block, and one before, with which what is compiled late is compiled."""
        return 2 * self.blocks + 1


PLANS = {"demo": Plan(10, 7), "0.3B": Plan(10, 4)}
QUICK = {"demo": Plan(2.5, 2)}


@contextmanager
def server(folder: Path, core: int, *options: str) -> Iterator[str]:
    """A server with the run's base, which waits to be told; its URL."""
    port = free_port()
    command = [str(Path(sysconfig.get_path("scripts")) / "delta-sync"), "serve", str(folder / "base")]
    command += ["--bucket", str(folder / "run"), "--policy", "manual", "--port", str(port), *SERVE_ARGUMENTS]
    command += ["--max-model-len", "256", *options]
    with Child("the server", command, folder / "server.log", server_environment(core)) as child:
        url = f"http://127.0.0.1:{port}"
        _wait_ready(url, child)
        yield url


def _wait_ready(url: str, child: Child) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.exit_code is None:
        try:
            response = httpx.get(f"{url}/health", timeout=PATIENCE_SECONDS, verify=False)
        except httpx.TransportError:
            time.sleep(0.25)
            continue
        if response.status_code == 200:
            return
    raise SystemExit(f"the server did not start:\n{child.tail()}")


@contextmanager
def clients(url: str, shape: Size, folder: Path, others: Sequence[int], *prompts: int) -> Iterator[Path]:
    """The streams, until the block ends; then what arrived lies in the file.

    Args:
        prompts: LENGTH and POOL of ``benchmarks.serving.load``.
    """
    file = folder / "arrivals.npy"
    command = ["taskset", "--cpu-list", ",".join(map(str, others)), sys.executable, "-m", "benchmarks.serving.load"]
    command += [url, str(shape.streams), str(shape.tokens), str(file), *map(str, prompts)]
    with Child("the clients", command, folder / "clients.log") as child:
        deadline = time.monotonic() + START_SECONDS
        while STREAMING not in child.tail():
            if child.exit_code is not None or time.monotonic() > deadline:
                raise SystemExit(f"the clients got no tokens:\n{child.tail()}")
            time.sleep(0.1)
        yield file
        child.say("enough")
        child.wait(LOAD_SECONDS)
        if child.exit_code != 0:
            raise SystemExit(f"the clients ended with {child.exit_code}:\n{child.tail()}")


def take(client: httpx.Client, version: int) -> Sync:
    """Have the server take one version, and see that it did."""
    asked = time.monotonic()
    response = client.post("/delta_sync/sync", json={"version": version})
    answered = time.monotonic()
    document: dict[str, Any] = response.json()
    if response.status_code != 200 or document["served"]["version"] != version:
        raise SystemExit(f"version {version} was not taken: {response.text}")
    return Sync(asked, answered, document["recent"][-1])


def follow(client: httpx.Client, blocks: int, seconds: float) -> tuple[list[Phase], list[Sync]]:
    """Go through the phases, with a sync in the middle of each that has one.

    Blocks of four phases: without, with, with, without syncs. A phase lasts longer than ``seconds`` if its sync does.
    """
    phases: list[Phase] = []
    syncs: list[Sync] = []
    start = time.monotonic()
    for has_sync in [False, True, True, False] * blocks:
        if has_sync:
            _sleep_until(start + seconds / 2)
            syncs.append(take(client, len(syncs) + 2))
        _sleep_until(max(start + seconds, time.monotonic() + AFTER_SECONDS if has_sync else 0.0))
        end = time.monotonic()
        phases.append(Phase(has_sync, start, end))
        start = end
    return phases, syncs


def _sleep_until(when: float) -> None:
    time.sleep(max(0.0, when - time.monotonic()))


def make_run(size: str, versions: int, folder: Path) -> None:
    """Write a base and so many versions, in a process of its own."""
    making = [sys.executable, "-m", "benchmarks.serving.run", size, str(versions), str(folder)]
    made = subprocess.run(making, check=False, capture_output=True, text=True)
    if made.returncode:
        raise SystemExit(f"the run could not be written:\n{made.stderr[-2000:]}")


def measure(size: str, plan: Plan, folder: Path) -> list[Row]:
    """Rows of one size."""
    make_run(size, plan.versions, folder)
    core, others = cores()
    with (
        server(folder, core) as url,
        httpx.Client(base_url=url, timeout=PATIENCE_SECONDS, verify=False) as client,
    ):
        with clients(url, SIZES[size], folder, others) as file:
            _sleep_until(time.monotonic() + SETTLE_SECONDS)
            take(client, 1)
            _sleep_until(time.monotonic() + SETTLE_SECONDS)
            course, syncs = follow(client, plan.blocks, plan.every)
    return figures(f"{size}, every {plan.every:g} s", Arrivals(np.load(file)), course, syncs, plan)


def figures(case: str, arrivals: Arrivals, course: Sequence[Phase], syncs: Sequence[Sync], plan: Plan) -> list[Row]:
    """All rows of a case."""

    def add(metric: str, value: float, unit: str, peer: str | None = None) -> None:
        rows.append(row(BENCH, case, metric, value, unit, peer))

    rows: list[Row] = []
    speeds = {kind: [arrivals.speed(p.start, p.end) for p in course if p.syncs is kind] for kind in (True, False)}
    arrived = [round(arrivals.tokens(phase.start, phase.end)) for phase in course]
    if 0 in arrived:
        raise SystemExit(
            f"{case}: no token arrived within a phase (each had {arrived}); give a longer --every, or a machine that "
            "is less busy"
        )
    gaps = {
        kind: 1e3 * np.quantile(arrivals.gaps([(p.start, p.end) for p in course if p.syncs is kind]), [0.5, 0.99, 1])
        for kind in (True, False)
    }
    with_syncs, without = statistics.fmean(speeds[True]), statistics.fmean(speeds[False])
    lost, one = lost_by_blocks(arrivals, course), lost_by_syncs(arrivals, course, syncs)
    add("syncs", len(syncs), "syncs")
    add("speed without", without, "tokens/s")
    add("speed with", with_syncs, "tokens/s")
    add("ratio", with_syncs / without, "x", "no_sync")
    add("lost", 100 * lost.mean, "%")
    add("lost ±", 100 * lost.half, "%")
    add("lost, by syncs", 100 * one.mean / plan.every, "%")
    add("lost, by syncs ±", 100 * one.half / plan.every, "%")
    add("lost per sync", 1e3 * one.mean, "ms")
    pauses = [sync.milliseconds("pause") for sync in syncs]
    add("pause p50", float(np.quantile(pauses, 0.5)), "ms")
    add("pause p99", float(np.quantile(pauses, 0.99)), "ms")
    add("staging p50", statistics.median(sync.milliseconds(*STAGING) for sync in syncs), "ms")
    add("asked to served p50", 1e3 * statistics.median(sync.answered - sync.asked for sync in syncs), "ms")
    add("speed while staging", 100 * speed_while_staging(arrivals, course, syncs), "% of without")
    for name, ours, theirs in zip(("p50", "p99", "longest"), gaps[True], gaps[False], strict=True):
        add(f"gap {name}", float(ours), "ms")
        add("ratio", float(ours / theirs), "x", f"no_sync (gap {name})")
    add("changed", statistics.fmean(sync.entry["changed"] for sync in syncs), "elements/sync")
    add("payload", statistics.fmean(sync.entry["payload_bytes"] for sync in syncs) / 1e3, "kB/sync")
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """What is lost, and what a client and a commit see of it; results have more of it than fits the page."""
    lost = ("speed without", "lost", "lost ±", "lost, by syncs", "lost, by syncs ±", "lost per sync")
    seen = ("gap p50", "gap p99", "gap longest", "pause p50", "pause p99", "staging p50", "asked to served p50")
    return grid("lost", rows, (*lost, *seen))


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    known = parser(BENCH, (__doc__ or "").partition("\n")[0], minutes=10)
    known.add_argument("--size", choices=sorted(SIZES), action="append", help="only this one; may be repeated")
    known.add_argument("--every", type=float, metavar="SECONDS", help="between two syncs (default: 10, quick: 2)")
    known.add_argument("--blocks", type=int, metavar="N", help="blocks of four phases")
    options = start(known, arguments)
    if options.blocks is not None and options.blocks < 2:
        known.error(f"--blocks is {options.blocks}; an interval needs two at least")
    return options


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    plans = QUICK if options.quick else PLANS
    rows: list[Row] = []
    for size in options.size or plans:
        usual = plans.get(size, PLANS[size])
        plan = Plan(options.every or usual.every, options.blocks or usual.blocks)
        with tempfile.TemporaryDirectory() as folder:
            rows += measure(size, plan, Path(folder))
    write(options.json, rows)


if __name__ == "__main__":
    main()
