"""``Committer``: the publisher's background work, which an interrupt must not leave half done.

For a version, each rank stores its objects; rank 0 commits it once all have reported that theirs are stored. Readers
see nothing before that. Whatever the outcome, all ranks do the same to their baselines.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.encode.budget_selection import NO_BOUND, BudgetSelection
from trainer_side.encode.encoder import EncodedObject, Encoder
from trainer_side.encode.update_gate import UpdateGate
from trainer_side.maintenance import BackgroundMaintenance, RebaseTag
from trainer_side.options import PublisherOptions
from trainer_side.ranks.group import Json, LostRankError, ProcessGroup, error_document, error_from_rank, first_error
from trainer_side.result import PublishProgress, Stopwatch
from trainer_side.run_start import OpenedRun
from trainer_side.writer import FormerVersionError, UncertainError, check_breaks, delta_manifest
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.base import has_object
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ConflictError,
    DataError,
    DeltaSyncError,
    FingerprintError,
    GateError,
    NotFoundError,
    PublishError,
    UsageError,
)
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.documents import Anchor, anchor_key
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, Sidecar
from vllm_delta_sync.logs import about, guarded_logger
from vllm_delta_sync.run.checks import check_document_size, document_limit
from vllm_delta_sync.tensors.changes import Bits
from vllm_delta_sync.units import listed

logger = guarded_logger(__name__)

_Result = TypeVar("_Result")


@dataclass
class _RankContents:
    """What this rank contributes to a version.

    Attributes:
        codec: of the objects. changes: tensor id → what it adds to the fingerprint.
        found: elements that changed. changed: elements in the objects. sidecars: rank 0's. error: why there is nothing.
    """

    codec: Codec
    objects: list[EncodedObject] = field(default_factory=list)
    changes: Mapping[int, Fingerprint] = field(default_factory=dict)
    found: int = 0
    changed: int = 0
    reversible: bool = True
    sidecars: list[tuple[Sidecar, bytes]] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def document(self) -> Json:
        if self.error is not None:
            return {"error": error_document(self.error)}
        return {
            "objects": [ref.model_dump() for ref, _ in self.objects],
            "found": self.found,
            "changed": self.changed,
            "fingerprint": sum(self.changes.values(), Fingerprint()).hex(),
            "reversible": self.reversible,
        }


class Committer:
    """Makes versions durable, and keeps the baseline consistent with them. One thread at a time.

    Every rank of the group makes the same calls in the same order.

    Attributes:
        baseline: holds the bits of ``current``, plus those of an open pending delta. If it is ``suspect``, ``recover``
            repairs it before anything is compared with it.
        current: the durable version that the baseline is at: the newest, or the one rebased to.
        stopped: why nothing more can be published.

    Args:
        group: the ranks, for the thread that makes the calls.
        maintenance: of the run; None on ranks other than 0.
    """

    def __init__(
        self,
        bucket: Bucket,
        opened: OpenedRun,
        options: PublisherOptions,
        group: ProcessGroup,
        maintenance: BackgroundMaintenance | None,
    ) -> None:
        self._bucket, self._options, self._group = bucket, options, group
        self._maintenance = maintenance
        self._weights = weights = opened.weights
        # A version of which it is unknown whether it is durable, and its ``changes`` as in ``_RankContents``.
        self._uncertain: tuple[Manifest, Mapping[int, Fingerprint]] | None = None
        self.baseline = weights.baseline
        self.writer = opened.writer
        self.current = opened.current
        self.stopped: DeltaSyncError | None = None
        self._closed = False
        self._encoder = Encoder(
            weights.base_tensor,
            weights.table,
            self.baseline.limits,
            options,
            group.size,
            None if maintenance is None else maintenance.recent,
        )
        self._part = self.baseline, weights.table, weights.places, group
        self._gate = None if options.gate is None else UpdateGate(options.gate, *self._part)
        self._budget = None if options.budget is None else BudgetSelection(options.budget, *self._part)
        self._rebase_tag = RebaseTag(lambda: self.run, opened.writer.epoch)

    @property
    def newest(self) -> Manifest:
        """The newest durable version."""
        return self.current if self.writer.newest is None else self.writer.newest

    @property
    def run(self) -> Run:
        """The run, for reading."""
        return self._weights.run

    def begin(self) -> None:
        """Compile kernels and, if there is a gate, measure the current version. Call before any delta is pending."""
        self._encoder.compile()
        self._start_from(self.current, self._reference(self.current))

    def commit_version(
        self,
        pending: PendingDelta,
        step: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None = None,
    ) -> None:
        """Make the pending delta the next version, or revert it and raise the reason.

        Args:
            failure: why this rank has nothing to publish; the caller raises it.
        """
        version = self.newest.version + 1
        try:
            own = self._store_own(pending, version, step, progress, watch, failure)
            reports = self._group.gather(f"version {version}", own.document)
            outcome = None if reports is None else self._outcome(reports, step, own, progress)
            answer = self._group.broadcast(f"version {version}: outcome", outcome)
            self._apply_outcome(answer, pending, own, version, step)
            progress.payload_bytes, progress.codec = self.current.payload_bytes, self.current.codec
            progress.changed = answer["found"]
            self._announce(own)
            progress.seconds["upload"] = watch.lap()
            progress.seconds["total"] = watch.total
            if self._group.is_rank0:
                _log_published(self.current, progress)
        except DeltaSyncError as error:
            if isinstance(error, LostRankError):
                self.stopped = error
            if failure is None:
                logger.error("version %d: %s", version, error)
            raise
        finally:
            self._encoder.release()
            if pending.open and self._uncertain is None:
                pending.revert()
        if self._maintenance is not None:
            self._maintenance.offer(self.current)

    def recover(self, pending: PendingDelta | None) -> None:
        """Bring the baseline to a durable version after a failure or an interrupt.

        Raises:
            PublishError: whether the manifest was written is still unknown, or the baseline cannot be repaired yet.
        """
        if self._uncertain is not None:
            manifest, changes = self._uncertain
            stored: bool = self._group.from_rank0("uncertain", lambda: self.writer.is_stored(manifest))
            self._uncertain = None
            if stored and pending is not None and pending.open:
                self.writer.set_newest(manifest)
                self._mark_durable(pending, manifest, changes)
        # It may still be open because an interrupt hit the caller before it could finish.
        if pending is not None and pending.open:
            pending.revert()
        if self.baseline.suspect:
            self.repair_baseline()

    def rebase(self, version: int) -> None:
        """Check out an older version, so that the next one builds on it; after an error nothing has changed."""
        if version != self.current.version:
            text: str = self._group.from_rank0("rebase: version", lambda: _text(self._rebase_target(version)))
            manifest = _parsed(text)
            self._move_to(manifest, "rebase", lambda: self._rebase(manifest))

    def close(self) -> None:
        """Release the rebase tag and write HEAD for the last time. May be called twice."""
        if not self._group.is_rank0 or self._closed:
            return
        self._closed = True
        self._rebase_tag.release()
        self.writer.finalize_head()

    def rescan(self) -> list[str]:
        """Do ``repair_baseline`` on every rank; return the names of all."""
        names: list[str] = self._group.reduce_on_rank0(
            "rescan", self.repair_baseline, lambda reports: sorted({name for names in reports for name in names})
        )
        return names

    def repair_baseline(self) -> list[str]:
        """Compare this rank's whole baseline with what was published, and repair differences from the bucket.

        No delta may be pending. Returns the names of the damaged tensors.

        Raises:
            PublishError: they cannot be repaired now; ``suspect`` stays set.
        """
        self.baseline.suspect = True
        damaged = self.baseline.damaged(range(len(self.baseline.table)), {})
        names = self._names(damaged)
        if damaged:
            try:
                self.baseline.repair(damaged, self._weights.restore(self.current))
                if self.baseline.damaged(damaged, {}):
                    raise FingerprintError("the tensors were damaged again immediately after the repair")
            except DeltaSyncError as error:
                raise PublishError(
                    f"the baseline in memory is damaged in {_listed_tensors(names)}, and cannot be restored from "
                    f"version {self.current.version} in the bucket: {error}; nothing is published until it can"
                ) from error
            logger.error("the baseline in memory was damaged in %s; restored from the bucket", _listed_tensors(names))
        self.baseline.suspect = False
        return names

    def write_anchor(self) -> int:
        """Write an anchor of the current version from memory, replacing any anchor of it in the bucket."""
        try:
            self._group.all_or_raise("anchor: baseline", self._check_undamaged)
            return self._run_on_rank0("anchor", self._write_anchor)
        except (ConflictError, LostRankError) as error:
            self.stopped = error
            raise

    # One version

    def _store_own(
        self,
        pending: PendingDelta,
        version: int,
        step: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None,
    ) -> _RankContents:
        """Store this rank's objects; an error is recorded, since other ranks wait for an answer in any case."""
        own = _RankContents(self._options.delta_codec, found=pending.changed)

        def check() -> None:
            if failure is not None:
                raise failure if isinstance(failure, Exception) else PublishError(f"failed unexpectedly: {failure!r}")
            pending.collect_from_devices()
            self._check_scrub_slice(pending, version)

        try:
            self._group.on_every_rank("check", check)
            watch.lap()
            if self._budget is None:
                self._group.on_every_rank("encode", lambda: self._encode(own, pending, version))
            else:
                exact = progress.exact or self._budget.is_exact_due(version, self.newest)
                progress.held_back = self._budget.encode(
                    pending, exact, self.newest, lambda: self._encode(own, pending, version)
                )
            progress.seconds["encode"] = watch.lap()
            # After the encoding, since a budget may then hold back more: servers get what is judged.
            self._judge(pending, version, step, progress)
            watch.lap()
            if self._group.is_rank0:
                self.writer.check_early()
                own.sidecars = [(Sidecar.of(data, name=name), data) for name, data in progress.sidecars.items()]
            self.writer.put_all((*own.objects, *own.sidecars))
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and ``_apply_outcome`` raises it
            own.error = failure or error
        return own

    def _encode(self, own: _RankContents, pending: PendingDelta, version: int) -> int:
        """Encode this rank's changes; return the bytes of its objects."""
        changes = self._weights.changes(pending)
        own.changed, own.reversible, own.changes = changes.changed, changes.reversible, changes.fingerprints
        context = DeltaContext(self.writer.run, version, self.current.version)
        encoded = self._encoder.encode(changes, context)
        own.objects = [(ref.model_copy(update={"rank": self._group.rank}), content) for ref, content in encoded]
        return sum(ref.bytes for ref, _ in encoded)

    def _check_scrub_slice(self, pending: PendingDelta, version: int) -> None:
        """Compare a slice of the baseline with what was published, taking the pending delta into account.

        Raises:
            PublishError: it was damaged. The pending delta, computed against damaged bits, is reverted, and the
                baseline is repaired from the bucket.
        """
        damaged = self.baseline.damaged(
            self.baseline.next_scrub_slice(self._options.rescan_bytes), pending.fingerprints
        )
        if not damaged:
            return
        self.baseline.suspect = True
        pending.revert()
        names = sorted({*self._names(damaged), *self.repair_baseline()})
        raise PublishError(
            f"version {version} is not published: the baseline in memory was damaged in {_listed_tensors(names)}; it "
            "was restored from the bucket, the next publish carries the changes: have the machine's memory checked"
        )

    def _judge(self, pending: PendingDelta, version: int, step: int, progress: PublishProgress) -> None:
        """Have the gate judge the pending delta; raise GateError, on every rank, if it refuses the version."""
        reasons = [] if self._gate is None else self._gate.judge(pending)
        if reasons and self._options.gate is not None and self._options.gate.action == "refuse":
            raise GateError(
                f"version {version} (step {step}) is not published: {'; '.join(reasons)}. Its changes stay, and are "
                "judged again with those of the next publish"
            )
        progress.quarantined = tuple(reasons)

    def _outcome(self, reports: list[Json], step: int, own: _RankContents, progress: PublishProgress) -> Json:
        """Commit on rank 0 what all ranks have stored; return the outcome, for all ranks."""
        failed = first_error(reports)
        if failed is not None:
            return {"outcome": "failed", **failed}
        try:
            unsigned = delta_manifest(
                self.newest, self.current, reports, (own.codec, self._options.compression), progress.quarantined,
                step=step, epoch=self.writer.epoch, sidecars=[item for item, _ in own.sidecars],
                held_back=progress.held_back,
            )  # fmt: skip
            manifest = self._options.keyring.signed(unsigned)
            text = _text(manifest)
            self.writer.commit(manifest)
        except Exception as error:  # other ranks wait for an answer; ``_apply_outcome`` raises it here
            if not isinstance(error, DeltaSyncError):
                logger.exception("committing failed unexpectedly")
            own.error = error
            match error:
                case ConflictError():
                    return {"outcome": "conflict", "message": error.message}
                case UncertainError():
                    return {"outcome": "uncertain", "message": error.message, "manifest": text}
                case FormerVersionError():
                    return {"outcome": "former", "message": error.message, "manifest": _text(error.manifest)}
                case _:
                    return {"outcome": "failed", "rank": 0, "error": error_document(error)}
        return {"outcome": "committed", "manifest": text, "found": sum(item["found"] for item in reports)}

    def _apply_outcome(self, answer: Json, pending: PendingDelta, own: _RankContents, version: int, step: int) -> None:
        """Apply the outcome of a commit on this rank; raise unless it succeeded."""
        message = answer.get("message", "")
        # ``own`` must not keep the error: its frames hold ``own``, so neither would be freed.
        cause, own.error = own.error, None
        match answer["outcome"]:
            case "committed":
                manifest = _parsed(answer["manifest"])
                self.writer.set_newest(manifest)
                self._mark_durable(pending, manifest, own.changes)
            case "conflict":
                self.stopped = ConflictError(message)
                raise ConflictError(message) from cause
            case "uncertain":
                self._uncertain = _parsed(answer["manifest"]), own.changes
                raise UncertainError(message) from cause
            case "former":
                pending.revert()
                self._encoder.forget(version)
                former = FormerVersionError(_parsed(answer["manifest"]))
                self._move_to(former.manifest, "former version", lambda: self._continue_from_former(former))
                raise PublishError(
                    f"{message}; this publisher continues from that version, and the next publish carries the changes "
                    f"of step {step}"
                ) from former
            case _:
                if cause is not None and (not isinstance(cause, DeltaSyncError) or isinstance(cause, PublishError)):
                    raise cause
                reason = cause or error_from_rank(answer["error"], answer["rank"])
                raise PublishError(
                    f"version {version} (step {step}) could not be made durable: {reason}; the next publish carries "
                    "its changes"
                ) from reason

    def _mark_durable(self, pending: PendingDelta, manifest: Manifest, changes: Mapping[int, Fingerprint]) -> None:
        if pending.open:
            self._weights.keep(changes)
        pending.keep()
        self.current = manifest
        if self._gate is not None:
            self._gate.mark_durable(manifest.version)
        if self._budget is not None:
            self._budget.mark_durable(manifest)
        if self._options.budget is None and manifest.held_back is None:
            self._budget = None
        if manifest.held_back is not None:
            logger.info(
                "version %d is not the trainer's exact state: %s", manifest.version, manifest.held_back.summary()
            )
        if manifest.quarantine is not None:
            reasons = "; ".join(manifest.quarantine.reasons)
            logger.warning("version %d is published as quarantined: %s", manifest.version, reasons)
        self._rebase_tag.release()
        self._rebase_tag.sweep()

    def _announce(self, own: _RankContents) -> None:
        """Do the remaining work for a committed version."""
        # First the notice: the rest takes as many round trips as receivers need to see the version.
        if self._group.is_rank0:
            self.writer.notify()
        self.writer.restore_collected((*own.objects, *own.sidecars))
        if self._group.is_rank0:
            self.writer.update_head()

    # Done by rank 0 for all ranks

    def _move_to(self, manifest: Manifest, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` on rank 0, which brings all baselines to a version; every rank calls it."""
        reference = self._reference(manifest)
        self._run_on_rank0(what, work)
        self._start_from(manifest, reference)

    def _run_on_rank0(self, what: str, work: Callable[[], _Result]) -> _Result:
        """Do ``work`` on rank 0, and set its ``current`` and ``newest`` on all ranks."""

        def report() -> Json:
            value = work()
            return {"value": value, "current": _text(self.current), "newest": _text(self.newest)}

        try:
            answer = self._weights.run_on_rank0(what, report)
        except LostRankError as error:
            self.stopped = error
            raise
        if not self._group.is_rank0:
            self.writer.set_newest(_parsed(answer["newest"]))
            self.current = _parsed(answer["current"])
        value: _Result = answer["value"]
        return value

    def _rebase_target(self, version: int) -> Manifest:
        newest = self.newest
        if version > newest.version:
            raise NotFoundError(f"version {version} is not published; the newest is {newest.version}")
        if version == newest.version:
            return newest
        check_breaks(newest.breaks)
        return self.run.manifest(version)

    def _rebase(self, manifest: Manifest) -> None:
        if manifest.version == self.newest.version:
            self._checkout(manifest)
            self._rebase_tag.release()
            return
        with self._rebase_tag.keeping(manifest.version):
            self._checkout(manifest)

    def _write_anchor(self) -> int:
        state, objects = self._weights.put_shards(self.writer.put)
        key = anchor_key(self.current.version)
        document = self._options.keyring.signed(Anchor.of(self.current, state.by_name, objects))
        check_document_size(document, document_limit(state.table), key)
        # Another run may be at the URL by now, and its anchor must not be overwritten.
        self.writer.check_not_fenced()
        self._bucket.put(key, document.to_bytes())
        if not all(has_object(self._bucket, ref) for ref in objects):
            # Garbage collection removed objects that no document named yet.
            self._weights.put_shards(self.writer.put)
        return self.current.version

    def _continue_from_former(self, former: FormerVersionError) -> None:
        """Continue from the last version of the former writer."""
        manifest = former.manifest
        try:
            self._checkout(manifest)
        except BaseUnavailableError as error:
            raise PublishError(f"{former.message}, and cannot be read without the run's base: {error}") from error
        except DeltaSyncError as error:
            raise PublishError(
                f"{former.message}, and cannot be rebuilt: {error}; if this persists, restart this publisher, which "
                "then commits a full snapshot after it"
            ) from error
        self.writer.set_newest(manifest)
        self.writer.update_head()

    def _checkout(self, manifest: Manifest) -> None:
        self._weights.checkout(manifest)
        self.current = manifest

    def _reference(self, manifest: Manifest) -> tuple[int, list[Bits]] | None:
        """Return what a quarantined version is compared with: the newest sound version that it builds on.

        Every rank calls it.

        Returns:
            Its number, and its bits per tensor id; None if it is not needed, or a rank cannot rebuild its part.
        """
        if self._gate is None or manifest.quarantine is None:
            return None
        found: list[tuple[int, list[Bits]]] = []

        def work() -> bool:
            try:
                sound = self._sound_before(manifest)
                if sound is not None:
                    found.append((sound.version, self._weights.restore(sound)))
            except (DataError, UsageError) as error:
                logger.warning("the sound version before version %d cannot be rebuilt: %s", manifest.version, error)
            return bool(found)

        is_known: bool = self._group.reduce_on_rank0("sound version", work, all)
        return found[0] if is_known else None

    def _sound_before(self, manifest: Manifest) -> Manifest | None:
        while (quarantine := manifest.quarantine) is not None:
            # The manifest names the sound version, unless a version in between was rebased.
            version = quarantine.sound
            if manifest.breaks and manifest.breaks[-1].version > (version or 0):
                version = manifest.base_version
            if version is None:
                return None
            manifest = self.run.manifest(version)
        return manifest

    def _start_from(self, manifest: Manifest, reference: tuple[int, list[Bits]] | None) -> None:
        if self._gate is not None:
            self._gate.start(manifest.version, manifest.quarantine is not None, reference)
        if self._options.budget is None:
            # After a version of a publisher with a budget: the next ones are exact once all its tensors were compared.
            self._budget = None if manifest.held_back is None else BudgetSelection(NO_BOUND, *self._part)
        if self._budget is not None:
            self._budget.start(manifest)

    def _check_undamaged(self) -> None:
        """Raise PublishError or FingerprintError unless this rank's baseline can be written as an anchor."""
        self.repair_baseline()
        overwritten = self.baseline.overwritten()
        if overwritten:
            raise FingerprintError(
                f"tensor {overwritten[0]!r} is read from the base, which was overwritten since: no anchor is written"
            )

    def _names(self, tensors: list[int]) -> list[str]:
        return [self.baseline.table[tensor].name for tensor in tensors]


def _parsed(text: str) -> Manifest:
    return Manifest.from_bytes(text.encode())


def _text(manifest: Manifest) -> str:
    return manifest.to_bytes().decode()


def _log_published(manifest: Manifest, progress: PublishProgress) -> None:
    """Log the one line of a version that is durable."""
    ms = {phase: 1e3 * seconds for phase, seconds in progress.seconds.items()}
    logger.info(
        "version %d (step %d) published: %s elements changed, %s bytes; diff %.0f ms, encode %.0f, upload %.0f",
        *(manifest.version, manifest.step, f"{progress.changed:,}", f"{progress.payload_bytes:,}"),
        *(ms.get(phase, 0.0) for phase in ("diff", "encode", "upload")),
        extra=about(
            "published",
            version=manifest.version,
            step=manifest.step,
            run=manifest.run,
            payload_bytes=progress.payload_bytes,
            changed=progress.changed,
            timings_ms=ms,
        ),
    )


def _listed_tensors(names: list[str]) -> str:
    return f"tensor{'s' if len(names) > 1 else ''} {listed([*map(repr, names)], 5)}"
