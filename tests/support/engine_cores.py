"""Engine cores without vLLM: what a pause watchdog needs of one, the utilities that a server calls, and its client."""

import queue
from collections.abc import Callable
from concurrent.futures import Future
from enum import Enum
from types import SimpleNamespace
from typing import Any

from tests.support.modules import ModulePort
from vllm_delta_sync.engine.compat.caches import WeightCaches
from vllm_delta_sync.engine.core.pause_watchdog import PauseWatchdog
from vllm_delta_sync.engine.protocol import decode_request


class PauseState(Enum):
    UNPAUSED = 0
    PAUSED_NEW = 1
    PAUSED_ALL = 2


class Scheduler:
    max_num_encoder_input_tokens = 0
    connector = None

    def __init__(self) -> None:
        self.pause_state = PauseState.UNPAUSED

    def set_pause_state(self, state: PauseState) -> None:
        self.pause_state = state


class EngineCore:
    """What a watchdog uses of vLLM's engine core.

    Attributes:
        busy: whether a pause is complete only when ``stop`` is called. labels: all that its outputs were given.
        sleeping_tags: what of its memory sleeps.
    """

    def __init__(self) -> None:
        self.busy = False
        self.labels: list[str] = []
        self.sleeping_tags: set[str] = set()
        self.scheduler = Scheduler()
        self.model_executor = self
        self.input_queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._idle_state_callbacks: list[Any] = []

    @property
    def state(self) -> str:
        return self.scheduler.pause_state.name

    def pause_scheduler(self, mode: str, clear_cache: bool) -> Any:
        self.scheduler.set_pause_state(PauseState.PAUSED_ALL if mode == "keep" else PauseState.PAUSED_NEW)
        if not self.busy:
            return None
        future: Future[None] = Future()
        self._idle_state_callbacks.append(lambda: future.set_result(None))
        return future

    def resume_scheduler(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def stop(self) -> None:
        """Complete every pause that waits for this."""
        self.busy = False
        while self._idle_state_callbacks:
            self._idle_state_callbacks.pop()()

    def set_weight_version(self, label: str) -> None:
        self.labels.append(label)

    def get_weight_version(self) -> str:
        return self.labels[-1] if self.labels else "default"


class Core(EngineCore):
    """With the utilities that a server's client calls; its ranks are those of a ModulePort.

    Attributes:
        log: calls of utilities, with the operation. hook: is called before each.
    """

    def __init__(self, port: ModulePort) -> None:
        super().__init__()
        self.guard = PauseWatchdog(self, WeightCaches(self, "keep"))
        self.log: list[str] = []
        self.hook: Callable[[str, str], None] = lambda utility, method: None
        self.port = port

    def collective_rpc(self, name: str, timeout: float | None, args: tuple[bytes, int]) -> list[Any]:
        request, number = args
        return [{"call": number, "answer": self.port.serve(rank, request)} for rank in self.port.ranks]

    def utility(self, name: str, *args: Any) -> Any:
        method = decode_request(args[0]).operation if args and isinstance(args[0], bytes) else ""
        self.log.append(f"{name} {method}")
        self.hook(name, method)
        return getattr(self.guard, name.removeprefix("delta_sync_"))(*args)


class Client:
    """The client of several engine cores."""

    def __init__(self, cores: list[Core], ranks: int = 1) -> None:
        self.cores = cores
        self.core_engines = [bytes([index]) for index in range(len(cores))]
        self.engine_core = self
        self.errored = False
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))

    def shutdown(self, timeout: float | None = None) -> None: ...

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        return self.cores[engine[0]].utility(method, *args)
