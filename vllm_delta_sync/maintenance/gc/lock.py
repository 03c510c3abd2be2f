"""``CollectionLock``: at most one collection at a time removes things from a run.

A collection claims the run with ``collections/<n>.json``, created if absent, n ascending. The newest claim holds until
``collections/<n>.end`` is there, or until its seconds are over by the store's clock, so that a collection that was
killed delays the next one for that long only. A collection that takes longer renews its claim by creating the next
number: that succeeds only if no other collection has begun since, however late it comes.

Where create-if-absent does not hold, two collections that begin within a moment may both pass. They write the same
``retention.json``, and ``retention`` reads that again before each removal: the one whose document was replaced stops.
"""

import secrets
import time
from collections.abc import Callable

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.conditional_put import confirm_created, create_if_absent
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, LimitError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.documents import (
    COLLECTION_END,
    COLLECTIONS_CLOCK,
    COLLECTIONS_PREFIX,
    Collection,
    collection_end_key,
    collection_key,
    collection_of_key,
)
from vllm_delta_sync.format.manifest import timestamp
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.documents import RunDocuments

logger = guarded_logger(__name__)

CLAIM_SECONDS = 600
"""How long a claim holds. It is renewed after half of that, so what follows a renewal has the other half to finish."""
KEPT = 4
"""How many of the newest claims stay."""


class CollectionLock:
    """The right to remove things from a run.

    Args:
        monotonic: seconds that this machine's clock counts.
    """

    def __init__(self, run: RunDocuments, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._run, self._monotonic = run, monotonic
        self._holder = secrets.token_hex(16)
        self._number: int | None = None
        self._since = 0.0

    def acquire(self) -> float:
        """Claim the run.

        Returns:
            the time of the claim, in seconds since the epoch by the store's clock.

        Raises:
            ConflictError: another collection is under way. StoreError: the store failed.
        """
        number, info, over = self._newest()
        if info is not None and not over:
            self._check_over(number, info)
        if not self._claim(number + 1):
            raise ConflictError(
                f"another collection of {self._run.bucket.url} began at the same moment; start this one again when "
                "that is done"
            )
        return self._run.bucket.stat(collection_key(number + 1)).modified

    def renew(self) -> None:
        """Make sure of the claim: to be called before each change of the run.

        Raises:
            ConflictError: another collection has begun. StoreError: the store failed.
        """
        number = self._number
        if number is not None and self._monotonic() - self._since < CLAIM_SECONDS / 2:
            return
        self._number = None
        if number is None or not self._claim(number + 1):
            raise ConflictError(
                f"another collection of {self._run.bucket.url} has begun since this one stood still for more than "
                f"{CLAIM_SECONDS} s; nothing more is removed: start this one again when that is done"
            )

    def release(self) -> None:
        """Let the next collection begin. If the store fails, the claim ends when its time is over."""
        number, self._number = self._number, None
        if number is None:
            return
        bucket = self._run.bucket
        try:
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

    def _newest(self) -> tuple[int, ObjectInfo | None, bool]:
        """Number of the newest claim, 0 for none; its entry in the listing; whether it was ended."""
        number, info, over = 0, None, False
        for item in self._run.bucket.list(COLLECTIONS_PREFIX):
            found = collection_of_key(item.key)
            if found is None or found[0] < number:
                continue
            if found[0] > number:
                number, info, over = found[0], None, False
            over |= found[1]
            info = info if found[1] else item
        return number, info, over

    def _check_over(self, number: int, info: ObjectInfo) -> None:
        bucket = self._run.bucket
        # What cannot be read has given itself no time: it gets that of one of ours.
        seconds = CLAIM_SECONDS
        try:
            data = bucket.get(info.key, max_bytes=limits.MAX_SIDE_BYTES)
            seconds = Collection.from_bytes(data, info.key).seconds
        except StoreError:
            raise
        except DeltaSyncError as error:
            logger.debug("%s cannot be read: %s", info.key, error)
        bucket.put(COLLECTIONS_CLOCK, COLLECTION_END)
        # The store's times are cut to whole seconds.
        left = info.modified + seconds + 1 - bucket.stat(COLLECTIONS_CLOCK).modified
        if left > 0:
            raise ConflictError(
                f"another collection of {bucket.url} is under way ({info.key}); start this one again when that is "
                f"done, or in {left:.0f} s if it was killed"
            )

    def _claim(self, number: int) -> bool:
        """Create a claim; False if another collection was first."""
        if number > limits.MAX_VERSION:
            raise LimitError(f"{COLLECTIONS_PREFIX} has no numbers left; remove what lies there")
        since = self._monotonic()
        document = Collection(
            run=self._run.info.run,
            number=number,
            holder=self._holder,
            seconds=CLAIM_SECONDS,
            created_at=timestamp(),
        )
        bucket, key, data = self._run.bucket, collection_key(number), document.to_bytes()
        if not (create_if_absent(bucket, key, data) and confirm_created(bucket, key, data)):
            return False
        if self._newest()[0] > number:
            # A number of long ago, which was free because its claim was removed.
            bucket.delete(key)
            return False
        self._number, self._since = number, since
        return True
