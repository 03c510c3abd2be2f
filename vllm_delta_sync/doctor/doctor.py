"""``delta-sync doctor``: try what a publisher and a receiver need of a bucket, ask a server how it is, and say so."""

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
"""After an interrupt: for the request that was under way."""


@dataclass(frozen=True)
class DoctorRequest:
    """What a doctor is asked to look at.

    Attributes:
        url: of a run. options: how to talk to the store. server: URL of a vLLM server.
        size: bytes for throughput; 0: not measured. reads_only: put nothing. keep_going: see ``CheckRunner``.
        cache: ``cache_dir`` and ``cache_bytes``.
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
    request: DoctorRequest, tell: Callable[[CheckResult], None] = lambda finding: None, progress: Progress | None = None
) -> list[CheckResult]:
    """Carry out all checks. Objects that are put on the way are removed at the end, whatever ends it.

    Args:
        tell: called with each finding at once. progress: see there; from other threads.

    Returns:
        the findings, in the order of ``BUCKET_CHECKS`` and ``SERVER_CHECKS``; nothing is raised but interrupts.
    """
    bucket_side = _BucketSide(request, tell, progress)
    findings = bucket_side.examine()
    if request.server is not None:
        findings = findings + _examine_server(request, request.server, bucket_side, tell)
    return findings


class _BucketSide:
    def __init__(self, request: DoctorRequest, tell: Callable[[CheckResult], None], progress: Progress | None) -> None:
        self._request = request
        self._progress = progress
        # Bars and lines of the store's own would come between ours; the mirror is looked at by itself.
        self._options = request.options.model_copy(update={"mirror": None, "store_progress": "off"})
        self._exam = CheckRunner(tell, request.keep_going)
        self._door = AccessChecks(request.url, self._options, request.reads_only)
        self._probe: StoreProbe | None = None
        self.run: RunProbe | None = None
        # With all tries a request takes three times the deadline, and a check makes few; a directory tries once.
        self._seconds = self._options.store_deadline * (2 if self._door.is_directory else 6)

    def examine(self) -> list[CheckResult]:
        exam, seconds = self._exam, self._seconds
        exam.check("url", self._door.url, seconds)
        exam.check("library", self._door.library, seconds)
        exam.check("credentials", self._door.credentials, seconds, ("url", "library"))
        bucket = self._door.bucket
        if bucket is None:
            for name in BUCKET_CHECKS[3:]:
                exam.check(name, _unreachable, seconds, ("url", "library"))
            return exam.findings
        try:
            self._examine_store(bucket)
            self._examine_run(bucket)
            return exam.findings
        finally:
            self._end()

    def _examine_store(self, bucket: Bucket) -> None:
        request, exam = self._request, self._exam
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
                exam.skip(name, "--read-only")
            elif name == "throughput" and not request.size:
                exam.skip(name, "--bytes 0")
            else:
                moving = 6 * self._options.allowance(request.size) if name == "throughput" else 0
                exam.check(name, call, self._seconds + moving, needs[name])

    def _examine_run(self, bucket: Bucket) -> None:
        exam, seconds, mirror = self._exam, self._seconds, self._request.options.mirror
        self.run = run = RunProbe(bucket, self._request.keyring, self._request.reads_only)
        exam.check("run", run.look, 2 * seconds, ("credentials",))
        if mirror is None:
            exam.skip("mirror", "none is set")
        else:
            exam.check("mirror", lambda: self._mirror(run, mirror), 2 * seconds, ("run",))
        cache = self._request.cache
        if cache is None:
            exam.skip("cache", "none is used for this bucket")
        else:
            exam.check("cache", lambda: check_cache(*cache), seconds)

    def _mirror(self, run: RunProbe, url: str) -> CheckResult:
        with open_mirror(url, self._options) as mirror:
            return run.mirror(mirror)

    def _end(self) -> None:
        """Remove what was put, within the time of a few requests; where the store hangs, a later doctor does."""
        exam, bucket, probe = self._exam, self._door.bucket, self._probe
        if bucket is None or probe is None:
            return
        exam.settle(SETTLE_SECONDS)
        try:
            left = probe.made if exam.hung else bounded(probe.clean_up, self._seconds)
            if not exam.hung:
                bounded(bucket.close, self._seconds)
        except HungError:
            left = probe.made
        if left:
            said = f"could not be removed from the bucket: {', '.join(left)}"
            exam.add(
                CheckResult("clean-up", "warning", said, {"left": left}, "A doctor who comes a day later removes it")
            )
        if not exam.hung:
            self._door.remove_folders()


def _examine_server(
    request: DoctorRequest, url: str, bucket_side: _BucketSide, tell: Callable[[CheckResult], None]
) -> list[CheckResult]:
    exam = CheckRunner(tell, request.keep_going)
    probe = ServerProbe(url)
    if bucket_side.run is not None:
        head = bucket_side.run.head
        probe.run, probe.head = bucket_side.run.run, None if head is None else head.version
    calls = (
        *(probe.reach, probe.plugin, probe.state, probe.routes, probe.same_run, probe.lag, probe.last_error),
        *(probe.versions, probe.notice, probe.admin),
    )
    for name, call in zip(SERVER_CHECKS, calls, strict=True):
        needs = ("server", "plugin")[: SERVER_CHECKS.index(name)]
        exam.check(name, call, 4 * REQUEST_SECONDS, needs)
    return exam.findings


def _unreachable() -> CheckResult:
    raise StoreError("the bucket could not be opened")
