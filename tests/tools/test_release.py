"""The version, what the distributions hold, and the tool that tries them (``make release-check`` installs them)."""

import importlib
import re
import zipfile
from pathlib import Path

import pytest

from tests.support.compose import FOLDER
from tests.tools.dist import ROOT, Distributions, build, problems, project
from vllm_delta_sync import __version__

pytestmark = pytest.mark.xdist_group("release")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Distributions:
    """Both, built from the files as they are now."""
    return build(tmp_path_factory.mktemp("dist"))


def test_every_place_states_the_same_version() -> None:
    version = project()["version"]
    assert __version__ == version
    newest = re.findall(r"^## (\S+)(?: \((\d{4}-\d\d-\d\d)\))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    released = [(name, date) for name, date in newest if name != "Unreleased"]
    assert released[0][0] == version
    assert released[0][1], "the section of a release has a date"
    images = re.findall(
        r"/vllm-delta-sync/\S+:(\S+)", "".join(path.read_text() for path in (FOLDER / "kubernetes").glob("*.yaml"))
    )
    assert images
    assert set(images) == {version}
    supported = re.findall(r"^\| (\S+) \| yes \|$", (ROOT / "SECURITY.md").read_text(), re.MULTILINE)
    assert supported == [version.rpartition(".")[0]]


def test_distributions_hold_what_they_should(made: Distributions) -> None:
    assert problems(made) == []


@pytest.mark.parametrize(
    ("name", "data", "found"),
    [
        ("tests/test_x.py", b"", "tests/test_x.py"),
        ("vllm_delta_sync/left_over.py", b"", "vllm_delta_sync/left_over.py"),
        ("trainer_side/py.typed", None, "trainer_side/py.typed"),
        ("vllm_delta_sync/dashboard/page.html", None, "page.html"),
    ],
)
def test_a_wheel_with_something_wrong_is_refused(
    made: Distributions, tmp_path: Path, name: str, data: bytes | None, found: str
) -> None:
    """A file too many, or one that is missing."""
    wheel = tmp_path / made.wheel.name
    with zipfile.ZipFile(made.wheel) as source, zipfile.ZipFile(wheel, "w") as target:
        for entry in source.namelist():
            if entry != name:
                target.writestr(entry, source.read(entry))
        if data is not None:
            target.writestr(name, data)
    (problem,) = problems(Distributions(made.sdist, wheel))
    assert found in problem


def test_entry_points_load() -> None:
    targets = list(project()["scripts"].values())
    for group in project()["entry-points"].values():
        targets += group.values()
    assert len(targets) == 3
    for target in targets:
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))
