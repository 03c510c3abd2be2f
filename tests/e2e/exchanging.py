"""What vLLM's CPU communicator lacks for engines that run in step, so that these can be tested on the CPU.

Name ``tests.e2e.exchanging.WorkerExtension`` as the worker extension: it is ours, in workers that have that.
"""

from typing import Any

import torch


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Tensors of all ranks, one after the other; ``sizes``: rows of each."""
    if isinstance(input_, list):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    rows = [input_.shape[0]] * self.world_size if sizes is None else sizes
    padded = input_.new_zeros(max(rows), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    found = [torch.empty_like(padded) for _ in rows]
    torch.distributed.all_gather(found, padded, group=self.device_group)
    return torch.cat([each[:count] for each, count in zip(found, rows, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """This rank's rows of the sum over all ranks."""
    rows = [input_.shape[0] // self.world_size] * self.world_size if sizes is None else sizes
    total = input_.float()
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(rows[: self.rank_in_group])
    return total[start : start + rows[self.rank_in_group]].to(input_.dtype)


def exchange_tokens() -> None:
    """Give vLLM's CPU communicator what engines that run in step need, and it lacks (see ``layout``)."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    CpuCommunicator.all_gatherv = all_gatherv
    CpuCommunicator.reduce_scatterv = reduce_scatterv


def __getattr__(name: str) -> object:
    if name != "WorkerExtension":
        raise AttributeError(name)
    from vllm_delta_sync import engine

    exchange_tokens()
    return engine.WorkerExtension
