"""``publish_gathered``: publish weights that a framework gathers on all ranks and yields as (name, tensor)."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer_side.model.streamed import StreamedWeights
from trainer_side.publisher import Publisher
from trainer_side.result import PublishResult

__all__ = ["Pairs", "gathered_publisher", "publish_gathered"]

Pairs = Iterable[tuple[str, torch.Tensor]]
"""(name in the checkpoint or of a parameter, whole tensor)."""


def gathered_publisher(bucket: str, base: str | Path, leads: bool = True, **options: Any) -> Publisher | None:
    """Make a publisher whose weights come with each call; None on ranks that do not publish.

    Version 0 is a reference to ``base``, which decides the names and dtypes of the run. Tensors that are never yielded
    keep the bits of ``base``.

    Args:
        bucket: run URL; an existing run is taken over.
        base: checkpoint that training and servers start from: a directory, or ``org/name@revision``.
        leads: whether this rank publishes. Exactly one rank does.
        options: of ``Publisher``.

    Raises:
        As ``StreamedWeights`` and ``Publisher``.
    """
    return Publisher(StreamedWeights(base), bucket, base, **options) if leads else None


def publish_gathered(publisher: Publisher | None, step: int, weights: Pairs) -> PublishResult | None:
    """Publish on one rank, and return when the version is durable; None on the other ranks.

    Call it on every rank: each reads the generator to its end, because gathering a tensor takes all ranks.

    Args:
        publisher: of ``gathered_publisher``.
        step: optimizer step.
        weights: (name in the checkpoint or of a parameter, whole tensor).

    Raises:
        As ``Publisher.publish`` and ``Publisher.flush``, after the generator was read to its end.
    """
    if publisher is None:
        for _ in weights:
            pass
        return None
    result = publisher.publish(step, wait=True, weights=weights)
    publisher.flush()
    return result
