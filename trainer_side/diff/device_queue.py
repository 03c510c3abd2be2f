"""``DeviceQueue``: what a comparison asks of a device: memory, and work in streams, in an order that events give it.

A piece of work is done in the order of its stream. Between two streams, and between a stream and the host, nothing
holds but what an event says. ``open_queue`` gives CUDA devices ``CudaQueue``; on all others every call is done at once.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch

Stream = Literal["caller", "copies", "background"]
"""``caller``: the current stream of the calling thread, in which training runs. ``copies``: to the device.
``background``: what goes on while training does."""

Event = Any


class DeviceQueue:
    """Work on one device, or on host memory that stands for one. Here every call is done when it returns."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._caller: Any = None

    def caller(self, current: Any, wait: Callable[[Any], object]) -> Any:
        """Return ``current``, the calling thread's stream of now, after what its stream of before has.

        They differ if a source of weights yields inside ``torch.cuda.stream``: its stream is current between two of its
        tensors, and no longer once it has ended.

        Args:
            wait: lets ``current`` wait for all that the stream that it is given has now.
        """
        if self._caller is not None and self._caller != current:
            wait(self._caller)
        self._caller = current
        return current

    def empty(self, stream: Stream, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return memory of the device, which ``stream`` uses first; others only after an event of it."""
        return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return host memory that the device copies from and to directly."""
        return torch.empty(shape, dtype=dtype, device="cpu")

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        """Enqueue what ``work`` launches. It is called at once, or later but in order; what it takes must stay."""
        work()

    def record(self, stream: Stream) -> Event:
        """Return an event that is done once all that ``stream`` has now is."""
        return None

    def wait(self, stream: Stream, event: Event) -> None:
        """Let what ``stream`` gets from now on wait for an event; the host does not."""
        self.synchronize(event)

    def synchronize(self, event: Event) -> None:
        """Wait on the host until an event is done."""
        if self.device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(self.device)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy, between the host and the device or within it."""
        self.run(stream, lambda: target.copy_(source, non_blocking=True))

    def finish(self, stream: Stream) -> None:
        """Wait on the host for all that ``stream`` has now."""
        self.synchronize(self.record(stream))


class CudaQueue(DeviceQueue):
    """A CUDA device. The thread that calls may have another current device and stream: both are set for each call.

    The device too, and before the stream: the end of ``torch.cuda.stream`` would otherwise make the thread's usual
    device current, and so CUDA would take half a gigabyte there, once for each process.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        with torch.cuda.device(device):
            self._own: dict[Stream, torch.cuda.Stream] = {
                "copies": torch.cuda.Stream(device),
                "background": torch.cuda.Stream(device),
            }

    def empty(self, stream: Stream, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        # Publishers may be made, or publish, in ``inference_mode``; what they keep is written outside it, too.
        with torch.inference_mode(False), torch.cuda.device(self.device), torch.cuda.stream(self._stream(stream)):
            return torch.empty(shape, dtype=dtype, device=self.device)

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        with torch.inference_mode(False), torch.cuda.device(self.device):
            return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream(stream)):
            work()

    def record(self, stream: Stream) -> Event:
        with torch.cuda.device(self.device):
            event = torch.cuda.Event()
            event.record(self._stream(stream))
            return event

    def wait(self, stream: Stream, event: Event) -> None:
        with torch.cuda.device(self.device):
            self._stream(stream).wait_event(event)

    def synchronize(self, event: Event) -> None:
        with torch.cuda.device(self.device):
            event.synchronize()

    def _stream(self, stream: Stream) -> torch.cuda.Stream:
        if stream != "caller":
            return self._own[stream]
        current = torch.cuda.current_stream(self.device)
        found: torch.cuda.Stream = self.caller(current, current.wait_stream)
        return found


def open_queue(device: torch.device) -> DeviceQueue:
    """Return the queue of a device."""
    return CudaQueue(device) if device.type == "cuda" else DeviceQueue(device)
