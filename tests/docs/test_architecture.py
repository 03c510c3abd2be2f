"""docs/architecture.md lists every package, and pictures are drawn from the tables of pages."""

import itertools
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

from docs.draw_architecture import BOLD, OVERVIEW, OVERVIEW_SOURCE, PACKAGES, SIZES, STATES, rows

ROOT = Path(__file__).parents[2]
WITHIN = {
    "vllm_delta_sync",
    "vllm_delta_sync/engine",
    "vllm_delta_sync/codec/tiles",
    "vllm_delta_sync/bucket/hub",
    "vllm_delta_sync/bucket/middleware",
    "vllm_delta_sync/maintenance/gc",
    "vllm_delta_sync/maintenance/repair",
}
"""Packages that are described with the one they belong to, or hold the others."""


def test_every_package_is_listed() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    for tree in ("vllm_delta_sync", "trainer_side"):
        for path in sorted((ROOT / tree).rglob("__init__.py")):
            package = path.parent.relative_to(ROOT).as_posix()
            assert package in WITHIN or f"| `{package}` |" in text, f"{package} is missing in docs/architecture.md"


def test_the_pictures_are_up_to_date() -> None:
    command = [sys.executable, str(ROOT / "docs" / "draw_architecture.py"), "--check"]
    assert subprocess.run(command, check=False).returncode == 0, "run: python docs/draw_architecture.py"


def test_the_readme_says_in_words_what_its_picture_shows() -> None:
    (words,) = re.findall(r"!\[([^]]*)\]\(docs/overview\.svg\)", (ROOT / "README.md").read_text())
    said = " ".join(words.split())
    for where, *cells in rows(OVERVIEW_SOURCE.read_text(), "Trainer, bucket, servers"):
        assert [text for text in (*where.split(" → "), *cells) if text not in said] == []


@pytest.mark.parametrize("path", [OVERVIEW, PACKAGES, STATES], ids=lambda path: path.stem)
def test_no_line_of_a_picture_is_cut(path: Path) -> None:
    """Each line ends inside its box and the picture, and before the next, in DejaVu Sans, wider than most fonts."""
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    picture = ElementTree.parse(path).getroot()
    boxes = [[int(rect.get(name, 0)) for name in ("x", "y", "width", "height")] for rect in picture.findall("{*}rect")]
    lines = []
    for text in picture.findall("{*}text"):
        style, words, x, y = text.attrib["class"], text.text or "", int(text.attrib["x"]), int(text.attrib["y"])
        font = ImageFont.truetype(fonts / f"DejaVuSans{'-Bold' if style in BOLD else ''}.ttf", SIZES[style])
        wide = font.getlength(words)
        left = x - wide / 2 if text.get("text-anchor") == "middle" else x
        lines.append((y, left, left + wide, words))
        for box_left, top, width, height in boxes:
            if box_left <= x < box_left + width and top <= y < top + height and style != "badge":
                assert box_left + 2 <= left, words
                assert left + wide <= box_left + width - 2, words
    assert lines
    for (y, _, right, words), (next_y, next_left, _, _) in itertools.pairwise(sorted(lines)):
        assert y != next_y or right + 2 <= next_left, words
