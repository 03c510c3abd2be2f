"""The way from version to version: short where there are folded ranges, right whatever is damaged or missing."""

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.samples import RunWriter, nudge, random_bits, state_of
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run, open_run
from vllm_delta_sync.chain.plan import FOLD_WIDTH, GapError, Planner, Step, path, plan
from vllm_delta_sync.chain.read import apply_mapped, apply_step
from vllm_delta_sync.errors import DeltaSyncError
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

TABLE = TensorTable([TensorSpec("a", "BF16", (40, 3)), TensorSpec("b", "F32", (7,)), TensorSpec("c", "I8", ())])


class Tree:
    """A run under construction.

    Attributes:
        writer: writes it. run: reads it.
    """

    def __init__(self, folder: Path, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.folder = folder
        self.writer = RunWriter(open_bucket(str(folder / "run")), TABLE)
        bits = random_bits(TABLE, self.random)
        anchor = folder / "anchor.safetensors"
        write_anchor(anchor, TABLE, [(spec.name, bits[tensor]) for tensor, spec in enumerate(TABLE)])
        self.writer.anchor(bits, anchor.read_bytes())
        self.run: Run = open_run(str(folder / "run"))

    def delta(self, base: int | None = None, full: tuple[int, ...] = ()) -> None:
        """Another version on top of ``base``, the last if None."""
        held = self.writer.bits[-1 if base is None else base]
        self.writer.delta(nudge(held, self.random, 0.1), full=full, base=base)

    def deltas(self, count: int) -> None:
        for _ in range(count):
            self.delta()

    def fold_all(self) -> None:
        """Every folded range that a run of this length may have."""
        head, size = len(self.writer.manifests) - 1, FOLD_WIDTH
        breaks = {item.version for item in self.writer.breaks}
        while size <= head:
            for first in range(0, head - size + 1, size):
                if not breaks & set(range(first + 1, first + size + 1)):
                    self.writer.fold(first, first + size)
            size *= FOLD_WIDTH

    def expect(self, steps: list[Step], held: int, target: int) -> None:
        """The steps turn the bits of one version into those of the other."""
        for apply in (apply_step, apply_mapped):
            state = state_of(TABLE, self.writer.bits[held])
            at = held
            for step in steps:
                assert step.start == at
                apply(step, state)
                at = step.end
            assert at == target
            for got, right in zip(state.bits, self.writer.bits[target], strict=True):
                assert np.array_equal(got, right)


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def spans(steps: list[Step]) -> list[tuple[int, int]]:
    return [(step.start, step.end) for step in steps]


def test_versions_one_by_one_without_folded_ranges(tree: Tree) -> None:
    tree.deltas(6)
    steps = path(tree.run, 1, 5)
    assert spans(steps) == [(1, 2), (2, 3), (3, 4), (4, 5)]
    tree.expect(steps, 1, 5)
    assert path(tree.run, 3, 3) == []


def test_folded_ranges_make_a_long_way_short(tree: Tree) -> None:
    tree.deltas(75)
    tree.fold_all()
    steps = path(tree.run, 3, 75)
    assert spans(steps) == [(3, 4), (4, 8), (8, 12), (12, 16), (16, 32), (32, 48), (48, 64), (64, 68), (68, 72), (72, 73), (73, 74), (74, 75)]  # fmt: skip # noqa: E501
    tree.expect(steps, 3, 75)
    assert spans(path(tree.run, 0, 64)) == [(0, 64)]
    for held in range(0, 75, 3):
        span = 75 - held
        # Three ranges of each length up to the longest that fits, and three on the way down.
        assert len(path(tree.run, held, 75)) <= 6 * (math.log(span, FOLD_WIDTH) + 1)


def test_way_back_takes_the_same_versions_back(tree: Tree) -> None:
    tree.deltas(9)
    tree.fold_all()
    steps = path(tree.run, 9, 1)
    assert spans(steps) == [(9, 8), (8, 4), (4, 3), (3, 2), (2, 1)]
    tree.expect(steps, 9, 1)


def test_version_that_builds_on_an_older_one(tree: Tree) -> None:
    tree.deltas(5)
    tree.delta(base=2)
    tree.deltas(2)
    steps = path(tree.run, 5, 8)
    assert spans(steps) == [(5, 4), (4, 3), (3, 2), (2, 6), (6, 7), (7, 8)]
    tree.expect(steps, 5, 8)
    # Versions that were left behind are not passed by who comes from before them.
    assert spans(path(tree.run, 1, 7)) == [(1, 2), (2, 6), (6, 7)]
    assert spans(path(tree.run, 7, 4)) == [(7, 6), (6, 2), (2, 3), (3, 4)]


def test_version_that_replaces_bits_cannot_be_taken_back(tree: Tree) -> None:
    tree.deltas(3)
    tree.delta(full=(0,))
    tree.delta(base=2)
    with pytest.raises(GapError, match="cannot be taken back"):
        path(tree.run, 4, 5)
    tree.expect(path(tree.run, 3, 5), 3, 5)
    # From the root there is a way all the same.
    assert [step.end for step in plan(tree.run, tree.run.head()).steps] == [1, 2, 5]


def test_damaged_folded_range_is_walked_around(tree: Tree) -> None:
    tree.deltas(17)
    tree.fold_all()
    bucket = tree.writer.bucket
    bucket.put(side.fold_key(0, 16), b"{}")
    assert spans(path(tree.run, 0, 17)) == [(0, 4), (4, 8), (8, 12), (12, 16), (16, 17)]
    other = tree.run.folded(4, 8).model_copy(update={"last_manifest": "ab" * 32})
    other._raw = None
    bucket.put(side.fold_key(4, 8), other.to_bytes())
    steps = path(tree.run, 0, 17)
    assert spans(steps) == [(0, 4), (4, 5), (5, 6), (6, 7), (7, 8), (8, 12), (12, 16), (16, 17)]
    tree.expect(steps, 0, 17)


def test_lost_delta_is_crossed_by_a_range_of_one(tree: Tree) -> None:
    tree.deltas(3)
    lost = keys.version_key(2)
    with pytest.raises(GapError, match="version 2 is damaged or missing"):
        path(tree.run, 0, 3, avoid={lost})
    tree.writer.fold(1, 2)
    tree.expect(path(tree.run, 0, 3, avoid={lost}), 0, 3)


def test_what_retention_says_is_gone_is_not_planned_once_a_hole_was_met(tree: Tree) -> None:
    tree.deltas(8)
    tree.fold_all()
    gone = side.Retention(run=tree.run.info.run, gone=[[1, 7]], created_at="2026-01-02T03:04:05Z")
    tree.writer.bucket.put(side.RETENTION_KEY, gone.to_bytes())
    with pytest.raises(GapError, match="version 6 is no longer kept"):
        path(tree.run, 5, 8, avoid={"something"})
    assert spans(path(tree.run, 0, 8, avoid={"something"})) == [(0, 4), (4, 8)]


def test_cheapest_root_is_taken(tree: Tree, tmp_path: Path) -> None:
    tree.deltas(12)
    head = tree.run.head()
    assert (plan(tree.run, head).root.version, plan(tree.run, head).beside) == (0, False)
    for version in (3, 11):
        tree.writer.beside(version, tmp_path)
    best = plan(tree.run, head)
    assert (best.root.version, best.beside, spans(best.steps)) == (11, True, [(11, 12)])
    assert plan(tree.run, head, avoid={side.anchor_key(11)}).root.version == 3
    assert plan(tree.run, head, anchors=False).root.version == 0
    assert plan(tree.run, tree.run.manifest(2)).root.version == 0


def test_planning_reads_few_documents(tree: Tree) -> None:
    tree.deltas(70)
    tree.fold_all()
    read: list[str] = []
    get = tree.run.bucket.get

    def counted(key: str, *, max_bytes: int | None = None) -> bytes:
        read.append(key)
        return get(key, max_bytes=max_bytes)

    tree.run.bucket.get = counted  # type: ignore[method-assign]
    planner = Planner(tree.run)
    assert len(planner.path(1, 69)) == 11
    assert len(read) <= 16


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_way_in_a_random_tree_is_exact(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tree = Tree(tmp_path_factory.mktemp("tree"), data.draw(st.integers(0, 1000)))
    for version in range(1, data.draw(st.integers(1, 24))):
        base = data.draw(st.none() | st.integers(0, version - 1)) if data.draw(st.integers(0, 5)) == 0 else None
        tree.delta(None if base == version - 1 else base, full=(1,) if data.draw(st.integers(0, 9)) == 0 else ())
    if data.draw(st.booleans()):
        tree.fold_all()
    head = len(tree.writer.manifests) - 1
    held, target = data.draw(st.integers(0, head)), data.draw(st.integers(0, head))
    avoid = {keys.version_key(version) for version in data.draw(st.sets(st.integers(1, max(1, head)), max_size=2))}
    try:
        steps = path(tree.run, held, target, avoid)
    except GapError:
        # Only what was avoided, or what replaces bits, can be in the way.
        full = {manifest.version for manifest in tree.writer.manifests if not manifest.reversible}
        assert avoid or full - {0}
    else:
        tree.expect(steps, held, target)
    try:
        state = tree.run.snapshot(target)
    except DeltaSyncError as error:
        pytest.fail(str(error))
    assert all(np.array_equal(got, right) for got, right in zip(state.bits, tree.writer.bits[target], strict=True))


def test_rewritten_version_is_crossed_by_a_range_of_one(tree: Tree) -> None:
    tree.deltas(4)
    forged = tree.run.manifest(2).model_copy(update={"step": 7})
    forged._raw = None
    tree.writer.bucket.put(keys.version_key(2), forged.to_bytes())
    with pytest.raises(GapError, match="version 2 is not the one that the version after it names"):
        path(tree.run, 0, 4)
    tree.writer.fold(1, 2)
    tree.expect(path(tree.run, 0, 4), 0, 4)


def test_nothing_stands_in_for_a_version_that_builds_on_an_older_one(tree: Tree) -> None:
    tree.deltas(4)
    tree.delta(base=1)
    tree.writer.fold(4, 5)
    with pytest.raises(GapError, match="version 5 is damaged or missing"):
        path(tree.run, 1, 5, avoid={keys.version_key(5)})
