"""Try releases of TRL: ``python -m tests.tools.support_trl [RELEASE...]``; writes docs/support.md.

For each release TRL alone is installed under .venv-support/, before this interpreter's own, and TESTS are run with it.
Ends with status 1 if any failed.
"""

import argparse
import sys
from collections.abc import Iterator

from tqdm import tqdm

from tests.tools.support_vllm import (
    ENVIRONMENTS,
    Outcome,
    importing_from,
    pip,
    run_tests,
    table,
    versions_of,
    write_section,
)

HEADING = "## Releases of TRL"
TESTS = {
    "tests/trainer/test_trl_trainers.py": "`SFTTrainer`, `DPOTrainer` and `GRPOTrainer` publish",
    "tests/trainer/test_transfer_trl.py": "`AsyncGRPOTrainer` publishes",
    "tests/trainer/sharded/test_trl_gather.py": "its stream of parameters, gathered by FSDP2",
}


def with_trl(release: str) -> dict[str, str]:
    """The environment of processes that import a release of TRL, which is installed if it is missing."""
    folder = ENVIRONMENTS / f"trl-{release}"
    if not folder.exists():
        pip(sys.executable, "install", "--no-deps", "--target", str(folder), f"trl=={release}")
    return {**importing_from(folder), "OMP_NUM_THREADS": "1"}


def section(outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of this part of docs/support.md."""
    yield "Made by `python -m tests.tools.support_trl`, on a CPU. A whole training, with a server: `make example-trl`."
    yield ""
    yield from table("TRL", TESTS, outcomes)
    yield ""
    yield "TRL 1.15 computes losses with Triton kernels, which need a GPU, so it cannot be tried on a CPU."


def main(arguments: list[str]) -> int:
    """Try each release; 0 if all work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.support_trl", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of trl, such as 1.16.0")
    releases: list[str] = parser.parse_args(arguments).releases
    outcomes = []
    with tqdm(total=len(releases) * len(TESTS), disable=None, unit="file") as bar:
        for release in releases:
            bar.set_description(f"TRL {release} installing")
            variables = with_trl(release)
            counts = run_tests(f"TRL {release}", sys.executable, TESTS, bar, variables)
            outcomes.append(Outcome(release, versions_of(sys.executable, variables), counts))
    write_section(HEADING, section(outcomes))
    return 0 if all(outcome.works for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
