"""``delta-sync tag set``, ``rm`` and ``list``, which ``maintenance.tags`` does."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, SIGNED_RUN, VERSION, opened, version
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import known, pick, print_columns

if TYPE_CHECKING:
    from vllm_delta_sync.format.documents import Tag

NAME = option("name", metavar="NAME", help="1 to 100 of A-Z a-z 0-9 . _ -")
REFUSED = "a document is damaged, or not signed by a trusted key"


def _row(name: str, tag: "Tag") -> dict[str, Any]:
    return {"tag": name, **pick(tag, "version manifest milestone branch created_at")}


@command(
    "tag set",
    "name a version",
    NAME,
    *SIGNED_RUN,
    option("--version", type=version, metavar=VERSION, help="the version; default: the head"),
    option("--milestone", action="store_true", help="the publisher makes an anchor of the version, which gc keeps"),
    failed=f"what the version needs is damaged; {REFUSED}",
)
def set_tag(options: argparse.Namespace) -> Report:
    """Name a version, so that gc keeps it and tag:NAME refers to it. A tag that exists is moved.

    examples:
      delta-sync tag set best --bucket /data/runs/a --version 420
      delta-sync tag set release-1 --bucket /data/runs/a --milestone
      delta-sync compact --bucket /data/runs/a --anchor tag:release-1  # if no publisher is running
    """
    from vllm_delta_sync.maintenance.tags import set_tag

    run = opened(options, writes=True)
    row = _row(options.name, set_tag(run, options.name, options.version, options.milestone))
    return Report(
        {"run": run.info.run, **row}, lambda data: print(f"version {data['version']} is tagged {options.name}")
    )


@command("tag rm", "remove a tag", NAME, *RUN, failed=REFUSED)
def remove(options: argparse.Namespace) -> Report:
    """Remove a tag. Its version stays until gc removes it.

    examples:
      delta-sync tag rm best --bucket /data/runs/a
    """
    from vllm_delta_sync.maintenance.tags import delete_tag

    run = opened(options)
    delete_tag(run, options.name)
    return Report({"run": run.info.run, "removed": options.name}, lambda _: print(f"removed tag {options.name}"))


@command("tag list", "list the tags", *RUN, failed=REFUSED)
def list_tags(options: argparse.Namespace) -> Report:
    """List the tags of a run, with their versions.

    examples:
      delta-sync tag list --bucket /data/runs/a
    """
    run = opened(options)
    rows = [_row(name, tag) for name, tag in run.tags().items()]
    return Report({"run": run.info.run, "url": run.bucket.url, "tags": rows}, _print_tags)


def _print_tags(data: dict[str, Any]) -> None:
    cells = [
        (row["tag"], row["version"], "yes" if row["milestone"] else "-", row["created_at"], known(row["branch"]))
        for row in data["tags"]
    ]
    print_columns(("tag", "version", "milestone", "created", "branch"), cells, left=(0, 2, 3, 4))
