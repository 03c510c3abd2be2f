"""prime-rl: a weight sender and receiver over a bucket, beside its filesystem, NCCL and NIXL ones.

Written against ``src/prime_rl/transports/weights/`` (``base.py`` at 114f3ca, ``__init__.py`` at 05732b7) and
``src/prime_rl/utils/weights.py`` (at 3a77ae0). ``setup_weight_sender`` and ``setup_weight_receiver`` there choose by
``config.type`` among fixed names, so a fork has to name these two classes; docs/recipes.md shows where.
"""

import asyncio
import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from prime_rl.transports.weights.base import (  # type: ignore[import-not-found]
    FINISHED_MARKER,
    WeightReceiver,
    WeightSender,
)
from prime_rl.utils.pathing import wait_for_path  # type: ignore[import-not-found]
from prime_rl.utils.weights import convert_state_dict_to_hf, resolve_fqn  # type: ignore[import-not-found]
from torch.distributed.tensor import DTensor

from trainer_side.integrations.gathered import gathered_publisher, publish_gathered
from vllm_delta_sync import open_run

VERSION = "delta_sync_version"
"""File in a step's directory with the number of its version in the run."""
_LAYER = re.compile(r".*?\blayers\.\d+\.")


class DeltaSyncWeightSender(WeightSender):  # type: ignore[misc]
    """Publishes, from the master rank, weights that all ranks gather layer by layer.

    Args:
        output_dir: of the training run.
        config: its ``weight_broadcast``, with ``timeout`` (seconds) and the added fields ``bucket`` (run URL) and
            ``base`` (checkpoint that the servers start from).
    """

    def __init__(self, output_dir: Path, config: Any) -> None:
        super().__init__(output_dir, config.timeout)
        self.publisher = gathered_publisher(config.bucket, config.base, leads=self.world.is_master, all_wait=True)

    def _broadcast(self, model: torch.nn.Module, step: int, step_dir: Path) -> None:
        if torch.distributed.is_initialized():
            # The other ranks wait here for the master's handshake, not in a collective on the device.
            torch.distributed.barrier()
        publish_gathered(self.publisher, step, hf_tensors(model))
        if self.publisher is not None:
            (step_dir / VERSION).write_text(str(self.publisher.version))


class DeltaSyncWeightReceiver(WeightReceiver):  # type: ignore[misc]
    """Waits until the servers that follow the run serve an offered version; it sends them no requests.

    Args:
        config: as the sender's, with ``replicas``, how many servers there are, each with a ``receiver_id``.
        broadcast_dir, admin_plane, model_name: as for prime-rl's own receivers.
    """

    async def receive(self, step: int) -> None:
        """Acknowledge the offer, and return once the version is served.

        Raises:
            FleetLateError: ``config.timeout`` seconds have passed; the message names the servers that lag.
        """
        self._ack(step)
        await wait_for_path(self.step_dir(step) / FINISHED_MARKER)
        version = int((self.step_dir(step) / VERSION).read_text())
        fleet = open_run(self.config.bucket).fleet()
        await asyncio.to_thread(fleet.wait, version, self.config.replicas, self.config.timeout)


def hf_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(checkpoint name, whole tensor) of a model in prime-rl's layout, layer by layer, as it is converted.

    Every rank must read all of it: each sharded tensor is gathered with its layer.
    """

    def layer(item: tuple[str, torch.Tensor]) -> str:
        match = _LAYER.match(item[0])
        return match.group() if match else ""

    for _, items in groupby(model.state_dict().items(), layer):
        gathered = {
            resolve_fqn(model, key): value.full_tensor() if isinstance(value, DTensor) else value
            for key, value in items
        }
        yield from convert_state_dict_to_hf(model, gathered).items()
