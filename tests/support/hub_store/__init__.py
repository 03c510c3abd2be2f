"""A Hugging Face Hub on loopback: storage buckets, and their Xet content store, with faults on order.

The real clients (huggingface_hub with hf_xet, obstore) work with it unchanged. ::

    with serving(tmp_path / "hub") as hub:
        hub.create_bucket("team/run")
        subprocess.run([...], env={**os.environ, **hub.environment})
        hub.fault("status", "/batch", code=503, times=2)
        assert not hub.requests("/cdn/xorb")
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "hf_loopback"
CONTROL_SECONDS = 120


@dataclass
class Hub:
    """A running server.

    Attributes:
        endpoint: for HF_ENDPOINT. token: may write. home: a fresh HF_HOME.
    """

    endpoint: str
    home: Path
    token: str = TOKEN

    @property
    def environment(self) -> dict[str, str]:
        """For a client's process, to be laid over os.environ before it imports huggingface_hub."""
        return {
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(self.home),
            "HF_TOKEN": self.token,
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
        self._control("DELETE", "/_faults", {"path": path})

    def requests(self, path: str = "") -> list[dict[str, Any]]:
        """What was asked, in order: method, path, query, range, status, sent (bytes), fault. ``path``: a pattern."""
        return [one for one in self._control("GET", "/_requests") if re.search(path, one["path"])]

    def forget_requests(self) -> None:
        self._control("DELETE", "/_requests")

    def options(self) -> dict[str, Any]:
        found: dict[str, Any] = self._control("GET", "/_options")
        return found

    def change(self, **options: Any) -> None:
        """Change the server's options; see tests.support.hub_store.server.Options."""
        self._control("POST", "/_options", options)

    def expire_tokens(self) -> None:
        """Every token of the content store and every signed address given out so far is void."""
        self._control("DELETE", "/_tokens")

    def create_bucket(self, id: str) -> None:
        self._control("POST", f"/api/buckets/{id}", {})

    def delete_bucket(self, id: str) -> None:
        self._control("DELETE", f"/api/buckets/{id}")

    def _control(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.token}"}
        with httpx.Client(timeout=CONTROL_SECONDS, headers=headers, trust_env=False) as client:
            answer = client.request(method, self.endpoint + path, json=body)
        answer.raise_for_status()
        return answer.json() if answer.content else None


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Hub]:
    """A server in a process of its own, until the end of the block.

    Args:
        folder: for its files. options: see tests.support.hub_store.server.Options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = json.dumps({"token": TOKEN, **options})
    command = [sys.executable, "-m", "tests.support.hub_store.server", str(folder), given]
    with (folder / "server.log").open("ab") as log:
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log)
    try:
        line = process.stdout.readline() if process.stdout else b""
        if not line:
            raise RuntimeError(f"server did not start: {(folder / 'server.log').read_text()[-2000:]}")
        yield Hub(line.decode().strip(), Path(tempfile.mkdtemp(prefix="client-", dir=folder)))
    finally:
        process.kill()
        process.communicate()
