"""Garbage collection beside others: tags, publishers, other collections, each at every moment of one."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.collecting import HOUR, LARGE, POLICIES, STEPS, Crash, Grown, MemoryBucket, long_run, objects, play
from vllm_delta_sync.bucket import base as bucket_base
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ConflictError, NotFoundError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.documents import Collection
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX
from vllm_delta_sync.maintenance.gc import collect as collecting
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.gc.lock import CLAIM_SECONDS, KEPT
from vllm_delta_sync.maintenance.tags import set_tag

FEW = RetentionPolicy(keep_last=3)
Meanwhile = Callable[[Grown], object]


@pytest.fixture(autouse=True)
def _one_removal_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens meanwhile then happens at a known moment: the collection itself does nothing until it is over."""
    monkeypatch.setattr(collecting, "AT_ONCE", 1)


def interleaved(
    folder: Path, make: Callable[[Path], Grown], policy: RetentionPolicy, meanwhile: Meanwhile
) -> list[Grown]:
    """Collect once for each change that a collection makes, and let something happen right before that change.

    Where another collection took over, or started at the same time, the first one is refused.
    """
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
        with suppress(ConflictError):
            collect(grown.run_, policy, monotonic=grown.seconds)
        if count <= at:
            return done
        done.append(grown)
        at += 1


@pytest.mark.parametrize("second", [False, True], ids=["alone", "beside another"])
def test_a_tag_set_meanwhile_holds_or_is_refused(tmp_path: Path, second: bool) -> None:
    """Also where a second collection, which keeps more, begins right before it."""
    outcomes: list[bool] = []

    def tag(grown: Grown) -> None:
        if second:
            with suppress(ConflictError):
                collect(grown.run_, RetentionPolicy(keep_last=3, keep_every=6))
        try:
            set_tag(grown.run_, "late", 18)
            outcomes.append(True)
        except NotFoundError:
            outcomes.append(False)

    runs = interleaved(tmp_path, lambda folder: long_run(folder, 24), FEW, tag)
    assert len(runs) == len(outcomes) > 20
    for grown, held in zip(runs, outcomes, strict=True):
        assert (side.tag_key("late") in grown.memory.held) == held
        assert not held or grown.equals(18)
    assert {True, False} == set(outcomes)


def test_a_tag_that_was_checked_before_the_collection_holds(tmp_path: Path) -> None:
    grown = long_run(tmp_path)

    def hook(action: str, key: str) -> None:
        # The collection has looked at the tags once.
        if key == side.RETENTION_KEY:
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


def test_publishing_meanwhile(tmp_path: Path) -> None:
    for grown in interleaved(tmp_path, lambda folder: long_run(folder, 24), FEW, Grown.grow):
        assert all(grown.equals(version) for version in (22, 24, 25))


def test_of_two_collections_one_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    def meanwhile(grown: Grown) -> None:
        before = dict(grown.memory.held)
        try:
            collect(grown.run_, RetentionPolicy(keep_last=1))
            refused.append("")
        except ConflictError as error:
            refused.append(str(error))
            assert {key for key in before if before[key] != grown.memory.held[key]} <= {side.COLLECTIONS_CLOCK}

    runs = interleaved(tmp_path, lambda folder: long_run(folder, 16, LARGE), FEW, meanwhile)
    assert len(runs) == len(refused) > 10
    for grown, error in zip(runs[1:-1], refused[1:-1], strict=True):
        assert side.collection_key(1) in error
        assert all(grown.equals(version) for version in (14, 15, 16))
    # Before the claim of the first one, and for the end of it.
    assert refused[0] == ""
    assert runs[0].equals(16)


def test_a_collection_that_stood_still_for_too_long_is_taken_over_from_and_stops(tmp_path: Path) -> None:
    """The second one knows of an anchor that makes another way to the head cheaper, and the first removes that way."""
    stopped: list[int] = []

    def meanwhile(grown: Grown) -> None:
        grown.beside(12, grown.folder)
        grown.memory.clock += CLAIM_SECONDS + 2
        removed = collect(grown.run_, RetentionPolicy(keep_last=1)).objects
        held = objects(grown.memory)

        def hook(action: str, key: str) -> None:
            # Nothing more, but for a key that is no object.
            assert action == "put" or key not in held, (len(stopped), key)

        grown.memory.after = hook
        stopped.append(len(removed))

    runs = interleaved(tmp_path, lambda folder: long_run(folder, 16, LARGE), FEW, meanwhile)
    assert len(runs) == len(stopped) > 10
    for grown in runs:
        grown.memory.after = lambda action, key: None
        assert grown.equals(16)
        # And the next one finds the run free.
        assert collect(grown.run_, RetentionPolicy(keep_last=1)).head == 16


def test_a_collection_counts_the_time_in_which_its_machine_sleeps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a laptop that is closed: Linux's monotonic clock stands still meanwhile."""
    grown, asleep = long_run(tmp_path, 16), 0.0
    uptime = time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: uptime(clock) + asleep * (clock == time.CLOCK_BOOTTIME))

    def sleep(action: str, key: str) -> None:
        nonlocal asleep
        if action == "delete":
            grown.memory.after = lambda action, key: None
            asleep = CLAIM_SECONDS + 2.0
            grown.memory.clock += asleep
            collect(grown.run_, RetentionPolicy(keep_last=8))

    grown.memory.after = sleep
    with pytest.raises(ConflictError, match="stood still"):
        collect(grown.run_, FEW)
    assert asleep
    assert grown.equals(16)


def test_a_collection_that_was_killed_delays_the_next_one_for_as_long_as_its_claim_holds(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 16)

    def crash(action: str, key: str) -> None:
        if action == "delete" or key.endswith(".end"):
            raise Crash

    grown.memory.before = crash
    with pytest.raises(Crash):
        collect(grown.run_, FEW)
    grown.memory.before = lambda action, key: None
    with pytest.raises(ConflictError, match=side.collection_key(1)):
        collect(grown.run_, FEW)
    grown.memory.clock += CLAIM_SECONDS
    assert collect(grown.run_, FEW).objects
    assert grown.equals(14)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_a_collection_that_is_interrupted_at_any_change_delays_no_other(tmp_path: Path, moment: str) -> None:
    """Also at its claim and at the renewal of that, but not while it ends the claim."""
    at = 0
    while True:
        grown = long_run(tmp_path, 16)
        memory, count = grown.memory, 0

        def interrupt(action: str, key: str, memory: MemoryBucket = memory, at: int = at) -> None:
            nonlocal count
            if key == side.RETENTION_KEY:
                memory.clock += CLAIM_SECONDS / 2
            count += 1
            if count == at + 1 and not key.endswith(".end"):
                memory.before = memory.after = lambda action, key: None
                raise KeyboardInterrupt

        setattr(memory, moment, interrupt)
        with suppress(KeyboardInterrupt):
            collect(grown.run_, FEW, monotonic=grown.seconds)
        setattr(memory, moment, lambda action, key: None)
        assert collect(grown.run_, FEW).head == 16, at
        assert grown.equals(14)
        if count <= at:
            break
        at += 1
    assert at > 10


def test_removals_at_once_keep_the_order_and_share_one_claim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collecting, "AT_ONCE", 8)
    grown = long_run(tmp_path, 24)
    met = threading.Barrier(2)
    removed: list[bool] = []

    def before(action: str, key: str) -> None:
        if key.startswith(side.COLLECTIONS_PREFIX):
            # Time for another removal to find the claim half over too.
            time.sleep(0.05)
        elif action == "delete":
            # Two at least are under way, and the claim is half over for both.
            if len(started) < 2:
                started.append(key)
                met.wait(60)
                grown.memory.clock += CLAIM_SECONDS / 2
            # Time for other removals to overtake this one.
            time.sleep(0 if key.startswith(OBJECTS_PREFIX) else 0.05)

    def after(action: str, key: str) -> None:
        if action == "delete" and not key.startswith(side.COLLECTIONS_PREFIX):
            removed.append(key.startswith(OBJECTS_PREFIX))

    started: list[str] = []
    grown.memory.before, grown.memory.after = before, after
    report = collect(grown.run_, FEW, monotonic=grown.seconds)
    assert removed == sorted(removed)
    assert removed.count(False) == len(report.merged_deltas) > 2
    assert removed.count(True) == len(report.objects) > 2
    assert all(grown.equals(version) for version in (22, 23, 24))
    assert collect(grown.run_, FEW).head == 24


def test_removals_are_prepared_some_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of 130,000 objects, prepared together, took 220 MB."""
    sizes: list[int] = []

    def prepare(call: Callable[[Any], bool], items: Any, workers: int) -> Iterator[bool]:
        sizes.append(len(items))
        return in_parallel(call, items, workers=workers)

    monkeypatch.setattr(collecting, "BATCH", 4)
    monkeypatch.setattr(collecting, "in_parallel", prepare)
    report = collect(long_run(tmp_path, 24).run_, FEW)
    assert max(sizes) == 4
    assert sum(sizes) == len(report.objects) + len(report.merged_deltas)


def test_of_removals_at_once_no_other_begins_after_another_collection_took_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collecting, "AT_ONCE", 4)
    grown = long_run(tmp_path, 24)
    deletes: list[str] = []

    def hook(action: str, key: str) -> None:
        if action != "delete" or key.startswith(side.COLLECTIONS_PREFIX):
            return
        deletes.append(key)
        if len(deletes) == 5:
            grown.memory.clock += CLAIM_SECONDS + 2
            grown.memory.put(side.collection_key(2), b"{}")

    grown.memory.before = hook
    with pytest.raises(ConflictError, match="another collection of memory has started"):
        collect(grown.run_, FEW, monotonic=grown.seconds)
    assert 5 <= len(deletes) <= 5 + 3
    assert grown.equals(24)


@pytest.mark.parametrize("data", [b"{", b"x" * 200_000])
def test_a_claim_that_cannot_be_read_holds_as_long_as_any(tmp_path: Path, data: bytes) -> None:
    grown = long_run(tmp_path, 8)
    grown.bucket.put(side.collection_key(7), data)
    with pytest.raises(ConflictError, match="is running"):
        collect(grown.run_, FEW)
    grown.memory.clock += CLAIM_SECONDS + 2
    assert collect(grown.run_, FEW).objects
    assert side.collection_end_key(8) in grown.memory.held


def test_a_long_collection_renews_its_claim_and_old_claims_are_removed(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 24)
    refused: list[str] = []

    def hook(action: str, key: str) -> None:
        # Each removal takes a quarter of what the claim holds.
        if action == "delete" and not key.startswith(side.COLLECTIONS_PREFIX):
            grown.memory.clock += CLAIM_SECONDS / 4
            try:
                collect(grown.run_, FEW)
            except ConflictError as error:
                refused.append(str(error))

    grown.memory.before = hook
    report = collect(grown.run_, FEW, monotonic=grown.seconds)
    assert len(report.objects) + len(report.merged_deltas) == len(refused) > 10
    claims = [key for key in grown.memory.held if side.collection_of_key(key) is not None]
    newest = max(key for key in claims if key.endswith(".json"))
    assert int(newest[-15:-5]) >= len(refused) // 3
    assert len(claims) <= KEPT + 1
    assert newest.replace(".json", ".end") in claims


def test_of_two_claims_without_create_if_absent_the_later_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.0)
    grown = long_run(tmp_path, 16)
    grown.memory.supports_conditional_put = False
    held = dict(grown.memory.held)

    def late(action: str, key: str) -> None:
        if key == side.collection_key(1):
            grown.memory.after = lambda action, key: None
            ours = Collection.from_bytes(grown.memory.get(key))
            theirs = Collection.model_validate({**ours.model_dump(), "holder": "f" * 32})
            grown.memory.put(key, theirs.to_bytes())

    grown.memory.after = late
    with pytest.raises(ConflictError, match="started at the same time"):
        collect(grown.run_, FEW)
    assert grown.memory.held.keys() - held.keys() == {side.collection_key(1)}


def test_a_collection_whose_record_is_replaced_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a store without create-if-absent, where two may both have a claim."""
    monkeypatch.setattr(bucket_base, "SETTLING_SECONDS", 0.0)
    grown = long_run(tmp_path, 24)
    grown.memory.supports_conditional_put = False
    other = RetentionPolicy(keep_last=3, keep_every=6)

    def second(action: str, key: str) -> None:
        if action == "delete" and key.startswith("objects/"):
            grown.memory.after = lambda action, key: None
            plain = long_run(grown.folder, 24)
            collect(plain.run_, other)
            grown.memory.put(side.RETENTION_KEY, plain.memory.get(side.RETENTION_KEY))

    grown.memory.after = second
    before = objects(grown.memory)
    with pytest.raises(ConflictError, match=r"retention\.json of memory was replaced"):
        collect(grown.run_, FEW)
    assert len(objects(grown.memory)) == len(before) - 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(STEPS, min_size=3, max_size=12),
    policies=st.tuples(POLICIES, POLICIES),
    at=st.integers(0, 12),
    meanwhile=st.lists(STEPS, max_size=3),
    stalled=st.booleans(),
)
@example(
    seed=2,
    steps=[("full", 0), ("whole", 0), ("beside", 0)],
    policies=(RetentionPolicy(keep_last=1, min_age=0.0), RetentionPolicy(keep_last=2, min_age=0.0)),
    at=3,
    meanwhile=[],
    stalled=True,
)
def test_collectors_that_do_not_know_of_each_other(
    tmp_path: Path,
    seed: int,
    steps: list[tuple[str, int]],
    policies: tuple[RetentionPolicy, RetentionPolicy],
    at: int,
    meanwhile: list[tuple[str, int]],
    stalled: bool,
) -> None:
    """A second collection, and what happens before it, at a random moment of a first.

    A removal that is under way cannot be called back, so the first stands still only after a change.
    """
    grown = Grown(MemoryBucket(), tmp_path, seed)
    play(grown, steps)
    grown.memory.clock += 2 * HOUR
    kept: list[set[int]] = []
    left = at

    def hook(action: str, key: str) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            grown.memory.before = grown.memory.after = lambda action, key: None
            play(grown, [step for step in meanwhile if step[0] not in ("age", "tag", "milestone", "branch", "rebase")])
            grown.memory.clock += stalled * (CLAIM_SECONDS + 2)
            with suppress(ConflictError):
                kept.append(set(collect(grown.run_, policies[1]).kept))

    if stalled:
        grown.memory.after = hook
    else:
        grown.memory.before = hook
    with suppress(ConflictError):
        kept.append(set(collect(grown.run_, policies[0], monotonic=grown.seconds).kept))
    assert kept
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
