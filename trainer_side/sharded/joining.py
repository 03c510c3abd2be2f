"""How one rank takes its place in a publisher of many."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from torch import nn

from trainer_side.assembly import Assembly, each, no_upkeep
from trainer_side.detection import Detector
from trainer_side.naming import ModelLike
from trainer_side.options import Options
from trainer_side.sharded.committer import RanksCommitter
from trainer_side.sharded.course import RanksCourse
from trainer_side.sharded.crew import Crew
from trainer_side.sharded.opening import open_or_begin
from trainer_side.sharded.parts import ModuleParts
from trainer_side.sharded.ranks import Ranks
from trainer_side.start import Opened
from trainer_side.upkeep import Upkeep
from trainer_side.worker import Worker
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.trust import Keyring


def joined_options(options: Options) -> Options:
    """The same; raises UsageError for what only the publisher of a whole model can do."""
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


def with_trusted(options: Options, trusted: Sequence[str]) -> Options:
    """Options of a rank that signs nothing, and believes whom rank 0 believes."""
    return replace(options, keyring=Keyring(trusted))


def joined(
    model: ModelLike,
    bucket: Bucket,
    base: str | Path | None,
    options: Options,
    background: Worker,
    detector: Detector,
    ranks: Ranks,
    undo: ExitStack,
) -> Assembly:
    """As ``assembly.assembled``, by every rank."""
    live = each(ranks, "model", lambda: _parts(model))
    found: list[tuple[Opened, Crew]] = []
    background.call(lambda: found.append(open_or_begin(bucket, live, base, options, ranks.work)))
    opened, crew = found[0]
    upkeep: Upkeep | None = None
    if ranks.leads:
        upkeep = Upkeep(bucket, crew.base, options, opened.writer)
        undo.callback(upkeep.close)
    committer = RanksCommitter(opened, crew, bucket, options, no_upkeep if upkeep is None else upkeep.offer)
    background.call(committer.begin)
    course = RanksCourse(live, crew.baseline.whole, options, committer, detector, background, ranks)
    return Assembly(opened, committer, course, detector, upkeep)


def _parts(model: ModelLike) -> ModuleParts:
    if not isinstance(model, nn.Module):
        raise UsageError("only a module can be published by several ranks together")
    return ModuleParts(model)
