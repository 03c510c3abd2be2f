"""A process that reads hostile bytes for a test: each time in a fork with little memory and little time.

The fork has everything imported and compiled before its memory is limited, so that what it may allocate is what it
may allocate for the bytes it reads.
"""

import gc
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from tests.support.commands import delta_sync
from tests.support.written import Written
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.cache import ObjectCache
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_reader import pieces_of
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.format.manifest import ObjectRef
from vllm_delta_sync.run.objects import open_step_objects
from vllm_delta_sync.run.read_plan import Step
from vllm_delta_sync.tensors.checkpoint import Checkpoint

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


def _tensors(url: str, version: int | str | None = None, base: str | None = None) -> dict[str, str]:
    """SHA-256 of each tensor's bytes: all of ``tensors()`` but the wrapping, which would import torch in each fork."""
    run = open_run(url)
    rows = zip(run.table, run.snapshot(version, base).bits, strict=True)
    return {spec.name: sha256(bits.tobytes()).hexdigest() for spec, bits in rows}


def _findings(url: str) -> list[tuple[str, str, str]]:
    found = open_run(url).verify(findings=True).findings
    return [(finding.key, finding.error.kind, finding.error.message) for finding in found]


def _changes(url: str, version: int) -> int:
    """The objects of a version alone: decoded, without the weights that they change."""
    run = open_run(url)
    return run.changes(run.manifest(version)).changed


def _pieces(url: str, version: int, scratch: str) -> int:
    """As ``_changes``, as large objects are read: from scratch files, piece by piece."""
    run = open_run(url)
    parts = open_step_objects(Step(run, run.manifest(version)), Path(scratch))
    return sum(piece.changed for piece in pieces_of(parts))


def _merged(url: str, first: int, last: int) -> int:
    run = open_run(url)
    return run.changes(run.merged_delta(first, last)).changed


def _checkpoint(path: str) -> int:
    checkpoint = Checkpoint(path)
    return sum(int(checkpoint.bits(name).sum(dtype="u8")) * 0 + 1 for name in checkpoint.specs)


def _cached(folder: str, key: str, size: int, digest: str, stored: str) -> int:
    """An object through the node's cache, which downloads it from a bucket."""
    ref = ObjectRef(key=key, bytes=size, sha256=digest)
    return len(ObjectCache(Path(folder), 2**60).get(ref, open_bucket(stored)))


DOORS: dict[str, Door] = {
    "head": lambda url: open_run(url).head().version,
    "tensors": _tensors,
    "verify": lambda url: open_run(url).verify().versions,
    "findings": _findings,
    "changes": _changes,
    "pieces": _pieces,
    "merged": _merged,
    "anchor": lambda url, version: open_run(url).anchor(version).version,
    "checkpoint": _checkpoint,
    "cached": _cached,
    "list": lambda url: [item.key for item in open_bucket(url).list()],
    # Exit code, stdout and stderr of a command.
    "cli": lambda *arguments: astuple(delta_sync(*arguments)),
}


def _attempt(door: str, arguments: list[Any], spare: int) -> dict[str, Any]:
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
            delta_sync(*command)


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
