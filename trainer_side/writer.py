"""The writing end of a run: claim a URL, then commit one version after another.

Order: objects, manifest (create-if-absent: the commit point), HEAD, notice. A reader that comes at any moment
finds whole versions only.
"""

import logging
import secrets
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from trainer_side.versions import timestamp
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
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
        """Raise ConflictError if there is a run at the URL already."""
        with suppress(NotFoundError):
            self._bucket.stat(RUN_KEY)
            raise self._exists()

    def start(self, manifest: Manifest, anchor: Path | None) -> None:
        """Claim the URL and commit version 0.

        Raises:
            ConflictError: there is a run at the URL already. StoreError: the store failed; the claim is given
                back.
        """
        info = RunInfo(
            run=self.run,
            created_at=timestamp(),
            tensors=self._table.digest,
            total=self._table.total,
            full_bytes=self._table.full_bytes,
        )
        self._claim(info.to_bytes())
        try:
            self._bucket.put(TABLE_KEY, self._table.to_bytes(), if_absent=True)
            if anchor is not None:
                self._bucket.put(manifest.objects[0].key, anchor)
            self.commit(manifest)
        finally:
            if self.newest is None:
                with suppress(DeltaSyncError):
                    self._bucket.delete(TABLE_KEY)
                    self._bucket.delete(RUN_KEY)
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

    def _claim(self, data: bytes) -> None:
        try:
            self._bucket.put(RUN_KEY, data, if_absent=True)
        except ConflictError as error:
            if self._bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES) != data:
                raise self._exists() from error

    def _exists(self) -> ConflictError:
        return ConflictError(f"{self._bucket.url} holds a run already; publish to a new run URL")

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
