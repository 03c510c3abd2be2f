"""Repair a run: bring back from a mirror, or rebuild, what checking it finds wrong; say what is lost.

Nothing is written that the digests and fingerprints of the chain do not prove, and nothing that is good is
overwritten. Into a signed run nothing is written that is not signed: what is taken from a mirror is, where trusted keys
are set, and what is made here is signed with the run's keyring, or not made. Each thing is mended by itself and in one
step, so that an end in the middle leaves a run that is no worse, and the next repair goes on.
"""

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, open_beside
from vllm_delta_sync.bucket.factory import OpenedBucket
from vllm_delta_sync.bucket.middleware.dry_run import DryRunBucket
from vllm_delta_sync.errors import DeltaSyncError, SettingsError, StoreError
from vllm_delta_sync.format import limits
from vllm_delta_sync.format.manifest import HEAD_KEY, Head
from vllm_delta_sync.maintenance.gc.record import spelled
from vllm_delta_sync.maintenance.keys import check_signer
from vllm_delta_sync.maintenance.repair.from_mirror import Mirror, mend_identity, mend_keys
from vllm_delta_sync.maintenance.repair.rebuild import Rebuilder
from vllm_delta_sync.run.documents import RunDocuments
from vllm_delta_sync.run.report import VerifyReport
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.trust.head import head_of
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.verify import Progress, examine

ROUNDS = 16
"""What one round mends shows what lies behind it; a run that needs more rounds is repaired again."""

HELP = (
    "a mirror that has them would bring them back (--mirror); where there is none, publisher.anchor() of a live "
    "publisher, or its next start, goes on with an anchor"
)


@dataclass
class RepairReport:
    """Outcome of ``repair``.

    Attributes:
        repaired: what was written, a line each: key, and how it was known.
        lost: what is still wrong, a line each, then the versions that cannot be read, and what would help.
        unreadable: those versions. notes: as ``VerifyReport.notes``, after the repair.
    """

    repaired: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    unreadable: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def repair(
    run: RunDocuments | Bucket,
    mirror: Bucket | str | None = None,
    base: str | Path | None = None,
    dry_run: bool = False,
    progress: Progress | None = None,
    keyring: Keyring | None = None,
) -> RepairReport:
    """Mend everything that ``verify_run`` finds, as far as it can be proven right.

    Args:
        run: the run, or its bucket if it cannot even be opened.
        mirror: a copy of the run, possibly damaged itself, to take from.
        base: as ``Run.snapshot``.
        dry_run: write to a temporary directory, and only say what could be repaired.
        progress: as ``verify_run``; each round begins anew.
        keyring: whose signatures to ask for, and with which key to sign what is made again; None: that of ``run``.

    Raises:
        NotFoundError: there is no run, or ``base`` is given and not there. StoreError: a store failed.
        DeltaSyncError: run.json, tensors.json or keys.json is damaged or may not be believed, and no mirror has them.
    """
    bucket = run.bucket if isinstance(run, RunDocuments) else run
    # A mirror in front of the bucket would hide what is damaged in there, or in the mirror to take from.
    bucket = bucket.origin if isinstance(bucket, OpenedBucket) else bucket
    if keyring is None:
        keyring = run.keyring if isinstance(run, RunDocuments) else Keyring()
    with ExitStack() as stack:
        if isinstance(mirror, str):
            mirror = stack.enter_context(open_beside(bucket, mirror, mirrored=False))
        mended = stack.enter_context(DryRunBucket(bucket)) if dry_run else bucket
        return _repair(mended, mirror, base, progress, keyring)


def _repair(
    bucket: Bucket, mirror: Bucket | None, base: str | Path | None, progress: Progress | None, keyring: Keyring
) -> RepairReport:
    outcome = RepairReport()
    outcome.repaired += mend_keys(bucket, mirror, keyring)
    if mirror is not None:
        outcome.repaired += [f"{key}: from the mirror" for key in mend_identity(bucket, mirror, keyring)]
    run = RunDocuments(bucket, keyring)
    unsigned: list[str] = []
    for _ in range(ROUNDS):
        report, census = examine(run, base, progress, findings=True)
        unsigned = []
        done = _round(run, mirror, base, report, census, unsigned)
        new = [line for line in done if line not in outcome.repaired]
        outcome.repaired += new
        if not new:
            break
    else:
        report, census = examine(run, base, progress, findings=True)
    outcome.notes = report.notes
    outcome.unreadable = report.unreadable
    outcome.lost = _lost(report, census) + (unsigned if report.findings else [])
    return outcome


def _round(
    run: RunDocuments,
    mirror: Bucket | None,
    base: str | Path | None,
    report: VerifyReport,
    census: DocumentAudit,
    unsigned: list[str],
) -> list[str]:
    """Mend what one examination found, the surest first; what was written.

    Args:
        unsigned: is told what would be made again if there were a key to sign it with.
    """
    done: list[str] = []
    if mirror is not None:
        source = Mirror(run, mirror, census)
        if report.pointed is None and (key := source.mend_head()) is not None:
            done.append(f"{key}: from the mirror")
        # From the newest manifest down: each names the one before it.
        for finding in sorted(report.findings, key=lambda finding: finding.key, reverse=True):
            key = source.mend(finding)
            if key is not None and f"{key}: from the mirror" not in done:
                done.append(f"{key}: from the mirror")
    if done:
        return done
    try:
        check_signer(run)
        done += _mend_head(run, report, census)
    except SettingsError as error:
        if any(finding.key == HEAD_KEY for finding in report.findings):
            unsigned.append(f"{HEAD_KEY} was not written: {error.message}")
    rebuilder = Rebuilder(run, base, report, census)
    rebuilder.versions()
    if not rebuilder.done:
        rebuilder.beside()
    unsigned += rebuilder.unsigned
    return done + rebuilder.done


def _mend_head(run: RunDocuments, report: VerifyReport, census: DocumentAudit) -> list[str]:
    """Point HEAD.json at the newest good manifest, unless it proves that there was a newer one."""
    damaged = any(finding.key == HEAD_KEY for finding in report.findings)
    behind = report.pointed is None or report.pointed < report.head
    if report.head < 0 or not (damaged or behind):
        return []
    head = head_of(run.manifest(report.head), run.keyring)
    try:
        data = run.bucket.get(HEAD_KEY, max_bytes=limits.MAX_HEAD_BYTES)
        there = Head.from_bytes(data, HEAD_KEY)
        run.authentic.head(there, HEAD_KEY)
        if (there.run, there.version, there.manifest) == (head.run, head.version, head.manifest):
            return []  # a publisher was first
    except StoreError:
        raise
    except DeltaSyncError:
        pass  # missing, damaged, or not to be believed
    run.bucket.put(HEAD_KEY, head.to_bytes())
    return [f"{HEAD_KEY}: points at version {report.head}, the newest that is good"]


def _lost(report: VerifyReport, census: DocumentAudit) -> list[str]:
    lines = []
    for finding in report.findings:
        where = "" if finding.document is None else f" (listed by {finding.document})"
        lines.append(f"{finding.key}{where}: {finding.error.message}")
    if report.unreadable:
        lines.append(f"versions that cannot be read: {spelled(report.unreadable)}; {HELP}")
    unreadable = set(report.unreadable)
    lines += [
        f"tag {name!r} is on version {version}, which cannot be read"
        for name, version in sorted(census.tags.items())
        if version in unreadable
    ]
    return lines
