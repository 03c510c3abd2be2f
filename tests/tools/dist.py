"""Build the source distribution and the wheel, and check both: ``python -m tests.tools.dist`` (``make dist``).

Both are built from a copy of the files that git tracks, the wheel from the source distribution, so that nothing else
that lies in the folder gets into them. The build uses the setuptools of this interpreter's environment.

In the copy, README.md has links that work where a package index shows it: to the tag of this version at ``Repository``
of ``[project.urls]``, or, while pyproject.toml names no repository, the paths of the files as text.

Ends with status 1 if a check failed.
"""

import configparser
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.metadata import InvalidMetadata, Metadata

from docs.site_hooks import with_links_for

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "dist"
PACKAGES = ("vllm_delta_sync", "trainer_side")
DATA = {"trainer_side/py.typed", "vllm_delta_sync/dashboard/page.html", "vllm_delta_sync/py.typed"}
"""Files of the packages that are not Python."""
INFO = {"METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "top_level.txt"}
GENERATED = ("PKG-INFO", "setup.cfg", "vllm_delta_sync.egg-info/")
"""What setuptools adds to a source distribution."""
LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


@dataclass(frozen=True)
class Distributions:
    """Paths of the files that were built."""

    sdist: Path
    wheel: Path

    def __iter__(self) -> Iterator[Path]:
        yield self.sdist
        yield self.wheel


def project() -> dict[str, Any]:
    """The table ``[project]`` of pyproject.toml."""
    table: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return table


def distributions(folder: Path) -> Distributions:
    """The files of this version in a folder, which need not exist."""
    stem = f"{project()['name'].replace('-', '_')}-{project()['version']}"
    return Distributions(folder / f"{stem}.tar.gz", folder / f"{stem}-py3-none-any.whl")


def git(*arguments: str) -> str:
    """What git prints."""
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def tracked() -> list[str]:
    """Paths of the files that git tracks, without those that were deleted since."""
    return [name for name in git("ls-files", "-z").split("\0") if name and (ROOT / name).is_file()]


def copy_tracked(target: Path) -> None:
    """Copy the files that git tracks, as they are now, with README.md as a package index can show it."""
    for name in tracked():
        place = target / name
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, place)
    readme = target / "README.md"
    repository = project().get("urls", {}).get("Repository")
    # Relative links lead into the tree of files on the web; without one they become text and path.
    tree = repository and f"{repository}/blob/v{project()['version']}"
    readme.write_text(with_links_for(readme.read_text(), "README.md", "README.md", lambda path: None, tree))


def build(folder: Path) -> Distributions:
    """Build both into a folder, in place of older ones of this project."""
    made = distributions(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(made.sdist.name.partition("-")[0] + "-*"):
        old.unlink()
    # The time of the commit, as the time of the files in the wheel.
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct").strip()}
    with tempfile.TemporaryDirectory(prefix="dist-") as scratch:
        copy = Path(scratch, "copy")
        copy_tracked(copy)
        code = f"from setuptools import build_meta; build_meta.build_sdist({str(folder.resolve())!r})"
        _run([sys.executable, "-c", code], copy, environment)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"]
        _run([*pip, "--wheel-dir", str(folder.resolve()), str(made.sdist.resolve())], Path(scratch), environment)
    return made


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    # A PYTHONPATH could put this checkout before the copy.
    environment = {name: value for name, value in environment.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(
            f"{' '.join(command[:6])} … ended with {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )


def problems(made: Distributions) -> list[str]:
    """What is wrong with the distributions, a sentence each."""
    return [*_sdist_problems(made.sdist), *_wheel_problems(made.wheel)]


def _sdist_problems(path: Path) -> Iterator[str]:
    with tarfile.open(path) as archive:
        members = {member.name.partition("/")[2]: member for member in archive.getmembers() if member.isfile()}
        info = archive.extractfile(members["PKG-INFO"])
        assert info is not None
        yield from _metadata_problems(f"PKG-INFO of {path.name}", info.read())
    expected = set(tracked())
    found = {name for name in members if not name.startswith(GENERATED)}
    if missing := sorted(expected - found):
        yield f"{path.name} lacks {missing}: name them in MANIFEST.in"
    if foreign := sorted(found - expected):
        yield f"{path.name} has {foreign}, which git does not track"


def _wheel_problems(path: Path) -> Iterator[str]:
    expected = {name for name in tracked() if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    expected = {name for name in expected if name.endswith(".py")} | DATA
    info = f"{path.name.removesuffix('-py3-none-any.whl')}.dist-info/"
    with zipfile.ZipFile(path) as wheel:
        files = {name: wheel.read(name) for name in wheel.namelist()}
    expected |= {info + name for name in INFO}
    if missing := sorted(expected - files.keys()):
        yield f"{path.name} lacks {missing}"
        return
    if foreign := sorted(files.keys() - expected):
        yield f"{path.name} has {foreign}, which are no files of the packages that git tracks"
    yield from _metadata_problems(f"METADATA of {path.name}", files[f"{info}METADATA"])
    points = configparser.ConfigParser(delimiters=("=",))
    points.read_string(files[f"{info}entry_points.txt"].decode())
    declared = {"console_scripts": project()["scripts"], **project()["entry-points"]}
    if {name: dict(points[name]) for name in points.sections()} != declared:
        yield f"entry points of {path.name} are not those of pyproject.toml"


def _metadata_problems(what: str, data: bytes) -> Iterator[str]:
    try:
        metadata = Metadata.from_email(data)
    except (ExceptionGroup, InvalidMetadata) as error:
        invalid = error.exceptions if isinstance(error, ExceptionGroup) else [error]
        yield f"{what}: " + "; ".join(map(str, invalid))
        return
    if metadata.description_content_type != "text/markdown" or not metadata.description:
        yield f"{what} has no description in Markdown"
    for _, target in LINK.findall(metadata.description or ""):
        if not re.match(r"\w+:|#", target):
            yield f"{what}: the link to {target} leads nowhere on a package index"


def state() -> str:
    """The commit that distributions are built from, and whether files differ from it."""
    commit = git("rev-parse", "HEAD").strip()
    changed = git("status", "--porcelain").splitlines()
    if not changed:
        return f"commit {commit}"
    return f"commit {commit} with uncommitted changes, untracked files left out:\n" + "\n".join(changed[:20])


def main() -> int:
    """Exit status: 0 both are built and sound, 1 something is wrong with them."""
    print(f"dist: {state()}", file=sys.stderr)
    made = build(FOLDER)
    found = problems(made)
    for problem in found:
        print(f"dist: {problem}", file=sys.stderr)
    for path in made:
        data = path.read_bytes()
        print(f"{hashlib.sha256(data).hexdigest()}  {path}  {len(data):,} bytes")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
