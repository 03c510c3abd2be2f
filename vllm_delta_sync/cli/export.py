"""``delta-sync export``, which ``maintenance.export`` does."""

import argparse
import sys
from typing import Any

from vllm_delta_sync.cli.arguments import BASE, RUN, SHARD_BYTES, VERSION, opened, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import ProgressBar, clean, pick, print_fields, size


@command(
    "export",
    "write a version as an ordinary checkpoint folder",
    *RUN,
    option(
        "--version",
        type=version,
        metavar=VERSION,
        help="the version to write; default: the newest that is not quarantined",
    ),
    option("--to", required=True, metavar="DIR", help="folder to write; created if it does not exist"),
    BASE,
    SHARD_BYTES,
    failed="weights or documents are damaged, or not signed by a trusted key",
)
def export(options: argparse.Namespace) -> Report:
    """Write the weights of a version to a folder, with configuration and tokenizer, bit for bit.

    The result is an ordinary Hugging Face checkpoint, which transformers, vLLM and other tools load. Every tensor has
    the bits that the trainer published; digests, fingerprints and (with --trusted-keys) signatures are checked.

    Configuration and tokenizer come from the run or, if it does not keep them, from the base, if that is available.

    It is safe to interrupt: the folder holds a complete checkpoint or none, and the same command continues without
    downloading anything twice. Until it is done, an export takes the disk space of the checkpoint and of the objects
    read. The folder must be new, empty, or from an earlier export. Without --version, quarantined versions are skipped.

    examples:
      delta-sync export --bucket /data/runs/a --to /models/a
      delta-sync export --bucket s3://bucket/runs/a --version tag:best --to ./best
      delta-sync export --bucket s3://bucket/runs/a --version step:400 --to ./step-400
      delta-sync export --bucket /data/runs/a --version 100 --to ./v100 --base /models/qwen3 --json
    """
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
    data = {
        "run": run.info.run,
        "directory": str(report.folder),
        **pick(report, "version step manifest files bytes present missing looked_in notes"),
    }
    return Report(data, _print)


def _print(data: dict[str, Any]) -> None:
    names = [name for name in data["files"] if name.endswith(".safetensors")]
    where = names[0] if len(names) == 1 else f"{len(names)} files"
    print_fields(
        ("version", f"{data['version']} (step {data['step']})"),
        ("directory", data["directory"]),
        ("weights", f"{size(data['bytes'])} in {where}" + (", already present" if data["present"] else "")),
        ("files", ", ".join(name for name in data["files"] if not name.endswith(".safetensors"))),
    )
    for note in data["notes"]:
        print(clean(f"note: {note}"))
    if data["missing"]:
        places = "; ".join(data["looked_in"]) or "the folder itself"
        print(
            clean(f"missing: {' and '.join(data['missing'])}, searched in {places}"),
            "without them the weights cannot be loaded as a model: copy them into the folder, or pass --base with a "
            "checkpoint that has them",
            sep="\n",
            file=sys.stderr,
        )
