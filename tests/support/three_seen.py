"""A run of the three machines seen from outside: its processes, their sockets, what they were told, and kills.

``examples/three_machines/run.sh`` marks each process with ``THREE_MACHINE=PID-NAME``. A machine with a network
namespace is looked at through /proc/PID/net, which lists all its sockets, those of ended processes included. On shared
loopback a machine's sockets are those that its processes hold: what begins and ends between two looks is not seen.
"""

import ipaddress
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MACHINES = ("trainer", "rollout", "environment")
LISTENING = 10
TABLES = ("tcp", "tcp6", "udp", "udp6")
LOOK_SECONDS, SETTLE_SECONDS = 0.5, 0.1
End = tuple[str, int]
Row = tuple[End, End, int, int]
"""Local end, remote end, state, inode."""


def text_of(path: Path | str) -> str:
    """A file of /proc; empty if its process has ended."""
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def processes(mark: str) -> list[int]:
    """Those that were started with this variable (``NAME=VALUE``)."""
    folders = Path("/proc").glob("[0-9]*")
    return sorted(int(one.name) for one in folders if mark in text_of(one / "environ").split("\0"))


def read_table(text: str) -> list[Row]:
    """Rows of a file like /proc/net/tcp."""
    rows = []
    for line in text.splitlines()[1:]:
        words = line.split()
        rows.append((_end(words[1]), _end(words[2]), int(words[3], 16), int(words[9])))
    return rows


def _end(text: str) -> End:
    """An address as the kernel prints it: words of 32 bits, each in the machine's byte order."""
    digits, port = text.split(":")
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address), int(port, 16)


def sockets_of(pids: Iterable[int], isolated: bool) -> list[Row]:
    """All sockets of a machine with these processes."""
    pids = list(pids)
    net = Path(f"/proc/{pids[0]}/net" if isolated and pids else "/proc/net")
    rows = [row for table in TABLES for row in read_table(text_of(net / table))] if pids else []
    if isolated:
        return rows
    held = {inode for pid in pids for inode in _held(pid)}
    return [row for row in rows if row[3] in held]


def _held(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds open."""
    try:
        links = [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]
    except OSError:
        return set()  # it has ended, or has closed one meanwhile: the next look sees the rest
    return {int(found[1]) for link in links if (found := re.fullmatch(r"socket:\[(\d+)\]", link))}


def ports_of(rows: Iterable[Row]) -> set[int]:
    """Where a machine listens."""
    return {local[1] for local, _, state, _ in rows if state == LISTENING}


def strange(rows: Iterable[Row], allowed: Iterable[End], served: Iterable[int] = ()) -> list[str]:
    """Connections of one machine that are neither with itself nor with an allowed end.

    Args:
        served: ports that it has listened at before: connections outlive a server that was killed.
    """
    rows = list(rows)
    allowed = set(allowed)
    ports = ports_of(rows).union(served)
    sides = {(local, remote) for local, remote, _, _ in rows}
    found = []
    for local, remote, state, _ in rows:
        if state == LISTENING or not remote[1] or remote in allowed:
            continue
        if local[1] in ports or (remote, local) in sides or (remote[0] == local[0] and remote[1] in ports):
            continue  # it serves, or is connected to itself
        found.append(f"{local[0]}:{local[1]} → {remote[0]}:{remote[1]}")
    return found


@dataclass
class Seen:
    """Looks at all machines of a run twice a second.

    Attributes:
        pid: of run.sh. allowed: of each machine, what it may be connected to. isolated: whether each has a network.
        looks: so many. connections: of each machine, in all looks. found: what should not have been, and how often.
    """

    pid: int
    allowed: dict[str, set[End]]
    isolated: bool
    looks: int = 0
    connections: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None
    _served: dict[str, set[int]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def pids(self, machine: str) -> list[int]:
        """The machine's processes."""
        return processes(f"THREE_MACHINE={self.pid}-{machine}")

    def look(self) -> None:
        """Look once at all machines."""
        self.looks += 1
        for machine in MACHINES:
            rows = sockets_of(self.pids(machine), self.isolated)
            self.connections[machine] += sum(row[2] != LISTENING for row in rows)
            served = self._served.setdefault(machine, set())
            served |= ports_of(rows)
            found = set(strange(rows, self.allowed[machine], served))
            if found and not self.isolated:
                # An end whose process closes it while /proc is read looks like a stranger's.
                time.sleep(SETTLE_SECONDS)
                found &= set(strange(sockets_of(self.pids(machine), False), self.allowed[machine], served))
            self.found.update(f"{machine}: {text}" for text in found)

    def __enter__(self) -> "Seen":
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self.error is not None:
            raise self.error

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            try:
                self.look()
            except Exception as error:  # noqa: BLE001 looks that failed are no proof
                self.error = error
                return


def told(texts: Iterable[str], forbidden: Iterable[str]) -> list[str]:
    """What of ``forbidden`` stands in arguments or variables, as a word."""
    text = "\n".join(texts)
    return [word for word in forbidden if re.search(rf"(?<![\w.]){re.escape(word)}(?![\w.]*\w)", text)]


def given(pids: Iterable[int]) -> list[str]:
    """Arguments and variables that each of these processes was started with."""
    return [text_of(f"/proc/{pid}/cmdline") + "\n" + text_of(f"/proc/{pid}/environ") for pid in pids]


def events(out: Path, machine: str) -> list[dict[str, Any]]:
    """What a machine's script has reported so far."""
    lines = text_of(out / machine / "events.jsonl").split("\n")[:-1]
    return [json.loads(line) for line in lines if line.startswith("{")]


def version_of(out: Path) -> int:
    """The newest that was published."""
    return max((one["version"] for one in events(out, "trainer") if one["event"] == "published"), default=0)


def kill(seen: Seen, part: str) -> None:
    """SIGKILL: ``worker`` is the rollout machine's script alone, any other part all processes of a machine."""
    for pid in seen.pids("rollout" if part == "worker" else part):
        if part != "worker" or "rollouts.py" in text_of(f"/proc/{pid}/cmdline"):
            os.kill(pid, signal.SIGKILL)


def went_on(seen: Seen, out: Path, part: str, killed: float) -> bool:
    """Whether a step was trained on games that were written after a new start; of the trainer: any step after it."""
    machine = "rollout" if part == "worker" else part
    script = {"rollout": "rollouts.py"}.get(machine, f"{machine}.py")
    lives = [pid for pid in seen.pids(machine) if script in text_of(f"/proc/{pid}/cmdline")]
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
