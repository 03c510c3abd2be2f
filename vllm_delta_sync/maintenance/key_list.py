"""Who may sign a run, as ``keys.json`` says; the changes that led to it, and whether a key of ours is one of them."""

from dataclasses import dataclass, field
from typing import Literal

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, SettingsError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import KEYS_KEY, KeyEntry, KeyFile, KeyValidity
from vllm_delta_sync.format.manifest import Document
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import RunKeys, short

CHANGES_PREFIX = "keys/"


@dataclass(frozen=True)
class KeyRow:
    """One key. ``trusted``: whether the reader trusts it anyhow, so that it may change the list. ``last``: None for a
    key in use, and for one that is revoked altogether."""

    key: str
    trusted: bool
    state: Literal["in use", "retired", "revoked"]
    last: KeyValidity | None


@dataclass
class KeyList:
    """What ``list_keys`` finds. ``sequence`` is 0, and ``signed_by`` None, where there is no ``keys.json``."""

    sequence: int = 0
    signed_by: str | None = None
    rows: list[KeyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def change_key(sequence: int) -> str:
    """Key of the change that made ``keys.json`` what it is with that sequence."""
    return f"{CHANGES_PREFIX}{sequence:010d}.json"


def check_signer(run: RunDocuments) -> None:
    """Raise SettingsError unless what is written beside the run's chain will be believed by those who check it.

    A run that is not signed takes anything.
    """
    signature = run.info.signature
    if signature is None:
        return
    ours, allowed = (
        run.keyring.public,
        run.verifier.keys.allowed() if run.keyring.checks_signatures else {signature.key},
    )
    known = ", ".join(sorted(map(short, allowed))) or "none that is in use"
    if ours is None:
        raise SettingsError(
            f"run {run.info.run} is signed, and what is written beside its chain must be too; give --signing-key PATH, "
            f"or set DELTA_SYNC_SIGNING_KEY, with the private key of one of: {known}"
        )
    if run.keyring.checks_signatures and ours not in allowed:
        raise SettingsError(
            f"signing_key is {short(ours)}, whose signatures readers of run {run.info.run} refuse; give the private "
            f"key of one of: {known}"
        )


def list_keys(run: RunDocuments) -> KeyList:
    """Which keys may sign a run, and which may no more. Without trusted keys nothing of it is checked.

    Raises:
        StoreError: the store failed. DeltaSyncError: ``keys.json`` is damaged.
    """
    keyring, found = run.keyring, KeyList()
    if keyring.checks_signatures:
        file = run.verifier.keys.file
        newest = newest_file(run.bucket, keyring, run.info.run)
        if newest is not None and newest.sequence > (0 if file is None else file.sequence):
            found.notes.append(
                f"{change_key(newest.sequence)} is newer than {KEYS_KEY}: an older list was put back, or a change was "
                "cut off; `delta-sync repair` puts the newer one in its place"
            )
    else:
        file = _stored(run.bucket, KEYS_KEY)
        found.notes.append("no trusted keys were given, so nothing of this was checked")
    entries = {} if file is None else {entry.key: entry for entry in file.keys}
    if file is not None:
        found.sequence, found.signed_by = file.sequence, signer_of(file)
    named = set(keyring.trusted) | entries.keys()
    first = signer_of(run.info)
    if first is not None and not keyring.checks_signatures:
        named.add(first)
    found.rows = [_row(key, key in keyring.trusted, entries.get(key)) for key in sorted(named)]
    if first is None:
        found.notes.append("the run is not signed")
    return found


def _row(key: str, trusted: bool, entry: KeyEntry | None) -> KeyRow:
    if entry is None or (entry.last is None and not entry.revoked):
        return KeyRow(key, trusted, "in use", None)
    return KeyRow(key, trusted, "revoked" if entry.revoked else "retired", entry.last)


def newest_file(bucket: Bucket, keyring: Keyring, run: str) -> KeyFile | None:
    """The newest list that one of the trusted keys has signed, be it ``keys.json`` or a change; None if there is none.

    Raises:
        StoreError: the store failed.
    """
    names = [KEYS_KEY, *(item.key for item in bucket.list(CHANGES_PREFIX))]
    best: KeyFile | None = None
    for name in names:
        try:
            file = KeyFile.from_bytes(bucket.get(name, max_bytes=limits.MAX_SIDE_BYTES), name)
            RunKeys(keyring, run).accept(file)
        except StoreError:
            raise
        except DeltaSyncError:
            continue  # a stranger's, or damaged
        if name in (KEYS_KEY, change_key(file.sequence)) and (best is None or file.sequence > best.sequence):
            best = file
    return best


def signer_of(document: Document) -> str | None:
    """The key that a document says it is signed by."""
    return None if document.signature is None else document.signature.key


def _stored(bucket: Bucket, key: str) -> KeyFile | None:
    try:
        return KeyFile.from_bytes(bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), key)
    except NotFoundError:
        return None
