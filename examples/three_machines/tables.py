"""The record as tables: rows of text, for the screen and for Markdown alike."""

import statistics

from examples.fleet.tables import Rows, in_markdown, megabytes
from examples.three_machines.record import Record
from examples.three_machines.settings import ROLLOUT, TRAINER

PERCENT = 100.0


def comparison(record: Record) -> Rows:
    """A version beside the full weights, over the same links."""
    fresh, full = sorted(record.fresh().values()), record.full
    payloads = [version.payload_bytes for version in record.versions]
    rows = [["from the trainer to the rollout machine", "bytes", "seconds to fresh"]]
    if fresh and payloads:
        rows.append(["a version, median", megabytes(statistics.median(payloads)), f"{statistics.median(fresh):.2f}"])
        rows.append(["a version, largest and slowest", megabytes(max(payloads)), f"{fresh[-1]:.2f}"])
    if payloads and ROLLOUT in record.passed:
        down = record.passed[ROLLOUT]["down"] / len(payloads)
        rows.append(["all that came down to the rollout machine, per version", megabytes(down), ""])
    if full is not None:
        rows.append(
            ["full weights, stored and fetched", megabytes(full.passed[ROLLOUT]["down"]), f"{full.seconds:.2f}"]
        )
    if full is not None and fresh and payloads:
        less = full.passed[ROLLOUT]["down"] / statistics.median(payloads)
        rows.append(
            ["full weights / median version", f"{less:.1f} ×", f"{full.seconds / statistics.median(fresh):.2f} ×"]
        )
    return rows


def traffic(record: Record) -> Rows:
    """All that passed each link during training: weights, trajectories, games, polling."""
    seconds = max(record.training_seconds, 1e-9)
    rows = [["link of", "up", "down", "share of the link, up", "down"]]
    for name in (TRAINER, ROLLOUT):
        ways = record.passed.get(name)
        if ways is not None:
            shares = [PERCENT * 8 * ways[way] / seconds / record.options.bits_per_second for way in ("up", "down")]
            bytes_passed = [megabytes(ways[way]) for way in ("up", "down")]
            rows.append([name, *bytes_passed, *(f"{share:.1f} %" for share in shares)])
    return rows


def kills(record: Record) -> Rows:
    """What was killed, and how long it took until training went on."""
    rows = [["killed", "at version", "went on after"]]
    for kill in record.kills:
        rows.append([kill.part, str(kill.version), "never" if kill.seconds is None else f"{kill.seconds:.1f} s"])
    return rows


def links(record: Record) -> Rows:
    """What the links are, as measured from the machines."""
    rows = [["link of", "round trip", "up", "down"]]
    for name, found in record.links.items():
        rates = [f"{found.up_mbit_s:.1f} Mbit/s", f"{found.down_mbit_s:.1f} Mbit/s"]
        rows.append([name, f"{found.round_trip_ms:.1f} ms", *rates])
    return rows


def everything(record: Record) -> list[Rows]:
    """All tables."""
    return [links(record), kills(record), traffic(record), comparison(record)]


def markdown(record: Record) -> str:
    """All tables, for three-machines.md."""
    return "\n".join(in_markdown(rows) for rows in everything(record))
