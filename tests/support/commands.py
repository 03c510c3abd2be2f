"""``delta-sync`` commands, called in this process. Only tests of how a process ends start one."""

import io
import json
import os
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from vllm_delta_sync import cli


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit code and what it printed."""

    code: int
    out: str
    err: str


def _variables(environment: dict[str, str]) -> dict[str, str]:
    """This process's variables without settings of ours, and those that are given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DELTA_SYNC_")}
    return {**kept, **environment}


def delta_sync(*arguments: object, encoding: str = "utf-8", **environment: str) -> Done:
    """Run a command by its entry point; ``encoding`` is what the terminal knows."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding) for _ in range(2))
    with (
        mock.patch.dict(os.environ, _variables(environment), clear=True),
        mock.patch.object(sys, "argv", ["delta-sync", *map(str, arguments)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            code = cli.main()
        except SystemExit as end:  # --help
            code = int(end.code or 0)
    texts = []
    for stream in (out, err):
        stream.flush()
        texts.append(stream.buffer.getvalue().decode(encoding))  # type: ignore[attr-defined]
    return Done(code, *texts)


def shown(*arguments: object, code: int = 0, **environment: str) -> str:
    """What a command prints for people; it ends with that code and reports no error."""
    done = delta_sync(*arguments, **environment)
    assert (done.code, done.err) == (code, ""), done
    return done.out


def parsed(line: str) -> Any:
    """One line of ``--json``, which has the form that all lines have."""
    value = json.loads(line)
    assert isinstance(value["ok"], bool)
    assert value.keys() - {"data"} == {"ok", "command"} | (set() if value["ok"] else {"error"}), value
    if not value["ok"]:
        assert [type(value["error"][member]) for member in ("kind", "message")] == [str, str]
    return value


def envelope(*arguments: object, code: int = 0, **environment: str) -> Any:
    """The one line that a command prints with ``--json``; its ``ok`` says what the exit code says."""
    (line,) = shown(*arguments, "--json", code=code, **environment).splitlines()
    value = parsed(line)
    assert value["ok"] == (code == 0)
    return value


def answer(*arguments: object, code: int = 0, **environment: str) -> Any:
    """The data that a command prints with ``--json``."""
    return envelope(*arguments, code=code, **environment)["data"]


def refusal(*arguments: object, code: int, **environment: str) -> Any:
    """The error that a command ends with: its kind and its message."""
    return envelope(*arguments, code=code, **environment)["error"]


def kind(code: int, *arguments: object, **environment: str) -> str:
    """The kind of the error that a command ends with."""
    return str(refusal(*arguments, code=code, **environment)["kind"])


def process(*arguments: object, **environment: str) -> Done:
    """Run a command in a process of its own, as users do."""
    command = [sys.executable, "-m", "vllm_delta_sync.cli", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, env=_variables(environment))
    return Done(done.returncode, done.stdout, done.stderr)
