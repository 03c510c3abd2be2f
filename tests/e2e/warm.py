"""Processes that are forked from one that has imported vLLM already: real servers, without the seconds of each import.

A server is three processes or more, one after the other, and each takes seconds of a core to import vLLM and torch.
Here they are forks: of a process that has imported both and done nothing else, and of one another, as vLLM allows by
``VLLM_WORKER_MULTIPROC_METHOD=fork``, but not on a CPU. ``/proc`` then shows the command line and environment of the
first process, and OpenMP has one thread, bound to no core. What looks there starts cold (the siege, for the sake of
tests/e2e/test_secrets.py), and so does what is decided at import (``HF_ENDPOINT``; that several API servers add up
their metrics), and the demo and the examples.

``python -m tests.e2e.warm`` reads a line of JSON for each process to start or to look at, and answers with a line.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
    # Since 0.33 vLLM gives each data parallel engine on a CPU a memory node of its own, and fails if there are too few.
    # This switches that off by being set; "0" switches nothing else on.
    "VLLM_CPU_SIM_MULTI_NUMA": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "60",
    "HF_HUB_OFFLINE": "1",
}
LOOK_SECONDS = 0.002
# Not our own packages: each process imports those, so that what PYTHONPATH and sitecustomize change of them is changed.
IMPORTS = (
    "vllm.entrypoints.cli.main",
    "vllm.entrypoints.cli.serve",
    "vllm.entrypoints.openai.api_server",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.models.qwen3_moe",
    "vllm.v1.sample.sampler",
    "transformers.models.qwen3.modeling_qwen3",
    "transformers.models.llama.modeling_llama",
    "cryptography.hazmat.primitives.asymmetric.ed25519",
    "numba",
    "zmq.asyncio",
    "zstandard",
)


class WarmProcess:
    """A process, with what the tests use of ``subprocess.Popen``. It leads a process group."""

    def __init__(self, nursery: "_Nursery", pid: int) -> None:
        self._nursery = nursery
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Exit status, negative for the signal that ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Exit status."""
        ends = None if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            if ends is not None and time.monotonic() > ends:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class _Nursery:
    """The process that has imported everything, from the side of the tests."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.e2e.warm"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            # A fork inherits no other thread, and OpenMP would wait for them.
            env={**os.environ, **ENVIRONMENT, "OMP_NUM_THREADS": "1"},
            # Ctrl-C is for the tests, which end their servers in order.
            process_group=0,
        )
        atexit.register(self.close)

    def ask(self, order: dict[str, Any]) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            print(json.dumps(order), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        assert answer, f"the process that servers are forked from has ended, with {self._process.wait(60)}"
        return json.loads(answer)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(60)


@functools.cache
def _nursery() -> _Nursery:
    return _Nursery()


def start(command: Sequence[str], log: Path, environment: Mapping[str, str]) -> WarmProcess:
    """Run a Python program, or ``sys.executable -m MODULE``, in a process group of its own.

    Args:
        log: gets all that it says.
        environment: on top of ours.
    """
    nursery = _nursery()
    order = {
        "command": list(command),
        "log": str(log.absolute()),
        "folder": os.getcwd(),
        "environment": {**os.environ, **ENVIRONMENT, **environment},
    }
    return WarmProcess(nursery, nursery.ask(order))


@dataclass(frozen=True)
class Ended:
    """A program that came to its end: exit status, negative for the signal that ended it, and what it said."""

    status: int
    said: str


def run(module: str, *arguments: str, seconds: float, environment: Mapping[str, str] | None = None) -> Ended:
    """Run ``python -m MODULE ARGUMENTS`` to its end; who takes longer is ended, with all that it started."""
    file, name = tempfile.mkstemp(suffix=".log")
    os.close(file)
    log = Path(name)
    process = start([sys.executable, "-m", module, *arguments], log, environment or {})
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{module} takes more than {seconds} s:\n{log.read_text()[-4000:]}") from None
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        status, said = process.wait(60), log.read_text(errors="replace")
        log.unlink()
    return Ended(status, said)


def see(
    module: str, root: Path, *arguments: str, seconds: float = 600, environment: dict[str, str] | None = None
) -> Any:
    """What a program that ends well has written to ``seen.json`` in the folder, its first argument."""
    environment = {"VLLM_PLUGINS": "delta_sync", **(environment or {})}
    done = run(module, str(root), *arguments, seconds=seconds, environment=environment)
    assert done.status == 0, done.said[-6000:]
    return json.loads((root / "seen.json").read_text())


class _Exec(BaseException):
    """A program replaces itself by another."""

    def __init__(self, command: Sequence[str]) -> None:
        super().__init__(*command)
        self.command = list(command)


def _exec(path: str, command: Sequence[str]) -> NoReturn:
    raise _Exec(command)


def _become(order: dict[str, Any]) -> None:
    """Run the program to its end, in the process that was forked for it."""
    os.setpgid(0, 0)
    with open(order["log"], "wb") as log, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    _import_site(os.environ.get("PYTHONPATH", ""))
    contexts: dict[str, Any] = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    os.execv = _exec  # type: ignore[assignment]
    command = order["command"]
    while command:
        try:
            _run(command)
            command = []
        except _Exec as becoming:
            command = becoming.command


def _import_site(python_path: str) -> None:
    """What Python does at its start: PYTHONPATH, and ``sitecustomize`` where there is one."""
    sys.path[:0] = filter(None, python_path.split(os.pathsep))
    sys.modules.pop("sitecustomize", None)
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module("sitecustomize")


def _run(command: list[str]) -> None:
    if command[:2] == [sys.executable, "-m"]:
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv = command
        runpy.run_path(command[0], run_name="__main__")


def _import_all() -> None:
    from vllm.platforms import current_platform

    # Small functions of vLLM's, such as the rank of a log probability, would be compiled in each run of the tests.
    backend = type(current_platform).simple_compile_backend
    type(current_platform).simple_compile_backend = "eager"
    for name in IMPORTS:
        # What a release of vLLM has elsewhere is imported by who needs it.
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    type(current_platform).simple_compile_backend = backend
    _let_llvmlite_be_scanned()
    registry: Any = sys.modules.get("vllm.model_executor.models.registry")
    if hasattr(registry, "_run_in_subprocess"):
        # What vLLM asks a class of models when it first meets it, it asks in a process that imports everything anew, to
        # leave GPUs alone.
        registry._run_in_subprocess = lambda function: function()
    queues: Any = sys.modules.get("vllm.distributed.device_communicators.shm_broadcast")
    if hasattr(queues, "SpinCondition"):
        queues.SpinCondition.__init__ = _sleeping(queues.SpinCondition.__init__)


def _let_llvmlite_be_scanned() -> None:
    """Do what ``format/kernels.py`` does where it imports numba, for processes that do not import that."""
    from llvmlite.binding import ffi  # type: ignore[import-untyped, unused-ignore]

    library: Any = type(ffi.lib)
    original = library.__getattr__

    def look_up(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    library.__getattr__ = look_up


def _sleeping(original: Callable[..., None]) -> Callable[..., None]:
    """Let readers of a queue between vLLM's processes sleep as soon as it is empty, not after a second of looking.

    A server that a test leaves alone would keep a core busy: it has something to say to its ranks more often than that.
    """

    @functools.wraps(original)
    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if self.is_reader:
            # At first it looks as long as ever, until its sockets are connected.
            self.last_read += self.busy_loop_s
            self.busy_loop_s = LOOK_SECONDS

    return made


def _main() -> None:
    """Start processes until the tests hang up. The processes that are started return from here as well."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    _import_all()
    # Else each fork would copy what the collector looks at.
    gc.collect()
    gc.freeze()
    ended: dict[int, int] = {}
    for line in sys.stdin:
        order = json.loads(line)
        if "poll" in order:
            pid = order["poll"]
            if pid not in ended:
                gone, status = os.waitpid(pid, os.WNOHANG)
                if gone:
                    ended[pid] = os.waitstatus_to_exitcode(status)
            answer = ended.get(pid)
        else:
            answer = os.fork()
            if not answer:
                answers.close()
                _become(order)
                return
            # Both do: whoever is asked of the group next finds it made.
            with contextlib.suppress(ProcessLookupError):
                os.setpgid(answer, answer)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _main()
