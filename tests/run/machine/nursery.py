"""Processes to be killed: a warm process forks one for each line that it reads, which spares each the imports."""

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable


class Nursery:
    """The warm process, of a module that calls ``serve``."""

    def __init__(self, module: str, *arguments: object) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        assert self._read() == "ready"

    def begin(self, *task: object) -> int:
        """Process id of a child that does a task."""
        return self._ask(*task)

    def end(self, pid: int) -> bool:
        """Wait for the end of a child; whether it was killed. That it failed is an error."""
        status = self._ask("reap", pid)
        assert status in (0, -signal.SIGKILL)
        return status != 0

    def kill(self, pid: int) -> bool:
        """Kill a child; whether it had not ended by itself."""
        os.kill(pid, signal.SIGKILL)
        return self.end(pid)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def _ask(self, *words: object) -> int:
        assert self._process.stdin is not None
        print(*words, file=self._process.stdin, flush=True)
        return int(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def serve(act: Callable[..., None]) -> None:
    """Say ``ready``, and for each line fork a process that acts on its words; ``reap ID`` says how one ended."""
    print("ready", flush=True)
    for line in sys.stdin:
        words = line.split()
        if words[0] == "reap":
            print(os.waitstatus_to_exitcode(os.waitpid(int(words[1]), 0)[1]), flush=True)
            continue
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        try:
            act(*words)
            os._exit(0)
        finally:
            traceback.print_exc()
            os._exit(1)
