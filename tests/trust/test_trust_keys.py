"""Signatures of documents, whose signatures count, key files, and the file of what was seen before: nothing but what is
signed is believed, and not as another kind."""

import functools
import json
import operator
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import rfc8785
import torch
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

from tests.support.collecting import MemoryBucket
from tests.support.signers import INFO, NEXT, ROOT, RUN, STRANGER, TIME, TRAINER, by, manifest, public, ring
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    ForkError,
    FormatError,
    NotFoundError,
    SettingsError,
    SignatureError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format.base_document import Document, dump_canonical
from vllm_delta_sync.format.documents import (
    Claim,
    Tag,
    anchor_key,
    merged_delta_key,
)
from vllm_delta_sync.format.manifest import RUN_KEY, Head, Manifest, version_key
from vllm_delta_sync.run.ancestors import Ancestors
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import UNPARSED_BYTES
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
    ring(None, NEXT).check(theirs, "it")


def test_signing_is_repeatable_and_takes_the_place_of_what_was_there() -> None:
    once = by(TRAINER, manifest(0))
    assert by(TRAINER, once).to_bytes() == once.to_bytes() == by(TRAINER, by(STRANGER, manifest(0))).to_bytes()
    assert Keyring().signed(once) is once
    assert Manifest.from_bytes(once.to_bytes()) == once


def test_fields_that_this_release_does_not_know_are_signed_too() -> None:
    value = json.loads(manifest(0).to_bytes()) | {"later": [1, {"x": "y"}]}
    signed = by(TRAINER, Manifest.from_bytes(dump_canonical(value)))
    assert json.loads(signed.to_bytes())["later"] == [1, {"x": "y"}]
    keys = ring(None, TRAINER)
    keys.check(signed, "it")
    value = json.loads(signed.to_bytes())
    without = {name: part for name, part in value.items() if name != "later"}
    for changed in (value | {"later": [1]}, value | {"later": None}, without):
        with pytest.raises(SignatureError, match="was changed"):
            keys.check(Manifest.from_bytes(dump_canonical(changed)), "it")


def _leaves(value: Any, place: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Places of everything in a JSON value, whole parts included."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(*place, key) for key, _ in parts]
    return found + [leaf for key, part in parts for leaf in _leaves(part, (*place, key))]


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


def test_nothing_can_be_taken_out_of_a_signed_manifest() -> None:
    """It is no manifest any more, or has no signature that is valid."""
    original = json.loads(_RICH_SIGNED.to_bytes())
    for place in _leaves(original):
        for gone in (True, False):
            changed = json.loads(_RICH_SIGNED.to_bytes())
            owner = functools.reduce(operator.getitem, place[:-1], changed)
            if gone:
                del owner[place[-1]]
            else:
                owner[place[-1]] = None
            if changed != original:
                with pytest.raises((FormatError, UnsupportedError, SignatureError)):
                    ring(None, TRAINER).check(Manifest.from_bytes(dump_canonical(changed)), "it")


def test_a_document_of_one_kind_is_not_taken_for_another() -> None:
    """All fields of a claim and of a tag in one: it is well formed as both, and signed as one."""
    fields = {
        "format_version": 2, "requires": [], "run": RUN, "name": "a", "version": 3, "manifest": "1" * 64, "epoch": 1,
        "writer": "2" * 32, "milestone": False, "branch": None, "created_at": TIME,
    }  # fmt: skip
    keys = ring(None, TRAINER)
    kinds: list[type[Document]] = [Claim, Tag, Head]
    for kind in kinds:
        signed = by(TRAINER, kind.from_bytes(dump_canonical(fields)))
        for other in kinds:
            taken = other.from_bytes(signed.to_bytes())
            if other is kind:
                keys.check(taken, "it")
            else:
                with pytest.raises(SignatureError, match="was changed"):
                    keys.check(taken, "it")


def test_messages_of_one_kind_are_not_taken_for_another() -> None:
    keyring = ring(TRAINER, TRAINER)
    signature = keyring.sign_bytes("notice", b"data")
    keyring.check_bytes("notice", b"data", signature, "it")
    for kind, data in (("notice", b"date"), ("manifest", b"data")):
        with pytest.raises(SignatureError, match="was changed"):
            keyring.check_bytes(kind, data, signature, "it")
    with pytest.raises(SignatureError, match="not signed"):
        keyring.check_bytes("notice", b"data", None, "it")
    with pytest.raises(SignatureError, match="not trusted"):
        ring(None, ROOT).check_bytes("notice", b"data", signature, "it")
    assert Keyring().sign_bytes("notice", b"data") is None


def test_a_signature_has_one_spelling() -> None:
    value = json.loads(by(TRAINER, manifest(0)).to_bytes())
    given = value["signature"]
    # What else is in there would be in the digest and not under the signature.
    with pytest.raises(FormatError, match="more"):
        Manifest.from_bytes(dump_canonical(value | {"signature": {**given, "more": 1}}))
    # With S plus the group's order it would verify as well, with another digest; RFC 8032 refuses that.
    raw = bytes.fromhex(given["value"])
    s = int.from_bytes(raw[32:], "little") + 2**252 + 27742317777372353535851937790883648493
    wrong: list[tuple[dict[str, str], str | None]]
    wrong = [({"key": given["key"], "value": (raw[:32] + s.to_bytes(32, "little")).hex()}, "was changed")]
    for key in ("00" * 32, "01" + "00" * 31, "ff" * 32, "ec" + "ff" * 30 + "7f"):
        wrong.append(({"key": key, "value": "00" * 64}, None))
    for signature, match in wrong:
        with pytest.raises(SignatureError, match=match):
            ring(None, TRAINER).check(Manifest.from_bytes(dump_canonical(value | {"signature": signature})), "it")


# Whose word counts


@pytest.mark.parametrize("signer", [None, STRANGER])
def test_everything_of_others_is_refused(signer: Any) -> None:
    keys = ring(None, ROOT, TRAINER)
    documents: list[Document] = [INFO, manifest(0), Head(run=RUN, version=0, manifest="0" * 64)]
    for document in documents:
        offered = document if signer is None else by(signer, document)
        with pytest.raises(SignatureError, match="not signed" if signer is None else "not trusted"):
            keys.check(offered, "it")
        for trusted in (ROOT, TRAINER):
            keys.check(by(trusted, document), "it")
        # A keyring without keys checks nothing.
        Keyring().check(offered, "it")


def test_large_documents_are_refused_before_they_are_parsed(tmp_path: Path) -> None:
    decoy = json.loads(by(STRANGER, manifest(0)).to_bytes())["signature"]
    fields = {"later": [{"a": 1, "signature": decoy}, "x" * UNPARSED_BYTES]}
    large = Manifest.from_bytes(dump_canonical(json.loads(manifest(0).to_bytes()) | fields))
    keys, signed = ring(None, TRAINER), by(TRAINER, large).to_bytes()
    keys.check_unparsed("manifest", signed, "it")
    keys.check_unparsed("manifest", manifest(0).to_bytes(), "it")  # small
    Keyring().check_unparsed("manifest", large.to_bytes(), "it")
    for kind, data in (
        ("manifest", large.to_bytes()),
        ("manifest", by(STRANGER, large).to_bytes()),
        ("manifest", signed.replace(b"xxx", b"xyx", 1)),
        ("anchor", signed),
    ):
        with pytest.raises(SignatureError):
            keys.check_unparsed(kind, data, "it")
    # By readers too: as JSON it would be refused for its format.
    generate(tmp_path / "key")
    with Publisher({"w": torch.zeros(4)}, str(tmp_path / "run"), signing_key=tmp_path / "key"):
        pass
    run = open_run(str(tmp_path / "run"), Keyring.load([tmp_path / "key.pub"]))
    for key, read in (
        (version_key(1), lambda: run.manifest(1)),
        (anchor_key(1), lambda: run.anchor(1)),
        (merged_delta_key(0, 4), lambda: run.merged_delta(0, 4)),
        (RUN_KEY, lambda: open_run(str(tmp_path / "run"), run.keyring)),
    ):
        file = tmp_path / "run" / key
        file.parent.mkdir(exist_ok=True)
        file.unlink(missing_ok=True)
        file.write_bytes(b"x" * (UNPARSED_BYTES + 1))
        with pytest.raises(SignatureError, match=f"{key} is not signed"):
            read()


# Along the chain


def history(versions: int) -> list[Manifest]:
    made: list[Manifest] = []
    for version in range(versions):
        made.append(by(TRAINER, manifest(version, made[-1] if made else None)))
    return made


def test_ancestors_are_read_once() -> None:
    manifests, read = history(41), []

    def stored(version: int) -> bytes:
        read.append(version)
        return manifests[version].to_bytes()

    ancestors, head = Ancestors(stored), manifests[40]
    for wanted in (40, 39, 5, 20, 19, 30, 0):
        assert ancestors.digest(40, head.digest, wanted) == manifests[wanted].digest
    # Also for who begins at one of them.
    assert ancestors.digest(30, manifests[30].digest, 2) == manifests[2].digest
    assert sorted(read) == list(range(1, 41))


def test_ancestors_of_threads_at_once() -> None:
    manifests = history(30)
    for _ in range(5):
        ancestors = Ancestors(lambda version: manifests[version].to_bytes())
        barrier = threading.Barrier(8)

        def find(version: int) -> str:
            barrier.wait(120)  # noqa: B023
            return ancestors.digest(29, manifests[29].digest, version)  # noqa: B023

        with ThreadPoolExecutor(8) as pool:
            assert list(pool.map(find, range(0, 16, 2))) == [one.digest for one in manifests[:16:2]]


def test_ancestors_that_were_replaced_or_are_missing() -> None:
    manifests = history(6)
    stored = {one.version: one.to_bytes() for one in manifests}
    digests = [one.digest for one in manifests]

    def digest(version: int, known: str, wanted: int) -> str:
        bucket = MemoryBucket()
        for number, data in stored.items():
            bucket.put(version_key(number), data)
        return Ancestors(lambda number: bucket.get(version_key(number))).digest(version, known, wanted)

    with pytest.raises(ChainError, match="cannot precede"):
        digest(3, digests[3], 4)
    with pytest.raises(ForkError):
        digest(3, digests[2], 1)
    # A manifest with a good signature, in the place of another.
    stored[2] = by(TRAINER, manifest(2, manifests[1], step=99)).to_bytes()
    with pytest.raises(ForkError, match="the manifest was replaced"):
        digest(5, digests[5], 1)
    assert digest(5, digests[5], 3) == digests[3]
    del stored[2]
    with pytest.raises(NotFoundError):
        digest(5, digests[5], 1)
    stored[1] = stored[0]
    with pytest.raises(ChainError, match="names no parent"):
        digest(0, digests[0], -1)


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


def test_key_files_that_others_can_reach_or_that_are_not_there(tmp_path: Path) -> None:
    generate(tmp_path / "trainer")
    for mode in (0o640, 0o604, 0o601):
        (tmp_path / "trainer").chmod(mode)
        with pytest.raises(SettingsError, match="chmod 600"):
            Keyring.load(None, tmp_path / "trainer")
    for files in ({"trusted_keys": str(tmp_path / "x")}, {"signing_key": tmp_path / "x"}, {"signing_key": tmp_path}):
        with pytest.raises(SettingsError, match="cannot be read"):
            Keyring.load(**files)  # type: ignore[arg-type]


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


def test_keyring_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = generate(tmp_path / "a"), generate(tmp_path / "b")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Keyring.load("~/a.pub, ~/b.pub").trusted == {first, second}
    assert Keyring.load(None, "~/a").public == first
    assert Keyring.load(f"{tmp_path / 'a.pub'} , {tmp_path / 'b.pub'},").trusted == {first, second}
    assert Keyring.load([tmp_path / "a.pub", str(tmp_path / "b.pub")]).trusted == {first, second}
    assert Keyring.load(tmp_path / "a.pub").trusted == {first}
    alone = Keyring.load(None, tmp_path / "a")
    assert (set(alone.trusted), alone.public) == ({first}, first)
    assert (alone.has_signing_key, alone.checks_signatures) == (True, True)
    apart = Keyring.load(str(tmp_path / "b.pub"), str(tmp_path / "a"))
    assert (set(apart.trusted), apart.public) == ({second}, first)
    none = Keyring.load()
    assert (none.trusted, none.public) == (frozenset(), None)
    assert (none.has_signing_key, none.checks_signatures) == (False, False)
    empties: list[str | list[str]] = ["", " , ", []]
    for empty in empties:
        with pytest.raises(SettingsError, match="names no file"):
            Keyring.load(empty)
    secret = [line for line in (tmp_path / "a").read_text().splitlines() if "KEY" not in line]
    assert secret
    assert not any(line in repr(alone) for line in secret)


# What was seen before


TRUSTED = [public(TRAINER)]


def mark(version: int, **fields: str) -> LastSeen:
    return replace(LastSeen(RUN, version, f"{version:064d}", public(TRAINER)), **fields)  # type: ignore[arg-type]


def test_mark_is_kept_and_only_rises(tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path / "state" / "deep", "file:///run", TRUSTED)
    assert file.load() is None
    for raised, kept in ((5, 5), (4, 5), (5, 5), (6, 6)):
        file.advance_to(mark(raised))
        assert LastSeenStore(tmp_path / "state" / "deep", "file:///run", TRUSTED).load() == mark(kept)
    assert LastSeenStore(tmp_path / "state" / "deep", "file:///other", TRUSTED).load() is None
    assert stat.S_IMODE((tmp_path / "state" / "deep").stat().st_mode) == 0o700


def test_mark_of_a_key_that_is_not_trusted_any_more_counts_as_none(tmp_path: Path) -> None:
    """The thief of a key could otherwise block every honest version, and the run that replaces this one."""
    LastSeenStore(tmp_path, "x", TRUSTED).advance_to(mark(10**9))
    file = LastSeenStore(tmp_path, "x", [public(NEXT)])
    assert file.load() is None
    file.advance_to(mark(2, run="cd" * 16, key=public(NEXT)))
    assert file.load() == mark(2, run="cd" * 16, key=public(NEXT))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=12))
def test_marks_of_several_servers(tmp_path_factory: pytest.TempPathFactory, seen: list[int]) -> None:
    file = LastSeenStore(tmp_path_factory.mktemp("marks"), "x", TRUSTED)
    with ThreadPoolExecutor(len(seen)) as pool:
        list(pool.map(file.advance_to, map(mark, seen)))
    assert file.load() == mark(max(seen))


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[]", b"{}", b'{"run":"x"}', b'{"run":1,"version":0,"manifest":"","key":""}',
     b'{"run":"x","version":true,"manifest":"","key":""}', b"\xff\xfe",
     b'{"run":"x","version":3.0,"manifest":"","key":""}', b'{"run":"x","version":0,"manifest":""}', b" " * (1 << 21)],
)  # fmt: skip
def test_damaged_mark_is_not_taken_for_none(data: bytes, tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path, "x", TRUSTED)
    file.advance_to(mark(3))
    file.path.write_bytes(data)
    for call in (file.load, lambda: file.advance_to(mark(4))):
        with pytest.raises(SettingsError, match="does not say what was seen"):
            call()
    assert file.path.read_bytes() == data


def test_mark_of_another_history_or_run_is_not_written_over(tmp_path: Path) -> None:
    file = LastSeenStore(tmp_path, "x", TRUSTED)
    file.prepare()
    assert file.load() is None
    file.advance_to(mark(5))
    with pytest.raises(ForkError, match="history was forked"):
        file.advance_to(mark(5, manifest="f" * 64))
    with pytest.raises(ChainError, match="records run"):
        file.advance_to(mark(9, run="cd" * 16))
    assert file.load() == mark(5)


def test_mark_of_an_older_release_is_read_and_then_private(tmp_path: Path) -> None:
    """Its mode was left to the umask."""
    file = LastSeenStore(tmp_path, "x", TRUSTED)
    file.path.write_text(f'{{"run": "{RUN}", "keys": 1, "version": 5, "manifest": "five", "key": "{public(TRAINER)}"}}')
    file.path.chmod(0o664)
    file.prepare()
    assert file.load() == LastSeen(RUN, 5, "five", public(TRAINER))
    file.advance_to(mark(6))
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
