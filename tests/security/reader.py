"""A process that reads hostile bytes for a test: each time in a fork with little memory and little time.

The fork has everything imported and compiled before its memory is limited, so that what it may allocate is what it
may allocate for the bytes it reads.
"""

import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SPARE_BYTES = 192 * 1024 * 1024
"""What a fork may allocate: far less than what any of the attacks declares."""
SECONDS = 10
"""What a fork may compute: none of the attacks may cost more. It may wait for a busy machine."""
PATIENCE_SECONDS = 300

Door = Callable[..., Any]


@dataclass(frozen=True)
class Outcome:
    """What came of one attempt.

    Attributes:
        kind, message: of the DeltaSyncError that was raised; None for none. A name in brackets is another exception's.
        result: what the door returned. seconds: it computed.
    """

    kind: str | None
    message: str | None
    result: Any
    seconds: float


class Reader:
    """Attempts, one at a time."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def __call__(self, door: str, *arguments: Any, spare: int = SPARE_BYTES) -> Outcome:
        """Go through a door of ``DOORS`` with these arguments."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        texts = [str(item) if isinstance(item, Path) else item for item in arguments]
        self._process.stdin.write(json.dumps([door, texts, spare]) + "\n")
        self._process.stdin.flush()
        return Outcome(**json.loads(self._process.stdout.readline()))

    def refused(self, door: str, *arguments: Any, kind: str | tuple[str, ...], spare: int = SPARE_BYTES) -> str:
        """The message of the one error, which has that kind, fits on a screen, and could not forge a line."""
        outcome = self(door, *arguments, spare=spare)
        kinds = (kind,) if isinstance(kind, str) else kind
        assert outcome.kind in kinds, outcome
        assert outcome.message is not None
        assert outcome.message.isprintable(), outcome
        assert len(outcome.message) < 1500, outcome
        return outcome.message

    def reads(self, door: str, *arguments: Any, spare: int = SPARE_BYTES) -> Any:
        """What the door returns; it raises nothing."""
        outcome = self(door, *arguments, spare=spare)
        assert outcome.kind is None, outcome
        return outcome.result


@contextmanager
def started() -> Iterator[Reader]:
    """The process, for as long as it is needed."""
    # One arena: each further one would take address space that has nothing to do with the bytes.
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.security.reader"]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield Reader(process)
        finally:
            process.kill()


# Below: in the process.


def _head(url: str) -> int:
    from vllm_delta_sync.client import open_run

    return open_run(url).head().version


def _tensors(url: str, version: int | str | None = None, base: str | None = None) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: all of ``tensors()`` but the wrapping, which would import torch in each fork."""
    from vllm_delta_sync.client import open_run

    run = open_run(url)
    rows = zip(run.table, run.snapshot(version, base).bits, strict=True)
    return {spec.name: sha256(bits.tobytes()).hexdigest() for spec, bits in rows}


def _verify(url: str) -> int:
    from vllm_delta_sync.client import open_run

    return open_run(url).verify().versions


def _findings(url: str) -> list[tuple[str, str, str]]:
    from vllm_delta_sync.client import open_run

    found = open_run(url).verify(findings=True).findings
    return [(finding.key, finding.error.kind, finding.error.message) for finding in found]


def _changes(url: str, version: int) -> int:
    """The objects of a version alone: decoded, without the weights that they change."""
    from vllm_delta_sync.client import open_run

    run = open_run(url)
    return run.changes(run.manifest(version)).changed


def _pieces(url: str, version: int, scratch: str) -> int:
    """As ``_changes``, as large objects are read: from scratch files, piece by piece."""
    from vllm_delta_sync.client import open_run
    from vllm_delta_sync.codec.delta_reader import pieces_of
    from vllm_delta_sync.run.objects import open_step_objects
    from vllm_delta_sync.run.read_plan import Step

    run = open_run(url)
    parts = open_step_objects(Step(run, run.manifest(version)), Path(scratch))
    return sum(piece.changed for piece in pieces_of(parts))


def _merged(url: str, first: int, last: int) -> int:
    from vllm_delta_sync.client import open_run

    run = open_run(url)
    return run.changes(run.merged_delta(first, last)).changed


def _anchor(url: str, version: int) -> int:
    from vllm_delta_sync.client import open_run

    return open_run(url).anchor(version).version


def _checkpoint(path: str) -> int:
    from vllm_delta_sync.tensors.checkpoint import Checkpoint

    checkpoint = Checkpoint(path)
    return sum(int(checkpoint.bits(name).sum(dtype="u8")) * 0 + 1 for name in checkpoint.specs)


def _cached(folder: str, key: str, size: int, digest: str, stored: str) -> int:
    """An object through the node's cache, which downloads it from a bucket."""
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.cache import ObjectCache
    from vllm_delta_sync.format.manifest import ObjectRef

    ref = ObjectRef(key=key, bytes=size, sha256=digest)
    return len(ObjectCache(Path(folder), 2**60).get(ref, open_bucket(stored)))


def _get(url: str, key: str) -> str:
    from vllm_delta_sync.bucket import open_bucket

    return open_bucket(url).get(key, max_bytes=4096).hex()


def _list(url: str, prefix: str = "") -> list[str]:
    from vllm_delta_sync.bucket import open_bucket

    return [item.key for item in open_bucket(url).list(prefix)]


def _cli(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``delta-sync``."""
    import io
    from contextlib import redirect_stderr, redirect_stdout

    from vllm_delta_sync import cli

    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.run(list(arguments))
    return code, out.getvalue(), err.getvalue()


DOORS: dict[str, Door] = {
    "head": _head,
    "tensors": _tensors,
    "verify": _verify,
    "findings": _findings,
    "changes": _changes,
    "pieces": _pieces,
    "merged": _merged,
    "anchor": _anchor,
    "checkpoint": _checkpoint,
    "cached": _cached,
    "get": _get,
    "list": _list,
    "cli": _cli,
}


def _attempt(door: str, arguments: list[Any], spare: int) -> dict[str, Any]:
    from vllm_delta_sync.errors import DeltaSyncError

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + spare
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    signal.alarm(PATIENCE_SECONDS)
    begun = time.process_time()
    answer: dict[str, Any] = {"kind": None, "message": None, "result": None}
    try:
        answer["result"] = DOORS[door](*arguments)
    except DeltaSyncError as error:
        answer.update(kind=error.kind, message=error.message)
    except BaseException as error:  # noqa: BLE001  what else escapes is what the tests look for
        answer.update(kind=f"[{type(error).__name__}]", message=str(error)[:500])
    answer["seconds"] = time.process_time() - begun
    return answer


def _fork(door: str, arguments: list[Any], spare: int) -> str:
    """The answer of a fork, as a line; it says so if the fork did not live to give one."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        text = json.dumps(_attempt(door, arguments, spare))
        with open(write, "w") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    with open(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if text:
        return text
    return json.dumps({"kind": f"[status {status}]", "message": None, "result": None, "seconds": float(SECONDS)})


def _warm() -> None:
    """Import and compile all that the doors use."""
    import logging
    import tempfile

    from tests.support.written import Written

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as folder:
        written = Written(Path(folder) / "run", 1)
        written.publish(codec="raw")
        written.writer.merge(0, 1)
        url = str(written.folder)
        for door, arguments in (
            ("tensors", []),
            ("verify", []),
            ("findings", []),
            ("changes", [1]),
            ("changes", [2]),
            ("pieces", [1, folder]),
            ("list", []),
        ):
            DOORS[door](url, *arguments)
        for command in (
            ["verify", "--bucket", url],
            ["log", "--bucket", url],
            ["inspect", "--bucket", url, "--version", "1"],
        ):
            _cli(*command)


def main() -> None:
    """Serve requests, one line each, until there are no more."""
    _warm()
    # Else each fork would copy what the collector looks at.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        print(_fork(*json.loads(line)), flush=True)


if __name__ == "__main__":
    main()
