"""A model in training, the run that it publishes, and servers that follow it: what tests with real vLLM start from."""

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psutil  # type: ignore[import-untyped]

from tests.e2e import warm
from tests.e2e.servers import PATIENCE_SECONDS, Server, beside, complaints, delta_sync_serve, serving
from tests.support.answers import closed_port
from tests.support.faults.inject import Faults
from tests.support.tiny import make_model, save_checkpoint, train_steps
from trainer_side import Publisher
from vllm_delta_sync import open_run


class World:
    """A trainer in this process, and its run.

    Attributes:
        base: checkpoint of version 0. version: the newest. faults: of the servers that it starts.
    """

    def __init__(
        self,
        root: Path,
        family: str = "qwen3",
        *,
        rate: float = 3e-5,
        sizes: Mapping[str, int] | None = None,
        publishes: bool = True,
        **publishing: Any,
    ) -> None:
        """``rate``: of learning. ``sizes``: of the model, see ``make_model``. ``publishes``: from now on, not from
        ``begin`` on. The rest is for the publisher."""
        self.root, self.family = root, family
        self.url = str(root / "run")
        self.model = make_model(family, seed=5, **(sizes or {}))
        self.base = save_checkpoint(self.model, root / "base")
        self.faults = Faults(root)
        self.version = 0
        self._steps = train_steps(self.model, lr=rate)
        self._publishing = publishing
        self._stack = ExitStack()
        self._begun = False
        if publishes:
            self.begin()

    def begin(self) -> None:
        """Start the run, or take it over."""
        self.publisher = self._stack.enter_context(
            Publisher(self.model, bucket=self.url, base=self.base, **self._publishing)
        )

    def publish(self) -> int:
        next(self._steps)
        result = self.publisher.publish(step=self.version + 1, wait=True)
        self.publisher.flush()
        assert result.version is not None
        self.version = result.version
        return self.version

    def save(self) -> Path:
        """Checkpoint of the newest version, as the trainer would save it."""
        folder = self.root / f"v{self.version}"
        return folder if folder.exists() else save_checkpoint(self.model, folder)

    def die_in_a_publish(self) -> None:
        """Another process takes the run over, and is killed after a version's objects and before its manifest."""
        self._stack.close()
        options = json.dumps({"bucket": self.url, "base": str(self.base)})
        command = [sys.executable, "-m", "tests.e2e.trainer", self.family, options, "die"]
        process = warm.start(command, self.root / "trainer.log", {})
        assert process.wait(300) == -signal.SIGKILL, (self.root / "trainer.log").read_text()

    def serve(
        self, *flags: str, environment: Mapping[str, str] | None = None, prefix: tuple[str, ...] = ()
    ) -> AbstractContextManager[Server]:
        """A server of this run, which keeps its state here. With a ``prefix`` of its command it starts cold."""
        command = [*prefix, *delta_sync_serve(self.base, "--bucket", self.url, *flags)]
        settings = {
            **self.faults.environment,
            "VLLM_SERVER_DEV_MODE": "1",
            "DELTA_SYNC_STATE_DIR": str(self.root / "state"),
            **(environment or {}),
        }
        return serving(self.root / "server.log", command, settings, cold=bool(prefix))

    def close(self) -> None:
        self._stack.close()


class Follower:
    """A server that tests share: each gets it as it is wanted, by ``reset``, and may leave it as it likes."""

    FLAGS = (
        *("--poll-seconds", "0.2"),
        *("--pause-seconds", "5"),
        *("--min-version-seconds", "3"),
        *("--max-lag", "5"),
        *("--undo-bytes", "12000000"),
        "--enable-scale-out",
    )

    def __init__(self, root: Path) -> None:
        notice = f"tcp://127.0.0.1:{closed_port()}"
        self.world = World(root, publishes=False, notice=notice)
        self._flags = (*self.FLAGS, "--notice", notice)
        self._stack = ExitStack()
        try:
            self.start()
            self.server.wait_error("not_found")
            self.world.begin()
        except BaseException:
            self.close()
            raise

    def start(self, *flags: str) -> Server:
        self._stack.close()
        self.world.faults.disarm()
        server = self._stack.enter_context(self.world.serve(*self._flags, *flags))
        self.server = server
        return server

    def reset(self) -> None:
        """It runs, serves the head, and is free to follow."""
        self.world.faults.disarm()
        if self.server.process.poll() is not None:
            self.start()
        self.server.post("/resume")
        self.server.post("/delta_sync/target", {"target": "head"})
        self.server.post("/delta_sync/release")
        self.server.wait_served(self.world.version)
        self.server.wait_idle()
        self.server.skip_log()

    def expect_quiet_stop(self) -> None:
        """End the server in the middle of polls and commits, and while a client waits for a version, as its supervisor
        does: it ends in order, and says no more than that."""
        self.reset()

        def publish(ended: threading.Event) -> None:
            while not ended.is_set():
                self.world.publish()

        with beside(publish):
            self.server.wait_served(self.world.version + 2)
            with waiting(self.server):
                self.server.process.send_signal(signal.SIGTERM)
                # Not its exit status: vLLM looks up who has its port, which fails if that is its ended engine.
                self.server.process.wait(120)
        said = self.server.logged()
        assert complaints(said) == []
        assert "no longer following: the engine has stopped" in said

    def close(self) -> None:
        self._stack.close()
        self.world.close()


def expect_served(world: World, server: Server, version: int) -> None:
    """The version is served, bit for bit, by a server that answers with it."""
    status = server.status()
    assert status["served"]["version"] == version, status
    assert status["served"]["fingerprint"] == open_run(world.url).manifest(version).fingerprint
    assert server.post("/delta_sync/verify").json()["verdict"] is True
    assert server.traced()["spans"] == [{"index": 0, "version": version, "start": 0, "end": 5}]


@contextmanager
def waiting(server: Server) -> Iterator[None]:
    """A client waits for a version; the server ends in here, and tells it to ask another one."""
    with closing(HTTPConnection(urlsplit(server.url).netloc, timeout=PATIENCE_SECONDS)) as client:
        client.request("GET", f"/delta_sync/wait?version={10**6}&timeout=240")
        # The server has this request before it answers a later one. One that it had not read would get no answer.
        server.status()
        yield
        answer = client.getresponse()
        assert (answer.status, json.load(answer)["error"]["kind"]) == (409, "unreachable")


def kill(server: Server) -> None:
    """SIGKILL to the API server; every process of it is gone soon."""
    with no_process_left(server):
        server.process.send_signal(signal.SIGKILL)


@contextmanager
def no_process_left(server: Server) -> Iterator[None]:
    """The server ends in here, and no process of it outlives that."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    yield
    assert psutil.wait_procs(children, timeout=120)[1] == []


def ranks_bound(count: int) -> dict[str, str]:
    """vLLM wants one entry for each rank of a machine."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % (os.cpu_count() or 1)) for rank in range(count))}
