"""``RunWriter``: write one version after another to a run; ``full_manifest`` and ``delta_manifest``: their manifests.

Order: objects, manifest (create-if-absent: the commit point), notice, HEAD. So readers see complete versions only, at
any moment.
"""

import logging
import math
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from trainer_side.options import PublisherOptions
from trainer_side.run_weights import FullState
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import exists, has_object, reads_back
from vllm_delta_sync.bucket.threads import in_parallel, start_call
from vllm_delta_sync.codec.delta_object import required_features
from vllm_delta_sync.codec.zstd import Compression
from vllm_delta_sync.errors import (
    ConflictError,
    DataError,
    DeltaSyncError,
    FormatError,
    LimitError,
    NotFoundError,
    NoticeError,
    PublishError,
    SignatureError,
    StoreError,
    UnsupportedError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.codecs import BASE_CODECS, RELATIVE_CODECS, Codec
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, Claim, claim_key, claim_of_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    Base,
    Break,
    Head,
    Manifest,
    ObjectRef,
    Quarantine,
    RunInfo,
    Stored,
    version_key,
)
from vllm_delta_sync.notice import Notice, NoticePublisher
from vllm_delta_sync.run.checks import check_document_size
from vllm_delta_sync.trust.keyring import make_head
from vllm_delta_sync.urls import is_remote

logger = logging.getLogger(__name__)

EARLY_SECONDS = 2.0
"""Checks that began longer ago are made again before a commit: the longer ago, the likelier a takeover costs a version
that the former writer reported as published."""
_READ_BYTES = 1 << 24


class UncertainError(PublishError):
    """The store failed, and it is unknown whether the manifest was written."""


class FormerVersionError(PublishError):
    """The version number is taken: by the former writer's last commit, or by an earlier attempt of this writer.

    Attributes:
        manifest: of the version that is stored.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(
            f"version {manifest.version} was committed by the former writer of the run, just before it was stopped, or "
            "by an earlier attempt that the store had reported as failed"
        )
        self.manifest = manifest


class RunWriter:
    """Writes one run. Use one thread at a time; another may call ``renew_head`` meanwhile.

    HEAD is read before it is written, and this writer never moves it back. If something else moved HEAD back, the
    bucket was reset to an older state: that is logged, and HEAD is set to the newest version again. This does not bring
    back versions that the bucket lost: a reader that does not have the newest of them reaches later versions only
    through an anchor, which ``Publisher.anchor`` writes from memory.

    Attributes:
        run: its id, 32 hex digits. epoch: epoch of this writer.
        newest: manifest of the newest durable version; None before version 0.

    Args:
        document_limit: maximum bytes of a manifest of the run; see ``run.checks.document_limit``.
        claim: the claim of ``epoch`` as it is stored; None for the first writer, which has none.
    """

    def __init__(
        self,
        bucket: Bucket,
        info: RunInfo,
        epoch: int,
        options: PublisherOptions,
        document_limit: int = limits.MAX_JSON_BYTES,
        claim: bytes | None = None,
    ) -> None:
        self._document_limit = document_limit
        self._bucket = bucket
        self._info = info.to_bytes()
        self._claim_data = claim
        self._options = options
        self._notice: NoticePublisher | None = None
        self._head_lock = threading.Lock()
        self._head_manifest: Manifest | None = None
        self._head_written_at = -math.inf
        self._fenced = False
        self._early_check: tuple[float, Future[None]] | None = None
        self._tried_digests: set[str] = set()
        self.run = info.run
        self.epoch = epoch
        self.newest: Manifest | None = None

    def use_notice(self, notice: NoticePublisher) -> None:
        """Send notices there from now on, first for the newest version; the caller closes it."""
        self._notice = notice
        self.notify()

    def put(self, ref: Stored, content: bytes | Path) -> None:
        """Store an object, from any thread."""
        self._bucket.put(ref.key, content)

    def put_all(self, objects: Iterable[tuple[Stored, bytes | Path]]) -> None:
        """Store objects and sidecars of a version, several at once; the manifest that lists them follows."""
        for _ in in_parallel(lambda item: self.put(*item), objects):
            pass

    def restore_collected(self, objects: Iterable[tuple[Stored, bytes | Path]]) -> None:
        """Store objects of a committed version again that were collected before the manifest was written.

        A garbage collection whose ``min_age`` is shorter than the upload took sees objects without a manifest. A
        failure only warns: the version is committed.
        """
        for _ in in_parallel(lambda item: self._restore_if_collected(*item), objects):
            pass

    def _restore_if_collected(self, ref: Stored, content: bytes | Path) -> None:
        try:
            if has_object(self._bucket, ref):
                return
        except DeltaSyncError as error:
            logger.warning("whether object %s is still there is not known: %s", ref.key, error)
            return
        logger.warning("object %s was removed while its version was committed; it is stored again", ref.key)
        try:
            self.put(ref, content)
        except DeltaSyncError as error:
            logger.error("object %s of a committed version is gone and could not be stored again: %s", ref.key, error)

    def check_early(self) -> None:
        """Begin the checks that the next ``commit`` needs, so that they do not wait for the objects to be stored."""
        self._early_check = None
        if is_remote(self._bucket.url) and self._bucket.supports_conditional_put:
            with suppress(RuntimeError):  # there are too many threads: ``commit`` makes the checks
                self._early_check = time.monotonic(), start_call(self.check_not_fenced)

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: when this returns, the version is durable and ``newest``.

        Raises:
            ConflictError: another publisher has taken over the run or written this version, or the run was removed.
                FormerVersionError: the version is the former writer's.
            StoreError: the manifest was not written. UncertainError: it may have been written.
            LimitError: the manifest is larger than readers accept; nothing was written.
        """
        data, key = manifest.to_bytes(), version_key(manifest.version)
        check_document_size(manifest, self._document_limit, key)
        if not self._bucket.supports_conditional_put:
            self._check_newest()
        # Between the last commit and this one: a writer that claims after this check finds at most this one additional
        # version.
        early, self._early_check = self._early_check, None
        if early is not None and time.monotonic() - early[0] < EARLY_SECONDS:
            early[1].result()
        else:
            self.check_not_fenced()
        # A network may deliver a write long after the client gave up on it.
        self._tried_digests.add(manifest.digest)
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError as error:
            if not self.is_stored(manifest):
                raise self._number_taken_error(manifest.version) from error
        except StoreError as error:
            if not self.is_stored(manifest):
                raise StoreError(error.message) from error
        if not self._bucket.supports_conditional_put:
            self._check_written(manifest)
        self.set_newest(manifest)

    def set_newest(self, manifest: Manifest) -> None:
        """Record that ``manifest`` is durable."""
        self.newest = manifest
        self._tried_digests.clear()

    def announce(self) -> None:
        """Send a notice of the newest version and update HEAD; a failure only warns."""
        self.notify()
        self.update_head()

    def notify(self) -> None:
        """Send a notice of the newest version: readers also look beyond HEAD. A failure only warns."""
        if self._notice is None or self.newest is None:
            return
        try:
            self._notice.send(Notice(self.run, self.newest.version, self.newest.digest))
        except NoticeError as error:
            logger.warning("no notice of version %d, receivers poll: %s", self.newest.version, error)

    def is_stored(self, manifest: Manifest) -> bool:
        """Return whether exactly this manifest is in the bucket.

        Raises:
            UncertainError: the store failed.
        """
        key = version_key(manifest.version)
        try:
            return reads_back(lambda: self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), manifest.to_bytes())
        except NotFoundError:
            return False
        except StoreError as error:
            raise UncertainError(f"whether {key} was written is not known: {error}") from error

    def update_head(self) -> None:
        """Set HEAD to the newest version, unless it already names it or a later one; a failure only warns."""
        with self._head_lock:
            newest = self.newest
            if newest is None or newest is self._head_manifest or self._fenced:
                return
            if time.monotonic() - self._head_written_at < self._bucket.overwrite_seconds:
                return  # readers look beyond HEAD, and a later version or ``finalize_head`` updates it
            try:
                self._write_head(newest)
            except DeltaSyncError as error:
                logger.warning(
                    "version %d is durable but %s still points before it, the next publish repairs that: %s",
                    newest.version, HEAD_KEY, error,
                )  # fmt: skip

    def finalize_head(self) -> None:
        """Set HEAD to the newest version for the last time; a signed HEAD gets its full lifetime."""
        self._head_written_at = -math.inf
        if not self._options.keyring.has_signing_key:
            self.update_head()
        elif not self._fenced:
            self.renew_head()

    def renew_head(self) -> float | None:
        """Write HEAD again with a new expiry if a third of its lifetime has passed; a failure only warns.

        Returns:
            Seconds until the next call; None if this is no longer the writer of the run.
        """
        third = self._options.head_seconds / 3
        with self._head_lock:
            left = self._head_written_at + third - time.monotonic()
            if self.newest is None or left > 0:
                return max(left, third / 10)
            try:
                self.check_not_fenced()
                self._write_head(self.newest)
            except ConflictError as error:
                logger.error("%s is not renewed any more: %s", HEAD_KEY, error)
                return None
            except DeltaSyncError as error:
                logger.warning(
                    "%s could not be written again; otherwise it expires %.0f seconds after it was last written: %s",
                    HEAD_KEY, 3 * third, error,
                )  # fmt: skip
                return third / 10
            return third

    def _write_head(self, newest: Manifest) -> None:
        head = make_head(newest, self._options.keyring, self._options.head_seconds)
        if not self._head_is_ahead(head):
            self._bucket.put(HEAD_KEY, head.to_bytes())
        self._head_manifest, self._head_written_at = newest, time.monotonic()

    def _head_is_ahead(self, wanted: Head) -> bool:
        """Return whether to leave HEAD: it is equal, of another run, or moved forward by a writer that took over."""
        try:
            present = Head.from_bytes(self._bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES), HEAD_KEY)
            if present.run != wanted.run:
                return self._bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES) != self._info
            self._options.keyring.check(present, HEAD_KEY)
        except SignatureError as error:
            logger.error("%s, which another party has written to the bucket, is overwritten: %s", HEAD_KEY, error)
            return False
        except (NotFoundError, FormatError):
            return False
        if present.version <= wanted.version:
            self._log_if_restored(present)
            # A HEAD with an expiry is never equal: it is to be written again.
            return present.to_bytes() == wanted.to_bytes()
        # A damaged HEAD may name a version that never existed.
        return exists(self._bucket, version_key(present.version))

    def _log_if_restored(self, present: Head) -> None:
        last = self._head_manifest
        if last is None or present.version >= last.version:
            return
        gone = not self.is_stored(last)
        logger.error(
            "%s points at version %d and this publisher had pointed it at %d: the bucket was reset to an older "
            "state%s", HEAD_KEY, present.version, last.version,
            f", and {version_key(last.version)} is lost: only receivers that have version {last.version} can continue "
            "from it, until there is an anchor (Publisher.anchor()) or the bucket is repaired (delta-sync repair)"
            if gone else "; HEAD is moved forward again",
        )  # fmt: skip

    def check_not_fenced(self) -> None:
        """Raise ConflictError if this is no longer the writer of the run, or the run was removed.

        Takes two small gets and one stat, in parallel where the store is remote.
        """
        checks = (self._check_same_run, self._check_epoch, self._check_own_claim)
        run_all = in_parallel if is_remote(self._bucket.url) else map
        try:
            for _ in run_all(lambda check: check(), checks):
                pass
        except ConflictError:
            self._fenced = True
            raise

    def _check_same_run(self) -> None:
        bucket = self._bucket
        try:
            unchanged = reads_back(lambda: bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES), self._info)
        except NotFoundError as error:
            raise ConflictError(
                f"the run at {bucket.url} was removed, or its disk is no longer mounted; this publisher stops: mount "
                "it again and start the publisher again, or start a new run"
            ) from error
        if not unchanged:
            raise ConflictError(
                f"another run was started at {bucket.url} in place of this one; this publisher stops: publish to "
                "another run URL"
            )

    def _check_epoch(self) -> None:
        key = claim_key(self.epoch + 1)
        if exists(self._bucket, key):
            raise self._taken_over(key)

    def _check_own_claim(self) -> None:
        # Another writer has the same epoch where create-if-absent is not atomic; and the same or an earlier one if it
        # took over after the bucket was restored to a state before the own claim.
        key = self._replacing_claim()
        if key is not None:
            raise self._taken_over(key)

    def _taken_over(self, key: str) -> ConflictError:
        return ConflictError(
            f"another publisher has taken over the run at {self._bucket.url} ({key}); this one stops: nothing it "
            "publishes from now on would be kept"
        )

    def _replacing_claim(self) -> str | None:
        """Return the key of another writer's claim in place of the own one or, if that is gone, of one made after it.

        One that is damaged is none.
        """
        if self._claim_data is None:
            return None
        key = claim_key(self.epoch)
        own = Claim.from_bytes(self._claim_data, key)
        with suppress(DataError):
            try:
                found = self._read_claim(key)
            except NotFoundError:
                keys = [info.key for info in self._bucket.list(CLAIMS_PREFIX)]
                key = max((each for each in keys if claim_of_key(each) is not None), default=key)
                found = self._read_claim(key)
                return key if found.created_at > own.created_at else None
            # Not by one of them: a bit that flipped may be in it.
            if found.writer != own.writer and found.created_at != own.created_at:
                return key
        return None

    def _read_claim(self, key: str) -> Claim:
        return Claim.from_bytes(self._bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), key)

    # Where create-if-absent is not atomic

    def _check_newest(self) -> None:
        """Raise ConflictError if the version that the next one follows was overwritten."""
        if self.newest is None:
            return
        key = version_key(self.newest.version)
        try:
            if reads_back(lambda: stored_digest(self._bucket, key), self.newest.digest):
                return
        except NotFoundError:
            return  # lost, which can happen in any store
        self._fenced = True
        raise ConflictError(
            f"{key} of {self._bucket.url} was overwritten by another publisher; this one stops: let one publisher at "
            "a time write the run, and start it again"
        )

    def _check_written(self, manifest: Manifest) -> None:
        """Raise as ``commit`` unless the manifest just written is stored and this is still the writer of the run."""
        if not self.is_stored(manifest):
            try:
                raise self._number_taken_error(manifest.version)
            except NotFoundError as error:
                raise UncertainError(f"{version_key(manifest.version)} was written, and is gone: {error}") from error
        self.check_not_fenced()

    def _number_taken_error(self, version: int) -> PublishError | ConflictError:
        """Return the error to raise if another manifest has the version's number."""
        key, newest = version_key(version), self.newest
        try:
            data = self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES)
            self._options.keyring.check_unparsed(Manifest.KIND, data, key)
            theirs = Manifest.from_bytes(data, key)
            self._options.keyring.check(theirs, key)
        except SignatureError as error:
            theirs = None
            reason = (
                f"{error.message}. It lies in {self._bucket.url}, where only this publisher should write: find out who "
                f"else does, remove {key}, and start this publisher again; it stops now"
            )
        except (FormatError, UnsupportedError) as error:
            theirs = None
            reason = f"{key} of {self._bucket.url} is taken and unreadable; this publisher stops: {error}"
        else:
            reason = (
                f"version {version} of {self._bucket.url} was written by another publisher; this one stops: start it "
                "again to take the run over, or start a new run under a new URL"
            )
        if theirs is not None and newest is not None and theirs.run == self.run:
            follows = theirs.version == newest.version + 1 and theirs.parent == newest.digest
            if follows and (theirs.epoch < self.epoch or theirs.digest in self._tried_digests):
                return FormerVersionError(theirs)
        self._fenced = True
        return ConflictError(reason)


def stored_digest(bucket: Bucket, key: str) -> str:
    """Return the SHA-256 of an object as it is stored, read in pieces; raise NotFoundError if there is none."""
    digest, start = sha256(), 0
    while True:
        piece = bucket.get_range(key, start, _READ_BYTES)
        digest.update(piece)
        if len(piece) < _READ_BYTES:
            return digest.hexdigest()
        start += len(piece)


# Manifests


def full_manifest(
    run: str, state: FullState, objects: list[ObjectRef], base: Base | None = None, version: int = 0, **members: Any
) -> Manifest:
    """Return a version with all tensors in ``objects``, or without any if its weights equal ``base``."""
    return Manifest(
        run=run,
        version=version,
        kind="anchor" if base is None else "reference",
        base=base,
        objects=objects,
        changed=state.table.total if base is None else 0,
        total=state.table.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=state.table.full_bytes,
        fingerprint=sum(state.fingerprints, Fingerprint()).hex(),
        tensor_fingerprints=state.by_name,
        created_at=timestamp(),
        **members,
    )


def check_breaks(breaks: list[Break]) -> None:
    """Raise LimitError if a run with these breaks cannot have another one."""
    if len(breaks) >= limits.MAX_BREAKS:
        raise LimitError(f"the run has {len(breaks)} breaks (MAX_BREAKS); branch it, or start a new run")


def with_break(breaks: list[Break], version: int, base_version: int | None) -> list[Break]:
    """Return the breaks of a run up to a version that builds on an earlier one, or on none; raises as above."""
    check_breaks(breaks)
    return [*breaks, Break(version=version, base_version=base_version)]


def quarantine(reasons: Sequence[str], before: Manifest | None) -> Quarantine | None:
    """Return why a version is quarantined; None without reasons. Args: before: the newest good version before it."""
    sound = None if before is None else before.sound
    return Quarantine(reasons=list(reasons), sound=sound) if reasons else None


def delta_manifest(
    parent: Manifest, base: Manifest, reports: list[Any], coding: tuple[Codec, Compression], reasons: Sequence[str],
    **members: Any,
) -> Manifest:  # fmt: skip
    """Return the version after ``parent``.

    Args:
        base: the version that the objects change; if it is not ``parent``, the run gets a break.
        reports: of each rank, what it has stored: ``objects``, none if nothing changed; ``changed``, ``fingerprint``
            and ``reversible``: elements in them, what these add to the fingerprint, and whether they can be reverted.
        coding: of the objects. reasons: why the version is quarantined, if it is.
        members: of the manifest: ``step``, ``epoch``, ``sidecars`` and ``held_back``.

    Raises:
        LimitError: the run has too many breaks.
    """
    objects = [ObjectRef(**ref) for item in reports for ref in item["objects"]]
    change = sum((Fingerprint.from_hex(item["fingerprint"]) for item in reports), Fingerprint())
    reversible = all(item["reversible"] for item in reports)
    codec, compression = coding
    version, breaks = parent.version + 1, parent.breaks
    if base.version != parent.version:
        breaks = with_break(breaks, version, base.version)
    return Manifest(
        run=parent.run,
        version=version,
        kind="delta",
        base_version=base.version,
        parent=parent.digest,
        breaks=breaks,
        # Codec tiled needs the base bits to decode, which is just what a revert has to produce.
        reversible=reversible and not (objects and codec in BASE_CODECS),
        quarantine=quarantine(reasons, parent),
        codec=codec if objects else None,
        compression=(compression if codec in RELATIVE_CODECS else "none") if objects else None,
        requires=required_features(codec, compression) if objects else [],
        objects=objects,
        changed=sum(item["changed"] for item in reports),
        total=parent.total,
        payload_bytes=sum(ref.bytes for ref in objects),
        full_bytes=parent.full_bytes,
        fingerprint=(base.model_fingerprint + change).hex(),
        created_at=timestamp(),
        **members,
    )
