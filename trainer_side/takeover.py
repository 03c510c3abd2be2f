"""Take a run over: claim it, and hold the bits of its newest version, read back from the bucket.

Order: whether the model fits, claim, head, weights. Whatever ends this early leaves at most a claim, which fences the
writer of before and is otherwise without effect.
"""

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainer_side import manifests
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.engine import compile_kernels
from trainer_side.encode.encoder import BaseCopies
from trainer_side.encode.update_gate import judge_whole
from trainer_side.epochs import EpochToken, HistoryTail, claim, find_end
from trainer_side.model.sources import LiveTensors
from trainer_side.options import Options
from trainer_side.signing_policy import check_end, open_vouched, refuse_forged
from trainer_side.start import Collect, OpenedRun, begin, look_at
from trainer_side.writer import FormerVersionError, RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    FingerprintError,
    FormatError,
    NotFoundError,
    SignatureError,
    TensorMismatchError,
)
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_base
from vllm_delta_sync.run.restore import BaseError, restore
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint, resolve_base

logger = guarded_logger(__name__)

UNREADABLE = (NotFoundError, FormatError, ChainError, FingerprintError, TensorMismatchError)
"""What says that data in the bucket is bad. A store that fails says nothing about its data."""

_ATTEMPTS = 8

Call = Callable[[Callable[[], None]], None]


def open_or_begin(
    bucket: Bucket,
    live: LiveTensors,
    base: str | Path | None,
    files: Collect,
    options: Options,
    call: Call,
) -> tuple[OpenedRun, str | Path | None]:
    """Take over the run that is in the bucket, or begin one.

    Args:
        base: see ``Publisher``.
        files: gives the model's small files, if a run begins.
        call: makes a call in a thread that no interrupt hits, and raises what it raises.

    Returns:
        The run, and where its version 0 lies as far as the caller knows.

    Raises:
        ConflictError: there is a part of a run, or a run that is not to be resumed. Else as ``begin`` and ``Takeover``.
    """
    there = look_at(bucket, options.resume)
    if not there.run:
        resolved = None if base is None else resolve_base(base)
        path = None if resolved is None else resolved.path
        kept = files(resolved)
        baseline = Baseline.captured(live, path)
        _prepare(baseline, options, call)
        call(baseline.scan)
        store = partial(manifests.put_shards, baseline, options.shard_bytes)
        difference = baseline.first_difference
        writer, manifest = begin(bucket, baseline, difference, resolved, options, store, kept, there.unfinished)
        return OpenedRun(baseline, writer, manifest), path
    check_may_resume(bucket, options)
    place = place_of(base)
    takeover = Takeover(bucket, live, place, options, call)
    _prepare(takeover.baseline, options, call)
    return takeover.publishable(), place


def check_may_resume(bucket: Bucket, options: Options) -> None:
    """Raise ConflictError if the run that is there is not to be gone on with."""
    if not options.resume:
        raise ConflictError(
            f"{bucket.url} holds a run already; publish to a new run URL, or pass resume=True to go on with that run"
        )


def place_of(base: str | Path | None) -> str | Path | None:
    """Where the checkpoint of version 0 of a run lies, or the run branched from, by what the caller says.

    Raises:
        NotFoundError: it is not there.
    """
    # A branch may need the URL of the run that it comes from.
    if base is None or "://" in str(base):
        return base
    place = resolve_base(base).path
    check_base(place)
    return place


def _prepare(baseline: Baseline, options: Options, call: Call) -> None:
    baseline.place = options.baseline
    call(lambda: compile_kernels(baseline.table))
    # The codec's own check of the table, now rather than at the first version.
    none, nothing = DeltaContext("", 1, 0), Changes()
    encode(nothing, baseline.table, options.base_codec, options.compression, none, BaseCopies(baseline, nothing))


class Takeover:
    """Takes a run over, in steps; see ``publishable``.

    Args:
        base: where the checkpoint of version 0 lies, or the run branched from, if not at the recorded place.
        call: see ``open_or_begin``.

    Raises:
        TensorMismatchError, ModelError: the model does not fit into the run.
        SignatureError: the run is signed and there is no signing key, or the reverse, or the key may not sign it.
        DeltaSyncError: run.json or tensors.json is missing or damaged.
    """

    def __init__(
        self,
        bucket: Bucket,
        live: LiveTensors,
        base: str | Path | None,
        options: Options,
        call: Call,
    ) -> None:
        self._bucket, self._live, self._base, self._options, self._call = bucket, live, base, options, call
        self._run = open_vouched(bucket, options.keyring)
        self._claimed = EpochToken(0, b"")
        self.baseline = self._fitted()

    # What each process that publishes does for its own part, if there are several

    def _fitted(self) -> Baseline:
        return Baseline.of_run(self._live, self._run.table)

    def _hold(self, head: Manifest) -> None:
        self.baseline.take(restore(self._run, head, self._base, in_memory=True).state.bits, head.model_fingerprint)

    def _capture_live(self, rest: Checkpoint | None) -> None:
        self.baseline.capture(self._live, rest)

    def _stored(self, put: manifests.Put) -> tuple[manifests.FullState, list[ObjectRef]]:
        return self.baseline, manifests.put_shards(self.baseline, self._options.shard_bytes, put)

    # The course of it

    def publishable(self) -> OpenedRun:
        """Claim the run and hold its newest version; where that is lost, commit the weights of now behind it.

        Raises:
            StoreError: the store failed.
            ConflictError: another publisher has taken the run over meanwhile.
            NotFoundError: the base that version 0 refers to is needed and not at hand.
            DeltaSyncError: the newest version is lost and the model does not hold all tensors: why it is lost.
            LimitError: it is lost, and the run has too many breaks for another.
            SignatureError: the run ends with, or needs, what nobody trusted has signed.
        """
        done: list[OpenedRun] = []
        lost: list[tuple[HistoryTail, DeltaSyncError]] = []

        def take() -> None:
            # Before the claim: a publisher that may not go on stops nobody who may.
            self._claimed = claim(self._run, self._end())
            found = self._end()
            try:
                done.append(self._restored(found))
            except BaseError:
                # Nothing of the chain is lost: somebody has to say where the base is.
                raise
            except (*UNREADABLE, SignatureError) as error:
                if found.problem is None:
                    refuse_forged(self._run, found, error)
                _let_go(error)
                lost.append((found, error))

        self._call(take)
        if lost:
            found, problem = lost[0]
            self._capture(found, problem)
            self._call(lambda: done.append(self._begun_anew(found)))
        return done[0]

    def _end(self) -> HistoryTail:
        """The newest version; raises SignatureError where nobody trusted has written it."""
        found = find_end(self._run)
        check_end(self._run, found)
        return found

    def _restored(self, found: HistoryTail) -> OpenedRun:
        if found.problem is not None or found.manifest is None:
            raise found.problem or ChainError("no manifest is good")
        head = found.manifest
        self._hold(head)
        writer = self._writer(head)
        writer.point_head()
        logger.info(
            "run %s goes on from version %d, step %d, in epoch %d", writer.run, head.version, head.step, writer.epoch
        )
        return OpenedRun(self.baseline, writer, head)

    def _writer(self, newest: Manifest | None) -> RunWriter:
        claimed, limit = self._claimed, self._run.document_limit
        writer = RunWriter(self._bucket, self._run.info, claimed.epoch, self._options, limit, claimed.data)
        if newest is not None:
            writer.adopt(newest)
        return writer

    # The newest version is lost

    def _capture(self, found: HistoryTail, problem: DeltaSyncError) -> None:
        if not self._live.held:
            raise type(problem)(
                f"version {found.version} cannot be rebuilt ({problem}), and this publisher is handed the weights to "
                "begin anew only later; repair the run, or start a new one"
            ) from problem
        logger.error(
            "version %d of %s cannot be rebuilt, so the weights of now are committed as a full snapshot behind it: %s",
            found.version, self._bucket.url, problem,
        )  # fmt: skip
        absent, rest = self.baseline.absent(), None
        if absent:
            rest = _checkpoint(self._base)
            odd = [name for name in absent if rest is None or name not in rest.specs]
            odd = odd or [name for name in absent if rest and rest.specs[name] != self._run.table.by_name(name)]
            if odd:
                raise type(problem)(
                    f"version {found.version} cannot be rebuilt ({problem}), and to begin anew the model lacks tensor "
                    f"{odd[0]!r} ({len(odd)} in all); pass base= with a checkpoint that has it, repair the run, or "
                    "start a new one"
                ) from problem
            logger.warning("tensors that the model does not hold are taken from base: %s", ", ".join(absent[:5]))
        self._capture_live(rest)

    def _begun_anew(self, found: HistoryTail) -> OpenedRun:
        manifests.check_breaks([] if found.manifest is None else found.manifest.breaks)
        self.baseline.scan()
        reasons = judge_whole(self._options.gate, self.baseline)
        writer = self._writer(None)
        whole, objects = self._stored(writer.put_file)
        for _ in range(_ATTEMPTS):
            place = (found.version + 1, found.digest)
            behind = manifests.anchor_behind(
                writer.run, whole, objects, place, found.manifest, self._claimed.epoch, reasons
            )
            manifest = self._run.keyring.signed(behind)
            try:
                writer.commit(manifest)
            except (ConflictError, FormerVersionError):
                before, found = found, self._end()
                theirs = found.manifest if found.problem is None else None
                if found.version == before.version or (theirs is not None and theirs.epoch >= self._claimed.epoch):
                    raise
                # The former writer's last commit came in between.
                writer = self._writer(None)
                continue
            writer.announce()
            return OpenedRun(self.baseline, writer, manifest)
        raise ConflictError(f"versions keep appearing at {self._bucket.url}; another publisher writes there")


def _let_go(error: BaseException | None) -> None:
    """Free what the calls that failed still hold: weights, before others are captured."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def _checkpoint(base: str | Path | None) -> Checkpoint | None:
    return Checkpoint(base) if base is not None and Path(base).is_dir() else None
