"""``delta-sync doctor``: arguments and output; what it does is in ``doctor.doctor``."""

import argparse
import sys
import time
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    Command,
    add_bucket,
    add_json,
    add_trust,
    bucket_url,
    count,
    exit_codes,
    keyring_of,
    settings_of,
)
from vllm_delta_sync.cli.text import ProgressBar, clean, size
from vllm_delta_sync.doctor.findings import DEFAULT_BYTES, CheckResult
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.redaction import public_url
from vllm_delta_sync.settings import check_bucket

EXAMPLES = """\
Each line is one check, followed by what to do about those that are not well. Of the bucket: URL, library and
credentials; a small object of its own is put, read, listed, created twice, overwritten and deleted again; latency,
throughput and the store's clock; the run that lies there, quickly (`delta-sync verify` reads all of it); the mirror
(DELTA_SYNC_MIRROR) and the cache (DELTA_SYNC_CACHE_DIR). Of the server: whether it answers, has the plugin, and follows
that run. On either side the first failure is the last check, unless --keep-going.

Objects of a doctor lie under doctor/ and are removed at the end, those of one that was killed by a doctor who comes a
day later.

examples:
  delta-sync doctor --bucket hf://buckets/me/runs/a
  delta-sync doctor --bucket /data/runs/a --read-only --server http://127.0.0.1:8000
  delta-sync doctor --bucket s3://runs/a --bytes 1000000000 --keep-going --json
"""
MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "·"}
PLAIN_MARKS = {"ok": "+", "warning": "!", "failed": "x", "skipped": "-"}
REDRAW_SECONDS = 0.1
_WIDTH = 12
"""Of the longest name of a check."""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    """Add the subcommand."""
    parser = commands.add_parser(
        "doctor",
        help="try out a bucket, and see how a server follows it",
        description="Try out what publishers and receivers need of a bucket, ask a server how it follows the run, and "
        "say what is wrong and how to mend it.",
        epilog=EXAMPLES
        + exit_codes(
            "the run or the server is not well; of several failures the first decides", "well, or warnings only"
        ),
    )
    add_bucket(parser)
    parser.add_argument("--server", metavar="URL", help="also look at this vLLM server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--read-only", action="store_true", help="put nothing: what a receiver without receiver_id needs"
    )
    parser.add_argument(
        "--bytes",
        type=count,
        default=DEFAULT_BYTES,
        metavar="N",
        help=f"size of the object that measures throughput, 0: none (default: {DEFAULT_BYTES})",
    )
    parser.add_argument(
        "--keep-going", action="store_true", help="after a failure go on with what can still be checked"
    )
    add_trust(parser)
    add_json(parser)


def _doctor(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.doctor.doctor import DoctorRequest, examine

    settings = settings_of(options)
    url = bucket_url(options)
    check_bucket(url)
    cache = settings.cache_folder()
    request = DoctorRequest(
        url,
        settings.store(),
        keyring_of(options),
        server=options.server,
        size=options.bytes,
        reads_only=options.read_only,
        keep_going=options.keep_going,
        # What a receiver with these settings would use.
        cache=None if cache is None else (cache, settings.cache_bytes),
    )
    bars = _Bars()
    findings = examine(request, lambda finding: bars.tell(finding, options.json), bars.update)
    failed = [finding for finding in findings if finding.error is not None]
    document: dict[str, Any] = {
        "verdict": not failed,
        "bucket": public_url(request.url),
        "server": None if request.server is None else public_url(request.server),
        "findings": [finding.document() for finding in findings],
    }
    if failed and failed[0].error is not None:
        error = failed[0].error
        document["error"] = {"kind": error.kind, "message": error.message}
        # Something that a run lacks makes it damaged: there is a run.
        lacks = failed[0].check == "run" and isinstance(error, NotFoundError)
        document["exit_code"] = 1 if lacks else error.exit_code
    return document, lambda: _print_mends(findings, options.keep_going)


class _Bars:
    """A bar while a large object moves, and a line for each finding."""

    def __init__(self) -> None:
        self._way = ""
        self._bar: ProgressBar | None = None
        self._drawn = 0.0

    def update(self, way: str, done: int, total: int) -> None:
        if self._bar is None or way != self._way:
            self._way, self._bar = way, ProgressBar(total, "bytes")
        if done < total and time.monotonic() - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = time.monotonic()
        self._bar.update(min(done, total), f"{way}, {size(total)}")

    def tell(self, finding: CheckResult, silent: bool) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not silent:
            print(clean(f"{_mark(finding)} {finding.check.ljust(_WIDTH)}  {finding.summary}"), flush=True)


def _mark(finding: CheckResult) -> str:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return (MARKS if encoding == "utf8" else PLAIN_MARKS)[finding.verdict]


def _print_mends(findings: list[CheckResult], keeps_going: bool) -> None:
    """What to do, and how it came out."""
    mends = [finding for finding in findings if finding.remedy and finding.verdict in ("failed", "warning")]
    if mends:
        print("\nwhat to do:")
        for finding in mends:
            print(clean(f"  {finding.check.ljust(_WIDTH)}  {finding.remedy}."))
    failed = any(finding.error is not None for finding in findings)
    if failed and not keeps_going:
        print("\n--keep-going checks the rest too, where it does not need what failed")
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in MARKS}
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    print(f"\n{counts['failed']} failed, {warnings}, {counts['ok']} well, {counts['skipped']} skipped")


COMMANDS: dict[str, Command] = {"doctor": _doctor}
