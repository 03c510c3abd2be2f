"""``python -m benchmarks.fleet --json FILE``: see ``--help``."""

import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.fleet.noise import SIZES
from benchmarks.fleet.record import BENCH
from benchmarks.fleet.replica import ReplicaError
from benchmarks.fleet.run import Fleet, Options
from benchmarks.rows import parser, write
from vllm_delta_sync.errors import DeltaSyncError


def main(arguments: list[str]) -> int:
    """Run it; 0 only if everything holds."""
    known = parser(BENCH, "Servers that follow a trainer over slow links, beside sending full weights.")
    known.add_argument("--replicas", type=int, help="servers at the start, of some 3 GB each; one joins (default 3)")
    known.add_argument("--versions", type=int, help="versions before the first server is killed (default 8)")
    known.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of each link, each way (default 100)")
    known.add_argument("--round-trip-ms", type=float, default=50.0, help="ms from a machine to the store (default 50)")
    known.add_argument("--slow-start", action="store_true", help="new and idle connections start slowly, as TCP's do")
    given = known.parse_args(arguments)
    size = SIZES["small" if given.quick else "full"]
    replicas, versions = given.replicas or (1 if given.quick else 3), given.versions or (2 if given.quick else 8)
    if min(replicas, versions, given.mbit, given.round_trip_ms) <= 0:
        known.error("give numbers above 0")
    options = Options(size, replicas, versions, 1e6 * given.mbit, given.round_trip_ms / 1e3, given.slow_start)
    # Whoever ends this process from outside ends its servers too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    folder, began = Path(tempfile.mkdtemp(prefix="delta-sync-fleet-")), time.monotonic()
    fleet = Fleet(options, folder, lambda text: print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr))
    try:
        fleet.run()
    except KeyboardInterrupt:
        return 130
    except (ReplicaError, DeltaSyncError, httpx.HTTPError, OSError, RuntimeError) as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    write(given.json, fleet.record.rows(size.ratio))
    return 0 if all(fleet.record.claims(size.ratio).values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
