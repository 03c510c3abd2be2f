"""``publish_gathered``: publish weights that a framework gathers on all ranks and yields as (name, tensor)."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainer_side.model.streamed import StreamedWeights
from trainer_side.publisher import Publisher
from trainer_side.ranks.group import WORK_SECONDS, ProcessGroup, in_world
from trainer_side.result import PublishResult

__all__ = ["Pairs", "gathered_publisher", "publish_gathered"]

_Result = TypeVar("_Result")
Pairs = Iterable[tuple[str, torch.Tensor]]
"""(name in the checkpoint or of a parameter, whole tensor)."""


_waiting: ProcessGroup | None = None
"""The ranks that wait together for the publisher made last; None where only the one that publishes calls it."""


def gathered_publisher(
    bucket: str, base: str | Path, leads: bool = True, *, all_wait: bool = False, **options: Any
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
        options: of ``Publisher``.

    Raises:
        As ``StreamedWeights`` and ``Publisher``.
    """
    global _waiting
    if _waiting is not None:
        _waiting.close()
    _waiting = ProcessGroup(WORK_SECONDS) if all_wait and in_world() else None
    return _together("beginning", lambda: Publisher(StreamedWeights(base), bucket, base, **options) if leads else None)


def _together(what: str, work: Callable[[], _Result]) -> _Result:
    """Return what ``work`` returns, once it has returned on every rank that waits."""
    return work() if _waiting is None else _waiting.on_every_rank(what, work)


def publish_gathered(
    publisher: Publisher | None, step: int, weights: Pairs, exact: bool = False
) -> PublishResult | None:
    """Publish on one rank, and return when the version is durable; None on the other ranks.

    Call it on every rank: each reads the generator to its end, because gathering a tensor takes all ranks.

    Args:
        publisher: of ``gathered_publisher``.
        step: optimizer step.
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

    return _together(f"step {step}", work)
