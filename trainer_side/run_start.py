"""``begin`` commits version 0 of a new run; ``RunStart`` removes what it wrote if that fails."""

import secrets
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer_side.options import PublisherOptions
from trainer_side.run_weights import FullState, RunWeights
from trainer_side.writer import RunWriter, UncertainError, full_manifest
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import confirm_created, create_if_absent, exists, has_content
from vllm_delta_sync.bucket.verified import fetch_object
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, DigestError, LimitError, NotFoundError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.manifest import (
    RUN_KEY,
    TABLE_KEY,
    Manifest,
    ObjectRef,
    RunFile,
    RunInfo,
    Stored,
    version_key,
)
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.checks import document_limit
from vllm_delta_sync.tensors.checkpoint import ResolvedBase

logger = guarded_logger(__name__)

CollectFiles = Callable[[ResolvedBase | None], Mapping[str, bytes]]
"""Returns the small files of a model, name → content, for the base that was found."""


@dataclass
class OpenedRun:
    """A run that can be published to.

    Attributes:
        weights: those of ``current``. writer: its ``newest`` is ``current``.
        began: whether the run was begun, not taken over.
    """

    weights: RunWeights
    writer: RunWriter
    current: Manifest
    began: bool = False


def begin(
    bucket: Bucket,
    weights: RunWeights,
    state: FullState,
    difference: str | None,
    base: ResolvedBase | None,
    options: PublisherOptions,
    collect_files: CollectFiles,
    unfinished: bytes | None,
) -> OpenedRun:
    """Commit version 0 of a new run.

    Args:
        state, difference: as ``weights.begin`` returned them.
        unfinished: run.json of the interrupted start that this one replaces.

    Raises:
        ConflictError: the URL holds a run already.
        StoreError: the store failed; what this call wrote is removed, and the message names what could not be.
        UncertainError: version 0 may have been written; the URL stays claimed.
        SignatureError: the signing key is not trusted.
    """
    keyring = options.keyring
    keyring.check_signing_key()
    files = collect_files(base)
    info = keyring.signed(new_run(state.table, files))
    writer = RunWriter(bucket, info, 0, options, document_limit(state.table))
    if base is not None and difference is not None:
        logger.warning(
            "the model's weights are not those of base %s (first difference in tensor %s): version 0 is a full "
            "snapshot",
            base.path, difference,
        )  # fmt: skip
    with RunStart(bucket, writer, info) as start:
        if unfinished is not None:
            start.replace(unfinished)
        start.create(RUN_KEY, info.to_bytes())
        start.create(TABLE_KEY, state.table.to_bytes())
        for item in {item.key: item for item in info.files}.values():
            start.put(item, files[item.name])
        recorded, objects = None, list[ObjectRef]()
        if base is not None and difference is None:
            recorded = base.recorded
        else:
            state, objects = weights.put_shards(start.put)
        manifest = keyring.signed(full_manifest(info.run, state, objects, recorded, step=options.first_step))
        start.commit(manifest)
    writer.announce()
    return OpenedRun(weights, writer, manifest)


def new_run(table: TensorTable, files: Mapping[str, bytes]) -> RunInfo:
    """Return run.json of a new run. Args: files: name → content of the model's small files."""
    return RunInfo(
        run=secrets.token_hex(16),
        created_at=timestamp(),
        tensors=table.digest,
        total=table.total,
        full_bytes=table.full_bytes,
        files=[RunFile.of(data, name=name) for name, data in sorted(files.items())],
    )


class RunStart:
    """Starts one run at an empty URL. As a context manager it removes what it wrote if an error ends it early.

    Args:
        writer: of the new run. info: run.json.
    """

    def __init__(self, bucket: Bucket, writer: RunWriter, info: RunInfo) -> None:
        self._bucket = bucket
        self._writer = writer
        self._info = info
        # Keys that it has written, or tried to.
        self._tried: list[str] = []
        self._committing: Manifest | None = None

    def replace(self, unfinished: bytes) -> None:
        """Remove what an interrupted start left. If that start is still running, its commit will fail.

        Args:
            unfinished: run.json of that start. If another one is stored by now, nothing is removed.
        """
        if not has_content(self._bucket, RUN_KEY, unfinished):
            return
        self._refuse_begun()
        logger.warning(
            "an earlier start at %s ended before its first version: a new run begins in its place",
            self._bucket.url,
        )
        found: dict[str, bytes | None] = {RUN_KEY: unfinished, TABLE_KEY: None}
        if exists(self._bucket, TABLE_KEY):
            found[TABLE_KEY] = self._bucket.get(TABLE_KEY, max_bytes=limits.MAX_JSON_BYTES)
        files: list[RunFile] = []
        with suppress(DeltaSyncError):
            files = RunInfo.from_bytes(unfinished, RUN_KEY).files
        for item in files:
            try:
                found[item.key] = fetch_object(self._bucket, item)
            except (NotFoundError, LimitError, DigestError):
                found[item.key] = None
        # run.json last: if this is interrupted, what is left can be replaced again.
        for key in reversed(found):
            self._bucket.delete(key)
        try:
            self._refuse_begun()
        except ConflictError:
            for key, data in found.items():
                if data is not None:
                    create_if_absent(self._bucket, key, data)
            raise

    def _refuse_begun(self) -> None:
        if exists(self._bucket, version_key(0)):
            raise ConflictError(
                f"the run at {self._bucket.url} was begun by another publisher just now; start again to take it over"
            )

    def put(self, ref: Stored, content: bytes | Path) -> None:
        """Store an object that is named by its content, from any thread.

        It replaces one that an earlier start has left, which may be damaged.
        """
        self._tried.append(ref.key)
        self._bucket.put(ref.key, content)

    def commit(self, manifest: Manifest) -> None:
        """Commit version 0."""
        self._committing = manifest
        self._writer.commit(manifest)

    def __enter__(self) -> "RunStart":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """After an error, remove what was written, unless version 0 is or may be stored; the message then says so."""
        if error is None:
            return
        try:
            # Other errors of this project mean that it is not stored; an interrupt may come at any moment.
            kept = isinstance(error, UncertainError) or (
                not isinstance(error, DeltaSyncError)
                and self._committing is not None
                and self._writer.is_stored(self._committing)
            )
        except UncertainError:
            kept = True
        if kept:
            state = (
                f"{self._bucket.url} stays claimed by run {self._info.run}: start again, which continues that run if "
                "its version 0 was written, and otherwise begins a new one in its place"
            )
        elif left := self._remove_written():
            state = (
                f"this failed start may have left {', '.join(left)} in {self._bucket.url}: start again, which begins a "
                "run in its place, or remove them by hand"
            )
        else:
            return
        if isinstance(error, DeltaSyncError):
            raise type(error)(f"{error.message}; {state}") from error
        logger.warning("interrupted while the run began; %s", state)

    def create(self, key: str, data: bytes) -> None:
        """Write run.json, which claims the URL, or tensors.json."""
        self._tried.append(key)
        try:
            self._bucket.put(key, data, if_absent=True)
        except ConflictError as error:
            # If the answer to a put is lost and the client repeats it, it finds its own object. Only the content of
            # run.json proves who wrote it, since it holds the random id of the run.
            if not has_content(self._bucket, key, data):
                raise self._conflict(key) from error
            if key != RUN_KEY:
                self._tried.remove(key)
        if key == RUN_KEY and not confirm_created(self._bucket, key, data):
            raise self._conflict(key)

    def _conflict(self, key: str) -> ConflictError:
        self._tried.remove(key)
        return ConflictError(
            f"{self._bucket.url} holds {key} of another publisher, which began meanwhile; if each rank of a job makes "
            "a publisher, make it on rank 0 only; otherwise publish to a new run URL"
        )

    def _remove_written(self) -> list[str]:
        """Remove what this start has written; return the keys that may still be there."""
        try:
            # A writer that replaced run.json may use the table and the objects too, which are named by content.
            if not has_content(self._bucket, RUN_KEY, self._info.to_bytes()):
                return []
            # run.json last: while it exists, no other publisher writes here.
            while self._tried:
                self._bucket.delete(self._tried[-1])
                self._tried.pop()
        except DeltaSyncError as error:
            logger.warning("what a failed start has written was not removed: %s", error)
        return self._tried
