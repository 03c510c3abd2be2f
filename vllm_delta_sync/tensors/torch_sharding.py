"""``local_boxes``: this process's part of a DTensor or ZeRO-3 parameter, as boxes of the whole; ``owns``.

No DeepSpeed or trainer library is imported: a ZeRO-3 parameter is recognized by its attributes. No function
communicates with other processes.
"""

from functools import lru_cache
from itertools import product
from typing import Any

import torch

from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.tensors.boxes import Box, boxes_of_range

Pieces = list[tuple[Box, torch.Tensor]]
Index = tuple[slice, ...]
Ranges = list[tuple[int, int]]
"""Ranges (start, stop) of one dimension, in the order of the local tensor."""


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return True for a DTensor (replicated ones too) and for a parameter that ZeRO-3 manages."""
    return _is_dtensor(tensor) or hasattr(tensor, "ds_id")


def whole_shape(tensor: torch.Tensor) -> tuple[int, ...]:
    """Return the shape of the whole tensor."""
    shape: torch.Size = tensor.ds_shape if hasattr(tensor, "ds_id") else tensor.shape  # type: ignore[attr-defined]
    return tuple(shape)


def local_boxes(tensor: torch.Tensor, name: str = "") -> Pieces:
    """Return the boxes of a tensor that this process holds.

    Args:
        tensor: a DTensor, a ZeRO-3 parameter, or a plain tensor, which is one whole box.
        name: of the tensor, for messages.

    Returns:
        disjoint boxes that are not empty, each with a detached view of its memory in the box's shape.

    Raises:
        ModelError: a partial sum that is not reduced yet; or a partition that is quantized or not in memory.
    """
    if not is_sharded(tensor):
        plain = tensor.detach()
        return [(Box.all_of(tuple(plain.shape)), plain)] if plain.numel() else []
    indices = local_indices(tensor, name)
    memory = local_memory(tensor, name).detach() if indices else tensor
    return [(box, piece_of(memory, index).view(box.shape)) for box, index in indices]


def owns(tensor: Any) -> bool:
    """Return whether this process publishes what it holds: each element belongs to exactly one process.

    Replicas belong to coordinate 0 of each replicated mesh dimension. If several meshes hold the same tensor, as in
    tensor parallelism under DDP, it belongs to the mesh of rank 0. An unsharded tensor belongs to rank 0.
    """
    if _is_dtensor(tensor):
        mesh = tensor.device_mesh
        coordinate = _coordinate(mesh)
        if coordinate is None or not (mesh.mesh == 0).any():
            return False
        return all(
            place == 0 or not placement.is_replicate()
            for place, placement in zip(coordinate, tensor.placements, strict=True)
        )
    if hasattr(tensor, "ds_id"):
        return 0 in torch.distributed.get_process_group_ranks(tensor.ds_process_group)
    return torch.distributed.get_rank() == 0 if torch.distributed.is_initialized() else True


def local_indices(tensor: torch.Tensor, name: str = "") -> list[tuple[Box, Index]]:
    """Return the boxes of a sharded tensor that this process holds, and where they are in its ``local_memory``.

    They stay the same while ``layout`` does. Raises: as ``local_boxes``.
    """
    return _dtensor_indices(tensor, name) if _is_dtensor(tensor) else _partition_indices(tensor, name)


def local_memory(tensor: torch.Tensor, name: str = "") -> torch.Tensor:
    """Return the memory in which this process holds its boxes of a sharded tensor. Raises: as ``local_boxes``."""
    if _is_dtensor(tensor):
        # ``to_local`` makes a new view of it, which takes longer than all else that a publisher reads of a shard.
        local: torch.Tensor = tensor._local_tensor  # type: ignore[attr-defined]
        return local
    return _partition(tensor, name)


def piece_of(memory: torch.Tensor, index: Index) -> torch.Tensor:
    """Return the part of a ``local_memory`` that has a box, by one of ``local_indices``."""
    return memory[index] if index else memory


def layout(tensor: Any) -> tuple[object, ...]:
    """Return a value that stays equal, in this process, while ``local_boxes`` returns the same boxes."""
    if _is_dtensor(tensor):
        return tensor.shape, tensor.device_mesh, tensor.placements
    if hasattr(tensor, "ds_id"):
        return whole_shape(tensor), _partition_range(tensor)
    return (tuple(tensor.shape),)


def _is_dtensor(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def _coordinate(mesh: Any) -> tuple[int, ...] | None:
    """Coordinate of this process in a mesh; None outside it."""
    coordinate = mesh.get_coordinate()
    return None if coordinate is None else tuple(coordinate)


def _dtensor_indices(tensor: Any, name: str) -> list[tuple[Box, Index]]:
    whole, mesh = tuple(tensor.shape), tensor.device_mesh
    coordinate = _coordinate(mesh)
    if coordinate is None:
        return []
    shards = tuple(_shard(placement, name) for placement in tensor.placements)
    local = local_memory(tensor, name)
    local_shape, cuts = _cuts(whole, tuple(mesh.shape), coordinate, shards)
    if cuts and tuple(local.shape) != local_shape:
        raise ModelError(
            f"tensor {name!r} is a DTensor {list(whole)} placed as {list(tensor.placements)}; this process holds "
            f"{list(local.shape)} of it, not {list(local_shape)} as placed; publish a function that yields the whole "
            "tensors"
        )
    return [(box, () if box.shape == local_shape else index) for box, index in cuts]


def _shard(placement: Any, name: str) -> tuple[int, int] | None:
    """Return (sharded dimension, number of earlier shards of it) of a mesh dimension; None if it replicates."""
    if placement.is_replicate():
        return None
    if placement.is_partial() or not hasattr(placement, "dim"):
        raise ModelError(
            f"tensor {name!r} is a DTensor placed as {placement}, so no process has final values; redistribute "
            "it to shards or replicas first"
        )
    return placement.dim, getattr(placement, "split_factor", 1)


# Cached: a world of one calls it for each tensor of each version, always with the same result.
@lru_cache(maxsize=65_536)
def _cuts(
    whole: tuple[int, ...],
    sizes: tuple[int, ...],
    coordinate: tuple[int, ...],
    shards: tuple[tuple[int, int] | None, ...],
) -> tuple[tuple[int, ...], list[tuple[Box, Index]]]:
    """Return the local tensor's shape at ``coordinate`` of a mesh of ``sizes``, and its boxes with their index."""
    runs: list[Ranges] = [[(0, size)] for size in whole]
    for size, place, shard in zip(sizes, coordinate, shards, strict=True):
        if shard is not None:
            dimension, earlier = shard
            runs[dimension] = _take_shard(runs[dimension], earlier, size, place)
    local_shape = tuple(sum(stop - start for start, stop in ranges) for ranges in runs)
    return local_shape, _pieces(runs, whole) if all(local_shape) else []


def _take_shard(runs: Ranges, earlier: int, parts: int, number: int) -> Ranges:
    """Return part ``number`` of ``parts``, split as torch chunks, of each of the ``earlier`` existing shards."""
    found: Ranges = []
    for shard in range(earlier):
        for start, stop in _chunk(_chunk(runs, earlier, shard), parts, number):
            # Join adjacent ranges.
            if found and found[-1][1] == start:
                start = found.pop()[0]
            found.append((start, stop))
    return found


def _chunk(runs: Ranges, parts: int, number: int) -> Ranges:
    size = -(-sum(stop - start for start, stop in runs) // parts)
    first, last = number * size, (number + 1) * size
    found: Ranges = []
    for start, stop in runs:
        lower, upper = max(start, start + first), min(stop, start + last)
        if lower < upper:
            found.append((lower, upper))
        first, last = first - (stop - start), last - (stop - start)
    return found


def _pieces(runs: list[Ranges], whole: tuple[int, ...]) -> list[tuple[Box, Index]]:
    """Return one box for each combination of ranges."""
    places: list[list[tuple[int, int, int]]] = []
    for ranges in runs:
        at, found = 0, []
        for start, stop in ranges:
            found.append((start, stop, at))
            at += stop - start
        places.append(found)
    pieces = []
    for chosen in product(*places):
        offsets = tuple(start for start, _, _ in chosen)
        shape = tuple(stop - start for start, stop, _ in chosen)
        pieces.append((Box(offsets, shape, whole), tuple(slice(at, at + stop - start) for start, stop, at in chosen)))
    return pieces


def _partition_range(tensor: Any) -> tuple[int, int]:
    """Return the flat range of a ZeRO-3 parameter that this process holds, without the padding at its end."""
    size = int(tensor.ds_tensor.ds_numel)
    start = size * torch.distributed.get_rank(tensor.ds_process_group)
    return min(start, int(tensor.ds_numel)), min(start + size, int(tensor.ds_numel))


def _partition(tensor: Any, name: str) -> torch.Tensor:
    """Return the flat memory of a ZeRO-3 parameter in this process."""
    partition: torch.Tensor | None = getattr(tensor, "ds_tensor", None)
    if partition is None:
        raise ModelError(
            f"tensor {name!r} is managed by ZeRO-3 but not partitioned yet; call deepspeed.initialize first"
        )
    if getattr(getattr(partition, "status", None), "name", "AVAILABLE") != "AVAILABLE":
        raise ModelError(
            f"tensor {name!r} is a ZeRO-3 partition offloaded to NVMe, not in memory; offload parameters to the CPU "
            "or disable offloading"
        )
    if hasattr(partition, "ds_quant_scale"):
        raise ModelError(
            f"tensor {name!r} is a quantized ZeRO-3 partition, whose bits are not those of a checkpoint; disable "
            "zero_quantized_nontrainable_weights"
        )
    return partition


def _partition_indices(tensor: Any, name: str) -> list[tuple[Box, Index]]:
    _partition(tensor, name)  # raises, if it cannot be read
    start, stop = _partition_range(tensor)
    boxes = boxes_of_range(start, stop, whole_shape(tensor))
    return [(box, (slice(box.start - start, box.stop - start),)) for box in boxes]
