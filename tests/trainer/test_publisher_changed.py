"""A model that is not the one it was when the Publisher was made: refused by name, and the run stays."""

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from tests.support.architectures import VOCABULARY, Plain, adamw, train
from tests.support.edges import assert_versions, published
from tests.support.publishing import snapshot
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import DeltaSyncError, ModelError, TensorMismatchError


def add_parameter(model: Plain) -> None:
    model.extra = nn.Parameter(torch.ones(2, 3))


def remove_parameter(model: Plain) -> None:
    del model.scale


def resize_parameter(model: Plain) -> None:
    model.embed.weight = model.head.weight = nn.Parameter(torch.zeros(VOCABULARY + 4, 16))


def resize_in_place(model: Plain) -> None:
    model.norm.bias.data = torch.zeros(24)


def add_layer(model: Plain) -> None:
    model.second = nn.Linear(16, 16)


def untie(model: Plain) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def change_dtype(model: Plain) -> None:
    model.to(torch.bfloat16)


def leave_for_meta(model: Plain) -> None:
    model.embed.weight = model.head.weight = nn.Parameter(torch.empty(VOCABULARY, 16, device="meta"))


CHANGES: dict[str, tuple[Callable[[Plain], None], type[DeltaSyncError], list[str]]] = {
    "added": (add_parameter, TensorMismatchError, ["'extra'", "[2, 3]", "remove it", "new run"]),
    "layer added": (add_layer, TensorMismatchError, ["'second.", "[16", "remove it", "new run"]),
    "removed": (remove_parameter, TensorMismatchError, ["'scale'", "torch.float32 []", "put it back", "new run"]),
    "resized": (resize_parameter, TensorMismatchError, ["weight'", "[68, 16]", "[64, 16]", "new run"]),
    "resized in place": (resize_in_place, TensorMismatchError, ["'norm.bias'", "[24]", "[16]", "new run"]),
    "untied": (untie, TensorMismatchError, ["weight'", "no longer tied", "tie the weights again"]),
    "other dtype": (change_dtype, TensorMismatchError, ["torch.bfloat16", "torch.float32", "new Publisher"]),
    "on meta": (leave_for_meta, ModelError, ["weight'", "meta device", "fetch back"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_changed_model_is_refused_by_name_and_the_run_stays(case: str, url: str) -> None:
    change, error, words = CHANGES[case]
    model = Plain()
    train(model, adamw(model))
    kept = {name: getattr(module, name.rpartition(".")[2]) for name, module in places(model)}
    history = [published(model)]
    with Publisher(model, url) as publisher:
        change(model)
        for _ in range(2):
            with pytest.raises(error) as caught:
                publisher.publish(step=1)
            assert [word for word in words if word not in caught.value.message] == []
        assert open_run(url).head().version == 0
        # The way out: the model is again what it was, and has trained on meanwhile.
        put_back(model, kept)
        train(model, adamw(model, 1e-2))
        assert publisher.publish(step=2, wait=True).version == 1
        history.append(published(model))
    assert_versions(url, history)


def places(model: Plain) -> Iterator[tuple[str, nn.Module]]:
    for name, _ in model.named_parameters(remove_duplicate=False):
        yield name, model.get_submodule(name.rpartition(".")[0])


def put_back(model: Plain, kept: dict[str, nn.Parameter]) -> None:
    """The parameters of before and their bits' dtype, none besides."""
    for name in ("extra", "second"):
        if hasattr(model, name):
            delattr(model, name)
    model.to(torch.float32) if all(weight.device.type != "meta" for weight in model.parameters()) else None
    for name, parameter in kept.items():
        module = model.get_submodule(name.rpartition(".")[0])
        setattr(module, name.rpartition(".")[2], parameter)
    if model.norm.bias.numel() != 16:
        model.norm.bias.data = torch.zeros(16)


def test_yielded_tensors_that_change_are_refused_by_name_and_the_run_stays(url: str) -> None:
    named = {"a": torch.randn(4), "b": torch.randn(2, 2)}
    first = snapshot(named)
    with Publisher(named, url) as publisher:
        for change, words in [
            ({"a": torch.randn(5)}, ["'a'", "[5]", "[4]", "new run"]),
            ({"a": torch.randn(4).bfloat16()}, ["'a'", "torch.bfloat16", "new Publisher"]),
            ({"c": torch.randn(1)}, ["'c' was not there", "torch.float32 [1]", "yield it no more", "new run"]),
        ]:
            before = dict(named)
            named.update(change)
            with pytest.raises(TensorMismatchError) as caught:
                publisher.publish(step=1)
            assert [word for word in words if word not in caught.value.message] == []
            named.clear()
            named.update(before)
        held = named.pop("b")
        with pytest.raises(TensorMismatchError, match=r"'b' is no longer yielded.*new run"):
            publisher.publish(step=1)
        named["b"] = held.add_(1)
        publisher.publish(step=2)
    assert_versions(url, [first, snapshot(named)])


def test_model_of_another_dtype_goes_on_with_a_new_publisher(url: str) -> None:
    """The mend that the message names: the run keeps its dtype, and what is published is rounded to it."""
    model = Plain().to(torch.bfloat16)
    history = [published(model)]
    with Publisher(model, url):
        pass
    model.to(torch.float32)
    with Publisher(model, url) as publisher:
        train(model, adamw(model, 1e-2))
        publisher.publish(step=1)
    floating = {name: weight.is_floating_point() for name, weight in model.state_dict().items()}
    history.append({name: weight.bfloat16() if floating[name] else weight for name, weight in published(model).items()})
    run = assert_versions(url, history)
    assert {spec.dtype for spec in run.table} == {"BF16", "I64"}


def test_model_whose_weights_were_offloaded(url: str) -> None:
    from accelerate import cpu_offload
    from accelerate.hooks import remove_hook_from_submodules
    from accelerate.utils.modeling import get_state_dict_offloaded_model

    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    history = [published(model)]
    with Publisher(model, url) as publisher:
        cpu_offload(model)
        with pytest.raises(ModelError, match=r"'0.weight' is on the meta device and has no data; .* fetch back"):
            publisher.publish(step=1)
        # The one way out: a function that fetches.
        with Publisher(lambda: get_state_dict_offloaded_model(model).items(), f"{url}-function"):
            pass
        # The other.
        remove_hook_from_submodules(model)
        with torch.no_grad():
            model.get_parameter("1.weight").add_(1)
        publisher.publish(step=2)
        history.append(published(model))
    assert_versions(url, history)
    assert_versions(f"{url}-function", history[:1])


def test_tie_of_yielded_tensors_that_is_broken(url: str) -> None:
    weight = torch.randn(3)
    named, first = {"a": weight, "b": weight}, weight.clone()
    with Publisher(named, url) as publisher:
        named["b"] = weight + 1
        with pytest.raises(TensorMismatchError, match=r"'b' is tied to 'a' but has other values; .* new run"):
            publisher.publish(step=1)
        named["b"] = weight
        weight += 2
        publisher.publish(step=2)
    assert_versions(url, [{"a": first}, {"a": weight}])
