"""For all tests: nothing that they start reaches anything outside of this machine, or what earlier tests left.

Fixtures that tests of several folders share are here too.
"""

import gc
import logging
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.support.clouds import NOWHERE
from tests.support.fixed_examples import fix_examples, seed_generators
from tests.support.hub_buckets import hub as hub
from tests.support.hub_buckets import hub_server as hub_server
from tests.trainer.sharded.nursery import nursery as nursery

# Importing TRL, as some tests do, would otherwise silence the servers that others start from this process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

# A change is judged by the same examples wherever its tests run. `make test` tries few, `make test-full` many
# (--hypothesis-profile=full); `make fuzz` looks for new ones, with a seed (--hypothesis-profile=random
# --hypothesis-seed=SEED). A slow machine is no fault of a test.
fix_examples()
settings.register_profile(
    "quick",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("full", settings.get_profile("quick"), max_examples=200)
settings.register_profile("random", settings.get_profile("full"), derandomize=False)
settings.load_profile("quick")


MAY_SKIP = (
    "tests/bucket/contract",  # where Azurite is not installed, or nothing can be mounted
    "tests/bucket/test_clouds.py",  # where Azurite is not installed
    "tests/bucket/test_cache.py",  # as root, or where nothing can be mounted
    "tests/cli/test_cli_ipv6.py",  # where the kernel has no IPv6
    "tests/cli/test_cli_publish.py",  # as root, where setpriv does not work
    "tests/cli/test_cli_serve.py",  # as another user than root
    "tests/cli/test_doctor.py",  # as root, where setpriv does not work
    "tests/docs/test_monitoring.py::test_alerts_fire_when_they_should_and_else_not",  # where promtool is not installed
    "tests/e2e/test_faults.py",  # where nothing can be mounted
    "tests/e2e/test_nodes.py",  # where no network namespace can be made
    "tests/e2e/test_quantized.py",  # on a processor without AMX
    "tests/notice/test_notice_ipv6.py",  # where the kernel has no IPv6
    "tests/receiver/test_small_floats.py",  # on a processor without AMX
    "tests/run/test_process_folders.py",  # as another user than root, or where no namespace for processes can be made
    "tests/trainer/sharded/test_given_parts.py::test_ranks_of_megatron_publish_as_one",  # with Python 3.14
    "tests/trainer/test_recipe_jax.py",  # where jax is not installed
)
"""Tests that a machine may not allow. A run in which another one is skipped fails: nobody reads a count of skips."""
_skipped: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    """A client without credentials would ask a cloud's metadata service for some."""
    os.environ.update(NOWHERE)


def shared_by(item: pytest.Item) -> str:
    """What a test needs of a process that takes long to start: one that servers are forked from, or one for ranks."""
    if item.get_closest_marker("e2e") is not None:
        return "engines"
    return "ranks" if item.nodeid.startswith("tests/trainer") and "nursery" in getattr(item, "fixturenames", ()) else ""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that start engines come first, then those of several ranks: the longest, and others fill the gaps beside
    them."""
    items.sort(key=lambda item: ("engines", "ranks", "").index(shared_by(item)))
    if not getattr(config.option, "loadgroup", False):
        return
    # In `make test` one worker runs all tests that start engines, and one all that fork ranks: each such worker has to
    # import vLLM or trainers first.
    together = config.option.markexpr == "not slow"
    for item in items:
        marker = item.get_closest_marker("xdist_group")
        own = str(marker.args[0]) if marker is not None else ""
        group = (shared_by(item) if together else "") or own
        if group and not item.nodeid.endswith(f"@{group}"):
            # pytest-xdist 3.8 writes a group where pytest 9.2 does not read it. To go when xdist sets ``_id`` itself.
            identity: Any = item
            identity._id = type(identity._id).parse(f"{item.nodeid.removesuffix(f'@{own}')}@{group}")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Modules draw when they are imported, too."""
    seed_generators(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before any fixture, also of a module: it starts alike, whichever test comes first."""
    seed_generators(asked_seed(item.config) or 0)


def asked_seed(config: pytest.Config) -> int | None:
    """The seed of a random campaign; None if each test has its own."""
    asked = config.getoption("--hypothesis-seed")
    return None if asked is None else int(asked)


@pytest.fixture
def campaign_seed(request: pytest.FixtureRequest) -> int | None:
    """For tests that draw without Hypothesis. As ``asked_seed``."""
    return asked_seed(request.config)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported here stays: the collector of garbage need not look at a million objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """A test must not silence those that run after it in the same worker: they would fail, and not in every run."""
    if logging.root.level != logging.WARNING or logging.root.manager.disable:
        level = logging.getLevelName(logging.root.level)
        logging.root.setLevel(logging.WARNING)
        logging.disable(logging.NOTSET)
        pytest.fail(f"this test left the root logger at level {level}, or logging disabled")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    expected = hasattr(report, "wasxfail") or report.nodeid.startswith(MAY_SKIP)
    if report.skipped and not expected:
        _skipped.append(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        _skipped.append(report.nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of pytest-xdist reports the modules that it skipped at import; every worker imports all of them."""
    _skipped.extend(sorted(set(getattr(node, "workeroutput", {}).get("skipped", [])) - set(_skipped)))


def pytest_sessionfinish(session: pytest.Session) -> None:
    workeroutput = getattr(session.config, "workeroutput", None)
    if workeroutput is not None:
        workeroutput["skipped"] = _skipped
        return
    if _skipped and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for nodeid in _skipped:
        line = f"FAILED {nodeid} was skipped, and is not in MAY_SKIP of tests/conftest.py"
        terminalreporter.write_line(line, red=True)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers keep for their next life; a run of these tests may lie where one of earlier tests lay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture
def url(tmp_path: Path) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """torch computes in one thread: small models are trained sooner, and alike on every machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def classes_in_small_tensors(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code the small tensors of tests as large ones are: writers make small tensors plain.

    Not where vLLM serves them: its ranks divide them finer than tiles.
    """
    if request.node.get_closest_marker("e2e") is None:
        monkeypatch.setattr("vllm_delta_sync.codec.tiles.coder.SMALL_ELEMENTS", 1)


@pytest.fixture(autouse=True)
def worlds_end() -> Iterator[None]:
    """Publishers have threads, which run on until they are closed: those of worlds that a test makes end with it."""
    known = list(_worlds())
    yield
    for world in [world for world in _worlds() if world not in known]:
        world.close()


def _worlds() -> list[Any]:
    # Not imported for tests that do without: it takes seconds.
    module = sys.modules.get("tests.support.world")
    return [] if module is None else module.World.made
