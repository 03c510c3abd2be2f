"""``delta-sync du``: arguments and output; the work is done by ``maintenance.accounting``."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    add_bucket,
    add_trust,
    checking_history,
    exit_codes,
    opened,
    positive,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, many, percent, print_columns, print_fields, size, times

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.maintenance.accounting import TensorAccount, VersionCost

SHOWN = 20
GC_FLAGS = ("keep_last", "keep_every")
UNNAMED = "named by nothing: left by a crash, or being uploaded; gc removes them"

EXAMPLES = """\
Reads the manifests, anchors and merged deltas, and lists the bucket; each object counts once. With --tensors also the
headers of the deltas of the listed versions. Tensors of one block of a delta are compressed together, so the bytes of a
block are divided by changed elements. With --keep-last or --keep-every, also says what `delta-sync gc` with these
arguments would remove, or why nothing. Removes nothing.

examples:
  delta-sync du --bucket /data/runs/a
  delta-sync du --bucket /data/runs/a --last 100 --tensors layer
  delta-sync du --bucket s3://bucket/runs/a --keep-last 50 --keep-every 1000 --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "du",
        help="show what a run costs in its bucket",
        description="Show the bytes of a run by kind of object, by version and by tensor, against full checkpoints.",
        epilog=EXAMPLES + exit_codes("a version is missing or damaged, or does not follow the one before it"),
    )
    add_bucket(parser)
    add_trust(parser)
    parser.add_argument("--last", type=positive, default=10, metavar="N", help="versions to list (default: 10)")
    parser.add_argument(
        "--tensors",
        choices=("layer", "kind"),
        metavar="layer|kind",
        help="also show what the deltas of the listed versions carry, by layer or by kind of tensor",
    )
    parser.add_argument("--keep-last", type=positive, metavar="N", help="what gc --keep-last N would remove")
    parser.add_argument("--keep-every", type=positive, metavar="K", help="what gc --keep-every K would remove")
    parser.set_defaults(handler=_du)


def _du(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.accounting import KINDS, account, tensor_costs

    run = opened(options)
    document: dict[str, Any] = {"run": run.info.run, "url": run.bucket.url}
    with run.caching_manifests(), checking_history(run):
        with ProgressBar("manifests") as bar:
            found = account(run, bar.update)
        listed = found.versions[-options.last :]
        document |= {
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
            "tensors": None,
            "gc": None,
        }
        read: dict[str, int] = {"manifests": len(found.versions), "documents": found.documents, "headers": 0}
        if options.tensors:
            with ProgressBar("headers") as bar:
                costs = tensor_costs(run, [cost.manifest for cost in listed], options.tensors, bar.update)
            document["tensors"] = _tensors(costs, options.tensors)
            read |= {"headers": costs.objects, "header_bytes": costs.read}
        if found.versions and any(getattr(options, flag) is not None for flag in GC_FLAGS):
            document["gc"] = _gc(run, options)
    document["read"] = read
    return document, lambda: _print(document)


def _version(cost: "VersionCost") -> dict[str, Any]:
    manifest, stored = cost.manifest, cost.stored
    return {
        "version": manifest.version,
        "step": manifest.step,
        "kind": manifest.kind,
        "changed": manifest.changed,
        "total": manifest.total,
        "payload_bytes": manifest.payload_bytes,
        "full_bytes": manifest.full_bytes,
        "stored": {
            "objects": stored["deltas"] + stored["anchors"],
            "standalone_anchor": stored["standalone anchors"],
            "sidecars": stored["sidecars"],
            "manifest": stored["manifests"],
        },
        "stored_bytes": stored.total(),
        "lost": cost.lost,
    }


def _tensors(costs: "TensorAccount", by: str) -> dict[str, Any]:
    rows = [
        {
            "group": name,
            "tensors": group.tensors,
            "full_bytes": group.full_bytes,
            "elements": group.elements,
            "carried": group.carried,
            "bytes": group.bytes,
        }
        for name, group in sorted(costs.groups.items(), key=lambda item: -item[1].bytes)
    ]
    return {
        "by": by,
        "versions": costs.versions,
        "objects": costs.objects,
        "lost": costs.lost,
        "groups": rows,
        "headers_bytes": costs.rest,
    }


def _gc(run: "Run", options: argparse.Namespace) -> dict[str, Any]:
    from vllm_delta_sync.cli.gc import KEEP_LAST
    from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect

    keep_last = KEEP_LAST if options.keep_last is None else options.keep_last
    report = collect(run, RetentionPolicy(keep_last=keep_last, keep_every=options.keep_every), dry_run=True)
    return {
        "keep_last": keep_last,
        "keep_every": options.keep_every,
        "kept": len(report.kept),
        "objects": len(report.objects),
        "anchors": len(report.anchors),
        "merged_deltas": len(report.merged_deltas),
        "sidecars": len(report.sidecars),
        "bytes": report.bytes,
        "lost": list(report.lost),
        "nothing_because": report.nothing_because,
        "notes": report.notes,
    }


def _print(document: dict[str, Any]) -> None:
    versions, collected = document["versions"], document["collected"]
    full = document["full_bytes"]
    fields: list[tuple[str, object]] = [
        ("run", document["run"]),
        ("url", document["url"]),
        ("in the bucket", f"{size(document['bytes'])} in {many(document['objects'], 'object')}"),
        ("versions", f"{versions:,}" + (f", {collected:,} without objects of their own" if collected else "")),
        ("full checkpoints", f"{size(full)}, {times(full, document['bytes'])} what is in the bucket"),
    ]
    print_fields(fields)
    print()
    print_columns(
        ("kind", "objects", "size", "share"),
        [
            (row["kind"], f"{row['objects']:,}", size(row["bytes"]), percent(row["bytes"], document["bytes"]))
            for row in document["kinds"]
        ],
    )
    if any(row["kind"] == "unnamed" for row in document["kinds"]):
        print(f"unnamed: {UNNAMED}")
    for row in document["unreadable"]:
        print(clean(f"unreadable, so what it names counts as unnamed: {row['key']}: {row['reason']}"))
    if document["last"]:
        print()
        _print_versions(document["last"])
    if document["tensors"]:
        print()
        _print_tensors(document["tensors"])
    if document["gc"]:
        print()
        _print_gc(document["gc"])
    print()
    read = document["read"]
    headers = "no objects" if not read["headers"] else f"{many(read['headers'], 'header')} of objects"
    print(f"read {many(read['manifests'], 'manifest')}, {many(read['documents'], 'other document')}, {headers}")


def _print_versions(rows: list[dict[str, Any]]) -> None:
    titles = ("version", "step", "kind", "changed", "objects", "sidecars", "manifest", "anchor", "in all", "smaller")
    cells = []
    for row in rows:
        stored = row["stored"]
        parts = (stored["objects"], stored["sidecars"], stored["manifest"], stored["standalone_anchor"])
        cells.append(
            (
                row["version"],
                row["step"],
                row["kind"] + (", collected" if row["lost"] else ""),
                percent(row["changed"], row["total"]) if row["kind"] == "delta" else "-",
                *(size(part) if part else "-" for part in parts),
                size(row["stored_bytes"]),
                times(row["full_bytes"], row["stored_bytes"]) if row["kind"] != "reference" else "-",
            )
        )
    print_columns(titles, cells, left=(2,))


def _print_tensors(document: dict[str, Any]) -> None:
    rows = document["groups"]
    whole = sum(row["bytes"] for row in rows) + document["headers_bytes"]
    cells = [
        (
            row["group"],
            row["tensors"],
            size(row["full_bytes"]),
            f"{row['carried']:,}",
            percent(row["carried"], row["elements"] * document["versions"]),
            size(row["bytes"]),
            percent(row["bytes"], whole),
        )
        for row in rows[:SHOWN]
    ]
    titles = (document["by"], "tensors", "full", "carried", "changed", "in deltas", "share")
    print_columns(titles, cells)
    if len(rows) > SHOWN:
        print(f"… {len(rows) - SHOWN} more; --json lists them")
    lost = f"; {many(document['lost'], 'object')} no longer stored" if document["lost"] else ""
    print(
        f"{many(document['objects'], 'object')} of {many(document['versions'], 'delta')}; their headers take "
        f"{size(document['headers_bytes'])}{lost}"
    )


def _print_gc(document: dict[str, Any]) -> None:
    every = "" if document["keep_every"] is None else f" --keep-every {document['keep_every']}"
    counts = (
        f"{many(document['objects'], 'object')}, {many(document['anchors'], 'anchor')}, "
        f"{many(document['merged_deltas'], 'merged delta')}, {many(document['sidecars'], 'sidecar')}"
    )
    fields: list[tuple[str, object]] = [
        (f"gc --keep-last {document['keep_last']}{every}", f"would free {size(document['bytes'])}: {counts}")
    ]
    if document["lost"]:
        fields.append(("LOST", f"{many(len(document['lost']), 'version')} cannot be rebuilt; run delta-sync repair"))
    fields += [("nothing, because", reason) for reason in document["nothing_because"]]
    print_fields([*fields, *(("note", note) for note in document["notes"])])
