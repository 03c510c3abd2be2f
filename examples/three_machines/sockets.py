"""Who is connected to whom: the sockets of every machine's processes, looked at during the whole run.

A machine with a network namespace is looked at through /proc/PID/net of one of its processes, which lists all its
sockets, those included whose process has ended. On shared loopback a machine's sockets are those that its processes
hold open: what begins and ends between two looks is not seen there.
"""

import ipaddress
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from examples.demo.processes import Child
from examples.three_machines.machines import Machine

LISTENING = "listen"
STATES = {1: "established", 2: "attempted", 10: LISTENING}
TABLES = ("tcp", "tcp6", "udp", "udp6")
LOOK_SECONDS = 0.5
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class End:
    """One end of a connection; port 0 and a host of zeros: none."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    def is_at(self, listening: Iterable["End"]) -> bool:
        """Whether somebody who listens there answers it."""
        return any(end.port == self.port and (end.host == self.host or end.any_host) for end in listening)

    @property
    def any_host(self) -> bool:
        return ipaddress.ip_address(self.host).is_unspecified

    @property
    def inner(self) -> bool:
        """Whether it is loopback."""
        return ipaddress.ip_address(self.host).is_loopback


@dataclass(frozen=True)
class Socket:
    """One row of /proc/net."""

    kind: str
    local: End
    remote: End
    state: str

    @property
    def other_side(self) -> tuple[str, End, End]:
        """How the other end of this connection sees it."""
        return self.kind, self.remote, self.local

    @property
    def side(self) -> tuple[str, End, End]:
        return self.kind, self.local, self.remote

    def __str__(self) -> str:
        return f"{self.kind} {self.local} → {self.remote} ({self.state})"


@dataclass(frozen=True)
class View:
    """What one look at a machine has seen."""

    isolated: bool
    connections: frozenset[Socket]
    listening: frozenset[End]

    @property
    def sides(self) -> set[tuple[str, End, End]]:
        return {socket.side for socket in self.connections}


@dataclass(frozen=True)
class Rules:
    """What a machine may do: connect to ``allowed`` ends, and be connected to at the ports it ``serves``."""

    allowed: frozenset[End] = frozenset()
    serves: frozenset[int] = frozenset()


def read_table(kind: str, text: str) -> list[tuple[Socket, int]]:
    """Rows of a file like /proc/net/tcp, each with the inode of its socket (0: its process has let go of it)."""
    rows = []
    for line in text.splitlines()[1:]:
        words = line.split()
        state = STATES.get(int(words[3], 16), "ending" if kind.startswith("tcp") else "open")
        rows.append((Socket(kind.rstrip("6"), _end(words[1]), _end(words[2]), state), int(words[9])))
    return rows


def _end(text: str) -> End:
    """An address as the kernel prints it: words of 32 bits, each in the machine's byte order."""
    digits, port = text.split(":")
    raw = b"".join(bytes.fromhex(digits[at : at + 8])[::-1] for at in range(0, len(digits), 8))
    address = ipaddress.ip_address(raw)
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return End(str(mapped or address), int(port, 16))


def descendants(roots: Iterable[int]) -> list[int]:
    """These processes and all that descend from them."""
    children: dict[int, list[int]] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        parent = re.search(r"\) \S (\d+) ", _text(folder / "stat"))
        if parent:
            children.setdefault(int(parent[1]), []).append(int(folder.name))
    found, waiting = [], list(roots)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        waiting += children.get(pid, [])
    return found


def look(machine: Machine, roots: Iterable[int]) -> View:
    """The sockets of one machine whose processes descend from ``roots``."""
    pids = descendants(roots)
    if machine.namespace is not None:
        inside = [pid for pid in pids if _namespace(pid) == machine.namespace]
        rows = _rows(f"/proc/{inside[0]}/net") if inside else []
        sockets = {socket for socket, _ in rows}
    else:
        rows = _rows("/proc/net")
        held = {inode for pid in pids for inode in _held(pid)}
        sockets = {socket for socket, inode in rows if inode in held}
    listening = frozenset(socket.local for socket in sockets if socket.state == LISTENING)
    connections = frozenset(socket for socket in sockets if socket.state != LISTENING and socket.remote.port)
    return View(machine.namespace is not None, connections, listening)


def _rows(folder: str) -> list[tuple[Socket, int]]:
    return [row for kind in TABLES for row in read_table(kind, _text(Path(folder) / kind))]


def _namespace(pid: int) -> int | None:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return None


def _held(pid: int) -> set[int]:
    """Inodes of the sockets that a process holds open."""
    found = set()
    try:
        for entry in os.scandir(f"/proc/{pid}/fd"):
            named = re.fullmatch(r"socket:\[(\d+)\]", os.readlink(entry.path))
            if named:
                found.add(int(named[1]))
    except OSError:
        pass  # it has ended, or has closed this one meanwhile: the next look sees the rest
    return found


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def wrong(views: Mapping[str, View], rules: Mapping[str, Rules]) -> list[str]:
    """What one look at all machines has found that may not be, in words."""
    found = []
    for name, view in views.items():
        for socket in sorted(view.connections, key=str):
            others = [other for other in views if other != name and _joins(socket, views[other], view.isolated)]
            if others and not _is_served(socket, rules[name], view) and socket.remote not in rules[name].allowed:
                found.append(f"{name} and {others[0]} are joined: {socket}")
            elif not others and not _is_allowed(socket, rules[name], view):
                found.append(f"{name} is connected to what it should not know: {socket}")
    return found


def _joins(socket: Socket, other: View, isolated: bool) -> bool:
    """Whether the other end, or who should answer there, is that machine's."""
    if (isolated or other.isolated) and socket.remote.inner:
        return False  # loopback of a machine of its own
    return socket.other_side in other.sides or socket.remote.is_at(other.listening)


def _is_served(socket: Socket, rules: Rules, view: View) -> bool:
    return socket.local.port in rules.serves and socket.local.is_at(view.listening)


def _is_allowed(socket: Socket, rules: Rules, view: View) -> bool:
    if socket.remote in rules.allowed or _is_served(socket, rules, view):
        return True
    if view.isolated:
        return socket.remote.inner or socket.remote.host == socket.local.host
    # Shared loopback: with itself, or with somebody who has just let go and whom no other machine knows.
    within = socket.other_side in view.sides or socket.remote.is_at(view.listening)
    return within or socket.local.is_at(view.listening)


@dataclass
class Watch:
    """Looks at all machines twice a second until it is stopped; any thread may say which processes they have.

    Attributes:
        looks: so many. seen: of each machine, how many connections it had in all looks together. found: everything that
            should not have been, and at how many looks.
    """

    machines: Mapping[str, Machine]
    rules: Mapping[str, Rules]
    looks: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    found: Counter[str] = field(default_factory=Counter)
    _children: dict[str, dict[str, Child]] = field(default_factory=dict)
    _stop: threading.Event = field(default_factory=threading.Event)
    _looking: Future[None] | None = None

    def runs(self, machine: str, child: Child) -> None:
        """A program of a machine was started, in place of an earlier one of the same name."""
        self._children.setdefault(machine, {})[child.name] = child

    def roots(self, machine: str) -> list[int]:
        """The processes under which all of a machine's run."""
        return [child.process.pid for child in list(self._children.get(machine, {}).values())]

    def look(self) -> None:
        """Look once at all machines."""
        views = self._views()
        self.looks += 1
        self.seen.update({name: len(view.connections) for name, view in views.items()})
        found = wrong(views, self.rules)
        if found and not all(view.isolated for view in views.values()):
            # On a shared loopback an end whose process closes it while /proc is read looks like a stranger's.
            time.sleep(SETTLE_SECONDS)
            still = set(wrong(self._views(), self.rules))
            found = [text for text in found if text in still]
        self.found.update(found)

    def _views(self) -> dict[str, View]:
        return {name: look(machine, self.roots(name)) for name, machine in self.machines.items()}

    def start(self) -> None:
        self._looking = ThreadPoolExecutor(1, "watch").submit(self._run)

    def stop(self) -> None:
        """Returns after the last look. Raises what ended the looks before it, if anything did."""
        self._stop.set()
        if self._looking is not None:
            self._looking.result()

    def _run(self) -> None:
        while not self._stop.is_set():
            self.look()
            self._stop.wait(LOOK_SECONDS)


def given(pids: Iterable[int]) -> dict[int, str]:
    """Arguments and variables that each of these processes was started with; those that have ended are left out."""
    texts = {pid: _text(Path(f"/proc/{pid}/cmdline")) + "\0" + _text(Path(f"/proc/{pid}/environ")) for pid in pids}
    return {pid: text.replace("\0", "\n") for pid, text in texts.items() if len(text) > 1}
