"""What every benchmark shares: the command line, rows, timing, and the file of results."""

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
Row = dict[str, Any]
PACKAGES = ("torch", "numpy", "vllm")
_BEGAN = time.monotonic()


def parser(bench: str, description: str, minutes: float) -> argparse.ArgumentParser:
    """``--json FILE`` and ``--quick``, for benchmarks that add to it.

    Args:
        minutes: an estimate of how long it takes on two cores; ``start`` prefers what the committed results took.
    """
    known = argparse.ArgumentParser(
        prog=f"python -m benchmarks.{bench}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    known.add_argument("--json", type=Path, required=True, metavar="FILE", help="write the rows here")
    known.add_argument("--quick", action="store_true", help="small sizes; a minute or two")
    known.set_defaults(minutes=minutes)
    return known


def parse(bench: str, description: str, arguments: list[str] | None, minutes: float) -> argparse.Namespace:
    """``--json FILE`` and ``--quick``; arguments as of ``parser``."""
    return start(parser(bench, description, minutes), arguments)


def start(known: argparse.ArgumentParser, arguments: list[str] | None) -> argparse.Namespace:
    """Parse the arguments, and print how long the benchmark takes."""
    given = known.parse_args(arguments)
    if given.json.is_dir():
        known.error(f"argument --json: {given.json} is a directory")
    file = RESULTS / f"{known.prog.rpartition('.')[2]}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    if given.quick:
        takes = "a minute or two"
    elif "seconds" in found:
        takes = f"about {max(1, round(found['seconds'] / 60))} min ({found['machine']})"
    else:
        takes = f"about {given.minutes:g} min, by estimate"
    print(f"{known.prog} takes {takes}", file=sys.stderr, flush=True)
    return given


def row(bench: str, case: str, metric: str, value: float, unit: str, peer: str | None = None) -> Row:
    """One measurement; a comparison has metric ``ratio`` and names its peer."""
    found: Row = {"bench": bench, "case": case, "metric": metric, "value": round(value, 6), "unit": unit}
    return found if peer is None else {**found, "peer": peer}


def best_seconds(action: Callable[[], object], repeats: int, prepare: Callable[[], object] = lambda: None) -> float:
    """Shortest of ``repeats`` runs of ``action``; ``prepare`` runs before each and is not timed."""
    times = []
    for _ in range(repeats):
        prepare()
        began = time.perf_counter()
        action()
        times.append(time.perf_counter() - began)
    return min(times)


def machine() -> str:
    """Processor and cores, for the record."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    return f"{model}, {len(os.sched_getaffinity(0))} cores"


def commit() -> str | None:
    """The commit that is checked out; None outside of a repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() or None


def versions() -> dict[str, str]:
    """Python, and the packages that matter where they are installed."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def write(path: Path, rows: list[Row], note: str | None = None) -> None:
    """Write the rows, with where, when and with what they were measured, and print them.

    Args:
        note: what the page of results says of them beside that.
    """
    about = {
        "machine": machine(),
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "versions": versions(),
        # With a note, some of the rows are of another run.
        **({"seconds": round(time.monotonic() - _BEGAN)} if note is None else {"note": note}),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    head = json.dumps(about, indent=1).removesuffix("\n}")
    path.write_text(head + ',\n "rows": [\n  ' + ",\n  ".join(map(json.dumps, rows)) + "\n ]\n}\n")
    for item in rows:
        peer = f" against {item['peer']}" if "peer" in item else ""
        print(f"{item['bench']:8} {item['case']:28} {item['metric']:24} {item['value']:>12.4g} {item['unit']}{peer}")
