"""Latency of a notice, from ``send`` at the trainer to ``receive`` at the server, on one machine.

Publisher, broker and subscriber are processes of their own, connected over TCP on the loopback interface. Notices are
sent one at a time: each when the one before has arrived. Both ends read ``time.monotonic``, which on Linux is one clock
for the whole machine. A notice that is lost counts with the time that its repetition takes.
"""

import json
import multiprocessing
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.common.rows import Row, parse, row, write
from benchmarks.common.tables import grid
from vllm_delta_sync.notice import Notice, NoticePublisher, NoticeSubscriber, curve
from vllm_delta_sync.trust import Keyring, keys
from vllm_delta_sync.trust.keys import PUBLIC_SUFFIX

BENCH = "notice"
RUN = "0" * 32
LOOPBACK = "tcp://127.0.0.1:*"
WARM = 50
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """A way from the trainer to the server."""

    name: str
    broker: bool = False
    encrypted: bool = False
    signed: bool = False


CASES = (
    Case("direct"),
    Case("direct, CURVE", encrypted=True),
    Case("broker", broker=True),
    Case("broker, CURVE", broker=True, encrypted=True),
    Case("broker, CURVE, signed", broker=True, encrypted=True, signed=True),
)

LEFT_OUT = ("direct, CURVE", "broker")
"""Cases that the page leaves out, which has to stay short."""


@dataclass(frozen=True)
class Key:
    """Key files of one process."""

    own: Path
    public: Path

    @classmethod
    def make(cls, path: Path) -> "Key":
        curve.generate(path)
        return cls(path, path.with_name(path.name + PUBLIC_SUFFIX))


def announce(pipe: Connection, address: str, own: Path | None, others: Path | None, signing_key: Path | None) -> None:
    """The trainer's process: sends a notice for each version that comes through the pipe."""
    keyring = None if signing_key is None else Keyring.load(signing_key=signing_key)
    publisher = NoticePublisher(address, own, others, keyring)
    pipe.send(publisher.address)
    while (version := pipe.recv()) is not None:
        publisher.send(Notice(RUN, version, str(time.monotonic_ns())))
    publisher.close()


def listen(pipe: Connection, address: str, own: Path | None, server: Path | None, trusted: Path | None) -> None:
    """The server's process: answers each new version with the nanoseconds that its notice took."""
    keyring = None if trusted is None else Keyring.load(str(trusted))
    subscriber = NoticeSubscriber(address, RUN, curve.client_keys(own, server), keyring)
    newest = 0
    while True:
        notice = subscriber.receive(DEADLINE_SECONDS)
        now = time.monotonic_ns()
        if notice is None:
            return
        if notice.version > newest:
            newest = notice.version
            pipe.send(now - int(notice.manifest))


@contextmanager
def process(target: object, *arguments: object) -> Iterator[Connection]:
    """Run a function in a process of its own; the pipe to it."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    running = context.Process(target=target, args=(theirs, *arguments), daemon=True)  # type: ignore[arg-type]
    running.start()
    theirs.close()
    try:
        yield ours
    finally:
        running.kill()
        running.join()
        ours.close()


@contextmanager
def broker(key: Key | None, publisher: Key, subscriber: Key) -> Iterator[tuple[str, str]]:
    """``delta-sync broker``: the addresses for publishers and for subscribers."""
    command = [sys.executable, "-m", "vllm_delta_sync.cli", "broker", "--json"]
    command += ["--publishers", LOOPBACK, "--subscribers", LOOPBACK]
    if key is not None:
        command += ["--key", str(key.own)]
        command += ["--allowed-publishers", str(publisher.public), "--allowed-subscribers", str(subscriber.public)]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert running.stdout is not None
        bound = json.loads(running.stdout.readline())["data"]
        yield bound["publishers"], bound["subscribers"]
    finally:
        running.terminate()
        running.wait()


def latencies(case: Case, count: int, folder: Path) -> list[float]:
    """Milliseconds that each of ``count`` notices took."""
    trainer, middle, server = (Key.make(folder / name) for name in ("trainer", "broker", "server"))
    signing = folder / "signing"
    keys.generate(signing)
    with ExitStack() as stack:
        bind = LOOPBACK
        hub: str | None = None
        if case.broker:
            sources, hub = stack.enter_context(broker(middle if case.encrypted else None, trainer, server))
            bind = f"connect:{sources}"
        others = middle if case.broker else server
        pair = (trainer.own, others.public) if case.encrypted else (None, None)
        announcer = stack.enter_context(process(announce, bind, *pair, signing if case.signed else None))
        address = announcer.recv()
        entry = middle if case.broker else trainer
        pair = (server.own, entry.public) if case.encrypted else (None, None)
        trusted = folder / "signing.pub" if case.signed else None
        listener = stack.enter_context(process(listen, hub or address, *pair, trusted))
        found = []
        for version in range(1, WARM + count + 1):
            announcer.send(version)
            if not listener.poll(DEADLINE_SECONDS):
                raise TimeoutError(f"{case.name}: notice {version} did not arrive within {DEADLINE_SECONDS} s")
            found.append(listener.recv() / 1e6)
        return found[WARM:]


def tables(rows: Sequence[Row]) -> list[str]:
    """Latencies, and those of plain notices over them."""
    shown = [item for item in rows if item["case"] not in LEFT_OUT]
    return grid("latency", shown, ("p50", "p99", "longest", "/ direct (p50)"))


def main(arguments: list[str] | None = None) -> None:
    options = parse(BENCH, __doc__ or "", arguments, minutes=2)
    count = 1000 if options.quick else 10_000
    rows: list[Row] = []
    direct = 0.0
    for case in CASES:
        with tempfile.TemporaryDirectory() as folder:
            found = latencies(case, count, Path(folder))
        cuts = statistics.quantiles(found, n=100)
        direct = direct or cuts[49]
        rows += [row(BENCH, case.name, "p50", cuts[49], "ms"), row(BENCH, case.name, "p99", cuts[98], "ms")]
        rows.append(row(BENCH, case.name, "longest", max(found), "ms"))
        if case != CASES[0]:
            rows.append(row(BENCH, case.name, "ratio", direct / cuts[49], "x", "direct (p50)"))
    write(options.json, rows)


if __name__ == "__main__":
    main()
