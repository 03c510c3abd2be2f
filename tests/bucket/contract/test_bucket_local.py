"""What only the local directory has: links, pipes, staging, full disks, and the forms of its URL."""

import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import run_python, small_disk
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket.local import STAGING, STALE_STAGING_SECONDS, LocalBucket
from vllm_delta_sync.errors import NotFoundError, StoreError, UsageError


def refused(call: Callable[[], object]) -> None:
    with pytest.raises(StoreError, match="symbolic link"):
        call()


def refused_everywhere(bucket: Bucket, key: str) -> None:
    refused(lambda: bucket.get(key))
    refused(lambda: bucket.get_range(key, 0, 1))
    refused(lambda: bucket.stat(key))
    refused(lambda: bucket.put(key, b"written through a link"))
    refused(lambda: bucket.put(key, b"written through a link", if_absent=True))
    refused(lambda: bucket.delete(key))


def test_a_linked_object_is_refused(local: LocalBucket, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    local.put("a/real", b"x")
    (root / "a" / "link").symlink_to(outside)
    (root / "a" / "dangling").symlink_to(tmp_path / "nothing")
    for key in ("a/link", "a/dangling"):
        refused_everywhere(local, key)
    assert outside.read_bytes() == b"secret"
    assert not (tmp_path / "nothing").exists()
    assert [info.key for info in local.list()] == ["a/real"]


def test_a_linked_folder_is_refused(local: LocalBucket, root: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "object").write_bytes(b"secret")
    local.put("a/real", b"x")
    (root / "a" / "link").symlink_to(outside)
    refused_everywhere(local, "a/link/object")
    refused(lambda: local.put("a/link/new", b"x"))
    refused(lambda: local.put("a/link/deep/new", b"x"))
    refused(lambda: list(local.list("a/link/")))
    assert [info.key for info in local.list()] == ["a/real"]
    assert [path.name for path in outside.iterdir()] == ["object"]


def test_linked_staging_is_refused(local: LocalBucket, root: Path, tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    root.mkdir()
    (root / STAGING).symlink_to(tmp_path / "outside")
    refused(lambda: local.put("key", b"x"))
    assert list((tmp_path / "outside").iterdir()) == []


def test_the_root_may_be_a_link(root: Path, tmp_path: Path) -> None:
    root.mkdir()
    (tmp_path / "link").symlink_to(root)
    LocalBucket(tmp_path / "link").put("a/key", b"x")
    assert LocalBucket(root).get("a/key") == b"x"


def test_a_pipe_is_refused_without_waiting_for_it(local: LocalBucket, root: Path) -> None:
    local.put("real", b"x")
    os.mkfifo(root / "pipe")
    for call in (lambda: local.get("pipe"), lambda: local.stat("pipe"), lambda: local.put("pipe", b"x")):
        with pytest.raises(StoreError, match="not a regular file"):
            call()
    assert [info.key for info in local.list()] == ["real"]


def test_only_stale_staging_is_swept(root: Path) -> None:
    LocalBucket(root).put("key", b"x")
    for name, age in (("stale", STALE_STAGING_SECONDS + 60), ("fresh", 60)):
        (root / STAGING / name).write_bytes(b"half")
        moment = time.time() - age
        os.utime(root / STAGING / name, (moment, moment))
    LocalBucket(root).put("key", b"y")
    assert [path.name for path in (root / STAGING).iterdir()] == ["fresh"]


def test_bytes_are_synced_before_the_name_and_the_name_after(
    local: LocalBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.put("a/first", b"x")
    calls: list[str] = []
    for name in ("fsync", "link", "replace"):
        real = getattr(os, name)

        def spy(*args: object, _name: str = name, _real: Callable[..., object] = real, **more: object) -> object:
            calls.append(_name)
            return _real(*args, **more)

        monkeypatch.setattr(os, name, spy)
    local.put("a/new", b"x", if_absent=True)
    local.put("a/new", b"y")
    assert calls == ["fsync", "link", "fsync", "fsync", "replace", "fsync"]


def test_reading_creates_nothing(local: LocalBucket, root: Path) -> None:
    with pytest.raises(NotFoundError, match="does not exist; check the bucket URL"):
        local.get("key")
    assert list(local.list()) == []
    local.delete("key")
    assert not root.exists()


def test_a_root_that_is_a_file(root: Path) -> None:
    root.write_bytes(b"")
    local = LocalBucket(root)
    calls: list[Callable[[], object]] = [
        lambda: local.get("key"),
        lambda: local.put("key", b"x"),
        lambda: list(local.list()),
        lambda: list(local.list("a/b")),
        lambda: local.delete("a/b"),
    ]
    for call in calls:
        with pytest.raises(StoreError, match=r"root.*give a directory as the bucket"):
            call()


def test_list_reads_folders_when_it_gets_there(local: LocalBucket, root: Path) -> None:
    for key in ("a/1", "b/1", "c/1"):
        local.put(key, b"x")
    found = local.list()
    assert next(found).key == "a/1"
    local.put("b/2", b"x")
    shutil.rmtree(root / "c")
    assert [info.key for info in found] == ["b/1", "b/2"]


def test_list_gives_its_descriptors_back(local: LocalBucket) -> None:
    for number in range(5):
        local.put(f"{number}/a/b/c", b"x")
    before = len(os.listdir("/proc/self/fd"))
    abandoned = local.list()
    next(abandoned)
    del abandoned
    for _ in range(10):
        list(local.list())
        with pytest.raises(NotFoundError):
            local.get("0/a/b")
        with pytest.raises(NotFoundError):
            local.get("0/a/x/y")
    assert len(os.listdir("/proc/self/fd")) == before


FILL = """
import resource, sys
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.errors import StoreError
url, limit = sys.argv[1], int(sys.argv[2])
if limit:
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
bucket = open_bucket(url)
bucket.put("objects/small", b"s" * 1000)
bucket.put("objects/old", b"o" * 1000)
for key, if_absent in (("objects/large", True), ("objects/old", False)):
    try:
        bucket.put(key, b"x" * 4_000_000, if_absent=if_absent)
    except StoreError as error:
        print(error.kind, error)
    else:
        sys.exit("a full disk took 4 MB")
assert [(i.key, i.bytes) for i in bucket.list()] == [("objects/old", 1000), ("objects/small", 1000)]
assert bucket.get("objects/old") == b"o" * 1000
bucket.put("objects/next", b"n" * 1000, if_absent=True)
"""


@pytest.mark.parametrize(("limit", "remedy"), [(1_000_000, "ulimit -f"), (0, "free some space")])
def test_a_full_disk(limit: int, remedy: str, tmp_path: Path) -> None:
    """A disk that takes no 4 MB: by a limit for each file, or because it is small."""
    place = tmp_path / "disk"
    place.mkdir()
    prefix = [] if limit else small_disk(place, "1m")
    done = run_python("-c", FILL, str(place / "bucket"), str(limit), prefix=prefix)
    first, second = done.stdout.splitlines()
    assert first.startswith("store cannot write key 'objects/large' of file://")
    assert second.startswith("store cannot write key 'objects/old' of file://")
    assert remedy in first


@pytest.mark.parametrize("if_absent", [False, True])
def test_a_folder_that_is_a_mount_of_its_own_is_named(if_absent: bool, tmp_path: Path) -> None:
    folder = tmp_path / "objects"
    folder.mkdir()
    code = f"from vllm_delta_sync.bucket import open_bucket; open_bucket({str(tmp_path)!r}).put('objects/a', b'x', "
    done = run_python("-c", f"{code}if_absent={if_absent})", prefix=small_disk(folder, "1m"), code=1)
    assert "on one file system that has hard links: no folder in it may be its own mount" in done.stderr


def _all_descriptors() -> Iterator[int]:
    while True:
        try:
            yield os.open("/", os.O_RDONLY)
        except OSError:
            return


def test_running_out_of_descriptors_is_a_store_error(local: LocalBucket) -> None:
    local.put("a/b/c", b"x")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))), hard))
    held: list[int] = []
    try:
        held.extend(_all_descriptors())
        with pytest.raises(StoreError, match="ulimit -n"):
            local.get("a/b/c")
    finally:
        for descriptor in held:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(os.listdir("/proc/self/fd")) == used
    assert local.get("a/b/c") == b"x"


@pytest.mark.parametrize(
    "form",
    ["{path}", "{path}/", "file://{path}", "file://localhost{path}", "FILE://{path}", "{path}/../runs"],
)
def test_forms_of_the_url(form: str, tmp_path: Path) -> None:
    path = tmp_path / "runs"
    bucket = open_bucket(form.format(path=path))
    assert bucket.url == f"file://{path}"
    bucket.put("key", b"x")
    assert (path / "key").read_bytes() == b"x"


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    """The URL that is shown leads back to it."""
    path = tmp_path / os.fsdecode(b"run\xff")
    first = open_bucket(str(path))
    first.put("key", b"x")
    for url in (first.url, f"file://{path}"):
        assert open_bucket(url).get("key") == b"x"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (None, "the bucket is None; give the URL or the path of a run"),
        ("", "is empty or has a control character"),
        ("a\0b", "is empty or has a control character"),
        ("/data/run\r", "is empty or has a control character"),
        ("file:///data/run\r", "is empty or has a control character"),
        ("/data\0/run", "is empty or has a control character"),
        ("ftp://host/path", "unknown scheme 'ftp'; supported: a path, file:///absolute/path, hf://"),
        ("http://169.254.169.254/latest", "unknown scheme 'http'"),
        ("javascript://run", "unknown scheme 'javascript'"),
        ("s3://", "names no bucket: write s3://bucket/run"),
        ("s3://bucket/a//b", "has a path that cannot be used"),
        ("s3://key:secret@bucket/run", "give credentials in the environment"),
        ("s3://127.0.0.1:9000/runs/a", "names a host and a port: write s3://bucket/run, and set store_endpoint"),
        ("hf://localhost:80/buckets/a/b", "names a host and a port"),
        ("gs://a:1", "names a host and a port"),
        ("file:relative", "no absolute path"),
        ("FILE:relative", "no absolute path"),
        ("file:/one/slash", "no absolute path"),
        ("file://", "no absolute path"),
        ("file://server/share", "names the host 'server'"),
        ("file://../../etc", "names the host '..'"),
        ("file:///a?b=c", "'?' or '#'"),
        ("file:///a#b", "'?' or '#'"),
        ("file:///a%00b", "has a control character in its path"),
        ("file:///data/%00/run", "has a control character in its path"),
    ],
)
def test_urls_that_are_refused(url: Any, message: str) -> None:
    with pytest.raises(UsageError) as raised:
        open_bucket(url)
    assert message in raised.value.message
    assert raised.value.message.isprintable()
