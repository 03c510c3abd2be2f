"""What several files of these tests start from."""

from collections.abc import Iterator

import pytest

from tests.support.forks import Forks


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Forks exports and followers."""
    made = Forks("tests.run.machine.killed_folders", tmp_path_factory.mktemp("warm"))
    yield made
    made.close()
