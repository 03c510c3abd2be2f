"""A fleet in one process: receivers on plain modules that follow one run, and a record of who paused."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from tests.support.modules import FusedModel, ModulePort
from tests.support.world import World
from vllm_delta_sync.engine.follow.service import ReceiverService
from vllm_delta_sync.settings import Settings

WAIT = 120.0


POLL = 0.05


class RecordedPort(ModulePort):
    """An engine that notes its name in ``pauses`` at each pause, which lasts at least as long as ``lasting``."""

    def __init__(self, model: FusedModel, name: str, pauses: list[str], lasting: Callable[[], object]) -> None:
        super().__init__(model)
        self._name, self._pauses, self._lasting = name, pauses, lasting

    def pause(self) -> None:
        super().pause()
        self._pauses.append(self._name)
        self._lasting()


class Rollouts:
    """A world, whose publisher any number of servers follow by name.

    Attributes:
        pauses: names of servers, in the order in which they paused. lasting: called in each pause.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self.world = World(folder, url=url)
        self.url, self.publisher, self.train = self.world.url, self.world.publisher, self.world.train
        self._folder = folder
        self.pauses: list[str] = []
        self.services: dict[str, ReceiverService] = {}
        self.lasting: Callable[[], object] = lambda: None

    def serve(self, name: str, **settings: Any) -> ReceiverService:
        """Start a server on the base, which follows the run."""
        model = FusedModel()
        model.load_weights(load_file(self._folder / "base" / "model.safetensors").items())
        port = RecordedPort(model, name, self.pauses, lambda: self.lasting())
        chosen = {"bucket": self.url, "poll_seconds": POLL, "heartbeat_seconds": 3, "receiver_id": name}
        # Orders of an earlier test at the same place must not count.
        chosen |= {"state_dir": self._folder / f"state-{name}", **settings}
        service = ReceiverService(port, Settings.model_validate(chosen))
        self.services[name] = service
        service.start()
        return service

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
