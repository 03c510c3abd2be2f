"""``RankCoordinator``: run the code of a single process on rank 0, and the steps on weights on every rank.

Where rank 0's code reads or writes weights it sends a command, which every rank executes on its own parts.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from trainer_side.diff.baseline import Baseline
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.manifests import Put
from trainer_side.options import Options
from trainer_side.ranks.gather import put_shards
from trainer_side.ranks.group import Json, LostRankError, ProcessGroup, error_from_rank
from trainer_side.ranks.shard_baseline import GatheredState, ShardBaseline, changes_of_tensors, check_same_tables
from trainer_side.ranks.shard_parts import ModuleParts, boxes_document, check_coverage
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError, FingerprintError, PublishError, UsageError
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.partial import restore_boxes
from vllm_delta_sync.tensors.bits import Bits
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint

logger = guarded_logger(__name__)


class RankCoordinator:
    """One rank among those that publish a run together: ``run_weights.RunWeights``, of which it holds its parts.

    Attributes:
        baseline: this rank's parts, once they are known.

    Args:
        group: of the thread that publishes. live: this rank's parts.
        base: location of version 0, for reading versions back.
    """

    def __init__(
        self, group: ProcessGroup, live: ModuleParts, bucket: Bucket, options: Options, base: str | Path | None
    ) -> None:
        self.group = group
        self._live, self._bucket, self._options, self._base = live, bucket, options, base
        self._baseline: ShardBaseline | None = None
        self._run: Run | None = None
        self._name = ""

    @property
    def baseline(self) -> Baseline:
        return self._shards.parts

    @property
    def table(self) -> TensorTable:
        return self._shards.whole

    @property
    def _shards(self) -> ShardBaseline:
        if self._baseline is None:
            raise UsageError("the weights of this rank are not known yet")
        return self._baseline

    @property
    def run(self) -> Run:
        """The run, for reading."""
        if self._run is None:
            self._run = Run(self._bucket, self._options.keyring)
        return self._run

    def follower_writer(self, newest: Manifest) -> RunWriter:
        """Return the writer with which a rank other than 0 stores objects; it commits nothing."""
        writer = RunWriter(self._bucket, self.run.info, 0, self._options, self.run.document_limit)
        writer.set_newest(newest)
        return writer

    def run_on_rank0(self, what: str, work: Callable[[], Json]) -> Json:
        """Do ``work`` on rank 0, and execute its commands on the other ranks; return its result on every rank.

        Raises:
            DeltaSyncError: ``work`` raised it. LostRankError: a rank is lost.
        """
        self._name = what
        if self.group.is_rank0:
            return self.group.from_rank0(what, work)
        while True:
            command = self.group.broadcast(what)
            if "error" in command:
                raise error_from_rank(command["error"], 0)
            if "command" not in command:
                return command["value"]
            try:
                self._execute(command)
            except LostRankError:
                raise
            except Exception:  # rank 0 received the error, and raises it in ``work``
                logger.debug("rank %d could not execute a command", self.group.rank, exc_info=True)

    # Commands, for the work of ``run_on_rank0``

    def fit(self, run: Run) -> None:
        """Find out which parts of the run's tensors the ranks own.

        Raises:
            ModelError: they do not own each element once. Other errors as ``Baseline.of_run``.
        """
        self._run = run
        self._command({"command": "find_parts", "tensors": run.table.digest})
        self._find_parts(run.table.digest)

    def capture(self, fallback: Checkpoint | None) -> None:
        """Copy the current live parts; tensors that the model lacks come from ``fallback``."""
        self._command({"command": "capture"})
        self._capture(fallback)

    def checkout(self, manifest: Manifest) -> None:
        """Check out a version: replace the bits of all ranks by it.

        Raises:
            FingerprintError: the parts of all ranks do not have the manifest's fingerprint; nothing was replaced.
            PublishError: only another rank cannot rebuild its parts. Other errors as ``restore``.
        """
        self._command({"command": "checkout", "manifest": manifest.to_bytes().decode()})
        self._checkout(manifest)

    def put_shards(self, put: Put) -> tuple[GatheredState, list[ObjectRef]]:
        """Store the baseline as an anchor's objects; return state and objects. Raises as ``put``."""
        self._command({"command": "put_shards"})
        return self._put_shards(put)

    def _command(self, command: Json) -> None:
        self.group.broadcast(self._name, command)

    def _execute(self, command: Json) -> None:
        match command["command"]:
            case "find_parts":
                self._find_parts(command["tensors"])
            case "capture":
                self._capture(None)
            case "checkout":
                self._checkout(Manifest.from_bytes(command["manifest"].encode()))
            case "put_shards":
                self._put_shards(self._store)

    # What every rank executes

    def begin(self, base: Path | None) -> tuple[GatheredState | None, str | None]:
        """Capture the weights of a new run; every rank calls it.

        Returns:
            On rank 0 the state of all ranks, and the first tensor that differs from the base; else None.

        Raises:
            ModelError: the ranks do not publish the same tensors, or not each element once. Other errors as
                ``Baseline.captured``.
        """

        def work() -> Json:
            baseline = ShardBaseline.captured_parts(self._live, base, self.group.rank)
            self._baseline = baseline
            baseline.scan()
            return {
                "tensors": baseline.whole.digest,
                "boxes": boxes_document(baseline.boxes),
                "difference": baseline.parts.first_difference,
                **_shares_document(baseline),
            }

        def judge(reports: list[Json]) -> None:
            check_same_tables(reports)
            check_coverage(self.table, [item["boxes"] for item in reports])

        reports = self.group.all_or_raise("weights", work, judge)
        if reports is None:
            return None, None
        difference = next((item["difference"] for item in reports if item["difference"] is not None), None)
        return _gathered_state(self.table, reports), difference

    def restore(self, manifest: Manifest) -> list[Bits]:
        """Return (numel,) bits of this rank's parts at a version, from the bucket; raises as ``restore``."""
        baseline = self._shards
        return baseline.in_part_order(restore_boxes(self.run, manifest, baseline.wanted(), self._base))

    def changes(self, pending: PendingDelta) -> Changes:
        """Return this rank's changes in terms of whole tensors; valid as ``PendingDelta.changes``."""
        return changes_of_tensors(self._shards, pending)

    def keep(self, changes: Mapping[int, Fingerprint]) -> None:
        """Add durable changes to this rank's shares: tensor id → what was added to its fingerprint."""
        known = self._shards.shares
        # In one assignment, so that a failure in the middle changes nothing.
        self._shards.shares = known | {
            tensor: known.get(tensor, Fingerprint()) + change for tensor, change in changes.items()
        }

    def _find_parts(self, tensors: str) -> None:
        def work() -> Json:
            if self.run.table.digest != tensors:
                raise UsageError(
                    f"rank {self.group.rank} sees another run at {self._bucket.url} than rank 0: give every rank the "
                    "URL of one bucket that all of them reach"
                )
            self._baseline = ShardBaseline.parts_of_run(self._live, self.run.table, self.group.rank)
            return boxes_document(self._baseline.boxes)

        self.group.all_or_raise("parts", work, lambda reports: check_coverage(self.run.table, reports))

    def _capture(self, fallback: Checkpoint | None) -> None:
        def work() -> None:
            self.baseline.capture(self._live, fallback)
            self._shards.scan()

        self.group.all_or_raise("capture", work)

    def _checkout(self, manifest: Manifest) -> None:
        restored: list[tuple[list[Bits], dict[int, Fingerprint]]] = []

        def work() -> str:
            bits = self.restore(manifest)
            restored.append((bits, self._shards.shares_of(bits)))
            return sum(restored[0][1].values(), Fingerprint()).hex()

        def judge(reports: list[Json]) -> None:
            reached = sum(map(Fingerprint.from_hex, reports), Fingerprint())
            if reached != manifest.model_fingerprint:
                raise FingerprintError(
                    f"weights have fingerprint {reached.hex()}, the manifest says {manifest.fingerprint}"
                )

        try:
            self.group.all_or_raise("restore", work, judge)
        except FingerprintError:
            raise
        except DeltaSyncError as error:
            if not restored:
                raise
            # The version exists, because this rank was able to read it: do not start over.
            raise PublishError(f"version {manifest.version} cannot be restored: {error.message}") from error
        self._shards.replace_bits(*restored[0])

    def _put_shards(self, put: Put) -> tuple[GatheredState, list[ObjectRef]]:
        reports = self.group.all_or_raise("fingerprints", lambda: _shares_document(self._shards))
        refs = put_shards(self.group, self._shards, self._options.shard_bytes, put)
        return _gathered_state(self.table, reports or []), refs or []

    def _store(self, ref: ObjectRef, path: Path) -> None:
        RunWriter(self._bucket, self.run.info, 0, self._options).put_file(ref, path)


def _shares_document(baseline: ShardBaseline) -> Json:
    return {"shares": {str(tensor): share.hex() for tensor, share in baseline.shares.items()}}


def _gathered_state(table: TensorTable, reports: list[Json]) -> GatheredState:
    fingerprints = [Fingerprint()] * len(table)
    for item in reports:
        for tensor, share in item["shares"].items():
            fingerprints[int(tensor)] += Fingerprint.from_hex(share)
    return GatheredState(table, fingerprints)
