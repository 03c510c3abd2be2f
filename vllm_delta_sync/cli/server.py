"""``delta-sync status``, ``sync``, ``rollback``, ``hold``, ``release`` and ``wait``: a client of running servers.

Each command calls the route of its name; ``server_client`` makes the requests.
"""

import argparse
import re
import time
from typing import Any
from urllib.parse import urlencode

from vllm_delta_sync import admin_token
from vllm_delta_sync.cli.arguments import RUN, VERSION, interval, opened, version
from vllm_delta_sync.cli.command import Command, Option, Report, option
from vllm_delta_sync.cli.text import clean, known, pick, print_columns, print_error, print_fields, size, writing
from vllm_delta_sync.engine.observe.states import STATES
from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.server_client import (
    REQUEST_SECONDS,
    Reply,
    ServerError,
    ServerStatus,
    VersionPoint,
    call_plugin,
    check_server_url,
)

DEFAULT_SERVER = "http://localhost:8000"
WAIT_SECONDS = 20.0
"""Longest request of ``wait``: proxies and firewalls drop what is silent for long, from half a minute on."""
RECENT = 5
"""Most updates that ``status`` lists."""
SERVED = "served"
_BEFORE_SERVED = re.compile(f"{SERVED}~[0-9]{{1,10}}")

SERVERS = """\
Several servers are asked in turn, also after one has failed; the exit code is that of the first failure. The data of
--json are {"servers": [{"server", "status" or "error"}]}, with each server's own answer.
"""
NAMES = """
A version that is named, as head~2 or tag:NAME, is looked up in the run (--bucket), which each server must follow.
"""
TOKEN = f"""
The admin token comes from {admin_token.VARIABLE}, or from the file that the setting admin_token_file names, and
is sent to every --server: use https:// where others can listen. A server that has no token obeys its own machine only.
"""
FAILED = "the server refuses or fails"
DONE = {"sync": "synced", "rollback": "rolled back", "hold": "held", "release": "released", "wait": "done"}


def older(text: str) -> int | str:
    """Parse the version of ``rollback``: as ``version``, or ``served~N``."""
    return text if _BEFORE_SERVED.fullmatch(text) else version(text)


def _named(text: str, metavar: str = VERSION, parse: Any = version, required: bool = True) -> tuple[Option, ...]:
    """Options of a command that takes a version by number or name."""
    return (option("--version", type=parse, required=required, metavar=metavar, help=text), *RUN)


def _timeout(longest: float = 600.0) -> Option:
    return option(
        "--timeout",
        type=interval,
        default=longest,
        metavar="TIME",
        help=f"longest wait for each server (default: {longest:g})",
    )


def _order(options: argparse.Namespace) -> Report:
    """Ask each server, and print each outcome as it comes; the error is that of the first server that failed."""
    token = None
    if options.command != "status":
        token = admin_token.load_text(options.settings.admin_token_file)
    options.run = None
    named = getattr(options, "version", None)
    if isinstance(named, str) and not _BEFORE_SERVED.fullmatch(named):
        run = opened(options)
        options.run, options.version = run.info.run, run.resolve(named).version
    servers = options.server or [DEFAULT_SERVER]
    for url in servers:
        check_server_url(url)
    rows: list[dict[str, Any]] = []
    first: DeltaSyncError | None = None
    for url in servers:
        outcome: Reply | DeltaSyncError
        try:
            outcome = _ask(url, options, token)
            rows.append({"server": url, "status": outcome.document})
        except DeltaSyncError as error:
            outcome = error
            first = first or error
            rows.append({"server": url, "error": pick(error, "kind message")})
        if not options.json:
            with writing():
                _print_outcome(options.command, url, outcome)
    return Report({"servers": rows}, lambda _: None, first)


def _ask(url: str, options: argparse.Namespace, token: str | None) -> Reply:
    """Call the command's route.

    Raises:
        ServerError: with kind ``late``, the version is not served in time. Otherwise as ``call_plugin``.
    """
    if options.command == "status":
        return call_plugin(url, "status")
    if options.run is not None:
        followed = call_plugin(url, "status").server_status.run
        if followed != options.run:
            raise UsageError(f"{url} follows run {known(followed)}, not {options.run} of --bucket; give a number")
    if options.command == "wait":
        deadline = time.monotonic() + options.timeout
        while True:
            left = max(0.0, deadline - time.monotonic())
            seconds = min(left, WAIT_SECONDS)
            query = urlencode({"version": options.version, "timeout": seconds})
            reply = call_plugin(url, f"wait?{query}", token=token, seconds=seconds + REQUEST_SECONDS)
            if reply.status != 408 or seconds == left:
                break
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
    served = call_plugin(url, "status").server_status.served
    if served is None or served.version < count:
        serves = "no version" if served is None else f"version {served.version}"
        raise ServerError("not_found", f"{url}: it serves {serves}, so there is no version {SERVED}~{count}")
    return served.version - count


def _print_outcome(command: str, url: str, outcome: Reply | DeltaSyncError) -> None:
    if isinstance(outcome, DeltaSyncError):
        print_error(outcome)
    elif command == "status":
        _print_status(url, outcome.server_status)
    else:
        print(clean(f"{url}: {DONE[command]}; {_summary(outcome)}"))


def _summary(reply: Reply) -> str:
    """Return what a server serves, in one line."""
    status = reply.server_status
    return f"serves {_version(status.served)}, lag {known(status.lag)}, state {known(status.state)}"


def _print_status(url: str, status: ServerStatus) -> None:
    """Print one screen: what is served and followed, what is wrong and what to do, and the newest updates."""
    meaning = next((f": {text}" for name, text in STATES.items() if name == status.state), "")
    follows, error = status.policy == "follow", status.last_error
    quarantined = [] if status.head is None else status.head.quarantined
    retries = error is not None and status.retries
    stale = ""
    if follows and status.holding and status.polled is not None:
        stale = f", {status.polled:.0f} s ago: a held server does not read the bucket"
    print_fields(
        ("server", url),
        ("served", _version(status.served)),
        ("head", _version(status.head)),
        *(("", f"quarantined: {reason}") for reason in quarantined[:RECENT]),
        ("lag", known(status.lag) + stale),
        ("state", known(status.state) + meaning),
        ("hold", "yes, until delta-sync release" if status.holding else "no"),
        ("target", known(status.target) + ("" if follows else "; updates on delta-sync sync only")),
        ("ready", "yes" if status.ready else f"no: {'; '.join(status.reasons[:RECENT]) or '-'}"),
        ("last error", "none since the last success" if error is None else f"{error.kind}: {error.message}"),
        ("", "the server keeps serving its version, and retries by itself" if retries else None),
    )
    if status.recent:
        print()
        titles = ("version", "step", "changed", "payload", "staged in", "paused for")
        cells = [
            (
                known(commit.version),
                known(commit.step),
                known(commit.changed, "{:,}"),
                "-" if commit.payload is None else size(commit.payload),
                known(commit.staged, "{:.1f} ms"),
                known(commit.pause, "{:.1f} ms"),
            )
            for commit in status.recent[-RECENT:]
        ]
        print_columns(titles, cells)
    print()


def _version(point: VersionPoint | None) -> str:
    if point is None:
        return "no version"
    return f"version {point.version} (step {known(point.step)}{', quarantined' if point.quarantined else ''})"


def _command(
    name: str, brief: str, text: str, examples: str, *options: Option, failed: str = FAILED, about: str = TOKEN
) -> Command:
    lines = "".join(f"  delta-sync {example}\n" for example in examples.splitlines())
    server = option(
        "--server", action="append", metavar="URL", help=f"vLLM server; may be repeated (default: {DEFAULT_SERVER})"
    )
    return Command(name, brief, f"{text}\n\n{SERVERS}{about}\nexamples:\n{lines}", (server, *options), _order, failed)


COMMANDS = (
    _command(
        "status",
        "show what a server serves",
        "Show what a server serves, its lag, its last error and its recent updates.",
        "status\nstatus --server http://rollout-1:8000 --server http://rollout-2:8000",
        about="",
    ),
    _command(
        "sync",
        "make a server update now",
        "Make a server poll the bucket now, and serve the newest version or a named one.",
        "sync\nsync --server http://rollout-1:8000 --version 20",
        *_named(
            "version to serve; an older one than the served one is held. Default: what the server's target names",
            required=False,
        ),
        _timeout(),
        about=NAMES + TOKEN,
    ),
    _command(
        "rollback",
        "make a server serve an older version",
        "Make a server serve an older version and hold it, until delta-sync release.",
        f"rollback --server http://rollout-1:8000 --version 18\nrollback --version {SERVED}~2\n"
        "rollback --bucket /data/runs/a --version tag:best",
        *_named(
            f"version to roll back to; {SERVED}~N: N before the one that each server serves",
            metavar=f"{VERSION}|{SERVED}~N",
            parse=older,
        ),
        _timeout(),
        about=NAMES + TOKEN,
    ),
    _command(
        "hold",
        "make a server stay at its version",
        "Make a server stay at the version that it serves, whatever is published, until delta-sync release.",
        "hold --server http://rollout-1:8000 --server http://rollout-2:8000",
        _timeout(),
    ),
    _command(
        "release",
        "end a hold",
        "End a hold or a rollback: the server follows the run again.",
        "release",
        _timeout(),
    ),
    _command(
        "wait",
        "wait until a server serves a version",
        "Wait until a server serves a version or a later one. Fails at once if an operator must act first.",
        "wait --version 20 --timeout 60",
        *_named("version to wait for"),
        _timeout(30.0),
        failed=f"{FAILED}, or does not serve the version in time",
        about=NAMES + TOKEN,
    ),
)
