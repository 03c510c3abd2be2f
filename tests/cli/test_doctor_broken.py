"""The doctor notices every promise of a bucket that a store breaks."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from errno import EROFS
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_doctor import SIZE, look, verdicts
from tests.support.publishing import keys
from vllm_delta_sync.bucket import Bucket, ObjectInfo, StoreOptions
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.wrapper import WrappedBucket
from vllm_delta_sync.errors import AccessError, ConflictError, StoreError
from vllm_delta_sync.upkeep import doctor_door, doctor_store
from vllm_delta_sync.upkeep.doctor import BUCKET_CHECKS
from vllm_delta_sync.upkeep.doctor_findings import Finding


class Broken(WrappedBucket):
    """A directory of which one method does otherwise."""

    def __init__(self, root: Path) -> None:
        super().__init__(LocalBucket(root))
        self.copies: dict[str, bytes] = {}
        self.hangs = threading.Event()


class Unwritable(Broken):
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        raise AccessError("this token may not write")


class OnReadOnlyMount(Broken):
    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        raise StoreError("cannot write: Read-only file system") from OSError(EROFS, "Read-only file system")


class Damaging(Broken):
    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return super().get(key, max_bytes=max_bytes)[:-1] + b"?"


class Misjudging(Broken):
    def stat(self, key: str) -> ObjectInfo:
        found = super().stat(key)
        return ObjectInfo(key, found.bytes + 1, found.modified)


class Rangeless(Broken):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return super().get(key)


class Endless(Broken):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        return super().get_range(key, start, length) or b"x"


class Lagging(Broken):
    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return iter(())


class Careless(Broken):
    """Heeds If-None-Match as many an S3 server does: not at all."""

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        super().put(key, data)


class Lying(Broken):
    """Refuses the second writer, and overwrites all the same."""

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        try:
            super().put(key, data, if_absent=if_absent)
        except ConflictError:
            super().put(key, data)
            raise


class Racy(Broken):
    """Looks first, and writes then; the writers of the race all look before any has written."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.looked = threading.Barrier(doctor_store.WRITERS)

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if if_absent and any(True for _ in self.list(key)):
            raise ConflictError("exists already")
        if key.endswith("-race"):
            self.looked.wait(120)
        super().put(key, data)


class Candid(Racy):
    """The same, and says so."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.exclusive = False


class Caching(Broken):
    """A reader gets what it got before."""

    def get(self, key: str, *, max_bytes: int | None = None) -> bytes:
        return self.copies.setdefault(key, super().get(key, max_bytes=max_bytes))


class Undying(Broken):
    def delete(self, key: str) -> None:
        if key.endswith("-once"):
            super().delete(key)


class Remembering(Broken):
    """Deleted objects stay in listings."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gone: dict[str, ObjectInfo] = {}

    def delete(self, key: str) -> None:
        if (self._inner.url, key) and key not in self.gone:
            self.gone[key] = self.stat(key)
        super().delete(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        yield from super().list(prefix)
        yield from (info for key, info in self.gone.items() if key.startswith(prefix))


class Shortening(Broken):
    """Loses the end of what is large."""

    def get_file(self, key: str, path: Path) -> None:
        super().get_file(key, path)
        os.truncate(path, SIZE - 1)


class Hanging(Broken):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        self.hangs.wait(600)
        return b""


class Surprising(Broken):
    def get_range(self, key: str, start: int, length: int) -> bytes:
        raise ZeroDivisionError("of a library")


def ahead(seconds: float) -> type[Broken]:
    class Ahead(Broken):
        def stat(self, key: str) -> ObjectInfo:
            found = super().stat(key)
            return ObjectInfo(key, found.bytes, found.modified + seconds)

    return Ahead


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., dict[str, Finding]]]:
    """Findings of a kind of broken bucket in an empty directory."""
    opened: list[Broken] = []

    def findings(kind: type[Broken], **request: Any) -> dict[str, Finding]:
        def open_broken(url: str, options: StoreOptions) -> Bucket:
            opened.append(kind(Path(url)))
            return opened[-1]

        monkeypatch.setattr(doctor_door, "open_bucket", open_broken)
        return look(tmp_path, **request)

    yield findings
    for bucket in opened:
        bucket.hangs.set()


FAILURES = [
    (Unwritable, "put", "may not write", "access"),
    (OnReadOnlyMount, "put", "Read-only", "store"),
    (Damaging, "get", "other bytes", "store"),
    (Misjudging, "get", "has 1001", "store"),
    (Rangeless, "range", "50 bytes of it from 100", "store"),
    (Endless, "range", "behind its end", "store"),
    (Lagging, "list", "lag behind", "store"),
    (Careless, "create", "heeds If-None-Match", "store"),
    (Lying, "create", "a second writer was refused", "store"),
    (Racy, "race", "16 are told", "store"),
    (Caching, "overwrite", "other bytes", "store"),
    (Undying, "delete", "can be read after it was deleted", "store"),
    (Remembering, "delete", "lag behind", "store"),
    (Shortening, "throughput", "does not come back equal", "store"),
    (Surprising, "range", "unexpected ZeroDivisionError: of a library", "store"),
]


@pytest.mark.parametrize(("kind", "check", "said", "error"), FAILURES, ids=lambda value: getattr(value, "__name__", ""))
def test_broken_promises(
    broken: Callable[..., dict[str, Finding]], kind: type[Broken], check: str, said: str, error: str
) -> None:
    found = broken(kind)
    assert verdicts(found)["failed"][0] == check
    assert said in found[check].said
    assert found[check].error is not None
    assert found[check].error.kind == error  # type: ignore[union-attr]


@pytest.mark.parametrize("kind", [Unwritable, OnReadOnlyMount])
def test_whoever_may_only_read_is_told_of_read_only(
    broken: Callable[..., dict[str, Finding]], kind: type[Broken]
) -> None:
    found = broken(kind)
    assert "--read-only" in found["put"].mend
    needs_writes = ("get", "range", "list", "create", "race", "overwrite", "delete", "latency", "throughput", "clock")
    assert verdicts(found)["skipped"][: len(needs_writes)] == list(needs_writes)
    assert found["run"].verdict == "ok"
    assert "failed" not in verdicts(broken(kind, reads_only=True))


def test_without_keep_going_the_first_failure_is_the_last_check(broken: Callable[..., dict[str, Finding]]) -> None:
    found = broken(Lagging, keep_going=False)
    assert verdicts(found)["failed"] == ["list"]
    assert verdicts(found)["skipped"] == list(BUCKET_CHECKS[BUCKET_CHECKS.index("list") + 1 :])
    assert found["run"].said == "not checked: 'list' failed"


def test_a_store_without_create_if_absent_is_a_warning(broken: Callable[..., dict[str, Finding]]) -> None:
    found = broken(Candid)
    assert verdicts(found)["warning"] == ["race"]
    assert found["race"].figures == {"writers": 16, "winners": 16, "exclusive": False}
    assert "one publisher at a time" in found["race"].mend
    assert "failed" not in verdicts(found)


def test_a_store_that_hangs_is_given_up(
    broken: Callable[..., dict[str, Finding]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = time.monotonic()
    found = broken(Hanging, options=StoreOptions(store_deadline=2))
    assert time.monotonic() - began < 120
    assert verdicts(found)["failed"] == ["range"]
    assert found["range"].error is not None
    assert (found["range"].error.kind, found["range"].error.exit_code) == ("deadline", 4)
    assert found["run"].said == "not checked: a check before it did not come back"
    left = found["clean-up"].figures["left"]
    assert keys(str(tmp_path)) == set(left)
    # The next doctor finds them a day later.
    for key in left:
        os.utime(tmp_path / key, (0, 0))
    monkeypatch.undo()
    assert look(tmp_path)["delete"].figures == {"stale_removed": 1}
    assert keys(str(tmp_path)) == set()


@pytest.mark.parametrize(
    ("seconds", "verdict"), [(0, "ok"), (55, "ok"), (-55, "ok"), (75, "warning"), (-75, "warning")]
)
def test_clocks(broken: Callable[..., dict[str, Finding]], seconds: float, verdict: str) -> None:
    found = broken(ahead(seconds))["clock"]
    assert found.verdict == verdict
    assert found.figures["off_seconds"] == pytest.approx(seconds, abs=2)
    if verdict == "warning":
        assert ("ahead of" if seconds > 0 else "behind") in found.said
