"""``BucketProbe`` checks a bucket: access to it, the contract of ``Bucket``, its speed and clock, and the run in it.

Test objects have keys ``doctor/<32 hex digits>-<name>``; readers of a run ignore unknown keys (docs/FORMAT.md).
"""

import os
import secrets
import shutil
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from errno import EROFS
from pathlib import Path
from typing import Any

from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.base import conflict_error, create_if_absent, has_object
from vllm_delta_sync.bucket.local import STAGING, describe_failure
from vllm_delta_sync.bucket.middleware.deadline import DeadlineBucket
from vllm_delta_sync.bucket.ranged import download
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.doctor.findings import CheckResult, failed, ok, skipped, warning
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DataError,
    DeltaSyncError,
    LimitError,
    NotFoundError,
    StoreError,
)
from vllm_delta_sync.format.limits import MAX_JSON_BYTES
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, RUN_KEY, VERSIONS_PREFIX
from vllm_delta_sync.maintenance.accounting import is_empty
from vllm_delta_sync.process_folders import ProcessFolder
from vllm_delta_sync.run.objects import file_digest
from vllm_delta_sync.run.run_reader import RunReader, read_info
from vllm_delta_sync.settings import MIN_BYTES_PER_SECOND
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.units import rounded
from vllm_delta_sync.urls import local_path, scheme_of

PREFIX = "doctor/"
SMALL_BYTES = 1000
CLOCK_SECONDS = 60.0
CHUNK_BYTES = 4 * 1024 * 1024
MOST_READ_BYTES = 256 * 1024 * 1024
READ_ONLY_REMEDY = "A receiver only needs to read: check it with --read-only. A publisher must be able to write"
SINGLE_WRITER = (
    "Run only one publisher at a time: if two writers create the same key at once, this store keeps the later "
    "one. A publisher reads back what it wrote, and stops if another writer replaced it"
)


class BucketProbe:
    """The checks of one bucket in the order of their dependencies, ``url`` first, and their test objects.

    Args:
        size: bytes of the throughput test's object.
        reads_only: put and delete nothing; read run.json instead of a test object.

    Attributes:
        made: keys of test objects that may have been put.
        run, head: id and newest version of the run, once known.
    """

    def __init__(self, url: str, options: StoreOptions, keyring: Keyring, size: int, reads_only: bool) -> None:
        self._url = url
        self._options = options.without_copies()
        self._keyring, self._size, self._reads_only = keyring, size, reads_only
        self._closing = ExitStack()
        self._folders: list[Path] = []
        self._stem = f"{PREFIX}{secrets.token_hex(16)}-"
        self._key = RUN_KEY if reads_only else self._stem + "small"
        self._data = os.urandom(SMALL_BYTES)
        self.made: list[str] = []
        self.run: str | None = None
        self.head: int | None = None
        self.is_directory = scheme_of(url) == "file"

    def url(self) -> CheckResult:
        """Check whether the URL is valid and its library installed; warn about a directory that does not exist yet."""
        bucket = open_bucket(self._url, self._options)
        # A mount may hang too.
        bucket = DeadlineBucket(bucket, self._options) if self.is_directory else bucket
        self._bucket = self._closing.enter_context(bucket)
        figures: dict[str, Any] = {"url": bucket.url, "scheme": scheme_of(self._url)}
        if not self.is_directory:
            return ok(bucket.url, **figures)
        root = local_path(bucket.url)
        try:
            figures["exists"] = root.exists()
        except OSError as error:
            raise StoreError(describe_failure(f"look for {root}", error)) from error
        self._folders = [root / PREFIX]
        if figures["exists"]:
            return ok(f"{bucket.url}, a directory", **figures)
        if self._reads_only:
            return failed(NotFoundError(f"{root} does not exist"), "Check the path and the mount", **figures)
        self._folders += [root / STAGING, root, *(folder for folder in root.parents if not folder.exists())]
        remedy = "The first publisher creates it; if a run should be there, check the path and the mount"
        return warning(f"{bucket.url} does not exist yet", remedy, **figures)

    def credentials(self) -> CheckResult:
        """Check whether the store accepts the credentials for reading."""
        next(iter(self._bucket.list(PREFIX)), None)
        try:
            self._bucket.stat(RUN_KEY)
        except NotFoundError:
            pass
        if not self.is_directory:
            return ok("accepted for reading")
        root = local_path(self._bucket.url)
        if not root.exists():
            return ok("none needed")
        free = shutil.disk_usage(root).free
        summary = f"none needed, this user may read; {rounded(free / 1e9)} GB free"
        return ok(summary, user=os.geteuid(), owner=root.stat().st_uid, free_bytes=free)

    def put(self) -> CheckResult:
        """Check whether a small object can be put, and overwritten after it was read."""
        began = time.perf_counter()
        try:
            self._put("small", b"overwritten next")
            ms = round(1000 * (time.perf_counter() - began), 2)
            self._bucket.get(self._key)
            self._put("small", self._data)
        except StoreError as error:
            return failed(error, READ_ONLY_REMEDY if is_refusal(error) else "")
        return ok(f"a small object was written in {ms} ms, and overwritten", ms=ms)

    def get(self) -> CheckResult:
        """Check whether an object reads back as it was put last, whole and in part."""
        if self._reads_only:
            try:
                self._data = self._bucket.get(self._key, max_bytes=MAX_JSON_BYTES)
            except NotFoundError as error:
                return skipped(error.message)
        else:
            self._expect(self._bucket.get(self._key), self._data, "the put")
        size = self._bucket.stat(self._key).bytes
        if size != len(self._data):
            raise StoreError(f"the store reports {size} bytes for an object of {len(self._data)} bytes")
        start, length = size // 10, size // 20
        part = self._bucket.get_range(self._key, start, length)
        self._expect(part, self._data[start : start + length], f"a request for {length} of its bytes from {start}")
        beyond = self._bucket.get_range(self._key, size, length)
        self._expect(beyond, b"", "a request for a range beyond its end")
        what = f"{RUN_KEY} can be read, {size} bytes" if self._reads_only else "it reads back unchanged"
        return ok(f"{what}, and in part", bytes=size)

    def listing(self) -> CheckResult:
        found = [info for info in self._bucket.list(self._key) if info.key == self._key]
        if [info.bytes for info in found] != [len(self._data)]:
            raise StoreError(
                f"a listing does not show {self._key!r} as it was put, so listings of this store lag; use a store with "
                "consistent listings"
            )
        return ok("listings show it at once")

    def create(self) -> CheckResult:
        """Check whether create-if-absent refuses the second writer of a key."""
        key = self._stem + "once"
        self.made.append(key)
        if not create_if_absent(self._bucket, key, self._data):
            raise conflict_error(self._bucket.url, key)
        try:
            self._bucket.put(key, b"second", if_absent=True)
        except ConflictError:
            self._expect(self._bucket.get(key), self._data, "the refusal of a second writer")
        else:
            raise StoreError(
                "create-if-absent overwrites an existing key, so two publishers would overwrite each other's versions; "
                "use a store that honours If-None-Match"
            )
        if self._bucket.supports_conditional_put:
            return ok("an existing key is not created again", exclusive=True)
        summary = "an existing key is not created again, but of two writers at once both may succeed"
        return warning(summary, SINGLE_WRITER, exclusive=False)

    def delete(self) -> CheckResult:
        """Check whether a deleted object disappears at once."""
        self._bucket.delete(self._key)
        self._bucket.delete(self._key)
        try:
            self._bucket.get(self._key)
        except NotFoundError:
            pass
        else:
            raise StoreError(f"{self._key!r} can still be read after it was deleted: a cache or proxy keeps old copies")
        if any(info.key == self._key for info in self._bucket.list(self._key)):
            raise StoreError(
                f"a listing still shows {self._key!r} after it was deleted, so listings of this store lag; use a store "
                "with consistent listings"
            )
        return ok("a deleted object disappears at once")

    def throughput(self) -> CheckResult:
        """Upload and download one large object, in bounded memory; with ``reads_only``, download one of the run's."""
        if self._reads_only:
            largest = max(self._bucket.list(OBJECTS_PREFIX), key=lambda info: info.bytes, default=None)
            if largest is None or not largest.bytes:
                return skipped("there is no object to read")
            size = min(largest.bytes, self._size, MOST_READ_BYTES)
            return _speeds(size, {"down": _timed(lambda: self._bucket.get_range(largest.key, 0, size))})
        with ProcessFolder() as folder:
            source, copy = folder.path / "up", folder.path / "down"
            try:
                with source.open("wb") as file:
                    for start in range(0, self._size, CHUNK_BYTES):
                        file.write(os.urandom(min(CHUNK_BYTES, self._size - start)))
            except OSError as error:
                raise StoreError(
                    f"no room for {self._size} bytes in {folder.path}: {error.strerror}; set TMPDIR, or lower --bytes"
                ) from error
            digest = file_digest(source)
            up = _timed(lambda: self._put("large", source))
            source.unlink()
            down = _timed(lambda: download(self._bucket, self._stem + "large", self._size, copy))
            if file_digest(copy) != digest:
                raise StoreError(f"an object of {self._size} bytes does not read back unchanged")
        return _speeds(self._size, {"up": up, "down": down})

    def clock(self) -> CheckResult:
        """Compare the store's clock with this machine's."""
        before = time.time()
        self._put("small", self._data)
        after = time.time()
        modified = self._bucket.stat(self._stem + "small").modified
        off = modified - min(max(modified, before), after)
        if abs(off) <= CLOCK_SECONDS:
            return ok(f"the store's clock and this machine's agree to {abs(off):.0f} s", off_seconds=round(off, 1))
        return warning(
            f"the store's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's",
            "Synchronize this machine's clock with NTP: a signed HEAD.json expires by the reading machine's clock, "
            "while gc measures ages by the store's",
            off_seconds=round(off, 1),
        )

    def check_run(self) -> CheckResult:
        """Check that the newest version can be found, and that its objects exist; objects are not read."""
        remedy = (
            f"Run delta-sync verify --bucket {self._bucket.url} --all for details, and delta-sync repair to repair it"
        )
        try:
            try:
                self.run = read_info(self._bucket).run
            except NotFoundError as error:
                return self._no_run(error)
            return self._check_head(RunReader(self._bucket, self._keyring))
        except DataError as error:
            return failed(error, remedy, run=self.run)

    def _no_run(self, error: NotFoundError) -> CheckResult:
        if next(iter(self._bucket.list(VERSIONS_PREFIX)), None) is not None:
            lost = NotFoundError(f"there are versions but no {RUN_KEY}, so part of a run was removed")
            remedy = f"Restore {RUN_KEY} from a copy with delta-sync repair --mirror, or remove the rest"
            return failed(lost, remedy, run=None)
        if self._reads_only:
            remedy = "Check the URL, especially its last part; or start the publisher"
            return warning(f"there is no run at the URL: {error.message}", remedy, run=None)
        return ok("there is no run at the URL yet; a publisher can start one", run=None)

    def _check_head(self, run: RunReader) -> CheckResult:
        figures: dict[str, Any] = {"run": self.run, "signed": run.info.signature is not None}
        try:
            head, error = run.reachable_head()
        except NotFoundError:
            if not is_empty(run):
                raise
            return ok(f"run {self.run}, nothing published yet", head=None, **figures)
        if error is not None:
            raise error
        for ref, found in zip(
            head.objects, in_parallel(lambda ref: has_object(self._bucket, ref), head.objects), strict=True
        ):
            if not found:
                raise NotFoundError(f"{ref.key} of version {head.version} is missing, or has the wrong size")
        self.head = head.version
        age, checked = age_of(head.created_at), run.keyring.checks_signatures
        figures |= {"head": head.version, "step": head.step, "age_seconds": round(age), "signatures_checked": checked}
        signed = "not signed"
        if figures["signed"]:
            signed = "signatures are valid" if checked else "signed, not checked without --trusted-keys"
        summary = (
            f"run {self.run}, head version {head.version}, published {ago(age)}, {signed}; `verify` reads all of it"
        )
        if run.pointer is None:
            remedy = "The publisher writes it with its next version; without a publisher run `delta-sync repair`"
            return warning(f"{summary}; HEAD.json is missing", remedy, **figures)
        expired = 0.0 if run.pointer.expires_at is None else age_of(run.pointer.expires_at)
        if expired > 0:
            figures["expired_seconds"] = round(expired)
            remedy = (
                "If a publisher should be running, check that it is and that clocks agree; otherwise this is normal"
            )
            return warning(f"{summary}; HEAD.json expired {ago(expired)}", remedy, **figures)
        return ok(summary, **figures)

    def clean_up(self) -> list[str]:
        """Remove the test objects and the empty directories that the checks created, and close the bucket.

        Returns:
            the keys that could not be removed.
        """
        left = [key for key in self.made if not self._remove(key)]
        self._closing.close()
        for folder in self._folders:
            try:
                folder.rmdir()
            except FileNotFoundError:
                continue  # never created
            except OSError:
                break  # another process has put something into it
        return left

    def _remove(self, key: str) -> bool:
        try:
            self._bucket.delete(key)
        except DeltaSyncError:
            # Without write access nothing can be deleted, and nothing was put.
            try:
                self._bucket.stat(key)
            except DeltaSyncError as error:
                return isinstance(error, NotFoundError)
            return False
        return True

    def _put(self, name: str, data: bytes | Path) -> None:
        if self._stem + name not in self.made:
            self.made.append(self._stem + name)
        self._bucket.put(self._stem + name, data)

    def _expect(self, found: bytes, expected: bytes, after: str) -> None:
        if found != expected:
            raise StoreError(
                f"after {after}, {self._key!r} reads as {len(found)} wrong bytes: a cache or proxy answers with an old "
                "or damaged copy"
            )


def is_refusal(error: StoreError) -> bool:
    """Return whether a write failed for lack of permission, rather than lack of space or network."""
    cause = error.__cause__
    return isinstance(error, AccessError) or isinstance(cause, PermissionError) or getattr(cause, "errno", 0) == EROFS


def age_of(moment: str) -> float:
    """Return the seconds since a document's timestamp, by this machine's clock; negative if it is in the future.

    Raises:
        LimitError: the timestamp is not a valid date and time.
    """
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    except ValueError as error:
        raise LimitError(f"{moment!r} is not a valid date and time: {error}") from error


def ago(seconds: float) -> str:
    """Return a time span in words."""
    if seconds < 0:
        return f"{-seconds:.0f} s in the future"
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"


def _speeds(size: int, seconds: dict[str, float]) -> CheckResult:
    speeds = {direction: size / max(taken, 1e-9) for direction, taken in seconds.items()}
    figures = {"bytes": size, **{f"{name}_bytes_per_second": round(speed) for name, speed in speeds.items()}}
    parts = [f"{rounded(speed / 1e6)} MB/s {direction}" for direction, speed in speeds.items()]
    summary = f"{', '.join(parts)} ({rounded(size / 1e6)} MB)"
    if size < MIN_BYTES_PER_SECOND or min(speeds.values()) >= MIN_BYTES_PER_SECOND:
        return ok(summary, **figures)
    remedy = (
        "A transfer is aborted if it takes longer than store_deadline plus one second per MB: raise store_deadline, or "
        "use a nearer store"
    )
    return warning(summary, remedy, **figures)


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
