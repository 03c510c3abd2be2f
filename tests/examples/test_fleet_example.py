"""The fleet example's own parts, without vLLM: links, the S3 server behind them, the noisy trainer, tables, verdict."""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from examples.demo.processes import DemoError
from examples.fleet import store, tables
from examples.fleet.__main__ import parse_options
from examples.fleet.links import Links
from examples.fleet.noise import NoisyAdam
from examples.fleet.orchestrate import difference
from examples.fleet.output import MARKER, prepare_output
from examples.fleet.probe import far_end, measure
from examples.fleet.record import Arrival, Change, Full, Record
from examples.fleet.settings import SHARE, SIZES, Options
from examples.fleet.shaping import FIRST_WINDOW_BYTES, IDLE_SECONDS, Window
from tests.support.running import mentioning
from vllm_delta_sync.bucket import StoreOptions, open_bucket

RATE = 40e6
ROUND_TRIP = 0.04
SECONDS = 60
OPTIONS = Options("full", 2, 1, 100.0, 50.0, False, Path("out"), 0)


@pytest.fixture
def links(tmp_path: Path) -> Iterator[Links]:
    with Links(RATE, ROUND_TRIP, tmp_path / "links.log") as links:
        yield links


@contextmanager
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets, connection by connection, until its end."""

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                while data := connection.recv(1 << 16):
                    connection.sendall(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=serve, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), SECONDS)


def send_all(connection: socket.socket, data: bytes) -> None:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)


def read_all(connection: socket.socket) -> bytes:
    data = b""
    while piece := connection.recv(1 << 16):
        data += piece
    return data


def test_a_link_has_the_round_trip_and_no_more_than_the_rate(links: Links) -> None:
    with far_end() as port:
        found = measure(links, "a", port, RATE)
    # A busy machine makes a link slower, and never faster.
    assert found.round_trip_ms >= 1e3 * ROUND_TRIP
    assert RATE / 20 < 1e6 * found.up_mbit_s < 1.1 * RATE
    assert RATE / 20 < 1e6 * found.down_mbit_s < 1.1 * RATE


def test_connections_share_a_link_and_each_link_has_its_own_rate(links: Links) -> None:
    size = int(RATE / 8 / 4)
    with far_end() as port:
        one, other = links.forward("a", port), links.forward("b", port)
        began = time.monotonic()
        threads = [threading.Thread(target=download, args=(entry, size)) for entry in (one, one, other)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    assert time.monotonic() - began > 2 * size / (RATE / 8)
    passed = links.passed()
    assert passed["a"]["down"] == 2 * passed["b"]["down"] == 2 * (size + 1)


def download(port: int, size: int) -> None:
    with connect(port) as connection:
        connection.sendall((0).to_bytes(8, "little") + size.to_bytes(8, "little"))
        left = size + 1
        while left:
            left -= len(connection.recv(min(left, 1 << 16)))


def test_bytes_come_whole_and_in_order_and_an_end_is_passed_on(links: Links) -> None:
    sent = os.urandom(1_000_003)
    with echo() as port, connect(links.forward("a", port)) as connection:
        sending = threading.Thread(target=send_all, args=(connection, sent))
        sending.start()
        assert read_all(connection) == sent
        sending.join(SECONDS)
    assert links.passed() == {"a": {"up": len(sent), "down": len(sent)}}


def test_a_new_connection_pays_a_round_trip_of_its_own(links: Links) -> None:
    with echo() as port:
        entry = links.forward("a", port)
        began = time.monotonic()
        with connect(entry) as connection:
            connection.sendall(b"x")
            assert connection.recv(1) == b"x"
    assert time.monotonic() - began >= 2 * ROUND_TRIP


def test_with_slow_start_a_connection_takes_a_round_trip_for_each_doubling(tmp_path: Path) -> None:
    sizes = (FIRST_WINDOW_BYTES, 31 * FIRST_WINDOW_BYTES)
    took = []
    with Links(1e9, ROUND_TRIP, tmp_path / "links.log", slow_start=True) as links, far_end() as port:
        for size in sizes:
            began = time.monotonic()
            download(links.forward("a", port), size)
            took.append(time.monotonic() - began)
    # 1 + 2 + 4 + 8 + 16 windows, and one byte more that the far end adds.
    assert took[0] >= 2 * ROUND_TRIP
    assert took[1] >= 6 * ROUND_TRIP


def test_slow_start_begins_again_after_a_pause() -> None:
    window = Window()
    window.send(FIRST_WINDOW_BYTES, 0.0)
    assert asyncio.run(window.room()) == 2 * FIRST_WINDOW_BYTES
    window.send(1, time.monotonic() + SECONDS)
    assert asyncio.run(window.room()) == 2 * FIRST_WINDOW_BYTES - 1
    rested = Window()
    rested.send(FIRST_WINDOW_BYTES, 0.0)
    time.sleep(IDLE_SECONDS + 0.1)
    rested.send(1, time.monotonic() + SECONDS)
    assert asyncio.run(rested.room()) == FIRST_WINDOW_BYTES - 1


def test_inward_traffic_comes_down_the_link_of_who_is_reached(links: Links) -> None:
    with echo() as port:
        trainer = links.forward("trainer", port, inward=True)
        with connect(links.forward("replica", trainer)) as connection:
            send_all(connection, b"abc")
            assert read_all(connection) == b"abc"
    assert links.passed() == {"trainer": {"up": 3, "down": 3}, "replica": {"up": 3, "down": 3}}


def test_who_is_not_there_ends_the_connection(links: Links) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with connect(links.forward("a", port)) as connection:
        assert connection.recv(1) == b""


def test_links_that_are_gone_say_so(links: Links) -> None:
    links.child.ask_to_end()
    links.child.wait(SECONDS)
    with pytest.raises(DemoError, match="the process of the links is gone"):
        links.passed()


def test_the_store_behind_a_link_keeps_connections(
    tmp_path: Path, links: Links, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that follow each other at once, and a body that is refused, leave the connection in order."""
    with store.serving(tmp_path / "store", tmp_path / "store.log") as server:
        url = server.create_bucket("runs") + "/run"
        counted = Connections(server.port)
        for name, value in store.through(server, counted.port).items():
            monkeypatch.setenv(name, value)
        with open_bucket(url, StoreOptions(store_connections=1)) as bucket:
            for number in range(20):
                bucket.put(f"k{number % 3}", bytes([number]) * 1000)
                assert bucket.get(f"k{number % 3}") == bytes([number]) * 1000
        assert counted.made < 10
        counted.close()


class Connections:
    """Passes connections on as they are, and counts them."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.made = 0
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.made += 1
            far = connect(self._target)
            threading.Thread(target=self._pass, args=(client, far), daemon=True).start()
            threading.Thread(target=self._pass, args=(far, client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)
        except OSError:
            sink.close()


def test_about_one_percent_changes_with_every_step() -> None:
    adam = NoisyAdam(SIZES["small"], 3, SHARE)
    parameters = list(adam.model.parameters())
    for _ in range(3):
        before = [parameter.detach().view(torch.int16).clone() for parameter in parameters]
        adam.step()
        changed = [
            int((parameter.detach().view(torch.int16) != old).sum())
            for parameter, old in zip(parameters, before, strict=True)
        ]
        share = sum(changed) / sum(parameter.numel() for parameter in parameters)
        assert 0.7 * SHARE < share < 1.4 * SHARE


def test_the_full_model_has_a_hundred_million_parameters() -> None:
    from transformers import Qwen3ForCausalLM

    from examples.fleet.noise import configuration

    with torch.device("meta"):
        model = Qwen3ForCausalLM(configuration(SIZES["full"]))
    assert sum(parameter.numel() for parameter in model.parameters()) > 100_000_000


def record(full_seconds: float = 30.0) -> Record:
    """Two versions on two replicas, fresh after 1, 1, 1 and 2 s; then one while a server started."""
    made = Record(OPTIONS)
    passed = {"trainer": {"up": 100, "down": 0}, "a": {"up": 1, "down": 200}, "b": {"up": 1, "down": 200}}
    for version, scene, late in ((1, "follow", 1.0), (2, "follow", 2.0), (3, "restart", 9.0)):
        fresh = {"a": 1.0, "b": late}
        seconds = {"diff": 0.125, "encode": 0.25, "upload": 9.0, "total": 9.375}
        timings = {
            name: {"fetch": 125.0, "verify": 0.0, "decode": 62.5, "pause": 31.25, "commit": 9.0} for name in fresh
        }
        made.changes.append(Change(scene, version, 10, 1000, 90, seconds, fresh, passed, timings))
    made.arrivals.append(Arrival("b", "killed, started again", 3, 12.0, 400))
    made.full = Full(2000, 0.5, full_seconds / 2, full_seconds / 2, {"a": {"up": 5, "down": 2200}})
    made.full_replica = "a"
    made.fingerprints = {"the run's head": "f", "a": "f", "b": "f"}
    made.served = {"a": 3, "b": 3}
    made.answers = {"a": [[[1, 2], [-0.5, -0.25]]], "b": [[[1, 2], [-0.5, -0.25]]]}
    return made


def test_verdict_of_a_run_that_holds() -> None:
    assert record().claims(20.0) == dict.fromkeys(
        ("weights_exact", "all_fresh", "answers_equal", "ratio_reached"), True
    )
    assert "ratio_reached" not in record(full_seconds=2.0).claims(None)


def test_each_claim_can_fail() -> None:
    other = record()
    other.fingerprints["b"] = "g"
    other.served["a"] = 2
    other.answers["b"] = [[[1, 2], [-0.5, -0.125]]]
    assert set(other.claims(20.0).values()) == {False, True}
    assert other.claims(31.0) == dict.fromkeys(("weights_exact", "all_fresh", "answers_equal", "ratio_reached"), False)
    nothing = Record(OPTIONS).claims(None)
    assert nothing == dict.fromkeys(("weights_exact", "all_fresh", "answers_equal"), False)


def test_a_fingerprint_that_nobody_else_has_proves_nothing() -> None:
    alone = record()
    alone.fingerprints = {"a": "f", "b": "f"}
    assert not alone.claims(None)["weights_exact"]


def test_ratios_leave_out_what_was_disturbed() -> None:
    summary = record().summary(20.0, 5.0)
    assert summary["fresh_seconds"] == {"median": 1.0, "longest": 2.0}
    assert summary["ratio"] == {"time": 30.0, "bytes": 11.0, "overlapped": 15.0}
    assert summary["changed_share"] == 0.01
    assert json.loads(json.dumps(summary)) == summary


def test_phases_add_up_to_the_time_to_fresh() -> None:
    made = record()
    made.changes[1].fresh["b"] = 1.0
    phases = made.phases()
    assert sum(phases.values()) == 1.0
    assert phases["pause"] == 0.03125
    assert phases["between"] == 1.0 - 0.125 - 0.25 - 0.125 - 0.0625 - 0.03125


def test_tables_show_every_version_and_who_did_not_follow() -> None:
    made = record()
    del made.changes[1].fresh["b"]
    rows = tables.versions(made)
    assert rows[0][-2:] == ["a: s, down", "b: s, down"]
    assert [row[-1] for row in rows[1:]] == ["1.00, 0.2 kB", "–", "9.00, 0.2 kB"]
    text = tables.markdown(made)
    assert "| full weights / median version | 11 × | 30.0 × |" in text
    assert "| b | killed, started again | 3 | 12.0 | 0.4 kB |" in text


def test_difference_counts_links_that_came_later() -> None:
    before = {"a": {"up": 1, "down": 2}}
    after = {"a": {"up": 5, "down": 2}, "b": {"up": 3, "down": 0}}
    assert difference(after, before) == {"a": {"up": 4, "down": 0}, "b": {"up": 3, "down": 0}}


def test_output_is_made_anew_and_nothing_foreign_is_touched(tmp_path: Path) -> None:
    out = prepare_output(tmp_path / "out")
    (out / "summary.json").write_text("old")
    assert [file.name for file in prepare_output(out).iterdir()] == [MARKER]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    with pytest.raises(DemoError, match="holds files that the example did not write"):
        prepare_output(tmp_path / "mine")
    with pytest.raises(DemoError, match="is a file"):
        prepare_output(tmp_path / "mine" / "file")


@pytest.mark.parametrize(
    "arguments", [["--replicas", "0"], ["--mbit", "nan"], ["--size", "huge"], ["--versions", "1.5"]]
)
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_options(arguments)
    assert caught.value.code == 2


def test_help_says_what_it_does() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "examples.fleet", "--help"], capture_output=True, text=True, timeout=SECONDS, check=True
    )
    assert "--round-trip-ms" in done.stdout
    assert "Exit status" in done.stdout


def test_an_interrupt_ends_every_process(tmp_path: Path) -> None:
    out = tmp_path / "out"
    # A background shell takes SIGINT away from what it starts.
    program = (
        "import runpy, signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "runpy.run_module('examples.fleet', run_name='__main__')"
    )
    command = [sys.executable, "-c", program, "--size", "small", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "making the model" in line:
                break
        assert mentioning(out) > {process.pid}
        process.send_signal(signal.SIGINT)
        said = process.stdout.read()
        assert process.wait(SECONDS) == 130, said
    assert "interrupted; all processes have ended" in said
    assert mentioning(out) == set()
