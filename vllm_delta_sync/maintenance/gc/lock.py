"""``CollectionLock`` lets only one collection at a time remove things from a run.

A collection claims the run by creating ``collections/<n>.json`` if absent, n ascending. The newest claim is valid until
``collections/<n>.end`` exists or until it expires by the store's clock, so a killed collection delays the next one no
longer than that. A longer collection renews its claim by creating the next number, which succeeds only if no other
collection has started since.

On a store without create-if-absent, two collections that start at almost the same time may both get a claim. Both write
``retention.json``, and ``collect`` reads it again before each removal: the collection whose file was replaced stops.
"""

import secrets
import threading
import time
from collections.abc import Callable

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.base import confirm_created, create_if_absent
from vllm_delta_sync.errors import ConflictError, DataError, DeltaSyncError, LimitError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import (
    COLLECTION_END,
    COLLECTIONS_CLOCK,
    COLLECTIONS_PREFIX,
    Collection,
    collection_end_key,
    collection_key,
    collection_of_key,
)
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.run.run_reader import RunReader

logger = guarded_logger(__name__)

CLAIM_SECONDS = 600
"""Seconds that a claim is valid. It is renewed after half of them, which leaves the other half for the next step."""
KEPT = 4
"""Number of newest claims that stay in the bucket."""


def uptime() -> float:
    """Return the seconds since this machine started; unlike ``time.monotonic``, also those in which it slept."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class CollectionLock:
    """The exclusive right to remove things from a run. Threads may share it.

    Args:
        monotonic: this machine's clock, in seconds.
    """

    def __init__(self, run: RunReader, monotonic: Callable[[], float] = uptime) -> None:
        self._run, self._monotonic = run, monotonic
        self._holder = secrets.token_hex(16)
        self._renewing = threading.Lock()
        self._number: int | None = None
        self._since = 0.0
        self._tried = False

    def acquire(self) -> float:
        """Claim the run.

        Returns:
            the time of the claim, in seconds since the epoch by the store's clock.

        Raises:
            ConflictError: another collection is running. StoreError: the store failed.
        """
        number, info = self._newest()
        if info is not None:
            self._check_over(info)
        if not self._claim(number + 1):
            raise ConflictError(
                f"another collection of {self._run.bucket.url} started at the same time; start this one again when "
                "the other is done"
            )
        return self._run.bucket.stat(collection_key(number + 1)).modified

    def renew(self) -> None:
        """Renew the claim if it is half over. Call this before each change to the run.

        Raises:
            ConflictError: another collection has started. StoreError: the store failed.
        """
        with self._renewing:
            number = self._number
            if number is not None and self._monotonic() - self._since < CLAIM_SECONDS / 2:
                return
            self._number = None
            if number is None or not self._claim(number + 1):
                raise ConflictError(
                    f"another collection of {self._run.bucket.url} has started, because this one stood still for more "
                    f"than {CLAIM_SECONDS} s; this one stopped removing: start it again when the other is done"
                )

    def release(self) -> None:
        """Let the next collection start. If the store fails, the claim expires by itself."""
        with self._renewing:
            number, self._number = self._number, None
        bucket = self._run.bucket
        try:
            if number is None and self._tried:
                # After an interrupt or a failure the claim may be there all the same.
                newest, info = self._newest()
                claim = None if info is None else self._read(info)
                number = newest if claim is not None and claim.holder == self._holder else None
            if number is None:
                return
            bucket.put(collection_end_key(number), COLLECTION_END)
            for info in [*bucket.list(COLLECTIONS_PREFIX)]:
                found = collection_of_key(info.key)
                if found is not None and found[0] <= number - KEPT:
                    bucket.delete(info.key)
        except DeltaSyncError as error:
            logger.warning(
                "%s was not cleaned up, so the next collection may have to wait %d s: %s",
                COLLECTIONS_PREFIX,
                CLAIM_SECONDS,
                error,
            )

    def _newest(self) -> tuple[int, ObjectInfo | None]:
        """Return the number of the newest claim, 0 for none; its entry in the listing, None if it was released."""
        listed = self._run.bucket.list(COLLECTIONS_PREFIX)
        found = {named: item for item in listed if (named := collection_of_key(item.key)) is not None}
        number = max((number for number, _ in found), default=0)
        return number, None if (number, True) in found else found.get((number, False))

    def _check_over(self, info: ObjectInfo) -> None:
        bucket = self._run.bucket
        found = self._read(info)
        # A claim that cannot be read states no duration; assume the usual one.
        seconds = CLAIM_SECONDS if found is None else found.seconds
        bucket.put(COLLECTIONS_CLOCK, COLLECTION_END)
        # The store's times are cut to whole seconds.
        left = info.modified + seconds + 1 - bucket.stat(COLLECTIONS_CLOCK).modified
        if left > 0:
            raise ConflictError(
                f"another collection of {bucket.url} is running ({info.key}); start this one again when the other is "
                f"done, or in {left:.0f} s if the other was killed"
            )

    def _read(self, info: ObjectInfo) -> Collection | None:
        """Return a claim; None if it cannot be read."""
        try:
            return Collection.from_bytes(self._run.bucket.get(info.key, max_bytes=limits.MAX_SIDE_BYTES), info.key)
        except DataError as error:
            logger.debug("%s cannot be read: %s", info.key, error)
            return None

    def _claim(self, number: int) -> bool:
        """Create a claim; False if another collection was first."""
        if number > limits.MAX_VERSION:
            raise LimitError(f"{COLLECTIONS_PREFIX} has no numbers left; remove the objects under it")
        since = self._monotonic()
        document = Collection(
            run=self._run.info.run,
            number=number,
            holder=self._holder,
            seconds=CLAIM_SECONDS,
            created_at=timestamp(),
        )
        bucket, key, data = self._run.bucket, collection_key(number), document.to_bytes()
        self._tried = True
        if not (create_if_absent(bucket, key, data) and confirm_created(bucket, key, data)):
            return False
        if self._newest()[0] > number:
            # An old number, free again because its claim was removed.
            bucket.delete(key)
            return False
        self._number, self._since = number, since
        return True
