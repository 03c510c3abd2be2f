"""An S3 server on loopback: a Ceph cluster of one node with its gateway, from Debian's packages.

Another implementation of the protocol than tests.support.s3_store, and one that clusters run. Everything lies in a
temporary folder, objects in the memory of ``ceph-osd``; no root rights are needed.

``python -m tests.tools.rados_store COMMAND …`` runs a command with the server in its environment.
"""

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from socket import socket
from tempfile import TemporaryDirectory

from tests.support.s3_store import ACCESS_KEY, END_SECONDS, HOST, RUNNING, SECRET_KEY, START_SECONDS, S3Server

BINARIES = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
INSTALL = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
POLL_SECONDS = 0.1

CONFIGURATION = """\
[global]
fsid = {fsid}
mon_host = v2:{host}:{port}
public_addr = {host}
cluster_addr = {host}
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
# The gateway would want to encrypt, which takes keys.
ms_mon_client_mode = crc
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
run_dir = {folder}
crash_dir = {folder}
admin_socket = {folder}/$name-$pid.asok
pid_file = {folder}/$name-$pid.pid
log_file = {folder}/$name.log
log_to_stderr = false
err_to_stderr = true
# Memory comes with no redundancy, and is never too full for the monitor.
osd_objectstore = memstore
memstore_device_bytes = 8589934592
osd_pool_default_size = 1
osd_pool_default_pg_num = 1
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
# Seconds that each of the gateway's pools would wait for others to be made along with it.
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
"""


def missing() -> str | None:
    """What to install before ``serving`` can work, in a sentence; None when all is there."""
    absent = [name for name in BINARIES if shutil.which(name) is None]
    return f"{', '.join(absent)}: not on PATH; {INSTALL}" if absent else None


@contextmanager
def serving(*buckets: str) -> Iterator[S3Server]:
    """Serve S3 with these buckets, empty, until the end of the block.

    Raises:
        RuntimeError: a program is missing or failed; the message ends with what it said.
    """
    absent = missing()
    if absent is not None:
        raise RuntimeError(absent)
    with TemporaryDirectory(prefix="rados-") as name, ExitStack() as daemons:
        cluster = _Cluster(Path(name), daemons)
        cluster.start_storage()
        user = ("--uid=tester", "--display-name=tester", f"--access-key={ACCESS_KEY}", f"--secret={SECRET_KEY}")
        cluster.run("radosgw-admin", "user", "create", *user)
        port = _free_port()
        gateway = cluster.start("radosgw", "-n", "client.admin", f"--rgw_frontends=beast endpoint={HOST}:{port}")
        server = S3Server(f"http://{HOST}:{port}", gateway.pid)
        cluster.wait_for(server, gateway)
        for bucket in buckets:
            server.create_bucket(bucket)
        yield server


class _Cluster:
    def __init__(self, folder: Path, daemons: ExitStack) -> None:
        self._folder, self._daemons = folder, daemons
        self._file = folder / "ceph.conf"
        self._fsid, self._port = str(uuid.uuid4()), _free_port()
        for part in ("mon", "osd", "rgw"):
            (folder / part).mkdir()
        text = CONFIGURATION.format(fsid=self._fsid, host=HOST, port=self._port, folder=folder)
        self._file.write_text(text)

    def start_storage(self) -> None:
        """Monitor and storage, ready."""
        address, plan = f"[v2:{HOST}:{self._port}]", self._folder / "monmap"
        self.run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", address, str(plan))
        self.run("ceph-mon", "-i", "a", "--mkfs", "--monmap", str(plan))
        self.start("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        self.run("ceph", "osd", "new", disk)
        self.run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        self.start("ceph-osd", "-i", "0")

    def run(self, *command: str) -> None:
        """Run a program of Ceph's to its end."""
        try:
            done = subprocess.run(self._with_file(command), capture_output=True, text=True, timeout=START_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{' '.join(command[:3])}: no end after {START_SECONDS} s{self._logged()}") from error
        if done.returncode:
            raise RuntimeError(f"{' '.join(command[:3])} ended with {done.returncode}: {done.stderr}{self._logged()}")

    def start(self, *command: str) -> subprocess.Popen[bytes]:
        """Start a daemon, which ends with the block, or with the thread that started it."""
        bound = ["setpriv", "--pdeathsig", "KILL", *self._with_file(command), "-f"]
        said = self._daemons.enter_context((self._folder / f"{command[0]}.said").open("wb"))
        daemon = subprocess.Popen(bound, stdin=subprocess.DEVNULL, stdout=said, stderr=said)
        self._daemons.callback(daemon.wait, END_SECONDS)
        self._daemons.callback(daemon.kill)
        return daemon

    def wait_for(self, server: S3Server, gateway: subprocess.Popen[bytes]) -> None:
        """Return when the gateway answers."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                server.request("GET", "/")
                return
            except OSError as error:
                if gateway.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"radosgw did not answer at {server.endpoint}{self._logged()}") from error
            time.sleep(POLL_SECONDS)

    def _with_file(self, command: Sequence[str]) -> list[str]:
        name, *rest = command
        return [name, *rest] if name == "monmaptool" else [name, "--conf", str(self._file), *rest]

    def _logged(self) -> str:
        """The end of what the daemons have said."""
        found = [*self._folder.glob("*.said"), *self._folder.glob("*.log")]
        return "".join(f"\n--- {file.name}\n{file.read_text(errors='replace')[-1000:]}" for file in found)


def _free_port() -> int:
    with socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def main() -> int:
    """Exit status of the command; 1 when the server cannot be started."""
    absent = missing()
    if absent is not None:
        print(absent, file=sys.stderr)
        return 1
    with serving() as server:
        environment = os.environ | server.environment | {RUNNING: server.endpoint}
        return subprocess.run(sys.argv[1:] or ["env"], env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
