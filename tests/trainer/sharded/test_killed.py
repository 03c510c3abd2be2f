"""Ranks killed at each step of a publish: there is the version before or the whole new one, and the job goes on."""

import signal
from pathlib import Path

import pytest

from tests.trainer.sharded.killed import POINTS, TOLD, begin, digest, live
from tests.trainer.sharded.nursery import Nursery
from vllm_delta_sync import open_run

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
        expected = [-signal.SIGKILL if rank == victim else TOLD for rank in range(size)]
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
        assert statuses == [-signal.SIGKILL, TOLD], f"killed at {prefix}\n{nursery.logs()}"
        assert (tmp_path / "run" / "run.json").exists()
        assert not (tmp_path / "run" / "HEAD.json").exists()
    assert nursery.statuses(2, begin, where=str(tmp_path), victim=-1, prefix="") == [0, 0], nursery.logs()
    assert open_run(str(tmp_path / "run")).verify().head == 1
