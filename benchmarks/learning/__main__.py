"""The reward of ``examples/real_model.py`` over several seeds: SmolLM2-135M, trained against a server that follows it.

Each run is the whole example, its proofs included; a seed chooses the questions and their order. *first* and *last* are
means over ten steps, and *rise* is their difference in standard errors, taken over steps. A run whose proofs fail, or
whose reward rises by less than three standard errors, ends the benchmark. Bytes are those of a version's objects.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common import real_model
from benchmarks.common.rows import Row, parser, row, start, write
from benchmarks.common.tables import Place, pivot

BENCH = "learning"
EXAMPLE = Path(__file__).parents[2] / "examples/real_model.py"
OUT = Path("bench-out/learning")
SEEDS = (0, 1, 2)
QUICK_STEPS = 4


def rows_of(summary: dict[str, Any]) -> list[Row]:
    """Rows of one run, from its summary.json."""
    case = f"seed {summary['seed']}"
    rise = summary["reward_last"] - summary["reward_first"]
    rows = [
        row(BENCH, case, "learning rate", 1e6 * summary["learning_rate"], "1e-6"),
        row(BENCH, case, "steps", summary["steps"], "steps"),
        row(BENCH, case, "first", summary["reward_first"], "reward"),
        row(BENCH, case, "last", summary["reward_last"], "reward"),
        row(BENCH, case, "standard error", summary["standard_error"], "reward"),
        row(BENCH, case, "rise", rise / summary["standard_error"], "standard errors"),
        row(BENCH, case, "changed", 100 * summary["changed"], "%"),
        row(BENCH, case, "version", summary["payload_bytes"] / 1e6, "MB"),
        row(BENCH, case, "all weights", summary["full_bytes"] / 1e6, "MB"),
        row(BENCH, case, "ratio", summary["full_bytes"] / summary["payload_bytes"], "x", "all weights, bytes"),
        row(BENCH, case, "age", summary["age"], "versions"),
        row(BENCH, case, "pause", summary["pause_ms"], "ms"),
        row(BENCH, case, "time", summary["training_seconds"] / 60, "min"),
    ]
    return rows


def tables(rows: list[Row]) -> list[str]:
    """One line for each seed."""

    def place(item: Row) -> Place:
        name = f"/ {item['peer']}" if "peer" in item else item["metric"]
        return None if name in ("all weights", "standard error") else (item["case"], f"{name} [{item['unit']}]")

    return pivot(f"weights {real_model.ORIGIN}", rows, place)


def main(arguments: list[str] | None = None) -> None:
    known = parser(BENCH, (__doc__ or "").partition("\n")[0], minutes=45)
    known.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="of the runs (default: 0 1 2)")
    options = start(known, arguments)
    checkpoint = real_model.checkpoint()
    rows: list[Row] = []
    for seed in options.seeds[:1] if options.quick else options.seeds:
        out = OUT / f"seed-{seed}"
        command: list[str | Path] = [sys.executable, EXAMPLE, checkpoint, "--seed", str(seed), "--out", out]
        command += ["--steps", str(QUICK_STEPS)] if options.quick else []
        if subprocess.run(command).returncode:
            raise SystemExit(f"{EXAMPLE.name} failed with seed {seed}; what it wrote is in {out}")
        rows += rows_of(json.loads((out / "summary.json").read_text()))
    write(options.json, rows)


if __name__ == "__main__":
    main()
