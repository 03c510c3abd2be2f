"""``Committer``: the publisher's background work, which an interrupt must not leave half done."""

from collections.abc import Callable
from pathlib import Path

from trainer_side import manifests
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.encode.encoder import Encoder
from trainer_side.encode.update_gate import UpdateGate
from trainer_side.maintenance import RebaseTag
from trainer_side.options import Options
from trainer_side.result import PublishProgress, Stopwatch
from trainer_side.takeover import OpenedRun
from trainer_side.writer import FormerVersionError, UncertainError
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.bucket.verified import has_object
from vllm_delta_sync.client import Run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
    FingerprintError,
    GateError,
    NotFoundError,
    PublishError,
    StoreError,
)
from vllm_delta_sync.format.documents import anchor_key
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_document_size, document_limit
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.tensors.bits import Bits

logger = guarded_logger(__name__)


class Committer:
    """Makes versions durable, and keeps the baseline consistent with them. One thread at a time.

    Attributes:
        baseline: holds the bits of ``current``, plus those of an open pending delta.
        current: the durable version that the baseline is at: the newest, or the one rebased to.
        stopped: why nothing more can be published.
        suspect: the baseline may be damaged; ``recover`` repairs it before anything is compared with it.

    Args:
        base: location of version 0, for reading versions back.
        on_durable: called with each version that became durable.
    """

    def __init__(
        self,
        bucket: Bucket,
        opened: OpenedRun,
        base: str | Path | None,
        options: Options,
        on_durable: Callable[[Manifest], None],
    ) -> None:
        self._bucket = bucket
        self._base = base
        self._options = options
        self._on_durable = on_durable
        self._run: Run | None = None
        self._uncertain: Manifest | None = None
        self.baseline = opened.baseline
        self.writer = opened.writer
        self.current = opened.current
        self.stopped: DeltaSyncError | None = None
        self.suspect = False
        self._encoder = Encoder(opened.baseline, options, opened.writer.bandwidth)
        self._gate = None if options.gate is None else UpdateGate(options.gate, opened.baseline)
        self._rebase_tag = RebaseTag(lambda: self.run, opened.writer.epoch)

    @property
    def newest(self) -> Manifest:
        """The newest durable version."""
        return self.current if self.writer.newest is None else self.writer.newest

    @property
    def run(self) -> Run:
        """The run, for reading."""
        if self._run is None:
            self._run = Run(self._bucket, self._options.keyring)
        return self._run

    def begin(self) -> None:
        """Compile kernels and, if there is a gate, measure the current version. Call before any delta is pending.

        Raises:
            StoreError: the store failed.
        """
        self._encoder.compile()
        self._start_gate(self.current, self._reference(self.current))

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
            self._check_scrub_slice(pending, version)
            self._judge(pending, version, step, progress)
            self._make_durable(pending, version, step, progress, watch)
            self.writer.update_head()
            progress.seconds["upload"] = watch.lap()
            progress.seconds["total"] = watch.total
        except DeltaSyncError as error:
            logger.error("version %d: %s", version, error)
            raise
        finally:
            if pending.open and self._uncertain is None:
                pending.revert()
        self._on_durable(self.current)

    def recover(self, pending: PendingDelta | None) -> None:
        """Bring the baseline to a durable version after a failure or an interrupt.

        Raises:
            PublishError: whether the manifest was written is still unknown, or the baseline cannot be repaired yet.
        """
        # The delta may still be open because an interrupt hit the caller before it could finish.
        if pending is not None and pending.open:
            manifest = self._uncertain
            if manifest is not None and self.writer.is_stored(manifest):
                self.writer.set_newest(manifest)
                self._mark_durable(pending, manifest)
            else:
                pending.revert()
            self._uncertain = None
        if self.suspect:
            self.repair_baseline()

    def rebase(self, version: int) -> None:
        """Check out an older version, so that the next one builds on it.

        Raises:
            NotFoundError: there is no such version. LimitError: the run has too many breaks.
            DeltaSyncError: it cannot be rebuilt; nothing has changed.
        """
        if version == self.current.version:
            return
        newest = self.newest
        if version > newest.version:
            raise NotFoundError(f"version {version} is not published; the newest is {newest.version}")
        if version == newest.version:
            self._checkout(newest)
            self._rebase_tag.release()
            return
        manifests.check_breaks(newest.breaks)
        with self._rebase_tag.keeping(version):
            self._checkout(self.run.manifest(version))

    def close(self) -> None:
        """Release the rebase tag and write HEAD for the last time."""
        self._rebase_tag.release()
        self.writer.finalize_head()

    def rescan(self) -> list[str]:
        """See ``Publisher.rescan``; raises as ``repair_baseline``."""
        return self.repair_baseline()

    def repair_baseline(self) -> list[str]:
        """Compare the whole baseline with what was published, and repair differences from the bucket.

        No delta may be pending.

        Returns:
            Names of the tensors that were damaged.

        Raises:
            PublishError: they cannot be repaired now; ``suspect`` stays set.
        """
        self.suspect = True
        damaged = self.baseline.damaged(range(len(self.baseline.table)), {})
        names = self._names(damaged)
        if damaged:
            try:
                self.baseline.repair(damaged, self._bits_of(self.current))
                if self.baseline.damaged(damaged, {}):
                    raise FingerprintError("the tensors were damaged again immediately after the repair")
            except DeltaSyncError as error:
                raise PublishError(
                    f"the baseline in memory is damaged in {_listed_tensors(names)}, and cannot be restored from "
                    f"version {self.current.version} in the bucket: {error}; nothing is published until it can"
                ) from error
            logger.error("the baseline in memory was damaged in %s; restored from the bucket", _listed_tensors(names))
        self.suspect = False
        return names

    def write_anchor(self) -> int:
        """Write an anchor of the current version from memory, replacing any anchor of it in the bucket.

        Raises:
            PublishError: the baseline is damaged. FingerprintError: the base on disk is. StoreError: the store failed.
            ConflictError: another writer has taken over the run, or it was removed.
        """
        self.repair_baseline()
        overwritten = self.baseline.overwritten()
        if overwritten:
            raise FingerprintError(
                f"tensor {overwritten[0]!r} is read from the base, which was overwritten since: no anchor is written"
            )
        state, objects = self._put_shards()
        key = anchor_key(self.current.version)
        document = self._options.keyring.signed(manifests.standalone_anchor(self.current, state, objects))
        check_document_size(document, document_limit(state.table), key)
        # Another run may be at the URL by now, and its anchor must not be overwritten.
        try:
            self.writer.check_not_fenced()
        except ConflictError as error:
            self.stopped = error
            raise
        self._bucket.put(key, document.to_bytes())
        if not all(has_object(self._bucket, ref) for ref in objects):
            # Garbage collection removed objects that no document named yet.
            self._put_shards()
        return self.current.version

    def _put_shards(self) -> tuple[manifests.FullState, list[ObjectRef]]:
        """Store the baseline as an anchor's objects; return its state and the objects."""
        return self.baseline, manifests.put_shards(self.baseline, self._options.shard_bytes, self.writer.put_file)

    def _bits_of(self, manifest: Manifest) -> list[Bits]:
        """Return the bits of the version per tensor id, read back from the bucket; raises as ``restore``."""
        return restore(self.run, manifest, self._base).state.bits

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
        self.suspect = True
        pending.revert()
        names = sorted({*self._names(damaged), *self.repair_baseline()})
        raise PublishError(
            f"version {version} is not published: the baseline in memory was damaged in {_listed_tensors(names)}; it "
            "was restored from the bucket, the next publish carries the changes: have the machine's memory checked"
        )

    def _judge(self, pending: PendingDelta, version: int, step: int, progress: PublishProgress) -> None:
        """Have the gate judge the pending delta.

        Raises:
            GateError: it refuses the version.
        """
        reasons = [] if self._gate is None else self._gate.judge(pending)
        if reasons and self._options.gate is not None and self._options.gate.action == "refuse":
            raise GateError(
                f"version {version} (step {step}) is not published: {'; '.join(reasons)}. Its changes stay, and are "
                "judged again with those of the next publish"
            )
        progress.quarantined = tuple(reasons)

    def _make_durable(
        self, pending: PendingDelta, version: int, step: int, progress: PublishProgress, watch: Stopwatch
    ) -> None:
        try:
            watch.lap()
            changes = pending.changes()
            context = DeltaContext(self.writer.run, version, self.current.version)
            codec, encoded = self._encoder.encode(changes, context)
            coding = (codec, self._options.compression)
            progress.seconds["encode"] = watch.lap()
            store_all = in_parallel if len(encoded) > 1 else map
            objects = list(store_all(self.writer.put_object, encoded))
            sidecars = self.writer.put_sidecars(progress.sidecars)
            manifest = manifests.delta(
                self.newest, self.current, step, coding, objects, changes, self.writer.epoch, progress.quarantined,
                [item for item, _ in sidecars],
            )  # fmt: skip
            progress.payload_bytes, progress.codec = manifest.payload_bytes, manifest.codec
            self._commit(self._options.keyring.signed(manifest), pending)
            # First the notice: the remaining work takes as many round trips as receivers need to see the version.
            self.writer.notify()
            for ref, data in (*zip(objects, encoded, strict=True), *sidecars):
                self.writer.restore_if_collected(ref, data)
        except (ConflictError, UncertainError):
            raise
        except FormerVersionError as error:
            pending.revert()
            self._continue_from_former(error)
            raise PublishError(
                f"{error.message}; this publisher continues from that version, and the next publish carries the "
                f"changes of step {step}"
            ) from error
        except DeltaSyncError as error:
            raise PublishError(
                f"version {version} (step {step}) could not be made durable: {error}; the next publish "
                "carries its changes"
            ) from error

    def _commit(self, manifest: Manifest, pending: PendingDelta) -> None:
        try:
            self.writer.commit(manifest)
        except ConflictError as error:
            self.stopped = error
            raise
        except UncertainError:
            self._uncertain = manifest
            raise
        self._mark_durable(pending, manifest)

    def _mark_durable(self, pending: PendingDelta, manifest: Manifest) -> None:
        pending.keep()
        self.current = manifest
        if self._gate is not None:
            self._gate.mark_durable(manifest.version)
        if manifest.quarantine is not None:
            reasons = "; ".join(manifest.quarantine.reasons)
            logger.warning("version %d is published as quarantined: %s", manifest.version, reasons)
        self._rebase_tag.release()
        self._rebase_tag.sweep()

    def _continue_from_former(self, former: FormerVersionError) -> None:
        """Continue from the last version of the former writer."""
        manifest = former.manifest
        try:
            self._checkout(manifest)
        except DeltaSyncError as error:
            raise PublishError(
                f"{former.message}, and cannot be rebuilt: {error}; if this persists, restart this publisher, which "
                "then commits a full snapshot after it"
            ) from error
        self.writer.set_newest(manifest)
        self.writer.update_head()

    def _checkout(self, manifest: Manifest) -> None:
        bits = self._bits_of(manifest)
        reference = self._reference(manifest)
        self.baseline.replace(bits, manifest.model_fingerprint)
        self.current = manifest
        self._start_gate(manifest, reference)

    def _reference(self, manifest: Manifest) -> tuple[int, list[Bits]] | None:
        """Return what a quarantined version is compared with: the newest sound version that it builds on.

        Returns:
            Its number, and its bits per tensor id; None if it is not needed, or cannot be rebuilt.

        Raises:
            StoreError: the store failed.
        """
        current = manifest
        if self._gate is None or current.quarantine is None:
            return None
        try:
            while (quarantine := manifest.quarantine) is not None:
                # The manifest names the sound version, unless a version in between was rebased.
                version = quarantine.sound
                if manifest.breaks and manifest.breaks[-1].version > (version or 0):
                    version = manifest.base_version
                if version is None:
                    return None
                manifest = self.run.manifest(version)
            return manifest.version, restore(self.run, manifest, self._base).state.bits
        except StoreError:
            raise
        except DeltaSyncError as error:
            logger.warning("the sound version before version %d cannot be rebuilt: %s", current.version, error)
            return None

    def _start_gate(self, manifest: Manifest, reference: tuple[int, list[Bits]] | None) -> None:
        if self._gate is not None:
            self._gate.start(manifest.version, manifest.quarantine is not None, reference)

    def _names(self, tensors: list[int]) -> list[str]:
        return [self.baseline.table[tensor].name for tensor in tensors]


def _listed_tensors(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"tensor{'s' if len(names) > 1 else ''} {', '.join(map(repr, names[:5]))}{more}"
