"""``delta-sync branch``, which ``maintenance.branch`` does."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import SIGNED_RUN, VERSION, opened, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import print_fields


@command(
    "branch",
    "start a new run at a version of this one",
    *SIGNED_RUN,
    option("--version", type=version, metavar=VERSION, help="version to start at; default: the newest not quarantined"),
    option("--to", required=True, metavar="URL", help="URL of the new run"),
)
def branch(options: argparse.Namespace) -> Report:
    """Start a new run at a version of this one, without copying anything.

    Nothing is copied: version 0 of the new run refers to the version, which the old run keeps as long as its tag
    branch-… exists.

    examples:
      delta-sync branch --bucket /data/runs/a --to /data/runs/b
      delta-sync branch --bucket /data/runs/a --version 420 --to /data/runs/b
      delta-sync branch --bucket s3://bucket/runs/a --version tag:best --to s3://bucket/runs/b --json
    """
    from vllm_delta_sync.maintenance.branch import branch

    run = opened(options, writes=True)
    made = options.closing.enter_context(branch(run, options.version, options.to))
    first = made.manifest(0)
    source = first.base.version if first.base is not None else None
    data = {
        "run": made.info.run,
        "url": made.bucket.url,
        "source": {"run": run.info.run, "url": run.bucket.url, "version": source},
        "fingerprint": first.fingerprint,
    }
    return Report(data, _print)


def _print(data: dict[str, Any]) -> None:
    print_fields(
        ("run", data["run"]),
        ("url", data["url"]),
        ("starts at", f"version {data['source']['version']} of {data['source']['url']}"),
        ("fingerprint", data["fingerprint"]),
    )
