"""How tests are shared out over processes (`pytest -n 2 --dist loadgroup`, as `make test` runs them)."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A file's tests stay together, for the sake of their fixtures; tests that start engines take turns."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        group = "engine" if item.get_closest_marker("e2e") else str(item.path)
        item.add_marker(pytest.mark.xdist_group(group))
