"""``newest_good_before`` finds the newest good version where HEAD.json is damaged, from an untrusted listing."""

from collections.abc import Callable, Container, Mapping

from vllm_delta_sync.errors import DataError, DeltaSyncError
from vllm_delta_sync.format.manifest import Manifest

MAX_BAD_IN_A_ROW = 64
"""Bad manifests that are skipped in a row. A publisher that continues after more of them has moved HEAD.json there."""
MAX_BAD_DOCUMENTS = 4
"""Total bytes of bad manifests to read, as a multiple of the maximum manifest size."""


def newest_good_before(
    sizes: Mapping[int, int],
    limit: int,
    read: Callable[[int], Manifest],
    end: int,
    reason: DeltaSyncError,
) -> Manifest:
    """Return the newest good manifest of a version below ``end``, within bounds on how many are read.

    Version numbers have no gaps, so the newest version is in the block of consecutive numbers that starts at the
    lowest. Numbers beyond a gap are tried first, in case a manifest was lost; the block is always tried after them, so
    that stray files beyond a gap cannot hide it. In each part, at most ``MAX_BAD_IN_A_ROW`` bad manifests are skipped,
    from the newest down: the cost is bounded whatever the listing holds, and a head with up to that many bad manifests
    behind it is found.

    Args:
        sizes: version → size in bytes of its manifest, for all that are listed.
        limit: the maximum bytes of a manifest. Once ``MAX_BAD_DOCUMENTS`` times that many bytes of bad manifests have
            been read, larger manifests are skipped unread, so the result may not be the newest good one.
        read: returns the manifest of a version, or raises.
        reason: raised if no manifest is good.

    Raises:
        StoreError: the store failed. DeltaSyncError: ``reason``.
    """
    block_end = last_consecutive(sizes, min(sizes, default=0))
    numbers = sorted((version for version in sizes if version < end), reverse=True)
    for part in ([n for n in numbers if n > block_end], [n for n in numbers if n <= block_end]):
        left = MAX_BAD_DOCUMENTS * limit
        for version in part[: MAX_BAD_IN_A_ROW + 1]:
            if sizes[version] > min(left, limit):
                continue
            try:
                return read(version)
            except DataError:
                left -= sizes[version]
    raise reason


def last_consecutive(numbers: Container[int], start: int) -> int:
    """Return the end of the block of consecutive numbers that begins at ``start``, which need not be in ``numbers``."""
    while start + 1 in numbers:
        start += 1
    return start
