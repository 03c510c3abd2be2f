"""``DuplicateCheck`` refuses changes after which a duplicate would differ from its owner, bit for bit."""

import numpy as np
import torch

from vllm_delta_sync.codec.merge import apply_row
from vllm_delta_sync.engine.model.route import region_view
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.tensors.bits import BaseLookup, Bits, Positions
from vllm_delta_sync.tensors.changes import Changes, Full, Sparse
from vllm_delta_sync.tensors.torch_views import SIGNED


class DuplicateCheck:
    """Compares what each duplicate and its owner would be on this rank. Both are equal before the changes.

    Equal changes lead to equal bits, and models that tie their heads publish equal changes. Only if they are written in
    different ways is the owner read from memory. Keeps the changes of these tensors until ``finish``.
    """

    def __init__(self, routes: RouteMap) -> None:
        self._routes = routes
        self._kept = {*routes.duplicates, *routes.duplicates.values()}
        self._changes = Changes()

    def add(self, piece: Sparse | Full) -> None:
        """Add changes, in any order of tensors."""
        if isinstance(piece, Full):
            self._changes.full += [piece] if piece.id in self._kept else []
        elif self._kept:
            rows = [row for row, tensor in enumerate(piece.ids.tolist()) if tensor in self._kept]
            self._changes.sparse += [piece.rows(row, row + 1) for row in rows]

    def finish(self, version: int, held: BaseLookup) -> None:
        """Compare.

        Args:
            version: that the changes lead to. held: reads what this rank holds before them.

        Raises:
            TiedTensorError: they would differ. Otherwise as ``held``.
        """
        for duplicate, owner in self._routes.duplicates.items():
            if _are_alike(self._changes, duplicate, owner):
                continue
            before = held(owner).bits
            first, second = (_after(self._changes, tensor, before.copy()) for tensor in (duplicate, owner))
            if not all(
                torch.equal(region_view(first, route.source), region_view(second, route.source))
                for route in self._routes.routes[owner]
            ):
                raise self._routes.tie_error(version, duplicate)


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


def _after(changes: Changes, tensor: int, bits: Bits) -> torch.Tensor:
    """Change (numel,) bits in place, and return them as signed integers; undefined where this rank has no part."""
    for full in changes.full:
        if full.id == tensor:
            bits[:] = full.bits
    for group in changes.sparse:
        for row in np.flatnonzero(group.ids == tensor).tolist():
            apply_row(bits, group, row)
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
