"""``dump_canonical`` and ``load_canonical``: JSON with one byte string per value (RFC 8785).

Digests and signatures of documents are stable because of this.
"""

import json
import math
import re
from typing import Any

import rfc8785

from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.format.limits import FORMAT_VERSION, MAX_JSON_BYTES, MAX_JSON_DEPTH, MAX_JSON_VALUES, check_limit

# A bracket or a whole string. A string may end with the data, so no quote is scanned twice.
_TOKENS = re.compile(rb"""[\[{\]}]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)""", re.DOTALL)

_DEPTH_CHECK_BYTES = 65_536


def dump_canonical(value: Any) -> bytes:
    """Serialize to canonical JSON.

    Raises:
        FormatError: the value has an integer beyond 2^53, a NaN, half a surrogate pair, or a type that JSON lacks.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise FormatError(f"value cannot be written as canonical JSON: {str(error)[:200]}") from error


def load_canonical(data: bytes, what: str, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON; refuse duplicate keys, deep nesting and any non-canonical spelling.

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


def load_json(data: bytes, what: str, finite: bool = True) -> Any:
    """Parse JSON; refuse duplicate keys, nesting beyond MAX_JSON_DEPTH and halves of surrogate pairs.

    Args:
        finite: whether to refuse NaN and infinities; False for files such as config.json, where Python's ``json`` may
            have written them.

    Raises:
        LimitError: more values than MAX_JSON_VALUES; nothing was allocated.
        FormatError: not JSON, duplicate key, nested too deep, or a string that UTF-8 cannot encode.
    """
    # Each value but the first follows one of these. Occurrences in strings count too: real data has few.
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if _is_deep(data if values <= MAX_JSON_VALUES else data[:_DEPTH_CHECK_BYTES]):
        raise FormatError(f"{what} is nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")
    check_limit(f"{what}: number of values", values, MAX_JSON_VALUES, "MAX_JSON_VALUES")
    try:
        parsers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, **parsers)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {str(error)[:200]}") from error


def check_format_version(document: dict[str, Any], what: str) -> None:
    """Check the field ``format_version`` of a document or a delta object.

    Raises:
        FormatError: missing, or not a positive integer. UnsupportedError: of another format.
    """
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: field 'format_version' is {str(version)[:40]!r}, not a positive integer")
    if version > FORMAT_VERSION:
        raise UnsupportedError(
            f"{what}: format_version is {version}, this release reads {FORMAT_VERSION}; upgrade to read it"
        )
    if version < FORMAT_VERSION:
        raise UnsupportedError(
            f"{what}: format_version is {version}, this release reads {FORMAT_VERSION}; use the release that wrote the "
            "run, or export a version with it (delta-sync export) and begin a new run from that checkpoint"
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


def _finite(text: str) -> float:
    """Parse a number with a fraction or an exponent; JSON cannot spell the infinity that Python makes of 1e999."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the largest double")
    return value


def _is_deep(data: bytes) -> bool:
    """Return whether brackets outside of strings are nested deeper than MAX_JSON_DEPTH."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return True
        elif first in b"]}":
            depth -= 1
    return False
