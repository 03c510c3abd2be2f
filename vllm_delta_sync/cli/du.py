"""``delta-sync du``, which ``maintenance.accounting`` computes."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, checking_history, opened, positive
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.gc import KEEP_LAST
from vllm_delta_sync.cli.text import ProgressBar, clean, many, percent, pick, print_columns, print_fields, size, times

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.maintenance.accounting import TensorAccount, VersionCost

SHOWN = 20


@command(
    "du",
    "show what a run costs in its bucket",
    *RUN,
    option("--last", type=positive, default=10, metavar="N", help="versions to list (default: 10)"),
    option(
        "--tensors",
        choices=("layer", "kind"),
        metavar="layer|kind",
        help="also show what the deltas of the listed versions carry, by layer or by kind of tensor",
    ),
    option("--keep-last", type=positive, metavar="N", help="what gc --keep-last N would remove"),
    option("--keep-every", type=positive, metavar="K", help="what gc --keep-every K would remove"),
    failed="a version is missing or damaged, or does not follow the one before it",
)
def du(options: argparse.Namespace) -> Report:
    """Show the bytes of a run by kind of object, by version and by tensor, against full checkpoints.

    Reads the manifests, anchors and merged deltas, and lists the bucket; each object counts once. With --tensors also
    the headers of the deltas of the listed versions. Tensors of one block of a delta are compressed together, so the
    bytes of a block are divided by changed elements. With --keep-last or --keep-every, also says what `delta-sync gc`
    with these arguments would remove, or why nothing. Removes nothing.

    examples:
      delta-sync du --bucket /data/runs/a
      delta-sync du --bucket /data/runs/a --last 100 --tensors layer
      delta-sync du --bucket s3://bucket/runs/a --keep-last 50 --keep-every 1000 --json
    """
    from vllm_delta_sync.maintenance.accounting import KINDS, account, tensor_costs

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
            "tensors": None,
            "gc": None,
            "read": {"manifests": len(found.versions), "documents": found.documents, "headers": 0},
        }
        if options.tensors:
            with ProgressBar("headers") as bar:
                costs = tensor_costs(run, [cost.manifest for cost in listed], options.tensors, bar.update)
            data["tensors"] = _tensors(costs, options.tensors)
            data["read"] |= {"headers": costs.objects, "header_bytes": costs.read}
        if found.versions and (options.keep_last is not None or options.keep_every is not None):
            data["gc"] = _gc(run, KEEP_LAST if options.keep_last is None else options.keep_last, options.keep_every)
    return Report(data, _print)


def _version(cost: "VersionCost") -> dict[str, Any]:
    stored = cost.stored
    return {
        **pick(cost.manifest, "version step kind changed total payload_bytes full_bytes"),
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
    groups = sorted(costs.groups.items(), key=lambda item: -item[1].bytes)
    return {
        "by": by,
        **pick(costs, "versions objects lost"),
        "groups": [{"group": name, **vars(group)} for name, group in groups],
        "headers_bytes": costs.rest,
    }


def _gc(run: "Run", keep_last: int, keep_every: int | None) -> dict[str, Any]:
    from vllm_delta_sync.maintenance.gc.collect import RetentionPolicy, collect

    report = collect(run, RetentionPolicy(keep_last=keep_last, keep_every=keep_every), dry_run=True)
    return {
        "keep_last": keep_last,
        "keep_every": keep_every,
        **{name: len(getattr(report, name)) for name in ("kept", "objects", "anchors", "merged_deltas", "sidecars")},
        **pick(report, "bytes nothing_because notes"),
        "lost": list(report.lost),
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
        print("unnamed: named by nothing: left by a crash, or being uploaded; gc removes them")
    for row in data["unreadable"]:
        print(clean(f"unreadable, so what it names counts as unnamed: {row['key']}: {row['reason']}"))
    for rows, show in ((data["last"], _print_versions), (data["tensors"], _print_tensors), (data["gc"], _print_gc)):
        if rows:
            print()
            show(rows)
    read = data["read"]
    headers = "no objects" if not read["headers"] else f"{many(read['headers'], 'header')} of objects"
    print(f"\nread {many(read['manifests'], 'manifest')}, {many(read['documents'], 'other document')}, {headers}")


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


def _print_tensors(tensors: dict[str, Any]) -> None:
    rows = tensors["groups"]
    whole = sum(row["bytes"] for row in rows) + tensors["headers_bytes"]
    cells = [
        (
            row["group"],
            row["tensors"],
            size(row["full_bytes"]),
            f"{row['carried']:,}",
            percent(row["carried"], row["elements"] * tensors["versions"]),
            size(row["bytes"]),
            percent(row["bytes"], whole),
        )
        for row in rows
    ]
    print_columns((tensors["by"], "tensors", "full", "carried", "changed", "in deltas", "share"), cells, most=SHOWN)
    lost = f"; {many(tensors['lost'], 'object')} no longer stored" if tensors["lost"] else ""
    print(
        f"{many(tensors['objects'], 'object')} of {many(tensors['versions'], 'delta')}; their headers take "
        f"{size(tensors['headers_bytes'])}{lost}"
    )


def _print_gc(data: dict[str, Any]) -> None:
    every = "" if data["keep_every"] is None else f" --keep-every {data['keep_every']}"
    kinds = ("object", "anchor", "merged delta", "sidecar")
    counts = ", ".join(many(data[f"{kind.replace(' ', '_')}s"], kind) for kind in kinds)
    lost = f"{many(len(data['lost']), 'version')} cannot be rebuilt; run delta-sync repair" if data["lost"] else None
    print_fields(
        (f"gc --keep-last {data['keep_last']}{every}", f"would free {size(data['bytes'])}: {counts}"),
        ("LOST", lost),
        *(("nothing, because", reason) for reason in data["nothing_because"]),
        notes=data["notes"],
    )
