"""``RankCommitter``: the background work of each rank for a version: store its objects, and apply rank 0's outcome.

Rank 0 commits a version once all ranks have reported that their objects are stored; readers see nothing before that.
Whatever the outcome, all ranks do the same to their baselines.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from trainer_side import manifests
from trainer_side.committer import Committer
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.encode.encoder import compile_codec
from trainer_side.options import Options
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.group import Json, LostRankError, error_document, error_from_rank, first_error
from trainer_side.ranks.shard_baseline import ShardBaseline, changes_of_tensors
from trainer_side.result import PublishProgress, Stopwatch
from trainer_side.takeover import OpenedRun
from trainer_side.writer import FormerVersionError, UncertainError
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, FingerprintError, PublishError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef, Sidecar
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.tensors.bits import Bits

logger = guarded_logger(__name__)


@dataclass
class _RankContents:
    """What this rank contributes to a version.

    Attributes:
        shares: tensor id → what it adds to the fingerprint.
        found: elements that changed. changed: elements in the objects. sidecars: rank 0's. error: why there is nothing.
    """

    refs: list[ObjectRef] = field(default_factory=list)
    data: list[bytes] = field(default_factory=list)
    shares: dict[int, Fingerprint] = field(default_factory=dict)
    found: int = 0
    changed: int = 0
    reversible: bool = True
    sidecars: list[tuple[Sidecar, bytes]] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def document(self) -> Json:
        if self.error is not None:
            return {"error": error_document(self.error)}
        change = sum(self.shares.values(), Fingerprint())
        return {
            "objects": [ref.model_dump() for ref in self.refs],
            "found": self.found,
            "changed": self.changed,
            "fingerprint": change.hex(),
            "reversible": self.reversible,
        }


@dataclass(frozen=True)
class _AllContents:
    """What all ranks contribute to a version; see ``manifests.DeltaContents``."""

    changed: int
    fingerprint: Fingerprint
    reversible: bool


class RankCommitter(Committer):
    """Makes versions durable together with the other ranks. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        opened: OpenedRun,
        coordinator: RankCoordinator,
        bucket: Bucket,
        options: Options,
        on_durable: Callable[[Manifest], None],
    ) -> None:
        super().__init__(bucket, opened, coordinator.base, options, on_durable)
        self._coordinator = coordinator
        self._group = coordinator.group
        self._parts: ShardBaseline = coordinator.baseline
        self._uncertain_shares: dict[int, Fingerprint] = {}
        coordinator.check_parts = self._check_whole

    def close(self) -> None:
        """See ``Committer.close``."""
        if self._group.is_rank0:
            super().close()

    def begin(self) -> None:
        """Compile the kernels that encode."""
        compile_codec(self._options.base_codec, self._parts.whole)

    def commit_version(
        self,
        pending: PendingDelta,
        step: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None = None,
    ) -> None:
        """Make the pending deltas of all ranks the next version, or revert them and raise the reason.

        Args:
            failure: why this rank has nothing to publish; the caller raises it.
        """
        version = self.newest.version + 1
        try:
            own = self._store_own(pending, version, progress, watch, failure)
            reports = self._group.gather(f"version {version}", own.document)
            outcome = None if reports is None else self._outcome(reports, step, own)
            answer = self._group.broadcast(f"version {version}: outcome", outcome)
            self._apply_outcome(answer, pending, own, version, step)
            progress.payload_bytes, progress.codec = self.current.payload_bytes, self.current.codec
            progress.changed = answer["found"]
            self._announce(own)
            progress.seconds["upload"] = watch.lap()
            progress.seconds["total"] = watch.total
        except DeltaSyncError as error:
            if isinstance(error, LostRankError):
                self.stopped = error
            if failure is None:
                logger.error("version %d: %s", version, error)
            raise
        finally:
            if pending.open and self._uncertain is None:
                pending.revert()
        self._on_durable(self.current)

    def recover(self, pending: PendingDelta | None) -> None:
        """As ``Committer.recover``; rank 0 finds out what was written."""
        manifest = self._uncertain
        if manifest is not None:
            found: bool = self._group.from_rank0("uncertain", lambda: self.writer.is_stored(manifest))
            self._uncertain = None
            if found and pending is not None and pending.open:
                self.writer.set_newest(manifest)
                self._mark_parts_durable(pending, manifest, self._uncertain_shares)
        super().recover(pending)

    def rebase(self, version: int) -> None:
        """See ``Committer.rebase``."""
        self._run_on_rank0("rebase", lambda: Committer.rebase(self, version))

    def rescan(self) -> list[str]:
        """See ``Committer.rescan``; names of the parts of all ranks."""
        reports = self._group.all_or_raise("rescan", self.repair_baseline)
        names: list[str] = self._group.from_rank0(
            "rescanned", lambda: sorted({name for names in reports or [] for name in names})
        )
        return names

    def write_anchor(self) -> int:
        """See ``Committer.write_anchor``."""
        return int(self._run_on_rank0("anchor", lambda: Committer.write_anchor(self)))

    # One version

    def _store_own(
        self,
        pending: PendingDelta,
        version: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None,
    ) -> _RankContents:
        """Store this rank's objects; an error is recorded, since the other ranks wait for an answer in any case."""
        own = _RankContents(found=pending.changed, error=failure)
        if failure is not None:
            return own
        try:
            self._check_scrub_slice(pending, version)
            watch.lap()
            self._encode(pending, version, own)
            progress.seconds["encode"] = watch.lap()
            store_all = in_parallel if len(own.data) > 1 else map
            refs = list(store_all(self.writer.put_object, own.data))
            own.refs = [ref.model_copy(update={"rank": self._group.rank}) for ref in refs]
            if self._group.is_rank0:
                own.sidecars = self.writer.put_sidecars(progress.sidecars)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is reported, and ``_apply_outcome`` raises it
            own.error = error
        return own

    def _encode(self, pending: PendingDelta, version: int, own: _RankContents) -> None:
        changes = changes_of_tensors(self._parts, pending)
        own.changed, own.reversible, own.shares = changes.changed, changes.reversible, changes.fingerprints
        if not changes.changed:
            return
        context = DeltaContext(self.writer.run, version, self.current.version)
        coding = (self._options.base_codec, self._options.compression)
        # Each rank gets an equal share of the maximum, since the number of objects of the others is still unknown.
        parts = changes.parts(self._options.shard_bytes, limits.MAX_OBJECTS_PER_VERSION // self._group.size)
        own.data = [encode(part, self._parts.whole, *coding, context) for part in parts]

    def _outcome(self, reports: list[Json], step: int, own: _RankContents) -> Json:
        """Commit on rank 0 what all ranks have stored; return the outcome, for all ranks."""
        failed = first_error(reports)
        if failed is not None:
            return {"outcome": "failed", **failed}
        try:
            manifest = self._options.keyring.signed(self._manifest(reports, step, own))
            text = manifest.to_bytes().decode()
            self.writer.commit(manifest)
        except ConflictError as error:
            return {"outcome": "conflict", "message": error.message}
        except UncertainError as error:
            return {"outcome": "uncertain", "message": error.message, "manifest": text}
        except FormerVersionError as error:
            theirs = error.manifest.to_bytes().decode()
            return {"outcome": "former", "message": error.message, "manifest": theirs}
        except Exception as error:  # the other ranks wait for an answer, and this rank applies it too
            if not isinstance(error, DeltaSyncError):
                logger.exception("committing failed unexpectedly")
            return {"outcome": "failed", "rank": 0, "error": error_document(error)}
        return {"outcome": "committed", "manifest": text, "found": sum(item["found"] for item in reports)}

    def _manifest(self, reports: list[Json], step: int, own: _RankContents) -> Manifest:
        objects = [ObjectRef(**ref) for item in reports for ref in item["objects"]]
        contents = _AllContents(
            sum(item["changed"] for item in reports),
            sum((Fingerprint.from_hex(item["fingerprint"]) for item in reports), Fingerprint()),
            all(item["reversible"] for item in reports),
        )
        coding = (self._options.base_codec, self._options.compression)
        sidecars = [item for item, _ in own.sidecars]
        return manifests.delta(
            self.newest, self.current, step, coding, objects, contents, self.writer.epoch, sidecars=sidecars
        )

    def _apply_outcome(self, answer: Json, pending: PendingDelta, own: _RankContents, version: int, step: int) -> None:
        """Apply the outcome of a commit on this rank; raise unless it succeeded."""
        message = answer.get("message", "")
        match answer["outcome"]:
            case "committed":
                manifest = _parsed(answer)
                self.writer.set_newest(manifest)
                self._mark_parts_durable(pending, manifest, own.shares)
            case "conflict":
                self.stopped = ConflictError(message)
                raise ConflictError(message)
            case "uncertain":
                self._uncertain, self._uncertain_shares = _parsed(answer), own.shares
                raise UncertainError(message)
            case "former":
                pending.revert()
                former = FormerVersionError(_parsed(answer))
                self._run_on_rank0("former version", lambda: Committer._continue_from_former(self, former))
                raise PublishError(
                    f"{message}; this publisher continues from that version, and the next publish carries the changes "
                    f"of step {step}"
                )
            case _:
                raise self._failure(answer, own, version, step)

    def _failure(self, answer: Json, own: _RankContents, version: int, step: int) -> BaseException:
        """Return the error that this rank raises if any rank failed to do its part."""
        if own.error is not None:
            error = own.error
            if not isinstance(error, DeltaSyncError) or isinstance(error, PublishError):
                return error
            reason = error.message
        elif answer["rank"] == self._group.rank:
            reason = answer["error"]["message"]
        else:
            reason = error_from_rank(answer["error"], answer["rank"]).message
        return PublishError(
            f"version {version} (step {step}) could not be made durable: {reason}; the next publish carries its changes"
        )

    def _mark_parts_durable(self, pending: PendingDelta, manifest: Manifest, shares: dict[int, Fingerprint]) -> None:
        if pending.open:
            known = self._parts.shares
            self._parts.shares = known | {
                tensor: known.get(tensor, Fingerprint()) + change for tensor, change in shares.items()
            }
        self._mark_durable(pending, manifest)

    def _announce(self, own: _RankContents) -> None:
        """Do the remaining work for a committed version."""
        if self._group.is_rank0:
            self.writer.notify()
        for ref, data in (*zip(own.refs, own.data, strict=True), *own.sidecars):
            self.writer.restore_if_collected(ref, data)
        if self._group.is_rank0:
            self.writer.update_head()

    # Single-process code on rank 0

    def _run_on_rank0(self, what: str, work: Callable[[], Any]) -> Any:
        """Do ``work`` on rank 0, and set its ``current`` and ``newest`` on all ranks."""

        def report() -> Json:
            value = work()
            return {"value": value, "current": _text(self.current), "newest": _text(self.newest)}

        try:
            answer = self._coordinator.run_on_rank0(what, report)
        except LostRankError as error:
            self.stopped = error
            raise
        except ConflictError as error:
            self.stopped = self.stopped or error
            raise
        if not self._group.is_rank0:
            self.writer.set_newest(Manifest.from_bytes(answer["newest"].encode()))
            self.current = Manifest.from_bytes(answer["current"].encode())
        return answer["value"]

    def _checkout(self, manifest: Manifest) -> None:
        self._coordinator.checkout(manifest)
        self.current = manifest

    def _bits_of(self, manifest: Manifest) -> list[Bits]:
        return self._coordinator.restore_parts(manifest)

    def _put_shards(self) -> tuple[manifests.FullState, list[ObjectRef]]:
        return self._coordinator.put_shards(self.writer.put_file)

    def _check_whole(self) -> None:
        """Raise unless this rank's parts equal what was published."""
        self.repair_baseline()
        overwritten = self.baseline.overwritten()
        if overwritten:
            raise FingerprintError(
                f"tensor {overwritten[0]!r} is read from the base, which was overwritten since: no anchor is written"
            )


def _parsed(answer: Json) -> Manifest:
    return Manifest.from_bytes(answer["manifest"].encode())


def _text(manifest: Manifest) -> str:
    return manifest.to_bytes().decode()
