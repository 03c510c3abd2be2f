"""Collections keep what servers stand at while the head is quarantined, and their way on."""

from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.collecting import HOUR, LARGE, MemoryBucket
from tests.support.marked import MarkedGrown
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.plan import Planner
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.upkeep.retention import Policy, collect

quiet = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
TIGHT = Policy(keep_last=1, min_age=0, keep_tagged=False)


def grown(tmp_path: Path, marks: str, whole: bool = True) -> MarkedGrown:
    found = MarkedGrown(MemoryBucket(), tmp_path, 1, whole, LARGE)
    found.play(marks)
    found.memory.clock += HOUR
    return found


def leads_on(reader: Run, first: int, last: int) -> None:
    """There is a way whose objects are all there, as a receiver looks for one."""
    gone: set[str] = set()
    while True:
        steps = Planner(reader, gone).path(first, last)
        before = len(gone)
        for step in steps:
            try:
                reader.changes(step.document)
            except NotFoundError:
                gone.add(step.key)
        if len(gone) == before:
            return


def test_newest_sound_version_is_kept_and_can_go_on(tmp_path: Path) -> None:
    run = grown(tmp_path, "......!!!!!!")
    report = collect(run.run_, TIGHT)
    assert report.kept == {6: ["sound"], 12: ["head"]}
    assert run.equals(6)
    assert run.equals(12)
    leads_on(Run(run.memory), 6, 12)
    run.play(".")
    run.memory.clock += HOUR
    report = collect(run.run_, TIGHT)
    assert report.kept == {13: ["head"]}
    assert run.equals(13)


def test_run_without_a_sound_version(tmp_path: Path) -> None:
    bucket = MemoryBucket()
    MarkedGrown.bad = True
    try:
        run = MarkedGrown(bucket, tmp_path, 1)
    finally:
        MarkedGrown.bad = False
    run.play("!!")
    bucket.clock += HOUR
    assert collect(run.run_, TIGHT).kept == {2: ["head"]}
    assert run.equals(2)


def test_anchor_that_leads_to_the_sound_version_is_kept(tmp_path: Path) -> None:
    run = grown(tmp_path, "....!!!", whole=False)
    for version in (2, 6):
        run.beside(version, tmp_path)
    run.memory.clock += HOUR
    report = collect(run.run_, TIGHT)
    assert report.anchors == []
    assert run.run_.anchors() == [2, 6]


@settings(quiet, max_examples=40)
@given(
    marks=st.text("..!", min_size=1, max_size=16),
    folds=st.booleans(),
    anchors=st.sets(st.integers(1, 16), max_size=3),
    keep_last=st.integers(1, 4),
    more=st.text("..!", max_size=4),
)
def test_sound_version_stays_readable_whatever_is_collected(
    tmp_path: Path, marks: str, folds: bool, anchors: set[int], keep_last: int, more: str
) -> None:
    run = grown(tmp_path, marks)
    if folds:
        run.fold_all()
    for version in anchors:
        if version <= run.newest:
            run.beside(version, tmp_path)
    policy = Policy(keep_last=keep_last, min_age=0, keep_tagged=False)
    for play in ("", more):
        run.play(play)
        run.memory.clock += HOUR
        collect(run.run_, policy)
        head, sound = run.manifests[-1], run.manifests[-1].sound
        assert sound is not None
        assert run.equals(head.version)
        assert run.equals(sound)
        if sound != head.version:
            leads_on(Run(run.memory), sound, head.version)
