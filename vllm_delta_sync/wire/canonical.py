"""Canonical JSON (RFC 8785): one byte string for one value, so that digests and signatures are stable."""

import json
from typing import Any

import rfc8785

from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.wire.limits import FORMAT_VERSION, MAX_JSON_BYTES, MAX_JSON_DEPTH, check_limit


def dump_canonical(value: Any) -> bytes:
    """Serialize to canonical JSON.

    Raises:
        FormatError: the value has an integer beyond 2^53, a NaN, half a surrogate pair, or a type JSON has not.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise FormatError(f"value cannot be written as canonical JSON: {error}") from error


def load_canonical(data: bytes, what: str, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse canonical JSON, refusing duplicates, deep nesting and any other spelling of the same value.

    Raises:
        LimitError: longer than ``limit`` bytes.
        FormatError: not JSON, or not in canonical form.
    """
    check_limit(f"{what}: size in bytes", len(data), limit, "MAX_JSON_BYTES")
    value = load_json(data, what)
    try:
        canonical = dump_canonical(value)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    if canonical != data:
        raise FormatError(f"{what} is JSON but not in canonical form (RFC 8785); it was not written by a publisher")
    return value


def load_json(data: bytes, what: str) -> Any:
    """Parse JSON with duplicate keys, nesting beyond MAX_JSON_DEPTH and halves of surrogate pairs refused.

    Raises:
        FormatError: not JSON, duplicate key, nested too deep, or a string that UTF-8 cannot spell.
    """
    if _depth(data) > MAX_JSON_DEPTH:
        raise FormatError(f"{what} is nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from error


def check_format_version(document: dict[str, Any], what: str) -> None:
    """Check the field ``format_version``, which every document and every delta object has.

    Raises:
        FormatError: missing, or not a positive integer. UnsupportedError: of a later release.
    """
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: field 'format_version' is {str(version)[:40]!r}, not a positive integer")
    if version > FORMAT_VERSION:
        raise UnsupportedError(
            f"{what}: format_version is {version}, this release reads {FORMAT_VERSION}; upgrade to read it"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _depth(data: bytes) -> int:
    # An upper bound that needs no parser: brackets inside strings count too, and real data has few.
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return 0
    depth = deepest = 0
    in_string = escaped = False
    for byte in data:
        if in_string:
            if escaped:
                escaped = False
            elif byte == 0x5C:
                escaped = True
            elif byte == 0x22:
                in_string = False
        elif byte == 0x22:
            in_string = True
        elif byte in b"[{":
            depth += 1
            deepest = max(deepest, depth)
            if deepest > MAX_JSON_DEPTH:
                return deepest
        elif byte in b"]}":
            depth -= 1
    return deepest
