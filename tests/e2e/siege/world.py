"""The processes under attack, and what must be true of them before, during and after."""

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.e2e.servers import Server, delta_sync_serve, serving
from tests.e2e.trainer import Child, Trainer
from tests.security.canaries import Canaries
from tests.support.answers import closed_port
from tests.support.proxy import TcpProxy
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync.admin_token import VARIABLE
from vllm_delta_sync.notice import curve
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keys import generate

POLL_SECONDS = 120.0
"""Far longer than a notice takes: what is served sooner than that came by notice."""
FRESH_SECONDS = 60.0
"""Within which a version must be served once nothing is in the way; a notice is announced again every second."""
BLOCKED_SECONDS = 10.0
"""A training step that stands still for longer counts as blocked; on an idle machine it is some milliseconds."""
FAMILY = "qwen3"


@dataclass
class Seen:
    """What an attack came to.

    Attributes:
        errors: kinds of errors that the server's status showed. answers: status codes that HTTP requests met.
        stood_still: longest that the training loop stood still, in seconds.
        fresh: seconds from the end of the fault until the newest version was served.
        notes: measured facts worth a place in the table.
    """

    errors: set[str] = field(default_factory=set)
    answers: list[int] = field(default_factory=list)
    stood_still: float = 0.0
    fresh: float = 0.0
    notes: list[str] = field(default_factory=list)


class Siege:
    """A signing trainer and a server that meet in a bucket, with a broker between them, behind a proxy on either side.

    Attributes:
        run: the bucket's directory. run_id: the run's id. publishers, subscribers: ports of the broker.
        server: vLLM. up: proxy from trainer to broker. down: from broker to server. canaries: the secrets.
        keyring: the honest key, with its private half. second: another key that the server trusts.
        trusted: files of the keys that the server trusts. seen: of the attack under way.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, cold: bool = False) -> None:
        """``cold``: the server starts as users start it."""
        self.folder, self._stack, self._cold = folder, stack, cold
        self.run = folder / "run"
        self.seen = Seen()
        self._make_keys()
        self.publishers, self.subscribers = closed_port(), closed_port()
        self.broker = self._start_broker()
        self.up = stack.enter_context(TcpProxy(self.publishers))
        self.down = stack.enter_context(TcpProxy(self.subscribers))
        self.base = save_checkpoint(make_model(FAMILY, seed=5), folder / "base")
        self.trainer = self._start_trainer()
        self._server_stack = stack.enter_context(ExitStack())
        self.server = self._start_server()
        self.server.wait_served(0)

    # Processes

    def _make_keys(self) -> None:
        self.canaries = Canaries(self.folder / "secrets")
        for name in ("publisher", "stranger"):
            curve.generate(self.folder / f"{name}.curve")
        for name, secret in (("broker", self.canaries.server_key), ("receiver", self.canaries.notice_key)):
            for suffix in ("", ".pub"):
                shutil.copy(f"{secret}{suffix}", self.folder / f"{name}.curve{suffix}")
        for group, member in (("publishers", "publisher"), ("subscribers", "receiver")):
            (self.folder / group).mkdir()
            public = self.folder / f"{member}.curve.pub"
            (self.folder / group / public.name).write_bytes(public.read_bytes())
        self.keyring = Keyring.load(None, self.canaries.signing_key)
        self.stranger = Keyring([], Ed25519PrivateKey.generate())
        generate(self.folder / "second.key")
        self.second = Keyring.load(None, self.folder / "second.key")
        self.trusted = [f"{self.canaries.signing_key}.pub", str(self.folder / "second.key.pub")]

    def _start_broker(self) -> Child:
        program = str(Path(sys.executable).with_name("delta-sync"))
        command = [
            *(program, "broker", "--json", "--key", str(self.folder / "broker.curve")),
            *("--publishers", f"tcp://127.0.0.1:{self.publishers}"),
            *("--subscribers", f"tcp://127.0.0.1:{self.subscribers}"),
            *("--allowed-publishers", str(self.folder / "publishers")),
            *("--allowed-subscribers", str(self.folder / "subscribers")),
        ]
        child = Child(command, self.folder / "broker.log")
        child.line()
        self._stack.callback(child.close)
        return child

    def restart_broker(self) -> None:
        self.broker = self._start_broker()

    def _start_trainer(self) -> Trainer:
        trainer = Trainer(
            FAMILY,
            self.folder / "trainer.log",
            bucket=str(self.run),
            base=str(self.base),
            notice=f"connect:tcp://127.0.0.1:{self.up.port}",
            notice_key=str(self.folder / "publisher.curve"),
            notice_allowed=str(self.folder / "broker.curve.pub"),
            signing_key=str(self.canaries.signing_key),
        )
        self.run_id = trainer.run
        self._stack.callback(trainer.close)
        return trainer

    def restart_trainer(self) -> None:
        self.trainer = self._start_trainer()

    def _start_server(self) -> Server:
        command = delta_sync_serve(
            self.base,
            "--bucket", str(self.run),
            "--trusted-keys", ",".join(self.trusted),
            "--state-dir", str(self.folder / "state"),
            "--notice", f"tcp://127.0.0.1:{self.down.port}",
            "--notice-key", str(self.folder / "receiver.curve"),
            "--notice-server-key", str(self.folder / "broker.curve.pub"),
            "--poll-seconds", str(POLL_SECONDS),
        )  # fmt: skip
        environment = {VARIABLE: self.canaries.token, "VLLM_SERVER_DEV_MODE": "1", "VLLM_LOGGING_LEVEL": "DEBUG"}
        log = self.folder / "server.log"
        return self._server_stack.enter_context(serving(log, command, environment, cold=self._cold))

    def server_down(self) -> None:
        self._server_stack.close()

    def server_up(self) -> None:
        self.server = self._start_server()

    def restart_server(self) -> None:
        self.server_down()
        self.server_up()

    # What must be true

    @property
    def admin(self) -> dict[str, str]:
        """Headers of an honest operator."""
        return {"Authorization": f"Bearer {self.canaries.token}"}

    def post(self, path: str, body: Any = None) -> int:
        """An honest operator's request; the status code."""
        return self.server.post(path, body, headers=self.admin).status_code

    def look(self) -> None:
        """Have the server look into the bucket now, and note what error it shows."""
        self.post("/delta_sync/sync")
        self.note_error()

    def note_error(self) -> None:
        error = self.server.status()["last_error"]
        if error is not None:
            self.seen.errors.add(error["kind"])

    def publish(self) -> dict[str, Any]:
        answer = self.trainer.step()
        self.seen.stood_still = max(self.seen.stood_still, answer["seconds"])
        assert answer["seconds"] < BLOCKED_SECONDS, f"the training loop stood still for {answer['seconds']:.1f} s"
        return answer

    def weights(self) -> tuple[int | None, dict[str, str]]:
        """The version served, and SHA-256 of every runtime parameter."""
        served = self.server.status()["served"]
        return (None if served is None else served["version"]), self.server.digests()

    def wait_for(self, answer: dict[str, Any], seconds: float = FRESH_SECONDS) -> None:
        """Until a published version is served, and is what was published."""
        started = time.monotonic()
        status = self.server.wait_served(answer["version"], seconds)
        self.seen.fresh = max(self.seen.fresh, time.monotonic() - started)
        assert status["served"]["version"] == answer["version"]
        assert status["served"]["fingerprint"] == answer["fingerprint"]

    def fresh(self) -> dict[str, Any]:
        """Publish, and wait until that is served: nothing is in the way, and the server was not left behind."""
        answer = self.publish()
        self.wait_for(answer)
        return answer

    @contextmanager
    def untouched(self) -> Iterator[None]:
        """Whatever happens inside, the version served and every weight stay as they are."""
        before = self.weights()
        yield
        assert self.weights() == before

    def leaks(self) -> list[tuple[str, list[str]]]:
        """Where a secret is that has no business there: the bucket, what the server keeps, and all logs."""
        kept = [path for name in ("run", "state", "base") for path in (self.folder / name).rglob("*") if path.is_file()]
        logs = list(self.folder.glob("*.log"))
        found = [(str(path), self.canaries.in_bytes(path.read_bytes())) for path in [*kept, *logs]]
        return [(path, names) for path, names in found if names]

    def path(self, key: str) -> Path:
        return self.run / key

    @contextmanager
    def replaced(self, files: dict[str, bytes | None]) -> Iterator[None]:
        """Keys of the bucket hold other bytes, or none, inside."""
        kept = {key: self.path(key).read_bytes() if self.path(key).is_file() else None for key in files}
        try:
            _write(self.run, files)
            yield
        finally:
            _write(self.run, kept)


def _write(root: Path, files: dict[str, bytes | None]) -> None:
    for key, data in files.items():
        path = root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        if data is not None:
            part = path.with_name(path.name + ".siege")
            part.write_bytes(data)
            os.replace(part, path)


@dataclass(frozen=True)
class Attack:
    """One row of the table.

    Attributes:
        who: what the attacker has. what: what is done. outcome: what must come of it.
        act: does it, checks what it must, and undoes it. quick: `make test` tries it too, not only the full run.
    """

    name: str
    who: str
    what: str
    outcome: str
    act: Callable[[Siege], None]
    quick: bool


ATTACKS: list[Attack] = []


def attack(
    name: str, who: str, outcome: str, *, quick: bool = False
) -> Callable[[Callable[[Siege], None]], Callable[[Siege], None]]:
    """Make a function a row of the table; its docstring says what is done."""

    def register(act: Callable[[Siege], None]) -> Callable[[Siege], None]:
        ATTACKS.append(Attack(name, who, (act.__doc__ or "").rstrip("."), outcome, act, quick))
        return act

    return register


def execute_plan(siege: Siege, attack: Attack) -> Seen:
    """Do it, and check that the server comes to the newest version afterwards, and holds exactly its weights."""
    siege.seen = Seen()
    attack.act(siege)
    siege.fresh()
    assert siege.post("/delta_sync/verify") == 200
    return siege.seen
