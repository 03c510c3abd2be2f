"""Checking and repairing a signed run: each document that is forged, changed or signed by the wrong key is named."""

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.collecting import HOUR
from tests.support.damage import Whole
from tests.support.forge import FORGERIES
from tests.support.signed_runs import NEXT, PUBLISHER, ROOT, STRANGER, Signed, name_of
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import ChainError, SettingsError, SignatureError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.documents import Anchor, KeyEntry, KeyFile, MergedDelta, Tag
from vllm_delta_sync.format.manifest import Document, Head, Manifest, RunInfo
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.keys import change_keys, check_signer, list_keys
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import make_head
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.verify import VerifyReport, verify_run


@pytest.fixture
def signed() -> Signed:
    return Signed().grown()


def all_of(signed: Signed, run: Run | None = None) -> VerifyReport:
    return verify_run(run or signed.run, findings=True)


def named(report: VerifyReport) -> list[str]:
    return sorted({finding.key for finding in report.findings})


KINDS: dict[str, type[Document]] = {
    keys.RUN_KEY: RunInfo,
    keys.HEAD_KEY: Head,
    side.KEYS_KEY: KeyFile,
    keys.version_key(0): Manifest,
    keys.version_key(4): Manifest,
    keys.version_key(8): Manifest,
    side.anchor_key(5): Anchor,
    side.merged_delta_key(0, 4): MergedDelta,
    side.tag_key("best"): Tag,
}


def test_a_whole_signed_run(signed: Signed) -> None:
    signed.list_keys(1, KeyEntry(key=name_of(PUBLISHER)))
    report = verify_run(signed.run)
    assert (report.head, report.replayed, report.checked, report.signed) == (8, True, True, name_of(ROOT))
    assert (report.notes, report.findings, report.refused) == ([], [], [])
    assert signed.run.verify() == report
    # Without trusted keys the same, and said.
    unchecked = verify_run(Run(signed.bucket))
    assert (unchecked.head, unchecked.checked, unchecked.findings) == (8, False, [])
    assert ["signatures were not checked" in note for note in unchecked.notes] == [True]


@pytest.mark.parametrize(
    ("key", "forgery"),
    [*((key, "stranger") for key in KINDS), *((keys.version_key(4), name) for name in FORGERIES if name != "stranger")],
)
def test_each_forged_document_is_named(key: str, forgery: str, signed: Signed) -> None:
    signed.list_keys(1, KeyEntry(key=name_of(PUBLISHER)))
    run = signed.run
    good = KINDS[key].from_bytes(signed.bucket.get(key))
    signed.bucket.put(key, FORGERIES[forgery](good, STRANGER))
    if key in (keys.RUN_KEY, side.KEYS_KEY):
        # Nothing can be believed without them.
        with pytest.raises(SignatureError, match=key.replace(".", r"\.")):
            _ = signed.run
        return
    with pytest.raises(SignatureError, match=key.replace(".", r"\.")):
        verify_run(run)
    report = all_of(signed, run)
    assert key in named(report)
    assert all(isinstance(finding.error, SignatureError) for finding in report.findings if finding.key == key)


def test_keys_json_that_was_changed_since_the_run_was_opened_is_named(signed: Signed) -> None:
    signed.list_keys(2)
    run = signed.run
    signed.list_keys(1)
    assert [(finding.key, finding.error.kind) for finding in all_of(signed, run).findings] == [("keys.json", "replay")]
    signed.bucket.put(side.KEYS_KEY, b"{")
    assert named(all_of(signed, run)) == ["keys.json"]


def test_every_bit_of_a_signed_document_counts(signed: Signed) -> None:
    """Also those that nothing else in a run says anything about, such as when it was made."""
    run = signed.run
    for key in (
        side.anchor_key(5),
        side.merged_delta_key(0, 4),
        side.tag_key("best"),
        keys.HEAD_KEY,
        keys.version_key(8),
    ):
        good = signed.bucket.get(key)
        for place in range(0, len(good), 13):
            signed.flip(key, place)
            assert key in {finding.key for finding in DocumentAudit(run).findings}, good[: place + 1]
            signed.bucket.put(key, good)


def test_hints_need_no_signature(signed: Signed) -> None:
    claim = signed.bucket.get(side.claim_key(1))
    assert b'"signature":null' in claim
    assert named(all_of(signed)) == []


def test_a_head_that_has_run_out_is_noted(signed: Signed) -> None:
    signed.bucket.put(keys.HEAD_KEY, make_head(signed.writer.manifests[8], ROOT, seconds=-1).to_bytes())
    report = verify_run(signed.run)
    assert ["HEAD.json expired at" in note for note in report.notes] == [True]
    signed.bucket.put(keys.HEAD_KEY, make_head(signed.writer.manifests[8], ROOT).to_bytes())
    assert verify_run(signed.run).notes == []


# Keys that come and go


def rotated() -> Signed:
    """The root lists a publisher, which is retired after version 4; another signs versions 5 to 7."""
    made = Signed(PUBLISHER)
    made.deltas(*["plain"] * 4)
    made.list_keys(1, KeyEntry(key=name_of(PUBLISHER)))
    made.merged_deltas()
    made.list_keys(2, KeyEntry(key=name_of(PUBLISHER), last=made.last_word(4)), KeyEntry(key=name_of(NEXT)))
    made.writer.keyring = NEXT
    made.deltas(*["plain"] * 3)
    return made


def test_what_a_retired_key_signed_holds() -> None:
    made = rotated()
    report = verify_run(made.run)
    assert (report.head, report.replayed, report.merged_deltas, report.notes) == (7, True, 1, [])


def test_what_a_retired_key_signs_later_is_named() -> None:
    made = rotated()
    made.writer.keyring = PUBLISHER
    made.deltas("plain")
    made.beside(7)
    report = all_of(made)
    assert named(report) == ["HEAD.json", "anchors/0000000007.json", "versions/0000000008.json"]
    assert all(name_of(PUBLISHER)[:16] in finding.error.message for finding in report.findings)
    assert report.refused == []


def test_a_retired_key_cannot_rewrite_what_it_signed() -> None:
    made = rotated()
    other = made.writer.manifests[3].model_copy(update={"step": 31, "signature": None, "_raw": None})
    forged = PUBLISHER.signed(Manifest.model_validate(other.model_dump()))
    made.bucket.put(keys.version_key(3), forged.to_bytes())
    assert keys.version_key(3) in named(all_of(made))


def stolen() -> Signed:
    """Versions 5 and 6, an anchor and HEAD.json are a thief's; the key was revoked up to version 4."""
    made = Signed(PUBLISHER)
    made.deltas(*["plain"] * 6)
    made.merged_deltas()
    made.beside(2)
    made.beside(6)
    made.list_keys(
        1, KeyEntry(key=name_of(PUBLISHER), last=made.last_word(4), revoked=True), KeyEntry(key=name_of(NEXT))
    )
    return made


def go_on(made: Signed) -> None:
    """Publish past the thief's versions, as a publisher does: from the newest version that is good."""
    made.writer.keyring = NEXT
    made.delta(base=4)
    made.delta()


def test_what_a_thief_has_published_is_named() -> None:
    report = all_of(stolen())
    assert named(report) == [
        "HEAD.json",
        "anchors/0000000002.json",
        "anchors/0000000006.json",
        "merged/0000000000-0000000004.json",
        "versions/0000000005.json",
        "versions/0000000006.json",
    ]
    assert report.head == 4


def test_once_the_chain_has_gone_past_a_thief_nothing_is_wrong_with_it() -> None:
    made = stolen()
    go_on(made)
    report = all_of(made)
    assert report.refused == [5, 6]
    assert report.replayed
    assert not any(key.startswith("versions/") for key in named(report))
    # Anchors and merged deltas are made again, and what the thief put beside its versions is removed.
    keyring = Keyring(ROOT.trusted, Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32))
    mended = repair(made.bucket, keyring=keyring)
    assert mended.lost == []
    report = verify_run(made.run)
    assert (report.head, report.replayed, report.refused, report.anchors, report.merged_deltas) == (
        8,
        True,
        [5, 6],
        1,
        1,
    )
    assert ["versions 5, 6: signed by a key that was retired or revoked" in note for note in report.notes] == [True]
    assert np.array_equal(made.run.snapshot(8).bits[0], made.writer.bits[8][0])


def test_a_collection_removes_what_a_thief_has_published() -> None:
    made = stolen()
    go_on(made)
    keyring = Keyring(ROOT.trusted, Ed25519PrivateKey.from_private_bytes(bytes([3]) * 32))
    assert repair(made.bucket, keyring=keyring).lost == []
    made.bucket.clock += HOUR
    report = collect(made.run, RetentionPolicy(keep_last=5, min_age=60.0))
    assert report.lost == {}
    assert not set(report.kept) & {5, 6}
    assert {made.object_of(version) for version in (5, 6)} <= set(report.objects)
    after = verify_run(made.run)
    assert (after.head, after.refused, after.replayed) == (8, [5, 6], True)


def test_a_version_that_builds_on_a_thiefs_is_named() -> None:
    made = stolen()
    made.writer.keyring = NEXT
    made.delta()
    report = all_of(made)
    assert keys.version_key(7) in named(report)
    assert 7 in report.unreadable


# Repair


def assert_all_signed(made: Signed) -> None:
    """Nothing unsigned lies in the run but hints."""
    for key in made.bucket.held:
        if key.endswith(".json") and not key.startswith(("claims/", "heartbeats/", "retention", "tensors")):
            assert b'"signature":{' in made.bucket.get(key), key


def test_what_is_made_again_is_signed(signed: Signed) -> None:
    whole = verify_run(signed.run)
    for key in (side.anchor_key(5), side.merged_delta_key(4, 8), keys.HEAD_KEY):
        signed.bucket.put(key, b"{")
    signed.flip(signed.object_of(3))
    signed.beside(3)
    report = repair(signed.bucket, keyring=ROOT)
    assert report.lost == []
    assert_all_signed(signed)
    after = verify_run(signed.run)
    # A merged delta replaces the lost object of version 3.
    assert (after.head, after.merged_deltas, after.replayed) == (whole.head, whole.merged_deltas + 1, True)


def test_nothing_unsigned_is_written_into_a_signed_run(signed: Signed) -> None:
    for key in (side.anchor_key(5), side.merged_delta_key(4, 8), keys.HEAD_KEY):
        signed.bucket.put(key, b"{")
    before = dict(signed.bucket.held)
    for keyring in (Keyring(), Keyring(ROOT.trusted)):
        report = repair(signed.bucket, keyring=keyring)
        assert dict(signed.bucket.held) == before
        assert report.repaired == []
        assert any("--signing-key" in line and name_of(ROOT)[:16] in line for line in report.lost)
    # With a key that nobody trusts neither.
    foreign = Keyring(ROOT.trusted, Ed25519PrivateKey.from_private_bytes(bytes([4]) * 32))
    assert any(name_of(STRANGER)[:16] in line for line in repair(signed.bucket, keyring=foreign).lost)
    assert dict(signed.bucket.held) == before


def test_nothing_is_taken_from_a_mirror_that_is_not_signed(signed: Signed) -> None:
    mirror = signed.bucket.copy()
    lost = [side.anchor_key(5), side.merged_delta_key(4, 8), side.tag_key("best"), keys.version_key(8), keys.HEAD_KEY]
    for key in lost:
        kind = next((known for name, known in KINDS.items() if name.split("/")[0] == key.split("/")[0]), Head)
        mirror.put(key, FORGERIES["unsigned"](kind.from_bytes(signed.bucket.get(key)), STRANGER))
        signed.bucket.put(key, b"{")
    before = dict(signed.bucket.held)
    report = repair(signed.bucket, mirror=mirror, keyring=Keyring(ROOT.trusted))
    assert report.lost != []
    assert dict(signed.bucket.held) == before


def test_what_is_signed_is_taken_from_a_mirror_without_a_key(signed: Signed) -> None:
    right = {key: data for key, (data, _) in signed.bucket.held.items()}
    mirror = signed.bucket.copy()
    for key in (side.anchor_key(5), side.merged_delta_key(4, 8), side.tag_key("best"), keys.HEAD_KEY, keys.RUN_KEY):
        signed.bucket.put(key, b"{")
    assert repair(signed.bucket, mirror=mirror, keyring=Keyring(ROOT.trusted)).lost == []
    assert {key: data for key, (data, _) in signed.bucket.held.items()} == right


def test_the_list_of_keys_comes_from_a_mirror_only_signed_and_newer() -> None:
    made = rotated()
    right = made.bucket.get(side.KEYS_KEY)
    mirror = made.bucket.copy()
    made.list_keys(1, KeyEntry(key=name_of(PUBLISHER)))
    trusted = Keyring(ROOT.trusted)
    assert repair(made.bucket, mirror=mirror, keyring=Keyring()).repaired == []
    report = repair(made.bucket, mirror=mirror, keyring=trusted)
    assert report.repaired == ["keys.json: from the mirror, with sequence 2"]
    assert made.bucket.get(side.KEYS_KEY) == right
    # An older one, and one of a stranger, are not taken.
    forged = STRANGER.signed(KeyFile.from_bytes(right).model_copy(update={"sequence": 9, "_raw": None}))
    for data in (made.writer.keyring.signed(KeyFile.from_bytes(right)).to_bytes(), forged.to_bytes()):
        mirror.put(side.KEYS_KEY, data)
        assert repair(made.bucket, mirror=mirror, keyring=trusted).repaired == []
    assert made.bucket.get(side.KEYS_KEY) == right


# Who may write


def test_who_may_write_beside_a_signed_chain(signed: Signed) -> None:
    check_signer(Run(Whole().bucket))
    check_signer(Run(signed.bucket, ROOT))
    with pytest.raises(SettingsError, match="--signing-key"):
        check_signer(signed.run)
    with pytest.raises(SettingsError, match="refuse"):
        check_signer(Run(signed.bucket, Keyring(ROOT.trusted, Ed25519PrivateKey.from_private_bytes(bytes([4]) * 32))))


def test_a_list_that_was_put_back_is_seen_by_its_changes(signed: Signed) -> None:
    change_keys(signed.bucket, ROOT, add=[name_of(PUBLISHER)])
    older = signed.bucket.get(side.KEYS_KEY)
    change_keys(signed.bucket, ROOT, revoke=[name_of(PUBLISHER)], version="none")
    signed.bucket.put(side.KEYS_KEY, older)
    assert ["is newer than keys.json" in note for note in list_keys(signed.run).notes] == [True]
    assert repair(signed.bucket, keyring=Keyring(ROOT.trusted)).repaired == [
        "keys.json: from the newest change in keys/, with sequence 2"
    ]
    assert list_keys(signed.run).sequence == 2


def test_objects_of_a_lost_manifest_are_never_signed(signed: Signed) -> None:
    """Only that manifest said which they are, and others that add up to the same fingerprint are made in seconds."""
    lost = keys.version_key(2)
    signed.bucket.delete(lost)
    for pair in Run(signed.bucket).merged_deltas():
        signed.bucket.delete(side.merged_delta_key(*pair))
    report = repair(signed.bucket, keyring=ROOT)
    assert not any("leads across" in line for line in report.repaired)
    assert any(lost in line for line in report.lost)
    assert Run(signed.bucket).merged_deltas() == []


def test_signed_tag_does_not_hold_under_another_name(signed: Signed) -> None:
    signed.tag("rejected", 7)
    signed.bucket.put(side.tag_key("best"), signed.bucket.get(side.tag_key("rejected")))
    with pytest.raises(ChainError, match="'rejected'"):
        signed.run.resolve("tag:best")
    assert side.tag_key("best") in named(all_of(signed))
