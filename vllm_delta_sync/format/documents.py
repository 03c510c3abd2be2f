"""The JSON documents beside the chain: anchors, folded ranges, tags, claims of writers, leases, what is gone.

None of them commits anything. What they say is bound to the chain by digests of manifests and by fingerprints, and a
run reads correctly without any of them.
"""

import re
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import (
    Count,
    Digest,
    Document,
    FormatVersion,
    Hex32,
    Manifest,
    ObjectRef,
    PublicKey,
    Timestamp,
    Version,
    timestamp,
)

ANCHORS_PREFIX = "anchors/"
FOLDS_PREFIX = "folds/"
TAGS_PREFIX = "tags/"
CLAIMS_PREFIX = "claims/"
LEASES_PREFIX = "receivers/"
TURNS_PREFIX = "turns/"
COLLECTIONS_PREFIX = "collections/"
COLLECTIONS_CLOCK = "collections/clock"
"""Overwritten to ask for the store's time; its content means nothing."""
RETENTION_KEY = "retention.json"
KEYS_KEY = "keys.json"

TAG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
RECEIVER_ID = TAG_NAME

_ANCHOR = re.compile(r"anchors/([0-9]{10})\.json")
_FOLD = re.compile(r"folds/([0-9]{10})-([0-9]{10})\.json")
_CLAIM = re.compile(r"claims/([0-9]{10})\.json")
_TAG = re.compile(r"tags/(.+)\.json")
_TURN = re.compile(r"turns/([0-9]{2})/([0-9]{10})\.(json|end)")
PAUSE_SLOT_END = b"{}"
"""Content of ``turns/<s>/<n>.end``, which means nothing: that it is there does."""
_COLLECTION = re.compile(r"collections/([0-9]{10})\.(json|end)")
COLLECTION_END = b"{}"
"""Content of ``collections/<n>.end``, which means nothing either."""

Range = Annotated[list[Version], Field(min_length=2, max_length=2)]
Objects = Annotated[list[ObjectRef], Field(max_length=limits.MAX_OBJECTS_PER_VERSION)]


def anchor_key(version: int) -> str:
    """Key of the anchor made for a version."""
    return f"{ANCHORS_PREFIX}{version:010d}.json"


def merged_delta_key(first: int, last: int) -> str:
    """Key of the folded range that leads from version ``first`` to ``last``."""
    return f"{FOLDS_PREFIX}{first:010d}-{last:010d}.json"


def claim_key(epoch: int) -> str:
    """Key of the claim that began an epoch."""
    return f"{CLAIMS_PREFIX}{epoch:010d}.json"


def tag_key(name: str) -> str:
    """Key of a tag.

    Raises:
        UsageError: the name cannot be a tag's.
    """
    return f"{TAGS_PREFIX}{_checked('tag', name)}.json"


def lease_key(receiver: str) -> str:
    """Key of a receiver's lease.

    Raises:
        UsageError: the name cannot be a receiver's.
    """
    return f"{LEASES_PREFIX}{_checked('receiver id', receiver)}.json"


def pause_slot_key(slot: int, number: int) -> str:
    """Key of claim number ``number`` on a slot."""
    return f"{TURNS_PREFIX}{slot:02d}/{number:010d}.json"


def pause_slot_end_key(slot: int, number: int) -> str:
    """Key of what says that a claim on a slot is over."""
    return f"{TURNS_PREFIX}{slot:02d}/{number:010d}.end"


def pause_slot_of_key(key: str) -> tuple[int, int, bool] | None:
    """Slot and number of a claim, and whether the key is of its end; None for any other key."""
    match = _TURN.fullmatch(key)
    return (int(match[1]), int(match[2]), match[3] == "end") if match else None


def collection_key(number: int) -> str:
    """Key of claim number ``number`` of a collection."""
    return f"{COLLECTIONS_PREFIX}{number:010d}.json"


def collection_end_key(number: int) -> str:
    """Key of the object that ends a claim of a collection."""
    return f"{COLLECTIONS_PREFIX}{number:010d}.end"


def collection_of_key(key: str) -> tuple[int, bool] | None:
    """Number of a collection's claim, and whether the key is of its end; None for any other key."""
    match = _COLLECTION.fullmatch(key)
    return (int(match[1]), match[2] == "end") if match else None


def anchor_of_key(key: str) -> int | None:
    """Inverse of ``anchor_key``; None for any other key."""
    match = _ANCHOR.fullmatch(key)
    return int(match[1]) if match else None


def merged_delta_of_key(key: str) -> tuple[int, int] | None:
    """Inverse of ``merged_delta_key``; None for any other key."""
    match = _FOLD.fullmatch(key)
    return (int(match[1]), int(match[2])) if match else None


def claim_of_key(key: str) -> int | None:
    """Inverse of ``claim_key``; None for any other key."""
    match = _CLAIM.fullmatch(key)
    return int(match[1]) if match else None


def tag_of_key(key: str) -> str | None:
    """Inverse of ``tag_key``; None for any other key."""
    match = _TAG.fullmatch(key)
    return match[1] if match and TAG_NAME.fullmatch(match[1]) else None


def _checked(what: str, name: str) -> str:
    if not TAG_NAME.fullmatch(name):
        raise UsageError(
            f"{what} {name[:80]!r} is not a name: give 1 to 100 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"
        )
    return name


class Anchor(Document):
    """anchors/<n>.json: all tensors of a version of the chain, so that nobody has to replay it.

    Attributes:
        manifest: digest of versions/<n>.json. fingerprint, tensor_fingerprints: of the version.
        objects: shards that together hold each tensor of the table once.
    """

    KIND = "anchor"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    version: Version
    manifest: Digest
    objects: Objects
    payload_bytes: Count
    fingerprint: Hex32
    tensor_fingerprints: dict[str, Hex32]
    created_at: Timestamp

    @classmethod
    def of(cls, manifest: Manifest, tensor_fingerprints: dict[str, str], objects: list[ObjectRef]) -> Self:
        """The document of an anchor made now, of the version of a manifest."""
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
        _check_objects(self.objects, self.payload_bytes)
        return self

    @property
    def model_fingerprint(self) -> Fingerprint:
        return Fingerprint.from_hex(self.fingerprint)


class MergedDelta(Document):
    """folds/<a>-<b>.json: everything that leads from version a to version b, folded into one delta.

    Attributes:
        first, last: a and b. first_manifest, last_manifest: digests of their manifests.
        first_fingerprint, last_fingerprint: of the model at a and at b.
        objects: delta objects whose ``base_version`` is a and whose ``version`` is b.
        changed: elements that the objects carry. reversible: whether they are all distances.
    """

    KIND = "fold"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
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
    created_at: Timestamp

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        _check_objects(self.objects, self.payload_bytes)
        if self.first >= self.last:
            raise ValueError("first does not precede last")
        return self


class Tag(Document):
    """tags/<name>.json: a name for a version, which retention keeps. May be overwritten and deleted.

    Attributes:
        name: as in the key, so that a signed tag cannot be copied to another name.
        manifest: digest of the version's manifest. milestone: whether the version gets an anchor of its own.
        branch: URL of a run that begins at this version and needs it; null for a tag that somebody set.
    """

    KIND = "tag"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    version: Version
    manifest: Digest
    milestone: bool = False
    branch: Annotated[str, Field(max_length=4096)] | None = None
    created_at: Timestamp


class Claim(Document):
    """claims/<e>.json: a writer took the run over, and with it began epoch e. Written create-if-absent.

    Attributes:
        version, manifest: the newest version that it found, and its digest.
        writer: random, names the writer.
    """

    KIND = "claim"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    epoch: Count
    version: Version
    manifest: Digest
    writer: Hex32
    created_at: Timestamp


class LeaseError(BaseModel):
    """What went wrong last at a receiver: the kind of error, and the beginning of its message."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    kind: Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,39}$")]
    message: Annotated[str, Field(max_length=limits.MAX_LEASE_TEXT)]


class Lease(Document):
    """receivers/<id>.json: what a receiver serves, and for how long that is to be believed. A hint.

    Attributes:
        served: version, null before one is proven. target: version on its way to, null if none.
        pins: further versions that must stay readable. seconds: how long it holds, from when it was written.
        step: of the version served. head: newest version known. lag: versions behind what following leads to.
        state: as in the status; ``left`` when the receiver has ended.
        following: what it was told to serve: ``head``, a number or ``tag:NAME``. holding: whether it stays there.
        waiting: for its turn to pause. paused: between asking for a pause and its end.
        started_at: by the receiver's clock. error: what failed last, null once something has succeeded.
        pause_ms: how long generation stood still at the last commit.
    """

    KIND = "lease"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    receiver: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    served: Version | None
    target: Version | None = None
    pins: Annotated[list[Version], Field(default_factory=list, max_length=limits.MAX_LEASE_PINS)]
    seconds: Annotated[int, Field(ge=1, le=limits.MAX_LEASE_SECONDS)]
    step: Count | None = None
    head: Version | None = None
    lag: Count | None = None
    state: Annotated[str, Field(pattern=r"^[a-z][a-z_]{0,39}$")] | None = None
    following: Annotated[str, Field(pattern=r"^(head|[0-9]{1,10}|tag:[A-Za-z0-9][A-Za-z0-9._-]{0,99})$")] | None = None
    holding: bool = False
    waiting: bool = False
    paused: bool = False
    started_at: Timestamp | None = None
    error: LeaseError | None = None
    pause_ms: Annotated[float, Field(ge=0, le=1e9)] | None = None
    created_at: Timestamp


class PauseSlotClaim(Document):
    """turns/<s>/<n>.json: a receiver claims slot s of those in which servers of a run may pause. Create-if-absent.

    Attributes:
        slot, number: as in the key. receiver: who claims it. holder: random, names this claim.
        version: what the receiver is about to serve. seconds: how long the claim holds, from when it was written,
            unless turns/<s>/<n>.end says before that it is over.
    """

    KIND = "turn"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    slot: Annotated[int, Field(ge=0, lt=limits.MAX_SLOTS)]
    number: Annotated[int, Field(ge=1, le=limits.MAX_VERSION)]
    receiver: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
    holder: Hex32
    version: Version
    seconds: Annotated[int, Field(ge=1, le=limits.MAX_TURN_SECONDS)]
    created_at: Timestamp


class Collection(Document):
    """collections/<n>.json: the claim of a collection, of which only one may remove things at a time. Create-if-absent.

    Attributes:
        number: as in the key. holder: random, names the collection. seconds: how long the claim holds, from when it was
            written, unless collections/<n>.end ends it before.
    """

    KIND = "collection"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    number: Annotated[int, Field(ge=1, le=limits.MAX_VERSION)]
    holder: Hex32
    seconds: Annotated[int, Field(ge=1, le=limits.MAX_COLLECTION_SECONDS)]
    created_at: Timestamp


class Retention(Document):
    """retention.json: what was removed, and what is about to be. A hint; readers need no more of it than ``gone``.

    Attributes:
        gone: closed ranges [a, b], ascending, apart, of versions whose own objects were removed, so that nobody plans
            a way through them.
        going: keys of anchors and folded ranges that are about to be removed; empty once they are.
        head: newest version that the collection saw; null before the first.
        kept: closed ranges of the versions that can be rebuilt after it, or should be and cannot. One of them that
            cannot be rebuilt later was damaged; any other up to ``head`` was given up.
    """

    KIND = "retention"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    gone: Annotated[list[Range], Field(max_length=limits.MAX_RANGES)]
    going: list[str] = Field(default_factory=list, max_length=limits.MAX_RANGES)
    head: Version | None = None
    kept: list[Range] = Field(default_factory=list, max_length=limits.MAX_RANGES)
    created_at: Timestamp

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        edges = [edge for pair in self.gone for edge in pair]
        if any(a > b for a, b in self.gone) or edges != sorted(edges):
            raise ValueError("gone is not a list of ascending ranges")
        if any(left[1] + 1 >= right[0] for left, right in zip(self.gone, self.gone[1:], strict=False)):
            raise ValueError("gone has ranges that touch")
        return self

    def is_gone(self, version: int) -> bool:
        """Whether a version's own objects were removed."""
        return any(a <= version <= b for a, b in self.gone)

    def gave_up(self, version: int) -> bool:
        """Whether a collection let go of a version on purpose."""
        return self.head is not None and version <= self.head and not any(a <= version <= b for a, b in self.kept)


class KeyValidity(BaseModel):
    """Up to which version a key's word holds, along the chain that leads to that version's manifest."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    version: Version
    manifest: Digest


class KeyEntry(BaseModel):
    """What a key may sign.

    Attributes:
        last: null for a key in use; where it is retired or revoked, the last version that it holds for, null for none.
        revoked: somebody else may have it. Of what it signed only the manifests up to ``last`` hold, and they because
            the chain leads to them.
    """

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")
    key: PublicKey
    last: KeyValidity | None = None
    revoked: bool = False


class KeyFile(Document):
    """keys.json: which keys may sign the run, besides those that a reader trusts anyhow, and which may no more.

    Attributes:
        info: digest of run.json, which holds whoever has signed it.
        sequence: grows with every change; a reader refuses one that is older than what it has seen.
        signature: of a key that the reader was told to trust; one that is only listed here may not change the list.
    """

    KIND = "keys"
    format_version: FormatVersion = 1
    requires: list[str] = Field(default_factory=list)
    run: Hex32
    info: Digest
    sequence: Annotated[int, Field(ge=1, le=2**53 - 1)]
    keys: Annotated[list[KeyEntry], Field(max_length=limits.MAX_KEYS)]
    created_at: Timestamp

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if len({entry.key for entry in self.keys}) != len(self.keys):
            raise ValueError("a key is listed twice")
        return self

    def entry(self, key: str) -> KeyEntry | None:
        """What it says of a key, if anything."""
        return next((entry for entry in self.keys if entry.key == key), None)


def _check_objects(objects: list[ObjectRef], payload_bytes: int) -> None:
    if payload_bytes != sum(item.bytes for item in objects):
        raise ValueError("payload_bytes is not the sum of the objects' bytes")
    if len({item.key for item in objects}) != len(objects):
        raise ValueError("an object is listed twice")
