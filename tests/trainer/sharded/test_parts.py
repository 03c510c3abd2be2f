"""What ranks hold of real models is every element of the checkpoint once, and its changes are those of the whole."""

import random
from collections.abc import Callable, Iterator
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
from tests.trainer.sharded.nursery import Nursery
from trainer_side.diff.baseline import Baseline
from trainer_side.diff.engine import Detector
from trainer_side.diff.pending_delta import PendingDelta
from trainer_side.model.live_tensors import CheckpointTensor, IterableTensors, LiveTensors
from trainer_side.model.module import live_tensors
from trainer_side.ranks.shard_baseline import ShardBaseline, changes_of_tensors
from trainer_side.ranks.shard_parts import ModuleParts, ShardPart, needs_ranks, part_name
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_reader import decode
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.codecs import Codec
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.tensors.boxes import Box
from vllm_delta_sync.tensors.changes import Changes

QUICK = ["fsdp llama tied", "fsdp qwen3 moe", "ddp plain"]
SLOW = {
    2: ["fsdp qwen3", "fsdp qwen3 tied", "columns qwen3 moe"],
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


@pytest.mark.parametrize(
    ("size", "cases"), [(2, QUICK), *(pytest.param(*found, marks=pytest.mark.slow) for found in SLOW.items())]
)
def test_all_parts_are_the_checkpoint_once(size: int, cases: list[str], nursery: Nursery) -> None:
    ranks = nursery.run(size, published, cases=cases)
    for case in cases:
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
    if cases == QUICK:
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


def refusal(work: Callable[[], object]) -> str:
    try:
        work()
    except DeltaSyncError as error:
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
    answers["added"] = refusal(lambda: dict(live.read()))
    del small.extra
    assert refusal(lambda: dict(live.read())) == ""
    small.weight = nn.Parameter(distribute_tensor(torch.zeros(7, 2), mesh))
    answers["resized"] = refusal(lambda: dict(live.read()))
    small.weight = nn.Parameter(distribute_tensor(torch.arange(12.0).reshape(6, 2), mesh))
    answers["replicated"] = refusal(lambda: dict(live.read()))
    split: Any = built("split")
    fully_shard(split.model.H_module.layers[0].mlp.gate_proj, mesh=mesh)
    answers["mixed"] = refusal(lambda: ModuleParts(split))
    meta: Any = fully_shard(nn.Linear(4, 4, device="meta"), mesh=mesh)
    answers["meta"] = refusal(lambda: ModuleParts(meta))
    return answers


def test_edges_of_a_sharded_model(nursery: Nursery) -> None:
    ranks = nursery.run(2, edges)
    for answer in ranks:
        assert answer["needed"] == [False, False, False]
        assert answer["alone"] == ["bias", "count", "weight"]
        assert answer["gathered"][:2] == [True, True]
        assert "'extra' appeared since the publisher was made" in answer["added"]
        assert "'weight' is now torch.float32 [7, 2], but was torch.float32 [6, 2]" in answer["resized"]
        assert "'weight' is sharded in another way than when the publisher was made" in answer["replicated"]
        assert "mlp.gate_up_proj.weight' is composed of" in answer["mixed"]
        assert "cannot be traced shard by shard; leave these parameters unsharded" in answer["mixed"]
        assert "is on the meta device and has no data" in answer["meta"]
    assert sum(answer["gathered"][2] for answer in ranks) == ranks[0]["gathered"][3]
    assert [answer["small"] for answer in ranks] == [["weight[0:3,0:2]", "bias", "count"], ["weight[3:6,0:2]"]]


SHAPES = {"a": (6, 8), "a.b": (5,), "b": (4, 3, 5), "c": (), "A": (2, 9)}


class Cut(LiveTensors):
    """Boxes of tensors in this process, in place of what a rank holds of a sharded module."""

    def __init__(self, tensors: dict[str, torch.Tensor], boxes: list[tuple[str, Box]]) -> None:
        self.whole = {name: CheckpointTensor(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self.whole_aliases = {"tied": "a"}
        self.whole_excluded: set[str] = set()
        self.parts = {part_name(ShardPart(name, box)): ShardPart(name, box) for name, box in boxes}
        self.tensors = {
            part: CheckpointTensor(part, what.box.shape, tensors[what.name].dtype) for part, what in self.parts.items()
        }
        self.aliases = {}
        self._live = tensors

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part, what in self.parts.items():
            ranges = zip(what.box.offsets, what.box.shape, strict=True)
            yield part, self._live[what.name][tuple(slice(at, at + size) for at, size in ranges)]


def divided(chance: random.Random, box: Box, most: int) -> list[Box]:
    """Some boxes that are this one together; a cut along any dimension, so that their elements lie between others'."""
    dimensions = [axis for axis, size in enumerate(box.shape) if size > 1]
    if not most or not dimensions:
        return [box]
    axis = chance.choice(dimensions)
    at = chance.randrange(1, box.shape[axis])

    def replaced(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    lower = Box(box.offsets, replaced(box.shape, at), box.whole)
    upper = Box(replaced(box.offsets, box.offsets[axis] + at), replaced(box.shape, box.shape[axis] - at), box.whole)
    return [*divided(chance, lower, most - 1), *divided(chance, upper, most - 1)]


def patched(baseline: Baseline, live: LiveTensors, codec: Codec) -> PendingDelta:
    patch = PendingDelta(baseline, codec, "zstd", Detector(1))
    patch.add_all(live.read())
    return patch


def elements(changes: Changes) -> dict[int, dict[int, int]]:
    return {
        tensor: dict(zip(positions.tolist(), data.tolist(), strict=True))
        for group in changes.sparse
        for tensor, positions, data in group.tensors()
    }


@pytest.mark.parametrize("codec", ["plain", "raw"])
@pytest.mark.parametrize("seed", range(12))
def test_changes_of_parts_are_those_of_the_whole(seed: int, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_side.diff.pending_delta.full_is_smaller", lambda *ignored: False)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    tensors = {name: torch.randn(shape).to(chance.choice(dtypes)) for name, shape in SHAPES.items()}
    ranks: list[list[tuple[str, Box]]] = [[] for _ in range(3)]
    for name, shape in SHAPES.items():
        for box in divided(chance, Box.all_of(shape), chance.randrange(4)):
            chance.choice(ranks).append((name, box))
    whole = IterableTensors(lambda: tensors.items())
    alone = Baseline.captured(whole)
    alone.scan()
    lives = [Cut(tensors, boxes) for boxes in ranks]
    parts = [ShardBaseline.captured_parts(live, None, rank) for rank, live in enumerate(lives)]  # type: ignore[arg-type]
    for baseline in parts:
        baseline.scan()
    assert sum((share for baseline in parts for share in baseline.shares.values()), Fingerprint()) == sum(
        alone.fingerprints, Fingerprint()
    )
    with torch.no_grad():
        for tensor in tensors.values():
            mask = torch.rand(tensor.shape) < 0.3
            tensor[mask] += 1
    reference = patched(alone, whole, codec).changes().load()
    found: dict[int, dict[int, int]] = {}
    change = Fingerprint()
    for baseline, live in zip(parts, lives, strict=True):
        patch = patched(baseline, live, codec)
        changes = changes_of_tensors(baseline, patch).load()
        # As others read it.
        data = encode(changes, baseline.whole, codec, "zstd", DeltaContext("r", 1, 0))
        read = decode(data, baseline.whole, DeltaContext("r", 1, 0))
        assert elements(read) == elements(changes)
        assert read.fingerprints == changes.fingerprints
        for number, values in elements(changes).items():
            own = found.setdefault(number, {})
            assert not own.keys() & values.keys()
            own.update(values)
        change += changes.fingerprint
        # What was translated still takes the patch back.
        patch.revert()
        assert baseline.shares_of(list(map(baseline.read, range(len(baseline.boxes))))) == baseline.shares
    assert found == elements(reference)
    assert change == reference.fingerprint
