"""What was seen of a run before, in this life and in earlier ones: what is older, or another, is refused."""

import time
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

LEEWAY = timedelta(seconds=60)
"""How far clocks may be apart."""
REPEAT_SECONDS = 600.0
PROVEN = 1024
"""Versions served of which is remembered that the chain leads on from them."""


class TrustedHead:
    """Judges heads by the newest that was seen. Sees and refuses nothing without trusted keys.

    The mark is raised when a head is accepted, before anything of it is committed: what is kept is which history there
    is, not what is served, and a crash in between must not make it forgotten. Threads: one drives it; ``document`` may
    be called from any.

    Args:
        writes: whether marks are kept in ``state_dir``, rather than only read there.

    Raises:
        SettingsError: ``state_dir`` cannot be written, or is damaged.
    """

    def __init__(self, settings: Settings, keyring: Keyring, writes: bool = True) -> None:
        self._keyring = keyring
        self._writes = writes
        self._refuses = settings.expired_head == "refuse"
        self._file: LastSeenStore | None = None
        self._mark: LastSeen | None = None
        self._kept = True
        self._proven: dict[str, None] = {}
        self._said: dict[str, float] = {}
        self._run: Run | None = None
        self._head: Head | None = None
        self._looked = False
        if keyring.checks_signatures:
            self._file = LastSeenStore(settings.state_folder(), open_bucket(settings.bucket, settings.store()).url)
            if writes:
                self._file.prepare()
            self._remember()

    def recall(self) -> None:
        """A look begins: what it finds is judged by what servers of this machine have seen up to now.

        Not by what they see while it lasts: they may be faster, and it is no older state that it finds then.

        Raises:
            StoreError, SettingsError: what was seen before cannot be read.
        """
        mark = self._remember()
        if mark is not None and self._run is not None:
            self._run.verifier.keys.add_revoked(mark.revoked)

    def admit(self, run: Run) -> None:
        """A run was opened.

        Raises:
            ChainError: it is another than was seen before. ForkError: it is the same, and its ``run.json`` another.
            ReplayError: its ``keys.json`` is older. SignatureError: that is signed by a key that was revoked before.
        """
        if self._file is None:
            return
        mark, before = self._mark, self._run
        if mark is not None:
            if run.info.run != mark.run:
                raise ChainError(
                    f"run {run.info.run} lies at {run.bucket.url!r} now, and run {mark.run} was seen there before: "
                    f"refused. {self._mend('the run was begun anew')}"
                )
            run.verifier.keys.accept(run.verifier.keys.file, mark.keys, mark.revoked)
        if before is not None and before is not run and before.info.run == run.info.run:
            if before.info.digest != run.info.digest:
                raise ForkError(
                    f"run.json of run {run.info.run} at {run.bucket.url!r} has SHA-256 {run.info.digest} now, and had "
                    f"{before.info.digest}: a run's never changes. Put the former back, or start the server again if "
                    "this one is right"
                )
            known = before.verifier.keys
            run.verifier.keys.accept(
                run.verifier.keys.file, 0 if known.file is None else known.file.sequence, known.revoked
            )
        if mark is not None:
            self._forget_revoked(run, mark)
        self._run = run
        if self._mark is not None:
            # Kept even where none of the versions turns out to be any good.
            self._raise_to(_with_keys(self._mark, run))

    def fallen(self, run: Run, held: Manifest) -> SignatureError | None:
        """What is wrong with a version that was believed when it was taken; None if it still may be."""
        if self._file is None or not _is_fallen(run, held.version, held.digest, _signer(held)):
            return None
        return SignatureError(
            f"version {held.version}, which was served, is signed by key {short(_signer(held))}, whose word does not "
            "hold for it any more"
        )

    def _forget_revoked(self, run: Run, mark: LastSeen) -> None:
        """Go back to a key's last word, if what was seen last is not part of that.

        Otherwise whoever stole a key could show one version, take it away, and so keep honest ones out for ever.
        """
        file = run.verifier.keys.file
        entry = None if file is None else file.entry(mark.key)
        if file is None or entry is None or not _is_fallen(run, mark.version, mark.manifest, mark.key):
            return
        last = _last_believed(run, file, entry)
        version = last.version
        lower = LastSeen(mark.run, mark.keys, version, last.digest, _signer(last))
        lower = lower.with_key_list(file.sequence, mark.revoked)
        logger.warning(
            "version %d, seen before, was signed by key %s, whose word holds no more: forgotten, back to version %d",
            mark.version, short(mark.key), version,
        )  # fmt: skip
        if self._file is not None and self._writes:
            kept = self._file.load()
            if kept is not None and kept.key == mark.key:
                self._file.retract_to(kept, lower)
        self._mark = lower

    def accept(self, run: Run, head: Manifest, stopped_by: DeltaSyncError | None, served: Manifest | None) -> None:
        """A head was found: refuse it, or raise the mark to it.

        Args:
            stopped_by: what is wrong with the version after it. served: the version served, if it is of this run;
                the head need not descend from it if it is ``fallen``.

        Raises:
            ReplayError: the head is older than what was seen. ForkError: it does not descend from that.
            DeltaSyncError: ``stopped_by``, where that is why no newer head was found; or a manifest between cannot be
                read. Else as ``admit``.
        """
        if self._file is None:
            return
        self.admit(run)
        mark = self._mark
        if mark is not None:
            self._check(run, head, (mark.version, mark.manifest), stopped_by)
        if served is not None and served.digest not in self._proven and self.fallen(run, served) is None:
            self._check(run, head, (served.version, served.digest), stopped_by)
            self._proven[served.digest] = None
            self._proven = dict.fromkeys(list(self._proven)[-PROVEN:])
        self._raise_to(_with_keys(LastSeen(run.info.run, 0, head.version, head.digest, _signer(head)), run))

    def missed(self, error: NotFoundError) -> DeltaSyncError:
        """What it means that a run shows no version at all."""
        mark = self._mark
        if self._file is None or mark is None:
            return error
        return ReplayError(
            f"{error.message}; and version {mark.version} was seen before. {self._mend('it was emptied')}"
        )

    def expiry(self, run: Run, stopped_by: DeltaSyncError | None) -> ExpiredError | None:
        """What is wrong with the age of HEAD.json as it was read last; told to the log now and then."""
        self._head, self._looked = run.pointer, True
        if self._file is None or (run.pointer is None and stopped_by is not None):
            return None
        if run.pointer is None:
            error = ExpiredError(
                f"{run.bucket.url!r} has no HEAD.json: nobody says until when what is there may be taken for the newest"
            )
        elif _is_past(run.pointer.expires_at):
            error = ExpiredError(
                f"HEAD.json has run out at {run.pointer.expires_at}, and this machine's clock says {timestamp()}: "
                "its publisher has ended, or cannot reach the bucket, or somebody hides what came later, so that there "
                "may be newer versions than those that can be seen; or a clock is wrong"
            )
        else:
            self._said.pop(ExpiredError.kind, None)
            return None
        self._say(ExpiredError.kind, error)
        return error

    def check_fresh(self, run: Run, stopped_by: DeltaSyncError | None, expired: ExpiredError | None) -> None:
        """Raise if the setting ``expired_head`` says that no new version is to be taken now."""
        if self._file is None or not self._refuses:
            return
        if expired is not None:
            raise expired
        if run.pointer is None and stopped_by is not None:
            raise stopped_by

    def document(self) -> dict[str, Any] | None:
        """``trust`` in the status; None without trusted keys."""
        if self._file is None:
            return None
        run, mark = self._run, self._mark
        file = None if run is None else run.verifier.keys.file
        head = self._head
        shown = None
        if mark is not None:
            shown = {"run": mark.run, "keys": mark.keys, "version": mark.version, "manifest": mark.manifest}
            shown["kept"] = self._kept
        return {
            "keys": [short(key) for key in sorted(self._keyring.trusted)],
            "key_file": None if file is None else file.sequence,
            "mark": shown,
            "expires_at": None if head is None else head.expires_at,
            "expired": self._looked and (head is None or _is_past(head.expires_at)),
        }

    def _check(self, run: Run, head: Manifest, known: tuple[int, str], stopped_by: DeltaSyncError | None) -> None:
        version, digest = known
        if head.version < version:
            if stopped_by is not None and not isinstance(stopped_by, NotFoundError):
                raise stopped_by
            raise ReplayError(
                f"the newest version in the bucket is {head.version}, and {version} was seen before: an older state "
                f"was put back, or what came later is hidden. {self._mend('it was put back')}"
            )
        there = head.digest
        if head.version > version:
            there = run.verifier.ancestor_digest(head.version - 1, head.parent or "", version)
        if there != digest:
            raise ForkError(
                f"version {head.version} in the bucket goes on from {there} as version {version}, and {digest} was "
                f"seen as version {version} before: there are two histories. {self._mend('history was rewritten')}"
            )

    def _mend(self, purpose: str) -> str:
        path = "" if self._file is None else str(self._file.path)
        return f"If {purpose} on purpose, remove {path!r} and start the servers that follow it again"

    def _remember(self) -> LastSeen | None:
        """The newest that was seen by any server of this machine, as far as it is of the same run."""
        kept = None if self._file is None else self._file.load()
        mark = self._mark
        if kept is not None and (mark is None or kept.run == mark.run):
            newest = kept if mark is None or kept.version > mark.version else mark
            newest = newest.with_key_list(kept.keys, kept.revoked)
            self._mark = newest if mark is None else newest.with_key_list(mark.keys, mark.revoked)
        return self._mark

    def _raise_to(self, mark: LastSeen) -> None:
        known = self._mark
        if known is not None:
            mark = mark.with_key_list(known.keys, known.revoked)
        if self._file is None or (known == mark and self._kept):
            return
        if self._writes:
            try:
                self._file.advance_to(mark)
                self._kept = True
            except StoreError as error:
                # What is known in this life still holds, and a full disk must not keep weights from being current.
                self._kept = False
                self._say(StoreError.kind, error)
        self._mark = mark

    def _say(self, kind: str, error: DeltaSyncError) -> None:
        now = time.monotonic()
        if now - self._said.get(kind, -REPEAT_SECONDS) >= REPEAT_SECONDS:
            self._said[kind] = now
            logger.warning("%s: %s", error.kind, error.message)


def _last_believed(run: Run, file: KeyFile, entry: KeyEntry) -> Manifest:
    """The last word of a key; or of the one that had signed that, if it holds no more either, and so on."""
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


def _with_keys(mark: LastSeen, run: Run) -> LastSeen:
    """A mark, with which list of keys was seen, and whom it revokes."""
    file = run.verifier.keys.file
    return mark.with_key_list(0 if file is None else file.sequence, run.verifier.keys.revoked)


def _is_fallen(run: Run, version: int, digest: str, key: str) -> bool:
    """Whether a manifest that was believed is none of those for which its key's word still holds.

    Raises:
        StoreError: the store failed. Where it cannot be told for another reason it is not.
    """
    file = run.verifier.keys.file
    entry = None if file is None else file.entry(key)
    if entry is None or entry.last is None:
        return entry is not None and entry.revoked
    if version > entry.last.version:
        return True
    try:
        return run.verifier.ancestor_digest(entry.last.version, entry.last.manifest, version) != digest
    except StoreError:
        raise
    except DeltaSyncError:
        return False


def _is_past(moment: str | None) -> bool:
    """Whether a document's time is over; one without an end is never."""
    if moment is None:
        return False
    try:
        end = datetime.fromisoformat(moment)
    except ValueError:
        return True
    return datetime.now(UTC) > end + LEEWAY
