"""Two machines on this one: this process's network, and a network namespace with a cable between them.

Run as ``python -m tests.e2e.nodes NAMESPACE SHARED OWN COMMAND...`` this program becomes a command of the second
machine: in its network, with shared memory of its own, and with folder OWN in the place of SHARED.
"""

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
PREFIX = "dsnode"
BLOCK = "10.78"


@dataclass(frozen=True)
class Nodes:
    """The machines, by number.

    Attributes:
        namespace: of machine 1. cables: what each calls its end of the cable. addresses: of the ends.
    """

    namespace: str
    cables: tuple[str, str]
    addresses: tuple[str, str]

    def environment(self, node: int) -> dict[str, str]:
        """By which address and cable vLLM and Gloo of a machine are reached."""
        return {"VLLM_HOST_IP": self.addresses[node], "GLOO_SOCKET_IFNAME": self.cables[node]}

    def inside(self, shared: Path, own: Path, command: list[str]) -> list[str]:
        return [sys.executable, "-m", "tests.e2e.nodes", self.namespace, str(shared), str(own), *command]


def cannot_make() -> str:
    """Why there can be no second machine here; empty if there can."""
    if not shutil.which("ip"):
        return "there is no ip command (iproute2)"
    if os.geteuid():
        return "only root may make network namespaces"
    trial = f"{PREFIX}-{os.getpid()}-trial"
    made = subprocess.run(["ip", "netns", "add", trial], capture_output=True, check=False).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", trial], check=True)
    return "" if made else "ip netns add fails"


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """Make the second machine; it is gone at the end of the block, and so is the cable."""
    pid = os.getpid()
    namespace, cable = f"{PREFIX}-{pid}", f"dsn{pid}"
    block = f"{BLOCK}.{pid % 256}"
    nodes = Nodes(namespace, (cable, "eth0"), (f"{block}.1", f"{block}.2"))
    try:
        _ip("netns", "add", namespace)
        _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _ip("addr", "add", f"{nodes.addresses[0]}/30", "dev", cable)
        _ip("link", "set", cable, "up")
        _ip("-n", namespace, "addr", "add", f"{nodes.addresses[1]}/30", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", namespace, "link", "set", device, "up")
        yield nodes
    finally:
        with suppress(subprocess.CalledProcessError):
            _ip("netns", "del", namespace)
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", cable)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def _enter(namespace: str, shared: str, own: str) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    with open(f"/var/run/netns/{namespace}") as network:
        for failed in (library.setns(network.fileno(), CLONE_NEWNET), library.unshare(CLONE_NEWNS)):
            if failed:
                raise OSError(ctypes.get_errno(), "the second machine cannot be entered")
    for mount in (["--make-rprivate", "/"], ["-t", "tmpfs", "tmpfs", "/dev/shm"], ["--bind", own, shared]):
        subprocess.run(["mount", *mount], check=True)


if __name__ == "__main__":
    name, common, private, *rest = sys.argv[1:]
    _enter(name, common, private)
    os.execv(rest[0], rest)
