"""A test that is skipped where none is expected to be fails the run."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("body", "workers", "status"),
    [
        ("def test_one(): pytest.skip('not today')", 0, 1),
        ("def test_one(): pytest.skip('not today')", 2, 1),
        ("pytest.importorskip('no_such_module')", 2, 1),
        ("@pytest.mark.xfail(reason='known')\ndef test_one(): assert False", 0, 0),
    ],
    ids=["a test", "a test of a worker", "a module of a worker", "expected to fail"],
)
def test_a_skip_fails_the_run(tmp_path: Path, body: str, workers: int, status: int) -> None:
    (tmp_path / "test_it.py").write_text(f"import pytest\n\ndef test_other(): pass\n\n{body}\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    done = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", str(workers), str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stdout
    assert ("is not in MAY_SKIP" in done.stdout) == bool(status)
