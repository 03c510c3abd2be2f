"""The three machines with real vLLM: every part is killed once, and no machine reaches another's but in the bucket."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.running import mentioning

pytestmark = [pytest.mark.e2e, pytest.mark.slow]
RUN = Path(__file__).parents[2] / "examples" / "three_machines" / "run.sh"
MACHINES = ("trainer", "rollout", "environment")
VERSIONS = 14
KILLS = {"environment": 2, "worker": 4, "rollout": 6, "trainer": 9}
"""Part → version at which it is killed, once what was killed before has recovered."""
SECONDS = 900
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3)"
LISTEN = "import socket, sys; s = socket.create_server((sys.argv[1], 9000)); print(flush=True); sys.stdin.read()"
CLAIMS = ("weights_exact", "trained_once", "none_too_stale", "versions_explain_tokens")


def text_of(path: Path | str) -> str:
    """A file; empty if it is not there, as one of /proc whose process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def pids(run: int, machine: str) -> set[int]:
    """A machine's processes, which run.sh marks. ``run``: the process id of run.sh."""
    return mentioning(Path(f"THREE_MACHINE={run}-{machine}"))


def events(out: Path, machine: str) -> list[dict[str, Any]]:
    """What a machine's script has reported so far."""
    lines = text_of(out / machine / "events.jsonl").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def version_of(out: Path) -> int:
    """The newest that was published."""
    return max((one["version"] for one in events(out, "trainer") if one["event"] == "published"), default=0)


def kill(run: int, part: str) -> None:
    """SIGKILL: ``worker`` is the rollout machine's script alone, any other part all processes of a machine."""
    for pid in pids(run, "rollout" if part == "worker" else part):
        if part != "worker" or "rollouts.py" in text_of(f"/proc/{pid}/cmdline"):
            os.kill(pid, signal.SIGKILL)


def went_on(run: int, out: Path, part: str, killed: float) -> bool:
    """Whether a step was trained on games that were written after a new start; of the trainer: any step after it."""
    machine = "rollout" if part == "worker" else part
    script = {"rollout": "rollouts.py"}.get(machine, f"{machine}.py")
    lives = [pid for pid in pids(run, machine) if script in text_of(f"/proc/{pid}/cmdline")]
    back = min((_started(pid) for pid in lives), default=0.0)
    steps = [one for one in events(out, "trainer") if one["event"] == "step" and one["at"] > max(back, killed)]
    played = {one["key"] for one in events(out, "rollout") if one["event"] == "batch" and one["at"] > max(back, killed)}
    fresh = [step for step in steps if part == "trainer" or played & set(step["trained"])]
    return back > killed and bool(fresh)


def _started(pid: int) -> float:
    """When a process started, in seconds since the epoch."""
    words = text_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    booted = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return booted + int(words[19]) / os.sysconf("SC_CLK_TCK") if words else 0.0


def until(reached: Callable[[], bool], what: str) -> None:
    """Wait for something that takes long to look at."""
    deadline = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < deadline, f"not within {SECONDS} s: {what}"
        time.sleep(0.2)


def connects(pid: int, source: str, host: str, port: int) -> bool:
    """Whether a machine reaches an address."""
    inside = ["ip", "netns", "exec", f"ds3m-{pid}-{source}", sys.executable, "-c", CONNECT, host, str(port)]
    return subprocess.run(inside, capture_output=True, timeout=60, check=False).returncode == 0


def attempts(pid: int, address: dict[str, str]) -> dict[tuple[str, str], bool]:
    """(from, to) → whether a port that answers there is reached."""
    listener = ["ip", "netns", "exec", f"ds3m-{pid}-trainer", sys.executable, "-c", LISTEN, address["trainer"]]
    with subprocess.Popen(listener, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = {(source, "trainer"): connects(pid, source, address["trainer"], 9000) for source in MACHINES[:2]}
        process.kill()
    commands = (text_of(f"/proc/{one}/cmdline").split("\0") for one in pids(pid, "rollout"))
    words = next(words for words in commands if any(word.endswith("rollouts.py") for word in words))
    port = int(words[words.index("--port") + 1])
    return found | {(source, "rollout"): connects(pid, source, address["rollout"], port) for source in MACHINES}


def trains(process: "subprocess.Popen[bytes]", out: Path, version: int) -> bool:
    """Whether a version is published, or nothing more will come."""
    return version_of(out) >= version or process.poll() is not None


@pytest.mark.parametrize("network", ["auto", "loopback"])
def test_it_goes_on_after_each_kill_and_machines_meet_in_the_bucket_only(network: str, tmp_path: Path) -> None:
    out, log = tmp_path / "out", tmp_path / "run.log"
    command = ["env", f"PYTHON={sys.executable}", "bash", str(RUN), "--out", str(out), "--network", network]
    command += ["--versions", str(VERSIONS), "--warm-up", "10"]
    ways: dict[tuple[str, str], bool] = {}
    with log.open("w") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        try:
            for part, version in KILLS.items():
                until(partial(trains, process, out, version), "it trains")
                assert process.poll() is None, log.read_text()
                pattern = r"^(\w+): network namespace \S+ address (\S+)$"
                address = dict(re.findall(pattern, log.read_text(), re.MULTILINE))
                if part == "rollout" and address:
                    ways = attempts(process.pid, address)
                killed = time.time()
                kill(process.pid, part)
                until(partial(went_on, process.pid, out, part, killed), f"it goes on without {part}")
            until(lambda: process.poll() is not None, "it ends")
        finally:
            process.terminate()
    assert process.returncode == 0, log.read_text()
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["verdict"], summary["versions"]) == (dict.fromkeys(CLAIMS, True), VERSIONS)
    assert 0 < summary["payload_bytes"] < summary["full_bytes"] / 2
    assert summary["fresh_seconds"]["median"] > 0.05
    assert all(reached is (source == target) for (source, target), reached in ways.items()), ways
    assert bool(ways) is bool(address)
    if shutil.which("ip"):
        left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, timeout=60, check=True).stdout
        assert f"ds3m-{process.pid}-" not in left
