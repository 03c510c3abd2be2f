"""``Accelerator`` is a rank's device, as one thread uses it; ``Workspace`` is what a rank keeps there for its commits.

Everything that a commit needs beside the patch is allocated once, while the first version is staged. So nothing is
allocated in a pause, and running out of memory can only fail a staging, which changes no weight.
"""

import math
import threading
from collections import deque
from collections.abc import Sequence
from functools import cached_property, partial
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from vllm_delta_sync.engine.model.undo_writes import undo_writes

ALIGNMENT = 16
"""Of arrays in memory of a device, in bytes."""
WORKSPACE_BYTES = 32 << 20
"""Size of each transfer buffer: about 1 ms over PCIe 5, and 5.5 M changed elements of bf16."""
LEAST_WORKSPACE_BYTES = 1 << 20
ARENA_BYTES = 128 << 20
"""Memory to decode in: some thousand tiles at a time, so that each part of a device has one to read."""
LEAST_ARENA_BYTES = 16 << 20
"""With less, a processor decodes: the largest tile takes some MB."""
RECENT_VERSIONS = 4
"""Versions that show how much memory versions usually take."""


class Accelerator:
    """A device that torch supports as an accelerator; every method acts for the calling thread.

    Attributes:
        staging_bytes: the most memory in which batches wait for their commit; None: half of what is free.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.staging_bytes: int | None = None

    @cached_property
    def has_triton(self) -> bool:
        """Whether kernels run there; torch's CUDA builds include Triton."""
        return self.device.type == "cuda" and find_spec("triton") is not None

    def set_device(self) -> None:
        """Make it the thread's current device."""
        torch.accelerator.set_device_index(self.device)

    def set_background_stream(self) -> None:
        """Make the background thread's own stream the thread's current stream.

        One stream for all operations: torch keeps freed memory for the stream that had it, and hands out streams in
        turn from a pool, which the engine's own streams come from too.
        """
        if self.device.type == "cuda":
            # vLLM replaces this function to learn of the stream.
            torch.cuda.set_stream(self._background_stream)
        else:
            torch.accelerator.set_stream(self._background_stream)

    @cached_property
    def _background_stream(self) -> Any:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else torch.Stream(self.device)

    def synchronize_stream(self) -> None:
        """Wait until all work launched on the thread's current stream is done."""
        torch.accelerator.current_stream(self.device).synchronize()

    def synchronize(self) -> None:
        """Wait until all work launched on any of the device's streams is done."""
        torch.accelerator.synchronize(self.device)

    def free_bytes(self) -> int:
        """Return the memory of the device that no process uses, in bytes."""
        return torch.accelerator.get_memory_info(self.device)[0]

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 on the device. Raises torch.OutOfMemoryError."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def release(self, memory: list[torch.Tensor]) -> None:
        """Empty a list of what ``allocate`` returned, and return its memory to the device."""
        memory.clear()
        # Until then torch keeps it for the stream that it was allocated on.
        torch.accelerator.empty_cache()

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 in host memory that the device copies by itself."""
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def free_idle_memory(self, keeps_usual: bool = False) -> None:
        """Return to the device what the workspace keeps for the next version.

        Args:
            keeps_usual: as ``Workspace.free_idle_slabs``.
        """
        if "workspace" in vars(self):
            self.workspace.free_idle_slabs(keeps_usual)

    @cached_property
    def workspace(self) -> "Workspace":
        """What this rank keeps on the device for commits. The first use allocates it: raises torch.OutOfMemoryError."""
        return Workspace(self)


class Workspace:
    """Memory through which patches reach a device: one pinned buffer in host memory, and one like it on the device.

    Attributes:
        nbytes: size of each buffer; where the device has little memory left, smaller than ``WORKSPACE_BYTES``.
        lock: held while the buffers are used: a staging uploads on the background thread, a commit on the main thread.
        slabs: number of pieces of that size that this rank has for uploaded batches, in use or idle.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.accelerator = accelerator
        self.lock = threading.Lock()
        self.nbytes = WORKSPACE_BYTES
        while True:
            try:
                self.on_device = accelerator.allocate(self.nbytes)
                break
            except torch.OutOfMemoryError:
                if self.nbytes <= LEAST_WORKSPACE_BYTES:
                    raise
                self.nbytes //= 2
        self.on_host = accelerator.allocate_pinned(self.nbytes)
        self._scratch: torch.Tensor | None = None
        self._arena: torch.Tensor | None = None
        self.slabs = 0
        self._idle_slabs: list[torch.Tensor] = []
        self._slab_lock = threading.Lock()
        self._recent: deque[int] = deque(maxlen=RECENT_VERSIONS)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """Return (nbytes,) uint8 on the device, the same at each call. Raises torch.OutOfMemoryError."""
        if self._scratch is None:
            self._scratch = self.accelerator.allocate(nbytes)
        return self._scratch

    def take_slab(self) -> "Slab | None":
        """Return memory for one uploaded batch; None once slabs and arena have ``staging_bytes``, or half of their own
        and the free memory together."""
        with self._slab_lock:
            if not self._idle_slabs:
                own = self.slabs * self.nbytes + (0 if self._arena is None else self._arena.nbytes)
                if own + self.nbytes > self._limit(own):
                    return None
                try:
                    self._idle_slabs.append(self.accelerator.allocate(self.nbytes))
                except torch.OutOfMemoryError:
                    return None
                self.slabs += 1
            return Slab(self._idle_slabs)

    def decode_arena(self) -> torch.Tensor | None:
        """Return uint8 on the device to decode in, the same at each call until idle memory is freed.

        None if ``staging_bytes``, or half of the free memory, is less than ``LEAST_ARENA_BYTES``.
        """
        if self._arena is None:
            limit = self._limit(0)
            if limit < LEAST_ARENA_BYTES:
                return None
            try:
                self._arena = self.accelerator.allocate(min(ARENA_BYTES, limit // ALIGNMENT * ALIGNMENT))
            except torch.OutOfMemoryError:
                return None
        return self._arena

    def _limit(self, own: int) -> int:
        """Return how many bytes staging may take, of which it has its ``own``."""
        half = (own + self.accelerator.free_bytes()) // 2
        return half if self.accelerator.staging_bytes is None else min(half, self.accelerator.staging_bytes)

    def record_version(self, slabs: int) -> None:
        """Record how many slabs a version has taken."""
        self._recent.append(slabs)

    def free_idle_slabs(self, keeps_usual: bool = False) -> None:
        """Return slabs that hold nothing to the device, and unless ``keeps_usual``, what it decodes in.

        Args:
            keeps_usual: keep what usual versions need, which is what two of the last ones have taken, unless there is
                more than twice of that. So a large version gives its memory back, and sizes that vary a little cause
                no allocations.
        """
        with self._slab_lock:
            if not keeps_usual and self._arena is not None:
                freed, self._arena = [self._arena], None
                self.accelerator.release(freed)
            usual = sorted(self._recent)[-2:][0] if keeps_usual and self._recent else 0
            surplus = min(len(self._idle_slabs), self.slabs - usual)
            if surplus <= 0 or (keeps_usual and self.slabs <= 2 * usual):
                return
            freed = [self._idle_slabs.pop() for _ in range(surplus)]
            self.slabs -= surplus
            self.accelerator.release(freed)

    def upload(self, nbytes: int, target: torch.Tensor) -> None:
        """Copy the first bytes of the host buffer to (≥ nbytes,) uint8 on the device, and wait. Needs ``lock``."""
        target[:nbytes].copy_(self.on_host[:nbytes], non_blocking=True)
        self.accelerator.synchronize_stream()

    def download(self, source: torch.Tensor) -> np.ndarray:
        """Return a copy of a contiguous (n,) array of the device in host memory. Needs ``lock``."""
        found = torch.empty(source.shape, dtype=source.dtype, device="cpu")
        most = self.on_host.nbytes // source.element_size()
        for start in range(0, source.numel(), most):
            piece = source[start : start + most]
            [pinned] = carve(self.on_host, [(piece.shape, piece.dtype)])
            pinned.copy_(piece, non_blocking=True)
            self.accelerator.synchronize_stream()
            found[start : start + most] = pinned
        return found.numpy()

    def exchange(self, live: torch.Tensor, staged: torch.Tensor) -> None:
        """Exchange the contents of weights on the device and of a contiguous host buffer of the same shape and dtype.

        Args:
            live: any strides; at most half of ``nbytes``.
            staged: in host memory.

        Raises:
            RuntimeError: the device failed; both are as before. WeightsLostError: it failed again.
        """
        sides = [(live.shape, live.dtype)] * 2
        with self.lock:
            old, new = carve(self.on_device, sides)
            old_on_host, new_on_host = carve(self.on_host, sides)
            new_on_host.copy_(staged)
            new.copy_(new_on_host, non_blocking=True)
            old.copy_(live)
            old_on_host.copy_(old, non_blocking=True)
            # A device reports errors only when it is waited for; until here neither side has changed.
            self.accelerator.synchronize_stream()
            try:
                live.copy_(new)
                self.accelerator.synchronize_stream()
                staged.copy_(old_on_host)
            except BaseException as error:  # including interrupts: the old bits must not be lost
                undo_writes([partial(live.copy_, old), self.accelerator.synchronize], "a part of a tensor", error)
                raise


class Slab:
    """Memory of the device that returns to the idle slabs of a workspace when nothing refers to this object.

    It may be used again at once: who wrote or read it last has waited for the device.
    """

    def __init__(self, idle: list[torch.Tensor]) -> None:
        self.memory = idle.pop()
        self._idle = idle

    def __del__(self) -> None:
        self._idle.append(self.memory)


Shapes = Sequence[tuple[Sequence[int], torch.dtype]]


def bytes_of(shapes: Shapes) -> int:
    """Return the size of arrays that lie one after the other, each aligned."""
    return sum(-(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT for shape, dtype in shapes)


def carve(memory: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """Return such arrays as views of (≥ ``bytes_of``,) uint8 memory."""
    found, at = [], 0
    for shape, dtype in shapes:
        nbytes = math.prod(shape) * dtype.itemsize
        found.append(memory[at : at + nbytes].view(dtype).view(tuple(shape)))
        at += -(-nbytes // ALIGNMENT) * ALIGNMENT
    return found
