"""``delta-sync diff``, which ``maintenance.compare`` computes."""

import argparse
import math
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import BASE, RUN, VERSION, opened, positive, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, known, many, percent, pick, print_columns, print_fields, shape, size

if TYPE_CHECKING:
    from vllm_delta_sync.client import Run
    from vllm_delta_sync.format.manifest import Manifest
    from vllm_delta_sync.format.table import TensorSpec


@command(
    "diff",
    "show which tensors changed between two versions, and how far",
    option("old", type=version, metavar="A", help=f"the old version: {VERSION}"),
    option("new", type=version, metavar="B", help=f"the new version: {VERSION}"),
    *RUN,
    option("--other", metavar="URL", help="B is a version of this run, which must have the same tensors"),
    option("--top", type=positive, default=20, metavar="N", help="tensors to list (default: 20)"),
    BASE,
    failed="weights, objects or documents are damaged, or the runs have other tensors",
)
def diff(options: argparse.Namespace) -> Report:
    """Show which tensors changed between two versions, how many elements, and how far in norm.

    Shows for each tensor how many elements have other bits, and the distance ‖new − old‖ / ‖old‖ in fp64. Elements
    that are NaN or infinite on either side are counted, and are in no norm. Both versions are rebuilt and checked, in
    temporary files: that takes the disk space of two models, and the memory of one tensor.

    examples:
      delta-sync diff head~1 head --bucket /data/runs/a
      delta-sync diff 0 tag:best --bucket /data/runs/a --top 50 --base /models/qwen3
      delta-sync diff 420 head --bucket /data/runs/a --other /data/runs/b --json
    """
    run = opened(options)
    other = run if options.other is None else opened(options, url=options.other)
    old, new = run.resolve(options.old), other.resolve(options.new)
    data: dict[str, Any] = {
        name: {"run": side.info.run, "url": side.bucket.url, **pick(manifest, "version step fingerprint")}
        for name, side, manifest in (("old", run, old), ("new", other, new))
    }
    data |= _compared(run, old, other, new, options.base)
    return Report(data, lambda data: _print(data, options.top))


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
        **{
            name: sum(getattr(change, name) for change in found.changes)
            for name in ("changed", "nonfinite_old", "nonfinite_new")
        },
        **_norms(found),
        "relative": relative_norm(found.norm_change, found.norm_old),
        "changes": [
            {**_tensor(change.spec), **pick(change, "changed nonfinite_old nonfinite_new relative"), **_norms(change)}
            for change in changes
        ],
        "read": {
            "objects": len(found.objects),
            "bytes": sum(ref.bytes for ref in found.objects),
            "bases": found.bases,
        },
    }


def _tensor(spec: "TensorSpec") -> dict[str, Any]:
    return {**pick(spec, "name dtype"), "shape": list(spec.shape), "elements": spec.numel}


def _norms(found: Any) -> dict[str, float | None]:
    """JSON has no infinity."""
    norms = pick(found, "norm_change norm_old")
    return {name: norm if math.isfinite(norm) else None for name, norm in norms.items()}


def _norm(value: float | None) -> str:
    return known(value, "{:.3e}")


def _nonfinite(row: dict[str, Any]) -> str:
    old, new = row["nonfinite_old"], row["nonfinite_new"]
    return "-" if old == new == 0 else f"{old:,}" if old == new else f"{old:,} → {new:,}"


def _print(data: dict[str, Any], top: int) -> None:
    """Print what changed."""
    sides: list[tuple[str, object]] = [
        (name, f"version {data[name]['version']} (step {data[name]['step']}) of {data[name]['url']}")
        for name in ("old", "new")
    ]
    share = percent(data["changed"], data["elements"])
    norms = f"{_norm(data['relative'])} of ‖old‖: {_norm(data['norm_change'])} of {_norm(data['norm_old'])}"
    nonfinite = f"{data['nonfinite_old']:,} in the old version, {data['nonfinite_new']:,} in the new one"
    print_fields(
        *sides,
        ("tensors", f"{data['changed_tensors']:,} of {data['tensors']:,} changed"),
        ("elements", f"{data['changed']:,} of {data['elements']:,} changed, {share}"),
        ("distance", norms),
        ("NaN or infinite", None if _nonfinite(data) == "-" else f"{nonfinite}; they are in no norm"),
    )
    if data["changes"]:
        print()
        rows = [
            (
                row["name"],
                row["dtype"],
                shape(row["shape"]),
                f"{row['changed']:,}",
                percent(row["changed"], row["elements"]),
                *(_norm(row[name]) for name in ("norm_change", "norm_old", "relative")),
                _nonfinite(row),
            )
            for row in data["changes"]
        ]
        titles = ("tensor", "dtype", "shape", "changed", "share", "‖new − old‖", "‖old‖", "distance", "NaN or inf")
        print_columns(titles, rows, left=(0, 1, 2), most=top)
    read = data["read"]
    bases = f", and {many(read['bases'], 'base')}" if read["bases"] else ""
    print(f"\nread {many(read['objects'], 'object')}, {size(read['bytes'])}{bases}")
