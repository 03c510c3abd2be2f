"""The loopback Hub as tests hold it, whether it runs in a process of its own or in a thread."""

import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "hf_loopback"
CONTROL_SECONDS = 120


@dataclass
class Hub:
    """A running server.

    Attributes:
        endpoint: for HF_ENDPOINT. token: may write; None: everybody may. home: a fresh HF_HOME.
    """

    endpoint: str
    token: str | None
    home: Path
    process: "subprocess.Popen[bytes] | None" = None

    @property
    def environment(self) -> dict[str, str]:
        """For a client's process, to be laid over os.environ before it imports huggingface_hub."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_TOKEN": self.token or "",
            "HF_HUB_DISABLE_XET": "0",
            "HF_HUB_OFFLINE": "0",
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1,localhost",
            "no_proxy": "127.0.0.1,localhost",
        }

    def fault(self, kind: str, path: str = "", **rule: Any) -> None:
        """Order a fault; see tests.support.hub_store.faults.Rule."""
        self._control("POST", "/_faults", {"kind": kind, "path": path, **rule})

    def faults(self) -> list[dict[str, Any]]:
        """The rules, with ``times`` and ``after`` as they are left."""
        found: list[dict[str, Any]] = self._control("GET", "/_faults")
        return found

    def clear_faults(self, path: str | None = None) -> None:
        """No faults any more, or none that were ordered with this ``path``; stalls end."""
        self._control("DELETE", "/_faults" + (f"?{urlencode({'path': path})}" if path else ""))

    def requests(self, path: str = "", method: str = ".*") -> list[dict[str, Any]]:
        """What was asked, in order: method, path, query, range, status, sent (bytes), fault. Patterns choose."""
        found = self._control("GET", "/_requests")
        return [one for one in found if re.search(path, one["path"]) and re.fullmatch(method, one["method"])]

    def forget_requests(self) -> None:
        self._control("DELETE", "/_requests")

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = self._control("GET", "/_options")
        return found

    def change(self, **options: Any) -> None:
        """Change the server's options; see tests.support.hub_store.access.Options."""
        self._control("POST", "/_options", options)

    def expire_tokens(self) -> None:
        """Every token of the content store and every signed address given out so far is void."""
        self.change(epoch=self.options()["epoch"] + 1)

    def create_bucket(self, id: str) -> str:
        """The id."""
        self._control("POST", f"/api/buckets/{id}", {})
        return id

    def delete_bucket(self, id: str) -> None:
        self._control("DELETE", f"/api/buckets/{id}")

    def _control(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.endpoint + path, data, method=method)
        request.add_header("Content-Type", "application/json")
        if self.token:
            request.add_header("Authorization", f"Bearer {self.token}")
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(request, timeout=CONTROL_SECONDS) as answer:
            return json.loads(answer.read() or b"null")


@contextmanager
def serving(folder: Path, port: int = 0, token: str | None = TOKEN, **options: Any) -> Iterator[Hub]:
    """A server in a process of its own, until the end of the block.

    Args:
        folder: the server's state, which a later server may take up. token: None: nobody needs one.
        options: see tests.support.hub_store.access.Options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = {"folder": folder, "port": port, **({"token": token} if token else {}), **options}
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    command = [sys.executable, "-m", "tests.support.hub_store", "--attached", *flags]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        line = process.stdout.readline() if process.stdout else b""
        if not line:
            raise RuntimeError(f"server did not start: {(folder / 'server.log').read_text()[-2000:]}")
        yield Hub(json.loads(line)["endpoint"], token, _home(folder), process)
    finally:
        process.kill()
        process.communicate()


def _home(folder: Path) -> Path:
    return Path(tempfile.mkdtemp(prefix="client-", dir=folder))
