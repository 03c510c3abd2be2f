"""Generate and read Ed25519 key pairs in PEM files (PKCS #8 and SubjectPublicKeyInfo, as openssl and ssh-keygen do)."""

import os
import stat
from pathlib import Path

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from vllm_delta_sync.errors import ConflictError, SettingsError, StoreError, UsageError

PUBLIC_SUFFIX = ".pub"
MAX_KEY_BYTES = 16_384


def generate(path: Path) -> str:
    """Write a new private key to ``path`` (mode 600) and its public key to ``path``.pub.

    Returns:
        The public key, 64 hex digits.

    Raises:
        ConflictError, StoreError: see ``write_pair``.
    """
    private = Ed25519PrivateKey.generate()
    secret = private.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    public = private.public_key()
    write_pair(path, secret, public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    return public_hex(public)


def load_private(path: Path) -> Ed25519PrivateKey:
    """Read a private key.

    Raises:
        SettingsError: the file cannot be read, is not such a key, or other users can read it.
    """
    data = _read(path, "signing key")
    check_private(path, "signing key")
    try:
        key = load_pem_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"signing key {str(path)!r} is not a PEM private key without a password; make one with delta-sync keygen"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise SettingsError(f"signing key {str(path)!r} is not an Ed25519 key; make one with delta-sync keygen")
    return key


def load_public(path: Path) -> str:
    """Read a public key, and return its 64 hex digits.

    Raises:
        SettingsError: the file cannot be read, or is not such a key.
    """
    data = _read(path, "trusted key")
    if b"PRIVATE" in data:
        raise SettingsError(
            f"trusted key {str(path)!r} is a private key; give the public key ({path.name}{PUBLIC_SUFFIX}), and keep "
            "the private key where weights are published"
        )
    try:
        key = load_pem_public_key(data)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise SettingsError(
            f"trusted key {str(path)!r} is not a PEM public key; delta-sync keygen writes one as PATH{PUBLIC_SUFFIX}"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise SettingsError(f"trusted key {str(path)!r} is not an Ed25519 key; make one with delta-sync keygen")
    return public_hex(key)


def public_hex(key: Ed25519PublicKey) -> str:
    """Return a public key as documents write it: its 32 bytes in hex."""
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw).hex()


def write_pair(path: Path, secret: bytes, public: bytes) -> None:
    """Write a key pair of any kind: the private half to ``path`` (mode 600), the public half to ``path``.pub.

    Raises:
        ConflictError: one of the files exists already; neither is touched. StoreError: they cannot be written.
        UsageError: ``path`` names a folder.
    """
    if not path.name:
        raise UsageError(f"the key's path {str(path)!r} is a folder; name a file")
    created: list[Path] = []
    try:
        for file_path, content, mode in (
            (path, secret, 0o600),
            (path.with_name(path.name + PUBLIC_SUFFIX), public, 0o644),
        ):
            handle = os.open(file_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            created.append(file_path)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except BaseException as error:  # an interrupt must not leave one half, which the next call would refuse
        for file_path in created:
            file_path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConflictError(f"{error.filename} exists already; give another path, or remove it first") from error
        if isinstance(error, OSError):
            raise StoreError(f"the key cannot be written to {str(path)!r}: {error.strerror}") from error
        raise


def check_private(path: Path, what: str) -> None:
    """Raise SettingsError if other users can read a private key."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{what} {str(path)!r} is readable by other users; chmod 600 it")


def _read(path: Path, what: str) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_KEY_BYTES + 1)
    except OSError as error:
        raise SettingsError(f"{what} {str(path)!r} cannot be read: {error.strerror}") from error
    if len(data) > MAX_KEY_BYTES:
        raise SettingsError(f"{what} {str(path)!r} is longer than {MAX_KEY_BYTES} bytes, so it is not a key file")
    return data
