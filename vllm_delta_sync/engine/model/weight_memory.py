"""``WeightMemory``: which thread may touch a rank's weights when, and what a thread must set up before it does.

A rank has two threads. The worker's main thread generates, commits, and runs vLLM's own calls that move or write
weights (sleep, wake up, reload). The background thread reads weights beside generation, to hash them or to decode
against them. On a device each thread has a current device, a current stream and grad modes of its own, kernels of two
streams are not ordered, and a kernel that reads memory which ``/sleep`` has unmapped ends the process. So:

- The background thread runs on the weights' device, in inference mode, on a stream of its own.
- It reads weights in short pieces under a lock. Calls that move or write weights hold the lock until the device is done
  with them, and while the engine is asleep nothing is read. Such a call comes before the next piece: a lock alone may
  go back to the thread that has just released it, so a reader first passes a gate that the call keeps shut.
- A commit runs on the main thread's current stream and waits for the device before and after.

On a CPU only the lock and inference mode are left of this.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vllm_delta_sync.engine.model.model_replica import is_plain, walk_tensors
from vllm_delta_sync.errors import BusyError


class Accelerator(Protocol):
    """What is asked of a device; all of it concerns the calling thread."""

    def set_device(self) -> None:
        """Make it the thread's current device."""

    def set_new_stream(self) -> None:
        """Make a new stream the thread's current one."""

    def synchronize_stream(self) -> None:
        """Wait until everything that was launched on the thread's current stream is done."""

    def synchronize(self) -> None:
        """Wait until everything that was launched on any of its streams is done."""


class TorchAccelerator:
    """Any device that torch knows as an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def set_device(self) -> None:
        torch.accelerator.set_device_index(self._device)

    def set_new_stream(self) -> None:
        torch.accelerator.set_stream(torch.Stream(self._device))

    def synchronize_stream(self) -> None:
        torch.accelerator.current_stream(self._device).synchronize()

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._device)


class WeightMemory:
    """The memory of one rank's weights.

    Args:
        accelerator: what it is on; None: in host memory.

    Attributes:
        asleep: whether the weights are not in memory. Written under ``exclusive``.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.asleep = False
        self._accelerator = accelerator
        # A call that moves weights may make another one.
        self._lock = threading.RLock()
        self._gate = threading.RLock()

    @classmethod
    def of(cls, model: Any) -> "WeightMemory":
        """That of a model, by the first of its tensors."""
        device = next((tensor.device for _, _, tensor in walk_tensors(model) if is_plain(tensor)), torch.device("cpu"))
        return cls(None if device.type in ("cpu", "meta") else TorchAccelerator(device))

    @contextmanager
    def background_thread(self) -> Iterator[None]:
        """For all that the background thread does. What it has launched is done at the end."""
        with torch.inference_mode():
            if self._accelerator is None:
                yield
                return
            self._accelerator.set_device()
            self._accelerator.set_new_stream()
            try:
                yield
            finally:
                self._accelerator.synchronize_stream()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For a short read of weights beside generation: some milliseconds, for so long may ``exclusive`` wait.

        Neither this nor ``exclusive`` may be entered within it.

        Raises:
            BusyError: the engine is asleep.
        """
        with self._gate:
            self._lock.acquire()
        try:
            self.check_awake()
            try:
                yield
            finally:
                if self._accelerator is not None:
                    self._accelerator.synchronize_stream()
        finally:
            self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """For a call that moves, unmaps or writes weights from outside of a commit."""
        with self._gate, self._lock:
            try:
                yield
            finally:
                self.synchronize()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """For a commit, on the worker's main thread while the engine is paused. Its writer calls ``synchronize``."""
        with torch.inference_mode():
            if self._accelerator is not None:
                self._accelerator.set_device()
            self.synchronize()
            yield

    def synchronize(self) -> None:
        """Wait until the device has done all that it was given."""
        if self._accelerator is not None:
            self._accelerator.synchronize()

    def check_awake(self) -> None:
        """Raise BusyError while the engine is asleep."""
        if self.asleep:
            raise BusyError("the engine is asleep and its weights are not in memory; wake it up (POST /wake_up)")
