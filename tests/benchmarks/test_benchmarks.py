"""Benchmarks run in short, and docs/benchmarks.md is what their committed results say. No time is asserted."""

import importlib
import json
import math
import subprocess
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import render
from benchmarks.catchup.widths import WIDTHS, ranges, way, widths
from benchmarks.common.rows import parser, row, start, write
from benchmarks.common.tables import grid, value_of
from benchmarks.common.training_data import Sequence
from benchmarks.published import __main__ as published
from benchmarks.scaling import __main__ as scaling
from benchmarks.scaling.shapes import scaled_models
from benchmarks.sparsity.movement import observed
from vllm_delta_sync.maintenance.compact import due_ranges
from vllm_delta_sync.run.read_plan import MERGE_WIDTH

ROOT = Path(__file__).parents[2]
SLOW = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in ("apply", "breakeven", "codec", "notice", "publish", "quantized", "scaling", "sparsity", "stores")
]


@pytest.mark.parametrize("bench", ["catchup", "published", *SLOW])
def test_quick_run_writes_rows_that_become_tables(tmp_path: Path, bench: str) -> None:
    file = tmp_path / f"{bench}.json"
    module = importlib.import_module(f"benchmarks.{bench}.__main__")
    module.main(["--quick", "--json", str(file)])
    document = json.loads(file.read_text())
    assert document["machine"]
    assert {"python", "torch", "numpy"} <= document["versions"].keys()
    for item in document["rows"]:
        assert set(item) - {"peer"} == {"bench", "case", "metric", "value", "unit"}
        assert item["bench"] == bench
        assert math.isfinite(item["value"])
        assert (item["metric"] == "ratio") == ("peer" in item)
    for lines in getattr(module, "blocks", lambda rows: {})(document["rows"]).values():
        assert len(lines) > 2
    tables = module.tables(document["rows"])
    assert sum(line.startswith("|---") for line in tables) >= 1
    assert len(tables) > 2


def test_the_committed_page_is_made_from_the_committed_results() -> None:
    text = render.render()
    assert render.TARGET.read_text() == text, "run: python -m benchmarks.render"
    assert len(text.splitlines()) <= 250
    for path in render.SOURCE.glob("*.json"):
        document = json.loads(path.read_text())
        assert document["date"]
        assert document["commit"]
        assert document.get("seconds", 1) > 0, "the next run would be said to take a minute"
        page = getattr(importlib.import_module(f"benchmarks.{path.stem}.__main__"), "PAGE", None)
        assert (f"({page})" if page else f"\n## {path.stem}\n") in text
    for page in render.PAGES:
        shown = page.read_text()
        assert shown == render.fill(shown), "run: python -m benchmarks.render"
        assert len(shown.splitlines()) <= (200 if page.name == "README.md" else 120)


def test_make_bench_runs_every_benchmark() -> None:
    said = subprocess.run(["make", "-n", "bench"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = said.partition("for name in ")[2].partition(";")[0].split()
    assert sorted(names) == sorted(path.parent.name for path in ROOT.glob("benchmarks/*/__main__.py"))


def test_a_page_is_made_of_the_results_that_there_are(tmp_path: Path) -> None:
    rows = [row("notice", "direct", "p50", 1.5, "ms"), row("notice", "broker, CURVE, signed", "p50", 2.25, "ms")]
    write(tmp_path / "notice.json", rows)
    text = render.render(tmp_path)
    assert (
        "| 1.5 ms plain; 2.25 ms by broker, encrypted and signed | `python -m benchmarks.notice --json FILE` |" in text
    )
    assert "| direct | 1.5 |" in text
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## notice"]


def test_a_benchmark_says_at_its_start_how_long_it_takes_and_its_help_keeps_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*arguments: str) -> str:
        start(parser("made_up", "", minutes=17), ["--json", "out.json", *arguments])
        return capsys.readouterr().err

    monkeypatch.setattr("benchmarks.common.rows.RESULTS", tmp_path)
    lists = "How it works:\n\n- one\n- two"
    assert lists in parser("made_up", lists, minutes=1).format_help()
    assert "17 min" in said()
    write(tmp_path / "made_up.json", [row("made_up", "one", "size", 2.0, "B")])
    document = json.loads((tmp_path / "made_up.json").read_text())
    assert document["seconds"] >= 0
    (tmp_path / "made_up.json").write_text(json.dumps(document | {"seconds": 254}))
    capsys.readouterr()
    assert "4 min" in said()
    assert "4 min" not in said("--quick")
    with pytest.raises(SystemExit):
        said("--json", str(tmp_path))
    assert "is a directory" in capsys.readouterr().err, "which would be found out only after the measurements"


def test_a_grid_has_a_line_for_each_case() -> None:
    rows = [
        row("b", "one", "ratio", 12345.6, "x", "raw"),
        row("b", "one", "size", 2.0, "B"),
        row("b", "two", "size", 0.04567, "B"),
        row("b", "three", "other", 1.0, "B"),
    ]
    assert grid("case", rows, ("size", "/ raw", "absent")) == [
        "| case | size [B] | / raw [x] |",
        "|---|---:|---:|",
        "| one | 2 | 12,300 |",
        "| two | 0.0457 |  |",
    ]
    with pytest.raises(KeyError, match="'none'"):
        value_of(rows, "one", "none")


def test_a_paper_s_figures_are_found_again_to_the_last_digit() -> None:
    rows = json.loads((render.SOURCE / "published.json").read_text())["rows"]
    for table, amount, metric, given in published.PAPER:
        found = value_of(rows, published.case_of(table, amount), metric)
        digits = 1 if given > 20 and metric == published.CHANGED else 2
        assert round(found, digits) == given, (table, amount, metric)


def test_widths_of_merged_deltas_are_those_of_a_run() -> None:
    assert ranges(MERGE_WIDTH, 100) == sorted(due_ranges(0, 100, []), key=lambda pair: (pair[1] - pair[0], pair))
    known = set(ranges(4, 100))
    edges = [50, 51, 52, 56, 60, 64, 80, 96, 100]
    assert way(50, 100, known) == list(pairwise(edges))
    base = {"weight": np.arange(1, 4001, dtype=np.uint16).reshape(40, 100)}
    steps = [(np.arange(step, 4000, 50, dtype=np.uint32), np.full(80, 5000 + step, np.uint16)) for step in range(20)]
    rows = widths("catchup", "made", Sequence(base, steps))
    most = [value_of(rows, f"made, width {width}", "objects read, most") for width in WIDTHS]
    assert most == [max(len(way(start, 20, set(ranges(width, 20)))) for start in range(20)) for width in WIDTHS]
    written = [value_of(rows, f"made, width {width}", "merged deltas") for width in WIDTHS]
    assert written == sorted(written, reverse=True)
    assert written[-1] > 0


def test_what_is_projected_has_the_known_parameters_and_takes_less_than_a_minute() -> None:
    eight, two, seventy, experts = scaled_models()
    assert [model.known for model in (eight, two, seventy, experts)] == ["8.03", "8.03", "70.55", "671"]
    assert eight.held == eight.numel
    for model in (two, seventy, experts):
        assert model.numel / model.ranks < model.held < model.numel
    rows = json.loads((render.SOURCE / "scaling.json").read_text())["rows"]
    assert value_of(rows, "projected rank: Llama-3.1-70B, TP 8", "proof") < 60


def test_a_part_that_is_not_measured_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = row("scaling", "slice: a: b", "proof", 1.0, "s"), row("scaling", "10 M", "encode", 2.0, "ns/element")
    write(tmp_path / "scaling.json", [old, row("scaling", "1 M", "encode", 3.0, "ns/element")])
    monkeypatch.setitem(scaling.PARTS, "sizes", lambda quick: [new])
    scaling.main(["--part", "sizes", "--json", str(tmp_path / "scaling.json")])
    assert json.loads((tmp_path / "scaling.json").read_text())["rows"] == [new, old]


def test_masters_anywhere_in_their_cells_change_as_often_as_an_update_is_of_a_rounding_step() -> None:
    mantissas = 1 + torch.rand(1_000_000, generator=torch.Generator().manual_seed(0))
    spread = torch.ldexp(mantissas, torch.tensor(-5)).requires_grad_()
    on_the_grid = spread.detach().bfloat16().float().requires_grad_()
    tiny = torch.ldexp(mantissas, torch.tensor(-14)).requires_grad_()
    with observed() as steps:
        for masters in (spread, on_the_grid, tiny):
            masters.grad = torch.ones_like(masters)
            torch.optim.SGD([masters], lr=1e-6).step()
    expected = 100 * 1e-6 / 2**-12
    for step in steps[:2]:
        assert step.mean_update == pytest.approx(1e-6, rel=0.01)
        assert step.share(step.expected) == pytest.approx(expected, rel=0.01)
        assert step.predict(1e-6, finer=0.5) == pytest.approx(expected / 2, rel=0.02)
        assert step.share(step.outright) == 0
    assert steps[0].share(steps[0].changed) == pytest.approx(expected, rel=0.1)
    assert steps[1].share(steps[1].changed) == 0
    assert steps[2].share(steps[2].changed) == steps[2].share(steps[2].outright) == 100
