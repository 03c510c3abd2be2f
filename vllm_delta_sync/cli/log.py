"""``delta-sync log``: arguments, output, and the document for ``--json``."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_bucket,
    add_last,
    add_trust,
    exit_codes,
    failed_check,
    last_count,
    opened,
)
from vllm_delta_sync.cli.text import percent, print_columns, print_error, size, times
from vllm_delta_sync.errors import DeltaSyncError, NotFoundError, StoreError
from vllm_delta_sync.trust.keyring import short

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.format.manifest import Manifest, RunInfo

Document = dict[str, Any]


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    log = commands.add_parser(
        "log",
        help="list the versions of a run",
        description="List the versions of a run, oldest first, and check that each follows the one before it; with "
        "--last, check only the listed ones and the one before them.",
        epilog="examples:\n  delta-sync log --bucket /data/runs/a\n"
        "  delta-sync log --bucket /data/runs/a --last 5 --json\n"
        "  delta-sync log --bucket /data/runs/a --last 1h\n"
        + exit_codes("a version is missing or damaged, or does not follow the one before it"),
    )
    add_bucket(log)
    add_trust(log)
    add_last(log)
    log.set_defaults(handler=_log)


def _log(options: argparse.Namespace) -> Answer:
    run = opened(options)
    with run.caching_manifests():
        document, failure = log_document(run, last_count(run, options.last))
    if failure is not None:
        error = failure  # mypy does not narrow it in the function below

        def show() -> None:
            print_log(document)
            print_error(error)

        raise CommandFailedError(error, document, show, error.exit_code if isinstance(error, StoreError) else 1)
    return document, lambda: print_log(document)


def log_document(run: "Run", last: int | None) -> tuple[Document, DeltaSyncError | None]:
    """Return the versions of a run, oldest first, and the error with the head or after the last listed version, if any.

    Raises:
        NotFoundError: nothing is published. StoreError: the store failed before anything was read.
    """
    versions: list[Document] = []
    try:
        head, failure = run.reachable_head()
    except NotFoundError as error:
        if run.pointer is not None:
            raise failed_check(error) from error  # HEAD.json shows that something was published
        raise
    try:
        for manifest in run.log(last, head):
            versions.append(summary(run, manifest))
    except DeltaSyncError as error:
        failure = error
    return {"run": run.info.run, "url": run.bucket.url, "versions": versions}, failure


def summary(run: "Run", manifest: "Manifest") -> Document:
    """What ``delta-sync log`` and ``delta-sync inspect`` show of a version."""
    return {
        "version": manifest.version,
        "step": manifest.step,
        "kind": manifest.kind,
        "base_version": manifest.base_version,
        "codec": manifest.codec,
        "compression": manifest.compression,
        "changed": manifest.changed,
        "total": manifest.total,
        "changed_share": manifest.changed / manifest.total if manifest.total else 0.0,
        "payload_bytes": manifest.payload_bytes,
        "full_bytes": manifest.full_bytes,
        "objects": len(manifest.objects),
        "sidecars": len(manifest.sidecars),
        "fingerprint": manifest.fingerprint,
        "created_at": manifest.created_at,
        **signed(run, manifest),
        "quarantined": [] if manifest.quarantine is None else manifest.quarantine.reasons,
        "held_back": None if manifest.held_back is None else manifest.held_back.model_dump(),
    }


def signed(run: "Run", document: "RunInfo | Manifest") -> Document:
    """Return the signing key, and whether its signature is valid (None without trusted keys to check it)."""
    key = None if document.signature is None else document.signature.key
    return {"signed_by": key, "signature_holds": True if run.keyring.checks_signatures else None}


def describe_signature(document: Document) -> str:
    """Return the fields of ``signed`` in words."""
    if document["signed_by"] is None:
        return "no"
    return f"by key {short(document['signed_by'])}, " + ("valid" if document["signature_holds"] else "not checked")


def describe_held_back(document: Document) -> list[tuple[str, str]]:
    """Return a row that says how far a version is from the trainer's weights; none if it is exact."""
    held = document["held_back"]
    if held is None:
        return []
    far = "unknown" if held["relative_norm"] is None else f"{held['relative_norm']:.3g}"
    return [("held back", f"{held['elements']:,} elements, relative distance {far}; exact: version {held['exact']}")]


def print_log(document: Document) -> None:
    """Print one line per version."""
    rows: list[tuple[object, ...]] = [
        (
            row["version"],
            row["step"],
            row["kind"] + (", not exact" if row["held_back"] else "") + (", quarantined" if row["quarantined"] else ""),
            percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
            size(row["payload_bytes"]),
            times(row["full_bytes"], row["payload_bytes"]),
            row["fingerprint"][:12],
            row["created_at"],
        )
        for row in document["versions"]
    ]
    titles: tuple[str, ...] = ("version", "step", "kind", "changed", "payload", "smaller", "fingerprint", "created")
    signers = [row["signed_by"] for row in document["versions"]]
    if any(signers):
        titles = (*titles, "signed by")
        rows = [(*row, short(key or "-")) for row, key in zip(rows, signers, strict=True)]
    counts = [row["sidecars"] for row in document["versions"]]
    if any(counts):
        titles = (*titles, "sidecars")
        rows = [(*row, count) for row, count in zip(rows, counts, strict=True)]
    print_columns(titles, rows, left=(2, 6, 7, *([8] if any(signers) else [])))
    if any(signers) and not any(row["signature_holds"] for row in document["versions"]):
        print("signatures were not checked: no trusted keys were given")
