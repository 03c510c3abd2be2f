"""The fingerprint kernel against the compiled loop for hosts, under Triton's interpreter: run with TRITON_INTERPRET=1.

A program of its own, as Triton decides when it is imported whether it interprets.
"""

import numpy as np
import torch

from tests.support.device import SimulatedDevice
from vllm_delta_sync.engine.model import fingerprint_triton
from vllm_delta_sync.engine.model.fingerprint_triton import BLOCK, BLOCKS_PER_PROGRAM, DeviceSums
from vllm_delta_sync.engine.model.route import Destination, Region, Route, coalesce
from vllm_delta_sync.engine.model.route_map import RouteMap, fingerprint_in_place
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import Fingerprint, tensor_seed
from vllm_delta_sync.format.table import TensorSpec, TensorTable

WIDTHS = (1, 2, 4, 8)
PROGRAM = BLOCK * BLOCKS_PER_PROGRAM
SIZES = (0, 1, BLOCK - 1, BLOCK, BLOCK + 1, PROGRAM, PROGRAM + 1, 2 * PROGRAM + 5)
NAMES = ("a.weight", "b.weight", "c.weight", "d.weight")
FAR = 1 << 31

Box = tuple[Region, Region]


def memory(width: int, count: int, generator: np.random.Generator) -> torch.Tensor:
    """Random patterns, and those in which a sign may go astray: −0.0, infinities, NaNs."""
    top = 1 << (8 * width - 1)
    special = np.array([0, 1, top, top - 1, top + 1, 2 * top - 1, top >> 1, top | top >> 1], np.uint64)
    patterns = generator.integers(0, 1 << 64, count, np.uint64)
    chosen = generator.random(count) < 0.3
    patterns[chosen] = generator.choice(special, chosen.sum())
    return torch.from_numpy(patterns.astype(f"<u{width}").view(f"<i{width}"))


def check(flat: torch.Tensor, boxes: list[Box]) -> None:
    """Hash all boxes into one tensor of sums."""
    names = [NAMES[slot % len(NAMES)] for slot in range(len(boxes))]
    sums = DeviceSums(len(boxes), flat.device)
    for slot, (name, box) in enumerate(zip(names, boxes, strict=True)):
        sums.add(slot, name, flat, *box)
    expected = [fingerprint_in_place(name, flat, *box) for name, box in zip(names, boxes, strict=True)]
    for box, found, right in zip(boxes, sums.read(), expected, strict=True):
        assert found == right, (flat.dtype, box)


def random_box(dims: int, generator: np.random.Generator) -> Box:
    """A box of a tensor and where it lies: both with gaps, the dimensions of memory in any order."""
    sizes = generator.integers(1, {0: 2, 1: 20_000, 2: 150, 3: 27, 4: 12}[dims], dims).tolist()
    steps, strides = [0] * dims, [0] * dims
    reach = 1
    for dim in generator.permutation(dims):
        steps[dim] = reach + int(generator.integers(0, 2))
        reach = steps[dim] * sizes[dim]
    reach, far = 1, int(generator.integers(0, 2 * dims + 1))
    for dim in reversed(range(dims)):
        strides[dim] = reach * (FAR if dim == far else int(generator.integers(1, 4)))
        reach = strides[dim] * sizes[dim]
    offset = int(generator.choice([0, 5, FAR - 7, FAR * 2, 1 << 45]))
    return coalesce(sizes, (offset, strides), (int(generator.integers(0, 50)), steps))


def check_far_memory() -> None:
    """Elements on both sides of 2³¹; what lies between is never touched, so that it takes no memory."""
    flat = torch.empty(FAR + 5000, dtype=torch.int8)
    flat[:100], flat[FAR - 5000 :] = 7, torch.arange(10_000).to(torch.int8)
    linear = Region(FAR - 5000, (10_000,), (1,))
    check(flat, [(linear, linear), (Region(3, (2, 50), (50, 1)), Region(1, (2, 50), (FAR, 1)))])


class Counted(DeviceSums):
    """Counts its calls; a launch takes few elements."""

    added = read_back = 0
    MAX_ELEMENTS = 8000

    def add(self, slot: int, name: str, flat: torch.Tensor, source: Region, target: Region) -> None:
        self.added += 1
        super().add(slot, name, flat, source, target)

    def read(self) -> list[Fingerprint]:
        self.read_back += 1
        return super().read()


def check_routes(generator: np.random.Generator) -> None:
    """A rank's tensors: one in two places, one transposed, one that no kernel takes, one that is not loaded."""
    shapes = [(300, 70), (60, 50), (2, 3, 2, 3, 2), (4,)]
    table = TensorTable(TensorSpec(f"t{number}", "BF16", shape) for number, shape in enumerate(shapes))
    flats = [memory(2, 50_000, generator), memory(2, 30_000, generator)]
    destinations = [Destination(f"d{number}", torch.bfloat16, flat) for number, flat in enumerate(flats)]
    whole = Region(0, (21_000,), (1,))
    spread = coalesce((2, 3, 2, 3, 2), (0, (36, 12, 6, 2, 1)), (9, (1000, 200, 50, 10, 2)))
    assert len(spread[0].sizes) == 5
    routes = [
        [Route(0, whole, Region(17, (21_000,), (1,))), Route(1, whole, whole)],
        [Route(0, *coalesce((60, 50), (0, (50, 1)), (40_000, (1, 60))))],
        [Route(1, *spread)],
        [],
    ]
    expected = RouteMap(table, destinations, routes).fingerprint_routes(range(4))
    made: list[Counted] = []

    def device_sums(slots: int, device: torch.device) -> DeviceSums:
        made.append(Counted(slots, device))
        return made[-1]

    setattr(fingerprint_triton, "DeviceSums", device_sums)  # noqa: B010  a class for mypy
    routed = RouteMap(table, destinations, routes, memory=WeightMemory(SimulatedDevice(has_triton=True)))
    assert routed.fingerprint_routes(range(4)) == expected
    assert [(sums.added, sums.read_back) for sums in made] == [(3 + 3 + 1, 1)]
    assert routed.measure([2, 0]) == {2: expected[2], 0: expected[0]}


def main() -> None:
    assert {tensor_seed(name) >> 63 for name in NAMES} == {0, 1}, "seeds on both sides of the largest signed integer"
    generator = np.random.default_rng(0)
    for width in WIDTHS:
        flat = memory(width, 60_000, generator)
        lines = [Region(3, (size,), (1,)) if size != 1 else Region(3, (), ()) for size in SIZES]
        check(flat, [(line, line) for line in lines])
        check(flat, [random_box(dims, generator) for dims in (0, 1, 2, 3, 4) for _ in range(6)])
        check(flat, [coalesce((170, 130), (11, (130, 1)), (11, (1, 170)))])
    check_far_memory()
    check_routes(generator)
    print("equal")


if __name__ == "__main__":
    main()
