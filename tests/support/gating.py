"""What the tests of gates and budgets share."""

import math

import pytest
import torch

from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.bucket import Bucket
from vllm_delta_sync.errors import GateError, PublishError

NAN, INF = math.nan, math.inf


def refused(publisher: Publisher, step: int = 1) -> str:
    """Publishing now is refused; why."""
    before = publisher.version
    publisher.publish(step, wait=True)
    with pytest.raises(GateError) as caught:
        publisher.flush()
    assert publisher.version == before
    assert isinstance(caught.value, PublishError)
    assert caught.value.kind == "gate"
    return caught.value.message


def marks(bucket: Bucket) -> list[int | None]:
    """For each version: the sound one before it if it is quarantined, else itself."""
    return [manifest.sound for manifest in open_run(bucket.url).log()]


def odd_tensors() -> dict[str, torch.Tensor]:
    """Small tensors of several dtypes, with numbers that comparisons get wrong."""
    generator = torch.Generator().manual_seed(3)
    made = {
        "a": torch.randn(60, generator=generator).bfloat16(),
        "b": torch.randn(6, 10, generator=generator),
        "c": torch.randn(40, generator=generator).half(),
        "d": torch.arange(30),
        "e": torch.randn(20, generator=generator).to(torch.float8_e4m3fn),
        "f": torch.randn(10, generator=generator).double(),
    }
    made["b"][0, :4] = torch.tensor([NAN, 0.0, -0.0, 1e-45])
    return made


def disturb(tensor: torch.Tensor, seed: int, how: str) -> None:
    """Change some elements of a tensor a little, or ``all``; or to ``odd`` or ``big`` numbers."""
    flat, generator = tensor.view(-1), torch.Generator().manual_seed(seed)
    many = flat.numel() if how == "all" else 1 + seed % 9
    chosen = torch.randperm(flat.numel(), generator=generator)[:many]
    if not flat.is_floating_point():
        flat[chosen] += 1
        return
    noise = torch.randn(len(chosen), generator=generator).double()
    if how == "odd":
        odd = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e-45, 6e-8])
        made = odd[torch.randint(7, (len(chosen),), generator=generator)]
    else:
        made = 30 * noise if how == "big" else flat[chosen].double() * (1 + 0.1 * noise)
    flat[chosen] = made.to(flat.dtype)
