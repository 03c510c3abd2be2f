"""The way that a receiver takes to a version: merged deltas, over breaks, around what is lost, by anchors. Nothing on
the way is ever served."""

import json
import logging
import random
import shutil
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from tests.support.chains import Chain, Server, tensors_of
from tests.support.hooks import Hook, HookedPort, failing
from tests.support.samples import changes_between
from tests.support.seeds import seeds
from tests.support.written import assert_bits
from vllm_delta_sync.client import open_run
from vllm_delta_sync.codec.delta_object import DeltaContext
from vllm_delta_sync.codec.delta_writer import encode
from vllm_delta_sync.engine.protocol import ClaimedVersion, Describe, unwrap
from vllm_delta_sync.engine.staging.reconstruct import newest_good_manifest, rebuild
from vllm_delta_sync.errors import (
    ChainError,
    DeltaSyncError,
    EngineError,
    FormatError,
    LimitError,
    NotFoundError,
)
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format import manifest as keys
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.documents import Anchor, MergedDelta
from vllm_delta_sync.format.limits import MAX_VERSION
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.run.read_plan import MERGE_WIDTH
from vllm_delta_sync.run.restore import restore


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2])
def test_weights_are_hashed_once_while_no_version_can_be_taken(
    chain: Chain, ranks: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Hashing takes minutes with a large model, and each poll would begin it again; but not trusting what was written
    since."""
    caplog.set_level(logging.INFO, logger="vllm.delta_sync")
    server = Server(chain, [bits ^ np.uint16(1) for bits in chain.bits[0]], ranks)
    (ref,) = chain.manifests[0].objects
    there, hidden = chain.folder / ref.key, chain.root / "hidden"
    there.rename(hidden)

    def hashed() -> int:
        for _ in range(3):
            with pytest.raises(NotFoundError):
                server.receiver.advance()
        return sum("taking an anchor" in record.getMessage() for record in caplog.records)

    assert hashed() == 1
    server.models[-1].load_weights(tensors_of([bits ^ np.uint16(3) for bits in chain.bits[0]]))
    server.port.ranks[-1].note_external_write("load_weights")
    assert hashed() == 2
    hidden.rename(there)
    server.reaches(0, commits=1)


@pytest.mark.parametrize("kind", ["delta", "anchor", "delta over a break"])
@pytest.mark.parametrize("serves", [True, False])
def test_forged_version_far_ahead_is_one_error(chain: Chain, kind: str, serves: bool) -> None:
    """Before a version in between is looked for: planning would take more memory than there is."""
    chain.grow(3)
    server = Server(chain, chain.bits[0])
    if serves:
        server.receiver.advance()
    like, fields = {
        "delta": (3, {"base_version": MAX_VERSION - 1}),
        "anchor": (0, {"breaks": [{"version": MAX_VERSION, "base_version": None}]}),
        "delta over a break": (3, {"base_version": 3, "breaks": [{"version": MAX_VERSION, "base_version": 3}]}),
    }[kind]
    named = keys.version_key(MAX_VERSION)
    forged = json.loads((chain.folder / keys.version_key(like)).read_bytes()) | fields
    (chain.folder / named).write_bytes(dump_canonical(forged | {"version": MAX_VERSION, "parent": "0" * 64}))
    head = json.loads((chain.folder / keys.HEAD_KEY).read_bytes())
    digest = sha256((chain.folder / named).read_bytes()).hexdigest()
    (chain.folder / keys.HEAD_KEY).write_bytes(dump_canonical(head | {"version": MAX_VERSION, "manifest": digest}))
    for _ in range(2):
        with pytest.raises(LimitError, match="MAX_PLANNED_VERSIONS"):
            server.receiver.advance()
    status = server.receiver.status()
    assert status["last_error"]["kind"] == "limit"
    assert server.receiver.served_version == (3 if serves else 0)
    chain.grow(1)
    server.reaches(4, commits=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_folded_ranges_spare_what_is_below_them(chain: Chain, ranks: int) -> None:
    chain.grow(21)
    for first, last in ((0, 4), (4, 8), (8, 12), (12, 16), (0, 16), (16, 20)):
        chain.merge(first, last)
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance(0)
    chain.lose(*range(1, 21))
    server.reaches(21, commits=1)
    assert server.receiver.status()["recent"][-1]["versions"] == 21


def test_rebuild_that_lacks_its_base_leaves_what_is_served(tmp_path: Path) -> None:
    chain = Chain(tmp_path, base=True)
    chain.grow(4, codec="raw")
    server = Server(chain, chain.bits[0])
    server.reaches(4, commits=1)
    chain.grow(2, base=2)
    hidden = (tmp_path / "base").rename(tmp_path / "hidden")
    with pytest.raises(ChainError, match="cannot be reverted"):
        server.receiver.advance()
    server.serves(4)
    hidden.rename(tmp_path / "base")
    server.reaches(6, commits=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_behind_retention_the_newest_anchor_is_taken(chain: Chain, ranks: int) -> None:
    chain.grow(20)
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance(3)
    chain.beside_it(8)
    chain.beside_it(16)
    chain.lose(*range(1, 16))
    retention = side.Retention(run=chain.run, gone=[[1, 15]], created_at="2026-01-01T00:00:00Z")
    chain.bucket.put(side.RETENTION_KEY, retention.to_bytes())
    server.reaches(20, commits=2)
    assert server.receiver.status()["last_error"] is None
    server.receiver.rollback(16)
    server.holds(chain.bits[16])
    server.receiver.rollback(3)
    server.holds(chain.bits[3])


def test_versions_before_a_hole_are_served_and_the_rest_when_it_heals(chain: Chain, tmp_path: Path) -> None:
    chain.grow(9)
    path = chain.folder / chain.manifests[6].objects[0].key
    hidden = path.rename(tmp_path / "hidden")
    server = Server(chain, chain.bits[0])
    with pytest.raises(NotFoundError):
        server.receiver.advance()
    server.serves(5)
    assert server.receiver.status()["last_error"]["kind"] == "not_found"
    hidden.rename(path)
    server.reaches(9, commits=1)
    assert server.receiver.status()["last_error"] is None


def test_damaged_manifest_in_the_middle_is_named(chain: Chain) -> None:
    chain.grow(6)
    chain.spoil_manifest(4)
    server = Server(chain, chain.bits[0])
    with pytest.raises(FormatError, match=r"0000000004\.json"):
        server.receiver.advance()
    server.serves(3)
    chain.merge(0, 4)
    chain.merge(3, 4)
    server.reaches(6, commits=1)


def test_range_whose_distances_are_wrong_is_taken_back_and_avoided(chain: Chain) -> None:
    """It declares the right sums, so that only the commit finds out; and it is not tried twice."""
    chain.grow(6)
    merged_delta = chain.merge(0, 4)
    changes = changes_between(chain.table, chain.bits[0], chain.bits[4])
    changes.sparse[0].data[3] += 1
    data = encode(changes, chain.table, "plain", "zstd", DeltaContext(chain.run, 4, 0))
    forged = merged_delta.model_copy(update={"objects": [chain._put(data)], "payload_bytes": len(data)})
    chain.bucket.put(side.merged_delta_key(0, 4), forged.to_bytes())
    server = Server(chain, chain.bits[0])
    server.reaches(6, commits=4)
    assert "revert" in server.port.log
    for rank in server.port.ranks:
        assert rank.version == 6


def test_rewritten_history_is_not_followed_by_an_anchor(chain: Chain, tmp_path: Path) -> None:
    chain.grow(4)
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    info, table = ((chain.folder / key).read_bytes() for key in (keys.RUN_KEY, keys.TABLE_KEY))
    shutil.rmtree(chain.folder)
    other = Chain(tmp_path, seed=0)
    other.random = np.random.default_rng(99)
    other.grow(8)
    other.beside_it(7)
    assert (info, table) == tuple((chain.folder / key).read_bytes() for key in (keys.RUN_KEY, keys.TABLE_KEY))
    with pytest.raises(ChainError, match="rewritten"):
        server.receiver.advance()
    server.serves(4)


def test_damage_to_the_manifest_held_does_not_outlast_its_repair(chain: Chain) -> None:
    """A digit of a time is wrong in an unsigned manifest when the server starts, which nothing shows then."""
    chain.grow(3)
    path = chain.folder / keys.version_key(0)
    right = path.read_bytes()
    created = chain.manifests[0].created_at
    wrong = created[:-2] + ("1" if created[-2] != "1" else "2") + created[-1]
    path.write_bytes(right.replace(created.encode(), wrong.encode()))
    server = Server(chain, chain.bits[0])
    server.receiver.advance(0)
    assert server.receiver.board.served is not None
    assert server.receiver.board.served.created_at == wrong
    path.write_bytes(right)
    server.reaches(3, commits=1)


def test_publisher_that_had_lost_the_run_is_not_followed(chain: Chain) -> None:
    chain.epoch = 2
    chain.grow(2)
    chain.epoch = 1
    chain.grow(1)
    chain.epoch = 2
    chain.grow(1)
    server = Server(chain, chain.bits[0])
    with pytest.raises(ChainError, match="epoch"):
        server.receiver.advance()
    assert server.receiver.served_version in (None, 0, 2)


def test_changed_weights_become_the_head_where_their_version_is_kept_no_more(chain: Chain) -> None:
    chain.grow(10)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(3)
    chain.beside_it(8)
    chain.lose(*range(1, 8))
    server.models[0].norm.data[0] += 1
    assert not server.receiver.verify()["verdict"]
    server.reaches(10, commits=2)


def test_hold_that_comes_first_keeps_the_first_version_served(chain: Chain) -> None:
    chain.grow(5)
    chain.beside_it(3)
    server = Server(chain, [bits ^ np.uint16(1) for bits in chain.bits[0]])
    server.receiver.hold()
    server.receiver.advance()
    server.serves(3)
    assert server.receiver.status()["state"] == "held"
    server.receiver.release()
    server.reaches(5, commits=1)


def test_anchor_writes_only_what_differs(chain: Chain) -> None:
    """What the undo log keeps of it is no more."""
    chain.grow(3, share=0.0)
    chain.lose(1)
    chain.beside_it(2)
    server = Server(chain, chain.bits[0])
    server.reaches(3, commits=2)
    assert all(rank.undo_bytes < chain.table.full_bytes / 4 for rank in unwrap(server.port.call(Describe())))


# Runs of random shape with random losses


COMMITS = 4
"""An anchor, what follows it, and twice around something that was found to be bad at the commit only."""


class Story:
    """A chain made by chance."""

    def __init__(self, root: Path, seed: int) -> None:
        self.chance = random.Random(seed)
        self.chain = Chain(root, seed=seed, base=self.chance.random() < 0.3)
        self.merged_deltas: list[tuple[int, int]] = []
        self.anchors: list[int] = []
        for _ in range(self.chance.randint(6, 30)):
            self.publish()
        self.compact()

    @property
    def head(self) -> int:
        return len(self.chain.manifests) - 1

    def publish(self) -> None:
        kind = self.chance.choices(["plain", "raw", "full", "break", "anchor"], [20, 1, 1, 2, 1])[0]
        if kind == "break" and self.head > 1:
            self.chain.grow(1, base=self.chance.randrange(self.head))
        elif kind == "anchor":
            self.chain.inside(self.chain.bits[-1])
        elif kind == "raw":
            self.chain.grow(1, codec="raw")
        else:
            self.chain.grow(1, full=[2] if kind == "full" else [])

    def compact(self) -> None:
        breaks = {item.version for item in self.chain.breaks}
        size = MERGE_WIDTH
        while size <= self.head:
            for first in range(0, self.head + 1 - size, size):
                if not breaks.intersection(range(first + 1, first + size + 1)) and self.chance.random() < 0.6:
                    self.chain.merge(first, first + size)
                    self.merged_deltas.append((first, first + size))
            size *= MERGE_WIDTH
        for version in self.chance.sample(range(1, self.head + 1), k=self.chance.randint(0, 2)):
            self.chain.beside_it(version)
            self.anchors.append(version)

    def lose(self) -> None:
        """Objects are removed or damaged, manifests and documents are spoilt; the head's manifest stays."""
        chain, chance = self.chain, self.chance
        share = chance.choice([0.0, 0.1, 0.3, 0.8])
        run = open_run(chain.url)
        documents: list[Manifest | MergedDelta | Anchor] = [*chain.manifests[1:]]
        documents += [run.merged_delta(*pair) for pair in self.merged_deltas]
        documents += [run.anchor(version) for version in self.anchors]
        for document in documents:
            if chance.random() < share and all((chain.folder / ref.key).exists() for ref in document.objects):
                (chain.remove if chance.random() < 0.7 else chain.damage)(document)
        for version in range(1, self.head):
            if chance.random() < share / 10:
                chain.spoil_manifest(version)

    def leads_there(self) -> bool:
        """Whether the head can be made from what the bucket and the base hold."""
        run = open_run(self.chain.url)
        try:
            restore(run, run.manifest(self.head))
        except DeltaSyncError:
            return False
        return True


@pytest.mark.parametrize("seed", seeds(12, 60))
def test_head_is_reached_wherever_anything_leads_there(tmp_path: Path, seed: int) -> None:
    """By a server, and by a cold start: that loads the head or a version before it, bit for bit."""
    story = Story(tmp_path, seed)
    chain, chance = story.chain, story.chance
    ranks = chance.choice([1, 2])
    server = Server(chain, chain.bits[0], ranks, stage_bytes=chance.choice([10**9, 10**9, 200_000]))
    start = chance.randrange(story.head + 1)
    server.receiver.advance(start)
    server.serves(start)
    many = server.receiver.settings.stage_bytes < 10**9
    story.lose()
    commits = server.commits
    labels = len(server.port.log)
    with suppress(DeltaSyncError):
        server.receiver.advance()
    reached = server.receiver.served_version
    assert reached is not None
    assert reached == story.head or (start <= reached and not story.leads_there())
    server.serves(reached)
    assert many or server.commits - commits <= COMMITS
    # Never back, not even on the way.
    shown = [int(entry[6:]) for entry in server.port.log[labels:] if entry.startswith("label ")]
    assert shown == sorted(shown)
    assert all(version > start for version in shown)
    run = open_run(chain.url)
    manifest, state = rebuild(run, newest_good_manifest(run), "/nowhere")
    assert manifest.version == story.head or not story.leads_there()
    assert_bits(state, chain.bits[manifest.version])


# Branches: from a run to one that begins with a version of it, without a full reload


@pytest.fixture(params=[False, True], ids=["source begins with an anchor", "source begins with a base"])
def source(tmp_path: Path, request: pytest.FixtureRequest) -> Chain:
    chain = Chain(tmp_path, base=request.param)
    chain.grow(10)
    return chain


def no_whole_reads(chain: Chain) -> None:
    """Nothing but steps is left: what holds a version whole is gone."""
    for document in chain.manifests:
        if document.kind == "anchor":
            chain.remove(document)
    shutil.rmtree(chain.root / "base", ignore_errors=True)


@pytest.mark.parametrize(("held", "ranks"), [(3, 1), (6, 2), (9, 2)])
def test_branch_is_followed_from_a_version_of_its_source(source: Chain, held: int, ranks: int) -> None:
    """Before, at, and behind the version that the branch begins with."""
    branch = source.branch("branch", 6, seed=1)
    branch.grow(5)
    server = Server(source, source.bits[0], ranks)
    server.receiver.advance(held)
    no_whole_reads(source)
    server.follow(branch)
    server.reaches(5, commits=1)
    branch.grow(1)
    server.reaches(6, commits=1)


@pytest.mark.parametrize("found", [True, False])
def test_run_replaced_by_its_own_branch(source: Chain, found: bool) -> None:
    """The URL is the same; what is held is proven to be the source's by the weights."""
    server = Server(source, source.bits[0])
    server.receiver.advance(7)
    here, moved = source.folder, source.root / "moved"
    here.rename(moved)
    source.url, source.folder = str(moved), moved
    branch = source.branch("branch", 4, seed=1)
    branch.grow(3)
    no_whole_reads(source)
    branch.folder.rename(here)
    server.chain = branch
    if not found:
        elsewhere = moved.rename(source.root / "elsewhere")
        with pytest.raises(NotFoundError, match=f"branches from is not at '{moved}'"):
            server.receiver.advance()
        assert server.receiver.status()["served"] is None
        server.holds(source.bits[7])
        elsewhere.rename(moved)
    server.reaches(3, commits=1)
    assert server.receiver.status()["undo"] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_server_with_the_sources_base_follows_the_branch(source: Chain, ranks: int) -> None:
    branch = source.branch("branch", 6, seed=1)
    branch.grow(2)
    second = branch.branch("second", 1, seed=2)
    second.grow(3)
    no_whole_reads(source)
    server = Server(second, source.bits[0], ranks)
    server.reaches(3, commits=1)


@pytest.mark.parametrize("anchored", [True, False])
def test_way_across_that_is_lost_is_gone_around(source: Chain, anchored: bool) -> None:
    branch = source.branch("branch", 6, seed=1)
    branch.grow(5)
    server = Server(source, source.bits[0])
    server.receiver.advance(9)
    source.lose(8)
    if anchored:
        no_whole_reads(source)
        branch.beside_it(3)
    server.follow(branch)
    server.reaches(5, commits=2 if anchored else 1)


@pytest.mark.parametrize(("held", "commits"), [(6, 0), (9, 1)], ids=["recognized", "reached through the source"])
def test_version_0_of_a_branch_needs_a_commit_only_if_the_weights_differ(
    source: Chain, held: int, commits: int
) -> None:
    branch = source.branch("branch", 6, seed=1)
    server = Server(source, source.bits[0])
    server.receiver.advance(held)
    server.follow(branch)
    server.reaches(0, commits)
    assert server.commits == 1 + commits


def test_failures_on_the_way_across_lose_nothing(source: Chain) -> None:
    branch = source.branch("branch", 6, seed=1)
    branch.grow(3)
    no_whole_reads(source)
    server = Server(source, source.bits[0], port=HookedPort)
    server.receiver.advance(8)
    server.follow(branch)
    faults: list[tuple[str, Hook]] = [("before", failing(method)) for method in ("start", "commit", "set_version")]
    for when, fault in [*faults, ("after", failing("commit"))]:
        setattr(server.port, when, fault)
        with pytest.raises(EngineError):
            server.receiver.advance()
        server.holds(source.bits[8])
        assert server.receiver.status()["served"] is None
        # A controller that starts over hears the same from the ranks.
        server.follow(branch)
    server.reaches(3, commits=1)


def test_weights_that_are_not_what_the_ranks_believe_are_refused(tmp_path: Path) -> None:
    source = Chain(tmp_path, base=True)
    source.grow(5)
    branch = source.branch("branch", 3, seed=1)
    branch.grow(2)
    server = Server(source, source.bits[0])
    server.receiver.advance(5)
    server.models[0].norm.data[0] += 1
    server.follow(branch)
    with pytest.raises(ChainError, match="not the run's base"):
        server.receiver.advance()
    assert server.receiver.status()["state"] == "refused"


def test_other_weights_are_replaced_where_the_source_begins_with_an_anchor(tmp_path: Path) -> None:
    source = Chain(tmp_path)
    source.grow(5)
    branch = source.branch("branch", 3, seed=1)
    branch.grow(2)
    server = Server(branch, [bits ^ np.uint16(1) for bits in source.bits[0]])
    server.reaches(2, commits=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_cold_start_on_a_branch_and_on_to_its_head(source: Chain, ranks: int) -> None:
    branch = source.branch("branch", 6, seed=1)
    branch.grow(3)
    run = open_run(branch.url)
    manifest, state = rebuild(run, newest_good_manifest(run), "/nowhere")
    assert manifest.version == 3
    assert_bits(state, branch.bits[3])
    server = Server(branch, branch.bits[3], ranks)
    for model in server.models:
        model.delta_sync_loaded = ClaimedVersion(branch.run, branch.url, 3, list(state.fingerprints))
    server.receiver.advance()
    assert (server.receiver.served_version, server.commits) == (3, 0)
    branch.grow(1)
    server.reaches(4, commits=1)
