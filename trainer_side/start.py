"""The beginning of a run: claim a URL and commit version 0, or give the URL back."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from trainer_side import manifests as versions
from trainer_side.diff.baseline import Baseline
from trainer_side.options import Options
from trainer_side.writer import RunWriter, UncertainError
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.conditional_put import confirm_created
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, DigestError, LimitError, NotFoundError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, KEYS_KEY
from vllm_delta_sync.format.manifest import (
    HEAD_KEY,
    RUN_KEY,
    TABLE_KEY,
    VERSIONS_PREFIX,
    Manifest,
    ObjectRef,
    RunFile,
    RunInfo,
    Stored,
    file_key,
    timestamp,
    version_key,
)
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.maintenance.keys import CHANGES_PREFIX
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import document_limit
from vllm_delta_sync.tensors.checkpoint import ResolvedBase

logger = guarded_logger(__name__)

Collect = Callable[[ResolvedBase | None], Mapping[str, bytes]]
"""Gives the small files of a model, name → content, by the base that was found."""


def new_run(table: TensorTable, files: Mapping[str, bytes]) -> RunInfo:
    """run.json of a run that begins now. Args: files: name → content of the model's small files."""
    digests = {name: sha256(data).hexdigest() for name, data in files.items()}
    return RunInfo(
        run=secrets.token_hex(16),
        created_at=timestamp(),
        tensors=table.digest,
        total=table.total,
        full_bytes=table.full_bytes,
        files=[
            RunFile(name=name, key=file_key(digest), bytes=len(files[name]), sha256=digest)
            for name, digest in sorted(digests.items())
        ],
    )


@dataclass(frozen=True)
class RunLocation:
    """What a publisher finds at its URL.

    Attributes:
        run: whether there is a run, whole or damaged.
        unfinished: run.json of a start that never came to a version; None if there is no such thing.
    """

    run: bool
    unfinished: bytes | None = None


def look_at(bucket: Bucket, resume: bool) -> RunLocation:
    """What is there.

    Args:
        resume: whether to go on where another publisher was.

    Raises:
        ConflictError: a part of a run, and not one that a start of a run leaves.
    """
    found = [key for key in (RUN_KEY, TABLE_KEY, HEAD_KEY) if _present(bucket, key)]
    versions = _present(bucket, version_key(0)) or next(iter(bucket.list(VERSIONS_PREFIX)), None) is not None
    if versions and RUN_KEY in found:
        return RunLocation(True)
    found += [VERSIONS_PREFIX] if versions else []
    # Claims of a run that is gone would fence the writer of a new one, its list of keys would be refused by readers.
    found += [KEYS_KEY] if _present(bucket, KEYS_KEY) else []
    for prefix in (CLAIMS_PREFIX, CHANGES_PREFIX):
        found += [prefix] if next(iter(bucket.list(prefix)), None) is not None else []
    if not found:
        return RunLocation(False)
    if resume and found in ([RUN_KEY], [RUN_KEY, TABLE_KEY]):
        try:
            return RunLocation(False, bucket.get(RUN_KEY, max_bytes=limits.MAX_JSON_BYTES))
        except NotFoundError:
            return RunLocation(False)
    keys = ", ".join(found)
    raise ConflictError(
        f"{bucket.url} holds {keys} but no whole run: another publisher is starting there, or a start "
        f"crashed, or a run was half removed; publish to a new run URL, or, if nobody uses this one, remove "
        f"{keys} by hand"
    )


@dataclass
class OpenedRun:
    """A run that can be published to.

    Attributes:
        baseline: holds the bits of ``held``. writer: its ``newest`` is ``held``.
    """

    baseline: Baseline
    writer: RunWriter
    held: Manifest


def begin(
    bucket: Bucket,
    whole: versions.FullState,
    difference: str | None,
    base: ResolvedBase | None,
    options: Options,
    store: Callable[[versions.Put], list[ObjectRef]],
    files: Mapping[str, bytes],
    unfinished: bytes | None = None,
) -> tuple[RunWriter, Manifest]:
    """Commit version 0 of a new run.

    Args:
        files: name → content of the model's small files, which the run keeps.
        unfinished: run.json of the start that this one takes the place of.
        whole: the weights. difference: the first tensor that is not the base's, None if all are.
        store: stores all weights as an anchor's objects with what it is given.

    Raises:
        ConflictError: there is a run at the URL already.
        StoreError: the store failed; what this call has written is removed, and the message names what could not be.
        UncertainError: version 0 may have been written; the URL stays claimed.
        SignatureError: the signing key is not one to begin a run with.
    """
    keyring = options.keyring
    keyring.check_can_start_run()
    info = keyring.signed(new_run(whole.table, files))
    writer = RunWriter(bucket, info, 0, options, document_limit(whole.table))
    if base is not None and difference is not None:
        logger.warning(
            "the model's weights are not those of base %s (first difference in tensor %s): version 0 is a full "
            "snapshot",
            base.path, difference,
        )  # fmt: skip
    with RunStart(bucket, writer, info, whole.table) as start:
        if unfinished is not None:
            start.replace(unfinished)
        start.claim()
        start.put_files(files)
        if base is not None and difference is None:
            manifest = keyring.signed(versions.reference(info.run, whole, base.recorded))
        else:
            manifest = keyring.signed(versions.anchor(info.run, whole, store(start.put)))
        start.commit(manifest)
    writer.announce()
    return writer, manifest


@dataclass
class _WrittenKeys:
    """What a start has written so far.

    Attributes:
        keys: created by it for certain. maybe: key → content, of puts whose outcome is not known.
        committing: version 0 as it may have been written.
    """

    keys: list[str] = field(default_factory=list)
    maybe: dict[str, bytes] = field(default_factory=dict)
    committing: Manifest | None = None


class RunStart:
    """Starts one run at a URL where nothing is.

    Args:
        writer: of the run that is to be. info, table: run.json and tensors.json.
    """

    def __init__(self, bucket: Bucket, writer: RunWriter, info: RunInfo, table: TensorTable) -> None:
        self._bucket = bucket
        self._writer = writer
        self._info = info
        self._table = table
        self._made = _WrittenKeys()

    def replace(self, unfinished: bytes) -> None:
        """Remove what a start has left that never came to a version; should it go on after all, it ends at its commit.

        Args:
            unfinished: its run.json. If another is there by now, that stays.

        Raises:
            ConflictError: it has come to a version meanwhile. StoreError: the store failed.
        """
        if not self._reads(RUN_KEY, unfinished):
            return
        self._refuse_begun()
        logger.warning(
            "somebody began a run at %s and was gone before its first version: a new run begins in its place",
            self._bucket.url,
        )
        there: dict[str, bytes | None] = {RUN_KEY: unfinished, TABLE_KEY: None}
        if _present(self._bucket, TABLE_KEY):
            there[TABLE_KEY] = self._bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
        for item in _files_of(unfinished):
            try:
                there[item.key] = fetch_object(self._bucket, item)
            except (NotFoundError, LimitError, DigestError):
                there[item.key] = None
        # The claim goes last: whoever is stopped in between leaves what can be replaced again.
        for key in reversed(there):
            self._bucket.delete(key)
        try:
            self._refuse_begun()
        except ConflictError:
            for key, data in there.items():
                if data is not None:
                    self._bucket.put(key, data, if_absent=True)
            raise

    def _refuse_begun(self) -> None:
        if _present(self._bucket, version_key(0)):
            raise ConflictError(
                f"the run at {self._bucket.url} was begun by another publisher just now; start again to take it over"
            )

    def claim(self) -> None:
        """Write run.json and tensors.json.

        Raises:
            ConflictError: there is a run at the URL already. StoreError: the store failed.
        """
        self._create(RUN_KEY, self._info.to_bytes())
        self._create(TABLE_KEY, self._table.to_bytes())

    def put_files(self, files: Mapping[str, bytes]) -> None:
        """Store the files that run.json lists; raises StoreError."""
        made = self._made
        for key, item in {item.key: item for item in self._info.files}.items():
            # No collection removes them later: what may have been stored, and what was left there, is taken back too.
            made.maybe[key] = files[item.name]
            self.put(item, files[item.name])
            del made.maybe[key]
            if key not in made.keys:
                made.keys.append(key)

    def put(self, ref: Stored, content: bytes | Path) -> None:
        """Store an object that is named by its content, from any thread; raises StoreError."""
        try:
            with self._writer.link.upload(ref.bytes):
                self._bucket.put(ref.key, content, if_absent=True)
            self._made.keys.append(ref.key)
        except ConflictError:
            # Left by an earlier start, perhaps damaged since.
            self._bucket.put(ref.key, content)
        self._writer.check_object(ref)

    def commit(self, manifest: Manifest) -> None:
        """Commit version 0; raises as ``RunWriter.commit``."""
        self._made.committing = manifest
        self._writer.commit(manifest)

    def __enter__(self) -> "RunStart":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Take back what was written, unless version 0 is there, or may be; the message then says so.

        Raises:
            DeltaSyncError: the error of before, with what is left named.
        """
        if error is None:
            return
        if isinstance(error, UncertainError):
            raise UncertainError(f"{error.message}; {self._kept()}") from error
        if not isinstance(error, DeltaSyncError):
            self._abandon()
            return
        left = self._take_back()
        if left:
            raise type(error)(f"{error.message}; {self._left(left)}") from error

    def _create(self, key: str, data: bytes) -> None:
        made = self._made
        made.maybe[key] = data
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError as error:
            # A put whose answer was lost and that the store's client repeats finds its own object. Only run.json
            # proves by its content whose it is: it holds the random id of the run.
            if not self._reads(key, data):
                raise self._lost(key) from error
            if key != RUN_KEY:
                del made.maybe[key]
                return
        if key == RUN_KEY and not confirm_created(self._bucket, key, data):
            raise self._lost(key)
        made.keys.append(key)
        del made.maybe[key]

    def _lost(self, key: str) -> ConflictError:
        del self._made.maybe[key]
        return ConflictError(f"{self._bucket.url} holds {key} of another publisher; publish to a new run URL")

    def _take_back(self) -> list[str]:
        """Remove what this start has created; return the keys that may still be there."""
        left: list[str] = []
        made = self._made
        if RUN_KEY in made.keys and self._is_replaced():
            # Whoever has written over run.json may use the table and the objects too, which are named by content.
            return left
        # The claim goes last: as long as it stands nobody else writes here.
        for key in [*reversed(made.maybe), *reversed(made.keys)]:
            try:
                if key in made.keys or self._reads(key, made.maybe[key]):
                    self._bucket.delete(key)
            except DeltaSyncError as error:
                logger.warning("%s of a failed start was not removed: %s", key, error)
                left.append(key)
        return left

    def _abandon(self) -> None:
        """After an interrupt: take back, unless version 0 may be there."""
        try:
            written = self._made.committing is not None and self._writer.holds(self._made.committing)
        except UncertainError:
            written = True
        if written:
            logger.warning("interrupted while version 0 was written; %s", self._kept())
            return
        left = self._take_back()
        if left:
            logger.warning("interrupted; %s", self._left(left))

    def _is_replaced(self) -> bool:
        try:
            return not self._reads(RUN_KEY, self._info.to_bytes())
        except StoreError as error:
            logger.warning("what a failed start has written stays, as %s cannot be read: %s", RUN_KEY, error)
            return True

    def _reads(self, key: str, data: bytes) -> bool:
        try:
            return self._bucket.get(key, max_bytes=max(len(data), limits.MAX_JSON_BYTES)) == data
        except (NotFoundError, LimitError):
            return False

    def _kept(self) -> str:
        return (
            f"{self._bucket.url} stays claimed by run {self._info.run}: start again, which goes on with that run if "
            "its version 0 is there, and else begins a new one in its place"
        )

    def _left(self, keys: list[str]) -> str:
        names = ", ".join(keys)
        return (
            f"this failed start may have left {names} in {self._bucket.url}: start again, which begins a run in its "
            "place, or remove by hand what is there"
        )


def _present(bucket: Bucket, key: str) -> bool:
    try:
        bucket.stat(key)
    except NotFoundError:
        return False
    return True


def _files_of(info: bytes) -> list[RunFile]:
    """The files that a run.json lists; none if it cannot be read."""
    try:
        return RunInfo.from_bytes(info, RUN_KEY).files
    except DeltaSyncError:
        return []
