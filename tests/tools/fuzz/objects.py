"""``campaign`` has damaged delta objects read, in a process of its own whose loops check all bounds."""

import math
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.fuzz.inputs import SECONDS, mutated, read_all, seeds

CORPUS = Path(__file__).parent / "corpus"
LARGEST_KEPT = 16_384


def run(inputs: int, seed: int, seconds: float = math.inf) -> tuple[int, int]:
    """Read so many changed files, or as many as there is time for → how many, and how many ways of refusal were met.

    Raises what is none, with its input kept.
    """
    chance = random.Random(seed)
    pool = [path.read_bytes() for path in sorted(CORPUS.glob("*.safetensors"))]
    met: set[str] = set()
    for data in pool:
        met |= read_all(data)
    last, began, number = input_of(os.getpid()), time.monotonic(), 0
    while number < inputs and time.monotonic() - began < seconds:
        data = mutated(chance.choice(pool), chance.choice(pool), chance)
        # Written before it is read: a crash leaves no other trace.
        last.write_bytes(data)
        new = read_all(data, SECONDS) - met
        met |= new
        if new and len(data) < LARGEST_KEPT:
            pool.append(data)
        number += 1
        if sys.stdout.isatty() and number % 500 == 0:
            rate = number / (time.monotonic() - began)
            print(f"\r{number:,} of {inputs:,} objects, {rate:.0f}/s, {len(met)} refusals", end="", flush=True)
    last.unlink(missing_ok=True)
    return number, len(met)


def input_of(process: int) -> Path:
    """Where a process keeps the input that it reads."""
    return Path(tempfile.gettempdir()) / f"delta-sync-fuzz-{process}.safetensors"


def renew() -> None:
    """Write the good objects as they are encoded today."""
    for path in CORPUS.glob("good-*"):
        path.unlink()
    for name, data in seeds().items():
        (CORPUS / f"good-{name}.safetensors").write_bytes(data)


def campaign(inputs: int, seed: int, seconds: float, scratch: Path, found: list[str]) -> None:
    """Read damaged objects in another process, whose end tells of a crash; adds what is wrong to ``found``."""
    print(f"objects: seed {seed}", flush=True)
    command = [sys.executable, "-m", "tests.tools.fuzz.objects", str(inputs), str(seed), str(seconds)]
    # A cache of its own, since the checks are compiled in.
    environment = {**os.environ, "NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(scratch / "numba")}
    # A session of its own, so that Ctrl-C reaches this process only.
    child = subprocess.Popen(command, env=environment, start_new_session=True)
    try:
        status = child.wait()
    except KeyboardInterrupt:
        child.kill()
        child.wait()
        input_of(child.pid).unlink(missing_ok=True)
        raise
    if status:
        again = f"python -m tests.tools.fuzz --only objects --seed {seed} --inputs {inputs}"
        found.append(f"objects: ended with {status} at the input in {input_of(child.pid)}; again: {again}")


def main(inputs: str, seed: str, seconds: str) -> None:
    tried, met = run(int(inputs), int(seed), float(seconds))
    start = "\r\x1b[K" if sys.stdout.isatty() else ""
    print(f"{start}objects: {tried:,} read or refused, in {met} ways; no crash, no hang, no access out of bounds")


if __name__ == "__main__":
    main(*sys.argv[1:])
