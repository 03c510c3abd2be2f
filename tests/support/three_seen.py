"""A run of the three machines seen from outside: its processes, what they have reported, and kills.

``examples/three_machines/run.sh`` marks each process with ``THREE_MACHINE=PID-NAME``.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.running import mentioning


def text_of(path: Path | str) -> str:
    """A file; empty if it is not there, as one of /proc whose process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def pids(run: int, machine: str) -> set[int]:
    """A machine's processes. ``run``: the process id of run.sh."""
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


def until(reached: Callable[[], bool], what: str, seconds: float) -> None:
    """Wait for a condition. Raises AssertionError: it did not come."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s: {what}"
        time.sleep(0.2)
