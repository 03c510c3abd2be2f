"""``publish_gathered``: publish weights that a framework gathers on all ranks and yields as (name, tensor)."""

from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from trainer_side.model.streamed import StreamedWeights
from trainer_side.publisher import Publisher
from trainer_side.ranks.group import WORK_SECONDS, ProcessGroup, in_world
from trainer_side.result import PublishResult
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import UsageError
from vllm_delta_sync.units import listed

__all__ = ["Pairs", "gathered_publisher", "publish_gathered"]

Pairs = Iterable[tuple[str, torch.Tensor]]
"""(name in the checkpoint or of a parameter, whole tensor)."""


_waiting: ProcessGroup | None = None
"""The ranks that wait together for a publisher, or this process alone; None before the first publisher."""


def gathered_publisher(
    bucket: str | Path | Bucket, base: str | Path, leads: bool = True, *, all_wait: bool = False, **options: Any
) -> Publisher | None:
    """Make a publisher whose weights come with each call; None on ranks that do not publish.

    Version 0 is a reference to ``base``, which decides the names and dtypes of the run. Tensors that are never yielded
    keep the bits of ``base``.

    Args:
        bucket: run URL; an existing run is taken over.
        base: checkpoint that training and servers start from: a directory, or ``org/name@revision``.
        leads: whether this rank publishes. Exactly one rank does.
        all_wait: all ranks of the world call this and ``publish_gathered``, and return from both together, however long
            the store takes: a rank that went ahead would reach its timeout in the next collective call of the training.
            The same for all publishers of a process, since the other ranks have none that tells them apart.
        options: of ``Publisher``.

    Raises:
        UsageError: ``all_wait`` is not that of an earlier one, or with it not exactly one rank ``leads``. Otherwise as
            ``StreamedWeights`` and ``Publisher``.
    """
    global _waiting
    former = _waiting
    group = ProcessGroup(WORK_SECONDS, alone=not (all_wait and in_world()))

    def make() -> Publisher | None:
        if former is not None and former.alone != group.alone:
            waited = "do not wait" if former.alone else "wait"
            raise UsageError(
                f"all_wait is {all_wait}, and the other ranks {waited} for an earlier publisher of this process: give "
                "all of them the same, after init_process_group"
            )
        return Publisher(StreamedWeights(base), bucket, base, **options) if leads else None

    with ExitStack() as undo:
        undo.callback(group.close)
        (leading,) = group.ranks_where("leads", [leads])
        if not group.alone and len(leading) != 1:
            raise UsageError(
                f"leads is true on {'rank ' + listed(leading, 8) if leading else 'no rank'}; give it on one rank, the "
                "one that publishes: leads=rank == 0"
            )
        publisher = group.on_every_rank("beginning", make)
        undo.pop_all()
    if former is not None:
        former.close()
    _waiting = group
    return publisher


def publish_gathered(
    publisher: Publisher | None, step: int, weights: Pairs, exact: bool = False
) -> PublishResult | None:
    """Publish on one rank, and return when the version is durable; None on the other ranks.

    Call it on every rank: each reads the generator to its end, because gathering a tensor takes all ranks.

    Args:
        publisher: of ``gathered_publisher``.
        step: optimizer step; that of the publishing rank counts.
        weights: (name in the checkpoint or of a parameter, whole tensor).
        exact: as ``Publisher.publish``; with a budget, give it with the last weights, since ``close`` has none.

    Raises:
        As ``Publisher.publish`` and ``Publisher.flush``, after the generator was read to its end.
    """

    def work() -> PublishResult | None:
        if publisher is None:
            for _ in weights:
                pass
            return None
        result = publisher.publish(step, wait=True, weights=weights, exact=exact)
        publisher.flush()
        return result

    return work() if _waiting is None else _waiting.on_every_rank("publish_gathered", work)
