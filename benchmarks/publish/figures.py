"""What the processes of ``benchmarks.publish`` measured, and what it comes to over all of them."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.common.estimate import Estimate, estimate
from benchmarks.common.rows import Row, row

BENCH = "publish"
MEGA = 1e6


@dataclass(frozen=True)
class Memory:
    """Bytes that one process held beyond its model and optimizer.

    Attributes:
        kept: with a publisher, between steps. opening: at most, while the publisher was made.
        without, publishing: at most, in steps without and with it. alone: at most, while a version was made between
            two steps. saving: at most, while a checkpoint was saved; beyond what was held then.
    """

    kept: int
    opening: int
    without: int
    publishing: int
    alone: int
    saving: int


@dataclass(frozen=True)
class Turn:
    """Seconds that one process spent in ``publish`` and, of it, in comparing; in passes over memory; in saving.

    ``durable`` is saving, and waiting until the disk has it. ``changed`` is the share of its elements that the step
    before had changed.
    """

    publish: float
    diff: float
    array_equal: float
    memcmp: float
    save: float
    durable: float
    changed: float


@dataclass(frozen=True)
class Phase:
    """Steps of the loop.

    Attributes:
        publishes: whether each was followed by a publish. seconds: of all steps.
        blocked: seconds of each publish. versions: how many were not skipped.
    """

    publishes: bool
    steps: int
    seconds: float
    blocked: list[float]
    versions: int


@dataclass(frozen=True)
class Rank:
    """All that one process measured; ``shard`` is the bytes of its part of the weights."""

    shard: int
    memory: Memory | None
    turns: list[Turn] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)


def added_by_blocks(phases: Sequence[Phase]) -> Estimate:
    """Seconds that a step takes longer with a publish behind it: one value for each block of four phases."""
    found = []
    for first in range(0, len(phases), 4):
        block = phases[first : first + 4]
        mean = {
            kind: statistics.fmean(phase.seconds / phase.steps for phase in block if phase.publishes is kind)
            for kind in (True, False)
        }
        found.append(mean[True] - mean[False])
    return estimate(found)


def loop(case: str, ranks: Sequence[Rank]) -> list[Row]:
    """Rows of the loop. All processes take the same time for a phase: they wait for each other."""
    phases = ranks[0].phases
    step = {
        kind: statistics.fmean(phase.seconds / phase.steps for phase in phases if phase.publishes is kind)
        for kind in (True, False)
    }
    with_it = [number for number, phase in enumerate(phases) if phase.publishes]
    calls = [max(each) for n in with_it for each in zip(*(rank.phases[n].blocked for rank in ranks), strict=True)]
    versions = sum(phase.versions for phase in phases)
    added = added_by_blocks(phases)
    blocked = statistics.fmean(calls)
    return [
        row(BENCH, case, "step without", 1e3 * step[False], "ms"),
        row(BENCH, case, "step with", 1e3 * step[True], "ms"),
        row(BENCH, case, "ratio", step[True] / step[False], "x", "no_publisher"),
        row(BENCH, case, "added", 1e3 * added.mean, "ms/step"),
        row(BENCH, case, "added ±", 1e3 * added.half, "ms/step"),
        row(BENCH, case, "blocked", 1e3 * blocked, "ms/step"),
        row(BENCH, case, "added beside it", 1e3 * (added.mean - blocked), "ms/step"),
        row(BENCH, case, "versions", versions, "versions"),
        row(BENCH, case, "skipped", len(calls) - versions, "versions"),
    ]


def cost(case: str, ranks: Sequence[Rank], saving: str) -> list[Row]:
    """Rows of one call against a pass over memory and against saving, named ``saving``; the slowest process counts."""

    def median(value: Callable[[Turn], float]) -> float:
        turns = zip(*(rank.turns for rank in ranks), strict=True)
        return statistics.median(max(value(turn) for turn in turn_of_all) for turn_of_all in turns)

    publish = median(lambda turn: turn.publish)
    saved = {saving: median(lambda turn: turn.save), "saved_durably": median(lambda turn: turn.durable)}
    passes = {"array_equal": median(lambda turn: turn.array_equal), "memcmp": median(lambda turn: turn.memcmp)}
    return [
        row(BENCH, case, "shard", max(rank.shard for rank in ranks) / MEGA, "MB"),
        row(BENCH, case, "changed", 100 * median(lambda turn: turn.changed), "%"),
        row(BENCH, case, "publish", 1e3 * publish, "ms"),
        row(BENCH, case, "publish: comparing", 1e3 * median(lambda turn: turn.diff), "ms"),
        *(row(BENCH, case, name, 1e3 * seconds, "ms") for name, seconds in passes.items()),
        *(row(BENCH, case, "ratio", publish / seconds, "x", name) for name, seconds in passes.items()),
        *(row(BENCH, case, name, 1e3 * seconds, "ms") for name, seconds in saved.items()),
        *(row(BENCH, case, "ratio", publish / seconds, "x", name) for name, seconds in saved.items()),
        row(BENCH, case, "less than saving", 100 * (1 - publish / saved[saving]), "%"),
        row(BENCH, case, "less than saving durably", 100 * (1 - publish / saved["saved_durably"]), "%"),
    ]


def memory(case: str, ranks: Sequence[Rank], saving: str) -> list[Row]:
    """Rows of what the publisher holds, of the process where it is most; as shares of its part of the weights too."""

    peaks: dict[str, Callable[[Memory], int]] = {
        "at rest": lambda one: one.kept,
        "at most, publishing": lambda one: one.alone,
        "at most, in steps": lambda one: one.publishing - one.without,
        "at most, opening": lambda one: one.opening,
        saving: lambda one: one.saving,
    }
    rows = []
    for name, value in peaks.items():
        held = [(value(rank.memory), rank.shard) for rank in ranks if rank.memory is not None]
        rows += [
            row(BENCH, case, name, max(size for size, _ in held) / MEGA, "MB"),
            row(BENCH, case, f"{name}, share", max(size / shard for size, shard in held), "x shard"),
        ]
        if name != saving:
            beyond = max(size - shard for size, shard in held)
            rows.append(row(BENCH, case, f"{name}, beyond the copy", beyond / MEGA, "MB"))
    return rows
