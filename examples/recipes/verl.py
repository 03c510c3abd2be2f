"""verl: a checkpoint engine that publishes the export of verl's training engine, and reads it back for its rollouts.

Written against verl 0.9.1 (``verl/checkpoint_engine/base.py``, ``verl/workers/engine_workers.py``). Copy it to a module
of your project under another name, and name that module in ``rollout.checkpoint_engine.custom_backend_module``.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import torch
from verl.checkpoint_engine.base import (  # type: ignore[import-not-found]
    CheckpointEngine,
    CheckpointEngineRegistry,
)

from trainer_side.integrations.gathered import Pairs, gathered_publisher, publish_gathered
from vllm_delta_sync import open_run

POLL_SECONDS = 0.2


@CheckpointEngineRegistry.register("delta_sync")  # type: ignore[untyped-decorator]
class DeltaSyncCheckpointEngine(CheckpointEngine):  # type: ignore[misc]
    """One object in each process: on the actor's rank 0 it publishes, on its other ranks it takes part in gathering.

    verl constructs it with ``bucket_size`` (not used: nothing is packed into buckets), on actors with ``is_master``,
    and with the values of ``rollout.checkpoint_engine.engine_kwargs.delta_sync``.

    Args:
        bucket: run URL. base: checkpoint that training began with; its path, or ``org/name@revision``.
        timeout: seconds that a rollout worker waits for a version.
    """

    def __init__(
        self,
        bucket_size: int,
        is_master: bool = False,
        *,
        bucket: str,
        base: str,
        timeout: float = 600.0,
    ) -> None:
        self._bucket, self._timeout = bucket, timeout
        self.publisher = gathered_publisher(bucket, base, leads=is_master)
        self._version = 0

    def prepare(self) -> dict[str, Any]:
        """The number of the next version, from the actor's rank 0."""
        return {} if self.publisher is None else {"version": self.publisher.version + 1}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Connect no processes: all receive the number of the version."""
        version = next(told["version"] for told in metadata if told)
        return {"version": [version] * actor_wg_world_size}, {"version": [version] * rollout_world_size}

    def init_process_group(self, version: int) -> None:
        self._version = version

    def finalize(self) -> None:
        """Do nothing: no state is kept between versions."""

    async def send_weights(self, weights: Pairs, global_steps: int | None = None) -> dict[str, float]:
        """Publish on rank 0; return metrics for verl's log. The version is durable when this returns."""
        result = publish_gathered(self.publisher, global_steps or 0, weights)
        return {} if result is None else result.metrics()

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield all tensors of the version, bit for bit, for verl's own transfer into its rollout engine."""
        run = open_run(self._bucket)
        deadline = time.monotonic() + self._timeout
        while run.head().version < self._version:
            if time.monotonic() > deadline:
                raise TimeoutError(
                    f"{self._bucket} has no version {self._version} after {self._timeout:g} s; see the actor's log, or "
                    "raise engine_kwargs.delta_sync.timeout"
                )
            await asyncio.sleep(POLL_SECONDS)
        for pair in run.tensors(self._version):
            yield pair
