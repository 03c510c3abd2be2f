"""``BaselineBuffer``: the baseline of one tensor, in host memory or on the device of the live tensor.

``HostSlab`` is the host memory of a whole baseline in one piece, which CUDA can pin as it is. torch rounds its own
pinned memory up to a power of two per tensor: 29.0 GB for the 15.2 GB of Qwen2.5-7B. A slab takes the tensors' bytes,
and up to 63 between two of them."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Literal

import numpy as np
import torch

from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.format.table import DType, TensorSpec
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.restore import scratch_file
from vllm_delta_sync.tensors.changes import Bits, Positions, revert_distances
from vllm_delta_sync.tensors.state import slab_layout
from vllm_delta_sync.tensors.torch_views import bits_of

logger = guarded_logger(__name__)

BaselineLocation = Literal["host", "device", "disk"]


class HostBuffer:
    """Bits (numel,) of one tensor, of the last published version, in host memory or a file mapped into it.

    Attributes:
        bits: the array itself. address: where it is. flat: the same as signed integers.
    """

    def __init__(self, bits: Bits) -> None:
        self.bits, self.flat = bits, _signed(bits)
        self.address = bits.ctypes.data

    def read(self) -> Bits:
        """Return all bits in host memory: a view if they are there, else a copy."""
        return self.bits

    def write(self, bits: Bits) -> None:
        """Replace all bits."""
        np.copyto(self.bits, bits)

    def get(self, positions: Positions) -> Bits:
        """Copy of the bits at (n,) flat positions, in host memory."""
        return self.bits[positions]

    def revert(self, element: DType, positions: Positions, distances: Bits) -> None:
        """Move the elements at (n,) distinct positions back by (n,) ULP distances."""
        revert_distances(element, self.bits, positions, distances)


class DeviceBuffer:
    """The same in memory of a device, of which there is only ``flat``.

    ``DeviceComparer`` reads and writes it directly. The methods here, which the background thread calls, use a stream
    of their own, so that training does not wait for them, nor they for what it has enqueued. They return only once the
    device has done what they ask for; the comparer waits for its own writes, too, before any of them is called.
    """

    def __init__(self, flat: torch.Tensor) -> None:
        self.flat = flat

    def read(self) -> Bits:
        with _own_stream(self.flat.device):
            return bits_of(self.flat.cpu().clone() if self.flat.device.type == "cpu" else self.flat.cpu())

    def write(self, bits: Bits) -> None:
        with _own_stream(self.flat.device):
            self.flat.copy_(_signed(bits))

    def get(self, positions: Positions) -> Bits:
        with _own_stream(self.flat.device):
            return bits_of(self.flat[self._on_device(positions)].cpu())

    def revert(self, element: DType, positions: Positions, distances: Bits) -> None:
        with _own_stream(self.flat.device):
            positions_there = self._on_device(positions)
            bits = bits_of(self.flat[positions_there].cpu())
            revert_distances(element, bits, np.arange(bits.size, dtype=np.int64), distances)
            self.flat[positions_there] = self._on_device(bits)

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return _signed(array).to(self.flat.device)


BaselineBuffer = HostBuffer | DeviceBuffer

_streams: dict[torch.device, torch.cuda.Stream] = {}


@contextmanager
def _own_stream(device: torch.device) -> Iterator[None]:
    """Do what the block asks of a device on a stream that nothing else uses, and wait for it."""
    if device.type == "cpu":
        yield
        return
    if device.type != "cuda":
        yield
        torch.accelerator.synchronize(device)
        return
    with torch.cuda.device(device):
        if device not in _streams:
            _streams[device] = torch.cuda.Stream(device)
        stream = _streams[device]
        with torch.cuda.stream(stream):
            yield
        stream.synchronize()


def move_buffer(buffer: BaselineBuffer, name: str, device: torch.device, location: BaselineLocation) -> BaselineBuffer:
    """Return the same bits where a live tensor on ``device`` is compared; ``buffer`` itself if they are there."""
    if device.type == "cpu" or location != "device":
        return buffer if isinstance(buffer, HostBuffer) else HostBuffer(buffer.read())
    if isinstance(buffer, DeviceBuffer) and buffer.flat.device == device:
        return buffer
    bits = buffer.read()
    try:
        # Inside ``inference_mode``, torch would let it be written only there.
        with torch.inference_mode(False):
            return DeviceBuffer(_signed(bits).to(device, copy=True))
    except torch.OutOfMemoryError as error:
        raise ModelError(
            f"tensor {name!r}: {device} has no {bits.nbytes} bytes left for its baseline; publish with baseline='host'"
        ) from error


def _signed(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits.view(f"<i{bits.itemsize}"))


_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for all devices, since a model may be on several."""


class HostSlab:
    """Uninitialized memory for some tensors: of the host, or of an unnamed temporary file that is mapped into memory.

    Attributes:
        nbytes: size of the one allocation, which ``slab_layout`` plans.
        places: tensor name → (numel,) bits.
        pinned: whether CUDA devices copy from it directly.

    Raises:
        StoreError: there is no room for the file.
    """

    def __init__(self, specs: Iterable[TensorSpec], on_disk: bool = False) -> None:
        specs = list(specs)
        starts, self.nbytes = slab_layout(specs)
        self._memory = scratch_file(self.nbytes) if on_disk else np.empty(self.nbytes, np.uint8)
        self._tried = on_disk
        self._unregister: weakref.finalize[..., np.ndarray] | None = None
        self.places: dict[str, Bits] = {
            # Plain arrays, whose kernels are found without inspecting their class.
            spec.name: np.asarray(self._memory[start : start + spec.nbytes]).view(spec.element.uint)
            for spec, start in zip(specs, starts, strict=True)
        }

    @property
    def pinned(self) -> bool:
        return self._unregister is not None and self._unregister.alive

    @property
    def pinnable(self) -> bool:
        """Whether ``pin`` may still succeed."""
        return not self._tried

    def pin(self, device: torch.device) -> None:
        """Pin the memory for CUDA devices, at the first call; if that fails, it stays pageable, and the log says so."""
        if self._tried:
            return
        self._tried = True
        error = _register(self._memory, device)
        if error is None:
            # Also without a call of ``close``: memory that is freed must not stay registered.
            self._unregister = weakref.finalize(self._memory, _unregister, self._memory.ctypes.data, device)
            # The end of the process does it too. A forked child must not: it cannot use CUDA.
            self._unregister.atexit = False
        else:
            logger.warning(
                "%s bytes of the baseline could not be pinned (%s): publish works all the same, but copies to %s are "
                "slower; check the limits of this process and its container for locked memory",
                f"{self.nbytes:,}", error, device,
            )  # fmt: skip

    def close(self) -> None:
        """Unpin the memory; it can still be read. May be called twice."""
        if self._unregister is not None:
            self._unregister()


def _register(memory: np.ndarray, device: torch.device) -> str | None:
    """Pin memory for CUDA devices; return the error if that fails."""
    with torch.cuda.device(device):
        code = int(torch.cuda.cudart().cudaHostRegister(memory.ctypes.data, memory.nbytes, _PORTABLE))
        if code == 0:
            return None
        # CUDA reports the error once more, at the next kernel, which would be one of the trainer's.
        with suppress(RuntimeError):
            torch.ones(1, device=device)
    return f"cudaHostRegister returned {code}"


def _unregister(address: int, device: torch.device) -> None:
    with torch.cuda.device(device):
        torch.cuda.synchronize()
        torch.cuda.cudart().cudaHostUnregister(address)
