"""Try releases of torch for the publisher: ``python -m tests.tools.support_torch RELEASE...``; writes docs/support.md.

Each release is installed under .venv-support/, before this interpreter's own torch, and TESTS are run with it; see
tests/tools/support_vllm.py. Ends with status 1 if any test failed.
"""

import argparse
import sys
from collections.abc import Iterator

from tqdm import tqdm

from tests.tools.support_vllm import Outcome, run_tests, table, versions_of, with_torch, write_section

HEADING = "## Releases of torch"
TESTS = {
    "tests/trainer/test_detection.py": "changed elements are found",
    "tests/trainer/sharded/test_boxes.py": "sharded tensors",
    "tests/trainer/test_publisher.py": "a model is published",
    "tests/trainer/test_codec_choice.py": "codecs",
    "tests/trainer/test_callback.py": "the callback of transformers",
    "tests/trainer/sharded/test_publish.py": "several ranks publish",
    "tests/trainer/sharded/test_recipe_fsdp2.py": "FSDP2",
}


def section(outcomes: list[Outcome]) -> Iterator[str]:
    """The lines of this part of docs/support.md."""
    yield "Made by `python -m tests.tools.support_torch`, on a CPU: the publisher, which needs no vLLM. The table above"
    yield "has the torch of each server."
    yield ""
    yield from table("torch", TESTS, outcomes)


def main(arguments: list[str]) -> int:
    """Try each release; 0 if all work."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.support_torch", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("releases", nargs="+", metavar="RELEASE", help="of torch, such as 2.15.0")
    releases: list[str] = parser.parse_args(arguments).releases
    outcomes = []
    with tqdm(total=len(releases) * len(TESTS), disable=None, unit="file") as bar:
        for release in releases:
            bar.set_description(f"torch {release} installing")
            variables = with_torch(release)
            counts = run_tests(f"torch {release}", sys.executable, TESTS, bar, variables)
            outcomes.append(Outcome(release, versions_of(sys.executable, variables), counts))
    write_section(HEADING, section(outcomes))
    return 0 if all(outcome.works for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
