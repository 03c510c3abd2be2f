"""Real processes with a real gloo process group on loopback, each running one function of a test module.

The function is called as ``function(rank, size, **arguments)`` at the top level of a module of tests; what it
returns must be JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).parents[3]
Function = Callable[..., Any]


class World:
    """``size`` processes; on leaving, those that still run are ended, each by its id.

    Args:
        arguments: JSON values, the same for every rank.
        environment: variables to set in every process besides those of this one.
    """

    def __init__(
        self, size: int, function: Function, environment: dict[str, str] | None = None, **arguments: Any
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="delta-sync-world-")
        self.path = Path(self._folder.name)
        self.processes: list[subprocess.Popen[bytes]] = []
        name = f"{function.__module__}:{function.__qualname__}"
        quiet = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        command = [
            sys.executable,
            "-m",
            "tests.trainer.sharded.world",
            str(self.path),
            name,
            json.dumps(arguments),
            str(size),
        ]
        for rank in range(size):
            with (self.path / f"{rank}.log").open("wb") as log:
                process = subprocess.Popen(
                    [*command, str(rank)],
                    cwd=ROOT,
                    env={**os.environ, **quiet, **(environment or {}), "RANK": str(rank), "WORLD_SIZE": str(size)},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self.processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
        for process in self.processes:
            process.wait()
        self._folder.cleanup()

    def kill(self, rank: int) -> None:
        """End one process as -9 does."""
        self.processes[rank].kill()
        self.processes[rank].wait()

    def wait(self, timeout: float = 300) -> list[int]:
        """Exit code of each process (negative: the signal that ended it), once all have ended.

        Raises:
            AssertionError: one still runs after ``timeout`` seconds; with the ends of the logs.
        """
        deadline = time.monotonic() + timeout
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"rank {rank} still runs after {timeout} s\n{self.logs()}") from None
        return [process.returncode for process in self.processes]

    def results(self, timeout: float = 300) -> list[Any]:
        """What each rank returned, in the order of ranks; the first failure ends the others after a moment.

        Raises:
            AssertionError: a rank failed, or still runs after ``timeout`` seconds; with the ends of the logs.
        """
        deadline = time.monotonic() + timeout
        grace = deadline
        while any(process.poll() is None for process in self.processes):
            if any(process.poll() for process in self.processes):
                # The others have a moment to say what they think of it.
                grace = min(grace, time.monotonic() + 5)
            if time.monotonic() > grace:
                break
            time.sleep(0.02)
        codes = [process.poll() for process in self.processes]
        if any(codes) or None in codes:
            raise AssertionError(f"exit codes {codes} (None: still running)\n{self.logs()}")
        return [self.result(rank) for rank in range(len(self.processes))]

    def result(self, rank: int) -> Any:
        """What one rank that has ended well returned."""
        return json.loads((self.path / f"{rank}.json").read_text())

    def log(self, rank: int) -> str:
        """Everything one rank wrote to its standard output and error so far."""
        return (self.path / f"{rank}.log").read_text(errors="replace")

    def logs(self) -> str:
        """The ends of all logs."""
        return "\n".join(f"--- rank {rank}\n{self.log(rank)[-3000:]}" for rank in range(len(self.processes)))


def run_world(size: int, function: Function, timeout: float = 300, **arguments: Any) -> list[Any]:
    """Run a function in ``size`` processes → what each returned.

    Raises:
        AssertionError: a rank failed, or still runs after ``timeout`` seconds; with the ends of the logs.
    """
    with World(size, function, **arguments) as world:
        return world.results(timeout)


def _main(folder: str, function: str, arguments: str, size: str, rank: str) -> None:
    import torch
    from torch import distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]

    torch.set_num_threads(1)
    store = FileStore(f"{folder}/store", int(size))
    # Longer than any test waits for a world: what hangs is reported by the test, with the logs.
    distributed.init_process_group(
        "gloo", store=store, rank=int(rank), world_size=int(size), timeout=timedelta(minutes=10)
    )
    module, _, name = function.partition(":")
    result = getattr(importlib.import_module(module), name)(int(rank), int(size), **json.loads(arguments))
    Path(folder, f"{rank}.json").write_text(json.dumps(result))
    # A rank that leaves first would break what the others still do with it.
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    _main(*sys.argv[1:])
