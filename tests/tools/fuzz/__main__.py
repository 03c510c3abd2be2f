"""``python -m tests.tools.fuzz``, see the package."""

import argparse
import os
import secrets
import signal
import sys
import tempfile
import time
from pathlib import Path

from tests.tools.fuzz import objects, properties

SHARE_OF_OBJECTS = 0.25


def main(arguments: list[str] | None = None) -> int:
    """Run a campaign: 0 if nothing was found, 1 if something was, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.tools.fuzz",
        description="Look for failures at random. Prints each seed, and the command that repeats a failure.",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=20.0,
        help="how long; tests that run then may end (default %(default)s). Objects take a quarter of it at most",
    )
    parser.add_argument("--seed", type=int, help="of the objects and of the first round; the next rounds count on")
    parser.add_argument("--only", choices=["objects", "properties"], help="one of the two parts, with all of the time")
    parser.add_argument("--inputs", type=int, default=100_000, help="how many objects at most (default %(default)s)")
    parser.add_argument("--tests", nargs="+", default=["tests"], help="files and folders of properties (default: all)")
    parser.add_argument("--rounds", type=int, default=sys.maxsize, help="how many, at most, of the properties")
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count(), help="that try properties side by side (default %(default)s)"
    )
    parser.add_argument("--renew", action="store_true", help="write the good objects of the corpus anew, and end")
    options = parser.parse_args(arguments)
    if options.renew:
        objects.renew()
        return 0
    seed = secrets.randbits(32) if options.seed is None else options.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began, seconds = time.monotonic(), 60 * options.minutes
    found: list[str] = []
    interrupted = False
    with tempfile.TemporaryDirectory(prefix="fuzz-", ignore_cleanup_errors=True) as scratch:
        try:
            if options.only != "properties":
                share = seconds if options.only else SHARE_OF_OBJECTS * seconds
                objects.campaign(options.inputs, seed, share, Path(scratch), found)
            if options.only != "objects":
                left = began + seconds - time.monotonic()
                properties.campaign(options.tests, seed, left, options.rounds, options.workers, Path(scratch), found)
        except KeyboardInterrupt:
            interrupted = True
    print(
        f"fuzz: {'interrupted after' if interrupted else 'done in'} {(time.monotonic() - began) / 60:.1f} min, "
        f"{len(found) or 'no'} failure{'' if len(found) == 1 else 's'}"
    )
    for failure in found:
        print(f"  {failure}")
    return 1 if found else 130 if interrupted else 0


if __name__ == "__main__":
    sys.exit(main())
