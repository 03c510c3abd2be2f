"""``list_keys`` and ``change_keys`` read and change ``keys.json``, the list of keys that may sign a run.

A change is first created as ``keys/<sequence>.json``, if absent, then put as ``keys.json``, which readers use. So if
two operators change the list at the same time, one gets a ConflictError and no change is lost.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import ConflictError, DataError, NotFoundError, SettingsError, SignatureError, UsageError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    KEYS_KEY,
    TAGS_PREFIX,
    Anchor,
    KeyEntry,
    KeyFile,
    KeyValidity,
    MergedDelta,
    Tag,
    anchor_key,
    merged_delta_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import HEAD_KEY, Document, Head, Manifest, timestamp, version_key
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import make_head
from vllm_delta_sync.trust.keyring import RunKeys, short

CHANGES_PREFIX = "keys/"


@dataclass(frozen=True)
class KeyRow:
    """One key. ``trusted``: it is among the reader's trusted keys, so it may change the list. ``last``: the last
    version with valid signatures; None for a key in use, and for one that is revoked for all versions."""

    key: str
    trusted: bool
    state: Literal["in use", "retired", "revoked"]
    last: KeyValidity | None


@dataclass
class KeyList:
    """Result of ``list_keys``. Without a ``keys.json``, ``sequence`` is 0 and ``signed_by`` is None."""

    sequence: int = 0
    signed_by: str | None = None
    rows: list[KeyRow] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def change_key(sequence: int) -> str:
    """Return the bucket key of the change with this sequence number."""
    return f"{CHANGES_PREFIX}{sequence:010d}.json"


def check_signer(run: RunDocuments) -> None:
    """Raise SettingsError unless readers will accept what the run's keyring signs. Any keyring fits an unsigned run."""
    signature = run.info.signature
    if signature is None:
        return
    ours = run.keyring.public
    allowed = run.verifier.keys.allowed() if run.keyring.checks_signatures else {signature.key}
    known = ", ".join(sorted(map(short, allowed))) or "(no key is in use)"
    if ours is None:
        raise SettingsError(
            f"run {run.info.run} is signed, so everything written to it must be signed; pass --signing-key PATH or set "
            f"DELTA_SYNC_SIGNING_KEY to the private key of one of: {known}"
        )
    if run.keyring.checks_signatures and ours not in allowed:
        raise SettingsError(
            f"signing_key is {short(ours)}, whose signatures readers of run {run.info.run} refuse; use the private key "
            f"of one of: {known}"
        )


def list_keys(run: RunDocuments) -> KeyList:
    """List the keys that may sign a run, and retired and revoked ones. Unverified if the keyring has no trusted keys.

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
                "interrupted; `delta-sync repair` restores the newer one"
            )
    else:
        file = _stored(run.bucket, KEYS_KEY)
        found.notes.append("no trusted keys were given, so this list was not verified")
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
    """Return the newest list that a trusted key has signed, in ``keys.json`` or a change; None if there is none."""
    names = [KEYS_KEY, *(item.key for item in bucket.list(CHANGES_PREFIX))]
    best: KeyFile | None = None
    for name in names:
        try:
            file = KeyFile.from_bytes(bucket.get(name, max_bytes=limits.MAX_SIDE_BYTES), name)
            RunKeys(keyring, run).accept(file)
        except DataError:
            continue  # not signed by a trusted key, or damaged
        if name in (KEYS_KEY, change_key(file.sequence)) and (best is None or file.sequence > best.sequence):
            best = file
    return best


def signer_of(document: Document) -> str | None:
    """Return the key that a document names as its signer; None if it is unsigned."""
    return None if document.signature is None else document.signature.key


def _stored(bucket: Bucket, key: str) -> KeyFile | None:
    try:
        return KeyFile.from_bytes(bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), key)
    except NotFoundError:
        return None


# Changing the list


NOTHING = "none"
"""Stands for a version: revoke a key for all versions."""

LastVersion = int | str | None
_Doc = TypeVar("_Doc", bound=Document)


@dataclass
class KeyChange:
    """What ``change_keys`` did.

    Attributes:
        file: the new ``keys.json``.
        versions: versions whose signatures became invalid. documents: bucket keys of other documents with such.
        head: version for which HEAD.json was signed again; None if that was not needed.
        notes: consequences, and what the operator must do.
    """

    file: KeyFile
    versions: list[int] = field(default_factory=list)
    documents: list[str] = field(default_factory=list)
    head: int | None = None
    notes: list[str] = field(default_factory=list)


def change_keys(
    bucket: Bucket,
    keyring: Keyring,
    add: Collection[str] = (),
    retire: Collection[str] = (),
    revoke: Collection[str] = (),
    version: LastVersion = None,
) -> KeyChange:
    """Change the keys that may sign a run, and sign HEAD.json again if its signature became invalid.

    Args:
        keyring: with the signing key, which must be a trusted key; without trusted keys it counts as one.
        add: public keys, 64 hex digits each, that may sign from now on. If there is no list yet, they also count as
            signers of run.json.
        retire: keys that stop signing; their signatures stay valid.
        revoke: keys that may be stolen; of their signatures, only those of manifests up to ``version`` stay valid.
        version: last version that the keys to retire or revoke signed, as ``RunDocuments.resolve`` takes it, or
            ``none`` for no version; None means the head.

    Raises:
        SettingsError: no signing key, or one that readers refuse. UsageError: the change is contradictory.
        ConflictError: another change of the list came first; this change was not made.
        NotFoundError: there is no run, or no such version. SignatureError: the signature of the run, or of the
            version that would be the last one, is not valid. ForkError: the head does not descend from that version.
        StoreError: the store failed.
    """
    requested = [*add, *retire, *revoke]
    if not requested or len(set(requested)) != len(requested):
        raise UsageError("name at least one key to add, retire or revoke, and each key only once")
    root = _trusted_signing_key(keyring, revoke)
    if RunDocuments(bucket).info.signature is None:
        raise UsageError(
            f"the run at {bucket.url} is not signed, so a list of keys has no effect; publish a new run with "
            "signing_key from version 0 on"
        )
    current = newest_file(bucket, keyring, RunDocuments(bucket).info.run)
    # Before the first list, run.json may be signed by a key that this change adds.
    run = RunDocuments(bucket, Keyring(keyring.trusted | set(add if current is None else ())))
    if run.verifier.keys.file is not None:
        RunKeys(keyring, run.info.run).accept(run.verifier.keys.file)
    notes: list[str] = []
    entries = {} if current is None else {entry.key: entry for entry in current.keys}
    for key in add:
        entries[key] = _added_entry(key, entries.get(key), notes)
    if retire or revoke:
        last = _last_valid_version(run, version, bool(revoke), notes)
        for key in (*retire, *revoke):
            entries[key] = _retired_or_revoked(key, entries.get(key), key in revoke, last)
    file = _signed(run, keyring, current, entries.values())
    change = KeyChange(file, notes=notes)
    _find_invalidated(run, keyring, change)
    _commit(bucket, keyring, file)
    if HEAD_KEY in change.documents:
        _sign_head(RunDocuments(bucket, keyring), change)
    _explain(change, root, retire, revoke)
    return change


def _trusted_signing_key(keyring: Keyring, revoke: Collection[str]) -> str:
    root = keyring.public
    if root is None:
        raise SettingsError("changing the list of keys needs --signing-key PATH with a trusted private key")
    if root not in keyring.trusted:
        raise SettingsError(
            f"signing_key is {short(root)}, which is not among trusted_keys; readers accept the list from those only"
        )
    if root in revoke:
        raise UsageError(
            f"key {short(root)} cannot revoke itself; sign with another key that the servers trust, or change the "
            "servers' trusted_keys"
        )
    return root


def _added_entry(key: str, entry: KeyEntry | None, notes: list[str]) -> KeyEntry:
    if entry is not None and entry.revoked:
        raise UsageError(f"key {short(key)} is revoked, as it may be stolen; make another with delta-sync keygen")
    if entry is not None and entry.last is not None:
        notes.append(f"key {short(key)} was retired after version {entry.last.version}, and is in use again")
    elif entry is not None:
        notes.append(f"key {short(key)} was already in use")
    return KeyEntry(key=key)


def _retired_or_revoked(key: str, entry: KeyEntry | None, revoked: bool, last: KeyValidity | None) -> KeyEntry:
    if last is None and not revoked:
        raise UsageError(
            "version none is for keys to revoke; the signatures of a retired key stay valid up to some version"
        )
    if entry is not None and entry.revoked and entry.last is None:
        raise UsageError(f"key {short(key)} is already revoked for all versions")
    before = None if entry is None else entry.last
    if before is not None and last is not None and last.version > before.version:
        # Keep the earlier last version: a later one would make signatures valid again.
        last = before
    return KeyEntry(key=key, last=last, revoked=revoked or (entry is not None and entry.revoked))


def _last_valid_version(run: RunDocuments, version: LastVersion, revoked: bool, notes: list[str]) -> KeyValidity | None:
    """Return the last version with valid signatures, with its manifest's digest; None for no version."""
    if version == NOTHING:
        return None
    if version is None:
        manifest = run.head()
        return KeyValidity(version=manifest.version, manifest=manifest.digest)
    if isinstance(version, str):
        version = run.resolve(version).version
    manifest = run.manifest(version)
    try:
        head, _ = run.reachable_head()
        if (
            head.version < version
            or run.verifier.ancestor_digest(head.version, head.digest, version) != manifest.digest
        ):
            raise NotFoundError(f"version {version} is not in the history of the head, version {head.version}")
    except DataError as error:
        if not revoked:
            raise
        # The thief of a key may have damaged the later history; that must not prevent the revocation.
        notes.append(f"the history after version {version} is not valid: {error.message}")
    return KeyValidity(version=version, manifest=manifest.digest)


def _signed(run: RunDocuments, keyring: Keyring, current: KeyFile | None, entries: Iterable[KeyEntry]) -> KeyFile:
    listed = sorted(entries, key=lambda entry: entry.key)
    if len(listed) > limits.MAX_KEYS:
        raise UsageError(f"the list would have {len(listed)} keys; at most {limits.MAX_KEYS} (MAX_KEYS) are allowed")
    file = keyring.signed(
        KeyFile(
            run=run.info.run,
            info=run.info.digest,
            sequence=1 if current is None else current.sequence + 1,
            keys=listed,
            created_at=timestamp(),
        )
    )
    # Check the list as every reader will.
    RunKeys(keyring, run.info.run).accept(file)
    return file


# Signatures that become invalid


def _find_invalidated(run: RunDocuments, keyring: Keyring, change: KeyChange) -> None:
    before, after = run.verifier.keys, RunKeys(keyring, run.info.run)
    after.accept(change.file)

    def invalidates(check: Callable[[RunKeys], object]) -> bool:
        try:
            check(before)
        except SignatureError:
            return False
        try:
            check(after)
        except SignatureError:
            return True
        return False

    def version_invalidated(version: int) -> bool:
        key = version_key(version)
        found = _read(run.bucket, Manifest, key, limits.MAX_JSON_BYTES)
        return found is not None and invalidates(lambda known: known.check_manifest(found, version, key))

    versions = run.versions()
    invalidated = in_parallel(version_invalidated, versions)
    change.versions = [version for version, invalid in zip(versions, invalidated, strict=True) if invalid]
    for key, document, version in _standalone_documents(run):
        if invalidates(lambda known, d=document, v=version, k=key: known.check_standalone(d, v, k)):  # type: ignore[misc]
            change.documents.append(key)


def _standalone_documents(run: RunDocuments) -> Iterable[tuple[str, Document, int]]:
    head = _read(run.bucket, Head, HEAD_KEY, limits.MAX_HEAD_BYTES)
    if head is not None:
        yield HEAD_KEY, head, head.version
    for version in run.anchors():
        key = anchor_key(version)
        anchor = _read(run.bucket, Anchor, key, limits.MAX_JSON_BYTES)
        if anchor is not None:
            yield key, anchor, version
    for pair in run.merged_deltas():
        key = merged_delta_key(*pair)
        merged = _read(run.bucket, MergedDelta, key, limits.MAX_JSON_BYTES)
        if merged is not None:
            yield key, merged, pair[1]
    for item in run.bucket.list(TAGS_PREFIX):
        tag = _read(run.bucket, Tag, item.key, limits.MAX_SIDE_BYTES)
        if tag is not None:
            yield item.key, tag, tag.version


def _read(bucket: Bucket, kind: type[_Doc], key: str, most: int) -> _Doc | None:
    try:
        return kind.from_bytes(bucket.get(key, max_bytes=most), key)
    except DataError:
        return None


# Writing


def _commit(bucket: Bucket, keyring: Keyring, file: KeyFile) -> None:
    place, data = change_key(file.sequence), file.to_bytes()
    try:
        bucket.put(place, data, if_absent=True)
    except ConflictError as error:
        newest = newest_file(bucket, keyring, file.run)
        if newest is not None and newest.sequence >= file.sequence and newest.to_bytes() != data:
            raise _change_conflict(newest) from error
        # No trusted key signed what is stored there.
        bucket.put(place, data)
    while True:
        newest = newest_file(bucket, keyring, file.run) or file
        bucket.put(KEYS_KEY, newest.to_bytes())
        again = newest_file(bucket, keyring, file.run)
        if again is None or again.sequence <= newest.sequence:
            break
    if bucket.get(place, max_bytes=limits.MAX_SIDE_BYTES) != data:
        raise _change_conflict(newest)


def _change_conflict(newest: KeyFile) -> ConflictError:
    by = signer_of(newest) or ""
    return ConflictError(
        f"another change of the key list came first (sequence {newest.sequence}, signed by key {short(by)}); this "
        "change was not made: check the list, then repeat the change"
    )


def _sign_head(run: RunDocuments, change: KeyChange) -> None:
    try:
        newest, _ = run.reachable_head()
    except DataError as error:
        change.notes.append(f"no version of the run has a valid signature any more: {error.message}")
        return
    run.bucket.put(HEAD_KEY, make_head(newest, run.keyring).to_bytes())
    change.documents.remove(HEAD_KEY)
    change.head = newest.version


def _explain(change: KeyChange, root: str, retire: Collection[str], revoke: Collection[str]) -> None:
    notes, file = change.notes, change.file
    for key in revoke:
        entry = file.entry(key)
        last_valid = None if entry is None else entry.last
        what = "none of its signatures is valid any more"
        if last_valid is not None:
            what = (
                f"of its signatures only those of manifests up to version {last_valid.version} stay valid; that "
                f"version has digest {last_valid.manifest}: compare it with a server that you trust"
            )
        notes.append(f"REVOKED key {short(key)}: {what}")
    if change.versions:
        listed = ", ".join(map(str, change.versions))
        notes.append(f"versions no longer valid: {listed}; servers refuse them, and one that serves them reports it")
    made = [key for key in change.documents if not key.startswith(TAGS_PREFIX)]
    if made:
        notes.append(
            f"{len(made)} anchors and merged deltas are no longer valid; `delta-sync compact --signing-key` makes them "
            "again"
        )
    tags = [key for key in change.documents if key.startswith(TAGS_PREFIX)]
    if tags:
        names = ", ".join(str(tag_of_key(key)) for key in tags)
        notes.append(f"tags no longer valid: {names}; `delta-sync tag set --signing-key` sets them again")
    if change.head is not None:
        notes.append(f"HEAD.json is now signed by {short(root)}, and names version {change.head}")
    if retire or revoke:
        notes.append("restart a publisher that signs with such a key with another key from the list")
    if root in retire:
        notes.append(f"key {short(root)} no longer signs weights, but may still change the list")
