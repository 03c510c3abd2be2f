"""``delta-sync dashboard`` and ``report``, which the package ``dashboard`` makes."""

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, count, opened, positive
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import clean, many, print_event, size
from vllm_delta_sync.durable_files import write_atomically
from vllm_delta_sync.errors import DeltaSyncError, UsageError
from vllm_delta_sync.server_client import call_plugin, check_server_url

if TYPE_CHECKING:
    from vllm_delta_sync.dashboard.overview import ServerView
    from vllm_delta_sync.dashboard.page_reader import PageReader

SERVER_SECONDS = 3.0
"""Longest wait for the status of a server."""
SOURCES = (
    *RUN,
    option("--server", action="append", metavar="URL", help="vLLM server to ask; may be repeated"),
    option("--last", type=positive, default=200, metavar="N", help="show the newest N versions (default: 200)"),
)
REFUSED = "the run is refused, such as one that is not signed"


@command(
    "dashboard",
    "show a run and its servers on a page in the browser",
    *SOURCES,
    option("--host", default="127.0.0.1", metavar="ADDRESS", help="to listen at (default: 127.0.0.1)"),
    option("--port", type=count, default=8642, metavar="N", help="to listen at; 0: any free one (default: 8642)"),
    failed=REFUSED,
)
def dashboard(options: argparse.Namespace) -> Report:
    """Serve a page that shows versions, lag, pauses, receivers, holds, quarantined versions and errors. Ends on Ctrl-C
    and SIGTERM.

    Reads the manifests of the newest versions (--last), heartbeats, tags, the headers of at most 64 objects for the
    heat map, and the status of each --server. Pause and staging times come from servers only; receivers with their
    versions also come from heartbeats (setting receiver_id).

    The bucket and the servers are read at most every 5 seconds, and only while the page is open in a browser. The page
    has no token and no route that changes anything: listen at another address than 127.0.0.1 only where everyone may
    read it.

    examples:
      delta-sync dashboard --bucket /data/runs/a
      delta-sync dashboard --bucket s3://bucket/runs/a --server http://rollout-1:8000 --server http://rollout-2:8000
      delta-sync dashboard --bucket hf://buckets/me/runs/a --last 1000 --port 9000
    """
    from vllm_delta_sync.dashboard.overview import PAGE_SECONDS, BackgroundReader, build_overview
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
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit())
        print_event(options, {"url": server.url}, lambda: print(clean(f"the page is at {server.url}")))
        server.serve_forever()
    finally:
        server.server_close()
    return Report()


@command(
    "report",
    "write the page of a run as one HTML file",
    *SOURCES,
    option("--to", required=True, metavar="FILE.html", help="file to write; it is replaced"),
    failed=REFUSED,
)
def report(options: argparse.Namespace) -> Report:
    """Write what delta-sync dashboard shows as one HTML file.

    Reads the manifests of the newest versions (--last), heartbeats, tags, the headers of at most 64 objects for the
    heat map, and the status of each --server. Pause and staging times come from servers only; receivers with their
    versions also come from heartbeats (setting receiver_id).

    The file needs no server and loads nothing. It shows the run as it is now, also a damaged one; the exit code then is
    still 0, see delta-sync verify.

    examples:
      delta-sync report --bucket /data/runs/a --to report.html
      delta-sync report --bucket s3://bucket/runs/a --server http://rollout-1:8000 --last 10000 --to report.html
    """
    from vllm_delta_sync.dashboard.overview import RunView, build_overview
    from vllm_delta_sync.dashboard.page import report_page
    from vllm_delta_sync.engine.observe.states import STATES

    run = _reader(options).read()
    now = time.time()
    overview = build_overview("report", now, RunView(run, None, now), _servers(options), STATES)
    # What a link leads to is replaced, as by a shell's ``>``, and not the link.
    page, path = report_page(overview), Path(os.path.realpath(options.to))
    if os.path.exists(path) and not os.path.isfile(path):
        raise UsageError(f"--to {options.to!r} is a folder, a device or a pipe; name a file")
    try:
        # Whole, or the old one stays.
        write_atomically(path, page, path.with_name(f".{path.name}.{os.getpid()}"), 0o644)
    except OSError as error:
        raise UsageError(f"--to {str(path)!r} cannot be written: {error.strerror}; name another file") from error
    versions = run["versions"]["version"]
    levels = [problem["level"] for problem in overview["problems"]]
    data = {
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
    found = f"{many(len(versions), 'version')}, {many(len(run['receivers']), 'receiver')}"
    wrong = f"{many(levels.count('error'), 'error')}, {many(levels.count('warning'), 'warning')}"
    return Report(data, lambda _: print(clean(f"{options.to}: {found}, {wrong}; {size(len(page))}")))


def _reader(options: argparse.Namespace) -> "PageReader":
    """Open the run, so that what is wrong with the command ends it now."""
    from vllm_delta_sync.dashboard.page_reader import PageReader

    for url in options.server or ():
        check_server_url(url)
    first = [opened(options)]
    return PageReader(lambda: first.pop() if first else opened(options), options.last)


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
