"""``WeightMemory`` decides which thread may access a worker's weights when, and sets the thread up for the access.

A worker has one main thread, which generates, commits, and runs vLLM's own calls that move or write weights (sleep,
wake up, reload). Each run that the worker follows, that of the model or of a LoRA adapter, has a background thread,
which reads weights beside generation, to hash them or to decode against them. All of them share one ``WeightMemory``,
because one sleep takes the memory of all. On a device, each thread has its own current device, current stream and grad
modes; kernels of two streams are not ordered; and a kernel that reads memory which ``/sleep`` has unmapped ends the
process. Therefore:

- A background thread runs on the weights' device, in inference mode, on a separate stream.
- It reads weights in short pieces under a lock. Calls that move or write weights hold the lock until the device has
  finished them, and nothing is read while the engine sleeps. Such a call comes before the reader's next piece: because
  a lock alone may return to the thread that just released it, a reader first passes a gate that the call holds.
- A commit runs on the main thread's current stream and waits for the device before and after.

On a CPU only the lock and inference mode remain.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from vllm_delta_sync.engine.model.accelerator import Accelerator
from vllm_delta_sync.engine.model.model_replica import is_plain, walk_tensors
from vllm_delta_sync.errors import BusyError

ASLEEP = "the engine is asleep and its weights are not in memory; wake it up (POST /wake_up, or LLM.wake_up())"


class WriteListener(Protocol):
    """Holds versions in this memory, and learns of what else happens to it; see ``RankWorker``."""

    def note_external_write(self, writer: str) -> None: ...

    def leave_device(self) -> None: ...
    def not_rebuilt(self) -> list[torch.UntypedStorage]: ...


class WeightMemory:
    """Guards the memory of one worker's weights, those of LoRA adapters included.

    Args:
        accelerator: the device of the weights; None means host memory.

    Attributes:
        accelerator: see above.
        asleep: whether the engine sleeps and its weights are not in memory. Written under ``exclusive``.
        listeners: everything followed in this worker; each hears of every sleep, wake-up and write from outside.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.asleep = False
        self.listeners: list[WriteListener] = []
        self.accelerator = accelerator
        # Reentrant, because a call that moves weights may make another one.
        self._lock = threading.RLock()
        self._gate = threading.RLock()

    @classmethod
    def for_model(cls, model: Any) -> "WeightMemory":
        """Return the guard of a model's weights; its first tensor that is on a device decides which."""
        devices = (tensor.device for _, _, tensor in walk_tensors(model) if is_plain(tensor))
        device = next((device for device in devices if device.type not in ("cpu", "meta")), None)
        return cls(None if device is None else Accelerator(device))

    @contextmanager
    def background_thread(self) -> Iterator[None]:
        """Set up the background thread for an operation; at the end, wait for what it launched."""
        with torch.inference_mode():
            if self.accelerator is None:
                yield
                return
            self.accelerator.set_device()
            self.accelerator.set_background_stream()
            try:
                yield
            finally:
                self.accelerator.synchronize_stream()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock for a short read beside generation: a few milliseconds, since ``exclusive`` waits for it.

        Neither ``reading`` nor ``exclusive`` may be entered inside.

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
                if self.accelerator is not None:
                    self.accelerator.synchronize_stream()
        finally:
            self._lock.release()

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Hold the lock for a call that moves, unmaps or writes weights outside of a commit."""
        with self._gate, self._lock:
            try:
                yield
            finally:
                self.synchronize()

    @contextmanager
    def committing(self) -> Iterator[None]:
        """Set up a commit, on the worker's main thread while the engine is paused. The caller calls ``synchronize``."""
        with torch.inference_mode():
            if self.accelerator is not None:
                self.accelerator.set_device()
            self.synchronize()
            yield

    def synchronize(self) -> None:
        """Wait until the device has done all its work."""
        if self.accelerator is not None:
            self.accelerator.synchronize()

    def check_awake(self) -> None:
        """Raise BusyError while the engine is asleep."""
        if self.asleep:
            raise BusyError(ASLEEP)
