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
    "format_version": 2, "run": RUN, "created_at": TIME, "requires": [], "signature": None, "tensors": DIGEST,
    "total": 10, "full_bytes": 20,
}  # fmt: skip
DELTA: dict[str, Any] = {
    "format_version": 2, "run": RUN, "created_at": TIME, "requires": ["plain", "zstd"], "version": 7, "step": 70,
    "kind": "delta", "base": None, "base_version": 6, "parent": DIGEST, "epoch": 2, "objects": [REF], "changed": 3,
    "breaks": [{"base_version": 1, "version": 4}], "payload_bytes": 9, "full_bytes": 20, "total": 10, "codec": "plain",
    "compression": "zstd", "reversible": True, "fingerprint": "0" * 32, "tensor_fingerprints": None,
    "quarantine": None, "signature": {"key": DIGEST, "value": "cd" * 64},
}  # fmt: skip
ANCHOR = {
    **DELTA, "kind": "anchor", "base_version": None, "codec": None, "compression": None, "requires": [],
    "reversible": False, "tensor_fingerprints": {"w": "0" * 32},
    "breaks": [{"base_version": 1, "version": 4}, {"base_version": None, "version": 7}],
}  # fmt: skip
REFERENCE = {
    **ANCHOR, "kind": "reference", "version": 0, "breaks": [], "parent": None, "objects": [], "payload_bytes": 0,
    "changed": 0,
    "base": {
        "location": "/models/base", "model": "org/base", "revision": "0123abc", "run": None, "version": None,
        "manifest": None,
    },
}  # fmt: skip
HELD_BACK: dict[str, Any] = {"elements": 5, "relative_norm": 0.25, "exact": 6}
HEAD: dict[str, Any] = {
    "format_version": 2, "run": RUN, "created_at": TIME, "expires_at": None, "signature": None, "version": 7,
    "epoch": 2, "manifest": DIGEST, "parent": DIGEST,
}  # fmt: skip
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


# What is named in the message: the field, with these values, or whatever is named beside several fields.
BROKEN_VALUES: dict[str, list[Any]] = {
    "run": ["5EED" * 8, RUN[:-1], RUN + "\n", None],
    "version": [-1, 10**10, "7", 7.5, True],
    "step": [-1],
    "kind": ["snapshot"],
    "base_version": [7, 8, None],
    "parent": [None, DIGEST[:-1]],
    "objects": [{}],
    "payload_bytes": [10],
    "changed": [-3],
    "total": ["10"],
    "fingerprint": ["0" * 31, "z" * 32],
    "tensor_fingerprints": [{"w": "0" * 32}],
    "created_at": ["2026-01-02", "2026-01-02T03:04:05+01:00", "٢026-01-02T03:04:05Z"],
    "epoch": [-1],
    "quarantine": [{"reasons": ["a"], "sound": 7}],
    "held_back": [HELD_BACK | {"exact": 7}, HELD_BACK | {"elements": 0}, HELD_BACK | {"relative_norm": -0.5}],
    "breaks": [
        [{"version": 8, "base_version": 1}],
        [{"version": 4, "base_version": 3}],
        [{"version": 4, "base_version": 1}, {"version": 2, "base_version": 0}],
        [{"version": 7, "base_version": 1}],
        [[4, 1]],
    ],
}
BROKEN: list[tuple[dict[str, Any], str]] = [
    *(({field: value}, field) for field, values in BROKEN_VALUES.items() for value in values),
    ({"version": 0, "base_version": None}, "parent"),
    ({"base_version": 5}, "breaks"),
    ({"objects": [REF, REF], "payload_bytes": 18}, "listed twice"),
    ({"objects": [{**REF, "key": "objects/elsewhere.safetensors"}]}, "key is not objects"),
    ({"objects": [{**REF, "key": "../" + object_key(DIGEST)}]}, "key is not objects"),
    ({"objects": [{**REF, "bytes": -9}]}, "bytes"),
    ({"objects": [{**REF, "sha256": DIGEST.upper()}]}, "sha256"),
    ({"base": {"location": "x" * 4097}}, "location"),
    ({"base": {"location": "x", "model": "org/base"}}, "revision"),
    ({"base": {"location": "x", "run": RUN}}, "manifest"),
]


@pytest.mark.parametrize(("change", "field"), BROKEN)
def test_a_malformed_field_is_named(change: dict[str, Any], field: str) -> None:
    with pytest.raises(FormatError, match=field):
        Manifest.from_bytes(rfc8785.dumps({**DELTA, **change}), "this manifest")


OPTIONAL = {"base", "breaks", "codec", "compression", "epoch", "requires", "reversible", "tensor_fingerprints"}
OPTIONAL |= {"quarantine", "signature"}


@pytest.mark.parametrize("field", sorted(set(DELTA) - OPTIONAL))
def test_a_missing_field_is_refused(field: str) -> None:
    with pytest.raises(FormatError):
        Manifest.from_bytes(rfc8785.dumps({name: value for name, value in DELTA.items() if name != field}))


@pytest.mark.parametrize(
    "change",
    [
        {"tensor_fingerprints": None}, {"base_version": 6}, {"kind": "reference"}, {"held_back": HELD_BACK},
        {"kind": "reference", "objects": [], "payload_bytes": 0},
    ],
)  # fmt: skip
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
