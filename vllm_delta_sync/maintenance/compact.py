"""``compact`` and ``maintain`` make the merged deltas and anchors that a run lacks, so that reading it stays cheap.

Merged deltas form an aligned skip list: one from a to a + 4^l for every a that 4^l divides, but none across a version
that does not build on the one before. An anchor is due every k-th version, for a milestone tag, or when replaying from
the nearest anchor reads more bytes than the model has.
"""

import heapq
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

from vllm_delta_sync.bucket import ObjectInfo
from vllm_delta_sync.bucket.threads import in_parallel
from vllm_delta_sync.errors import BaseUnavailableError, DataError, SignatureError, UnsupportedError, UsageError
from vllm_delta_sync.format.codecs import RelativeCodec
from vllm_delta_sync.format.documents import (
    TAGS_PREFIX,
    Anchor,
    MergedDelta,
    Retention,
    Tag,
    anchor_key,
    merged_delta_key,
    shared_digits,
    tag_of_key,
)
from vllm_delta_sync.format.manifest import Manifest
from vllm_delta_sync.logs import guarded_logger
from vllm_delta_sync.maintenance.anchor_writer import existing, make_anchor
from vllm_delta_sync.maintenance.merge_writer import PlainObjects, RawCodecError, make_merged_delta
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights, Stop, StoppedError, check_stop, never_stop
from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.objects import needs_base_bits
from vllm_delta_sync.run.read_plan import MERGE_WIDTH, ReadPlanner
from vllm_delta_sync.run.run_reader import RunReader, read_ahead
from vllm_delta_sync.run.service_policy import ServicePolicy, newest_to_serve

logger = guarded_logger(__name__)

MERGES_PER_CALL = 8
"""Maximum number of merged deltas that one call of ``maintain`` makes."""
READ_PER_CALL = 64
"""Maximum documents of a kind (signed anchors, merged deltas; tags) that one call of ``maintain`` reads, so that a long
run is not read at once."""
SETTLED_SECONDS = 2.0
"""Age from which an object cannot be rewritten with the same time: times are in whole seconds."""

VersionRange = tuple[int, int]
_Item = TypeVar("_Item", int, VersionRange)

# Per run, the tags that ``maintain`` has read, by how they were listed; None for a bad one.
_tags: WeakKeyDictionary[RunReader, dict[ObjectInfo, Tag | None]] = WeakKeyDictionary()

# Per run, the state at the last ``maintain``: the newest version that ends a range, the newest k-th version, the tags.
_maintained: WeakKeyDictionary[RunReader, tuple[int, int, tuple[tuple[str, float], ...]]] = WeakKeyDictionary()

# Per run, what ``_delta_bytes`` has added up: the bytes of the deltas after one version, up to another.
_summed: WeakKeyDictionary[RunReader, tuple[int, int, int]] = WeakKeyDictionary()


def due_ranges(first: int, last: int, breaks: list[int]) -> Iterator[VersionRange]:
    """Yield ranges (a, b) of merged deltas with ``first`` ≤ a and b ≤ ``last``, ascending by b, then by length.

    Args:
        breaks: ascending versions that do not build on the one before; no range ends at or crosses one.
    """
    for end in range(first - first % MERGE_WIDTH + MERGE_WIDTH, last + 1, MERGE_WIDTH):
        size = MERGE_WIDTH
        while end % size == 0 and end - size >= first:
            if bisect_right(breaks, end) != bisect_right(breaks, end - size):
                break
            yield end - size, end
            size *= MERGE_WIDTH


def maintain(
    run: RunReader,
    manifest: Manifest,
    base: str | Path | None = None,
    anchor_every: int | None = None,
    merge: bool = True,
    stop: Stop = never_stop,
    plain_objects: PlainObjects | None = None,
) -> list[str]:
    """Make what is due after a commit. The publisher calls this in the background, not necessarily after each version.

    Lists the tags. Does the rest only when ``MERGE_WIDTH`` versions or a k-th version have passed or the tags changed
    since the last call with the same ``run`` object. Makes at most ``MERGES_PER_CALL`` merged deltas, including missing
    ones in the aligned window that ends at the newest version, and at most one anchor. Versions of codec ``raw`` get no
    merged deltas. Versions of codec ``tiled`` get them here only where ``plain_objects`` has their changes, because
    merging them otherwise takes the weights, which should not be rebuilt beside training every few versions. Damage in
    the history is logged and skipped.

    Args:
        manifest: of the newest version. base: as ``run.restore.restore``.
        anchor_every: k: make an anchor for every k-th version, besides those due by cost or tag.
        merge: whether to make merged deltas. stop: polled during the work; True stops it.
        plain_objects: see ``make_merged_delta``.

    Returns:
        keys of the documents made.

    Raises:
        StoreError: the store failed, or there is no room for scratch files.
    """
    aligned = manifest.version - manifest.version % MERGE_WIDTH
    kth = manifest.version - manifest.version % anchor_every if anchor_every else 0
    if manifest.version == 0:
        return []
    tags = tuple((item.key, item.modified) for item in run.bucket.list(TAGS_PREFIX))
    state = (aligned, kth, tags)
    if _maintained.get(run, (0, 0, ())) == state:
        return []
    made: list[str] = []
    try:
        mergeable = plain_objects is not None or not (needs_base_bits(manifest) or manifest.codec == "raw")
        missing = _missing_ranges(run, manifest, aligned) if merge and mergeable and aligned else []
        for pair in missing[:MERGES_PER_CALL]:
            make = partial(make_merged_delta, run, *pair, stop=stop, plain_objects=plain_objects)
            if _try_to_make(f"no merged delta of versions {pair[0]} to {pair[1]}", make):
                made.append(merged_delta_key(*pair))
        version = _due_anchor(run, manifest, kth, stop)
        if version is not None and _try_to_make(
            f"no anchor of version {version}", partial(make_anchor, run, version, base, stop=stop)
        ):
            made.append(anchor_key(version))
        # What failed now is not tried again after every version.
        if not made or (version is None and len(missing) <= MERGES_PER_CALL):
            _maintained[run] = state
    except StoppedError:
        logger.debug("maintenance was stopped; a later call makes what is missing")
    return made


def _try_to_make(failure: str, make: Callable[[], object]) -> bool:
    try:
        make()
    except UnsupportedError as error:
        logger.debug("%s: %s", failure, error)
        return False
    except (DataError, UsageError) as error:
        logger.warning("%s: %s", failure, error)
        return False
    return True


def _missing_ranges(run: RunReader, manifest: Manifest, aligned: int) -> list[VersionRange]:
    """List ranges to make: those that end at ``aligned``, shortest first, then other missing ones, newest first."""
    window = MERGE_WIDTH
    while aligned % window == 0:
        window *= MERGE_WIDTH
    start = max(0, aligned - window)
    # List only keys that share the window's leading digits: a long run has many merged deltas.
    prefix = shared_digits(start, aligned - 1)
    listed = _trusted_merged_deltas(run, run.merged_deltas(prefix), READ_PER_CALL)
    missing = [pair for pair in due_ranges(start, aligned, _breaks(manifest)) if pair not in listed]
    missing.sort(key=lambda pair: (pair[1] != aligned, pair[1] - pair[0], -pair[1]))
    if any(pair[1] != aligned for pair in missing):
        retention = run.retention()
        missing = [pair for pair in missing if _can_make(pair, retention, listed)]
    return missing


def _can_make(pair: VersionRange, retention: Retention | None, made: set[VersionRange]) -> bool:
    """Return whether the parts of a range are available, judging by listings and retention.json."""
    first, last = pair
    size = (last - first) // MERGE_WIDTH
    if size == 1:
        return retention is None or not any(retention.is_gone(version) for version in range(first + 1, last + 1))
    parts = ((start, start + size) for start in range(first, last, size))
    return all(part in made or _can_make(part, retention, made) for part in parts)


def _breaks(manifest: Manifest) -> list[int]:
    return [item.version for item in manifest.breaks]


def _due_anchor(run: RunReader, manifest: Manifest, kth: int, stop: Stop) -> int | None:
    """Return the version that is due an anchor now, or None.

    A quarantined version gets an anchor only as a milestone: a server that starts does not serve it, so the newest
    sound version before it gets the anchor instead.

    Args:
        kth: the newest k-th version, which gets an anchor whatever it costs; 0 for none.
        stop: polled while tags are read; True stops it.
    """
    version = manifest.version
    anchors = sorted(_trusted_only(run, run.anchors()[::-1], run.anchor, READ_PER_CALL))
    if kth and not any(kth <= anchor <= version for anchor in anchors):
        sound = _newest_sound(run, manifest, kth)
        if sound and not any(sound <= anchor <= version for anchor in anchors):
            return sound
    milestone = _milestone(run, version, anchors, stop)
    if milestone is not None:
        return milestone
    newest = newest_to_serve(run, manifest, ServicePolicy())
    if not newest:
        return None
    if newest != version:
        version, manifest = newest, run.manifest(newest)
    return version if version not in anchors and _replay_costs_more(run, manifest, anchors) else None


def _newest_sound(run: RunReader, newest: Manifest, version: int) -> int:
    """Return the newest version up to ``version`` that is not quarantined; 0 if there is none."""
    try:
        manifest = newest if version == newest.version else run.manifest(version)
    except DataError:
        # Making its anchor will report the error.
        return version
    return newest_to_serve(run, manifest, ServicePolicy()) or 0


def _milestone(run: RunReader, version: int, anchors: list[int], stop: Stop) -> int | None:
    """Return the newest version that has a milestone tag and no anchor, of the tags that are known.

    Each call reads at most ``READ_PER_CALL`` tags that are new, the newest first: there may be many.
    """
    listed = [item for item in run.bucket.list(TAGS_PREFIX) if tag_of_key(item.key) is not None]
    # One that was put just now may be moved within the second that its time names.
    settled = max((item.modified for item in listed), default=0.0) - SETTLED_SECONDS
    known = _tags.get(run, {})
    known = _tags[run] = {item: known[item] for item in listed if item in known}

    def read(item: ObjectInfo) -> Tag | None:
        check_stop(stop)
        try:
            return run.tag(str(tag_of_key(item.key)))
        except DataError as error:
            # Removed meanwhile, or damaged; gc reports damaged tags.
            logger.debug("skipped %s: %s", item.key, error)
            return None

    unread = (item for item in listed if item not in known or item.modified > settled)
    # Those never read come first: of a copied bucket, all have times within a second of each other.
    chosen = heapq.nlargest(READ_PER_CALL, unread, key=lambda item: (item not in known, item.modified))
    known.update(zip(chosen, in_parallel(read, chosen), strict=True))
    tags = [tag for tag in known.values() if tag is not None and tag.milestone]
    return max((tag.version for tag in tags if tag.version <= version and tag.version not in anchors), default=None)


def _replay_costs_more(run: RunReader, manifest: Manifest, anchors: list[int]) -> bool:
    """Return whether a replay from the nearest anchor or version 0 reads more bytes than an anchor has."""
    bases = {item.version: item.base_version for item in manifest.breaks}
    bottom = max((number for number, base in bases.items() if base is None), default=0)
    root = max((anchor for anchor in anchors if bottom <= anchor <= manifest.version), default=bottom)
    planner = ReadPlanner(run)
    planner.add_manifests(manifest)
    try:
        if not any(root < number for number in bases) and _delta_bytes(run, root, manifest) <= run.table.full_bytes:
            return False  # no path takes more
        steps = planner.path(root, manifest.version)
    except DataError as error:
        logger.warning("cannot tell whether version %d needs an anchor: %s", manifest.version, error)
        return False
    # 100 versions of SmolLM2-135M at learning rate 1e-6, merged, are 6 % of the model (``benchmarks.catchup``).
    return sum(step.payload_bytes for step in steps) > run.table.full_bytes


def _delta_bytes(run: RunReader, root: int, manifest: Manifest) -> int:
    """Return the bytes of the deltas after ``root``, up to and with a version; reads only manifests that are new."""
    known, last, total = _summed.get(run, (root, root, 0))
    if known != root or last > manifest.version:
        last, total = root, 0
    if last < manifest.version:
        total += sum(item.payload_bytes for item in read_ahead(run.manifest, range(last + 1, manifest.version)))
        total += manifest.payload_bytes
    _summed[run] = root, manifest.version, total
    return total


@dataclass
class CompactReport:
    """Outcome of ``compact``.

    Attributes:
        head: newest version. present: number of merged deltas that existed before.
        merged_deltas: (first, last) of the merged deltas made, or to be made in a dry run.
        skipped: (first, last, reason) of those that cannot be made.
        damaged: whether one was skipped for another reason than codec ``raw`` or the base.
        base_error: why the base cannot be used that a skipped one needs; None if none was skipped for it.
        anchor: version whose anchor was made, or is to be made. anchor_present: the anchor existed before.
        bytes: of the objects made. seconds: duration.
    """

    head: int
    present: int = 0
    merged_deltas: list[VersionRange] = field(default_factory=list)
    skipped: list[tuple[int, int, str]] = field(default_factory=list)
    damaged: bool = False
    base_error: BaseUnavailableError | None = None
    anchor: int | None = None
    anchor_present: bool = False
    bytes: int = 0
    seconds: float = 0.0


def compact(
    run: RunReader,
    base: str | Path | None = None,
    merged_deltas: bool = True,
    anchor: int | str | None = None,
    dry_run: bool = False,
    scratch: str | Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    codec: RelativeCodec = "plain",
) -> CompactReport:
    """Make every merged delta that a run lacks, and an anchor if requested. Runs on any machine, without the trainer.

    Safe beside a publisher, readers and other compactions: a document made twice comes out the same. Safe to
    interrupt: the run stays intact, and the next call continues.

    Args:
        merged_deltas: whether to make merged deltas. anchor: a version, ``head`` or ``tag:NAME``.
        base: as ``run.restore.restore``. dry_run: only report what would be made.
        scratch: folder for temporary files; None for the system's.
        progress: called with documents made, documents to make, and what is being made.
        codec: of the merged deltas made. Writing ``tiled``, and merging versions that have it, takes the weights of
            the version before each range: the model's size in memory, or in scratch files for a large model.

    Raises:
        StoreError: the store failed, or there is no room for scratch files.
        NotFoundError: no such version or tag, or ``base`` does not exist.
        BaseUnavailableError: the anchor needs the base, which is missing, damaged or another one.
        DeltaSyncError: the anchor cannot be made. Ranges that cannot be made are reported as skipped.
    """
    began = time.monotonic()
    check_base_exists(base)
    head = run.head()
    report = CompactReport(head.version)
    target = None if anchor is None else run.resolve(anchor)
    planned = list(_missing_mergeable(run, head, report)) if merged_deltas else []
    if target is not None:
        report.anchor_present = existing(run, Anchor, anchor_key(target.version), target) is not None
        report.anchor = target.version
    work = len(planned) + (target is not None)
    report_progress = progress or (lambda _done, _all, _what: None)
    if dry_run:
        report.merged_deltas = planned
    else:
        weights = RollingWeights(run, base, scratch)
        for done, pair in enumerate(planned):
            report_progress(done, work, f"versions {pair[0]} to {pair[1]}")
            make = partial(make_merged_delta, run, *pair, scratch=scratch, codec=codec, weights=weights)
            _make_or_skip(make, pair, report)
    if target is not None and not dry_run:
        report_progress(len(planned), work, f"anchor of version {target.version}")
        document = make_anchor(run, target.version, base, scratch=scratch)
        report.bytes += 0 if report.anchor_present else document.payload_bytes
    report_progress(work, work, "done")
    report.seconds = time.monotonic() - began
    return report


def _make_or_skip(make: Callable[[], MergedDelta], pair: VersionRange, report: CompactReport) -> None:
    """Make a merged delta, or note why not. Skips it if a shorter range within it was skipped."""
    if any(pair[0] <= first and last <= pair[1] for first, last, _ in report.skipped):
        report.skipped.append((*pair, "a shorter merged delta within it cannot be made"))
        return
    try:
        merged = make()
    except BaseUnavailableError as error:
        # Others do not need the base, and are still made.
        report.skipped.append((*pair, error.message))
        report.base_error = error
        return
    except (DataError, UsageError) as error:
        report.skipped.append((*pair, error.message))
        report.damaged |= not isinstance(error, RawCodecError)
        return
    report.merged_deltas.append(pair)
    report.bytes += merged.payload_bytes


def _missing_mergeable(run: RunReader, head: Manifest, report: CompactReport) -> Iterator[VersionRange]:
    """Yield ranges that are due and missing, without those whose versions gc removed."""
    listed = _trusted_merged_deltas(run, run.merged_deltas())
    report.present = len(listed)
    retention = run.retention()
    made = set(listed)
    for pair in due_ranges(0, head.version, _breaks(head)):
        if pair not in listed and _can_make(pair, retention, made):
            made.add(pair)
            yield pair


# Signatures


# Per run: the anchors and merged deltas whose signatures were valid.
_trusted: WeakKeyDictionary[RunReader, set[object]] = WeakKeyDictionary()


def _trusted_merged_deltas(
    run: RunReader, listed: Iterable[VersionRange], most: int | None = None
) -> set[VersionRange]:
    newest_first = sorted(listed, key=lambda pair: (-pair[1], pair))
    return _trusted_only(run, newest_first, lambda pair: run.merged_delta(*pair), most)


def _trusted_only(
    run: RunReader, listed: Sequence[_Item], read: Callable[[_Item], object], most: int | None
) -> set[_Item]:
    """Return the listed documents with valid signatures; all if the run's keyring checks no signatures.

    A document without a valid signature counts as missing, so that it is made again.

    Args:
        most: read at most this many unread documents, the first; the rest count as valid.
    """
    if not run.keyring.checks_signatures:
        return set(listed)
    good = _trusted.setdefault(run, set())
    unread = [item for item in listed if item not in good][:most]
    answers = in_parallel(lambda item: _is_trusted(read, item), unread)
    refused = {item for item, answer in zip(unread, answers, strict=True) if not answer}
    good.update(set(unread) - refused)
    return set(listed) - refused


def _is_trusted(read: Callable[[_Item], object], item: _Item) -> bool:
    try:
        read(item)
    except SignatureError:
        return False
    except DataError:
        # Damaged, or removed meanwhile: readers plan around it, and repair fixes it.
        pass
    return True
