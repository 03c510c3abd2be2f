"""The ways a receiver takes: folded ranges, over breaks, around what is lost, by anchors, across branches."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests.support.chains import Chain, Server
from tests.support.samples import changes_between
from vllm_delta_sync.errors import (
    ChainError,
    DigestError,
    FormatError,
    NotFoundError,
)
from vllm_delta_sync.wire import documents as side
from vllm_delta_sync.wire import manifest as keys
from vllm_delta_sync.wire.delta import DeltaContext, encode


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


def fold_all(chain: Chain, *pairs: tuple[int, int]) -> None:
    for first, last in pairs:
        chain.fold(first, last)


@pytest.mark.parametrize("ranks", [1, 2])
def test_folded_ranges_spare_what_is_below_them(chain: Chain, ranks: int) -> None:
    chain.grow(21)
    fold_all(chain, (0, 4), (4, 8), (8, 12), (12, 16), (0, 16), (16, 20))
    server = Server(chain, chain.bits[0], ranks)
    server.receiver.advance(0)
    chain.lose(*range(1, 21))
    server.reaches(21, commits=1)
    assert server.receiver.status()["recent"][-1]["versions"] == 21


def test_bad_folded_range_is_avoided(chain: Chain) -> None:
    chain.grow(5)
    chain.damage(chain.fold(0, 4))
    server = Server(chain, chain.bits[0])
    server.reaches(5, commits=1)
    assert server.receiver.status()["last_error"] is None


def test_lost_version_is_crossed_by_its_repair(chain: Chain) -> None:
    """A folded range of one version, where repair wrote it."""
    # Compressed otherwise, or it would be the same object.
    chain.grow(3, compression="none")
    chain.fold(1, 2)
    chain.lose(2)
    Server(chain, chain.bits[0]).reaches(3, commits=1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_break_is_crossed_backwards_in_one_commit(chain: Chain, ranks: int) -> None:
    """Nothing on the way back is ever served."""
    chain.grow(9)
    server = Server(chain, chain.bits[0], ranks, stage_bytes=0)
    server.receiver.advance(9)
    before = server.commits
    chain.grow(1, base=4)
    chain.grow(2)
    served: list[int] = []
    original = server.port.label

    def label(version: int | None) -> None:
        served.append(-1 if version is None else version)
        original(version)

    server.port.label = label  # type: ignore[method-assign]
    server.receiver.advance()
    server.serves(12)
    assert served == [10, 11, 12]
    assert server.commits - before == 3


@pytest.mark.parametrize("codec", ["raw", "packed"])
def test_break_that_cannot_be_crossed_backwards_is_rebuilt(tmp_path: Path, codec: str) -> None:
    """Versions that replace bits cannot be taken back; there is the base, and no anchor further on."""
    chain = Chain(tmp_path, base=True)
    chain.grow(3)
    chain.grow(4, codec=codec, full=[0] if codec == "packed" else [])
    server = Server(chain, chain.bits[0])
    server.reaches(7, commits=1)
    chain.grow(1, base=2)
    chain.grow(2)
    server.reaches(10, commits=1)
    server.receiver.rollback(7)
    server.holds(chain.bits[7])


def test_rebuild_that_lacks_its_base_leaves_what_is_served(tmp_path: Path) -> None:
    chain = Chain(tmp_path, base=True)
    chain.grow(4, codec="raw")
    server = Server(chain, chain.bits[0])
    server.reaches(4, commits=1)
    chain.grow(2, base=2)
    hidden = (tmp_path / "base").rename(tmp_path / "hidden")
    with pytest.raises(ChainError, match="cannot be taken back"):
        server.receiver.advance()
    server.serves(4)
    hidden.rename(tmp_path / "base")
    server.reaches(6, commits=1)


def test_around_a_hole_by_a_range_that_begins_before_it(chain: Chain) -> None:
    chain.grow(9)
    chain.fold(4, 8)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(5)
    chain.lose(7)
    server.reaches(9, commits=1)
    chain.lose(5)


def test_around_a_hole_when_the_way_back_is_lost_too(tmp_path: Path) -> None:
    """Neither 5 back to 4 nor 7 can be had: rebuilt from the anchor and ranges."""
    chain = Chain(tmp_path)
    chain.grow(9)
    chain.fold(0, 4)
    chain.fold(4, 8)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(5)
    chain.lose(5, 7)
    server.reaches(9, commits=1)


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


@pytest.mark.parametrize("how", ["document", "object", "other version"])
def test_bad_anchor_leaves_the_one_before(chain: Chain, how: str) -> None:
    chain.grow(12)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(2)
    chain.beside_it(6)
    newest = chain.beside_it(9)
    if how == "document":
        chain.spoil_anchor(9)
    elif how == "object":
        chain.damage(newest)
    else:
        other = newest.model_copy(update={"manifest": "0" * 64})
        (chain.folder / side.anchor_key(9)).write_bytes(other.to_bytes())
    chain.lose(3, 4, 5)
    server.reaches(12, commits=2)


def test_anchor_in_the_chain_is_reached_over_damaged_manifests(chain: Chain) -> None:
    chain.grow(5)
    server = Server(chain, chain.bits[0])
    server.receiver.advance(3)
    chain.inside(chain.bits[5])
    chain.grow(2)
    chain.lose(4)
    chain.spoil_manifest(5)
    server.reaches(8, commits=2)


def test_server_that_holds_nothing_takes_the_newest_anchor(chain: Chain) -> None:
    """Version 0's own object is gone."""
    chain.grow(8)
    chain.beside_it(6)
    chain.lose(0, 1, 2, 3)
    other = [bits ^ np.uint16(1) for bits in chain.bits[0]]
    Server(chain, other).reaches(8, commits=2)


def test_anchor_is_taken_where_it_is_less_to_read(chain: Chain) -> None:
    chain.grow(40, share=0.4, codec="raw")
    server = Server(chain, chain.bits[0])
    server.receiver.advance(0)
    chain.beside_it(38)
    server.reaches(40, commits=2)
    assert [entry["version"] for entry in server.receiver.status()["recent"]] == [38, 40]


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


def test_hole_behind_an_anchor_behind_a_hole(chain: Chain) -> None:
    """As far as anything leads, and no further."""
    chain.grow(20)
    chain.beside_it(10)
    chain.lose(5)
    chain.damage(chain.manifests[15])
    server = Server(chain, chain.bits[0])
    with pytest.raises(DigestError):
        server.receiver.advance()
    server.serves(14)


def test_damaged_manifest_in_the_middle_is_named(chain: Chain) -> None:
    chain.grow(6)
    chain.spoil_manifest(4)
    server = Server(chain, chain.bits[0])
    with pytest.raises(FormatError, match=r"0000000004\.json"):
        server.receiver.advance()
    server.serves(3)
    chain.fold(0, 4)
    chain.fold(3, 4)
    server.reaches(6, commits=1)


def test_range_whose_distances_are_wrong_is_taken_back_and_avoided(chain: Chain) -> None:
    """It declares the right sums, so that only the commit finds out; and it is not tried twice."""
    chain.grow(6)
    folded = chain.fold(0, 4)
    changes = changes_between(chain.table, chain.bits[0], chain.bits[4])
    changes.sparse[0].data[3] += 1
    data = encode(changes, chain.table, "packed", "zstd", DeltaContext(chain.run, 4, 0))
    forged = folded.model_copy(update={"objects": [chain._put(data)], "payload_bytes": len(data)})
    chain.bucket.put(side.fold_key(0, 4), forged.to_bytes())
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
    assert all(answer["undo_bytes"] < chain.table.full_bytes / 4 for answer in server.port.call("describe", {}))
