"""Who may sign a run: reading and changing ``keys.json``.

A change is first put as ``keys/<sequence>.json``, create-if-absent, then as ``keys.json``, which is what readers read.
So of two operators who change the list at the same time one gets a ConflictError, and nobody's change is lost.
"""

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.parallel import in_parallel
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
    NotFoundError,
    SettingsError,
    SignatureError,
    StoreError,
    UsageError,
)
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
from vllm_delta_sync.maintenance.key_list import change_key, newest_file, signer_of
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import head_of
from vllm_delta_sync.trust.keyring import RunKeys, short

NOTHING: Literal["none"] = "none"
"""In the place of a version: a key whose word holds for no version at all."""

LastVersion = int | Literal["none"] | None
_Doc = TypeVar("_Doc", bound=Document)


@dataclass
class KeyChange:
    """What ``change_keys`` did.

    Attributes:
        file: ``keys.json`` as it is now.
        versions: that were believed before and are not any more. documents: keys of those beside the chain.
        head: version that HEAD.json was signed again for; None if it did not have to be.
        notes: what it means, and what is to be done.
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
    """Change who may sign a run, and see to it that HEAD.json is believed afterwards.

    Args:
        keyring: with the signing key; it has to be among the trusted ones, as it is by itself.
        add: public keys, 64 hex digits each, that may sign from now on. While there is no list yet they vouch for
            run.json as well.
        retire: keys that sign no more; what they signed holds.
        revoke: keys that somebody else may have; of what they signed, only manifests up to ``version`` hold.
        version: last one that keys to retire or revoke have signed, ``none`` for no version; None: the head.

    Raises:
        SettingsError: no signing key, or one that readers would refuse. UsageError: the change makes no sense.
        ConflictError: somebody else changed the list meanwhile; nothing of this change holds.
        NotFoundError: there is no run, or no such version. SignatureError: the run, or the version that would be the
            last one, may not be believed. ForkError: the head does not descend from that version.
        StoreError: the store failed.
    """
    asked = [*add, *retire, *revoke]
    if not asked or len(set(asked)) != len(asked):
        raise UsageError("name at least one key to add, retire or revoke, and each only once")
    root = _root(keyring, revoke)
    if RunDocuments(bucket).info.signature is None:
        raise UsageError(
            f"the run at {bucket.url} is not signed, so a list of keys would bind nobody; publish a run with "
            "signing_key from its version 0 on"
        )
    current = newest_file(bucket, keyring, RunDocuments(bucket).info.run)
    # The first list says of its keys what they said of themselves: that run.json is theirs.
    run = RunDocuments(bucket, Keyring(keyring.trusted | set(add if current is None else ())))
    if run.authentic.keys.file is not None:
        RunKeys(keyring, run.info.run).take(run.authentic.keys.file)
    notes: list[str] = []
    entries = {} if current is None else {entry.key: entry for entry in current.keys}
    for key in add:
        entries[key] = _added(key, entries.get(key), notes)
    if retire or revoke:
        last = _last_word(run, version, bool(revoke), notes)
        for key in (*retire, *revoke):
            entries[key] = _ended(key, entries.get(key), key in revoke, last)
    file = _signed(run, keyring, current, entries.values())
    change = KeyChange(file, notes=notes)
    _find_fallen(run, keyring, change)
    _commit(bucket, keyring, file)
    if HEAD_KEY in change.documents:
        _sign_head(RunDocuments(bucket, keyring), change)
    _explain(change, root, retire, revoke)
    return change


def _root(keyring: Keyring, revoke: Collection[str]) -> str:
    root = keyring.public
    if root is None:
        raise SettingsError("changing the list of keys needs --signing-key PATH: the private key of a trusted key")
    if root not in keyring.trusted:
        raise SettingsError(
            f"signing_key is {short(root)}, which is not among trusted_keys; readers take the list only from those"
        )
    if root in revoke:
        raise UsageError(
            f"key {short(root)} cannot revoke itself; sign with another key that the servers trust, or give the "
            "servers other trusted_keys"
        )
    return root


def _added(key: str, entry: KeyEntry | None, notes: list[str]) -> KeyEntry:
    if entry is not None and entry.revoked:
        raise UsageError(f"key {short(key)} is revoked: somebody else may have it; make another with delta-sync keygen")
    if entry is not None and entry.last is not None:
        notes.append(f"key {short(key)} had been retired after version {entry.last.version}, and is in use again")
    elif entry is not None:
        notes.append(f"key {short(key)} was in use already")
    return KeyEntry(key=key)


def _ended(key: str, entry: KeyEntry | None, revoked: bool, last: KeyValidity | None) -> KeyEntry:
    if last is None and not revoked:
        raise UsageError("--version none goes with --revoke; a key that was retired was believed up to some version")
    if entry is not None and entry.revoked and entry.last is None:
        raise UsageError(f"key {short(key)} is revoked altogether already")
    before = None if entry is None else entry.last
    if before is not None and last is not None and last.version > before.version:
        # It was given up after an earlier version; a later one would believe more again.
        last = before
    return KeyEntry(key=key, last=last, revoked=revoked or (entry is not None and entry.revoked))


def _last_word(run: RunDocuments, version: LastVersion, revoked: bool, notes: list[str]) -> KeyValidity | None:
    """The version that is to be the last one, and its digest as the chain has it."""
    if version == NOTHING:
        return None
    if version is None:
        manifest = run.head()
        return KeyValidity(version=manifest.version, manifest=manifest.digest)
    manifest = run.manifest(version)
    try:
        head, _ = run.reachable_head()
        if head.version < version or run.authentic.ancestor(head.version, head.digest, version) != manifest.digest:
            raise NotFoundError(f"version {version} is not in the chain that leads to the head, {head.version}")
    except StoreError:
        raise
    except DeltaSyncError as error:
        if not revoked:
            raise
        # Whoever stole the key may have broken the chain above; that must not keep anybody from revoking it.
        notes.append(f"the chain above version {version} does not hold: {error.message}")
    return KeyValidity(version=version, manifest=manifest.digest)


def _signed(run: RunDocuments, keyring: Keyring, current: KeyFile | None, entries: Iterable[KeyEntry]) -> KeyFile:
    listed = sorted(entries, key=lambda entry: entry.key)
    if len(listed) > limits.MAX_KEYS:
        raise UsageError(f"the list would have {len(listed)} keys, and {limits.MAX_KEYS} (MAX_KEYS) are the most")
    file = keyring.signed(
        KeyFile(
            run=run.info.run,
            info=run.info.digest,
            sequence=1 if current is None else current.sequence + 1,
            keys=listed,
            created_at=timestamp(),
        )
    )
    # As every reader will.
    RunKeys(keyring, run.info.run).take(file)
    return file


# What is not believed any more


def _find_fallen(run: RunDocuments, keyring: Keyring, change: KeyChange) -> None:
    before, after = run.authentic.keys, RunKeys(keyring, run.info.run)
    after.take(change.file)

    def falls(check: Callable[[RunKeys], object]) -> bool:
        try:
            check(before)
        except SignatureError:
            return False
        try:
            check(after)
        except SignatureError:
            return True
        return False

    def version_falls(version: int) -> bool:
        key = version_key(version)
        found = _read(run.bucket, Manifest, key, limits.MAX_JSON_BYTES)
        return found is not None and falls(lambda known: known.check_manifest(found, version, key))

    versions = run.versions()
    fallen = in_parallel(version_falls, versions)
    change.versions = [version for version, gone in zip(versions, fallen, strict=True) if gone]
    for key, document, version in _beside(run):
        if falls(lambda known, d=document, v=version, k=key: known.check_side(d, v, k)):  # type: ignore[misc]
            change.documents.append(key)


def _beside(run: RunDocuments) -> Iterable[tuple[str, Document, int]]:
    head = _read(run.bucket, Head, HEAD_KEY, limits.MAX_HEAD_BYTES)
    if head is not None:
        yield HEAD_KEY, head, head.version
    for version in run.anchors():
        key = anchor_key(version)
        anchor = _read(run.bucket, Anchor, key, limits.MAX_JSON_BYTES)
        if anchor is not None:
            yield key, anchor, version
    for pair in run.folds():
        key = merged_delta_key(*pair)
        folded = _read(run.bucket, MergedDelta, key, limits.MAX_JSON_BYTES)
        if folded is not None:
            yield key, folded, pair[1]
    for item in run.bucket.list(TAGS_PREFIX):
        tag = _read(run.bucket, Tag, item.key, limits.MAX_SIDE_BYTES)
        if tag is not None:
            yield item.key, tag, tag.version


def _read(bucket: Bucket, kind: type[_Doc], key: str, most: int) -> _Doc | None:
    try:
        return kind.from_bytes(bucket.get(key, max_bytes=most), key)
    except StoreError:
        raise
    except DeltaSyncError:
        return None


# Writing


def _commit(bucket: Bucket, keyring: Keyring, file: KeyFile) -> None:
    place, data = change_key(file.sequence), file.to_bytes()
    try:
        bucket.put(place, data, if_absent=True)
    except ConflictError as error:
        newest = newest_file(bucket, keyring, file.run)
        if newest is not None and newest.sequence >= file.sequence and newest.to_bytes() != data:
            raise _overtaken(newest) from error
        # Nobody who may change the list wrote what is there.
        bucket.put(place, data)
    while True:
        newest = newest_file(bucket, keyring, file.run) or file
        bucket.put(KEYS_KEY, newest.to_bytes())
        again = newest_file(bucket, keyring, file.run)
        if again is None or again.sequence <= newest.sequence:
            break
    if bucket.get(place, max_bytes=limits.MAX_SIDE_BYTES) != data:
        raise _overtaken(newest)


def _overtaken(newest: KeyFile) -> ConflictError:
    by = signer_of(newest) or ""
    return ConflictError(
        f"the list of keys was changed at the same time (sequence {newest.sequence}, signed by key {short(by)}); "
        "nothing of this change holds: look at the list, and make the change again"
    )


def _sign_head(run: RunDocuments, change: KeyChange) -> None:
    try:
        newest, _ = run.reachable_head()
    except StoreError:
        raise
    except DeltaSyncError as error:
        change.notes.append(f"no version of the run is believed any more: {error.message}")
        return
    run.bucket.put(HEAD_KEY, head_of(newest, run.keyring).to_bytes())
    change.documents.remove(HEAD_KEY)
    change.head = newest.version


def _explain(change: KeyChange, root: str, retire: Collection[str], revoke: Collection[str]) -> None:
    notes, file = change.notes, change.file
    for key in revoke:
        entry = file.entry(key)
        upto = None if entry is None else entry.last
        what = "nothing that it has signed is believed any more"
        if upto is not None:
            what = (
                f"of what it has signed only the manifests up to version {upto.version} are believed, which has digest "
                f"{upto.manifest}; compare that with a server that you trust"
            )
        notes.append(f"REVOKED key {short(key)}: {what}")
    if change.versions:
        spelled = ", ".join(map(str, change.versions))
        notes.append(f"versions that fall: {spelled}; servers take them no more, and one that serves them says so")
    made = [key for key in change.documents if not key.startswith(TAGS_PREFIX)]
    if made:
        notes.append(
            f"{len(made)} anchors and folded ranges are not believed any more; `delta-sync compact --signing-key` "
            "makes them again"
        )
    tags = [key for key in change.documents if key.startswith(TAGS_PREFIX)]
    if tags:
        names = ", ".join(str(tag_of_key(key)) for key in tags)
        notes.append(f"tags that are not believed any more: {names}; `delta-sync tag --signing-key` sets them again")
    if change.head is not None:
        notes.append(f"HEAD.json is signed by {short(root)} now, and names version {change.head}")
    if retire or revoke:
        notes.append("a publisher that signs with such a key has to be started with another, which is in the list")
    if root in retire:
        notes.append(f"key {short(root)} signs no more weights, and may still change the list")
