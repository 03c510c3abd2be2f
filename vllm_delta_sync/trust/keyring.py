"""The keys that somebody holds: whose signatures count, and with which key to sign."""

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

    Threads: any may call any method.

    Attributes:
        trusted: public keys, 64 hex digits each, that were configured: only they may sign ``keys.json``.
        public: public key of the signing key; None without.
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
            trusted_keys: public key files; in one string, separated by commas.
            signing_key: private key file. Without ``trusted_keys`` its public key is trusted.

        Raises:
            SettingsError: a file cannot be read or is no such key, or the list is empty.
        """
        signer = None if signing_key is None else load_private(Path(signing_key))
        if trusted_keys is None:
            return cls(() if signer is None else [public_hex(signer.public_key())], signer)
        parts = trusted_keys.split(",") if isinstance(trusted_keys, str) else trusted_keys
        files = [Path(part.strip() if isinstance(part, str) else part) for part in parts if str(part).strip()]
        if not files:
            raise SettingsError(
                "trusted_keys names no file; give public key files, separated by commas, or leave it out"
            )
        return cls([load_public(file) for file in files], signer)

    def __repr__(self) -> str:
        return f"Keyring(trusted={sorted(self.trusted)}, public={self.public!r})"

    @property
    def checks_signatures(self) -> bool:
        """Whether signatures are asked for."""
        return bool(self.trusted)

    @property
    def has_signing_key(self) -> bool:
        """Whether there is a signing key."""
        return self._signer is not None

    def check_can_start_run(self) -> None:
        """Raise SignatureError unless a run can begin with the signing key: it has no ``keys.json`` yet."""
        if self.public is not None and self.public not in self.trusted:
            raise SignatureError(
                f"a run cannot begin with signing_key {short(self.public)}, which is not among trusted_keys: add its "
                "public key file to them, or begin with a trusted key and list this one in keys.json (delta-sync keys)"
            )

    def signed(self, document: _Doc) -> _Doc:
        """The document with our signature; as it is without a signing key."""
        if self._signer is None:
            return document
        value = self._signer.sign(document.signed_bytes()).hex()
        return document.with_signature(Signature(key=self.public or "", value=value))

    def sign_bytes(self, kind: str, data: bytes) -> Signature | None:
        """A signature over a message of a kind of its own; None without a signing key."""
        if self._signer is None:
            return None
        return Signature(key=self.public or "", value=self._signer.sign(signed_form(kind, data)).hex())

    def check_bytes(
        self, kind: str, data: bytes, signature: Signature | None, what: str, allowed: frozenset[str]
    ) -> None:
        """Raise SignatureError unless a message is signed by one of ``allowed``."""
        check_signature(signature, signed_form(kind, data), what)
        if signature is None or signature.key not in allowed:
            raise _untrusted(what, "" if signature is None else signature.key)


class RunKeys:
    """Whose word counts in one run: the configured keys, and what ``keys.json`` says of them and of others.

    Attributes:
        file: newest ``keys.json`` that was accepted; None if the run has none.
        revoked: trusted keys that any of them revoked.
    """

    def __init__(self, keyring: Keyring, run: str) -> None:
        self._keyring = keyring
        self._run = run
        self._lock = threading.Lock()
        self.file: KeyFile | None = None
        self.revoked: frozenset[str] = frozenset()

    def accept(self, file: KeyFile | None, at_least: int = 0, revoked: Iterable[str] = ()) -> None:
        """Take note of ``keys.json`` as it is now.

        Args:
            file: None if there is none. at_least: sequence that was seen before, in another life.
            revoked: trusted keys that were revoked then.

        Raises:
            SignatureError: not signed by a trusted key, or by one that it revokes itself, or that was revoked before.
            ChainError: of another run. ReplayError: older than what was seen.
        """
        if file is not None:
            if file.run != self._run:
                raise ChainError(f"keys.json belongs to run {file.run}, this is {self._run}")
            check_signature(file.signature, file.signed_bytes(), "keys.json")
            key = "" if file.signature is None else file.signature.key
            entry = file.entry(key)
            if key not in self._keyring.trusted:
                raise SignatureError(
                    f"keys.json is signed by key {short(key)}, which is not among trusted_keys; only those may change "
                    "the list of keys"
                )
            if entry is not None and entry.revoked:
                raise SignatureError(f"keys.json is signed by key {short(key)}, which it revokes; sign it with another")
        with self._lock:
            known = max(at_least, 0 if self.file is None else self.file.sequence)
            gone = self.revoked.union(revoked)
            if file is not None and key in gone:
                seen = at_least if file is self.file else known
                raise SignatureError(
                    f"keys.json is signed by key {short(key)}, which was revoked before: put back the one of sequence "
                    f"{seen}, and take the key out of trusted_keys; or, if a thief had revoked it, remove what the "
                    "servers have seen (state_dir)"
                )
            sequence = 0 if file is None else file.sequence
            if sequence < known:
                raise ReplayError(
                    f"keys.json has sequence {sequence}, and {known} was seen before: an older list of keys was put "
                    "back; restore the newest one"
                )
            listed = [] if file is None else file.keys
            self.revoked = gone.union(
                entry.key for entry in listed if entry.revoked and entry.key in self._keyring.trusted
            )
            self.file = file

    def add_revoked(self, revoked: Iterable[str]) -> None:
        """Take note of trusted keys that were revoked, as somebody else has seen."""
        with self._lock:
            self.revoked = self.revoked.union(revoked)

    def allowed(self) -> frozenset[str]:
        """Keys that are in use now."""
        listed = {} if self.file is None else {entry.key: entry for entry in self.file.keys}
        keys = self._keyring.trusted | listed.keys()
        return frozenset(key for key in keys if _in_use(listed.get(key)))

    def last_signed(self) -> list[KeyValidity]:
        """Of keys that were retired or revoked, the newest first."""
        entries = [] if self.file is None else self.file.keys
        return sorted((entry.last for entry in entries if entry.last), key=lambda last: -last.version)

    def check_info(self, info: RunInfo) -> None:
        """Raise SignatureError unless run.json is vouched for, by its signature or by ``keys.json``."""
        if self.file is not None and self.file.info == info.digest:
            return
        entry = self._signer(info, "run.json")
        if entry is not None and entry.revoked:
            raise SignatureError(f"run.json is signed by key {short(entry.key)}, which is revoked")

    def check_standalone(self, document: Document, version: int, what: str) -> None:
        """Raise SignatureError unless a document about a version, outside the chain, may be believed."""
        entry = self._signer(document, what)
        if entry is not None and (entry.revoked or (entry.last is not None and version > entry.last.version)):
            raise SignatureError(
                f"{what} is signed by key {short(entry.key)}, whose word does not hold for it any more"
            )

    def check_manifest(self, document: Document, version: int, what: str) -> KeyEntry | None:
        """Raise SignatureError unless a manifest may be believed.

        Returns:
            What ``keys.json`` says of a key that is no longer in use: the manifest holds only if the chain leads from
            it to ``last``; None if it holds by itself.
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
        """Check the signature; what ``keys.json`` says of its key."""
        signature = document.signature
        check_signature(signature, document.signed_bytes(), what)
        key = "" if signature is None else signature.key
        entry = None if self.file is None else self.file.entry(key)
        if entry is None and key not in self._keyring.trusted:
            raise _untrusted(what, key)
        return entry


def check_signature(signature: Signature | None, data: bytes, what: str) -> None:
    """Raise SignatureError unless ``data`` is signed by the key that the signature names, whoever has it."""
    if signature is None:
        raise SignatureError(
            f"{what} is not signed, and trusted_keys asks for signatures; publish with signing_key, or take the run "
            "from where it is signed"
        )
    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(signature.key)).verify(bytes.fromhex(signature.value), data)
    except (InvalidSignature, ValueError) as error:
        raise SignatureError(
            f"{what} does not have the signature of key {short(signature.key)} that it claims: it was changed"
        ) from error


def short(key: str) -> str:
    """A key as messages name it."""
    return key[:16]


def _in_use(entry: KeyEntry | None) -> bool:
    return entry is None or (entry.last is None and not entry.revoked)


def _untrusted(what: str, key: str) -> SignatureError:
    return SignatureError(
        f"{what} is signed by key {short(key)}, which is not trusted; if it should be, add its public key file to "
        "trusted_keys, or list it in keys.json (delta-sync keys)"
    )
