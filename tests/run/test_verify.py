"""Checking a run: all of it is checked, what is bad is named, and what retention removed is no error."""

import json
import threading
from dataclasses import replace
from hashlib import sha256
from typing import Any
from unittest import mock

import numpy as np
import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import load, save

from tests.support.collecting import MemoryBucket
from tests.support.damage import TABLE, Damage, Whole, random_run
from tests.support.samples import CREATED, RUN, changes_between, nudge
from tests.support.seeds import few_by_default
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    DigestError,
    FingerprintError,
    FormatError,
    NotFoundError,
)
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.run.graph import ROOT, VersionGraph, Ways
from vllm_delta_sync.verify.verify import VerifyReport, verify_run

SEEDS = st.integers(0, 2**32)
FAR = "s3://far/run"
"""As the URL of a bucket: what is needed next is read early."""
TOGETHER = 10
PATIENCE_SECONDS = 60.0
"""Passes only where reads that should be under way together are not."""
DAMAGES = st.lists(st.builds(Damage, *[st.integers(0, 10**6)] * 3), min_size=1, max_size=4)


@pytest.fixture
def whole() -> Whole:
    """Sixteen versions with a break, an anchor in the chain, merged deltas, anchors, a tag and a second writer."""
    made = Whole()
    made.deltas("plain", "raw", "plain", "full", "plain", "same", "plain", "plain")
    made.claim()
    made.delta(base=6)
    made.deltas("plain", "plain")
    made.anchor(nudge(made.writer.bits[-1], made.random, 0.3))
    made.deltas("plain", "plain", "plain", "plain")
    made.merged_deltas()
    made.beside(5)
    made.beside(14, shards=1)
    made.tag("best", 7)
    return made


def all_of(whole: Whole) -> VerifyReport:
    return verify_run(whole.run, findings=True)


def outline(report: VerifyReport) -> tuple[VerifyReport, list[tuple[str, type[DeltaSyncError], int | None]]]:
    """What is compared of two reports: errors themselves are never equal."""
    found = [(finding.key, type(finding.error), finding.version) for finding in report.findings]
    return replace(report, findings=[]), found


def first(whole: Whole) -> DeltaSyncError:
    with pytest.raises(DeltaSyncError) as raised:
        verify_run(whole.run)
    return raised.value


def test_a_whole_run(whole: Whole) -> None:
    seen: list[int] = []
    report = verify_run(whole.run, progress=lambda so_far: seen.append(so_far.head))
    assert seen == list(range(17))
    assert (report.versions, report.head, report.pointed, report.replayed) == (17, 16, 16, True)
    assert (report.anchors, report.merged_deltas, report.gone) == (2, 3, 0)
    sizes = [len(data) for key, (data, _) in whole.bucket.held.items() if key.startswith("objects/")]
    assert (report.objects, report.bytes) == (len(sizes), sum(sizes))
    assert (report.notes, report.findings, report.unreadable) == ([], [], [])
    assert all_of(whole) == report


def test_of_a_distant_store_the_objects_of_many_versions_are_read_at_once(whole: Whole) -> None:
    near = verify_run(whole.run)
    changed, under_way = threading.Condition(), set[str]()

    def get(key: str, **limits: Any) -> bytes:
        if key.startswith("objects/"):
            with changed:
                under_way.add(key)
                changed.notify_all()
                assert changed.wait_for(lambda: len(under_way) >= TOGETHER, PATIENCE_SECONDS), under_way
        return MemoryBucket.get(whole.bucket, key, **limits)

    whole.bucket.url = FAR
    with mock.patch.object(whole.bucket, "get", get):
        assert verify_run(whole.run) == near


def test_a_damaged_object_is_named_with_its_version(whole: Whole) -> None:
    for version in (0, 4):
        key = whole.object_of(version)
        whole.flip(key, len(whole.bucket.get(key)) - 1)
        error = first(whole)
        assert isinstance(error, DigestError)
        assert key in error.message
        assert f"(version {version})" in error.message
        found = next(finding for finding in all_of(whole).findings if finding.key == key)
        assert (found.version, found.tensor, found.document) == (version, None, keys.version_key(version))
        whole.flip(key, len(whole.bucket.get(key)) - 1)


def replace_object(whole: Whole, listing: str, old: str, data: bytes) -> None:
    """List other bytes in a document beside the chain, digest and all."""
    digest = sha256(data).hexdigest()
    ref = ObjectRef(key=keys.object_key(digest), bytes=len(data), sha256=digest)
    whole.bucket.put(ref.key, data)
    run = whole.run
    version = side.anchor_of_key(listing)
    pair = side.merged_delta_of_key(listing)
    document = run.anchor(version) if version is not None else run.merged_delta(*pair) if pair is not None else None
    assert document is not None
    objects = [ref if item.key == old else item for item in document.objects]
    changed = document.model_copy(
        update={"objects": objects, "payload_bytes": sum(item.bytes for item in objects), "_raw": None}
    )
    whole.bucket.put(listing, type(changed).model_validate(changed.model_dump()).to_bytes())


def test_an_anchor_with_right_digests_and_other_weights_is_named(whole: Whole) -> None:
    key = side.anchor_key(14)
    shard = whole.run.anchor(14).objects[0]
    content = load(whole.bucket.get(shard.key))
    content["b"] = content["b"] + 1
    replace_object(whole, key, shard.key, save(content))
    error = first(whole)
    assert isinstance(error, FingerprintError)
    assert "anchor of version 14: tensor 'b'" in error.message
    assert [(found.key, found.tensor) for found in all_of(whole).findings] == [(key, "b")]


def test_a_folded_range_that_leads_elsewhere_is_named(whole: Whole) -> None:
    """What it declares adds up, so only the weights that it would make give it away."""
    key = side.merged_delta_key(0, 4)
    bits = whole.writer.bits
    changes = changes_between(TABLE, bits[0], bits[4])
    for group in changes.sparse:
        if group.dtype == "F32":
            group.data[:1] += np.uint32(1 << 20)
    data = encode(changes, TABLE, "plain", "zstd", DeltaContext(RUN, 4, 0))
    replace_object(whole, key, whole.run.merged_delta(0, 4).objects[0].key, data)
    error = first(whole)
    assert isinstance(error, FingerprintError)
    assert "merged delta 0 to 4: tensor 'b' does not have the declared fingerprint" in error.message
    assert [(found.key, found.tensor) for found in all_of(whole).findings] == [(key, "b")]


TAG, CLAIM, ANCHOR, MERGED = side.tag_key("best"), side.claim_key(1), side.anchor_key(5), side.merged_delta_key(0, 4)
LATE = {"version": 9, "manifest": "late"}
NAMED: dict[str, tuple[str, bytes | dict[str, Any] | None, type[DeltaSyncError]]] = {
    "tag": (TAG, {"version": 6}, ChainError),
    "tag cut": (TAG, b"{", FormatError),
    "claim missing": (CLAIM, None, NotFoundError),
    "claim too late": (CLAIM, LATE, ChainError),
    "anchor": (ANCHOR, {"manifest": "0" * 64}, ChainError),
    "anchor version": (side.anchor_key(6), b"of 5", ChainError),
    "merge": (MERGED, {"first_manifest": "0" * 64}, ChainError),
    "merge fingerprint": (MERGED, {"last_fingerprint": "0" * 32}, FingerprintError),
    "retention": (side.RETENTION_KEY, b"{", FormatError),
    "head": (keys.HEAD_KEY, b"{", FormatError),
    "head beyond": (keys.HEAD_KEY, {"version": 9999}, NotFoundError),
    "manifest of a tag": (keys.version_key(7), {"step": 1}, ChainError),
    "lost manifest": (keys.version_key(7), None, NotFoundError),
    "newest lost": (keys.version_key(16), None, NotFoundError),
}
"""A key; what it gets: nothing, other bytes, or other fields; and the error."""


@pytest.mark.parametrize("case", NAMED)
def test_documents_that_contradict_the_history_are_named(case: str, whole: Whole) -> None:
    key, change, kind = NAMED[case]
    if change is None:
        whole.bucket.delete(key)
    elif case == "anchor version":
        whole.bucket.put(key, whole.bucket.get(ANCHOR))
    elif isinstance(change, bytes):
        whole.bucket.put(key, change)
    else:
        fields = change | ({"manifest": whole.writer.manifests[9].digest} if change is LATE else {})
        whole.bucket.put(key, rfc8785.dumps({**json.loads(whole.bucket.get(key)), **fields}))
    assert type(first(whole)) is kind
    found = [finding for finding in all_of(whole).findings if finding.key == key]
    assert [type(finding.error) for finding in found] == [kind]


def test_head_behind_is_noted(whole: Whole) -> None:
    whole.writer.head(3)
    report = verify_run(whole.run)
    assert report.pointed == 3
    assert ["is behind: it names version 3, the newest is 16" in note for note in report.notes] == [True]
    whole.bucket.delete(keys.HEAD_KEY)
    assert "is missing" in verify_run(whole.run).notes[0]
    # It is not behind where the manifest that it names is damaged.
    whole.writer.head(16)
    whole.bucket.put(keys.version_key(16), b"{")
    report = all_of(whole)
    assert (report.pointed, report.head) == (16, 15)
    assert not any("HEAD.json" in note for note in report.notes)


def test_all_problems_are_listed_and_what_they_make_unreadable(whole: Whole) -> None:
    for version in (2, 13):
        whole.flip(whole.object_of(version))
    whole.bucket.delete(whole.object_of(7))
    report = all_of(whole)
    assert [finding.version for finding in report.findings] == [2, 7, 13]
    # Merged deltas lead to 4, 8 and 16; 5 has an anchor, 9 builds on 6, 14 has an anchor. Reverts lead to 3 and 7.
    assert report.unreadable == [v for v in range(17) if v not in whole.readable()]
    assert 2 in report.unreadable
    assert not report.replayed


@pytest.mark.parametrize("beside", ["anchor", "merged delta"])
def test_a_lost_object_of_a_document_beside_the_chain_is_raised(whole: Whole, beside: str) -> None:
    document = whole.run.anchor(14) if beside == "anchor" else whole.run.merged_delta(12, 16)
    own = [
        ref.key
        for ref in document.objects
        if ref.key not in {o.key for v in range(17) for o in whole.run.manifest(v).objects}
    ]
    whole.bucket.delete(own[0])
    assert isinstance(first(whole), NotFoundError)
    assert [finding.key for finding in all_of(whole).findings] == [own[0]]


def test_versions_whose_objects_are_gone_are_no_error(whole: Whole) -> None:
    whole.retire((1, 3), (7, 7))
    report = verify_run(whole.run)
    assert (report.gone, report.replayed, report.unreadable) == (4, True, [])
    assert all_of(whole) == report
    # An object that is missing and not listed is one.
    whole.bucket.delete(whole.object_of(10))
    with pytest.raises(NotFoundError, match=r"\(version 10\)"):
        verify_run(whole.run)


def test_what_is_absent_is_listed_also_where_other_documents_lead_to_the_version(whole: Whole) -> None:
    whole.bucket.delete(whole.object_of(4))
    report = all_of(whole)
    assert ([finding.key for finding in report.findings], report.unreadable) == ([whole.object_of(4)], [])


def test_a_version_that_is_kept_has_to_be_reachable() -> None:
    whole = Whole()
    whole.deltas(*["plain"] * 6)
    record = side.Retention(run=RUN, gone=[[1, 3]], created_at=CREATED, head=6, kept=[[0, 0]])
    whole.bucket.put(side.RETENTION_KEY, record.to_bytes())
    assert (verify_run(whole.run).unreadable, verify_run(whole.run).gone) == ([], 3)
    record = side.Retention(run=RUN, gone=[[1, 3]], created_at=CREATED, head=6, kept=[[0, 0], [3, 6]])
    whole.bucket.put(side.RETENTION_KEY, record.to_bytes())
    with pytest.raises(ChainError, match="version 3 is kept, but no document that is left leads to it"):
        verify_run(whole.run)
    report = all_of(whole)
    assert ([finding.version for finding in report.findings], report.unreadable) == ([3], [3, 4, 5, 6])


def test_way_around_a_lost_version_is_not_searched_for_each_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a run of 10,000 versions that lost one took minutes."""
    whole = Whole()
    whole.deltas(*["plain"] * 12)
    whole.lose(whole.object_of(3))
    begun: list[int] = []
    search = VersionGraph._cheapest

    def counted(graph: VersionGraph, moves: Any, begin: int, goal: int | None) -> Ways:
        begun.append(begin)
        return search(graph, moves, begin, goal)

    monkeypatch.setattr(VersionGraph, "_cheapest", counted)
    assert verify_run(whole.run, findings=True).unreadable == list(range(3, 13))
    assert begun.count(ROOT) <= 3


def test_objects_that_a_collection_removes_meanwhile(whole: Whole) -> None:
    def collect(report: VerifyReport) -> None:
        if report.head == 4 and whole.run.retention() is None:
            whole.retire((7, 7))
            whole.bucket.delete(side.merged_delta_key(12, 16))
            whole.bucket.delete(side.anchor_key(14))

    report = verify_run(whole.run, progress=collect)
    assert (report.gone, report.findings, report.unreadable) == (1, [], [])


@few_by_default(10)
@given(seed=SEEDS, damages=DAMAGES)
# Nothing that is left contradicts the manifest before a lost one.
@example(seed=4572, damages=[Damage(11, 1, 106), Damage(12, 0, 0)])
# Two manifests contradict each other, and the one after them is lost.
@example(seed=0, damages=[Damage(724, 1, 18), Damage(262143, 0, 0)])
# The newest is lost, and only HEAD.json names the digest of the altered one before it.
@example(seed=176, damages=[Damage(20, 1, 344), Damage(21, 0, 0)])
# A merged delta leads across an altered manifest.
@example(seed=186, damages=[Damage(16, 1, 358)])
# A merged delta names another digest of a lost manifest than the next manifest does.
@example(seed=186, damages=[Damage(16, 0, 0), Damage(2, 1, 303)])
# Two merged deltas lead across lost manifests, and what was loaded in between cannot be reverted.
@example(165, [Damage(616851, 2, 1489), Damage(152206, 1, 1157), Damage(21995, 0, 272), Damage(291549, 1, 269)])
def test_what_is_contradicted_counts_as_absent_and_verify_lists_it(seed: int, damages: list[Damage]) -> None:
    whole = random_run(seed)
    assert verify_run(whole.run).replayed
    good = whole.bucket.copy()
    for damage in damages:
        damage.do(whole)
    report = all_of(whole)
    whole.bucket.url = FAR
    assert outline(all_of(whole)) == outline(report)
    changed = {key for key in good.held if good.get(key) != whole.bucket.held.get(key, (b"", 0.0))[0]}
    assert changed or not report.findings
    if report.findings:
        first(whole)

    # Readers skip what is listed. Without it they read just the versions that are not said to be unreadable.
    before = set(whole.readable())
    for finding in report.findings:
        whole.bucket.delete(finding.key)
    after = set(whole.readable())
    assert after == set(range(report.versions)) - set(report.unreadable)
    assert after <= before


BESIDE: dict[str, type[side.Claim] | type[side.Tag] | type[side.Anchor] | type[side.MergedDelta]] = {
    "claims": side.Claim,
    "tags": side.Tag,
    "anchors": side.Anchor,
    "merged_deltas": side.MergedDelta,
}
UNBOUND = {"created_at", "writer", "requires", "signature", "milestone", "branch"}
"""Fields of documents beside the chain that nothing else of the run says anything about."""


def _means_the_same(key: str, before: bytes, after: bytes) -> bool:
    """Whether a document beside the chain says the same as before, as far as anything can tell."""
    kind = BESIDE.get(key.split("/")[0])
    try:
        return kind is not None and _bound(kind.from_bytes(before)) == _bound(kind.from_bytes(after))
    except DeltaSyncError:
        return False


def _bound(document: side.Claim | side.Tag | side.Anchor | side.MergedDelta) -> dict[str, Any]:
    fields = document.model_dump(exclude=UNBOUND)
    for ref in fields.get("objects", []):
        del ref["rank"]
    return fields


@few_by_default(10)
@given(seed=SEEDS, place=st.floats(0, 1, exclude_max=True))
def test_each_bit_of_a_document_beside_the_chain_is_bound_or_is_of_no_consequence(seed: int, place: float) -> None:
    whole = random_run(seed)
    whole.claim()
    for key in [key for key in whole.bucket.held if key.split("/")[0] in BESIDE]:
        good = whole.bucket.get(key)
        whole.flip(key, int(place * len(good)))
        if not _means_the_same(key, good, whole.bucket.get(key)):
            named = {finding.key for finding in all_of(whole).findings}
            # Of two that contradict each other, nobody knows which is right.
            assert key in named or any(other.startswith("versions/") for other in named)
        whole.bucket.put(key, good)
