"""``StoreProbe`` checks whether a store keeps the contract of ``Bucket``, its speed and its clock.

Test objects have keys ``doctor/<32 hex digits>-<name>``; readers of a run ignore unknown keys (docs/FORMAT.md).
"""

import os
import re
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from errno import EROFS
from hashlib import sha256
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.bucket.transfer_observers import TransferObserver, observed_by, with_observers
from vllm_delta_sync.doctor.findings import CheckResult, Failure, Progress, milliseconds
from vllm_delta_sync.errors import AccessError, ConflictError, DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.format.limits import MAX_JSON_BYTES
from vllm_delta_sync.format.manifest import OBJECTS_PREFIX, RUN_KEY
from vllm_delta_sync.settings import MIN_BYTES_PER_SECOND

PREFIX = "doctor/"
STALE_SECONDS = 24 * 3600.0
"""Age in seconds at which a test object must be from a doctor that was killed."""
MOST_STALE = 1000
SMALL_BYTES = 1000
WRITERS = 16
ROUNDS = 10
CLOCK_SECONDS = 60.0
SLOW_SECONDS = 2.0
CHUNK_BYTES = 4 * 1024 * 1024
MOST_READ_BYTES = 256 * 1024 * 1024
READ_ONLY_REMEDY = "A receiver only needs to read: check it with --read-only. A publisher must be able to write"
SINGLE_WRITER = (
    "Run only one publisher at a time: if two writers create the same key at once, this store keeps the later "
    "one. A publisher reads back what it wrote, and stops if another writer replaced it"
)
HUB_GATEWAY = (
    ". With credentials for the Hub's S3 gateway (HF_S3_ACCESS_KEY_ID, HF_S3_SECRET_ACCESS_KEY) exactly one writer wins"
)

_OWN = re.compile(re.escape(PREFIX) + r"[0-9a-f]{32}-[a-z]+")


class StoreProbe:
    """The checks of one store, in the order of their dependencies, and their test objects.

    Args:
        reads_only: put and delete nothing; read run.json instead of a test object.
        size: bytes of the throughput test's object.

    Attributes:
        made: keys of test objects that may have been put.
    """

    def __init__(
        self, bucket: Bucket, options: StoreOptions, size: int, reads_only: bool, progress: Progress | None = None
    ) -> None:
        self._bucket = bucket
        self._options = options
        self._size = size
        self._reads_only = reads_only
        self._progress = progress or (lambda what, done, total: None)
        self._stem = f"{PREFIX}{secrets.token_hex(16)}-"
        self.made: list[str] = []
        self._key = RUN_KEY if reads_only else self._stem + "small"
        self._data = os.urandom(SMALL_BYTES)

    def put(self) -> CheckResult:
        began = time.perf_counter()
        try:
            self._put("small", self._data)
        except StoreError as error:
            raise Failure(error, remedy=READ_ONLY_REMEDY if is_refusal(error) else "") from error
        seconds_taken = time.perf_counter() - began
        summary = f"a small object was written in {seconds_taken * 1000:.1f} ms"
        return CheckResult("put", "ok", summary, {"ms": milliseconds(seconds_taken)})

    def get(self) -> CheckResult:
        if self._reads_only:
            try:
                self._data = self._bucket.get(self._key, max_bytes=MAX_JSON_BYTES)
            except NotFoundError as error:
                return CheckResult("get", "skipped", error.message)
            return CheckResult(
                "get", "ok", f"{RUN_KEY} can be read, {len(self._data)} bytes", {"bytes": len(self._data)}
            )
        self._expect(self._bucket.get(self._key), self._data, "the put")
        size = self._bucket.stat(self._key).bytes
        if size != len(self._data):
            raise StoreError(f"the store reports {size} bytes for an object of {len(self._data)} bytes")
        return CheckResult("get", "ok", "it reads back unchanged", {"bytes": size})

    def part(self) -> CheckResult:
        start, length = len(self._data) // 10, len(self._data) // 20
        part = self._bucket.get_range(self._key, start, length)
        self._expect(part, self._data[start : start + length], f"a request for {length} of its bytes from {start}")
        beyond = self._bucket.get_range(self._key, len(self._data), length)
        self._expect(beyond, b"", "a request for a range beyond its end")
        return CheckResult("range", "ok", "a part of an object can be read alone", {"bytes": length})

    def listing(self) -> CheckResult:
        found = [info for info in self._bucket.list(self._key) if info.key == self._key]
        if [info.bytes for info in found] != [len(self._data)]:
            raise StoreError(
                f"a listing does not show {self._key!r} as it was put, so listings of this store lag; use a store with "
                "consistent listings"
            )
        return CheckResult("list", "ok", "listings show it at once")

    def create(self) -> CheckResult:
        """Check whether create-if-absent refuses the second writer of a key."""
        self._put("once", self._data, if_absent=True)
        try:
            self._bucket.put(self._stem + "once", b"second", if_absent=True)
        except ConflictError:
            self._expect(self._bucket.get(self._stem + "once"), self._data, "the refusal of a second writer")
            return CheckResult("create", "ok", "an existing key is not created again")
        raise StoreError(
            "create-if-absent overwrites an existing key, so two publishers would overwrite each other's versions; use "
            "a store that honours If-None-Match"
        )

    def race(self) -> CheckResult:
        """Check whether exactly one of many concurrent writers creates a key."""
        outcomes = self._race()
        for outcome in outcomes:
            if isinstance(outcome, DeltaSyncError) and not isinstance(outcome, ConflictError):
                raise outcome
        won = [number for number, outcome in enumerate(outcomes) if outcome is None]
        kept = self._bucket.get(self._stem + "race")
        figures = {"writers": WRITERS, "winners": len(won), "exclusive": self._bucket.supports_conditional_put}
        if self._bucket.supports_conditional_put and ([_payload(number) for number in won] != [kept]):
            summary = f"of {WRITERS} writers that create one key at once, {len(won)} succeed instead of one"
            remedy = "Use a store that honours If-None-Match, or " + _lowered(SINGLE_WRITER)
            raise Failure(StoreError(summary), figures, remedy)
        summary = f"of {WRITERS} writers at once, {len(won)} won"
        if self._bucket.supports_conditional_put:
            return CheckResult("race", "ok", summary, figures)
        remedy = SINGLE_WRITER + (HUB_GATEWAY if self._bucket.url.startswith("hf://") else "")
        return CheckResult(
            "race", "warning", f"{summary}; the store does not guarantee a single winner", figures, remedy
        )

    def _race(self) -> list[DeltaSyncError | None]:
        self._note("race")
        start = threading.Barrier(WRITERS)
        outcomes: list[DeltaSyncError | None] = [StoreError("a writer did not finish")] * WRITERS

        def write(number: int) -> None:
            start.wait()
            try:
                self._bucket.put(self._stem + "race", _payload(number), if_absent=True)
                outcomes[number] = None
            except DeltaSyncError as error:
                outcomes[number] = error

        threads = [
            threading.Thread(target=with_observers(write), args=(number,), daemon=True) for number in range(WRITERS)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return outcomes

    def overwrite(self) -> CheckResult:
        data = os.urandom(SMALL_BYTES // 2)
        self._put("small", data)
        self._data = data
        self._expect(self._bucket.get(self._key), data, "the overwrite")
        if self._bucket.stat(self._key).bytes != len(data):
            raise StoreError("the store reports the old size of an object that was overwritten")
        self.listing()
        return CheckResult("overwrite", "ok", "readers see an overwritten object at once")

    def delete(self) -> CheckResult:
        """Check whether a deleted object disappears at once. Also removes the test objects of killed doctors."""
        now = self._bucket.stat(self._key).modified
        self._bucket.delete(self._key)
        self._bucket.delete(self._key)
        try:
            self._bucket.get(self._key)
        except NotFoundError:
            pass
        else:
            raise StoreError(f"{self._key!r} can still be read after it was deleted: a cache or proxy keeps a copy")
        if any(info.key == self._key for info in self._bucket.list(self._key)):
            raise StoreError(f"a listing shows {self._key!r} after it was deleted: listings of this store lag")
        removed = self._remove_stale(now)
        more = f"; removed {removed} objects of a killed doctor" if removed else ""
        return CheckResult("delete", "ok", f"a deleted object disappears at once{more}", {"stale_removed": removed})

    def _remove_stale(self, now: float) -> int:
        stale = [
            info.key
            for info in self._bucket.list(PREFIX)
            if _OWN.fullmatch(info.key) and info.modified < now - STALE_SECONDS and not info.key.startswith(self._stem)
        ][:MOST_STALE]
        for key in stale:
            self._bucket.delete(key)
        return len(stale)

    def latency(self) -> CheckResult:
        began = time.perf_counter()
        puts: list[float] = []
        gets: list[float] = []
        while len(gets) < ROUNDS and (not gets or time.perf_counter() - began < self._options.store_deadline):
            if not self._reads_only:
                puts.append(_timed(lambda: self._put("small", self._data)))
            gets.append(_timed(lambda: self._bucket.get_range(self._key, 0, SMALL_BYTES)))
        figures = {**_spread("get", gets), **(_spread("put", puts) if puts else {}), "rounds": len(gets)}
        parts = [_describe("get", gets)] + ([_describe("put", puts)] if puts else [])
        summary = ", ".join(parts)
        if statistics.median(gets + puts) > SLOW_SECONDS:
            remedy = "Use a nearer store: each version costs a receiver about three requests in sequence"
            return CheckResult("latency", "warning", summary, figures, remedy)
        return CheckResult("latency", "ok", summary, figures)

    def throughput(self) -> CheckResult:
        """Upload and download one large object, in bounded memory."""
        if self._reads_only:
            return self._download_only()
        with tempfile.TemporaryDirectory(prefix="delta-sync-doctor-") as folder:
            source, copy = Path(folder, "up"), Path(folder, "down")
            try:
                digest = _write_random(source, self._size)
            except OSError as error:
                raise StoreError(
                    f"no room for {self._size} bytes in {folder}: {error.strerror}; set TMPDIR, or lower --bytes"
                ) from error
            up = self._transfer_seconds("up", self._size, lambda: self._put("large", source))
            source.unlink()
            down = self._transfer_seconds("down", self._size, lambda: self._bucket.get_file(self._stem + "large", copy))
            with copy.open("rb") as file:
                if _digest(file.read) != digest:
                    raise StoreError(f"an object of {self._size} bytes does not read back unchanged")
        return self._speeds(self._size, {"up": up, "down": down})

    def _download_only(self) -> CheckResult:
        largest = max(self._bucket.list(OBJECTS_PREFIX), key=lambda info: info.bytes, default=None)
        if largest is None or not largest.bytes:
            return CheckResult("throughput", "skipped", "there is no object to read")
        size = min(largest.bytes, self._size, MOST_READ_BYTES)
        down = self._transfer_seconds("down", size, lambda: self._bucket.get_range(largest.key, 0, size))
        return self._speeds(size, {"down": down})

    def _transfer_seconds(self, direction: str, size: int, move: Callable[[], object]) -> float:
        with observed_by(_ProgressObserver(lambda done: self._progress(direction, done, size))):
            return _timed(move)

    def _speeds(self, size: int, seconds_taken: dict[str, float]) -> CheckResult:
        speeds = {direction: size / max(seconds, 1e-9) for direction, seconds in seconds_taken.items()}
        figures = {
            "bytes": size,
            **{f"{direction}_bytes_per_second": round(speed) for direction, speed in speeds.items()},
        }
        summary = (
            ", ".join(f"{speed / 1e6:.3g} MB/s {direction}" for direction, speed in speeds.items())
            + f" ({size / 1e6:.3g} MB)"
        )
        if size >= MIN_BYTES_PER_SECOND and min(speeds.values()) < MIN_BYTES_PER_SECOND:
            remedy = (
                "A transfer is aborted if it takes longer than store_deadline plus one second per MB: raise "
                "store_deadline, or use a nearer store"
            )
            return CheckResult("throughput", "warning", summary, figures, remedy)
        return CheckResult("throughput", "ok", summary, figures)

    def clock(self) -> CheckResult:
        before = time.time()
        self._put("small", self._data)
        after = time.time()
        modified = self._bucket.stat(self._stem + "small").modified
        off = modified - (before if modified < before else after if modified > after else modified)
        figures = {"off_seconds": round(off, 1)}
        if abs(off) <= CLOCK_SECONDS:
            return CheckResult(
                "clock", "ok", f"the store's clock and this machine's agree to {abs(off):.0f} s", figures
            )
        return CheckResult(
            "clock",
            "warning",
            f"the store's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} this machine's",
            figures,
            "Synchronize this machine's clock with NTP: a signed HEAD.json expires by the reading machine's clock, "
            "while gc measures ages by the store's",
        )

    def clean_up(self) -> list[str]:
        """Remove the test objects; return the keys that could not be removed."""
        outcomes = in_parallel(self._remove, self.made)
        return [key for key, removed in zip(self.made, outcomes, strict=True) if not removed]

    def _remove(self, key: str) -> bool:
        try:
            self._bucket.delete(key)
        except DeltaSyncError:
            # Without write access nothing can be deleted, and nothing was put.
            return self._is_absent(key)
        return True

    def _is_absent(self, key: str) -> bool:
        try:
            self._bucket.stat(key)
        except NotFoundError:
            return True
        except DeltaSyncError:
            pass
        return False

    def _put(self, name: str, data: bytes | Path, if_absent: bool = False) -> None:
        self._note(name)
        self._bucket.put(self._stem + name, data, if_absent=if_absent)

    def _note(self, name: str) -> None:
        if self._stem + name not in self.made:
            self.made.append(self._stem + name)

    def _expect(self, found: bytes, expected: bytes, after: str) -> None:
        if found != expected:
            raise StoreError(
                f"after {after}, {self._key!r} reads as {len(found)} wrong bytes: a cache or proxy answers with an old "
                "or damaged copy"
            )


class _ProgressObserver(TransferObserver):
    def __init__(self, on_finding: Callable[[int], None]) -> None:
        self._on_finding = on_finding
        self._lock = threading.Lock()
        self._done = 0

    def on_bytes(self, count: int) -> None:
        with self._lock:
            self._done += count
            self._on_finding(self._done)


def is_refusal(error: StoreError) -> bool:
    """Return whether a write failed for lack of permission, rather than lack of space or network."""
    cause = error.__cause__
    return isinstance(error, AccessError) or isinstance(cause, PermissionError) or getattr(cause, "errno", 0) == EROFS


def _payload(number: int) -> bytes:
    return b"writer %d" % number


def _lowered(text: str) -> str:
    return text[0].lower() + text[1:]


def _timed(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _spread(name: str, seconds: list[float]) -> dict[str, float]:
    return {f"{name}_ms_p50": milliseconds(statistics.median(seconds)), f"{name}_ms_worst": milliseconds(max(seconds))}


def _describe(name: str, seconds: list[float]) -> str:
    return f"{name} {statistics.median(seconds) * 1000:.3g} ms (worst {max(seconds) * 1000:.3g})"


def _write_random(path: Path, size: int) -> str:
    digest = sha256()
    with path.open("wb") as file:
        for start in range(0, size, CHUNK_BYTES):
            chunk = os.urandom(min(CHUNK_BYTES, size - start))
            digest.update(chunk)
            file.write(chunk)
    return digest.hexdigest()


def _digest(read: Callable[[int], bytes]) -> str:
    digest = sha256()
    while chunk := read(CHUNK_BYTES):
        digest.update(chunk)
    return digest.hexdigest()
