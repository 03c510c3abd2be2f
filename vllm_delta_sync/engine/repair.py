"""Bring weights that somebody changed back to a version: rebuilt from the bucket, written where they differ."""

import torch

from vllm_delta_sync.chain import Run
from vllm_delta_sync.engine.patch import DensePatch, StagedPatch, dense_view, source_view
from vllm_delta_sync.engine.rebuild import rebuild
from vllm_delta_sync.engine.routes import Route, RouteMap
from vllm_delta_sync.errors import ChainError
from vllm_delta_sync.torch_bits import SIGNED
from vllm_delta_sync.wire.bits import Bits
from vllm_delta_sync.wire.fingerprint import Fingerprint
from vllm_delta_sync.wire.manifest import Manifest


def stage_repair(run: Run, target: Manifest, folder: str, routes: RouteMap) -> StagedPatch:
    """A patch that makes of whatever a rank holds the target version. O(model) memory while it is made.

    Args:
        folder: model folder that vLLM was started with; see ``rebuild``.

    Raises:
        ChainError: the target cannot be rebuilt, only a version before it. Else as ``rebuild``.
    """
    reached, state = rebuild(run, target, folder)
    if reached.version != target.version:
        raise ChainError(f"version {target.version} cannot be rebuilt from the bucket, only version {reached.version}")
    dense = []
    for tensor, bits in enumerate(state.bits):
        parts = [part for route in routes.routes[tensor] if (part := _different(bits, route, routes)) is not None]
        if parts:
            dense.append(DensePatch(tensor, parts))
    return StagedPatch(target.version, [], Fingerprint(), dense, state.fingerprints)


def _different(bits: Bits, route: Route, routes: RouteMap) -> tuple[Route, torch.Tensor] | None:
    flat = torch.from_numpy(bits.view(f"<i{bits.itemsize}")).view(SIGNED[bits.itemsize])
    right = source_view(flat, route)
    held = dense_view(routes.destinations[route.destination].flat, route)
    if torch.equal(right, held.to(right.device)):
        return None
    return route, right.clone(memory_format=torch.contiguous_format)
