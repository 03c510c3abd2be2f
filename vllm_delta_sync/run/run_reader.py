"""``RunReader`` reads and checks a run's documents: run.json, manifests, the head, tags, anchors, merged deltas.

``Prefetcher`` fetches small documents early and in parallel, and caches manifests during checks.
"""

import operator
import re
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from copy import copy
from datetime import UTC, datetime
from hashlib import sha256
from itertools import chain
from typing import Self, TypeVar

from vllm_delta_sync import units
from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.base import check_size
from vllm_delta_sync.bucket.threads import in_parallel, start_call
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    DigestError,
    ForkError,
    FormatError,
    LimitError,
    NotFoundError,
    UsageError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    CLAIMS_PREFIX,
    MERGED_PREFIX,
    RETENTION_KEY,
    TAGS_PREFIX,
    Anchor,
    Claim,
    MergedDelta,
    Retention,
    Standalone,
    Tag,
    anchor_key,
    anchor_of_key,
    claim_key,
    claim_of_key,
    merged_delta_key,
    merged_delta_of_key,
    tag_key,
    tag_of_key,
)
from vllm_delta_sync.format.limits import check_limit
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Head,
    Manifest,
    ObjectRef,
    RunInfo,
    version_key,
    version_of_key,
)
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.run.ancestors import Ancestors
from vllm_delta_sync.run.checks import check_tensor_fingerprints, document_limit, object_limit
from vllm_delta_sync.run.decode import decode_objects
from vllm_delta_sync.run.graph import check_follows
from vllm_delta_sync.settings import HEAD
from vllm_delta_sync.tensors.changes import BaseLookup, Changes
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.urls import is_remote, store_of

MAX_EXPECTED = 4
"""Maximum number of manifests of new versions that are requested before it is known whether they exist."""
KEPT_BYTES = 128 * 1024**2
"""Memory for manifests that are cached while a run is checked; holds about 100,000 of them."""
READ_AHEAD = 64
"""Maximum number of documents that ``read_ahead`` reads before the caller has taken them."""
READERS = 32
"""Most documents that ``read_ahead`` reads at once. They are small: more of them cost no bandwidth."""
_BATCH = 4096

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def read_ahead(read: Callable[[_Item], _Found], items: Sequence[_Item]) -> Iterator[_Found]:
    """Yield ``read(item)`` for each item in order. Reads run in parallel, up to ``READ_AHEAD`` of them ahead.

    Raises:
        Whatever the first failing ``read`` raises.
    """
    for start in range(0, len(items), _BATCH):
        yield from in_parallel(read, items[start : start + _BATCH], READ_AHEAD, READERS)


class Prefetcher:
    """Reads a bucket's small documents; some are fetched before they are needed, and manifests can be cached.

    A prefetched document is used once. ``get`` requests one that was missing again, because a document that names it
    may have been read later.

    Attributes:
        is_remote: whether requests take longer than starting a thread.
    """

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self.is_remote = is_remote(bucket.url)
        self._under_way: dict[str, Future[bytes]] = {}
        # By key; None outside of ``caching_manifests``.
        self._manifests: dict[str, bytes] | None = None
        self._room = 0

    @contextmanager
    def prefetching(self, wanted: dict[str, int]) -> Iterator[None]:
        """Begin to fetch documents that ``get`` will need within the block.

        Args:
            wanted: key → the most bytes that the document may have.
        """
        try:
            if self.is_remote:
                with suppress(RuntimeError):  # there are too many threads: ``get`` reads what is not under way
                    for key, most in wanted.items():
                        self._under_way[key] = start_call(self._bucket.get, key, max_bytes=most)
            yield
        finally:
            self._under_way = {}

    @contextmanager
    def caching_manifests(self) -> Iterator[None]:
        """Fetch each manifest only once in the block, as far as ``KEPT_BYTES`` hold them; for all threads.

        For checks and listings: if a manifest is replaced meanwhile, the bytes read first are used.
        """
        if self._manifests is not None:
            yield
            return
        self._manifests, self._room = {}, KEPT_BYTES
        try:
            yield
        finally:
            self._manifests = None

    def is_under_way(self, key: str) -> bool:
        """Return whether a document is being fetched and was not used yet."""
        return key in self._under_way

    def get(self, key: str, max_bytes: int) -> bytes:
        """As ``Bucket.get``."""
        early = self._under_way.pop(key, None)
        if early is not None:
            try:
                return early.result()
            except NotFoundError:
                pass
        return self.stored(key, max_bytes)

    def probe(self, key: str, max_bytes: int, keep: bool = False) -> bytes:
        """As ``get``, for a document that nothing names: one that was missing when it was prefetched is missing.

        Args:
            keep: leave what was prefetched to a later ``get``.
        """
        early = self._under_way.get(key) if keep else self._under_way.pop(key, None)
        return self.stored(key, max_bytes) if early is None else early.result()

    def stored(self, key: str, max_bytes: int) -> bytes:
        """As ``get``, but never from what was prefetched."""
        kept = self._manifests
        if kept is None or not key.startswith(VERSIONS_PREFIX):
            return self._bucket.get(key, max_bytes=max_bytes)
        data = kept.get(key)
        if data is None:
            data = self._bucket.get(key, max_bytes=max_bytes)
            if len(data) <= self._room:
                kept[key] = data
                self._room -= len(data)
        check_size(key, len(data), max_bytes)
        return data


NAMES = f"{HEAD}~N, tag:NAME, step:N, ago:TIME"
"""What ``match_name`` recognizes, for messages."""
MOVING = (f"{HEAD}~", "step:", "ago:")
"""Beginnings of names that may mean another version whenever one is published."""
_NAME = re.compile(
    rf"{HEAD}(?:~(?P<before>[0-9]{{1,10}}))?|tag:(?P<tag>.*)|step:(?P<step>[0-9]{{1,18}})|ago:(?P<ago>.*)",
    re.DOTALL,
)


def match_name(text: str) -> "re.Match[str] | None":
    """Return the parts of a name, of which at most one is not None; None if it is no name.

    The groups are ``before``, the versions before the head; ``tag``; ``step``; and ``ago``, which
    ``units.duration`` reads.
    """
    found = _NAME.fullmatch(text)
    if found is None or found["ago"] is None or units.duration(found["ago"]) is not None:
        return found
    return None


MAX_BAD_IN_A_ROW = 64
"""Bad manifests that are skipped in a row. A publisher that continues after more of them has moved HEAD.json there."""
MAX_BAD_DOCUMENTS = 4
"""Total bytes of bad manifests to read, as a multiple of the maximum manifest size."""


def newest_good_before(
    sizes: Mapping[int, int],
    limit: int,
    read: Callable[[int], Manifest],
    end: int,
    reason: DeltaSyncError,
) -> Manifest:
    """Return the newest good manifest of a version below ``end``, within bounds on how many are read.

    Version numbers have no gaps, so the newest version is in the block of consecutive numbers that starts at the
    lowest. Numbers beyond a gap are tried first, in case a manifest was lost; the block is always tried after them, so
    that stray files beyond a gap cannot hide it. In each part, at most ``MAX_BAD_IN_A_ROW`` bad manifests are skipped,
    from the newest down: the cost is bounded whatever the listing holds, and a head with up to that many bad manifests
    behind it is found.

    Args:
        sizes: version → size in bytes of its manifest, for all that are listed.
        limit: the maximum bytes of a manifest. Once ``MAX_BAD_DOCUMENTS`` times that many bytes of bad manifests have
            been read, larger manifests are skipped unread, so the result may not be the newest good one.
        read: returns the manifest of a version, or raises.
        reason: raised if no manifest is good.

    Raises:
        StoreError: the store failed. DeltaSyncError: ``reason``.
    """
    block_end = last_consecutive(sizes, min(sizes, default=0))
    numbers = sorted((version for version in sizes if version < end), reverse=True)
    for part in ([n for n in numbers if n > block_end], [n for n in numbers if n <= block_end]):
        left = MAX_BAD_DOCUMENTS * limit
        for version in part[: MAX_BAD_IN_A_ROW + 1]:
            if sizes[version] > min(left, limit):
                continue
            try:
                return read(version)
            except DataError:
                left -= sizes[version]
    raise reason


def last_consecutive(numbers: Container[int], start: int) -> int:
    """Return the end of the block of consecutive numbers that begins at ``start``, which need not be in ``numbers``."""
    while start + 1 in numbers:
        start += 1
    return start


_Standalone = TypeVar("_Standalone", Anchor, Claim, MergedDelta, Retention, Tag)


def parse_target(target: str) -> int | str:
    """Return a setting ``target`` (a number, ``tag:NAME`` or ``head``) as ``RunReader.resolve`` takes it."""
    return int(target) if target.isdecimal() else target


class RunReader:
    """Reads the documents of one run in a bucket, and never writes.

    If the keyring has trusted keys, each document that decides about weights must be signed by one of them; otherwise
    it is refused with SignatureError.

    Attributes:
        bucket: the bucket of the run. cache: the cache that objects are read through, if any.
        info: run.json. table: tensors.json. document_limit: see ``checks.document_limit``.
        keyring: the trusted keys, and the key that signs what is written later. ancestors: which manifest precedes
            another.
        pointer: HEAD.json as last read; None if it was not read, or its signature is not valid.
    """

    def __init__(self, bucket: Bucket, keyring: Keyring | None = None, cache: ObjectCache | None = None) -> None:
        self.cache = cache
        self.keyring = Keyring() if keyring is None else keyring
        self.info = read_info(bucket, self.keyring)
        self.keyring.check(self.info, RUN_KEY)
        self.table = read_table(bucket, self.info)
        self.document_limit = document_limit(self.table)
        self._read_from(bucket)

    def in_bucket(self, bucket: Bucket) -> Self:
        """Return a reader of a copy of this run, whose documents are checked as those of this one."""
        other = copy(self)
        other.cache = None
        other._read_from(bucket)
        return other

    def _read_from(self, bucket: Bucket) -> None:
        self.bucket = bucket
        self.pointer: Head | None = None
        # HEAD.json when the head was found last, and the digest of that.
        self._reached: tuple[Head | None, str] | None = None
        # The last manifest parsed that has a fingerprint of each tensor: each poll reads it while it is the head.
        self._whole: Manifest | None = None
        self._prefetcher = Prefetcher(bucket)
        self.ancestors = Ancestors(lambda version: self.raw_manifest(version, limits.MAX_JSON_BYTES))

    def prefetching(self, known: int | None, expected: int | None = None) -> AbstractContextManager[None]:
        """Begin to fetch what ``is_there`` and ``reachable_head`` will read first within the block.

        Args:
            known: the newest version known. expected: a newer version, if a notice announced one.
        """
        again = self.keyring.checks_signatures
        wanted = {HEAD_KEY: limits.MAX_HEAD_BYTES, **({RUN_KEY: limits.MAX_JSON_BYTES} if again else {})}
        if known is not None:
            newer = known if expected is None else min(expected, known + MAX_EXPECTED)
            # The last is the version after it, whose absence shows that there is none newer.
            versions = range(known if again else known + 1, min(newer + 1, limits.MAX_VERSION) + 1)
            wanted.update({version_key(version): self.document_limit for version in versions})
        return self._prefetcher.prefetching(wanted)

    def caching_manifests(self) -> AbstractContextManager[None]:
        """Read each manifest from the store only once in the block; for checks and listings of many versions.

        If a manifest is replaced meanwhile, the bytes read first are used. At most ``KEPT_BYTES`` are kept.
        """
        return self._prefetcher.caching_manifests()

    @property
    def is_remote(self) -> bool:
        """Whether requests to the bucket take longer than starting a thread."""
        return self._prefetcher.is_remote

    def raw_manifest(self, version: int, max_bytes: int) -> bytes:
        """Return the bytes of a version's manifest, unchecked. Raises NotFoundError, LimitError, StoreError."""
        return self._prefetcher.stored(version_key(version), max_bytes)

    def is_current(self) -> bool:
        """Return whether run.json is unchanged since this object was opened; False if another run took its place.

        Raises:
            NotFoundError: the run was removed. StoreError: the store failed.
        """
        try:
            return self._prefetcher.get(RUN_KEY, limits.MAX_JSON_BYTES) == self.info.to_bytes()
        except NotFoundError as error:
            raise NotFoundError(
                f"run {self.info.run} is no longer at {self.bucket.url!r}: its {RUN_KEY} is missing; restore it, or "
                f"check the store ({error.message})"
            ) from error

    def is_there(self) -> bool:
        """As ``is_current``, for polls. Without trusted keys a HEAD.json of this run will do, which they read too."""
        if self.keyring.checks_signatures:
            return self.is_current()
        with suppress(DataError):
            data = self._prefetcher.probe(HEAD_KEY, limits.MAX_HEAD_BYTES, keep=True)
            if Head.from_bytes(data, HEAD_KEY).run == self.info.run:
                return True
        return self.is_current()

    def manifest(self, version: int) -> Manifest:
        """Return the manifest of one version.

        Raises:
            NotFoundError: the version was never published, or is no longer kept.
            FormatError, UnsupportedError, ChainError: it is malformed, too new, or of another run.
        """
        check_limit("version", version, limits.MAX_VERSION, "MAX_VERSION")
        key = version_key(version)
        return self.parsed_manifest(version, self._prefetcher.get(key, self.document_limit))

    def parsed_manifest(self, version: int, data: bytes) -> Manifest:
        """Return the manifest of one version, given its stored bytes. Errors as ``manifest``."""
        known = self._whole
        if known is not None and known.version == version and known.to_bytes() == data:
            return known
        key = version_key(version)
        self.keyring.check_unparsed(Manifest.KIND, data, key)
        manifest = Manifest.from_bytes(data, key)
        if manifest.run != self.info.run or manifest.version != version:
            raise ChainError(
                f"{key} belongs to run {manifest.run} version {manifest.version}, expected {self.info.run}"
            )
        if manifest.total != self.table.total or manifest.full_bytes != self.table.full_bytes:
            raise ChainError(f"{key}: total {manifest.total} or full_bytes {manifest.full_bytes} contradicts the table")
        check_tensor_fingerprints(manifest, self.table)
        self.keyring.check(manifest, key)
        if manifest.tensor_fingerprints is not None:
            self._whole = manifest
        return manifest

    def check_descends(self, younger: Manifest, older: Manifest) -> None:
        """Raise ForkError unless ``younger`` descends from ``older``; other errors as ``Ancestors.digest``.

        Checks nothing without trusted keys.
        """
        if not self.keyring.checks_signatures:
            return
        ancestor = self.ancestors.digest(younger.version, younger.digest, older.version)
        if ancestor != older.digest:
            raise ForkError(
                f"version {younger.version} descends from {ancestor} as version {older.version}, but {older.digest} is "
                f"another version {older.version} with a valid signature: the history was forked"
            )

    def head(self, known: Manifest | None = None) -> Manifest:
        """Return the newest committed manifest. HEAD.json may lag, so the versions after it are probed.

        Args:
            known: see ``reachable_head``.

        Raises:
            NotFoundError: nothing is published yet.
            DeltaSyncError: HEAD.json, or the newest manifest, is damaged.
        """
        manifest, error = self.reachable_head(known)
        if error is not None:
            raise error
        return manifest

    def reachable_head(self, known: Manifest | None = None) -> tuple[Manifest, DeltaSyncError | None]:
        """Return the newest good manifest, and the error of the manifest after it, None if there is none.

        Args:
            known: the newest one as of the last call, for callers that read again soon. Without trusted keys it is not
                read again while HEAD.json has its digest. On a distant store, once a newer one is found, manifests
                after it that are not under way are left for the next call: to learn that there is none takes a round
                trip.

        Reads the manifests from HEAD.json on, or from ``known`` if that was found so from the same HEAD.json before. If
        HEAD.json or the manifest it names is bad, a listing of the bucket gives the newest good manifest before it. A
        damaged manifest is skipped if a later one names its bytes as its parent: a publisher has then continued after
        it.

        Raises:
            NotFoundError: nothing is published yet. StoreError: the store failed.
            DeltaSyncError: no manifest is good; the first error found.
        """
        end = limits.MAX_VERSION + 1
        self.pointer = None
        try:
            with suppress(NotFoundError):
                self.pointer = self.read_head()
            head = self.pointer
            if head is not None:
                end = head.version
            manifest = self._pointed_at(head, known)
        except DataError as error:
            sizes = self._manifest_sizes()
            if self.pointer is None and not sizes and isinstance(error, NotFoundError):
                raise NotFoundError(f"no version is published at {self.bucket.url!r} yet") from error
            before = newest_good_before(sizes, self.document_limit, self.manifest, end, error)
            # A publisher may have continued after a damaged manifest, and ended before it wrote HEAD.json.
            found, _ = self._probe(before, None)
            if found.version > end:
                return found, None
            return found if found.version < end else before, error
        newest, problem = self._probe(manifest, known)
        self._reached = head, newest.digest
        return newest, problem

    def _probe(self, newest: Manifest, known: Manifest | None) -> tuple[Manifest, DeltaSyncError | None]:
        """Return the newest good manifest from ``newest`` on, and the error of the one after it.

        ``known``: see ``reachable_head``.

        Stops after ``MAX_BAD_IN_A_ROW`` bad manifests in a row, or ``MAX_BAD_DOCUMENTS`` times the size limit of them.
        """
        bad: DeltaSyncError | None = None
        version, digest, skipped = newest.version, newest.digest, 0
        bytes_left = allowed_bytes = MAX_BAD_DOCUMENTS * self.document_limit
        while skipped < MAX_BAD_IN_A_ROW:
            version += 1
            is_newer = known is not None and newest.version > known.version and bad is None
            if is_newer and self.is_remote and not self._prefetcher.is_under_way(version_key(version)):
                return newest, None
            try:
                data = self._prefetcher.probe(version_key(version), self.document_limit)
            except NotFoundError:
                return newest, bad
            except LimitError as error:
                return newest, bad or error
            try:
                following = self.parsed_manifest(version, data)
                check_follows(newest, following, digest)
                newest, bad, bytes_left, skipped = following, None, allowed_bytes, 0
            except DataError as error:
                bad = bad or error
                bytes_left, skipped = bytes_left - len(data), skipped + 1
                if bytes_left <= 0:
                    break
            digest = sha256(data).hexdigest()
        return newest, bad

    def read_head(self) -> Head:
        """Return HEAD.json.

        Raises:
            NotFoundError: it is missing. DataError: it is damaged, of another run, or not validly signed.
        """
        head = Head.from_bytes(self._prefetcher.get(HEAD_KEY, limits.MAX_HEAD_BYTES), HEAD_KEY)
        if head.run != self.info.run:
            raise ChainError(f"{HEAD_KEY} points into run {head.run}, this is {self.info.run}")
        self.keyring.check(head, HEAD_KEY)
        return head

    def _pointed_at(self, head: Head | None, known: Manifest | None) -> Manifest:
        if known is not None and head is not None and (head.version, head.manifest) == (known.version, known.digest):
            if not self.keyring.checks_signatures:
                return known
        elif known is not None and self._reached == (head, known.digest):
            # Otherwise each poll would read all versions after a HEAD.json that is lost or stays behind.
            with suppress(DataError):
                if self.manifest(known.version).digest == known.digest:
                    return known
        manifest = self.manifest(0 if head is None else head.version)
        if head is not None and manifest.digest != head.manifest:
            raise ChainError(
                f"{HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{manifest.digest}: one of them was rewritten"
            )
        return manifest

    def versions(self) -> list[int]:
        """Return the numbers of all versions that have a manifest, good or not, ascending; one listing."""
        return list(self._manifest_sizes())

    def _manifest_sizes(self) -> dict[int, int]:
        """Return version → size in bytes of its manifest, from one listing."""
        listed = self.bucket.list(VERSIONS_PREFIX)
        return {number: item.bytes for item in listed if (number := version_of_key(item.key)) is not None}

    def log(self, last: int | None = None, head: Manifest | None = None) -> Iterator[Manifest]:
        """Yield the manifests from version 0 to the head, and check that each follows its parent; reads in parallel.

        Args:
            last: only this many of the newest. The one before them is also read, to check the first of them.
            head: the newest one; None means the run's head.

        Raises:
            NotFoundError: nothing is published yet, or a manifest is missing.
            ChainError: a parent digest or base version does not fit. DeltaSyncError: a manifest is damaged.
        """
        if head is None:
            head = self.head()
        first = 0 if last is None else max(0, head.version - last + 1)
        parent: Manifest | None = None
        for manifest in chain(read_ahead(self.manifest, range(max(0, first - 1), head.version)), [head]):
            if parent is not None:
                check_follows(parent, manifest)
            if manifest.version >= first:
                yield manifest
            parent = manifest

    def fetch(self, ref: ObjectRef) -> bytes:
        """Return an object's bytes, with size and SHA-256 checked.

        Raises:
            NotFoundError: the object is missing. DigestError: it is not what the manifest lists.
        """
        check_limit(f"{ref.key}: bytes", ref.bytes, object_limit(self.table), "object_limit")
        return fetch_object(self.bucket, ref) if self.cache is None else self.cache.get(ref, self.bucket)

    def changes(self, document: Manifest | MergedDelta, old: BaseLookup | None = None) -> Changes:
        """Fetch, verify and decode everything that a version or a merged delta changes.

        For an anchor, that is every tensor in full, with no declared changes of fingerprint.

        Args:
            old: the base bits of the document, such as ``ModelState.base_tensor``; codec ``tiled`` needs them.

        Raises:
            UnsupportedError: the codec is ``tiled``, and ``old`` is None.
            NotFoundError, DigestError, FormatError, TensorMismatchError, ChainError: see ``fetch`` and
                ``codec.delta_reader.decode``; also when the objects do not add up to what the manifest declares.
        """
        return decode_objects(document, self.table, [self.fetch(ref) for ref in document.objects], old)

    # Documents other than manifests

    def resolve(self, version: int | str | None = None) -> Manifest:
        """Return the manifest of a version given by number or name, or of the head.

        Args:
            version: a number, or None or ``head`` for the head, ``head~N`` for the version N before it, ``tag:NAME``,
                ``step:N`` for the newest version of that optimizer step, or ``ago:TIME`` for the newest that is at
                least so old (see ``units.duration``) by the publisher's clock. The last two read the manifests after
                it.

        Raises:
            NotFoundError: there is no such version or tag. UsageError: ``version`` is none of these.
            ChainError: a tag names another manifest than the stored one. Otherwise as ``manifest``.
        """
        name = match_name(version) if isinstance(version, str) else None
        number = None
        with suppress(TypeError):  # integers of any kind, such as numpy's
            number = None if version is None else operator.index(version)  # type: ignore[arg-type]
        if name is None and number is None and version is not None:
            raise UsageError(
                f"version {str(version)[:80]!r} is not a version; give a number, {NAMES}, or none for the head"
            )
        if name is not None and name["tag"] is not None:
            return self._tagged(name["tag"])
        head = self.head()
        if name is not None and name["step"] is not None:
            return self._of_step(int(name["step"]), head)
        if name is not None and name["ago"] is not None:
            return self._from_ago(name["ago"], head)
        if number is None:
            number = head.version - int((name and name["before"]) or 0)
        if not 0 <= number <= head.version:
            raise NotFoundError(f"version {version} is not published; the newest is {head.version}")
        return head if number == head.version else self.manifest(number)

    def _tagged(self, name: str) -> Manifest:
        tag = self.tag(name)
        manifest = self.manifest(tag.version)
        if manifest.digest != tag.manifest:
            raise ChainError(
                f"tag 'tag:{name}' names manifest {tag.manifest}, but version {tag.version} has another manifest"
            )
        return manifest

    def _of_step(self, step: int, head: Manifest) -> Manifest:
        nearest: dict[bool, Manifest] = {}

        def fits(manifest: Manifest) -> bool:
            later = manifest.step > step
            known = nearest.setdefault(later, manifest)
            if abs(manifest.step - step) < abs(known.step - step):
                nearest[later] = manifest
            return manifest.step == step

        found = self._newest_where(fits, head)
        if found is None:
            others = " and ".join(f"version {nearest[later].version} (step {nearest[later].step})" for later in nearest)
            raise NotFoundError(f"no version was published at step {step}; the nearest: {others}")
        return found

    def _from_ago(self, span: str, head: Manifest) -> Manifest:
        found = self.newest_before(time.time() - (units.duration(span) or 0.0), head)
        if found is None:
            raise NotFoundError(
                f"no version is {span} old: version 0 was published at {self.manifest(0).created_at}; name 0 for it"
            )
        return found

    def newest_before(self, moment: float, head: Manifest) -> Manifest | None:
        """Return the newest version that was published until a time, by the publisher's clock; None if there is none.

        Args:
            moment: Unix time. head: the newest version to consider. Reads the manifests before it until one fits.

        Raises:
            DeltaSyncError: as ``manifest``.
        """
        until = timestamp(datetime.fromtimestamp(max(0.0, moment), UTC))
        return self._newest_where(lambda manifest: manifest.created_at <= until, head)

    def _newest_where(self, fits: Callable[[Manifest], bool], head: Manifest) -> Manifest | None:
        """Return the newest version up to ``head`` that fits; skips none, because steps and clocks may go back."""
        older = read_ahead(self.manifest, range(head.version - 1, -1, -1))
        return next((manifest for manifest in chain([head], older) if fits(manifest)), None)

    def tag(self, name: str) -> Tag:
        """Read a tag. Raises NotFoundError, UsageError (invalid name), FormatError, ChainError (of another run)."""
        key = tag_key(name)
        try:
            tag = self._read_standalone(Tag, key, limits.MAX_SIDE_BYTES)
        except NotFoundError as error:
            raise NotFoundError(f"run {self.info.run} has no tag {name!r}") from error
        if tag.name != name:
            raise ChainError(f"{key} contains tag {tag.name!r}: it was copied from another key")
        self.keyring.check(tag, key)
        return tag

    def tags(self) -> dict[str, Tag]:
        """Return all tags by name, including those that branches set. A damaged tag raises."""
        found: dict[str, Tag] = {}
        for _, tag in self.standalones([item.key for item in self.bucket.list(TAGS_PREFIX)]):
            if isinstance(tag, DataError):
                raise tag
            if isinstance(tag, Tag):
                found[tag.name] = tag
        return found

    def anchors(self) -> list[int]:
        """Return the versions that have a standalone anchor, ascending; one listing."""
        listed = self.bucket.list(ANCHORS_PREFIX)
        return [version for item in listed if (version := anchor_of_key(item.key)) is not None]

    def anchor(self, version: int) -> Anchor:
        """Return the standalone anchor of a version. The caller must compare the manifest's digest in it.

        Raises:
            NotFoundError: there is none. DeltaSyncError: it is damaged, or contradicts itself or the table.
        """
        key = anchor_key(version)
        anchor = self._read_standalone(Anchor, key, self.document_limit)
        if anchor.version != version:
            raise ChainError(f"{key} is of version {anchor.version}")
        self.keyring.check(anchor, key)
        check_tensor_fingerprints(anchor, self.table)
        return anchor

    def merged_delta(self, first: int, last: int) -> MergedDelta:
        """Return the merged delta between two versions. The caller must compare the manifests' digests in it.

        Raises:
            NotFoundError: there is none. DeltaSyncError: it is damaged, or of other versions.
        """
        key = merged_delta_key(first, last)
        merged = self._read_standalone(MergedDelta, key, self.document_limit)
        if (merged.first, merged.last) != (first, last):
            raise ChainError(f"{key} leads from version {merged.first} to {merged.last}")
        self.keyring.check(merged, key)
        return merged

    def merged_deltas(self, prefix: str = "") -> list[tuple[int, int]]:
        """List the first and last version of every merged delta, ascending; one listing.

        Args:
            prefix: only those whose first version, in ten digits, begins with it.
        """
        listed = self.bucket.list(MERGED_PREFIX + prefix)
        return [pair for item in listed if (pair := merged_delta_of_key(item.key)) is not None]

    def retention(self) -> Retention | None:
        """Read the record of what garbage collection removed, if any. A damaged one, only a hint, counts as none."""
        try:
            return self._read_standalone(Retention, RETENTION_KEY, limits.MAX_RETENTION_BYTES)
        except DataError:
            return None

    def newest_epoch(self) -> int:
        """Return the newest epoch that a publisher claimed; 0 is the first publisher's."""
        listed = self.bucket.list(CLAIMS_PREFIX)
        return max((epoch for item in listed if (epoch := claim_of_key(item.key)) is not None), default=0)

    def claim(self, epoch: int) -> Claim:
        """Return the claim of an epoch. Raises NotFoundError, FormatError, ChainError."""
        key = claim_key(epoch)
        claim = self._read_standalone(Claim, key, limits.MAX_SIDE_BYTES)
        if claim.epoch != epoch:
            raise ChainError(f"{key} is a claim of epoch {claim.epoch}")
        return claim

    def standalone(self, key: str) -> Standalone | None:
        """Read and check the anchor, merged delta, tag, claim or retention record under a key; None for another key."""
        if (version := anchor_of_key(key)) is not None:
            return self.anchor(version)
        if (pair := merged_delta_of_key(key)) is not None:
            return self.merged_delta(*pair)
        if (name := tag_of_key(key)) is not None:
            return self.tag(name)
        if (epoch := claim_of_key(key)) is not None:
            return self.claim(epoch)
        return self._read_standalone(Retention, key, limits.MAX_RETENTION_BYTES) if key == RETENTION_KEY else None

    def standalones(self, keys: Sequence[str]) -> Iterator[tuple[str, Standalone | DataError]]:
        """Yield each key with its document, or with why it cannot be read; reads in parallel.

        Leaves out documents that were removed since they were listed, and keys of anything else.
        """

        def read(key: str) -> Standalone | DataError | None:
            try:
                return self.standalone(key)
            except NotFoundError:
                return None
            except DataError as error:
                return error

        for key, found in zip(keys, read_ahead(read, keys), strict=True):
            if found is not None:
                yield key, found

    def open_source(self, first: Manifest, location: str | None = None) -> Self:
        """Open the run that this one branches from; the caller closes it.

        Args:
            first: version 0 of this run, whose ``base`` names the source run.
            location: URL of the source run, if it is not at the recorded one.

        Raises:
            NotFoundError: it is not there. ChainError: another run is there, or its version differs.
        """
        base = first.base
        if base is None or base.run is None or base.version is None:
            raise ChainError(f"run {self.info.run} does not branch from a run")
        url = location or base.location
        store = store_of(self.bucket.url)
        if location is None and store_of(url) != store:
            raise ChainError(
                f"run {self.info.run} branches from {url[:200]!r}, which is not in the branch's store {store!r}"
            )
        with ExitStack() as failing:
            bucket = failing.enter_context(open_beside(self.bucket, url))
            source = type(self)(bucket, self.keyring, self.cache)
            if source.info.run != base.run:
                raise ChainError(
                    f"run {self.info.run} branches from run {base.run}, but {url!r} holds {source.info.run}"
                )
            manifest = source.manifest(base.version)
            if manifest.digest != base.manifest or manifest.fingerprint != first.fingerprint:
                raise ChainError(
                    f"version {base.version} of run {base.run} is not the version that {self.info.run} branched from"
                )
            failing.pop_all()
        return source

    def close(self) -> None:
        """Close the bucket; safe to call twice."""
        self.bucket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_standalone(self, kind: type[_Standalone], key: str, max_bytes: int) -> _Standalone:
        data = self.bucket.get(key, max_bytes=max_bytes)
        if kind in (Anchor, MergedDelta):
            self.keyring.check_unparsed(kind.KIND, data, key)
        document = kind.from_bytes(data, key)
        if document.run != self.info.run:
            raise ChainError(f"{key} belongs to run {document.run}, this is {self.info.run}")
        return document


def read_info(bucket: Bucket, keyring: Keyring | None = None) -> RunInfo:
    """Read run.json, whose signature is still to be checked.

    Raises NotFoundError (there is no run), SignatureError, FormatError, UnsupportedError, StoreError.
    """
    try:
        data = bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES)
    except NotFoundError as error:
        lacks = "there is no such bucket or folder" if "does not exist" in error.message else "it has no run.json"
        raise NotFoundError(f"no run at {bucket.url!r}: {lacks}; start a publisher there, or check the URL") from error
    if keyring is not None:
        keyring.check_unparsed(RunInfo.KIND, data, RUN_KEY)
    return RunInfo.from_bytes(data, RUN_KEY)


def read_table(bucket: Bucket, info: RunInfo) -> TensorTable:
    """Read tensors.json. Raises NotFoundError, DigestError or FormatError (it does not fit run.json), StoreError."""
    try:
        data = bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
    except NotFoundError as error:
        raise NotFoundError(
            f"no object {TABLE_KEY!r} in {bucket.url}, which has {RUN_KEY}: a publisher is just starting there, or it "
            "was lost; then restore it from a copy: delta-sync repair --mirror"
        ) from error
    # Before it is parsed, as run.json was signed: that takes seconds, and many times its bytes of memory.
    if (digest := sha256(data).hexdigest()) != info.tensors:
        raise DigestError(f"{TABLE_KEY} has SHA-256 {digest}, run.json says {info.tensors}")
    table = TensorTable.from_bytes(data)
    if info.total != table.total or info.full_bytes != table.full_bytes:
        raise FormatError(f"{RUN_KEY}: total {info.total} or full_bytes {info.full_bytes} contradicts {TABLE_KEY}")
    return table
