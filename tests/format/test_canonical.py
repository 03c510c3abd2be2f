"""Canonical JSON: one spelling per value, everything else refused."""

import json

import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st

from vllm_delta_sync.errors import FormatError, LimitError, UnsupportedError
from vllm_delta_sync.format.base_document import check_format_version, dump_canonical, load_canonical, load_json
from vllm_delta_sync.format.limits import MAX_JSON_DEPTH

SCALARS = st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12
)


@given(VALUES)
def test_round_trip(value: object) -> None:
    data = dump_canonical(value)
    assert load_canonical(data, "document") == value
    assert data == rfc8785.dumps(value)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "data",
    [
        b'{"b":1,"a":2}', b'{"a": 1}', b'{"a":1}\n', b' {"a":1}', b'{"a":1.0}', b'{"a":-0}', b'{"a":1e2}',
        b'{"a":"\\u0041"}', b'{"a":"\\/"}',
    ],
)  # fmt: skip
def test_another_spelling_is_refused(data: bytes) -> None:
    json.loads(data)
    with pytest.raises(FormatError, match="document is JSON but not in canonical form"):
        load_canonical(data, "document")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"nonsense", b'{"a":1}{"a":1}', b'{"a":NaN}', b"[Infinity]", b"[-Infinity]", b"[-1e999]",
        b'{"a":1,"a":1}', b'{"x":{"a":1,"a":2}}', b'"\xff"', b'\xef\xbb\xbf{"a":1}', b'"\\ud800"', b'{"\\udfff":1}',
        b"[1" + b"0" * 5000 + b"]", b'{"a":"\x01"}',
    ],
)  # fmt: skip
def test_what_is_not_json_is_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^document"):
        load_json(data, "document")


@pytest.mark.parametrize("data", [b"[9007199254740993]", b"[-9007199254740992]", b"[1e999]"])
def test_numbers_that_others_read_differently_are_refused(data: bytes) -> None:
    with pytest.raises(FormatError, match=r"^document"):
        load_canonical(data, "document")


def test_nesting_is_bounded_before_it_is_parsed() -> None:
    fits = b"[" * MAX_JSON_DEPTH + b"]" * MAX_JSON_DEPTH
    assert load_canonical(fits, "document")
    for bomb in (b"[" + fits + b"]", b"[" * 5_000_000, b'{"a":' * 100_000):
        with pytest.raises(FormatError, match="nested deeper than 16"):
            load_canonical(bomb, "document")


def test_brackets_in_strings_do_not_nest() -> None:
    value = {"a": "[{" * 100, 'quote"\\': "[" * 50}
    assert load_canonical(dump_canonical(value), "document") == value


def test_size_is_checked_first() -> None:
    with pytest.raises(LimitError, match=r"document: size in bytes is 20, outside 0\.\.10"):
        load_canonical(b"[" * 20, "document", limit=10)


@pytest.mark.parametrize("value", [2**53, float("nan"), float("inf"), "\ud800", {"\ud800": 1}, {"a": {1, 2}}])
def test_values_without_a_canonical_form_are_not_written(value: object) -> None:
    with pytest.raises(FormatError, match="cannot be written"):
        dump_canonical(value)


@pytest.mark.parametrize("version", [1, 3, True, "1", 0, -1, None])
def test_format_version(version: object) -> None:
    check_format_version({"format_version": 2}, "document")
    error = UnsupportedError if version in (1, 3) and version is not True else FormatError
    with pytest.raises(error, match=r"document.*format_version"):
        check_format_version({"format_version": version}, "document")
