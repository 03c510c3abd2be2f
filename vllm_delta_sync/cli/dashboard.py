"""``delta-sync dashboard`` and ``report``: arguments; the work is done by the package ``dashboard``."""

import argparse
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    add_bucket,
    add_trust,
    count,
    exit_codes,
    opened,
    positive,
    print_event,
)
from vllm_delta_sync.cli.text import clean, many, size
from vllm_delta_sync.durable_files import write_atomically
from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.server_client import call_plugin, check_server_url

if TYPE_CHECKING:
    from vllm_delta_sync.dashboard.overview import ServerView
    from vllm_delta_sync.dashboard.run_reader import RunReader

PORT = 8642
SERVER_SECONDS = 3.0
"""Longest wait for the status of a server."""

READS = """\
Reads the manifests of the newest versions (--last), heartbeats, tags, the headers of at most 64 objects for the heat
map, and the status of each --server. Pause and staging times come from servers only; receivers with their versions also
come from heartbeats (setting receiver_id).
"""
DASHBOARD = f"""\
{READS}
The bucket and the servers are read at most every 5 seconds, and only while the page is open in a browser. The page has
no token and no route that changes anything: listen at another address than 127.0.0.1 only where everyone may read it.

examples:
  delta-sync dashboard --bucket /data/runs/a
  delta-sync dashboard --bucket s3://bucket/runs/a --server http://rollout-1:8000 --server http://rollout-2:8000
  delta-sync dashboard --bucket hf://buckets/me/runs/a --last 1000 --port 9000
"""
REPORT = f"""\
{READS}
The file needs no server and loads nothing. It shows the run as it is now, also a damaged one; the exit code then is
still 0, see delta-sync verify.

examples:
  delta-sync report --bucket /data/runs/a --to report.html
  delta-sync report --bucket s3://bucket/runs/a --server http://rollout-1:8000 --last 10000 --to report.html
"""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    dashboard = commands.add_parser(
        "dashboard",
        help="show a run and its servers on a page in the browser",
        description="Serve a page that shows versions, lag, pauses, receivers, holds, quarantined versions and errors. "
        "Ends on Ctrl-C and SIGTERM.",
        epilog=DASHBOARD + exit_codes("the run is refused, such as one that is not signed"),
    )
    _add_sources(dashboard)
    dashboard.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: 127.0.0.1)")
    dashboard.add_argument(
        "--port", type=count, default=PORT, metavar="N", help=f"to listen at; 0: any free one (default: {PORT})"
    )
    dashboard.set_defaults(handler=_dashboard)
    report = commands.add_parser(
        "report",
        help="write the page of a run as one HTML file",
        description="Write what delta-sync dashboard shows as one HTML file.",
        epilog=REPORT + exit_codes("the run is refused, such as one that is not signed"),
    )
    _add_sources(report)
    report.add_argument("--to", required=True, metavar="FILE.html", help="file to write; it is replaced")
    report.set_defaults(handler=_report)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    add_bucket(parser)
    add_trust(parser)
    parser.add_argument("--server", action="append", metavar="URL", help="vLLM server to ask; may be repeated")
    parser.add_argument(
        "--last", type=positive, default=200, metavar="N", help="show the newest N versions (default: 200)"
    )


def _reader(options: argparse.Namespace) -> "RunReader":
    """Open the run, so that what is wrong with the command ends it now."""
    from vllm_delta_sync.dashboard.run_reader import RunReader

    for url in options.server or ():
        check_server_url(url)
    first = [opened(options)]
    return RunReader(lambda: first.pop() if first else opened(options), options.last)


def _servers(options: argparse.Namespace) -> "list[ServerView]":
    """Ask all servers at once."""
    from vllm_delta_sync.bucket.threads import in_parallel
    from vllm_delta_sync.dashboard.overview import ServerView

    def ask(url: str) -> ServerView:
        try:
            return ServerView(url, call_plugin(url, "status", seconds=SERVER_SECONDS).document)
        except DeltaSyncError as error:
            return ServerView(url, error)

    return list(in_parallel(ask, options.server or ()))


def _dashboard(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.dashboard.background_reader import BackgroundReader
    from vllm_delta_sync.dashboard.overview import PAGE_SECONDS, build_overview
    from vllm_delta_sync.dashboard.web_server import DashboardServer
    from vllm_delta_sync.engine.observe.states import STATES

    run = _reader(options)
    servers: list[ServerView] = []

    def read() -> dict[str, Any]:
        servers[:] = _servers(options)
        return run.read()

    reader = BackgroundReader(read)

    def overview() -> dict[str, Any]:
        view = reader.latest()
        return build_overview("dashboard", time.time(), view, list(servers), STATES, PAGE_SECONDS)

    server = DashboardServer(options.host, options.port, overview)
    try:
        text = clean(f"the page is at {server.url}")
        print_event(options, {"url": server.url}, partial(print, text, flush=True))
        with _ending(server):
            server.serve_forever(poll_interval=0.1)
    finally:
        server.server_close()
    # Nothing is left to print: the address was printed at the start.
    return None, lambda: None


@contextmanager
def _ending(server: Any) -> Iterator[None]:
    """Let SIGTERM end the server. ``shutdown`` waits for the loop that the handler interrupts, so a thread calls it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    end = lambda number, frame: threading.Thread(target=server.shutdown, daemon=True).start()  # noqa: E731
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _report(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.dashboard.overview import RunView, build_overview
    from vllm_delta_sync.dashboard.page import report_page
    from vllm_delta_sync.engine.observe.states import STATES

    run = _reader(options).read()
    now = time.time()
    overview = build_overview("report", now, RunView(run, None, now), _servers(options), STATES)
    page = report_page(overview)
    _write(Path(options.to), page)
    versions = run["versions"]["version"]
    levels = [problem["level"] for problem in overview["problems"]]
    document = {
        "run": run["id"],
        "url": run["url"],
        "to": options.to,
        "bytes": len(page),
        "first": versions[0] if versions else None,
        "last": versions[-1] if versions else None,
        "receivers": len(run["receivers"]),
        "errors": levels.count("error"),
        "warnings": levels.count("warning"),
    }

    def show() -> None:
        found = f"{many(len(versions), 'version')}, {many(document['receivers'], 'receiver')}"
        wrong = f"{many(document['errors'], 'error')}, {many(document['warnings'], 'warning')}"
        print(clean(f"{options.to}: {found}, {wrong}; {size(len(page))}"))

    return document, show


def _write(path: Path, data: bytes) -> None:
    """Write a file whole, or leave the old one."""
    try:
        write_atomically(path, data, path.with_name(f".{path.name}.{os.getpid()}"), 0o644)
    except OSError as error:
        raise UsageError(f"--to {str(path)!r} cannot be written: {error.strerror}; name another file") from error
