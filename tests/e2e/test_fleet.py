"""Two real vLLM servers on one run: they take turns, tell what they serve, and one that ends is not waited for."""

import json
import signal
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.e2e.servers import Server, delta_sync_serve, serving
from tests.support.tiny import make_model, save_checkpoint
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

WAIT = 300.0
TINY_FLAGS = ("--poll-seconds", "0.2", "--fleet-pauses", "1", "--heartbeat-seconds", "6")


def test_two_servers_take_turns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_model("qwen3")
    base = save_checkpoint(model, tmp_path / "base")
    url = str(tmp_path / "run")
    with ExitStack() as ended, Publisher(model, url, base) as publisher:
        servers: dict[str, Server] = {}
        for name in ("a", "b"):
            state = str(tmp_path / f"state-{name}")
            flags = ("--bucket", url, "--receiver-id", name, "--state-dir", state, *TINY_FLAGS)
            log = tmp_path / f"{name}.log"
            servers[name] = ended.enter_context(serving(base, log, delta_sync_serve(base, *flags), {}))
        publisher.wait_served(0, replicas=2, timeout=WAIT)
        for step in (1, 2, 3):
            for parameter in model.parameters():
                parameter.data.view(-1)[::7] += 0.01
            publisher.publish(step=step, wait=True)
            served = publisher.wait_served(replicas=2, timeout=WAIT)
            assert [replica.heartbeat.served for replica in served] == [step, step]
        for server in servers.values():
            status = server.status()
            assert all(commit["timings_ms"]["queued"] > 0 for commit in status["recent"])
            assert server.post("/delta_sync/verify").json()["verdict"]
        capsys.readouterr()  # libraries that were imported meanwhile print to it
        assert cli.run(["fleet", "list", "--bucket", url, "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)["data"]["replicas"]
        assert [(row["receiver"], row["served"], row["lag"], row["error"]) for row in rows] == [
            ("a", 3, 0, None),
            ("b", 3, 0, None),
        ]
        servers["b"].process.send_signal(signal.SIGTERM)
        servers["b"].process.wait(WAIT)
        gone = {replica.receiver: replica.left for replica in open_run(url).fleet().ended}
        assert gone == {"b": True}
        assert publisher.wait_served(replicas=2, timeout=WAIT)
