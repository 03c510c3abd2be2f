"""Publish a model's weights, version by version, while it trains. Needs torch, not vllm."""

from trainer_side.gate import Gate
from trainer_side.publisher import Publisher
from trainer_side.result import PublishResult

__all__ = ["Gate", "PublishResult", "Publisher"]
