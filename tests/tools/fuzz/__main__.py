"""``python -m tests.tools.fuzz``, see the package."""

import argparse
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"


def run(inputs: int, seed: int, corpus: Path, keep: bool) -> int:
    """Read so many changed files → how many ways of refusal were met. Raises what is none, with its input kept."""
    from tests.tools.fuzz.inputs import SECONDS, mutated, read_all

    chance = random.Random(seed)
    pool = [path.read_bytes() for path in sorted(corpus.glob("*.safetensors"))]
    met: set[str] = set()
    for data in pool:
        met |= read_all(data)
    last, began = Path(tempfile.gettempdir()) / f"delta-sync-fuzz-{os.getpid()}.safetensors", time.monotonic()
    for number in range(inputs):
        data = mutated(chance.choice(pool), chance.choice(pool), chance)
        # Written before it is read: a crash leaves no other trace.
        last.write_bytes(data)
        new = read_all(data, SECONDS) - met
        met |= new
        if new and len(data) < 16_384:
            pool.append(data)
            if keep and len(list(corpus.iterdir())) < 160:
                (corpus / f"refused-{len(met):03}.safetensors").write_bytes(data)
        if sys.stderr.isatty() and number % 500 == 0:
            rate = (number + 1) / (time.monotonic() - began)
            print(f"\r{number:,} of {inputs:,} inputs, {rate:.0f}/s, {len(met)} refusals", end="", file=sys.stderr)
    last.unlink()
    return len(met)


def renew(corpus: Path) -> None:
    """Write the good objects as they are encoded today."""
    from tests.tools.fuzz.inputs import seeds

    for path in corpus.glob("good-*"):
        path.unlink()
    for name, data in seeds().items():
        (corpus / f"good-{name}.safetensors").write_bytes(data)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.fuzz", description=__doc__)
    parser.add_argument("--inputs", type=int, default=100_000, help="how many files to try (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the changes (default %(default)s)")
    parser.add_argument("--keep", action="store_true", help="add inputs that are refused in a new way to the corpus")
    parser.add_argument("--renew", action="store_true", help="write the good files of the corpus anew, and end")
    parser.add_argument("--corpus", type=Path, default=CORPUS, help="folder of files to start from")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.renew:
        renew(options.corpus)
        return 0
    if options.inside:
        met = run(options.inputs, options.seed, options.corpus, options.keep)
        print(
            f"{options.inputs:,} inputs read or refused, {met} ways of refusal, no crash, no hang"
            f"{', no access out of bounds' if os.environ.get('NUMBA_BOUNDSCHECK') else ''}"
        )
        return 0
    with tempfile.TemporaryDirectory() as cache:
        # In a process of its own, whose end tells of a crash; with a cache of its own, since checks are compiled in.
        environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": cache}
        child = subprocess.Popen([sys.executable, "-m", "tests.tools.fuzz", "--inside", *sys.argv[1:]], env=environment)
        try:
            status = child.wait()
        except KeyboardInterrupt:
            child.terminate()
            child.wait()
            return 130
    if status:
        where = Path(tempfile.gettempdir()) / f"delta-sync-fuzz-{child.pid}.safetensors"
        print(f"ended with {status} at the input in {where}", file=sys.stderr)
    return 1 if status else 0


if __name__ == "__main__":
    sys.exit(main())
