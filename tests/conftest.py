"""For all tests: nothing that they start reaches anything outside of this machine, or what earlier tests left."""

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.clouds import NOWHERE

# Importing TRL, as some tests do, would otherwise silence the servers that others start from this process.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")

# A change is judged by the same examples wherever its tests run; ``--hypothesis-profile=random`` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """A client without credentials would ask a cloud's metadata service for some."""
    os.environ.update(NOWHERE)


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What servers keep for their next life; a run of these tests may lie where one of earlier tests lay."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def worlds_end() -> Iterator[None]:
    """Publishers have threads, which run on until they are closed: those of worlds that a test makes end with it."""
    known = list(_worlds())
    yield
    for world in [world for world in _worlds() if world not in known]:
        world.close()


def _worlds() -> list[Any]:
    # Not imported for tests that do without: it takes seconds.
    module = sys.modules.get("tests.world")
    return [] if module is None else module.World.made
