"""Garbage collection: whatever is kept can be rebuilt bit for bit, after it and after a crash anywhere in one."""

import weakref
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.support.collecting import HOUR, LARGE, POLICIES, STEPS, Crash, Grown, MemoryBucket, long_run, objects, play
from tests.support.marked import MarkedGrown
from tests.support.written import Written
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    FormatError,
    LimitError,
    NotFoundError,
    UsageError,
)
from vllm_delta_sync.fleet.heartbeats import write_heartbeat
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import limits
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import MergedDelta, Tag
from vllm_delta_sync.format.manifest import RunInfo
from vllm_delta_sync.maintenance.accounting import account
from vllm_delta_sync.maintenance.gc.collect import CollectionReport, RetentionPolicy, collect
from vllm_delta_sync.maintenance.gc.contents import graph_of, survey
from vllm_delta_sync.maintenance.gc.lock import CLAIM_SECONDS
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run import run_reader
from vllm_delta_sync.run.read_plan import ReadPlanner
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve

quiet = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)

LEASES = st.lists(st.tuples(st.integers(0, 30), st.none() | st.integers(0, 30), st.integers(1, 20_000)), max_size=2)


def expected(
    grown: Grown, policy: RetentionPolicy, heartbeats: list[tuple[int, int | None, int]], now: float
) -> set[int]:
    """What a policy promises to keep, in the plainest words."""
    head = grown.newest
    found = {head, *range(max(0, head - policy.keep_last + 1), head + 1)}
    if policy.keep_every:
        found |= {version for version in range(1, head + 1) if version % policy.keep_every == 0}
    if policy.keep_seconds is not None:
        found |= {version for version in range(head + 1) if now - grown.put_at(version) < policy.keep_seconds}
    for tag in Run(grown.memory).tags().values():
        if policy.keep_tagged or tag.branch:
            found.add(tag.version)
    for served, target in honoured(grown, policy, heartbeats, now):
        found |= {served, target} - {None}
    return found


def honoured(
    grown: Grown, policy: RetentionPolicy, heartbeats: list[tuple[int, int | None, int]], now: float
) -> list[tuple[int | None, int | None]]:
    """What each live heartbeat says is served and aimed at; None for a version that it does not hold."""

    def held(version: int | None) -> int | None:
        if version is None or version > grown.newest or now - grown.put_at(version) >= policy.longest_pin:
            return None
        return version

    return [
        (held(served), held(target))
        for number, (served, target, seconds) in enumerate(heartbeats)
        if now < grown.memory.held[side.heartbeat_key(f"r{number}")][1] + seconds
    ]


def lay(grown: Grown, heartbeats: list[tuple[int, int | None, int]]) -> list[tuple[int, int | None, int]]:
    """Write heartbeats of versions that exist."""
    count = grown.newest + 1
    laid = [(served % count, None if target is None else target % count, s) for served, target, s in heartbeats]
    for number, (served, target, seconds) in enumerate(laid):
        write_heartbeat(grown.run_, f"r{number}", served, target=target, seconds=seconds)
    return laid


def check(grown: Grown, report: CollectionReport, wanted: set[int], policy: RetentionPolicy) -> None:
    assert set(report.kept) == wanted
    assert not report.lost
    for version in wanted:
        assert grown.equals(version), version
    for manifest in grown.manifests[max(0, grown.newest - policy.keep_last + 1) :]:
        assert {ref.key for ref in manifest.objects} <= objects(grown.memory)
    gone = {version for a, b in report.gone for version in range(a, b + 1)}
    held = objects(grown.memory)
    assert gone == {m.version for m in grown.manifests if any(ref.key not in held for ref in m.objects)}
    record = Run(grown.memory).retention()
    assert record is not None
    assert record.gone == report.gone


@quiet
@given(
    seed=st.integers(0, 2**32),
    whole=st.booleans(),
    steps=st.lists(STEPS, min_size=1, max_size=14),
    policy=POLICIES,
    heartbeats=LEASES,
    later=st.integers(0, 8000),
)
# Version 1 replaces bits, and only a merged delta over it leads back.
@example(
    seed=0,
    whole=False,
    steps=[("full", 0), ("rebase", 0), ("repair", 1)],
    policy=RetentionPolicy(keep_last=2, min_age=0.0),
    heartbeats=[(1, None, 1)],
    later=0,
)
# Anchors of milestones are newer than the one that the head needs, and none of them leads to it.
@example(
    seed=1,
    whole=True,
    steps=[
        *(("grow", 10), ("beside", 8)),
        *(step for number in range(11, 15) for step in (("full", 0), ("beside", number), ("milestone", number))),
        *(("rebase", 9), ("grow", 4), ("age", 7200)),
    ],
    policy=RetentionPolicy(keep_last=2),
    heartbeats=[],
    later=0,
)
def test_whatever_is_kept_can_be_rebuilt(
    tmp_path: Path,
    seed: int,
    whole: bool,
    steps: list[tuple[str, int]],
    policy: RetentionPolicy,
    heartbeats: list[tuple[int, int | None, int]],
    later: int,
) -> None:
    bucket = MemoryBucket()
    grown = Grown(bucket, tmp_path, seed, whole)
    play(grown, steps)
    laid = lay(grown, heartbeats)
    bucket.clock += later
    before = {key for key in bucket.held if bucket.clock + 1 - bucket.held[key][1] < policy.min_age}
    wanted = expected(grown, policy, laid, bucket.clock + 1)
    live = honoured(grown, policy, laid, bucket.clock + 1)
    there = set(bucket.held)
    contents = survey(grown.run_)
    onward = graph_of(contents.documents()).ways_to(contents.head)
    collectable = collect(grown.run_, policy, dry_run=True, now=bucket.clock + 1)
    report = collect(grown.run_, policy)
    check(grown, report, wanted, policy)
    assert before <= set(bucket.held), "something young was removed"
    assert {*collectable.objects} == {*report.objects}
    assert (collectable.anchors, collectable.merged_deltas) == (report.anchors, report.merged_deltas)
    removable = (keys.OBJECTS_PREFIX, side.ANCHORS_PREFIX, side.MERGED_PREFIX)
    assert {key for key in there - bucket.held.keys() if not key.startswith(removable)} == set()
    again = collect(grown.run_, policy, now=bucket.clock)
    assert again.kept.keys() <= wanted
    for version in again.kept:
        assert grown.equals(version)
    for served, _ in live:
        if served is not None and served in onward:
            leads_on(Run(bucket), served, grown.newest)


def without_claims(bucket: MemoryBucket) -> dict[str, bytes]:
    """What is in a bucket, but for the claims of collections."""
    return {key: data for key, (data, _) in bucket.held.items() if not key.startswith(side.COLLECTIONS_PREFIX)}


@settings(quiet, max_examples=8)  # each collects once for each change that a collection makes
@given(
    seed=st.integers(0, 2**32),
    steps=st.lists(STEPS, min_size=3, max_size=12),
    policy=POLICIES,
    late=st.booleans(),
)
def test_a_crash_anywhere_breaks_nothing(
    tmp_path: Path, seed: int, steps: list[tuple[str, int]], policy: RetentionPolicy, late: bool
) -> None:
    grown = Grown(MemoryBucket(), tmp_path, seed)
    play(grown, steps)
    grown.memory.clock += 2 * HOUR
    now = grown.memory.clock + 1
    start, whole = grown.memory, grown.memory.copy()
    wanted = collect(Run(whole), policy, now=now).kept
    count = 0
    while True:
        crashed, left = start.copy(), iter(range(count))

        def crash(action: str, key: str, left: Iterator[int] = left) -> None:
            if next(left, None) is None:
                raise Crash

        setattr(crashed, "after" if late else "before", crash)
        try:
            collect(Run(crashed), policy, now=now)
            break
        except Crash:
            count += 1
        grown.memory = crashed
        crashed.before = crashed.after = lambda action, key: None
        for version in wanted:
            assert grown.equals(version), (count, version)
        crashed.clock += CLAIM_SECONDS + 2
        report = collect(Run(crashed), policy, now=now)
        assert (set(report.kept), report.lost) == (set(wanted), {})
        assert objects(crashed) == objects(whole)
        assert {*without_claims(crashed)} == {*without_claims(whole)}
        check(grown, report, set(wanted), policy)
    assert count


FEW = RetentionPolicy(keep_last=3)


def of_versions(folder: Path, count: int, seed: int = 7, **options: Any) -> Grown:
    grown = Grown(MemoryBucket(), folder, seed, **options)
    for _ in range(count):
        grown.grow()
    return grown


def test_what_goes_and_what_stays(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    grown.bucket.put("objects/README.txt", b"not ours")
    grown.bucket.put("merged/notes.json", b"not ours")
    grown.bucket.put(keys.file_key("ab" * 32), b"a file of the model")
    grown.memory.clock += 2 * HOUR
    manifests = {key for key in grown.memory.held if not key.startswith(("objects/", "merged/"))}
    before = sum(map(len, without_claims(grown.memory).values()))
    told: list[tuple[int, int, int]] = []
    held = dict(grown.memory.held)
    dry = collect(grown.run_, FEW, dry_run=True)
    assert (dry.dry_run, grown.memory.held) == (True, held)
    report = collect(grown.run_, FEW, progress=lambda *numbers: told.append(numbers))
    assert set(report.kept) == {38, 39, 40}
    assert report.kept[40] == ["head"]
    # From 0 over 16 and 32 to 36, and then one by one or all at once.
    assert grown.run_.merged_deltas() == [(0, 16), (16, 32), (32, 36), (36, 40)]
    assert report.gone == [[1, 36]]
    assert sorted(dry.objects) == sorted(report.objects)
    record = grown.run_.retention()
    assert record is not None
    assert (record.gone, record.going, record.head) == (report.gone, [], 40)
    assert record.kept == [[0, 0], [16, 16], [32, 32], [36, 40]]
    assert len(objects(grown.memory)) == 1 + 1 + 4 + 4
    assert {"objects/README.txt", "merged/notes.json"} < grown.memory.held.keys()
    assert manifests < grown.memory.held.keys()
    hint = len(grown.memory.held[side.RETENTION_KEY][0])
    assert report.bytes == before - sum(map(len, without_claims(grown.memory).values())) + hint
    assert told[-1] == (len(told), len(told), report.bytes)
    for version in (38, 39, 40):
        assert grown.equals(version)
    with pytest.raises(DeltaSyncError):
        grown.equals(35)


def test_anchors_that_stay(tmp_path: Path) -> None:
    """Those of milestones, and the newest, though the way from version 0 is shorter."""
    grown = of_versions(tmp_path, 8, whole=False, table=LARGE)
    for version in (2, 3, 5, 6):
        grown.beside(version, tmp_path)
    grown.tag("release", 3, milestone=True)
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert report.anchors == [2, 5]
    assert grown.run_.anchors() == [3, 6]
    assert grown.run_.snapshot().fingerprint == grown.manifests[8].model_fingerprint, "from the base"
    (tmp_path / "base" / "model.safetensors").unlink()
    assert grown.equals(3)
    assert grown.equals(8)


def test_a_version_published_lately_keeps_its_delta(tmp_path: Path) -> None:
    """Also where its objects were uploaded long before its manifest."""
    grown = of_versions(tmp_path, 6, 1)
    for key in objects(grown.memory):
        grown.memory.held[key] = (grown.memory.held[key][0], 0.0)
    grown.merge_all()
    assert collect(grown.run_, RetentionPolicy(keep_last=1)).bytes == 0
    grown.memory.clock += HOUR
    assert collect(grown.run_, RetentionPolicy(keep_last=1)).bytes


def test_forged_heartbeats_do_not_hold_for_ever(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 20)
    grown.memory.clock += 7 * 24 * HOUR
    for number in range(20):
        write_heartbeat(grown.run_, f"forged-{number}", number, pins=list(range(20)), seconds=7 * 24 * 3600)
    grown.bucket.put("heartbeats/huge.json", b"{" * 100_000)
    report = collect(grown.run_, FEW)
    assert set(report.kept) == {18, 19, 20}
    assert any("heartbeat ignored" in note for note in report.notes)


@pytest.mark.parametrize("truncated", [False, True])
def test_what_cannot_be_rebuilt_is_said_and_spared(tmp_path: Path, truncated: bool) -> None:
    grown = of_versions(tmp_path, 20)
    grown.beside(14, tmp_path)
    grown.tag("best", 12)
    key = grown.manifests[10].objects[0].key
    data = grown.memory.get(key)
    grown.memory.delete(grown.manifests[13].objects[0].key)  # no way back from version 14 either
    if truncated:
        grown.memory.put(key, data[:-1])
    else:
        grown.memory.delete(key)
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert report.lost == {12: ["tag best"]}
    assert report.gone == [[13, 14]], "what is lost did not go because somebody removed it"
    spared = {ref.key for version in range(13) if version != 10 for ref in grown.manifests[version].objects}
    assert spared <= objects(grown.memory)
    grown.memory.put(key, data)
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert (report.lost, set(report.kept)) == ({}, {12, 18, 19, 20})
    assert grown.equals(12)
    assert grown.equals(20)


def test_damage_is_not_taken_for_what_was_given_up(tmp_path: Path) -> None:
    """A tag set after a collection, on a version that this had not to keep; then an object of it is lost."""
    grown = of_versions(tmp_path, 10)
    grown.memory.clock += 2 * HOUR
    collect(grown.run_, FEW)
    set_tag(grown.run_, "best", 5)
    for version in (3, 6):
        grown.memory.delete(grown.manifests[version].objects[0].key)
    grown.beside(9, tmp_path)
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert report.lost == {5: ["tag best"]}
    assert {ref.key for version in (1, 2, 4, 5) for ref in grown.manifests[version].objects} <= objects(grown.memory)


def test_what_was_given_up_once_is_not_missed(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    collect(grown.run_, FEW)
    report = collect(grown.run_, RetentionPolicy(keep_last=3, keep_every=10))
    assert report.lost == {}
    assert set(report.kept) == {38, 39, 40}
    assert "not kept, as an earlier collection gave them up: versions 10, 20, 30" in report.notes
    # What comes back is not gone any more.
    ref = grown.manifests[36].objects[0]
    spare = long_run(tmp_path)
    grown.memory.put(ref.key, spare.memory.get(ref.key))
    assert collect(grown.run_, FEW).gone == [[1, 35]]


def test_a_run_that_was_replaced_is_left_alone(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    run = grown.run_
    info = RunInfo.model_validate({**run.info.model_dump(), "run": "0" * 32})
    grown.bucket.put(keys.RUN_KEY, info.to_bytes())
    held = dict(grown.memory.held)
    with pytest.raises(ConflictError):
        collect(run, FEW)
    assert grown.memory.held == held


def test_more_than_a_record_lists_goes_in_several_collections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with 65,536 merged deltas, those of some 200,000 versions."""
    monkeypatch.setattr(limits, "MAX_RANGES", 4)
    grown = long_run(tmp_path)
    removed = 0
    while True:
        report = collect(grown.run_, FEW)
        now = len(report.merged_deltas) + len(report.anchors)
        assert now <= 4
        removed += now
        if not any("left for the next collection" in note for note in report.notes):
            break
    assert removed > 4
    monkeypatch.setattr(limits, "MAX_RANGES", 65_536)
    assert not collect(grown.run_, FEW).merged_deltas
    spread = long_run(tmp_path)
    monkeypatch.setattr(limits, "MAX_RANGES", 2)
    for dry_run in (True, False):
        with pytest.raises(LimitError, match="keep-every"):
            collect(spread.run_, RetentionPolicy(keep_last=1, keep_every=5, min_age=0.0), dry_run)


def test_the_largest_record_is_read_and_a_larger_one_is_not_parsed(tmp_path: Path) -> None:
    """Anyone who can write to the bucket can write one, and readers beside training parse it."""
    Written(tmp_path / "run", 1)
    run = open_run(tmp_path / "run")
    ranges = [[first, first + 1] for first in range(10**9, 10**9 + 3 * limits.MAX_RANGES, 3)]
    going = [side.merged_delta_key(first, first + 1) for first, _ in ranges]
    record = {"run": run.info.run, "gone": ranges, "kept": ranges, "going": going, "created_at": timestamp()}
    data = side.Retention.model_validate(record).to_bytes()
    run.bucket.put(side.RETENTION_KEY, data)
    assert run.retention() is not None
    larger = data[:-1] + b',"zzz":"' + b"x" * (limits.MAX_RETENTION_BYTES - len(data)) + b'"}'
    run.bucket.put(side.RETENTION_KEY, larger)
    assert run.retention() is None


def test_policies_that_make_no_sense() -> None:
    wrong: tuple[dict[str, Any], ...] = (
        *({"keep_last": 0}, {"keep_every": 0}, {"keep_last": 1.5}, {"min_age": -1.0}, {"longest_pin": float("inf")}),
    )
    for fields in wrong:
        with pytest.raises(UsageError):
            RetentionPolicy(**fields)


def test_version_that_was_let_go_of_is_said_to_be_no_longer_kept(tmp_path: Path) -> None:
    grown = long_run(tmp_path, 24)
    run = grown.run_
    report = collect(run, RetentionPolicy(keep_last=1, min_age=0.0))
    record = run.retention()
    assert record is not None
    let_go = max(version for version in range(25) if record.gave_up(version))
    assert let_go not in report.kept
    with pytest.raises(NotFoundError, match=f"version {let_go} is no longer kept"):
        run.snapshot(let_go)
    with pytest.raises(NotFoundError, match="is no longer kept"):
        set_tag(run, "late", let_go)
    for info in list(run.bucket.list("objects/")):
        run.bucket.delete(info.key)
    # That is a loss, not retention.
    with pytest.raises(NotFoundError, match="no object"):
        run.snapshot()


# Documents that are damaged, foreign, or of no use


def test_documents_beside_the_chain_are_not_kept_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An anchor has the fingerprints of all tensors: megabytes each, for a large model of many experts."""
    grown = of_versions(tmp_path, 40)
    for version in range(1, 40):
        grown.beside(version, grown.folder)
    read: list[weakref.ref[side.Anchor]] = []
    most = 0
    real = Run.anchor

    def anchor(run: Run, version: int) -> side.Anchor:
        nonlocal most
        read.append(weakref.ref(found := real(run, version)))
        most = max(most, sum(each() is not None for each in read))
        return found

    monkeypatch.setattr(Run, "anchor", anchor)
    monkeypatch.setattr(run_reader, "READ_AHEAD", 4)
    assert len(survey(grown.run_).standalone) == len(read) == 39
    assert account(grown.run_).documents == 39
    assert most < 20


def test_what_cannot_be_read_stops_a_collection_or_spares_orphans(tmp_path: Path) -> None:
    grown = long_run(tmp_path)
    held = dict(grown.memory.held)
    for key in (keys.version_key(5), keys.version_key(40), side.tag_key("bad")):
        grown.memory.held = {**held, key: (b"{", 0.0)}
        with pytest.raises(FormatError):
            collect(grown.run_, FEW)
        assert objects(grown.memory) == {key for key in held if key.startswith("objects/")}
    grown.memory.held = {key: value for key, value in held.items() if key != keys.version_key(5)}
    with pytest.raises(ChainError, match=r"0000000005\.json is missing"):
        collect(grown.run_, FEW)
    grown.memory.held = {**held, side.merged_delta_key(0, 4): (b"{", 0.0)}
    orphan = grown._put(b"whose is it")
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert any("merged/0000000000-0000000004.json cannot be read; it stays" in note for note in report.notes)
    assert orphan.key in grown.memory.held
    assert side.merged_delta_key(0, 4) in grown.memory.held
    assert report.objects


@pytest.mark.parametrize("damaged", [b"", b"{"])
def test_version_whose_damaged_manifest_a_publisher_passed_needs_nothing(tmp_path: Path, damaged: bytes) -> None:
    """No repair can bring it back; before, nothing was ever collected again."""
    grown = of_versions(tmp_path, 6)
    lost = grown.manifests[6]
    grown.tag("best", 6)
    grown.memory.held[keys.version_key(6)] = (damaged, 0.0)
    with pytest.raises(FormatError):
        collect(grown.run_, FEW)
    grown.manifests[6] = lost.model_copy()
    grown.manifests[6].__dict__["digest"] = sha256(damaged).hexdigest()
    grown.grow_whole()
    grown.grow()
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert (set(report.kept), report.lost, report.gone) == ({7, 8}, {}, [[0, 6]])
    assert any("version 6 is lost for good" in note for note in report.notes)
    assert not objects(grown.memory) & {ref.key for ref in lost.objects}
    assert grown.equals(7)
    assert grown.equals(8)
    assert collect(grown.run_, FEW).lost == {}
    # That of the newest one may still be repaired.
    grown.memory.held[keys.version_key(8)] = (b"{", 0.0)
    with pytest.raises(FormatError):
        collect(grown.run_, FEW)


@pytest.mark.parametrize("field", ["last_manifest", "first_fingerprint"])
def test_documents_of_another_run_or_that_do_not_fit_are_not_believed(tmp_path: Path, field: str) -> None:
    grown = long_run(tmp_path, 12)
    manifest = grown.manifests[4]
    tag = Tag(run="0" * 32, name="foreign", version=4, manifest=manifest.digest, created_at=manifest.created_at)
    grown.bucket.put(side.tag_key("foreign"), tag.to_bytes())
    merged_delta = grown.run_.merged_delta(0, 4)
    wrong = "0" * len(getattr(merged_delta, field))
    other = MergedDelta.model_validate({**merged_delta.model_dump(), field: wrong})
    grown.bucket.put(side.merged_delta_key(0, 4), other.to_bytes())
    grown.memory.clock += 2 * HOUR
    report = collect(grown.run_, FEW)
    assert 4 not in report.kept
    assert any("tag ignored" in note for note in report.notes)
    assert any(note.startswith("merged/0000000000-0000000004.json does not fit") for note in report.notes)
    assert {ref.key for ref in other.objects} <= objects(grown.memory)
    assert getattr(grown.run_.merged_delta(0, 4), field) == wrong
    assert grown.equals(12)


def test_merged_deltas_of_any_range_lead_on(tmp_path: Path) -> None:
    """Also of one that is not aligned, or leads across a version that builds on an older one."""
    for ends in ((1, 7), (4, 8), (2, 4)):
        grown = of_versions(tmp_path, 5)
        if ends == (4, 8):
            grown.grow(base=3)
        for _ in range(9 - grown.newest):
            grown.grow()
        grown.merge(*ends)
        grown.memory.clock += 2 * HOUR
        assert collect(grown.run_, FEW).merged_deltas == []
        assert ends in [(step.low, step.high) for step in ReadPlanner(grown.run_).path(ends[0], 9)]
        assert grown.equals(9)


# While the head is quarantined: what servers stand at, and their path on

TIGHT = RetentionPolicy(keep_last=1, min_age=0, keep_tagged=False)


def marked(tmp_path: Path, marks: str, whole: bool = True) -> MarkedGrown:
    found = MarkedGrown(MemoryBucket(), tmp_path, 1, whole, LARGE)
    found.play(marks)
    found.memory.clock += HOUR
    return found


def leads_on(reader: Run, first: int, last: int) -> None:
    """There is a way whose objects are all there, as a receiver looks for one."""
    gone: set[str] = set()
    while True:
        steps = ReadPlanner(reader, gone).path(first, last)
        before = len(gone)
        for step in steps:
            try:
                reader.changes(step.document)
            except NotFoundError:
                gone.add(step.key)
        if len(gone) == before:
            return


@pytest.mark.parametrize(
    ("marks", "why", "version"), [("......!!!!!!", "sound", 6), ("...~~!~", "exact", 3)], ids=["sound", "exact"]
)
def test_newest_sound_or_exact_is_kept_until_head_is_one(tmp_path: Path, marks: str, why: str, version: int) -> None:
    """The property below shows that a publisher can continue from it and readers can read it."""
    run = marked(tmp_path, marks)
    assert collect(run.run_, TIGHT).kept == {version: [why], len(marks): ["head"]}
    run.play(".")
    run.memory.clock += HOUR
    assert collect(run.run_, TIGHT).kept == {len(marks) + 1: ["head"]}


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
    run = marked(tmp_path, "....!!!", whole=False)
    for version in (2, 6):
        run.beside(version, tmp_path)
    run.memory.clock += HOUR
    report = collect(run.run_, TIGHT)
    assert report.anchors == []
    assert run.run_.anchors() == [2, 6]


@quiet
@example(marks=".....!!!", merged_deltas=True, anchors=set(), keep_last=1, more="")
@given(
    marks=st.text("..!~~?", min_size=1, max_size=16),
    merged_deltas=st.booleans(),
    anchors=st.sets(st.integers(1, 16), max_size=3),
    keep_last=st.integers(1, 4),
    more=st.text("..!~", max_size=4),
)
def test_sound_version_stays_readable_whatever_is_collected(
    tmp_path: Path, marks: str, merged_deltas: bool, anchors: set[int], keep_last: int, more: str
) -> None:
    run = marked(tmp_path, marks)
    if merged_deltas:
        run.merge_all()
    for version in anchors:
        if version <= run.newest:
            run.beside(version, tmp_path)
    policy = RetentionPolicy(keep_last=keep_last, min_age=0, keep_tagged=False)
    for marks_then in ("", more):
        run.play(marks_then)
        run.memory.clock += HOUR
        collect(run.run_, policy)
        head, sound = run.manifests[-1], run.manifests[-1].sound
        assert sound is not None
        assert run.equals(head.version)
        assert run.equals(sound)
        exact = newest_to_serve(Run(run.memory), head, ServicePolicy(exact=True))
        assert exact is not None
        assert run.equals(exact)
        for version in {sound, exact} - {head.version}:
            leads_on(Run(run.memory), version, head.version)
