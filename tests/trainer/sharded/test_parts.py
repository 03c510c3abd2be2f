"""What the ranks of real worlds publish of real models: together every element of the checkpoint once."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from tests.support.architectures import VOCABULARY, same_bits
from tests.trainer.sharded.models import WAYS, built, cut, fsdp, reference, steps
from tests.trainer.sharded.world import run_world
from trainer_side.naming import live_tensors
from trainer_side.sharded.parts import ModuleParts, needs_ranks
from vllm_delta_sync.errors import DeltaSyncError, ModelError

CASES = {
    2: [
        "fsdp qwen3",
        "fsdp qwen3 tied",
        "fsdp llama tied",
        "fsdp qwen3 moe",
        "columns qwen3 moe",
        "fsdp split",
        "ddp plain",
    ],
    4: ["fsdp llama tied", "fsdp qwen3 moe", "hybrid qwen3 tied", "fsdp tp qwen3"],
}


def published(rank: int, size: int, cases: list[str]) -> dict[str, Any]:
    """Per case: the whole tensors, and the parts after two steps, each compared with the gathered weights here."""
    answers = {}
    for case in cases:
        way = next(way for way in sorted(WAYS, key=len, reverse=True) if case.startswith(way))
        name = case.removeprefix(f"{way} ")
        model = WAYS[way](built(name), size)
        live = ModuleParts(model)
        found = []
        for count in (0, 2):
            steps(model, rank, count)
            expected, aliases = reference(name, model)
            assert live.whole_aliases == aliases
            read = dict(live.read())
            assert list(read) == list(live.tensors) == list(live.parts)
            for part, tensor in read.items():
                box = live.parts[part].box
                assert live.tensors[part].shape == tuple(tensor.shape) == box.shape
                same = same_bits(tensor, expected[live.parts[part].name][box.index])
                found.append([part, live.parts[part].name, box.offsets, box.shape, same])
        whole = {key: [known.shape, str(known.dtype), str(known.configured)] for key, known in live.whole.items()}
        form = {key: [list(tensor.shape), str(tensor.dtype)] for key, tensor in expected.items()}
        assert form == {key: [list(shape), dtype] for key, (shape, dtype, _) in whole.items()}
        answers[case] = {"whole": whole, "parts": found, "needed": needs_ranks(model)}
    return answers


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_all_parts_are_the_checkpoint_once(size: int) -> None:
    ranks = run_world(size, published, timeout=300, cases=CASES[size])
    for case in CASES[size]:
        answers = [answer[case] for answer in ranks]
        assert all(answer["needed"] for answer in answers)
        assert all(answer["whole"] == answers[0]["whole"] for answer in answers)
        assert [part for answer in answers for part in answer["parts"] if not part[4]] == []
        times = {name: np.zeros(shape, int) for name, (shape, _, _) in answers[0]["whole"].items()}
        for _, name, offsets, shape, _ in (part for answer in answers for part in answer["parts"]):
            times[name][cut(offsets, shape)] += 1
        # Looked at twice: before training and after it.
        assert [name for name, count in times.items() if not (count == 2).all()] == [], case
        if case.startswith("ddp"):
            assert [bool(answer["parts"]) for answer in answers] == [True] + [False] * (size - 1)
    if size == 2:
        check_names(ranks[1]["fsdp qwen3 moe"]["parts"])


def check_names(parts: list[Any]) -> None:
    """Of rank 1, which has experts 3 to 5: they are whole tensors of the checkpoint."""
    places = {name: (offsets, shape) for name, _, offsets, shape, _ in parts}
    assert places["lm_head.weight[32:64,0:32]"] == ([32, 0], [32, 32])
    assert places["model.layers.0.mlp.experts.5.gate_proj.weight"] == ([0, 0], [16, 32])
    assert "model.layers.0.mlp.experts.2.gate_proj.weight" not in places


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(12.0).reshape(6, 2))
        self.bias = nn.Parameter(torch.zeros(1))
        self.register_buffer("count", torch.tensor(3))


def refused(live: ModuleParts) -> str:
    try:
        dict(live.read())
    except DeltaSyncError as error:
        return f"{error.kind}: {error.message}"
    return ""


def unpublishable(model: nn.Module) -> str:
    try:
        ModuleParts(model)
    except ModelError as error:
        return error.message
    return ""


def edges(rank: int, size: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (size,))
    answers: dict[str, Any] = {}
    plain = Small()
    answers["needed"] = [needs_ranks(plain), needs_ranks(dict(plain.state_dict())), needs_ranks(plain.parameters)]
    answers["alone"] = sorted(live_tensors(plain).tensors)
    # Between a forward pass and the next one FSDP2 may leave plain tensors in the module.
    model: Any = fsdp(built("qwen3"), mesh=mesh)
    with torch.no_grad():
        model(torch.randint(3, VOCABULARY, (1, 4)))
    answers["gathered"] = [needs_ranks(model), not any(hasattr(p, "placements") for p in model.lm_head.parameters())]
    expected, _ = reference("qwen3", model)
    answers["gathered"].append(sum(tensor.numel() for _, tensor in ModuleParts(model).read()))
    answers["gathered"].append(sum(tensor.numel() for tensor in expected.values()))

    small: Any = fully_shard(Small(), mesh=mesh)
    live = ModuleParts(small)
    answers["small"] = list(live.parts)
    small.extra = nn.Parameter(torch.zeros(2))
    answers["added"] = refused(live)
    del small.extra
    assert refused(live) == ""
    small.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 2), mesh))
    answers["resized"] = refused(live)
    small.weight = nn.Parameter(distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh))
    answers["replicated"] = refused(live)
    split: Any = built("split")
    fully_shard(split.model.H_module.layers[0].mlp.gate_proj, mesh=mesh)
    answers["mixed"] = unpublishable(split)
    meta: Any = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
    answers["meta"] = unpublishable(meta)
    return answers


def test_edges_of_a_sharded_model() -> None:
    ranks = run_world(2, edges)
    for answer in ranks:
        assert answer["needed"] == [False, False, False]
        assert answer["alone"] == ["bias", "count", "weight"]
        assert answer["gathered"][:2] == [True, True]
        assert "'extra' appeared since the publisher was made" in answer["added"]
        assert "'weight' is now torch.float32 [7, 2], but was torch.float32 [6, 2]" in answer["resized"]
        assert "'weight' is sharded in another way than when the publisher was made" in answer["replicated"]
        assert "mlp.gate_up_proj.weight' is put together from" in answer["mixed"]
        assert "cannot be followed shard by shard; leave these parameters unsharded" in answer["mixed"]
        assert "is on the meta device and has no data" in answer["meta"]
    assert sum(answer["gathered"][2] for answer in ranks) == ranks[0]["gathered"][3]
    assert [answer["small"] for answer in ranks] == [["weight[0:3,0:2]", "bias", "count"], ["weight[3:6,0:2]"]]
