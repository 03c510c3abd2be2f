"""Ends of the notice channel for tests: in this process, and as processes of their own that can be stopped and killed.

``python -m tests.support.notices listen ADDRESS RUN`` prints each version heard, with two more arguments, CURVE keys,
by them; ``python -m tests.support.notices announce ADDRESS RUN`` announces each version that it reads.
"""

import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, curve

DIGEST = "ab" * 32
RUN = "0123456789abcdef" * 2
LOOPBACK = "tcp://127.0.0.1:*"
DEADLINE_SECONDS = 120.0
"""After which a test says that something hangs."""


def hear(subscriber: NoticeSubscriber, version: int) -> None:
    """Listen until that version is announced."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    heard = None
    while time.monotonic() < deadline:
        notice = subscriber.receive(0.05)
        heard = heard if notice is None else notice.version
        if heard == version:
            return
    raise AssertionError(f"no notice of version {version} within {DEADLINE_SECONDS} s, the last was of {heard}")


def hears_nothing(subscriber: NoticeSubscriber, seconds: float = 2.5) -> None:
    """Listen for longer than two repetitions, in vain."""
    heard = subscriber.receive(seconds)
    assert heard is None, heard


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


class Keys:
    """CURVE key pairs in a directory, and allow-lists beside it."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def make(self, name: str) -> Path:
        """Path of a new secret certificate; the public one is PATH.pub."""
        path = self.root / name
        curve.generate(path)
        return path

    def allow(self, where: str, *paths: Path) -> Path:
        """A directory of the public certificates of some keys."""
        folder = self.root / where
        folder.mkdir(exist_ok=True)
        for path in paths:
            (folder / f"{path.name}.pub").write_bytes(public(path).read_bytes())
        return folder


def public(path: Path) -> Path:
    return path.with_name(f"{path.name}.pub")


class Process:
    """A process whose lines can be waited for."""

    def __init__(self, *arguments: str) -> None:
        self.running = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.running.stdout is not None
        for line in self.running.stdout:
            self._lines.put(line.strip())

    def line(self, seconds: float = DEADLINE_SECONDS) -> str:
        """The next line; queue.Empty if none comes in time."""
        return self._lines.get(timeout=seconds)

    def hear(self, wanted: str) -> None:
        deadline = time.monotonic() + DEADLINE_SECONDS
        while self.line(max(0.01, deadline - time.monotonic())) != wanted:
            pass

    def write(self, line: str) -> None:
        assert self.running.stdin is not None
        print(line, file=self.running.stdin, flush=True)

    def end(self) -> None:
        self.running.kill()
        self.running.wait(DEADLINE_SECONDS)
        self._reader.join(DEADLINE_SECONDS)
        for stream in (self.running.stdin, self.running.stdout):
            if stream is not None:
                stream.close()


@contextmanager
def process(*arguments: str) -> Iterator[Process]:
    started = Process(*arguments)
    try:
        yield started
    finally:
        started.end()


class BrokerProcess(Process):
    """``delta-sync broker``, bound."""

    def __init__(self, publishers: str = LOOPBACK, subscribers: str = LOOPBACK, flags: Sequence[str] = ()) -> None:
        command = ("broker", "--publishers", publishers, "--subscribers", subscribers, "--json", *flags)
        super().__init__("vllm_delta_sync.cli", *command)
        bound = json.loads(self.line())["data"]
        self.publishers: str = bound["publishers"]
        self.subscribers: str = bound["subscribers"]


def _listen(address: str, run: str, *keys: str) -> None:
    subscriber = NoticeSubscriber(address, run, curve.client_keys(*map(Path, keys)) if keys else None)
    print("ready", flush=True)
    last = None
    while True:
        notice = subscriber.receive(60)
        if notice is not None and notice.version != last:
            last = notice.version
            print(last, flush=True)


def _announce(address: str, run: str) -> None:
    publisher = NoticePublisher(address)
    print(publisher.address, flush=True)
    for line in sys.stdin:
        publisher.send(Notice(run, int(line), DIGEST))


if __name__ == "__main__":
    if sys.argv[1] == "listen":
        _listen(*sys.argv[2:])
    else:
        _announce(*sys.argv[2:])
