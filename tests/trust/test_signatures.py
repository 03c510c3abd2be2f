"""Signatures of documents: nothing but what was signed is believed, and not as another kind."""

import json
from typing import Any

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from tests.support.signers import NEXT, ROOT, RUN, STRANGER, TIME, TRAINER, by, manifest, public, ring
from vllm_delta_sync.errors import DeltaSyncError, FormatError, SignatureError, UnsupportedError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import head_of
from vllm_delta_sync.trust.keyring import RunKeys
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.documents import Anchor, Claim, Collection, FoldedRange, KeyFile, Lease, Retention, Tag
from vllm_delta_sync.wire.manifest import Document, Head, Manifest, RunInfo, Signature


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
    requires=["packed"],
    codec="packed",
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
        keys.check_side(found, 9, "it")


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


def _kinds() -> list[type[Document]]:
    return [RunInfo, Manifest, Head, Anchor, FoldedRange, Tag, Claim, Lease, Collection, Retention, KeyFile]


def test_each_kind_has_a_name_of_its_own() -> None:
    assert len({kind.KIND for kind in _kinds()}) == len(_kinds())


def test_a_document_of_one_kind_is_not_taken_for_another() -> None:
    """All fields of a claim and of a tag in one: it is well formed as both, and signed as one."""
    fields = {
        "format_version": 1, "requires": [], "run": RUN, "name": "a", "version": 3, "manifest": "1" * 64, "epoch": 1,
        "writer": "2" * 32, "milestone": False, "branch": None, "created_at": TIME,
    }  # fmt: skip
    keys = RunKeys(ring(None, TRAINER), RUN)
    kinds: list[type[Document]] = [Claim, Tag, Head]
    for kind in kinds:
        signed = by(TRAINER, kind.from_bytes(dump_canonical(fields)))
        for other in kinds:
            taken = other.from_bytes(signed.to_bytes())
            if other is kind:
                keys.check_side(taken, 3, "it")
            else:
                with pytest.raises(SignatureError, match="was changed"):
                    keys.check_side(taken, 3, "it")


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
    plain = head_of(newest, Keyring())
    assert (plain.version, plain.manifest, plain.parent, plain.epoch) == (4, newest.digest, newest.parent, 2)
    assert (plain.created_at, plain.expires_at, plain.signature) == (None, None, None)
    signed = head_of(newest, ring(TRAINER, TRAINER), 60)
    RunKeys(ring(None, TRAINER), RUN).check_side(signed, 4, "HEAD.json")
    from datetime import datetime, timedelta

    begins, ends = (datetime.fromisoformat(time or "") for time in (signed.created_at, signed.expires_at))
    assert ends - begins == timedelta(seconds=60)
