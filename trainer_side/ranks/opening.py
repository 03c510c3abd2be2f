"""``build_sharded``: open a run from all ranks; rank 0 writes and decides, each rank holds its own parts."""

from contextlib import ExitStack
from pathlib import Path

from torch import nn

from trainer_side import manifests
from trainer_side.background_thread import BackgroundThread
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.engine import Detector, compile_kernels
from trainer_side.maintenance import BackgroundMaintenance
from trainer_side.model.sources import ModelLike
from trainer_side.options import Options
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.group import Json, ProcessGroup, RankGroups, check_same
from trainer_side.ranks.rank_committer import RankCommitter
from trainer_side.ranks.shard_parts import ModuleParts
from trainer_side.session import PublisherParts, PublishSession, on_every_rank, skip_maintenance
from trainer_side.takeover import (
    CollectFiles,
    OpenedRun,
    Takeover,
    UrlContents,
    begin,
    check_may_resume,
    inspect_url,
    locate_base,
)
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint, ResolvedBase, resolve_base


def build_sharded(
    model: ModelLike,
    bucket: Bucket,
    base: str | Path | None,
    files: CollectFiles,
    options: Options,
    background: BackgroundThread,
    detector: Detector,
    ranks: RankGroups,
    undo: ExitStack,
) -> PublisherParts:
    """As ``session.build_publisher``, called by every rank."""
    live = on_every_rank(ranks, "model", lambda: _module_parts(model))
    found: list[tuple[OpenedRun, RankCoordinator]] = []
    background.call(lambda: found.append(open_or_begin(bucket, live, base, files, options, ranks.work)))
    opened, coordinator = found[0]
    maintenance: BackgroundMaintenance | None = None
    if ranks.is_rank0:
        maintenance = BackgroundMaintenance(bucket, coordinator.base, options, opened.writer)
        undo.callback(maintenance.close)
    committer = RankCommitter(
        opened, coordinator, bucket, options, skip_maintenance if maintenance is None else maintenance.offer
    )
    background.call(committer.begin)
    session = PublishSession(live, coordinator.baseline.whole, options, committer, detector, background, ranks.caller)
    return PublisherParts(opened, committer, session, detector, maintenance)


def _module_parts(model: ModelLike) -> ModuleParts:
    if not isinstance(model, nn.Module):
        raise UsageError("only a module can be published by several ranks together")
    return ModuleParts(model)


def open_or_begin(
    bucket: Bucket,
    live: ModuleParts,
    base: str | Path | None,
    files: CollectFiles,
    options: Options,
    group: ProcessGroup,
) -> tuple[OpenedRun, RankCoordinator]:
    """As ``takeover.open_or_begin``, called by all ranks where no interrupt hits. Every rank raises the same error.

    Returns:
        The run (on ranks other than 0 its writer stores objects only), and this rank's coordinator.
    """
    found: list[UrlContents] = []

    def look() -> bool:
        found.append(inspect_url(bucket, options.resume))
        if found[0].run:
            check_may_resume(bucket, options)
        return found[0].run

    exists = group.from_rank0("opening", look)
    places: list[tuple[ResolvedBase | None, str | Path | None]] = []

    def locate() -> bool:
        resolved = None if exists or base is None else resolve_base(base)
        path = None if resolved is None else resolved.path
        places.append((resolved, locate_base(base) if exists else path))
        return resolved is not None

    # If rank 0 has to download it, ranks that share its cache find it there.
    based = group.from_rank0("base", locate)
    group.all_or_raise("base of each", lambda: based if group.is_rank0 else locate(), _check_based)
    resolved, base_location = places[0]
    coordinator = RankCoordinator(group, live, bucket, options, base_location)
    writers: list[RunWriter] = []
    if exists:
        text = coordinator.run_on_rank0(
            "taking over", lambda: _take_over_together(coordinator, live, options, bucket, writers)
        )
    else:
        state, difference = coordinator.begin(None if resolved is None else resolved.path)

        def start() -> str:
            if state is None:
                raise UsageError("only rank 0 begins a run")
            store, unfinished = (lambda put: coordinator.put_shards(put)[1]), found[0].unfinished
            kept = files(resolved)
            writer, manifest = begin(bucket, state, difference, resolved, options, store, kept, unfinished)
            writers.append(writer)
            return manifest.to_bytes().decode()

        text = coordinator.run_on_rank0("beginning", start)
    current = Manifest.from_bytes(text.encode())
    group.all_or_raise("ready", lambda: _prepare(coordinator, current, options))
    writer = writers[0] if writers else coordinator.follower_writer(current)
    return OpenedRun(coordinator.baseline, writer, current), coordinator


def _check_based(reports: list[Json]) -> None:
    check_same("whether base= is given", reports)


def _prepare(coordinator: RankCoordinator, current: Manifest, options: Options) -> None:
    baseline = coordinator.baseline
    baseline.location = options.baseline
    compile_kernels(baseline.table)
    # Run the codec's check of the table now rather than at the first version.
    encode(Changes(), baseline.whole, options.base_codec, options.compression, DeltaContext("", 1, 0))
    if coordinator.run.info.run != current.run:
        raise UsageError(
            f"rank {coordinator.group.rank} finds another run in the bucket than rank 0 has written: give every rank "
            "the URL of one bucket that all of them reach"
        )


class _RanksTakeover(Takeover):
    """A takeover by rank 0 for all ranks."""

    def __init__(self, coordinator: RankCoordinator, live: ModuleParts, bucket: Bucket, options: Options) -> None:
        self._coordinator = coordinator
        super().__init__(bucket, live, coordinator.base, options, lambda work: work())

    def _matching_baseline(self) -> Baseline:
        return self._coordinator.find_parts()

    def _checkout(self, head: Manifest) -> None:
        self._coordinator.checkout(head)

    def _capture_live(self, fallback: Checkpoint | None) -> None:
        self._coordinator.capture(fallback)

    def _store_anchor(self, put: manifests.Put) -> tuple[manifests.FullState, list[ObjectRef]]:
        return self._coordinator.put_shards(put)


def _take_over_together(
    coordinator: RankCoordinator, live: ModuleParts, options: Options, bucket: Bucket, writers: list[RunWriter]
) -> str:
    opened = _RanksTakeover(coordinator, live, bucket, options).take_over()
    writers.append(opened.writer)
    return opened.current.to_bytes().decode()
