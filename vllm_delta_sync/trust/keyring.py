"""``Keyring`` holds the configured keys: it signs documents, and refuses those that no trusted key has signed."""

import os
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from vllm_delta_sync.errors import SettingsError, SignatureError
from vllm_delta_sync.format.base_document import Document, Signature, signed_form, timestamp
from vllm_delta_sync.format.manifest import Head, Manifest, RunInfo
from vllm_delta_sync.trust.keys import load_private, load_public, public_hex

_Doc = TypeVar("_Doc", bound=Document)

UNPARSED_BYTES = 256 * 1024
"""Larger documents are not parsed before a signature of theirs was checked: that takes seconds, and many times their
bytes of memory."""
_MOST_SIGNATURES = 4
# As canonical JSON has it: never the first member, since ``format_version`` comes before it.
_SIGNATURE = re.compile(rb',"signature":\{"key":"([0-9a-f]{64})","value":"([0-9a-f]{128})"\}')


class Keyring:
    """Checks and makes signatures. Without trusted keys it checks nothing, without a signing key it signs nothing.

    Thread-safe.

    Attributes:
        trusted: the configured public keys, 64 hex digits each. A signature is valid if one of them made it.
        public: public key of the signing key; None without one.
    """

    def __init__(self, trusted: Iterable[str] = (), signer: Ed25519PrivateKey | None = None) -> None:
        self.trusted = frozenset(trusted)
        self._signer = signer
        self.public = None if signer is None else public_hex(signer.public_key())

    @classmethod
    def load(
        cls, trusted_keys: str | Path | Sequence[str | Path] | None = None, signing_key: str | Path | None = None
    ) -> "Keyring":
        """Read keys from files. A path may begin with ``~``, which a shell does not replace in a list or a file.

        Args:
            trusted_keys: public key files; a string is split at commas.
            signing_key: private key file. Without ``trusted_keys``, its public key is trusted.

        Raises:
            SettingsError: a file cannot be read or is not such a key, or the list is empty.
        """
        signer = None if signing_key is None else load_private(Path(os.path.expanduser(signing_key)))
        if trusted_keys is None:
            return cls(() if signer is None else [public_hex(signer.public_key())], signer)
        if isinstance(trusted_keys, Path):
            trusted_keys = [trusted_keys]
        parts = trusted_keys.split(",") if isinstance(trusted_keys, str) else trusted_keys
        files = [
            Path(os.path.expanduser(part.strip() if isinstance(part, str) else part))
            for part in parts
            if str(part).strip()
        ]
        if not files:
            raise SettingsError(
                "trusted_keys names no file; give public key files, separated by commas, or leave the setting out"
            )
        return cls([load_public(file) for file in files], signer)

    def __repr__(self) -> str:
        return f"Keyring(trusted={sorted(self.trusted)}, public={self.public!r})"

    @property
    def checks_signatures(self) -> bool:
        """Whether documents must be signed, which is so if there are trusted keys."""
        return bool(self.trusted)

    @property
    def has_signing_key(self) -> bool:
        """Whether there is a signing key."""
        return self._signer is not None

    def check_signing_key(self) -> None:
        """Raise SignatureError if readers with the same trusted keys would refuse what the signing key signs."""
        if self.public is not None and self.public not in self.trusted:
            raise SignatureError(
                f"signing_key {short(self.public)} is not among trusted_keys; add its public key file to trusted_keys "
                "here and on the receivers"
            )

    def check_can_sign(self, info: RunInfo) -> None:
        """Raise SettingsError unless readers will accept what is written to a run. Any keyring fits an unsigned run."""
        if info.signature is None:
            return
        accepted = self.trusted or {info.signature.key}
        known = ", ".join(sorted(map(short, accepted)))
        if self.public is None:
            raise SettingsError(
                f"run {info.run} is signed, so everything written to it must be signed; pass --signing-key PATH or set "
                f"DELTA_SYNC_SIGNING_KEY to the private key of one of: {known}"
            )
        if self.public not in accepted:
            raise SettingsError(
                f"signing_key is {short(self.public)}, whose signatures readers of run {info.run} refuse; use the "
                f"private key of one of: {known}"
            )

    def signed(self, document: _Doc) -> _Doc:
        """Return the document with a signature of the signing key; unchanged without one."""
        signature = self._signature(document.signed_bytes())
        return document if signature is None else document.with_signature(signature)

    def sign_bytes(self, kind: str, data: bytes) -> Signature | None:
        """Sign a message of the given kind; None without a signing key."""
        return self._signature(signed_form(kind, data))

    def _signature(self, data: bytes) -> Signature | None:
        if self._signer is None:
            return None
        return Signature(key=self.public or "", value=self._signer.sign(data).hex())

    def check(self, document: Document, what: str) -> None:
        """Raise SignatureError unless a trusted key signed the document. Checks nothing without trusted keys."""
        if self.trusted:
            self._check_signature(document.signature, document.signed_bytes(), what)

    def check_unparsed(self, kind: str, data: bytes, what: str) -> None:
        """Raise SignatureError if the bytes of a large document have no valid signature. ``check`` it all the same.

        So without a key, write access to the bucket makes no reader parse megabytes. Smaller documents are not checked
        here: what is wrong with them is said more exactly when they are parsed.
        """
        if not self.trusted or len(data) <= UNPARSED_BYTES:
            return
        signature, signed = None, data
        for found in islice(_SIGNATURE.finditer(data), _MOST_SIGNATURES):
            signature = Signature(key=found[1].decode(), value=found[2].decode())
            signed = data[: found.start()] + data[found.end() :]
            try:
                return self._check_signature(signature, signed_form(kind, signed), what)
            except SignatureError:
                continue  # a member of that name may lie within another one
        self._check_signature(signature, signed_form(kind, signed), what)

    def check_bytes(self, kind: str, data: bytes, signature: Signature | None, what: str) -> None:
        """Raise SignatureError unless a trusted key signed the message. Checks nothing without trusted keys."""
        if self.trusted:
            self._check_signature(signature, signed_form(kind, data), what)

    def _check_signature(self, signature: Signature | None, data: bytes, what: str) -> None:
        if signature is None:
            raise SignatureError(
                f"{what} is not signed, and trusted_keys requires signatures; publish with signing_key, or use a "
                "signed copy of the run"
            )
        if signature.key not in self.trusted:
            raise SignatureError(
                f"{what} is signed by key {short(signature.key)}, which is not trusted; to trust it, add its public "
                "key file to trusted_keys"
            )
        try:
            Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(
                bytes.fromhex(signature.value), data
            )
        except (InvalidSignature, ValueError) as error:
            raise SignatureError(
                f"{what} does not match the signature of key {short(signature.key)} that it carries: it was changed"
            ) from error


def short(key: str) -> str:
    """Return the first 16 hex digits of a key, for messages."""
    return key[:16]


HEAD_SECONDS = 600
"""Lifetime of a signed HEAD.json. A publisher rewrites it before it expires."""
MAX_HEAD_SECONDS = 366 * 24 * 3600


def make_head(manifest: Manifest, keyring: Keyring, seconds: int = HEAD_SECONDS) -> Head:
    """Return the HEAD.json that points at ``manifest``; if the keyring can sign, signed and valid for ``seconds``."""
    head = Head(
        run=manifest.run,
        version=manifest.version,
        manifest=manifest.digest,
        epoch=manifest.epoch,
        parent=manifest.parent,
    )
    if not keyring.has_signing_key:
        return head
    now = datetime.now(UTC)
    times = {"created_at": timestamp(now), "expires_at": timestamp(now + timedelta(seconds=seconds))}
    return keyring.signed(head.model_copy(update=times))
