"""An S3 server on loopback: moto in a process of its own, which lasts as long as the block.

with serving() as server:
    url = server.create_bucket("runs")
    os.environ.update(server.environment)
"""

import hashlib
import hmac
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlsplit

from tests.support import google_store

ACCESS_KEY, SECRET_KEY, REGION = "loopback-key", "loopback-secret", "us-east-1"
HOST = "127.0.0.1"
RUNNING = "TEST_S3_ENDPOINT"
"""Variable with the endpoint of another server, for tests to run over in place of moto."""
START_SECONDS = 120
END_SECONDS = 120
ALGORITHM = "AWS4-HMAC-SHA256"
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
        """Remove an empty bucket."""
        self.request("DELETE", f"/{name}")

    def request(self, method: str, path: str) -> bytes:
        """One signed request without a body; raises RuntimeError for an answer other than 2xx."""
        stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {
            "host": f"{HOST}:{self.port}",
            "x-amz-content-sha256": hashlib.sha256(b"").hexdigest(),
            "x-amz-date": stamp,
        }
        scope = f"{stamp[:8]}/{self.region}/s3/aws4_request"
        proof = signature(self.secret_key, method, path, headers, scope)
        signed = f"SignedHeaders={';'.join(headers)}, Signature={proof}"
        authorization = f"{ALGORITHM} Credential={self.access_key}/{scope}, {signed}"
        connection = HTTPConnection(HOST, self.port, timeout=START_SECONDS)
        try:
            connection.request(method, path, headers={**headers, "Authorization": authorization, "Content-Length": "0"})
            answer = connection.getresponse()
            body = answer.read()
        finally:
            connection.close()
        if answer.status // 100 != 2:
            raise RuntimeError(f"{method} {path}: {answer.status} {body.decode(errors='replace')}")
        return body


def signature(secret: str, method: str, target: str, headers: Mapping[str, str], scope: str) -> str:
    """Signature (version 4, hex) of a request.

    Args:
        target: path and query as sent. headers: the signed ones, in the order of their names, which are in lower case;
            ``x-amz-date`` and ``x-amz-content-sha256`` among them. scope: ``YYYYMMDD/REGION/s3/aws4_request``.
    """
    parts = urlsplit(target)
    query = sorted(
        (quote(name, safe="-_.~"), quote(value, safe="-_.~"))
        for name, value in parse_qsl(parts.query, keep_blank_values=True)
    )
    lines = [
        method,
        parts.path or "/",
        "&".join(f"{name}={value}" for name, value in query),
        *(f"{name}:{' '.join(value.split())}" for name, value in headers.items()),
        "",
        ";".join(headers),
        headers["x-amz-content-sha256"],
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
    key = f"AWS4{secret}".encode()
    for step in scope.split("/"):
        key = hmac.digest(key, step.encode(), "sha256")
    text = f"{ALGORITHM}\n{headers['x-amz-date']}\n{scope}\n{digest}"
    return hmac.digest(key, text.encode(), "sha256").hex()


@contextmanager
def serving(*buckets: str, keep_alive: bool = False) -> Iterator[S3Server]:
    """Serve S3 with these buckets, empty, until the end of the block.

    Args:
        keep_alive: keep connections open, as stores on a network do.

    Raises:
        RuntimeError: the server did not start; it has said why on stderr.
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
