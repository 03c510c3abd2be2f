"""The newest good version of a run whose HEAD.json does not say it, from a listing that may hold anything."""

from collections.abc import Callable, Container, Iterable, Mapping

from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.format.documents import KeyValidity
from vllm_delta_sync.format.manifest import Manifest

MAX_BAD_IN_A_ROW = 64
"""Manifests that are passed over. Who has gone on behind more of them has moved HEAD.json there."""
MAX_BAD_DOCUMENTS = 4
"""Size of all manifests that are passed over, in manifests as large as may be."""


def newest_good_before(
    sizes: Mapping[int, int],
    limit: int,
    read: Callable[[int], Manifest],
    end: int,
    reason: DeltaSyncError,
    last_signed: Iterable[KeyValidity] = (),
) -> Manifest:
    """The newest good manifest of a version below ``end``, of those that are looked at.

    A chain has no gaps, so its newest version is in the block of numbers that follow each other from the lowest on.
    That is looked at last, and always, lest what lies beyond a gap hide it; what does is looked at for the case that a
    manifest was lost. Of either, from the newest down, ``MAX_BAD_IN_A_ROW`` are passed over and no more, so that a look
    costs little whatever lies there: with up to that many bad ones right behind it the head is still found.

    Args:
        sizes: version → bytes of its manifest, of all that are listed.
        limit: bytes that a manifest may have. Where bad ones have used up ``MAX_BAD_DOCUMENTS`` times that, those that
            are larger than what is left are passed over unread; a good one among them follows the one returned.
        read: gives the manifest of a version, or raises.
        last_signed: of keys that were revoked, the newest first: looked at where nothing else is good, so that the last
            honest version is found however many a thief has made.

    Raises:
        StoreError: the store failed. DeltaSyncError: ``reason``, if none is good.
    """
    reached = last_consecutive(sizes, min(sizes, default=0))
    numbers = sorted((version for version in sizes if version < end), reverse=True)
    for part in ([n for n in numbers if n > reached], [n for n in numbers if n <= reached]):
        left = MAX_BAD_DOCUMENTS * limit
        for version in part[: MAX_BAD_IN_A_ROW + 1]:
            if sizes[version] > min(left, limit):
                continue
            try:
                return read(version)
            except StoreError:
                raise
            except DeltaSyncError:
                left -= sizes[version]
    for word in last_signed:
        try:
            manifest = read(word.version) if word.version < end else None
        except StoreError:
            raise
        except DeltaSyncError:
            continue
        if manifest is not None and manifest.digest == word.manifest:
            return manifest
    raise reason


def last_consecutive(numbers: Container[int], start: int) -> int:
    """The last of the numbers that follow each other from ``start`` on, which is taken to be one of them."""
    while start + 1 in numbers:
        start += 1
    return start
