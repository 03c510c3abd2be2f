"""``RunProbe`` checks a run and its mirror without reading all of it; ``check_cache`` checks the local cache."""

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
from vllm_delta_sync.errors import ChainError, DataError, LimitError, NotFoundError, SettingsError
from vllm_delta_sync.format.limits import MAX_JSON_BYTES
from vllm_delta_sync.format.manifest import RUN_KEY, VERSIONS_PREFIX, Manifest, ObjectRef, version_key
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring

LOOK_BACK = 20
"""Number of newest versions searched for an object; references and empty deltas have none."""
MOST_FETCHED = 256 * 1024 * 1024


class RunProbe:
    """Quick checks of the run at a URL.

    Attributes:
        run: its id, once known. head: manifest of its newest version, once known.
    """

    def __init__(self, bucket: Bucket, keyring: Keyring, reads_only: bool) -> None:
        self._bucket = bucket
        self._keyring = keyring
        self._reads_only = reads_only
        self._documents: RunDocuments | None = None
        self.run: str | None = None
        self.head: Manifest | None = None

    def check_run(self) -> CheckResult:
        """Check the documents that readers start with, the head's objects, and that no manifest is missing."""
        try:
            # get, not stat: stat cannot report that the bucket itself is missing.
            self._bucket.get(RUN_KEY, max_bytes=MAX_JSON_BYTES)
        except NotFoundError as error:
            return self._no_run(error)
        except LimitError:
            pass  # RunDocuments below reports it
        remedy = (
            f"Run delta-sync verify --bucket {self._bucket.url} --all for details, and delta-sync repair to repair it"
        )
        try:
            documents = RunDocuments(self._bucket, self._keyring)
            self._documents, self.run = documents, documents.info.run
            return self._examine(documents)
        except DataError as error:
            raise Failure(error, {"run": self.run}, remedy) from error

    def _no_run(self, error: NotFoundError) -> CheckResult:
        if next(iter(self._bucket.list(VERSIONS_PREFIX)), None) is not None:
            raise NotFoundError(
                f"there are versions but no {RUN_KEY}, so part of a run was removed; restore {RUN_KEY} from a copy "
                "with `delta-sync repair --mirror`, or remove the rest"
            )
        figures = {"run": None}
        if self._reads_only:
            remedy = "Check the URL, especially its last part; or start the publisher"
            return CheckResult("run", "warning", f"there is no run at the URL: {error.message}", figures, remedy)
        return CheckResult("run", "ok", "there is no run at the URL yet; a publisher can start one", figures)

    def _examine(self, documents: RunDocuments) -> CheckResult:
        figures: dict[str, Any] = {"run": self.run, "signed": documents.info.signature is not None}
        try:
            head, error = documents.reachable_head()
        except NotFoundError:
            # No versions: the run exists, but nothing was published.
            if documents.versions():
                raise
            return CheckResult("run", "ok", f"run {self.run}, nothing published yet", {**figures, "head": None})
        if error is not None:
            raise error
        self.head = head
        self._check_complete(documents, head)
        age = age_of(head.created_at)
        figures |= {"head": head.version, "step": head.step, "age_seconds": round(age)}
        figures["signatures_checked"] = documents.keyring.checks_signatures
        signed = "not signed"
        if figures["signed"]:
            signed = (
                "signatures are valid"
                if documents.keyring.checks_signatures
                else "signed, not checked without --trusted-keys"
            )
        summary = (
            f"run {self.run}, head version {head.version}, published {ago(age)}, {signed}; `verify` checks all of it"
        )
        return self._judge(documents, summary, figures)

    def _check_complete(self, documents: RunDocuments, head: Manifest) -> None:
        stored = set(documents.versions())
        missing = next((version for version in range(head.version + 1) if version not in stored), None)
        if missing is not None:
            raise ChainError(f"{version_key(missing)} is missing, so the history has a hole")
        for ref, found in zip(
            head.objects, in_parallel(lambda ref: has_object(self._bucket, ref), head.objects), strict=True
        ):
            if not found:
                raise NotFoundError(f"{ref.key} of version {head.version} is missing, or has the wrong size")

    def _judge(self, documents: RunDocuments, summary: str, figures: dict[str, Any]) -> CheckResult:
        pointer = documents.pointer
        if pointer is None:
            remedy = "The publisher writes it with its next version; without a publisher run `delta-sync repair`"
            return CheckResult("run", "warning", f"{summary}; HEAD.json is missing", figures, remedy)
        if pointer.expires_at is not None and age_of(pointer.expires_at) > 0:
            figures["expired_seconds"] = round(age_of(pointer.expires_at))
            summary = f"{summary}; HEAD.json expired {ago(age_of(pointer.expires_at))}"
            remedy = (
                "If a publisher should be running, check that it is and that clocks agree; otherwise this is normal"
            )
            return CheckResult("run", "warning", summary, figures, remedy)
        return CheckResult("run", "ok", summary, figures)

    def mirror(self, mirror: Bucket) -> CheckResult:
        """Check whether a mirror has an undamaged object of the run."""
        ref = self._some_object()
        if ref is None:
            return CheckResult("mirror", "skipped", "the run has no object yet to request")
        figures = {"key": ref.key, "bytes": ref.bytes}
        try:
            data = mirror.get(ref.key, max_bytes=ref.bytes)
            check_object(ref, data)
        except NotFoundError:
            remedy = (
                "Readers take it from the bucket instead; check the mirror's URL if the mirror should have it by now"
            )
            return CheckResult("mirror", "warning", f"{mirror.url} does not have {ref.key}", figures, remedy)
        except DataError as error:
            remedy = "Readers fetch it from the mirror and then from the bucket; delete it from the mirror"
            raise Failure(error, figures, remedy) from error
        return CheckResult("mirror", "ok", f"serves an object of {ref.bytes} bytes with the right digest", figures)

    def _some_object(self) -> ObjectRef | None:
        """Return the smallest object of the newest version that has any."""
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
    """Check whether ``cache_dir`` is usable and has room for ``cache_bytes``.

    Raises:
        SettingsError: it is not usable; receivers then run without a cache.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        if not place.is_dir():
            raise SettingsError(f"cache_dir {str(folder)!r}: {str(place)!r} is not a directory; set another cache_dir")
        if place == folder and place.stat().st_uid != os.geteuid():
            raise SettingsError(f"cache_dir {str(folder)!r} belongs to another user; set a directory of this user")
        with tempfile.TemporaryFile(dir=place) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            file.write(b"x")
            file.flush()
        room = os.statvfs(place)
    except OSError as error:
        raise SettingsError(
            f"cache_dir {str(folder)!r} cannot be written: {error.strerror or error}; set a directory of this user on "
            "a local disk with free space"
        ) from error
    free = room.f_bavail * room.f_frsize
    figures = {"free_bytes": free, "cache_bytes": limit}
    summary = f"{folder} is writable, {free / 1e9:.3g} GB free"
    if free < limit:
        remedy = f"Free some space, or set cache_bytes below its current {limit / 1e9:.3g} GB"
        return CheckResult("cache", "warning", summary, figures, remedy)
    return CheckResult("cache", "ok", summary, figures)


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
