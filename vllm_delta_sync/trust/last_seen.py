"""``LastSeenStore`` keeps the newest state that a receiver saw of a run across restarts (TUF's rollback protection)."""

from collections.abc import Collection
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from vllm_delta_sync.durable_files import StateFile
from vllm_delta_sync.errors import ChainError, ForkError, SettingsError, StoreError

MAX_LAST_SEEN_BYTES = 1 << 20


@dataclass(frozen=True)
class LastSeen:
    """The newest state seen: the run's id, version and digest of a manifest, and the key that signed it."""

    __pydantic_config__ = ConfigDict(strict=True, extra="ignore")  # Files of older releases have other members too.

    run: str
    version: int
    manifest: str
    key: str


_FORMAT = TypeAdapter(LastSeen)


class LastSeenStore:
    """Stores the ``LastSeen`` of one run URL in a file. Several servers on a machine may share the file.

    A version signed by a key that is no longer trusted counts as not seen. Otherwise the thief of a key could sign one
    high version, which would block every honest version and every new run at this URL.

    Args:
        folder: created if it does not exist, for this user only.
        trusted: the public keys that are trusted now.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path, url: str, trusted: Collection[str]) -> None:
        self._trusted = trusted
        self.path = folder / f"{sha256(url.encode()).hexdigest()[:32]}.json"
        # Older releases left the file's mode to the umask, and network disks may show another owner. The next write
        # makes it private; a server that refused it until then would not start after an upgrade.
        self._file = StateFile(self.path, MAX_LAST_SEEN_BYTES, lock=self.path.with_suffix(".lock"), check_owner=False)

    def load(self) -> LastSeen | None:
        """Return what was seen; None if nothing was seen yet, or if its key is no longer trusted.

        Raises:
            SettingsError: the file is malformed. StoreError: it cannot be read.
        """
        try:
            kept = _FORMAT.validate_json(self._file.read())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"what was seen of the run cannot be read from {str(self.path)!r}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise SettingsError(
                f"{str(self.path)!r} is damaged and does not say what was seen of the run; remove it if you know that "
                "the bucket was not put back to an older state"
            ) from error
        return kept if kept.key in self._trusted else None

    def prepare(self) -> None:
        """Check that the file can be read and written.

        Raises:
            SettingsError: the folder is not writable, or the file is malformed.
        """
        try:
            with self._file.locked():
                self.load()
        except (OSError, StoreError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise SettingsError(
                f"what was seen of the run cannot be kept in {str(self.path.parent)!r}: {reason}; set state_dir to a "
                "directory that this user can write to"
            ) from error

    def advance_to(self, mark: LastSeen) -> None:
        """Store ``mark``, unless the file holds a newer one of the same run.

        Raises:
            StoreError: it cannot be written. SettingsError: as ``load``. ForkError: the file names another manifest of
                that version. ChainError: the file names another run.
        """
        try:
            with self._file.locked():
                kept = self.load()
                if kept is not None:
                    self._check_same(kept, mark)
                if kept is None or mark.version > kept.version:
                    self._file.write(_FORMAT.dump_json(mark))
        except OSError as error:
            raise StoreError(
                f"what was seen of the run cannot be written to {str(self.path)!r}: {error.strerror}; make room, or "
                "set state_dir"
            ) from error

    def _check_same(self, kept: LastSeen, mark: LastSeen) -> None:
        if kept.run != mark.run:
            raise ChainError(f"{str(self.path)!r} records run {kept.run} for this URL, which now holds run {mark.run}")
        if kept.version == mark.version and kept.manifest != mark.manifest:
            raise ForkError(
                f"another server on this machine saw manifest {kept.manifest} as version {kept.version}, this one sees "
                f"{mark.manifest}: the history was forked"
            )
