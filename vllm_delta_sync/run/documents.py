"""The documents of a run, read and checked one by one: what is committed, the head, and what lies beside the chain."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from hashlib import sha256
from itertools import chain
from types import TracebackType
from typing import Self, TypeVar

from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.errors import ChainError, DeltaSyncError, LimitError, NotFoundError, StoreError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    CLAIMS_PREFIX,
    FOLDS_PREFIX,
    RETENTION_KEY,
    TAGS_PREFIX,
    Anchor,
    Claim,
    Lease,
    MergedDelta,
    Retention,
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
    VERSIONS_PREFIX,
    Head,
    Manifest,
    ObjectRef,
    version_key,
    version_of_key,
)
from vllm_delta_sync.run.checks import (
    check_follows,
    check_same_store,
    check_tensor_fingerprints,
    decode_objects,
    document_limit,
    object_limit,
)
from vllm_delta_sync.run.head import BAD_DOCUMENTS, BAD_IN_A_ROW, newest_before
from vllm_delta_sync.run.metadata import read_info, read_table
from vllm_delta_sync.run.prefetch import MOST_EXPECTED, Prefetcher, read_ahead
from vllm_delta_sync.run.verifier import RunVerifier
from vllm_delta_sync.tensors.bits import BaseLookup
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.precheck import GLANCE_BYTES, check_glance

TAG_PREFIX = "tag:"
_Side = TypeVar("_Side", Anchor, Claim, MergedDelta, Lease, Retention, Tag)


class RunDocuments:
    """One run in a bucket, document by document; nothing is ever written.

    Where the keyring has trusted keys, each document that decides about weights is refused with SignatureError unless
    one of them, or one that they list in keys.json, has signed it.

    Attributes:
        bucket: where it lies. cache: what its objects are read through, if anything.
        info: run.json. table: tensors.json. document_limit: see ``checks.document_limit``.
        keyring: see there; whoever writes beside the chain signs with it. authentic: its checks in this run.
        pointer: HEAD.json as it was read last; None if it was not, or may not be believed.
    """

    def __init__(self, bucket: Bucket, keyring: Keyring | None = None, cache: ObjectCache | None = None) -> None:
        self.bucket = bucket
        self.cache = cache
        self.keyring = Keyring() if keyring is None else keyring
        self.pointer: Head | None = None
        self._ahead = Prefetcher(bucket)
        self.info = read_info(bucket)
        self.authentic = RunVerifier(
            bucket, self.keyring, self.info, lambda version: self.stored(version, limits.MAX_JSON_BYTES)
        )
        self.table = read_table(bucket, self.info)
        self.document_limit = document_limit(self.table)

    def looking(self, known: int | None, expected: int | None = None) -> AbstractContextManager[None]:
        """Within the block, what ``is_current`` and ``reachable_head`` read first is on its way already.

        Args:
            known: the newest version known. expected: a newer one, of which somebody has told.
        """
        wanted = {RUN_KEY: limits.MAX_JSON_BYTES, HEAD_KEY: limits.MAX_HEAD_BYTES}
        if known is not None:
            newer = known if expected is None else min(expected, known + MOST_EXPECTED, limits.MAX_VERSION)
            wanted.update({version_key(version): self.document_limit for version in range(known, newer + 1)})
        return self._ahead.reading(wanted)

    def keeping(self) -> AbstractContextManager[None]:
        """Within the block each manifest is read from the store once; for checks and listings of many versions.

        If a manifest is replaced meanwhile, the bytes read first are used. Up to ``ahead.KEPT_BYTES`` are kept, those
        used last.
        """
        return self._ahead.keeping()

    def stored(self, version: int, max_bytes: int) -> bytes:
        """A version's manifest as it is stored, unchecked. Raises NotFoundError, LimitError, StoreError."""
        return self._ahead.stored(version_key(version), max_bytes)

    def is_current(self) -> bool:
        """Whether run.json is still the one this object was opened from; False if another run took its place.

        Raises:
            NotFoundError: the run is gone. StoreError: the store failed.
        """
        try:
            return self._ahead.get(RUN_KEY, limits.MAX_JSON_BYTES) == self.info.to_bytes()
        except NotFoundError as error:
            raise NotFoundError(
                f"run {self.info.run} is not at {self.bucket.url!r} any more: its {RUN_KEY} is gone; put it back, "
                f"or check what the store shows ({error.message})"
            ) from error

    def manifest(self, version: int) -> Manifest:
        """The manifest of one version.

        Raises:
            NotFoundError: the version was never published, or is no longer kept.
            FormatError, UnsupportedError, ChainError: malformed, too new, or of another run.
        """
        check_limit("version", version, limits.MAX_VERSION, "MAX_VERSION")
        key = version_key(version)
        return self._parsed(version, self._ahead.get(key, self.document_limit))

    def _parsed(self, version: int, data: bytes) -> Manifest:
        key = version_key(version)
        self._glance(Manifest.KIND, data, key)
        manifest = Manifest.from_bytes(data, key)
        if manifest.run != self.info.run or manifest.version != version:
            raise ChainError(
                f"{key} belongs to run {manifest.run} version {manifest.version}, expected {self.info.run}"
            )
        if manifest.total != self.table.total or manifest.full_bytes != self.table.full_bytes:
            raise ChainError(f"{key}: total {manifest.total} or full_bytes {manifest.full_bytes} contradicts the table")
        check_tensor_fingerprints(manifest, self.table)
        self.authentic.manifest(manifest, key)
        return manifest

    def _glance(self, kind: str, data: bytes, key: str) -> None:
        """Refuse a large document that cannot be good before anything is parsed."""
        if self.keyring.checks and len(data) > GLANCE_BYTES:
            file = self.authentic.keys.file
            listed = frozenset(entry.key for entry in file.keys) if file is not None else frozenset()
            check_glance(data, kind, self.keyring, self.keyring.trusted | listed, key)

    def head(self) -> Manifest:
        """The newest committed manifest. HEAD.json may lag, so what follows it is probed.

        Raises:
            NotFoundError: nothing is published yet.
            DeltaSyncError: HEAD.json, or the newest manifest, is damaged.
        """
        manifest, error = self.reachable_head()
        if error is not None:
            raise error
        return manifest

    def reachable_head(self) -> tuple[Manifest, DeltaSyncError | None]:
        """The newest good manifest, and what is wrong with the one after it: None if there is none after it.

        Follows the chain from HEAD.json on. Where HEAD.json or its target is bad, the newest good manifest before
        that is looked for in a listing of the bucket. A damaged manifest is passed over if one that follows names
        it, as it is stored, as its parent: then a publisher has gone on behind it.

        Raises:
            NotFoundError: nothing is published yet. StoreError: the store failed, so nothing can be said.
            DeltaSyncError: no manifest is good; the first error met.
        """
        end = limits.MAX_VERSION + 1
        self.pointer = None
        self.authentic.refresh()
        try:
            head = self._pointer()
            if head is not None:
                end = head.version
            manifest = self._pointed_at(head)
        except StoreError:
            raise
        except DeltaSyncError as error:
            words = self.authentic.keys.last_words()
            before = newest_before(self._listed(), self.document_limit, self.manifest, end, error, words)
            # Somebody may have gone on behind a damaged manifest without coming to HEAD any more.
            found, _ = self._probe(before)
            if found.version > end:
                return found, None
            return found if found.version < end else before, error
        return self._probe(manifest)

    def _probe(self, newest: Manifest) -> tuple[Manifest, DeltaSyncError | None]:
        """What follows ``newest``. Bad manifests that follow each other are read up to a number and a size in all.

        Those of a key that was retired or revoked do not count: nobody but its holder can make them.
        """
        bad: DeltaSyncError | None = None
        version, digest, passed = newest.version, newest.digest, 0
        left = spare = BAD_DOCUMENTS * self.document_limit
        while passed < BAD_IN_A_ROW:
            version += 1
            try:
                data = self._ahead.get(version_key(version), self.document_limit)
            except NotFoundError:
                return newest, bad
            except LimitError as error:
                return newest, bad or error
            try:
                following = self._parsed(version, data)
                check_follows(newest, following, digest)
                newest, bad, left, passed = following, None, spare, 0
            except DeltaSyncError as error:
                bad = bad or error
                if self.authentic.gave_up(data, version_key(version)) is None:
                    left, passed = left - len(data), passed + 1
                if left <= 0:
                    break
            digest = sha256(data).hexdigest()
        return newest, bad

    def _pointer(self) -> Head | None:
        try:
            data = self._ahead.get(HEAD_KEY, limits.MAX_HEAD_BYTES)
        except NotFoundError:
            return None
        head = Head.from_bytes(data, HEAD_KEY)
        if head.run != self.info.run:
            raise ChainError(f"{HEAD_KEY} points into run {head.run}, this is {self.info.run}")
        self.authentic.head(head, HEAD_KEY)
        self.pointer = head
        return head

    def _pointed_at(self, head: Head | None) -> Manifest:
        manifest = self.manifest(0 if head is None else head.version)
        if head is not None and manifest.digest != head.manifest:
            raise ChainError(
                f"{HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{manifest.digest}: one of them was rewritten"
            )
        return manifest

    def versions(self) -> list[int]:
        """Numbers of all versions that have a manifest, good or not, ascending: one listing."""
        return list(self._listed())

    def _listed(self) -> dict[int, int]:
        """Version → size in bytes of its manifest."""
        listed = self.bucket.list(VERSIONS_PREFIX)
        return {number: item.bytes for item in listed if (number := version_of_key(item.key)) is not None}

    def log(self, last: int | None = None, head: Manifest | None = None) -> Iterator[Manifest]:
        """Manifests from version 0 to the head, each proven to follow its parent; several are read at a time.

        Args:
            last: only so many of the newest; the one before them is read too, which the first of them has to follow.
            head: the newest one; None: the run's head.

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
        """An object's bytes, with size and SHA-256 checked.

        Raises:
            NotFoundError: the object is gone. DigestError: it is not what the manifest lists.
        """
        check_limit(f"{ref.key}: bytes", ref.bytes, object_limit(self.table), "object_limit")
        return fetch_object(self.bucket, ref) if self.cache is None else self.cache.get(ref, self.bucket)

    def changes(self, document: Manifest | MergedDelta, old: BaseLookup | None = None) -> Changes:
        """Everything that a version or a folded range changes, fetched, verified and decoded.

        For an anchor that is every tensor in full, with no declared changes of fingerprint.

        Args:
            old: the bits that the document builds on, such as ``ModelState.base_tensor``; codec ``context`` needs it.

        Raises:
            UnsupportedError: codec ``context``, and no old bits.
            NotFoundError, DigestError, FormatError, TensorMismatchError, ChainError: see ``fetch`` and
                ``codec.delta_reader.decode``; also when the objects do not add up to what the manifest declares.
        """
        return decode_objects(document, self.table, [self.fetch(ref) for ref in document.objects], old)

    # Documents beside the chain

    def resolve(self, version: int | str | None = None) -> Manifest:
        """The manifest that somebody means.

        Args:
            version: a number, ``tag:NAME``, or None for the head.

        Raises:
            NotFoundError: there is no such version or tag. UsageError: it is neither.
            ChainError: a tag names another manifest than the one that is there. Else as ``manifest``.
        """
        if version is None:
            return self.head()
        if isinstance(version, str):
            if not version.startswith(TAG_PREFIX):
                raise UsageError(f"version is {version[:80]!r}; give a number, {TAG_PREFIX}NAME, or none for the head")
            tag = self.tag(version.removeprefix(TAG_PREFIX))
            manifest = self.manifest(tag.version)
            if manifest.digest != tag.manifest:
                raise ChainError(f"tag {version!r} names manifest {tag.manifest}, version {tag.version} is another")
            return manifest
        head = self.head()
        if not 0 <= version <= head.version:
            raise NotFoundError(f"version {version} is not published; the newest is {head.version}")
        return head if version == head.version else self.manifest(version)

    def tag(self, name: str) -> Tag:
        """A tag. Raises NotFoundError, UsageError (no name at all), FormatError, ChainError (of another run)."""
        key = tag_key(name)
        try:
            tag = self._side(Tag, key, limits.MAX_SIDE_BYTES)
        except NotFoundError as error:
            raise NotFoundError(f"run {self.info.run} has no tag {name!r}") from error
        if tag.name != name:
            raise ChainError(f"{key} is tag {tag.name!r}: it was copied there, and names nothing")
        self.authentic.side(tag, tag.version, key)
        return tag

    def tags(self) -> dict[str, Tag]:
        """All tags by name, those that branches set included; one that is damaged raises."""
        names = [tag_of_key(item.key) for item in self.bucket.list(TAGS_PREFIX)]
        return {name: self.tag(name) for name in names if name is not None}

    def anchors(self) -> list[int]:
        """Versions for which there is an anchor beside the chain, ascending: one listing."""
        listed = self.bucket.list(ANCHORS_PREFIX)
        return [version for item in listed if (version := anchor_of_key(item.key)) is not None]

    def anchor(self, version: int) -> Anchor:
        """The anchor beside a version. Its digest of the manifest is for the caller to compare.

        Raises:
            NotFoundError: there is none. DeltaSyncError: it is damaged, or contradicts itself or the table.
        """
        key = anchor_key(version)
        anchor = self._side(Anchor, key, self.document_limit)
        if anchor.version != version:
            raise ChainError(f"{key} is of version {anchor.version}")
        self.authentic.side(anchor, version, key)
        check_tensor_fingerprints(anchor, self.table)
        return anchor

    def folded(self, first: int, last: int) -> MergedDelta:
        """The folded range between two versions. Its digests of manifests are for the caller to compare.

        Raises:
            NotFoundError: there is none. DeltaSyncError: it is damaged, or of other versions.
        """
        key = merged_delta_key(first, last)
        folded = self._side(MergedDelta, key, self.document_limit)
        if (folded.first, folded.last) != (first, last):
            raise ChainError(f"{key} leads from version {folded.first} to {folded.last}")
        self.authentic.side(folded, last, key)
        return folded

    def folds(self) -> list[tuple[int, int]]:
        """First and last version of every folded range, ascending: one listing."""
        listed = self.bucket.list(FOLDS_PREFIX)
        return [pair for item in listed if (pair := merged_delta_of_key(item.key)) is not None]

    def retention(self) -> Retention | None:
        """What was removed, if anything was. A damaged document counts as none, since it is only a hint."""
        try:
            return self._side(Retention, RETENTION_KEY, limits.MAX_JSON_BYTES)
        except StoreError:
            raise
        except DeltaSyncError:
            return None

    def newest_claim(self) -> int:
        """The newest epoch that a writer claimed; 0 is the first writer's."""
        listed = self.bucket.list(CLAIMS_PREFIX)
        return max((epoch for item in listed if (epoch := claim_of_key(item.key)) is not None), default=0)

    def claim(self, epoch: int) -> Claim:
        """The claim that began an epoch. Raises NotFoundError, FormatError, ChainError."""
        return self._side(Claim, claim_key(epoch), limits.MAX_SIDE_BYTES)

    def origin(self, first: Manifest, location: str | None = None) -> Self:
        """The run that this one branches from; the caller closes it.

        Args:
            first: version 0 of this run, whose ``base`` names a run.
            location: URL of that run, where it is not at the recorded one.

        Raises:
            NotFoundError: it is not there. ChainError: another run is there, or its version is another.
        """
        base = first.base
        if base is None or base.run is None or base.version is None:
            raise ChainError(f"run {self.info.run} does not branch from a run")
        url = location or base.location
        if location is None:
            check_same_store(self.info.run, self.bucket.url, url)
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
                    f"version {base.version} of run {base.run} is not the one that {self.info.run} began with"
                )
            failing.pop_all()
        return source

    def close(self) -> None:
        """Close the bucket; safe to call twice. Nothing can be read afterwards."""
        self.bucket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _side(self, kind: type[_Side], key: str, max_bytes: int) -> _Side:
        data = self.bucket.get(key, max_bytes=max_bytes)
        if kind in (Anchor, MergedDelta):
            self._glance(kind.KIND, data, key)
        document = kind.from_bytes(data, key)
        if document.run != self.info.run:
            raise ChainError(f"{key} belongs to run {document.run}, this is {self.info.run}")
        return document
