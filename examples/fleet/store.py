"""An S3 server on loopback for the length of a block, and what machines behind a link need to reach it."""

import json
import os
import select
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.demo.processes import Child, DemoError
from tests.support import s3_store

START_SECONDS = 120.0


@contextmanager
def serving(folder: Path, log: Path) -> Iterator[s3_store.S3Server]:
    """Serve S3 with its objects below ``folder``. Raises DemoError: it did not start."""
    folder.mkdir()
    environment = os.environ | s3_store.SETTINGS | {"TMPDIR": str(folder)}
    command = [sys.executable, "-m", "examples.fleet.s3"]
    with Child("the S3 server", command, log, environment=environment, talk=True) as child:
        ready = select.select([child.lines], [], [], START_SECONDS)[0]
        line = child.lines.readline() if ready else ""
        if not line:
            raise DemoError(f"the S3 server did not start; the end of {log.name}:\n{child.tail()}")
        yield s3_store.S3Server(f"http://{s3_store.HOST}:{json.loads(line)}", child.process.pid)


def through(server: s3_store.S3Server, port: int, host: str = s3_store.HOST) -> dict[str, str]:
    """Variables of a client that reaches the server by another port, or at another address."""
    return server.environment | {"AWS_ENDPOINT_URL": f"http://{host}:{port}"}
