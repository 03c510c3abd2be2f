"""Models that ranks train together, and the same models whole, as one process would hold them."""

from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

VOCABULARY = 300


class Low(nn.Module):
    """One parameter in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(13, 3).to(torch.bfloat16))

    def forward(self) -> torch.Tensor:
        return self.weight.float().mean()


class Mixed(nn.Module):
    """Two dtypes, sizes that no world divides, a tensor smaller than the world, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 7)
        self.low = Low()
        self.narrow = nn.Parameter(torch.randn(1, 5))
        self.last = nn.Linear(7, 3, bias=False)
        self.register_buffer("seen", torch.zeros(2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.first(inputs) * self.narrow.sum() + self.low()
        return self.last(torch.tanh(hidden))


def make(kind: str) -> nn.Module:
    """The same model in every process: ``mixed``, or a family of ``tests.support.tiny``."""
    if kind == "mixed":
        torch.manual_seed(0)
        return Mixed()
    # Only here, so that worlds of plain models do not import transformers.
    from tests.support.tiny import make_model

    sizes: dict[str, Any] = {"hidden_size": 48, "vocab_size": VOCABULARY, "intermediate_size": 40}
    return make_model(kind, 0, **sizes)


def sharded(model: nn.Module, how: str) -> nn.Module:
    """``fsdp``: every block and the rest by ``fully_shard``. ``hsdp``: over half of the ranks. ``ddp``."""
    if how == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    size = distributed.get_world_size()
    shape, names = ((size,), ("all",)) if how == "fsdp" else ((size // 2, 2), ("copies", "shards"))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    # Parameters of one dtype are sharded together.
    blocks = [model.low] if isinstance(model, Mixed) else getattr(getattr(model, "model", None), "layers", [])
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def loss_of(model: nn.Module, kind: str, step: int) -> torch.Tensor:
    """The loss on one batch, which is the same on every rank, so that ranks or one process come to the same."""
    generator = torch.Generator().manual_seed(step)
    if kind == "mixed":
        result: torch.Tensor = model(torch.randn(4, 11, generator=generator)).square().mean()
        return result
    tokens = torch.randint(3, VOCABULARY, (2, 12), generator=generator)
    result = model(input_ids=tokens, labels=tokens).loss
    return result


def train(model: nn.Module, optimizer: torch.optim.Optimizer, kind: str, step: int) -> None:
    """One optimizer step."""
    loss = loss_of(model, kind, step)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def whole_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """The model's state, gathered: every rank calls it."""
    inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in inner.state_dict().items()
    }
