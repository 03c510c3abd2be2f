"""``delta-sync status``, ``sync``, ``rollback``, ``hold``, ``release`` and ``wait``: a client of running servers.

Each command calls the route of its name; ``server_client`` makes the requests.
"""

import argparse
import re
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, TextIO
from urllib.parse import urlencode

from vllm_delta_sync import admin_token
from vllm_delta_sync.cli.arguments import (
    VERSION,
    Answer,
    CommandFailedError,
    add_bucket,
    add_trust,
    exit_codes,
    interval,
    opened,
    print_event,
    settings_of,
    version,
)
from vllm_delta_sync.cli.text import clean, print_columns, print_fields, redraw, size
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.server_client import (
    MAX_MESSAGE,
    REQUEST_SECONDS,
    STAGING,
    Reply,
    ServerError,
    call_plugin,
    check_server_url,
)

DEFAULT_SERVER = "http://localhost:8000"
CHANGE_SECONDS = 600.0
WAIT_SECONDS = 30.0
RECENT = 5
"""Most updates that ``status`` lists."""

SERVED = "served"
_BEFORE_SERVED = re.compile(f"{SERVED}~[0-9]{{1,10}}")

COMMANDS = {
    "status": (
        "show what a server serves",
        "Show what a server serves, its lag, its last error and its recent updates.",
        ("status", "status --server http://rollout-1:8000 --server http://rollout-2:8000 --watch 2"),
    ),
    "sync": (
        "make a server update now",
        "Make a server poll the bucket now, and serve the newest version or a named one.",
        ("sync", "sync --server http://rollout-1:8000 --version 20"),
    ),
    "rollback": (
        "make a server serve an older version",
        "Make a server serve an older version and hold it, until delta-sync release.",
        (
            "rollback --server http://rollout-1:8000 --version 18",
            f"rollback --version {SERVED}~2",
            "rollback --bucket /data/runs/a --version tag:best",
        ),
    ),
    "hold": (
        "make a server stay at its version",
        "Make a server stay at the version that it serves, whatever is published, until delta-sync release.",
        ("hold --server http://rollout-1:8000 --server http://rollout-2:8000",),
    ),
    "release": ("end a hold", "End a hold or a rollback: the server follows the run again.", ("release",)),
    "wait": (
        "wait until a server serves a version",
        "Wait until a server serves a version or a later one. Fails at once if an operator must act first.",
        ("wait --version 20 --timeout 60",),
    ),
}
"""Help, description and examples of each command."""
VERSION_HELP = {
    "sync": "version to serve; an older one than the served one is held. Default: what the server's target names",
    "rollback": f"version to roll back to; {SERVED}~N: N before the one that each server serves",
    "wait": "version to wait for",
}
DONE = {"sync": "synced", "rollback": "rolled back", "hold": "held", "release": "released", "wait": "done"}
NAMES = """
A version that is named, as head~2 or tag:NAME, is looked up in the run (--bucket), which each server must follow.
"""
SERVERS = """\
Several servers are asked in turn, also after one has failed; the exit code is that of the first failure. The data of
--json are {"servers": [{"server", "status" or "error"}]}, with each server's own answer.
"""
TOKEN = f"""
The admin token comes from {admin_token.VARIABLE}, or from the file that the setting admin_token_file names, and
is sent to every --server: use https:// where others can listen. A server that has no token obeys its own machine only.
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    for name, (brief, description, examples) in COMMANDS.items():
        lines = "".join(f"  delta-sync {example}\n" for example in examples)
        failed = "the server refuses or fails" + (", or does not serve the version in time" if name == "wait" else "")
        text = SERVERS + (NAMES if name in VERSION_HELP else "") + ("" if name == "status" else TOKEN)
        parser = commands.add_parser(
            name,
            help=brief,
            description=description,
            epilog=text + f"\nexamples:\n{lines}{exit_codes(failed)}",
        )
        parser.add_argument(
            "--server", action="append", metavar="URL", help=f"vLLM server; may be repeated (default: {DEFAULT_SERVER})"
        )
        if name in VERSION_HELP:
            parser.add_argument(
                "--version",
                type=older if name == "rollback" else version,
                required=name != "sync",
                metavar=f"{VERSION}|{SERVED}~N" if name == "rollback" else VERSION,
                help=VERSION_HELP[name],
            )
            add_bucket(parser)
            add_trust(parser)
        if name == "status":
            parser.add_argument("--watch", type=interval, metavar="TIME", help="refresh until Ctrl-C")
            parser.set_defaults(handler=_status)
            continue
        longest = WAIT_SECONDS if name == "wait" else CHANGE_SECONDS
        parser.add_argument(
            "--timeout",
            type=interval,
            default=longest,
            metavar="TIME",
            help=f"longest wait for each server (default: {longest:g})",
        )
        parser.set_defaults(handler=_order)


def older(text: str) -> int | str:
    """Parse the version of ``rollback``: as ``version``, or ``served~N``."""
    return text if _BEFORE_SERVED.fullmatch(text) else version(text)


Outcome = tuple[str, Reply | DeltaSyncError]
"""URL of a server, and its status or what went wrong."""


def _status(options: argparse.Namespace) -> Answer:
    if options.watch is None:
        return _answer(options, _ask_each(options))
    while True:
        outcomes = list(_ask_each(options))
        show = partial(redraw, partial(_print_outcomes, outcomes))
        print_event(options, _document(outcomes), show, _first_error(outcomes))
        time.sleep(options.watch)


def _order(options: argparse.Namespace) -> Answer:
    token = admin_token.load_text(settings_of(options).admin_token_file)
    options.run = None
    named = getattr(options, "version", None)
    if isinstance(named, str) and not _BEFORE_SERVED.fullmatch(named):
        run = opened(options)
        options.run, options.version = run.info.run, run.resolve(named).version
    return _answer(options, _ask_each(options, token))


def _ask_each(options: argparse.Namespace, token: str | None = None) -> Iterator[Outcome]:
    servers = options.server or [DEFAULT_SERVER]
    for url in servers:
        check_server_url(url)
    for url in servers:
        try:
            yield url, _ask(url, options, token)
        except DeltaSyncError as error:
            yield url, error


def _ask(url: str, options: argparse.Namespace, token: str | None) -> Reply:
    """Call the command's route.

    Raises:
        ServerError: with kind ``late``, the version is not served in time. Otherwise as ``call_plugin``.
    """
    if options.command == "status":
        return call_plugin(url, "status")
    if options.run is not None:
        followed = call_plugin(url, "status").field("run", str)
        if followed != options.run:
            raise UsageError(f"{url} follows run {_text(followed)}, not {options.run} of --bucket; give a number")
    if options.command == "wait":
        query = urlencode({"version": options.version, "timeout": options.timeout})
        reply = call_plugin(url, f"wait?{query}", token=token, seconds=options.timeout + REQUEST_SECONDS)
        if reply.status == 408:
            late = f"version {options.version} is not served after {options.timeout:g} s: {_summary(reply)}"
            raise ServerError("late", f"{url}: {late}; see delta-sync status, or raise --timeout")
        return reply
    wanted = getattr(options, "version", None)
    if isinstance(wanted, str):
        wanted = _before_served(url, int(wanted.partition("~")[2]))
    body = None if wanted is None else {"version": wanted}
    return call_plugin(url, options.command, method="POST", body=body, token=token, seconds=options.timeout)


def _before_served(url: str, count: int) -> int:
    """Return the version so many before the one that a server serves. Raises ServerError: there is none."""
    served = call_plugin(url, "status").field("served.version", int)
    if served is None or served < count:
        serves = "no version" if served is None else f"version {served}"
        raise ServerError("not_found", f"{url}: it serves {serves}, so there is no version {SERVED}~{count}")
    return served - count


def _answer(options: argparse.Namespace, asked: Iterator[Outcome]) -> Answer:
    """Report each outcome as it comes.

    Raises:
        CommandFailedError: a server failed.
    """
    outcomes = []
    for url, outcome in asked:
        outcomes.append((url, outcome))
        if not options.json:
            _print_outcome(options.command, url, outcome, sys.stderr)
    document, error = _document(outcomes), _first_error(outcomes)
    if error is not None:
        raise CommandFailedError(error, document, lambda: None, error.exit_code)
    return document, lambda: None


def _first_error(outcomes: list[Outcome]) -> DeltaSyncError | None:
    return next((outcome for _, outcome in outcomes if isinstance(outcome, DeltaSyncError)), None)


def _document(outcomes: list[Outcome]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for url, outcome in outcomes:
        if isinstance(outcome, DeltaSyncError):
            rows.append({"server": url, "error": {"kind": outcome.kind, "message": outcome.message}})
        else:
            rows.append({"server": url, "status": outcome.document})
    return {"servers": rows}


def _print_outcomes(outcomes: list[Outcome]) -> None:
    for url, outcome in outcomes:
        _print_outcome("status", url, outcome, sys.stdout)


def _print_outcome(command: str, url: str, outcome: Reply | DeltaSyncError, errors: TextIO) -> None:
    if isinstance(outcome, DeltaSyncError):
        print(clean(f"delta-sync: {outcome.kind}: {outcome.message}"), file=errors, flush=True)
    elif command == "status":
        print_status(url, outcome)
    else:
        print(clean(f"{url}: {DONE[command]}; {_summary(outcome)}"), flush=True)


def _summary(status: Reply) -> str:
    """Return what a server serves, in one line."""
    lag = _text(status.field("lag", int))
    return f"serves {_version(status, 'served')}, lag {lag}, state {_text(status.field('state', str))}"


def print_status(url: str, status: Reply) -> None:
    """Print one screen: what is served and followed, what is wrong and what to do, and the newest updates."""
    state = _text(status.field("state", str))
    meaning = next((f": {text}" for name, text in STATES.items() if name == state), "")
    holding, follows = status.field("holding", bool), status.field("policy", str) == "follow"
    quarantined = status.field("head.quarantined", list) or []
    reasons = [str(reason)[:MAX_MESSAGE] for reason in status.field("ready.reasons", list) or []]
    fields = [
        ("server", url),
        ("served", _version(status, "served")),
        ("head", _version(status, "head")),
        *[("", f"quarantined: {str(reason)[:MAX_MESSAGE]}") for reason in quarantined[:RECENT]],
        ("lag", _text(status.field("lag", int))),
        ("state", state + meaning),
        ("hold", "yes, until delta-sync release" if holding else "no"),
        ("target", _text(status.field("target", str)) + ("" if follows else "; updates on delta-sync sync only")),
        ("ready", "yes" if status.field("ready.ready", bool) else f"no: {'; '.join(reasons[:RECENT]) or '-'}"),
    ]
    kind, message = status.field("last_error.kind", str), status.field("last_error.message", str)
    if kind is None or message is None:
        fields.append(("last error", "none since the last success"))
    else:
        fields.append(("last error", f"{kind[:MAX_MESSAGE]}: {message[:MAX_MESSAGE]}"))
        if status.field("served.version", int) is not None and follows and not holding:
            fields.append(("", "the server keeps serving its version, and retries by itself"))
    print_fields(fields)
    recent = [Reply(status.status, row) for row in status.field("recent", list) or [] if isinstance(row, dict)]
    if recent:
        print()
        titles = ("version", "step", "changed", "payload", "staged in", "paused for")
        print_columns(titles, [_cells(commit) for commit in recent[-RECENT:]])
    print(flush=True)


def _cells(commit: Reply) -> tuple[object, ...]:
    """Return the cells of one update."""
    phases = [commit.field(f"timings_ms.{phase}", float) for phase in STAGING]
    staged = [value for value in phases if value is not None]
    changed, payload = commit.field("changed", int), commit.field("payload_bytes", int)
    return (
        _text(commit.field("version", int)),
        _text(commit.field("step", int)),
        "-" if changed is None else f"{changed:,}",
        "-" if payload is None else size(payload),
        _milliseconds(sum(staged) if staged else None),
        _milliseconds(commit.field("timings_ms.pause", float)),
    )


def _version(status: Reply, name: str) -> str:
    version, step = status.field(f"{name}.version", int), status.field(f"{name}.step", int)
    if version is None:
        return "no version"
    quarantined = ", quarantined" if status.field(f"{name}.quarantined", list) else ""
    return f"version {version} (step {_text(step)}{quarantined})"


def _milliseconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f} ms"


def _text(value: str | int | None) -> str:
    return "-" if value is None else str(value)[:100]
