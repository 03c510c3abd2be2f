"""``delta-sync export``: arguments and output; the work is done by ``maintenance.export``."""

import argparse
import sys
from typing import Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_base,
    add_bucket,
    add_trust,
    exit_codes,
    opened,
    positive_bytes,
    version,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, print_fields, size

EXAMPLES = """\
The result is an ordinary Hugging Face checkpoint, which transformers, vLLM and other tools load. Every tensor has the
bits that the trainer published; digests, fingerprints and (with --trusted-keys) signatures are checked.

Configuration and tokenizer come from the run. Runs of older publishers do not keep them; then they come from the base,
if it is available.

It is safe to interrupt: the folder holds a complete checkpoint or none, and the same command continues without
downloading anything twice. Until it is done, an export takes the disk space of the checkpoint and of the objects read.
The folder must be new, empty, or from an earlier export. Without --version, quarantined versions are skipped.

examples:
  delta-sync export --bucket /data/runs/a --to /models/a
  delta-sync export --bucket s3://bucket/runs/a --version tag:best --to ./best
  delta-sync export --bucket s3://bucket/runs/a --version step:400 --to ./step-400
  delta-sync export --bucket /data/runs/a --version 100 --to ./v100 --base /models/qwen3 --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "export",
        help="write a version as an ordinary checkpoint folder",
        description="Write the weights of a version to a folder, with configuration and tokenizer, bit for bit.",
        epilog=EXAMPLES + exit_codes("weights or documents are damaged, or not signed by a trusted key"),
    )
    add_bucket(parser)
    parser.add_argument(
        "--version",
        type=version,
        metavar=VERSION,
        help="the version to write; default: the newest that is not quarantined",
    )
    parser.add_argument("--to", required=True, metavar="DIR", help="folder to write; created if it does not exist")
    add_base(parser)
    parser.add_argument(
        "--shard-bytes",
        type=positive_bytes,
        metavar="SIZE",
        help="bytes of tensors in one file; default: 5 GB",
    )
    add_trust(parser)
    parser.set_defaults(handler=_export)


def _export(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.checkpoint_files import SHARD_BYTES
    from vllm_delta_sync.maintenance.export import export

    run = opened(options)
    try:
        with ProgressBar("bytes") as bar:
            shard_bytes = options.shard_bytes or SHARD_BYTES
            report = export(run, options.to, options.version, options.base, shard_bytes, bar.update)
    except KeyboardInterrupt:
        print("\nstopped; the same command continues from here", file=sys.stderr)
        raise
    document = {
        "run": run.info.run,
        "version": report.version,
        "step": report.step,
        "manifest": report.manifest,
        "directory": str(report.folder),
        "files": report.files,
        "bytes": report.bytes,
        "present": report.present,
        "missing": report.missing,
        "looked_in": report.looked_in,
        "notes": report.notes,
    }
    return document, lambda: _print(document)


def _print(document: dict[str, Any]) -> None:
    print_fields(
        [
            ("version", f"{document['version']} (step {document['step']})"),
            ("directory", document["directory"]),
            ("weights", _weights(document)),
            ("files", ", ".join(name for name in document["files"] if not name.endswith(".safetensors"))),
        ]
    )
    for note in document["notes"]:
        print(clean(f"note: {note}"))
    if document["missing"]:
        places = "; ".join(document["looked_in"]) or "the folder itself"
        print(
            clean(f"missing: {' and '.join(document['missing'])}, searched in {places}"),
            "without them the weights cannot be loaded as a model: copy them into the folder, or pass --base with a "
            "checkpoint that has them",
            sep="\n",
            file=sys.stderr,
        )


def _weights(document: dict[str, Any]) -> str:
    names = [name for name in document["files"] if name.endswith(".safetensors")]
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    return f"{size(document['bytes'])} in {where}" + (", already present" if document["present"] else "")
