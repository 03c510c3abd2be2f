"""``SimulatedDevice``: the device path with ``device="cpu"`` and streams that do nothing; memory may run out."""

import numpy as np
import torch

from tests.support.routing import all_indices
from vllm_delta_sync.engine.model.accelerator import Accelerator
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route import Addresses, Destination, Region, Route, RoutePatch, SparsePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable
from vllm_delta_sync.tensors import torch_hash


class SimulatedDevice(Accelerator):
    """An accelerator whose memory is the host's, of which ``free`` bytes are left."""

    def __init__(self, free: int = 1 << 34, has_triton: bool = False) -> None:
        super().__init__(torch.device("cpu"))
        self.free, self.has_triton = free, has_triton

    def set_device(self) -> None:
        pass

    def set_background_stream(self) -> None:
        pass

    def synchronize_stream(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def free_bytes(self) -> int:
        return self.free

    def allocate(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.free:
            raise torch.OutOfMemoryError(f"{nbytes} bytes wanted, {self.free} left")
        self.free -= nbytes
        return torch.empty(nbytes, dtype=torch.uint8)

    def release(self, memory: list[torch.Tensor]) -> None:
        self.free += sum(block.nbytes for block in memory)
        memory.clear()

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def staged_on_device(
    patches: list[RoutePatch],
    destinations: list[Destination],
    uploaded: bool = True,
    device: SimulatedDevice | None = None,
) -> tuple[StagedPatch, RouteMap]:
    """Patches staged on a simulated device, uploaded or not, and routes to the weights there."""
    routes = RouteMap(TensorTable([]), destinations, [], memory=WeightMemory(device or SimulatedDevice()))
    staged = StagedPatch(1, [], Fingerprint(), [], [], patches)
    staged.prepare(routes)
    if not uploaded and staged.on_device is not None:
        staged.on_device.release()
    return staged, routes


def identity(destination: int, numel: int) -> Route:
    """All elements of a tensor lie in a destination as they are in the tensor."""
    whole = Region(0, (numel,), (1,)) if numel > 1 else Region(0, (), ())
    return Route(destination, whole, whole)


def for_host(patch: RoutePatch) -> SparsePatch:
    """The same changes as a commit in host memory reads them; shares nothing with the patch."""
    source, target = patch.route.source, patch.route.target
    leads = dict(zip(all_indices(source), all_indices(target), strict=True))
    places = patch.positions.astype(np.int64) + patch.route.source.offset
    addresses: Addresses = np.array([leads[place] for place in places.tolist()], np.int64)
    premix = torch_hash.premix(patch.seed, torch.from_numpy(places)).numpy().view(np.uint64)
    order = np.argsort(addresses, kind="stable")
    return SparsePatch(
        patch.route.destination, patch.group, patch.element, patch.relative, addresses[order], patch.data[order],
        premix[order],
    )  # fmt: skip
