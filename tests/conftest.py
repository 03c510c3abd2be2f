"""For all tests: nothing that they start reaches anything outside of this machine."""

import os

import pytest
from hypothesis import settings

from tests.clouds import NOWHERE

# A change is judged by the same examples wherever its tests run; ``--hypothesis-profile=random`` looks for new ones.
settings.register_profile("fixed", derandomize=True, deadline=None, database=None)
settings.register_profile("random", deadline=None)
settings.load_profile("fixed")


def pytest_configure(config: pytest.Config) -> None:
    """A client without credentials would ask a cloud's metadata service for some."""
    os.environ.update(NOWHERE)
