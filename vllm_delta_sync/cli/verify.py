"""``delta-sync verify``, which ``verify.verify`` does."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import BASE, RUN, as_finding, opened
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, many, pick, print_fields, size
from vllm_delta_sync.errors import BaseUnavailableError, DeltaSyncError


@command(
    "verify",
    "check a run from version 0 to the head",
    *RUN,
    BASE,
    option("--all", action="store_true", help="list every problem, not only the first"),
    failed="a problem was found, also a missing object or manifest",
    done="no problem was found",
)
def verify(options: argparse.Namespace) -> Report:
    """Read and check all of a run: history, signatures, digests, the model's files, contents of objects, anchors,
    merged deltas, and the fingerprint of every version against the rebuilt weights.

    Stops at the first problem, and names the version and the object or document, or the tensor if weights are not as
    declared; --all lists all problems. With trusted keys, each document must have a valid signature; without them,
    signatures are not checked. An expired HEAD.json is noted: it means that the publisher has ended, or that an
    attacker hides newer versions. `delta-sync repair` repairs what it can.

    examples:
      delta-sync verify --bucket /data/runs/a
      delta-sync verify --bucket /data/runs/a --base /models/qwen3 --json
      delta-sync verify --bucket /data/runs/a --all
      delta-sync verify --bucket /data/runs/a --trusted-keys trainer.key.pub
    """
    from vllm_delta_sync.verify.report import Findings
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
        if any(finding.error is error for finding in found.items) or isinstance(error, BaseUnavailableError):
            as_finding(error)
        raise
    data = {
        "verdict": not report.findings,
        "run": run.info.run,
        "url": run.bucket.url,
        **pick(report, "versions head files objects sidecars bytes replayed anchors merged_deltas gone"),
        **pick(report, "undecoded notes"),
        "fingerprint": audit.manifests[report.head].fingerprint if report.head in audit.manifests else None,
        "signed_by": report.signed,
        "signatures_checked": report.checked,
    }
    if options.all:
        data["unreadable"] = report.unreadable
        data["findings"] = [
            {**pick(finding, "key document version tensor"), **pick(finding.error, "kind message")}
            for finding in report.findings
        ]
    return Report(data, _print, as_finding(report.findings[0].error) if report.findings else None)


def _print(data: dict[str, Any]) -> None:
    """Print the verdict, and what was checked."""
    from vllm_delta_sync.maintenance.gc.record import spelled

    findings = data.get("findings", [])
    for row in findings:
        print(clean(f"{row['kind']}: {row['message']}"))
    if findings:
        print()
    good = data["verdict"]
    objects = f"{data['objects']}, {size(data['bytes'])}"
    weights = "not rebuilt; the declared changes match the fingerprints"
    if data["replayed"]:
        weights = "rebuilt, and equal to the fingerprint of every version" + (" that is kept" if data["gone"] else "")
    standalone = f"{data['anchors']} anchors and {data['merged_deltas']} merged deltas are valid"
    unreadable = data.get("unreadable")
    print_fields(
        ("verdict", "ok" if good else many(len(findings), "problem")),
        ("run", data["run"]),
        ("versions", f"0 to {data['head']}" + (": history and digests are valid" if good else "")),
        ("objects", f"{objects}: complete, undamaged, well-formed" if good else f"{objects} are undamaged"),
        ("weights", weights if good else None),
        ("signatures", "of every document are valid" if good and data["signatures_checked"] else None),
        ("files", f"{data['files']} of the model are undamaged" if data["files"] else None),
        ("sidecars", f"{data['sidecars']} are undamaged" if data["sidecars"] else None),
        ("standalone", standalone if data["anchors"] or data["merged_deltas"] else None),
        ("removed", f"own objects of {data['gone']} versions, by gc" if data["gone"] else None),
        ("unreadable", f"versions {spelled(unreadable)}" if unreadable else None),
        ("fingerprint", data["fingerprint"] or "none"),
        notes=data["notes"],
    )
