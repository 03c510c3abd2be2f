"""A fleet in one process: receivers on plain modules that follow one run, and a record of who was paused when."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tests.support.modules import FusedModel, ModulePort, checkpoint_tensors, save_base
from trainer_side import Publisher
from vllm_delta_sync.config import Settings
from vllm_delta_sync.engine.service import ReceiverService

WAIT = 120.0
POLL = 0.05


class Pauses:
    """Who is paused now, who was with whom, and how many at once.

    Attributes:
        most: how many at once. log: names, in the order in which they paused.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._now: set[str] = set()
        self.most = 0
        self.log: list[str] = []

    def begin(self, name: str) -> None:
        with self._lock:
            self._now.add(name)
            self.log.append(name)
            self.most = max(self.most, len(self._now))

    def end(self, name: str) -> None:
        with self._lock:
            self._now.discard(name)


class RecordedPort(ModulePort):
    """An engine that records its pauses, each of which lasts at least a while."""

    def __init__(self, model: FusedModel, name: str, pauses: Pauses, lasting: Callable[[], None]) -> None:
        super().__init__(model)
        self._name, self._pauses, self._lasting = name, pauses, lasting

    def pause(self) -> None:
        super().pause()
        self._pauses.begin(self._name)
        self._lasting()

    def resume(self) -> bool:
        self._pauses.end(self._name)
        return super().resume()


class Rollouts:
    """A publisher, and servers by name.

    Attributes:
        tensors: the trainer's. pauses: of all servers.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.url, self._folder = url, folder
        self.tensors = checkpoint_tensors()
        self.base = save_base(folder / "base", self.tensors)
        self.publisher = Publisher(lambda: self.tensors.items(), url, self.base, fold=False)  # type: ignore[arg-type]
        self.pauses = Pauses()
        self.services: dict[str, ReceiverService] = {}
        self.lasting: Callable[[], None] = lambda: None
        self._first = {name: tensor.to(torch.bfloat16) for name, tensor in self.tensors.items()}

    def model(self) -> FusedModel:
        """One that holds version 0."""
        model = FusedModel()
        model.load_weights(self._first.items())
        return model

    def serve(self, name: str, **settings: Any) -> ReceiverService:
        """Start a server that follows the run."""
        port = RecordedPort(self.model(), name, self.pauses, lambda: self.lasting())
        chosen = {"bucket": self.url, "poll_seconds": POLL, "lease_seconds": 3, "receiver_id": name}
        # Orders of an earlier test at the same place must not count.
        chosen |= {"state_dir": self._folder / f"state-{name}", **settings}
        service = ReceiverService(port, Settings.model_validate(chosen))
        self.services[name] = service
        service.start()
        return service

    def train(self, step: int) -> None:
        """Publish a version."""
        generator = torch.Generator().manual_seed(step)
        for tensor in self.tensors.values():
            chosen = torch.rand(tensor.shape, generator=generator) < 0.05
            tensor += chosen * 1e-3 * torch.randn(tensor.shape, generator=generator)
        self.publisher.publish(step=step, wait=True)
        self.publisher.flush()

    def end(self, name: str) -> None:
        """Stop a server, as it does when its process ends."""
        service = self.services.pop(name)
        service.stop()
        service.join(WAIT)


@contextmanager
def rollouts(url: str, folder: Path) -> Iterator[Rollouts]:
    """A run and its servers, ended with the block."""
    fleet = Rollouts(url, folder)
    try:
        yield fleet
    finally:
        for service in fleet.services.values():
            service.stop()
        for service in fleet.services.values():
            service.join(WAIT)
        fleet.publisher.close()
