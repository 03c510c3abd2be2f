"""Whether what the ranks hold of a run's tensors is each element once: neither a gap nor an overlap."""

from collections.abc import Sequence

from trainer_side.ranks.group import Json
from trainer_side.ranks.shard_parts import ShardPart, part_name
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import TensorSpec, TensorTable
from vllm_delta_sync.tensors.boxes import Box

_LISTED = 8

Held = tuple[int, Box]
"""A rank, and a box that it holds."""


def boxes_document(boxes: Sequence[tuple[int, Box]]) -> Json:
    """A rank's (tensor id, box) as rank 0 is told of them, for ``check_cover``."""
    return [[tensor] if box.is_whole else [tensor, box.offsets, box.shape] for tensor, box in boxes]


def check_cover(table: TensorTable, told: Sequence[Json]) -> None:
    """Raise ModelError unless the ranks hold every element of every tensor once.

    Args:
        told: ``boxes_document`` of each rank.
    """
    held: list[list[Held]] = [[] for _ in table]
    for rank, rows in enumerate(told):
        for tensor, *cut in rows:
            whole = table[tensor].shape
            box = Box(tuple(cut[0]), tuple(cut[1]), whole) if cut else Box.all_of(whole)
            if box.numel:
                held[tensor].append((rank, box))
    for spec, pieces in zip(table, held, strict=True):
        covered = sum(box.numel for _, box in pieces)
        twice = _overlap(pieces)
        if twice is not None:
            raise ModelError(
                f"{_named(spec, twice)} share elements of tensor {spec.name!r}, of whose {spec.numel} the ranks hold "
                f"{covered}; make the same model on every rank, and shard it there in the same way"
            )
        if covered != spec.numel:
            raise ModelError(
                f"the ranks hold {covered} of the {spec.numel} elements of tensor {spec.name!r} "
                f"({_named(spec, pieces)}); shard each parameter over a mesh that rank 0 is in, in the same way on "
                "every rank, or publish from one rank through a function that yields (checkpoint name, whole tensor)"
            )


def _overlap(pieces: Sequence[Held]) -> tuple[Held, Held] | None:
    """Two that share an element."""
    if len(pieces) < 2:
        return None
    dimensions = range(len(pieces[0][1].whole))
    if not dimensions:
        return pieces[0], pieces[1]
    # Along the dimension that is cut most often few boxes lie beside each other.
    axis = max(dimensions, key=lambda dimension: len({box.offsets[dimension] for _, box in pieces}))
    beside: list[Held] = []
    for piece in sorted(pieces, key=lambda piece: piece[1].offsets[axis]):
        start = piece[1].offsets[axis]
        beside = [other for other in beside if start < other[1].offsets[axis] + other[1].shape[axis]]
        for other in beside:
            if _meet(other[1], piece[1]):
                return other, piece
        beside.append(piece)
    return None


def _meet(first: Box, second: Box) -> bool:
    rows = zip(first.offsets, first.shape, second.offsets, second.shape, strict=True)
    return all(max(at, other) < min(at + size, other + others) for at, size, other, others in rows)


def _named(spec: TensorSpec, pieces: Sequence[Held]) -> str:
    named = [f"rank {rank}: {part_name(ShardPart(spec.name, box))}" for rank, box in pieces[:_LISTED]]
    return ", ".join(named or ["no rank has any"]) + (", …" if len(pieces) > _LISTED else "")
