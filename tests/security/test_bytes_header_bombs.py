"""Safetensors headers that lie about sizes: in an object of a version, and in a base checkpoint."""

from pathlib import Path

import pytest

from tests.security.build import NEXT, container, next_object, untouched
from tests.security.reader import Reader
from tests.support.written import Written

MEBIBYTE = 2**20


def entry(shape: str = "[1]", offsets: str = "[0,1]", dtype: str = '"U8"') -> bytes:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'.encode()


def header(*entries: bytes) -> bytes:
    return b"{" + b",".join(b'"%c":%s' % (ord("a") + place, text) for place, text in enumerate(entries)) + b"}"


BOMBS: dict[str, tuple[str, bytes]] = {
    "length of 2^63": ("limit", (2**63).to_bytes(8, "little") + b"{}"),
    "length of 2^64 - 1": ("limit", b"\xff" * 8 + b"{}"),
    "length above the limit": ("limit", (101 * MEBIBYTE).to_bytes(8, "little") + b"{}"),
    "length beyond the file": ("format", (100 * MEBIBYTE).to_bytes(8, "little") + b"{}"),
    "length of one byte more": ("format", (3).to_bytes(8, "little") + b"{}"),
    "seven bytes": ("format", b"\x02\0\0\0\0\0\0"),
    "no object": ("format", container(b"[]")),
    "white space first": ("format", container(b" {}")),
    "byte order mark": ("format", container(b"\xef\xbb\xbf{}")),
    "offsets beyond the file": ("format", container(header(entry(offsets="[0,2]")), b"x")),
    "offsets of 2^63": ("format", container(header(entry("[1]", "[0,9223372036854775808]")), b"x")),
    "offsets of 4000 digits": ("format", container(header(entry(offsets=f"[0,{'9' * 4000}]")), b"x")),
    "offsets reversed": ("format", container(header(entry(offsets="[1,0]")), b"x")),
    "offsets negative": ("format", container(header(entry(offsets="[-1,0]")), b"x")),
    "offsets as floats": ("format", container(header(entry(offsets="[0,1.0]")), b"x")),
    "offsets as booleans": ("format", container(header(entry(offsets="[false,true]")), b"x")),
    "overlap": ("format", container(header(entry("[2]", "[0,2]"), entry("[2]", "[1,3]")), b"xyz")),
    "same bytes twice": ("format", container(header(entry(), entry()), b"x")),
    "hole": ("format", container(header(entry(), entry(offsets="[2,3]")), b"xyz")),
    "bytes after the last": ("format", container(header(entry()), b"xy")),
    "shape of 2^60": ("limit", container(header(entry("[1152921504606846976]")), b"x")),
    "shape that overflows to 1": ("format", container(header(entry("[281474976710656,281474976710656]")), b"x")),
    "shape with a negative": ("limit", container(header(entry("[-1]")), b"x")),
    "shape of -1 by -1": ("limit", container(header(entry("[-1,-1]")), b"x")),
    "shape of 500,000 dimensions": ("limit", container(header(entry(f"[{'1,' * 499_999}1]")), b"x")),
    "shape of 4000 digits": ("limit", container(header(entry(f"[{'9' * 4000}]")), b"x")),
    "shape as a string": ("format", container(header(entry('"[1]"')), b"x")),
    "unknown dtype": ("format", container(header(entry(dtype='"OBJECT"')), b"x")),
    "dtype of pickles": ("format", container(header(entry(dtype='"|O"')), b"x")),
    "dtype as a list": ("format", container(header(entry(dtype='["U8"]')), b"x")),
    "name twice": ("format", container(b'{"a":%s,"a":%s}' % (entry(), entry(offsets="[1,2]")), b"xy")),
    "member twice": ("format", container(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")),
    "metadata twice": ("format", container(b'{"__metadata__":{},"__metadata__":{}}')),
    "metadata member twice": ("format", container(b'{"__metadata__":{"a":"x","a":"y"}}')),
    "metadata that nests": ("format", container(b'{"__metadata__":{"a":{"b":"c"}}}')),
    "member too many": ("format", container(header(entry()[:-1] + b',"x":0}'), b"x")),
    "invalid UTF-8": ("format", container(b'{"\xff":%s}' % entry(), b"x")),
    "half a surrogate pair": ("format", container(b'{"\\ud800":%s}' % entry(), b"x")),
    "surrogate in UTF-8": ("format", container(b'{"\xed\xa0\x80":%s}' % entry(), b"x")),
    "nested deep": ("format", container(b'{"a":' * 100_000 + b"0" + b"}" * 100_000)),
    "nested deep in an entry": ("format", container(header(entry("[" * 99 + "]" * 99)), b"x")),
    "NaN": ("format", container(header(entry("[NaN]")), b"x")),
    "JSON twice": ("format", container(b"{}{}")),
    "quotes without an end": ("format", container(b'{"a":[' + b"[" * 20 + b'"' + b'\\"' * 300_000)),
    "metadata of a megabyte": ("format", container(b'{"__metadata__":{"a":"%s"}}' % (b"x" * MEBIBYTE))),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_in_an_object(bomb: str, reader: Reader, written: Written, tmp_path: Path) -> None:
    kind, data = BOMBS[bomb]
    next_object(written, data)
    for door in (("changes", written.folder, NEXT), ("pieces", written.folder, NEXT, tmp_path)):
        assert "version 5" in reader.refused(*door, kind=kind)
    reader.refused("tensors", written.folder, kind=kind)
    reader.refused("verify", written.folder, kind=kind)
    untouched(reader, written)


@pytest.mark.parametrize("bomb", [name for name in BOMBS if name != "metadata of a megabyte"])
def test_in_a_checkpoint(bomb: str, reader: Reader, tmp_path: Path) -> None:
    kind, data = BOMBS[bomb]
    (tmp_path / "model.safetensors").write_bytes(data)
    assert "model.safetensors" in reader.refused("checkpoint", tmp_path, kind=kind)


HUNDRED = 99 * MEBIBYTE


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[' + b"[]," * (HUNDRED // 3) + b"[]]}",
        b'{"a":[' + b"{}," * (HUNDRED // 3) + b"{}]}",
        b'{"a":[' + b"0," * (HUNDRED // 2) + b"0]}",
        b'{"__metadata__":{' + b'"":"",' * (HUNDRED // 6) + b'"a":""}}',
        b"{" * HUNDRED,
    ],
    ids=["lists", "objects", "numbers", "strings", "braces"],
)
def test_a_header_of_a_hundred_megabytes(text: bytes, reader: Reader, tmp_path: Path) -> None:
    """Parsed, it would take up to thirty times its bytes; what is allowed here is the file mapped, and two copies."""
    (tmp_path / "model.safetensors").write_bytes(container(text))
    reader.refused("checkpoint", tmp_path, kind=("limit", "format"), spare=3 * 2**27)
