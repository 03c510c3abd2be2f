"""How one rank takes its place in a publisher of many."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from trainer_side.assembly import PublisherParts, each, no_upkeep
from trainer_side.background_thread import BackgroundThread
from trainer_side.diff.engine import Detector
from trainer_side.maintenance import BackgroundMaintenance
from trainer_side.model.sources import ModelLike
from trainer_side.options import Options
from trainer_side.ranks.coordinator import RankCoordinator
from trainer_side.ranks.group import Json, RankGroups, check_same
from trainer_side.ranks.opening import open_or_begin
from trainer_side.ranks.rank_committer import RankCommitter
from trainer_side.ranks.rank_session import RankPublishSession
from trainer_side.ranks.shard_parts import ModuleParts
from trainer_side.start import Collect, OpenedRun
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.format.codecs import BASE_CODECS
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
    if options.codec in BASE_CODECS:
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
