"""Test the page in a real Chromium and draw its pictures: ``python -m tests.tools.screenshots`` (``make test-page``).

Needs Debian's packages chromium and chromium-driver. Runs the tests of ``tests/page``, then writes ``docs/img``.
"""

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.page.states import Pages
from tests.support.browser import browser, missing

ROOT = Path(__file__).parents[2]
MOST_BYTES = 150_000
WIDE, PHONE = {"width": 1240, "height": 900}, {"width": 390, "height": 844}
PICTURES = {
    "page-busy": ("busy", WIDE, False, 2000),
    "page-dark": ("busy", WIDE, True, 2000),
    "page-phone": ("busy", PHONE, False, 1900),
    "page-long": ("long", WIDE, False, 2000),
    "page-empty": ("empty", {"width": 1240, "height": 460}, False, 460),
    "page-broken": ("broken", WIDE, False, 1200),
    "page-hostile": ("hostile", WIDE, False, 2600),
}
"""File → state of the page, size of the window, whether it is dark, and the most pixels from the top."""


def small(png: bytes) -> bytes:
    """Reduce a picture to 256 colors, which its flat areas do not show."""
    with Image.open(io.BytesIO(png)) as picture:
        # Coverage, not frequency: the few red pixels are those that matter.
        reduced = picture.convert("RGB").quantize(
            256, method=Image.Quantize.MAXCOVERAGE, kmeans=4, dither=Image.Dither.NONE
        )
        out = io.BytesIO()
        reduced.save(out, "PNG", optimize=True)
    return out.getvalue()


def draw(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(temporary)
        pages = Pages(work)
        with browser(work) as window:
            for name, (state, size, dark, height) in PICTURES.items():
                window.look(**size, dark=dark)
                window.open(pages.url(state))
                data = small(window.screenshot(height))
                assert len(data) <= MOST_BYTES, f"{name}.png has {len(data)} bytes, more than {MOST_BYTES}"
                (folder / f"{name}.png").write_bytes(data)
                print(f"{folder / name}.png: {len(data)} bytes")


def main() -> int:
    """Exit status: 0, or 1 if a test fails, 2 if Chromium is not there."""
    lacking = missing()
    if lacking is not None:
        print(lacking, file=sys.stderr)
        return 2
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-m", "slow", "tests/page"], cwd=ROOT, check=False)
    if done.returncode != 0:
        return 1
    draw(ROOT / "docs" / "img")
    return 0


if __name__ == "__main__":
    sys.exit(main())
