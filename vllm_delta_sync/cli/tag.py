"""``delta-sync tag``: arguments and output; the work is done by ``maintenance.tags``."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import VERSION, Answer, add_bucket, add_trust, opened, version
from vllm_delta_sync.cli.text import print_columns
from vllm_delta_sync.errors import UsageError

if TYPE_CHECKING:
    from vllm_delta_sync.format.documents import Tag

TAG_EXAMPLES = """\
examples:
  delta-sync tag --bucket /data/runs/a
  delta-sync tag best --bucket /data/runs/a --version 420
  delta-sync tag release-1 --bucket /data/runs/a --milestone
  delta-sync compact --bucket /data/runs/a --anchor tag:release-1   (if no publisher is running)
  delta-sync tag best --bucket /data/runs/a --delete
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    tag = commands.add_parser(
        "tag",
        help="name a version, so that gc keeps it",
        description="Name a version, so that gc keeps it and tag:NAME refers to it. Without NAME, list the tags.",
        epilog=TAG_EXAMPLES,
    )
    tag.add_argument("name", metavar="NAME", nargs="?", help="1 to 100 of A-Z a-z 0-9 . _ -")
    add_bucket(tag)
    add_trust(tag, signing=True)
    tag.add_argument("--version", type=version, metavar=VERSION, help="the version; default: the head")
    tag.add_argument(
        "--milestone", action="store_true", help="the publisher makes an anchor of the version, which gc keeps"
    )
    tag.add_argument("--delete", action="store_true", help="remove the tag")
    tag.set_defaults(handler=_tag)


def _tag(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.tags import delete_tag, set_tag

    if options.delete and (options.version is not None or options.milestone):
        raise UsageError("--delete cannot be combined with --version or --milestone")
    if options.name is None and (options.delete or options.version is not None or options.milestone):
        raise UsageError("NAME is missing; only listing the tags needs no NAME")
    run = opened(options, writes=options.name is not None and not options.delete)
    if options.name is None:
        rows = [_tag_document(name, tag) for name, tag in run.tags().items()]
        document = {"run": run.info.run, "url": run.bucket.url, "tags": rows}
        return document, lambda: _print_tags(rows)
    if options.delete:
        delete_tag(run, options.name)
        return {"run": run.info.run, "deleted": options.name}, lambda: print(f"deleted tag {options.name}")
    row = _tag_document(options.name, set_tag(run, options.name, options.version, options.milestone))
    return {"run": run.info.run, **row}, lambda: print(f"version {row['version']} is tagged {options.name}")


def _tag_document(name: str, tag: "Tag") -> dict[str, Any]:
    return {"tag": name, **tag.model_dump(include={"version", "manifest", "milestone", "branch", "created_at"})}


def _print_tags(rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["tag"], row["version"], "yes" if row["milestone"] else "-", row["created_at"], row["branch"] or "-")
        for row in rows
    ]
    print_columns(("tag", "version", "milestone", "created", "branch"), cells, left=(0, 2, 3, 4))
