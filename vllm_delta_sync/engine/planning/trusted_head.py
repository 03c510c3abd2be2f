"""``TrustedHead`` refuses a head older than, or contradicting, what this machine has seen (rollback protection)."""

from datetime import UTC, datetime, timedelta
from typing import Any

from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.engine.logger import logger
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    ExpiredError,
    ForkError,
    NotFoundError,
    ReplayError,
    StoreError,
)
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.manifest import Head, Manifest
from vllm_delta_sync.logs import LogThrottle
from vllm_delta_sync.settings import Settings
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import short
from vllm_delta_sync.trust.last_seen import LastSeen, LastSeenStore

CLOCK_LEEWAY = timedelta(seconds=60)
"""Tolerated difference between clocks."""
REPEAT_SECONDS = 600.0


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
        # The version served that was found to be an ancestor of the head.
        self._checked = ""
        self._log = LogThrottle(logger, REPEAT_SECONDS)
        self._run: Run | None = None
        self._head: Head | None = None
        self._looked = False
        if keyring.checks_signatures:
            url = open_bucket(settings.bucket, settings.store().without_copies()).url
            self._file = LastSeenStore(settings.state_folder(), url, keyring.trusted)
            if writes:
                self._file.prepare()
            self.reload_last_seen()

    def reload_last_seen(self) -> None:
        """Read at the start of a poll what servers of this machine have seen.

        What they see during the poll does not count: they may simply be ahead, and that does not make this poll's head
        a replay.

        Raises:
            StoreError, SettingsError: the last seen head cannot be read.
        """
        kept = None if self._file is None else self._file.load()
        known = self._last_seen
        if kept is not None and (known is None or (kept.run == known.run and kept.version > known.version)):
            self._last_seen = kept

    def check_run(self, run: Run) -> None:
        """Check a run that was opened.

        Raises:
            ChainError: another run was seen at this URL before. ForkError: the run's ``run.json`` has changed.
        """
        if self._file is None:
            return
        last_seen, before = self._last_seen, self._run
        if last_seen is not None and run.info.run != last_seen.run:
            raise ChainError(
                f"{run.bucket.url!r} has run {run.info.run} now, and had run {last_seen.run} before: refused. "
                f"{self._remedy('the run was begun anew')}"
            )
        if before is not None and before.info.run == run.info.run and before.info.digest != run.info.digest:
            raise ForkError(
                f"run.json of run {run.info.run} at {run.bucket.url!r} has SHA-256 {run.info.digest} now, and had "
                f"{before.info.digest} before: run.json never changes. Restore the former one, or restart the server "
                "if the new one is right"
            )
        self._run = run

    def accept_head(self, run: Run, head: Manifest, stopped_by: DeltaSyncError | None, served: Manifest | None) -> None:
        """Refuse a head, or store it as the last seen one.

        Args:
            stopped_by: what is wrong with the version after it. served: the version served, if it is of this run.

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
        if served is not None and served.digest != self._checked:
            self._check_descends(run, head, (served.version, served.digest), stopped_by)
            self._checked = served.digest
        key = "" if head.signature is None else head.signature.key
        seen = LastSeen(run.info.run, head.version, head.digest, key)
        if self._writes and (seen != last_seen or not self._saved):
            try:
                self._file.advance_to(seen)
                self._saved = True
            except StoreError as error:
                # This process still remembers it, and a full disk must not stop updates.
                self._saved = False
                self._log.warn(f"{error.kind}: {error.message}", StoreError.kind)
        self._last_seen = seen

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
            self._log.forget(ExpiredError.kind)
            return None
        self._log.warn(f"{error.kind}: {error.message}", error.kind)
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
        seen, head = self._last_seen, self._head
        return {
            "keys": [short(key) for key in sorted(self._keyring.trusted)],
            "last_seen": None
            if seen is None
            else {"run": seen.run, "version": seen.version, "manifest": seen.manifest, "kept": self._saved},
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
            there = run.ancestors.digest(head.version - 1, head.parent or "", version)
        if there != digest:
            raise ForkError(
                f"version {head.version} in the bucket descends from {there} as version {version}, but {digest} was "
                f"seen as version {version} before: there are two histories. {self._remedy('history was rewritten')}"
            )

    def _remedy(self, purpose: str) -> str:
        path = "" if self._file is None else str(self._file.path)
        return f"If {purpose} on purpose, remove {path!r} and restart the servers that follow it"


def _is_past(moment: str | None) -> bool:
    """Return whether a document has expired; one without an expiry never has."""
    if moment is None:
        return False
    try:
        end = datetime.fromisoformat(moment)
    except ValueError:
        return True
    return datetime.now(UTC) - CLOCK_LEEWAY > end
