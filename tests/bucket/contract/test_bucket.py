"""What the Bucket contract promises to one caller at a time."""

import time
from pathlib import Path

import pytest

from tests.support.stores import Kind
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.errors import ConflictError, LimitError, NotFoundError, UsageError
from vllm_delta_sync.urls import MAX_KEY_BYTES, MAX_KEY_PART_BYTES

BAD_KEYS = [
    "",
    "/a",
    "a/",
    "a//b",
    ".",
    "..",
    "a/../b",
    "./a",
    "a/.",
    "...",
    "a../b",
    "a b",
    "a\\b",
    "a\0b",
    "a\n",
    "ü",
    "a:b",
    "~staging/x",
    "a" * (MAX_KEY_PART_BYTES + 1),
    "/".join(["abcdefg"] * 65),
]
GOOD_KEYS = [
    "a",
    ".hidden",
    "-",
    "HEAD.json",
    "versions/0000000007.json",
    "a" * MAX_KEY_PART_BYTES,
    "/".join(["abcdefg"] * 64),
]


@pytest.mark.parametrize("if_absent", [False, True])
def test_what_was_put_is_what_comes_back(bucket: Bucket, tmp_path: Path, if_absent: bool) -> None:
    for number, data in enumerate((b"", b"x", bytes(range(256)) * 40_000)):
        before, key = time.time(), f"some/key{number}"
        # Of three, one comes from a file, which may be changed later.
        source: bytes | Path = data
        if number == 2:
            source = tmp_path / "source"
            source.write_bytes(data)
        bucket.put(key, source, if_absent=if_absent)
        if isinstance(source, Path):
            source.write_bytes(b"changed later")
        assert bucket.get(key) == data
        info = bucket.stat(key)
        assert (info.key, info.bytes) == (key, len(data))
        assert before - 5 < info.modified < time.time() + 5
        listed = list(bucket.list())[number]
        assert (listed.key, listed.bytes) == (info.key, info.bytes)
        assert abs(listed.modified - info.modified) < 1


def test_good_keys(bucket: Bucket) -> None:
    for key in GOOD_KEYS:
        assert len(key) <= MAX_KEY_BYTES
        bucket.put(key, b"x")
        assert bucket.get(key) == b"x"
        assert [info.key for info in bucket.list()] == [key]
        bucket.delete(key)


def test_bad_arguments_are_refused_by_every_method(bucket: Bucket, tmp_path: Path) -> None:
    for key in BAD_KEYS:
        for call in (
            lambda key=key: bucket.put(key, b"x"),
            lambda key=key: bucket.get(key),
            lambda key=key: bucket.get_range(key, 0, 1),
            lambda key=key: bucket.stat(key),
            lambda key=key: bucket.delete(key),
        ):
            with pytest.raises(UsageError):
                call()  # type: ignore[no-untyped-call]
    # Of prefixes before iteration.
    for prefix in ("/", "a//", "../", "a/../", "a b", "ü", "a" * (MAX_KEY_BYTES + 1)):
        with pytest.raises(UsageError):
            bucket.list(prefix)
    with pytest.raises(UsageError, match=r"missing.*'key'"):
        bucket.put("key", tmp_path / "missing")
    assert list(bucket.list()) == []


def test_create_if_absent_leaves_the_first(bucket: Bucket) -> None:
    bucket.put("key", b"first", if_absent=True)
    with pytest.raises(ConflictError, match=r"key.*exists already"):
        bucket.put("key", b"second", if_absent=True)
    assert bucket.get("key") == b"first"


def test_what_is_not_there(bucket: Bucket) -> None:
    bucket.put("folder/key", b"x")
    for key in ("key", "folder", "folder/other", "folder/key/below", "nowhere/key"):
        with pytest.raises(NotFoundError, match=key):
            bucket.get(key)
        with pytest.raises(NotFoundError):
            bucket.get_range(key, 0, 1)
        with pytest.raises(NotFoundError):
            bucket.stat(key)
        bucket.delete(key)
    assert bucket.get("folder/key") == b"x"


def test_reads_are_bounded(bucket: Bucket) -> None:
    data = b"0123456789"
    bucket.put("key", data)
    assert bucket.get("key", max_bytes=10) == data
    with pytest.raises(LimitError, match="'key' has 10 bytes, more than the 9"):
        bucket.get("key", max_bytes=9)
    bucket.put("empty", b"")
    assert bucket.get("empty", max_bytes=0) == b""
    for start, length in ((0, 10), (0, 0), (3, 4), (8, 10), (10, 1), (99, 1), (2, 1 << 40)):
        assert bucket.get_range("key", start, length) == data[start : start + length]
    for start, length in ((-1, 5), (0, -1)):
        with pytest.raises(UsageError, match="neither may be negative"):
            bucket.get_range("key", start, length)


def test_list_ascends_by_key_across_folders(bucket: Bucket) -> None:
    keys = ["a-b", "a.b", "a/b", "a/b-c", "a/b.c/d", "a/bb/c", "a0", "A", "_", "0", "z/y/x/w", "z/y0", ".a"]
    for key in keys:
        bucket.put(key, key.encode())
    assert [info.key for info in bucket.list()] == sorted(keys)
    for prefix in ("a", "a/", "a/b", "a/b.", "z/y/", "z/y", "zz", "a/b/c/d", ".", "_"):
        assert [info.key for info in bucket.list(prefix)] == sorted(k for k in keys if k.startswith(prefix))
    assert all(info.bytes == len(info.key) for info in bucket.list())


def test_a_key_that_is_a_folder_too_is_refused_or_held(bucket: Bucket, kind: Kind) -> None:
    bucket.put("a", b"x")
    bucket.put("b/c", b"z")
    if kind.refuses_folder_keys:
        with pytest.raises(UsageError):
            bucket.put("a/b", b"y")
        for if_absent in (False, True):
            with pytest.raises(UsageError):
                bucket.put("b", b"y", if_absent=if_absent)
        assert [info.key for info in bucket.list()] == ["a", "b/c"]
    else:
        bucket.put("a/b", b"y")
        bucket.put("b", b"w", if_absent=True)
        assert [info.key for info in bucket.list()] == ["a", "a/b", "b", "b/c"]
        assert [bucket.get(key) for key in ("a", "a/b", "b", "b/c")] == [b"x", b"y", b"w", b"z"]


def test_it_says_what_it_is_and_its_url_opens_it_again(bucket: Bucket, kind: Kind) -> None:
    assert bucket.supports_conditional_put == kind.exclusive
    bucket.put("key", b"x")
    again = open_bucket(bucket.url)
    assert (again.get("key"), again.url) == (b"x", bucket.url)
    again.close()
    again.close()
