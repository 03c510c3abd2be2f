"""Figures of the publish benchmark, from measurements that are known; and that its processes measure."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3ForCausalLM

from benchmarks import publish
from benchmarks.publish_figures import Memory, Phase, Rank, Turn, added_by_blocks, cost, loop, memory
from benchmarks.publish_model import SIZES
from benchmarks.publish_rank import PASS_ELEMENTS, Passes, Plan
from benchmarks.render import render
from benchmarks.rows import Row, write
from benchmarks.tables import value_of
from vllm_delta_sync.wire.bits import Bits

STEP, BLOCKED, BESIDE = 0.5, 0.02, 0.03
CASE = "a case"


def phases_of(blocks: int, drift: float = 0.0) -> list[Phase]:
    """Of four steps each, while the machine gets slower by ``drift`` a step with each phase. One publish is skipped."""
    found = []
    for number, publishes in enumerate([False, True, True, False] * blocks):
        step = STEP + drift * number + publishes * (BLOCKED + BESIDE)
        blocked, versions = ([BLOCKED] * 4, 4) if publishes else ([], 0)
        found.append(Phase(publishes, 4, 4 * step, blocked, versions))
    found[1] = Phase(True, 4, found[1].seconds, [BLOCKED] * 4, 3)
    return found


def turns_of(*publish: float) -> list[Turn]:
    return [Turn(seconds, 0.9 * seconds, 0.08, 0.05, 2.0, 4.0, 0.01) for seconds in publish]


@pytest.mark.parametrize("drift", [0.0, 0.01])
def test_what_a_publish_adds_to_a_step_is_found_on_a_machine_that_gets_slower(drift: float) -> None:
    added = added_by_blocks(phases_of(3, drift))
    assert added.mean == pytest.approx(BLOCKED + BESIDE)
    assert added.half == pytest.approx(0, abs=1e-9)


def test_rows_of_the_loop() -> None:
    slower = [Phase(p.publishes, p.steps, p.seconds, [2 * one for one in p.blocked], 0) for p in phases_of(2)]
    rows = loop(CASE, [Rank(1, None, [], phases_of(2)), Rank(1, None, [], slower)])
    assert value_of(rows, CASE, "step without") == pytest.approx(1e3 * STEP)
    assert value_of(rows, CASE, "ratio", "no_publisher") == pytest.approx(1 + (BLOCKED + BESIDE) / STEP)
    assert value_of(rows, CASE, "blocked") == pytest.approx(2e3 * BLOCKED)
    assert value_of(rows, CASE, "added beside it") == pytest.approx(1e3 * (BESIDE - BLOCKED))
    assert value_of(rows, CASE, "versions") == 15
    assert value_of(rows, CASE, "skipped") == 1


def test_the_slowest_process_counts_in_each_turn() -> None:
    ranks = [Rank(100_000_000, None, turns_of(0.1, 0.3, 0.1)), Rank(90_000_000, None, turns_of(0.2, 0.1, 0.2))]
    rows = cost(CASE, ranks, "gathered_save")
    assert value_of(rows, CASE, "shard") == 100
    assert value_of(rows, CASE, "publish") == pytest.approx(200)
    assert value_of(rows, CASE, "publish: comparing") == pytest.approx(180)
    assert value_of(rows, CASE, "changed") == pytest.approx(1)
    assert value_of(rows, CASE, "ratio", "array_equal") == pytest.approx(2.5)
    assert value_of(rows, CASE, "ratio", "memcmp") == pytest.approx(4)
    assert value_of(rows, CASE, "ratio", "gathered_save") == pytest.approx(0.1)
    assert value_of(rows, CASE, "less than saving") == pytest.approx(90)
    assert value_of(rows, CASE, "less than saving durably") == pytest.approx(95)


def test_memory_is_what_the_publisher_adds_in_shards_of_its_process() -> None:
    mega = 1_000_000
    small = Memory(12 * mega, 11 * mega, without=50 * mega, publishing=65 * mega, alone=14 * mega, saving=40 * mega)
    large = Memory(21 * mega, 25 * mega, without=50 * mega, publishing=72 * mega, alone=23 * mega, saving=0)
    rows = memory(CASE, [Rank(10_000_000, small), Rank(20_000_000, large)], "gathered_save")
    assert value_of(rows, CASE, "at most, in steps") == pytest.approx(22)
    assert value_of(rows, CASE, "at most, in steps, share") == pytest.approx(1.5)
    assert value_of(rows, CASE, "at most, in steps, beyond the copy") == pytest.approx(5)
    assert value_of(rows, CASE, "at most, publishing, share") == pytest.approx(1.4)
    assert value_of(rows, CASE, "at rest, share") == pytest.approx(1.2)
    assert value_of(rows, CASE, "gathered_save") == pytest.approx(40)


def test_a_measurement_is_the_same_once_written_and_read() -> None:
    rank = Rank(7, Memory(1, 2, 3, 4, 5, 6), turns_of(0.1), phases_of(1))
    assert Rank.of(json.loads(json.dumps(asdict(rank)))) == rank
    assert Rank.of(json.loads(json.dumps(asdict(Rank(7, None))))) == Rank(7, None)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["array_equal", "memcmp"])
def test_a_pass_reads_to_the_last_element(threads: int, kind: str) -> None:
    sizes = (2 * PASS_ELEMENTS + 5, 1, 0, 7)
    live: list[Bits] = [np.arange(size, dtype=np.uint32).astype(np.uint16) for size in sizes]
    passes = Passes(lambda: live, threads)
    equal = getattr(passes, kind)
    assert passes.seconds(equal) > 0
    for array in (live[0], live[1], live[3]):
        array[-1] ^= 1
        assert passes.changed() == 1 / sum(sizes)
        with pytest.raises(SystemExit, match="changed"):
            passes.seconds(equal)
        passes.renew()
    assert passes.seconds(equal) > 0


def check_rows(rows: list[Row], folder: Path) -> None:
    for row in rows:
        assert set(row) - {"peer"} == {"bench", "case", "metric", "value", "unit"}
        assert (row["metric"] == "ratio") == ("peer" in row)
    text = render(folder)
    assert all(f"| {table} |" in text for table in ("loop", "call", "memory"))


def test_a_process_trains_publishes_and_saves(tmp_path: Path) -> None:
    plan = Plan("7 M", 1, 1, turns=1, blocks=2, steps=1, settle=0.0)
    [found] = publish.run(plan, tmp_path)
    rows, case = publish.figures(plan, [found]), publish.case_of(plan)
    with torch.device("meta"):
        elements = Qwen3ForCausalLM(SIZES[plan.size].config()).num_parameters()
    assert found.shard == 2 * elements
    assert value_of(rows, f"{case}: call", "changed") > 0.1
    assert value_of(rows, f"{case}: loop", "versions") + value_of(rows, f"{case}: loop", "skipped") == 4
    assert value_of(rows, f"{case}: memory", "at most, publishing, share") > 1
    write(tmp_path / "rows" / "publish.json", rows)
    check_rows(rows, tmp_path / "rows")


@pytest.mark.slow
def test_quick_run_has_rows_of_one_process_and_of_several(tmp_path: Path) -> None:
    path = tmp_path / "publish.json"
    publish.main(["--quick", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    check_rows(rows, tmp_path)
    shards = {row["case"]: row["value"] for row in rows if row["metric"] == "shard"}
    one, two = (shards[f"7 M, {processes}, 1 thread: call"] for processes in ("1 process", "2 processes, FSDP2"))
    assert two == pytest.approx(one / 2, rel=0.01)


def test_a_process_that_fails_is_reported_with_its_words(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("no directory")
    with pytest.raises(SystemExit, match=r"process 0 ended with 1:\n(.*\n)*.*run"):
        publish.run(Plan("7 M", 1, 1, turns=0, blocks=2, steps=1, settle=0.0), tmp_path)
