"""``delta-sync verify``: arguments and output; the work is done by ``verify.verify``."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_base,
    add_bucket,
    add_trust,
    exit_codes,
    failed_check,
    opened,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, print_fields, size
from vllm_delta_sync.errors import BaseUnavailableError, DeltaSyncError
from vllm_delta_sync.verify.report import Finding, Findings

EXAMPLES = """\
Stops at the first problem, and names version, object and tensor; --all lists all problems. With trusted keys, each
document must have a valid signature; without them, signatures are not checked. An expired HEAD.json is noted: it means
that the publisher has ended, or that an attacker hides newer versions. `delta-sync repair` repairs what it can.

examples:
  delta-sync verify --bucket /data/runs/a
  delta-sync verify --bucket /data/runs/a --base /models/qwen3 --json
  delta-sync verify --bucket /data/runs/a --all
  delta-sync verify --bucket /data/runs/a --trusted-keys trainer.key.pub
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "verify",
        help="check a run from version 0 to the head",
        description="Read and check all of a run: history, signatures, digests, the model's files, contents of "
        "objects, anchors, merged deltas, and the fingerprint of every version against the rebuilt weights.",
        epilog=EXAMPLES + exit_codes("a problem was found, also a missing object or manifest", "no problem was found"),
    )
    add_bucket(parser)
    add_base(parser)
    add_trust(parser)
    parser.add_argument("--all", action="store_true", help="list every problem, not only the first")
    parser.set_defaults(handler=_verify)


def _verify(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.verify.verify import examine

    run = opened(options)
    found = Findings(options.all)
    versions = max(run.versions(), default=0) + 1
    try:
        with ProgressBar("versions") as bar:
            report, audit = examine(
                run, options.base, lambda so_far: bar.update(so_far.versions, versions, size(so_far.bytes)), found
            )
    except DeltaSyncError as error:
        if found.contains(error) or isinstance(error, BaseUnavailableError):
            raise failed_check(error) from error
        raise
    document: dict[str, Any] = {
        "verdict": not report.findings,
        "run": run.info.run,
        "url": run.bucket.url,
        "versions": report.versions,
        "head": report.head,
        "fingerprint": audit.manifests[report.head].fingerprint if report.head in audit.manifests else None,
        "files": report.files,
        "objects": report.objects,
        "sidecars": report.sidecars,
        "bytes": report.bytes,
        "replayed": report.replayed,
        "anchors": report.anchors,
        "merged_deltas": report.merged_deltas,
        "gone": report.gone,
        "signed_by": report.signed,
        "signatures_checked": report.checked,
        "undecoded": report.undecoded,
        "notes": report.notes,
    }
    if options.all:
        document["unreadable"] = report.unreadable
        document["findings"] = [_problem(finding) for finding in report.findings]
    if report.findings:
        raise CommandFailedError(report.findings[0].error, document, lambda: _print(document))
    return document, lambda: _print(document)


def _problem(finding: Finding) -> dict[str, Any]:
    return {
        "key": finding.key,
        "document": finding.document,
        "version": finding.version,
        "tensor": finding.tensor,
        "kind": finding.error.kind,
        "message": finding.error.message,
    }


def _print(document: dict[str, Any]) -> None:
    """Print the verdict, and what was checked."""
    findings = document.get("findings", [])
    if findings:
        for row in findings:
            print(clean(f"{row['kind']}: {row['message']}"))
        print()
    fields: list[tuple[str, object]] = [
        ("verdict", "ok" if document["verdict"] else f"{len(findings)} problems"),
        ("run", document["run"]),
        ("versions", f"0 to {document['head']}" + (": history and digests are valid" if document["verdict"] else "")),
        ("objects", _objects(document)),
    ]
    if document["verdict"]:
        fields.append(("weights", _weights(document)))
    if document["signatures_checked"] and document["verdict"]:
        fields.append(("signatures", "of every document are valid"))
    if document["files"]:
        fields.append(("files", f"{document['files']} of the model are undamaged"))
    if document["sidecars"]:
        fields.append(("sidecars", f"{document['sidecars']} are undamaged"))
    if document["anchors"] or document["merged_deltas"]:
        fields.append(
            ("standalone", f"{document['anchors']} anchors and {document['merged_deltas']} merged deltas are valid")
        )
    if document["gone"]:
        fields.append(("removed", f"own objects of {document['gone']} versions, by gc"))
    if document.get("unreadable"):
        from vllm_delta_sync.maintenance.gc.record import spelled

        fields.append(("unreadable", f"versions {spelled(document['unreadable'])}"))
    fields.append(("fingerprint", document["fingerprint"] or "none"))
    print_fields(fields + [("note", note) for note in document["notes"]])


def _objects(document: dict[str, Any]) -> str:
    counted = f"{document['objects']}, {size(document['bytes'])}"
    return f"{counted}: complete, undamaged, well-formed" if document["verdict"] else f"{counted} are undamaged"


def _weights(document: dict[str, Any]) -> str:
    if not document["replayed"]:
        return "not rebuilt; the declared changes match the fingerprints"
    return "rebuilt, and equal to the fingerprint of every version" + (" that is kept" if document["gone"] else "")
