"""What several files of these tests start from."""

from collections.abc import Iterator

import pytest

from tests.run.machine.nursery import Nursery


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Forks exports and followers."""
    made = Nursery("tests.run.machine.killed_folders", tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
