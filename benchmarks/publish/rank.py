"""One process of ``benchmarks.publish``: ``python -m benchmarks.publish.rank PLAN RANK FOLDER``.

Trains, publishes and saves as the plan (JSON) says, and writes what it measured to ``FOLDER/rank-N.json``. Where there
are several processes they meet over gloo on the loopback interface, and before whatever is timed they wait for each
other.
"""

import ctypes
import gc
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from benchmarks.common.timing import peak_extra_bytes
from benchmarks.publish.figures import Memory, Phase, Rank, Turn
from benchmarks.publish.model import SIZES, Training, WholeRealTraining
from trainer_side import Publisher
from vllm_delta_sync.tensors.changes import Bits

PASS_ELEMENTS = 1 << 18
"""Compared at a time: numpy's result stays in the core's cache, and the interpreter's share is small."""
PAGE = os.sysconf("SC_PAGESIZE")


@dataclass(frozen=True)
class Plan:
    """What is measured of a size.

    Attributes:
        ranks, threads: processes, and threads that torch computes with in each.
        turns: times that publishing, saving and passes over memory are timed; 0 for none of it, nor of memory.
        blocks, steps: of four phases each, and the steps of a phase; 0 blocks for no loop.
        settle: seconds between two phases, in which nothing is done.
        checkpoint: of the real model, which is trained then; one process only.
    """

    size: str
    ranks: int
    threads: int
    turns: int
    blocks: int
    steps: int
    settle: float
    checkpoint: str | None = None


Meet = Callable[[], None]


@contextmanager
def world(plan: Plan, rank: int, folder: Path) -> Iterator[Meet]:
    """The group of all processes; what is given waits for all of them."""
    torch.set_num_threads(plan.threads)
    if plan.ranks == 1:
        yield lambda: None
        return
    meeting = (folder / "meeting").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=plan.ranks)
    try:
        yield torch.distributed.barrier
    finally:
        torch.distributed.destroy_process_group()


class Passes:
    """Plain passes over what this process holds and a copy of it, in as many threads as the publisher compares in."""

    def __init__(self, held: Callable[[], Iterable[Bits]], threads: int) -> None:
        """``held``: the live arrays of this moment, flat, each time in the same order."""
        self._held = held
        self._copies = [bits.copy() for bits in held()]
        self._memcmp = ctypes.CDLL(None).memcmp
        self._memcmp.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        self._threads = threads

    def changed(self) -> float:
        """Share of the elements that differ from the copies."""
        counts = [np.count_nonzero(live != copy) for live, copy in zip(self._held(), self._copies, strict=True)]
        return sum(counts) / sum(copy.size for copy in self._copies)

    def renew(self) -> None:
        """Make the copies equal again: both kinds of pass would end early otherwise."""
        for copy, bits in zip(self._copies, self._held(), strict=True):
            np.copyto(copy, bits)

    def array_equal(self, live: Bits, copy: Bits) -> bool:
        return all(
            np.array_equal(live[start : start + PASS_ELEMENTS], copy[start : start + PASS_ELEMENTS])
            for start in range(0, live.size, PASS_ELEMENTS)
        )

    def memcmp(self, live: Bits, copy: Bits) -> bool:
        return int(self._memcmp(live.ctypes.data, copy.ctypes.data, live.nbytes)) == 0

    def seconds(self, equal: Callable[[Bits, Bits], bool]) -> float:
        """One pass.

        Raises:
            SystemExit: something differs, so that less was read.
        """
        pieces = [
            (live[first:last], copy[first:last])
            for live, copy in zip(self._held(), self._copies, strict=True)
            for first, last in _split(live.size, self._threads)
        ]
        with ThreadPoolExecutor(self._threads) as pool:
            # Threads start when there is work for them; that is not to be timed.
            list(pool.map(time.sleep, [0.0] * self._threads))
            shares = [pieces[number :: self._threads] for number in range(self._threads)]
            began = time.perf_counter()
            same = list(pool.map(lambda share: all(equal(*piece) for piece in share), shares))
            took = time.perf_counter() - began
        if not all(same):
            raise SystemExit("weights changed while nobody trained")
        return took


def _split(size: int, parts: int) -> Iterator[tuple[int, int]]:
    return pairwise(size * part // parts for part in range(parts + 1))


def resident() -> int:
    """Bytes of memory that this process holds, with nothing kept back that it could give."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return PAGE * int(Path("/proc/self/statm").read_text().split()[1])


class Measurement:
    """All that one process measures."""

    def __init__(self, plan: Plan, rank: int, folder: Path, meet: Meet) -> None:
        self._plan, self._rank, self._folder, self._meet = plan, rank, folder, meet
        self._training: Training | WholeRealTraining
        if plan.checkpoint is None:
            self._training = Training(SIZES[plan.size], rank, plan.ranks)
        else:
            self._training = WholeRealTraining(Path(plan.checkpoint))
        self._number = 0

    def all(self) -> Rank:
        """In this order: memory, turns, the loop."""
        plan = self._plan
        for _ in range(2):
            self._training.step()
        before = resident()
        without = peak_extra_bytes(lambda: self._steps(plan.steps, None)) if plan.turns else 0
        opened: list[Publisher] = []
        opening = peak_extra_bytes(lambda: opened.append(self._open()))
        memory, turns = None, []
        with opened[0] as publisher:
            publisher.flush()
            if plan.turns:
                opened_with = resident() - before
                publishing = opened_with + peak_extra_bytes(lambda: self._steps(plan.steps, publisher))
                alone = max(self._alone(publisher, before) for _ in range(plan.steps))
                kept = resident() - before
                memory = Memory(kept, opening, without, publishing, alone, peak_extra_bytes(self._save))
                turns = self._turns(publisher)
            phases = self._phases(publisher) if plan.blocks else []
        return Rank(sum(bits.nbytes for bits in self._training.held()), memory, turns, phases)

    def _open(self) -> Publisher:
        return Publisher(self._training.model, bucket=str(self._folder / "run"))

    def _step(self) -> int:
        self._training.step()
        self._number += 1
        return self._number

    def _steps(self, count: int, publisher: Publisher | None) -> None:
        for _ in range(count):
            number = self._step()
            if publisher is not None:
                publisher.publish(step=number, wait=True)
        if publisher is not None:
            publisher.flush()

    def _alone(self, publisher: Publisher, before: int) -> int:
        """Most bytes beyond ``before`` while a version is made and nothing else is done."""

        def publish() -> None:
            publisher.publish(step=number)
            publisher.flush()

        number = self._step()
        held = resident() - before
        return held + peak_extra_bytes(publish)

    def _turns(self, publisher: Publisher) -> list[Turn]:
        passes = Passes(self._training.held, self._plan.threads)
        found = []
        for _ in range(self._plan.turns):
            number = self._step()
            self._meet()
            began = time.perf_counter()
            result = publisher.publish(step=number)
            blocked = time.perf_counter() - began
            publisher.flush()
            changed = passes.changed()
            passes.renew()
            self._quieten()
            compared = passes.seconds(passes.array_equal)
            self._meet()
            bare = passes.seconds(passes.memcmp)
            self._meet()
            began = time.perf_counter()
            self._save(keep=True)
            saved = time.perf_counter() - began
            self._flush_saved()
            durable = time.perf_counter() - began
            self._quieten()
            self._remove()
            found.append(Turn(blocked, result.seconds["diff"], compared, bare, saved, durable, changed))
        return found

    def _save(self, keep: bool = False) -> None:
        self._training.save(self._folder / "saved")
        if not keep:
            self._meet()
            self._remove()

    def _flush_saved(self) -> None:
        """Wait until the disk has what was saved."""
        if self._rank == 0:
            for path in (self._folder / "saved").iterdir():
                with path.open("rb") as file:
                    os.fsync(file.fileno())

    def _remove(self) -> None:
        """Away with what was saved."""
        if self._rank == 0:
            shutil.rmtree(self._folder / "saved", ignore_errors=True)

    def _quieten(self) -> None:
        """What was written before must not be on its way to the disk while something is timed."""
        self._meet()
        if self._rank == 0:
            os.sync()
        self._meet()

    def _phases(self, publisher: Publisher) -> list[Phase]:
        """Blocks of without, with, with, without. One phase goes before, for what is slow the first time."""
        found = []
        for publishes in [True] + [False, True, True, False] * self._plan.blocks:
            found.append(self._phase(publisher if publishes else None))
            publisher.flush()
            self._quieten()
            time.sleep(self._plan.settle)
        return found[1:]

    def _phase(self, publisher: Publisher | None) -> Phase:
        """Begins with a step that is not timed: what its version leaves to do in the background falls on the next."""
        blocked, versions = [], 0
        began = 0.0
        for timed in [False] + [True] * self._plan.steps:
            number = self._step()
            if publisher is not None:
                asked = time.perf_counter()
                result = publisher.publish(step=number)
                if timed:
                    blocked.append(time.perf_counter() - asked)
                    versions += result.version is not None
            if not timed:
                self._meet()
                began = time.perf_counter()
        self._meet()
        seconds = time.perf_counter() - began
        return Phase(publisher is not None, self._plan.steps, seconds, blocked, versions)


def main(plan: str, rank: str, folder: str) -> None:
    asked, number, place = Plan(**json.loads(plan)), int(rank), Path(folder)
    with world(asked, number, place) as meet:
        found = Measurement(asked, number, place, meet).all()
    (place / f"rank-{number}.json").write_text(json.dumps(asdict(found)))


if __name__ == "__main__":
    main(*sys.argv[1:4])
