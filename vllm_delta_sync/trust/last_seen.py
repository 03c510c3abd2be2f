"""``LastSeenStore`` keeps the newest state that a receiver saw of a run across restarts (TUF's rollback protection)."""

import fcntl
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from vllm_delta_sync.errors import ChainError, ForkError, SettingsError, StoreError

_FIELDS = {"run": str, "keys": int, "version": int, "manifest": str, "key": str}
_REVOKED = "revoked"


@dataclass(frozen=True)
class LastSeen:
    """The newest state seen: the run's id, the sequence of keys.json (0: none), version and digest of a manifest.

    Attributes:
        key: the key that signed the manifest. If it is revoked, the version may be replaced by an older one.
        revoked: trusted keys that another trusted key revoked, ascending. A keys.json that they sign is refused.
    """

    run: str
    keys: int
    version: int
    manifest: str
    key: str = ""
    revoked: tuple[str, ...] = ()

    def with_key_list(self, keys: int, revoked: Iterable[str]) -> "LastSeen":
        """Return a copy that also remembers another key list that was seen."""
        return replace(self, keys=max(self.keys, keys), revoked=tuple(sorted({*self.revoked, *revoked})))


class LastSeenStore:
    """Stores the ``LastSeen`` of one run URL in a file. Several servers on a machine may share the file.

    Args:
        folder: created if it does not exist, for this user only.

    Attributes:
        path: the file.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.path = folder / f"{sha256(url.encode()).hexdigest()[:32]}.json"

    def load(self) -> LastSeen | None:
        """Return what was seen; None if nothing was seen yet.

        Raises:
            SettingsError: the file is malformed. StoreError: it cannot be read.
        """
        try:
            value = json.loads(self.path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreError(
                f"what was seen of the run cannot be read from {str(self.path)!r}: {error.strerror}"
            ) from error
        except ValueError as error:
            raise self._damaged() from error
        return self._parsed(value)

    def prepare(self) -> None:
        """Check that the file can be read and written.

        Raises:
            SettingsError: the folder is not writable, or the file is malformed.
        """
        try:
            with self._locked():
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
            with self._locked():
                kept = self.load()
                if kept is not None:
                    self._check_same(kept, mark)
                    newest = mark if mark.version > kept.version else kept
                    mark = newest.with_key_list(mark.keys, mark.revoked).with_key_list(kept.keys, kept.revoked)
                    if mark == kept:
                        return
                self._write(mark)
        except OSError as error:
            raise StoreError(
                f"what was seen of the run cannot be written to {str(self.path)!r}: {error.strerror}; make room, or "
                "set state_dir"
            ) from error

    def retract_to(self, believed: LastSeen, mark: LastSeen) -> None:
        """Replace ``believed``, whose signature is no longer valid, by the older ``mark``, if the file still has it.

        Raises:
            StoreError: it cannot be written. SettingsError: as ``load``.
        """
        try:
            with self._locked():
                if self.load() == believed:
                    self._write(mark)
        except OSError as error:
            raise StoreError(
                f"what was seen of the run cannot be written to {str(self.path)!r}: {error.strerror}; make room, or "
                "set state_dir"
            ) from error

    @contextmanager
    def _locked(self) -> Iterator[None]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with open(self.path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, mark: LastSeen) -> None:
        part = self.path.with_suffix(".part")
        with open(part, "w", encoding="utf-8") as file:
            json.dump(asdict(mark), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.path)
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def _check_same(self, kept: LastSeen, mark: LastSeen) -> None:
        if kept.run != mark.run:
            raise ChainError(f"{str(self.path)!r} records run {kept.run} for this URL, which now holds run {mark.run}")
        if kept.version == mark.version and kept.manifest != mark.manifest:
            raise ForkError(
                f"another server on this machine saw manifest {kept.manifest} as version {kept.version}, this one sees "
                f"{mark.manifest}: the history was forked"
            )

    def _parsed(self, value: Any) -> LastSeen:
        if not isinstance(value, dict):
            raise self._damaged()
        # Files of older releases lack this field.
        revoked = value.pop(_REVOKED, [])
        if not isinstance(revoked, list) or any(type(key) is not str for key in revoked):
            raise self._damaged()
        if value.keys() != _FIELDS.keys() or any(type(value[name]) is not kind for name, kind in _FIELDS.items()):
            raise self._damaged()
        return LastSeen(**value, revoked=tuple(revoked))

    def _damaged(self) -> SettingsError:
        return SettingsError(
            f"{str(self.path)!r} is damaged and does not say what was seen of the run; remove it if you know that the "
            "bucket was not put back to an older state"
        )
