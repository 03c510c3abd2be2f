"""``delta-sync doctor``: sound buckets and servers, every promise of either broken in turn, and what it prints."""

import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from errno import EROFS
from pathlib import Path
from typing import Any

import pytest

from tests.golden.regenerate import DIRECTORY, RUN, SIGNED
from tests.support import hub_store, s3_store
from tests.support.answers import Answer, Answers, Asked, closed_port
from tests.support.answers import answering as web
from tests.support.commands import answer, delta_sync, envelope, parsed
from tests.support.exporting import file_size_limit
from tests.support.modules import checkpoint_tensors, save_base
from tests.support.publishing import keys
from tests.support.running import interruptible, run_python, without_rights_of_root
from tests.support.stores import s3_server
from tests.support.web import Site, listening
from trainer_side import Publisher
from vllm_delta_sync import server_client
from vllm_delta_sync.bucket import Bucket, ObjectInfo, StoreOptions, open_bucket
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.middleware.base import BucketMiddleware
from vllm_delta_sync.client import open_run
from vllm_delta_sync.doctor import bucket_checks
from vllm_delta_sync.doctor.doctor import examine
from vllm_delta_sync.doctor.findings import CheckResult
from vllm_delta_sync.doctor.server_checks import ServerProbe
from vllm_delta_sync.engine import WORKER_EXTENSION
from vllm_delta_sync.engine.names import PLUGIN_NAME
from vllm_delta_sync.errors import AccessError, ConflictError, StoreError
from vllm_delta_sync.format.manifest import Head
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.gc.collect import collect
from vllm_delta_sync.server_client import MAX_ANSWER_BYTES, NOT_LOADED, ask
from vllm_delta_sync.settings import environment_name
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.verify.document_audit import DocumentAudit

GOLDEN = str(DIRECTORY)
OPTIONS = StoreOptions(store_deadline=60)
SIZE = 300_000
LEFT = "doctor/" + "0123456789abcdef" * 2
BUCKET_CHECKS = (*("url", "credentials", "put", "get", "list", "create", "delete", "throughput", "clock", "run"),)
SERVER_CHECKS = ("server", "plugin", "state", "same run", "lag", "last error", "notice")
WRITING = ["put", "create", "delete", "clock"]


def look(url: str | Path, **request: Any) -> dict[str, CheckResult]:
    chosen = {"keyring": Keyring(), "size": SIZE, **request}
    options = chosen.pop("options", OPTIONS)
    found = examine(str(url), options, **chosen)
    assert [finding.check for finding in found][: len(BUCKET_CHECKS)] == list(BUCKET_CHECKS)
    return {finding.check: finding for finding in found}


def verdicts(findings: dict[str, CheckResult]) -> dict[str, list[str]]:
    """Checks by verdict, without those that came out well."""
    found: dict[str, list[str]] = {}
    for finding in findings.values():
        if finding.verdict != "ok":
            found.setdefault(finding.verdict, []).append(finding.check)
    return found


def error_of(finding: CheckResult) -> tuple[str, int]:
    """Kind and exit code of a failure; ``("", 0)`` where there is none."""
    return ("", 0) if finding.error is None else (finding.error.kind, finding.error.exit_code)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DIRECTORY, tmp_path / "run"))


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine nothing is found to hang that does not."""
    monkeypatch.setattr(server_client, "REQUEST_SECONDS", 120.0)


# Sound buckets


def test_a_sound_bucket(run: Path) -> None:
    before = sorted(run.rglob("*"))
    found = look(run)
    assert verdicts(found) == {}
    assert found["url"].figures["exists"] is True
    assert found["get"].figures["bytes"] == bucket_checks.SMALL_BYTES
    assert found["create"].figures == {"exclusive": True}
    assert found["throughput"].figures["bytes"] == SIZE
    assert found["throughput"].figures["up_bytes_per_second"] > 0
    assert abs(found["clock"].figures["off_seconds"]) < 30
    figures = found["run"].figures
    assert (figures["head"], figures["run"], figures["signed"]) == (5, RUN, False)
    # The run is the same before and after.
    assert sorted(path for path in run.rglob("*") if path.name != "~staging") == before
    assert all(open_bucket(run).get(key) == open_bucket(DIRECTORY).get(key) for key in keys(str(run)))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    url = tmp_path / "a" / "b"
    found = look(url)
    assert verdicts(found) == {"warning": ["url"]}
    assert found["run"].figures == {"run": None}
    assert list(tmp_path.iterdir()) == []
    assert error_of(look(url, reads_only=True)["url"]) == ("not_found", 3)
    assert list(tmp_path.iterdir()) == []

    def put(finding: CheckResult) -> None:
        if finding.check == "clock":
            open_bucket(url).put("run.json", b"{}")

    # What others put there meanwhile stays.
    examine(str(url), OPTIONS, Keyring(), size=0, on_finding=put)
    assert keys(str(url)) == {"run.json"}


def test_read_only(run: Path, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = look(run, reads_only=True)
    assert verdicts(found) == {"skipped": WRITING}
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert found["get"].figures["bytes"] == (run / "run.json").stat().st_size
    largest = max(path.stat().st_size for path in (run / "objects").iterdir())
    assert found["throughput"].figures["bytes"] == largest
    assert look(run, reads_only=True, size=100)["throughput"].figures["bytes"] == 100
    (tmp_path / "empty").mkdir()
    found = look(tmp_path / "empty", reads_only=True)
    assert (found["get"].verdict, found["run"].verdict, "failed" in verdicts(found)) == ("skipped", "warning", False)


def test_signed_runs(tmp_path: Path) -> None:
    run = shutil.copytree(SIGNED, tmp_path / "run")
    found = look(run)["run"]
    assert (found.verdict, found.figures["signed"], found.figures["signatures_checked"]) == ("ok", True, False)
    keys = [entry.signature.key for entry in open_run(str(run)).log() if entry.signature is not None]
    assert look(run, keyring=Keyring(keys))["run"].figures["signatures_checked"] is True
    assert error_of(look(run, keyring=Keyring(keys[:1]))["run"])[0] == "signature"
    assert error_of(look(run, keyring=Keyring(["ab" * 32]))["run"])[0] == "signature"
    head = Head.from_bytes((run / "HEAD.json").read_bytes())
    ended = Head(**{**head.model_dump(exclude={"signature"}), "expires_at": "2026-01-02T03:14:07Z"})
    (run / "HEAD.json").write_bytes(ended.to_bytes())
    found = look(run)["run"]
    assert (found.verdict, found.figures["expired_seconds"] > 0) == ("warning", True)


# What it leaves behind


def test_nobody_takes_offence_at_what_a_killed_doctor_left(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    base = save_base(tmp_path / "base", tensors)
    url = str(tmp_path / "run")
    left = {f"{LEFT}-small": b"x", f"{LEFT}-large": b"y" * 5000, f"{LEFT}-race": b"writer 3"}
    for key, data in left.items():
        open_bucket(url).put(key, data)
    for step in (1, 2):
        with Publisher(lambda: tensors.items(), url, base) as publisher:
            tensors["q.weight"] = tensors["q.weight"] + 0.01
            assert publisher.publish(step, wait=True).version == step
    opened = open_run(url)
    assert opened.verify(base, findings=True).findings == []
    assert DocumentAudit(opened).findings == []
    assert collect(opened).objects == []
    branch(opened, 1, str(tmp_path / "branch"))
    for command in ("verify", "gc --yes", "compact", "repair"):
        assert delta_sync(*command.split(), "--bucket", url).code == 0
    assert {key: open_bucket(url).get(key) for key in left} == left


def test_an_interrupt_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for check in ("url", "put", "create", "throughput", "run"):

        def interrupt(finding: CheckResult, check: str = check) -> None:
            if finding.check == check:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            examine(str(tmp_path), OPTIONS, Keyring(), size=SIZE, on_finding=interrupt)
        assert keys(str(tmp_path)) == set(), check
    put = LocalBucket.put

    def slow(bucket: LocalBucket, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if key.endswith("-large"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        put(bucket, key, data, if_absent=if_absent)

    # Within a check the request under way is waited for, so that what it puts is removed as well.
    monkeypatch.setattr(LocalBucket, "put", slow)
    with interruptible():
        assert delta_sync("doctor", "--bucket", tmp_path, "--bytes", SIZE).code == 130
    assert keys(str(tmp_path)) == set()


# Runs


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def only_begun(run: Path) -> None:
    shutil.rmtree(run / "versions")
    (run / "HEAD.json").unlink()


DAMAGES: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "run.json damaged": (lambda run: cut(run / "run.json"), "failed", "format"),
    "tensors.json gone": (lambda run: (run / "tensors.json").unlink(), "failed", "not_found"),
    "head damaged": (lambda run: cut(run / "versions" / "0000000005.json"), "failed", "format"),
    "object gone": (lambda run: (run / open_run(str(run)).head().objects[0].key).unlink(), "failed", "not_found"),
    "HEAD damaged": (lambda run: cut(run / "HEAD.json"), "failed", "format"),
    "run.json gone": (lambda run: (run / "run.json").unlink(), "failed", "not_found"),
    "HEAD gone": (lambda run: (run / "HEAD.json").unlink(), "warning", ""),
    "only begun": (only_begun, "ok", ""),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_runs(run: Path, name: str) -> None:
    damage, verdict, kind = DAMAGES[name]
    damage(run)
    found = look(run, size=0, reads_only=True)["run"]
    assert (found.verdict, error_of(found)[0]) == (verdict, kind)
    # What the run lacks is damage, not something that was asked for and is not there.
    assert delta_sync("doctor", "--bucket", run, "--read-only", "--bytes", 0).code == int(verdict == "failed")
    if verdict == "failed":
        assert ("--mirror" if name == "run.json gone" else "delta-sync verify") in found.remedy


# Stores that break a promise


class Broken(BucketMiddleware):
    """A directory of which some methods do otherwise: each is called with the bucket, and what the method is given."""

    def __init__(self, root: Path, **methods: Callable[..., Any]) -> None:
        super().__init__(LocalBucket(root))
        self.memory: dict[str, Any] = {}
        self.hangs = threading.Event()
        for name, method in methods.items():
            setattr(self, name, lambda *given, method=method, **options: method(self, *given, **options))

    @property
    def sound(self) -> Bucket:
        return self._inner


def _raises(error: BaseException) -> Callable[..., Any]:
    def method(bucket: Broken, *given: Any, **options: Any) -> Any:
        raise error

    return method


def _on_read_only_mount(bucket: Broken, key: str, data: bytes | Path, **options: Any) -> None:
    raise StoreError("cannot write: Read-only file system") from OSError(EROFS, "Read-only file system")


def _lying(bucket: Broken, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
    """Refuses the second writer, and overwrites all the same."""
    try:
        bucket.sound.put(key, data, if_absent=if_absent)
    except ConflictError:
        bucket.sound.put(key, data)
        raise


def _remembering(bucket: Broken, key: str) -> None:
    if key not in bucket.memory:
        bucket.memory[key] = bucket.sound.stat(key)
    bucket.sound.delete(key)


def _listing_what_is_gone(bucket: Broken, prefix: str = "") -> Iterator[ObjectInfo]:
    yield from bucket.sound.list(prefix)
    yield from (info for key, info in bucket.memory.items() if key.startswith(prefix))


def _shortening(bucket: Broken, key: str, start: int, length: int) -> bytes:
    return bucket.sound.get_range(key, start, length - 1 if key.endswith("-large") else length)


def _stat(bytes_more: int = 0, seconds: float = 0.0) -> Callable[..., ObjectInfo]:
    def method(bucket: Broken, key: str) -> ObjectInfo:
        found = bucket.sound.stat(key)
        return ObjectInfo(key, found.bytes + bytes_more, found.modified + seconds)

    return method


UNWRITABLE = {"put": _raises(AccessError("this token may not write"))}
ON_READ_ONLY_MOUNT = {"put": _on_read_only_mount}
LAGGING: dict[str, Callable[..., Any]] = {"list": lambda bucket, prefix="": iter(())}
FAILURES: dict[str, tuple[dict[str, Callable[..., Any]], str, str, str]] = {
    "unwritable": (UNWRITABLE, "put", "may not write", "access"),
    "on a read-only mount": (ON_READ_ONLY_MOUNT, "put", "Read-only", "store"),
    "damaging": (
        {"get": lambda b, key, max_bytes=None: bytes([b.sound.get(key)[0] ^ 1]) + b.sound.get(key)[1:]},
        *("get", "wrong bytes", "store"),
    ),
    "misjudging": ({"stat": _stat(1)}, "get", "reports 1001 bytes", "store"),
    "rangeless": ({"get_range": lambda b, key, start, length: b.sound.get(key)}, "get", "from 100", "store"),
    "endless": (
        {"get_range": lambda b, key, start, length: b.sound.get_range(key, start, length) or b"x"},
        *("get", "beyond its end", "store"),
    ),
    "lagging": (LAGGING, "list", "listings of this store lag", "store"),
    "careless of If-None-Match": (
        {"put": lambda b, key, data, if_absent=False: b.sound.put(key, data)},
        *("create", "honours If-None-Match", "store"),
    ),
    "lying": ({"put": _lying}, "create", "the refusal of a second writer", "store"),
    "caching": (
        {"get": lambda b, key, max_bytes=None: b.memory.setdefault(key, b.sound.get(key))},
        *("get", "wrong bytes", "store"),
    ),
    "undying": (
        {"delete": lambda b, key: b.sound.delete(key) if key.endswith("-once") else None},
        *("delete", "can still be read after it was deleted", "store"),
    ),
    "remembering": (
        {"delete": _remembering, "list": _listing_what_is_gone},
        "delete",
        "listings of this store lag",
        "store",
    ),
    "shortening": ({"get_range": _shortening}, "throughput", "truncated or replaced", "digest"),
    "timing out by itself": ({"get_range": _raises(TimeoutError("of its own"))}, "get", "of its own", "store"),
    "surprising": ({"get_range": _raises(ZeroDivisionError("of a library"))}, "get", "of a library", "store"),
}

Broke = Callable[..., dict[str, CheckResult]]


@pytest.fixture
def broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broke]:
    """Findings of a broken bucket in an empty directory."""
    opened: list[Broken] = []

    def findings(
        methods: dict[str, Callable[..., Any]], exclusive: bool = True, **request: Any
    ) -> dict[str, CheckResult]:
        def open_broken(url: str, options: StoreOptions) -> Bucket:
            opened.append(Broken(Path(url), **methods))
            opened[-1].supports_conditional_put = exclusive
            return opened[-1]

        monkeypatch.setattr(bucket_checks, "open_bucket", open_broken)
        return look(tmp_path, **request)

    yield findings
    for bucket in opened:
        bucket.hangs.set()


@pytest.mark.parametrize("name", FAILURES)
def test_broken_promises(broken: Broke, name: str) -> None:
    methods, check, said, kind = FAILURES[name]
    found = broken(methods)
    assert verdicts(found)["failed"][0] == check
    assert (error_of(found[check])[0], said in found[check].summary) == (kind, True)
    if check == "put":
        # Whoever may only read is told of --read-only.
        assert "--read-only" in found["put"].remedy
        needs_writes = [check for check in BUCKET_CHECKS if check not in ("url", "credentials", "put", "run")]
        assert verdicts(found)["skipped"] == needs_writes
        assert "failed" not in verdicts(broken(methods, reads_only=True))


def test_a_store_without_create_if_absent_is_a_warning(broken: Broke) -> None:
    found = broken({}, exclusive=False)
    assert (verdicts(found)["warning"], "failed" in verdicts(found)) == (["create"], False)
    assert found["create"].figures == {"exclusive": False}
    assert "one publisher at a time" in found["create"].remedy


def test_a_create_whose_answer_was_lost_is_no_finding(broken: Broke) -> None:
    """It is repeated, and then finds its own object."""

    def repeated(bucket: Broken, key: str, data: bytes | Path, if_absent: bool = False) -> None:
        bucket.sound.put(key, data, if_absent=if_absent)
        bucket.sound.put(key, data, if_absent=if_absent)

    assert verdicts(broken({"put": repeated})) == {}


def test_a_mount_that_hangs_is_given_up(broken: Broke, tmp_path: Path) -> None:
    hanging = {"get_range": lambda bucket, key, start, length: bytes(bucket.hangs.wait(600))}
    began = time.monotonic()
    found = broken(hanging, options=StoreOptions(store_deadline=2))
    assert time.monotonic() - began < 120
    assert verdicts(found)["failed"] == ["get"]
    assert error_of(found["get"]) == ("unavailable", 4)
    assert found["run"].verdict == "ok"
    assert keys(str(tmp_path)) == set()


def test_clocks(broken: Broke) -> None:
    for seconds, verdict in ((0, "ok"), (55, "ok"), (-55, "ok"), (75, "warning"), (-75, "warning")):
        found = broken({"stat": _stat(seconds=seconds)}, size=0)["clock"]
        assert found.verdict == verdict
        assert found.figures["off_seconds"] == pytest.approx(seconds, abs=2)
        if verdict == "warning":
            assert ("ahead of" if seconds > 0 else "behind") in found.summary


# Stores over a network


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hub_store.Hub]:
    with hub_store.serving(tmp_path_factory.mktemp("hub"), read_token="hf_may_only_read") as hub:
        hub.create_bucket("team/runs")
        yield hub


def over(url: str, environment: dict[str, str], *flags: str) -> tuple[int, dict[str, str], dict[str, Any]]:
    """Exit code, what did not come out well, and all findings by check."""
    variables = {"DELTA_SYNC_CACHE_BYTES": "0", **environment}
    done = delta_sync("doctor", "--bucket", url, "--json", "--bytes", SIZE, *flags, **variables)
    for secret in (s3_store.SECRET_KEY, hub_store.TOKEN):
        assert secret not in done.out + done.err
    found = {row["check"]: row for row in parsed(done.out)["data"]["findings"]}
    bad = {name: row["verdict"] for name, row in found.items() if row["verdict"] not in ("ok", "skipped")}
    return done.code, bad, found


def test_s3() -> None:
    server = s3_server()
    url = server.create_bucket("doctor-well") + "/run"
    code, bad, found = over(url, server.environment)
    assert (code, bad) == (0, {}), found
    assert found["create"]["figures"] == {"exclusive": True}
    assert found["throughput"]["figures"]["bytes"] == SIZE
    code, bad, found = over(url, {**server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert (code, bad, found["credentials"]["kind"]) == (4, {"credentials": "failed"}, "access")
    assert "AWS_ACCESS_KEY_ID" in found["credentials"]["said"]
    # A bucket can be removed when nothing is in it.
    server.delete_bucket("doctor-well")
    assert over("s3://doctor-nowhere/run", server.environment)[:2] == (4, {"put": "failed"})
    assert over("s3://doctor-nowhere/run", server.environment, "--read-only")[:2] == (0, {"run": "warning"})


def test_s3_that_is_down() -> None:
    closed = {"AWS_ENDPOINT_URL": f"http://127.0.0.1:{closed_port()}", "DELTA_SYNC_STORE_DEADLINE": "2"}
    code, bad, found = over("s3://doctor/run", {**s3_server().environment, **closed})
    assert (code, bad) == (4, {"credentials": "failed"})
    assert found["credentials"]["kind"] in ("unavailable", "deadline")


URL = "hf://buckets/team/runs/a"


def test_hub(hub: hub_store.Hub) -> None:
    code, bad, found = over(URL, hub.environment)
    # It has no create-if-absent.
    assert (code, bad) == (0, {"create": "warning"}), found
    assert found["create"]["figures"] == {"exclusive": False}


def test_hub_with_tokens_that_do_not_do(hub: hub_store.Hub) -> None:
    reading = {**hub.environment, "HF_TOKEN": "hf_may_only_read"}
    code, bad, found = over(URL, reading)
    assert (code, bad, found["put"]["kind"]) == (4, {"put": "failed"}, "access")
    assert "--read-only" in found["put"]["remedy"]
    assert over(URL, reading, "--read-only")[0] == 0
    for token in ("hf_wrong", ""):
        code, bad, found = over(URL, {**hub.environment, "HF_TOKEN": token})
        assert (code, bad) == (4, {"credentials": "failed"})
        assert "HF_TOKEN" in found["credentials"]["said"]


def test_hub_that_fails_on_the_way(hub: hub_store.Hub) -> None:
    """What cannot be removed is named."""
    # Not an error that is tried again until the deadline, at each of the requests.
    hub.fault("status", "/batch", code=403, times=1000, after=2)
    try:
        code, bad, found = over(URL, hub.environment)
    finally:
        hub.clear_faults()
    assert code == 4
    assert next(iter(bad)) == "create"
    assert bad["clean-up"] == "warning"
    assert found["create"]["kind"] == "access"
    assert [key.rpartition("-")[2] for key in found["clean-up"]["figures"]["left"]] == ["small"]


# Servers

POINT = {"version": 3, "step": 30, "fingerprint": "cd" * 16, "quarantined": []}
WELL: dict[str, Any] = {
    "run": "ab" * 16,
    "served": POINT,
    "head": POINT,
    "lag": 0,
    "state": "idle",
    "last_error": None,
    "policy": "follow",
    "target": "head",
    "holding": False,
    "notice": {"listens": False, "heard_seconds": None},
}


def look_at(server: str, bucket: Path | str = "/nowhere") -> dict[str, CheckResult]:
    """Findings on the server's side, of a doctor who puts nothing."""
    found = examine(str(bucket), OPTIONS, Keyring(), server, reads_only=True, size=0)
    assert [finding.check for finding in found[len(BUCKET_CHECKS) :]] == list(SERVER_CHECKS)
    return {finding.check: finding for finding in found[len(BUCKET_CHECKS) :]}


@contextmanager
def answering(answers: dict[str, tuple[int, bytes]]) -> Iterator[Answers]:
    """A server that has these answers by path, and 404 otherwise."""

    def reply(asked: Asked) -> Answer:
        status, body = answers.get(asked.path.partition("?")[0], (404, b"{}"))
        return Answer(status, body, {"Location": "/elsewhere"} if status == 302 else {})

    with web() as server:
        server.reply = reply
        yield server


def status_of(**members: Any) -> dict[str, tuple[int, bytes]]:
    """Answers of a server that says this of itself."""
    document = json.dumps({**WELL, **members}).encode()
    return {"/health": (200, b""), "/delta_sync/status": (200, document)}


def told(**members: Any) -> dict[str, CheckResult]:
    with answering(status_of(**members)) as server:
        return look_at(server.url)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """A server of version 0, which says of itself what vLLM says."""
    site = Site(tmp_path)

    @site.app.get("/health")
    async def health() -> None:
        return None

    @site.app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"data": [{"id": "tiny"}]}

    yield site
    site.end()


def test_a_server_that_follows(site: Site) -> None:
    site.serve()
    site.publish(1)
    with listening(site.app) as port:
        url = f"http://127.0.0.1:{port}"
        ask(url, "/delta_sync/wait?version=1&timeout=120")
        found = look_at(url, site.settings.bucket)
        assert verdicts(found) == {}
        assert found["server"].figures == {"health": 200, "models": ["tiny"], "api_key": False}
        assert found["state"].figures == {"state": "idle", "policy": "follow"}
        assert found["lag"].figures == {"served": 1, "head": 1, "lag": 0}
        assert found["same run"].figures["run"] == site.publisher.run
        assert found["notice"].figures["listens"] is True
        assert found["notice"].figures["heard_seconds"] < 30
        assert verdicts(look_at(url + "/", site.settings.bucket)) == {}
        assert not site.was_changed()


def test_a_server_without_a_run(tmp_path: Path, site: Site) -> None:
    for file in (tmp_path / "run").glob("*.json"):
        file.unlink()
    with listening(site.app) as port:
        site.service.start()
        found = look_at(f"http://127.0.0.1:{port}", site.settings.bucket)
    assert verdicts(found)["warning"] == [
        check for check in SERVER_CHECKS if check in ("state", "same run", "lag", "notice")
    ]
    assert set(verdicts(found).get("failed", [])) <= {"last error"}


def test_a_plain_vllm_has_no_plugin() -> None:
    with answering({"/health": (200, b""), "/v1/models": (401, b'{"error": "no key"}')}) as server:
        found = look_at(server.url)
    assert found["server"].figures == {"health": 200, "models": [], "api_key": True}
    assert found["plugin"].verdict == "failed"
    for word in ("VLLM_PLUGINS", "DELTA_SYNC_BUCKET", "--worker-extension-cls", "delta-sync serve"):
        assert word in found["plugin"].remedy
    assert [finding.verdict for finding in found.values()][2:] == ["skipped"] * 5
    # What is said to be set is what is read.
    assert all(word in NOT_LOADED for word in (WORKER_EXTENSION, PLUGIN_NAME, environment_name("bucket")))


def test_nothing_but_the_unknown_run_is_wrong_with_that_status() -> None:
    assert verdicts(told()) == {"warning": ["same run"]}


AHEAD = {**POINT, "version": 9}
STATES: dict[str, tuple[dict[str, Any], str, str, str]] = {
    "refused": ({"state": "refused", "served": None, "last_error": {"kind": "tensor", "message": "w is odd; fix it"}},
                "state", "failed", "refused: w is odd; fix it"),
    "lost": ({"state": "lost"}, "state", "failed", "lost: the server gives no reason"),
    "identifying": ({"state": "identifying", "served": None}, "state", "warning", "serves no version"),
    "unknown state": ({"state": "\x1b[2J"}, "state", "failed", "no reason"),
    "no run": ({"run": None}, "same run", "warning", "no run yet"),
    "lags": ({"head": AHEAD, "lag": 6}, "lag", "warning", "6 behind the head"),
    "held": ({"head": AHEAD, "lag": 6, "holding": True, "state": "held"}, "lag", "ok", "as ordered"),
    "target": ({"head": AHEAD, "target": "3"}, "lag", "ok", "as ordered"),
    "newer than its target": ({"state": "held", "target": "2"}, "state", "ok", "newer version than its target"),
    "quarantined": ({"head": AHEAD, "lag": 0}, "lag", "ok", "quarantined"),
    "versions of nonsense": ({"served": {"version": "3"}, "head": []}, "lag", "warning", "serves no version"),
    "booleans for numbers": ({"served": {"version": True}}, "lag", "warning", "serves no version"),
    "error": ({"last_error": {"kind": "store", "message": "disk; remedy"}}, "last error", "warning", "disk; remedy"),
    "lost with an error": ({"state": "lost", "last_error": {"kind": "x", "message": "x"}}, "last error", "failed", "x"),
    "fatal error": ({"served": None, "last_error": {"kind": "store", "message": "x"}}, "last error", "failed", "x"),
    "deaf": ({"notice": {"listens": True, "heard_seconds": None}}, "notice", "warning", "none came yet"),
    "gone deaf": ({"notice": {"listens": True, "heard_seconds": 99.5}}, "notice", "warning", "came 100 s ago"),
    "hears": ({"notice": {"listens": True, "heard_seconds": 1.0}}, "notice", "ok", "1 s ago"),
    "no word of notices": ({"notice": None}, "notice", "skipped", "does not report it"),
}  # fmt: skip


@pytest.mark.parametrize("name", STATES)
def test_states(name: str) -> None:
    members, check, verdict, said = STATES[name]
    found = told(**members)[check]
    assert (found.verdict, said in found.summary) == (verdict, True), found


def test_a_server_that_is_behind_is_waited_for() -> None:
    there = {**POINT, "version": 4}
    with answering(status_of(head=there, lag=1)) as server:
        behind = server.reply

        def reply(asked: Asked) -> Answer:
            waited = sum(each.path.endswith("/status") for each in server.asked) > 3
            status, body = status_of(served=there, head=there)["/delta_sync/status"]
            return Answer(status, body) if waited and asked.path.endswith("/status") else behind(asked)

        server.reply = reply
        found = look_at(server.url)["lag"]
        assert (found.verdict, found.figures["served"]) == ("ok", 4)


def test_the_run_of_an_adapter() -> None:
    with answering(status_of()) as server:
        base = server.reply

        def reply(asked: Asked) -> Answer:
            if not asked.path.startswith("/delta_sync/status?"):
                return base(asked)
            if asked.path.endswith("?adapter=math"):
                return Answer(200, json.dumps({**WELL, "run": "cd" * 16}).encode())
            return Answer(404, b'{"error": {"kind": "not_found", "message": "lora_adapters has math"}}')

        server.reply = reply
        other, own, unknown = (ServerProbe(server.url, "cd" * 16, 3, name) for name in (None, "math", "maths"))
        assert [probe.plugin().verdict for probe in (other, own, unknown)] == ["ok", "ok", "failed"]
        assert "--adapter NAME" in other.same_run().remedy
        assert [own.same_run().verdict, own.lag().verdict] == ["ok", "ok"]
        assert "lora_adapters has math" in unknown.plugin().summary
    assert delta_sync("doctor", "--bucket", "/nowhere", "--adapter", "math").code == 2


def test_a_server_that_skips_the_head_is_not_waited_for() -> None:
    with answering(status_of(head=AHEAD, lag=0)) as server:
        assert look_at(server.url)["lag"].verdict == "ok"
        assert not any("/wait?" in asked.path for asked in server.asked)


def test_the_exit_code_is_of_the_servers_error() -> None:
    for kind, expected in (("not_found", ("not_found", 3)), ("strange", ("engine", 1))):
        error = {"kind": kind, "message": "there is no run"}
        assert error_of(told(state="refused", served=None, last_error=error)["state"]) == expected


ANSWERS: dict[str, tuple[dict[str, tuple[int, bytes]], str, str]] = {
    "nothing of vLLM": ({}, "server", "is not a vLLM server: /health returns 404"),
    "a dead engine": ({"/health": (503, b"")}, "server", "engine is dead"),
    "a redirect": ({"/health": (302, b"")}, "server", "/health returns 302"),
    "no JSON": ({**status_of(), "/delta_sync/status": (200, b"<html>")}, "plugin", "not with the plugin's status"),
    "a list": ({**status_of(), "/delta_sync/status": (200, b"[1]")}, "plugin", "not with the plugin's status"),
    "a bomb": ({**status_of(), "/delta_sync/status": (200, b"[" * 100_000)}, "plugin", "not with the plugin's status"),
    "an error": ({**status_of(), "/delta_sync/status": (500, b"{}")}, "plugin", "answers with 500"),
    "too much": ({**status_of(), "/delta_sync/status": (200, b" " * (MAX_ANSWER_BYTES + 9))}, "plugin", "more than"),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_answers(name: str) -> None:
    answers, check, said = ANSWERS[name]
    with answering(answers) as server:
        found = look_at(server.url)[check]
    assert (found.verdict, said in found.summary) == ("failed", True), found


def test_what_is_no_http_server() -> None:
    def serve() -> None:
        connection, _ = opened.accept()
        with connection:
            connection.sendall(b"SSH-2.0-OpenSSH\r\n")

    with socket.create_server(("127.0.0.1", 0)) as opened:
        thread = threading.Thread(target=serve)
        thread.start()
        found = look_at(f"http://127.0.0.1:{opened.getsockname()[1]}")
        thread.join(120)
    assert error_of(found["server"]) == ("unavailable", 4)


# The command


def lines_of(text: str) -> dict[str, tuple[str, str]]:
    """Check → mark, and what is said."""
    found = re.findall(r"^(\S) ([a-z-]+(?: [a-z]+)?)  +(.*)$", text, re.MULTILINE)
    return {check: (mark, said) for mark, check, said in found}


def test_for_people(run: Path, tmp_path: Path) -> None:
    done = delta_sync("doctor", "--bucket", run, "--bytes", "1000")
    assert (done.code, done.err) == (0, "")
    lines = lines_of(done.out)
    assert list(lines) == list(BUCKET_CHECKS)
    assert {mark for mark, _ in lines.values()} == {"✓"}
    assert len({line.index(said) for line, (_, said) in zip(done.out.splitlines(), lines.values(), strict=False)}) == 1
    assert "what to do" not in done.out
    assert done.out.splitlines()[-1] == "0 failed, 0 warnings, 10 ok, 0 skipped"
    done = delta_sync("doctor", "--bucket", tmp_path / "no", "--bytes", "0", encoding="ascii")
    assert (done.code, "\\" in done.out) == (0, False)
    assert {mark for mark, _ in lines_of(done.out).values()} == {"+", "!", "-"}
    assert re.search(r"^  url  +The first publisher creates it; .*\.$", done.out, re.MULTILINE)


def test_as_json(run: Path) -> None:
    evil = status_of(state="refused", served=None, last_error={"kind": "store", "message": "\x1b[2Jboo"})
    with answering(status_of()) as well, answering(evil) as other:
        whole = envelope("doctor", "--bucket", run, "--bytes", "0", "--server", well.url, code=1)
        done = delta_sync("doctor", "--bucket", run, "--read-only", "--server", other.url)
    document = whole["data"]
    assert [row["check"] for row in document["findings"]] == [*BUCKET_CHECKS, *SERVER_CHECKS]
    assert {"check", "verdict", "kind", "said", "remedy", "figures"} == set(document["findings"][0])
    # The golden run is another one than the server says that it follows.
    assert (document["verdict"], whole["error"]["kind"]) == (False, "chain")
    found = {row["check"]: row["verdict"] for row in document["findings"]}
    assert (found["same run"], found["lag"]) == ("failed", "skipped")
    # What a server says is harmless where it is shown.
    assert ("\x1b" in done.out, "boo" in done.out) == (False, True)


def test_the_first_failure_decides(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    for code, *arguments in (
        (3, "--bucket", tmp_path / "none", "--read-only"),
        (4, "--bucket", tmp_path / "file"),
        (4, "--bucket", GOLDEN, "--read-only", "--server", "http://127.0.0.1:9"),
        (2, "--bucket", GOLDEN, "--read-only", "--server", "nonsense"),
    ):
        done = delta_sync("doctor", *arguments)
        assert done.code == code, done.out
        assert [mark for mark, _ in lines_of(done.out).values()].count("✗") == 1


def test_the_bucket_itself_is_tested_and_not_its_mirror(tmp_path: Path) -> None:
    answer("doctor", "--bucket", GOLDEN, "--read-only", DELTA_SYNC_MIRROR=str(tmp_path))


def test_a_directory_that_may_only_be_read(run: Path) -> None:
    for folder in (run, *(path for path in run.iterdir() if path.is_dir())):
        folder.chmod(0o555)
    command = ("-m", "vllm_delta_sync.cli", "doctor", "--bucket", str(run))
    done = run_python(*command, prefix=without_rights_of_root(), code=4)
    lines = lines_of(done.stdout)
    assert lines["put"][0] == "✗", done.stdout
    assert "give this user access" in lines["put"][1]
    assert "--read-only" in done.stdout
    assert lines["run"][0] == "✓"


def test_a_file_size_limit(tmp_path: Path) -> None:
    for limit, check, advice in ((500, "put", "ulimit -f"), (1_000_000, "throughput", "lower --bytes")):
        with file_size_limit(limit):
            done = delta_sync("doctor", "--bucket", tmp_path, "--bytes", "2000000")
        assert (done.code, advice in lines_of(done.out)[check][1]) == (4, True)
    assert keys(str(tmp_path)) == set()
