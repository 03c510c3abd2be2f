"""What a doctor says of a run without reading all of it, of the mirror in front of it, and of the cache beside it."""

import fcntl
import os
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.bucket.verified import check_object, has_object
from vllm_delta_sync.doctor.findings import CheckResult, Failure
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    LimitError,
    NotFoundError,
    SettingsError,
    StoreError,
)
from vllm_delta_sync.format.limits import MAX_JSON_BYTES
from vllm_delta_sync.format.manifest import RUN_KEY, VERSIONS_PREFIX, Manifest, ObjectRef, version_key
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring

LOOK_BACK = 20
"""Versions before the head that are looked at for an object; a reference and an empty delta have none."""
MOST_FETCHED = 256 * 1024 * 1024


class RunProbe:
    """A quick look at the run at a URL.

    Attributes:
        run: its id, once it is known. head: its newest version.
    """

    def __init__(self, bucket: Bucket, keyring: Keyring, reads_only: bool) -> None:
        self._bucket = bucket
        self._keyring = keyring
        self._reads_only = reads_only
        self._documents: RunDocuments | None = None
        self.run: str | None = None
        self.head: Manifest | None = None

    def look(self) -> CheckResult:
        """The documents that readers begin with, the head's objects, and whether manifests are missing."""
        try:
            # Not by stat, which cannot say that there is no bucket at all.
            self._bucket.get(RUN_KEY, max_bytes=MAX_JSON_BYTES)
        except NotFoundError as error:
            return self._nothing(error)
        except LimitError:
            pass  # said below, as what it is
        mend = f"Look closer: delta-sync verify --bucket {self._bucket.url} --all; delta-sync repair mends what it can"
        try:
            documents = RunDocuments(self._bucket, self._keyring)
            self._documents, self.run = documents, documents.info.run
            return self._examine(documents)
        except (StoreError, Failure):
            raise
        except DeltaSyncError as error:
            raise Failure(error, {"run": self.run}, mend) from error

    def _nothing(self, error: NotFoundError) -> CheckResult:
        if next(iter(self._bucket.list(VERSIONS_PREFIX)), None) is not None:
            raise NotFoundError(
                f"there are versions but no {RUN_KEY}: a run was removed in part; bring {RUN_KEY} back from a copy "
                "with `delta-sync repair --mirror`, or remove the rest"
            )
        figures = {"run": None}
        if self._reads_only:
            mend = "Check the URL, its last part above all; or start the publisher"
            return CheckResult("run", "warning", f"there is no run at the URL: {error.message}", figures, mend)
        return CheckResult("run", "ok", "there is no run at the URL yet; a publisher can begin one", figures)

    def _examine(self, documents: RunDocuments) -> CheckResult:
        figures: dict[str, Any] = {"run": self.run, "signed": documents.info.signature is not None}
        try:
            head, error = documents.reachable_head()
        except NotFoundError:
            # Without version 0 nothing is published, whatever else there is.
            if documents.versions():
                raise
            return CheckResult("run", "ok", f"run {self.run}, nothing published yet", {**figures, "head": None})
        if error is not None:
            raise error
        self.head = head
        self._check_whole(documents, head)
        age = age_of(head.created_at)
        figures |= {"head": head.version, "step": head.step, "age_seconds": round(age)}
        figures["signatures_checked"] = documents.keyring.checks_signatures
        signed = "not signed"
        if figures["signed"]:
            signed = (
                "signatures hold"
                if documents.keyring.checks_signatures
                else "signed, not checked without --trusted-keys"
            )
        said = f"run {self.run}, head version {head.version}, published {ago(age)}, {signed}; `verify` checks all of it"
        return self._judge(documents, said, figures)

    def _check_whole(self, documents: RunDocuments, head: Manifest) -> None:
        there = set(documents.versions())
        missing = next((version for version in range(head.version + 1) if version not in there), None)
        if missing is not None:
            raise ChainError(f"{version_key(missing)} is missing: the chain has a hole")
        for ref, found in zip(
            head.objects, in_parallel(lambda ref: has_object(self._bucket, ref), head.objects), strict=True
        ):
            if not found:
                raise NotFoundError(f"{ref.key} of version {head.version} is missing, or has another size than it had")

    def _judge(self, documents: RunDocuments, said: str, figures: dict[str, Any]) -> CheckResult:
        pointer = documents.pointer
        if pointer is None:
            mend = "A publisher that goes on, or `delta-sync repair`, writes it again"
            return CheckResult("run", "warning", f"{said}; HEAD.json is missing", figures, mend)
        if pointer.expires_at is not None and age_of(pointer.expires_at) > 0:
            figures["expired_seconds"] = round(age_of(pointer.expires_at))
            said = f"{said}; HEAD.json ran out {ago(age_of(pointer.expires_at))}"
            mend = "If a publisher should be at work, see whether it is, and whether clocks agree; else all is well"
            return CheckResult("run", "warning", said, figures, mend)
        return CheckResult("run", "ok", said, figures)

    def mirror(self, mirror: Bucket) -> CheckResult:
        """Whether a mirror has an object of the run as it should be."""
        ref = self._some_object()
        if ref is None:
            return CheckResult("mirror", "skipped", "the run has no object yet to ask it for")
        figures = {"key": ref.key, "bytes": ref.bytes}
        try:
            data = mirror.get(ref.key, max_bytes=ref.bytes)
            check_object(ref, data)
        except NotFoundError:
            mend = "Nothing is lost, for the bucket is asked then; check the mirror's URL if it should be filled by now"
            return CheckResult("mirror", "warning", f"{mirror.url} does not have {ref.key}", figures, mend)
        except StoreError:
            raise
        except DeltaSyncError as error:
            mend = "Readers take it from the bucket then, each at the cost of both; drop it from the mirror"
            raise Failure(error, figures, mend) from error
        return CheckResult("mirror", "ok", f"it serves an object of {ref.bytes} bytes with the right digest", figures)

    def _some_object(self) -> ObjectRef | None:
        """The smallest object of the newest version that has any."""
        if self._documents is None or self.head is None:
            return None
        manifest = self.head
        for version in range(self.head.version, max(-1, self.head.version - LOOK_BACK), -1):
            manifest = manifest if manifest.version == version else self._documents.manifest(version)
            refs = [ref for ref in manifest.objects if ref.bytes <= MOST_FETCHED]
            if refs and has_object(self._bucket, refs[0]):
                return min(refs, key=lambda ref: ref.bytes)
        return None


def check_cache(folder: Path, limit: int) -> CheckResult:
    """Whether ``cache_dir`` can be used, and has room for ``cache_bytes``.

    Raises:
        SettingsError: it cannot be used; receivers do without it then.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            raise SettingsError(f"cache_dir {str(folder)!r}: {str(place)!r} is no directory; set another")
        if place == folder and place.stat().st_uid != os.geteuid():
            raise SettingsError(f"cache_dir {str(folder)!r} belongs to another user; set one of this user")
        with tempfile.TemporaryFile(dir=place) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(b"x")
            file.flush()
        room = os.statvfs(place)
    except OSError as error:
        raise SettingsError(
            f"cache_dir {str(folder)!r} cannot be written: {error.strerror or error}; set a directory of this user "
            "on a local disk with room"
        ) from error
    free = room.f_bavail * room.f_frsize
    figures = {"free_bytes": free, "cache_bytes": limit}
    said = f"{folder} is writable, {free / 1e9:.3g} GB free"
    if free < limit:
        mend = f"Free some space, or set cache_bytes to less than the {limit / 1e9:.3g} GB that it may hold now"
        return CheckResult("cache", "warning", said, figures, mend)
    return CheckResult("cache", "ok", said, figures)


def age_of(moment: str) -> float:
    """Seconds since a timestamp of a document, by this machine's clock; negative before it.

    Raises:
        LimitError: it is no time that a calendar knows.
    """
    try:
        return (datetime.now(UTC) - datetime.fromisoformat(moment)).total_seconds()
    except ValueError as error:
        raise LimitError(f"{moment!r} is no time: {error}") from error


def ago(seconds: float) -> str:
    """A time span in words."""
    if seconds < 0:
        return f"{-seconds:.0f} s in the future"
    for size, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {name} ago"
    return f"{seconds:.0f} s ago"
