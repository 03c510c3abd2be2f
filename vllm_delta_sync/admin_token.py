"""``AdminToken``: the token that state-changing HTTP routes require, from a file or the environment.

A server keeps only the SHA-256 of its token, so its memory, an object's text and its children's environment cannot
reveal the token. Wrong tokens are neither delayed nor counted: guessing a random token is hopeless at any rate, and a
limit would let strangers lock the operator out.
"""

import hashlib
import hmac
import os
import re
import stat
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from vllm_delta_sync.errors import SettingsError

VARIABLE = "DELTA_SYNC_ADMIN_TOKEN"
DIGEST_VARIABLE = "DELTA_SYNC_ADMIN_TOKEN_SHA256"
"""Variable that replaces the token in the environment of child processes."""
SHORTEST = 16
LONGEST = 4096
_TOKEN = re.compile(r"[!-~]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_REMEDY = "make one with: openssl rand -hex 32"


class AdminToken:
    """A token that can be compared, but neither shown nor recovered."""

    __slots__ = ("_digest",)

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def of(cls, text: str, source: str) -> "AdminToken":
        """Create from the token's text.

        Args:
            source: of the token, for error messages.

        Raises:
            SettingsError: the token is empty, too short, too long, or has characters that a header cannot carry. The
                message never shows it.
        """
        if not text:
            raise SettingsError(f"{source} is empty; {_REMEDY}")
        if len(text) < SHORTEST:
            raise SettingsError(f"{source} has a token of {len(text)} characters, fewer than {SHORTEST}; {_REMEDY}")
        if len(text) > LONGEST or not _TOKEN.fullmatch(text):
            raise SettingsError(
                f"{source} has a token longer than {LONGEST} or with characters outside printable ASCII; {_REMEDY}"
            )
        return cls(_digest(text))

    def matches(self, given: str) -> bool:
        """Return whether ``given`` is the token; compared in constant time."""
        return hmac.compare_digest(self._digest, _digest(given))

    def for_peers(self) -> str:
        """Return the token with which servers and readers of a run read each other's caches.

        It is derived from this one, so that it needs no setting and a peer learns nothing that lets it change state.
        """
        return hmac.digest(self._digest, b"vllm-delta-sync peer", "sha256").hex()

    def matches_peer(self, given: str) -> bool:
        """Return whether ``given`` is ``for_peers()``; compared in constant time."""
        return hmac.compare_digest(_digest(self.for_peers()), _digest(given))

    def __repr__(self) -> str:
        return "AdminToken(…)"


def hide(environment: MutableMapping[str, str] | None = None) -> None:
    """Replace the token in the environment by its SHA-256, so that new child processes get only that.

    ``/proc/PID/environ`` of this process still shows the token, since the kernel keeps the initial environment. A token
    that ``load`` refuses is left unchanged.
    """
    environment = os.environ if environment is None else environment
    try:
        token = AdminToken.of(environment[VARIABLE], VARIABLE)
    except (KeyError, SettingsError):
        return
    if DIGEST_VARIABLE not in environment:
        environment[DIGEST_VARIABLE] = token._digest.hex()
        del environment[VARIABLE]


def load(file: Path | None, environment: Mapping[str, str] | None = None) -> AdminToken | None:
    """Return the token from the setting ``admin_token_file`` or from the environment; None if neither is set.

    Raises:
        SettingsError: both are set, the file cannot be read, or as ``AdminToken.of``.
    """
    environment = os.environ if environment is None else environment
    text, digest = load_text(file, environment), environment.get(DIGEST_VARIABLE)
    if text is not None:
        return AdminToken(_digest(text))
    if digest is None:
        return None
    if not _DIGEST.fullmatch(digest):
        raise SettingsError(f"{DIGEST_VARIABLE} is not a SHA-256 of 64 hexadecimal digits; set {VARIABLE} instead")
    return AdminToken(bytes.fromhex(digest))


def load_text(file: Path | None, environment: Mapping[str, str] | None = None) -> str | None:
    """Return the token itself, for a client that sends it to a server; None if only its SHA-256 or nothing is set.

    Raises:
        SettingsError: as ``load``.
    """
    environment = os.environ if environment is None else environment
    given = [name for name in (VARIABLE, DIGEST_VARIABLE) if name in environment]
    if file is not None:
        given.append("admin_token_file")
    if len(given) > 1:
        raise SettingsError(f"{' and '.join(given)} are both set; give one")
    text, source = environment.get(VARIABLE), VARIABLE
    if file is not None:
        text, source = _read(file), f"admin_token_file {str(file)!r}"
    if text is not None:
        AdminToken.of(text, source)
    return text


def readable_by_others(file: Path) -> bool:
    """Return whether the file's mode lets other users read it."""
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _read(file: Path) -> str:
    try:
        # Not a pipe: opening it could block forever, and a second reader would get nothing.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise SettingsError(f"admin_token_file {str(file)!r} is not a regular file; write the token to one")
            return opened.read(LONGEST + 3).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error would show bytes of the token.
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise SettingsError(f"admin_token_file {str(file)!r} cannot be read: {reason}") from None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
