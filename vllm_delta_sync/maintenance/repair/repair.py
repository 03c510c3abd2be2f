"""``repair`` restores what verification finds absent from a mirror, and reports what is lost.

Without a mirror it points HEAD.json at the newest good version, writes damaged anchors and merged deltas again if their
versions can be rebuilt, and records lost deltas that other documents replace as gone. It writes only what digests and
fingerprints prove, and overwrites nothing intact. With trusted keys only validly signed documents are taken from a
mirror, and what is written is signed with the run's keyring, or not written. Each repair is a single step, so an
interrupted call leaves the run no worse, and the next call continues.
"""

from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.middleware.dry_run import DryRunBucket
from vllm_delta_sync.errors import ConflictError, DataError, SettingsError, UsageError
from vllm_delta_sync.format.base_document import timestamp
from vllm_delta_sync.format.documents import RETENTION_KEY, Retention, anchor_of_key, merged_delta_of_key
from vllm_delta_sync.format.manifest import HEAD_KEY, version_of_key
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.gc.lock import CollectionLock
from vllm_delta_sync.maintenance.gc.record import empty_record, ranges, spelled
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.maintenance.repair.from_mirror import (
    Mirror,
    check_copy,
    restore_identity,
    restore_lost_head,
)
from vllm_delta_sync.maintenance.rolling_weights import RollingWeights
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.keyring import make_head
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.report import Findings, VerifyReport
from vllm_delta_sync.verify.verify import Progress, examine

ROUNDS = 16
"""Maximum rounds of one call: repairs of a round may reveal further damage. Repeat the call if that is not enough."""

HELP = (
    "a mirror that has them can restore them (--mirror); without one, publisher.anchor() of a running publisher, or "
    "its next start, continues the run with an anchor; and delta-sync gc gives up those that it need not keep"
)


@dataclass
class RepairReport:
    """Outcome of ``repair``.

    Attributes:
        repaired: one line for each repair: key and source.
        lost: one line for each remaining problem, then the unreadable versions with a remedy.
        unreadable: these versions. notes: as ``VerifyReport.notes``, after the repair.
    """

    repaired: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def repair(
    run: RunReader | Bucket,
    mirror: Bucket | str | None = None,
    base: str | Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    keyring: Keyring | None = None,
) -> RepairReport:
    """Repair everything that ``verify_run`` finds, as far as the repair can be proven correct.

    Args:
        run: the run, or its bucket if the run cannot be opened.
        mirror: a copy of the run to restore from; may be damaged itself.
        base: as ``Run.snapshot``.
        dry_run: write to a temporary directory, and only report what could be repaired.
        progress: as ``verify_run``; starts again in each round.
        keyring: trusted keys, and the key that signs rebuilt documents; None means that of ``run``.

    Raises:
        NotFoundError: there is no run, the mirror is empty, or ``base`` does not exist. StoreError: a store failed.
        UsageError: the mirror holds another run.
        BaseUnavailableError: ``base`` is not the run's base; nothing was rebuilt.
        DeltaSyncError: run.json or tensors.json is damaged or has no valid signature, and no mirror has it.
    """
    bucket = run.bucket if isinstance(run, RunReader) else run
    # Bypass the mirror in front of the bucket, which would hide damage in the bucket or in the mirror to restore from.
    bucket = bucket.origin if isinstance(bucket, OpenedBucket) else bucket
    if keyring is None:
        keyring = run.keyring if isinstance(run, RunReader) else Keyring()
    with ExitStack() as stack:
        if isinstance(mirror, str):
            mirror = stack.enter_context(open_beside(bucket, mirror, mirrored=False))
        if dry_run:
            bucket = stack.enter_context(DryRunBucket(bucket))
        repaired: list[str] = []
        if mirror is not None:
            repaired += [f"{key}: from the mirror" for key in restore_identity(bucket, mirror, keyring)]
        run = RunReader(bucket, keyring)
        if mirror is not None:
            check_copy(mirror, run.info)
            repaired += [f"{key}: from the mirror" for key in restore_lost_head(run, mirror)]
        unsigned: list[str] = []
        for _ in range(ROUNDS):
            report, audit = examine(run, base, progress, Findings(keep=True))
            unsigned = []
            done = _round(run, mirror, base, report, audit, unsigned)
            new = [line for line in done if line not in repaired]
            repaired += new
            if not new:
                break
        else:
            report, audit = examine(run, base, progress, Findings(keep=True))
        lost = _lost(report, audit) + (unsigned if report.findings else [])
        return RepairReport(repaired, lost, report.unreadable, report.notes)


def _round(
    run: RunReader,
    mirror: Bucket | None,
    base: str | Path | None,
    report: VerifyReport,
    audit: DocumentAudit,
    unsigned: list[str],
) -> list[str]:
    """Repair what one examination found, from the mirror first; return a line for each repair.

    Args:
        unsigned: gets a line for each repair that lacks a key to sign with.
    """
    done: list[str] = []
    if mirror is not None:
        source = Mirror(run, mirror, audit)
        if report.pointed is None and (key := source.restore_head()) is not None:
            done.append(f"{key}: from the mirror")
        # From the newest manifest down, because each names the digest of the one before.
        for finding in sorted(report.findings, key=lambda finding: finding.key, reverse=True):
            key = source.restore(finding)
            if key is not None and f"{key}: from the mirror" not in done:
                done.append(f"{key}: from the mirror")
        done += [f"{key}: from the mirror" for key in source.restore_leading_to(report.unreadable)]
    if done:
        return done
    wanted = [finding.document or finding.key for finding in report.findings]
    if report.pointed is None or report.pointed < report.head:
        wanted.append(HEAD_KEY)
    wanted = list(dict.fromkeys(wanted))
    lost = [number for key in wanted if (number := version_of_key(key)) is not None]
    # A version that has no good manifest and is not missed was given up by a collection, which has recorded that. What
    # leads to an unreadable version is needed again once it is found: of what is gone, a mirror restores nothing.
    last = max(report.unreadable, default=-1)
    gone = [number for number in lost if number in audit.manifests and number > last]
    if gone:
        with suppress(ConflictError):  # a collection is running; the next call does it
            done.append(_record_gone(run, gone, report.versions))
    for key in wanted:
        try:
            line = _write_again(run, key, base, report)
        except SettingsError as error:
            unsigned.append(f"{key} was not written: {error.message}")
        except (DataError, UsageError, ConflictError):
            continue  # stays among the findings
        else:
            done += [] if line is None else [line]
    return done


def _write_again(run: RunReader, key: str, base: str | Path | None, report: VerifyReport) -> str | None:
    """Write a document again from the versions that are there; None for one that only a mirror has.

    Raises:
        SettingsError: the run is signed, and there is no key to sign with. DataError, UsageError: it cannot be rebuilt.
    """
    version, ends = anchor_of_key(key), merged_delta_of_key(key)
    if key != HEAD_KEY and version is None and ends is None:
        return None
    run.keyring.check_can_sign(run.info)
    if version is not None:
        make_anchor(run, version, base, replace=True)
    elif ends is not None:
        make_merged_delta(run, *ends, replace=True, weights=RollingWeights(run, base))
    else:
        return _repair_head(run, report)
    return f"{key}: rebuilt from the history"


def _record_gone(run: RunReader, versions: list[int], end: int) -> str:
    """Record that the own objects of versions are gone, to which other documents lead, so that nothing looks for them.

    Args:
        end: of the versions that there are; an earlier record may name any.

    Raises:
        ConflictError: a collection is running. StoreError: the store failed.
    """
    lock = CollectionLock(run)
    try:
        lock.acquire()
        record = run.retention() or empty_record(run)
        gone = [number for first, last in record.gone for number in range(first, min(last + 1, end))]
        written = Retention(
            run=record.run,
            gone=ranges([*gone, *versions]),
            going=record.going,
            head=record.head,
            kept=record.kept,
            created_at=timestamp(),
        )
        run.bucket.put(RETENTION_KEY, written.to_bytes())
    finally:
        lock.release()
    return (
        f"{RETENTION_KEY}: says that the objects of versions {spelled(versions)} are gone; no kept version needs them"
    )


def _repair_head(run: RunReader, report: VerifyReport) -> str | None:
    """Point HEAD.json at the newest good manifest, unless a publisher has written it meanwhile."""
    if report.head < 0:
        return None
    head = make_head(run.manifest(report.head), run.keyring)
    with suppress(DataError):  # missing, damaged, or without a valid signature
        there = run.read_head()
        if there.version != report.pointed or (there.version, there.manifest) == (head.version, head.manifest):
            return None
    run.bucket.put(HEAD_KEY, head.to_bytes())
    return f"{HEAD_KEY}: points at version {report.head}, the newest good one"


def _lost(report: VerifyReport, audit: DocumentAudit) -> list[str]:
    lines = []
    for finding in report.findings:
        where = "" if finding.document is None else f" (listed by {finding.document})"
        lines.append(f"{finding.key}{where}: {finding.error.message}")
    if report.unreadable:
        lines.append(f"unreadable versions: {spelled(report.unreadable)}; {HELP}")
    unreadable = set(report.unreadable)
    lines += [
        f"tag {name!r} is on version {version}, which is unreadable"
        for name, version in sorted(audit.tags.items())
        if version in unreadable
    ]
    return lines
