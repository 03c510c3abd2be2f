"""A plain ``vllm serve`` where this package is merely installed: it is as it would be without it.

``tests/receiver/test_plugin.py`` checks one process, in each order of imports.
"""

import re

import pytest

from tests.receiver.test_plugin import CHANGED, LIGHT
from tests.tools.installed import Seen, changed, compare

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Seen, Seen]:
    return compare(tmp_path_factory.mktemp("installed"))


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
