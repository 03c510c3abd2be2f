"""What a model does besides training in place is published, or refused by name: the cases of docs/edges.md."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from tests.support.architectures import VOCABULARY, Plain, adamw, qwen3, train
from tests.support.publishing import Tensors, assert_versions, published, snapshot
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import DeltaSyncError, ModelError, TensorMismatchError


def changed_tensors(run: Run, version: int) -> set[str]:
    return {run.table[tensor].name for tensor in run.changes(run.manifest(version)).fingerprints}


# Which parameters train


def test_frozen_parameters_are_published_once_and_cost_nothing_until_they_thaw(url: str) -> None:
    model = Plain()
    optimizer, history = adamw(model, 1e-2), [published(model)]
    with Publisher(model, url) as publisher:
        for step in range(1, 5):
            model.embed.requires_grad_(step % 2 == 0)
            train(model, optimizer)
            publisher.publish(step, wait=True)
            history.append(published(model))
    run = assert_versions(url, history)
    moved = ["embed.weight" in changed_tensors(run, version) for version in range(1, 5)]
    assert moved == [False, True, False, True]
    assert run.manifest(3).payload_bytes < run.table.by_name("embed.weight").nbytes


# What counts as a weight


def test_persistent_buffers_are_published_and_others_are_not(url: str) -> None:
    model, kept, scratch = nn.Linear(2, 2), torch.arange(4), torch.zeros(4)
    model.register_buffer("kept", kept)
    model.register_buffer("scratch", scratch, persistent=False)
    history = [published(model)]
    with Publisher(model, url) as publisher:
        kept += 3
        scratch += 1
        assert publisher.publish(step=1, wait=True).changed == 4
        history.append(published(model))
        scratch.resize_(9)
        assert publisher.publish(step=2, wait=True).changed == 0
        history.append(history[-1])
    assert_versions(url, history)


class Shared(nn.Module):
    """Parameters that are windows of one storage: two halves, one that overlaps both, and one seen transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.storage = torch.randn(4, 8)
        self.upper = nn.Parameter(self.storage[:2])
        self.lower = nn.Parameter(self.storage[2:])
        self.middle = nn.Parameter(self.storage[1:3])
        self.turned = nn.Parameter(self.storage.t())
        self.again = nn.Parameter(self.storage[:2])


def test_windows_of_one_storage_are_published_each_as_it_is(url: str) -> None:
    model = Shared()
    history = [published_windows(model)]
    with Publisher(model, url) as publisher:
        for step in range(1, 3):
            model.storage[step] += 1
            # Two or three windows show the row, each of them carries it.
            changed = 8 * sum([step < 2, step >= 2, 1 <= step < 3, True])
            assert publisher.publish(step, wait=True).changed == changed
            history.append(published_windows(model))
    assert_versions(url, history)


def published_windows(model: Shared) -> Tensors:
    """``again`` shows just what ``upper`` does: a tie, of which one name is published."""
    return snapshot({"upper": model.upper, "lower": model.lower, "middle": model.middle, "turned": model.turned})


def test_a_model_without_elements_is_published(url: str) -> None:
    with Publisher({"none": torch.empty(0, 4)}, url) as publisher:
        assert publisher.publish(step=1, wait=True).changed == 0
    assert_versions(url, [{"none": torch.empty(0, 4)}] * 2)


# Weights that move otherwise than by an optimizer's step


def test_weights_replaced_by_data_are_followed(url: str) -> None:
    model = Plain()
    named = [("w", nn.Parameter(torch.randn(6))), ("v", nn.Parameter(torch.randn(3, 2)))]
    history, listed = [published(model)], [snapshot(dict(named))]
    with Publisher(model, url) as publisher, Publisher(named, f"{url}-pairs") as pairs:
        for step in range(1, 4):
            model.norm.weight.data = torch.randn(16)
            # Another layout in memory: the elements are the same ones.
            model.embed.weight.data = torch.randn(16, VOCABULARY).t()
            publisher.publish(step, wait=True)
            history.append(published(model))
            named[0][1].data = torch.randn(6)
            pairs.publish(step, wait=True)
            listed.append(snapshot(dict(named)))
    assert_versions(url, history)
    assert_versions(f"{url}-pairs", listed)


def test_new_parameter_objects_are_followed_in_a_module_and_by_a_function_not_in_a_list(url: str) -> None:
    model = nn.Linear(3, 3)
    old = snapshot(dict(model.named_parameters()))
    with (
        Publisher(model, f"{url}-module") as module,
        Publisher(model.named_parameters, f"{url}-function") as function,
        Publisher(list(model.named_parameters()), f"{url}-list") as listed,
    ):
        model.weight = nn.Parameter(torch.randn(3, 3))
        for publisher in (module, function, listed):
            publisher.publish(step=1)
    new = snapshot(dict(model.named_parameters()))
    assert_versions(f"{url}-module", [old, new])
    assert_versions(f"{url}-function", [old, new])
    assert_versions(f"{url}-list", [old, old])


# Two in one process


def test_policy_and_draft_are_published_from_two_threads_to_two_runs(url: str) -> None:
    models = {"policy": qwen3(tied=False), "draft": Plain()}
    together = threading.Barrier(len(models))

    def life(name: str) -> list[Tensors]:
        model = models[name]
        optimizer, history = adamw(model, 1e-2), [published(model)]
        with Publisher(model, f"{url}-{name}") as publisher:
            for step in range(1, 6):
                train(model, optimizer)
                together.wait(60)
                publisher.publish(step, wait=step > 1)
                history.append(published(model))
        return history

    with ThreadPoolExecutor(len(models)) as pool:
        histories = list(pool.map(life, models))
    runs = [assert_versions(f"{url}-{name}", history) for name, history in zip(models, histories, strict=True)]
    assert runs[0].info.run != runs[1].info.run


def add_parameter(model: Plain) -> None:
    model.extra = nn.Parameter(torch.ones(2, 3))


def resize_parameter(model: Plain) -> None:
    model.embed.weight = model.head.weight = nn.Parameter(torch.zeros(VOCABULARY + 4, 16))


def resize_in_place(model: Plain) -> None:
    model.norm.bias.data = torch.zeros(24)


def untie(model: Plain) -> None:
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())


def change_dtype(model: Plain) -> None:
    model.to(torch.bfloat16)


def leave_for_meta(model: Plain) -> None:
    model.embed.weight = model.head.weight = nn.Parameter(torch.empty(VOCABULARY, 16, device="meta"))


CHANGES: dict[str, tuple[Callable[[Plain], None], type[DeltaSyncError], list[str]]] = {
    "added": (add_parameter, TensorMismatchError, ["'extra'", "[2, 3]", "remove it", "new run"]),
    "removed": (lambda model: delattr(model, "scale"), TensorMismatchError, ["'scale'", "put it back", "new run"]),
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
    kept = [(module, module._parameters.copy(), module._buffers.copy()) for module in model.modules()]
    data = {parameter: parameter.data for parameter in model.parameters()}
    history = [published(model)]
    with Publisher(model, url) as publisher:
        change(model)
        for _ in range(2):
            with pytest.raises(error) as caught:
                publisher.publish(step=1)
            assert [word for word in words if word not in caught.value.message] == []
        assert open_run(url).head().version == 0
        # The way out: the model is again what it was, and has trained on meanwhile.
        for module, parameters, buffers in kept:
            module._parameters, module._buffers = parameters, buffers
        for parameter, tensor in data.items():
            parameter.data = tensor
        train(model, adamw(model, 1e-2))
        assert publisher.publish(step=2, wait=True).version == 1
        history.append(published(model))
    assert_versions(url, history)


def test_yielded_tensors_that_change_are_refused_by_name_and_the_run_stays(url: str) -> None:
    named = {"a": torch.randn(4), "b": torch.randn(2, 2)}
    first = snapshot(named)
    with Publisher(named, url) as publisher:
        for change, words in [
            ({"a": torch.randn(5)}, ["'a'", "[5]", "[4]", "new run"]),
            ({"a": torch.randn(4).bfloat16()}, ["'a'", "torch.bfloat16", "new Publisher"]),
            ({"c": torch.randn(1)}, ["'c' was not there", "torch.float32 [1]", "do not yield it", "new run"]),
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
    """The remedy that the message names: the run keeps its dtype, and what is published is rounded to it."""
    model = Plain().to(torch.bfloat16)
    history = [published(model)]
    with Publisher(model, url):
        pass
    model.to(torch.float32)
    with Publisher(model, url) as publisher:
        assert publisher.publish(step=1, wait=True).changed == 0
        history.append(history[0])
        train(model, adamw(model, 1e-2))
        publisher.publish(step=2, wait=True)
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


def test_one_buffer_that_is_refilled_for_each_tensor_ties_nothing(url: str) -> None:
    weights = {name: torch.ones(3) for name in "abc"}
    buffer = torch.empty(3)

    def refill() -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights.items():
            buffer.copy_(weight)
            yield name, buffer

    history = [snapshot(weights)]
    with Publisher(refill, url) as publisher:
        weights["b"] += 1
        publisher.publish(step=1)
        history.append(snapshot(weights))
    assert_versions(url, history)
