"""The receiver's states: the changes between them that docs/architecture.md draws are those that are seen."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from docs.draw_architecture import SOURCE, rows
from tests.support.chains import Chain, Server
from tests.support.hooks import failing, hooked
from tests.support.world import World
from vllm_delta_sync.engine.follow.receiver import Receiver
from vllm_delta_sync.engine.observe.states import STATES, State
from vllm_delta_sync.errors import ChainError, DeltaSyncError, FingerprintError, WeightsLostError

Change = tuple[str, str]


def drawn() -> dict[str, set[Change]]:
    """The changes in docs/architecture.md, by row of its table."""
    found = {}
    for step, before, after, _ in rows(SOURCE.read_text(), "The states of a receiver"):
        starts = [name for name in STATES if name != "lost"] if before == "any" else before.split(", ")
        found[step] = {(start, end) for start in starts for end in after.split(", ")}
    return found


def test_the_states_drawn_are_those_that_exist() -> None:
    everything = set.union(*drawn().values())
    assert set(STATES) == set(get_args(State)) == {state for change in everything for state in change}


class Seen:
    """The changes of state of receivers."""

    def __init__(self) -> None:
        self.changes: set[Change] = set()

    def watch(self, receiver: Receiver) -> Receiver:
        board = receiver.board
        last = [board.state]

        def changed() -> None:
            if board.state != last[0]:
                self.changes.add((last[0], board.state))
                last[0] = board.state

        board.watch(changed)
        return receiver


def test_the_changes_that_are_drawn_are_those_that_are_seen(tmp_path: Path) -> None:
    seen = Seen()
    for scenario in (updates_and_orders, drift, another_model, other_runs, a_lost_engine):
        folder = tmp_path / scenario.__name__
        folder.mkdir()
        scenario(folder, seen)
    everything: set[Change] = set.union(*drawn().values())
    assert not seen.changes - everything, "changes that are not drawn"
    missing = [step for step, changes in drawn().items() if not changes & seen.changes]
    assert not missing, f"no test sees the changes in these rows of the table: {missing}"


def updates_and_orders(folder: Path, seen: Seen) -> None:
    world = World(folder)
    world.follow(stage_bytes=0)
    receiver = seen.watch(world.receiver)
    receiver.advance()
    world.train_and_follow(1, 2)
    world.train(3)
    world.follow(pause_mode="wait")
    receiver = seen.watch(world.receiver)
    receiver.advance()
    receiver.rollback(2)
    receiver.release()
    receiver.hold()


def drift(folder: Path, seen: Seen) -> None:
    world = World(folder)
    receiver = seen.watch(world.receiver)
    receiver.advance()
    world.model.norm.data.mul_(2.0)
    assert not receiver.verify()["verdict"]
    receiver.repair()
    world.train(1)
    world.model.norm.data.mul_(2.0)
    with pytest.raises(FingerprintError):
        receiver.advance()


def another_model(folder: Path, seen: Seen) -> None:
    world = World(folder)
    receiver = seen.watch(world.receiver)
    world.model.norm.data.mul_(2.0)
    for _ in range(2):
        with pytest.raises(ChainError):
            receiver.advance()


def other_runs(folder: Path, seen: Seen) -> None:
    chain = Chain(folder)
    chain.grow(4)
    other = chain.branch("other", 2, seed=1)
    other.grow(1)
    receiver = seen.watch(Server(chain, chain.bits[0]).receiver)
    receiver.advance()
    shutil.rmtree(chain.folder)
    shutil.copytree(other.folder, chain.folder)
    with suppress(DeltaSyncError):
        receiver.advance()


def a_lost_engine(folder: Path, seen: Seen) -> None:
    world = World(folder)
    port = hooked(world)
    receiver = seen.watch(world.receiver)
    receiver.advance()
    world.train(1)
    port.before = failing("resume", 9)
    with pytest.raises(WeightsLostError):
        receiver.advance()
