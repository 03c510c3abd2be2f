"""Tests of the page in a real Chromium. Without one they are not collected; the tool ``screenshots`` asks for one."""

from collections.abc import Iterator

import pytest

from tests.support.browser import Browser, browser, missing

collect_ignore_glob = [] if missing() is None else ["test_*.py"]


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened
