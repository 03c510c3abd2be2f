"""One warm process for all worlds of a test session."""

from collections.abc import Iterator

import pytest

from tests.trainer.sharded.nursery import Nursery, opened


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with opened(tmp_path_factory.mktemp("nursery")) as made:
        yield made
