"""``ModuleParts``: the shards that one rank publishes, as parts of checkpoint tensors; ``check_coverage``.

A checkpoint tensor is a strided window into a source, such as one expert of a stack. A rank holds a box of the source;
its share of the checkpoint tensor is again a few boxes, each strided in the rank's memory: ``shard_views``."""

import json
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, product
from typing import ClassVar

import torch
from torch import distributed, nn

from trainer_side.model.conversion_trace import View
from trainer_side.model.live_tensors import (
    CheckpointTensor,
    LiveTensors,
    Selection,
    changed,
    check_readable,
    storages_of,
)
from trainer_side.model.module import ModuleForm
from trainer_side.ranks.group import Json, in_world
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range
from vllm_delta_sync.tensors.torch_sharding import Index, is_sharded, local_indices, local_memory, owns, piece_of
from vllm_delta_sync.units import listed


@dataclass(frozen=True)
class ShardView:
    """Elements of a checkpoint tensor that are in one box of its source.

    Attributes:
        box: where they are in the checkpoint tensor.
        strides, offset: where they are in the box of the source, which is contiguous in memory.
    """

    box: Box
    strides: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class _Digit:
    """Neighbouring dimensions of a source, as one digit of a position; a box has a range of its values.

    Attributes:
        size: number of values in the source. stride: flat indices of the source from one value to the next.
        start, stop: values in the box. local: flat indices of the box from one value to the next.
    """

    size: int
    stride: int
    start: int
    stop: int
    local: int


@dataclass(frozen=True)
class _Axis:
    """A dimension of a view: its number, its size, and by how much each index moves a digit."""

    number: int
    size: int
    step: int


def shard_views(view: View, box: Box) -> list[ShardView] | None:
    """Return the elements of ``view`` that are in ``box``, each once.

    Args:
        view: into the source as if that were contiguous. box: of the source, not empty.

    Returns:
        Disjoint non-empty windows; None if boxes cannot describe them.
    """
    if 0 in view.shape:
        return []
    digits = _digits(box)
    axes: list[list[_Axis]] = [[] for _ in digits]
    for number, (size, stride) in enumerate(zip(view.shape, view.strides, strict=True)):
        if size == 1:
            continue
        place = max((i for i, digit in enumerate(digits) if digit.stride <= stride), default=None)
        if place is None or stride % digits[place].stride:
            return None
        axes[place].append(_Axis(number, size, stride // digits[place].stride))
    found: list[list[Box]] = []
    firsts = [view.offset // digit.stride % digit.size for digit in digits]
    for digit, first, own in zip(digits, firsts, axes, strict=True):
        own.sort(key=lambda axis: -axis.step)
        if first + _reach(own) >= digit.size or not _ascending(own):
            return None
        lower, upper = (_below(limit - first, own) for limit in (digit.start, digit.stop))
        found.append(boxes_of_range(lower, upper, tuple(axis.size for axis in own)))
    return [_window(view, digits, firsts, axes, chosen) for chosen in product(*found)]


def _window(
    view: View, digits: list[_Digit], firsts: list[int], axes: list[list[_Axis]], chosen: Sequence[Box]
) -> ShardView:
    offsets, shape, strides, start = [0] * len(view.shape), [1] * len(view.shape), [1] * len(view.shape), 0
    for digit, first, own, part in zip(digits, firsts, axes, chosen, strict=True):
        value = first - digit.start
        for axis, offset, size in zip(own, part.offsets, part.shape, strict=True):
            offsets[axis.number], shape[axis.number] = offset, size
            strides[axis.number] = axis.step * digit.local
            value += offset * axis.step
        start += value * digit.local
    return ShardView(Box(tuple(offsets), tuple(shape), view.shape), tuple(strides), start)


def _digits(box: Box) -> list[_Digit]:
    """Return the fewest digits of which the box has one range each, the innermost first."""
    found: list[_Digit] = []
    size, start, stop, stride, local = 1, 0, 1, 1, 1
    for offset, extent, whole in reversed(list(zip(box.offsets, box.shape, box.whole, strict=True))):
        if (start, stop) == (0, size):
            start, stop, size = offset * size, (offset + extent) * size, whole * size
        elif extent == 1:
            start, stop, size = offset * size + start, offset * size + stop, whole * size
        else:
            found.append(_Digit(size, stride, start, stop, local))
            stride, local = stride * size, local * (stop - start)
            size, start, stop = whole, offset, offset + extent
    found.append(_Digit(size, stride, start, stop, local))
    return found


def _reach(axes: Sequence[_Axis]) -> int:
    """Return the distance from the first to the last value."""
    return sum((axis.size - 1) * axis.step for axis in axes)


def _ascending(axes: Sequence[_Axis]) -> bool:
    """Return True if values grow with the axes' indices in row-major order."""
    return all(axis.step > _reach(axes[number + 1 :]) for number, axis in enumerate(axes))


def _below(limit: int, axes: Sequence[_Axis]) -> int:
    """Return how many values, counted from the first, are less than ``limit``; they are in ascending order."""
    count = 0
    if limit <= 0:
        return 0
    for number, axis in enumerate(axes):
        inner = math.prod(other.size for other in axes[number + 1 :])
        index, rest = divmod(limit, axis.step)
        if index >= axis.size:
            return count + axis.size * inner
        count += index * inner
        limit = rest
        if not limit:
            return count
    return count + 1


# By class name, so that none of them needs to be imported. A module sharded by FSDP2 may temporarily hold plain
# tensors, after a forward pass without a backward pass.
_OF_ALL_RANKS = {"DistributedDataParallel", "DeepSpeedEngine", "FSDPModule"}


@dataclass(frozen=True)
class ShardPart:
    """A piece of a checkpoint tensor that this rank publishes; its box in that tensor is never empty."""

    name: str
    box: Box


@dataclass(frozen=True)
class _OwnedSource:
    """What this rank owns of a sharded source: pieces of its ``local_memory``, which has this shape."""

    shape: torch.Size
    indices: list[Index]


@dataclass(frozen=True)
class _PartSource:
    """Where a part's values are: a window of the n-th piece that this rank owns of a source, or all of the piece."""

    source: str
    piece: int
    window: ShardView | None


class RankParts(LiveTensors):
    """The parts of checkpoint tensors that this rank publishes: those of all ranks contain every element exactly once.

    The keys of ``tensors`` and ``read`` are names of parts, with the shapes of their boxes: a part that is a whole
    tensor has the checkpoint name, another is called ``name[start:stop,…]``. A rank may have no parts.

    Attributes:
        whole: checkpoint name → the whole tensor, the same on every rank.
        whole_aliases: name of a tied duplicate → name in ``whole``; ``aliases`` is empty.
        whole_excluded: names in ``whole`` that the selection leaves out.
        parts: name of the part → the part.
        remedy: what to do if the parts of all ranks do not contain every element exactly once.
    """

    remedy: ClassVar[str]

    def __init__(self) -> None:
        self.tensors, self.aliases = {}, {}
        self.whole: dict[str, CheckpointTensor] = {}
        self.whole_aliases: dict[str, str] = {}
        self.whole_excluded: Collection[str] = ()
        self.parts: dict[str, ShardPart] = {}

    @property
    def digest(self) -> str:
        """A digest of the names and shapes of ``whole``."""
        rows = sorted((name, tensor.shape) for name, tensor in self.whole.items())
        return sha256(json.dumps(rows).encode()).hexdigest()


class ModuleParts(RankParts):
    """The parts of a module. Constructing it does not communicate; do so on every rank, at one point of the program."""

    remedy = (
        "make the same model on every rank, and shard each parameter in the same way, over a mesh that rank 0 is in; "
        "or publish from one rank through a function that yields (checkpoint name, whole tensor)"
    )

    def __init__(self, model: nn.Module, selection: Selection | None = None) -> None:
        """Find this rank's parts. Args: selection: as of ``ModuleForm``.

        Raises:
            ModelError: a tensor cannot be published, see ``check_readable``, ``local_boxes`` and ``trace``; or one that
                comes from sharded parameters is not composed of strided windows into them.
        """
        super().__init__()
        self._form = ModuleForm(model, selection)
        self.whole, self.whole_aliases = self._form.tensors, self._form.aliases
        self.whole_excluded = self._form.excluded
        self._places: dict[str, _PartSource] = {}
        self._owned: dict[str, _OwnedSource] = {}
        state, _ = self._form.state()
        owned: dict[str, list[tuple[Box, Index]]] = {}
        for name, tensor in state.items():
            if is_sharded(tensor):
                owned[name] = local_indices(tensor, name) if owns(tensor) else []
                if owned[name]:
                    shape = local_memory(tensor, name).shape
                    self._owned[name] = _OwnedSource(shape, [index for _, index in owned[name]])
        for name, route in self._form.routes.items():
            if owned.keys().isdisjoint(route.sources):
                # Rank 0 reads tensors that are not sharded.
                if distributed.get_rank() == 0 and 0 not in route.shape:
                    self._add(ShardPart(name, Box.all_of(route.shape)), None)
                continue
            if not isinstance(route, View):
                raise ModelError(
                    f"checkpoint tensor {name!r} is composed of {', '.join(route.sources[:3])}, which cannot be traced "
                    "shard by shard; leave these parameters unsharded, or publish from one rank through a function "
                    "that yields (checkpoint name, whole tensor)"
                )
            for piece, (box, index) in enumerate(owned[route.source]):
                for window in _windows(name, route, box):
                    # With an empty index the piece has the shape of its box.
                    full = Box.all_of(box.shape)
                    whole = not index and (window.box.shape, window.strides) == (full.shape, full.strides)
                    self._add(ShardPart(name, window.box), _PartSource(route.source, piece, None if whole else window))
        self.excluded = [name for name, part in self.parts.items() if part.name in self.whole_excluded]
        for _ in self.read():
            pass

    def read(self) -> Iterator[tuple[str, torch.Tensor]]:
        state, _ = self._form.state()
        used = {place.source for name, place in self._places.items() if name not in self.unused}
        owned = {name: _owned_pieces(name, state[name], self._owned[name]) for name in used & state.keys()}
        whole = (tensor for tensor in state.values() if not is_sharded(tensor))
        self.storages = storages_of(chain(whole, *owned.values()))
        for name, part in self.parts.items():
            if name in self.unused:
                continue
            place = self._places.get(name)
            if part.name not in self._form.routes:
                continue  # left out, and gone
            if place is None:
                yield name, self._form.routes[part.name].read(state)
                continue
            piece, window = owned[place.source][place.piece], place.window
            if window is None:
                yield name, piece
                continue
            start = piece.storage_offset() + window.offset
            yield name, piece.as_strided(window.box.shape, window.strides, start)

    def _add(self, part: ShardPart, place: _PartSource | None) -> None:
        known = self.whole[part.name]
        name = part_name(part)
        self.parts[name] = part
        self.tensors[name] = CheckpointTensor(name, part.box.shape, known.dtype, known.configured, known.device)
        if place is not None:
            self._places[name] = place


def needs_ranks(model: object) -> bool:
    """Return True if all ranks of a world have to publish the model together.

    A plain module, and anything else but parts, belongs to the process that publishes it, in any world.
    """
    if not in_world() or not isinstance(model, nn.Module | RankParts):
        return False
    if isinstance(model, RankParts):
        return True
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    tensors = [*model.parameters(), *model.buffers()]
    return bool(classes & _OF_ALL_RANKS) or any(is_sharded(tensor) for tensor in tensors)


def part_name(part: ShardPart) -> str:
    """Return a part's name: the tensor's if it is the whole tensor, else with the range in each dimension."""
    if part.box.is_whole:
        return part.name
    ranges = zip(part.box.offsets, part.box.shape, strict=True)
    return f"{part.name}[{','.join(f'{start}:{start + size}' for start, size in ranges)}]"


def _owned_pieces(name: str, tensor: torch.Tensor, owned: _OwnedSource) -> list[torch.Tensor]:
    """Return the contiguous pieces of a source that this rank owns; views where possible."""
    memory = check_readable(name, local_memory(tensor, name))
    if memory.shape != owned.shape:
        raise changed(name, (tuple(memory.shape), memory.dtype), (tuple(owned.shape), memory.dtype))
    return [piece_of(memory, index).contiguous() for index in owned.indices]


def _windows(name: str, view: View, box: Box) -> list[ShardView]:
    found = shard_views(view, box)
    if found is None:
        raise ModelError(
            f"checkpoint tensor {name!r} cuts {view.source!r} in a way that its shard {list(box.shape)} at "
            f"{list(box.offsets)} of {list(box.whole)} cannot be traced; shard that parameter along its first "
            "dimension, or publish from one rank through a function that yields (checkpoint name, whole tensor)"
        )
    return found


RankBox = tuple[int, Box]
"""A rank, and a box that it holds."""


def boxes_document(boxes: Sequence[tuple[int, Box]]) -> Json:
    """Return a rank's (tensor id, box) in the form that ``check_coverage`` takes."""
    return [[tensor] if box.is_whole else [tensor, box.offsets, box.shape] for tensor, box in boxes]


def check_coverage(table: TensorTable, reports: Sequence[Json], remedy: str) -> None:
    """Raise ModelError unless the ranks hold every element of every tensor exactly once.

    Args:
        reports: ``boxes_document`` of each rank. remedy: see ``RankParts``.
    """
    boxes_by_tensor: list[list[RankBox]] = [[] for _ in table]
    for rank, rows in enumerate(reports):
        for tensor, *cut in rows:
            whole = table[tensor].shape
            box = Box(tuple(cut[0]), tuple(cut[1]), whole) if cut else Box.all_of(whole)
            if box.numel:
                boxes_by_tensor[tensor].append((rank, box))
    for spec, pieces in zip(table, boxes_by_tensor, strict=True):
        covered = sum(box.numel for _, box in pieces)
        twice = _overlap(pieces)
        if twice is not None:
            raise ModelError(
                f"{_named(spec, twice)} share elements of tensor {spec.name!r}; of its {spec.numel} elements the ranks "
                f"hold {covered}; {remedy}"
            )
        if covered != spec.numel:
            raise ModelError(
                f"the ranks hold {covered} of the {spec.numel} elements of tensor {spec.name!r} "
                f"({_named(spec, pieces)}); {remedy}"
            )


def _overlap(pieces: Sequence[RankBox]) -> tuple[RankBox, RankBox] | None:
    """Return two boxes that share an element; None if there are none."""
    if len(pieces) < 2:
        return None
    dimensions = range(len(pieces[0][1].whole))
    if not dimensions:
        return pieces[0], pieces[1]
    # Along the dimension with the most cuts few boxes overlap.
    axis = max(dimensions, key=lambda dimension: len({box.offsets[dimension] for _, box in pieces}))
    beside: list[RankBox] = []
    for piece in sorted(pieces, key=lambda piece: piece[1].offsets[axis]):
        start = piece[1].offsets[axis]
        beside = [other for other in beside if start < other[1].offsets[axis] + other[1].shape[axis]]
        for other in beside:
            if other[1].overlaps(piece[1]):
                return other, piece
        beside.append(piece)
    return None


def _named(spec: TensorSpec, pieces: Sequence[RankBox]) -> str:
    named = [f"rank {rank}: {part_name(ShardPart(spec.name, box))}" for rank, box in pieces]
    return listed(named, 8) or "no rank has any"
