"""What publishing costs the training: seconds of a step, seconds of a call, and memory; against saving a checkpoint.

Qwen3 in bfloat16 under AdamW at the rate that changes about 1 % of the weights in a step: whole in one process, or
sharded by FSDP2 over processes that meet by gloo. Every step is a real one, and so is every version, written to a
directory on the local disk. All is measured in one run and by turns, so that a machine that gets slower does so for
both sides. Where there are several processes, they wait for each other before anything is timed, and the slowest
counts. A process has as many threads as its case says, for torch and for comparing. Beside *1 thread* a core is free
for what the publisher does in the background, as in trainers whose work is done by accelerators; with as many threads
as cores, or processes, that work takes turns with the training.

*Loop*: phases of a few steps come in blocks of four: without, with, with, without a publish behind every step; so a
steady drift of the machine cancels within a block. The first step of a phase is not timed, and what its version
leaves to do in the background is done during the next: each timed step has the whole cost of one version in it.
``added`` is by how much a step takes longer, the mean of all blocks, and ``added ±`` half its 95 % interval;
``blocked`` is the part of it within ``publish``, and ``added beside it`` the rest, which goes to the background work
on the same cores. Versions are skipped where the one before is still on its way. Peer ``no_publisher``: the same loop
in the phases without.

*Call*: ``publish`` blocks the loop until all that changed is found and noted. It is compared with a plain pass over
the same bytes in as many threads, live weights and published ones read once each and found to be equal:
``array_equal`` is numpy's, in pieces that stay in the cache, and ``memcmp`` that of the C library, as fast as memory
can be read here. Neither notes, writes or hashes anything. ``save_pretrained`` saves the same model to the same disk;
``gathered_save`` is FSDP's ``get_model_state_dict(full_state_dict=True, cpu_offload=True)`` and one file from the
first process. Neither waits for the disk; ``saved_durably`` is the same save, waited for until the disk has it, as
a version has to be before anybody hears of it. Medians of several times by turns; for all ratios *lower is better*,
and ``less than saving`` says by how many percent the call is shorter.

*Memory*: resident bytes of a process, beyond those that it has between two steps without a publisher, in the process
with the most: ``at rest`` between steps; ``at most, publishing`` at the worst moment of a version that is made
between two steps; ``at most, in steps`` that of steps with a version under way, less that of as many steps without,
which varies where FSDP frees what it gathered sooner or later; ``at most, opening`` while version 0 is written; and
that of saving, beyond what was held before. The part of the weights that the process holds, once more, is what
versions are compared with: a share of 1 is that and nothing else; ``beyond the copy`` is the rest, of which the
libraries that a publisher loads and the compiled loops are some 120 MB, whatever the model's size.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.common import real_model
from benchmarks.common.processes import Child
from benchmarks.common.real_model import CASE
from benchmarks.common.rows import Row, parser, start, write
from benchmarks.common.tables import grid
from benchmarks.publish.figures import BENCH, Rank, cost, loop, memory
from benchmarks.publish.rank import Plan

PATIENCE_SECONDS = 3600.0
LOOK_SECONDS = 0.1


def plans(quick: bool, checkpoint: Path | None) -> list[Plan]:
    """What is measured: calls of a large model, the loop of a smaller one, and both of the real one."""
    cores = len(os.sched_getaffinity(0))
    shares = [(1, threads) for threads in sorted({1, cores})] + [(2, max(1, cores // 2))]
    if quick:
        return [Plan("7 M", ranks, 1, turns=3, blocks=2, steps=2, settle=0.0) for ranks in (1, 2)]
    calls = [Plan("0.5 B", *share, turns=5, blocks=0, steps=2, settle=0.0) for share in shares]
    loops = [Plan("0.1 B", *share, turns=0, blocks=3, steps=2, settle=0.5) for share in shares]
    if checkpoint is None:
        return calls + loops
    real = Plan(CASE, 1, 1, turns=5, blocks=3, steps=2, settle=0.5, checkpoint=str(checkpoint))
    return [*calls, *loops, real]


def case_of(plan: Plan) -> str:
    """Such as ``0.1 B, 1 process, 2 threads``."""
    processes = "1 process" if plan.ranks == 1 else f"{plan.ranks} processes, FSDP2"
    return f"{plan.size}, {processes}, {plan.threads} thread{'s' * (plan.threads > 1)}"


def run(plan: Plan, folder: Path) -> list[Rank]:
    """Start all processes of a plan, and gather what they measured.

    Raises:
        SystemExit: one of them failed, or they took too long; all are ended then.
    """
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}
    with ExitStack() as stack:
        children = []
        for rank in range(plan.ranks):
            command = [sys.executable, "-m", "benchmarks.publish.rank"]
            command += [json.dumps(asdict(plan)), str(rank), str(folder)]
            child = Child(f"process {rank}", command, folder / f"rank-{rank}.log", environment)
            children.append(stack.enter_context(child))
        _wait(children)
    return [TypeAdapter(Rank).validate_json((folder / f"rank-{rank}.json").read_bytes()) for rank in range(plan.ranks)]


def _wait(children: Sequence[Child]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        codes = [child.exit_code for child in children]
        for child, code in zip(children, codes, strict=True):
            if code:
                raise SystemExit(f"{child.name} ended with {code}:\n{child.tail()}")
        if None not in codes:
            return
        if time.monotonic() > deadline:
            raise SystemExit(f"not done after {PATIENCE_SECONDS:g} s:\n{children[0].tail()}")
        time.sleep(LOOK_SECONDS)


def figures(plan: Plan, ranks: Sequence[Rank]) -> list[Row]:
    """All rows of a plan."""
    case = case_of(plan)
    saving = "save_pretrained" if plan.ranks == 1 else "gathered_save"
    rows: list[Row] = []
    if plan.turns:
        rows += cost(f"{case}: call", ranks, saving) + memory(f"{case}: memory", ranks, saving)
    if plan.blocks:
        rows += loop(f"{case}: loop", ranks)
    return rows


def tables(rows: Sequence[Row]) -> list[str]:
    """One for the loop, one for a call, one for memory."""
    parts = {
        "loop": ["step without", "step with", "/ no_publisher", "added", "added ±", "blocked", "added beside it"],
        "call": ["shard", "changed", "publish", "publish: comparing", "array_equal", "memcmp"],
        "memory": [
            "at rest",
            "at most, publishing",
            "at most, publishing, share",
            "at most, publishing, beyond the copy",
            "at most, in steps",
            "at most, opening",
            "save_pretrained",
            "gathered_save",
        ],
    }
    parts["loop"] += ["versions", "skipped"]
    parts["call"] += ["/ array_equal", "/ memcmp", "save_pretrained", "gathered_save", "saved_durably"]
    parts["call"] += ["less than saving", "less than saving durably"]
    lines: list[str] = []
    for name, columns in parts.items():
        mine = [item for item in rows if item["case"].endswith(f": {name}")]
        mine = [{**item, "case": item["case"].removesuffix(f": {name}")} for item in mine]
        if name == "memory":
            mine = [item for item in mine if not item["case"].endswith("2 threads")]  # as with one
        lines += [*grid(name, mine, columns), ""]
    return lines[:-1]


def options_of(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    known = parser(BENCH, (__doc__ or "").partition("\n")[0], minutes=10)
    real_model.add_flag(known)
    known.add_argument("--ranks", type=int, action="append", metavar="N", help="only with N processes; may be repeated")
    return start(known, arguments)


def main(arguments: list[str] | None = None) -> None:
    options = options_of(arguments)
    rows: list[Row] = []
    for plan in plans(options.quick, real_model.find_checkpoint(options)):
        if (options.ranks is not None and plan.ranks not in options.ranks) or (options.real and plan.size != CASE):
            continue
        with tempfile.TemporaryDirectory(prefix="delta-sync-bench-") as folder:
            rows += figures(plan, run(plan, Path(folder)))
    write(options.json, rows)


if __name__ == "__main__":
    main()
