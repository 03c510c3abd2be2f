"""``shard_views``: find the elements of a checkpoint tensor that lie in one box of its source tensor.

A checkpoint tensor is a strided window into a source, such as one expert of a stack. A rank holds a box of the source;
its share of the checkpoint tensor is again a few boxes, each strided in the rank's memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from trainer_side.model.conversion_trace import View
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range


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

    def is_all_of(self, box: Box) -> bool:
        """Return whether it is all of the box of the source, in its shape."""
        return (self.box.shape, self.strides) == (box.shape, Box.all_of(box.shape).strides)


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
        inner = 1
        for other in axes[number + 1 :]:
            inner *= other.size
        index, rest = divmod(limit, axis.step)
        if index >= axis.size:
            return count + axis.size * inner
        count += index * inner
        limit = rest
        if not limit:
            return count
    return count + 1
