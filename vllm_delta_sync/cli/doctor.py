"""``delta-sync doctor``, which ``doctor.doctor`` does."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from vllm_delta_sync.cli.arguments import RUN, as_finding, bucket_url, byte_count, keyring_of
from vllm_delta_sync.cli.command import Report, command, option
from vllm_delta_sync.cli.text import clean, writing
from vllm_delta_sync.errors import NotFoundError, UsageError
from vllm_delta_sync.logs import public_url
from vllm_delta_sync.settings import check_bucket

if TYPE_CHECKING:
    from vllm_delta_sync.doctor.findings import CheckResult

MARKS = {"ok": "✓", "warning": "!", "failed": "✗", "skipped": "·"}
PLAIN_MARKS = {"ok": "+", "warning": "!", "failed": "x", "skipped": "-"}
_WIDTH = 12
"""Length of the longest name of a check."""


@command(
    "doctor",
    "test a bucket, and how a server follows it",
    *RUN,
    option("--server", metavar="URL", help="also check this vLLM server, such as http://127.0.0.1:8000"),
    option("--adapter", metavar="NAME", help="with --server: the run is that of this adapter in its lora_adapters"),
    option("--read-only", action="store_true", help="put nothing; checks what a receiver without receiver_id needs"),
    option(
        "--bytes",
        type=byte_count,
        default=32_000_000,
        metavar="SIZE",
        help="size of the throughput test's object; 0: no test (default: 32MB)",
    ),
    failed="a check of the run or the server failed; the first failure decides",
    done="ok, or warnings only",
)
def doctor(options: argparse.Namespace) -> Report:
    """Test what publishers and receivers need from a bucket, check how a server follows the run, and report what is
    wrong and how to fix it.

    Prints one line for each check, then what to do about failures and warnings. Checks of the bucket: URL and
    credentials; whether a small test object can be put, overwritten, read, listed, created only once and deleted;
    throughput and the store's clock; the run's newest version (`delta-sync verify` reads all of the run). Checks of the
    server: whether it answers, has the plugin, follows the run, and receives notices. A check that needs one that
    failed is skipped.

    Test objects are stored under doctor/ and removed at the end. What a doctor that was killed leaves there, readers
    of the run ignore; delete it by hand.

    examples:
      delta-sync doctor --bucket hf://buckets/me/runs/a
      delta-sync doctor --bucket /data/runs/a --read-only --server http://127.0.0.1:8000
      delta-sync doctor --bucket s3://runs/a --bytes 1GB --json
    """
    from vllm_delta_sync.doctor.doctor import examine

    url = bucket_url(options)
    check_bucket(url)
    if options.adapter is not None and options.server is None:
        raise UsageError("--adapter needs --server: it names an adapter of that server")
    findings = examine(
        url,
        options.settings.store(),
        keyring_of(options),
        server=options.server,
        adapter=options.adapter,
        size=options.bytes,
        reads_only=options.read_only,
        on_finding=(lambda finding: None) if options.json else _print_finding,
    )
    first = next((finding for finding in findings if finding.error is not None), None)
    error = None if first is None else first.error
    if first is not None and first.check == "run" and isinstance(error, NotFoundError):
        as_finding(error)  # the run is damaged; that there is none is no failure
    data: dict[str, Any] = {
        "verdict": error is None,
        "bucket": public_url(url),
        "server": None if options.server is None else public_url(options.server),
        "findings": [finding.document() for finding in findings],
    }
    return Report(data, lambda _: _print_remedies(findings), error)


def _print_finding(finding: "CheckResult") -> None:
    encoding = (sys.stdout.encoding or "").lower().replace("-", "")
    mark = (MARKS if encoding == "utf8" else PLAIN_MARKS)[finding.verdict]
    with writing():
        print(clean(f"{mark} {finding.check.ljust(_WIDTH)}  {finding.summary}"))


def _print_remedies(findings: "list[CheckResult]") -> None:
    """Print what to do, and the counts of verdicts."""
    remedies = [finding for finding in findings if finding.remedy and finding.verdict in ("failed", "warning")]
    if remedies:
        print("\nwhat to do:")
    for finding in remedies:
        print(clean(f"  {finding.check.ljust(_WIDTH)}  {finding.remedy}."))
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in MARKS}
    warnings = f"{counts['warning']} warning{'' if counts['warning'] == 1 else 's'}"
    print(f"\n{counts['failed']} failed, {warnings}, {counts['ok']} ok, {counts['skipped']} skipped")
