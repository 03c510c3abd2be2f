"""Ranks killed at each step of a publish: there is the version before or the whole new one, and the job goes on."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import distributed

from tests.support.publishers import Hooked
from tests.support.publishing import digest
from tests.trainer.sharded.models import built, fsdp, gathered, move
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import PublishError

REPORTED = 3
POINTS = ("before the diff", "before its upload", "after its upload", "before the manifest", "after the manifest")
"""Before and after the manifest: as rank 0 is about to write it, and once it has."""


def doom(bucket: Hooked, victim: int, at: str) -> None:
    """Have a process end as by kill -9, at a step of the next publish in this one."""

    def end(key: str) -> None:
        if key.startswith("versions/" if "manifest" in at else "objects/"):
            os.kill(victim, signal.SIGKILL)

    if at == "before the diff":
        end("objects/")
    elif at.startswith("before"):
        bucket.before = end
    else:
        bucket.after = end


def live(rank: int, size: int, where: str, victim: int, at: str) -> None:
    """Take the run in ``where`` over, or begin it, publish one version, and be on the way to the next when rank
    ``victim`` ends itself, ``at`` a step of POINTS.

    A rank ends with status REPORTED if a publish says that the victim is lost. Rank 0 writes to ``log``, line by line,
    ``will SHA`` of the weights that it is about to publish, and ``done VERSION`` once they are.
    """
    folder = Path(where)
    url = str(folder / "run")

    def note(*words: object) -> None:
        if rank == 0:
            with (folder / "log").open("a") as log:
                print(*words, file=log)

    model: Any = built("mixed")
    if (folder / "run" / "versions").exists():
        model.load_state_dict(dict(open_run(url).tensors()))
    model = fsdp(model) if size > 1 else model
    bucket = Hooked(folder / "run")

    def step(number: int, doomed: int | None = None) -> None:
        move(model)
        note("will", digest(gathered(model)))
        if doomed is not None:
            doom(bucket, doomed, at)
        result = publisher.publish(number)
        publisher.flush()
        note("done", result.version)

    processes: list[Any] = [None] * size
    distributed.all_gather_object(processes, os.getpid())
    note("will", digest(gathered(model)))
    publisher = Publisher(model, bucket)
    before = publisher.version
    note("done", before)
    step(2 * before + 1)
    assert publisher.version == before + 1
    try:
        # Rank 0 writes the manifest, whichever rank ends then.
        acts = 0 if "manifest" in at else victim
        step(2 * before + 2, processes[victim] if rank == acts else None)
    except PublishError as error:
        print(f"rank {rank} of {size}, {victim} dead {at}: {error}", flush=True)
        os._exit(REPORTED if f"rank {victim} " in str(error) else 1)
    publisher.close()


def begin(rank: int, size: int, where: str, victim: int, prefix: str) -> None:
    """Begin a run in ``where``; rank ``victim`` ends itself as it puts the first object whose key begins so.

    The others end with status REPORTED if a publish says so. Without a victim one version is published.
    """
    model: Any = fsdp(built("mixed"))
    bucket = Hooked(Path(where) / "run")
    if rank == victim:
        bucket.before = lambda key: os.kill(os.getpid(), signal.SIGKILL) if key.startswith(prefix) else None
    try:
        publisher = Publisher(model, bucket)
    except PublishError as error:
        print(f"rank {rank} of {size}, {victim} dead at {prefix}: {error}", flush=True)
        os._exit(REPORTED if f"rank {victim} " in str(error) else 1)
    move(model)
    publisher.publish(1)
    publisher.close()


TELLING = [(1, "after its upload"), (1, "before the manifest"), (0, "after the manifest")]
EVERY = [(rank, at) for at in POINTS for rank in (0, 1)]


def committed(victim: int, at: str) -> bool:
    """Whether the version is there although a rank is not any more."""
    return at == "after the manifest" or (at == "before the manifest" and victim != 0)


@pytest.mark.parametrize(
    ("deaths", "sizes"), [(TELLING, [2, 3]), pytest.param(EVERY, [2, 3, 2, 4], marks=pytest.mark.slow)]
)
def test_killed_ranks_leave_whole_versions_and_the_job_goes_on(
    deaths: list[tuple[int, str]], sizes: list[int], nursery: Nursery, tmp_path: Path
) -> None:
    head = -1
    for number, (victim, at) in enumerate(deaths):
        size = sizes[number % len(sizes)]
        statuses = nursery.statuses(size, live, where=str(tmp_path), victim=victim, at=at)
        expected = [-signal.SIGKILL if rank == victim else REPORTED for rank in range(size)]
        assert statuses == expected, f"{victim} of {size} killed {at}\n{nursery.logs()}"
        # Each world begins where the one before ended, publishes one version, and one more if that was committed.
        run = open_run(str(tmp_path / "run"))
        before, head = head, run.head().version
        assert head == (1 if before < 0 else before + 1) + committed(victim, at), at
        lines = (tmp_path / "log").read_text().split("\n")
        meant = [line.split()[1] for line in lines if line.startswith("will")]
        assert digest(dict(run.tensors(head))) == meant[-1 if committed(victim, at) else -2]
    # One rank alone goes on, too, and nothing of what was left behind is in its way.
    assert nursery.statuses(1, live, where=str(tmp_path), victim=0, at="after its upload") == [-signal.SIGKILL]
    assert open_run(str(tmp_path / "run")).verify().head == head + 1


def test_ranks_killed_before_the_first_version_are_in_nobodys_way(nursery: Nursery, tmp_path: Path) -> None:
    for prefix in ("tensors.json", "objects/", "versions/"):
        statuses = nursery.statuses(2, begin, where=str(tmp_path), victim=0, prefix=prefix)
        assert statuses == [-signal.SIGKILL, REPORTED], f"killed at {prefix}\n{nursery.logs()}"
        assert (tmp_path / "run" / "run.json").exists()
        assert not (tmp_path / "run" / "HEAD.json").exists()
    assert nursery.statuses(2, begin, where=str(tmp_path), victim=-1, prefix="") == [0, 0], nursery.logs()
    assert open_run(str(tmp_path / "run")).verify().head == 1
