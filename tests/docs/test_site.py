"""The documentation builds as a site without a warning, and it loads nothing from afar.

``mkdocs build --strict`` fails for a page that is not in the navigation and for a link or anchor that leads nowhere:
see ``validation`` in mkdocs.yml.
"""

import re
import shutil
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest

from tests.support.running import run_python

ROOT = Path(__file__).parents[2]
LONG = {"FORMAT.md", "REFERENCE.md"}
"""Pages that are looked up, not read from top to bottom."""
LIMIT = 300

pytestmark = pytest.mark.xdist_group("site")


class Loads(HTMLParser):
    """Collects the addresses that a page loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.found.append(given.get("href", ""))
        if tag != "a":
            self.found += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    command = ["-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = run_python(*command, environment={"NO_MKDOCS_2_WARNING": "1"})
    assert "WARNING" not in done.stderr, done.stderr
    yield folder
    shutil.rmtree(folder)


def test_pages_load_nothing_from_another_host(site: Path) -> None:
    foreign = re.compile(r"^(\w+:)?//")
    for path in site.rglob("*.html"):
        loads = Loads(path.read_text()).found
        assert loads, path
        assert [address for address in loads if foreign.match(address)] == [], path
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()) == [], path


def test_pages_that_are_read_are_short() -> None:
    long = {path.name for path in (ROOT / "docs").rglob("*.md") if len(path.read_text().splitlines()) > LIMIT}
    assert long == LONG
