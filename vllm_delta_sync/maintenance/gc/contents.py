"""``survey`` reads everything that a run's bucket holds, for a collection."""

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DataError,
    DeltaSyncError,
    NotFoundError,
    SignatureError,
    UnsupportedError,
)
from vllm_delta_sync.fleet.heartbeats import Heartbeats, read_heartbeats
from vllm_delta_sync.format.documents import (
    ANCHORS_PREFIX,
    MERGED_PREFIX,
    TAGS_PREFIX,
    Anchor,
    MergedDelta,
    Retention,
    Tag,
    named_versions,
)
from vllm_delta_sync.format.manifest import (
    OBJECTS_PREFIX,
    SIDECARS_PREFIX,
    VERSIONS_PREFIX,
    Manifest,
    ObjectRef,
    version_key,
    version_of_key,
)
from vllm_delta_sync.run.graph import ROOT, Edge, VersionGraph, contradicted, contradiction
from vllm_delta_sync.run.run_reader import RunReader, read_ahead
from vllm_delta_sync.run.service_policy import ServicePolicy, may_be_served

_OBJECT = re.compile(re.escape(OBJECTS_PREFIX) + r"[0-9a-f]{64}\.safetensors")
_SIDECAR = re.compile(re.escape(SIDECARS_PREFIX) + r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Listed:
    """A document that lists objects: a manifest, a standalone anchor, or a merged delta.

    Attributes:
        info: of the document. start, end: versions that it leads from (``ROOT`` if none) and to.
        refs: (key, bytes) of its objects. reversible: whether it can be reverted.
        digest, parent, epoch, fingerprint, sidecars (keys): of a manifest. sound, exact: whether servers accept it by
            default, and with ``require_exact``. lost: why a damaged manifest cannot be read.
    """

    info: ObjectInfo
    start: int
    end: int
    refs: tuple[tuple[str, int], ...]
    reversible: bool = False
    digest: str = ""
    parent: str | None = None
    epoch: int = 0
    fingerprint: str = ""
    sound: bool = True
    exact: bool = True
    sidecars: tuple[str, ...] = ()
    lost: DataError | None = None

    @property
    def key(self) -> str:
        return self.info.key

    @property
    def version(self) -> int:
        return self.end

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.refs)


@dataclass
class RunContents:
    """Everything that a run's bucket holds.

    Attributes:
        history: manifests by version; the last is the head. standalone: anchors and merged deltas.
        unrelated: documents that do not fit the history. unreadable: key of a document → why it cannot be read.
        tags: by name. heartbeats: heartbeats of receivers.
        objects, sidecars: by key; only keys that have the form of an object's or sidecar's.
        notes: for the operator.
    """

    history: list[Listed] = field(default_factory=list)
    standalone: list[Listed] = field(default_factory=list)
    unrelated: list[Listed] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    tags: dict[str, Tag] = field(default_factory=dict)
    heartbeats: Heartbeats = field(default_factory=Heartbeats)
    objects: dict[str, ObjectInfo] = field(default_factory=dict)
    sidecars: dict[str, ObjectInfo] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def head(self) -> int:
        return len(self.history) - 1

    @property
    def sound(self) -> int | None:
        """Newest version that is not quarantined; None if there is none."""
        return next((document.end for document in reversed(self.history) if document.sound), None)

    @property
    def exact(self) -> int | None:
        """Newest version that servers with ``require_exact`` accept; ``sound`` in a run without byte budgets."""
        return next((document.end for document in reversed(self.history) if document.exact), None)

    def is_complete(self, document: Listed) -> bool:
        """Return whether all objects of a document are stored with their declared sizes."""
        return document.lost is None and all(
            key in self.objects and self.objects[key].bytes == size for key, size in document.refs
        )

    def newest(self, document: Listed) -> float:
        """Return when the document or one of its objects was last put."""
        stored = (self.objects[key].modified for key, _ in document.refs if key in self.objects)
        return max(document.info.modified, max(stored, default=0.0))

    def documents(self) -> list[Listed]:
        """Return the documents that are complete and that readers use."""
        return [item for item in (*self.history, *self.standalone) if self.is_complete(item)]


def graph_of(documents: Iterable[Listed], unsettled: Callable[[Listed], bool] = lambda document: False) -> VersionGraph:
    """Return the graph of documents. Args: unsettled: whether a way uses a document only where there is no other."""
    return VersionGraph(
        Edge(
            item.key,
            item.start,
            item.end,
            item.bytes,
            item.reversible and item.start != ROOT,
            unsettled(item),
        )
        for item in documents
    )


def survey(run: RunReader, known: RunContents | None = None, record: Retention | None = None) -> RunContents:
    """Read each document of the run once, then list its objects.

    Documents come first: writers put objects before the document that lists them, so the later listing has them.

    Args:
        known: an earlier survey; documents not put again since then are not read again.
        record: retention.json of the last collection. Objects for which it contradicts the listing are checked one by
            one, because a listing may lag.

    Raises:
        NotFoundError: nothing is published. ConflictError: another run took the URL meanwhile.
        DeltaSyncError: a manifest or a tag cannot be read. StoreError: the store failed.
    """
    known_documents = {document.info: document for document in (*known.history, *known.standalone)} if known else {}
    found = RunContents()
    found.history = _read_history(run, known_documents)
    found.notes += [
        f"version {item.end} is lost for good, as a publisher continued after its damaged manifest: {item.lost.message}"
        for item in found.history
        if item.lost is not None
    ]
    _read_standalone(run, found, known_documents)
    found.tags = _tags(run, found.notes)
    found.heartbeats = read_heartbeats(run)
    found.notes += [f"heartbeat ignored: {reason}" for reason in found.heartbeats.ignored]
    found.objects = {item.key: item for item in run.bucket.list(OBJECTS_PREFIX) if _OBJECT.fullmatch(item.key)}
    found.sidecars = {item.key: item for item in run.bucket.list(SIDECARS_PREFIX) if _SIDECAR.fullmatch(item.key)}
    _recheck_listing(run, found, record)
    check_current(run)
    return found


def check_current(run: RunReader) -> None:
    """Raise ConflictError if another run took the URL, NotFoundError if there is no run any more."""
    if not run.is_current():
        raise ConflictError(f"{run.bucket.url} no longer holds run {run.info.run} but another; open it again")


def _recheck_listing(run: RunReader, found: RunContents, record: Retention | None) -> None:
    """Check one by one the objects that are unexpectedly missing from the listing, or unexpectedly in it."""

    def stat(key: str) -> ObjectInfo | None:
        try:
            return run.bucket.stat(key)
        except NotFoundError:
            return None

    removed = {document.end for document in found.history if record is not None and record.is_gone(document.end)}
    expected = {key: document.end not in removed for document in found.history for key, _ in document.refs}
    expected |= {key: True for document in found.standalone for key, _ in document.refs}
    doubtful = sorted(key for key, stored in expected.items() if stored != (key in found.objects))
    for key, info in zip(doubtful, in_parallel(stat, doubtful), strict=True):
        if info is None:
            found.objects.pop(key, None)
        else:
            found.objects[key] = info


def _read_history(run: RunReader, known_documents: dict[ObjectInfo, Listed]) -> list[Listed]:
    head = run.head().version
    items = run.bucket.list(VERSIONS_PREFIX)
    listed = {number: item for item in items if (number := version_of_key(item.key)) is not None}
    if max(listed, default=0) > head:
        head = run.head().version  # the head moved while the listing was made
    lost = _find_unlisted(run, head, listed)
    if lost is not None or max(listed) > head:
        what = f"{version_key(lost)} is missing" if lost is not None else "there are manifests after the head"
        raise ChainError(f"{what}: gc removes nothing from a history with holes; run `delta-sync repair`")

    def document_of(version: int) -> Listed:
        info = listed[version]
        if info in known_documents:
            return known_documents[info]
        data: bytes | None = None
        try:
            data = run.raw_manifest(version, run.document_limit)
            return _of_manifest(run.parsed_manifest(version, data), info)
        except DataError as error:
            if data is None or isinstance(error, SignatureError | UnsupportedError):
                raise _unreadable(info.key, error) from error
            digest = sha256(data).hexdigest()
            return Listed(info, version, version, (), digest=digest, sound=False, exact=False, lost=error)

    history = list(read_ahead(document_of, range(head + 1)))
    for item, following in zip(history, [*history[1:], None], strict=True):
        # A damaged manifest is lost for good once a publisher has continued after it: no other fits in its place.
        if item.lost is not None and (following is None or following.parent != item.digest):
            raise _unreadable(item.key, item.lost) from item.lost
    _, wrong = contradicted(history, {})
    if wrong:
        raise ChainError(f"{version_key(min(wrong))} {wrong[min(wrong)]}")
    return history


def _find_unlisted(run: RunReader, head: int, listed: dict[int, ObjectInfo]) -> int | None:
    """Add manifests put during the listing, which it lacks; return the first missing version."""
    for version in range(head + 1):
        if version not in listed:
            try:
                listed[version] = run.bucket.stat(version_key(version))
            except NotFoundError:
                return version
    return None


def _of_manifest(manifest: Manifest, info: ObjectInfo) -> Listed:
    return Listed(
        info=info,
        start=ROOT if manifest.base_version is None else manifest.base_version,
        end=manifest.version,
        refs=_refs(manifest.objects),
        reversible=manifest.reversible,
        digest=manifest.digest,
        parent=manifest.parent,
        epoch=manifest.epoch,
        fingerprint=manifest.fingerprint,
        sound=may_be_served(manifest, ServicePolicy()),
        exact=may_be_served(manifest, ServicePolicy(exact=True)),
        sidecars=tuple(item.key for item in manifest.sidecars),
    )


def _refs(objects: Iterable[ObjectRef]) -> tuple[tuple[str, int], ...]:
    return tuple((item.key, item.bytes) for item in objects)


def _unreadable(key: str, error: DeltaSyncError) -> DeltaSyncError:
    return type(error)(
        f"{error.message}; {key} cannot be read, so what it needs is unknown and gc removes nothing: fix it first, a "
        "version with `delta-sync repair`, a tag with `delta-sync tag rm`"
    )


def _read_standalone(run: RunReader, found: RunContents, known_documents: dict[ObjectInfo, Listed]) -> None:
    listed = [item for prefix in (ANCHORS_PREFIX, MERGED_PREFIX) for item in run.bucket.list(prefix)]
    fresh = {item.key: item for item in listed if item not in known_documents}
    answers: dict[str, tuple[Listed, bool] | str] = {}
    for key, document in run.standalones(list(fresh)):
        # Not kept: an anchor has the fingerprints of all tensors, and an error what was read.
        if isinstance(document, Anchor | MergedDelta):
            answers[key] = _of_standalone(fresh[key], document, found.history)
        elif isinstance(document, DataError):
            answers[key] = document.message
    for item in listed:
        answer = (known_documents[item], True) if item in known_documents else answers.get(item.key)
        if isinstance(answer, str):
            found.unreadable[item.key] = answer
            found.notes.append(f"{item.key} cannot be read; it stays, and so do all unlisted objects: {answer}")
        elif answer is not None:
            listing, fits = answer
            (found.standalone if fits else found.unrelated).append(listing)
    found.notes += [f"{document.key} does not fit the history, and stays" for document in found.unrelated]


def _of_standalone(item: ObjectInfo, document: Anchor | MergedDelta, history: list[Listed]) -> tuple[Listed, bool]:
    """Return an anchor or a merged delta, and whether it belongs to this history."""
    if isinstance(document, Anchor):
        listing = Listed(item, ROOT, document.version, _refs(document.objects))
    else:
        listing = Listed(item, document.first, document.last, _refs(document.objects), document.reversible)
    named = {at: history[at] for at, _, _ in named_versions(document) if at < len(history)}
    return listing, listing.end in named and contradiction(document, named) is None


def _tags(run: RunReader, notes: list[str]) -> dict[str, Tag]:
    found: dict[str, Tag] = {}
    for key, tag in run.standalones([item.key for item in run.bucket.list(TAGS_PREFIX)]):
        if isinstance(tag, ChainError):
            notes.append(f"tag ignored: {tag.message}")
        elif isinstance(tag, DataError):
            raise _unreadable(key, tag) from tag
        elif isinstance(tag, Tag):
            found[tag.name] = tag
    return found
