"""Ranks killed at each step of a publish: there is the version before or the whole new one, and the job goes on."""

import signal
from pathlib import Path

from tests.trainer.sharded.killed import POINTS, TOLD, begin, digest, live
from tests.trainer.sharded.nursery import Nursery
from vllm_delta_sync import open_run

BY_ALL = POINTS[:4]
"""Steps that every rank takes."""
COMMITTED = ("before the outcome", "after the manifest")
"""Where the version is there although a rank is not any more."""


def test_killed_ranks_leave_whole_versions_and_the_job_goes_on(nursery: Nursery, tmp_path: Path) -> None:
    deaths = [(rank, at) for at in BY_ALL for rank in (0, 1)]
    # Rank 0 commits while the others wait for what comes of it.
    deaths += [(1, "before the outcome"), (0, "before the manifest"), (0, "after the manifest")]
    sizes = [2, 3, 2, 4]
    head = -1
    for number, (victim, at) in enumerate(deaths):
        size = sizes[number % len(sizes)]
        statuses = nursery.statuses(size, live, where=str(tmp_path), victim=victim, at=at)
        expected = [-signal.SIGKILL if rank == victim else TOLD for rank in range(size)]
        assert statuses == expected, f"{victim} of {size} killed {at}\n{nursery.logs()}"
        # Each world begins where the one before ended, publishes one version, and one more if that was committed.
        run = open_run(str(tmp_path / "run"))
        before, head = head, run.head().version
        assert head == (1 if before < 0 else before + 1) + (at in COMMITTED), at
        lines = (tmp_path / "log").read_text().split("\n")
        meant = [line.split()[1] for line in lines if line.startswith("will")]
        published = meant[-1] if at in COMMITTED else meant[-2]
        assert digest(dict(run.tensors(head))) == published
    # One rank alone goes on, too, and nothing of what was left behind is in its way.
    assert nursery.statuses(1, live, where=str(tmp_path), victim=0, at="after its upload") == [-signal.SIGKILL]
    run = open_run(str(tmp_path / "run"))
    assert run.head().version == head + 1
    assert run.verify().head == head + 1


def test_ranks_killed_before_the_first_version_are_in_nobodys_way(nursery: Nursery, tmp_path: Path) -> None:
    for prefix in ("tensors.json", "objects/", "versions/"):
        statuses = nursery.statuses(2, begin, where=str(tmp_path), victim=0, prefix=prefix)
        assert statuses == [-signal.SIGKILL, TOLD], f"killed at {prefix}\n{nursery.logs()}"
        assert (tmp_path / "run" / "run.json").exists()
        assert not (tmp_path / "run" / "HEAD.json").exists()
    assert nursery.statuses(2, begin, where=str(tmp_path), victim=-1, prefix="") == [0, 0], nursery.logs()
    assert open_run(str(tmp_path / "run")).verify().head == 1
