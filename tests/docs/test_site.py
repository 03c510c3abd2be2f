"""The documentation builds as a site without a warning, its links lead somewhere, and it loads nothing from afar."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from docs import site_hooks

ROOT = Path(__file__).parents[2]
LONG = {"FORMAT.md", "REFERENCE.md"}
"""Pages that are looked up, not read from top to bottom."""
LIMIT = 300
STRUCTURE = ("table", "li", "blockquote", "h2", "h3", "img")
"""Elements of which a page of the site has as many as the repository shows of its file."""

pytestmark = pytest.mark.xdist_group("site")


class Elements(HTMLParser):
    """Collects the links, anchors and loaded addresses of a page, and counts the elements of its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.loads: list[str] = []
        self.counts = dict.fromkeys(STRUCTURE, 0)
        self.in_article = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        if tag == "article":
            self.in_article = True
        if self.in_article and tag in self.counts:
            self.counts[tag] += 1
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev"):
            self.loads.append(given.get("href", ""))
        if tag != "a":
            self.loads += [given[name] for name in ("src", "srcset", "data", "poster") if name in given]

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.in_article = False


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pages(site: Path) -> dict[Path, Elements]:
    return {path: Elements(path.read_text()) for path in sorted(site.rglob("*.html")) if path.name != "404.html"}


def built(source: Path) -> str:
    """The page that a file of the repository becomes, in the site's folder."""
    inside = str(source.relative_to(ROOT))
    uri = Path(site_hooks.PAGES.get(inside, inside.removeprefix("docs/")))
    return str(uri.with_name("index.html") if uri.name == "README.md" else uri.with_suffix(".html"))


def sources() -> list[Path]:
    return [*(ROOT / name for name in site_hooks.PAGES), *sorted((ROOT / "docs").rglob("*.md"))]


def test_links_lead_to_pages_and_anchors(site: Path, pages: dict[Path, Elements]) -> None:
    dead = []
    for path, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if target.is_dir():
                target /= "index.html"
            known = pages[target].anchors if target in pages else set()
            if not target.exists() or (parts.fragment and unquote(parts.fragment) not in known):
                dead.append(f"{path.relative_to(site)}: {link}")
    assert dead == []


def test_pages_load_nothing_from_another_host(site: Path, pages: dict[Path, Elements]) -> None:
    foreign = re.compile(r"^(\w+:)?//")
    for path, page in pages.items():
        assert page.loads, path
        assert [address for address in page.loads if foreign.match(address)] == [], path
    for path in site.rglob("*.css"):
        assert re.findall(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", path.read_text()) == [], path


def test_every_page_is_in_the_navigation(site: Path, pages: dict[Path, Elements]) -> None:
    assert {str(path.relative_to(site)) for path in pages} == {built(path) for path in sources()}
    assert {built(path) for path in sources()} - {"index.html"} <= set(pages[site / "index.html"].links)


def test_pages_that_are_read_are_short() -> None:
    long = {path.name for path in (ROOT / "docs").rglob("*.md") if len(path.read_text().splitlines()) > LIMIT}
    assert long == LONG
