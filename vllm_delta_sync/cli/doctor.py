"""``delta-sync doctor``: arguments and output; the work is done by ``doctor.doctor``."""

import argparse
import sys
from typing import Any

from vllm_delta_sync.cli.arguments import (
    Answer,
    CommandFailedError,
    add_bucket,
    add_trust,
    bucket_url,
    byte_count,
    exit_codes,
    keyring_of,
    settings_of,
)
from vllm_delta_sync.cli.text import clean
from vllm_delta_sync.doctor.findings import DEFAULT_BYTES, CheckResult
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.redaction import public_url
from vllm_delta_sync.settings import check_bucket

EXAMPLES = """\
Prints one line for each check, then what to do about failures and warnings. Checks of the bucket: URL and credentials;
whether a small test object can be put, overwritten, read, listed, created only once and deleted; latency, throughput
and the store's clock; the documents of the run's newest 200 versions (`delta-sync verify` reads all of them, and the
objects). Checks of the server: whether it answers, has the plugin, follows the run, and receives notices. Each side
stops at its first failure, unless --keep-going is given.

Test objects are stored under doctor/ and removed at the end. If the doctor is killed, a run of it a day later removes
them.

examples:
  delta-sync doctor --bucket hf://buckets/me/runs/a
  delta-sync doctor --bucket /data/runs/a --read-only --server http://127.0.0.1:8000
  delta-sync doctor --bucket s3://runs/a --bytes 1GB --keep-going --json
"""
MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "·"}
PLAIN_MARKS = {"ok": "+", "warning": "!", "failed": "x", "skipped": "-"}
_WIDTH = 12
"""Length of the longest name of a check."""


def add(commands: "argparse._SubParsersAction[Any]") -> None:
    parser = commands.add_parser(
        "doctor",
        help="test a bucket, and how a server follows it",
        description="Test what publishers and receivers need from a bucket, check how a server follows the run, and "
        "report what is wrong and how to fix it.",
        epilog=EXAMPLES
        + exit_codes("a check of the run or the server failed; the first failure decides", "ok, or warnings only"),
    )
    add_bucket(parser)
    parser.add_argument("--server", metavar="URL", help="also check this vLLM server, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--read-only", action="store_true", help="put nothing; checks what a receiver without receiver_id needs"
    )
    parser.add_argument(
        "--bytes",
        type=byte_count,
        default=DEFAULT_BYTES,
        metavar="SIZE",
        help=f"size of the throughput test's object; 0: no test (default: {DEFAULT_BYTES})",
    )
    parser.add_argument("--keep-going", action="store_true", help="after a failure, continue with the other checks")
    add_trust(parser)
    parser.set_defaults(handler=_doctor)


def _doctor(options: argparse.Namespace) -> Answer:
    from vllm_delta_sync.doctor.doctor import examine

    settings = settings_of(options)
    url = bucket_url(options)
    check_bucket(url)
    findings = examine(
        url,
        settings.store(),
        keyring_of(options),
        server=options.server,
        size=options.bytes,
        reads_only=options.read_only,
        keep_going=options.keep_going,
        on_finding=(lambda finding: None) if options.json else _print_finding,
    )
    failed = [finding for finding in findings if finding.error is not None]
    document: dict[str, Any] = {
        "verdict": not failed,
        "bucket": public_url(url),
        "server": None if options.server is None else public_url(options.server),
        "findings": [finding.document() for finding in findings],
    }

    def show() -> None:
        _print_remedies(findings, options.keep_going)

    if failed and failed[0].error is not None:
        error = failed[0].error
        # NotFoundError from the check "run" means that the run is damaged, not that it does not exist.
        damaged = failed[0].check == "run" and isinstance(error, NotFoundError)
        raise CommandFailedError(error, document, show, 1 if damaged else error.exit_code)
    return document, show


def _print_finding(finding: CheckResult) -> None:
    print(clean(f"{_mark(finding)} {finding.check.ljust(_WIDTH)}  {finding.summary}"), flush=True)


def _mark(finding: CheckResult) -> str:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    return (MARKS if encoding == "utf8" else PLAIN_MARKS)[finding.verdict]


def _print_remedies(findings: list[CheckResult], keeps_going: bool) -> None:
    """Print what to do, and the counts of verdicts."""
    remedies = [finding for finding in findings if finding.remedy and finding.verdict in ("failed", "warning")]
    if remedies:
        print("\nwhat to do:")
        for finding in remedies:
            print(clean(f"  {finding.check.ljust(_WIDTH)}  {finding.remedy}."))
    failed = any(finding.error is not None for finding in findings)
    if failed and not keeps_going:
        print("\n--keep-going also runs the checks that do not depend on the failed one")
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in MARKS}
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    print(f"\n{counts['failed']} failed, {warnings}, {counts['ok']} ok, {counts['skipped']} skipped")
