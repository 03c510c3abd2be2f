"""O"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
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
from trainer_side.ranks.rank_session import RankPublishSession
from trainer_side.ranks.shard_parts import ModuleParts
from trainer_side.session import PublisherParts, each, no_upkeep
from trainer_side.takeover import Collect, OpenedRun, RunLocation, Takeover, begin, check_may_resume, look_at, place_of
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.delta_object import DeltaContext, encode
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint, ResolvedBase, resolve_base
from vllm_delta_sync.trust import Keyring

# What ranks would else encode or cut in other ways, or come to their calls at other steps. Of all others rank 0's
# count, or each rank's own.
_ALIKE = ("codec", "compression", "every", "shard_bytes")


def joined_options(ranks: RankGroups, check: Callable[[bool], Options]) -> Options:
    """See ``assembly.agreed_options``; raises UsageError also for what only the publisher of a whole model can do."""
    found: list[Options] = []

    def work() -> Json:
        found.append(_of_ranks(check(ranks.leads)))
        return [getattr(found[0], name) for name in _ALIKE]

    def judge(told: list[Json]) -> None:
        for name, values in zip(_ALIKE, zip(*told, strict=True), strict=True):
            check_same(name, values)

    ranks.work.together("options", work, judge)
    trusted = ranks.work.first("keys", lambda: sorted(found[0].keyring.trusted))
    # Who signs nothing believes whom rank 0 believes.
    return found[0] if ranks.leads else replace(found[0], keyring=Keyring(trusted))


def _of_ranks(options: Options) -> Options:
    if options.gate is not None:
        raise UsageError(
            "gate is set, and a gate looks at whole tensors, of which each rank has a part; leave it out, or publish "
            "from one rank through a function that yields (checkpoint name, whole tensor)"
        )
    if options.codec == "context":
        raise UsageError(
            "codec is 'context', which codes changes by the whole tensor that they are in, of which each rank has a "
            "part; give 'packed' or 'auto'"
        )
    return options


def joined(
    model: ModelLike,
    bucket: Bucket,
    base: str | Path | None,
    files: Collect,
    options: Options,
    background: BackgroundThread,
    detector: Detector,
    ranks: RankGroups,
    undo: ExitStack,
) -> PublisherParts:
    """As ``assembly.assembled``, by every rank."""
    live = each(ranks, "model", lambda: _parts(model))
    found: list[tuple[OpenedRun, RankCoordinator]] = []
    background.call(lambda: found.append(open_or_begin(bucket, live, base, files, options, ranks.work)))
    opened, crew = found[0]
    upkeep: BackgroundMaintenance | None = None
    if ranks.leads:
        upkeep = BackgroundMaintenance(bucket, crew.base, options, opened.writer)
        undo.callback(upkeep.close)
    committer = RankCommitter(opened, crew, bucket, options, no_upkeep if upkeep is None else upkeep.offer)
    background.call(committer.begin)
    course = RankPublishSession(live, crew.baseline.whole, options, committer, detector, background, ranks)
    return PublisherParts(opened, committer, course, detector, upkeep)


def _parts(model: ModelLike) -> ModuleParts:
    if not isinstance(model, nn.Module):
        raise UsageError("only a module can be published by several ranks together")
    return ModuleParts(model)


def open_or_begin(
    bucket: Bucket, live: ModuleParts, base: str | Path | None, files: Collect, options: Options, circle: ProcessGroup
) -> tuple[OpenedRun, RankCoordinator]:
    """As ``resume.open_or_begin``, by all ranks; call it where no interrupt hits. On every rank the errors are one's.

    Returns:
        The run (whose writer stores objects only, on ranks other than 0), and this rank's place in it.
    """
    looked: list[RunLocation] = []

    def look() -> bool:
        looked.append(look_at(bucket, options.resume))
        if looked[0].run:
            check_may_resume(bucket, options)
        return looked[0].run

    there = circle.first("opening", look)
    places: list[tuple[ResolvedBase | None, str | Path | None]] = []

    def locate() -> bool:
        resolved = None if there or base is None else resolve_base(base)
        path = None if resolved is None else resolved.path
        places.append((resolved, place_of(base) if there else path))
        return resolved is not None

    # Where it has to be downloaded, ranks that share a cache take it from there.
    based = circle.first("base", locate)
    circle.together("base of each", lambda: based if circle.leads else locate(), _check_based)
    resolved, place = places[0]
    crew = RankCoordinator(circle, live, bucket, options, place)
    writers: list[RunWriter] = []
    if there:
        text = crew.lead("taking over", lambda: _take_over(crew, live, options, bucket, writers))
    else:
        whole, difference = crew.begin(None if resolved is None else resolved.path)

        def start() -> str:
            if whole is None:
                raise UsageError("only rank 0 begins a run")
            store, unfinished = (lambda put: crew.put_shards(put)[1]), looked[0].unfinished
            kept = files(resolved)
            writer, manifest = begin(bucket, whole, difference, resolved, options, store, kept, unfinished)
            writers.append(writer)
            return manifest.to_bytes().decode()

        text = crew.lead("beginning", start)
    held = Manifest.from_bytes(text.encode())
    circle.together("ready", lambda: _prepare(crew, held, options))
    writer = writers[0] if writers else crew.follower(held)
    return OpenedRun(crew.baseline, writer, held), crew


def _check_based(told: list[Json]) -> None:
    check_same("whether base= is given", told)


def _prepare(crew: RankCoordinator, held: Manifest, options: Options) -> None:
    baseline = crew.baseline
    baseline.place = options.baseline
    compile_kernels(baseline.table)
    # The codec's own check of the table, now rather than at the first version.
    encode(Changes(), baseline.whole, options.base_codec, options.compression, DeltaContext("", 1, 0))
    if crew.run.info.run != held.run:
        raise UsageError(
            f"rank {crew.circle.rank} finds another run in the bucket than rank 0 has written: give every rank the URL "
            "of one bucket that all of them reach"
        )


class _RanksTakeover(Takeover):
    """A takeover by rank 0 on behalf of all."""

    def __init__(self, crew: RankCoordinator, live: ModuleParts, bucket: Bucket, options: Options) -> None:
        self._crew = crew
        super().__init__(bucket, live, crew.base, options, lambda work: work())

    def _fitted(self) -> Baseline:
        return self._crew.fit()

    def _hold(self, head: Manifest) -> None:
        self._crew.hold(head)

    def _capture_live(self, rest: Checkpoint | None) -> None:
        self._crew.capture(rest)

    def _stored(self, put: manifests.Put) -> tuple[manifests.FullState, list[ObjectRef]]:
        return self._crew.put_shards(put)


def _take_over(
    crew: RankCoordinator, live: ModuleParts, options: Options, bucket: Bucket, writers: list[RunWriter]
) -> str:
    opened = _RanksTakeover(crew, live, bucket, options).publishable()
    writers.append(opened.writer)
    return opened.held.to_bytes().decode()
