"""``Keyring`` holds the configured keys and signs; ``RunKeys`` decides which keys are valid for one run's documents."""

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from vllm_delta_sync.errors import ChainError, ReplayError, SettingsError, SignatureError
from vllm_delta_sync.format.documents import KeyEntry, KeyFile, KeyValidity
from vllm_delta_sync.format.manifest import Document, RunInfo, Signature, signed_form
from vllm_delta_sync.trust.keys import load_private, load_public, public_hex

_Doc = TypeVar("_Doc", bound=Document)


class Keyring:
    """Checks and makes signatures. Without trusted keys it checks nothing, without a signing key it signs nothing.

    Thread-safe.

    Attributes:
        trusted: the configured public keys, 64 hex digits each; only they may sign ``keys.json``.
        public: public key of the signing key; None without one.
    """

    def __init__(self, trusted: Iterable[str] = (), signer: Ed25519PrivateKey | None = None) -> None:
        self.trusted = frozenset(trusted)
        self._signer = signer
        self.public = None if signer is None else public_hex(signer.public_key())

    @classmethod
    def load(
        cls, trusted_keys: str | Sequence[str | Path] | None = None, signing_key: str | Path | None = None
    ) -> "Keyring":
        """Read keys from files.

        Args:
            trusted_keys: public key files; a string is split at commas.
            signing_key: private key file. Without ``trusted_keys``, its public key is trusted.

        Raises:
            SettingsError: a file cannot be read or is not such a key, or the list is empty.
        """
        signer = None if signing_key is None else load_private(Path(signing_key))
        if trusted_keys is None:
            return cls(() if signer is None else [public_hex(signer.public_key())], signer)
        parts = trusted_keys.split(",") if isinstance(trusted_keys, str) else trusted_keys
        files = [Path(part.strip() if isinstance(part, str) else part) for part in parts if str(part).strip()]
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

    def check_can_start_run(self) -> None:
        """Raise SignatureError unless a new run can begin with the signing key; such a run has no ``keys.json`` yet."""
        if self.public is not None and self.public not in self.trusted:
            raise SignatureError(
                f"a run cannot begin with signing_key {short(self.public)}, which is not among trusted_keys; add its "
                "public key file to trusted_keys, or begin with a trusted key and list this one in keys.json "
                "(delta-sync keys add)"
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

    def check_bytes(
        self, kind: str, data: bytes, signature: Signature | None, what: str, allowed: frozenset[str]
    ) -> None:
        """Raise SignatureError unless a message is signed by one of ``allowed``."""
        key = check_signature(signature, signed_form(kind, data), what)
        if key not in allowed:
            raise _untrusted(what, key)


class RunKeys:
    """The keys that are valid in one run: the configured ones, as changed and extended by ``keys.json``.

    Attributes:
        file: the newest accepted ``keys.json``; None if the run has none.
        revoked: trusted keys that any accepted ``keys.json`` revoked.
    """

    def __init__(self, keyring: Keyring, run: str) -> None:
        self._keyring = keyring
        self._run = run
        self._lock = threading.Lock()
        self.file: KeyFile | None = None
        self.revoked: frozenset[str] = frozenset()

    def accept(self, file: KeyFile | None, at_least: int = 0, revoked: Iterable[str] = ()) -> None:
        """Check ``keys.json`` as it is now, and use it from here on.

        Args:
            file: None if the run has none.
            at_least: the sequence number seen before a restart.
            revoked: trusted keys that were revoked before a restart.

        Raises:
            SignatureError: not signed by a trusted key, or signed by a key that it revokes or that was revoked before.
            ChainError: it belongs to another run. ReplayError: it is older than one seen before.
        """
        if file is not None:
            if file.run != self._run:
                raise ChainError(f"keys.json belongs to run {file.run}, this is {self._run}")
            key = check_signature(file.signature, file.signed_bytes(), "keys.json")
            entry = file.entry(key)
            if key not in self._keyring.trusted:
                raise SignatureError(
                    f"keys.json is signed by key {short(key)}, which is not among trusted_keys; only trusted keys may "
                    "change the key list"
                )
            if entry is not None and entry.revoked:
                raise SignatureError(f"keys.json is signed by key {short(key)}, which it revokes; sign it with another")
        with self._lock:
            known = max(at_least, 0 if self.file is None else self.file.sequence)
            all_revoked = self.revoked.union(revoked)
            if file is not None and key in all_revoked:
                seen = at_least if file is self.file else known
                raise SignatureError(
                    f"keys.json is signed by key {short(key)}, which was revoked before; restore the keys.json with "
                    f"sequence {seen} and remove the key from trusted_keys, or, if an attacker revoked the key, delete "
                    "what the servers remember of the run (state_dir)"
                )
            sequence = 0 if file is None else file.sequence
            if sequence < known:
                raise ReplayError(
                    f"keys.json has sequence {sequence}, and {known} was seen before: an older key list was put back; "
                    "restore the newest one"
                )
            listed = [] if file is None else file.keys
            self.revoked = all_revoked.union(
                entry.key for entry in listed if entry.revoked and entry.key in self._keyring.trusted
            )
            self.file = file

    def add_revoked(self, revoked: Iterable[str]) -> None:
        """Add trusted keys that another process has seen revoked."""
        with self._lock:
            self.revoked = self.revoked.union(revoked)

    def allowed(self) -> frozenset[str]:
        """Return the keys that may sign new documents now."""
        listed = {} if self.file is None else {entry.key: entry for entry in self.file.keys}
        keys = self._keyring.trusted | listed.keys()
        return frozenset(key for key in keys if _in_use(listed.get(key)))

    def last_signed(self) -> list[KeyValidity]:
        """Return the last valid version of each retired or revoked key, the newest first."""
        entries = [] if self.file is None else self.file.keys
        return sorted((entry.last for entry in entries if entry.last), key=lambda last: -last.version)

    def check_info(self, info: RunInfo) -> None:
        """Raise SignatureError unless run.json has a valid signature, or ``keys.json`` lists its digest."""
        if self.file is not None and self.file.info == info.digest:
            return
        entry = self._signer(info, "run.json")
        if entry is not None and entry.revoked:
            raise SignatureError(f"run.json is signed by key {short(entry.key)}, which is revoked")

    def check_standalone(self, document: Document, version: int, what: str) -> None:
        """Raise SignatureError unless a document about ``version``, other than its manifest, is validly signed."""
        entry = self._signer(document, what)
        if entry is not None and (entry.revoked or (entry.last is not None and version > entry.last.version)):
            raise SignatureError(
                f"{what} is signed by key {short(entry.key)}, which is not valid for version {version} any more"
            )

    def check_manifest(self, document: Document, version: int, what: str) -> KeyEntry | None:
        """Raise SignatureError unless a manifest's signature is valid.

        Returns:
            None if the signature suffices. The entry in ``keys.json`` of a key that is no longer in use: the manifest
            is valid only if the version ``last`` descends from it.
        """
        entry = self._signer(document, what)
        if _in_use(entry) or entry is None:
            return None
        if entry.last is None or version > entry.last.version:
            until = "" if entry.last is None else f" after version {entry.last.version}"
            raise SignatureError(
                f"{what} is signed by key {short(entry.key)}, which was "
                f"{'revoked' if entry.revoked else 'retired'}{until}"
            )
        return entry

    def _signer(self, document: Document, what: str) -> KeyEntry | None:
        """Check the signature; return the entry in ``keys.json`` of its key."""
        key = check_signature(document.signature, document.signed_bytes(), what)
        entry = None if self.file is None else self.file.entry(key)
        if entry is None and key not in self._keyring.trusted:
            raise _untrusted(what, key)
        return entry


def check_signature(signature: Signature | None, data: bytes, what: str) -> str:
    """Return the key that signed ``data``, trusted or not; raise SignatureError unless the signature is its own."""
    if signature is None:
        raise not_signed_error(what)
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(bytes.fromhex(signature.value), data)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"{what} does not match the signature of key {short(signature.key)} that it carries: it was changed"
        ) from error
    return signature.key


def not_signed_error(what: str) -> SignatureError:
    return SignatureError(
        f"{what} is not signed, and trusted_keys requires signatures; publish with signing_key, or use a signed copy "
        "of the run"
    )


def short(key: str) -> str:
    """Return the first 16 hex digits of a key, for messages."""
    return key[:16]


def _in_use(entry: KeyEntry | None) -> bool:
    return entry is None or (entry.last is None and not entry.revoked)


def _untrusted(what: str, key: str) -> SignatureError:
    return SignatureError(
        f"{what} is signed by key {short(key)}, which is not trusted; to trust it, add its public key file to "
        "trusted_keys, or list it in keys.json (delta-sync keys add)"
    )
