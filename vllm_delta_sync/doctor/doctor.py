"""``examine`` runs the checks of ``delta-sync doctor``: those of a bucket, then those of a server."""

from collections.abc import Callable
from dataclasses import replace

from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.doctor.bucket_checks import BucketProbe
from vllm_delta_sync.doctor.findings import CheckResult, failed, skipped, warning
from vllm_delta_sync.doctor.server_checks import ServerProbe
from vllm_delta_sync.errors import DeltaSyncError, StoreError
from vllm_delta_sync.trust import Keyring


def examine(
    url: str,
    options: StoreOptions,
    keyring: Keyring,
    server: str | None = None,
    adapter: str | None = None,
    size: int = 32_000_000,
    reads_only: bool = False,
    on_finding: Callable[[CheckResult], None] = lambda finding: None,
) -> list[CheckResult]:
    """Run all checks. Removes the test objects at the end, even after an interrupt.

    Args:
        url: of a run. options: of the store's client; the mirror is not used. server: URL of a vLLM server.
        adapter: see ``ServerProbe``.
        size: bytes of the throughput test; 0: no test. reads_only: put nothing.
        on_finding: called with each finding at once.

    Returns:
        the findings, those of the bucket first. Raises only interrupts.
    """
    findings: list[CheckResult] = []

    def add(name: str, found: CheckResult) -> None:
        findings.append(replace(found, check=name))
        on_finding(findings[-1])

    def check(name: str, call: Callable[[], CheckResult], needs: str) -> None:
        """Run a check, unless the check that it needs failed or was skipped."""
        if any(finding.check == needs and finding.verdict in ("failed", "skipped") for finding in findings):
            add(name, skipped(f"not checked: it needs {needs!r}"))
            return
        try:
            found = call()
        except DeltaSyncError as error:
            found = failed(error)
        except Exception as error:  # noqa: BLE001  an exception from a client library is a finding, not a traceback
            found = failed(StoreError(f"unexpected {type(error).__name__}: {error}"))
        add(name, found)

    probe = BucketProbe(url, options, keyring, size, reads_only)
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
            ("throughput", probe.throughput, "get"),
            ("clock", probe.clock, "put"),
            ("run", probe.check_run, "credentials"),
        ):
            if name in unwanted:
                add(name, skipped(unwanted[name]))
            else:
                check(name, call, needs)
    finally:
        left = probe.clean_up()
        if left:
            summary = f"could not remove test objects from the bucket: {', '.join(left)}"
            add("clean-up", warning(summary, "Delete them; readers of the run ignore them", left=left))
    if server is not None:
        served = ServerProbe(server, probe.run, probe.head, adapter)
        for name, call, needs in (
            ("server", served.reach, ""),
            ("plugin", served.plugin, "server"),
            ("state", served.state, "plugin"),
            ("same run", served.same_run, "plugin"),
            ("lag", served.lag, "same run"),
            ("last error", served.last_error, "plugin"),
            ("notice", served.notice, "plugin"),
        ):
            check(name, call, needs)
    return findings
