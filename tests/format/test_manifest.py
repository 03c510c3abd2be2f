"""run.json, manifests and HEAD.json: fields, consistency, what later releases may add."""

from datetime import UTC, datetime
from typing import Any

import pytest
import rfc8785

from vllm_delta_sync.errors import FormatError, LimitError, UnsupportedError
from vllm_delta_sync.format.base_document import Document, timestamp
from vllm_delta_sync.format.manifest import (
    Head,
    HeldBack,
    Manifest,
    RunInfo,
    Sidecar,
    object_key,
    sidecar_key,
    version_key,
    version_of_key,
)

RUN, DIGEST, TIME = "5eed" * 8, "ab" * 32, "2026-01-02T03:04:05.678901Z"
REF = {"bytes": 9, "key": object_key(DIGEST), "rank": 0, "sha256": DIGEST}
INFO: dict[str, Any] = {
    "created_at": TIME,
    "format_version": 2,
    "full_bytes": 20,
    "requires": [],
    "run": RUN,
    "signature": None,
    "tensors": DIGEST,
    "total": 10,
}
DELTA: dict[str, Any] = {
    "base": None,
    "base_version": 6,
    "breaks": [{"base_version": 1, "version": 4}],
    "changed": 3,
    "codec": "plain",
    "compression": "zstd",
    "created_at": TIME,
    "epoch": 2,
    "fingerprint": "0" * 32,
    "format_version": 2,
    "full_bytes": 20,
    "kind": "delta",
    "objects": [REF],
    "parent": DIGEST,
    "payload_bytes": 9,
    "quarantine": None,
    "requires": ["plain", "zstd"],
    "reversible": True,
    "run": RUN,
    "signature": {"key": DIGEST, "value": "cd" * 64},
    "step": 70,
    "tensor_fingerprints": None,
    "total": 10,
    "version": 7,
}
ANCHOR = {
    **DELTA,
    "kind": "anchor",
    "base_version": None,
    "breaks": [{"base_version": 1, "version": 4}, {"base_version": None, "version": 7}],
    "codec": None,
    "compression": None,
    "requires": [],
    "reversible": False,
    "tensor_fingerprints": {"w": "0" * 32},
}
REFERENCE = {
    **ANCHOR,
    "kind": "reference",
    "version": 0,
    "breaks": [],
    "parent": None,
    "objects": [],
    "payload_bytes": 0,
    "changed": 0,
    "base": {
        "location": "/models/base",
        "manifest": None,
        "model": "org/base",
        "revision": "0123abc",
        "run": None,
        "version": None,
    },
}
HELD_BACK: dict[str, Any] = {"elements": 5, "relative_norm": 0.25, "exact": 6}
HEAD: dict[str, Any] = {
    "created_at": TIME,
    "epoch": 2,
    "expires_at": None,
    "format_version": 2,
    "manifest": DIGEST,
    "parent": DIGEST,
    "run": RUN,
    "signature": None,
    "version": 7,
}
ALL: list[tuple[type[Document], dict[str, Any]]] = [
    (RunInfo, INFO),
    (Manifest, DELTA),
    (Manifest, ANCHOR),
    (Manifest, REFERENCE),
    (Head, HEAD),
    (Manifest, {**DELTA, "held_back": HELD_BACK, "quarantine": {"reasons": ["a", "b"], "sound": 6}}),
]


@pytest.mark.parametrize(("cls", "value"), ALL)
def test_round_trip(cls: type[Document], value: dict[str, Any]) -> None:
    data = rfc8785.dumps(value)
    parsed = cls.from_bytes(data)
    assert parsed.to_bytes() == data
    assert cls.model_validate(parsed.model_dump()).to_bytes() == data


@pytest.mark.parametrize(("cls", "value"), ALL)
def test_fields_of_a_later_release_are_ignored_but_stay_in_the_digest(
    cls: type[Document], value: dict[str, Any]
) -> None:
    data = rfc8785.dumps({**value, "later": {"nested": [1, 2]}})
    parsed = cls.from_bytes(data)
    assert parsed.to_bytes() == data
    assert parsed.digest != cls.from_bytes(rfc8785.dumps(value)).digest


@pytest.mark.parametrize(("cls", "value"), ALL)
def test_a_later_format_is_unsupported_whatever_else_it_says(cls: type[Document], value: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="format_version is 3, this release reads 2"):
        cls.from_bytes(rfc8785.dumps({"format_version": 3, "run": 5}))
    without = {name: item for name, item in value.items() if name != "format_version"}
    for broken in (without, {**value, "format_version": True}, {**value, "format_version": 0}):
        with pytest.raises(FormatError, match="format_version"):
            cls.from_bytes(rfc8785.dumps(broken))


@pytest.mark.parametrize(("cls", "value"), ALL[:4])
def test_an_unknown_requirement_is_refused_by_name(cls: type[Document], value: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedError, match="'requires' names 'teleport'"):
        cls.from_bytes(rfc8785.dumps({**value, "requires": ["plain", "teleport"]}))
    with pytest.raises(UnsupportedError, match="teleport"):
        cls.from_bytes(rfc8785.dumps({**value, "requires": ["teleport"], "kind": "beam", "total": []}))
    malformed: list[Any] = ["plain", [1], [["plain"]], {}]
    for requires in malformed:
        with pytest.raises(FormatError, match="requires"):
            cls.from_bytes(rfc8785.dumps({**value, "requires": requires}))


BROKEN: list[tuple[dict[str, Any], str]] = [
    ({"run": "5EED" * 8}, "run"),
    ({"run": RUN[:-1]}, "run"),
    ({"run": RUN + "\n"}, "run"),
    ({"run": None}, "run"),
    ({"version": -1}, "version"),
    ({"version": 10**10}, "version"),
    ({"version": "7"}, "version"),
    ({"version": 7.5}, "version"),
    ({"version": True}, "version"),
    ({"step": -1}, "step"),
    ({"kind": "snapshot"}, "kind"),
    ({"base_version": 7}, "base_version"),
    ({"base_version": 8}, "base_version"),
    ({"base_version": None}, "base_version"),
    ({"parent": None}, "parent"),
    ({"parent": DIGEST[:-1]}, "parent"),
    ({"version": 0, "base_version": None}, "parent"),
    ({"objects": [REF, REF], "payload_bytes": 18}, "listed twice"),
    ({"objects": [{**REF, "key": "objects/elsewhere.safetensors"}]}, "key is not objects"),
    ({"objects": [{**REF, "key": "../" + object_key(DIGEST)}]}, "key is not objects"),
    ({"objects": [{**REF, "bytes": -9}]}, "bytes"),
    ({"objects": [{**REF, "sha256": DIGEST.upper()}]}, "sha256"),
    ({"objects": {}}, "objects"),
    ({"payload_bytes": 10}, "payload_bytes"),
    ({"changed": -3}, "changed"),
    ({"total": "10"}, "total"),
    ({"fingerprint": "0" * 31}, "fingerprint"),
    ({"fingerprint": "z" * 32}, "fingerprint"),
    ({"tensor_fingerprints": {"w": "0" * 32}}, "tensor_fingerprints"),
    ({"created_at": "2026-01-02"}, "created_at"),
    ({"created_at": "2026-01-02T03:04:05+01:00"}, "created_at"),
    ({"created_at": "٢026-01-02T03:04:05Z"}, "created_at"),
    ({"base": {"location": "x" * 4097}}, "location"),
    ({"breaks": [{"version": 8, "base_version": 1}]}, "breaks"),
    ({"breaks": [{"version": 4, "base_version": 3}]}, "breaks"),
    ({"breaks": [{"version": 4, "base_version": 1}, {"version": 2, "base_version": 0}]}, "breaks"),
    ({"breaks": [{"version": 7, "base_version": 1}]}, "breaks"),
    ({"base_version": 5}, "breaks"),
    ({"breaks": [[4, 1]]}, "breaks"),
    ({"base": {"location": "x", "model": "org/base"}}, "revision"),
    ({"base": {"location": "x", "run": RUN}}, "manifest"),
    ({"epoch": -1}, "epoch"),
    ({"quarantine": {"reasons": ["a"], "sound": 7}}, "quarantine"),
    ({"held_back": HELD_BACK | {"exact": 7}}, "held_back"),
    ({"held_back": HELD_BACK | {"elements": 0}}, "held_back"),
    ({"held_back": HELD_BACK | {"relative_norm": -0.5}}, "held_back"),
]


@pytest.mark.parametrize(("change", "field"), BROKEN)
def test_a_malformed_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(FormatError, match=field):
        Manifest.from_bytes(rfc8785.dumps({**DELTA, **change}), "this manifest")


@pytest.mark.parametrize(
    "field",
    sorted(
        set(DELTA)
        - {"base", "breaks", "codec", "compression", "epoch", "requires", "reversible", "tensor_fingerprints"}
        - {"quarantine", "signature"}
    ),
)
def test_a_missing_field_is_refused(field: str) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(rfc8785.dumps({name: value for name, value in DELTA.items() if name != field}))


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_fingerprints": None},
        {"base_version": 6},
        {"kind": "reference"},
        {"kind": "reference", "objects": [], "payload_bytes": 0},
        {"held_back": HELD_BACK},
    ],
)
def test_an_anchor_is_complete(change: dict[str, Any]) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(rfc8785.dumps({**ANCHOR, **change}))


@pytest.mark.parametrize("data", [b"", b"[]", b"null", b'"{}"', rfc8785.dumps(DELTA) + b"\n", b"{" * 40])
def test_what_is_no_document(data: bytes) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(data)


def test_a_distance_is_shown_where_it_is_known() -> None:
    held_back = HeldBack(**HELD_BACK)
    assert "0.25" in held_back.summary()
    assert "0.25" not in held_back.model_copy(update={"relative_norm": None}).summary()


def test_a_timestamp_is_the_moment_that_was_given_or_now() -> None:
    assert timestamp(datetime.fromisoformat(TIME)) == TIME
    assert datetime.fromisoformat(timestamp()).tzinfo == UTC


def test_too_large() -> None:
    with pytest.raises(LimitError):
        Manifest.from_bytes(b" " * (64 * 1024 * 1024 + 1))


def test_keys_sort_as_versions_do_and_come_back() -> None:
    versions = [0, 1, 9, 10, 99, 12345, 10**10 - 1]
    assert sorted(versions, key=version_key) == versions
    assert [version_of_key(version_key(version)) for version in versions] == versions
    for key in ("HEAD.json", "versions/1.json", "versions/0000000001.json\n", "versions/٠٠٠٠٠٠٠٠٠١.json", "versions/"):
        assert version_of_key(key) is None


def test_a_sidecar_lies_under_its_digest() -> None:
    assert Sidecar(name="state", key=sidecar_key(DIGEST), sha256=DIGEST, bytes=1).sha256 == DIGEST
    with pytest.raises(ValueError, match="sidecars/<sha256>"):
        Sidecar(name="state", key=sidecar_key("cd" * 32), sha256=DIGEST, bytes=1)
