"""The steps from version to version: few where there are merged deltas, right whatever is damaged or missing."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.damage import TABLE
from tests.support.samples import state_of
from tests.support.store_faults import asked_of
from tests.support.written import Written, assert_bits, find_steps
from vllm_delta_sync.errors import DeltaSyncError, FormatError, NotFoundError
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.run import read_plan
from vllm_delta_sync.run.graph import ROOT, Edge, VersionGraph
from vllm_delta_sync.run.read_plan import MERGE_WIDTH, GapError, ReadPlanner, Step, plan_read
from vllm_delta_sync.run.restore import apply_step


@pytest.fixture
def tree(tmp_path: Path) -> Written:
    return Written(tmp_path / "run", table=TABLE)


def spans(steps: list[Step]) -> list[tuple[int, int]]:
    return [(step.start, step.end) for step in steps]


def expect(tree: Written, steps: list[Step], held: int, target: int) -> None:
    """The steps turn the bits of one version into those of the other."""
    for in_pieces in (False, True):
        state = state_of(TABLE, tree.writer.bits[held])
        at = held
        for step in steps:
            assert step.start == at
            apply_step(step, state, in_pieces=in_pieces)
            at = step.end
        assert at == target
        assert_bits(state, tree.writer.bits[target])


def grow(tree: Written, count: int) -> None:
    tree.deltas(*["plain"] * count)


def test_merged_deltas_make_a_long_path_short_with_few_reads(tree: Written) -> None:
    grow(tree, 75)
    tree.merged_deltas()
    steps = find_steps(tree.run, 3, 75)
    assert spans(steps) == [(3, 4), (4, 8), (8, 12), (12, 16), (16, 32), (32, 48), (48, 64), (64, 68), (68, 72), (72, 73), (73, 74), (74, 75)]  # fmt: skip # noqa: E501
    expect(tree, steps, 3, 75)
    assert spans(find_steps(tree.run, 0, 64)) == [(0, 64)]
    for held in range(0, 75, 12):
        # Three ranges of each length up to the longest that fits, and three on the way down.
        assert len(find_steps(tree.run, held, 75)) <= 6 * (math.log(75 - held, MERGE_WIDTH) + 1)
    run = tree.run
    read = asked_of(run.bucket, "get")
    assert len(ReadPlanner(run).path(1, 69)) == 11
    assert len(read) <= 16


def test_backwards_takes_the_same_versions_back(tree: Written) -> None:
    grow(tree, 9)
    tree.merged_deltas()
    steps = find_steps(tree.run, 9, 1)
    assert spans(steps) == [(9, 8), (8, 4), (4, 0), (0, 1)]  # few documents are reverted
    expect(tree, steps, 9, 1)


def test_version_that_builds_on_an_older_one(tree: Written) -> None:
    grow(tree, 5)
    tree.delta(base=2)
    grow(tree, 2)
    steps = find_steps(tree.run, 5, 8)
    assert spans(steps) == [(5, 4), (4, 3), (3, 2), (2, 6), (6, 7), (7, 8)]
    expect(tree, steps, 5, 8)
    # From before them, versions that were left behind are not passed.
    assert spans(find_steps(tree.run, 1, 7)) == [(1, 2), (2, 6), (6, 7)]
    assert spans(find_steps(tree.run, 7, 4)) == [(7, 6), (6, 2), (2, 3), (3, 4)]
    with pytest.raises(GapError, match="version 6 is damaged or missing"):
        find_steps(tree.run, 1, 6, avoid={keys.version_key(6)})
    # A merged delta may stand in for it.
    tree.writer.merge(5, 6)
    steps = find_steps(tree.run, 4, 6, avoid={keys.version_key(6)})
    assert spans(steps) == [(4, 5), (5, 6)]
    expect(tree, steps, 4, 6)


def test_version_that_replaces_bits_cannot_be_taken_back(tree: Written) -> None:
    grow(tree, 3)
    tree.delta("full")
    tree.delta(base=2)
    with pytest.raises(GapError, match="cannot be reverted"):
        find_steps(tree.run, 4, 5)
    expect(tree, find_steps(tree.run, 3, 5), 3, 5)
    # From the root there is a path all the same.
    assert [step.end for step in plan_read(tree.run, tree.run.head()).steps] == [1, 2, 5]


def test_version_that_replaces_bits_is_taken_back_by_a_merged_delta_over_it(tree: Written) -> None:
    """Collecting counts on it: it replaced objects that were lost, and that are there again."""
    tree.deltas("full", "plain")
    tree.writer.merge(0, 1)
    steps = find_steps(tree.run, 2, 0)
    assert [step.key for step in steps] == [keys.version_key(2), side.merged_delta_key(0, 1)]
    expect(tree, steps, 2, 0)


def test_damaged_merged_delta_is_avoided(tree: Written) -> None:
    grow(tree, 17)
    tree.merged_deltas()
    tree.bucket.put(side.merged_delta_key(0, 16), b"{}")
    assert spans(find_steps(tree.run, 0, 17)) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 17)]
    tree.forge(side.merged_delta_key(4, 8), tree.run.merged_delta(4, 8), last_manifest="ab" * 32)
    steps = find_steps(tree.run, 0, 17)
    assert spans(steps) == [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 12), (12, 16), (16, 17)]
    expect(tree, steps, 0, 17)


def test_of_two_ranges_that_disagree_the_version_between_tells_which_is_wrong(tree: Written) -> None:
    """Though the version at the other end of one of them is lost, and those inside it."""
    grow(tree, 12)
    tree.merged_deltas()
    tree.forge(side.merged_delta_key(8, 12), tree.run.merged_delta(8, 12), first_manifest="ab" * 32)
    for version in range(4, 8):
        tree.lose(keys.version_key(version))
    steps = find_steps(tree.run, 12, 0)
    assert spans(steps) == [(12, 11), (11, 10), (10, 9), (9, 8), (8, 4), (4, 0)]
    expect(tree, steps, 12, 0)


@pytest.mark.parametrize("how", ["lost", "rewritten"])
def test_bad_version_is_crossed_by_a_range_of_one(tree: Written, how: str) -> None:
    grow(tree, 4)
    avoid = {keys.version_key(2)} if how == "lost" else set()
    if how == "rewritten":
        tree.forge(keys.version_key(2), tree.run.manifest(2), step=7)
    with pytest.raises(GapError, match=f"version 2 {'is damaged or missing' if how == 'lost' else 'has digest'}"):
        find_steps(tree.run, 0, 4, avoid)
    tree.writer.merge(1, 2)
    expect(tree, find_steps(tree.run, 0, 4, avoid), 0, 4)


def test_manifest_that_the_next_one_contradicts_hides_no_merged_delta(tree: Written) -> None:
    """It is read on the way from the anchor, which leads nowhere."""
    grow(tree, 9)
    tree.merged_deltas()
    tree.beside(2)
    tree.forge(keys.version_key(4), tree.run.manifest(4), step=7)
    found = plan_read(tree.run, tree.run.manifest(8), {keys.version_key(7)})
    assert (found.root.key, spans(found.steps)) == (keys.version_key(0), [(0, 4), (4, 8)])
    expect(tree, found.steps, 0, 8)


def test_gap_is_crossed_by_a_step_back_and_a_merged_delta(tree: Written) -> None:
    """Collecting may keep just these, since they are the cheapest way on."""
    grow(tree, 9)
    tree.merged_deltas()
    for version in (6, 7):
        tree.bucket.delete(keys.version_key(version))
    steps = find_steps(tree.run, 5, 9)
    assert spans(steps) == [(5, 4), (4, 8), (8, 9)]
    expect(tree, steps, 5, 9)
    tree.bucket.delete(side.merged_delta_key(4, 8))
    with pytest.raises(GapError):
        find_steps(tree.run, 5, 9)


def test_what_retention_says_is_gone_is_not_planned_once_a_hole_was_met(tree: Written) -> None:
    grow(tree, 8)
    tree.merged_deltas()
    gone = side.Retention(run=tree.run.info.run, gone=[[1, 7]], created_at="2026-01-02T03:04:05Z")
    tree.bucket.put(side.RETENTION_KEY, gone.to_bytes())
    with pytest.raises(GapError, match="version 6 is no longer kept"):
        find_steps(tree.run, 5, 8, avoid={"something"})
    assert spans(find_steps(tree.run, 0, 8, avoid={"something"})) == [(0, 4), (4, 8)]


def test_cheapest_root_is_taken(tree: Written) -> None:
    grow(tree, 12)
    run, head = tree.run, tree.run.head()
    assert (plan_read(run, head).root.version, plan_read(run, head).root.anchor) == (0, None)
    for version in (3, 11):
        tree.beside(version)
    best = plan_read(tree.run, head)
    assert (best.root.key, spans(best.steps)) == (side.anchor_key(11), [(11, 12)])
    assert plan_read(tree.run, head, avoid={side.anchor_key(11)}).root.version == 3
    anchors = {side.anchor_key(3), side.anchor_key(11)}
    assert plan_read(tree.run, head, avoid=anchors).root.version == 0
    assert plan_read(tree.run, tree.run.manifest(2)).root.version == 0
    with pytest.raises(NotFoundError, match="version 0"):
        plan_read(tree.run, head, avoid={keys.version_key(0), *anchors})


def test_an_anchor_that_leads_nowhere_leaves_the_other_roots(tree: Written) -> None:
    grow(tree, 17)
    tree.merged_deltas()
    tree.beside(6)
    avoid = {keys.version_key(6), keys.version_key(8)}
    best = plan_read(tree.run, tree.run.head(), avoid)
    assert (best.root.key, spans(best.steps)) == (keys.version_key(0), [(0, 16), (16, 17)])


def test_a_bad_anchor_is_reported_where_no_other_root_is_left(tree: Written) -> None:
    grow(tree, 12)
    tree.beside(6)
    tree.bucket.put(side.anchor_key(6), b"{}")
    assert plan_read(tree.run, tree.run.head()).root.version == 0
    with pytest.raises(FormatError, match="anchor"):
        plan_read(tree.run, tree.run.head(), avoid={keys.version_key(0)})


def test_what_retention_says_is_gone_is_not_planned_once_an_anchor_was_bad(tree: Written) -> None:
    grow(tree, 12)
    tree.beside(6)
    gone = side.Retention(run=tree.run.info.run, gone=[[1, 5]], created_at="2026-01-02T03:04:05Z")
    tree.bucket.put(side.RETENTION_KEY, gone.to_bytes())
    assert plan_read(tree.run, tree.run.head()).root.version == 6
    tree.bucket.put(side.anchor_key(6), b"{}")
    with pytest.raises(FormatError, match="anchor"):
        plan_read(tree.run, tree.run.head())


def test_the_next_version_needs_no_listing_and_a_few_need_a_narrow_one(tree: Written) -> None:
    grow(tree, 27)
    tree.merged_deltas()
    run = tree.run
    listed = asked_of(run.bucket, "list")
    planner = ReadPlanner(run)
    planner.add_manifests(run.manifest(20), run.manifest(21))
    assert spans(planner.path(20, 21)) == [(20, 21)]
    assert listed == []
    assert spans(planner.path(20, 25)) == [(20, 24), (24, 25)]
    assert listed == [side.MERGED_PREFIX + "000000002"]


def test_a_way_up_takes_no_time_for_the_versions_below_it(tree: Written, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server plans at each poll; of 100,000 versions, that took half a second of its API server's process."""
    grow(tree, 30)
    put = list[str]()

    def edge(key: str, *values: Any) -> Edge:
        put.append(key)
        return Edge(key, *values)

    monkeypatch.setattr(read_plan, "Edge", edge)
    assert spans(find_steps(tree.run, 24, 27)) == [(24, 25), (25, 26), (26, 27)]
    assert {*put} == {keys.version_key(version) for version in (25, 26, 27)}


def test_a_last_resort_is_used_where_there_is_no_other_way_even_back() -> None:
    graph = VersionGraph([Edge("a", ROOT, 2, 10), Edge("b", 1, 2, 10, True), Edge("c", ROOT, 1, 1, last_resort=True)])
    assert [move.edge.key for move in graph.way(ROOT, 1) or []] == ["a", "b"]
    graph.drop("a")
    assert [move.edge.key for move in graph.way(ROOT, 1) or []] == ["c"]


@given(st.data())
def test_every_path_in_a_random_tree_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tree = Written(tmp_path_factory.mktemp("tree") / "run", 0, data.draw(st.integers(0, 1000)), TABLE)
    for version in range(1, data.draw(st.integers(1, 24))):
        base = data.draw(st.none() | st.integers(0, version - 1)) if data.draw(st.integers(0, 5)) == 0 else None
        full = (1,) if data.draw(st.integers(0, 9)) == 0 else ()
        tree.publish(0.1, full=full, base=None if base == version - 1 else base)
    if data.draw(st.booleans()):
        tree.merged_deltas()
    held, target = data.draw(st.integers(0, tree.head)), data.draw(st.integers(0, tree.head))
    avoid = {keys.version_key(version) for version in data.draw(st.sets(st.integers(1, max(1, tree.head)), max_size=2))}
    try:
        steps = find_steps(tree.run, held, target, avoid)
    except GapError:
        # Only what was avoided, or what replaces bits, can be in the way.
        full_versions = {manifest.version for manifest in tree.writer.manifests if not manifest.reversible}
        assert avoid or full_versions - {0}
    else:
        expect(tree, steps, held, target)
    try:
        state = tree.run.snapshot(target)
    except DeltaSyncError as error:
        pytest.fail(str(error))
    assert all(np.array_equal(got, right) for got, right in zip(state.bits, tree.writer.bits[target], strict=True))


def test_reading_ahead_changes_no_path_and_reads_nothing_twice(tmp_path: Path) -> None:
    """As on distant stores, where the documents of a path are read side by side."""
    written = Written(tmp_path / "run", 70, table=TABLE)
    written.merged_deltas()

    def path(start: int, target: int, is_remote: bool) -> tuple[list[str], list[str]]:
        run = written.run
        read = asked_of(run.bucket, "get")
        run._prefetcher.is_remote = is_remote
        steps = [step.key for step in ReadPlanner(run).path(start, target)]
        return steps, sorted(read)

    for start, target in ((0, 70), (3, 70), (1, 2), (63, 66), (70, 3), (7, 7)):
        assert path(start, target, True) == path(start, target, False)
    written.lose(side.merged_delta_key(0, 64))
    written.lose(side.merged_delta_key(64, 68))
    steps, read = path(0, 70, True)
    assert steps == path(0, 70, False)[0]
    assert len(read) == len(set(read))
