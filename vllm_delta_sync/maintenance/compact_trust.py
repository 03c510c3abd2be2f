"""Which anchors and folded ranges beside a chain may be believed: one that nobody trusted has signed is made again."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from weakref import WeakKeyDictionary

from vllm_delta_sync.bucket.parallel import in_parallel
from vllm_delta_sync.errors import DeltaSyncError, SignatureError, StoreError
from vllm_delta_sync.format.documents import anchor_key, merged_delta_key
from vllm_delta_sync.run.documents import RunDocuments

READ_PER_CALL = 64
"""How many documents are read at most, so that publishing's upkeep does not read all that a long run has at once."""

Pair = tuple[int, int]

# Keys of documents that were read and believed, and the list of keys by which they were.
_believed: WeakKeyDictionary[RunDocuments, tuple[int, set[str]]] = WeakKeyDictionary()


def believed_folds(run: RunDocuments, listed: Iterable[Pair], most: int | None = None) -> set[Pair]:
    """Those folded ranges that are there and signed by somebody trusted; all, if the run's keyring trusts anybody.

    Args:
        most: read so many documents that were not read before, those that end last; the others count as signed.

    Raises:
        StoreError: the store failed.
    """
    pairs = {merged_delta_key(*pair): pair for pair in sorted(listed, key=lambda pair: (-pair[1], pair))}
    reads = {key: partial(run.folded, *pair) for key, pair in pairs.items()}
    return {pairs[key] for key in pairs.keys() - _refused(run, reads, most)}


def believed_anchors(run: RunDocuments, listed: Iterable[int], most: int | None = None) -> list[int]:
    """Those anchors, ascending, as ``believed_folds``."""
    versions = {anchor_key(version): version for version in sorted(listed, reverse=True)}
    reads = {key: partial(run.anchor, version) for key, version in versions.items()}
    return sorted(versions[key] for key in versions.keys() - _refused(run, reads, most))


def _refused(run: RunDocuments, reads: Mapping[str, Callable[[], object]], most: int | None) -> set[str]:
    if not run.keyring.checks:
        return set()
    file = run.authentic.keys.file
    sequence = 0 if file is None else file.sequence
    known, good = _believed.get(run, (0, set()))
    if known != sequence:
        good = set()
    _believed[run] = sequence, good
    unknown = [key for key in reads if key not in good][:most]
    answers = in_parallel(lambda key: _is_believed(reads[key]), unknown)
    refused = {key for key, answer in zip(unknown, answers, strict=True) if not answer}
    good.update(set(unknown) - refused)
    return refused


def _is_believed(read: Callable[[], object]) -> bool:
    try:
        read()
    except SignatureError:
        return False
    except StoreError:
        raise
    except DeltaSyncError:
        # Damaged, or gone meanwhile: readers find a way around it, and repair puts it right.
        pass
    return True
