"""What ranks find in their parts, put together, is what one process finds in the whole tensors."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from trainer_side.baseline import Baseline
from trainer_side.changes import Patch
from trainer_side.detection import Detector
from trainer_side.naming import CheckpointTensor, IterableTensors, LiveTensors
from trainer_side.sharded.baseline import PartsBaseline, check_same_tables, whole_changes
from trainer_side.sharded.parts import Part, part_name
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.wire.boxes import Box
from vllm_delta_sync.wire.changes import Changes
from vllm_delta_sync.wire.delta import Codec, DeltaContext, decode, encode
from vllm_delta_sync.wire.fingerprint import Fingerprint

SHAPES = {"a": (6, 8), "a.b": (5,), "b": (4, 3, 5), "c": (), "A": (2, 9)}


class Cut(LiveTensors):
    """Boxes of tensors in this process, in place of what a rank holds of a sharded module."""

    def __init__(self, tensors: dict[str, torch.Tensor], boxes: list[tuple[str, Box]]) -> None:
        self.whole = {name: CheckpointTensor(name, tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self.whole_aliases = {"tied": "a"}
        self.parts = {part_name(Part(name, box)): Part(name, box) for name, box in boxes}
        self.tensors = {
            part: CheckpointTensor(part, what.box.shape, tensors[what.name].dtype) for part, what in self.parts.items()
        }
        self.aliases = {}
        self._live = tensors

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        for part, what in self.parts.items():
            ranges = zip(what.box.offsets, what.box.shape, strict=True)
            yield part, self._live[what.name][tuple(slice(at, at + size) for at, size in ranges)]


def cut(chance: random.Random, box: Box, most: int) -> list[Box]:
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
    return [*cut(chance, lower, most - 1), *cut(chance, upper, most - 1)]


def patched(baseline: Baseline, live: LiveTensors, codec: Codec) -> Patch:
    patch = Patch(baseline, codec, "zstd", Detector(1))
    patch.add_all(live.read())
    return patch


def elements(changes: Changes) -> dict[int, dict[int, int]]:
    return {
        tensor: dict(zip(positions.tolist(), data.tolist(), strict=True))
        for group in changes.sparse
        for tensor, positions, data in group.tensors()
    }


@pytest.mark.parametrize("codec", ["packed", "raw"])
@pytest.mark.parametrize("seed", range(12))
def test_changes_of_parts_are_those_of_the_whole(seed: int, codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_side.changes.full_is_smaller", lambda *ignored: False)
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    tensors = {name: torch.randn(shape).to(chance.choice(dtypes)) for name, shape in SHAPES.items()}
    ranks: list[list[tuple[str, Box]]] = [[] for _ in range(3)]
    for name, shape in SHAPES.items():
        for box in cut(chance, Box.all_of(shape), chance.randrange(4)):
            chance.choice(ranks).append((name, box))
    whole = IterableTensors(lambda: tensors.items())
    alone = Baseline.captured(whole)
    alone.scan()
    lives = [Cut(tensors, boxes) for boxes in ranks]
    parts = [PartsBaseline.captured_parts(live, None, rank) for rank, live in enumerate(lives)]  # type: ignore[arg-type]
    for baseline in parts:
        baseline.scan()
    assert sum((share for baseline in parts for share in baseline.shares.values()), Fingerprint()) == alone.fingerprint
    with torch.no_grad():
        for tensor in tensors.values():
            mask = torch.rand(tensor.shape) < 0.3
            tensor[mask] += 1
    reference = patched(alone, whole, codec).changes()
    found: dict[int, dict[int, int]] = {}
    change = Fingerprint()
    for baseline, live in zip(parts, lives, strict=True):
        patch = patched(baseline, live, codec)
        changes = whole_changes(baseline, patch)
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
        assert baseline.shares_of(list(map(baseline.peek, range(len(baseline.table))))) == baseline.shares
    assert found == elements(reference)
    assert change == reference.fingerprint


def test_parts_find_their_bits_among_those_of_boxes() -> None:
    tensors = {"a": torch.arange(48.0).reshape(6, 8), "c": torch.tensor(3.0)}
    boxes = [("a", Box((0, 4), (6, 4), (6, 8))), ("c", Box.all_of(())), ("a", Box((2, 0), (4, 4), (6, 8)))]
    baseline = PartsBaseline.captured_parts(Cut(tensors, boxes), None, 1)  # type: ignore[arg-type]
    wanted = baseline.wanted()
    assert wanted.keys() == {"a", "c"}
    found = {
        name: [box.view(tensors[name].numpy().reshape(-1).view(np.uint32)).reshape(-1) for box in of]
        for name, of in wanted.items()
    }
    arranged = baseline.arranged(found)
    assert all((baseline.peek(part) == bits).all() for part, bits in enumerate(arranged))


def test_other_tensors_on_some_ranks_are_named() -> None:
    same = {"tensors": "x"}
    check_same_tables([same, same])
    with pytest.raises(ModelError, match="rank 1, 3 has other tensors"):
        check_same_tables([same, {"tensors": "y"}, same, {"tensors": "z"}])
