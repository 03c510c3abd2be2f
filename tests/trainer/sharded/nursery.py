"""Worlds of ranks that are forked from one warm process, which spares each of them the seconds that imports take.

A function of a test module is called as ``function(rank, size, **arguments)`` in real processes with a real gloo group
on loopback; arguments and what it returns are JSON.
"""

import importlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.support.forks import Forks, serve

LONGEST_SECONDS = 600.0
GRACE_SECONDS = 60.0
"""How long the others of a world may go on when one has ended badly."""


class Nursery(Forks):
    """The warm process, from the side of a test. ``folder`` gets the ranks' output and results."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._worlds = 0
        variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        super().__init__("tests.trainer.sharded.nursery", folder, **variables)

    def statuses(
        self, size: int, function: Callable[..., Any], group_seconds: float = 600.0, **arguments: Any
    ) -> list[int]:
        """Run a world → exit status of each rank, negative for the signal that ended it.

        Who does not end is ended. ``group_seconds``: how long its collective calls wait.
        """
        order = {"size": size, "module": function.__module__, "name": function.__name__, "arguments": arguments}
        order["group_seconds"] = group_seconds
        children = [self.begin(self._worlds, rank, order) for rank in range(size)]
        self._worlds += 1
        ends, found = time.monotonic() + LONGEST_SECONDS, dict[int, int]()
        while running := [child for child in children if child not in found]:
            for child in running:
                if (status := self.poll(child)) is not None:
                    found[child] = status
                    ends = min(ends, time.monotonic() + GRACE_SECONDS) if status else ends
                elif time.monotonic() > ends:
                    os.kill(child, signal.SIGKILL)
            time.sleep(0.005)
        return [found[child] for child in children]

    def run(self, size: int, function: Callable[..., Any], **arguments: Any) -> list[Any]:
        """Run a world → what each rank returned.

        Raises:
            AssertionError: a rank failed, or did not end; with the ends of the logs.
        """
        statuses = self.statuses(size, function, **arguments)
        assert not any(statuses), f"exit statuses {statuses}\n{self.logs()}"
        return [json.loads((self._folder / f"{self._worlds - 1}-{rank}.json").read_text()) for rank in range(size)]

    def logs(self) -> str:
        paths = sorted(self._folder.glob(f"{self._worlds - 1}-*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-3000:]}" for path in paths)


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with closing(Nursery(tmp_path_factory.mktemp("nursery"))) as made:
        yield made


def _act(folder: Path, number: int, rank: int, order: dict[str, Any]) -> None:
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
    serve(partial(_act, folder))


if __name__ == "__main__":
    _main(Path(sys.argv[1]))
