"""Benchmarks run, and write what docs/benchmarks.md is made from. No time is asserted."""

import json
from pathlib import Path

import pytest

from benchmarks import apply, breakeven, catchup, codec, notice, scaling
from benchmarks.render import render

SLOW = [pytest.param(bench, marks=pytest.mark.slow) for bench in (apply, breakeven, codec, scaling)]


@pytest.mark.parametrize("bench", [catchup, notice, *SLOW])
def test_quick_run_writes_rows(tmp_path: Path, bench: object) -> None:
    name = bench.BENCH  # type: ignore[attr-defined]
    bench.main(["--quick", "--json", str(tmp_path / f"{name}.json")])  # type: ignore[attr-defined]
    document = json.loads((tmp_path / f"{name}.json").read_text())
    assert document["machine"]
    for row in document["rows"]:
        assert set(row) - {"peer"} == {"bench", "case", "metric", "value", "unit"}
        assert row["bench"] == name
        assert row["value"] > 0 or (row["unit"] == "MB" and row["value"] == 0)
        assert (row["metric"] == "ratio") == ("peer" in row)
    assert f"## {name}" in render(tmp_path)
