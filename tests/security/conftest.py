"""The process that reads for all tests of this directory, and a run to attack."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.reader import Reader, started
from tests.support.written import Written


@pytest.fixture(scope="session")
def reader() -> Iterator[Reader]:
    with started() as found:
        yield found


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Written:
    return Written(tmp_path_factory.mktemp("attacks") / "run", 4)


@pytest.fixture
def written(template: Written, tmp_path: Path) -> Written:
    """A run with an anchor and four deltas."""
    return template.copied(tmp_path / "run")
