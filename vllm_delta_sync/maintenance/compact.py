"""What is made beside a chain so that reading it stays cheap: folded ranges and anchors; when each is due.

Folded ranges form an aligned skip list: one from a to b = a + 4^l for every a that 4^l divides, never across a version
that does not build on the one before. An anchor is due every k-th version, for a milestone tag, or when replaying from
the nearest one costs more bytes than the model has.
"""

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from weakref import WeakKeyDictionary

from vllm_delta_sync.errors import DeltaSyncError, StoreError, UnsupportedError
from vllm_delta_sync.format.codecs import RelativeCodec
from vllm_delta_sync.format.documents import (
    FOLDS_PREFIX,
    TAGS_PREFIX,
    MergedDelta,
    Retention,
    anchor_key,
    merged_delta_key,
    merged_delta_of_key,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.maintenance.anchor_writer import existing_anchor, make_anchor
from vllm_delta_sync.maintenance.compact_trust import READ_PER_CALL, believed_anchors, believed_folds
from vllm_delta_sync.maintenance.compact_uploads import OBJECT_BYTES, Stop, StoppedError, never
from vllm_delta_sync.maintenance.merge_writer import RawCodecError, make_fold
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights
from vllm_delta_sync.redaction import guarded_logger
from vllm_delta_sync.run.checks import check_base
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.plan import FOLD_WIDTH, Planner

__all__ = [
    "ANCHOR_RATIO",
    "FOLDS_PER_CALL",
    "OBJECT_BYTES",
    "CompactReport",
    "StoppedError",
    "compact",
    "due_folds",
    "make_anchor",
    "make_fold",
    "upkeep",
]

logger = guarded_logger(__name__)

ANCHOR_RATIO = 1.0
"""An anchor is due when replaying takes more than this times the bytes of the model."""
FOLDS_PER_CALL = 8
"""How many folded ranges ``upkeep`` makes at most before it returns."""

Pair = tuple[int, int]

# What there was when a run was last looked after: the newest version that ends a range, the newest k-th, and the tags.
_looked: WeakKeyDictionary[RunDocuments, tuple[int, int, tuple[tuple[str, float], ...]]] = WeakKeyDictionary()


def due_folds(first: int, last: int, breaks: list[int]) -> Iterator[Pair]:
    """Folded ranges (a, b) with ``first`` ≤ a and b ≤ ``last``, ascending by b, then by length.

    Args:
        breaks: ascending versions that do not build on the one before; no range leads into or across one.
    """
    for end in range(first - first % FOLD_WIDTH + FOLD_WIDTH, last + 1, FOLD_WIDTH):
        size = FOLD_WIDTH
        while end % size == 0 and end - size >= first:
            if bisect_right(breaks, end) != bisect_right(breaks, end - size):
                break
            yield end - size, end
            size *= FOLD_WIDTH


def upkeep(
    run: RunDocuments,
    manifest: Manifest,
    base: str | Path | None = None,
    anchor_every: int | None = None,
    fold: bool = True,
    stop: Stop = never,
) -> list[str]:
    """Make what is due now that a version is committed: for the publisher's background, after each version or some.

    Lists the tags; looks further once for every ``FOLD_WIDTH`` versions, every k-th, and whenever the tags are others,
    as long as ``run`` is the same object. Ranges that were missed, because nobody called in time, are made too: those
    of the aligned window that the newest one closes, ``FOLDS_PER_CALL`` at most, and one anchor at most. Versions of
    codec ``raw`` get no folded ranges. Those of codec ``context`` get them from ``compact`` alone: it takes a version's
    weights, which are not to be rebuilt beside a training every few versions. What cannot be made because the chain is
    damaged is logged and left.

    Args:
        manifest: of the newest version. base: as ``run.restore.restore``.
        anchor_every: an anchor for every k-th version, beside those by cost and by tag.
        fold: whether to make folded ranges. stop: asked now and then; True ends it.

    Returns:
        keys of the documents made.

    Raises:
        StoreError: the store failed, or there is no room for scratch files.
    """
    aligned = manifest.version - manifest.version % FOLD_WIDTH
    kth = manifest.version - manifest.version % anchor_every if anchor_every else 0
    if manifest.version == 0:
        return []
    tags = tuple((item.key, item.modified) for item in run.bucket.list(TAGS_PREFIX))
    found = (aligned, kth, tags)
    if _looked.get(run, (0, 0, ())) == found:
        return []
    made: list[str] = []
    run.authentic.refresh()
    try:
        missed = _missed(run, manifest, aligned) if fold and aligned else []
        for pair in missed[:FOLDS_PER_CALL]:
            if _tried(f"versions {pair[0]} to {pair[1]} are not folded", partial(make_fold, run, *pair, stop=stop)):
                made.append(merged_delta_key(*pair))
        version = _due_anchor(run, manifest, kth)
        make = partial(make_anchor, run, version or 0, base, stop=stop)
        if version is not None and _tried(f"version {version} gets no anchor", make):
            made.append(anchor_key(version))
        # What cannot be made now is not tried again after each version.
        if not made or (version is None and len(missed) <= FOLDS_PER_CALL):
            _looked[run] = found
    except StoppedError:
        logger.debug("upkeep was stopped; what is missing is made later")
    return made


def _tried(failure: str, make: Callable[[], object]) -> bool:
    try:
        make()
    except StoreError:
        raise
    except UnsupportedError as error:
        logger.debug("%s: %s", failure, error)
        return False
    except DeltaSyncError as error:
        logger.warning("%s: %s", failure, error)
        return False
    return True


def _missed(run: RunDocuments, manifest: Manifest, aligned: int) -> list[Pair]:
    """Ranges to make: those that end at ``aligned``, shortest first, then others that are missing, the newest first."""
    window = FOLD_WIDTH
    while aligned % window == 0:
        window *= FOLD_WIDTH
    start = max(0, aligned - window)
    # Not all of them: a long run has many.
    low, high = f"{start:010d}", f"{aligned - 1:010d}"
    shared = next((digit for digit in range(10) if low[digit] != high[digit]), 10)
    items = run.bucket.list(FOLDS_PREFIX + low[:shared])
    pairs = (pair for item in items if (pair := merged_delta_of_key(item.key)) is not None)
    listed = believed_folds(run, pairs, READ_PER_CALL)
    missing = [pair for pair in due_folds(start, aligned, _breaks(manifest)) if pair not in listed]
    missing.sort(key=lambda pair: (pair[1] != aligned, pair[1] - pair[0], -pair[1]))
    if any(pair[1] != aligned for pair in missing):
        retention = run.retention()
        missing = [pair for pair in missing if _possible(pair, retention, listed)]
    return missing


def _possible(pair: Pair, retention: Retention | None, made: set[Pair]) -> bool:
    """Whether the parts of a range are there, as far as listings and hints tell."""
    first, last = pair
    size = (last - first) // FOLD_WIDTH
    if size == 1:
        return retention is None or not any(retention.is_gone(version) for version in range(first + 1, last + 1))
    parts = ((start, start + size) for start in range(first, last, size))
    return all(part in made or _possible(part, retention, made) for part in parts)


def _breaks(manifest: Manifest) -> list[int]:
    return [item.version for item in manifest.breaks]


def _due_anchor(run: RunDocuments, manifest: Manifest, kth: int) -> int | None:
    """The version that should get an anchor now, if one should. A quarantined one gets none but as a milestone: whoever
    starts anew does not serve it, and the newest sound one before it stands in for it.

    Args:
        kth: the newest version that gets one whatever it costs; 0 for none.
    """
    version = manifest.version
    anchors = believed_anchors(run, run.anchors(), READ_PER_CALL)
    if kth and not any(kth <= anchor <= version for anchor in anchors):
        sound = _sound(run, manifest, kth)
        if sound and not any(sound <= anchor <= version for anchor in anchors):
            return sound
    milestone = _milestone(run, version, anchors)
    if milestone is not None:
        return milestone
    if manifest.quarantine is not None:
        if not manifest.sound:
            return None
        manifest = run.manifest(manifest.sound)
        version = manifest.version
    return version if version not in anchors and _costs_more(run, manifest, anchors) else None


def _sound(run: RunDocuments, newest: Manifest, version: int) -> int:
    """The newest version up to this one that is not quarantined; 0 if there is none."""
    try:
        manifest = newest if version == newest.version else run.manifest(version)
    except StoreError:
        raise
    except DeltaSyncError:
        # Whoever makes its anchor says what is wrong.
        return version
    return manifest.sound or 0


def _milestone(run: RunDocuments, version: int, anchors: list[int]) -> int | None:
    """A version with a milestone tag and no anchor; the newest."""
    wanted = []
    for name in (tag_of_key(item.key) for item in run.bucket.list(TAGS_PREFIX)):
        try:
            tag = None if name is None else run.tag(name)
        except StoreError:
            raise
        except DeltaSyncError as error:
            # Removed meanwhile, or damaged: that is between its owner and retention.
            logger.debug("tag %s is not looked at: %s", name, error)
            continue
        if tag is not None and tag.milestone and tag.version <= version and tag.version not in anchors:
            wanted.append(tag.version)
    return max(wanted, default=None)


def _costs_more(run: RunDocuments, manifest: Manifest, anchors: list[int]) -> bool:
    """Whether a reader who begins at the nearest version that is held whole reads more than an anchor has."""
    planner = Planner(run)
    planner.know(manifest)
    bases = {item.version: item.base_version for item in manifest.breaks}
    bottom = max((number for number, base in bases.items() if base is None), default=0)
    root = max((anchor for anchor in anchors if bottom <= anchor <= manifest.version), default=bottom)
    try:
        steps = planner.path(root, manifest.version)
    except StoreError:
        raise
    except DeltaSyncError as error:
        logger.warning("whether version %d needs an anchor is not known: %s", manifest.version, error)
        return False
    return sum(step.payload_bytes for step in steps) > ANCHOR_RATIO * run.table.full_bytes


@dataclass
class CompactReport:
    """Outcome of ``compact``.

    Attributes:
        head: newest version. present: folded ranges that were there.
        folds: (first, last) of those made, or to be made in a dry run. skipped: (first, last, why) of those that
            cannot be made. damaged: one of them for another reason than its codec, which is ``raw``.
        anchor: version whose anchor was made, or is to be made. anchor_present: it was there.
        bytes: of the objects made. seconds: it took.
    """

    head: int
    present: int = 0
    folds: list[Pair] = field(default_factory=list)
    skipped: list[tuple[int, int, str]] = field(default_factory=list)
    damaged: bool = False
    anchor: int | None = None
    anchor_present: bool = False
    bytes: int = 0
    seconds: float = 0.0


def compact(
    run: RunDocuments,
    base: str | Path | None = None,
    folds: bool = True,
    anchor: int | str | None = None,
    dry_run: bool = False,
    scratch: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    stop: Stop = never,
    codec: RelativeCodec = "packed",
) -> CompactReport:
    """Make every folded range that a run lacks, and an anchor if asked for; on any machine, without the trainer.

    Safe beside a publisher, readers and others that compact: whatever is made twice is made the same. Ended at any
    point it leaves the run whole, and goes on from there the next time.

    Args:
        base: as ``run.restore.restore``. anchor: a version, ``head`` or ``tag:NAME``.
        dry_run: only say what would be made.
        scratch: folder for temporary files; None for the system's.
        progress: called with documents made so far, documents to make, and what is being made.
        codec: of the folded ranges that are made. Writing ``context``, and folding versions that have it, takes the
            weights of the version before each range: a model's size of memory, or of scratch for a large one.

    Raises:
        StoreError: the store failed, or there is no room for scratch files. StoppedError: ``stop`` said so.
        NotFoundError: there is no such version or tag, or the base is not at hand.
        DeltaSyncError: the anchor cannot be made. Ranges that cannot be made are reported as skipped.
    """
    began = time.monotonic()
    check_base(base)
    head = run.head()
    report = CompactReport(head.version)
    target = None if anchor is None else run.resolve(None if anchor == "head" else anchor)
    planned = list(_unfolded(run, head, report)) if folds else []
    if target is not None:
        report.anchor_present = existing_anchor(run, target) is not None
        report.anchor = target.version
    work = len(planned) + (target is not None)
    tell = progress or (lambda _done, _all, _what: None)
    if dry_run:
        report.folds = planned
    else:
        weights = RollingWeights(run, base, scratch, stop)
        for done, pair in enumerate(planned):
            tell(done, work, f"versions {pair[0]} to {pair[1]}")
            make = partial(make_fold, run, *pair, scratch=scratch, stop=stop, codec=codec, weights=weights)
            _fold_or_note(make, pair, report)
    if target is not None and not dry_run:
        tell(len(planned), work, f"anchor of version {target.version}")
        document = make_anchor(run, target.version, base, scratch=scratch, stop=stop)
        report.bytes += 0 if report.anchor_present else document.payload_bytes
    tell(work, work, "done")
    report.seconds = time.monotonic() - began
    return report


def _fold_or_note(make: Callable[[], MergedDelta], pair: Pair, report: CompactReport) -> None:
    """Make a range; what keeps it from being made also keeps longer ones, which are not tried."""
    if any(pair[0] <= first and last <= pair[1] for first, last, _ in report.skipped):
        report.skipped.append((*pair, "a shorter range that it consists of cannot be made"))
        return
    try:
        folded = make()
    except StoreError:
        raise
    except DeltaSyncError as error:
        report.skipped.append((*pair, error.message))
        report.damaged |= not isinstance(error, RawCodecError)
        return
    report.folds.append(pair)
    report.bytes += folded.payload_bytes


def _unfolded(run: RunDocuments, head: Manifest, report: CompactReport) -> Iterator[Pair]:
    """Ranges that are due and not there; what cannot be made for versions that are gone is left out."""
    listed = believed_folds(run, run.folds())
    report.present = len(listed)
    retention = run.retention()
    made = set(listed)
    for pair in due_folds(0, head.version, _breaks(head)):
        if pair not in listed and _possible(pair, retention, made):
            made.add(pair)
            yield pair
