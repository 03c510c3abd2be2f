"""``check_duplicates`` refuses changes after which a duplicate would differ from its owner, bit for bit."""

import numpy as np
import torch

from vllm_delta_sync.engine.model.patch import region_view
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.staging.live_base import with_changes
from vllm_delta_sync.tensors.bits import BaseLookup, BaseTensor, Bits, Positions
from vllm_delta_sync.tensors.changes import Changes
from vllm_delta_sync.tensors.torch_views import SIGNED


def check_duplicates(version: int, changes: Changes, routes: RouteMap, held: BaseLookup) -> None:
    """Compare what each duplicate and its owner would be on this rank. Both are equal before the changes.

    Equal changes lead to equal bits, and models that tie their heads publish equal changes. Only if they are written in
    different ways is the owner read from memory.

    Args:
        version: that the changes lead to. held: reads what this rank holds before them.

    Raises:
        TiedTensorError: they would differ. Otherwise as ``held``.
    """
    for duplicate, owner in routes.duplicates.items():
        if _are_alike(changes, duplicate, owner):
            continue
        before = held(owner).bits
        first, second = _after(changes, duplicate, before.copy()), _after(changes, owner, before)
        if not all(
            torch.equal(region_view(first, route.source), region_view(second, route.source))
            for route in routes.routes[owner]
        ):
            raise routes.tie_error(version, duplicate)


def _are_alike(changes: Changes, first: int, second: int) -> bool:
    """Return whether two tensors change in the same way, as far as can be seen without their old bits."""
    sparse = [_sparse_changes(changes, tensor) for tensor in (first, second)]
    full = [[found.bits for found in changes.full if found.id == tensor] for tensor in (first, second)]
    return (
        len(sparse[0]) == len(sparse[1])
        and len(full[0]) == len(full[1])
        and all(np.array_equal(one, other) for one, other in zip(*full, strict=True))
        and all(
            one[0] == other[0] and np.array_equal(one[1], other[1]) and np.array_equal(one[2], other[2])
            for one, other in zip(*sparse, strict=True)
        )
    )


def _sparse_changes(changes: Changes, tensor: int) -> list[tuple[bool, Positions, Bits]]:
    return [
        (group.relative, positions, data)
        for group in changes.sparse
        for of, positions, data in group.tensors()
        if of == tensor
    ]


def _after(changes: Changes, tensor: int, before: Bits) -> torch.Tensor:
    """Return a tensor after the changes, flat; undefined where this rank does not hold it. May modify ``before``."""
    bits = with_changes(lambda _: BaseTensor(before), [changes])(tensor).bits
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
