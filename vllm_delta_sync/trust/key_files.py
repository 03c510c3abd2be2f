"""Files of key pairs, of whatever kind: the private half for this user alone, the public one beside it."""

import os
import stat
from pathlib import Path

from vllm_delta_sync.errors import ConflictError, SettingsError, StoreError

PUBLIC_SUFFIX = ".pub"


def write_pair(path: Path, secret: bytes, public: bytes) -> None:
    """Write the private half to ``path`` (mode 600) and the public one to ``path``.pub.

    Raises:
        ConflictError: one of the files is there already; neither is touched. StoreError: they cannot be written.
    """
    made: list[Path] = []
    try:
        for place, content, mode in (
            (path, secret, 0o600),
            (path.with_name(path.name + PUBLIC_SUFFIX), public, 0o644),
        ):
            handle = os.open(place, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            made.append(place)
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        for place in made:
            place.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            raise ConflictError(f"{error.filename} is there already; give another path, or remove it first") from error
        raise StoreError(f"the key cannot be written to {str(path)!r}: {error.strerror}") from error


def check_private(path: Path, what: str) -> None:
    """Raise SettingsError if other users can read a private key."""
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise SettingsError(f"{what} {str(path)!r} can be read by other users; chmod 600 it")
