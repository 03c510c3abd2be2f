"""A test that is skipped where none is expected to be fails the run."""

from pathlib import Path

import pytest

from tests.support.running import run_python

ROOT = Path(__file__).parents[2]
SKIPPED = {
    "test_one.py": "import pytest\ndef test_one(): pytest.skip('not today')",
    "test_two.py": "import pytest\npytest.importorskip('no_such_module')",
}
NOT_SKIPPED = {
    "test_one.py": "import pytest\n@pytest.mark.xfail(reason='known')\ndef test_one(): assert False",
    "test_two.py": "def test_two(): pass",
}


@pytest.mark.slow
@pytest.mark.parametrize(("files", "named"), [(SKIPPED, 2), (NOT_SKIPPED, 0)], ids=["skipped", "not skipped"])
def test_a_skip_fails_the_run(tmp_path: Path, files: dict[str, str], named: int) -> None:
    for name, body in {**files, "test_other.py": "def test_other(): pass"}.items():
        (tmp_path / name).write_text(body)
    command = ["-m", "pytest", "-q", "-p", "tests.conftest", "-c", str(ROOT / "pyproject.toml")]
    command += ["--rootdir", str(tmp_path), "-p", "no:cacheprovider", "-n", "2", str(tmp_path)]
    done = run_python(*command, code=int(named > 0))
    assert done.stdout.count("is not in MAY_SKIP") == named
