"""``LastSeenStore`` keeps the newest state that a receiver saw of a run across restarts (TUF's rollback protection)."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter

from vllm_delta_sync.durable_files import StateFile
from vllm_delta_sync.errors import ChainError, ForkError, SettingsError, StoreError

MAX_LAST_SEEN_BYTES = 1 << 20


@dataclass(frozen=True)
class LastSeen:
    """The newest state seen: the run's id, the sequence of keys.json (0: none), version and digest of a manifest.

    Attributes:
        key: the key that signed the manifest. If it is revoked, the version may be replaced by an older one.
        revoked: trusted keys that another trusted key revoked, ascending. A keys.json that they sign is refused.
    """

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")

    run: str
    keys: int
    version: int
    manifest: str
    key: str
    revoked: tuple[str, ...] = ()  # Files of older releases lack it.

    def with_key_list(self, keys: int, revoked: Iterable[str]) -> "LastSeen":
        """Return a copy that also remembers another key list that was seen."""
        return replace(self, keys=max(self.keys, keys), revoked=tuple(sorted({*self.revoked, *revoked})))


_FORMAT = TypeAdapter(LastSeen)


class LastSeenStore:
    """Stores the ``LastSeen`` of one run URL in a file. Several servers on a machine may share the file.

    Args:
        folder: created if it does not exist, for this user only.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.path = folder / f"{sha256(url.encode()).hexdigest()[:32]}.json"
        # Older releases left the file's mode to the umask, and network disks may show another owner. The next write
        # makes it private; a server that refused it until then would not start after an upgrade.
        self._file = StateFile(self.path, MAX_LAST_SEEN_BYTES, lock=self.path.with_suffix(".lock"), check_owner=False)

    def load(self) -> LastSeen | None:
        """Return what was seen; None if nothing was seen yet.

        Raises:
            SettingsError: the file is malformed. StoreError: it cannot be read.
        """
        try:
            return _FORMAT.validate_json(self._file.read())
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
        with self._locked_for_writing():
            kept = self.load()
            if kept is not None:
                self._check_same(kept, mark)
                newest = mark if mark.version > kept.version else kept
                mark = newest.with_key_list(mark.keys, mark.revoked).with_key_list(kept.keys, kept.revoked)
            if mark != kept:
                self._file.write(_FORMAT.dump_json(mark))

    def retract_to(self, believed: LastSeen, mark: LastSeen) -> None:
        """Replace ``believed``, whose signature is no longer valid, by the older ``mark``, if the file still has it.

        Raises:
            StoreError: it cannot be written. SettingsError: as ``load``.
        """
        with self._locked_for_writing():
            if self.load() == believed:
                self._file.write(_FORMAT.dump_json(mark))

    @contextmanager
    def _locked_for_writing(self) -> Iterator[None]:
        try:
            with self._file.locked():
                yield
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
