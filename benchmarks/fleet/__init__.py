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
Loss and TLS are not imitated.
"""

from collections.abc import Sequence

from benchmarks.fleet.record import FULL
from benchmarks.rows import Row
from benchmarks.tables import grid


def tables(rows: Sequence[Row]) -> list[str]:
    """Rows as Markdown: the comparison first."""
    names = sorted({row["metric"].split()[0] for row in rows if row["metric"].endswith(" fresh")})
    replicas = [f"{name} {what}" for name in names for what in ("fresh", "down")]
    versions = [row for row in rows if row["case"].partition(",")[0].isdecimal()]
    others = [row for row in rows if row not in versions]
    phases = list(dict.fromkeys(row["metric"] for row in others if row["case"] == "way of a version"))
    return [
        *grid("over one replica's link", others, ["bytes down", "seconds to fresh"]),
        *["", *grid("full weights / a version, median", others, [f"/ {FULL}"])],
        *["", *grid("version", versions, ["changed", "payload", "trainer up", *replicas])],
        *["", *grid("server", others, ["version", "from start", "came down"])],
        *["", *grid("median", [row for row in others if row["case"] == "way of a version"], phases)],
        *["", *grid("link", others, ["round trip", "up", "down"])],
        *["", *grid("1: it holds", others, [row["metric"] for row in others if row["case"] == "verdict"])],
    ]
