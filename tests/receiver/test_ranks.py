"""Several ranks in one process: slices and copies are patched, and all ranks move or none."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.forge import BAD_VERSIONS, BadVersion
from tests.support.modules import ModulePort
from tests.support.world import World
from vllm_delta_sync.engine.background import Background
from vllm_delta_sync.engine.rank import RankReceiver
from vllm_delta_sync.errors import BusyError, EngineError, FingerprintError, WeightsLostError

RANKS = 2


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, ranks=RANKS)


@pytest.mark.parametrize("codec", ["packed", "context", "raw"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_follows_every_version(tmp_path: Path, codec: str, ranks: int) -> None:
    world = World(tmp_path, codec=codec, ranks=ranks)
    for step in range(1, 6):
        world.receiver.advance()
        world.expect_exact()
        assert world.receiver.verify()["verdict"]
        world.train(step)
    world.tensors["k.weight"].mul_(-3.0)
    world.train(6)
    world.receiver.advance()
    world.expect_exact()
    assert [rank["rank"] for rank in world.receiver.status()["ranks"]] == list(range(ranks))


def test_anchor_replaces_other_weights_on_every_rank(tmp_path: Path) -> None:
    world = World(tmp_path, with_base=False, ranks=RANKS)
    world.models[1].norm.data.fill_(5.0)
    world.receiver.advance()
    world.expect_exact()


def test_copies_that_differ_between_ranks_are_refused(world: World) -> None:
    world.models[1].norm.data[0] += 1.0
    error = world.expect_fails("chain")
    assert "model.norm.weight" in error.message


def test_drift_of_one_copy_is_found_by_the_commit(world: World) -> None:
    """Each rank alone changes as declared only in sum: the copies are compared too."""
    world.follow(rescan_bytes=0)
    world.receiver.advance()
    world.train(1)
    world.models[1].norm.data.mul_(2.0)
    with pytest.raises(FingerprintError, match="changed from outside"):
        world.receiver.advance()
    assert world.receiver.status()["served"] is None


def test_drift_of_a_slice_is_found_while_staging(world: World) -> None:
    world.receiver.advance()
    world.train(1)
    world.models[1].transposed.data.view(torch.int16)[0, 0] ^= 1
    with pytest.raises(FingerprintError, match=r"out\.weight"):
        world.receiver.advance()


class FaultyRanks(ModulePort):
    """Calls back with (rank, method, "before" or "after") around every call of one rank."""

    def __init__(self, *models: Any) -> None:
        super().__init__(*models)
        self.hook: Callable[[int, str, str], None] = lambda rank, method, when: None

    def call_rank(self, rank: RankReceiver, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            self.hook(rank.index, method, "before")
            answer = super().call_rank(rank, method, arguments)
            self.hook(rank.index, method, "after")
        except EngineError as error:
            return {"error": {"kind": error.kind, "message": error.message}}
        return answer


def failing(where: tuple[int, str, str]) -> Callable[[int, str, str], None]:
    def hook(rank: int, method: str, when: str) -> None:
        if (rank, method, when) == where:
            raise EngineError("injected")

    return hook


@pytest.mark.parametrize("rank", range(RANKS))
@pytest.mark.parametrize("when", ["before", "after"])
def test_one_rank_that_fails_is_taken_back_on_all(world: World, rank: int, when: str) -> None:
    port = FaultyRanks(*world.models)
    world.use(port)
    world.receiver.advance()
    world.train(1)
    port.hook = failing((rank, "commit", when))
    world.expect_fails("engine")
    assert world.receiver.status()["state"] == "idle"
    assert port.ended == []
    port.hook = failing((-1, "", ""))
    world.receiver.advance()
    world.expect_exact()
    assert world.receiver.verify()["verdict"]


@pytest.mark.parametrize("rank", range(RANKS))
def test_rank_that_can_neither_commit_nor_go_back_ends_the_engine(world: World, rank: int) -> None:
    port = FaultyRanks(*world.models)
    world.use(port)
    world.receiver.advance()
    world.train(1)

    def hook(who: int, method: str, when: str) -> None:
        if (who, method) == (rank, "revert") or ((who, when) == (rank, "after") and method == "commit"):
            raise EngineError("injected")

    port.hook = hook
    with pytest.raises(WeightsLostError):
        world.receiver.advance()
    assert len(port.ended) == 1
    assert "resume" not in port.log
    assert world.receiver.status()["state"] == "lost"


@pytest.mark.parametrize("when", ["before", "after"])
def test_rollback_that_fails_on_one_rank_leaves_all_where_they_were(world: World, when: str) -> None:
    port = FaultyRanks(*world.models)
    world.use(port)
    for step in (1, 2):
        world.receiver.advance()
        world.train(step)
    world.receiver.advance()
    once = iter([True])

    def hook(who: int, method: str, at: str) -> None:
        if (who, method, at) == (1, "revert", when) and next(once, False):
            raise EngineError("injected")

    port.hook = hook
    with pytest.raises(EngineError, match="injected"):
        world.receiver.rollback(1)
    assert world.receiver.status()["state"] == "idle"
    assert world.receiver.served_version == 2
    world.expect_exact()
    world.receiver.rollback(1)
    assert world.receiver.served_version == 1


@pytest.mark.parametrize("bad", BAD_VERSIONS, ids=lambda bad: bad.name)
def test_bad_version_is_refused_by_all_ranks(world: World, bad: BadVersion) -> None:
    world.receiver.advance()
    world.train(1)
    world.receiver.advance()
    forgery = bad.write(Path(world.url))
    world.expect_fails(bad.kind)
    forgery.remove()
    world.train(2)
    world.receiver.advance()
    world.expect_exact()


def test_a_result_crosses_to_the_controller_once(tmp_path: Path) -> None:
    """A rank that has finished is polled until the slowest one has: a poll says only whether it still runs."""
    world = World(tmp_path, ranks=2)
    port, seen = world.port, []
    call, slow = port.call, port.ranks[1]
    let_go = threading.Event()
    prove = slow.prove

    def late(**arguments: Any) -> Any:
        assert let_go.wait(60)
        return prove(**arguments)

    def counting(method: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
        answers = call(method, arguments)
        seen.append((method, answers))
        if len([1 for name, _ in seen if name == "poll"]) > 5:
            let_go.set()
        return answers

    slow.prove = late  # type: ignore[method-assign, assignment]
    port.call = counting  # type: ignore[method-assign]
    world.receiver.advance()
    polls = [answers for method, answers in seen if method == "poll"]
    assert len(polls) > 5
    assert {frozenset(answer) for answers in polls for answer in answers} == {frozenset({"running"})}
    assert [method for method, _ in seen].count("outcome") == 1
    assert port.ranks[0].outcome()["measured"]


def test_an_operation_that_runs_has_no_outcome_yet() -> None:
    background, let_go = Background(nullcontext), threading.Event()

    def operation(value: int) -> dict[str, Any]:
        assert let_go.wait(60)
        return {"value": value}

    background.start("wait", operation, {"value": 3})
    with pytest.raises(BusyError, match="still running"):
        background.outcome()
    with pytest.raises(BusyError, match="another one is running"):
        background.start("wait", operation, {"value": 4})
    let_go.set()
    while background.is_busy:
        pass
    assert background.outcome() == background.outcome() == {"value": 3}
