"""Begin a run from all ranks, or take one over: rank 0 writes and decides, each rank holds its own parts."""

from pathlib import Path

from trainer_side import manifests
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.engine import compile_kernels
from trainer_side.options import Options
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.group import Json, ProcessGroup, check_same
from trainer_side.ranks.shard_parts import ModuleParts
from trainer_side.start import Collect, OpenedRun, RunLocation, begin, look_at
from trainer_side.takeover import Takeover, check_may_resume, place_of
from trainer_side.writer import RunWriter
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.manifest import Manifest, ObjectRef
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import Checkpoint, ResolvedBase, resolve_base


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
