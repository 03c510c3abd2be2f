"""TRL's own rollout loop, which also notes by which weight version each answer was sampled."""

from contextvars import ContextVar
from typing import Any

import numpy as np
from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, RolloutSample, _AsyncRolloutLoop

from examples.demo.rollouts import parse_completions
from examples.trl_async.names import SERVED_VERSION

_sampled_by: ContextVar[list[int]] = ContextVar("sampled_by")


class VersionedRolloutLoop(_AsyncRolloutLoop):
    """Runs in TRL's rollout process, and changes nothing but the metrics that samples carry."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._versions: dict[str, float] = {}

    async def _generate_one(self, *arguments: Any, **options: Any) -> Any:
        # One task of asyncio each, so that answers to others do not reach this context.
        sampled_by: list[int] = []
        _sampled_by.set(sampled_by)
        outcome = await super()._generate_one(*arguments, **options)
        sequences = outcome[2]
        self._versions |= {sequence.rollout_id: float(np.mean(sampled_by)) for sequence in sequences}
        return outcome

    async def _post(self, path: str, payload: dict[str, Any], timeout: float, max_retries: int = 3) -> dict[str, Any]:
        answer: dict[str, Any] = await super()._post(path, payload, timeout, max_retries)
        _sampled_by.get().extend(versions_of(answer))
        return answer

    async def _score_group(self, group: RolloutGroup) -> list[RolloutSample]:
        samples: list[RolloutSample] = await super()._score_group(group)
        sequences = (sequence for conversation in group.completions_sequences for sequence in conversation)
        for sample, sequence in zip(samples, sequences, strict=True):
            sample.metrics[SERVED_VERSION] = self._versions.pop(sequence.rollout_id)
        return samples


def versions_of(answer: dict[str, Any]) -> list[int]:
    """The weight version of each token of a ``/v1/completions`` answer with one choice.

    Tokens from before the server had proven what it serves count as version 0: it was started from the run's base.
    """
    ((completion,),) = parse_completions(answer, samples=1)
    return [version or 0 for version in completion.versions]
