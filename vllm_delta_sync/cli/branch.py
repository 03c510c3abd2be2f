"""``delta-sync branch``: arguments and output; the work is done by ``maintenance.branch``."""

import argparse
from typing import Any

from vllm_delta_sync.cli.arguments import VERSION, Answer, add_bucket, add_trust, opened, version
from vllm_delta_sync.cli.text import print_fields

BRANCH_EXAMPLES = """\
Nothing is copied: version 0 of the new run refers to the version, which the old run keeps as long as its tag branch-…
exists.

examples:
  delta-sync branch --bucket /data/runs/a --to /data/runs/b
  delta-sync branch --bucket /data/runs/a --version 420 --to /data/runs/b
  delta-sync branch --bucket s3://bucket/runs/a --version tag:best --to s3://bucket/runs/b --json
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    branch = commands.add_parser(
        "branch",
        help="start a new run at a version of this one",
        description="Start a new run at a version of this one, without copying anything.",
        epilog=BRANCH_EXAMPLES,
    )
    add_bucket(branch)
    branch.add_argument("--version", type=version, metavar=VERSION, help="version to start at; default: the head")
    branch.add_argument("--to", required=True, metavar="URL", help="URL of the new run")
    add_trust(branch, signing=True)
    branch.set_defaults(handler=_branch)


def _branch(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.branch import branch

    run = opened(options, writes=True)
    made = options.closing.enter_context(branch(run, options.version, options.to))
    first = made.manifest(0)
    source = first.base.version if first.base is not None else None
    document = {
        "run": made.info.run,
        "url": made.bucket.url,
        "source": {"run": run.info.run, "url": run.bucket.url, "version": source},
        "fingerprint": first.fingerprint,
    }
    fields: list[tuple[str, object]] = [
        ("run", made.info.run),
        ("url", made.bucket.url),
        ("starts at", f"version {source} of {run.bucket.url}"),
        ("fingerprint", first.fingerprint),
    ]
    return document, lambda: print_fields(fields)
