"""Hooks of mkdocs.yml: pages outside docs/ join the site, and links between files lead to what the site has.

The pages are written to be read in the repository. ``on_files`` adds those that lie elsewhere, the README as the front
page. ``on_page_markdown`` corrects each link: to a page or picture of the site, it is written relative to the page; to
another file, it leads to the repository if ``repo_url`` is set, and else becomes the file's name. ``on_config`` makes
anchors as GitHub does.
"""

import logging
import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.plugins.site_hooks")

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "SECURITY.md": "security-policy.md",
    "docker/README.md": "docker/README.md",
    "examples/README.md": "examples/README.md",
    "tests/README.md": "tests/README.md",
}
"""Files of the repository outside docs/, and the pages that they become."""

LINK_OR_CODE = re.compile(
    r"""^(?P<indent>[ ]*)(?P<fence>```+).*?^(?P=indent)(?P=fence)[ ]*$   # a block of code
      | \[(?P<text>(?:`[^`]*`|[^\[\]`])*)\]\((?P<target>[^()\s]+)\)     # a link or a picture, perhaps with code in it
      | (?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)                      # code within a line
    """,
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
TABLE_ROW = re.compile(r"^\|.*\|$", re.MULTILINE)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    config.mdx_configs.setdefault("toc", {})["slugify"] = anchor
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    source = next((name for name, uri in PAGES.items() if uri == page.file.src_uri), f"docs/{page.file.src_uri}")

    def page_of(path: str) -> str | None:
        """The page or picture of the site that a file of the repository has become."""
        uri = PAGES.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
        return uri if uri in files.src_uris else None

    tree = config.repo_url and f"{config.repo_url.rstrip('/')}/blob/HEAD"
    return TABLE_ROW.sub(plain_bars, with_links_for(markdown, source, page.file.src_uri, page_of, tree))


def anchor(title: str, separator: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w -]", "", title.lower()).replace(" ", separator)


def with_links_for(markdown: str, source: str, uri: str, page_of: Callable[[str], str | None], tree: str | None) -> str:
    """The text of a file of the repository, its links changed for the page ``uri`` of a site.

    Args:
        page_of: the page of the site that a path of the repository has become, or None.
        tree: URL below which the repository's other files are; None: links to them become text and path.
    """

    def change(found: re.Match[str]) -> str:
        text, target = found["text"], found["target"]
        if target is None or re.match(r"#|[a-z]+:", target):
            return found[0]
        file, _, section = target.partition("#")
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), file))
        if not (ROOT / path).exists():
            log.warning("%s has a link to %s, which does not exist", source, path)
        there = page_of(path) or page_of(f"{path}/README.md")
        if there:
            relative = posixpath.relpath(there, posixpath.dirname(uri) or ".")
            return f"[{text}]({relative}{'#' if section else ''}{section})"
        if tree:
            return f"[{text}]({tree}/{path}{'#' if section else ''}{section})"
        return f"`{path}`" if path.endswith(text.strip("`/")) else f"{text} (`{path}`)"

    return LINK_OR_CODE.sub(change, markdown)


def plain_bars(row: re.Match[str]) -> str:
    r"""A row of a table whose code has ``|`` for ``\|``: only GitHub wants bars in code escaped."""
    return re.sub(r"`[^`]+`", lambda code: code[0].replace(r"\|", "|"), row[0])
