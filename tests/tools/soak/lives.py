"""The server through its lives: started, killed with all it has, and started again."""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.servers import Server, delta_sync_serve, serving

POLL_SECONDS = "0.2"
UNDO_BYTES = str(8 * 1024**2)
"""So little that the undo log is full soon: only then can memory be flat."""
CACHE_BLOCKS = "64"
"""So few that all are used soon: a page of vLLM's cache becomes resident when it is first written."""
FEW_KERNELS = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "16"}
"""oneDNN keeps a kernel for each number of tokens that a step had, by default up to a thousand in each of two caches.
So the memory of any server on a CPU grows while new numbers come, without us too. So few that all are there soon."""


@dataclass
class Life:
    """A server from its start to its end.

    Attributes:
        number: 1 for the first. ended: whether it was told to end, so that answers may be cut off.
    """

    number: int
    server: Server
    ended: bool = False

    @property
    def group(self) -> int:
        """The process group of all its processes."""
        return self.server.process.pid


class Lives:
    """Starts and kills; any thread may ask for the life that is on."""

    def __init__(self, base: Path, url: str, folder: Path) -> None:
        self._base, self._url, self._folder = base, url, folder
        self._stack = ExitStack()
        self._changed = threading.Condition()
        self._life: Life | None = None
        self._count = 0
        self._closed = False

    def start(self) -> Life:
        """A new server, once it serves any version."""
        self._count += 1
        flags = ["--bucket", self._url, "--poll-seconds", POLL_SECONDS, "--undo-bytes", UNDO_BYTES]
        flags += ["--num-gpu-blocks-override", CACHE_BLOCKS]
        command = delta_sync_serve(self._base, *flags)
        log = self._folder / f"server-{self._count}.log"
        server = self._stack.enter_context(serving(self._base, log, command, FEW_KERNELS, cold=True))
        server.wait_served(0)
        with self._changed:
            self._life = Life(self._count, server)
            self._changed.notify_all()
            return self._life

    def kill(self) -> None:
        """End it as a machine that loses power would."""
        with self._changed:
            life, self._life = self._life, None
        if life is not None:
            life.ended = True
            os.killpg(life.group, signal.SIGKILL)
            life.server.process.wait(60)

    def now(self) -> Life | None:
        """The life that is on, if any."""
        return self._life

    def wait(self, given_up: Callable[[], bool]) -> Life | None:
        """The life that is on, or the next; None once it is over, or given up."""
        with self._changed:
            while self._life is None and not self._closed and not given_up():
                self._changed.wait(0.2)
            return self._life

    def close(self) -> None:
        """End it for good, in order."""
        with self._changed:
            if self._life is not None:
                self._life.ended = True
            self._life, self._closed = None, True
            self._changed.notify_all()
        self._stack.close()


def until(reached: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait for something that has to come.

    Raises:
        TimeoutError: it did not.
    """
    deadline = time.monotonic() + seconds
    while not reached():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s: {what}")
        time.sleep(0.1)
