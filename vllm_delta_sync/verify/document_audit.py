"""``DocumentAudit`` reads the documents of a run, and finds those that are missing, damaged or rewritten.

A manifest is bound by its digest: the next manifest names it, and so do HEAD.json, tags, anchors, merged deltas and
claims. A document that one of these contradicts counts as absent. Manifests are read from the newest down, so that each
is checked against one that was checked already.
"""

from collections.abc import Callable
from hashlib import sha256
from typing import TypeVar

from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
)
from vllm_delta_sync.format import limits
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
    Tag,
    anchor_key,
    anchor_of_key,
    claim_key,
    claim_of_key,
    merged_delta_key,
    merged_delta_of_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, Head, Manifest, version_key
from vllm_delta_sync.run.checks import check_follows
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.prefetch import read_ahead
from vllm_delta_sync.verify.report import Finding

MISSING_AT_MOST = 1000
"""Maximum number of missing manifests. A HEAD.json that names a version further beyond the newest, or a manifest
further beyond the others, is itself treated as damaged."""

Standalone = Anchor | MergedDelta | Tag | Claim | Retention
_Found = TypeVar("_Found")


def read_head(run: RunDocuments) -> Head:
    """Read and check HEAD.json. Raises NotFoundError, or another DataError if it is damaged or not validly signed."""
    head = Head.from_bytes(run.bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES), HEAD_KEY)
    if head.run != run.info.run:
        raise ChainError(f"{HEAD_KEY} points into run {head.run}, this is {run.info.run}")
    run.keyring.check(head, HEAD_KEY)
    return head


def read_standalone(run: RunDocuments, key: str) -> Standalone | None:
    """Read and check the anchor, merged delta, tag, claim or retention record under a key; None for another key."""
    if (version := anchor_of_key(key)) is not None:
        return run.anchor(version)
    if (pair := merged_delta_of_key(key)) is not None:
        return run.merged_delta(*pair)
    if (name := tag_of_key(key)) is not None:
        return run.tag(name)
    if (epoch := claim_of_key(key)) is not None:
        claim = run.claim(epoch)
        if claim.epoch != epoch:
            raise ChainError(f"{key} is a claim of epoch {claim.epoch}")
        return claim
    if key == RETENTION_KEY:
        record = Retention.from_bytes(run.bucket.get(key, max_bytes=limits.MAX_JSON_BYTES), key)
        if record.run != run.info.run:
            raise ChainError(f"{key} belongs to run {record.run}, this is {run.info.run}")
        return record
    return None


def named_versions(document: Standalone) -> list[tuple[int, str, str | None]]:
    """Return the versions that a document names: each with its manifest's digest, and its fingerprint if that is named.

    A retention record only lists numbers, so it names none.
    """
    if isinstance(document, Retention):
        return []
    if isinstance(document, MergedDelta):
        return [
            (document.first, document.first_manifest, document.first_fingerprint),
            (document.last, document.last_manifest, document.last_fingerprint),
        ]
    return [(document.version, document.manifest, document.fingerprint if isinstance(document, Anchor) else None)]


class DocumentAudit:
    """Audits the documents of a run.

    Args:
        newest: audit only so many of the versions up to the one that HEAD.json names, and what belongs to them; None,
            or a HEAD.json that cannot be read, means all.

    Attributes:
        findings: the problems: HEAD.json first, then by version.
        top: newest version that exists, or that a document names.
        digests, fingerprints: of good manifests, by version. confirmed: versions of these that are named by digest.
        unreadable: versions whose manifest is missing or malformed. epochs: epoch → its first version.
        anchors: versions that have a readable standalone anchor. merged_deltas: (first, last) of readable ones.
        tags: name → version.
        head: HEAD.json; None if it is missing, damaged, or not validly signed. pointed: version that it names.

    Raises:
        NotFoundError: nothing is published yet. StoreError: the store failed.
    """

    def __init__(self, run: RunDocuments, newest: int | None = None) -> None:
        self._run = run
        self._named: dict[int, dict[str, str]] = {}
        self._parents: dict[int, str] = {}
        # (key, version, digest, fingerprint): what standalone documents and claims say of a version.
        self._references: list[tuple[str, int, str, str | None]] = []
        self.epochs: dict[int, int] = {}
        self._claims: dict[int, Claim] = {}
        self.confirmed: set[int] = set()
        self._found: list[tuple[int, Finding]] = []
        self._bad_keys: set[str] = set()
        self.unreadable: set[int] = set()
        self.digests: dict[int, str] = {}
        self.fingerprints: dict[int, str] = {}
        self.anchors: set[int] = set()
        self.merged_deltas: set[tuple[int, int]] = set()
        self.tags: dict[str, int] = {}
        # HEAD.json comes first: if a publisher is running, what is read later can only be newer.
        self.head = self._read_head()
        self.pointed = None if self.head is None else self.head.version
        self._first = 0 if newest is None or self.pointed is None else max(0, self.pointed - newest + 1)
        for prefix in (ANCHORS_PREFIX, MERGED_PREFIX, TAGS_PREFIX, CLAIMS_PREFIX, RETENTION_KEY):
            self._read_standalone(prefix)
        self.top = self._top()
        self._read_manifests()
        self._check_references()
        self._check_claims()

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, finding in sorted(self._found, key=lambda item: item[0])]

    def manifest(self, version: int) -> Manifest | None:
        """Return a version's manifest; None if it is not good."""
        if version not in self.digests:
            return None
        return self._run.manifest(version)

    def acceptable_digests(self, version: int) -> set[str]:
        """Return a manifest's possible digests: the next manifest's if that is good, else all that are named."""
        parent = self._parents.get(version + 1)
        if parent is not None and version + 1 in self.digests:
            return {parent}
        return {*self._named.get(version, {}), *([] if parent is None else [parent])}

    def namers(self, version: int) -> set[str]:
        """Return the keys of documents that name a digest of this version's manifest, one for each digest."""
        found = set(self._named.get(version, {}).values())
        return found | {version_key(version + 1)} if version + 1 in self._parents else found

    def _add(self, rank: int, key: str, error: DeltaSyncError, version: int | None = None) -> None:
        self._found.append((rank, Finding(key, error, version)))
        self._bad_keys.add(key)

    def _read_head(self) -> Head | None:
        try:
            head = read_head(self._run)
        except NotFoundError:
            return None
        except DataError as error:
            self._add(_FIRST, HEAD_KEY, error)
            return None
        self._name(head.version, head.manifest, HEAD_KEY)
        if head.parent is not None:
            self._name(head.version - 1, head.parent, HEAD_KEY)
        return head

    def _name(self, version: int, digest: str, key: str) -> None:
        self._named.setdefault(version, {}).setdefault(digest, key)

    def _read_standalone(self, prefix: str) -> None:
        keys = [item.key for item in self._run.bucket.list(prefix) if _last_version(item.key) >= self._first]
        documents = read_ahead(lambda key: _outcome(lambda: read_standalone(self._run, key)), keys)
        for key, document in zip(keys, documents, strict=True):
            if isinstance(document, NotFoundError) or document is None:
                continue  # removed after listing, or not a key of the format
            if isinstance(document, DeltaSyncError):
                pair = merged_delta_of_key(key)
                self._add(_LAST, key, document, anchor_of_key(key) if pair is None else pair[1])
                continue
            for version, digest, fingerprint in named_versions(document):
                self._name(version, digest, key)
                self._references.append((key, version, digest, fingerprint))
            if isinstance(document, Anchor):
                self.anchors.add(document.version)
            elif isinstance(document, MergedDelta):
                self.merged_deltas.add((document.first, document.last))
            elif isinstance(document, Tag):
                self.tags[document.name] = document.version
            elif isinstance(document, Claim):
                self._claims[document.epoch] = document

    def _top(self) -> int:
        newest = -1
        for count, version in enumerate(self._run.versions()):
            if version > count + MISSING_AT_MOST:
                # A stray file with this name must not cause a search for ten billion versions before it.
                key = version_key(version)
                stray = ChainError(f"{key} is more than {MISSING_AT_MOST} versions beyond the versions before it")
                self._add(_LAST, key, stray, version)
                continue
            newest = version
        if newest < 0 and not self._named:
            raise NotFoundError(f"run {self._run.info.run} at {self._run.bucket.url!r} has no version")
        head = self.head
        if head is not None and head.version > newest + MISSING_AT_MOST:
            error = NotFoundError(
                f"{HEAD_KEY} names version {head.version}, whose manifest {version_key(head.version)} is missing; the "
                f"newest is {newest}"
            )
            self._add(_FIRST, HEAD_KEY, error, head.version)
        return max([newest, *(version for version in self._named if version <= newest + MISSING_AT_MOST)])

    # Manifests

    def _read_manifests(self) -> None:
        above: Manifest | None = None
        versions = range(self.top, self._first - 1, -1)
        found = read_ahead(lambda version: _outcome(lambda: self._run.manifest(version)), versions)
        for version, manifest in zip(versions, found, strict=True):
            if isinstance(manifest, DeltaSyncError):
                error = self._explain_damaged(version, manifest, above)
                self._add(version, version_key(version), error, version)
                self.unreadable.add(version)
                above = None
                continue
            self._parents[version] = manifest.parent or ""
            above = manifest if self._judge(manifest, above) else None
            if above is not None:
                self.digests[version] = manifest.digest
                self.fingerprints[version] = manifest.fingerprint
                self.epochs[manifest.epoch] = version

    def _explain_damaged(self, version: int, error: DeltaSyncError, above: Manifest | None) -> DeltaSyncError:
        """Return the error of a bad manifest; says so if the next version names the damaged bytes as its parent."""
        if above is None or isinstance(error, NotFoundError):
            return error
        try:
            data = self._run.raw_manifest(version, limits.MAX_JSON_BYTES)
        except DeltaSyncError:
            return error
        if sha256(data).hexdigest() != above.parent:
            return error
        return type(error)(f"{error.message} (version {version + 1} was published after it, so it cannot be replaced)")

    def _judge(self, manifest: Manifest, above: Manifest | None) -> bool:
        """Return whether a manifest is good. Add a finding if it is bad, or if the manifest above it turns out bad."""
        version, digest = manifest.version, manifest.digest
        named = self._named.get(version, {})
        if above is not None:
            try:
                check_follows(manifest, above)
            except ChainError as error:
                wrong_epoch = above.parent == digest
                if not wrong_epoch and digest not in named:
                    self._add(version, version_key(version), error, version)
                    return False
                # The manifest above is the bad one: of an ended epoch, or against another document that names this one.
                self._add(above.version, version_key(above.version), error, above.version)
                for known in (self.digests, self.fingerprints):
                    known.pop(above.version, None)
                above = manifest if wrong_epoch else None
        if above is None and named and digest not in named:
            other, key = next(iter(named.items()))
            contradiction = ChainError(
                f"{key} names manifest {other} as version {version}, which has digest {digest}: one of them was "
                "rewritten"
            )
            self._add(version, version_key(version), contradiction, version)
            return False
        if above is not None or digest in named:
            self.confirmed.add(version)
        return True

    # Documents that name a version

    def _check_references(self) -> None:
        error: DeltaSyncError
        head = self.head
        if head is not None and self.digests.get(head.version, head.manifest) != head.manifest:
            error = ChainError(
                f"{HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{self.digests[head.version]}: {HEAD_KEY} was rewritten"
            )
            self._add(_FIRST, HEAD_KEY, error, head.version)
        for key, version, digest, fingerprint in self._references:
            # The next manifest names the digest of one that is missing or damaged.
            following = self._parents[version + 1] if version + 1 in self.digests else digest
            right = self.digests.get(version, following)
            if version > self.top:
                self._add(_LAST, key, NotFoundError(f"{key} names version {version}, which does not exist"))
            elif right != digest:
                error = ChainError(f"{key} names manifest {digest} as version {version}, which has digest {right}")
                self._add(_LAST, key, error, version)
            elif fingerprint is not None and self.fingerprints.get(version, fingerprint) != fingerprint:
                error = FingerprintError(
                    f"{key} gives version {version} fingerprint {fingerprint}, its manifest says "
                    f"{self.fingerprints[version]}"
                )
                self._add(_LAST, key, error, version)

    def _check_claims(self) -> None:
        error: DeltaSyncError
        for epoch, first in self.epochs.items():
            key = claim_key(epoch)
            if epoch == 0 or key in self._bad_keys:
                continue
            claim = self._claims.get(epoch)
            if claim is None:
                error = NotFoundError(f"version {first} is of epoch {epoch}, and {key} is missing")
                self._add(_LAST, key, error, first)
            elif claim.version >= first:
                error = ChainError(
                    f"{key} was written after version {claim.version}, but version {first} is already of its epoch"
                )
                self._add(_LAST, key, error, first)

    def usable_merged_deltas(self) -> list[tuple[int, int]]:
        """Return (first, last) of merged deltas without a finding, ascending."""
        return sorted(pair for pair in self.merged_deltas if merged_delta_key(*pair) not in self._bad_keys)

    def usable_anchors(self) -> set[int]:
        """Return the versions with a standalone anchor that has no finding."""
        return {version for version in self.anchors if anchor_key(version) not in self._bad_keys}


def _last_version(key: str) -> int:
    """Return the version that an anchor is of, or a merged delta leads to; the highest for any other key."""
    pair, version = merged_delta_of_key(key), anchor_of_key(key)
    return pair[1] if pair is not None else limits.MAX_VERSION if version is None else version


def _outcome(read: Callable[[], _Found]) -> _Found | DeltaSyncError:
    """Return the result of a read, or the error that it raises, except StoreError."""
    try:
        return read()
    except DataError as error:
        return error


_FIRST, _LAST = -1, limits.MAX_VERSION + 1
