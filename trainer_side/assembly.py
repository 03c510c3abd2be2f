"""Put together what a publisher works with: for a model of this process, or as one of the ranks that share a model."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from torch import distributed

from trainer_side.background_thread import BackgroundThread
from trainer_side.committer import Committer
from trainer_side.diff.engine import Detector
from trainer_side.maintenance import BackgroundMaintenance
from trainer_side.model.sources import ModelLike, live_tensors
from trainer_side.options import Options
from trainer_side.run_files import collect_files
from trainer_side.session import PublishSession
from trainer_side.start import OpenedRun
from trainer_side.takeover import open_or_begin
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.format.manifest import Manifest

if TYPE_CHECKING:
    from trainer_side.ranks.group import RankGroups

_Found = TypeVar("_Found")


@dataclass
class PublisherParts:
    """A publisher's parts.

    Attributes:
        upkeep: None on a rank that leaves it to rank 0.
    """

    opened: OpenedRun
    committer: Committer
    course: PublishSession
    detector: Detector
    upkeep: BackgroundMaintenance | None


def ranks_of(model: ModelLike) -> "RankGroups | None":
    """The ranks that publish a model together; None if this process does by itself.

    Raises:
        PublishError: a rank does not take part.
    """
    if not (distributed.is_available() and distributed.is_initialized()):
        return None
    from trainer_side.ranks.shard_parts import needs_ranks

    if not needs_ranks(model):
        return None
    from trainer_side.ranks.group import RankGroups

    return RankGroups()


def each(ranks: "RankGroups | None", what: str, work: Callable[[], _Found]) -> _Found:
    """What ``work`` gives here, once it has gone well on every rank; raises what it raised on any."""
    if ranks is None:
        return work()
    found: list[_Found] = []
    ranks.work.together(what, lambda: found.append(work()))
    return found[0]


def agreed_options(ranks: "RankGroups | None", check: Callable[[bool], Options]) -> Options:
    """A publisher's options.

    Args:
        check: makes them, with keys to sign with if it is told so: only rank 0 needs them.

    Raises:
        UsageError, SettingsError: what ``check`` raised on any rank; or the ranks were given other options.
    """
    if ranks is None:
        return check(True)
    from trainer_side.ranks.joining import joined_options

    return joined_options(ranks, check)


def assembled(
    model: ModelLike,
    bucket: Bucket,
    base: str | Path | None,
    files: str | Path | None,
    options: Options,
    background: BackgroundThread,
    ranks: "RankGroups | None",
    undo: ExitStack,
) -> PublisherParts:
    """Begin the run or take it over, and start what looks after it; errors as ``Publisher``.

    Args:
        undo: gets what has to be closed if something fails after this.
    """
    detector = Detector(options.diff_threads)
    undo.callback(detector.close)
    collected = partial(collect_files, model, files)
    if ranks is not None:
        from trainer_side.ranks.joining import joined

        return joined(model, bucket, base, collected, options, background, detector, ranks, undo)
    live = live_tensors(model)
    opened, place = open_or_begin(bucket, live, base, collected, options, background.call)
    upkeep = BackgroundMaintenance(bucket, place, options, opened.writer)
    undo.callback(upkeep.close)
    committer = Committer(bucket, opened, place, options, upkeep.offer)
    background.call(committer.begin)
    course = PublishSession(live, opened.baseline.table, options, committer, detector, background)
    return PublisherParts(opened, committer, course, detector, upkeep)


def no_upkeep(manifest: Manifest) -> None:
    """What a rank does that leaves upkeep to rank 0."""
