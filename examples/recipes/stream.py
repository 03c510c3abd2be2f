"""Weights that a framework gathers on all ranks and yields as (name, tensor), with no module to hand over."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from trainer_side import Publisher, PublishResult
from trainer_side.handed import HandedTensors

Pairs = Iterable[tuple[str, torch.Tensor]]


def gathered_publisher(bucket: str, base: str | Path, leads: bool = True, **options: Any) -> Publisher | None:
    """A publisher whose weights come with each call, on the rank that leads; None on the others.

    Version 0 is a reference to ``base``, whose names and dtypes the run has. What is never handed over keeps its bits.

    Args:
        bucket: run URL; a run that is there is taken over.
        base: checkpoint that training and servers start from: a directory, or ``org/name@revision``.
        options: of ``Publisher``.

    Raises:
        As ``HandedTensors`` and ``Publisher``.
    """
    return Publisher(HandedTensors(base), bucket, base, **options) if leads else None


def publish_gathered(publisher: Publisher | None, step: int, weights: Pairs) -> PublishResult | None:
    """Publish from the rank that has a publisher; durable when this returns.

    Args:
        publisher: of ``gathered_publisher``; ranks that have none take part in gathering each tensor, and so read the
            generator to its end.
        step: optimizer step. weights: (name in the checkpoint, or of a parameter, whole tensor).

    Raises:
        As ``Publisher.publish`` and ``Publisher.flush``; the generator has been read to its end then too.
    """
    if publisher is None:
        for _ in weights:
            pass
        return None
    result = publisher.publish(step, wait=True, weights=weights)
    publisher.flush()
    return result
