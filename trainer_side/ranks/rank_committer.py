"""What each rank's background thread does for a version: store its own object, and go by what rank 0 makes of it all.

A version is committed by rank 0, once all ranks have said that their objects are stored; nothing before that can be
seen by a reader. Whatever comes of it, all ranks do the same to their baselines.
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
from trainer_side.ranks.group import Json, LostRankError, error_document, first_error, told_error
from trainer_side.ranks.shard_baseline import ShardBaseline, whole_changes
from trainer_side.result import PublishProgress, Stopwatch
from trainer_side.sidecars import put_sidecars
from trainer_side.start import OpenedRun
from trainer_side.writer import FormerVersionError, UncertainError
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.parallel import in_parallel
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
class _Own:
    """What this rank carries of a version.

    Attributes:
        shares: tensor id → what it adds to the fingerprint.
        found: elements that changed. changed: elements carried. sidecars: rank 0's. error: why there is nothing.
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
class _All:
    """What all ranks carry of a version; see ``versions.Carried``."""

    changed: int
    fingerprint: Fingerprint
    reversible: bool


class RankCommitter(Committer):
    """Makes versions durable together with the other ranks. Every rank makes the same calls in the same order."""

    def __init__(
        self,
        opened: OpenedRun,
        crew: RankCoordinator,
        bucket: Bucket,
        options: Options,
        offer: Callable[[Manifest], None],
    ) -> None:
        super().__init__(bucket, opened, crew.base, options, offer)
        self._crew = crew
        self._circle = crew.circle
        self._parts: ShardBaseline = crew.baseline
        self._uncertain_shares: dict[int, Fingerprint] = {}
        crew.check = self._check_whole

    def close(self) -> None:
        """See ``Committer.close``."""
        if self._circle.leads:
            super().close()

    def begin(self) -> None:
        """Compile what encoding runs."""
        compile_codec(self._options.base_codec, self._parts.whole)

    def work(
        self,
        patch: PendingDelta,
        step: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None = None,
    ) -> None:
        """Make the patches of all ranks the next version, or take them back and raise why not.

        Args:
            failure: why this rank has nothing to publish; the caller knows.
        """
        version = self.newest.version + 1
        try:
            own = self._prepared(patch, version, progress, watch, failure)
            told = self._circle.gather(f"version {version}", own.document)
            outcome = None if told is None else self._outcome(told, step, own)
            answer = self._circle.broadcast(f"version {version}: outcome", outcome)
            self._follow(answer, patch, own, version, step)
            progress.payload_bytes, progress.codec = self.held.payload_bytes, self.held.codec
            progress.changed = answer["found"]
            self._announced(own)
            progress.seconds["upload"] = watch.lap()
            progress.seconds["total"] = watch.total
        except DeltaSyncError as error:
            if isinstance(error, LostRankError):
                self.stopped = error
            if failure is None:
                logger.error("version %d: %s", version, error)
            raise
        finally:
            if patch.open and self._uncertain is None:
                patch.revert()
        self._offer(self.held)

    def tidy(self, patch: PendingDelta | None) -> None:
        """As ``Committer.tidy``; what was written is found out by rank 0."""
        manifest = self._uncertain
        if manifest is not None:
            found: bool = self._circle.first("uncertain", lambda: self.writer.holds(manifest))
            self._uncertain = None
            if found and patch is not None and patch.open:
                self.writer.adopt(manifest)
                self._settle_parts(patch, manifest, self._uncertain_shares)
        super().tidy(patch)

    def rebase(self, version: int) -> None:
        """See ``Committer.rebase``."""
        self._led("rebase", lambda: Committer.rebase(self, version))

    def rescan(self) -> list[str]:
        """See ``Committer.rescan``; names of the parts of all ranks."""
        told = self._circle.together("rescan", self.mend)
        names: list[str] = self._circle.first(
            "rescanned", lambda: sorted({name for names in told or [] for name in names})
        )
        return names

    def write_anchor(self) -> int:
        """See ``Committer.write_anchor``."""
        return int(self._led("anchor", lambda: Committer.write_anchor(self)))

    # One version

    def _prepared(
        self,
        patch: PendingDelta,
        version: int,
        progress: PublishProgress,
        watch: Stopwatch,
        failure: BaseException | None,
    ) -> _Own:
        """Store what this rank carries; an error is noted, since the others wait for an answer in any case."""
        own = _Own(found=patch.changed, error=failure)
        if failure is not None:
            return own
        try:
            self._check_share(patch, version)
            watch.lap()
            self._encode(patch, version, own)
            progress.seconds["encode"] = watch.lap()
            together = in_parallel if len(own.data) > 1 else map
            refs = list(together(self.writer.put_object, own.data))
            own.refs = [ref.model_copy(update={"rank": self._circle.rank}) for ref in refs]
            if self._circle.leads:
                own.sidecars = put_sidecars(self.writer, progress.sidecars)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and raised by ``_follow``
            own.error = error
        return own

    def _encode(self, patch: PendingDelta, version: int, own: _Own) -> None:
        changes = whole_changes(self._parts, patch)
        own.changed, own.reversible, own.shares = changes.changed, changes.reversible, changes.fingerprints
        if not changes.changed:
            return
        context = DeltaContext(self.writer.run, version, self.held.version)
        coding = (self._options.base_codec, self._options.compression)
        # Of what a version can list each rank has an equal share: how many objects the others make is not known yet.
        parts = changes.parts(self._options.shard_bytes, limits.MAX_OBJECTS_PER_VERSION // self._circle.size)
        own.data = [encode(part, self._parts.whole, *coding, context) for part in parts]

    def _outcome(self, told: list[Json], step: int, own: _Own) -> Json:
        """Commit what all ranks have stored, on rank 0 → what came of it, for all."""
        failed = first_error(told)
        if failed is not None:
            return {"outcome": "failed", **failed}
        try:
            manifest = self._options.keyring.signed(self._manifest(told, step, own))
            text = manifest.to_bytes().decode()
            self.writer.commit(manifest)
        except ConflictError as error:
            return {"outcome": "conflict", "message": error.message}
        except UncertainError as error:
            return {"outcome": "uncertain", "message": error.message, "manifest": text}
        except FormerVersionError as error:
            theirs = error.manifest.to_bytes().decode()
            return {"outcome": "former", "message": error.message, "manifest": theirs}
        except Exception as error:  # the other ranks wait for an answer, and this one goes by it too
            if not isinstance(error, DeltaSyncError):
                logger.exception("committing failed unexpectedly")
            return {"outcome": "failed", "rank": 0, "error": error_document(error)}
        return {"outcome": "committed", "manifest": text, "found": sum(item["found"] for item in told)}

    def _manifest(self, told: list[Json], step: int, own: _Own) -> Manifest:
        objects = [ObjectRef(**ref) for item in told for ref in item["objects"]]
        carried = _All(
            sum(item["changed"] for item in told),
            sum((Fingerprint.from_hex(item["fingerprint"]) for item in told), Fingerprint()),
            all(item["reversible"] for item in told),
        )
        coding = (self._options.base_codec, self._options.compression)
        sidecars = [item for item, _ in own.sidecars]
        return manifests.delta(
            self.newest, self.held, step, coding, objects, carried, self.writer.epoch, sidecars=sidecars
        )

    def _follow(self, answer: Json, patch: PendingDelta, own: _Own, version: int, step: int) -> None:
        """Do on this rank what all do after a try to commit; raise unless it went well."""
        message = answer.get("message", "")
        match answer["outcome"]:
            case "committed":
                manifest = _parsed(answer)
                self.writer.adopt(manifest)
                self._settle_parts(patch, manifest, own.shares)
            case "conflict":
                self.stopped = ConflictError(message)
                raise ConflictError(message)
            case "uncertain":
                self._uncertain, self._uncertain_shares = _parsed(answer), own.shares
                raise UncertainError(message)
            case "former":
                patch.revert()
                former = FormerVersionError(_parsed(answer))
                self._led("former version", lambda: Committer._adopt(self, former))
                raise PublishError(
                    f"{message}; this publisher goes on from there, and the next publish carries the changes of step "
                    f"{step}"
                )
            case _:
                raise self._failure(answer, own, version, step)

    def _failure(self, answer: Json, own: _Own, version: int, step: int) -> BaseException:
        """What this rank raises where one of them could not do its part."""
        if own.error is not None:
            error = own.error
            if not isinstance(error, DeltaSyncError) or isinstance(error, PublishError):
                return error
            reason = error.message
        elif answer["rank"] == self._circle.rank:
            reason = answer["error"]["message"]
        else:
            reason = told_error(answer["error"], answer["rank"]).message
        return PublishError(
            f"version {version} (step {step}) could not be made durable: {reason}; the next publish carries its changes"
        )

    def _settle_parts(self, patch: PendingDelta, manifest: Manifest, shares: dict[int, Fingerprint]) -> None:
        if patch.open:
            known = self._parts.shares
            self._parts.shares = known | {
                tensor: known.get(tensor, Fingerprint()) + change for tensor, change in shares.items()
            }
        self._settle(patch, manifest)

    def _announced(self, own: _Own) -> None:
        """What is left to do for a committed version."""
        if self._circle.leads:
            self.writer.notify()
        for ref, data in (*zip(own.refs, own.data, strict=True), *own.sidecars):
            self.writer.put_missing(ref, data)
        if self._circle.leads:
            self.writer.point_head()

    # What rank 0 does with the code of a single process

    def _led(self, what: str, work: Callable[[], Any]) -> Any:
        """Run ``work`` on rank 0, and hold and note on all ranks what it holds and has noted then."""

        def led() -> Json:
            value = work()
            return {"value": value, "held": _text(self.held), "newest": _text(self.newest)}

        try:
            answer = self._crew.lead(what, led)
        except LostRankError as error:
            self.stopped = error
            raise
        except ConflictError as error:
            self.stopped = self.stopped or error
            raise
        if not self._circle.leads:
            self.writer.adopt(Manifest.from_bytes(answer["newest"].encode()))
            self.held = Manifest.from_bytes(answer["held"].encode())
        return answer["value"]

    def _hold(self, manifest: Manifest) -> None:
        self._crew.hold(manifest)
        self.held = manifest

    def _bits_of(self, manifest: Manifest) -> list[Bits]:
        return self._crew.restored(manifest)

    def _put_shards(self) -> tuple[manifests.FullState, list[ObjectRef]]:
        return self._crew.put_shards(self.writer.put_file)

    def _check_whole(self) -> None:
        """Raise unless this rank's parts are those that were published."""
        self.mend()
        overwritten = self.baseline.overwritten()
        if overwritten:
            raise FingerprintError(
                f"tensor {overwritten[0]!r} is read from the base, which was overwritten since: no anchor is written"
            )


def _parsed(answer: Json) -> Manifest:
    return Manifest.from_bytes(answer["manifest"].encode())


def _text(manifest: Manifest) -> str:
    return manifest.to_bytes().decode()
