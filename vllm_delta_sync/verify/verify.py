"""``verify_run`` checks a whole run: documents, digests, contents, declared fingerprints and the weights themselves."""

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from vllm_delta_sync.run.checks import check_base_exists
from vllm_delta_sync.run.run_reader import RunReader
from vllm_delta_sync.trust.keyring import short
from vllm_delta_sync.verify.document_audit import DocumentAudit
from vllm_delta_sync.verify.object_audit import check_files, check_sidecars
from vllm_delta_sync.verify.replay_audit import ReplayAudit
from vllm_delta_sync.verify.report import Finding, Findings, VerifyReport

__all__ = ["Finding", "VerifyReport", "examine", "verify_run"]

Progress = Callable[[VerifyReport], None]


def verify_run(
    run: RunReader,
    base: str | Path | None = None,
    progress: Progress | None = None,
    findings: bool = False,
) -> VerifyReport:
    """Check the whole run, from version 0 to the head.

    Checks the documents first: each manifest against the documents that name it by digest; anchors, merged deltas,
    tags and claims against the manifests. Then checks the run's files and, version by version, the objects, the weights
    that they lead to, the standalone anchor (bit for bit), merged deltas (the fingerprint of each tensor that they
    would result in) and sidecars. Versions whose objects retention removed are not errors; versions that it keeps must
    be reachable. Holds the weights of one version: O(model) memory, or O(model) of the temporary directory's disk for
    large models.

    Objects of codec ``tiled`` are decoded with their base bits; if these are not available, the report lists the
    document as ``undecoded``.

    If the run's keyring has trusted keys, every document except the hints (claims, heartbeats, retention.json) must be
    signed by one of them. Objects are bound by their digests.

    Args:
        base: as ``Run.snapshot``. progress: called with the report so far after each version.
        findings: True keeps every finding in the report and continues; False raises the first one.

    Raises:
        NotFoundError: nothing is published, or ``base`` is given and not there. (If it is not given, a recorded base
            that is not there becomes a note.)
        StoreError: the store failed.
        DeltaSyncError: the first problem, naming version, object, tensor or base.
    """
    return examine(run, base, progress, Findings(findings))[0]


def examine(
    run: RunReader, base: str | Path | None, progress: Progress | None, found: Findings
) -> tuple[VerifyReport, DocumentAudit]:
    """As ``verify_run``, and return the document audit as well."""
    check_base_exists(base)
    with run.caching_manifests():
        documents = DocumentAudit(run)
        for finding in documents.findings:
            found.add(finding)
        signature = run.info.signature
        signed = None if signature is None else signature.key
        report = VerifyReport(
            findings=found.items, pointed=documents.pointed, signed=signed, checked=run.keyring.checks_signatures
        )
        check_files(run, report, found)
        good_sidecars = set[str]()
        report.replayed = True
        replay = ReplayAudit(run, documents, base, found, report)
        for version, manifest in replay.versions():
            replay.audit_version(version, manifest)
            if manifest is not None:
                check_sidecars(run, manifest, report, found, good_sidecars)
                report.head = version
            report.versions += 1
            if progress is not None:
                progress(report)
        replay.finish()
    if report.undecoded:
        report.notes.append(
            f"{len(report.undecoded)} documents of codec 'tiled' (the first is {report.undecoded[0]}) were read "
            "without their base bits, which are not available: digests, tables and declared fingerprints were checked, "
            "the changes themselves were not"
        )
    report.notes += _signature_notes(documents, report)
    behind = documents.pointed is None or documents.pointed < report.head
    if behind and not any(finding.key == "HEAD.json" for finding in found.items):
        what = "is missing" if documents.pointed is None else f"is behind: it names version {documents.pointed}"
        report.notes.append(f"HEAD.json {what}, the newest is {report.head}; readers still find the newest")
    return report, documents


def _signature_notes(documents: DocumentAudit, report: VerifyReport) -> list[str]:
    notes: list[str] = []
    if not report.checked:
        if report.signed is not None:
            notes.append(
                f"the run is signed by key {short(report.signed)}, and signatures were not checked: no trusted keys "
                "were given"
            )
        return notes
    expires = None if documents.head is None else documents.head.expires_at
    if expires is not None and has_passed(expires):
        # Not a failure: a run whose publisher has ended is complete, and only a receiver knows what it saw before.
        notes.append(
            f"HEAD.json expired at {expires}: its publisher has ended, or newer versions are being hidden; the newest "
            f"visible version is {report.head}"
        )
    return notes


def has_passed(moment: str) -> bool:
    """Return whether a document's expiry time has passed by this machine's clock; a malformed time counts as passed."""
    try:
        return datetime.fromisoformat(moment) < datetime.now(UTC)
    except ValueError:
        return True
