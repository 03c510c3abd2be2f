"""``PauseSlots``: lets at most m servers of a run pause at once, without a coordinator process.

There are m slots. A claim on slot s is an object ``pause-slots/<s>/<n>.json``, created if absent, with ascending n: the
writer of the newest claim holds the slot. The next claim may be created only after that one has ended: either
``pause-slots/<s>/<n>.end`` exists, or the claim's time has passed. Others measure that time by the store's later
timestamps, or by how long they have seen the claim themselves, so clocks need not agree. The holder measures from
before it requested the claim, so it never believes in its claim longer than others do.

Later holders remove old claims and keep the last few. A writer so slow that it creates a removed claim again finds
newer ones when it lists the claims once more, and does not hold the slot.
"""

import contextlib
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.errors import AccessError, ConflictError, DataError, DeltaSyncError, LimitError, NotFoundError
from vllm_delta_sync.fleet.store_clock import StoreClock
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    PAUSE_SLOT_END,
    PAUSE_SLOTS_PREFIX,
    PauseSlotClaim,
    heartbeat_key,
    pause_slot_end_key,
    pause_slot_key,
    pause_slot_of_key,
)
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.run.documents import RunDocuments

MARGIN_SECONDS = 15
"""Time of a claim beyond the longest pause: for confirming the claim and starting the pause."""
CLAIMS_KEPT = 4
"""Number of a slot's latest claims that are kept."""
SHORTEST_POLL_SECONDS = 0.05
LONGEST_POLL_SECONDS = 1.0
CHECK_SECONDS = 0.05
"""Interval at which ``acquire`` calls ``give_up`` while it waits."""
PATIENCE_SECONDS = 30.0
"""How long the store may fail before ``acquire`` raises its error."""


@dataclass(frozen=True)
class PauseSlot:
    """A slot that this receiver holds.

    Attributes:
        slot, number: of the claim. deadline: when it ends at the latest, by the monotonic clock.
        obsolete: keys of old claims, to be removed.
    """

    slot: int
    number: int
    deadline: float
    obsolete: list[str] = field(default_factory=list)


@dataclass
class _SlotClaims:
    """The objects under pause-slots/<s>/.

    Attributes:
        number: of the newest claim, 0 if there is none. info: its object, None if it was removed. ended: whether it
        was released. keys: number and key of all objects.
    """

    number: int = 0
    info: ObjectInfo | None = None
    ended: bool = False
    keys: list[tuple[int, str]] = field(default_factory=list)


class PauseSlots:
    """Acquires pause slots for one receiver.

    Args:
        run: the run whose servers share the slots. receiver: the name of this one. slots: how many may pause at once.
        pause_seconds: the longest pause.
        monotonic, sleep, pick: clock, sleep function and random choice, for tests.
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
        self._requested_at: dict[str, float] = {}

    def acquire(self, version: int, give_up: Callable[[], bool] = lambda: False) -> PauseSlot | None:
        """Wait until a slot is free and acquire it.

        Args:
            version: the version to commit in the pause. give_up: called every CHECK_SECONDS; stops waiting if True.

        Returns:
            the slot, which expires by itself if ``release`` is not called; None if ``give_up`` returned True.

        Raises:
            AccessError: the store refuses writes. DeltaSyncError: it fails for longer than PATIENCE_SECONDS.
        """
        interval = SHORTEST_POLL_SECONDS
        failing: float | None = None
        while True:
            began = self._monotonic()
            try:
                slot = self.try_acquire(version)
                failing = None
                if slot is not None:
                    return slot
            except AccessError:
                raise
            except DeltaSyncError:
                failing = began if failing is None else failing
                if self._monotonic() - failing >= PATIENCE_SECONDS:
                    raise
            if self._wait(interval * self._pick.uniform(0.5, 1.0), give_up):
                return None
            interval = min(2 * interval, LONGEST_POLL_SECONDS)

    def _wait(self, seconds: float, give_up: Callable[[], bool]) -> bool:
        """Wait; return True if ``give_up`` returned True meanwhile."""
        end = self._monotonic() + seconds
        while not give_up():
            left = end - self._monotonic()
            if left <= 0:
                return False
            self._sleep(min(left, CHECK_SECONDS))
        return True

    def try_acquire(self, version: int) -> PauseSlot | None:
        """Acquire a slot if one is free now; None if not. Raises StoreError, LimitError."""
        found = self._list_claims()
        free = []
        for slot in range(self._slots):
            newest = found.get(slot, _SlotClaims())
            if self._has_ended(newest):
                free.append((slot, newest.number))
            elif newest.info is not None and self._is_mine(newest.info.key):
                # Created by an earlier call whose answer was lost.
                return self._confirm(slot, newest.number)
        if not free:
            return None
        slot, last = self._pick.choice(free)
        return self._claim(slot, last + 1, version)

    def release(self, claimed: PauseSlot) -> None:
        """Free the slot for others. Raises StoreError; then it becomes free when the claim expires."""
        bucket = self._run.bucket
        bucket.put(pause_slot_end_key(claimed.slot, claimed.number), PAUSE_SLOT_END)
        for key in claimed.obsolete:
            bucket.delete(key)

    def _list_claims(self) -> dict[int, _SlotClaims]:
        found: dict[int, _SlotClaims] = {}
        for info in self._run.bucket.list(PAUSE_SLOTS_PREFIX):
            parsed = pause_slot_of_key(info.key)
            if parsed is None:
                continue
            self._clock.observe(info.modified)
            number, is_end = parsed[1:]
            slot = found.setdefault(parsed[0], _SlotClaims())
            slot.keys.append((number, info.key))
            if number > slot.number:
                slot.number, slot.info, slot.ended = number, None, False
            if number == slot.number:
                slot.ended |= is_end
                slot.info = slot.info if is_end else info
        return found

    def _has_ended(self, newest: _SlotClaims) -> bool:
        """Return whether the newest claim on a slot has ended."""
        if newest.number == 0 or newest.ended:
            return True
        if newest.info is None:
            return False
        claim, first = self._read_claim(newest.info.key)
        # An unreadable claim states no duration; assume ours.
        seconds = self._seconds if claim is None else min(claim.seconds, limits.MAX_SLOT_SECONDS)
        if self._monotonic() - first >= seconds + 1:
            return True
        self._observe_own_heartbeat()
        # The store truncates times to whole seconds.
        return self._clock.earliest >= newest.info.modified + seconds + 1

    def _read_claim(self, key: str) -> tuple[PauseSlotClaim | None, float]:
        """Return a claim, None if it is unreadable or gone, and when it was first seen."""
        if key not in self._claims:
            first = self._monotonic()
            try:
                claim: PauseSlotClaim | None = PauseSlotClaim.from_bytes(
                    self._run.bucket.get(key, max_bytes=limits.MAX_SIDE_BYTES), key
                )
            except NotFoundError:
                return None, first  # removed meanwhile, so there are newer claims
            except DataError:
                claim = None
            self._claims[key] = claim, first
        return self._claims[key]

    def _observe_own_heartbeat(self) -> None:
        """Advance the store clock by this receiver's own heartbeat, which is rewritten regularly."""
        with contextlib.suppress(NotFoundError):
            self._clock.observe(self._run.bucket.stat(heartbeat_key(self._receiver)).modified)

    def _is_mine(self, key: str) -> bool:
        claim = self._read_claim(key)[0]
        return key in self._requested_at and claim is not None and claim.holder == self._holder

    def _claim(self, slot: int, number: int, version: int) -> PauseSlot | None:
        if number > limits.MAX_VERSION:
            raise LimitError(f"{PAUSE_SLOTS_PREFIX}{slot:02d}/ has no numbers left; remove the objects there")
        key = pause_slot_key(slot, number)
        claim = PauseSlotClaim(
            run=self._run.info.run,
            slot=slot,
            number=number,
            receiver=self._receiver,
            holder=self._holder,
            version=version,
            seconds=min(self._seconds, limits.MAX_SLOT_SECONDS),
            created_at=timestamp(),
        )
        self._requested_at.setdefault(key, self._monotonic())
        try:
            self._run.bucket.put(key, claim.to_bytes(), if_absent=True)
        except ConflictError:
            if not self._is_mine(key):
                return None
        return self._confirm(slot, number)

    def _confirm(self, slot: int, number: int) -> PauseSlot | None:
        """Return the slot of our claim if the claim is the newest and leaves enough time for a pause."""
        key = pause_slot_key(slot, number)
        newest = self._list_claims().get(slot, _SlotClaims())
        if newest.number > number:
            self._run.bucket.delete(key)
            return None
        obsolete = [other for other_number, other in newest.keys if other_number <= number - CLAIMS_KEPT]
        since = self._requested_at[key]
        claimed = PauseSlot(slot, number, since + self._seconds, obsolete)
        if self._monotonic() - since >= MARGIN_SECONDS:
            self.release(claimed)
            return None
        return claimed
