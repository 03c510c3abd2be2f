"""The record as tables: rows of text, for the screen and for Markdown alike."""

import statistics

from rich.table import Table

from examples.fleet.record import MB, PERCENT, Record

Rows = list[list[str]]
"""The first row names the columns."""


def comparison(record: Record) -> Rows:
    """A version beside the full weights, over the same link."""
    full, fresh, down = record.full, record.fresh(), record.down()
    rows = [["over one replica's link", "bytes down", "seconds to fresh"]]
    rows.append(["a version, median", megabytes(statistics.median(down)), f"{statistics.median(fresh):.2f}"])
    rows.append(["a version, slowest", megabytes(max(down)), f"{max(fresh):.2f}"])
    if full is not None:
        bytes_down = full.passed[record.full_replica]["down"]
        rows.append(["full weights, stored and fetched", megabytes(bytes_down), f"{full.seconds:.2f}"])
        bound = max(full.up, full.down)
        rows.append(["the same, if both ways overlapped (computed)", megabytes(bytes_down), f"{bound:.2f}"])
        rows.append(["full weights / median version", f"{record.byte_ratio():.0f} ×", f"{record.time_ratio():.1f} ×"])
    return rows


def versions(record: Record) -> Rows:
    """Every version on every replica."""
    names = sorted({name for change in record.changes for name in change.fresh})
    rows = [["version", "scene", "changed", "payload", "trainer up", *(f"{name}: s, down" for name in names)]]
    for change in record.changes:
        cells = [
            f"{change.fresh[name]:.2f}, {megabytes(change.passed[name]['down'])}" if name in change.fresh else "–"
            for name in names
        ]
        share = f"{PERCENT * change.changed / change.total:.2f} %"
        up = megabytes(change.passed["trainer"]["up"])
        rows.append([str(change.version), change.scene, share, megabytes(change.payload_bytes), up, *cells])
    return rows


def arrivals(record: Record) -> Rows:
    """Servers that came back, or came late."""
    rows = [["server", "how", "version", "seconds from start", "bytes down"]]
    rows += [[a.name, a.how, str(a.version), f"{a.seconds:.1f}", megabytes(a.down)] for a in record.arrivals]
    return rows


def phases(record: Record) -> Rows:
    """Where the time of a version goes."""
    return [
        ["part of a version's way", "median ms"],
        *([name, f"{1e3 * s:.0f}"] for name, s in record.phases().items()),
    ]


def links(record: Record) -> Rows:
    """What the links are, as measured."""
    rows = [["link", "round trip", "up", "down"]]
    for name, found in record.links.items():
        rates = [f"{found.up_mbit_s:.1f} Mbit/s", f"{found.down_mbit_s:.1f} Mbit/s"]
        rows.append([name, f"{found.round_trip_ms:.1f} ms", *rates])
    return rows


def everything(record: Record) -> list[Rows]:
    """All tables."""
    return [links(record), versions(record), arrivals(record), phases(record), comparison(record)]


def on_screen(rows: Rows) -> Table:
    """For a terminal."""
    table = Table(*rows[0])
    for row in rows[1:]:
        table.add_row(*row)
    return table


def markdown(record: Record) -> str:
    """All tables, for fleet.md."""
    listing = [f"```\n$ delta-sync fleet\n{record.listing}```\n"] if record.listing else []
    return "\n".join([*(in_markdown(rows) for rows in everything(record)), *listing])


def in_markdown(rows: Rows) -> str:
    """For a document."""
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def megabytes(count: float) -> str:
    """``count`` bytes for people."""
    return f"{count / MB:.2f} MB" if count >= MB / 10 else f"{count / 1e3:.1f} kB"
