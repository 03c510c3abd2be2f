"""Signatures of documents, whose signatures count, key files, and the file of what was seen before: nothing but what is
signed is believed, not as another kind, and not beyond the word of a revoked key."""

import json
import os
import stat
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from hypothesis import given
from hypothesis import strategies as st

from tests.support.publishers import Hooked
from tests.support.signers import (
    INFO,
    NEXT,
    OTHER_ROOT,
    ROOT,
    RUN,
    STRANGER,
    TIME,
    TRAINER,
    by,
    entry,
    key_file,
    manifest,
    public,
    ring,
)
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    ForkError,
    FormatError,
    ReplayError,
    SettingsError,
    SignatureError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format.canonical_json import dump_canonical
from vllm_delta_sync.format.documents import (
    KEYS_KEY,
    Anchor,
    Claim,
    Collection,
    Heartbeat,
    KeyEntry,
    KeyFile,
    MergedDelta,
    Retention,
    Tag,
)
from vllm_delta_sync.format.manifest import Document, Head, Manifest, RunInfo, Signature, version_key
from vllm_delta_sync.run.verifier import RunVerifier
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import make_head
from vllm_delta_sync.trust.keyring import RunKeys
from vllm_delta_sync.trust.keys import MAX_KEY_BYTES, generate, load_private, load_public
from vllm_delta_sync.trust.last_seen import LastSeen, LastSeenStore


def test_what_is_signed_can_be_checked_without_this_project() -> None:
    signed = by(TRAINER, manifest(0))
    value = json.loads(signed.to_bytes())
    signature = value.pop("signature")
    message = b"vllm-delta-sync/manifest/1\0" + rfc8785.dumps(value)
    TRAINER.public_key().verify(bytes.fromhex(signature["value"]), message)
    assert signature["key"] == public(TRAINER)
    # And the reverse: what others sign like that is believed.
    value["signature"] = {"key": public(NEXT), "value": NEXT.sign(message).hex()}
    theirs = Manifest.from_bytes(rfc8785.dumps(value))
    RunKeys(ring(None, NEXT), RUN).check_manifest(theirs, 0, "it")


def test_signing_is_repeatable_and_takes_the_place_of_what_was_there() -> None:
    once = by(TRAINER, manifest(0))
    assert by(TRAINER, once).to_bytes() == once.to_bytes() == by(TRAINER, by(STRANGER, manifest(0))).to_bytes()
    assert Keyring().signed(once) is once
    assert Manifest.from_bytes(once.to_bytes()) == once


def test_fields_that_this_release_does_not_know_are_signed_too() -> None:
    value = json.loads(manifest(0).to_bytes()) | {"later": [1, {"x": "y"}]}
    signed = by(TRAINER, Manifest.from_bytes(dump_canonical(value)))
    assert json.loads(signed.to_bytes())["later"] == [1, {"x": "y"}]
    keys = RunKeys(ring(None, TRAINER), RUN)
    keys.check_manifest(signed, 0, "it")
    value = json.loads(signed.to_bytes())
    without = {name: part for name, part in value.items() if name != "later"}
    for changed in (value | {"later": [1]}, value | {"later": None}, without):
        with pytest.raises(SignatureError, match="was changed"):
            keys.check_manifest(Manifest.from_bytes(dump_canonical(changed)), 0, "it")


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of everything in a JSON value, whole parts included."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*place, key) for key, _ in parts]
    return found + [leaf for key, part in parts for leaf in _leaves(part, (*place, key))]


def _put(value: Any, place: tuple[Any, ...], new: Any) -> None:
    for key in place[:-1]:
        value = value[key]
    if new is _GONE:
        del value[place[-1]]
    else:
        value[place[-1]] = new


_GONE = object()


_RICH = manifest(
    9,
    manifest(8),
    breaks=[{"version": 4, "base_version": 2}],
    requires=["plain"],
    codec="plain",
    compression="zstd",
    reversible=True,
    epoch=2,
    quarantine={"reasons": ["a", "b"], "sound": 7},
)


_RICH_SIGNED = by(TRAINER, _RICH)


def _refused(document: dict[str, Any], kind: type[Document]) -> None:
    """It is no document any more, or nobody has signed it."""
    keys = RunKeys(ring(None, TRAINER), RUN)
    try:
        found = kind.from_bytes(dump_canonical(document))
    except (FormatError, UnsupportedError):
        return
    with pytest.raises(SignatureError):
        keys.check_standalone(found, 9, "it")


def _flipped(value: Any) -> list[Any]:
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, max(0, value - 1)]
    if isinstance(value, str):
        last = "1" if value[-1:] == "0" else "0"
        return [value[:-1] + last, value + "0"]
    if isinstance(value, list):
        return [[], [*value, *value[:1]]]
    return [{}]


@pytest.mark.parametrize(
    "place", _leaves(json.loads(_RICH_SIGNED.to_bytes())), ids=lambda place: ".".join(map(str, place))
)
def test_every_field_of_a_signed_manifest_counts(place: tuple[Any, ...]) -> None:
    original = json.loads(_RICH_SIGNED.to_bytes())
    part = original
    for key in place:
        part = part[key]
    tried = 0
    for new in (*_flipped(part), None, _GONE):
        changed = json.loads(_RICH_SIGNED.to_bytes())
        _put(changed, place, new)
        if changed == original:
            continue
        tried += 1
        _refused(changed, Manifest)
    assert tried


@given(st.integers(0, len(_RICH_SIGNED.to_bytes()) - 1), st.integers(1, 255))
def test_changed_bytes_are_refused(place: int, flip: int) -> None:
    data = bytearray(_RICH_SIGNED.to_bytes())
    data[place] ^= flip
    with pytest.raises(DeltaSyncError):
        RunKeys(ring(None, TRAINER), RUN).check_manifest(Manifest.from_bytes(bytes(data)), 9, "it")


def test_each_kind_has_a_name_of_its_own() -> None:
    kinds: list[type[Document]] = [RunInfo, Manifest, Head, Anchor, MergedDelta, Tag, Claim, Heartbeat, Collection]
    kinds += [Retention, KeyFile]
    assert len({kind.KIND for kind in kinds}) == len(kinds)


def test_a_document_of_one_kind_is_not_taken_for_another() -> None:
    """All fields of a claim and of a tag in one: it is well formed as both, and signed as one."""
    fields = {
        "format_version": 2, "requires": [], "run": RUN, "name": "a", "version": 3, "manifest": "1" * 64, "epoch": 1,
        "writer": "2" * 32, "milestone": False, "branch": None, "created_at": TIME,
    }  # fmt: skip
    keys = RunKeys(ring(None, TRAINER), RUN)
    kinds: list[type[Document]] = [Claim, Tag, Head]
    for kind in kinds:
        signed = by(TRAINER, kind.from_bytes(dump_canonical(fields)))
        for other in kinds:
            taken = other.from_bytes(signed.to_bytes())
            if other is kind:
                keys.check_standalone(taken, 3, "it")
            else:
                with pytest.raises(SignatureError, match="was changed"):
                    keys.check_standalone(taken, 3, "it")


def test_messages_of_one_kind_are_not_taken_for_another() -> None:
    keyring, allowed = ring(TRAINER, TRAINER), frozenset([public(TRAINER)])
    signature = keyring.sign_bytes("notice", b"data")
    keyring.check_bytes("notice", b"data", signature, "it", allowed)
    for kind, data in (("notice", b"date"), ("manifest", b"data")):
        with pytest.raises(SignatureError, match="was changed"):
            keyring.check_bytes(kind, data, signature, "it", allowed)
    with pytest.raises(SignatureError, match="not signed"):
        keyring.check_bytes("notice", b"data", None, "it", allowed)
    with pytest.raises(SignatureError, match="not trusted"):
        keyring.check_bytes("notice", b"data", signature, "it", frozenset([public(ROOT)]))
    assert Keyring().sign_bytes("notice", b"data") is None


def test_signatures_with_more_in_them_are_no_documents() -> None:
    """What is in there would be in the digest and not under the signature."""
    value = json.loads(by(TRAINER, manifest(0)).to_bytes())
    value["signature"]["more"] = 1
    with pytest.raises(FormatError, match="more"):
        Manifest.from_bytes(dump_canonical(value))


def test_a_signature_has_one_spelling() -> None:
    """With S plus the group's order it would verify as well, with another digest; RFC 8032 refuses that."""
    signed = by(TRAINER, manifest(0))
    assert signed.signature is not None
    raw = bytes.fromhex(signed.signature.value)
    order = 2**252 + 27742317777372353535851937790883648493
    s = int.from_bytes(raw[32:], "little") + order
    other = Signature(key=signed.signature.key, value=(raw[:32] + s.to_bytes(32, "little")).hex())
    value = json.loads(signed.to_bytes()) | {"signature": other.model_dump()}
    with pytest.raises(SignatureError, match="was changed"):
        RunKeys(ring(None, TRAINER), RUN).check_manifest(Manifest.from_bytes(dump_canonical(value)), 0, "it")


@pytest.mark.parametrize("key", ["00" * 32, "01" + "00" * 31, "ff" * 32, "ec" + "ff" * 30 + "7f"])
def test_keys_that_are_no_keys(key: str) -> None:
    value = json.loads(manifest(0).to_bytes()) | {"signature": {"key": key, "value": "00" * 64}}
    with pytest.raises(SignatureError):
        RunKeys(ring(None, TRAINER), RUN).check_manifest(Manifest.from_bytes(dump_canonical(value)), 0, "it")


def test_head_of_a_version() -> None:
    newest = by(TRAINER, manifest(4, manifest(3), epoch=2))
    plain = make_head(newest, Keyring())
    assert (plain.version, plain.manifest, plain.parent, plain.epoch) == (4, newest.digest, newest.parent, 2)
    assert (plain.created_at, plain.expires_at, plain.signature) == (None, None, None)
    signed = make_head(newest, ring(TRAINER, TRAINER), 60)
    RunKeys(ring(None, TRAINER), RUN).check_standalone(signed, 4, "HEAD.json")
    from datetime import datetime, timedelta

    begins, ends = (datetime.fromisoformat(time or "") for time in (signed.created_at, signed.expires_at))
    assert ends - begins == timedelta(seconds=60)


# Whose word counts


# Whose word counts


def test_a_keyring_that_without_keys_checks_nothing(tmp_path: Path) -> None:
    bucket = open_bucket(str(tmp_path))
    bucket.put(KEYS_KEY, b"garbage")
    found = RunVerifier(bucket, Keyring(), INFO)
    found.refresh()
    found.check_manifest(manifest(0), "it")
    found.check_head(Head(run=RUN, version=0, manifest="0" * 64), "it")


@pytest.mark.parametrize("signer", [None, STRANGER])
def test_everything_of_others_is_refused(signer: Any) -> None:
    keys = RunKeys(ring(None, ROOT, TRAINER), RUN)
    checks: list[tuple[Callable[..., object], Document, tuple[Any, ...]]] = [
        (keys.check_info, INFO, ()),
        (keys.check_manifest, manifest(0), (0, "it")),
        (keys.check_standalone, Head(run=RUN, version=0, manifest="0" * 64), (0, "it")),
    ]
    for check, document, rest in checks:
        offered = document if signer is None else by(signer, document)
        with pytest.raises(SignatureError, match="not signed" if signer is None else "not trusted"):
            check(offered, *rest)
        check(by(TRAINER, document), *rest)


@pytest.mark.parametrize("signer", [None, STRANGER])
def test_head_of_others_is_refused(signer: Any, tmp_path: Path) -> None:
    found = RunVerifier(open_bucket(str(tmp_path)), ring(None, TRAINER), by(TRAINER, INFO))
    head = Head(run=RUN, version=0, manifest="0" * 64)
    found.check_head(by(TRAINER, head), "it")
    with pytest.raises(SignatureError):
        found.check_head(head if signer is None else by(signer, head), "it")


def test_delegated_keys() -> None:
    keys = RunKeys(ring(None, ROOT), RUN)
    signed = by(TRAINER, manifest(0))
    with pytest.raises(SignatureError, match="not trusted"):
        keys.check_manifest(signed, 0, "it")
    keys.accept(key_file([entry(TRAINER)]))
    assert keys.check_manifest(signed, 0, "it") is None
    assert keys.allowed() == {public(ROOT), public(TRAINER)}
    # Who is taken out of the list altogether is nobody any more.
    keys.accept(key_file([entry(NEXT)], 2))
    with pytest.raises(SignatureError, match="not trusted"):
        keys.check_manifest(signed, 0, "it")
    assert keys.allowed() == {public(ROOT), public(NEXT)}


def test_list_of_keys_vouches_for_run_json() -> None:
    keys = RunKeys(ring(None, ROOT), RUN)
    info = by(TRAINER, INFO)
    with pytest.raises(SignatureError, match="not trusted"):
        keys.check_info(info)
    # Also after the key that began the run was stolen.
    keys.accept(key_file([entry(TRAINER, revoked=True)]))
    keys.check_info(info)
    with pytest.raises(SignatureError, match="revoked"):
        keys.check_info(by(TRAINER, INFO.model_copy(update={"total": 101})))


def test_only_roots_change_the_list() -> None:
    """A delegated key lists one of its own."""
    keys = RunKeys(ring(None, ROOT), RUN)
    keys.accept(key_file([entry(TRAINER)]))
    listed = [entry(TRAINER), entry(STRANGER)]
    value = json.loads(key_file(listed, 2).to_bytes())
    unsigned, changed = {**value, "signature": None}, {**value, "sequence": 3}
    forged = [key_file(listed, 2, TRAINER), key_file(listed, 2, STRANGER)]
    for one in [*forged, *(KeyFile.from_bytes(dump_canonical(one)) for one in (unsigned, changed))]:
        with pytest.raises(SignatureError):
            keys.accept(one)
    with pytest.raises(ChainError, match="belongs to run"):
        keys.accept(key_file([entry(TRAINER)], 2, run="cd" * 16))
    assert keys.allowed() == {public(ROOT), public(TRAINER)}
    assert keys.file is not None
    assert keys.file.sequence == 1


def test_list_that_was_put_back() -> None:
    keys = RunKeys(ring(None, ROOT), RUN)
    keys.accept(key_file([entry(TRAINER)], 1))
    keys.accept(key_file([entry(TRAINER, manifest(3))], 2))
    keys.accept(key_file([entry(TRAINER, manifest(3))], 2))
    for old in (key_file([entry(TRAINER)], 1), None):
        with pytest.raises(ReplayError, match="2 was seen before"):
            keys.accept(old)
    assert keys.allowed() == {public(ROOT)}
    fresh = RunKeys(ring(None, ROOT), RUN)
    with pytest.raises(ReplayError, match="sequence 1, and 2"):
        fresh.accept(key_file([entry(TRAINER)], 1), at_least=2)
    with pytest.raises(ReplayError, match="sequence 0, and 2"):
        fresh.accept(None, at_least=2)


def test_revoked_root_does_not_take_it_back() -> None:
    keys = RunKeys(ring(None, ROOT, OTHER_ROOT), RUN)
    keys.accept(key_file([entry(ROOT, revoked=True)], 1, OTHER_ROOT))
    with pytest.raises(SignatureError, match="which it revokes"):
        keys.accept(key_file([entry(ROOT, revoked=True)], 2, ROOT))
    with pytest.raises(SignatureError, match="was revoked before"):
        keys.accept(key_file([], 2, ROOT))
    assert keys.allowed() == {public(OTHER_ROOT)}
    keys.accept(key_file([], 2, OTHER_ROOT))
    assert keys.allowed() == {public(ROOT), public(OTHER_ROOT)}


def test_side_documents_of_retired_and_revoked_keys() -> None:
    keys = RunKeys(ring(None, ROOT), RUN)
    at_3, at_4 = (by(TRAINER, Head(run=RUN, version=version, manifest="0" * 64)) for version in (3, 4))
    keys.accept(key_file([entry(TRAINER, manifest(3))]))
    keys.check_standalone(at_3, 3, "it")
    with pytest.raises(SignatureError, match="is not valid for version 4 any more"):
        keys.check_standalone(at_4, 4, "it")
    keys.accept(key_file([entry(TRAINER, manifest(3), revoked=True)], 2))
    for head in (at_3, at_4):
        with pytest.raises(SignatureError, match="is not valid"):
            keys.check_standalone(head, head.version, "it")


# Along the chain


class Chain:
    """Signed manifests in a bucket; each is signed by the key that is given for it."""

    def __init__(self, folder: Path, signers: list[Any]) -> None:
        self.bucket: Bucket = open_bucket(str(folder))
        self.manifests: list[Manifest] = []
        for version, signer in enumerate(signers):
            self.put(by(signer, manifest(version, self.manifests[-1] if self.manifests else None)))

    def put(self, made: Manifest) -> Manifest:
        self.manifests.append(made)
        self.bucket.put(version_key(made.version), made.to_bytes())
        return made

    def list_keys(self, *entries: KeyEntry, sequence: int = 1) -> None:
        self.bucket.put(KEYS_KEY, key_file(list(entries), sequence).to_bytes())

    def reader(self) -> RunVerifier:
        return RunVerifier(self.bucket, ring(None, ROOT), by(TRAINER, INFO))

    def believed(self, reader: RunVerifier | None = None) -> list[int]:
        reader = reader or self.reader()
        found = []
        for one in self.manifests:
            try:
                reader.check_manifest(one, version_key(one.version))
            except (SignatureError, ForkError):
                continue
            found.append(one.version)
        return found


def test_rotation(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [TRAINER] * 4 + [NEXT] * 3)
    chain.list_keys(entry(TRAINER), entry(NEXT))
    assert chain.believed() == list(range(7))
    chain.list_keys(entry(TRAINER, chain.manifests[3]), entry(NEXT), sequence=2)
    assert chain.believed() == list(range(7))
    # The old key goes on: it is not believed after its last word.
    chain.put(by(TRAINER, manifest(7, chain.manifests[6])))
    assert chain.believed() == list(range(7))
    # Nor with another version in the place of one that it did sign.
    again = by(TRAINER, manifest(2, chain.manifests[1], step=99))
    with pytest.raises(SignatureError, match=r"is not among the versions that keys.json accepts"):
        chain.reader().check_manifest(again, "it")


def test_revocation(tmp_path: Path) -> None:
    """The key was stolen, and used for versions 4 and 5: without a last word nothing of it is believed."""
    chain = Chain(tmp_path, [TRAINER] * 6)
    chain.list_keys(entry(TRAINER))
    assert chain.believed() == list(range(6))
    chain.list_keys(entry(TRAINER, revoked=True), sequence=2)
    assert chain.believed() == []
    chain.list_keys(entry(TRAINER, chain.manifests[3], revoked=True), entry(NEXT), sequence=3)
    reader = chain.reader()
    assert chain.believed(reader) == [0, 1, 2, 3]
    chain.put(by(NEXT, manifest(4, chain.manifests[3], step=99)))
    assert chain.believed(reader) == [0, 1, 2, 3, 4]
    with pytest.raises(SignatureError, match="was revoked after version 3"):
        reader.check_manifest(chain.manifests[4], "it")


def test_only_manifests_of_ended_keys_are_recognized_as_such(tmp_path: Path) -> None:
    """Later versions may name them as parents, though they are not served."""
    chain = Chain(tmp_path, [TRAINER, NEXT, STRANGER])
    chain.list_keys(entry(TRAINER))
    assert chain.reader().signed_by_ended_key(chain.manifests[0].to_bytes(), "it") is None
    chain.list_keys(entry(TRAINER, chain.manifests[0], revoked=True), entry(NEXT), sequence=2)
    reader = chain.reader()
    ended = [reader.signed_by_ended_key(one.to_bytes(), "it") is not None for one in chain.manifests]
    assert ended == [True, False, False]
    unsigned, forged = manifest(0), by(TRAINER, manifest(0)).to_bytes().replace(b'"step":0', b'"step":1')
    assert reader.signed_by_ended_key(unsigned.to_bytes(), "it") is None
    assert reader.signed_by_ended_key(forged, "it") is None
    without_keys = RunVerifier(chain.bucket, Keyring(), INFO)
    assert without_keys.signed_by_ended_key(chain.manifests[0].to_bytes(), "it") is None


def test_history_that_is_not_linked_to_a_last_word_is_not_believed(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [TRAINER] * 5)
    chain.list_keys(entry(TRAINER, chain.manifests[4], revoked=True))
    chain.bucket.delete(version_key(3))
    with pytest.raises(SignatureError, match="cannot be shown"):
        chain.reader().check_manifest(chain.manifests[1], "it")
    chain.reader().check_manifest(chain.manifests[4], "it")
    chain.bucket.put(version_key(3), b"{}")
    with pytest.raises(ForkError, match="the manifest was replaced"):
        chain.reader().check_manifest(chain.manifests[1], "it")
    # A thief writes every manifest up to the pin anew, with good signatures and links: only the pin tells.
    forged: list[Manifest] = []
    for version in range(5):
        forged.append(by(TRAINER, manifest(version, forged[-1] if forged else None, step=7)))
        chain.bucket.put(version_key(version), forged[-1].to_bytes())
    for one in forged:
        with pytest.raises((ForkError, SignatureError)):
            chain.reader().check_manifest(one, version_key(one.version))


def test_each_link_is_read_once_with_many_keys(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [TRAINER] * 20 + [NEXT] * 20 + [ROOT])
    chain.list_keys(entry(TRAINER, chain.manifests[19]), entry(NEXT, chain.manifests[39]))
    counting, read = Hooked(tmp_path), []
    counting.reading = lambda key: read.append(key) if key.startswith("versions/") else None
    reader = RunVerifier(counting, ring(None, ROOT), by(TRAINER, INFO))
    for version in (0, 39, 5, 20, 19, 30, 0):
        reader.check_manifest(chain.manifests[version], "it")
    assert 30 <= len(read) == len(set(read)) <= 40


def test_threads_that_prove_at_once(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [TRAINER] * 30)
    chain.list_keys(entry(TRAINER, chain.manifests[29]))
    for _ in range(5):
        reader, failures = chain.reader(), []
        barrier = threading.Barrier(8)

        def prove(version: int) -> None:
            barrier.wait(120)  # noqa: B023
            try:
                reader.check_manifest(chain.manifests[version], "it")  # noqa: B023
            except DeltaSyncError as error:
                failures.append(error)  # noqa: B023

        threads = [threading.Thread(target=prove, args=(version,)) for version in range(0, 16, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert failures == []


def test_ancestors(tmp_path: Path) -> None:
    chain = Chain(tmp_path, [TRAINER] * 6)
    chain.list_keys(entry(TRAINER))
    reader = chain.reader()
    digests = [one.digest for one in chain.manifests]
    for version in (5, 3):
        assert [reader.ancestor_digest(version, digests[version], wanted) for wanted in range(version + 1)] == digests[
            : version + 1
        ]
    with pytest.raises(ChainError, match="cannot precede"):
        reader.ancestor_digest(3, digests[3], 4)
    with pytest.raises(ForkError):
        reader.ancestor_digest(3, digests[2], 1)


# Key files


def test_generated_keys(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        made = generate(tmp_path / "trainer")
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "trainer").stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "trainer.pub").stat().st_mode) == 0o644
    assert load_public(tmp_path / "trainer.pub") == made == public(load_private(tmp_path / "trainer"))
    assert generate(tmp_path / "other") != made


@pytest.mark.parametrize("there", ["trainer", "trainer.pub"])
def test_keys_that_are_there_are_not_replaced(there: str, tmp_path: Path) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConflictError, match="exists already"):
        generate(tmp_path / "trainer")
    with pytest.raises(StoreError, match="cannot be written"):
        generate(tmp_path / "no" / "folder")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {there: "mine"}


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601])
def test_private_key_that_others_can_reach(mode: int, tmp_path: Path) -> None:
    generate(tmp_path / "trainer")
    (tmp_path / "trainer").chmod(mode)
    with pytest.raises(SettingsError, match="chmod 600"):
        Keyring.load(None, tmp_path / "trainer")


def _pem(key: Any, password: bytes | None = None) -> bytes:
    how = NoEncryption() if password is None else BestAvailableEncryption(password)
    pem: bytes = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, how)
    return pem


def _public_pem(key: Any) -> bytes:
    pem: bytes = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    return pem


CURVE = ec.generate_private_key(ec.SECP256R1())


BAD_KEYS = {
    "private: nothing": (b"", "not a PEM private key"),
    "private: text": (b"not a key", "not a PEM private key"),
    "private: password": (_pem(TRAINER, b"secret"), "without a password"),
    "private: another kind": (_pem(CURVE), "not an Ed25519 key"),
    "private: public": (_public_pem(TRAINER), "not a PEM private key"),
    "private: huge": (_pem(TRAINER) + b"\n" * MAX_KEY_BYTES, "longer than"),
    "public: nothing": (b"", "not a PEM public key"),
    "public: text": (b"not a key", "not a PEM public key"),
    "public: private": (_pem(TRAINER), r"is a private key; give the public key \(key\.pub\)"),
    "public: another kind": (_public_pem(CURVE), "not an Ed25519 key"),
    "public: huge": (b"\n" * (MAX_KEY_BYTES + 1), "longer than"),
}


@pytest.mark.parametrize("name", BAD_KEYS)
def test_bad_keys(name: str, tmp_path: Path) -> None:
    data, match = BAD_KEYS[name]
    file = tmp_path / "key"
    file.write_bytes(data)
    file.chmod(0o600)
    with pytest.raises(SettingsError, match=match) as caught:
        load_private(file) if name.startswith("private") else Keyring.load([file])
    # Nothing of the file is shown: it may hold a key all the same.
    assert not any(line in str(caught.value) for line in data.decode().splitlines() if line)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    for files in ({"trusted_keys": str(tmp_path / "x")}, {"signing_key": tmp_path / "x"}, {"signing_key": tmp_path}):
        with pytest.raises(SettingsError, match="cannot be read"):
            Keyring.load(**files)  # type: ignore[arg-type]


def test_keyring_from_files(tmp_path: Path) -> None:
    first, second = generate(tmp_path / "a"), generate(tmp_path / "b")
    assert Keyring.load(f"{tmp_path / 'a.pub'} , {tmp_path / 'b.pub'},").trusted == {first, second}
    assert Keyring.load([tmp_path / "a.pub", str(tmp_path / "b.pub")]).trusted == {first, second}
    alone = Keyring.load(None, tmp_path / "a")
    assert (set(alone.trusted), alone.public, alone.has_signing_key, alone.checks_signatures) == (
        {first},
        first,
        True,
        True,
    )
    apart = Keyring.load(str(tmp_path / "b.pub"), str(tmp_path / "a"))
    assert (set(apart.trusted), apart.public) == ({second}, first)
    none = Keyring.load()
    assert (none.trusted, none.public, none.has_signing_key, none.checks_signatures) == (
        frozenset(),
        None,
        False,
        False,
    )
    empties: list[str | list[str]] = ["", " , ", []]
    for empty in empties:
        with pytest.raises(SettingsError, match="names no file"):
            Keyring.load(empty)
    secret = [line for line in (tmp_path / "a").read_text().splitlines() if "KEY" not in line]
    assert secret
    assert not any(line in repr(alone) for line in secret)


def test_a_run_begins_with_a_trusted_key() -> None:
    ring(ROOT, ROOT).check_can_start_run()
    ring(None, ROOT).check_can_start_run()
    Keyring().check_can_start_run()
    with pytest.raises(SignatureError, match="cannot begin"):
        ring(TRAINER, ROOT).check_can_start_run()


# What was seen before


def mark(keys: int, version: int, **fields: str) -> LastSeen:
    return replace(LastSeen(RUN, keys, version, f"{version:064d}", public(TRAINER)), **fields)  # type: ignore[arg-type]


def test_mark_is_kept_and_only_rises(tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path / "state" / "deep", "file:///run")
    assert file.load() is None
    for raised, kept in (((2, 5), (2, 5)), ((1, 4), (2, 5)), ((3, 4), (3, 5)), ((1, 6), (3, 6))):
        file.advance_to(mark(*raised))
        assert LastSeenStore(tmp_path / "state" / "deep", "file:///run").load() == mark(*kept)
    assert LastSeenStore(tmp_path / "state" / "deep", "file:///other").load() is None
    assert stat.S_IMODE((tmp_path / "state" / "deep").stat().st_mode) == 0o700


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=1, max_size=12))
def test_marks_of_several_servers(tmp_path_factory: pytest.TempPathFactory, seen: list[tuple[int, int]]) -> None:
    file = LastSeenStore(tmp_path_factory.mktemp("marks"), "x")
    threads = [threading.Thread(target=file.advance_to, args=(mark(keys, version),)) for keys, version in seen]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    version = max(version for _, version in seen)
    assert file.load() == mark(max(keys for keys, _ in seen), version)


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"run":"x"}', b'{"run":1,"keys":0,"version":0,"manifest":"","key":""}',
     b'{"run":"x","keys":true,"version":0,"manifest":"","key":""}', b"\xff\xfe",
     b'{"run":"x","keys":0,"version":3.0,"manifest":"","key":""}', b'{"run":"x","keys":0,"version":0,"manifest":""}',
     b'{"run":"x","keys":0,"version":0,"manifest":"","key":"","more":0}', b" " * (1 << 21)],
)  # fmt: skip
def test_damaged_mark_is_not_taken_for_none(data: bytes, tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path, "x")
    file.advance_to(mark(0, 3))
    file.path.write_bytes(data)
    for call in (file.load, lambda: file.advance_to(mark(0, 4))):
        with pytest.raises(SettingsError, match="does not say what was seen"):
            call()
    assert file.path.read_bytes() == data


def test_mark_that_cannot_be_kept(tmp_path: Path) -> None:
    (tmp_path / "state").write_text("a file")
    with pytest.raises(StoreError, match="state_dir"):
        LastSeenStore(tmp_path / "state", "x").advance_to(mark(0, 3))
    with pytest.raises(SettingsError, match="set state_dir"):
        LastSeenStore(tmp_path / "state", "x").prepare()


def test_mark_of_another_history_or_run_is_not_written_over(tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path, "x")
    file.prepare()
    assert file.load() is None
    file.advance_to(mark(1, 5))
    with pytest.raises(ForkError, match="history was forked"):
        file.advance_to(mark(2, 5, manifest="f" * 64))
    with pytest.raises(ChainError, match="records run"):
        file.advance_to(mark(2, 9, run="cd" * 16))
    assert file.load() == mark(1, 5)


def test_mark_is_lowered_only_from_what_was_believed(tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path, "x")
    file.advance_to(mark(1, 9))
    file.retract_to(mark(1, 8), mark(2, 3))
    assert file.load() == mark(1, 9)
    file.retract_to(mark(1, 9), mark(2, 3))
    assert file.load() == mark(2, 3)


def test_mark_of_an_older_release_is_read_and_then_private(tmp_path: Path) -> None:
    """Its mode was left to the umask."""
    file = LastSeenStore(tmp_path, "x")
    file.path.write_text(f'{{"run": "{RUN}", "keys": 1, "version": 5, "manifest": "five", "key": ""}}')
    file.path.chmod(0o664)
    file.prepare()
    assert file.load() == LastSeen(RUN, 1, 5, "five", "")
    file.advance_to(mark(1, 6))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
