"""``SimulatedDevice``: the device path with ``device="cpu"`` and streams that do nothing; memory may run out."""

import torch

from vllm_delta_sync.engine.model.accelerator import Accelerator
from vllm_delta_sync.engine.model.patch import StagedPatch
from vllm_delta_sync.engine.model.route import Destination, SparsePatch
from vllm_delta_sync.engine.model.route_map import RouteMap
from vllm_delta_sync.engine.model.weight_memory import WeightMemory
from vllm_delta_sync.format.fingerprint import Fingerprint
from vllm_delta_sync.format.table import TensorTable


class SimulatedDevice(Accelerator):
    """An accelerator whose memory is the host's, of which ``free`` bytes are left."""

    def __init__(self, free: int = 1 << 34) -> None:
        super().__init__(torch.device("cpu"))
        self.free = free

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
    patches: list[SparsePatch],
    destinations: list[Destination],
    uploaded: bool = True,
    device: SimulatedDevice | None = None,
) -> tuple[StagedPatch, RouteMap]:
    """Patches staged on a simulated device, uploaded or not, and routes to the weights there."""
    routes = RouteMap(TensorTable([]), destinations, [], memory=WeightMemory(device or SimulatedDevice()))
    staged = StagedPatch(1, patches, Fingerprint(), [], [])
    staged.prepare(routes)
    if not uploaded and staged.on_device is not None:
        staged.on_device.release()
    return staged, routes
