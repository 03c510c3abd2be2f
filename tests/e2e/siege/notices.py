"""Somebody who reaches the broker's ports, and networks that fail."""

import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import zmq
from zmq.auth import load_certificate

from tests.e2e.servers import beside
from tests.e2e.siege.world import ATTACKS, POLL_SECONDS, Attack, Siege, attack
from tests.support.notices import process
from tests.support.proxy import TcpProxy
from vllm_delta_sync.format.base_document import dump_canonical

PORT = "notice port"
ALLOWED = "notice port, a stolen notice key"
NO_ATTACKER = "no attacker: a network that fails"
STORM = 3000


@contextmanager
def _connected(siege: Siege, port: int, name: str | None, kind: int = zmq.PUB) -> Iterator[Any]:
    """A socket to one of the broker's ports, with somebody's CURVE key or with none."""
    context = zmq.Context()
    peer = context.socket(kind)
    peer.setsockopt(zmq.LINGER, 0)
    peer.setsockopt(zmq.SNDTIMEO, 1000)
    if name is not None:
        public, secret = load_certificate(siege.folder / f"{name}.curve")
        peer.curve_publickey, peer.curve_secretkey = public, secret
        peer.curve_serverkey = load_certificate(siege.folder / "broker.curve.pub")[0]
    peer.connect(f"tcp://127.0.0.1:{port}")
    try:
        yield peer
    finally:
        peer.close(linger=0)
        context.term()


def _polls(siege: Siege) -> int:
    return int(siege.server.status()["polls"])


def _storm(siege: Siege, name: str | None) -> None:
    """Thousands of forged messages: polls of the bucket stay few, and the next honest version arrives."""
    before, started = _polls(siege), time.monotonic()
    with siege.untouched(), _connected(siege, siege.publishers, name) as peer:
        _send(peer, lambda number: _forged(siege, number))
    polls, seconds = _polls(siege) - before, time.monotonic() - started
    siege.seen.notes.append(f"{STORM} forged in {seconds:.1f} s: {polls} polls")
    assert polls <= 2 + seconds / POLL_SECONDS * 2, f"{polls} polls of the bucket in {seconds:.1f} s"


def _send(peer: Any, message: Callable[[int], list[bytes]]) -> None:
    time.sleep(0.5)
    for number in range(STORM):
        peer.send_multipart(message(number))
        if number % 100 == 0:
            time.sleep(0.05)


def _forged(siege: Siege, ahead: int) -> list[bytes]:
    body: dict[str, Any] = {"manifest": "ab" * 32, "run": siege.run_id, "version": 1000 + ahead}
    if ahead % 2:
        body["signature"] = {"key": siege.stranger.public, "value": "cd" * 64}
    return [siege.run_id.encode(), dump_canonical(body)]


for whose, who, what, outcome, name in (
    ("no key", PORT, "3,000 notices to the broker", "not passed on", None),
    ("stranger's key", PORT, "A CURVE key that is not on the list", "not passed on", "stranger"),
    ("listener's key", "a receiver's notice key", "A key that may listen only", "not passed on", "receiver"),
    ("trainer's key", ALLOWED, "Passed on, but not signed", "ignored", "publisher"),
):
    storm = partial(_storm, name=name)
    ATTACKS.append(Attack(f"forged notices, {whose}", who, what, outcome, storm, quick=name == "publisher"))


@attack("replayed notices", ALLOWED, "no polls")
def replayed(siege: Siege) -> None:
    """Signed notices of older versions."""
    with _connected(siege, siege.subscribers, "receiver", zmq.SUB) as ear:
        ear.setsockopt(zmq.SUBSCRIBE, siege.run_id.encode())
        ear.setsockopt(zmq.RCVTIMEO, 5000)
        recorded = ear.recv_multipart()
    siege.fresh()
    before = _polls(siege)
    with siege.untouched(), _connected(siege, siege.publishers, "publisher") as peer:
        _send(peer, lambda number: recorded)
    polls = _polls(siege) - before
    siege.seen.notes.append(f"{STORM} replayed: {polls} polls")
    assert polls <= 2


@attack("eavesdropper", PORT, "hear nothing")
def eavesdropper(siege: Siege) -> None:
    """Subscribers without a listed key."""
    for name in (None, "stranger"):
        with _connected(siege, siege.subscribers, name, zmq.SUB) as ear:
            ear.setsockopt(zmq.SUBSCRIBE, b"")
            ear.setsockopt(zmq.RCVTIMEO, 2500)
            siege.fresh()
            try:
                heard = ear.recv_multipart()
            except zmq.Again:
                continue
            raise AssertionError(f"{name} hears {heard}")


@attack("garbage", PORT, "dropped")
def garbage(siege: Siege) -> None:
    """300 connections that speak no ZMTP."""
    source = random.Random(1)
    for port in (siege.publishers, siege.subscribers):
        for number in range(150):
            with socket.create_connection(("127.0.0.1", port), timeout=5) as peer:
                greeting = b"\xff" + bytes(8) + b"\x7f\x03"
                peer.sendall([source.randbytes(2000), b"GET / HTTP/1.1\r\n\r\n", greeting][number % 3])


@attack("huge frames", ALLOWED, "connection closed")
def huge_frames(siege: Siege) -> None:
    """50 MB each."""
    with _connected(siege, siege.publishers, "publisher") as peer:
        time.sleep(0.3)
        for _ in range(5):
            peer.send_multipart([siege.run_id.encode(), bytes(50_000_000)])
        time.sleep(0.5)


@attack("broker killed", NO_ATTACKER, "fresh by notice")
def broker_killed(siege: Siege) -> None:
    """SIGKILL, started again."""
    siege.broker.kill()
    answer = siege.publish()
    siege.restart_broker()
    siege.wait_for(answer)


LINES = {"trainer's": "up", "server's": "down"}


def _cut(siege: Siege, line: str) -> None:
    proxy: TcpProxy = getattr(siege, line)
    proxy.cut()
    for _ in range(3):
        answer = siege.publish()
    proxy.resume()
    siege.wait_for(answer)


def _stall(siege: Siege, line: str) -> None:
    """Bytes are taken and not passed on, for some seconds and versions."""
    proxy: TcpProxy = getattr(siege, line)
    proxy.stall()
    try:
        for _ in range(4):
            answer = siege.publish()
            time.sleep(0.5)
    finally:
        proxy.resume()
    siege.wait_for(answer)


for fault, what, act in (("cut", "Three versions meanwhile", _cut), ("stalled", "Four versions meanwhile", _stall)):
    for whose, line in LINES.items():
        name = f"line {fault}, {whose}"
        ATTACKS.append(
            Attack(name, NO_ATTACKER, what, "fresh by notice", partial(act, line=line), name == "line cut, server's")
        )


@attack("throttled", NO_ATTACKER, "fresh by notice")
def throttled(siege: Siege) -> None:
    """400 bytes a second on both lines."""
    siege.up.throttle(400)
    siege.down.throttle(400)
    try:
        for _ in range(3):
            siege.publish()
    finally:
        siege.up.resume()
        siege.down.resume()
    siege.wait_for(siege.publish())


@attack("flapping", NO_ATTACKER, "fresh by notice")
def flapping(siege: Siege) -> None:
    """Lines break every 100 ms, out of order."""
    source = random.Random(2)

    def flap(ended: threading.Event) -> None:
        while not ended.is_set():
            for proxy in source.sample([siege.up, siege.down], 2):
                proxy.cut()
                ended.wait(0.05)
                proxy.resume()
            ended.wait(0.1)

    with beside(flap):
        for _ in range(4):
            answer = siege.publish()
            time.sleep(1)
    siege.wait_for(answer)


@attack("connections reset and reordered", NO_ATTACKER, "fresh by notice")
def reordered(siege: Siege) -> None:
    """RST on both lines; the next connections are held back for 2 s, so that later ones overtake them."""
    for proxy in (siege.up, siege.down):
        proxy.delay(2.0, 2)
        proxy.reset()
    for _ in range(3):
        answer = siege.publish()
        time.sleep(0.3)
    siege.up.reset()
    answer = siege.publish()
    siege.up.resume()
    siege.down.resume()
    siege.wait_for(answer)


@attack("stopped subscriber", NO_ATTACKER, "no one waits; newest on waking")
def stopped_subscriber(siege: Siege) -> None:
    """SIGSTOP over five versions."""
    keys = (str(siege.folder / "receiver.curve"), str(siege.folder / "broker.curve.pub"))
    address = f"tcp://127.0.0.1:{siege.subscribers}"
    with process("tests.support.notices", "listen", address, siege.run_id, *keys) as listener:
        listener.hear("ready")
        listener.line()
        os.kill(listener.running.pid, signal.SIGSTOP)
        for _ in range(5):
            answer = siege.fresh()
        os.kill(listener.running.pid, signal.SIGCONT)
        listener.hear(str(answer["version"]))


@attack("trainer killed", NO_ATTACKER, "fresh by notice")
def trainer_killed(siege: Siege) -> None:
    """SIGKILL, another takes over."""
    siege.trainer.kill()
    siege.restart_trainer()
    siege.fresh()


@attack("server restarted", NO_ATTACKER, "joins late")
def server_restarted(siege: Siege) -> None:
    """Two versions meanwhile."""
    siege.server_down()
    siege.publish()
    answer = siege.publish()
    siege.server_up()
    siege.wait_for(answer)
