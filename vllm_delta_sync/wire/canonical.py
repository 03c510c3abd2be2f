"""Canonical JSON (RFC 8785): one byte string for one value, so that digests and signatures are stable."""

import json
from typing import Any

import rfc8785

from vllm_delta_sync.errors import FormatError
from vllm_delta_sync.wire.limits import MAX_JSON_BYTES, MAX_JSON_DEPTH, check_limit


def dump_canonical(value: Any) -> bytes:
    """Serialize to canonical JSON.

    Raises:
        FormatError: the value has an integer beyond 2^53, a NaN, or a type JSON has not.
    """
    try:
        return rfc8785.dumps(value)
    except rfc8785.CanonicalizationError as error:
        raise FormatError(f"value cannot be written as canonical JSON: {error}") from error


def load_canonical(data: bytes, what: str, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse canonical JSON, refusing duplicates, deep nesting and any other spelling of the same value.

    Raises:
        LimitError: longer than ``limit`` bytes.
        FormatError: not JSON, or not in canonical form.
    """
    check_limit(f"{what}: size in bytes", len(data), limit, "MAX_JSON_BYTES")
    value = load_json(data, what)
    if dump_canonical(value) != data:
        raise FormatError(f"{what} is JSON but not in canonical form (RFC 8785); it was not written by a publisher")
    return value


def load_json(data: bytes, what: str) -> Any:
    """Parse JSON with duplicate keys and nesting beyond MAX_JSON_DEPTH refused.

    Raises:
        FormatError: not JSON, duplicate key, or nested too deep.
    """
    if _depth(data) > MAX_JSON_DEPTH:
        raise FormatError(f"{what} is nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=_unique, parse_constant=_no_constant)
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {error}") from error


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
