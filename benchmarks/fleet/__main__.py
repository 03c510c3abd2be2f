"""What a version costs where machines are far apart, beside sending full weights over the same links.

One trainer and real ``delta-sync serve`` machines, each behind a link of its own of 100 Mbit/s each way and 50 ms to an
S3 store, all on one machine (``tests/support/links.py``, in userspace). A Qwen3 of 100.7 M parameters (201 MB of bf16)
takes true steps of Adam on noise, at the rate that changes about 1 % of the bf16 weights. Versions are published one by
one; then a server is killed, misses versions, and starts again from the checkpoint that it once started from; then one
joins from the bucket alone. At the end the full checkpoint is stored through the trainer's link and fetched through a
replica's, all weights are rescanned, and greedy answers compared. The exit status is 0 only if all fingerprints are
that of the checkpoint that the trainer wrote, all answers are equal, and in full size a version was there 20 times
sooner than full weights.

``seconds to fresh`` is from the call of ``publish()`` until a replica answers that the version is served, which is
asked past the link. ``bytes down`` is all that came down a replica's link until all served the version: changes,
manifests, HEAD, heartbeats, polling, headers of HTTP. Versions that went out while a server was starting are shown and
not counted: on one machine it takes the others' processors. Full weights count from the trainer's memory (writing the
checkpoint included) until the file is complete on the replica's disk; loading it is not counted, which favours the
peer. Ratios are peer / ours, so *higher is better*. With ``--slow-start`` connections begin with ten packets and double
with each round trip, as TCP does, and again after a second without traffic; without it each has the whole link at once.
Loss and TLS are not imitated. ``--signed`` and ``--poll-seconds`` measure the same with signatures, and without
notices.
"""

import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import httpx

from benchmarks.common import real_model
from benchmarks.common.real_model import CASE
from benchmarks.common.rows import Row, parser, start, write
from benchmarks.common.tables import Place, pivot
from benchmarks.fleet.record import BENCH, RATIO, Record
from benchmarks.fleet.replica import ReplicaError
from benchmarks.fleet.run import Fleet, Options
from benchmarks.fleet.trainers import NoisyTrainer, RealTrainer, Trainer
from vllm_delta_sync.errors import DeltaSyncError


def main(arguments: list[str]) -> int:
    """Run it; 0 only if everything holds."""
    known = parser(BENCH, "Servers that follow a trainer over slow links, beside sending full weights.", minutes=12)
    real_model.add_flag(known)
    known.add_argument("--replicas", type=int, help="servers at the start, of some 3 GB each; one joins (default 3)")
    known.add_argument("--versions", type=int, help="versions before the first server is killed (default 8)")
    known.add_argument("--mbit", type=float, default=100.0, help="Mbit/s of each link, each way (default 100)")
    known.add_argument("--round-trip-ms", type=float, default=50.0, help="ms from a machine to the store (default 50)")
    known.add_argument("--slow-start", action="store_true", help="new and idle connections start slowly, as TCP's do")
    known.add_argument("--signed", action="store_true", help="the publisher signs, and servers trust that key alone")
    known.add_argument("--poll-seconds", type=float, help="no notices: servers poll the bucket so often")
    given = start(known, arguments)
    replicas, versions = given.replicas or (1 if given.quick else 3), given.versions or (2 if given.quick else 8)
    if min(replicas, versions, given.mbit, given.round_trip_ms, given.poll_seconds or 1) <= 0:
        known.error("give numbers above 0")
    size = "small" if given.quick else "full"
    trainers: dict[str, Callable[[], Trainer]] = {} if given.real else {"": partial(NoisyTrainer, size)}
    checkpoint = real_model.find_checkpoint(given)
    if checkpoint is not None:
        trainers[f"{CASE}: "] = partial(RealTrainer, checkpoint)
    # SIGTERM ends the servers too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ratio = None if given.quick else RATIO
    rows: list[Row] = []
    holds = True
    try:
        for case, make in trainers.items():
            options = Options(
                make,
                replicas,
                versions,
                bits=1e6 * given.mbit,
                round_trip=given.round_trip_ms / 1e3,
                slow_start=given.slow_start,
                signed=given.signed,
                poll_seconds=given.poll_seconds,
            )
            record = measure(options)
            rows += [{**item, "case": case + item["case"]} for item in record.rows(ratio)]
            holds = holds and all(record.claims(ratio).values())
    except KeyboardInterrupt:
        return 130
    except (ReplicaError, DeltaSyncError, httpx.HTTPError, OSError, RuntimeError) as error:
        print(f"fleet: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    write(given.json, rows)
    return 0 if holds else 1


def measure(options: Options) -> Record:
    """Run one fleet; raises what ``Fleet.run`` does."""
    folder, began = Path(tempfile.mkdtemp(prefix="delta-sync-fleet-")), time.monotonic()
    fleet = Fleet(options, folder, lambda text: print(f"[{time.monotonic() - began:5.1f} s] {text}", file=sys.stderr))
    try:
        fleet.run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return fleet.record


def tables(rows: Sequence[Row]) -> list[str]:
    """Rows as Markdown: the comparison. The results have each version too, and where its time goes."""

    def compared(item: Row) -> Place:
        if item["metric"] not in ("bytes down", "seconds to fresh"):
            return None
        case = item["case"].removeprefix(f"{CASE}: ")
        model = f"{CASE}: " if item["case"] != case else ""
        return (case, f"{model}{item['metric']} [{item['unit']}]")

    return pivot("over one replica's link", rows, compared, lambda column: "seconds" in column)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
