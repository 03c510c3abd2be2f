"""Read weights beside generation while the engine falls asleep, in memory that is then protected: one touch ends all.

``python -m tests.tools.guarded_weights`` prints how many reads were refused and how many finished. The weights lie in
pages of their own; ``sleep`` takes all access to them away, as ``/sleep`` unmaps them on a GPU, and ``wake_up`` gives
it back. A separate program, because a wrong access ends the process by a signal.
"""

import ctypes
import mmap
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from tests.support.world import World
from vllm_delta_sync.engine import protocol
from vllm_delta_sync.engine.compat import write_hooks
from vllm_delta_sync.engine.model import route_map
from vllm_delta_sync.engine.staging import stage
from vllm_delta_sync.errors import BusyError, EngineError

CYCLES = 100
"""Times that the engine falls asleep; more on a machine so busy that the reads hardly meet them."""
LONGEST_SECONDS = 120.0
PAGE = mmap.PAGESIZE
NO_ACCESS, READ_WRITE = 0, 3


class GuardedWorker:
    """A worker whose ``sleep`` makes the memory of its model inaccessible."""

    def __init__(self, model: Any) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._memory = mmap.mmap(-1, sum(_pages(p) for p in model.parameters()))
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        at = 0
        for parameter in model.parameters():
            size = parameter.numel() * parameter.element_size()
            moved = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=at).view(parameter.dtype)
            moved = moved.view(parameter.shape)
            moved.copy_(parameter.data)
            parameter.data = moved
            at += _pages(parameter)

    def _protect(self, access: int) -> None:
        size = ctypes.c_size_t(len(self._memory))
        if self._libc.mprotect(ctypes.c_void_p(self._address), size, access):
            raise OSError(ctypes.get_errno(), "mprotect")

    def sleep(self, level: int = 1) -> None:
        self._protect(NO_ACCESS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self._protect(READ_WRITE)


def _pages(parameter: torch.Tensor) -> int:
    return -(-parameter.numel() * parameter.element_size() // PAGE) * PAGE


def stage_request(world: World) -> protocol.Stage:
    """Return the request by which the receiver stages the newest version, which is then not committed."""
    call, found = world.port.call, []

    def kept(request: Any) -> Any:
        if isinstance(request, protocol.Stage):
            found.append(request)
        if isinstance(request, protocol.Commit):
            raise EngineError("not committed")
        return call(request)

    world.port.call = kept
    try:
        world.receiver.advance()
    except EngineError:
        pass
    world.port.call = call
    request: protocol.Stage = found[0]
    return request


def main() -> None:
    # Many short pieces, so that a sleep often comes between two of them.
    modules: list[Any] = [route_map, stage]
    for module in modules:
        module.READ_ELEMENTS = 64
    chance = random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), codec="tiled")
        worker = GuardedWorker(world.model)
        world.use(world.port)
        world.receiver.advance()
        rank = world.port.ranks[0]
        write_hooks.watch_writes(worker, world.model, rank.memory)
        world.train(1)
        staged = stage_request(world)
        scan = protocol.Scan(list(range(len(world.tensors))))
        began = time.monotonic()
        rank.stage(staged)
        rank.scan(scan)
        # So that of the reads some finish, and sleeps come in the middle of others.
        awake = 2 * (time.monotonic() - began)
        ended, outcomes = threading.Event(), {"finished": 0, "refused": 0}

        def read() -> None:
            while not ended.is_set():
                try:
                    with rank.memory.background_thread():
                        rank.stage(staged) if chance.random() < 0.5 else rank.scan(scan)
                    outcomes["finished"] += 1
                except (BusyError, EngineError):
                    outcomes["refused"] += 1
                    rank.clear_external_write(protocol.ClearExternalWrite([rank.external_writes]))
                    time.sleep(2e-4)

        reader = threading.Thread(target=read)
        reader.start()
        cycles, deadline = 0, time.monotonic() + LONGEST_SECONDS
        while cycles < CYCLES or (min(outcomes.values()) < CYCLES // 10 and time.monotonic() < deadline):
            cycles += 1
            time.sleep(chance.random() * awake)
            worker.sleep()
            time.sleep(chance.random() * 2e-3)
            worker.wake_up()
        ended.set()
        reader.join()
        world.close()
    print(outcomes)
    if min(outcomes.values()) < CYCLES // 10:
        raise SystemExit("the reads and the sleeps hardly met")


if __name__ == "__main__":
    main()
