"""Repairing a run: what can be proven is brought back or rebuilt, what cannot is listed, what is good stays."""

from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.collecting import MemoryBucket
from tests.support.damage import Damage, Whole, random_run
from tests.support.seeds import few_by_default
from tests.support.written import SMALL, Written, save_base
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import BaseUnavailableError, DeltaSyncError, NotFoundError, UsageError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.manifest import Head
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.repair.repair import RepairReport, repair
from vllm_delta_sync.verify.verify import verify_run

SEEDS = st.integers(0, 2**32)
DAMAGES = st.lists(st.builds(Damage, *[st.integers(0, 10**6)] * 3), min_size=1, max_size=4)


@pytest.fixture
def whole() -> Whole:
    """Eight versions that can all be taken back, and merged deltas over them."""
    made = Whole()
    made.deltas(*["plain"] * 8)
    made.merged_deltas()
    made.tag("best", 5)
    return made


def contents(whole: Whole) -> dict[str, bytes]:
    return {key: data for key, (data, _) in whole.bucket.held.items()}


def assert_whole(whole: Whole) -> None:
    report = verify_run(whole.run)
    assert (report.replayed, report.unreadable) == (True, [])
    assert whole.readable() == list(range(len(whole.writer.manifests)))


def test_nothing_is_done_to_a_whole_run(whole: Whole) -> None:
    before = contents(whole)
    assert repair(whole.run) == RepairReport()
    assert repair(whole.run, mirror=whole.bucket.copy()) == RepairReport()
    assert contents(whole) == before


def test_head_is_written_again(whole: Whole) -> None:
    right = whole.bucket.get(keys.HEAD_KEY)
    for wrong in (b"{", None, b"x" * 10_000):
        if wrong is None:
            whole.bucket.delete(keys.HEAD_KEY)
        else:
            whole.bucket.put(keys.HEAD_KEY, wrong)
        report = repair(whole.run)
        assert report.repaired == ["HEAD.json: points at version 8, the newest good one"]
        assert (report.lost, whole.bucket.get(keys.HEAD_KEY)) == ([], right)
    whole.writer.head(3)
    assert repair(whole.run).notes == []
    assert whole.bucket.get(keys.HEAD_KEY) == right


def test_head_that_names_a_lost_version_is_left_alone(whole: Whole) -> None:
    whole.bucket.delete(keys.version_key(8))
    whole.bucket.delete(side.merged_delta_key(4, 8))
    before = contents(whole)
    report = repair(whole.run)
    assert (report.repaired, report.unreadable) == ([], [8])
    assert ["a mirror" in line for line in report.lost if "unreadable" in line] == [True]
    assert contents(whole) == before


@pytest.mark.parametrize("lost", [0, 3, 9])
def test_a_version_that_other_documents_lead_to_needs_its_own_objects_no_more(lost: int, whole: Whole) -> None:
    """By a merged delta, by reverting the one after it, or by an anchor."""
    whole.delta(base=3)
    whole.deltas("plain", "plain")
    whole.beside(10)
    whole.flip(whole.object_of(lost))
    before = contents(whole)
    report = repair(whole.run)
    gone = f"{side.RETENTION_KEY}: says that the objects of versions {lost} are gone; no kept version needs them"
    assert (report.repaired, report.lost, report.unreadable) == ([gone], [], [])
    assert {key for key, data in contents(whole).items() if before.get(key) != data} - {side.RETENTION_KEY} == {
        key for key in whole.bucket.held if key.startswith("collections/")
    }
    assert_whole(whole)
    assert repair(whole.run).repaired == []


def test_a_repair_keeps_what_a_collection_recorded(whole: Whole) -> None:
    whole.retire((2, 2))
    before = whole.run.retention()
    whole.bucket.delete(whole.object_of(8))
    assert [line.split(":")[0] for line in repair(whole.run).repaired] == [side.RETENTION_KEY]
    after = whole.run.retention()
    assert before is not None
    assert after is not None
    assert (after.gone, after.head, after.kept) == ([[2, 2], [8, 8]], before.head, before.kept)
    assert_whole(whole)


@pytest.mark.parametrize("what", ["document", "object", "both"])
def test_damaged_anchors_and_folded_ranges_are_made_again(what: str, whole: Whole) -> None:
    whole.beside(5)
    for key in (side.anchor_key(5), side.merged_delta_key(0, 4)):
        if what != "document":
            run = whole.run
            listed = (
                run.anchor(5)
                if key == side.anchor_key(5)
                else run.merged_delta(*(side.merged_delta_of_key(key) or (0, 0)))
            )
            whole.flip(listed.objects[0].key)
        if what != "object":
            whole.bucket.put(key, b"{")
    report = repair(whole.run)
    assert sorted(report.repaired) == [
        f"{side.anchor_key(5)}: rebuilt from the history",
        f"{side.merged_delta_key(0, 4)}: rebuilt from the history",
    ]
    assert report.lost == []
    assert (verify_run(whole.run).anchors, verify_run(whole.run).merged_deltas) == (1, 2)
    assert_whole(whole)


def test_what_is_lost_is_listed_with_its_tags(whole: Whole) -> None:
    for key in [key for key in whole.bucket.held if key.startswith("merged/")]:
        whole.bucket.delete(key)
    whole.bucket.delete(whole.object_of(4))
    report = repair(whole.run)
    assert report.unreadable == [4, 5, 6, 7, 8]
    assert ["unreadable versions: 4 to 8; a mirror" in line for line in report.lost] == [False, True, False]
    assert report.lost[2] == "tag 'best' is on version 5, which is unreadable"


def test_everything_comes_back_from_a_mirror(whole: Whole) -> None:
    whole.beside(3)
    whole.claim()
    whole.deltas("raw", "full")
    mirror = whole.bucket.copy()
    right = contents(whole)
    for key in right:
        if key not in (keys.HEAD_KEY, keys.version_key(5)):
            whole.bucket.delete(key)
    report = repair(whole.bucket, mirror=mirror)
    assert report.lost == []
    assert all(line.endswith(": from the mirror") for line in report.repaired)
    # Nothing that is left needs the tag: it may have been removed on purpose.
    assert {key.split("/")[0] for key in right if key not in whole.bucket.held} == {"tags"}
    assert_whole(whole)


@pytest.mark.parametrize("head", [None, b"{"])
def test_all_manifests_come_back_from_a_mirror_without_a_head(head: bytes | None, whole: Whole) -> None:
    mirror = whole.bucket.copy()
    right = contents(whole)
    for key in right:
        if key == keys.HEAD_KEY or key.startswith(keys.VERSIONS_PREFIX):
            whole.bucket.delete(key)
    if head is not None:
        whole.bucket.put(keys.HEAD_KEY, head)
    with pytest.raises(NotFoundError, match="has no version"):
        repair(whole.run)
    assert repair(whole.run, mirror=mirror).lost == []
    assert contents(whole) == right


def test_a_mirror_is_believed_only_where_digests_prove_it(whole: Whole) -> None:
    mirror = Whole(seed=77)  # says that it is the same run
    mirror.deltas(*["plain"] * 8)
    mirror.merged_deltas()
    mirror.beside(5)
    mirror.tag("best", 5)
    whole.beside(5)
    manifests = {keys.version_key(3), keys.version_key(8)}
    before = contents(whole)
    for key in (*manifests, side.merged_delta_key(0, 4), side.anchor_key(5), side.tag_key("best"), whole.object_of(2)):
        whole.bucket.put(key, b"{")
        report = repair(whole.run, mirror=mirror.bucket)
        assert not any("from the mirror" in line for line in report.repaired)
        if key in manifests or key.startswith("tags/"):
            assert whole.bucket.get(key) == b"{"
            assert report.lost
        for name, data in before.items():
            whole.bucket.put(name, data)


def test_run_json_and_the_table_come_back(whole: Whole) -> None:
    mirror = whole.bucket.copy()
    stranger = Whole(seed=8)
    for keys_lost in (["run.json"], ["tensors.json"], ["run.json", "tensors.json"]):
        right = {key: whole.bucket.get(key) for key in keys_lost}
        for key in keys_lost:
            whole.bucket.put(key, b"{")
        with pytest.raises(DeltaSyncError):
            repair(whole.bucket)
        report = repair(whole.bucket, mirror=mirror)
        assert report.repaired == [f"{key}: from the mirror" for key in keys_lost]
        assert {key: whole.bucket.get(key) for key in keys_lost} == right
    whole.bucket.delete("tensors.json")
    with pytest.raises(NotFoundError, match=r"'tensors.json'.* restore it from a copy: delta-sync repair --mirror"):
        repair(whole.bucket)
    whole.bucket.delete("run.json")
    other = MemoryBucket()
    other.held = {**stranger.bucket.held}
    other.put("run.json", stranger.bucket.get("run.json").replace(b"5eed5eed", b"0eed5eed"))
    with pytest.raises(NotFoundError):
        repair(whole.bucket, mirror=other)


def test_a_mirror_that_is_none_is_refused_although_nothing_is_damaged(whole: Whole) -> None:
    with pytest.raises(NotFoundError, match="holds nothing; give the URL of a copy"):
        repair(whole.run, mirror=MemoryBucket())
    other = whole.bucket.copy()
    other.put("run.json", whole.run.info.to_bytes().replace(b"5eed5eed", b"0eed5eed"))
    with pytest.raises(UsageError, match=r"holds run 0eed5eed.*, not run 5eed5eed"):
        repair(whole.run, mirror=other)
    damaged = whole.bucket.copy()
    damaged.delete("run.json")
    assert repair(whole.run, mirror=damaged) == RepairReport()


def test_the_newest_manifest_comes_from_a_mirror_before_any_head_names_it(whole: Whole) -> None:
    """Its publisher was killed before it wrote HEAD.json."""
    before = whole.writer.manifests[7]
    for key in [
        item.key for item in whole.bucket.list("") if "8" in item.key and item.key.startswith(("merged/", "tags/"))
    ]:
        whole.bucket.delete(key)
    whole.bucket.put(keys.HEAD_KEY, Head(run=before.run, version=7, manifest=before.digest).to_bytes())
    mirror = whole.bucket.copy()
    right = contents(whole)
    whole.bucket.put(keys.version_key(8), b"{")
    assert repair(whole.run, mirror=mirror).lost == []
    assert whole.run.head().version == 8
    assert {**contents(whole), keys.HEAD_KEY: right[keys.HEAD_KEY]} == right


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_publisher_that_goes_on_meanwhile_keeps_its_head(whole: Whole, dry_run: bool) -> None:
    """The check began after it had put the manifest of version 8, and before HEAD.json."""
    before = whole.writer.manifests[7]
    whole.bucket.put(keys.HEAD_KEY, Head(run=before.run, version=7, manifest=before.digest).to_bytes())

    def publish(_: object) -> None:
        if whole.head == 8:
            whole.delta()

    assert repair(whole.run, dry_run=dry_run, progress=publish).repaired == []
    assert whole.run.read_head().version == 9


def test_a_mirror_decides_between_head_and_manifest(whole: Whole) -> None:
    whole.bucket.delete(side.merged_delta_key(4, 8))
    mirror = whole.bucket.copy()
    right = contents(whole)
    newest = whole.writer.manifests[8]
    head = Head(run=newest.run, version=8, manifest="0" * 64)
    whole.bucket.put(keys.HEAD_KEY, head.to_bytes())
    assert repair(whole.run).unreadable == [8]
    assert repair(whole.run, mirror=mirror).repaired == ["HEAD.json: from the mirror"]
    assert contents(whole) == right
    # Proof and manifest damaged together: the newest follows from the one before it, and the mirror's head names it.
    whole.bucket.put(keys.HEAD_KEY, head.to_bytes())
    for damaged in (b"{", right[keys.version_key(8)].replace(b'"step":80', b'"step":81')):
        whole.bucket.put(keys.version_key(8), damaged)
        assert repair(whole.run, mirror=mirror).lost == []
        assert contents(whole) == right
        whole.bucket.put(keys.HEAD_KEY, b"{")


def test_a_dry_run_writes_nothing_and_says_the_same(whole: Whole) -> None:
    whole.beside(6)
    mirror = whole.bucket.copy()
    whole.flip(whole.object_of(2))
    whole.bucket.delete(keys.version_key(4))
    whole.bucket.put(keys.HEAD_KEY, b"{")
    before = contents(whole)
    dry = repair(whole.run, mirror=mirror, dry_run=True)
    assert contents(whole) == before
    assert repair(whole.run, mirror=mirror) == dry
    assert dry.lost == []
    assert_whole(whole)


@pytest.mark.parametrize("stop", [0, 1, 2, 4, 7, 11])
def test_a_repair_that_is_ended_in_the_middle_is_harmless(stop: int) -> None:
    class Killed(BaseException):
        pass

    def build() -> Whole:
        whole = random_run(5016)
        whole.flip(whole.object_of(2))
        for key in list(whole.bucket.held):
            if key.startswith("merged/"):
                whole.bucket.put(key, b"{")
        whole.bucket.put(keys.HEAD_KEY, b"{")
        return whole

    whole, other = build(), build()
    readable = whole.readable()
    left = [stop]

    def kill(action: str, key: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise Killed

    whole.bucket.before = kill
    try:
        repair(whole.run)
    except Killed:
        pass
    whole.bucket.before = lambda action, key: None
    assert set(readable) <= set(whole.readable())
    assert repair(whole.run).unreadable == repair(other.run).unreadable
    assert whole.readable() == other.readable()


@few_by_default(10)
@given(seed=SEEDS, damages=DAMAGES)
def test_any_damage_is_mended_from_a_mirror(seed: int, damages: list[Damage]) -> None:
    whole = random_run(seed)
    mirror = whole.bucket.copy()
    for damage in damages:
        damage.do(whole)
    report = repair(whole.run, mirror=mirror)
    assert report.lost == []
    assert not verify_run(whole.run).findings
    assert whole.readable() == list(range(len(whole.writer.manifests)))


@few_by_default(10)
@given(seed=SEEDS, damages=DAMAGES)
# The newest manifest and HEAD.json are lost.
@example(seed=17, damages=[Damage(125000, 0, 0), Damage(0, 0, 0)])
# Nothing that is left contradicts the manifest before a lost one.
@example(seed=4572, damages=[Damage(11, 1, 106), Damage(12, 0, 0)])
# Only the manifest of a version that later ones do not build on contradicts that of their root.
@example(seed=216, damages=[Damage(1624, 1, 3)])
def test_without_a_mirror_what_is_said_to_be_lost_is_what_cannot_be_read(seed: int, damages: list[Damage]) -> None:
    whole = random_run(seed)
    for damage in damages:
        damage.do(whole)
    readable = set(whole.readable())
    report = repair(whole.run)
    assert readable <= set(whole.readable())
    findings = verify_run(whole.run, findings=True).findings
    assert bool(report.lost) == bool(findings)
    assert repair(whole.run).repaired == []
    # A reader that has not read what contradicts a document may still use it, for weights whose fingerprint is right.
    for finding in findings:
        whole.bucket.delete(finding.key)
    # Without the newest manifest and HEAD.json a run ends before: nothing is left that leads there.
    known = verify_run(whole.run, findings=True).versions
    assert set(whole.readable()) == set(range(known)) - set(report.unreadable)


# Runs from which retention has removed what it does not keep

POLICIES = st.builds(
    RetentionPolicy, keep_last=st.integers(1, 5), keep_every=st.sampled_from([None, 3, 4, 8]), min_age=st.just(0.0)
)


def collected(seed: int, policy: RetentionPolicy) -> Whole:
    whole = random_run(seed)
    collect(whole.run, policy, now=whole.bucket.clock + 1e7)
    return whole


@pytest.mark.slow
@given(seed=SEEDS, policy=POLICIES, damages=DAMAGES)
def test_what_was_kept_comes_back_from_a_mirror(seed: int, policy: RetentionPolicy, damages: list[Damage]) -> None:
    whole = collected(seed, policy)
    report = verify_run(whole.run)
    assert report.replayed
    assert verify_run(whole.run, findings=True) == report
    assert repair(whole.run).repaired == []
    kept = whole.readable()
    mirror = whole.bucket.copy()
    for damage in damages[:3]:
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


def test_what_was_removed_is_not_lost_and_what_is_needed_is_missed() -> None:
    whole = Whole()
    whole.deltas(*["plain"] * 12)
    whole.merged_deltas()
    whole.beside(8)
    collect(whole.run, RetentionPolicy(keep_last=2, keep_every=8, min_age=0.0), now=whole.bucket.clock + 1e7)
    assert whole.readable() == [8, 9, 10, 11, 12]
    mirror = whole.bucket.copy()
    whole.bucket.delete(side.anchor_key(8))
    assert verify_run(whole.run, findings=True).unreadable == [8, 9, 10, 11, 12]
    report = repair(whole.run)
    assert (report.repaired, report.unreadable) == ([], [8, 9, 10, 11, 12])
    assert repair(whole.run, mirror=mirror).repaired == [f"{side.anchor_key(8)}: from the mirror"]
    assert whole.readable() == [8, 9, 10, 11, 12]

    def repaired_without_a_mirror() -> None:
        whole.bucket.delete(side.RETENTION_KEY)
        whole.bucket.delete(whole.object_of(12))
        assert len(repair(whole.run).repaired) == 1

    for damage in (
        lambda: whole.bucket.delete(side.RETENTION_KEY),
        lambda: whole.bucket.put(side.RETENTION_KEY, b"{"),
        repaired_without_a_mirror,
    ):
        damage()
        assert verify_run(whole.run, findings=True).unreadable
        report = repair(whole.run, mirror=mirror)
        assert (report.repaired[0], report.lost) == (f"{side.RETENTION_KEY}: from the mirror", [])
        assert whole.bucket.get(side.RETENTION_KEY) == mirror.get(side.RETENTION_KEY)


def test_object_of_a_version_that_was_given_up_comes_back_if_a_kept_one_needs_it() -> None:
    """Also after a repair without a mirror, which must not record it as gone."""
    whole = Whole()
    whole.deltas(*["plain"] * 8)
    mirror = whole.bucket.copy()
    whole.bucket.delete(whole.object_of(5))
    collect(whole.run, RetentionPolicy(keep_last=1, keep_every=4, min_age=0.0), now=whole.bucket.clock + 1e7)
    report = repair(whole.run)
    assert (report.repaired, report.unreadable) == ([], [8])
    assert repair(whole.run, mirror=mirror).lost == []
    assert 8 in whole.readable()


def test_damaged_manifest_of_a_version_that_was_given_up_is_not_said_to_be_repaired() -> None:
    whole = Whole()
    whole.deltas(*["plain"] * 12)
    whole.merged_deltas()
    collect(whole.run, RetentionPolicy(keep_last=1, min_age=0.0), now=whole.bucket.clock + 1e7)
    whole.flip(keys.version_key(3))
    report = repair(whole.run)
    assert (report.repaired, len(report.lost), report.unreadable) == ([], 1, [])


def test_another_base_is_refused_and_nothing_is_rebuilt_for_it(tmp_path: Path) -> None:
    """The weights of versions that it does not lead to could be rebuilt from an anchor above them: nothing is lost."""
    written = Written(tmp_path / "run", 3, table=SMALL, start="checkpoint")
    written.beside(3)
    before = sorted(info.key for info in written.bucket.list())
    other = save_base(tmp_path / "other", written.writer.bits[1]).parent
    with pytest.raises(BaseUnavailableError, match=r"/other'.* pass base= with the original checkpoint"):
        repair(written.run, base=other)
    assert sorted(info.key for info in written.bucket.list()) == before
    assert repair(written.run, base=tmp_path / "checkpoint").lost == []
