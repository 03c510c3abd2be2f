"""``torch.set_default_device`` in the trainer changes nothing: no tensor of ours goes to a device by default."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from tests.support.publishers import assert_holds
from trainer_side import Publisher
from trainer_side.diff import reader
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.settings import Settings

ROOT = Path(__file__).parents[2]
FACTORIES = {
    "arange", "asarray", "as_tensor", "empty", "empty_permuted", "empty_strided", "eye", "full", "linspace", "logspace",
    "normal", "ones", "rand", "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
}  # fmt: skip
"""Functions of torch that make a tensor on the default device unless they get another one."""


@contextmanager
def default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def live_weights() -> dict[str, torch.Tensor]:
    """Every way in which the comparison reads a tensor: as it is, rounded, converted, transposed, in planes."""
    torch.manual_seed(3)
    return {
        "plain": torch.randn(300, 40).bfloat16(),
        "rounded": torch.randn(300, 40),
        "converted": torch.randn(300, 40, dtype=torch.float64),
        "transposed": torch.randn(40, 300).bfloat16().t(),
        "planes": torch.randn(5, 7, 9).bfloat16().permute(2, 0, 1),
    }


def stepped(live: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    for tensor in live.values():
        tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)[::3] += 1
    return {name: tensor.bfloat16().contiguous() for name, tensor in live.items()}


def test_a_run_is_published_and_followed(tmp_path: Path) -> None:
    """The meta device computes nothing: a tensor that lands there by default has no bits to publish or to serve."""
    live = live_weights()
    base = save_base(tmp_path / "base", {name: tensor.bfloat16().contiguous() for name, tensor in live.items()})
    reader.nan_pattern.cache_clear()
    with default_device("meta"), Publisher(live.items, str(tmp_path / "run"), base=base) as publisher:
        for step in (1, 2):
            expected = stepped(live)
            assert publisher.publish(step, wait=True).changed > 0
        publisher.flush()
        assert_holds(publisher._bucket, 2, expected)


def test_a_server_follows(tmp_path: Path) -> None:
    """A version that changes a part of the elements, and one that changes all of them."""
    tensors = checkpoint_tensors()
    base, url = save_base(tmp_path / "base", tensors), str(tmp_path / "run")
    model, fresh = FusedModel(), FusedModel()
    model.load_weights(tensors.items())
    port = ModulePort(model)
    receiver = Receiver(port, Settings(bucket=url))
    with Publisher(tensors.items, url, base=base) as publisher:
        for step in (1, 2):
            for tensor in tensors.values():
                tensor.view(torch.int32).view(-1)[:: 5 if step == 1 else 1] += 1 << 17
            publisher.publish(step, wait=True)
            publisher.flush()
            with default_device("meta"):
                receiver.advance()
            assert port.ranks[0].version == step
    fresh.load_weights((name, tensor.bfloat16()) for name, tensor in tensors.items())
    assert [name for name, held in model.named_parameters() if not torch.equal(held, fresh.get_parameter(name))] == []


def without_device(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner, given = node.func.value, {keyword.arg for keyword in node.keywords}
        if (
            isinstance(owner, ast.Name)
            and owner.id == "torch"
            and node.func.attr in FACTORIES
            and "device" not in given
        ):
            yield f"{node.lineno}: {ast.unparse(node)}"


@pytest.mark.parametrize("package", ["trainer_side", "vllm_delta_sync"])
def test_every_tensor_is_made_on_a_device_of_our_choice(package: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / package).rglob("*.py"))
        for line in without_device(ast.parse(path.read_text()))
    ]
    assert found == []
