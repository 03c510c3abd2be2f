"""A test that is skipped where none is expected to be fails the run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("def test_one(): pytest.skip('not today')", 1),
        ("pytest.importorskip('no_such_module')", 1),
        ("@pytest.mark.xfail(reason='known')\ndef test_one(): assert False", 0),
        ("def test_one(): pass", 0),
    ],
    ids=["a test", "a module", "expected to fail", "none"],
)
def test_a_skip_fails_the_run(tmp_path: Path, body: str, status: int) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_other(): pass\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    assert ("is not in MAY_SKIP" in done.stdout) == bool(status)
