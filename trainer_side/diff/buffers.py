"""``BaselineBuffer``: the baseline of one tensor, in host memory or on the device of the live tensor."""

from abc import ABC, abstractmethod
from typing import Literal

import numpy as np
import torch

from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.dtypes import DType
from vllm_delta_sync.tensors.bits import Bits, Positions, revert_distances
from vllm_delta_sync.tensors.torch_views import bits_of

BaselineLocation = Literal["host", "device", "disk"]


class BaselineBuffer(ABC):
    """Bits (numel,) of one tensor, of the last published version."""

    @abstractmethod
    def read(self) -> Bits:
        """Return all bits in host memory: a view if they are there, else a copy."""

    @abstractmethod
    def write(self, bits: Bits) -> None:
        """Replace all bits."""

    @abstractmethod
    def get(self, positions: Positions) -> Bits:
        """Copy of the bits at (n,) flat positions, in host memory."""

    @abstractmethod
    def revert(self, element: DType, positions: Positions, distances: Bits) -> None:
        """Move the elements at (n,) distinct positions back by (n,) ULP distances."""

    @abstractmethod
    def window(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        """Return elements start … stop − 1 as signed integers on ``device``: a view if they are there, else a copy."""


class HostBuffer(BaselineBuffer):
    """Host memory, or a file mapped into it. ``bits`` is the array itself, ``address`` where it is."""

    def __init__(self, bits: Bits) -> None:
        self.bits = bits
        self.address = bits.ctypes.data

    def read(self) -> Bits:
        return self.bits

    def write(self, bits: Bits) -> None:
        np.copyto(self.bits, bits)

    def put(self, positions: Positions, bits: Bits) -> None:
        """Replace the bits at (n,) flat positions."""
        self.bits[positions] = bits

    def get(self, positions: Positions) -> Bits:
        return self.bits[positions]

    def revert(self, element: DType, positions: Positions, distances: Bits) -> None:
        revert_distances(element, self.bits, positions, distances)

    def window(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        return _signed(self.bits[start:stop]).to(device, non_blocking=True)


class DeviceBuffer(BaselineBuffer):
    """Memory of a device. ``flat`` is (numel,) signed integers of the element's width.

    The caller's thread and the background thread use it in turns, each on its own current stream. So every method
    returns only once the device has done what it asked for: nothing then depends on the order of two streams.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def read(self) -> Bits:
        return bits_of(self.flat.cpu().clone() if self.flat.device.type == "cpu" else self.flat.cpu())

    def write(self, bits: Bits) -> None:
        self.flat.copy_(_signed(bits))
        self._wait_done()

    def put(self, positions: torch.Tensor, bits: torch.Tensor) -> None:
        """Replace the bits at (n,) int64 flat positions by (n,) signed integers; both on the device."""
        self.flat[positions] = bits
        self._wait_done()

    def get(self, positions: Positions) -> Bits:
        return bits_of(self.flat[self._on_device(positions)].cpu())

    def revert(self, element: DType, positions: Positions, distances: Bits) -> None:
        positions_there = self._on_device(positions)
        bits = bits_of(self.flat[positions_there].cpu())
        revert_distances(element, bits, np.arange(bits.size, dtype=np.int64), distances)
        self.flat[positions_there] = self._on_device(bits)
        self._wait_done()

    def window(self, start: int, stop: int, device: torch.device) -> torch.Tensor:
        return self.flat[start:stop].to(device)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return _signed(array).to(self.flat.device)

    def _wait_done(self) -> None:
        if self.flat.device.type != "cpu":
            torch.accelerator.current_stream(self.flat.device).synchronize()


def move_buffer(buffer: BaselineBuffer, name: str, device: torch.device, location: BaselineLocation) -> BaselineBuffer:
    """Return the same bits where a live tensor on ``device`` is compared; ``buffer`` itself if they are there."""
    if device.type == "cpu" or location != "device":
        return buffer if isinstance(buffer, HostBuffer) else HostBuffer(buffer.read())
    if isinstance(buffer, DeviceBuffer) and buffer.flat.device == device:
        return buffer
    bits = buffer.read()
    try:
        return DeviceBuffer(_signed(bits).to(device, copy=True))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"tensor {name!r}: {device} has no {bits.nbytes} bytes left for its baseline; publish with baseline='host'"
        ) from error


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}"))
