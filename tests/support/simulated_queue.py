"""``SimulatedQueue``: a device with streams in host memory, which does its work as late as events allow, or at random.

What reads or writes memory without an event that orders it gets what no real device promises: the bits of before.
"""

import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trainer_side.diff.device_queue import DeviceQueue, Stream


@dataclass(frozen=True)
class Moment:
    """An event: all that a stream has up to a position."""

    stream: str
    position: int


@dataclass
class Record:
    """What was asked of the device: bytes allocated, bytes copied by direction, and waits of the host.

    Attributes:
        launches: how many kernels. waits: per wait of the host, how much work its stream had that came after.
    """

    allocated: list[int] = field(default_factory=list)
    pinned: list[int] = field(default_factory=list)
    to_device: int = 0
    to_host: int = 0
    launches: int = 0
    waits: list[int] = field(default_factory=list)


class SimulatedQueue(DeviceQueue):
    """Args: seed: of what runs before anything waits for it; None for a device that does nothing until then.

    Attributes:
        current: the calling thread's current stream, one of two.
        memory, used: bytes that the device has, None for no end; and those in use.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__(torch.device("cpu"))
        self._random = None if seed is None else random.Random(seed)
        self.current = "default"
        self._streams: dict[str, list[Callable[[], object]]] = {
            name: [] for name in ("default", "side", "copies", "background")
        }
        self._done = dict.fromkeys(self._streams, 0)
        self._own: set[int] = set()
        self.memory: int | None = None
        self.used = 0
        self.record_of = Record()

    def empty(self, stream: Stream, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        if self.memory is not None and made.nbytes > self.memory - self.used:
            raise torch.OutOfMemoryError(f"{made.nbytes} bytes, and {self.memory - self.used} are left")
        self.used += made.nbytes
        weakref.finalize(made.untyped_storage(), self._free, made.nbytes)
        # Neither zeros nor what was there before.
        made.view(torch.uint8).fill_(0xA5)
        self._own.add(made.untyped_storage().data_ptr())
        self.record_of.allocated.append(made.nbytes)
        return made

    def _free(self, nbytes: int) -> None:
        self.used -= nbytes

    def pinned(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        made = torch.empty(shape, dtype=dtype)
        made.view(torch.uint8).fill_(0x5A)
        self.record_of.pinned.append(made.nbytes)
        return made

    def run(self, stream: Stream, work: Callable[[], object]) -> None:
        self.record_of.launches += 1
        self._enqueue(self._of(stream), work)

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        there, here = (side.untyped_storage().data_ptr() in self._own for side in (target, source))
        if there != here:
            self.record_of.to_device += target.nbytes if there else 0
            self.record_of.to_host += 0 if there else target.nbytes
        self._enqueue(self._of(stream), lambda: target.copy_(source))

    def record(self, stream: Stream) -> Moment:
        return self._now(self._of(stream))

    def wait(self, stream: Stream, event: Moment) -> None:
        self._enqueue(self._of(stream), lambda: self._reach(event))

    def synchronize(self, event: Moment) -> None:
        self.record_of.waits.append(len(self._streams[event.stream]) - event.position)
        self._reach(event)

    def run_all(self) -> None:
        """Do all that was asked for, as a device does in the end."""
        for name in self._streams:
            self._reach(self._now(name))

    def _of(self, stream: Stream) -> str:
        if stream != "caller":
            return stream
        current = self.current

        def wait(other: str) -> None:
            event = self._now(other)
            self._enqueue(current, lambda: self._reach(event))

        return str(self.caller(current, wait))

    def _now(self, name: str) -> Moment:
        return Moment(name, len(self._streams[name]))

    def _enqueue(self, stream: str, work: Callable[[], object]) -> None:
        self._streams[stream].append(work)
        while self._random is not None and self._random.random() < 0.5:
            other = self._random.choice(list(self._streams))
            self._reach(Moment(other, min(self._done[other] + 1, len(self._streams[other]))))

    def _reach(self, event: Moment) -> None:
        while self._done[event.stream] < event.position:
            stream, done = self._streams[event.stream], self._done[event.stream]
            stream[done]()
            # Frees what only this work refers to.
            stream[done] = _nothing
            self._done[event.stream] += 1


def _nothing() -> None:
    pass
