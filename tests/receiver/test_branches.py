"""Branches: a server goes over from a run to one that begins with a version of it, without a full reload."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.chains import Chain, Server, models_of
from tests.support.hooks import Hook, HookedPort, failing
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.engine.lineage import across, line
from vllm_delta_sync.engine.loader import Loaded
from vllm_delta_sync.engine.rebuild import newest, rebuild
from vllm_delta_sync.errors import ChainError, EngineError, NotFoundError


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
    if found:
        server.reaches(3, commits=1)
        assert server.receiver.status()["undo"] == []
        return
    moved.rename(source.root / "elsewhere")
    with pytest.raises(NotFoundError, match="branches from is not at"):
        server.receiver.advance()
    assert server.receiver.status()["served"] is None
    server.holds(source.bits[7])


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
    faults: list[tuple[str, Hook]] = [("before", failing(method)) for method in ("start", "commit", "adopt")]
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
    manifest, state = rebuild(run, newest(run), "/nowhere")
    assert manifest.version == 3
    for found, right in zip(state.bits, branch.bits[3], strict=True):
        assert np.array_equal(found, right)
    models = models_of(branch.bits[3], ranks)
    for model in models:
        fingerprints = tuple(value.hex() for value in state.fingerprints)
        model.delta_sync_loaded = Loaded(branch.run, branch.url, 3, manifest.digest, fingerprints)
    server = Server(branch, branch.bits[3], ranks)
    for model, loaded in zip(server.models, models, strict=True):
        model.delta_sync_loaded = loaded.delta_sync_loaded
    server.receiver.advance()
    assert (server.receiver.served_version, server.commits) == (3, 0)
    branch.grow(1)
    server.reaches(4, commits=1)


def test_source_that_is_gone_is_named_and_waited_for(tmp_path: Path) -> None:
    source = Chain(tmp_path, base=True)
    source.grow(5)
    branch = source.branch("branch", 3, seed=1)
    hidden = source.folder.rename(tmp_path / "hidden")
    server = Server(branch, source.bits[0])
    with pytest.raises(NotFoundError, match=f"branches from is not at '{source.url}'"):
        server.receiver.advance()
    hidden.rename(source.folder)
    branch.grow(1)
    server.reaches(1, commits=1)


def test_lines_end_where_a_run_comes_round_again(source: Chain) -> None:
    branch = source.branch("branch", 3, seed=1)
    run = open_run(branch.url)
    found = line(run, 0)
    assert [(point.run.info.run, point.version) for point in found] == [(branch.run, 0), (source.run, 3)]
    assert across(found[:1], found[1:]) is None
