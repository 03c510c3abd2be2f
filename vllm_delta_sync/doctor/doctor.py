"""``examine`` runs the checks of ``delta-sync doctor``: those of a bucket, then those of a server."""

from collections.abc import Callable

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.bucket.threads import start_call
from vllm_delta_sync.doctor.bucket_checks import BucketProbe
from vllm_delta_sync.doctor.findings import CheckResult, CheckRunner, HungError, skipped, wait_for, warning
from vllm_delta_sync.doctor.server_checks import ServerProbe
from vllm_delta_sync.server_client import REQUEST_SECONDS
from vllm_delta_sync.trust import Keyring

SETTLE_SECONDS = 3.0
"""Seconds to wait, after an interrupt, for the request in flight."""


def examine(
    url: str,
    options: StoreOptions,
    keyring: Keyring,
    server: str | None = None,
    size: int = 32_000_000,
    reads_only: bool = False,
    on_finding: Callable[[CheckResult], None] = lambda finding: None,
) -> list[CheckResult]:
    """Run all checks. Removes the test objects at the end, even after an interrupt.

    Args:
        url: of a run. options: of the store's client; the mirror is not used. server: URL of a vLLM server.
        size: bytes of the throughput test; 0: no test. reads_only: put nothing.
        on_finding: called with each finding at once.

    Returns:
        the findings, those of the bucket first. Raises only interrupts.
    """
    runner = CheckRunner(on_finding)
    probe = BucketProbe(url, options, keyring, size, reads_only)
    # A request with retries takes up to three deadlines, and a check makes few requests; directories never retry.
    seconds = options.store_deadline * (2 if probe.is_directory else 6)
    limits = {"throughput": seconds + 6 * options.allowance(size), "run": 10 * seconds}
    unwanted = {} if size else {"throughput": "--bytes 0"}
    if reads_only:
        unwanted |= dict.fromkeys(("put", "create", "delete", "clock"), "--read-only")
    try:
        for name, call, needs in (
            ("url", probe.url, ""),
            ("credentials", probe.credentials, "url"),
            ("put", probe.put, "credentials"),
            ("get", probe.get, "credentials" if reads_only else "put"),
            ("list", probe.listing, "get"),
            ("create", probe.create, "put"),
            ("delete", probe.delete, "get"),
            ("latency", probe.latency, "get"),
            ("throughput", probe.throughput, "get"),
            ("clock", probe.clock, "put"),
            ("run", probe.check_run, "credentials"),
        ):
            if name in unwanted:
                runner.add(name, skipped(unwanted[name]))
            else:
                runner.check(name, call, limits.get(name, seconds), needs)
    finally:
        _clean_up(runner, probe, seconds)
    if server is None:
        return runner.findings
    return runner.findings + _examine_server(server, probe, CheckRunner(on_finding))


def _clean_up(runner: CheckRunner, probe: BucketProbe, seconds: float) -> None:
    """Remove the test objects, within the time of a few requests; if the store hangs, a later doctor does it."""
    runner.settle(SETTLE_SECONDS)
    left = probe.made
    try:
        if not runner.hung:
            left = wait_for(start_call(probe.clean_up), seconds)
    except HungError:
        pass
    if left:
        summary = f"could not remove test objects from the bucket: {', '.join(left)}"
        remedy = "delta-sync doctor removes them when it runs a day later"
        runner.add("clean-up", warning(summary, remedy, left=left))


def _examine_server(url: str, bucket: BucketProbe, runner: CheckRunner) -> list[CheckResult]:
    probe = ServerProbe(url, bucket.run, bucket.head)
    for name, call, needs in (
        ("server", probe.reach, ""),
        ("plugin", probe.plugin, "server"),
        ("state", probe.state, "plugin"),
        ("same run", probe.same_run, "plugin"),
        ("lag", probe.lag, "same run"),
        ("last error", probe.last_error, "plugin"),
        ("notice", probe.notice, "plugin"),
    ):
        runner.check(name, call, 4 * REQUEST_SECONDS, needs)
    return runner.findings
