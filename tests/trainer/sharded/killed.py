"""The life of a rank that is killed, or whose neighbour is."""

import os
import signal
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.support.publishers import Hooked
from tests.trainer.sharded.training import sharded, whole_tensors
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import PublishError

TOLD = 3
POINTS = (
    "before the diff",
    "after the diff",
    "before its upload",
    "after its upload",
    "before the outcome",
    "before the manifest",
    "after the manifest",
)


def digest(tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 over all bits, in the order of names."""
    state = sha256()
    for name in sorted(tensors):
        state.update(tensors[name].detach().contiguous().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


class Small(nn.Module):
    """Two layers whose rows no world of several ranks shares out evenly."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(9, 5, bias=False)
        self.second = nn.Linear(5, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(inputs)))
        return result


def die(*ignored: object) -> None:
    """End this process as kill -9 does."""
    os.kill(os.getpid(), signal.SIGKILL)


def doom(publisher: Publisher, bucket: Hooked, at: str) -> Callable[[], None]:
    """Have this process end at a step of the next publish → what to call right before that."""

    def of(prefix: str) -> Callable[[str], None]:
        return lambda key: die() if key.startswith(prefix) else None

    def arm() -> None:
        match at:
            case "before the diff":
                die()
            case "after the diff":
                publisher._background.submit = die  # type: ignore[assignment,method-assign]
            case "before its upload":
                bucket.before = of("objects/")
            case "after its upload":
                bucket.after = of("objects/")
            case "before the outcome":
                publisher._committer._circle.broadcast = die  # type: ignore[attr-defined]
            case "before the manifest":
                bucket.before = of("versions/")
            case "after the manifest":
                bucket.after = of("versions/")

    return arm


def live(rank: int, size: int, where: str, victim: int, at: str) -> None:
    """Take the run in ``where`` over, or begin it, publish one version, and be on the way to the next when rank
    ``victim`` ends itself, ``at`` a step of POINTS.

    A rank ends with status TOLD if a publish says that the victim is lost. Rank 0 writes to ``log``, line by line,
    ``will SHA`` of the weights that it is about to publish, and ``done VERSION`` once they are.
    """
    folder = Path(where)
    url = str(folder / "run")

    def note(*words: object) -> None:
        if rank == 0:
            with (folder / "log").open("a") as log:
                print(*words, file=log)

    model: Any = Small()
    if (folder / "run" / "versions").exists():
        model.load_state_dict(dict(open_run(url).tensors()))
    model = sharded(model, "fsdp") if size > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    bucket = Hooked(folder / "run")

    def step(number: int, arm: Callable[[], None] | None = None) -> None:
        loss = model(torch.full((2, 9), float(number))).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        note("will", digest(whole_tensors(model)))
        if arm is not None:
            arm()
        result = publisher.publish(number)
        publisher.flush()
        note("done", result.version)

    note("will", digest(whole_tensors(model)))
    publisher = Publisher(model, bucket)
    before = publisher.version
    note("done", before)
    step(2 * before + 1)
    assert publisher.version == before + 1
    try:
        step(2 * before + 2, doom(publisher, bucket, at) if rank == victim else None)
    except PublishError as error:
        print(f"rank {rank} of {size}, {victim} dead {at}: {error}", flush=True)
        os._exit(TOLD if f"rank {victim} " in str(error) else 1)
    publisher.close()


def begin(rank: int, size: int, where: str, victim: int, prefix: str) -> None:
    """Begin a run in ``where``; rank ``victim`` ends itself as it puts the first object whose key begins so.

    The others end with status TOLD if they are told so. Without a victim one version is published.
    """
    model: Any = sharded(Small(), "fsdp")
    bucket = Hooked(Path(where) / "run")
    if rank == victim:
        bucket.before = lambda key: die() if key.startswith(prefix) else None
    try:
        publisher = Publisher(model, bucket)
    except PublishError as error:
        print(f"rank {rank} of {size}, {victim} dead at {prefix}: {error}", flush=True)
        os._exit(TOLD if f"rank {victim} " in str(error) else 1)
    model.second.bias.data.add_(1.0)
    publisher.publish(1)
    publisher.close()
