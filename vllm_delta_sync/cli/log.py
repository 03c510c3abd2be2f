"""``delta-sync log``, and what ``log`` and ``inspect`` show of a version."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import LAST, RUN, as_finding, checking_history, last_count, opened
from vllm_delta_sync.cli.command import Report, command
from vllm_delta_sync.cli.text import percent, pick, print_columns, print_error, size, times
from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.trust.keyring import short

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.format.manifest import Manifest, RunInfo

Document = dict[str, Any]


@command(
    "log",
    "list the versions of a run",
    *RUN,
    LAST,
    failed="a version is missing or damaged, or does not follow the one before it",
)
def log(options: argparse.Namespace) -> Report:
    """List the versions of a run, oldest first, and check that each follows the one before it; with --last, check
    only the listed ones and the one before them.

    examples:
      delta-sync log --bucket /data/runs/a
      delta-sync log --bucket /data/runs/a --last 5 --json
      delta-sync log --bucket /data/runs/a --last 1h
    """
    run = opened(options)
    with run.caching_manifests():
        data, failure = log_document(run, last_count(run, options.last))
    if failure is not None and not isinstance(failure, StoreError):
        as_finding(failure)

    def show(data: Document) -> None:
        _print(data)
        if failure is not None:
            print_error(failure)

    return Report(data, show, failure)


def log_document(run: "Run", last: int | None) -> tuple[Document, DeltaSyncError | None]:
    """Return the versions of a run, oldest first, and the error with the head or after the last listed version, if any.

    Raises:
        NotFoundError: nothing is published. StoreError: the store failed before anything was read.
    """
    versions: list[Document] = []
    with checking_history(run):
        head, failure = run.reachable_head()
    try:
        for manifest in run.log(last, head):
            versions.append(summary(run, manifest))
    except DeltaSyncError as error:
        failure = error
    return {"run": run.info.run, "url": run.bucket.url, "versions": versions}, failure


def summary(run: "Run", manifest: "Manifest") -> Document:
    """What ``delta-sync log`` and ``delta-sync inspect`` show of a version."""
    return {
        **pick(manifest, "version step kind base_version codec compression changed total payload_bytes full_bytes"),
        **pick(manifest, "fingerprint created_at"),
        "changed_share": manifest.changed / manifest.total if manifest.total else 0.0,
        "objects": len(manifest.objects),
        "sidecars": len(manifest.sidecars),
        **signed(run, manifest),
        "quarantined": [] if manifest.quarantine is None else manifest.quarantine.reasons,
        "held_back": None if manifest.held_back is None else manifest.held_back.model_dump(),
    }


def signed(run: "Run", document: "RunInfo | Manifest") -> Document:
    """Return the signing key, and whether its signature is valid (None without trusted keys to check it)."""
    key = None if document.signature is None else document.signature.key
    return {"signed_by": key, "signature_holds": True if run.keyring.checks_signatures else None}


def describe(document: Document) -> list[tuple[str, str]]:
    """Return rows about a version: why it is quarantined, and how far it is from the trainer's weights, if it is."""
    rows = [("quarantined", reason) for reason in document["quarantined"]]
    held = document["held_back"]
    if held is not None:
        far = "unknown" if held["relative_norm"] is None else f"{held['relative_norm']:.3g}"
        text = f"{held['elements']:,} elements, relative distance {far}; exact: version {held['exact']}"
        rows.append(("held back", text))
    return rows


def describe_signature(document: Document) -> str:
    """Return the fields of ``signed`` in words."""
    if document["signed_by"] is None:
        return "no"
    return f"by key {short(document['signed_by'])}, " + ("valid" if document["signature_holds"] else "not checked")


def _print(data: Document) -> None:
    """Print one line per version; signers and sidecars only where there are any."""
    versions = data["versions"]
    titles = ["version", "step", "kind", "changed", "payload", "smaller", "fingerprint", "created"]
    rows: list[list[object]] = [
        [
            row["version"],
            row["step"],
            row["kind"] + (", not exact" if row["held_back"] else "") + (", quarantined" if row["quarantined"] else ""),
            percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
            size(row["payload_bytes"]),
            times(row["full_bytes"], row["payload_bytes"]),
            row["fingerprint"][:12],
            row["created_at"],
        ]
        for row in versions
    ]
    left = [2, 6, 7]
    is_signed = any(row["signed_by"] for row in versions)
    if is_signed:
        left.append(len(titles))
        titles.append("signed by")
        for cells, row in zip(rows, versions, strict=True):
            cells.append(short(row["signed_by"] or "-"))
    if any(row["sidecars"] for row in versions):
        titles.append("sidecars")
        for cells, row in zip(rows, versions, strict=True):
            cells.append(row["sidecars"])
    print_columns(titles, rows, left)
    if is_signed and not any(row["signature_holds"] for row in versions):
        print("signatures were not checked: no trusted keys were given")
