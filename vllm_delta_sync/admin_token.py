"""The admin token of the HTTP routes: where it comes from, and how it is kept.

A process that checks tokens keeps only the SHA-256 of its own, so neither its memory, nor an object's text, nor what
its children inherit can give the token away. Wrong tokens are neither delayed nor counted: no rate finds a random
token, and a limit would let strangers lock the operator out.
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
"""What is left in the environment once the token was taken out of it."""
SHORTEST = 16
LONGEST = 4096
_TOKEN = re.compile(r"[!-~]+")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MEND = "make one with: openssl rand -hex 32"


class AdminToken:
    """A token that can be compared with, and neither shown nor got back."""

    __slots__ = ("_digest",)

    def __init__(self, digest: bytes) -> None:
        self._digest = digest

    @classmethod
    def of(cls, text: str, source: str) -> "AdminToken":
        """Keep a token.

        Args:
            source: where it is from, for the message.

        Raises:
            SettingsError: it is empty, short, long, or has characters that a header cannot carry; never shows it.
        """
        if not text:
            raise SettingsError(f"{source} is empty; {_MEND}")
        if len(text) < SHORTEST:
            raise SettingsError(f"{source} has a token of {len(text)} characters, {SHORTEST} are the least; {_MEND}")
        if len(text) > LONGEST or not _TOKEN.fullmatch(text):
            raise SettingsError(
                f"{source} has a token that is longer than {LONGEST} or has other than printable ASCII characters; "
                + _MEND
            )
        return cls(_digest(text))

    def matches(self, given: str) -> bool:
        """Whether that is the token, in a time that says nothing of how much of it is right."""
        return hmac.compare_digest(self._digest, _digest(given))

    def __repr__(self) -> str:
        return "AdminToken(…)"


def hide(environment: MutableMapping[str, str] | None = None) -> None:
    """Put the token's SHA-256 in its place in the environment, so that processes started from now on get that alone.

    What the kernel shows of a process in ``/proc/PID/environ`` is what it was started with, and stays. What ``load``
    refuses is left for it to refuse.
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
    """The token of the setting ``admin_token_file``, or of the environment; None if there is none.

    Raises:
        SettingsError: there are two, the file cannot be read, or as ``AdminToken.of``.
    """
    environment = os.environ if environment is None else environment
    text, digest = environment.get(VARIABLE), environment.get(DIGEST_VARIABLE)
    given = [name for name, value in ((VARIABLE, text), (DIGEST_VARIABLE, digest)) if value is not None]
    if file is not None:
        given.append("admin_token_file")
    if len(given) > 1:
        raise SettingsError(f"{' and '.join(given)} are both set; give one")
    if file is not None:
        return AdminToken.of(_read(file), f"admin_token_file {str(file)!r}")
    if text is not None:
        return AdminToken.of(text, VARIABLE)
    if digest is None:
        return None
    if not _DIGEST.fullmatch(digest):
        raise SettingsError(f"{DIGEST_VARIABLE} is no SHA-256 of 64 hexadecimal digits; set {VARIABLE} instead")
    return AdminToken(bytes.fromhex(digest))


def readable_by_others(file: Path) -> bool:
    """Whether the file's mode lets anybody but its owner read it."""
    try:
        return bool(file.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH))
    except OSError:
        return False


def _read(file: Path) -> str:
    try:
        # A pipe would block for ever, and its second reader would find nothing.
        with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as opened:
            if not stat.S_ISREG(os.fstat(opened.fileno()).st_mode):
                raise SettingsError(f"admin_token_file {str(file)!r} is no regular file; write the token into one")
            return opened.read(LONGEST + 3).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        # The text of a decoding error holds the bytes.
        reason = error.strerror if isinstance(error, OSError) else "it is no text"
        raise SettingsError(f"admin_token_file {str(file)!r} cannot be read: {reason}") from None


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
