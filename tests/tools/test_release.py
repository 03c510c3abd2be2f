"""The version, what the distributions hold, and the tool that tries them (``make release-check`` installs them)."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from tests.support.compose import FOLDER
from tests.tools import release
from tests.tools.dist import LINK, ROOT, Distributions, build, for_index, problems, project
from tests.tools.images import Screen
from tests.tools.release import CHECKS, Environment, Outcome, ReleaseError, install_commands, run_all, table
from vllm_delta_sync import __version__

INTERRUPTED = """
import signal
import sys
from pathlib import Path
from tests.tools.images import Screen
from tests.tools.release import Runner, scratch_folder

# A shell lets what it starts in the background ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
with scratch_folder() as folder:
    print(folder, flush=True)
    code = "open('began', 'w'); import time; time.sleep(600)"
    Runner(Screen()).run([sys.executable, "-c", code], folder)
"""


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
        ("vllm_delta_sync/errors.py", b"changed", "RECORD"),
    ],
)
def test_a_wheel_with_something_wrong_is_refused(
    made: Distributions, tmp_path: Path, name: str, data: bytes | None, found: str
) -> None:
    """A file too many, one that is missing, or one that was changed."""
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


def test_links_of_the_readme_work_on_a_package_index() -> None:
    text = (ROOT / "README.md").read_text()
    relative = [target for _, target in LINK.findall(text) if not re.match(r"\w+:|#", target)]
    assert relative
    without = for_index(text, None)
    assert not [target for _, target in LINK.findall(without) if not re.match(r"\w+:|#", target)]
    assert all(f"`{target.partition('#')[0]}`" in without for target in relative)
    tree = "https://host.example/project/blob/v1"
    absolute = [target for _, target in LINK.findall(for_index(text, tree)) if not target.startswith("#")]
    assert [f"{tree}/{target}" for target in relative] == [target for target in absolute if target.startswith(tree)]


def test_the_installation_of_a_server_on_a_cpu_is_read_from_its_page() -> None:
    commands = install_commands()
    assert [words[2:][0] for words in commands] == [f"torch=={release_of_torch()}", "--no-deps", "--no-deps"]
    assert commands[-1][-1] == "."


def release_of_torch() -> str:
    """What the Makefile installs."""
    (found,) = re.findall(r"^TORCH \?= torch==(\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return str(found)


@pytest.mark.slow
def test_a_check_that_fails_is_in_the_table_and_the_next_one_runs(
    monkeypatch: pytest.MonkeyPatch, made: Distributions
) -> None:
    folders = []

    def fails(made: Distributions, environment: Environment, outcome: Outcome) -> None:
        folders.append(environment.folder)
        environment.run("python", "-c", "import sys; sys.exit('it does not work')")

    def holds(made: Distributions, environment: Environment, outcome: Outcome) -> None:
        outcome.versions = {"torch": "2"}
        outcome.remarks.append(environment.run("python", "-c", "print('as it should')").strip())

    monkeypatch.setattr(release, "CHECKS", {"first": fails, "second": holds})
    monkeypatch.setattr(release, "NEEDED_BYTES", 0)
    outcomes = run_all(["first", "second"], made)
    assert outcomes[0].error is not None
    assert "it does not work" in outcomes[0].error
    assert outcomes[1].error is None
    assert [line.partition("|")[2].split(" | ")[0].strip() for line in table(outcomes).splitlines()[2:]] == [
        "first",
        "second",
    ]
    assert not folders[0].exists()


@pytest.mark.slow
@pytest.mark.parametrize("alone", [True, False])
def test_a_vllm_that_is_out_of_reach_is_told_from_a_wheel_that_does_not_fit(
    alone: bool, monkeypatch: pytest.MonkeyPatch, made: Distributions
) -> None:
    """``alone``: vLLM resolves by itself, so that the wheel is to blame."""

    def resolved(environment: Environment, *requirements: str | Path) -> dict[str, str]:
        if alone and str(made.wheel) not in str(requirements[0]):
            return {"vllm": "0.33.0"}
        raise ReleaseError("No matching distribution")

    monkeypatch.setattr(release, "resolved", resolved)
    monkeypatch.setattr(release, "NEEDED_BYTES", 0)
    (outcome,) = run_all(["server-gpu"], made)
    assert (outcome.error is not None) == alone
    assert bool(outcome.remarks) != alone


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.tools.release", "--dist", str(tmp_path), *CHECKS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert project()["version"] in done.stderr


def test_a_command_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(release, "QUIET_SECONDS", 0.05)
    runner = release.Runner(Screen())
    with pytest.raises(ReleaseError, match="did not end"):
        runner.run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path, seconds=0.1)


def test_an_interrupted_run_leaves_nothing() -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdout is not None
    folder = Path(process.stdout.readline().strip())
    deadline = time.monotonic() + 60
    while not (folder / "began").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert children
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(60) != 0
    assert not folder.exists()
    assert not [child for child in children if Path(f"/proc/{child}").exists()]
