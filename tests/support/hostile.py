"""Flawed safetensors headers and zstd frames, each with the kind of the one error that it must be.

The suites of the format go through all of them (``format/test_container.py``, ``codec/test_compression.py``); those of
other readers take some.
"""

from typing import Any

import zstandard


def container(header: bytes, data: bytes = b"") -> bytes:
    """A safetensors file of any header."""
    return len(header).to_bytes(8, "little") + header + data


def entry(shape: str = "[1]", offsets: str = "[0,1]", dtype: str = '"U8"') -> bytes:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'.encode()


def _file(*entries: bytes, data: bytes = b"x") -> bytes:
    named = (b'"%c":%s' % (ord("a") + place, text) for place, text in enumerate(entries))
    return container(b"{" + b",".join(named) + b"}", data)


def _of_metadata(value: bytes) -> bytes:
    return container(b'{"__metadata__":%s}' % value)


def _length(number: int) -> bytes:
    return number.to_bytes(8, "little") + b"{}"


HEADERS: dict[str, tuple[str, bytes]] = {
    "length of 2^63": ("limit", _length(2**63)),
    "length of 2^64 - 1": ("limit", _length(2**64 - 1)),
    "length above the limit": ("limit", _length(101 << 20)),
    "length beyond the file": ("format", _length(100 << 20)),
    "length of one byte more": ("format", _length(3)),
    "empty file": ("format", b""),
    "seven bytes": ("format", b"\x02\0\0\0\0\0\0"),
    "empty header": ("format", container(b"")),
    "no JSON": ("format", container(b"{garbage")),
    "no object": ("format", container(b"[]")),
    "white space first": ("format", container(b' {"a":1}')),
    "byte order mark": ("format", container(b"\xef\xbb\xbf{}")),
    "JSON twice": ("format", container(b"{}{}")),
    "NaN": ("format", _file(entry("[NaN]"))),
    "quotes without an end": ("format", container(b'{"a":[' + b"[" * 20 + b'"' + b'\\"' * 300_000)),
    "invalid UTF-8": ("format", container(b'{"\xff":%s}' % entry(), b"x")),
    "half a surrogate pair": ("format", container(b'{"\\ud800":%s}' % entry(), b"x")),
    "half a surrogate pair in metadata": ("format", _of_metadata(b'{"a":"\\udc00"}')),
    "surrogate in UTF-8": ("format", container(b'{"\xed\xa0\x80":%s}' % entry(), b"x")),
    "nested deep": ("format", container(b'{"a":' * 100_000 + b"0" + b"}" * 100_000)),
    "nested without an end": ("format", container(b'{"a":' + b"[" * 100_000)),
    "nested deep in an entry": ("format", _file(entry("[" * 99 + "]" * 99))),
    "name twice": ("format", container(b'{"a":%s,"a":%s}' % (entry(), entry(offsets="[1,2]")), b"xy")),
    "member twice": ("format", container(b'{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}', b"x")),
    "member too many": ("format", _file(entry()[:-1] + b',"x":0}')),
    "member missing": ("format", _file(b'{"dtype":"U8","data_offsets":[0,1]}')),
    "entry as a string": ("format", _file(b'"U8"')),
    "metadata as a list": ("format", _of_metadata(b"[]")),
    "metadata of numbers": ("format", _of_metadata(b'{"a":1}')),
    "metadata that nests": ("format", _of_metadata(b'{"a":{"b":"c"}}')),
    "metadata twice": ("format", container(b'{"__metadata__":{},"__metadata__":{}}')),
    "metadata member twice": ("format", _of_metadata(b'{"a":"x","a":"y"}')),
    "unknown dtype": ("format", _file(entry(dtype='"OBJECT"'))),
    "dtype of pickles": ("format", _file(entry(dtype='"|O"'))),
    "dtype as a number": ("format", _file(entry(dtype="8"))),
    "dtype as a list": ("format", _file(entry(dtype='["U8"]'))),
    "three offsets": ("format", _file(entry(offsets="[0,1,1]"))),
    "offsets beyond the file": ("format", _file(entry("[2]", "[0,2]"))),
    "offsets of 2^63": ("format", _file(entry(offsets="[0,9223372036854775808]"))),
    "offsets of 4000 digits": ("format", _file(entry(offsets=f"[0,{'9' * 4000}]"))),
    "offsets reversed": ("format", _file(entry(offsets="[1,0]"))),
    "offsets negative": ("format", _file(entry(offsets="[-1,0]"))),
    "offsets as floats": ("format", _file(entry(offsets="[0,1.0]"))),
    "offsets as booleans": ("format", _file(entry(offsets="[false,true]"))),
    "overlap": ("format", _file(entry("[2]", "[0,2]"), entry("[2]", "[1,3]"), data=b"xyz")),
    "same bytes twice": ("format", _file(entry(), entry())),
    "hole": ("format", _file(entry(), entry(offsets="[2,3]"), data=b"xyz")),
    "hole at the start": ("format", _file(entry(offsets="[1,2]"), data=b"xy")),
    "bytes after the last": ("format", _file(entry(), data=b"xy")),
    "bytes without entries": ("format", container(b"{}", b"x")),
    "shape against offsets": ("format", _file(entry("[2]"))),
    "shape of 2^60": ("limit", _file(entry("[1152921504606846976]"))),
    "shape of 2^48 + 1": ("limit", _file(entry(f"[{2**48 + 1}]"))),
    "shape that overflows to 1": ("format", _file(entry("[281474976710656,281474976710656]"))),
    "shape with a negative": ("limit", _file(entry("[-1]"))),
    "shape of -1 by -1": ("limit", _file(entry("[-1,-1]"))),
    "shape of 17 dimensions": ("limit", _file(entry(f"[{'1,' * 16}1]"))),
    "shape of 500,000 dimensions": ("limit", _file(entry(f"[{'1,' * 499_999}1]"))),
    "shape of 4000 digits": ("limit", _file(entry(f"[{'9' * 4000}]"))),
    "shape as a number": ("format", _file(entry("1"))),
    "shape as a string": ("format", _file(entry('"[1]"'))),
    "shape of a string": ("format", _file(entry('["1"]'))),
    "shape of a float": ("format", _file(entry("[1.0]"))),
    "shape of a boolean": ("format", _file(entry("[true]"))),
}


MAGIC = b"\x28\xb5\x2f\xfd"
EMPTY = zstandard.ZstdCompressor().compress(b"")
ONE = zstandard.ZstdCompressor().compress(b"\x05")
_HUNDRED = zstandard.ZstdCompressor().compress(bytes(range(100)))
_SKIPPABLE = b"\x50\x2a\x4d\x18" + (4).to_bytes(4, "little") + b"skip"


def declaring(size: int, blocks: bytes = b"\x01\0\0") -> bytes:
    """A frame with a content size of 8 bytes, a window of 1 KiB, and ``blocks`` (one empty last block)."""
    return MAGIC + b"\xc0\0" + size.to_bytes(8, "little") + blocks


def _with_dictionary(data: bytes) -> bytes:
    training: list[Any] = [bytes([number % 251]) * 40 + b"abcdefgh" for number in range(400)]
    dictionary = zstandard.train_dictionary(2048, training)
    return zstandard.ZstdCompressor(dict_data=dictionary).compress(data)


def _undeclared(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_content_size=False).compress(data)


FRAMES: dict[str, tuple[str, int, bytes]] = {
    "nothing": ("format", 1, b""),
    "nothing for nothing": ("format", 0, b""),
    "magic alone": ("format", 0, MAGIC),
    "no frame": ("format", 1, b"\x05"),
    "as many bytes, no frame": ("format", 100, bytes(range(100))),
    "a gzip file": ("format", 1, b"\x1f\x8b\x08\0\0\0\0\0\0\x03"),
    "declares 2^60": ("format", 1, declaring(2**60)),
    "declares 2^64 - 2": ("format", 1, declaring(2**64 - 2)),
    "declares no size": ("format", 100, _undeclared(bytes(range(100)))),
    "declares a hundred, holds nothing": ("format", 100, declaring(100)),
    "declares nothing, holds 128 kB": ("format", 0, declaring(0, b"\x03\0\x10x")),
    "declares one, holds two": ("format", 1, MAGIC + b"\x20\x01" + b"\x11\0\0" + b"\x05\x05"),
    "declares one, holds 128 kB": (
        "format",
        1,
        MAGIC + b"\x20\x01" + (0x10000 << 3 | 3).to_bytes(3, "little") + b"\x05",
    ),
    "declares two, holds one": ("format", 1, MAGIC + b"\x20\x02" + b"\x09\0\0" + b"\x05"),
    "window of 2 GiB": ("limit", 1, MAGIC + b"\xc0" + bytes([21 << 3]) + (1).to_bytes(8, "little") + b"\x09\0\0\x05"),
    "window of 2^41": ("format", 1, MAGIC + b"\xc0\xff" + (1).to_bytes(8, "little") + b"\x09\0\0\x05"),
    "a frame before": ("format", 1, EMPTY + ONE),
    "a frame of nothing before": ("limit", 0, EMPTY + _HUNDRED),
    "a frame after": ("format", 1, ONE + ONE),
    "twenty thousand frames": ("format", 1, ONE + EMPTY * 20_000),
    "a skippable frame": ("format", 4, _SKIPPABLE),
    "a skippable frame before": ("format", 1, _SKIPPABLE + ONE),
    "a skippable frame after": ("format", 1, ONE + _SKIPPABLE),
    "a dictionary": ("format", 1, _with_dictionary(b"\x05")),
    "a byte after": ("format", 1, ONE + b"\0"),
    "a byte after nothing": ("format", 0, EMPTY + b"!"),
    "cut": ("format", 1, ONE[:-1]),
    "cut in the middle": ("format", 100, _HUNDRED[:20]),
    "cut, of nothing": ("format", 0, EMPTY[:-1]),
    "a reserved block": ("format", 1, MAGIC + b"\x20\x01" + b"\x0f\0\0" + b"\x05"),
    "empty blocks without end": ("format", 1, MAGIC + b"\x20\x01" + b"\0\0\0" * 20_000),
}
"""Kind of error, size that is expected, frame."""
