"""The benchmarks of a busy server run, and their rows become tables. No figure is asserted: they are the machine's."""

import json
from pathlib import Path

import pytest

from benchmarks.caching import __main__ as caching
from benchmarks.serving import __main__ as serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_quick_run_writes_rows(tmp_path: Path) -> None:
    # On a busy machine, no token came for 16 s once; a server that stops until its next sync still fails.
    serving.main(["--quick", "--every", "25", "--json", str(tmp_path / "serving.json")])
    rows = json.loads((tmp_path / "serving.json").read_text())["rows"]
    values = {(row["metric"], row.get("peer")): row["value"] for row in rows}
    assert {row["case"] for row in rows} == {"demo, every 25 s"}
    assert values["syncs", None] == 4
    for metric in ("speed with", "speed without", "pause p50", "staging p50", "payload", "changed"):
        assert values[metric, None] > 0
    assert values["ratio", "no_sync"] > 0
    assert sum(line.startswith("| demo") for line in serving.tables(rows)) == 1


def test_quick_run_of_caching_compares_all_settings(tmp_path: Path) -> None:
    caching.main(["--quick", "--json", str(tmp_path / "caching.json")])
    rows = json.loads((tmp_path / "caching.json").read_text())["rows"]
    values = {(row["case"], row["metric"], row.get("peer")): row["value"] for row in rows}
    assert {case for case, _, _ in values} == {f"demo, {setting}" for setting in caching.SETTINGS}
    for case in {case for case, _, _ in values}:
        for metric in ("speed", "speed without versions", "hits without versions"):
            assert values[case, metric, None] > 0
    assert values["demo, salt", "ratio", "reset"] > 0
    assert sum(line.startswith("| demo") for line in caching.tables(rows)) == 1
