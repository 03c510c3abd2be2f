"""The commit kernel under Triton's interpreter against the compiled loops: run with TRITON_INTERPRET=1.

Random patterns of every width, and those at which arithmetic or a grid may go wrong: NaNs, −0.0, distances that wrap
around, segments of one element and of a block and one more, 64-bit positions, routes of up to three dimensions in any
order and with gaps; forwards, back, and forwards again.
"""

import numpy as np
import torch

from tests.support.device import SimulatedDevice, for_host, identity, staged_on_device
from tests.support.routing import all_indices, densely
from vllm_delta_sync.engine.commit.apply import apply_patch
from vllm_delta_sync.engine.model import accelerator, device_batch, device_patch
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route import Destination, Region, Route, RoutePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import DTYPES, DType, TensorTable
from vllm_delta_sync.tensors.torch_views import SIGNED, TORCH_DTYPES

SIZES = (1, device_batch.BLOCK - 1, device_batch.BLOCK, device_batch.BLOCK + 1, 2 * device_batch.BLOCK + 7)


def edge_patterns(element: DType) -> np.ndarray:
    """Zeros, the smallest and largest patterns on both sides of zero: −0.0, infinities and NaNs are among them."""
    sign = 1 << (8 * element.itemsize - 1)
    near = [at + step for at in (0, sign // 2, sign, sign + sign // 2, 2 * sign) for step in range(-4, 5)]
    return np.array([pattern % (2 * sign) for pattern in near], np.uint64).astype(element.uint)


def random_bits(random: np.random.Generator, element: DType, size: int) -> np.ndarray:
    bits = random.integers(0, 1 << 64, size, dtype=np.uint64).astype(element.uint)
    edges = edge_patterns(element)
    return np.where(random.random(size) < 0.3, random.choice(edges, size), bits)


def random_route(random: np.random.Generator, destination: int, least: int, dims: int) -> Route:
    """A route of at least so many elements, unless it has no dimension: rows with gaps, which lie in another order."""
    sizes = [int(size) for size in random.integers(2, 5, dims)]
    if dims:
        sizes[-1] = -(-least // int(np.prod(sizes[:-1], dtype=np.int64))) + 1
    strides: list[int] = []
    reach = 1
    for size in reversed(sizes):
        strides.insert(0, reach * int(random.integers(1, 3)))
        reach = strides[0] * size
    source = Region(int(random.integers(0, 1 << 40)), tuple(sizes), tuple(strides))
    order = [int(dim) for dim in random.permutation(dims)]
    return Route(destination, source, densely(source, int(random.integers(0, 9)), order))


def check(dtype: str, relative: bool, wide: bool, workspace: int, uploaded: bool, seed: int) -> None:
    """Compare both paths over several destinations; every other one is of another group of ranks."""
    accelerator.WORKSPACE_BYTES = workspace
    random, element = np.random.default_rng(seed), DTYPES[dtype]
    on_host: list[Destination] = []
    on_device: list[Destination] = []
    patches: list[RoutePatch] = []
    for number, count in enumerate(SIZES):
        route = random_route(random, number, count, dims=(number + seed) % 4)
        size = route.target.last + 1 + int(random.integers(0, 50))
        bits = random_bits(random, element, size)
        for destinations in (on_host, on_device):
            flat = torch.from_numpy(bits.copy().view(f"<i{element.itemsize}")).view(SIGNED[element.itemsize])
            destinations.append(Destination(str(number), TORCH_DTYPES[dtype], flat))
        near = np.array(all_indices(route.source)) - route.source.offset
        chosen = np.sort(random.choice(near, min(count, near.size), replace=False))
        positions = chosen.astype(np.int64) if wide else chosen.astype(np.int32)
        number_of_seed = int(random.integers(0, 1 << 64, dtype=np.uint64))
        data = random_bits(random, element, positions.size)
        patches.append(RoutePatch(route, number_of_seed, number % 2, element, relative, positions, data))
    there = sorted([for_host(patch) for patch in patches], key=lambda patch: patch.destination)
    expected, host_routes = StagedPatch(1, there, Fingerprint(), [], []), RouteMap(TensorTable([]), on_host, [])
    staged, routes = staged_on_device(patches, on_device, uploaded, SimulatedDevice(has_triton=True))
    for reverse in (False, True, False):
        measured = apply_patch(staged, routes, reverse)
        assert measured == apply_patch(expected, host_routes, reverse), (dtype, relative, reverse)
        for one, other in zip(on_host, on_device, strict=True):
            assert torch.equal(one.flat, other.flat), (dtype, relative, reverse, one.name)
        for one_patch, other_patch in zip(there, patches, strict=True):
            assert np.array_equal(one_patch.data, for_host(other_patch).data), (dtype, relative, reverse)


def main() -> None:
    seed = 0
    for dtype in ("BF16", "F16", "F32", "F64", "F8_E4M3", "I64", "I8", "U8"):
        for relative in (True, False):
            workspace = 1 << (20 if seed % 2 else 13)
            check(dtype, relative, seed % 3 == 0, workspace, seed % 4 < 2, seed)
            seed += 1
    destination = Destination("weight", torch.bfloat16, torch.arange(50, dtype=torch.int16))
    empty, routes = staged_on_device([], [destination], device=SimulatedDevice(has_triton=True))
    routes.routes.append([identity(0, 50)])
    device_patch.compile_kernels({DTYPES["BF16"], DTYPES["U8"]}, routes)
    assert torch.equal(destination.flat, torch.arange(50, dtype=torch.int16))
    assert apply_patch(empty, routes) == {}
    print("equal")


if __name__ == "__main__":
    main()
