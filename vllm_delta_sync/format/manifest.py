"""``RunInfo`` (run.json), ``Manifest`` (versions/<n>.json) and ``Head`` (HEAD.json), with their keys and digests."""

import builtins
import re
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import (
    Count,
    DatedDocument,
    Digest,
    Document,
    DocumentPart,
    FileName,
    Hex32,
    TensorFingerprints,
    Timestamp,
    Version,
)
from vllm_delta_sync.format.fingerprint import Fingerprint

RUN_KEY = "run.json"
TABLE_KEY = "tensors.json"
HEAD_KEY = "HEAD.json"
VERSIONS_PREFIX = "versions/"
OBJECTS_PREFIX = "objects/"
SIDECARS_PREFIX = "sidecars/"
FILES_PREFIX = "files/"


def version_key(version: int) -> str:
    """Return the key of a version's manifest; ten digits, so that keys sort like versions."""
    return f"{VERSIONS_PREFIX}{version:010d}.json"


def object_key(digest: str) -> str:
    """Return the key of an object, named by its SHA-256."""
    return f"{OBJECTS_PREFIX}{digest}.safetensors"


def sidecar_key(digest: str) -> str:
    """Return the key of a sidecar, named by its SHA-256; below ``objects/``, older releases would remove it."""
    return f"{SIDECARS_PREFIX}{digest}"


def file_key(digest: str) -> str:
    """Return the key of a run file, named by its SHA-256."""
    return f"{FILES_PREFIX}{digest}"


class Stored(DocumentPart):
    """Immutable bytes in the bucket, under a key that contains their SHA-256.

    Attributes:
        KEY_FORM: of the key.
    """

    KEY_FORM: ClassVar[str]
    key: str
    bytes: Count
    sha256: Digest

    @model_validator(mode="after")
    def _named_by_digest(self) -> Self:
        if self.key != self.KEY_FORM.replace("<sha256>", self.sha256):
            raise ValueError(f"key is not {self.KEY_FORM}")
        return self

    @classmethod
    def of(cls, content: "builtins.bytes | Path", **fields: Any) -> Self:
        """Return the reference of bytes, or of a file. Args: fields: beside those of every reference."""
        if isinstance(content, Path):
            with content.open("rb") as file:
                size, digest = content.stat().st_size, file_digest(file, "sha256").hexdigest()
        else:
            size, digest = len(content), sha256(content).hexdigest()
        return cls(key=cls.KEY_FORM.replace("<sha256>", digest), bytes=size, sha256=digest, **fields)


class RunFile(Stored):
    """A small model file that all versions share, such as config.json or tokenizer.json. No weights.

    Attributes:
        name: file name; unique in a run.
    """

    KEY_FORM = "files/<sha256>"
    bytes: Annotated[int, Field(ge=0, le=limits.MAX_RUN_FILE_BYTES)]
    name: FileName


class RunInfo(DatedDocument):
    """run.json: describes the run; the first document written, and never changed.

    Attributes:
        tensors: SHA-256 of tensors.json.
        total: elements of all tensors. full_bytes: their bytes in the served dtypes.
        files: configuration, tokenizer and generation settings of the model; empty in runs of older publishers.
    """

    KIND = "run"
    OMITTED_IF_EMPTY = ("files",)
    tensors: Digest
    total: Count
    full_bytes: Count
    files: list[RunFile] = Field(default_factory=list, max_length=limits.MAX_RUN_FILES)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        # Some file systems ignore case in names.
        if len({item.name.lower() for item in self.files}) != len(self.files):
            raise ValueError("two files have the same name")
        if sum(item.bytes for item in self.files) > limits.MAX_RUN_FILES_BYTES:
            raise ValueError(f"files have more than {limits.MAX_RUN_FILES_BYTES} bytes in all (MAX_RUN_FILES_BYTES)")
        return self


class ObjectRef(Stored):
    """An object of a version, and the publisher rank that wrote it."""

    KEY_FORM = "objects/<sha256>.safetensors"
    rank: Count = 0


class Sidecar(Stored):
    """The caller's bytes that are committed with a version, such as a small training state. No weights.

    Attributes:
        name: unique in a version.
    """

    KEY_FORM = "sidecars/<sha256>"
    bytes: Annotated[int, Field(ge=0, le=limits.MAX_SIDECAR_BYTES)]
    name: FileName


def check_objects(objects: list[ObjectRef], payload_bytes: int) -> None:
    """Raise ValueError if a document lists an object twice, or another sum of their bytes."""
    if payload_bytes != sum(item.bytes for item in objects):
        raise ValueError("payload_bytes is not the sum of the objects' bytes")
    if len({item.key for item in objects}) != len(objects):
        raise ValueError("an object is listed twice")


class Base(DocumentPart):
    """Where the weights of a ``reference`` version 0 lie. A hint: readers check the fingerprint.

    Attributes:
        location: path of a checkpoint on the publisher's machine, or URL of the run that this run branches from.
        model, revision: id and commit of a public model; null for any other base.
        run, version, manifest: for a branch, the other run's id, its version, and the digest of that manifest.
    """

    location: Annotated[str, Field(max_length=4096)]
    model: Annotated[str, Field(max_length=256)] | None = None
    revision: Annotated[str, Field(max_length=256)] | None = None
    run: Hex32 | None = None
    version: Version | None = None
    manifest: Digest | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.model is None) != (self.revision is None):
            raise ValueError("model and revision belong together")
        if len({self.run is None, self.version is None, self.manifest is None}) != 1:
            raise ValueError("run, version and manifest belong together")
        return self


class Break(DocumentPart):
    """A version that builds on ``base_version`` instead of its predecessor; null for an anchor, which has no base."""

    version: Version
    base_version: Version | None


class Quarantine(DocumentPart):
    """Why receivers skip a version that is part of the run's history.

    Attributes:
        reasons: findings of the publisher's update gate, for people.
        sound: newest version before this one that is not quarantined; null if there is none.
    """

    reasons: Annotated[list[Annotated[str, Field(max_length=1000)]], Field(min_length=1, max_length=64)]
    sound: Version | None

    def summary(self) -> str:
        """Return the first reason, shortened for the log."""
        more = len(self.reasons) - 1
        return f"{self.reasons[0][:300]!r}{f' and {more} more' if more else ''}"


class HeldBack(DocumentPart):
    """How far a version is from the trainer's weights, whose publisher has a byte budget.

    Attributes:
        elements: changed elements of the trainer's weights that have their earlier bits in this version.
        relative_norm: ‖trainer − version‖₂ / ‖version‖₂ over the finite elements of floating-point tensors; null if it
            is beyond float64.
        exact: newest version before this one that is exact.
    """

    elements: Annotated[Count, Field(ge=1)]
    relative_norm: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    exact: Version

    def summary(self) -> str:
        """Return the distance in words, for the log."""
        far = "unknown" if self.relative_norm is None else f"{self.relative_norm:.3g}"
        return f"{self.elements:,} changed elements are held back, relative distance {far}"


class Manifest(DatedDocument):
    """versions/<n>.json: writing the manifest commits the version.

    Attributes:
        kind: ``anchor`` (objects hold every tensor), ``reference`` (version 0 whose weights lie elsewhere),
            ``delta`` (objects hold changes against ``base_version``).
        parent: digest of the preceding version's manifest; null for version 0.
        fingerprint: of the whole model at this version, 32 hex digits.
        tensor_fingerprints: per tensor name; for anchors and references only.
        breaks: every version up to this one that does not build on its predecessor; ascending, without version 0. One
            manifest thus describes the structure of the whole history.
        reversible: whether the objects carry distances only, so that the version can be reverted.
        epoch: writer epoch, see ``documents.Claim``; 0 for the first writer.
        quarantine: set for a version that receivers skip unless their setting or target says otherwise.
        changed: elements in the objects. total: elements of the model.
        payload_bytes: sum of the objects' bytes. full_bytes: the model's bytes in the served dtypes.
        sidecars: the caller's bytes beside the weights; readers of weights ignore them.
        held_back: set for a version that is not the trainer's exact state.
    """

    KIND = "manifest"
    OMITTED_IF_EMPTY = ("sidecars", "held_back")
    version: Version
    step: Count
    kind: Literal["anchor", "reference", "delta"]
    base_version: Version | None = None
    parent: Digest | None = None
    base: Base | None = None
    breaks: list[Break] = Field(default_factory=list, max_length=limits.MAX_BREAKS)
    reversible: bool = False
    epoch: Count = 0
    quarantine: Quarantine | None = None
    codec: str | None = None
    compression: str | None = None
    objects: list[ObjectRef] = Field(default_factory=list, max_length=limits.MAX_OBJECTS_PER_VERSION)
    sidecars: list[Sidecar] = Field(default_factory=list, max_length=limits.MAX_SIDECARS)
    held_back: HeldBack | None = None
    changed: Count
    total: Count
    payload_bytes: Count
    full_bytes: Count
    fingerprint: Hex32
    tensor_fingerprints: TensorFingerprints | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        first = self.version == 0
        if first != (self.parent is None):
            raise ValueError("parent must be null for version 0 and set for all others")
        if (self.kind == "delta") != (self.base_version is not None):
            raise ValueError("base_version must be set for deltas, and only for them")
        if self.base_version is not None and self.base_version >= self.version:
            raise ValueError("base_version does not precede version")
        if (self.kind == "delta") == (self.tensor_fingerprints is not None):
            raise ValueError("tensor_fingerprints must be set for anchors and references, and for no delta")
        check_objects(self.objects, self.payload_bytes)
        if len({item.name for item in self.sidecars}) != len(self.sidecars):
            raise ValueError("two sidecars have the same name")
        if self.kind == "reference" and (self.objects or not first):
            raise ValueError("a reference is version 0 and has no objects")
        sound = None if self.quarantine is None else self.quarantine.sound
        if sound is not None and sound >= self.version:
            raise ValueError("quarantine.sound does not precede version")
        if self.held_back is not None and (self.held_back.exact >= self.version or self.kind != "delta"):
            raise ValueError("held_back.exact does not precede version, or the version is no delta")
        self._check_breaks()
        return self

    def _check_breaks(self) -> None:
        versions = [item.version for item in self.breaks]
        if versions != sorted(set(versions)) or (versions and not 0 < versions[0] <= versions[-1] <= self.version):
            raise ValueError("breaks are not ascending versions from 1 to this one")
        if any(item.base_version is not None and item.base_version >= item.version - 1 for item in self.breaks):
            raise ValueError(
                "breaks list a version that builds on its predecessor, or on a version that does not precede it"
            )
        regular = self.version == 0 or self.base_version == self.version - 1
        if regular == (self.version in versions) or (not regular and self.breaks[-1].base_version != self.base_version):
            raise ValueError("breaks do not match base_version")

    @property
    def model_fingerprint(self) -> Fingerprint:
        return Fingerprint.from_hex(self.fingerprint)

    @property
    def sound(self) -> int | None:
        """Newest version up to this one that is not quarantined; None if all are."""
        return self.version if self.quarantine is None else self.quarantine.sound

    @property
    def exact(self) -> int:
        """Newest version up to this one that is the trainer's exact state."""
        return self.version if self.held_back is None else self.held_back.exact


class Head(Document):
    """HEAD.json: names the newest manifest. It may lag behind, but never names a manifest before it exists.

    Attributes:
        epoch, parent: of that manifest.
        created_at, expires_at: when the head was signed, and when it stops counting as the newest; null if unsigned.
    """

    KIND = "head"
    version: Version
    manifest: Digest
    epoch: Count = 0
    parent: Digest | None = None
    created_at: Timestamp | None = None
    expires_at: Timestamp | None = None


_VERSION_NAME = re.compile(r"versions/([0-9]{10})\.json")


def version_of_key(key: str) -> int | None:
    """Inverse of ``version_key``; None for any other key."""
    match = _VERSION_NAME.fullmatch(key)
    return int(match.group(1)) if match else None
