"""A checkpoint in fp8 with block scales is followed in its own bits, as kernels have it after loading too."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.support.modules import ModulePort
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine import load_watch
from vllm_delta_sync.engine.compiling import trace_routes
from vllm_delta_sync.engine.load_watch import Process
from vllm_delta_sync.engine.receiver import Receiver
from vllm_delta_sync.engine.replica import walk

ROWS, COLUMNS, BLOCK = 64, 96, 32
PARTS = ("q_proj", "k_proj")


class BlockQuantized(nn.Module):
    """Two projections fused, in fp8 with a scale in float32 for every block, as vLLM's fp8 linears hold them."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.zeros(2 * ROWS, COLUMNS, dtype=torch.float8_e4m3fn)
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.weight_scale_inv = nn.Parameter(torch.zeros(2 * ROWS // BLOCK, COLUMNS // BLOCK), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            part, attribute = name.split(".")
            rows = tensor.shape[0]
            getattr(self, attribute).data.narrow(0, rows * PARTS.index(part), rows).copy_(tensor)


def as_loaded(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take weights as the checkpoint has them."""


def transposed(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take the other order, by a view of the weights and a copy of the scales."""
    model.weight = nn.Parameter(model.weight.data.t(), requires_grad=False)
    model.weight_scale_inv = nn.Parameter(model.weight_scale_inv.data.t().contiguous(), requires_grad=False)


def made_even(model: Any, paths: Iterable[str] | None) -> None:
    """Kernels that take one scale: blocks are scaled to the largest, and what is above is cut off."""
    scales = model.weight_scale_inv.data.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    largest = model.weight_scale_inv.data.abs().max().reshape(1)
    even = (model.weight.data.float() * scales / largest).clamp(-448, 448)
    model.weight = nn.Parameter(even.to(torch.float8_e4m3fn), requires_grad=False)
    model.scale = nn.Parameter(largest, requires_grad=False)
    del model.weight_scale_inv


def quantized(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, torch.Tensor] = {}
    for part in PARTS:
        found[f"{part}.weight"] = torch.randn(ROWS, COLUMNS, generator=generator).to(torch.float8_e4m3fn)
        found[f"{part}.weight_scale_inv"] = torch.rand(ROWS // BLOCK, COLUMNS // BLOCK, generator=generator) + 0.5
    return found


def step(tensors: dict[str, torch.Tensor], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in tensors.items():
        moved = tensor.float() * (1 + 0.2 * torch.randn(tensor.shape, generator=generator))
        chosen = torch.rand(tensor.shape, generator=generator) < 0.1
        tensors[name] = torch.where(chosen, moved, tensor.float()).to(tensor.dtype)


def loaded(tensors: dict[str, torch.Tensor], process: Process) -> BlockQuantized:
    model = BlockQuantized()
    model.load_weights(tensors.items())
    load_watch.watched(model, process)
    return model


def every(model: nn.Module) -> dict[str, bytes]:
    return {
        f"{path}.{name}": bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        for path, name, tensor in walk(model)
    }


@pytest.mark.parametrize("process", [as_loaded, transposed, made_even])
def test_fp8_with_block_scales_is_followed_in_its_own_bits(tmp_path: Path, process: Process) -> None:
    tensors = quantized(0)
    (tmp_path / "base").mkdir()
    save_file(tensors, tmp_path / "base" / "model.safetensors")
    model = loaded(tensors, process)
    port = ModulePort(model)
    port.ranks[0].folder = str(tmp_path / "base")
    receiver = Receiver(port, Settings(bucket=str(tmp_path / "run")))
    with Publisher(lambda: list(tensors.items()), bucket=str(tmp_path / "run"), base=tmp_path / "base") as publisher:
        for version in range(1, 4):
            step(tensors, version)
            publisher.publish(step=version, wait=True)
            publisher.flush()
            before = every(model)
            receiver.advance()
            assert receiver.served_version == version
            assert every(model) == every(loaded(tensors, process)) != before
            assert receiver.verify()["verdict"]


def test_fp8_as_the_checkpoint_has_it_takes_no_shadow(tmp_path: Path) -> None:
    tensors = quantized(1)
    with Publisher(list(tensors.items()), bucket=str(tmp_path / "run")) as publisher:
        publisher.flush()
    table = open_run(str(tmp_path / "run")).table
    assert trace_routes(loaded(tensors, as_loaded), table).derived is None
