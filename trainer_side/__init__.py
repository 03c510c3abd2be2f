"""Publish a model's weights, version by version, while it trains. Needs torch, not vllm."""

from typing import TYPE_CHECKING

from trainer_side.gate import Gate
from trainer_side.publisher import Publisher
from trainer_side.result import PublishResult

if TYPE_CHECKING:
    from trainer_side.integrations.transformers_callback import DeltaSyncCallback

__all__ = ["DeltaSyncCallback", "Gate", "PublishResult", "Publisher"]


def __getattr__(name: str) -> object:
    # Publishing needs no transformers, which takes seconds to import.
    if name == "DeltaSyncCallback":
        from trainer_side.integrations import transformers_callback

        return transformers_callback.DeltaSyncCallback
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
