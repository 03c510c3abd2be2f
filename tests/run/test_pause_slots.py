"""Pause slots as a protocol: who holds one, with interleavings, lost answers, dead holders and odd clocks."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.turn_model import FleetRun, Stage
from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import AccessError, StoreError
from vllm_delta_sync.fleet.pause_slots import CLAIMS_KEPT, MARGIN_SECONDS, PATIENCE_SECONDS, PauseSlot, PauseSlots
from vllm_delta_sync.format import documents as side

PAUSE = 4.0
LIFE = int(PAUSE) + 1 + MARGIN_SECONDS


@pytest.fixture
def world(tmp_path: Path) -> FleetRun:
    return FleetRun(tmp_path)


def claims(world: FleetRun) -> list[str]:
    return [info.key for info in world.bucket.list(side.PAUSE_SLOTS_PREFIX)]


def taken(turns: PauseSlots) -> PauseSlot:
    held = turns.try_acquire(1)
    assert held is not None
    return held


def test_one_holds_and_the_next_one_waits_for_the_end(world: FleetRun) -> None:
    first, second = world.turns("a"), world.turns("b")
    held = taken(first)
    assert second.try_acquire(1) is None
    first.release(held)
    assert taken(second).number == held.number + 1


def test_so_many_at_once_as_there_are_slots(world: FleetRun) -> None:
    everyone = [world.turns(f"r{number}", slots=3, seed=number) for number in range(5)]
    held = [turns.try_acquire(1) for turns in everyone]
    assert [item is not None for item in held] == [True, True, True, False, False]
    assert {item.slot for item in held if item is not None} == {0, 1, 2}


@pytest.mark.parametrize("skew", [-1e6, 0.0, 1e6])
def test_dead_holder_delays_others_by_the_life_of_its_claim(world: FleetRun, skew: float) -> None:
    """Whatever the clocks say: of the one who waits, and of the one who died."""
    taken(world.turns("dead", skew=-skew))
    died = world.bucket.now
    waiting = world.turns("b", skew=skew)
    assert waiting.try_acquire(1) is None
    world.passes(LIFE)
    assert waiting.try_acquire(1) is None, "its claim may have been put a second later than the store says"
    assert waiting.acquire(1) is not None
    assert world.bucket.now - died <= LIFE + 3


def test_claim_of_long_ago_delays_nobody_who_has_a_heartbeat(world: FleetRun) -> None:
    taken(world.turns("dead"))
    world.passes(LIFE + 5)
    world.bucket.put(side.heartbeat_key("b"), b"{}")
    assert world.turns("b").try_acquire(1) is not None


def test_lost_answer_is_no_lost_turn(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    put = world.bucket.put
    lost = [1]

    def unlucky(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        put(key, data, if_absent=if_absent)
        if if_absent and lost:
            lost.pop()
            raise StoreError("no answer")

    monkeypatch.setattr(world.bucket, "put", unlucky)
    turns = world.turns("a")
    began = world.bucket.now
    held = turns.acquire(1)
    assert held is not None
    assert (held.number, world.bucket.now - began < LIFE) == (1, True)
    assert world.turns("b").try_acquire(1) is None
    assert held.deadline == began + LIFE, "it counts from when it asked first"


def test_turn_that_came_too_late_is_given_back(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    put = world.bucket.put

    def slow(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        put(key, data, if_absent=if_absent)
        if if_absent:
            world.passes(MARGIN_SECONDS)

    monkeypatch.setattr(world.bucket, "put", slow)
    assert world.turns("a").try_acquire(1) is None
    monkeypatch.undo()
    assert world.turns("b").try_acquire(1) is not None, "without waiting for its time to be over"


def test_who_makes_a_claim_of_long_ago_again_does_not_hold_the_slot(
    world: FleetRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that saw claim 0 over, and was stopped while many others had their turns."""
    slow, fast = world.turns("slow"), world.turns("fast")
    put = world.bucket.put
    stopped = [True]

    def stopping(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if stopped and if_absent:
            stopped.pop()
            for _ in range(CLAIMS_KEPT + 3):
                fast.release(taken(fast))
            taken(fast)
        put(key, data, if_absent=if_absent)

    monkeypatch.setattr(world.bucket, "put", stopping)
    assert slow.try_acquire(1) is None
    assert side.pause_slot_key(0, 1) not in claims(world), "what it made is gone again"


def test_old_claims_are_removed_by_those_who_come_later(world: FleetRun) -> None:
    for number in range(1, 3 * CLAIMS_KEPT):
        turns = world.turns(f"r{number % 3}")
        turns.release(taken(turns))
    assert len(claims(world)) <= 2 * (CLAIMS_KEPT + 1)
    assert taken(world.turns("last")).number == 3 * CLAIMS_KEPT


def test_turn_costs_few_requests(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two listings, the claim, its end; later the removal of an old claim and its end."""
    asked: list[str] = []

    def counted(name: str) -> None:
        call = getattr(world.bucket, name)

        def ask(*arguments: Any, **options: Any) -> Any:
            asked.append(name)
            return call(*arguments, **options)

        monkeypatch.setattr(world.bucket, name, ask)

    turns = world.turns("a")
    for name in ("put", "list", "delete", "get"):
        counted(name)
    monkeypatch.setattr(world.bucket, "stat", lambda key: ObjectInfo(key, 1, world.bucket.held[key][1]))
    for number in range(1, 3 * CLAIMS_KEPT):
        asked.clear()
        turns.release(taken(turns))
        assert asked == ["list", "put", "list", "put"] + ["delete"] * (2 if number > CLAIMS_KEPT else 0)


@pytest.mark.parametrize("data", [b"{", b"x" * 200_000, b'{"format_version":3}'])
def test_claim_that_cannot_be_read_holds_as_long_as_ones_own(world: FleetRun, data: bytes) -> None:
    for key in (
        "pause-slots/00/7.json",
        "pause-slots/0/0000000007.json",
        "pause-slots/64x",
        "pause-slots/00/0000000007.txt",
    ):
        world.bucket.put(key, b"{}")  # claims of nobody
    world.bucket.put(side.pause_slot_key(0, 7), data)
    turns = world.turns("a")
    assert turns.try_acquire(1) is None
    world.passes(LIFE + 1)
    assert taken(turns).number == 8


def test_numbers_that_are_used_up_are_a_failure(world: FleetRun) -> None:
    world.bucket.put(side.pause_slot_key(0, 10**10 - 1), b"{}")
    world.bucket.put(side.pause_slot_end_key(0, 10**10 - 1), side.PAUSE_SLOT_END)
    with pytest.raises(Exception, match=r"pause-slots/00/ has no numbers left"):
        world.turns("a").acquire(1)


def test_store_that_fails_is_waited_for_so_long(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def down(prefix: str = "") -> Iterator[ObjectInfo]:
        raise StoreError("the store is down")

    monkeypatch.setattr(world.bucket, "list", down)
    began = world.bucket.now
    with pytest.raises(StoreError, match="the store is down"):
        world.turns("a").acquire(1)
    assert PATIENCE_SECONDS <= world.bucket.now - began <= PATIENCE_SECONDS + 2


def test_who_may_not_write_is_told_at_once(world: FleetRun, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        raise AccessError("read only")

    monkeypatch.setattr(world.bucket, "put", refused)
    began = world.bucket.now
    with pytest.raises(AccessError):
        world.turns("a").acquire(1)
    assert world.bucket.now == began


def test_who_is_asked_for_something_waits_no_longer(world: FleetRun) -> None:
    taken(world.turns("a"))
    asked = iter([False] * 5 + [True])
    began = world.bucket.now
    assert world.turns("b").acquire(1, lambda: next(asked)) is None
    assert world.bucket.now - began < LIFE


@given(
    seed=st.integers(0, 2**32),
    slots=st.integers(1, 3),
    receivers=st.integers(2, 5),
    longest=st.sampled_from([0.2, 2.0, 9.0]),
)
@example(seed=16874223, slots=1, receivers=2, longest=9.0)
def test_never_more_at_once_whatever_comes_between(seed: int, slots: int, receivers: int, longest: float) -> None:
    """Between any two calls to the store others run and time passes; answers are lost, and receivers die."""
    with tempfile.TemporaryDirectory() as folder:
        outcome = Stage(Path(folder), seed, slots, receivers, longest, PAUSE).play()
    assert outcome.errors == []
    assert outcome.most <= slots
    # A claim that takes longer than its margin is given up, so in a store that is so slow none may be confirmed.
    assert outcome.pauses or outcome.died or 4 * longest > MARGIN_SECONDS
