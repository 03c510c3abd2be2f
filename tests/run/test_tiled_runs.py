"""Runs whose versions are of codec ``tiled``, all or some: read, checked, and never taken back."""

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.support.damage import Whole
from tests.support.samples import RunWriter, nudge, random_bits, state_of
from tests.support.written import TABLE, Written, assert_bits, find_steps
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cli.inspect import version_document
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec import delta_reader as reading
from vllm_delta_sync.codec.delta_object import FINGERPRINTS
from vllm_delta_sync.codec.tiles import coder
from vllm_delta_sync.errors import DeltaSyncError, FormatError, UnsupportedError
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.safetensors_file import Container
from vllm_delta_sync.run import restore as chain_read
from vllm_delta_sync.run.read_plan import GapError, Step
from vllm_delta_sync.run.restore import apply_step
from vllm_delta_sync.verify.verify import verify_run


@pytest.fixture(scope="module", autouse=True)
def classes_in_any_tensor() -> Iterator[None]:
    """Classes cost less than nothing, so that all tensors have some, and need base bits."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coder, "SMALL_ELEMENTS", 1)
        patch.setattr(coder, "TABLE_BITS", -1000.0)
        yield


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """All codecs, a tensor in full, and a version that two ranks wrote. Tests add to it, and change nothing."""
    written = Written(tmp_path_factory.mktemp("mixed") / "run", 1)
    written.publish(codec="tiled")
    written.publish(codec="raw")
    written.publish(codec="tiled", full=[1])
    written.publish(share=0.0, codec="tiled")
    written.publish_by_ranks(2, "tiled")
    written.publish(codec="tiled", base=4)
    return written


@pytest.mark.parametrize("pieces", [False, True])
def test_every_version_is_bit_exact(mixed: Written, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if pieces:
        monkeypatch.setattr(chain_read, "DECODED_ELEMENTS", 0)
        monkeypatch.setattr(reading, "LAZY_ELEMENTS", 100)
    for version, bits in enumerate(mixed.writer.bits):
        assert_bits(mixed.run.snapshot(version), bits)
    report = mixed.run.verify()
    assert (report.replayed, report.undecoded, report.notes, report.findings) == (True, [], [], [])


def test_nothing_is_read_without_the_weights_before(mixed: Written) -> None:
    run = mixed.run
    for version in (2, 4, 6):
        manifest = run.manifest(version)
        assert not manifest.reversible
        with pytest.raises(UnsupportedError, match="not available here"):
            run.changes(manifest)
        changes = run.changes(manifest, state_of(TABLE, mixed.writer.bits[version - 1]).base_tensor)
        assert changes.changed == manifest.changed


def test_a_version_is_not_taken_back(mixed: Written) -> None:
    run = mixed.run
    with pytest.raises(GapError, match="cannot be reverted"):
        find_steps(run, 2, 1)
    # One that lies about it is refused all the same, and found.
    state = state_of(TABLE, mixed.writer.bits[2])
    liar = run.manifest(2).model_copy(update={"reversible": True})
    for in_pieces in (False, True):
        with pytest.raises(UnsupportedError, match="only with the weights of its base version"):
            apply_step(Step(run, liar, backwards=True), state, in_pieces=in_pieces)
    assert_bits(state, mixed.writer.bits[2])
    whole = Whole()
    whole.delta("tiled")
    whole.writer.manifests[1] = whole.writer.manifests[1].model_copy(update={"reversible": True})
    whole.bucket.put(keys.version_key(1), whole.writer.manifests[1].to_bytes())
    whole.writer.head(1)
    with pytest.raises(FormatError, match="need base bits for decoding"):
        verify_run(whole.run)


@pytest.mark.parametrize("in_pieces", [False, True])
def test_other_weights_are_refused_and_stay(mixed: Written, in_pieces: bool) -> None:
    run = mixed.run
    for version in (2, 4, 6):
        step = find_steps(run, version - 1, version)[0]
        other = nudge(mixed.writer.bits[version - 1], np.random.default_rng(8), 0.01)
        state = state_of(TABLE, other)
        with pytest.raises(DeltaSyncError, match=r"other weights|lead to fingerprint"):
            apply_step(step, state, in_pieces=in_pieces)
        assert_bits(state, other)


def test_a_flipped_bit_is_refused_wherever_it_is(mixed: Written) -> None:
    """With the digest of the damaged object in the manifest, as a writer with bad memory would leave it."""
    run, manifest = mixed.run, mixed.run.manifest(2)
    data = run.fetch(manifest.objects[0])
    refused = 0
    for place in range(8, len(data), 29):
        bad = bytearray(data)
        bad[place] ^= 4
        digest = sha256(bad).hexdigest()
        ref = manifest.objects[0].model_copy(update={"sha256": digest, "key": keys.object_key(digest)})
        mixed.bucket.put(ref.key, bytes(bad))
        state = state_of(TABLE, mixed.writer.bits[1])
        step = Step(run, manifest.model_copy(update={"objects": [ref]}))
        try:
            apply_step(step, state)
            assert_bits(state, mixed.writer.bits[2])
        except DeltaSyncError:
            refused += 1
    assert refused > 30


def test_what_can_be_checked_without_weights_is(tmp_path: Path) -> None:
    """The base is elsewhere, so no weights are there at all."""
    random = np.random.default_rng(9)
    bits = [random_bits(TABLE, random)]
    writer = RunWriter(open_bucket(tmp_path / "run"), TABLE)
    writer.reference(bits[0], str(tmp_path / "elsewhere"))
    for codec in ("tiled", "plain", "tiled"):
        bits.append(nudge(bits[-1], random, 0.02))
        writer.delta(bits[-1], codec)  # type: ignore[arg-type]
    run = open_run(str(tmp_path / "run"))
    report = run.verify()
    assert (report.replayed, report.undecoded) == (False, [keys.version_key(1), keys.version_key(3)])
    assert "2 documents of codec 'tiled' (the first is versions/0000000001.json)" in report.notes[-1]
    # What their objects declare is held against the manifests all the same, and their tables are read.
    manifest = writer.manifests[3]
    data = run.fetch(manifest.objects[0])
    entries, start = Container(data, "object").entries, 8 + int.from_bytes(data[:8], "little")
    for name, message in ((FINGERPRINTS, "lead to fingerprint"), ("@0.tables", "block 0: tables")):
        bad = bytearray(data)
        bad[start + entries[name].end - 1] ^= 255
        digest = sha256(bad).hexdigest()
        ref = manifest.objects[0].model_copy(update={"sha256": digest, "key": keys.object_key(digest)})
        writer.bucket.put(ref.key, bytes(bad))
        writer.manifests[3] = manifest.model_copy(update={"objects": [ref]})
        writer.bucket.put(keys.version_key(3), writer.manifests[3].to_bytes())
        writer.head(3)
        [finding] = run.verify(findings=True).findings
        assert finding.key == keys.version_key(3)
        assert message in finding.error.message


def test_inspect_says_how_much_changed_without_weights(mixed: Written) -> None:
    document = version_document(mixed.run, 4)
    old, new = mixed.writer.bits[3], mixed.writer.bits[4]
    rows = {row["name"]: (row["sent"], row["changed"]) for row in document["tensors"]}
    assert rows == {
        spec.name: ("full", spec.numel) if tensor == 1 else ("sparse", int((old[tensor] != new[tensor]).sum()))
        for tensor, spec in enumerate(TABLE)
    }
    assert {row["one_ulp"] for row in document["tensors"]} == {None}


# Repair and retention


def test_what_a_collection_took_leaves_versions_unread() -> None:
    """A delta is there, and nothing that leads to what it builds on."""
    whole = Whole(seed=9)
    whole.deltas("plain", "plain", "tiled", "tiled")
    whole.beside(4)
    whole.retire((1, 2))
    report = verify_run(whole.run, findings=True)
    assert (report.undecoded, report.unreadable) == ([keys.version_key(3), keys.version_key(4)], [3])
    assert whole.is_readable(4)
