"""``delta-sync diff``: arguments and output; the work is done by ``maintenance.compare``."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_base,
    add_bucket,
    add_trust,
    exit_codes,
    opened,
    positive,
    version,
)
from vllm_delta_sync.cli.text import ProgressBar, many, percent, print_columns, print_fields, shape, size
from vllm_delta_sync.errors import UsageError

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.format.manifest import Manifest
    from vllm_delta_sync.format.table import TensorSpec

EXAMPLES = """\
Shows for each tensor how many elements have other bits, and the distance ‖new − old‖ / ‖old‖ in fp64. Elements that are
NaN or infinite on either side are counted, and are in no norm. Both versions are rebuilt and checked, in temporary
files: that takes the disk space of two models, and the memory of one tensor.

--quick reads only the deltas between two versions of one run, and shows how many elements they carry: no fewer than
have changed, and without norms.

examples:
  delta-sync diff head~1 head --bucket /data/runs/a
  delta-sync diff 0 tag:best --bucket /data/runs/a --top 50 --base /models/qwen3
  delta-sync diff 420 head --bucket /data/runs/a --other /data/runs/b --json
  delta-sync diff ago:1d head --bucket s3://bucket/runs/a --quick
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "diff",
        help="show which tensors changed between two versions, and how far",
        description="Show which tensors changed between two versions, how many elements, and how far in norm.",
        epilog=EXAMPLES + exit_codes("weights, objects or documents are damaged, or the runs have other tensors"),
    )
    parser.add_argument("old", type=version, metavar="A", help=f"the old version: {VERSION}")
    parser.add_argument("new", type=version, metavar="B", help=f"the new version: {VERSION}")
    add_bucket(parser)
    parser.add_argument("--other", metavar="URL", help="B is a version of this run, which must have the same tensors")
    parser.add_argument("--quick", action="store_true", help="only count what the deltas between A and B carry")
    parser.add_argument("--top", type=positive, default=20, metavar="N", help="tensors to list (default: 20)")
    add_base(parser)
    add_trust(parser)
    parser.set_defaults(handler=_diff)


def _diff(options: argparse.Namespace) -> Answer:
    if options.quick and options.other is not None:
        raise UsageError("--quick compares versions of one run; leave out --other, or --quick")
    run = opened(options)
    other = run if options.other is None else opened(options, url=options.other)
    old, new = run.resolve(options.old), other.resolve(options.new)
    document: dict[str, Any] = {"old": _side(run, old), "new": _side(other, new)}
    if options.quick:
        document |= _counted(run, old, new)
        return document, lambda: _print_counted(document, options.top)
    document |= _compared(run, old, other, new, options.base)
    return document, lambda: _print_compared(document, options.top)


def _side(run: "Run", manifest: "Manifest") -> dict[str, Any]:
    return {
        "run": run.info.run,
        "url": run.bucket.url,
        "version": manifest.version,
        "step": manifest.step,
        "fingerprint": manifest.fingerprint,
    }


def _compared(run: "Run", old: "Manifest", other: "Run", new: "Manifest", base: str | None) -> dict[str, Any]:
    from vllm_delta_sync.maintenance.compare import compare, relative_norm

    with ProgressBar("bytes") as bar:
        found = compare(run, old, other, new, base, bar.update)
    # Tensors that moved from zero first: there is no norm to compare with.
    changes = sorted(
        (change for change in found.changes if change.changed),
        key=lambda change: (-math.inf if change.relative is None else -change.relative, -change.changed),
    )
    return {
        "tensors": len(found.changes),
        "elements": run.table.total,
        "changed_tensors": len(changes),
        "changed": sum(change.changed for change in changes),
        "nonfinite_old": sum(change.nonfinite_old for change in found.changes),
        "nonfinite_new": sum(change.nonfinite_new for change in found.changes),
        "norm_change": _finite(found.norm_change),
        "norm_old": _finite(found.norm_old),
        "relative": relative_norm(found.norm_change, found.norm_old),
        "changes": [
            {
                **_tensor(change.spec),
                "changed": change.changed,
                "nonfinite_old": change.nonfinite_old,
                "nonfinite_new": change.nonfinite_new,
                "norm_change": _finite(change.norm_change),
                "norm_old": _finite(change.norm_old),
                "relative": change.relative,
            }
            for change in changes
        ],
        "read": {
            "objects": len(found.objects),
            "bytes": sum(ref.bytes for ref in found.objects),
            "bases": found.bases,
        },
    }


def _counted(run: "Run", old: "Manifest", new: "Manifest") -> dict[str, Any]:
    from vllm_delta_sync.maintenance.compare import count_carried

    with ProgressBar("bytes") as bar:
        carried, steps = count_carried(run, old.version, new.version, bar.update)
    rows = [{**_tensor(run.table[tensor]), "carried": count} for tensor, count in carried.items()]
    return {
        "tensors": len(run.table),
        "elements": run.table.total,
        "changed_tensors": len(rows),
        "carried": sum(carried.values()),
        "changes": sorted(rows, key=lambda row: -row["carried"] / row["elements"]),
        "read": {
            "objects": sum(len(step.objects) for step in steps),
            "bytes": sum(step.payload_bytes for step in steps),
            "documents": [step.key for step in steps],
        },
    }


def _tensor(spec: "TensorSpec") -> dict[str, Any]:
    return {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "elements": spec.numel}


def _finite(norm: float) -> float | None:
    """JSON has no infinity."""
    return norm if math.isfinite(norm) else None


def _norm(value: float | None) -> str:
    return "-" if value is None else f"{value:.3e}"


def _sides(document: dict[str, Any]) -> list[tuple[str, object]]:
    sides = [(name, document[name]) for name in ("old", "new")]
    return [(name, f"version {side['version']} (step {side['step']}) of {side['url']}") for name, side in sides]


def _print_compared(document: dict[str, Any], top: int) -> None:
    fields = [
        *_sides(document),
        ("tensors", f"{document['changed_tensors']:,} of {document['tensors']:,} changed"),
        ("elements", _share(document["changed"], document["elements"])),
        ("distance", f"{_norm(document['relative'])} of ‖old‖: {_norm(document['norm_change'])} of "
                     f"{_norm(document['norm_old'])}"),
    ]  # fmt: skip
    if document["nonfinite_old"] or document["nonfinite_new"]:
        counts = f"{document['nonfinite_old']:,} in the old version, {document['nonfinite_new']:,} in the new one"
        fields.append(("NaN or infinite", f"{counts}; they are in no norm"))
    print_fields(fields)
    _print_rows(
        ("tensor", "dtype", "shape", "changed", "share", "‖new − old‖", "‖old‖", "distance", "NaN or inf"),
        [
            (
                *_first(row, row["changed"]),
                *(_norm(row[name]) for name in ("norm_change", "norm_old", "relative")),
                _nonfinite(row),
            )
            for row in document["changes"]
        ],
        top,
    )
    read = document["read"]
    bases = f", and {many(read['bases'], 'base')}" if read["bases"] else ""
    print(f"read {many(read['objects'], 'object')}, {size(read['bytes'])}{bases}")


def _nonfinite(row: dict[str, Any]) -> str:
    old, new = row["nonfinite_old"], row["nonfinite_new"]
    return "-" if old == new == 0 else f"{old:,}" if old == new else f"{old:,} → {new:,}"


def _print_counted(document: dict[str, Any], top: int) -> None:
    print_fields(
        [
            *_sides(document),
            ("tensors", f"at most {document['changed_tensors']:,} of {document['tensors']:,} changed"),
            ("elements", "at most " + _share(document["carried"], document["elements"])),
        ]
    )
    rows = [_first(row, row["carried"]) for row in document["changes"]]
    _print_rows(("tensor", "dtype", "shape", "at most", "share"), rows, top)
    read = document["read"]
    counts = f"{many(len(read['documents']), 'delta')}: {many(read['objects'], 'object')}, {size(read['bytes'])}"
    print(f"read {counts}; no weights")


def _share(changed: int, elements: int) -> str:
    return f"{changed:,} of {elements:,} changed, {percent(changed, elements)}"


def _first(row: dict[str, Any], changed: int) -> tuple[object, ...]:
    return row["name"], row["dtype"], shape(row["shape"]), f"{changed:,}", percent(changed, row["elements"])


def _print_rows(titles: tuple[str, ...], rows: list[tuple[object, ...]], top: int) -> None:
    if rows:
        print()
        print_columns(titles, rows[:top], left=(0, 1, 2))
    if len(rows) > top:
        print(f"… {len(rows) - top} more; --json lists them")
    print()
