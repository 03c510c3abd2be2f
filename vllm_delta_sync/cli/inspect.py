"""``delta-sync inspect`` shows a run, or one of its versions."""

import argparse
from collections import Counter
from typing import TYPE_CHECKING

from vllm_delta_sync.cli.arguments import RUN, VERSION, as_finding, opened, positive, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.log import Document, describe, describe_signature, signed, summary
from vllm_delta_sync.cli.text import percent, pick, print_columns, print_fields, shape, size
from vllm_delta_sync.errors import NotFoundError

if TYPE_CHECKING:
    import numpy as np

    from vllm_delta_sync.client import Run
    from vllm_delta_sync.format.manifest import Manifest
    from vllm_delta_sync.tensors.changes import Sparse


@command(
    "inspect",
    "show a run, or one of its versions",
    *RUN,
    option("--version", type=version, metavar=VERSION, help="a version of the run"),
    option("--top", type=positive, default=20, metavar="N", help="tensors to list (default: 20)"),
    option("--all", action="store_true", help="list every tensor"),
    failed="the document or an object is damaged, or an object of the version is missing",
)
def inspect(options: argparse.Namespace) -> Report:
    """Show the contents of a run; with --version, the changes of one version tensor by tensor.

    examples:
      delta-sync inspect --bucket /data/runs/a
      delta-sync inspect --bucket /data/runs/a --version 7 --all
    """
    top = None if options.all else options.top
    run = opened(options)
    if options.version is None:
        return Report(_of_run(run), lambda data: _print_run(data, top))
    named = options.version
    number = named if isinstance(named, int) else run.resolve(named).version
    return Report(version_document(run, number), lambda data: _print_version(data, top))


def _of_run(run: "Run") -> Document:
    """Describe a run: identity, tensors, the model's files, head."""
    try:
        head: Document | None = summary(run, run.head())
    except NotFoundError as error:
        if run.pointer is not None:
            as_finding(error)
            raise
        head = None  # the run exists, but nothing was published
    return {
        "url": run.bucket.url,
        **pick(run.info, "run created_at format_version requires"),
        **signed(run, run.info),
        "tensors": [
            {**pick(spec, "name dtype"), "shape": list(spec.shape), "bytes": spec.nbytes} for spec in run.table
        ],
        **pick(run.table, "total full_bytes"),
        "files": [pick(item, "name bytes sha256") for item in run.info.files],
        "head": head,
    }


def _print_run(data: Document, top: int | None) -> None:
    head = data["head"]
    dtypes = Counter(row["dtype"] for row in data["tensors"])
    print_fields(
        ("run", data["run"]),
        ("url", data["url"]),
        ("created", data["created_at"]),
        ("signed", describe_signature(data)),
        ("tensors", f"{len(data['tensors'])} ({', '.join(f'{n} {dtype}' for dtype, n in dtypes.most_common())})"),
        ("elements", f"{data['total']:,}"),
        ("full size", size(data["full_bytes"])),
        ("head", "nothing published yet" if head is None else f"version {head['version']}, step {head['step']}"),
        *([] if head is None else [("fingerprint", head["fingerprint"]), *describe(head)]),
    )
    if data["files"]:
        print()
        print_columns(("file", "size"), [(item["name"], size(item["bytes"])) for item in data["files"]])
    _print_tensors(data["tensors"], top)


def _print_tensors(tensors: list[Document], top: int | None) -> None:
    """Print the largest ones."""
    rows = [
        (row["name"], row["dtype"], shape(row["shape"]), size(row["bytes"]))
        for row in sorted(tensors, key=lambda row: -row["bytes"])
    ]
    print()
    print_columns(("tensor", "dtype", "shape", "size"), rows, left=(0, 1, 2), most=top, hint="--all")


def version_document(run: "Run", version: int) -> Document:
    """Describe a version: its manifest, and its changes in each tensor. Reads and checks the objects."""
    head = run.head().version
    if version > head:
        raise NotFoundError(f"version {version} is not published; the newest is {head}")
    try:
        manifest = run.manifest(version)
        tensors = _changed_tensors(run, manifest)
    except NotFoundError as error:
        record = run.retention()
        if record is not None and record.is_gone(version):
            raise NotFoundError(
                f"the objects of version {version} were removed by garbage collection (delta-sync gc), so its changes "
                "are unknown; delta-sync log shows its manifest, delta-sync diff compares versions that are kept"
            ) from error
        as_finding(error)  # the version was published, so it is damaged
        raise
    return {
        **summary(run, manifest),
        **pick(manifest, "run parent digest requires"),
        "url": run.bucket.url,
        "base": manifest.base.location if manifest.base else None,
        "objects": [ref.model_dump() for ref in manifest.objects],
        "sidecars": [item.model_dump() for item in manifest.sidecars],
        "tensors": tensors,
    }


def _changed_tensors(run: "Run", manifest: "Manifest") -> list[Document]:
    """Return a row for each tensor that the version carries."""
    from vllm_delta_sync.run.objects import needs_base_bits, summarize_changes

    rows: dict[int, Document] = {}

    def count(tensor: int, sent: str, changed: int) -> Document:
        spec = run.table[tensor]
        if tensor not in rows:
            rows[tensor] = {**pick(spec, "name dtype"), "shape": list(spec.shape), "sent": sent, "changed": 0}
            rows[tensor] |= {"total": spec.numel, "bytes": spec.nbytes, "one_ulp": None}
        rows[tensor]["changed"] += changed
        return rows[tensor]

    if needs_base_bits(manifest):
        # Without the weights before this version, distances are unknown; counts are known.
        found = summarize_changes(manifest, run.table, [run.fetch(ref) for ref in manifest.objects])
        for tensor, changed in found.counts.items():
            count(tensor, "full" if tensor in found.full else "sparse", changed)
    else:
        changes = run.changes(manifest)
        for group in changes.sparse:
            for tensor, positions, data in group.tensors():
                row = count(tensor, "sparse", int(positions.size))
                if group.relative:
                    row["one_ulp"] = (row["one_ulp"] or 0) + _single_steps(group, data)
        for full in changes.full:
            count(full.id, "full", int(full.bits.size))
    return [rows[tensor] for tensor in sorted(rows)]


def _single_steps(group: "Sparse", distances: "np.ndarray") -> int:
    import numpy as np

    one = group.element.uint.type(1)
    return int(np.count_nonzero(distances == one) + np.count_nonzero(distances + one == 0))


def _print_version(data: Document, top: int | None) -> None:
    """Print a version's manifest, its objects, and the tensors that changed most."""
    delta: list[tuple[str, object]] = []
    if data["kind"] == "delta":
        share = percent(data["changed"], data["total"])
        delta = [
            ("carried", f"{data['changed']:,} of {data['total']:,} elements, {share}"),
            ("codec", f"{data['codec']}, compression {data['compression']}" if data["codec"] else None),
        ]
    print_fields(
        ("version", f"{data['version']} ({data['kind']}), step {data['step']}"),
        ("run", data["run"]),
        ("created", data["created_at"]),
        ("signed", describe_signature(data)),
        ("fingerprint", data["fingerprint"]),
        ("digest", data["digest"]),
        ("parent", data["parent"] or "none: the first version"),
        ("payload", f"{size(data['payload_bytes'])} of {size(data['full_bytes'])}"),
        *describe(data),
        ("base", (data["base"] or "not recorded") if data["kind"] == "reference" else None),
        *delta,
    )
    print()
    objects = [(item["key"], item["rank"], size(item["bytes"])) for item in data["objects"]]
    print_columns(("object", "rank", "size"), objects)
    if data["sidecars"]:
        print()
        sidecars = [(item["name"], item["key"], size(item["bytes"])) for item in data["sidecars"]]
        print_columns(("sidecar", "key", "size"), sidecars, left=(0, 1))
    print()
    rows = [
        (
            row["name"],
            row["dtype"],
            shape(row["shape"]),
            row["sent"],
            f"{row['changed']:,}",
            percent(row["changed"], row["total"]),
            "-" if row["one_ulp"] is None else percent(row["one_ulp"], row["changed"]),
        )
        for row in sorted(data["tensors"], key=lambda row: -row["changed"])
    ]
    titles = ("tensor", "dtype", "shape", "sent", "changed", "share", "by 1 ULP")
    print_columns(titles, rows, left=(0, 1, 2, 3), most=top, hint="--all")
