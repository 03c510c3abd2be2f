"""``TrustedHead`` refuses a head older than, or contradicting, what this machine has seen (rollback protection)."""

import time
from datetime import UTC, datetime, timedelta
from typing import Any

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    DeltaSyncError,
    ExpiredError,
    ForkError,
    NotFoundError,
    ReplayError,
    SignatureError,
    StoreError,
)
from vllm_delta_sync.format.documents import KeyEntry, KeyFile
from vllm_delta_sync.format.manifest import Head, Manifest, timestamp
from vllm_delta_sync.run.documents import revoked_manifest
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import short
from vllm_delta_sync.trust.last_seen import LastSeen, LastSeenStore

CLOCK_LEEWAY = timedelta(seconds=60)
"""Tolerated difference between clocks."""
REPEAT_SECONDS = 600.0
MAX_CHECKED = 1024
"""Served versions that are remembered to be ancestors of the head."""


class TrustedHead:
    """Compares heads with the newest one seen. Does nothing without trusted keys.

    The last seen head is stored when a head is accepted, before it is committed: it records which history exists, not
    what is served, and must survive a crash in between. One thread drives this class; ``document`` may be called from
    any.

    Args:
        writes: whether to store the last seen head in ``state_dir``; otherwise it is only read.

    Raises:
        SettingsError: ``state_dir`` cannot be written, or is damaged.
    """

    def __init__(self, settings: Settings, keyring: Keyring, writes: bool = True) -> None:
        self._keyring = keyring
        self._writes = writes
        self._refuses = settings.expired_head == "refuse"
        self._file: LastSeenStore | None = None
        self._last_seen: LastSeen | None = None
        self._saved = True
        self._checked: dict[str, None] = {}
        self._logged_at: dict[str, float] = {}
        self._run: Run | None = None
        self._head: Head | None = None
        self._looked = False
        if keyring.checks_signatures:
            self._file = LastSeenStore(settings.state_folder(), open_bucket(settings.bucket, settings.store()).url)
            if writes:
                self._file.prepare()
            self._merge_last_seen()

    def reload_last_seen(self) -> None:
        """Read at the start of a poll what servers of this machine have seen.

        What they see during the poll does not count: they may simply be ahead, and that does not make this poll's head
        a replay.

        Raises:
            StoreError, SettingsError: the last seen head cannot be read.
        """
        last_seen = self._merge_last_seen()
        if last_seen is not None and self._run is not None:
            self._run.verifier.keys.add_revoked(last_seen.revoked)

    def check_run(self, run: Run) -> None:
        """Check a run that was opened, and adopt its key revocations.

        Raises:
            ChainError: another run was seen at this URL before. ForkError: the run's ``run.json`` has changed.
            ReplayError: its ``keys.json`` is older. SignatureError: a key that was revoked before signed it.
        """
        if self._file is None:
            return
        last_seen, before = self._last_seen, self._run
        if last_seen is not None:
            if run.info.run != last_seen.run:
                raise ChainError(
                    f"{run.bucket.url!r} has run {run.info.run} now, and had run {last_seen.run} before: refused. "
                    f"{self._remedy('the run was begun anew')}"
                )
            run.verifier.keys.accept(run.verifier.keys.file, last_seen.keys, last_seen.revoked)
        if before is not None and before is not run and before.info.run == run.info.run:
            if before.info.digest != run.info.digest:
                raise ForkError(
                    f"run.json of run {run.info.run} at {run.bucket.url!r} has SHA-256 {run.info.digest} now, and had "
                    f"{before.info.digest} before: run.json never changes. Restore the former one, or restart the "
                    "server if the new one is right"
                )
            known = before.verifier.keys
            run.verifier.keys.accept(
                run.verifier.keys.file, 0 if known.file is None else known.file.sequence, known.revoked
            )
        if last_seen is not None:
            self._drop_revoked(run, last_seen)
        self._run = run
        if self._last_seen is not None:
            # Stored even if no version turns out to be good.
            self._advance_last_seen(_with_keys(self._last_seen, run))

    def revoked_signature(self, run: Run, held: Manifest) -> SignatureError | None:
        """Return the error if a version's signature has been revoked since it was taken; None if it is still valid."""
        if self._file is None or not _is_revoked(run, held.version, held.digest, _signer(held)):
            return None
        return SignatureError(
            f"version {held.version}, which was served, is signed by key {short(_signer(held))}, which is revoked for "
            "this version"
        )

    def _drop_revoked(self, run: Run, last_seen: LastSeen) -> None:
        """If the last seen head's signature was revoked since, move back to the last version its key is valid for.

        Otherwise a stolen key could sign one high version, whose removal would block honest versions forever.
        """
        file = run.verifier.keys.file
        entry = None if file is None else file.entry(last_seen.key)
        if file is None or entry is None or not _is_revoked(run, last_seen.version, last_seen.manifest, last_seen.key):
            return
        last = _last_valid(run, file, entry)
        version = last.version
        lower = LastSeen(last_seen.run, last_seen.keys, version, last.digest, _signer(last))
        lower = lower.with_key_list(file.sequence, last_seen.revoked)
        logger.warning(
            "version %d, seen before, was signed by key %s, which is revoked for it: the last seen version is now %d",
            last_seen.version, short(last_seen.key), version,
        )  # fmt: skip
        if self._file is not None and self._writes:
            kept = self._file.load()
            if kept is not None and kept.key == last_seen.key:
                self._file.retract_to(kept, lower)
        self._last_seen = lower

    def accept_head(self, run: Run, head: Manifest, stopped_by: DeltaSyncError | None, served: Manifest | None) -> None:
        """Refuse a head, or store it as the last seen one.

        Args:
            stopped_by: what is wrong with the version after it. served: the version served, if it is of this run;
                the head need not descend from it if its signature was revoked.

        Raises:
            ReplayError: the head is older than the last seen one. ForkError: it does not descend from that.
            DeltaSyncError: ``stopped_by``, if that hides newer versions; or a manifest between is unreadable. Other
                errors as ``check_run``.
        """
        if self._file is None:
            return
        self.check_run(run)
        last_seen = self._last_seen
        if last_seen is not None:
            self._check_descends(run, head, (last_seen.version, last_seen.manifest), stopped_by)
        if served is not None and served.digest not in self._checked and self.revoked_signature(run, served) is None:
            self._check_descends(run, head, (served.version, served.digest), stopped_by)
            self._checked[served.digest] = None
            self._checked = dict.fromkeys(list(self._checked)[-MAX_CHECKED:])
        self._advance_last_seen(_with_keys(LastSeen(run.info.run, 0, head.version, head.digest, _signer(head)), run))

    def empty_run_error(self, error: NotFoundError) -> DeltaSyncError:
        """Return the error for a run without versions: a replay, if some were seen before."""
        last_seen = self._last_seen
        if self._file is None or last_seen is None:
            return error
        return ReplayError(
            f"{error.message}, but version {last_seen.version} was seen before. {self._remedy('it was emptied')}"
        )

    def check_expiry(self, run: Run, stopped_by: DeltaSyncError | None) -> ExpiredError | None:
        """Return the error if HEAD.json, as read last, is missing or expired; logged from time to time."""
        self._head, self._looked = run.pointer, True
        if self._file is None or (run.pointer is None and stopped_by is not None):
            return None
        if run.pointer is None:
            error = ExpiredError(
                f"{run.bucket.url!r} has no HEAD.json, so it is unknown until when its newest version counts as current"
            )
        elif _is_past(run.pointer.expires_at):
            error = ExpiredError(
                f"HEAD.json expired at {run.pointer.expires_at}, and this machine's clock says {timestamp()}: the "
                "publisher has ended or cannot reach the bucket, an attacker hides newer versions, or a clock is wrong"
            )
        else:
            self._logged_at.pop(ExpiredError.kind, None)
            return None
        self._log(ExpiredError.kind, error)
        return error

    def check_fresh(self, run: Run, stopped_by: DeltaSyncError | None, expired: ExpiredError | None) -> None:
        """Raise if the head is expired and the setting ``expired_head`` refuses new versions then."""
        if self._file is None or not self._refuses:
            return
        if expired is not None:
            raise expired
        if run.pointer is None and stopped_by is not None:
            raise stopped_by

    def document(self) -> dict[str, Any] | None:
        """Return ``trust`` in the status; None without trusted keys."""
        if self._file is None:
            return None
        run, last_seen = self._run, self._last_seen
        file = None if run is None else run.verifier.keys.file
        head = self._head
        shown = None
        if last_seen is not None:
            shown = {
                "run": last_seen.run,
                "keys": last_seen.keys,
                "version": last_seen.version,
                "manifest": last_seen.manifest,
            }
            shown["kept"] = self._saved
        return {
            "keys": [short(key) for key in sorted(self._keyring.trusted)],
            "key_file": None if file is None else file.sequence,
            "last_seen": shown,
            "expires_at": None if head is None else head.expires_at,
            "expired": self._looked and (head is None or _is_past(head.expires_at)),
        }

    def _check_descends(
        self, run: Run, head: Manifest, known: tuple[int, str], stopped_by: DeltaSyncError | None
    ) -> None:
        version, digest = known
        if head.version < version:
            if stopped_by is not None and not isinstance(stopped_by, NotFoundError):
                raise stopped_by
            raise ReplayError(
                f"the newest version in the bucket is {head.version}, but version {version} was seen before: an older "
                f"state was restored, or newer versions are hidden. {self._remedy('it was restored')}"
            )
        there = head.digest
        if head.version > version:
            there = run.verifier.ancestor_digest(head.version - 1, head.parent or "", version)
        if there != digest:
            raise ForkError(
                f"version {head.version} in the bucket descends from {there} as version {version}, but {digest} was "
                f"seen as version {version} before: there are two histories. {self._remedy('history was rewritten')}"
            )

    def _remedy(self, purpose: str) -> str:
        path = "" if self._file is None else str(self._file.path)
        return f"If {purpose} on purpose, remove {path!r} and restart the servers that follow it"

    def _merge_last_seen(self) -> LastSeen | None:
        """Merge in the newest head that any server of this machine has seen of the same run."""
        kept = None if self._file is None else self._file.load()
        last_seen = self._last_seen
        if kept is not None and (last_seen is None or kept.run == last_seen.run):
            newest = kept if last_seen is None or kept.version > last_seen.version else last_seen
            newest = newest.with_key_list(kept.keys, kept.revoked)
            self._last_seen = newest if last_seen is None else newest.with_key_list(last_seen.keys, last_seen.revoked)
        return self._last_seen

    def _advance_last_seen(self, last_seen: LastSeen) -> None:
        known = self._last_seen
        if known is not None:
            last_seen = last_seen.with_key_list(known.keys, known.revoked)
        if self._file is None or (known == last_seen and self._saved):
            return
        if self._writes:
            try:
                self._file.advance_to(last_seen)
                self._saved = True
            except StoreError as error:
                # This process still remembers it, and a full disk must not stop updates.
                self._saved = False
                self._log(StoreError.kind, error)
        self._last_seen = last_seen

    def _log(self, kind: str, error: DeltaSyncError) -> None:
        now = time.monotonic()
        if now - self._logged_at.get(kind, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self._logged_at[kind] = now
            logger.warning("%s: %s", error.kind, error.message)


def _last_valid(run: Run, file: KeyFile, entry: KeyEntry) -> Manifest:
    """Return a key's last valid version; if another revoked key signed it, that key's last one, and so on."""
    while True:
        version = 0 if entry.last is None else entry.last.version
        try:
            last = run.manifest(version)
        except SignatureError:
            given_up = revoked_manifest(run, version)
            before = None if given_up is None else file.entry(_signer(given_up))
            if before is None or (before.last is not None and before.last.version >= version) or version == 0:
                raise
            entry = before
            continue
        if entry.last is not None and last.digest != entry.last.manifest:
            raise ForkError(f"version {version} is {last.digest}, and keys.json names {entry.last.manifest}")
        return last


def _signer(manifest: Manifest) -> str:
    return "" if manifest.signature is None else manifest.signature.key


def _with_keys(last_seen: LastSeen, run: Run) -> LastSeen:
    """Return a last seen head that also records the run's keys.json and its revocations."""
    file = run.verifier.keys.file
    return last_seen.with_key_list(0 if file is None else file.sequence, run.verifier.keys.revoked)


def _is_revoked(run: Run, version: int, digest: str, key: str) -> bool:
    """Return whether the key of a manifest that was accepted is revoked for it. False if that cannot be determined.

    Raises:
        StoreError: the store failed.
    """
    file = run.verifier.keys.file
    entry = None if file is None else file.entry(key)
    if entry is None or entry.last is None:
        return entry is not None and entry.revoked
    if version > entry.last.version:
        return True
    try:
        return run.verifier.ancestor_digest(entry.last.version, entry.last.manifest, version) != digest
    except DataError:
        return False


def _is_past(moment: str | None) -> bool:
    """Return whether a document has expired; one without an expiry never has."""
    if moment is None:
        return False
    try:
        end = datetime.fromisoformat(moment)
    except ValueError:
        return True
    return datetime.now(UTC) > end + CLOCK_LEEWAY
