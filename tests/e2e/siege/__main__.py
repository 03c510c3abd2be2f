"""Carry out every attack and write the table: ``python -m tests.e2e.siege [--write docs/attacks.md] [NAME …]``."""

import argparse
import os
import platform
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

from tests.e2e.siege import ATTACKS
from tests.e2e.siege.world import Attack, Seen, Siege, execute_plan

HEADER = """# Attacks and network faults, tried

Written by `python -m tests.e2e.siege --write docs/attacks.md`; `make test-full` runs the same rows, `make test` some
of them (`tests/e2e/test_siege.py`). Each row runs against real processes over real sockets: a trainer that signs
(`Publisher`), a broker with CURVE and allow-lists (`delta-sync broker`), TCP proxies on both of its sides, and a vLLM
server (`delta-sync serve`) with `trusted_keys`. The server polls only every {poll:.0f} s: anything sooner came by
notice.

During each row the test compares the served version and the SHA-256 of every runtime parameter with those from
before, and measures how long `publish` blocked the training loop ({blocked:.0f} s would fail). After each row the
trainer publishes once more. The server must serve that version within {fresh:.0f} s, with the fingerprint that the
trainer declares, and rescans all weights against it. [SECURITY.md](SECURITY.md) says what each attacker has access to.

Run on {machine}.

| | attack or fault | who | what is done | outcome | seen |
|---:|---|---|---|---|---|
"""


def seen_in_words(seen: Seen) -> str:
    """What was observed, for the table's last column."""
    parts = []
    if seen.errors:
        parts.append("status: " + ", ".join(f"`{kind}`" for kind in sorted(seen.errors)))
    if seen.answers:
        parts.append("HTTP " + ", ".join(map(str, sorted(set(seen.answers)))))
    parts += seen.notes
    parts.append(f"fresh after {seen.fresh:.1f} s; training blocked {1000 * seen.stood_still:.0f} ms")
    return "; ".join(parts)


def row(number: int, attack: Attack, seen: Seen) -> str:
    cells = [str(number), attack.name, attack.who, attack.what, attack.outcome, seen_in_words(seen)]
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    from tests.e2e.siege.world import BLOCKED_SECONDS, FRESH_SECONDS, POLL_SECONDS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the table there")
    parser.add_argument("names", nargs="*", help="only these attacks")
    options = parser.parse_args()
    chosen = [attack for attack in ATTACKS if not options.names or attack.name in options.names]
    rows = []
    with tempfile.TemporaryDirectory(prefix="delta-sync-siege-") as folder, ExitStack() as stack:
        siege = Siege(Path(folder), stack)
        for number, attack in enumerate(chosen, start=1):
            rows.append(row(number, attack, execute_plan(siege, attack)))
            print(rows[-1], flush=True)
    if options.write is not None:
        machine = f"{os.cpu_count()} cores ({platform.machine()}), no GPU"
        head = HEADER.format(poll=POLL_SECONDS, blocked=BLOCKED_SECONDS, fresh=FRESH_SECONDS, machine=machine)
        options.write.write_text(head + "\n".join(rows) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
