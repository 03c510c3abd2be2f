"""Checking and repairing runs from which retention has removed what it does not keep."""

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.collecting import MemoryBucket
from tests.support.damage import Damage, Whole, random_run
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.verify import verify_run
from vllm_delta_sync.upkeep.repair import repair
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys

POLICIES = st.builds(
    Policy, keep_last=st.integers(1, 5), keep_every=st.sampled_from([None, 3, 4, 8]), min_age=st.just(0.0)
)
DAMAGES = st.lists(st.builds(Damage, *[st.integers(0, 10**6)] * 3), min_size=1, max_size=3)


def collected(seed: int, policy: Policy) -> Whole:
    whole = random_run(seed)
    collect(whole.run, policy, now=whole.bucket.clock + 1e7)
    return whole


def kept_run() -> tuple[Whole, MemoryBucket]:
    """Versions 8 and 11 to 12 are kept, 8 by an anchor; with a mirror."""
    whole = Whole()
    whole.deltas(*["packed"] * 12)
    whole.folds()
    whole.beside(8)
    collect(whole.run, Policy(keep_last=2, keep_every=8, min_age=0.0), now=whole.bucket.clock + 1e7)
    assert whole.readable() == [8, 9, 10, 11, 12]
    return whole, whole.bucket.copy()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES)
def test_a_collection_leaves_a_run_that_verifies(seed: int, policy: Policy) -> None:
    whole = collected(seed, policy)
    report = verify_run(whole.run)
    assert report.replayed
    assert verify_run(whole.run, findings=True) == report
    assert repair(whole.run).repaired == []


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), policy=POLICIES, damages=DAMAGES)
def test_what_was_kept_comes_back_from_a_mirror(seed: int, policy: Policy, damages: list[Damage]) -> None:
    whole = collected(seed, policy)
    kept = whole.readable()
    mirror = whole.bucket.copy()
    for damage in damages:
        damage.do(whole)
    alone = whole.bucket.copy()
    readable = whole.readable()
    repair(whole.run)
    assert set(readable) <= set(whole.readable())
    whole.bucket.held = alone.held
    # One that can be read and says otherwise might be newer than the mirror's.
    doubtful = whole.run.retention() not in (None, Run(mirror).retention())
    assert doubtful or repair(whole.run, mirror=mirror).lost == []
    assert doubtful or set(kept) <= set(whole.readable())


def test_an_anchor_that_a_kept_version_needs_is_missed() -> None:
    whole, mirror = kept_run()
    whole.bucket.delete(side.anchor_key(8))
    assert [finding.key for finding in verify_run(whole.run, findings=True).findings] == [keys.version_key(8)]
    report = repair(whole.run)
    assert (report.repaired, report.unreadable) == ([], [8, 9, 10, 11, 12])
    assert repair(whole.run, mirror=mirror).repaired == [f"{side.anchor_key(8)}: from the mirror"]
    assert whole.readable() == [8, 9, 10, 11, 12]


def test_what_was_removed_is_not_lost_when_the_record_of_it_is() -> None:
    whole, mirror = kept_run()
    for damage in (lambda: whole.bucket.delete(side.RETENTION_KEY), lambda: whole.bucket.put(side.RETENTION_KEY, b"{")):
        damage()
        assert verify_run(whole.run, findings=True).unreadable
        report = repair(whole.run, mirror=mirror)
        assert (report.repaired, report.lost) == ([f"{side.RETENTION_KEY}: from the mirror"], [])
        assert whole.bucket.get(side.RETENTION_KEY) == mirror.get(side.RETENTION_KEY)
