"""Publish a model's weights, version by version, while it trains: ``Publisher``. Needs torch, not vllm."""

from typing import TYPE_CHECKING

from trainer_side.options import Budget, Gate
from trainer_side.publisher import Publisher
from trainer_side.ranks.given_parts import Part
from trainer_side.result import PublisherStatus, PublishResult

if TYPE_CHECKING:
    from trainer_side.integrations.transformers import DeltaSyncCallback

__all__ = ["Budget", "DeltaSyncCallback", "Gate", "Part", "PublishResult", "Publisher", "PublisherStatus"]


def __getattr__(name: str) -> object:
    # Imported on demand: publishing does not need transformers, whose import takes seconds.
    if name == "DeltaSyncCallback":
        from trainer_side.integrations.transformers import DeltaSyncCallback

        return DeltaSyncCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
