"""``DocumentAudit`` reads every document of a run, and finds those that are missing, damaged or rewritten.

A manifest is bound by its digest: the next manifest names it, and so do HEAD.json, tags, anchors, merged deltas and
claims. Manifests are read from the newest down, so that each is checked against one that was checked already.
"""

from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import TypeVar

from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    FingerprintError,
    NotFoundError,
    SignatureError,
    StoreError,
)
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    CLAIMS_PREFIX,
    KEYS_KEY,
    RETENTION_KEY,
    TAGS_PREFIX,
    Claim,
    Retention,
    anchor_key,
    claim_key,
    claim_of_key,
    merged_delta_key,
    tag_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, Head, Manifest, version_key
from vllm_delta_sync.run.checks import check_follows
from vllm_delta_sync.run.documents import RunDocuments, revoked_manifest
from vllm_delta_sync.run.prefetch import read_ahead
from vllm_delta_sync.verify.report import Finding

MISSING_AT_MOST = 1000
"""Maximum number of missing manifests. A HEAD.json that names a version further beyond the newest, or a manifest
further beyond the others, is itself treated as damaged."""

_Found = TypeVar("_Found")
_Item = TypeVar("_Item")


class DocumentAudit:
    """Audits the documents of a run.

    Attributes:
        findings: the problems: HEAD.json first, then by version.
        top: newest version that exists, or that a document names.
        digests, fingerprints: of good manifests, by version. confirmed: versions of these that are named by digest.
        unreadable: versions whose manifest is missing or malformed. epochs: epoch → its first version.
        anchors: versions that have a readable standalone anchor. folds: (first, last) of readable merged deltas.
        tags: name → version.
        refused: versions whose signing key was retired or revoked before them; later versions descend from them.
        head: HEAD.json; None if it is missing, damaged, or not validly signed. pointed: version that it names.

    Raises:
        NotFoundError: nothing is published yet. StoreError: the store failed.
    """

    def __init__(self, run: RunDocuments) -> None:
        self._run = run
        self._named: dict[int, dict[str, str]] = {}
        self._parents: dict[int, str] = {}
        # (key, version, digest, fingerprint): what standalone documents and claims say of a version.
        self._references: list[tuple[str, int, str, str | None]] = []
        self.epochs: dict[int, int] = {}
        self._claims: dict[int, Claim] = {}
        self.confirmed: set[int] = set()
        self._found: list[tuple[int, Finding]] = []
        self.unreadable: set[int] = set()
        self.digests: dict[int, str] = {}
        self.fingerprints: dict[int, str] = {}
        self.anchors: set[int] = set()
        self.folds: set[tuple[int, int]] = set()
        self.tags: dict[str, int] = {}
        self.refused: set[int] = set()
        self._read_keys()
        # HEAD.json comes first: if a publisher is running, what is read later can only be newer.
        self.head = head = self._read_head()
        self._read_standalone()
        self._read_claims()
        self._read_retention()
        self.top = self._top(head)
        self._read_manifests()
        self._check_references(head)
        self._check_claims()

    @property
    def findings(self) -> list[Finding]:
        return [finding for _, finding in sorted(self._found, key=lambda item: item[0])]

    def manifests(self) -> Iterator[Manifest | None]:
        """Yield each version's manifest from version 0 on, None for one that is not good; reads in parallel."""
        return read_ahead(self.manifest, range(self.top + 1))

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

    def only_head_names(self, version: int) -> bool:
        """Return whether HEAD.json is the only document that names this version's digest."""
        return set(self._named.get(version, {}).values()) <= {HEAD_KEY} and version + 1 not in self._parents

    def _add(self, rank: int, finding: Finding) -> None:
        self._found.append((rank, finding))

    def _try(self, key: str, read: Callable[[], _Found]) -> _Found | None:
        return self._taken(key, _outcome(read))

    def _taken(self, key: str, outcome: _Found | DeltaSyncError, version: int | None = None) -> _Found | None:
        """Return the document; None if it was removed after listing, or is bad, which becomes a finding."""
        if not isinstance(outcome, DeltaSyncError):
            return outcome
        if not isinstance(outcome, NotFoundError):
            self._add(_LAST, Finding(key, outcome, version))
        return None

    def _all(self, read: Callable[[_Item], _Found], items: Sequence[_Item]) -> Iterator[_Found | DeltaSyncError]:
        """Return the result or error of each read; reads in parallel."""
        return read_ahead(lambda item: _outcome(lambda: read(item)), items)

    def _read_keys(self) -> None:
        """Read keys.json again; if the new one is refused, the one accepted before stays in use."""
        run = self._run
        for key, check in ((KEYS_KEY, run.verifier.refresh), (RUN_KEY, self._check_info)):
            try:
                check()
            except StoreError:
                raise
            except DeltaSyncError as error:
                self._add(_FIRST, Finding(key, error))

    def _check_info(self) -> None:
        if self._run.keyring.checks_signatures:
            self._run.verifier.keys.check_info(self._run.info)

    def _read_head(self) -> Head | None:
        self.pointed: int | None = None
        try:
            data = self._run.bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
            head = Head.from_bytes(data, HEAD_KEY)
            if head.run != self._run.info.run:
                raise ChainError(f"{HEAD_KEY} points into run {head.run}, this is {self._run.info.run}")
            self._run.verifier.check_head(head, HEAD_KEY)
        except (StoreError, NotFoundError) as error:
            if isinstance(error, StoreError):
                raise
            return None
        except DeltaSyncError as error:
            self._add(_FIRST, Finding(HEAD_KEY, error))
            return None
        self.pointed = head.version
        self._name(head.version, head.manifest, HEAD_KEY)
        return head

    def _name(self, version: int, digest: str, key: str, fingerprint: str | None = None) -> None:
        self._named.setdefault(version, {}).setdefault(digest, key)
        if key != HEAD_KEY:
            self._references.append((key, version, digest, fingerprint))

    def _read_standalone(self) -> None:
        anchors, folds = self._run.anchors(), self._run.merged_deltas()
        for version, one in zip(anchors, self._all(self._run.anchor, anchors), strict=True):
            key = anchor_key(version)
            anchor = self._taken(key, one, version)
            if anchor is not None:
                self.anchors.add(version)
                self._name(version, anchor.manifest, key, anchor.fingerprint)
        for pair, other in zip(folds, self._all(lambda pair: self._run.merged_delta(*pair), folds), strict=True):
            key = merged_delta_key(*pair)
            merged = self._taken(key, other, pair[1])
            if merged is not None:
                self.folds.add(pair)
                self._name(merged.first, merged.first_manifest, key, merged.first_fingerprint)
                self._name(merged.last, merged.last_manifest, key, merged.last_fingerprint)
        names = [name for item in self._run.bucket.list(TAGS_PREFIX) if (name := tag_of_key(item.key))]
        for name, mark in zip(names, self._all(self._run.tag, names), strict=True):
            tag = self._taken(tag_key(name), mark)
            if tag is not None:
                self.tags[name] = tag.version
                self._name(tag.version, tag.manifest, tag_key(name))

    def _read_claims(self) -> None:
        for item in self._run.bucket.list(CLAIMS_PREFIX):
            epoch = claim_of_key(item.key)
            if epoch is None:
                continue
            claim = self._try(item.key, lambda epoch=epoch: self._run.claim(epoch))  # type: ignore[misc]
            if claim is not None and claim.epoch != epoch:
                self._add(_LAST, Finding(item.key, ChainError(f"{item.key} is a claim of epoch {claim.epoch}")))
            elif claim is not None:
                self._claims[epoch] = claim
                self._name(claim.version, claim.manifest, item.key)

    def _read_retention(self) -> None:
        def read() -> None:
            data = self._run.bucket.get(RETENTION_KEY, max_bytes=limits.MAX_JSON_BYTES)
            record = Retention.from_bytes(data, RETENTION_KEY)
            if record.run != self._run.info.run:
                raise ChainError(f"{RETENTION_KEY} belongs to run {record.run}, this is {self._run.info.run}")

        self._try(RETENTION_KEY, read)

    def _top(self, head: Head | None) -> int:
        newest = -1
        for count, version in enumerate(self._run.versions()):
            if version > count + MISSING_AT_MOST:
                # A stray file with this name must not cause a search for ten billion versions before it.
                key = version_key(version)
                stray = ChainError(f"{key} is more than {MISSING_AT_MOST} versions beyond the versions before it")
                self._add(_LAST, Finding(key, stray, version))
                continue
            newest = version
        if newest < 0 and not self._named:
            raise NotFoundError(f"run {self._run.info.run} at {self._run.bucket.url!r} has no version")
        if head is not None and head.version > newest + MISSING_AT_MOST:
            error = NotFoundError(
                f"{HEAD_KEY} names version {head.version}, whose manifest {version_key(head.version)} is missing; the "
                f"newest is {newest}"
            )
            self._add(_FIRST, Finding(HEAD_KEY, error, head.version))
        return max([newest, *(version for version in self._named if version <= newest + MISSING_AT_MOST)])

    # Manifests

    def _read_manifests(self) -> None:
        above: Manifest | None = None
        skipped: Manifest | None = None
        versions = range(self.top, -1, -1)
        found = read_ahead(lambda version: _outcome(lambda: self._run.manifest(version)), versions)
        for version, manifest in zip(versions, found, strict=True):
            if isinstance(manifest, DeltaSyncError):
                skipped = self._skipped_revoked(version, manifest, above or skipped)
                if skipped is not None:
                    self.refused.add(version)
                    above = None
                    continue
                error = self._explain_damaged(version, manifest, above)
                self._add(version, Finding(version_key(version), error, version))
                self.unreadable.add(version)
                above = None
                continue
            skipped = None
            self._parents[version] = manifest.parent or ""
            above = manifest if self._judge(manifest, above) else None
            if above is not None:
                self.digests[version] = manifest.digest
                self.fingerprints[version] = manifest.fingerprint
                self.epochs[manifest.epoch] = version

    def _skipped_revoked(self, version: int, error: DeltaSyncError, above: Manifest | None) -> Manifest | None:
        """Return the manifest of a version with a retired or revoked key if the next manifest names it as parent."""
        if above is None or not isinstance(error, SignatureError):
            return None
        found = revoked_manifest(self._run, version)
        return found if found is not None and found.digest == above.parent else None

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
                if wrong_epoch or digest in named or above.version not in self.confirmed:
                    # In each of these cases, the manifest above is the bad one.
                    self._add(above.version, Finding(version_key(above.version), error, above.version))
                    for known in (self.digests, self.fingerprints):
                        known.pop(above.version, None)
                    above = manifest if wrong_epoch else None
                else:
                    self._add(version, Finding(version_key(version), error, version))
                    return False
        if above is None and named and digest not in named:
            other, key = next(iter(named.items()))
            contradiction = ChainError(
                f"{key} points at manifest {other} as version {version}, which has digest {digest}: one of them was "
                "rewritten"
            )
            self._add(version, Finding(version_key(version), contradiction, version))
            return False
        if above is not None or digest in named:
            self.confirmed.add(version)
        return True

    # Documents that name a version

    def _check_references(self, head: Head | None) -> None:
        error: DeltaSyncError
        if head is not None and self.digests.get(head.version, head.manifest) != head.manifest:
            error = ChainError(
                f"{HEAD_KEY} points at manifest {head.manifest} as version {head.version}, which has digest "
                f"{self.digests[head.version]}: {HEAD_KEY} was rewritten"
            )
            self._add(_FIRST, Finding(HEAD_KEY, error, head.version))
        for key, version, digest, fingerprint in self._references:
            if version > self.top:
                self._add(_LAST, Finding(key, NotFoundError(f"{key} names version {version}, which does not exist")))
            elif self.digests.get(version, digest) != digest:
                error = ChainError(
                    f"{key} names manifest {digest} as version {version}, which has digest {self.digests[version]}"
                )
                self._add(_LAST, Finding(key, error, version))
            elif fingerprint is not None and self.fingerprints.get(version, fingerprint) != fingerprint:
                error = FingerprintError(
                    f"{key} gives version {version} fingerprint {fingerprint}, its manifest says "
                    f"{self.fingerprints[version]}"
                )
                self._add(_LAST, Finding(key, error, version))

    def _check_claims(self) -> None:
        error: DeltaSyncError
        damaged = {finding.key for _, finding in self._found}
        for epoch, first in self.epochs.items():
            key = claim_key(epoch)
            if epoch == 0 or key in damaged:
                continue
            claim = self._claims.get(epoch)
            if claim is None:
                error = NotFoundError(f"version {first} is of epoch {epoch}, and {key} is missing")
                self._add(_LAST, Finding(key, error, first))
            elif claim.version >= first:
                error = ChainError(
                    f"{key} was written after version {claim.version}, but version {first} is already of its epoch"
                )
                self._add(_LAST, Finding(key, error, first))

    def usable_merged_deltas(self) -> list[tuple[int, int]]:
        """Return (first, last) of merged deltas without a finding, ascending."""
        damaged = {finding.key for _, finding in self._found}
        return sorted(pair for pair in self.folds if merged_delta_key(*pair) not in damaged)

    def usable_anchors(self) -> set[int]:
        """Return the versions with a standalone anchor that has no finding."""
        damaged = {finding.key for _, finding in self._found}
        return {version for version in self.anchors if anchor_key(version) not in damaged}


def _outcome(read: Callable[[], _Found]) -> _Found | DeltaSyncError:
    """Return the result of a read, or the error that it raises, except StoreError."""
    try:
        return read()
    except StoreError:
        raise
    except DeltaSyncError as error:
        return error


_FIRST, _LAST = -1, limits.MAX_VERSION + 1
