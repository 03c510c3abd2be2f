"""For all tests: nothing that they start reaches anything outside of this machine."""

import os

import pytest

from tests.clouds import NOWHERE


def pytest_configure(config: pytest.Config) -> None:
    """A client without credentials would ask a cloud's metadata service for some."""
    os.environ.update(NOWHERE)
