"""The fleet benchmark without vLLM: links in userspace, the S3 server behind them, the noisy trainer, claims, rows."""

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks.common.noise import SHARE, qwen3_config
from benchmarks.common.tables import value_of
from benchmarks.fleet.__main__ import main, tables
from benchmarks.fleet.probe import Measured, exchange, far_end, measure
from benchmarks.fleet.record import Arrival, Change, Full, Record
from benchmarks.fleet.trainers import SIZES, NoisyTrainer
from tests.support.links import FIRST_WINDOW_BYTES, Links, difference
from tests.support.s3_store import serving
from vllm_delta_sync.bucket import StoreOptions, open_bucket

RATE = 40e6
ROUND_TRIP = 0.04
SECONDS = 60


@pytest.fixture
def links() -> Iterator[Links]:
    with Links(RATE, ROUND_TRIP) as links:
        yield links


@contextmanager
def echo() -> Iterator[int]:
    """Port of a server that sends back what it gets, connection by connection."""

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


def download(port: int, size: int) -> float:
    """Seconds that so many bytes, and one more, take to come."""
    with connect(port) as connection:
        return exchange(connection, 0, size)


def test_a_link_has_the_round_trip_and_no_more_than_the_rate(links: Links) -> None:
    with far_end() as port:
        found = measure(links.forward("a", port), RATE)
    # A busy machine makes a link slower, and never faster.
    assert found.round_trip_ms >= 1e3 * ROUND_TRIP
    assert RATE / 20 < 1e6 * found.up_mbit_s < 1.1 * RATE
    assert RATE / 20 < 1e6 * found.down_mbit_s < 1.1 * RATE


def test_connections_share_a_link_and_each_link_has_its_own_rate(links: Links) -> None:
    size = int(RATE / 8 / 4)
    with far_end() as port:
        one, other = links.forward("a", port), links.forward("b", port)
        began = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(download, (one, one, other), [size] * 3))
    assert time.monotonic() - began > 2 * size / (RATE / 8)
    passed = links.passed()
    assert passed["a"]["down"] == 2 * passed["b"]["down"] == 2 * (size + 1)
    assert difference(passed, {"a": passed["a"]}) == {"a": {"up": 0, "down": 0}, "b": passed["b"]}


def test_with_slow_start_a_connection_takes_a_round_trip_for_each_doubling() -> None:
    with Links(1e9, ROUND_TRIP, slow_start=True) as links, far_end() as port:
        took = [download(links.forward("a", port), size) for size in (FIRST_WINDOW_BYTES, 31 * FIRST_WINDOW_BYTES)]
    # 1 + 2 + 4 + 8 + 16 windows, and one byte more that the far end adds.
    assert took[0] >= 2 * ROUND_TRIP
    assert took[1] >= 6 * ROUND_TRIP


def test_inward_traffic_comes_down_the_link_of_who_is_reached_and_who_is_away_ends_it(links: Links) -> None:
    with echo() as port:
        trainer = links.forward("trainer", port, inward=True)
        with connect(links.forward("replica", trainer)) as connection:
            connection.sendall(b"abc")
            connection.shutdown(socket.SHUT_WR)
            assert b"".join(iter(lambda: connection.recv(1 << 16), b"")) == b"abc"
    assert links.passed() == {"trainer": {"up": 3, "down": 3}, "replica": {"up": 3, "down": 3}}
    with connect(links.forward("replica", port)) as connection:
        assert connection.recv(1) == b""
    links.process.kill()
    links.process.join(SECONDS)
    with pytest.raises(RuntimeError, match="the process of the links is gone"):
        links.passed()


def test_the_store_behind_a_link_keeps_connections(links: Links, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that follow each other at once leave the connection in order."""
    with serving("runs", keep_alive=True) as server:
        endpoint = f"http://127.0.0.1:{links.forward('a', server.port)}"
        for name, value in (server.environment | {"AWS_ENDPOINT_URL": endpoint}).items():
            monkeypatch.setenv(name, value)
        with open_bucket("s3://runs/run", StoreOptions(store_connections=1)) as bucket:
            bucket.put("k", b"")
            began = time.monotonic()
            for number in range(10):
                bucket.put(f"k{number % 3}", bytes([number]) * 1000)
                assert bucket.get(f"k{number % 3}") == bytes([number]) * 1000
            elsewhere = _ports_of(server.pid, server.port)
    assert time.monotonic() - began >= 20 * ROUND_TRIP
    assert elsewhere < 10


def _ports_of(pid: int, port: int) -> int:
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] != "0A" for row in rows)


def test_about_one_percent_changes_with_every_step(one_thread: None) -> None:
    trainer = NoisyTrainer("small")
    parameters = list(trainer.model.parameters())
    for _ in range(2):
        before = [parameter.detach().view(torch.int16).clone() for parameter in parameters]
        trainer.step()
        pairs = zip(parameters, before, strict=True)
        changed = sum(int((parameter.detach().view(torch.int16) != old).sum()) for parameter, old in pairs)
        assert 0.7 * SHARE < changed / sum(parameter.numel() for parameter in parameters) < 1.4 * SHARE


def test_the_full_model_has_a_hundred_million_parameters() -> None:
    with torch.device("meta"):
        model = Qwen3ForCausalLM(qwen3_config(**SIZES["full"], vocabulary=64, positions=256))
    assert sum(parameter.numel() for parameter in model.parameters()) > 100_000_000


def record(full_seconds: float = 30.0) -> Record:
    """Two versions on two replicas, fresh after 1, 1, 1 and 2 s; then one while a server started."""
    made = Record(links={"trainer": Measured(50.0, 99.0, 98.0)})
    passed = {"trainer": {"up": 100, "down": 0}, "a": {"up": 1, "down": 200}, "b": {"up": 1, "down": 200}}
    for version, scene, late in ((1, "follow", 1.0), (2, "follow", 2.0), (3, "restart", 9.0)):
        fresh = {"a": 1.0, "b": late}
        seconds = {"diff": 0.125, "encode": 0.25, "upload": 9.0, "total": 9.375}
        timings = {
            name: {"fetch": 125.0, "verify": 0.0, "decode": 62.5, "pause": 31.25, "commit": 9.0} for name in fresh
        }
        made.changes.append(Change(scene, version, 10, 1000, 90, seconds, fresh, passed, timings))
    made.arrivals.append(Arrival("b", "killed, started again", 3, 12.0, 400))
    made.full = Full(full_seconds / 2, full_seconds / 2, 2200)
    made.fingerprints = {"the run's head": "f", "a": "f", "b": "f"}
    made.served = {"a": 3, "b": 3}
    made.answers = {"a": [[[1, 2], [-0.5, -0.25]]], "b": [[[1, 2], [-0.5, -0.25]]]}
    return made


def test_each_claim_can_fail() -> None:
    names = ("weights exact", "all fresh", "answers equal", "ratio reached")
    assert record().claims(20.0) == dict.fromkeys(names, True)
    assert "ratio reached" not in record(full_seconds=2.0).claims(None)
    other = record()
    other.fingerprints["b"] = "g"
    other.served["a"] = 2
    other.answers["b"] = [[[1, 2], [-0.5, -0.125]]]
    assert other.claims(31.0) == dict.fromkeys(names, False)
    assert Record().claims(None) == dict.fromkeys(names[:3], False)
    alone = record()
    alone.fingerprints = {"a": "f", "b": "f"}  # that nobody else has proves nothing
    assert not alone.claims(None)["weights exact"]


def test_rows_leave_out_what_was_disturbed_and_phases_add_up() -> None:
    made = record()
    rows = made.rows(20.0)
    assert value_of(rows, "a version, median", "seconds to fresh") == 1.0
    assert value_of(rows, "a version, slowest", "seconds to fresh") == 2.0
    full = "full weights, stored and fetched"
    cases = ("seconds to fresh", "bytes down", "seconds, both ways overlapped")
    assert [value_of(rows, case, "ratio", full) for case in cases] == [30.0, 11.0, 15.0]
    assert value_of(rows, "1, follow", "changed") == 1.0
    made.changes[1].fresh["b"] = 1.0
    phases = made.phases()
    assert sum(phases.values()) == 1.0
    assert phases["between"] == 1.0 - 0.125 - 0.25 - 0.125 - 0.0625 - 0.03125


def test_rows_have_every_version_and_tables_the_comparison() -> None:
    made = record()
    del made.changes[1].fresh["b"]
    rows = made.rows(20.0)
    assert value_of(rows, "2, follow", "a fresh") == 1.0
    assert not any(row["case"] == "2, follow" and row["metric"] == "b fresh" for row in rows)
    assert value_of(rows, "b: killed, started again", "from start") == 12.0
    assert value_of(rows, "link of trainer", "up") == 99.0
    assert "| full weights, stored and fetched | 0.0022 | 30 |" in tables(rows)
    assert [value_of(rows, "way of a version", phase) for phase in ("diff", "encode")] == [125.0, 250.0]


@pytest.mark.parametrize("arguments", [["--replicas", "-1"], ["--mbit", "x"], ["--versions", "1.5"]])
def test_wrong_arguments_are_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--json", "x", *arguments])
    assert ended.value.code == 2
