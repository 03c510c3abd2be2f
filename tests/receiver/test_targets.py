"""What is followed is changed while a server runs: forward, back, to a tag, to another run of the same base."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chains import TABLE, Chain, Server
from tests.support.hooks import HookedPort, failing
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.engine.standing import sibling
from vllm_delta_sync.errors import ChainError, DeltaSyncError, EngineError, NotFoundError, UsageError
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.upkeep.tagging import set_tag


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    chain = Chain(tmp_path)
    chain.grow(8)
    return chain


def served(server: Server) -> tuple[str | None, int | None]:
    return server.receiver.served_run, server.receiver.served_version


@pytest.mark.parametrize("ranks", [1, 2])
def test_target_goes_forward_and_back_and_follows_on(chain: Chain, ranks: int) -> None:
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance()
    set_tag(open_run(chain.url), "best", 3)
    for named, version in (("5", 5), ("tag:best", 3), ("head", 8), ("2", 2)):
        pauses = server.commits
        server.receiver.target(named)
        assert server.commits == pauses + 1
        server.serves(version)
        status = server.receiver.status()
        assert (status["target"], status["state"], status["holding"]) == (named, "idle", False)
        server.reaches(version, commits=0)
    server.receiver.target("tag:best")
    set_tag(open_run(chain.url), "best", 6)
    server.reaches(6, commits=1)
    server.receiver.target("head")
    chain.grow(1)
    server.reaches(9, commits=1)


def test_target_ends_a_hold(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    server.receiver.rollback(4)
    server.receiver.target("head")
    assert server.receiver.status()["state"] == "idle"
    server.serves(8)


@pytest.mark.parametrize(
    ("named", "error"), [("9", NotFoundError), ("tag:none", NotFoundError), ("4", DeltaSyncError)], ids=str
)
def test_target_that_cannot_be_served_changes_nothing(chain: Chain, named: str, error: type[DeltaSyncError]) -> None:
    server = Server(chain, chain.bits[0], target="6")
    server.receiver.advance()
    server.receiver.hold()
    # Neither back nor anew.
    chain.lose(4, 5)
    chain.remove(chain.manifests[0])
    with pytest.raises(error):
        server.receiver.target(named)
    status = server.receiver.status()
    assert (status["target"], status["state"], status["served"]["version"]) == ("6", "held", 6)
    server.serves(6)


def test_version_that_was_let_go_of_is_refused_by_name(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    chain.beside_it(7)
    collect(open_run(chain.url), Policy(keep_last=1, min_age=0), now=time.time() + 1e6)
    with pytest.raises(NotFoundError, match="version 3 is no longer kept"):
        server.receiver.rollback(3)
    server.serves(8)


@pytest.mark.parametrize("what", ["raw", "anchor", "break"])
def test_back_across_what_cannot_be_taken_back(tmp_path: Path, what: str) -> None:
    chain = Chain(tmp_path)
    chain.grow(3)
    if what == "raw":
        chain.grow(1, codec="raw")
    elif what == "anchor":
        chain.inside(chain.bits[-1])
    else:
        chain.grow(1, base=1)
    chain.grow(2)
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    for version in (4, 2, 3, 0):
        if version > (server.receiver.served_version or 0):
            server.receiver.release()
            server.receiver.advance(version)
        else:
            pauses = server.commits
            server.receiver.rollback(version)
            assert server.commits == pauses + 1
        server.serves(version)


def test_back_around_a_damaged_step(chain: Chain) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    chain.damage(chain.manifests[6])
    pauses = server.commits
    server.receiver.rollback(4)
    assert server.commits == pauses + 1
    server.serves(4)


def test_back_of_more_than_fits_is_rebuilt(chain: Chain) -> None:
    server = Server(chain, chain.bits[0], stage_bytes=0)
    server.receiver.advance()
    pauses = server.commits
    server.receiver.rollback(2)
    assert server.commits == pauses + 1
    server.serves(2)


@pytest.mark.parametrize("ranks", [1, 2])
def test_two_branches_in_turn(chain: Chain, ranks: int) -> None:
    """What an A/B test needs: old answers under the old run's name until the commit, new ones under the new name."""
    other = chain.branch("other", 4, seed=1)
    other.grow(3)
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance()
    seen: list[tuple[Any, ...]] = []
    server.receiver.board.watch(lambda: seen.append((server.receiver.run_id, *served(server))))
    for target, there, version in (("head", other, 3), ("7", chain, 7), ("1", other, 1), ("head", chain, 8)):
        pauses = server.commits
        before = (server.chain.run, *served(server))
        server.chain = there
        seen.clear()
        server.receiver.target(target, there.url)
        assert server.commits == pauses + 1
        assert set(seen) == {before, (there.run, there.run, version)}
        server.serves(version)
        status = server.receiver.status()
        assert (status["run"], status["target"], status["state"], status["undo"]) == (there.run, target, "idle", [])
        assert status["last_error"] is None
    server.receiver.target("head", other.url)
    other.grow(2)
    server.chain = other
    server.reaches(5, commits=1)
    assert server.receiver.status()["undo"] == [3]
    server.receiver.rollback(2)
    server.serves(2)


def test_version_0_of_a_branch_needs_a_commit_only_if_the_weights_differ(chain: Chain) -> None:
    other = chain.branch("other", 4, seed=1)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(4)
    server.receiver.target("head", other.url)
    server.chain = other
    server.serves(0)
    assert (served(server), server.commits) == ((other.run, 0), 1)


def test_two_runs_of_one_checkpoint(tmp_path: Path) -> None:
    one, other = Chain(tmp_path, "run", 0, base=True), Chain(tmp_path, "other", 1, base=True)
    one.grow(3)
    other.grow(4)
    server = Server(one, one.bits[0])
    server.receiver.advance()
    server.receiver.target("head", other.url)
    server.chain = other
    server.serves(4)
    assert served(server) == (other.run, 4)


def strange(root: Path) -> Chain:
    """A run that begins with other weights."""
    other = Chain(root, "strange", 5)
    other.inside([bits ^ np.uint16(1) for bits in other.fresh()])
    other.grow(1)
    return other


@pytest.mark.parametrize("why", ["no run", "other weights", "no version", "no such tag"])
def test_run_that_cannot_be_followed_is_refused_and_the_old_one_stays(chain: Chain, why: str) -> None:
    server = Server(chain, chain.bits[0])
    server.receiver.advance(6)
    url, named = f"{chain.root}/strange", "head"
    if why == "other weights":
        strange(chain.root)
    elif why != "no run":
        url = chain.branch("other", 2, seed=1).url
        named = "3" if why == "no version" else "tag:x"
    log = list(server.port.log)
    with pytest.raises(ChainError if why == "other weights" else NotFoundError):
        server.receiver.target(named, url)
    assert server.port.log == log
    assert (served(server), server.receiver.run_id) == ((chain.run, 6), chain.run)
    server.reaches(8, commits=1)


@pytest.mark.parametrize("named", ["head", "6"])
def test_the_target_in_force_that_fails_is_no_success(chain: Chain, named: str) -> None:
    server = Server(chain, chain.bits[0], target=named)
    port = HookedPort(*server.models)
    server.port = port
    server.follow(chain, target=named)
    server.receiver.advance(4)
    server.receiver.hold()
    port.before = failing("start")
    with pytest.raises(EngineError):
        server.receiver.target(named)
    status = server.receiver.status()
    assert (status["target"], status["served"]["version"], status["state"]) == (named, 4, "held")
    head = chain.folder / "HEAD.json"
    head.rename(chain.folder / "away")
    (chain.folder / "versions").rename(chain.folder / "gone")
    with pytest.raises(DeltaSyncError):
        server.receiver.target(named)
    (chain.folder / "away").rename(head)
    (chain.folder / "gone").rename(chain.folder / "versions")
    server.receiver.target(named)
    server.serves(8 if named == "head" else 6)


@pytest.mark.parametrize("at", ["start", "adopt", "commit"])
@pytest.mark.parametrize("times", [1, 3])
def test_failure_on_the_way_to_another_run_leaves_the_old_one(chain: Chain, at: str, times: int) -> None:
    other = chain.branch("other", 4, seed=1)
    other.grow(3)
    server = Server(chain, chain.bits[0])
    port = HookedPort(*server.models)
    server.port = port
    server.follow(chain)
    server.receiver.advance(6)
    port.before = failing(at, times)
    with pytest.raises(EngineError):
        server.receiver.target("head", other.url)
    assert (served(server), server.receiver.run_id) == ((chain.run, 6), chain.run)
    assert server.receiver.status()["last_error"]["kind"] == "engine"
    server.holds(chain.bits[6])
    port.before = lambda method, arguments: None
    server.reaches(8, commits=1)
    server.receiver.target("head", other.url)
    server.chain = other
    server.serves(3)


def test_damaged_branch_is_left_for_the_old_run(chain: Chain) -> None:
    other = chain.branch("other", 4, seed=1)
    other.grow(1)
    other.lose(1)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(6)
    with pytest.raises(DeltaSyncError):
        server.receiver.target("1", other.url)
    assert served(server) == (chain.run, 6)
    server.serves(6)
    server.reaches(8, commits=1)


@pytest.mark.parametrize(
    ("configured", "asked", "found"),
    [
        ("/data/runs/a", "/data/runs/b", "/data/runs/b"),
        ("/data/runs/a/", "file:///data/runs/b", "/data/runs/b"),
        ("file:///data/runs/a", "/data/runs/b", "file:///data/runs/b"),
        ("s3://bucket/team/a", "s3://bucket/team/b/", "s3://bucket/team/b"),
        ("s3://bucket/a", "s3://bucket/a", "s3://bucket/a"),
        ("hf://buckets/me/runs/a", "hf://buckets/me/runs/b.2", "hf://buckets/me/runs/b.2"),
    ],
)
def test_run_beside_the_configured_one(configured: str, asked: str, found: str) -> None:
    assert sibling(configured, asked) == found


@pytest.mark.parametrize(
    ("configured", "asked"),
    [
        ("/data/runs/a", "/data/b"),
        ("/data/runs/a", "/data/runs/a/b"),
        ("/data/runs/a", "/data/runs/../b"),
        ("/data/runs/a", "/data/runs/.."),
        ("/data/runs/a", "/data/runs/.hidden"),
        ("/data/runs/a", "file://host/data/runs/b"),
        ("/data/runs/a", "file:///data/runs/%2e%2e"),
        ("/data/runs/a", "s3:///data/runs/b"),
        ("/data/runs/a", "b"),
        ("/data/runs/a", "/"),
        ("s3://bucket/team/a", "s3://bucket/b"),
        ("s3://bucket/team/a", "s3://other/team/b"),
        ("s3://bucket/team/a", "S3://bucket/team/b"),
        ("s3://bucket/team/a", "gs://bucket/team/b"),
        ("s3://bucket/team/a", "s3://user@bucket/team/b"),
        ("s3://bucket/team/a", "s3://bucket:1/team/b"),
        ("s3://bucket/team/a", "s3://bucket/team/b?x"),
        ("s3://bucket/team/a", "s3://bucket/team/b#x"),
        ("s3://bucket/team/a", "s3://bucket/team//b"),
        ("s3://bucket", "s3://other"),
        ("hf://buckets/me/runs", "hf://buckets/me/others"),
        ("memory://a", "memory://b"),
    ],
)
def test_anything_else_is_no_run_beside_it(configured: str, asked: str) -> None:
    with pytest.raises(UsageError, match="beside"):
        sibling(configured, asked)


def test_other_tensors_are_refused(tmp_path: Path, chain: Chain) -> None:
    from tests.support.samples import RunWriter
    from vllm_delta_sync.bucket import open_bucket
    from vllm_delta_sync.wire.anchor import write_anchor
    from vllm_delta_sync.wire.table import TensorTable

    table = TensorTable(list(TABLE)[:-1])
    writer = RunWriter(open_bucket(tmp_path / "small"), table, run=f"{9:032x}")
    bits = chain.bits[0][:-1]
    write_anchor(tmp_path / "a", table, ((spec.name, bits[tensor]) for tensor, spec in enumerate(table)))
    writer.anchor(bits, (tmp_path / "a").read_bytes())
    server = Server(chain, chain.bits[0])
    server.receiver.advance()
    with pytest.raises(ChainError, match="has other tensors"):
        server.receiver.target("head", str(tmp_path / "small"))
    server.serves(8)
