"""Worlds of ranks that are forked from one warm process, which spares each of them the seconds that imports take.

A function of a test module is called as ``function(rank, size, **arguments)`` in real processes with a real gloo group
on loopback; arguments and what it returns are JSON. ``python -m tests.trainer.sharded.nursery FOLDER`` reads a line of
JSON for each world, and answers with the exit statuses of its ranks.
"""

import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

LONGEST_SECONDS = 600.0
GRACE_SECONDS = 60.0
"""How long the others of a world may go on when one has ended badly."""


class Nursery:
    """The warm process, from the side of a test. ``folder`` gets the ranks' output and results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.sharded.nursery", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.getcwd(), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
            | {"TOKENIZERS_PARALLELISM": "false"},
        )
        assert self._read() == "ready"

    def statuses(
        self, size: int, function: Callable[..., Any], group_seconds: float = 600.0, **arguments: Any
    ) -> list[int]:
        """Run a world → exit status of each rank, negative for the signal that ended it.

        ``group_seconds``: how long its collective calls wait.
        """
        assert self._process.stdin is not None
        order = {"size": size, "module": function.__module__, "name": function.__name__, "arguments": arguments}
        order["group_seconds"] = group_seconds
        print(json.dumps(order), file=self._process.stdin, flush=True)
        self._worlds += 1
        found: list[int] = json.loads(self._read())
        return found

    def run(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run a world → what each rank returned.

        Raises:
            AssertionError: a rank failed, or did not end; with the ends of the logs.
        """
        statuses = self.statuses(size, function, **arguments)
        assert not any(statuses), f"exit statuses {statuses}\n{self.logs()}"
        return [json.loads(self._file(rank, "json").read_text()) for rank in range(size)]

    def logs(self) -> str:
        paths = sorted(self._folder.glob(f"{self._worlds - 1}-*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)

    def _file(self, rank: int, kind: str) -> Path:
        return self._folder / f"{self._worlds - 1}-{rank}.{kind}"

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with closing(Nursery(tmp_path_factory.mktemp("nursery"))) as made:
        yield made


def _forked(folder: Path, number: int, rank: int, order: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with (folder / f"{number}-{rank}.log").open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        # torch makes its pool of threads anew after a fork, and not safely if several threads ask for it at once.
        torch.set_num_threads(1)
        from torch.distributed import FileStore  # type: ignore[attr-defined]

        size = order["size"]
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(size))
        store = FileStore(str(folder / f"{number}.store"), size)
        limit = timedelta(seconds=order["group_seconds"])
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=limit)
        result = getattr(importlib.import_module(order["module"]), order["name"])(rank, size, **order["arguments"])
        (folder / f"{number}-{rank}.json").write_text(json.dumps(result))
        # A rank that leaves first would break what the others still do with it.
        distributed.barrier()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
        if status == 1:
            traceback.print_exc()
    except BaseException:  # noqa: BLE001 - told by the exit status, and this process must not go on as its parent
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _reaped(children: list[int]) -> list[int]:
    """Exit statuses, once all have ended; who does not is ended."""
    ends = time.monotonic() + LONGEST_SECONDS
    found: dict[int, int] = {}
    while len(found) < len(children):
        for child in children:
            if child not in found:
                gone, status = os.waitpid(child, os.WNOHANG)
                if gone:
                    found[child] = os.waitstatus_to_exitcode(status)
                    ends = min(ends, time.monotonic() + GRACE_SECONDS) if found[child] else ends
        if time.monotonic() > ends:
            for child in children:
                if child not in found:
                    os.kill(child, signal.SIGKILL)
        time.sleep(0.005)
    return [found[child] for child in children]


def _main(folder: Path) -> None:
    from tests.support import tiny
    from tests.trainer.sharded import models
    from trainer_side import Publisher
    from vllm_delta_sync import open_run

    torch.set_num_threads(1)
    # Loads what ranks need, some of them; the first is what torch loads when something is sharded first.
    libraries = ("torch._dynamo", "transformers.trainer", "megatron.core.models.gpt.gpt_model")
    for name in (*libraries, "trainer_side.ranks.coordinator"):
        if find_spec(name.partition(".")[0]) is not None:
            importlib.import_module(name)
    warm = [(name, tensor.detach()) for name, tensor in models.built("mixed").state_dict().items()]
    with Publisher(warm, str(folder / "warm")) as publisher:
        for _, tensor in warm:
            tensor.add_(1)
        publisher.publish(1)
    open_run(str(folder / "warm")).verify()
    # What transformers loads of a family when it is made first.
    for made in (tiny.make_model("qwen3"), models.built("qwen3 moe")):
        assert made is not None
    # Else each fork would copy what the collector looks at.
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        children = [_forked(folder, number, rank, order) for rank in range(order["size"])]
        print(json.dumps(_reaped(children)), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
