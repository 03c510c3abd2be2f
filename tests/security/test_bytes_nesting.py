"""JSON that nests deeply, or that is many small values: refused before anything is parsed."""

import json
from collections.abc import Callable

import pytest

from tests.security.build import NEXT, next_changed, untouched
from tests.security.reader import Reader
from tests.support.forge import forge
from tests.support.written import Written
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.limits import MAX_JSON_BYTES
from vllm_delta_sync.wire.manifest import version_key

MANY = MAX_JSON_BYTES // 3 - 1000

NESTS: dict[str, Callable[[], bytes]] = {
    "lists": lambda: b"[" * 100_000 + b"]" * 100_000,
    "objects": lambda: b'{"a":' * 100_000 + b"0" + b"}" * 100_000,
    "lists without an end": lambda: b"[" * 1_000_000,
    "objects without an end": lambda: b'{"a":' * 1_000_000,
    "one too many": lambda: b"[" * 16 + b"]" * 16,
    "behind a string of brackets": lambda: b'["]]]]]]]]]]]]]]]]]",' + b"[" * 16 + b"]" * 17,
    "behind an escaped quote": lambda: b'["\\"]]]]]]]]]]]]]]]]]",' + b"[" * 16 + b"]" * 17,
}
MANIES: dict[str, Callable[[], bytes]] = {
    "empty lists": lambda: b"[" + b"[]," * MANY + b"[]]",
    "empty objects": lambda: b"[" + b"{}," * MANY + b"{}]",
    "zeros": lambda: b"[" + b"0," * MANY + b"0]",
    "empty strings": lambda: b"[" + b'"",' * MANY + b'""]',
}
KEYS = ["run.json", "tensors.json", "HEAD.json", "versions/0000000004.json"]


def with_member(good: bytes, value: bytes) -> bytes:
    """A document with one more member, which readers do not know."""
    return good[:-1] + b',"zzz":' + value + b"}"


@pytest.mark.parametrize("key", KEYS)
def test_documents_that_nest(key: str, reader: Reader, written: Written) -> None:
    good = (written.folder / key).read_bytes()
    for nest in NESTS.values():
        (written.folder / key).write_bytes(with_member(good, nest()))
        assert key in reader.refused("head", written.folder, kind=("format", "limit"))
    (written.folder / key).write_bytes(good)
    untouched(reader, written)


@pytest.mark.parametrize("name", MANIES)
def test_documents_of_many_values(name: str, reader: Reader, written: Written) -> None:
    """64 MiB of them would take gigabytes, and half a minute."""
    for key, match in (("versions/0000000004.json", "bytes, more than the"), ("tensors.json", "MAX_JSON_VALUES")):
        good = (written.folder / key).read_bytes()
        (written.folder / key).write_bytes(with_member(good, MANIES[name]()))
        assert match in reader.refused("head", written.folder, kind="limit")
        if key.startswith("versions/"):
            (written.folder / "HEAD.json").unlink()
            assert match in reader.refused("head", written.folder, kind="limit")
            (written.folder / key).write_bytes(good)


def test_a_long_string_is_no_nest(reader: Reader, written: Written) -> None:
    """Brackets in strings are text. A million of them, and a million quotes, are read in one pass."""
    text = json.dumps('[{"\\' * 250_000)
    forge(written.folder)
    path = written.folder / version_key(NEXT)
    path.write_bytes(dump_canonical({**json.loads(path.read_bytes()), "zzz": json.loads(text)}))
    assert reader.reads("head", written.folder) == NEXT


def test_metadata_of_a_delta(reader: Reader, written: Written) -> None:
    value: object = 0
    for _ in range(40):
        value = [value]
    next_changed(written, lambda arrays, metadata: metadata.update(zzz=value))
    assert "nested deeper" in reader.refused("changes", written.folder, NEXT, kind="format")
    untouched(reader, written)
