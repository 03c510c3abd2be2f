"""The JSON documents besides manifests: ``Anchor``, ``MergedDelta``, ``Tag``, ``Claim``, ``Heartbeat`` …

None of them commits a version. Digests of manifests and fingerprints bind them to versions. A run can be read without
any of them.
"""

import itertools
import re
from typing import Annotated, NamedTuple, Self

from pydantic import Field, model_validator

from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import (
    FILE_NAME,
    Count,
    DatedDocument,
    Digest,
    DocumentPart,
    FileName,
    Hex32,
    TensorFingerprints,
    Timestamp,
    Version,
    timestamp,
)
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, check_objects

ANCHORS_PREFIX = "anchors/"
MERGED_PREFIX = "merged/"
TAGS_PREFIX = "tags/"
CLAIMS_PREFIX = "claims/"
HEARTBEATS_PREFIX = "heartbeats/"
COLLECTIONS_PREFIX = "collections/"
COLLECTIONS_CLOCK = "collections/clock"
"""Key that is overwritten to read the store's clock; the content has no meaning."""
RETENTION_KEY = "retention.json"

TAG_NAME = re.compile(FILE_NAME)
RECEIVER_ID = TAG_NAME

_ANCHOR = re.compile(r"anchors/([0-9]{10})\.json")
_MERGED = re.compile(r"merged/([0-9]{10})-([0-9]{10})\.json")
_CLAIM = re.compile(r"claims/([0-9]{10})\.json")
_TAG = re.compile(r"tags/(.+)\.json")
_COLLECTION = re.compile(r"collections/([0-9]{10})\.(json|end)")
COLLECTION_END = b"{}"
"""Content of ``collections/<n>.end``; only the object's existence matters."""

Range = Annotated[list[Version], Field(min_length=2, max_length=2)]
Objects = Annotated[list[ObjectRef], Field(max_length=limits.MAX_OBJECTS_PER_VERSION)]


def anchor_key(version: int) -> str:
    """Return the key of the anchor of a version."""
    return f"{ANCHORS_PREFIX}{version:010d}.json"


def merged_delta_key(first: int, last: int) -> str:
    """Return the key of the merged delta from version ``first`` to ``last``."""
    return f"{MERGED_PREFIX}{first:010d}-{last:010d}.json"


def shared_digits(one: int, other: int) -> str:
    """Return what the ten digits of two versions begin with, and so the keys of merged deltas between them."""
    pairs = zip(f"{one:010d}", f"{other:010d}", strict=True)
    return "".join(digit for digit, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def claim_key(epoch: int) -> str:
    """Return the key of the claim that started an epoch."""
    return f"{CLAIMS_PREFIX}{epoch:010d}.json"


def tag_key(name: str) -> str:
    """Return the key of a tag. Raises UsageError if its name is malformed."""
    return f"{TAGS_PREFIX}{_checked('tag', name)}.json"


def heartbeat_key(receiver: str) -> str:
    """Return the key of a receiver's heartbeat. Raises UsageError if its id is malformed."""
    return f"{HEARTBEATS_PREFIX}{_checked('receiver id', receiver)}.json"


def collection_key(number: int) -> str:
    """Return the key of garbage collection number ``number``."""
    return f"{COLLECTIONS_PREFIX}{number:010d}.json"


def collection_end_key(number: int) -> str:
    """Return the key of the object that ends a garbage collection."""
    return f"{COLLECTIONS_PREFIX}{number:010d}.end"


def collection_of_key(key: str) -> tuple[int, bool] | None:
    """Return (number, whether the key is that of its end) of a garbage collection; None for any other key."""
    match = _COLLECTION.fullmatch(key)
    return (int(match[1]), match[2] == "end") if match else None


def anchor_of_key(key: str) -> int | None:
    """Inverse of ``anchor_key``; None for any other key."""
    return _number(_ANCHOR, key)


def merged_delta_of_key(key: str) -> tuple[int, int] | None:
    """Inverse of ``merged_delta_key``; None for any other key."""
    match = _MERGED.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def claim_of_key(key: str) -> int | None:
    """Inverse of ``claim_key``; None for any other key."""
    return _number(_CLAIM, key)


def tag_of_key(key: str) -> str | None:
    """Inverse of ``tag_key``; None for any other key."""
    match = _TAG.fullmatch(key)
    return match[1] if match and TAG_NAME.fullmatch(match[1]) else None


def _number(form: re.Pattern[str], key: str) -> int | None:
    match = form.fullmatch(key)
    return int(match[1]) if match else None


def _checked(what: str, name: str) -> str:
    if not TAG_NAME.fullmatch(name):
        raise UsageError(
            f"{what} {name[:80]!r} is not a name: use 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
        )
    return name


class Anchor(DatedDocument):
    """anchors/<n>.json: all tensors of a version, so that readers need not replay its history.

    Attributes:
        manifest: digest of versions/<n>.json. fingerprint, tensor_fingerprints: of the version.
        objects: shards that together contain each tensor of the table once.
    """

    KIND = "anchor"
    version: Version
    manifest: Digest
    objects: Objects
    payload_bytes: Count
    fingerprint: Hex32
    tensor_fingerprints: TensorFingerprints

    @classmethod
    def of(cls, manifest: Manifest, tensor_fingerprints: dict[str, str], objects: list[ObjectRef]) -> Self:
        """Return a new anchor document for the version of a manifest."""
        return cls(
            run=manifest.run,
            version=manifest.version,
            manifest=manifest.digest,
            objects=objects,
            payload_bytes=sum(ref.bytes for ref in objects),
            fingerprint=manifest.fingerprint,
            tensor_fingerprints=tensor_fingerprints,
            created_at=timestamp(),
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_objects(self.objects, self.payload_bytes)
        return self

    @property
    def model_fingerprint(self) -> Fingerprint:
        return Fingerprint.from_hex(self.fingerprint)


class MergedDelta(DatedDocument):
    """merged/<a>-<b>.json: one delta that leads from version a to version b.

    Attributes:
        first, last: a and b. first_manifest, last_manifest: digests of their manifests.
        first_fingerprint, last_fingerprint: of the model at a and at b.
        objects: delta objects with ``base_version`` a and ``version`` b.
        changed: elements in the objects. reversible: whether all of them are distances.
    """

    KIND = "merged-delta"
    first: Version
    last: Version
    first_manifest: Digest
    last_manifest: Digest
    first_fingerprint: Hex32
    last_fingerprint: Hex32
    objects: Objects
    changed: Count
    payload_bytes: Count
    reversible: bool

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        check_objects(self.objects, self.payload_bytes)
        if self.first >= self.last:
            raise ValueError("first does not precede last")
        return self


class Tag(DatedDocument):
    """tags/<name>.json: a name for a version, which is then retained. Tags may be overwritten and deleted.

    Attributes:
        name: as in the key, so that a signed tag cannot be copied to another name.
        manifest: digest of the version's manifest. milestone: whether the version gets its own anchor.
        branch: URL of a run that branches from this version and needs it; null for a user's tag.
    """

    KIND = "tag"
    name: FileName
    version: Version
    manifest: Digest
    milestone: bool = False
    branch: Annotated[str, Field(max_length=4096)] | None = None


class Claim(DatedDocument):
    """claims/<e>.json: a writer's takeover of the run, which starts epoch e. Written create-if-absent.

    Attributes:
        version, manifest: newest version at the takeover, and its manifest's digest.
        writer: random id of the writer.
    """

    KIND = "claim"
    epoch: Count
    version: Version
    manifest: Digest
    writer: Hex32


class ReportedError(DocumentPart):
    """Last error of a receiver: its kind, and the beginning of its message."""

    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    message: Annotated[str, Field(max_length=limits.MAX_HEARTBEAT_TEXT)]


class Heartbeat(DatedDocument):
    """heartbeats/<id>.json: a receiver's heartbeat, which says what it serves and how long that is valid. A hint.

    Attributes:
        served: version, null until its weights are identified. target: version that it is moving to, null if none.
        pins: further versions that must stay readable. seconds: validity, from the time of writing.
        step: of the served version. head: newest known version. lag: versions behind the target that it follows.
        state: as in the status; ``left`` after the receiver has ended.
        following: the configured target: ``head``, a number or ``tag:NAME``. holding: whether a hold is in force.
        paused: from the request of a pause to its end.
        started_at: by the receiver's clock. error: the last failure, null after a success.
        pause_ms: duration of the last commit's pause.
    """

    KIND = "heartbeat"
    receiver: FileName
    served: Version | None
    target: Version | None = None
    pins: Annotated[list[Version], Field(default_factory=list, max_length=limits.MAX_HEARTBEAT_PINS)]
    seconds: Annotated[int, Field(ge=1, le=limits.MAX_HEARTBEAT_SECONDS)]
    step: Count | None = None
    head: Version | None = None
    lag: Count | None = None
    state: Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,39}$")] | None = None
    following: Annotated[str, Field(pattern=r"^(head|[0-9]{1,10}|tag:[A-Za-z0-9][A-Za-z0-9._-]{0,99})$")] | None = None
    holding: bool = False
    paused: bool = False
    started_at: Timestamp | None = None
    error: ReportedError | None = None
    pause_ms: Annotated[float, Field(ge=0, le=1e9)] | None = None


class Collection(DatedDocument):
    """collections/<n>.json: a garbage collection's claim, so that only one runs at a time. Create-if-absent.

    Attributes:
        number: as in the key. holder: random id of the collection. seconds: validity, from the time of writing;
            collections/<n>.end ends the claim earlier.
    """

    KIND = "collection"
    number: Annotated[int, Field(ge=1, le=limits.MAX_VERSION)]
    holder: Hex32
    seconds: Annotated[int, Field(ge=1, le=limits.MAX_COLLECTION_SECONDS)]


class Retention(DatedDocument):
    """retention.json: what garbage collections removed, and what the current one is about to remove. A hint.

    Attributes:
        gone: closed ranges [a, b], ascending and not adjacent, of versions whose own objects were removed. Planners
            avoid them; other readers need no other field.
        going: keys of anchors and merged deltas that are about to be removed; empty afterwards.
        head: newest version at the last collection; null before the first one.
        kept: closed ranges of the versions that the last collection retained. If one of them cannot be rebuilt, it was
            damaged; every other version up to ``head`` was removed on purpose.
    """

    KIND = "retention"
    gone: Annotated[list[Range], Field(max_length=limits.MAX_RANGES)]
    going: list[str] = Field(default_factory=list, max_length=limits.MAX_RANGES)
    head: Version | None = None
    kept: list[Range] = Field(default_factory=list, max_length=limits.MAX_RANGES)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        edges = [edge for pair in self.gone for edge in pair]
        if any(a > b for a, b in self.gone) or edges != sorted(edges):
            raise ValueError("gone is not a list of ascending ranges")
        if any(left[1] + 1 >= right[0] for left, right in zip(self.gone, self.gone[1:], strict=False)):
            raise ValueError("gone has adjacent or overlapping ranges")
        return self

    def is_gone(self, version: int) -> bool:
        """Return whether a version's own objects were removed."""
        return any(a <= version <= b for a, b in self.gone)

    def gave_up(self, version: int) -> bool:
        """Return whether a garbage collection removed the version on purpose."""
        return self.head is not None and version <= self.head and not any(a <= version <= b for a, b in self.kept)


Standalone = Anchor | MergedDelta | Tag | Claim | Retention
"""A document beside the chain of manifests."""


class NamedVersion(NamedTuple):
    """A version that a document names: with its manifest's digest, and the model's fingerprint if that is named."""

    version: int
    digest: str
    fingerprint: str | None


def named_versions(document: Standalone) -> list[NamedVersion]:
    """Return the versions that a document names; a retention record only lists numbers, so it names none."""
    if isinstance(document, Retention):
        return []
    if isinstance(document, MergedDelta):
        return [
            NamedVersion(document.first, document.first_manifest, document.first_fingerprint),
            NamedVersion(document.last, document.last_manifest, document.last_fingerprint),
        ]
    fingerprint = document.fingerprint if isinstance(document, Anchor) else None
    return [NamedVersion(document.version, document.manifest, fingerprint)]
