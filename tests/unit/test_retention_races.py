"""Collections beside others: tags, publishers, other collectors, each at every moment of a collection."""

from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.collecting import HOUR, LARGE, POLICIES, STEPS, Grown, MemoryBucket, long_run, objects, play
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.upkeep.tagging import set_tag
from vllm_delta_sync.wire import documents as side

FEW = Policy(keep_last=3)
Meanwhile = Callable[[Grown], None]


def interleaved(folder: Path, make: Callable[[Path], Grown], policy: Policy, meanwhile: Meanwhile) -> list[Grown]:
    """Collect once for each change that a collection makes, and let something happen right before that change."""
    done: list[Grown] = []
    at = 0
    while True:
        grown = make(folder)
        count = 0

        def hook(action: str, key: str, grown: Grown = grown, at: int = at) -> None:
            nonlocal count
            count += 1
            if count == at + 1:
                grown.memory.before = lambda action, key: None
                meanwhile(grown)
                grown.memory.before = lambda action, key: None

        grown.memory.before = hook
        collect(grown.run_, policy)
        if count <= at:
            return done
        done.append(grown)
        at += 1


def test_a_tag_set_meanwhile_holds_or_is_refused(tmp_path: Path) -> None:
    outcomes: list[bool] = []

    def tag(grown: Grown) -> None:
        try:
            set_tag(grown.run_, "late", 18)
            outcomes.append(True)
        except NotFoundError:
            outcomes.append(False)

    runs = interleaved(tmp_path, lambda folder: long_run(folder, 24), FEW, tag)
    assert len(runs) == len(outcomes) > 20
    for grown, held in zip(runs, outcomes, strict=True):
        assert (side.tag_key("late") in grown.memory.held) == held
        if held:
            assert grown.equals(18)
    assert {True, False} == set(outcomes)


def test_a_tag_that_was_checked_before_the_collection_holds(tmp_path: Path) -> None:
    grown = long_run(tmp_path)

    def hook(action: str, key: str) -> None:
        # The collection has looked at the tags once, and asked for the time.
        grown.memory.after = lambda action, key: None
        grown.tag("late", 21)

    grown.memory.after = hook
    report = collect(grown.run_, FEW)
    assert report.kept[21] == ["tag late"]
    assert grown.equals(21)
    record = grown.run_.retention()
    assert record is not None
    assert not record.is_gone(21)
    set_tag(grown.run_, "again", 21)


def grow_once(grown: Grown) -> None:
    grown.grow()


def test_publishing_meanwhile(tmp_path: Path) -> None:
    for grown in interleaved(tmp_path, lambda folder: long_run(folder, 24), FEW, grow_once):
        assert grown.equals(25)
        assert grown.equals(24)
        assert grown.equals(22)


def test_two_collectors_at_once(tmp_path: Path) -> None:
    """The second knows of an anchor that makes another way to the head cheaper, and the first removes that way."""
    policy = Policy(keep_last=1)

    def meanwhile(grown: Grown) -> None:
        grown.beside(12, grown.folder)
        collect(grown.run_, policy)

    runs = interleaved(tmp_path, lambda folder: long_run(folder, 16, LARGE), policy, meanwhile)
    assert len(runs) > 10
    for grown in runs:
        assert grown.equals(16)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(STEPS, min_size=3, max_size=12),
    policies=st.tuples(POLICIES, POLICIES),
    at=st.integers(0, 12),
    meanwhile=st.lists(STEPS, max_size=3),
)
def test_collectors_that_do_not_know_of_each_other(
    tmp_path: Path,
    seed: int,
    steps: list[tuple[str, int]],
    policies: tuple[Policy, Policy],
    at: int,
    meanwhile: list[tuple[str, int]],
) -> None:
    """A second collection, and what happens before it, at a random moment of a first."""
    grown = Grown(MemoryBucket(), tmp_path, seed)
    play(grown, steps)
    grown.memory.clock += 2 * HOUR
    kept: list[set[int]] = []
    left = at

    def hook(action: str, key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            grown.memory.before = lambda action, key: None
            play(grown, [step for step in meanwhile if step[0] not in ("age", "tag", "milestone", "branch", "rebase")])
            kept.append(set(collect(grown.run_, policies[1]).kept))

    grown.memory.before = hook
    kept.append(set(collect(grown.run_, policies[0]).kept))
    for version in set.intersection(*kept):
        assert grown.equals(version), version


def test_an_object_that_is_put_again_meanwhile_stays(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    orphan = grown._put(b"left by a writer that crashed")
    grown.memory.clock += 2 * HOUR

    def hook(action: str, key: str) -> None:
        if action == "delete":
            grown.memory.before = lambda action, key: None
            grown._put(b"left by a writer that crashed")

    grown.memory.before = hook
    report = collect(grown.run_, FEW)
    assert orphan.key in objects(grown.memory)
    assert orphan.key not in report.objects
    assert report.objects
    grown.memory.clock += 2 * HOUR
    assert orphan.key in collect(grown.run_, FEW).objects
