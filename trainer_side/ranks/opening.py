"""``open_or_begin``: open a run from all ranks; rank 0 writes and decides, each rank holds its own parts."""

from pathlib import Path

from torch import nn

from trainer_side.diff.engine import compile_kernels
from trainer_side.model.sources import ModelLike
from trainer_side.options import Options
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.group import Json, ProcessGroup, check_same
from trainer_side.ranks.shard_parts import ModuleParts
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
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.checkpoint import ResolvedBase, resolve_base


def module_parts(model: ModelLike) -> ModuleParts:
    """Return this rank's parts of a module; raise UsageError if the model is none, or as ``ModuleParts``."""
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
) -> OpenedRun:
    """As ``takeover.open_or_begin``, called by all ranks where no interrupt hits. Every rank raises the same error.

    On ranks other than 0 the writer of the run stores objects only.
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
            "taking over", lambda: _take_over_together(coordinator, live, base_location, options, bucket, writers)
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
    return OpenedRun(coordinator, writer, current, base_location)


def _check_based(reports: list[Json]) -> None:
    check_same("whether base= is given", reports)


def _prepare(coordinator: RankCoordinator, current: Manifest, options: Options) -> None:
    baseline = coordinator.baseline
    baseline.location = options.baseline
    compile_kernels(baseline.table)
    # Run the codec's check of the table now rather than at the first version.
    encode(Changes(), coordinator.table, options.base_codec, options.compression, DeltaContext("", 1, 0))
    if coordinator.run.info.run != current.run:
        raise UsageError(
            f"rank {coordinator.group.rank} finds another run in the bucket than rank 0 has written: give every rank "
            "the URL of one bucket that all of them reach"
        )


def _take_over_together(
    coordinator: RankCoordinator,
    live: ModuleParts,
    base: str | Path | None,
    options: Options,
    bucket: Bucket,
    writers: list[RunWriter],
) -> str:
    opened = Takeover(bucket, live, coordinator, base, options, lambda work: work()).take_over()
    writers.append(opened.writer)
    return opened.current.to_bytes().decode()
