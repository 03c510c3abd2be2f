"""Machines on one machine: a network namespace each, whose only way out is one cable to where the links begin.

Inside a namespace there is loopback and one address; no route leads further than to the other end of the cable. Where
namespaces cannot be made (not root, no ``ip``) all machines share this one's loopback, and the site says why.
"""

import ipaddress
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from examples.demo.processes import DemoError
from examples.fleet.shaping import HOST

PREFIX = "ds3m"
NETWORK = ipaddress.ip_network("10.77.0.0/16")
CABLE_BITS = 30
NETWORK_KINDS = ("auto", "namespaces", "loopback")
NAMESPACES = Path("/run/netns")
IP_SECONDS = 30.0


@dataclass(frozen=True)
class Machine:
    """One machine.

    Attributes:
        address: its own. gateway: where it finds what its link leads to. prefix: words before each command that runs
            on it. namespace: inode of its network namespace; None: that of everybody.
    """

    name: str
    address: str
    gateway: str
    prefix: tuple[str, ...] = ()
    namespace: int | None = None

    def command(self, *words: str) -> list[str]:
        """A command that runs on this machine."""
        return [*self.prefix, *words]


@dataclass(frozen=True)
class Site:
    """All machines. ``shared``: why they have no networks of their own; empty: they have."""

    machines: dict[str, Machine]
    shared: str = ""

    @property
    def isolated(self) -> bool:
        """Whether each machine has a network of its own."""
        return not self.shared

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]


@contextmanager
def machines(names: Sequence[str], kind: str = "auto") -> Iterator[Site]:
    """Machines for the length of a block; namespaces and cables are removed at its end.

    Args:
        names: lower-case letters. kind: one of ``NETWORK_KINDS``; ``auto``: namespaces where they can be made.

    Raises:
        DemoError: ``namespaces`` cannot be made.
    """
    refused = "" if kind == "loopback" else why_not()
    if kind == "namespaces" and refused:
        raise DemoError(f"--network namespaces is not possible: {refused}; use auto or loopback")
    if kind == "loopback" or refused:
        yield Site({name: Machine(name, HOST, HOST) for name in names}, refused or "--network loopback was given")
        return
    sweep()
    try:
        yield Site(_build(names))
    finally:
        _remove(os.getpid())


def why_not() -> str:
    """Why namespaces cannot be made here; empty: they can."""
    if shutil.which("ip") is None:
        return "there is no ip command (iproute2)"
    if os.geteuid() != 0:
        return "only root may make network namespaces"
    trial = f"{PREFIX}-{os.getpid()}-trial"
    done = _run("netns", "add", trial)
    if done.returncode:
        return f"ip netns add: {done.stderr.strip()}"
    inside = _run("netns", "exec", trial, "ip", "link", "set", "lo", "up")
    _run("netns", "del", trial)
    return f"ip netns exec: {inside.stderr.strip()}" if inside.returncode else ""


def sweep() -> None:
    """Remove what runs have left that were killed before they could."""
    for pid in {int(found) for found in re.findall(rf"\b{PREFIX}-(\d+)-", _names())}:
        if not Path(f"/proc/{pid}").exists():
            _remove(pid)


def _names() -> str:
    """Names of all namespaces and interfaces, in one text."""
    return _run("netns", "list").stdout + _run("-o", "link").stdout


def _remove(pid: int) -> None:
    for name in sorted(set(re.findall(rf"\b{PREFIX}-{pid}-\w+", _names()))):
        kind = "netns" if (NAMESPACES / name).exists() else "link"
        _run(kind, "del", name)


def _build(names: Sequence[str]) -> dict[str, Machine]:
    cables = _free_network().subnets(new_prefix=CABLE_BITS)
    return {name: _plug(number, name, cable) for number, (name, cable) in enumerate(zip(names, cables, strict=False))}


def _plug(number: int, name: str, cable: ipaddress.IPv4Network) -> Machine:
    """A namespace and its cable: the outer end stays here, the inner one is the machine's only interface."""
    gateway, address = (str(host) for host in cable.hosts())
    namespace, outer, inner = f"{PREFIX}-{os.getpid()}-{name}", f"{PREFIX}-{os.getpid()}-{number}", "eth0"
    _do("netns", "add", namespace)
    _do("link", "add", outer, "type", "veth", "peer", "name", inner, "netns", namespace)
    _do("addr", "add", f"{gateway}/{CABLE_BITS}", "dev", outer)
    _do("link", "set", outer, "up")
    _do("-n", namespace, "addr", "add", f"{address}/{CABLE_BITS}", "dev", inner)
    _do("-n", namespace, "link", "set", inner, "up")
    _do("-n", namespace, "link", "set", "lo", "up")
    inode = (NAMESPACES / namespace).stat().st_ino
    return Machine(name, address, gateway, ("ip", "netns", "exec", namespace), inode)


def _free_network() -> ipaddress.IPv4Network:
    """A /24 that nothing here uses yet; processes begin to look at different places.

    Raises:
        DemoError: all are in use.
    """
    said = _do("-4", "-o", "addr") + _do("-4", "route")
    used = [
        ipaddress.ip_network(text, strict=False)
        for text in re.findall(r"\b\d+\.\d+\.\d+\.\d+(?:/\d+)?", said)
        if text != "0.0.0.0"
    ]
    blocks = [block for block in NETWORK.subnets(new_prefix=24) if isinstance(block, ipaddress.IPv4Network)]
    start = os.getpid() % len(blocks)
    for block in (*blocks[start:], *blocks[:start]):
        if not any(block.overlaps(other) for other in used):
            return block
    raise DemoError(f"no free addresses in {NETWORK}; use --network loopback")


def _run(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["ip", *words], capture_output=True, text=True, timeout=IP_SECONDS, check=False)


def _do(*words: str) -> str:
    done = _run(*words)
    if done.returncode:
        raise DemoError(f"ip {' '.join(words)}: {done.stderr.strip()}; use --network loopback")
    return done.stdout
