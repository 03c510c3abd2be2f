"""An S3 server on loopback: moto in a process of its own, which lasts as long as the block.

with serving() as server:
    url = server.create_bucket("runs")
    os.environ.update(server.environment)
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from botocore.auth import S3SigV4Auth  # type: ignore[import-untyped]
from botocore.awsrequest import AWSRequest  # type: ignore[import-untyped]
from botocore.credentials import Credentials  # type: ignore[import-untyped]
from botocore.httpsession import URLLib3Session  # type: ignore[import-untyped]

from tests.support import google_store

ACCESS_KEY, SECRET_KEY, REGION = "loopback-key", "loopback-secret", "us-east-1"
HOST = "127.0.0.1"
RUNNING = "TEST_S3_ENDPOINT"
"""Variable with the endpoint of another server, for tests to run over in place of moto."""
START_SECONDS = 120
END_SECONDS = 120
KEEP_ALIVE = "keep-alive"
SETTINGS = {"MALLOC_ARENA_MAX": "2", "MALLOC_MMAP_THRESHOLD_": str(1 << 20), "MOTO_S3_DEFAULT_MAX_KEYS": "10"}
"""The server gives the memory of uploads back to the machine (200 MB instead of 520 remain after an object of 1 GB),
and lists by pages of 10 objects instead of 1000, so that clients turn pages."""


@dataclass(frozen=True)
class S3Server:
    """A server that answers, with path-style addresses and one user who may do all.

    Attributes:
        endpoint: ``http://127.0.0.1:PORT``. pid: the process that answers.
    """

    endpoint: str
    pid: int
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    region: str = REGION

    @property
    def environment(self) -> dict[str, str]:
        """What a client (obstore, boto3) needs in its environment to reach the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        }

    @property
    def port(self) -> int:
        port = urlsplit(self.endpoint).port
        if port is None:
            raise ValueError(f"endpoint is {self.endpoint!r}; it needs a port")
        return port

    def create_bucket(self, name: str) -> str:
        """Make a bucket (3 to 63 lower-case letters, digits, hyphens); its URL."""
        self.request("PUT", f"/{name}")
        return f"s3://{name}"

    def delete_bucket(self, name: str) -> None:
        self.request("DELETE", f"/{name}")

    def request(self, method: str, path: str) -> bytes:
        """One signed request without a body; raises RuntimeError for an answer other than 2xx."""
        request = AWSRequest(method, self.endpoint + path)
        S3SigV4Auth(Credentials(self.access_key, self.secret_key), "s3", self.region).add_auth(request)
        answer = URLLib3Session(timeout=START_SECONDS).send(request.prepare())
        if answer.status_code // 100 != 2:
            raise RuntimeError(f"{method} {path}: {answer.status_code} {answer.text}")
        body: bytes = answer.content
        return body


@contextmanager
def serving(*buckets: str, keep_alive: bool = False) -> Iterator[S3Server]:
    """Serve S3 with these buckets, empty, until the end of the block.

    Args:
        keep_alive: keep connections open, as stores on a network do.
    """
    command = [sys.executable, "-m", "tests.support.s3_server", *([KEEP_ALIVE] if keep_alive else [])]
    root = Path(__file__).resolve().parents[2]
    # The server ends when its stdin does: it does not outlive a test run that was killed.
    pipe = subprocess.PIPE
    settings = SETTINGS | {google_store.PUBLIC_KEY: google_store.public_pem()}
    with subprocess.Popen(command, cwd=root, env=os.environ | settings, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            if process.stdout is None:
                raise RuntimeError("tests.support.s3_server: stdout is no pipe")
            port = process.stdout.readline().strip()
            if not port:
                raise RuntimeError(f"tests.support.s3_server ended with {process.wait(END_SECONDS)} before it served")
            server = S3Server(f"http://{HOST}:{port}", process.pid)
            for bucket in buckets:
                server.create_bucket(bucket)
            yield server
        finally:
            process.kill()
