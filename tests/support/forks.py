"""``Forks``: a warm process forks one for each task that it is given, which spares each of them the imports."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any


class Forks:
    """The warm process, ``python -m MODULE ARGUMENTS``, which calls ``serve``; and the processes that it has forked."""

    def __init__(self, module: str, *arguments: object, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), **environment},
        )
        assert self._read() == "ready"

    def begin(self, *task: object) -> int:
        """Process id of a child that does a task, which is JSON."""
        return int(self._ask(task))

    def poll(self, pid: int) -> int | None:
        """Exit status of a child, negative for the signal that ended it; None while it runs."""
        status: int | None = self._ask(pid)
        return status

    def end(self, pid: int) -> bool:
        """Wait for the end of a child; whether it was killed. That it failed is an error."""
        while (status := self.poll(pid)) is None:
            time.sleep(0.002)
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

    def _ask(self, order: object) -> Any:
        assert self._process.stdin is not None
        print(json.dumps(order, default=str), file=self._process.stdin, flush=True)
        return json.loads(self._read())

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


def serve(act: Callable[..., None]) -> None:
    """Say ``ready``, and fork a process that acts for each task; the id of one asks how it has ended."""
    # Else each fork would copy what the collector looks at.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if isinstance(order, int):
            gone, status = os.waitpid(order, os.WNOHANG)
            print(json.dumps(os.waitstatus_to_exitcode(status) if gone else None), flush=True)
            continue
        child = os.fork()
        if child:
            print(child, flush=True)
            continue
        code: object = 1
        try:
            act(*order)
            code = 0
        except SystemExit as ended:
            code = ended.code
        except BaseException:  # noqa: BLE001 - the exit status reports it, and this process must not go on as its parent
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code if isinstance(code, int) else 1)
