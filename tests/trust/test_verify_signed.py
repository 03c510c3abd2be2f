"""Checking and repairing a signed run: each document that is forged, changed or signed by the wrong key is named."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.support.collecting import HOUR
from tests.support.forge import FORGERIES
from tests.support.signed_runs import NEXT, ROOT, STRANGER, Signed, name_of
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import ChainError, SignatureError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.documents import Anchor, MergedDelta, Tag
from vllm_delta_sync.format.manifest import Head, Manifest, RunInfo
from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import make_head
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
    keys.version_key(0): Manifest,
    keys.version_key(4): Manifest,
    keys.version_key(8): Manifest,
    side.anchor_key(5): Anchor,
    side.merged_delta_key(0, 4): MergedDelta,
    side.tag_key("best"): Tag,
}


def test_a_whole_signed_run(signed: Signed) -> None:
    report = verify_run(signed.run)
    assert (report.head, report.replayed, report.checked, report.signed) == (8, True, True, name_of(ROOT))
    assert (report.notes, report.findings) == ([], [])
    assert signed.run.verify() == report
    # Hints need no signature.
    assert b'"signature":null' in signed.bucket.get(side.claim_key(1))
    # Without trusted keys the same, and said.
    unchecked = verify_run(Run(signed.bucket))
    assert (unchecked.head, unchecked.checked, unchecked.findings) == (8, False, [])
    assert ["signatures were not checked" in note for note in unchecked.notes] == [True]


@pytest.mark.parametrize(
    ("key", "forgery"),
    [*((key, "stranger") for key in KINDS), *((keys.version_key(4), name) for name in FORGERIES if name != "stranger")],
)
def test_each_forged_document_is_named(key: str, forgery: str, signed: Signed) -> None:
    run = signed.run
    good = KINDS[key].from_bytes(signed.bucket.get(key))
    signed.bucket.put(key, FORGERIES[forgery](good, STRANGER))
    if key == keys.RUN_KEY:
        # Nothing can be believed without it.
        with pytest.raises(SignatureError, match=key.replace(".", r"\.")):
            _ = signed.run
        return
    with pytest.raises(SignatureError, match=key.replace(".", r"\.")):
        verify_run(run)
    report = all_of(signed, run)
    assert key in named(report)
    assert all(isinstance(finding.error, SignatureError) for finding in report.findings if finding.key == key)


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
        for place in range(0, len(good), 37):
            signed.flip(key, place)
            assert key in {finding.key for finding in DocumentAudit(run).findings}, good[: place + 1]
            signed.bucket.put(key, good)


def test_a_head_that_has_run_out_is_noted(signed: Signed) -> None:
    signed.bucket.put(keys.HEAD_KEY, make_head(signed.writer.manifests[8], ROOT, seconds=-1).to_bytes())
    report = verify_run(signed.run)
    assert ["HEAD.json expired at" in note for note in report.notes] == [True]
    signed.bucket.put(keys.HEAD_KEY, make_head(signed.writer.manifests[8], ROOT).to_bytes())
    assert verify_run(signed.run).notes == []


def two_keys() -> Signed:
    """The root signs versions 0 to 4, and then a publisher with another key takes over."""
    made = Signed()
    made.deltas(*["plain"] * 4)
    made.merged_deltas()
    made.writer.keyring = NEXT
    made.deltas(*["plain"] * 3)
    made.beside(7)
    return made


def test_a_run_of_two_keys_is_whole_where_both_are_trusted_and_else_what_is_not_is_named() -> None:
    made = two_keys()
    report = verify_run(Run(made.bucket, Keyring(ROOT.trusted | NEXT.trusted)))
    assert (report.head, report.replayed, report.merged_deltas, report.anchors, report.notes) == (7, True, 1, 1, [])
    report = all_of(made)
    later = [keys.version_key(version) for version in (5, 6, 7)]
    assert named(report) == ["HEAD.json", side.anchor_key(7), *later]
    assert all(isinstance(finding.error, SignatureError) for finding in report.findings)
    assert report.head == 4
    # The key of run.json must be trusted, or nothing is read.
    with pytest.raises(SignatureError, match=r"run\.json"):
        Run(made.bucket, Keyring(NEXT.trusted))
    # Nothing is removed from a history that is not trusted.
    made.bucket.clock += HOUR
    before = set(made.bucket.held)
    with pytest.raises(SignatureError):
        collect(made.run, RetentionPolicy(keep_last=1, min_age=60.0))
    assert set(made.bucket.held) == before


# Repair


def assert_all_signed(made: Signed) -> None:
    """Nothing unsigned lies in the run but hints."""
    for key in made.bucket.held:
        if key.endswith(".json") and not key.startswith(
            ("claims/", "collections/", "heartbeats/", "retention", "tensors")
        ):
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
    # The anchor replaces the lost object of version 3.
    assert (after.head, after.merged_deltas, after.gone, after.replayed) == (whole.head, whole.merged_deltas, 1, True)


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
