"""vLLM calls our general plugin in every process of an environment: what it leaves there, and what it must not do.

``tests/e2e/test_installed.py`` compares the processes of real servers.
"""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.running import run_python
from tests.support.snapshot import differences
from vllm_delta_sync.engine import WorkerExtension
from vllm_delta_sync.engine.entrypoints.plugin import AfterImport
from vllm_delta_sync.engine.names import WORKER_EXTENSION, is_our_extension

pytestmark = pytest.mark.xdist_group("plugin")
CHANGED = [
    "vllm.distributed.weight_transfer.factory.WeightTransferEngineFactory._registry",
    "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER",
    "vllm.v1.engine.core.EngineCore._initialize_kv_caches",
]
LIGHT = {
    "vllm_delta_sync",
    "vllm_delta_sync.engine",
    "vllm_delta_sync.engine.entrypoints",
    "vllm_delta_sync.engine.entrypoints.plugin",
    "vllm_delta_sync.engine.names",
    "vllm_delta_sync.errors",
    "vllm_delta_sync.logs",
}
REGISTER = """
from vllm_delta_sync.engine.entrypoints import plugin
plugin.register()
plugin.register()
"""
IMPORT = """
import vllm.model_executor.model_loader, vllm.v1.engine.core, vllm.distributed.weight_transfer.factory
"""
TELL = """
import json, sys
from tests.support.snapshot import snapshot
print("SEEN", json.dumps(snapshot()))
"""
# As a release of vLLM that has not got them yet, or any more.
LACKING = """
import importlib.abc, sys
class Lacking(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name in ("vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.factory"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Lacking())
"""
LOOK = """
import vllm.model_executor.model_loader as loaders
from vllm_delta_sync.engine.names import LOAD_FORMAT
print("entry", LOAD_FORMAT in loaders._LOAD_FORMAT_TO_MODEL_LOADER)
try:
    import vllm.distributed.weight_transfer
except ModuleNotFoundError:
    print("lacking")
"""
# What vLLM's own method does is not reached here: that it is called, and that nothing of ours is loaded for it.
ENGINE_OF_ANOTHER = """
from types import SimpleNamespace
from vllm.v1.engine.core import EngineCore
config = SimpleNamespace(parallel_config=SimpleNamespace(worker_extension_cls=""))
try:
    EngineCore._initialize_kv_caches(SimpleNamespace(), config)
except AttributeError as error:
    assert "model_executor" in str(error), error
else:
    raise SystemExit("vLLM's method was not called")
assert "vllm_delta_sync.engine.core.pause_watchdog" not in sys.modules
"""


FORKS = """
import os, sys, traceback
# What vLLM needs and takes long to import; nothing of vLLM.
import torch, transformers
torch.set_num_threads(1)
for code in sys.argv[1:]:
    print("FORK", flush=True)
    child = os.fork()
    if child == 0:
        try:
            exec(code, {})
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""
"""Runs each of several programs in a process that has not imported vLLM."""


def run(*programs: str) -> list[str]:
    """What each of them printed."""
    return run_python("-c", FORKS, *programs).stdout.split("FORK\n")[1:]


def seen(said: str) -> list[dict[str, Any]]:
    """What a process held each time that it was asked to tell."""
    lines = [line for line in said.splitlines() if line.startswith("SEEN ")]
    return [json.loads(line.removeprefix("SEEN ")) for line in lines]


@pytest.fixture(scope="module")
def said() -> list[str]:
    return run(IMPORT + TELL + REGISTER + TELL + ENGINE_OF_ANOTHER, LACKING + REGISTER + LOOK)


def expect_little(plain: dict[str, Any], changed: dict[str, Any]) -> None:
    assert differences(plain["attributes"], changed["attributes"]) == CHANGED
    assert changed["threads"] == plain["threads"]
    assert changed["environment"] == plain["environment"]
    assert set(changed["ours"]) == LIGHT


def test_all_that_changes_is_one_method_and_two_entries(said: list[str]) -> None:
    expect_little(*seen(said[0]))


@pytest.mark.slow
def test_the_order_does_not_matter() -> None:
    """A process that is forked from one whose plugins are loaded loads none."""
    plain, early = run(IMPORT + TELL, REGISTER + IMPORT + TELL)
    expect_little(*seen(plain), *seen(early))


def test_nothing_is_imported() -> None:
    before = "import sys, logging, json, importlib.abc, importlib.util\nbefore = set(sys.modules)"
    program = before + REGISTER + "print('LOADED', *sorted(set(sys.modules) - before))"
    loaded = {name for name in run_python("-c", program).stdout.split() if "." not in name}
    assert loaded - set(sys.stdlib_module_names) == {"LOADED", "vllm_delta_sync"}


def test_a_vllm_that_lacks_modules_is_left_alone(said: list[str]) -> None:
    """The plugin raises nothing, and what this vLLM does have is changed all the same."""
    assert said[1].split() == ["entry", "True", "lacking"]


def test_a_module_that_lacks_a_name_is_imported_all_the_same() -> None:
    def change(module: Any) -> None:
        module.no_such_name.attribute = 1

    finder = AfterImport({"vllm.somewhere": change})
    finder.change(SimpleNamespace(__name__="vllm.somewhere"))  # type: ignore[arg-type]


class Derived(WorkerExtension):
    """As users write who need methods of their own in workers."""


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        (WORKER_EXTENSION, True),
        (f"{__name__}.Derived", True),
        ("vllm.v1.worker.cpu_worker.CPUWorker", False),
        ("os.path", False),
        ("vllm_delta_sync.engine.Nothing", False),
        ("no.such.module.Extension", False),
        ("Extension", False),
        ("", False),
        (None, False),
    ],
)
def test_a_worker_extension_that_derives_from_ours_is_ours(name: str | None, ours: bool) -> None:
    assert is_our_extension(name) is ours
