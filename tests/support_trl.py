"""Try releases of TRL: ``python -m tests.support_trl [RELEASE...]``; rewrites their part of docs/support.md.

For each release TRL alone is installed under .venv-support/, before this interpreter's own, and TESTS are run with it.
Ends with status 1 if any failed.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support import DOCUMENT, ENVIRONMENTS, FILE_SECONDS, ROOT, TRL_HEADING, Outcome, counted, versions_of

TESTS = {
    "tests/unit/test_trl_trainers.py": "`SFTTrainer`, `DPOTrainer` and `GRPOTrainer` publish",
    "tests/unit/test_transfer_trl.py": "`AsyncGRPOTrainer` publishes",
    "tests/sharded/test_trl_gather.py": "its stream of parameters, gathered by FSDP2",
}


def installed(release: str) -> Path:
    """Where a release of TRL lies; it is fetched if it is missing."""
    folder = ENVIRONMENTS / f"trl-{release}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-qq", "--no-deps"]
    if not folder.exists():
        subprocess.run([*pip, "--target", str(folder), f"trl=={release}"], check=True)
    return folder


def tried(release: str) -> Outcome:
    """Run TESTS with a release, file by file."""
    environment = {**os.environ, "PYTHONPATH": str(installed(release)), "OMP_NUM_THREADS": "1"}
    counts = {}
    for file in TESTS:
        with tempfile.TemporaryDirectory() as scratch:
            report = Path(scratch, "report.xml")
            command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
            done = subprocess.run(
                [*command, f"--basetemp={scratch}/tests", f"--junitxml={report}"],
                cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=FILE_SECONDS,
                check=False,
            )  # fmt: skip
            counts[file] = counted(report)
        print(f"TRL {release}, {file}: {counts[file]}", file=sys.stderr, flush=True)
        if done.returncode:
            print(done.stdout.decode()[-4000:], file=sys.stderr)
    return Outcome(release, {}, counts)


def section(outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of this part of docs/support.md."""
    own = versions_of(Path(sys.executable))
    yield TRL_HEADING
    yield ""
    yield "Made by `python -m tests.support_trl`, on a CPU. A whole training, with a server: `make example-trl`."
    yield ""
    yield "| | " + " | ".join(f"TRL {outcome.release}" for outcome in outcomes) + " |"
    yield "|---|" + "---|" * len(outcomes)
    for file, what in TESTS.items():
        yield f"| {what}: `{file}` | " + " | ".join(outcome.row(file) for outcome in outcomes) + " |"
    for name in ("torch", "transformers"):
        yield f"| {name} | " + " | ".join(own[name] for _ in outcomes) + " |"
    yield "| works | " + " | ".join("yes" if outcome.works else "**no**" for outcome in outcomes) + " |"
    yield ""
    yield "TRL 1.15 computes losses with Triton kernels, which need a GPU, so it cannot be tried on a CPU."


def main(arguments: list[str]) -> int:
    """Try each release; 0 if all work."""
    parser = argparse.ArgumentParser(prog="python -m tests.support_trl", description=__doc__.splitlines()[0])
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of trl, such as 1.16.0")
    outcomes = [tried(release) for release in parser.parse_args(arguments).releases]
    before = DOCUMENT.read_text().partition(TRL_HEADING)[0].rstrip()
    DOCUMENT.write_text(before + "\n\n" + "\n".join(section(outcomes)) + "\n")
    print(f"wrote {DOCUMENT.relative_to(ROOT)}")
    return 0 if all(outcome.works for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
