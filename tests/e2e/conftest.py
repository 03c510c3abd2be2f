"""What several files of these tests look at, made once."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import warm
from tests.e2e.siege.world import Siege
from tests.e2e.world import Follower


@pytest.fixture(scope="session")
def shared_follower(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Follower]:
    follower = Follower(tmp_path_factory.mktemp("follower"))
    yield follower
    try:
        # Here, because it needs a server that no test uses any more.
        follower.expect_quiet_stop()
    finally:
        follower.close()


@pytest.fixture
def follower(shared_follower: Follower) -> Follower:
    """A server of one rank that serves the head of its run and follows; what happened before does not matter.

    Tests that use it are of xdist_group("follower"), so that one process starts it.
    """
    shared_follower.reset()
    return shared_follower


@pytest.fixture(scope="session")
def siege(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Siege]:
    """A server with every secret that it can have, started as users do: /proc shows its own command line.

    Tests that use it are of xdist_group("signed").
    """
    with ExitStack() as stack:
        siege = Siege(tmp_path_factory.mktemp("siege"), stack, cold=True)
        siege.fresh()
        yield siege
        siege.server_down()
        assert siege.leaks() == []


@pytest.fixture(scope="session")
def attached(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What tests/e2e/attached.py saw of an ``AsyncLLM``: the doors, and one cache setting for each pause mode."""
    return look(tmp_path_factory.mktemp("attached"), "some")


@pytest.fixture(scope="session")
def attached_again(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return look(tmp_path_factory.mktemp("attached"), "others")


def look(root: Path, what: str) -> dict[str, Any]:
    done = warm.run("tests.e2e.attached", str(root), what, seconds=600)
    assert done.status == 0, done.said[-4000:]
    seen: dict[str, Any] = json.loads((root / "seen.json").read_text())
    return seen | {"said": done.said}
