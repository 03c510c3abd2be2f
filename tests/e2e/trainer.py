"""A trainer in a process of its own: run as ``python -m tests.e2e.trainer FAMILY CHECKPOINT RUN SHARD_BYTES WRITERS``.

For each line of standard input it trains a step and publishes it, and answers with the version's number. With ``die``
in place of the numbers it publishes a step, and is killed by SIGKILL after the objects and before the manifest.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from hashlib import sha256
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.format.manifest import ObjectRef, object_key


def main(family: str, base: str, url: str, shard_bytes: str, writers: str = "0") -> None:
    dies = shard_bytes == "die"
    putting = upload_by_processes(url, int(writers)) if int(writers) else set()
    # Not before, and not above: those processes import this module too.
    from tests.support.tiny import make_model, train_steps
    from trainer_side import Publisher

    model = make_model(family, seed=5)
    steps = train_steps(model, lr=3e-5)
    with Publisher(model, bucket=url, base=base, shard_bytes=2**30 if dies else int(shard_bytes)) as publisher:
        print("ready", flush=True)
        if dies:
            die_before_the_manifest()
        for number, _ in enumerate(["die"] if dies else sys.stdin, start=1):
            next(steps)
            result = publisher.publish(step=number, wait=True)
            publisher.flush()
            print(result.version, flush=True)
    if len(putting) != int(writers):
        raise SystemExit(f"{len(putting)} of {writers} processes have put objects")


def upload_by_processes(url: str, writers: int) -> set[int]:
    """Let so many processes put objects, each with a bucket of its own, as the ranks of a sharded trainer would.

    Returns:
        the ids of the processes that have put some, which grows.
    """
    from trainer_side.writer import RunWriter

    pool = ProcessPoolExecutor(writers, get_context("spawn"))
    # All at once, so that each starts one.
    list(pool.map(cached_url, [url] * writers))

    putting: set[int] = set()

    def put(self: RunWriter, data: bytes) -> ObjectRef:
        process, ref = pool.submit(put_by_itself, url, data).result()
        putting.add(process)
        return ref

    RunWriter.put_object = put  # type: ignore[assignment, method-assign]
    return putting


def put_by_itself(url: str, data: bytes) -> tuple[int, ObjectRef]:
    """Store one object of a version; the work of one writer, whose process id comes first."""
    digest = sha256(data).hexdigest()
    ref = ObjectRef(key=object_key(digest), bytes=len(data), sha256=digest)
    cached_bucket(url).put(ref.key, data)
    return os.getpid(), ref


@cache
def cached_bucket(url: str) -> Bucket:
    return open_bucket(url)


def cached_url(url: str) -> str:
    return cached_bucket(url).url


def die_before_the_manifest() -> None:
    """Be killed as soon as the next manifest is about to be written."""
    from vllm_delta_sync.bucket.local import LocalBucket

    original = LocalBucket.put

    def put(self: LocalBucket, key: str, data: Any, *, if_absent: bool = False) -> None:
        if key.startswith("versions/"):
            os.kill(os.getpid(), signal.SIGKILL)
        original(self, key, data, if_absent=if_absent)

    LocalBucket.put = put  # type: ignore[method-assign]


class Trainer:
    """Drives the process."""

    def __init__(
        self,
        family: str,
        base: Path,
        url: str,
        environment: Mapping[str, str] | None = None,
        shard_bytes: int = 2**30,
        writers: int = 0,
    ) -> None:
        """``writers``: processes that put objects, 0 for the publisher itself."""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.trainer", family, str(base), url, str(shard_bytes), str(writers)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(environment or {})},
        )
        assert self._line() == "ready"

    def step(self) -> int:
        """Train and publish; the version."""
        if self.process.stdin is None:
            raise AssertionError("the trainer has no input")
        self.process.stdin.write("step\n")
        self.process.stdin.flush()
        return int(self._line())

    def close(self) -> None:
        """End the process."""
        if self.process.poll() is None and self.process.stdin is not None:
            self.process.stdin.close()
            assert self.process.wait(300) == 0

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout is not None else ""
        assert line, f"the trainer ended with {self.process.wait(120)}"
        return line.strip()


if __name__ == "__main__":
    main(*sys.argv[1:6])
