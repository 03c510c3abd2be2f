"""Small models, sharded in the ways that trainers shard them, and the checkpoint tensors that they then have."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from transformers import HrmTextConfig, HrmTextForCausalLM

from tests.support.architectures import VOCABULARY, Plain, adamw, qwen3, qwen3_moe, small, train
from tests.support.publishing import Tensors
from trainer_side.model.module import live_tensors
from vllm_delta_sync import open_run
from vllm_delta_sync.client import Run


class Mixed(nn.Module):
    """Sizes that no world divides, a tensor smaller than the world, a buffer, and a part of another dtype.

    Parameters of one dtype are sharded together, so that part is a layer by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 7)
        self.low = nn.ModuleList([nn.Linear(3, 13, bias=False, dtype=torch.bfloat16)])
        self.narrow = nn.Parameter(torch.randn(1, 5))
        self.last = nn.Linear(7, 3, bias=False)
        self.register_buffer("seen", torch.zeros(2))


def tied_llama() -> Any:
    """Sizes that 2 or 4 ranks do not divide."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 30, "intermediate_size": 45, "head_dim": 10}
    heads = {"num_attention_heads": 3, "num_key_value_heads": 3}
    return small("llama", **sizes, **heads, tie_word_embeddings=True)


def split() -> HrmTextForCausalLM:
    """Its checkpoints have gate and up fused, and all of attention's projections; the model has not."""
    config = HrmTextConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=46, num_layers_per_stack=1, num_attention_heads=4,
        num_key_value_heads=4, head_dim=8, H_cycles=1, L_cycles=1, L_bp_cycles=[1], pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    return HrmTextForCausalLM(config)


BUILDS: dict[str, Callable[[], nn.Module]] = {
    "qwen3": lambda: qwen3(tied=False), "qwen3 tied": qwen3, "llama tied": tied_llama, "qwen3 moe": qwen3_moe,
    "split": split, "plain": Plain, "mixed": Mixed,
}  # fmt: skip


def fsdp(model: Any, **options: Any) -> nn.Module:
    """Each layer by itself and the rest together, as is usual."""
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    for layer in (layer for stack in stacks for layer in stack):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return cast(nn.Module, model)


def fsdp_rows(model: nn.Module, size: int) -> nn.Module:
    return fsdp(model, mesh=init_device_mesh("cpu", (size,)))


def fsdp_columns(model: nn.Module, size: int) -> nn.Module:
    def place(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.dim() > 1 and parameter.shape[1] % size == 0 else None

    return fsdp(model, mesh=init_device_mesh("cpu", (size,)), shard_placement_fn=place)


def hybrid(model: nn.Module, size: int) -> nn.Module:
    return fsdp(model, mesh=init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("replica", "shard")))


def fsdp_tensor_parallel(model: Any, size: int) -> nn.Module:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    for layer in model.model.layers:
        plan: dict[str, Any] = {f"mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")}
        parallelize_module(layer, mesh["tp"], plan | {"mlp.down_proj": RowwiseParallel()})
    return fsdp(model, mesh=mesh["dp"])


def ddp(model: nn.Module, size: int) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)


WAYS: dict[str, Callable[[nn.Module, int], nn.Module]] = {
    "fsdp": fsdp_rows, "columns": fsdp_columns, "hybrid": hybrid, "fsdp tp": fsdp_tensor_parallel, "ddp": ddp,
}  # fmt: skip


def built(name: str) -> nn.Module:
    """The same weights in every process."""
    torch.manual_seed(0)
    return BUILDS[name]()


def steps(model: nn.Module, rank: int, count: int, lr: float = 1e-2) -> None:
    """Real steps, each rank with samples of its own."""
    optimizer = adamw(model, lr)
    torch.manual_seed(100 + rank)
    for _ in range(count):
        train(model, optimizer)


def move(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.01)


def gathered(model: nn.Module) -> Tensors:
    """The model's state, whole; every rank calls it."""
    state = getattr(model, "module", model).state_dict()
    return {key: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone() for key, t in state.items()}


def assert_same_runs(url: str, alone: str, since: int = 0) -> Run:
    """Both runs say the same of each version, and hold the same, bit for bit; the first one is whole.

    ``since``: the first version that is looked at; others may be lost.
    """
    runs = open_run(url), open_run(alone)
    same = {"version", "step", "kind", "base_version", "total", "held_back", "quarantine", "fingerprint"}
    for manifests in zip(*(list(run.log())[since:] for run in runs), strict=True):
        ours, theirs = (manifest.model_dump(include=same) for manifest in manifests)
        assert ours == theirs
        mine, others = (run.snapshot(ours["version"]).bits for run in runs)
        assert all((a == b).all() for a, b in zip(mine, others, strict=True))
    assert since or runs[0].verify().head == ours["version"]
    return runs[0]


def reference(name: str, model: nn.Module) -> Tensors:
    """Checkpoint tensors of an unsharded model with the sharded one's weights of this moment.

    Every rank has to call it: the weights are gathered.
    """
    plain = built(name)
    plain.load_state_dict(gathered(model))
    return {key: tensor.clone() for key, tensor in live_tensors(plain).read()}
