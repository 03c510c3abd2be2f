"""Real vLLM servers on one run: they answer while they take versions, say what they serve, are peers, and may end."""

import signal
import statistics
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from tests.e2e.servers import Load, Server, delta_sync_serve, end_group, serving
from tests.e2e.world import World
from tests.support.answers import closed_port
from tests.support.commands import answer
from tests.support.tiny import make_model, save_checkpoint
from tests.support.web import TOKEN
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.admin_token import VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WAIT = 300.0
NAMES = ("a", "b", "c")
VERSIONS = 6
FLAGS = ("--poll-seconds", "0.2", "--heartbeat-seconds", "6", "--pause-mode", "wait")
LONGEST_SECONDS = 60.0
"""A request waits for those in flight, then for the pause: 16 s with three servers on two cores, 6 s being usual."""


def test_three_servers_answer_every_request_while_they_take_dense_versions(tmp_path: Path) -> None:
    """Servers pause when they are ready, in no order; each waits for the requests in flight before it commits."""
    model = make_model("qwen3")
    elements = sum(parameter.numel() for parameter in model.parameters())
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    with ExitStack() as ended, Publisher(model, url, base) as publisher:
        servers: dict[str, Server] = {}
        for name in NAMES:
            flags = ("--bucket", url, "--receiver-id", name, "--state-dir", str(tmp_path / f"state-{name}"), *FLAGS)
            log = tmp_path / f"{name}.log"
            servers[name] = ended.enter_context(serving(log, delta_sync_serve(base, *flags), {}))
        publisher.wait_served(0, replicas=3, timeout=WAIT)
        with ExitStack() as asking:
            loads = [asking.enter_context(Load(server)) for server in servers.values()]
            for step in range(1, VERSIONS + 1):
                for parameter in model.parameters():
                    parameter.data += 0.01
                assert publisher.publish(step=step, wait=True).changed > 0.9 * elements
                served = publisher.wait_served(replicas=3, timeout=WAIT)
                assert [replica.heartbeat.served for replica in served] == [step] * 3
        answers = [response for load in loads for response in load.answers]
        assert {response.status_code for response in answers} == {200}
        for load in loads:
            spans = [response.json()["delta_sync"]["spans"] for response in load.answers]
            assert {len(each) for each in spans} == {1}, "a request in flight finishes with its version"
            assert {each[0]["version"] for each in spans} == set(range(VERSIONS + 1))
        seconds = [response.elapsed.total_seconds() for response in answers]
        print(f"{len(seconds)} answers: {statistics.median(seconds):.2f} s (median), {max(seconds):.2f} s (longest)")
        assert max(seconds) < LONGEST_SECONDS
        for server in servers.values():
            status = server.status()
            print([commit["timings_ms"]["pause"] for commit in status["recent"]])
            assert (status["served"]["version"], status["last_error"]) == (VERSIONS, None)
            assert server.post("/delta_sync/verify").json()["verdict"]
        rows = answer("fleet", "list", "--bucket", url)["replicas"]
        assert [(row["receiver"], row["served"], row["lag"], row["error"]) for row in rows] == [
            (name, VERSIONS, 0, None) for name in NAMES
        ]
        servers["c"].process.send_signal(signal.SIGTERM)
        servers["c"].process.wait(WAIT)
        gone = {replica.receiver: replica.left for replica in open_run(url).fleet().ended}
        assert gone == {"c": True}
        assert publisher.wait_served(replicas=3, timeout=WAIT)


def test_two_servers_are_peers_of_each_other(tmp_path: Path) -> None:
    """Both have the same list. The first reads the bucket, until it is killed; then the second does."""
    world = World(tmp_path)
    ports = {"a": closed_port(), "b": closed_port()}
    peers = ",".join(f"http://127.0.0.1:{port}" for port in ports.values())
    environment = {VARIABLE: TOKEN}

    def start(name: str, cache: str) -> Server:
        flags = ["--bucket", world.url, "--receiver-id", name, "--peer", peers, "--poll-seconds", "0.2"]
        command = delta_sync_serve(world.base, *flags, "--cache-dir", str(tmp_path / cache))
        return ended.enter_context(serving(tmp_path / f"{cache}.log", command, environment, port=ports[name]))

    def publish(*served_by: str) -> None:
        version = world.publish()
        for name in served_by:
            served = servers[name].wait_served(version)["served"]
            assert served["fingerprint"] == open_run(world.url).head().fingerprint
        sizes.append(sum(ref.bytes for ref in open_run(world.url).manifest(version).objects))

    def counts(name: str) -> tuple[int, int]:
        store = servers[name].status()["store"]
        return store["peer_bytes"], store["peer_failures"]

    with ExitStack() as ended, closing(world):
        servers, sizes = {name: start(name, name) for name in ports}, list[int]()
        for _ in range(5):
            publish("a", "b")
        assert servers["a"].outputs() == servers["b"].outputs()
        assert counts("a") == (0, 0), "first in the list"
        assert counts("b") == (sum(sizes), 0)

        servers["a"].process.send_signal(signal.SIGKILL)
        end_group(servers["a"].process)
        publish("b")
        assert counts("b") == (sum(sizes[:-1]), 1), "from the bucket"

        servers["a"] = start("a", "a-again")
        servers["a"].wait_served(6)
        assert counts("a") == (0, 0), "first again; what it asked itself is no failure"
        for server in servers.values():
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert server.post("/delta_sync/verify", headers=headers).json()["verdict"]
        assert servers["a"].outputs() == servers["b"].outputs()
