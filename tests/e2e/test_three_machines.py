"""The three machines with real vLLM: every part is killed once, and no machine meets another but in the bucket."""

import json
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.three_seen import MACHINES, Seen, given, kill, text_of, told, until, version_of, went_on

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
RUN = Path(__file__).parents[2] / "examples" / "three_machines" / "run.sh"
VERSIONS = 14
KILLS = {"environment": 2, "worker": 4, "rollout": 6, "trainer": 9}
"""Part → version at which it is killed, once what was killed before has recovered."""
SECONDS = 900
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 9000)); print(flush=True); sys.stdin.read()"
CLAIMS = ("weights_exact", "trained_once", "none_too_stale", "versions_explain_tokens")


class Ends:
    """All ends of a run: host and port of each, from what run.sh says and starts."""

    def __init__(self, out: Path, said: list[str]) -> None:
        variables = dict(line.split("=", 1) for line in (out / "store.env").read_text().splitlines())
        urls = ("STORE_trainer", "STORE_rollout", "FORWARD_rollout")
        self.trainer_store, self.rollout_store, self.forward = (_end(variables[name]) for name in urls)
        self.address = dict(re.findall(r"^(\w+): network namespace \S+ address (\S+)$", "".join(said), re.MULTILINE))
        self.isolated = bool(self.address)
        self.service, self.server = ("127.0.0.1", 0), ("127.0.0.1", 0)

    def find(self, seen: Seen) -> None:
        """Where environment and server listen, by their arguments."""
        for pid in [*seen.pids("environment"), *seen.pids("rollout")]:
            words = text_of(f"/proc/{pid}/cmdline").split("\0")
            if any(word.endswith("environment.py") for word in words):
                self.service = (words[words.index("--host") + 1], int(words[words.index("--port") + 1]))
            elif any(word.endswith("rollouts.py") for word in words):
                host = self.address.get("rollout", "127.0.0.1")
                self.server = (host, int(words[words.index("--port") + 1]))

    def forbidden(self, machine: str) -> list[str]:
        """What a machine must not be told."""
        stores = {"trainer": self.trainer_store, "rollout": self.rollout_store}
        ends = [end for name, end in stores.items() if name != machine] + [self.service] * (machine != "environment")
        ends += [self.server] * (machine != "rollout") + [self.forward] * (machine != "rollout")
        addresses = [address for name, address in self.address.items() if name != machine]
        return [f"{host}:{port}" for host, port in ends] + addresses


def _end(url: str) -> tuple[str, int]:
    host, _, port = url.removeprefix("http://").rpartition(":")
    return host, int(port)


def connects(pid: int, source: str, host: str, port: int) -> bool:
    """Whether a machine reaches an address."""
    inside = ["ip", "netns", "exec", f"ds3m-{pid}-{source}", sys.executable, "-c", CONNECT, host, str(port)]
    return subprocess.run(inside, capture_output=True, timeout=60, check=False).returncode == 0


def attempts(pid: int, ends: Ends) -> dict[tuple[str, str], bool]:
    """(from, to) → whether a port that answers there is reached."""
    trainer = ends.address["trainer"]
    listener = ["ip", "netns", "exec", f"ds3m-{pid}-trainer", sys.executable, "-c", LISTEN, trainer]
    with subprocess.Popen(listener, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {("trainer", "trainer"): connects(pid, "trainer", trainer, 9000)}
        found["rollout", "trainer"] = connects(pid, "rollout", trainer, 9000)
        process.kill()
    for source in MACHINES:
        found[source, "rollout"] = connects(pid, source, *ends.server)
    return found


def trains(process: "subprocess.Popen[bytes]", out: Path, version: int) -> bool:
    """Whether a version is published, or nothing more will come."""
    return version_of(out) >= version or process.poll() is not None


@pytest.mark.parametrize("network", ["auto", "loopback"])
def test_it_goes_on_after_each_kill_and_machines_meet_in_the_bucket_only(network: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["env", f"PYTHON={sys.executable}", "bash", str(RUN), "--out", str(out), "--network", network]
    command += ["--versions", str(VERSIONS), "--warm-up", "10"]
    log = tmp_path / "run.log"
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            until(lambda: "\n" in text_of(out / "store.env") or process.poll() is not None, "the store serves", SECONDS)
            ends = Ends(out, [log.read_text()])
            allowed = {"trainer": {ends.trainer_store}, "rollout": {ends.rollout_store, ends.forward}}
            seen = Seen(process.pid, allowed | {"environment": set()}, ends.isolated)
            with seen:
                for part, version in KILLS.items():
                    until(partial(trains, process, out, version), "it trains", SECONDS)
                    assert process.poll() is None, log.read_text()
                    if part == "rollout":
                        ends.find(seen)
                        assert all(given(seen.pids(machine)) for machine in MACHINES)
                        assert [told(given(seen.pids(m)), ends.forbidden(m)) for m in MACHINES] == [[], [], []]
                        ways = attempts(process.pid, ends) if ends.isolated else {}
                    killed = time.time()
                    kill(seen, part)
                    until(partial(went_on, seen, out, part, killed), f"it goes on after {part} was killed", SECONDS)
                until(lambda: process.poll() is not None, "it ends", SECONDS)
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["verdict"], summary["versions"]) == (dict.fromkeys(CLAIMS, True), VERSIONS)
    assert 0 < summary["payload_bytes"] < summary["full_bytes"] / 2
    assert summary["fresh_seconds"]["median"] > 0.05
    assert dict(seen.found) == {}
    assert seen.looks > VERSIONS
    assert min(seen.connections["trainer"], seen.connections["rollout"]) > 0
    assert all(reached is (source == target) for (source, target), reached in ways.items()), ways
    assert bool(ways) is ends.isolated
    if shutil.which("ip"):
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"ds3m-{process.pid}-" not in left
