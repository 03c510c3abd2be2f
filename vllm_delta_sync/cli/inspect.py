"""``delta-sync inspect``: arguments, output, and the documents for ``--json``."""

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_bucket,
    add_trust,
    exit_codes,
    failed_check,
    opened,
    positive,
    version,
)
from vllm_delta_sync.cli.log import Document, describe_held_back, describe_signature, signed, summary
from vllm_delta_sync.cli.text import percent, print_columns, print_fields, shape, size
from vllm_delta_sync.errors import NotFoundError, StoreError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from vllm_delta_sync.client import Run
    from vllm_delta_sync.tensors.changes import Changes, Sparse


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    inspect = commands.add_parser(
        "inspect",
        help="show a run, one of its versions, or a single file",
        description="Show the contents of a run; with --version, the changes of one version tensor by tensor; with "
        "FILE, the header of a .safetensors file.",
        epilog="examples:\n  delta-sync inspect --bucket /data/runs/a\n"
        "  delta-sync inspect --bucket /data/runs/a --version 7 --all\n"
        "  delta-sync inspect ./objects/4fc55e65….safetensors\n"
        + exit_codes("the document or an object is damaged, or an object of the version is missing"),
    )
    inspect.add_argument("file", metavar="FILE", nargs="?", help="a .safetensors file to show, instead of a run")
    add_bucket(inspect)
    inspect.add_argument("--version", type=version, metavar=VERSION, help="a version of the run")
    inspect.add_argument("--top", type=positive, default=20, metavar="N", help="tensors to list (default: 20)")
    inspect.add_argument("--all", action="store_true", help="list every tensor")
    add_trust(inspect)
    inspect.set_defaults(handler=_inspect)


def _inspect(options: argparse.Namespace) -> Answer:
    top = None if options.all else options.top
    if options.file is not None:
        if options.version is not None or options.bucket is not None:
            raise UsageError("FILE cannot be combined with --bucket or --version; leave FILE out to show a run")
        if not Path(options.file).is_file():
            raise UsageError(f"{options.file!r} is not a file; to show a run, name it with --bucket URL")
        document = file_document(Path(options.file))
        return document, lambda: print_file(document, top)
    run = opened(options)
    if options.version is None:
        document = run_document(run)
        return document, lambda: print_run(document, top)
    named = options.version
    document = version_document(run, named if isinstance(named, int) else run.resolve(named).version)
    return document, lambda: print_version(document, top)


def run_document(run: "Run") -> Document:
    """Describe a run: identity, tensors, the model's files, head."""
    try:
        head: Document | None = summary(run, run.head())
    except NotFoundError as error:
        if run.pointer is not None:
            raise failed_check(error) from error
        head = None  # the run exists, but nothing was published
    return {
        "url": run.bucket.url,
        "run": run.info.run,
        "created_at": run.info.created_at,
        "format_version": run.info.format_version,
        "requires": run.info.requires,
        **signed(run, run.info),
        "tensors": [
            {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "bytes": spec.nbytes}
            for spec in run.table
        ],
        "total": run.table.total,
        "full_bytes": run.table.full_bytes,
        "files": [{"name": item.name, "bytes": item.bytes, "sha256": item.sha256} for item in run.info.files],
        "head": head,
    }


def print_run(document: Document, top: int | None) -> None:
    """Print a run, and its largest tensors."""
    head = document["head"]
    dtypes = Counter(row["dtype"] for row in document["tensors"])
    fields = [
        ("run", document["run"]),
        ("url", document["url"]),
        ("created", document["created_at"]),
        ("signed", describe_signature(document)),
        ("tensors", f"{len(document['tensors'])} ({', '.join(f'{n} {dtype}' for dtype, n in dtypes.most_common())})"),
        ("elements", f"{document['total']:,}"),
        ("full size", size(document["full_bytes"])),
        ("head", "nothing published yet" if head is None else f"version {head['version']}, step {head['step']}"),
    ]
    if head is not None:
        fields.append(("fingerprint", head["fingerprint"]))
        fields += [("quarantined", reason) for reason in head["quarantined"]]
        fields += describe_held_back(head)
    print_fields(fields)
    if document["files"]:
        print()
        print_columns(("file", "size"), [(item["name"], size(item["bytes"])) for item in document["files"]])
    print()
    _print_tensors(document["tensors"], top)


def _print_tensors(tensors: list[Document], top: int | None) -> None:
    rows = sorted(tensors, key=lambda row: -row["bytes"])[:top]
    print_columns(
        ("tensor", "dtype", "shape", "size"),
        [(row["name"], row["dtype"], shape(row["shape"]), size(row["bytes"])) for row in rows],
        left=(0, 1, 2),
    )
    _print_rest(len(tensors), len(rows))


def _print_rest(count: int, shown: int) -> None:
    if shown < count:
        print(f"… {count - shown} more; --all lists them")


def version_document(run: "Run", version: int) -> Document:
    """Describe a version: its manifest, and its changes in each tensor. Reads and checks the objects."""
    from vllm_delta_sync.run.objects import needs_base_bits, summarize_changes

    head = run.head().version
    if version > head:
        raise NotFoundError(f"version {version} is not published; the newest is {head}")
    try:
        manifest = run.manifest(version)
        if needs_base_bits(manifest):
            # Without the weights before this version, distances are unknown; counts are known.
            found = summarize_changes(manifest, run.table, [run.fetch(ref) for ref in manifest.objects])
            tensors = [
                _row(run, tensor, "full" if tensor in found.full else "sparse", changed)
                for tensor, changed in sorted(found.counts.items())
            ]
        else:
            tensors = _changed_tensors(run, run.changes(manifest))
    except NotFoundError as error:
        raise failed_check(error) from error  # the version was published, so it is damaged
    return {
        **summary(run, manifest),
        "run": manifest.run,
        "url": run.bucket.url,
        "parent": manifest.parent,
        "digest": manifest.digest,
        "requires": manifest.requires,
        "base": manifest.base.location if manifest.base else None,
        "objects": [ref.model_dump() for ref in manifest.objects],
        "sidecars": [item.model_dump() for item in manifest.sidecars],
        "tensors": tensors,
    }


def _row(run: "Run", tensor: int, how: str, changed: int = 0) -> Document:
    spec = run.table[tensor]
    row = {"name": spec.name, "dtype": spec.dtype, "shape": list(spec.shape), "sent": how, "changed": changed}
    return {**row, "total": spec.numel, "bytes": spec.nbytes, "one_ulp": None}


def _changed_tensors(run: "Run", changes: "Changes") -> list[Document]:
    rows: dict[int, Document] = {}

    def row_of(tensor: int, how: str) -> Document:
        return rows.setdefault(tensor, _row(run, tensor, how))

    for group in changes.sparse:
        for tensor, positions, data in group.tensors():
            row = row_of(tensor, "sparse")
            row["changed"] += int(positions.size)
            if group.relative:
                row["one_ulp"] = (row["one_ulp"] or 0) + _single_steps(group, data)
    for full in changes.full:
        row_of(full.id, "full")["changed"] += int(full.bits.size)
    return [rows[tensor] for tensor in sorted(rows)]


def _single_steps(group: "Sparse", distances: "np.ndarray") -> int:
    import numpy as np

    one = group.element.uint.type(1)
    return int(np.count_nonzero(distances == one) + np.count_nonzero(distances + one == 0))


def print_version(document: Document, top: int | None) -> None:
    """Print a version's manifest, its objects, and the tensors that changed most."""
    print_fields(_version_fields(document))
    print()
    print_columns(
        ("object", "rank", "size"),
        [(item["key"], item["rank"], size(item["bytes"])) for item in document["objects"]],
    )
    if document["sidecars"]:
        print()
        print_columns(
            ("sidecar", "key", "size"),
            [(item["name"], item["key"], size(item["bytes"])) for item in document["sidecars"]],
            left=(0, 1),
        )
    print()
    rows = sorted(document["tensors"], key=lambda row: -row["changed"])[:top]
    print_columns(
        ("tensor", "dtype", "shape", "sent", "changed", "share", "by 1 ULP"),
        [
            (
                row["name"],
                row["dtype"],
                shape(row["shape"]),
                row["sent"],
                f"{row['changed']:,}",
                percent(row["changed"], row["total"]),
                "-" if row["one_ulp"] is None else percent(row["one_ulp"], row["changed"]),
            )
            for row in rows
        ],
        left=(0, 1, 2, 3),
    )
    _print_rest(len(document["tensors"]), len(rows))


def _version_fields(document: Document) -> list[tuple[str, object]]:
    fields: list[tuple[str, object]] = [
        ("version", f"{document['version']} ({document['kind']}), step {document['step']}"),
        ("run", document["run"]),
        ("created", document["created_at"]),
        ("signed", describe_signature(document)),
        ("fingerprint", document["fingerprint"]),
        ("digest", document["digest"]),
        ("parent", document["parent"] or "none: the first version"),
        ("payload", f"{size(document['payload_bytes'])} of {size(document['full_bytes'])}"),
    ]
    fields += [("quarantined", reason) for reason in document["quarantined"]]
    fields += describe_held_back(document)
    if document["kind"] == "reference":
        fields.append(("base", document["base"] or "not recorded"))
    if document["kind"] == "delta":
        share = percent(document["changed"], document["total"])
        fields.append(("carried", f"{document['changed']:,} of {document['total']:,} elements, {share}"))
        fields.append(("codec", f"{document['codec']}, compression {document['compression']}"))
    return fields


def file_document(path: Path) -> Document:
    """Describe header and metadata of a safetensors file: a delta object, an anchor, or any other file."""
    import numpy as np

    from vllm_delta_sync.codec.delta_object import METADATA_KEY
    from vllm_delta_sync.format.canonical_json import load_canonical
    from vllm_delta_sync.format.safetensors_file import Container

    try:
        length = path.stat().st_size
        container = Container(np.memmap(path, np.uint8, mode="r") if length else b"", path.name)
    except OSError as error:
        raise StoreError(f"file {str(path)!r} cannot be read: {error.strerror}") from error
    delta = container.metadata.get(METADATA_KEY)
    return {
        "file": str(path),
        "bytes": length,
        "kind": "tensors" if delta is None else "delta",
        "metadata": container.metadata,
        "delta": None if delta is None else load_canonical(delta.encode(), f"{path.name} metadata"),
        "entries": [
            {
                "name": name,
                "dtype": entry.dtype.name,
                "shape": list(entry.shape),
                "bytes": entry.end - entry.start,
            }
            for name, entry in container.entries.items()
        ],
    }


def print_file(document: Document, top: int | None) -> None:
    """Print a file's metadata and its largest entries."""
    fields: list[tuple[str, object]] = [
        ("file", document["file"]),
        ("size", size(document["bytes"])),
        ("holds", "changes of one version" if document["kind"] == "delta" else "whole tensors"),
    ]
    shown = document["delta"] if isinstance(document["delta"], dict) else document["metadata"]
    fields += [(name, value if isinstance(value, str) else json.dumps(value)) for name, value in shown.items()]
    print_fields(fields)
    print()
    _print_tensors(document["entries"], top)
