"""``delta-sync du``, which ``maintenance.accounting`` computes."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, checking_history, opened, positive
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, many, percent, pick, print_columns, print_fields, size, times

if TYPE_CHECKING:
    from vllm_delta_sync.maintenance.accounting import VersionCost


@command(
    "du",
    "show what a run costs in its bucket",
    *RUN,
    option("--last", type=positive, default=10, metavar="N", help="versions to list (default: 10)"),
    failed="a version is missing or damaged, or does not follow the one before it",
)
def du(options: argparse.Namespace) -> Report:
    """Show the bytes of a run by kind of object and by version, against full checkpoints.

    Reads the manifests, anchors and merged deltas, and lists the bucket; each object counts once. Removes nothing;
    `delta-sync gc --dry-run` says what a collection would remove.

    examples:
      delta-sync du --bucket /data/runs/a
      delta-sync du --bucket s3://bucket/runs/a --last 100 --json
    """
    from vllm_delta_sync.maintenance.accounting import KINDS, account

    run = opened(options)
    with run.caching_manifests(), checking_history(run):
        with ProgressBar("manifests") as bar:
            found = account(run, bar.update)
        listed = found.versions[-options.last :]
        data: dict[str, Any] = {
            "run": run.info.run,
            "url": run.bucket.url,
            "bytes": found.bytes.total(),
            "objects": found.counts.total(),
            "kinds": [
                {"kind": kind, "objects": found.counts[kind], "bytes": found.bytes[kind]}
                for kind in KINDS
                if found.counts[kind]
            ],
            "versions": len(found.versions),
            "collected": sum(cost.lost > 0 for cost in found.versions),
            "full_bytes": found.full_bytes,
            "last": [_version(cost) for cost in listed],
            "unreadable": [{"key": key, "reason": reason} for key, reason in found.unreadable.items()],
            "read": {"manifests": len(found.versions), "documents": found.documents},
        }
    return Report(data, _print)


def _version(cost: "VersionCost") -> dict[str, Any]:
    stored = Counter(cost.stored)
    return {
        **pick(cost.row, "version step kind changed total payload_bytes full_bytes"),
        "stored": {
            "objects": stored["deltas"] + stored["anchors"],
            "standalone_anchor": stored["standalone anchors"],
            "sidecars": stored["sidecars"],
            "manifest": stored["manifests"],
        },
        "stored_bytes": stored.total(),
        "lost": cost.lost,
    }


def _print(data: dict[str, Any]) -> None:
    versions, collected, full = data["versions"], data["collected"], data["full_bytes"]
    print_fields(
        ("run", data["run"]),
        ("url", data["url"]),
        ("in the bucket", f"{size(data['bytes'])} in {many(data['objects'], 'object')}"),
        ("versions", f"{versions:,}" + (f", {collected:,} without objects of their own" if collected else "")),
        ("full checkpoints", f"{size(full)}, {times(full, data['bytes'])} what is in the bucket"),
    )
    print()
    print_columns(
        ("kind", "objects", "size", "share"),
        [
            (row["kind"], f"{row['objects']:,}", size(row["bytes"]), percent(row["bytes"], data["bytes"]))
            for row in data["kinds"]
        ],
    )
    if any(row["kind"] == "unnamed" for row in data["kinds"]):
        print(
            "unnamed: named by nothing: left by a crash, or being uploaded; gc removes those in objects/ and sidecars/"
        )
    for row in data["unreadable"]:
        print(clean(f"unreadable, so what it names counts as unnamed: {row['key']}: {row['reason']}"))
    if data["last"]:
        print()
        _print_versions(data["last"])
    read = data["read"]
    print(f"\nread {many(read['manifests'], 'manifest')}, {many(read['documents'], 'other document')}, no objects")


def _print_versions(rows: list[dict[str, Any]]) -> None:
    titles = ("version", "step", "kind", "changed", "objects", "sidecars", "manifest", "anchor", "in all", "smaller")
    cells = [
        (
            row["version"],
            row["step"],
            row["kind"] + (", collected" if row["lost"] else ""),
            percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
            *(
                size(row["stored"][part]) if row["stored"][part] else "-"
                for part in ("objects", "sidecars", "manifest", "standalone_anchor")
            ),
            size(row["stored_bytes"]),
            times(row["full_bytes"], row["stored_bytes"]) if row["kind"] != "reference" else "-",
        )
        for row in rows
    ]
    print_columns(titles, cells, left=(2,))
