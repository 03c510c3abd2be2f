"""A plain ``vllm serve`` where this package is merely installed: it is as it would be without it.

Two servers of a small model, with nothing of ours set: one as vLLM starts it, and one that loads all plugins but ours.
``tests/receiver/test_plugin.py`` checks one process, in each order of imports.
"""

import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.servers import VLLM_FLAGS, serving
from tests.e2e.warm import ENVIRONMENT
from tests.receiver.test_plugin import CHANGED, LIGHT
from tests.support.snapshot import differences
from tests.support.tiny import make_model, save_checkpoint
from vllm_delta_sync.engine.names import PLUGIN_NAME

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
OTHERS = ",".join(
    sorted({entry.name for entry in entry_points(group="vllm.general_plugins")} - {PLUGIN_NAME}) or ["none"]
)
# Each process of the server answers a signal with a file.
SITE = """
import json, os, signal

def tell(*_):
    from tests.support.snapshot import snapshot
    folder = os.environ["SNAPSHOTS"]
    with open(f"{folder}/{os.getpid()}.part", "w") as file:
        json.dump(snapshot(), file)
    os.rename(file.name, f"{folder}/{os.getpid()}.json")

signal.signal(signal.SIGUSR2, tell)
"""


@dataclass(frozen=True)
class Seen:
    """A server that has answered a request.

    Attributes:
        processes: what each holds (``tests.support.snapshot``), by the module that tells what it is.
        answer: tokens of a greedy completion.
    """

    processes: dict[str, dict[str, Any]]
    answer: list[int]


def serve(base: Path, root: Path, **environment: str) -> Seen:
    """Start ``vllm serve`` as a user does, look at all of its processes, and end it."""
    root.mkdir()
    (root / "sitecustomize.py").write_text(SITE)
    # vLLM keeps tables whose keys are hashes of strings.
    site = {"PYTHONPATH": f"{root}{os.pathsep}{ROOT}", "SNAPSHOTS": str(root), "PYTHONHASHSEED": "0"}
    foreign = [name for name in os.environ if name.startswith(("DELTA_SYNC_", "VLLM_"))]
    clean = ["env", *(f"--unset={name}" for name in foreign if name not in {**ENVIRONMENT, **environment})]
    # In float32 no kernel uses AMX, for which a process without our plugin does not ask, and ends with SIGILL.
    flags = [*VLLM_FLAGS, "--dtype", "float32"]
    command = [*clean, sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(base), *flags]
    with serving(root / "log", command, {**site, **environment}, cold=True) as server:
        body = {"model": "tiny", "prompt": "fox", "max_tokens": 8, "temperature": 0, "return_token_ids": True}
        answer = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
        processes = {role: held for pid in server.pids() if (role := role_of(pid)) for held in [ask(pid, root)]}
    return Seen(processes, answer)


def role_of(pid: int) -> str | None:
    """What vLLM has named the process; none for Python's own helper."""
    title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    if "resource_tracker" in title:
        return None
    named = re.match(r"VLLM::(\w+)", title)
    return named.group(1) if named else "APIServer"


def ask(pid: int, folder: Path) -> dict[str, Any]:
    os.kill(pid, signal.SIGUSR2)
    file = folder / f"{pid}.json"
    ends = time.monotonic() + 60
    while not file.exists():
        if time.monotonic() > ends:
            raise RuntimeError(f"process {pid} does not answer")
        time.sleep(0.05)
    held: dict[str, Any] = json.loads(file.read_text())
    return held


def changed(without: Seen, installed: Seen) -> dict[str, list[str]]:
    both = without.processes.keys() & installed.processes.keys()
    return {
        role: differences(without.processes[role]["attributes"], installed.processes[role]["attributes"])
        for role in sorted(both)
    }


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    """A server without any plugin of ours, and one as vLLM starts it."""
    root = tmp_path_factory.mktemp("installed")
    base = save_checkpoint(make_model("llama", seed=5), root / "base")
    return serve(base, root / "without", VLLM_PLUGINS=OTHERS), serve(base, root / "installed")


def test_only_what_is_documented_differs_in_vllm(servers: tuple[Seen, Seen]) -> None:
    """One method and two entries; each process has those whose modules it has imported."""
    found = changed(*servers)
    assert found["EngineCore"] == [name for name in CHANGED if "EngineCore" in name]
    assert sorted({name for names in found.values() for name in names}) == CHANGED


def test_no_variable_no_thread_and_nothing_else_of_ours(servers: tuple[Seen, Seen]) -> None:
    without, installed = servers
    assert without.processes.keys() == installed.processes.keys()
    for role, plain in without.processes.items():
        held = installed.processes[role]
        assert held["environment"].keys() ^ plain["environment"].keys() == {"VLLM_PLUGINS"}, role
        assert threads(held["threads"]) == threads(plain["threads"]), role
        assert set(held["ours"]) <= LIGHT, role
        assert not plain["ours"], role


def threads(names: list[str]) -> list[str]:
    """Kinds of threads: how many a pool has started, and their numbers, are its own affair."""
    return sorted({re.sub(r"\d+", "N", name) for name in names})


def test_it_answers_alike(servers: tuple[Seen, Seen]) -> None:
    without, installed = servers
    assert installed.answer == without.answer
    assert len(installed.answer) == 8
