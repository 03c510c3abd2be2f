"""What all ranks do to their parts at rank 0's word: rank 0 runs the code that a single process would, and where that
reads or writes weights it gives an order, which every rank carries out for its own parts.
"""

from collections.abc import Callable
from pathlib import Path

from trainer_side.manifests import Put
from trainer_side.options import Options
from trainer_side.ranks.gather import put_shards
from trainer_side.ranks.group import Json, LostRankError, ProcessGroup, told_error
from trainer_side.ranks.shard_baseline import GatheredState, ShardBaseline, check_same_tables
from trainer_side.ranks.shard_parts import ModuleParts, boxes_document, check_cover
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
from vllm_delta_sync.tensors.checkpoint import Checkpoint

logger = guarded_logger(__name__)


class RankCoordinator:
    """One rank's place among those that publish a run together.

    Attributes:
        baseline: this rank's parts, once there are any.
        base: where version 0 lies, for what has to be read back.
        check: called before parts are written as a snapshot; raises if they are not what was published.

    Args:
        circle: of the thread that publishes. live: this rank's parts.
    """

    def __init__(
        self, circle: ProcessGroup, live: ModuleParts, bucket: Bucket, options: Options, base: str | Path | None
    ) -> None:
        self.circle, self.base = circle, base
        self.check: Callable[[], None] = _nothing
        self._live, self._bucket, self._options = live, bucket, options
        self._baseline: ShardBaseline | None = None
        self._run: Run | None = None
        self._what = ""

    @property
    def baseline(self) -> ShardBaseline:
        if self._baseline is None:
            raise UsageError("the weights of this rank are not known yet")
        return self._baseline

    @property
    def run(self) -> Run:
        """The run, for reading."""
        if self._run is None:
            self._run = Run(self._bucket, self._options.keyring)
        return self._run

    def follower(self, newest: Manifest) -> RunWriter:
        """What a rank other than 0 stores objects with; it commits nothing."""
        writer = RunWriter(self._bucket, self.run.info, 0, self._options, self.run.document_limit)
        writer.adopt(newest)
        return writer

    def lead(self, what: str, work: Callable[[], Json]) -> Json:
        """Do ``work`` on rank 0, and on the others what it orders → what it gives, on every rank.

        Raises:
            DeltaSyncError: whatever it raised. LostRankError: a rank is gone.
        """
        self._what = what
        if self.circle.leads:
            return self.circle.first(what, work)
        while True:
            order = self.circle.broadcast(what)
            if "error" in order:
                raise told_error(order["error"], 0)
            if "do" not in order:
                return order["value"]
            try:
                self._obey(order)
            except LostRankError:
                raise
            except Exception:  # rank 0 has been told, and says what becomes of it
                logger.debug("rank %d could not do as it was told", self.circle.rank, exc_info=True)

    # Orders, for what rank 0 runs in ``lead``

    def fit(self) -> ShardBaseline:
        """Find out which parts of the run's tensors the ranks own.

        Raises:
            ModelError: that is not each element once. Else as ``Baseline.of_run``.
        """
        self._order({"do": "fit", "tensors": self.run.table.digest})
        return self._fit(self.run.table.digest)

    def capture(self, rest: Checkpoint | None) -> None:
        """Hold the live parts of this moment; what the model does not hold comes from ``rest``."""
        self._order({"do": "capture"})
        self._capture(rest)

    def hold(self, manifest: Manifest) -> None:
        """Hold the bits of a version.

        Raises:
            FingerprintError: what all ranks hold together is not what it says; nothing was taken. PublishError: only
                another rank cannot rebuild its parts. Else as ``restore``.
        """
        self._order({"do": "hold", "manifest": manifest.to_bytes().decode()})
        self._hold(manifest)

    def put_shards(self, put: Put) -> tuple[GatheredState, list[ObjectRef]]:
        """Store the baseline as an anchor's objects; what it is, and the objects. Raises as ``check`` and ``put``."""
        self._order({"do": "anchor"})
        return self._put_shards(put)

    def _order(self, order: Json) -> None:
        self.circle.broadcast(self._what, order)

    def _obey(self, order: Json) -> None:
        match order["do"]:
            case "fit":
                self._fit(order["tensors"])
            case "capture":
                self._capture(None)
            case "hold":
                self._hold(Manifest.from_bytes(order["manifest"].encode()))
            case "anchor":
                self._put_shards(self._store)

    # What every rank does

    def begin(self, base: Path | None) -> tuple[GatheredState | None, str | None]:
        """Capture the weights of a new run; every rank calls it.

        Returns:
            on rank 0 all of them, and the first tensor that is not the base's; else None.

        Raises:
            ModelError: the ranks do not publish the same tensors, or not each element of them once. Else as
                ``Baseline.captured``.
        """

        def work() -> Json:
            baseline = ShardBaseline.captured_parts(self._live, base, self.circle.rank)
            self._baseline = baseline
            baseline.scan()
            return {
                "tensors": baseline.whole.digest,
                "boxes": boxes_document(baseline.boxes),
                "difference": baseline.first_difference,
                **_shares(baseline),
            }

        def judge(told: list[Json]) -> None:
            check_same_tables(told)
            check_cover(self.baseline.whole, [item["boxes"] for item in told])

        told = self.circle.together("weights", work, judge)
        if told is None:
            return None, None
        difference = next((item["difference"] for item in told if item["difference"] is not None), None)
        return _summed(self.baseline.whole, told), difference

    def restored(self, manifest: Manifest) -> list[Bits]:
        """(numel,) bits of this rank's parts at a version, from the bucket; raises as ``restore``."""
        baseline = self.baseline
        return baseline.arranged(restore_boxes(self.run, manifest, baseline.wanted(), self.base))

    def _fit(self, tensors: str) -> ShardBaseline:
        def work() -> Json:
            if self.run.table.digest != tensors:
                raise UsageError(
                    f"rank {self.circle.rank} sees another run at {self._bucket.url} than rank 0: give every rank the "
                    "URL of one bucket that all of them reach"
                )
            self._baseline = ShardBaseline.parts_of_run(self._live, self.run.table, self.circle.rank)
            return boxes_document(self._baseline.boxes)

        self.circle.together("parts", work, lambda told: check_cover(self.run.table, told))
        return self.baseline

    def _capture(self, rest: Checkpoint | None) -> None:
        def work() -> None:
            self.baseline.capture(self._live, rest)
            self.baseline.scan()

        self.circle.together("capture", work)

    def _hold(self, manifest: Manifest) -> None:
        taken: list[tuple[list[Bits], dict[int, Fingerprint]]] = []

        def work() -> str:
            bits = self.restored(manifest)
            taken.append((bits, self.baseline.shares_of(bits)))
            return sum(taken[0][1].values(), Fingerprint()).hex()

        def judge(told: list[Json]) -> None:
            reached = sum(map(Fingerprint.from_hex, told), Fingerprint())
            if reached != manifest.model_fingerprint:
                raise FingerprintError(
                    f"weights have fingerprint {reached.hex()}, the manifest says {manifest.fingerprint}"
                )

        try:
            self.circle.together("restore", work, judge)
        except FingerprintError:
            raise
        except DeltaSyncError as error:
            if not taken:
                raise
            # That version is there, as this rank has seen: nothing is to be begun anew.
            raise PublishError(f"version {manifest.version} cannot be restored: {error.message}") from error
        self.baseline.take_bits(*taken[0])

    def _put_shards(self, put: Put) -> tuple[GatheredState, list[ObjectRef]]:
        def work() -> Json:
            self.check()
            return _shares(self.baseline)

        told = self.circle.together("fingerprints", work)
        refs = put_shards(self.circle, self.baseline, self._options.shard_bytes, put)
        return _summed(self.baseline.whole, told or []), refs or []

    def _store(self, ref: ObjectRef, path: Path) -> None:
        RunWriter(self._bucket, self.run.info, 0, self._options).put_file(ref, path)


def _nothing() -> None:
    return None


def _shares(baseline: ShardBaseline) -> Json:
    return {"shares": {str(tensor): share.hex() for tensor, share in baseline.shares.items()}}


def _summed(table: TensorTable, told: list[Json]) -> GatheredState:
    fingerprints = [Fingerprint()] * len(table)
    for item in told:
        for tensor, share in item["shares"].items():
            fingerprints[int(tensor)] += Fingerprint.from_hex(share)
    return GatheredState(table, fingerprints)
