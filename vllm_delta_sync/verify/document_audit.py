"""``DocumentAudit`` reads the documents of a run, and finds those that are missing, damaged or contradicted.

Each manifest names the digest of the one before it, and HEAD.json that of the newest; the newest speaks first
(``run.graph.contradicted``). What the manifests say decides about all other documents.
"""

from collections.abc import Iterator
from typing import NamedTuple

from vllm_delta_sync.errors import ChainError, DataError, DeltaSyncError, NotFoundError
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
    Standalone,
    Tag,
    anchor_of_key,
    claim_key,
    merged_delta_of_key,
    named_versions,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, Head, Manifest, version_key
from vllm_delta_sync.run.graph import contradicted, contradiction
from vllm_delta_sync.run.run_reader import RunReader, read_ahead
from vllm_delta_sync.verify.report import Finding

MISSING_AT_MOST = 1000
"""Maximum number of missing manifests. A HEAD.json that names a version further beyond the newest, or a manifest
further beyond the others, is itself treated as damaged."""


class Note(NamedTuple):
    """What is kept of a manifest, so that any number of them fits into memory."""

    version: int
    digest: str
    parent: str | None
    epoch: int
    fingerprint: str


class DocumentAudit:
    """Audits the documents of a run.

    Attributes:
        findings: the problems: HEAD.json first, then by version.
        top: newest version that is listed, or that HEAD.json names.
        manifests: notes of the good ones, by version.
        anchors: versions of good ones. merged_deltas: (first, last) of good ones. tags: name → version.
        known: version → digest of its manifest, as far as that or the one after it is good.
        claims: readable ones, by epoch. epochs: epoch → its first version.
        head: HEAD.json; None if it is missing, damaged, or not validly signed. pointed: version that it names.

    Raises:
        NotFoundError: nothing is published yet. StoreError: the store failed.
    """

    def __init__(self, run: RunReader) -> None:
        self._run = run
        self._found: list[tuple[int, Finding]] = []
        # HEAD.json comes first: if a publisher is running, what is read later can only be newer.
        self.head = self._read_head()
        self.pointed = None if self.head is None else self.head.version
        # Before the manifests, which can then only be newer than what names them.
        standalone = list(self._read_standalone())
        self.top = self._top()
        self.manifests: dict[int, Note] = {}
        self._read_manifests()
        self.epochs = {self.manifests[version].epoch: version for version in sorted(self.manifests, reverse=True)}
        self.anchors: set[int] = set()
        self.merged_deltas: set[tuple[int, int]] = set()
        self.tags: dict[str, int] = {}
        self.claims: dict[int, Claim] = {}
        for key, document in standalone:
            self._judge(key, document)
        self._check_claims()

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, finding in sorted(self._found, key=lambda item: item[0])]

    def manifest(self, version: int) -> Manifest | None:
        """Read a version's manifest; None if it is not good."""
        return self._run.manifest(version) if version in self.manifests else None

    def contradiction(self, document: Standalone) -> DeltaSyncError | None:
        """Return what contradicts a document beside the chain; None if nothing does."""
        for named in named_versions(document):
            if named.version > self.top:
                return NotFoundError(f"it names version {named.version}, which does not exist")
        return contradiction(document, self.manifests, self.known)

    def _add(self, rank: int, key: str, error: DeltaSyncError, version: int | None = None) -> None:
        self._found.append((rank, Finding(key, error, version)))

    def _read_head(self) -> Head | None:
        try:
            return self._run.read_head()
        except NotFoundError:
            return None
        except DataError as error:
            self._add(_FIRST, HEAD_KEY, error)
            return None

    def _read_standalone(self) -> Iterator[tuple[str, Standalone]]:
        for prefix in (ANCHORS_PREFIX, MERGED_PREFIX, TAGS_PREFIX, CLAIMS_PREFIX, RETENTION_KEY):
            for key, document in self._run.standalones([item.key for item in self._run.bucket.list(prefix)]):
                if isinstance(document, DataError):
                    pair = merged_delta_of_key(key)
                    self._add(_LAST, key, document, anchor_of_key(key) if pair is None else pair[1])
                else:
                    yield key, document

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
        if newest < 0 and self.head is None:
            raise NotFoundError(f"run {self._run.info.run} at {self._run.bucket.url!r} has no version")
        if self.head is not None and self.head.version > newest + MISSING_AT_MOST:
            error = NotFoundError(
                f"{HEAD_KEY} names version {self.head.version}, whose manifest {version_key(self.head.version)} is "
                f"missing; the newest is {newest}"
            )
            self._add(_FIRST, HEAD_KEY, error, self.head.version)
            return newest
        return max(newest, -1 if self.head is None else self.head.version)

    def _read_manifests(self) -> None:
        versions = range(self.top, -1, -1)
        found = read_ahead(self._manifest_or_error, versions)
        for version, manifest in zip(versions, found, strict=True):
            if isinstance(manifest, DataError):
                self._add(version, version_key(version), manifest, version)
            else:
                self.manifests[version] = Note(
                    version, manifest.digest, manifest.parent, manifest.epoch, manifest.fingerprint
                )
        head = self.head
        # HEAD.json may be behind; then the newer manifests speak first.
        trusted = {} if head is None or head.version + 1 in self.manifests else {head.version: head.manifest}
        if trusted and head is not None and head.parent is not None and head.version not in self.manifests:
            trusted[head.version - 1] = head.parent
        self.known, wrong = contradicted(self.manifests.values(), trusted)
        for version, why in wrong.items():
            del self.manifests[version]
            self._add(version, version_key(version), ChainError(f"version {version} {why}"), version)
        if head is not None and (right := self.known.get(head.version, head.manifest)) != head.manifest:
            error = ChainError(
                f"{HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest {right}: "
                f"{HEAD_KEY} was rewritten"
            )
            self._add(_FIRST, HEAD_KEY, error, head.version)

    def _manifest_or_error(self, version: int) -> Manifest | DataError:
        try:
            return self._run.manifest(version)
        except DataError as error:
            return error

    def _judge(self, key: str, document: Standalone) -> None:
        error = self.contradiction(document)
        if isinstance(document, Claim):
            self.claims[document.epoch] = document
        if error is not None:
            version = max((named.version for named in named_versions(document)), default=None)
            self._add(_LAST, key, type(error)(f"{key}: {error.message}"), version)
        elif isinstance(document, Anchor):
            self.anchors.add(document.version)
        elif isinstance(document, MergedDelta):
            self.merged_deltas.add((document.first, document.last))
        elif isinstance(document, Tag):
            self.tags[document.name] = document.version

    def _check_claims(self) -> None:
        bad = {finding.key for _, finding in self._found}
        for epoch, first in self.epochs.items():
            key, claim = claim_key(epoch), self.claims.get(epoch)
            if epoch == 0 or key in bad:
                continue
            if claim is None:
                missing = NotFoundError(f"version {first} is of epoch {epoch}, and {key} is missing")
                self._add(_LAST, key, missing, first)
            elif claim.version >= first:
                late = ChainError(
                    f"{key} was written after version {claim.version}, but version {first} is already of its epoch"
                )
                self._add(_LAST, key, late, first)


_FIRST, _LAST = -1, limits.MAX_VERSION + 1
