"""``delta-sync tag set``, ``rm`` and ``list``: arguments and output; the work is done by ``maintenance.tags``."""

import argparse
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    add_bucket,
    add_group,
    add_trust,
    exit_codes,
    opened,
    version,
)
from vllm_delta_sync.cli.text import print_columns

if TYPE_CHECKING:
    from vllm_delta_sync.format.documents import Tag

SET = """\
  delta-sync tag set best --bucket /data/runs/a --version 420
"""
SET_MILESTONE = """\
  delta-sync tag set release-1 --bucket /data/runs/a --milestone
  delta-sync compact --bucket /data/runs/a --anchor tag:release-1   (if no publisher is running)
"""
REMOVE = "  delta-sync tag rm best --bucket /data/runs/a\n"
LIST = "  delta-sync tag list --bucket /data/runs/a\n"
NAME = "1 to 100 of A-Z a-z 0-9 . _ -"
REFUSED = "a document is damaged, or not signed by a trusted key"


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    group = add_group(commands, "tag", "name versions, so that gc keeps them", SET + REMOVE + LIST)

    setting = group.add_parser(
        "set",
        help="name a version",
        description="Name a version, so that gc keeps it and tag:NAME refers to it. A tag that exists is moved.",
        epilog=f"examples:\n{SET}{SET_MILESTONE}{exit_codes(REFUSED)}",
    )
    setting.add_argument("name", metavar="NAME", help=NAME)
    add_bucket(setting)
    setting.add_argument("--version", type=version, metavar=VERSION, help="the version; default: the head")
    setting.add_argument(
        "--milestone", action="store_true", help="the publisher makes an anchor of the version, which gc keeps"
    )
    add_trust(setting, signing=True)
    setting.set_defaults(handler=_set)

    removing = group.add_parser(
        "rm",
        help="remove a tag",
        description="Remove a tag. Its version stays until gc removes it.",
        epilog=f"examples:\n{REMOVE}{exit_codes(REFUSED)}",
    )
    removing.add_argument("name", metavar="NAME", help=NAME)
    add_bucket(removing)
    add_trust(removing)
    removing.set_defaults(handler=_remove)

    listing = group.add_parser(
        "list",
        help="list the tags",
        description="List the tags of a run, with their versions.",
        epilog=f"examples:\n{LIST}{exit_codes(REFUSED)}",
    )
    add_bucket(listing)
    add_trust(listing)
    listing.set_defaults(handler=_list)


def _set(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.tags import set_tag

    run = opened(options, writes=True)
    row = _tag_document(options.name, set_tag(run, options.name, options.version, options.milestone))
    return {"run": run.info.run, **row}, lambda: print(f"version {row['version']} is tagged {options.name}")


def _remove(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.maintenance.tags import delete_tag

    run = opened(options)
    delete_tag(run, options.name)
    return {"run": run.info.run, "removed": options.name}, lambda: print(f"removed tag {options.name}")


def _list(options: argparse.Namespace) -> Answer:
    run = opened(options)
    rows = [_tag_document(name, tag) for name, tag in run.tags().items()]
    return {"run": run.info.run, "url": run.bucket.url, "tags": rows}, lambda: _print_tags(rows)


def _tag_document(name: str, tag: "Tag") -> dict[str, Any]:
    return {"tag": name, **tag.model_dump(include={"version", "manifest", "milestone", "branch", "created_at"})}


def _print_tags(rows: list[dict[str, Any]]) -> None:
    cells = [
        (row["tag"], row["version"], "yes" if row["milestone"] else "-", row["created_at"], row["branch"] or "-")
        for row in rows
    ]
    print_columns(("tag", "version", "milestone", "created", "branch"), cells, left=(0, 2, 3, 4))
