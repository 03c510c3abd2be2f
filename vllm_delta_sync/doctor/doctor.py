"""``examine`` runs the checks of ``delta-sync doctor``: those of a bucket, then those of a server."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from vllm_delta_sync.bucket import Bucket, StoreOptions
from vllm_delta_sync.bucket.factory import open_mirror
from vllm_delta_sync.doctor.access_checks import AccessChecks
from vllm_delta_sync.doctor.findings import DEFAULT_BYTES, CheckResult, CheckRunner, HungError, Progress, bounded
from vllm_delta_sync.doctor.run_checks import RunProbe, check_cache
from vllm_delta_sync.doctor.server_checks import ServerProbe
from vllm_delta_sync.doctor.server_client import REQUEST_SECONDS
from vllm_delta_sync.doctor.store_checks import StoreProbe
from vllm_delta_sync.errors import StoreError
from vllm_delta_sync.trust import Keyring

BUCKET_CHECKS = (
    *("url", "library", "credentials", "put", "get", "range", "list", "create", "race", "overwrite", "delete"),
    *("latency", "throughput", "clock", "run", "mirror", "cache"),
)
SERVER_CHECKS = (
    *("server", "plugin", "state", "routes", "same run", "lag", "last error", "versions", "notice", "admin"),
)
WRITING = ("put", "create", "race", "overwrite", "delete", "clock")
SETTLE_SECONDS = 3.0
"""Seconds to wait, after an interrupt, for the request in flight."""


@dataclass(frozen=True)
class DoctorRequest:
    """What to check.

    Attributes:
        url: of a run. options: of the store's client. server: URL of a vLLM server.
        size: bytes of the throughput test; 0: no test. reads_only: put nothing. keep_going: see ``CheckRunner``.
        cache: settings ``cache_dir`` and ``cache_bytes``.
    """

    url: str
    options: StoreOptions
    keyring: Keyring = field(default_factory=Keyring)
    server: str | None = None
    size: int = DEFAULT_BYTES
    reads_only: bool = False
    keep_going: bool = False
    cache: tuple[Path, int] | None = None


def examine(
    request: DoctorRequest,
    on_finding: Callable[[CheckResult], None] = lambda finding: None,
    progress: Progress | None = None,
) -> list[CheckResult]:
    """Run all checks. Removes the test objects at the end, even after an interrupt.

    Args:
        on_finding: called with each finding at once. progress: see ``Progress``; called from other threads.

    Returns:
        the findings, in the order of ``BUCKET_CHECKS`` and ``SERVER_CHECKS``. Raises only interrupts.
    """
    bucket_checks = _BucketChecks(request, on_finding, progress)
    findings = bucket_checks.examine()
    if request.server is not None:
        findings = findings + _examine_server(request, request.server, bucket_checks, on_finding)
    return findings


class _BucketChecks:
    def __init__(
        self, request: DoctorRequest, on_finding: Callable[[CheckResult], None], progress: Progress | None
    ) -> None:
        self._request = request
        self._progress = progress
        # The store's own progress output would mix with the doctor's; the mirror has a check of its own.
        self._options = request.options.model_copy(update={"mirror": None, "store_progress": "off"})
        self._runner = CheckRunner(on_finding, request.keep_going)
        self._access = AccessChecks(request.url, self._options, request.reads_only)
        self._probe: StoreProbe | None = None
        self.run: RunProbe | None = None
        # A request with retries takes up to three deadlines, and a check makes few requests; directories never retry.
        self._seconds = self._options.store_deadline * (2 if self._access.is_directory else 6)

    def examine(self) -> list[CheckResult]:
        runner, seconds = self._runner, self._seconds
        runner.check("url", self._access.url, seconds)
        runner.check("library", self._access.library, seconds)
        runner.check("credentials", self._access.credentials, seconds, ("url", "library"))
        bucket = self._access.bucket
        if bucket is None:
            for name in BUCKET_CHECKS[3:]:
                runner.check(name, _unreachable, seconds, ("url", "library"))
            return runner.findings
        try:
            self._examine_store(bucket)
            self._examine_run(bucket)
            return runner.findings
        finally:
            self._clean_up()

    def _examine_store(self, bucket: Bucket) -> None:
        request, runner = self._request, self._runner
        self._probe = probe = StoreProbe(bucket, self._options, request.size, request.reads_only, self._progress)
        needs = {
            "put": ("credentials",),
            "get": ("credentials",) if request.reads_only else ("put",),
            **dict.fromkeys(("create", "race", "clock"), ("put",)),
            **dict.fromkeys(("range", "overwrite", "latency"), ("get",)),
            "list": ("get",),
            "delete": ("overwrite",),
            "throughput": ("get",),
        }
        calls = {
            "put": probe.put,
            "get": probe.get,
            "range": probe.part,
            "list": probe.listing,
            "create": probe.create,
            "race": probe.race,
            "overwrite": probe.overwrite,
            "delete": probe.delete,
            "latency": probe.latency,
            "throughput": probe.throughput,
            "clock": probe.clock,
        }
        for name, call in calls.items():
            if request.reads_only and name in WRITING:
                runner.skip(name, "--read-only")
            elif name == "throughput" and not request.size:
                runner.skip(name, "--bytes 0")
            else:
                moving = 6 * self._options.allowance(request.size) if name == "throughput" else 0
                runner.check(name, call, self._seconds + moving, needs[name])

    def _examine_run(self, bucket: Bucket) -> None:
        runner, seconds, mirror = self._runner, self._seconds, self._request.options.mirror
        self.run = run = RunProbe(bucket, self._request.keyring, self._request.reads_only)
        runner.check("run", run.check_run, 2 * seconds, ("credentials",))
        if mirror is None:
            runner.skip("mirror", "no mirror is set")
        else:
            runner.check("mirror", lambda: self._mirror(run, mirror), 2 * seconds, ("run",))
        cache = self._request.cache
        if cache is None:
            runner.skip("cache", "no cache is used for this bucket")
        else:
            runner.check("cache", lambda: check_cache(*cache), seconds)

    def _mirror(self, run: RunProbe, url: str) -> CheckResult:
        with open_mirror(url, self._options) as mirror:
            return run.mirror(mirror)

    def _clean_up(self) -> None:
        """Remove the test objects, within the time of a few requests; if the store hangs, a later doctor does it."""
        runner, bucket, probe = self._runner, self._access.bucket, self._probe
        if bucket is None or probe is None:
            return
        runner.settle(SETTLE_SECONDS)
        try:
            left = probe.made if runner.hung else bounded(probe.clean_up, self._seconds)
            if not runner.hung:
                bounded(bucket.close, self._seconds)
        except HungError:
            left = probe.made
        if left:
            summary = f"could not remove test objects from the bucket: {', '.join(left)}"
            remedy = "delta-sync doctor removes them when it runs a day later"
            runner.add(CheckResult("clean-up", "warning", summary, {"left": left}, remedy))
        if not runner.hung:
            self._access.remove_folders()


def _examine_server(
    request: DoctorRequest, url: str, bucket_checks: _BucketChecks, on_finding: Callable[[CheckResult], None]
) -> list[CheckResult]:
    runner = CheckRunner(on_finding, request.keep_going)
    probe = ServerProbe(url)
    if bucket_checks.run is not None:
        head = bucket_checks.run.head
        probe.run, probe.head = bucket_checks.run.run, None if head is None else head.version
    calls = (
        *(probe.reach, probe.plugin, probe.state, probe.routes, probe.same_run, probe.lag, probe.last_error),
        *(probe.versions, probe.notice, probe.admin),
    )
    for name, call in zip(SERVER_CHECKS, calls, strict=True):
        needs = ("server", "plugin")[: SERVER_CHECKS.index(name)]
        runner.check(name, call, 4 * REQUEST_SECONDS, needs)
    return runner.findings


def _unreachable() -> CheckResult:
    raise StoreError("the bucket could not be opened")
