"""``Document`` is the base of a run's JSON documents: canonical bytes, digest, signature, and the types of fields.

``dump_canonical`` and ``load_canonical`` write and read JSON with one byte string per value (RFC 8785): digests and
signatures are stable because of this.
"""

import json
import math
import re
from datetime import UTC, datetime
from functools import cached_property
from hashlib import sha256
from typing import Annotated, Any, ClassVar, Literal, Self

import rfc8785
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SerializerFunctionWrapHandler,
    ValidationError,
    model_serializer,
)

from vllm_delta_sync.errors import FormatError, UnsupportedError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.codecs import FEATURES
from vllm_delta_sync.format.limits import FORMAT_VERSION, MAX_JSON_BYTES, MAX_JSON_DEPTH, MAX_JSON_VALUES, check_limit

# A bracket or a whole string. A string may end with the data, so no quote is scanned twice.
_TOKENS = re.compile(rb"""[\[{\]}]|"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)""", re.DOTALL)

_DEPTH_CHECK_BYTES = 65_536


def dump_canonical(value: Any) -> bytes:
    """Serialize to canonical JSON.

    Raises:
        FormatError: the value has an integer beyond 2^53, a NaN, half a surrogate pair, or a type that JSON lacks.
    """
    try:
        return rfc8785.dumps(value)
    except (rfc8785.CanonicalizationError, UnicodeEncodeError) as error:
        raise FormatError(f"value cannot be written as canonical JSON: {str(error)[:200]}") from error


def load_canonical(data: bytes, what: str, limit: int = MAX_JSON_BYTES) -> Any:
    """Parse JSON; refuse duplicate keys, deep nesting and any non-canonical spelling.

    Raises:
        LimitError: longer than ``limit`` bytes.
        FormatError: not JSON, or not in canonical form.
    """
    check_limit(f"{what}: size in bytes", len(data), limit, "MAX_JSON_BYTES")
    value = load_json(data, what)
    try:
        canonical = dump_canonical(value)
    except FormatError as error:
        raise FormatError(f"{what}: {error}") from error
    if canonical != data:
        raise FormatError(f"{what} is JSON but not in canonical form (RFC 8785); it was not written by a publisher")
    return value


def load_json(data: bytes, what: str, finite: bool = True) -> Any:
    """Parse JSON; refuse duplicate keys, nesting beyond MAX_JSON_DEPTH and halves of surrogate pairs.

    Args:
        finite: whether to refuse NaN and infinities; False for files such as config.json, where Python's ``json`` may
            have written them.

    Raises:
        LimitError: more values than MAX_JSON_VALUES; nothing was allocated.
        FormatError: not JSON, duplicate key, nested too deep, or a string that UTF-8 cannot encode.
    """
    # Each value but the first follows one of these. Occurrences in strings count too: real data has few.
    values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if _is_deep(data if values <= MAX_JSON_VALUES else data[:_DEPTH_CHECK_BYTES]):
        raise FormatError(f"{what} is nested deeper than {MAX_JSON_DEPTH} levels (MAX_JSON_DEPTH)")
    check_limit(f"{what}: number of values", values, MAX_JSON_VALUES, "MAX_JSON_VALUES")
    try:
        parsers: dict[str, Any] = {"parse_constant": _no_constant, "parse_float": _finite} if finite else {}
        value = json.loads(data.decode("utf-8"), object_pairs_hook=_unique, **parsers)
        if b"\\u" in data:
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is not valid JSON: {str(error)[:200]}") from error


def check_format_version(document: dict[str, Any], what: str) -> None:
    """Check the field ``format_version`` of a document or a delta object.

    Raises:
        FormatError: missing, or not a positive integer. UnsupportedError: of another format.
    """
    version = document.get("format_version")
    if type(version) is not int or version < 1:
        raise FormatError(f"{what}: field 'format_version' is {str(version)[:40]!r}, not a positive integer")
    if version > FORMAT_VERSION:
        raise UnsupportedError(
            f"{what}: format_version is {version}, this release reads {FORMAT_VERSION}; upgrade to read it"
        )
    if version < FORMAT_VERSION:
        raise UnsupportedError(
            f"{what}: format_version is {version}, this release reads {FORMAT_VERSION}; use the release that wrote the "
            "run, or export a version with it (delta-sync export) and begin a new run from that checkpoint"
        )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"duplicate key {key[:80]!r}")
            seen.add(key)
    return result


def _no_constant(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    """Parse a number with a fraction or an exponent; JSON cannot spell the infinity that Python makes of 1e999."""
    value = float(text)
    if math.isinf(value):
        raise ValueError(f"{text[:40]} is beyond the largest double")
    return value


def _is_deep(data: bytes) -> bool:
    """Return whether brackets outside of strings are nested deeper than MAX_JSON_DEPTH."""
    if data.count(b"[") + data.count(b"{") <= MAX_JSON_DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return True
        elif first in b"]}":
            depth -= 1
    return False


_HEX32 = re.compile(r"[0-9a-f]{32}")
FILE_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,99}"
"""Names of sidecars, run files, tags and receivers."""
FileName = Annotated[str, Field(pattern=f"^{FILE_NAME}$")]
Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=0, le=2**53 - 1)]
Version = Annotated[int, Field(ge=0, le=limits.MAX_VERSION)]
Timestamp = Annotated[str, Field(pattern=r"^[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?Z$")]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
FormatVersion = Literal[2]


def timestamp(moment: datetime | None = None) -> str:
    """Return a time in UTC, by default the current one, in the format of documents."""
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


class DocumentPart(BaseModel):
    """A strict, immutable object in a document; fields that this release does not know are ignored."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class Signature(BaseModel):
    """Ed25519 (RFC 8032) over ``Document.signed_bytes``: public key and signature in hex."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    key: PublicKey
    value: Annotated[str, Field(pattern=r"^[0-9a-f]{128}$")]


def signed_form(kind: str, data: bytes) -> bytes:
    """Return the bytes to sign for a kind of message: ``data`` behind a prefix that no other protocol uses."""
    return b"vllm-delta-sync/" + kind.encode() + b"/1\0" + data


class Document(DocumentPart):
    """A canonical JSON document. Fields that this release does not know count in its digest.

    Attributes:
        KIND: kind of document. It is signed too, so that one kind cannot be passed off as another.
        OMITTED_IF_EMPTY: fields of later releases; without them, a document has the same bytes as before they existed.
        run: 32 random hex digits that name the run.
    """

    KIND: ClassVar[str]
    OMITTED_IF_EMPTY: ClassVar[tuple[str, ...]] = ()
    format_version: FormatVersion = 2
    run: Hex32
    signature: Signature | None = None
    _raw: bytes | None = PrivateAttr(default=None)

    @model_serializer(mode="wrap")
    def _without_empty(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields: dict[str, Any] = serialize(self)
        return {name: value for name, value in fields.items() if value or name not in self.OMITTED_IF_EMPTY}

    def to_bytes(self) -> bytes:
        """Return the bytes that the document was parsed from, or else its canonical JSON."""
        return dump_canonical(self.model_dump(mode="json")) if self._raw is None else self._raw

    @cached_property
    def digest(self) -> str:
        """SHA-256 of ``to_bytes()``, hex."""
        # Computed once: a search for a way through a long run asks for it many times.
        return sha256(self.to_bytes()).hexdigest()

    def __copy__(self) -> Self:
        copied = super().__copy__()
        copied.__dict__.pop("digest", None)  # ``model_copy`` changes fields afterwards
        return copied

    def signed_bytes(self) -> bytes:
        """Return the bytes that a signature covers: the kind, and the canonical JSON without the signature."""
        value = load_json(self.to_bytes(), self.KIND)
        value.pop("signature", None)
        return signed_form(self.KIND, dump_canonical(value))

    def with_signature(self, signature: Signature) -> Self:
        """Return a copy with the signature, as if parsed from the signed bytes."""
        value = load_json(self.to_bytes(), self.KIND)
        value["signature"] = signature.model_dump()
        return type(self).from_bytes(dump_canonical(value), self.KIND)

    @classmethod
    def from_bytes(cls, data: bytes, what: str | None = None) -> Self:
        """Parse a document; ``what`` names it in errors, by default its kind.

        Raises:
            FormatError, LimitError: not canonical JSON, or a field is missing or malformed.
            UnsupportedError: a newer format version, or a required feature is unknown.
        """
        what = what or cls.KIND
        value = load_canonical(data, what)
        if not isinstance(value, dict):
            raise FormatError(f"{what} is not a JSON object")
        check_format_version(value, what)
        _check_requires(value, what)
        try:
            document = cls.model_validate(value)
        except ValidationError as error:
            raise FormatError(f"{what}: {_first_problem(error)}") from error
        document._raw = data
        return document


def _check_requires(value: dict[str, Any], what: str) -> None:
    # Before validation: an unknown feature may change the form of other fields.
    required = value.get("requires", [])
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        raise FormatError(f"{what}: field 'requires' is not a list of strings")
    unknown = sorted(set(required) - FEATURES)
    if unknown:
        raise UnsupportedError(
            f"{what}: field 'requires' names {', '.join(repr(name[:40]) for name in unknown[:8])}, which this release "
            "does not know; upgrade to read it"
        )


def reject_bad_fingerprint(value: object) -> object:
    """Refuse malformed fingerprints at the first; pydantic would report each, in a kilobyte."""
    if isinstance(value, dict):
        rows = value.items()
        bad = next((name for name, text in rows if not isinstance(text, str) or not _HEX32.fullmatch(text)), None)
        if bad is not None:
            raise ValueError(f"the fingerprint of tensor {bad[:80]!r} is not 32 hex digits")
    return value


TensorFingerprints = Annotated[dict[str, Hex32], BeforeValidator(reject_bad_fingerprint)]
"""Tensor name → fingerprint."""


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"]) or "document"
    return f"field {field[:120]!r}: {problem['msg']} (value {str(problem['input'])[:80]!r})"


class DatedDocument(Document):
    """A document that says when it was written, and which features (``requires``) a reader must know."""

    requires: list[str] = []
    created_at: Timestamp
