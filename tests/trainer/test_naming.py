"""Names, shapes and values of checkpoint tensors, held against ``save_pretrained`` of real models."""

import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.support.architectures import TRANSFORMERS, adamw, qwen3, qwen3_moe, saved, train
from tests.support.publishing import assert_same
from trainer_side import Publisher
from trainer_side.model.conversion_trace import Replay, View, trace
from trainer_side.model.module import live_tensors
from vllm_delta_sync.errors import ModelError, UsageError


@pytest.mark.parametrize("build", TRANSFORMERS.values(), ids=TRANSFORMERS.keys())
def test_models_are_read_as_saved_and_not_copied(build: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    model = build()
    live = live_tensors(model)
    expected = saved(model, tmp_path / "before")
    assert_same(dict(live.read()), expected)
    assert_same(dict(live_tensors(AutoModelForCausalLM.from_pretrained(tmp_path / "before")).read()), expected)
    train(model, adamw(model))
    assert_same(dict(live.read()), saved(model, tmp_path / "after"))
    owned = {tensor.untyped_storage().data_ptr() for tensor in model.state_dict().values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in dict(live.read()).values()} <= owned


def test_changed_layout_in_memory_is_followed(tmp_path: Path) -> None:
    model = qwen3_moe()
    live = live_tensors(model)
    experts = model.model.layers[0].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert_same(dict(live.read()), saved(model, tmp_path))


@pytest.mark.usefixtures("process_group")
def test_wrappers_add_nothing_to_names(tmp_path: Path) -> None:
    model = qwen3()
    expected = saved(model, tmp_path)
    model.model.layers[1] = torch.compile(model.model.layers[1])
    for wrapped in (nn.parallel.DistributedDataParallel(torch.compile(model)), torch.compile(nn.DataParallel(model))):
        assert_same(dict(live_tensors(wrapped).read()), expected)


def test_attribute_that_is_named_like_a_wrappers_stays() -> None:
    model = nn.Module()
    model.module = nn.Linear(2, 2)
    assert set(live_tensors(model).tensors) == {"module.weight", "module.bias"}


def test_configured_dtype_is_for_parameters_only() -> None:
    model = qwen3(dtype="bfloat16")
    model.register_buffer("statistics", torch.zeros(3))
    live = live_tensors(model)
    assert live.tensors["model.norm.weight"].configured == torch.bfloat16
    assert live.tensors["statistics"].configured is None


@pytest.mark.parametrize("form", ["list", "mapping", "function", "function of mapping"])
def test_named_tensors(form: str) -> None:
    weight = torch.randn(3, 4)
    named = {"a": weight, "b": weight.t(), "c": torch.tensor(3), "same": weight}
    model: Any = {
        "list": list(named.items()),
        "mapping": named,
        "function": lambda: iter(named.items()),
        "function of mapping": lambda: named,
    }[form]
    live = live_tensors(model)
    assert list(live.tensors) == ["a", "b", "c"]
    assert live.aliases == {"same": "a"}
    weight.add_(1)
    assert_same(dict(live.read()), named)


def test_gathered_tensors_are_not_held_and_not_taken_for_tied() -> None:
    gathered: list[weakref.ref[torch.Tensor]] = []

    def gather() -> Iterator[tuple[str, torch.Tensor]]:
        for index in range(50):
            assert [one for one in gathered[:-1] if one() is not None] == []
            tensor = torch.full((1000,), float(index))
            gathered.append(weakref.ref(tensor))
            yield f"layer.{index}", tensor

    live = live_tensors(gather)
    assert len(live.tensors) == 50
    assert live.aliases == {}


def refusals() -> dict[str, tuple[Any, type[Exception], str]]:
    weight = torch.randn(2, 2)
    quantized = qwen3()
    quantized.hf_quantizer = object()
    adapted = qwen3()
    adapted.peft_config = {"default": object()}
    lazy = nn.LazyLinear(3)
    offloaded = torch.randn(2, 2)
    offloaded.untyped_storage().resize_(0)
    return {
        "offloaded": ([("w", offloaded)], ModelError, "'w' has no memory"),
        "meta": ([("w", weight.to("meta"))], ModelError, "'w' is on the meta device and has no data"),
        "meta module": (nn.Linear(2, 2, device="meta"), ModelError, "'weight' is on the meta device and has no data"),
        "sparse": ([("w", weight.to_sparse())], ModelError, "'w' is not dense"),
        "no tensor": ([("w", 3.0)], ModelError, "'w' is a float"),
        "twice": ([("w", weight), ("w", weight.clone())], ModelError, "'w' is yielded twice"),
        "twice tied": ([("v", weight), ("w", weight), ("w", weight)], ModelError, "'w' is yielded twice"),
        "generator": ((pair for pair in [("w", weight)]), UsageError, "can be read only once"),
        "not pairs": ([weight], UsageError, "pairs, got a Tensor"),
        "a number": (3, UsageError, "the model is a int"),
        "nothing": (nn.Module(), ModelError, "has no tensor"),
        "quantized": (quantized, ModelError, "was loaded quantized"),
        "adapters": (adapted, ModelError, "carries PEFT adapters"),
        "lazy": (lazy, ModelError, "is not initialized"),
        "subclass": ([("w", weight.as_subclass(Strange))], ModelError, "'w' is a Strange"),
    }


class Strange(torch.Tensor):
    pass


@pytest.mark.parametrize("case", list(refusals()))
def test_refused(case: str) -> None:
    model, error, message = refusals()[case]
    with pytest.raises(error, match=message):
        live_tensors(model)


TENSORS_OF_NO_RUN = {
    "reserved": ("@0.ids", (2,), "'@0.ids' is empty, reserved"),
    "nameless": ("", (2,), "'' is empty, reserved"),
    "header": ("__metadata__", (2,), "'__metadata__' is empty, reserved"),
    "line end": ("a\nb", (2,), r"'a\\nb' is .*not printable"),
    "long": ("ä" * 257, (2,), "bytes is 514"),
    "deep": ("w", (1,) * 17, "w: dimensions is 17"),
}


@pytest.mark.parametrize("case", list(TENSORS_OF_NO_RUN))
def test_tensors_that_no_run_can_have(case: str, tmp_path: Path) -> None:
    name, shape, words = TENSORS_OF_NO_RUN[case]
    values = {name: torch.zeros(shape), "kept": torch.zeros(2)}
    with pytest.raises(ModelError, match=f"no run can have this tensor: .*{words}.*; .*rename=.*exclude=") as caught:
        Publisher(values, str(tmp_path / "run"))
    assert "hostile" not in caught.value.message
    if case not in ("header", "deep"):  # which no checkpoint is read with
        save_file(values, tmp_path / "model.safetensors")
        with pytest.raises(ModelError, match=f"{words}.*; give a base that has no such tensor"):
            Publisher({"kept": values["kept"]}, str(tmp_path / "run"), base=tmp_path)
    module = nn.Module()
    module._parameters = {key: nn.Parameter(value) for key, value in values.items()}
    assert not (tmp_path / "run").exists()
    with Publisher(module, str(tmp_path / "run"), include="kept") as publisher:
        assert [spec.name for spec in publisher.table] == ["kept"]


@pytest.mark.usefixtures("process_group")
def test_sharded_module_of_one_process_is_read_as_it_is_saved(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = qwen3_moe()
    expected = saved(model, tmp_path)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert_same(dict(live_tensors(model).read()), expected)


@pytest.mark.usefixtures("process_group")
def test_sharded_tensors_that_are_yielded_and_fsdp1_are_refused() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.tensor import distribute_tensor

    weight = distribute_tensor(torch.zeros(2, 2), init_device_mesh("cpu", (1,)))
    partition: Any = torch.zeros(2, 2)
    partition.ds_id = 0
    for tensor, what in ((weight, "DTensor"), (partition, "ZeRO-3 partition")):
        with pytest.raises(ModelError, match=rf"'weight' is a {what}.*pass the module itself"):
            live_tensors([("weight", tensor)])
    model = nn.Sequential(FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu")))
    with pytest.raises(ModelError, match="module '0' is sharded by FullyShardedDataParallel"):
        live_tensors(model)


Tensors = dict[str, torch.Tensor]
MOVES: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], type]] = {
    "chunk": (lambda x: x.chunk(3, dim=1)[1].contiguous(), View),
    "chunk then select": (lambda x: x.chunk(2, dim=0)[1].contiguous().chunk(2)[0].squeeze(), View),
    "transpose": (lambda x: x.transpose(0, 1).contiguous(), View),
    "unbind": (lambda x: x.unbind(1)[2].clone(), View),
    "split off": (lambda x: x.reshape(2, 2, 6).narrow(0, 1, 1).reshape(2, 6), View),
    "interleave": (lambda x: x.reshape(4, 3, 2).transpose(1, 2).reshape(4, 6).contiguous(), Replay),
    "rope": (lambda x: x.view(2, 2, 6).transpose(0, 1).reshape(4, 6)[1:3], Replay),
    "cat": (lambda x: torch.cat([x[2:], x[:2]], dim=1), Replay),
    "stack": (lambda x: torch.stack([x.t(), x.flip(0).t()]), Replay),
}


@pytest.mark.parametrize("case", MOVES)
def test_conversion_is_followed(case: str) -> None:
    """Also on a window of a larger storage."""
    move, kind = MOVES[case]
    source = torch.arange(100.0)[7:31].reshape(4, 6)
    routes = trace({"w": source}, lambda given: {"out": move(given["w"])})
    assert isinstance(routes["out"], kind)
    for live in (source, source + 100):
        assert torch.equal(routes["out"].read({"w": live}), move(live))


def _write(given: Tensors) -> Tensors:
    out = given["w"].clone()
    out[0] = 0
    return {"out": out}


REFUSED: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "arithmetic": (lambda given: {"out": -given["w"].exp()}, "w to checkpoint form .*computes new values"),
    "cast": (lambda given: {"out": given["w"].to(torch.bfloat16)}, "casts torch.float32 to torch.bfloat16"),
    "in place": (_write, "writes in place"),
    "foreign": (lambda given: {"out": torch.cat([given["w"], torch.zeros(1, 6)])}, "mixes in a tensor"),
    "constant": (lambda given: {"out": torch.zeros(3)}, "'out' does not come from a parameter"),
    "bits": (lambda given: {"out": given["w"].view(torch.int32)}, "computes new values"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_conversion_that_computes_is_refused(case: str) -> None:
    convert, message = REFUSED[case]
    with pytest.raises(ModelError, match=message):
        trace({"w": torch.randn(4, 6)}, convert)
