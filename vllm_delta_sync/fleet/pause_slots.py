"""Turns: at most so many servers of a run pause at once, and nobody coordinates them.

There are m slots. Claims on slot s are objects ``turns/<s>/<n>.json``, made create-if-absent, n ascending: who made the
newest one holds the slot. The next one may be made only once that is over: when ``turns/<s>/<n>.end`` is there, or the
time that the claim gives itself has passed. That time is told by what else the store has put since, or by having seen
the claim for so long: no two clocks have to agree. A holder counts from before it asked for the claim, so it knows of
the end no later than anybody else.

Claims of long ago are removed by later holders, and the last few are kept. Who was so slow that it makes one of those
again finds newer ones when it looks once more, and does not hold the slot.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import (
    AccessError,
    ConflictError,
    DeltaSyncError,
    LimitError,
    NotFoundError,
    StoreError,
)
from vllm_delta_sync.fleet.store_clock import StoreClock
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    PAUSE_SLOT_END,
    TURNS_PREFIX,
    PauseSlotClaim,
    lease_key,
    pause_slot_end_key,
    pause_slot_key,
    pause_slot_of_key,
)
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.run.documents import RunDocuments

MARGIN_SECONDS = 15
"""What a claim holds on top of the longest pause: for making sure of it, and for beginning to pause."""
KEPT = 4
"""Claims of a slot that are kept."""
SHORTEST_LOOK_SECONDS = 0.05
LONGEST_LOOK_SECONDS = 1.0
ASK_SECONDS = 0.05
"""How often is looked whether somebody asks for something while a turn is waited for."""
PATIENCE_SECONDS = 30.0
"""How long a store may fail before a turn is given up."""


@dataclass(frozen=True)
class HeldSlot:
    """A turn that was taken.

    Attributes:
        slot, number: of the claim. until: when it ends at the latest, by the monotonic clock.
        old: keys of claims that nobody needs any more.
    """

    slot: int
    number: int
    until: float
    old: list[str] = field(default_factory=list)


@dataclass
class _Slot:
    """What lies under turns/<s>/. ``number``: of the newest claim, 0 for none; ``info``: of it, None if it is gone."""

    number: int = 0
    info: ObjectInfo | None = None
    ended: bool = False
    keys: list[tuple[int, str]] = field(default_factory=list)


class PauseSlots:
    """Takes turns for one receiver.

    Args:
        run: whose servers take turns. receiver: the name of this one. slots: how many may pause at once.
        pause_seconds: the longest pause.
        monotonic, sleep, pick: clock, waiting and choosing, for tests.
    """

    def __init__(
        self,
        run: RunDocuments,
        receiver: str,
        slots: int,
        pause_seconds: float,
        monotonic: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pick: random.Random | None = None,
    ) -> None:
        self._run, self._receiver, self._slots = run, receiver, slots
        self._seconds = int(pause_seconds) + 1 + MARGIN_SECONDS
        self._monotonic, self._sleep = monotonic, sleep
        self._pick = random.Random() if pick is None else pick
        self._clock = StoreClock(monotonic)
        self._holder = secrets.token_hex(16)
        self._claims: dict[str, tuple[PauseSlotClaim | None, float]] = {}
        self._asked_at: dict[str, float] = {}

    def take(self, version: int, until: Callable[[], bool] = lambda: False) -> HeldSlot | None:
        """Wait for a turn, for as long as others have theirs.

        Args:
            version: what it is for. until: asked now and then; if True, the turn is not waited for any longer.

        Returns:
            the turn, which ends by itself if ``end`` is not called; None if ``until`` said so.

        Raises:
            AccessError: the store lets nobody write here. DeltaSyncError: it fails for longer than PATIENCE_SECONDS.
        """
        pace = SHORTEST_LOOK_SECONDS
        failing: float | None = None
        while True:
            began = self._monotonic()
            try:
                held = self.attempt(version)
                failing = None
                if held is not None:
                    return held
            except AccessError:
                raise
            except DeltaSyncError:
                failing = began if failing is None else failing
                if self._monotonic() - failing >= PATIENCE_SECONDS:
                    raise
            if self._waits_long(pace * self._pick.uniform(0.5, 1.0), until):
                return None
            pace = min(2 * pace, LONGEST_LOOK_SECONDS)

    def _waits_long(self, seconds: float, until: Callable[[], bool]) -> bool:
        """Wait; True if ``until`` says that it is enough."""
        end = self._monotonic() + seconds
        while not until():
            left = end - self._monotonic()
            if left <= 0:
                return False
            self._sleep(min(left, ASK_SECONDS))
        return True

    def attempt(self, version: int) -> HeldSlot | None:
        """Take a turn if one is to be had now. Raises StoreError, LimitError."""
        found = self._look()
        free = []
        for slot in range(self._slots):
            there = found.get(slot, _Slot())
            if self._is_over(slot, there):
                free.append((slot, there.number))
            elif there.info is not None and self._is_mine(there.info.key):
                # Made by an attempt whose answer was lost.
                return self._confirmed(slot, there.number)
        if not free:
            return None
        slot, last = self._pick.choice(free)
        return self._claim(slot, last + 1, version)

    def end(self, held: HeldSlot) -> None:
        """Let the next one have the slot. Raises StoreError; then it is free when its time is over."""
        bucket = self._run.bucket
        bucket.put(pause_slot_end_key(held.slot, held.number), PAUSE_SLOT_END)
        for key in held.old:
            bucket.delete(key)

    def _look(self) -> dict[int, _Slot]:
        found: dict[int, _Slot] = {}
        for info in self._run.bucket.list(TURNS_PREFIX):
            where = pause_slot_of_key(info.key)
            if where is None:
                continue
            self._clock.saw(info.modified)
            number, is_end = where[1:]
            slot = found.setdefault(where[0], _Slot())
            slot.keys.append((number, info.key))
            if number > slot.number:
                slot.number, slot.info, slot.ended = number, None, False
            if number == slot.number:
                slot.ended |= is_end
                slot.info = slot.info if is_end else info
        return found

    def _is_over(self, slot: int, there: _Slot) -> bool:
        """Whether the newest claim on a slot holds no more."""
        if there.number == 0 or there.ended:
            return True
        if there.info is None:
            return False
        claim, first = self._claimed(there.info.key)
        # What cannot be read has given itself no time: it gets that of one of ours.
        seconds = self._seconds if claim is None else min(claim.seconds, limits.MAX_TURN_SECONDS)
        if self._monotonic() - first >= seconds + 1:
            return True
        self._ask_time()
        # The store's times are cut to whole seconds.
        return self._clock.earliest >= there.info.modified + seconds + 1

    def _claimed(self, key: str) -> tuple[PauseSlotClaim | None, float]:
        """A claim, and when it was first seen."""
        if key not in self._claims:
            first = self._monotonic()
            try:
                claim: PauseSlotClaim | None = PauseSlotClaim.from_bytes(
                    self._run.bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), key
                )
            except NotFoundError:
                return None, first  # removed meanwhile, so there are newer ones
            except StoreError:
                raise
            except DeltaSyncError:
                claim = None
            self._claims[key] = claim, first
        return self._claims[key]

    def _ask_time(self) -> None:
        """The lease of this receiver is written again and again: as good a clock as any."""
        with contextlib.suppress(NotFoundError):
            self._clock.saw(self._run.bucket.stat(lease_key(self._receiver)).modified)

    def _is_mine(self, key: str) -> bool:
        claim = self._claimed(key)[0]
        return key in self._asked_at and claim is not None and claim.holder == self._holder

    def _claim(self, slot: int, number: int, version: int) -> HeldSlot | None:
        if number > limits.MAX_VERSION:
            raise LimitError(f"{TURNS_PREFIX}{slot:02d}/ has no numbers left; remove what lies there")
        key = pause_slot_key(slot, number)
        turn = PauseSlotClaim(
            run=self._run.info.run,
            slot=slot,
            number=number,
            receiver=self._receiver,
            holder=self._holder,
            version=version,
            seconds=min(self._seconds, limits.MAX_TURN_SECONDS),
            created_at=timestamp(),
        )
        self._asked_at.setdefault(key, self._monotonic())
        try:
            self._run.bucket.put(key, turn.to_bytes(), if_absent=True)
        except ConflictError:
            if not self._is_mine(key):
                return None
        return self._confirmed(slot, number)

    def _confirmed(self, slot: int, number: int) -> HeldSlot | None:
        """A claim that this receiver has made, if it counts: it is the newest, and there is time left to pause in."""
        key = pause_slot_key(slot, number)
        there = self._look().get(slot, _Slot())
        if there.number > number:
            self._run.bucket.delete(key)
            return None
        old = [other for other_number, other in there.keys if other_number <= number - KEPT]
        since = self._asked_at[key]
        held = HeldSlot(slot, number, since + self._seconds, old)
        if self._monotonic() - since >= MARGIN_SECONDS:
            self.end(held)
            return None
        return held
