"""The writing end of a run: claim a URL, then commit one version after another.

Order: objects, manifest (create-if-absent: the commit point), HEAD, notice. A reader that comes at any moment
finds whole versions only.
"""

import logging
import secrets
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from trainer_side.versions import timestamp
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
    LimitError,
    NotFoundError,
    NoticeError,
    PublishError,
    StoreError,
)
from vllm_delta_sync.notice import Notice, NoticePublisher
from vllm_delta_sync.wire import limits
from vllm_delta_sync.wire.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Head,
    Manifest,
    ObjectRef,
    RunInfo,
    object_key,
    version_key,
)
from vllm_delta_sync.wire.table import TensorTable

logger = logging.getLogger(__name__)


class UncertainError(PublishError):
    """The store failed in such a way that nobody knows whether the manifest was written."""


@dataclass
class _Made:
    """What a start has written so far.

    Attributes:
        keys: created by it for certain. maybe: key → content, of puts whose outcome is not known.
        committing: version 0 may have been written.
    """

    keys: list[str] = field(default_factory=list)
    maybe: dict[str, bytes] = field(default_factory=dict)
    committing: bool = False


class RunWriter:
    """Writes one run. Not thread-safe: one thread at a time.

    Attributes:
        run: its id, 32 hex digits.
        newest: manifest of the newest durable version; None before version 0.
    """

    def __init__(self, bucket: Bucket, table: TensorTable) -> None:
        self._bucket = bucket
        self._table = table
        self._notice: NoticePublisher | None = None
        self._head_lags = False
        self.run = secrets.token_hex(16)
        self.newest: Manifest | None = None

    @property
    def notice_address(self) -> str | None:
        return None if self._notice is None else self._notice.address

    def open_notice(self, address: str) -> None:
        """Bind the notice address; if it cannot be bound, warn and carry on without notices."""
        try:
            self._notice = NoticePublisher(address)
        except NoticeError as error:
            logger.warning("publishing without notices, receivers poll: %s", error)

    def close(self) -> None:
        """Bring HEAD up to date if it lags, and close the notice socket."""
        self._point_head()
        if self._notice is not None:
            self._notice.close()

    def refuse_existing(self) -> None:
        """Raise ConflictError if there is a run at the URL already, or a part of one."""
        found = [key for key in (RUN_KEY, TABLE_KEY, HEAD_KEY) if self._present(key)]
        versions = next(iter(self._bucket.list(VERSIONS_PREFIX)), None) is not None
        if versions and RUN_KEY in found:
            raise ConflictError(f"{self._bucket.url} holds a run already; publish to a new run URL")
        found += [VERSIONS_PREFIX] if versions else []
        if found:
            keys = ", ".join(found)
            raise ConflictError(
                f"{self._bucket.url} holds {keys} but no whole run: another publisher is starting there, or a start "
                f"crashed, or a run was half removed; publish to a new run URL, or, if nobody uses this one, remove "
                f"{keys} by hand"
            )

    def start(self, manifest: Manifest, anchor: Path | None) -> None:
        """Claim the URL and commit version 0.

        Raises:
            ConflictError: there is a run at the URL already. StoreError: the store failed; what this call has
                written is removed, and the message names what could not be. UncertainError: version 0 may have
                been written; the URL stays claimed.
        """
        info = RunInfo(
            run=self.run,
            created_at=timestamp(),
            tensors=self._table.digest,
            total=self._table.total,
            full_bytes=self._table.full_bytes,
        )
        made = _Made()
        try:
            self._create(RUN_KEY, info.to_bytes(), made)
            self._create(TABLE_KEY, self._table.to_bytes(), made)
            if anchor is not None:
                self._put_anchor(manifest.objects[0].key, anchor, made)
            made.committing = True
            self.commit(manifest)
        except UncertainError as error:
            raise UncertainError(f"{error.message}; {self._kept()}") from error
        except DeltaSyncError as error:
            left = self._take_back(made)
            if left:
                raise type(error)(f"{error.message}; {self._left(left)}") from error
            raise
        except BaseException:  # an interrupted start gives its URL back as well
            self._abandon(manifest, made)
            raise
        self.announce()

    def put_object(self, data: bytes) -> ObjectRef:
        """Store a version's object under its digest."""
        digest = sha256(data).hexdigest()
        ref = ObjectRef(key=object_key(digest), bytes=len(data), sha256=digest)
        self._bucket.put(ref.key, data)
        return ref

    def commit(self, manifest: Manifest) -> None:
        """Write the manifest: when this returns, the version is durable and ``newest``.

        Raises:
            ConflictError: the version exists already and is another writer's.
            StoreError: the manifest was not written. UncertainError: it may have been.
        """
        data, key = manifest.to_bytes(), version_key(manifest.version)
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError as error:
            if not self.holds(manifest):
                raise ConflictError(
                    f"version {manifest.version} of {self._bucket.url} was written by another publisher; "
                    "this one stops: start a new run under a new URL"
                ) from error
        except StoreError as error:
            if not self.holds(manifest):
                raise StoreError(error.message) from error
        self.adopt(manifest)

    def adopt(self, manifest: Manifest) -> None:
        """Take note that ``manifest`` is durable."""
        self.newest = manifest
        self._head_lags = True

    def announce(self) -> None:
        """Point HEAD at the newest version and send a notice; a failure only warns."""
        self._point_head()
        if self._notice is None or self.newest is None:
            return
        try:
            self._notice.send(Notice(self.run, self.newest.version, self.newest.digest))
        except NoticeError as error:
            logger.warning("no notice of version %d, receivers poll: %s", self.newest.version, error)

    def holds(self, manifest: Manifest) -> bool:
        """Whether this very manifest is in the bucket.

        Raises:
            UncertainError: the store does not tell.
        """
        key = version_key(manifest.version)
        try:
            return self._bucket.get(key, max_bytes=limits.MAX_JSON_BYTES) == manifest.to_bytes()
        except NotFoundError:
            return False
        except StoreError as error:
            raise UncertainError(f"whether {key} was written is not known: {error}") from error

    def _present(self, key: str) -> bool:
        try:
            self._bucket.stat(key)
        except NotFoundError:
            return False
        return True

    def _create(self, key: str, data: bytes, made: _Made) -> None:
        made.maybe[key] = data
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError as error:
            # A put whose answer was lost and that the store's client repeats finds its own object. Only run.json
            # proves by its content whose it is: it holds the random id of the run.
            if not self._reads(key, data):
                del made.maybe[key]
                raise ConflictError(
                    f"{self._bucket.url} holds {key} of another publisher; publish to a new run URL"
                ) from error
            if key != RUN_KEY:
                del made.maybe[key]
                return
        made.keys.append(key)
        del made.maybe[key]

    def _put_anchor(self, key: str, anchor: Path, made: _Made) -> None:
        try:
            self._bucket.put(key, anchor, if_absent=True)
            made.keys.append(key)
        except ConflictError:
            # Left by an earlier start, perhaps damaged since.
            self._bucket.put(key, anchor)

    def _take_back(self, made: _Made) -> list[str]:
        """Remove what this start has created; return the keys that may still be there."""
        left: list[str] = []
        # The claim goes last: as long as it stands nobody else writes here.
        for key in [*reversed(made.maybe), *reversed(made.keys)]:
            try:
                if key in made.keys or self._reads(key, made.maybe[key]):
                    self._bucket.delete(key)
            except DeltaSyncError as error:
                logger.warning("%s of a failed start was not removed: %s", key, error)
                left.append(key)
        return left

    def _abandon(self, manifest: Manifest, made: _Made) -> None:
        """After an interrupt: take back, unless version 0 may be there."""
        try:
            written = made.committing and self.holds(manifest)
        except UncertainError:
            written = True
        if written:
            logger.warning("interrupted while version 0 was written; %s", self._kept())
            return
        left = self._take_back(made)
        if left:
            logger.warning("interrupted; %s", self._left(left))

    def _reads(self, key: str, data: bytes) -> bool:
        try:
            return self._bucket.get(key, max_bytes=max(len(data), limits.MAX_JSON_BYTES)) == data
        except (NotFoundError, LimitError):
            return False

    def _kept(self) -> str:
        return f"{self._bucket.url} stays claimed by run {self.run}: publish to a new run URL"

    def _left(self, keys: list[str]) -> str:
        names = ", ".join(keys)
        return (
            f"this failed start may have left {names} in {self._bucket.url}: remove by hand what is there, or "
            "publish to a new run URL"
        )

    def _point_head(self) -> None:
        if self.newest is None or not self._head_lags:
            return
        head = Head(run=self.run, version=self.newest.version, manifest=self.newest.digest)
        try:
            self._bucket.put(HEAD_KEY, head.to_bytes())
            self._head_lags = False
        except DeltaSyncError as error:
            logger.warning(
                "version %d is durable but %s still points before it, the next publish mends that: %s",
                self.newest.version, HEAD_KEY, error,
            )  # fmt: skip
