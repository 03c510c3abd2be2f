"""What the doctor says of buckets: sound ones, and every promise of a bucket broken in turn."""

import os
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.golden.regenerate import DIRECTORY, RUN, SIGNED
from tests.support.modules import checkpoint_tensors, save_base
from tests.support.publishing import keys
from trainer_side import Publisher
from vllm_delta_sync import cli
from vllm_delta_sync.bucket import StoreOptions, open_bucket
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain.census import Census
from vllm_delta_sync.errors import NotFoundError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.upkeep import doctor_door, doctor_store
from vllm_delta_sync.upkeep.branching import branch
from vllm_delta_sync.upkeep.doctor import BUCKET_CHECKS, Request, examine
from vllm_delta_sync.upkeep.doctor_findings import Examination, Finding, HungError, bounded
from vllm_delta_sync.upkeep.doctor_run import ago
from vllm_delta_sync.upkeep.retention import collect
from vllm_delta_sync.wire.manifest import Head

OPTIONS = StoreOptions(store_deadline=60)
SIZE = 300_000
LEFT = "doctor/" + "0123456789abcdef" * 2


def look(url: str | Path, **request: Any) -> dict[str, Finding]:
    """Findings by check, of a doctor who goes on."""
    chosen = {"size": SIZE, "keep_going": True, **request}
    options = chosen.pop("options", OPTIONS)
    found = examine(Request(str(url), options, **chosen))
    assert [finding.check for finding in found][: len(BUCKET_CHECKS)] == list(BUCKET_CHECKS)
    return {finding.check: finding for finding in found}


def verdicts(findings: dict[str, Finding]) -> dict[str, list[str]]:
    """Checks by verdict, without those that came out well."""
    found: dict[str, list[str]] = {}
    for finding in findings.values():
        if finding.verdict != "ok":
            found.setdefault(finding.verdict, []).append(finding.check)
    return found


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A copy of the golden run."""
    return Path(shutil.copytree(DIRECTORY, tmp_path / "run"))


# Sound buckets


def test_a_sound_bucket(run: Path) -> None:
    before = sorted(run.rglob("*"))
    found = look(run)
    assert verdicts(found) == {"skipped": ["mirror", "cache"]}
    assert found["url"].figures["exists"] is True
    assert found["get"].figures["bytes"] == doctor_store.SMALL_BYTES
    assert found["race"].figures == {"writers": 16, "winners": 1, "exclusive": True}
    assert found["latency"].figures["rounds"] == doctor_store.ROUNDS
    assert 0 < found["latency"].figures["get_ms_p50"] <= found["latency"].figures["get_ms_worst"]
    assert found["throughput"].figures["bytes"] == SIZE
    assert found["throughput"].figures["up_bytes_per_second"] > 0
    assert abs(found["clock"].figures["off_seconds"]) < 30
    assert found["run"].figures["head"] == 5
    assert found["run"].figures["run"] == RUN
    assert found["run"].figures["signed"] is False
    assert sorted(path for path in run.rglob("*") if path.name != "~staging") == before


def test_a_bucket_in_memory() -> None:
    found = look("memory://doctor", size=0)
    assert verdicts(found) == {"skipped": ["throughput", "mirror", "cache"]}
    assert found["library"].figures["obstore"]
    assert list(open_bucket("memory://doctor").list()) == []


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    url = tmp_path / "a" / "b"
    found = look(url)
    assert verdicts(found) == {"warning": ["url"], "skipped": ["mirror", "cache"]}
    assert "does not exist yet" in found["url"].said
    assert found["run"].figures == {"run": None}
    assert list(tmp_path.iterdir()) == []
    found = look(url, reads_only=True)
    assert found["url"].error is not None
    assert found["url"].error.exit_code == 3
    assert list(tmp_path.iterdir()) == []


def test_what_others_put_into_a_new_directory_stays(tmp_path: Path) -> None:
    def put(finding: Finding) -> None:
        if finding.check == "clock":
            open_bucket(tmp_path / "a" / "b").put("run.json", b"{}")

    examine(Request(str(tmp_path / "a" / "b"), OPTIONS, size=0), put)
    assert keys(str(tmp_path / "a" / "b")) == {"run.json"}


def test_read_only(run: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in run.rglob("*")}
    found = look(run, reads_only=True)
    assert verdicts(found) == {
        "skipped": ["put", "create", "race", "overwrite", "delete", "clock", "mirror", "cache"],
    }
    assert {path: path.stat().st_mtime_ns for path in run.rglob("*")} == before
    assert found["get"].figures["bytes"] == (run / "run.json").stat().st_size
    largest = max(path.stat().st_size for path in (run / "objects").iterdir())
    assert found["throughput"].figures["bytes"] == largest
    assert look(run, reads_only=True, size=100)["throughput"].figures["bytes"] == 100


def test_read_only_where_nothing_is(tmp_path: Path) -> None:
    found = look(tmp_path, reads_only=True)
    assert found["get"].verdict == "skipped"
    assert found["run"].verdict == "warning"
    assert "no object 'run.json'" in found["run"].said
    assert "failed" not in verdicts(found)


def test_signed_runs(tmp_path: Path) -> None:
    run = shutil.copytree(SIGNED, tmp_path / "run")
    found = look(run)["run"]
    assert (found.verdict, found.figures["signed"], found.figures["signatures_checked"]) == ("ok", True, False)
    key = open_run(str(run)).info.signature
    assert key is not None
    trusting = look(run, keyring=Keyring([key.key]))["run"]
    assert "signatures hold" in trusting.said
    stranger = look(run, keyring=Keyring(["ab" * 32]))["run"]
    assert stranger.error is not None
    assert stranger.error.kind == "signature"
    head = Head.from_bytes((run / "HEAD.json").read_bytes())
    ended = Head(**{**head.model_dump(exclude={"signature"}), "expires_at": "2026-01-02T03:14:07Z"})
    (run / "HEAD.json").write_bytes(ended.to_bytes())
    found = look(run)["run"]
    assert found.verdict == "warning"
    assert "HEAD.json ran out" in found.said
    assert found.figures["expired_seconds"] > 0


# What a doctor leaves


def test_nobody_takes_offence_at_what_a_killed_doctor_left(tmp_path: Path) -> None:
    tensors = checkpoint_tensors()
    base = save_base(tmp_path / "base", tensors)
    url = str(tmp_path / "run")
    left = {f"{LEFT}-small": b"x", f"{LEFT}-large": b"y" * 5000, f"{LEFT}-race": b"writer 3"}
    for key, data in left.items():
        open_bucket(url).put(key, data)
    with Publisher(lambda: tensors.items(), url, base) as publisher:
        tensors["q.weight"] = tensors["q.weight"] + 0.01
        publisher.publish(step=1, wait=True)
    with Publisher(lambda: tensors.items(), url, base) as publisher:
        tensors["q.weight"] = tensors["q.weight"] + 0.01
        assert publisher.publish(step=2, wait=True).version == 2
    opened = open_run(url)
    assert opened.verify(base, findings=True).findings == []
    assert Census(opened).findings == []
    assert collect(opened).objects == []
    branch(opened, 1, str(tmp_path / "branch"))
    for command in ("verify", "gc --yes", "compact", "repair"):
        assert cli.run([*command.split(), "--bucket", url]) == 0
    assert {key: open_bucket(url).get(key) for key in left} == left


def test_what_killed_doctors_left_goes_a_day_later(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path)
    old, young, foreign = f"{LEFT}-small", f"{LEFT}-large", "doctor/notes"
    for key in (old, young, foreign):
        bucket.put(key, b"x")
    before = time.time() - doctor_store.STALE_SECONDS - 60
    for key in (old, foreign):
        os.utime(tmp_path / key, (before, before))
    found = look(tmp_path)["delete"]
    assert found.figures == {"stale_removed": 1}
    assert keys(str(tmp_path)) == {young, foreign}


@pytest.mark.parametrize("check", ["url", "put", "race", "throughput", "run"])
def test_an_interrupt_between_checks_leaves_nothing(tmp_path: Path, check: str) -> None:
    def interrupt(finding: Finding) -> None:
        if finding.check == check:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        examine(Request(str(tmp_path), OPTIONS, size=SIZE), interrupt)
    assert keys(str(tmp_path)) == set()


def test_an_interrupt_within_a_check_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request under way is waited for, so that what it puts is removed as well."""
    put = LocalBucket.put

    def slow(bucket: LocalBucket, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        if key.endswith("-large"):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
        put(bucket, key, data, if_absent=if_absent)

    monkeypatch.setattr(LocalBucket, "put", slow)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            examine(Request(str(tmp_path), OPTIONS, size=SIZE))
    finally:
        signal.signal(signal.SIGINT, before)
    assert keys(str(tmp_path)) == set()


# Runs


def damage_json(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def remove_head_object(run: Path) -> None:
    manifest = open_run(str(run)).head()
    (run / manifest.objects[0].key).unlink()


DAMAGES: list[tuple[str, Callable[[Path], Any], str, str]] = [
    ("run.json damaged", lambda run: damage_json(run / "run.json"), "failed", "format"),
    ("tensors.json gone", lambda run: (run / "tensors.json").unlink(), "failed", "not_found"),
    ("head damaged", lambda run: damage_json(run / "versions" / "0000000005.json"), "failed", "format"),
    ("hole", lambda run: (run / "versions" / "0000000003.json").unlink(), "failed", "chain"),
    ("object gone", remove_head_object, "failed", "not_found"),
    ("HEAD damaged", lambda run: damage_json(run / "HEAD.json"), "failed", "format"),
    ("run.json gone", lambda run: (run / "run.json").unlink(), "failed", "not_found"),
    ("HEAD gone", lambda run: (run / "HEAD.json").unlink(), "warning", ""),
]


@pytest.mark.parametrize(("name", "damage", "verdict", "kind"), DAMAGES, ids=[case[0] for case in DAMAGES])
def test_damaged_runs(run: Path, name: str, damage: Callable[[Path], Any], verdict: str, kind: str) -> None:
    damage(run)
    found = look(run, size=0)["run"]
    assert found.verdict == verdict
    assert (found.error.kind if found.error else "") == kind
    if kind in ("format", "chain"):
        assert "delta-sync verify" in found.mend


def test_a_run_that_has_only_begun(run: Path) -> None:
    shutil.rmtree(run / "versions")
    (run / "HEAD.json").unlink()
    found = look(run, size=0)["run"]
    assert (found.verdict, found.figures["head"]) == ("ok", None)


def test_ago() -> None:
    assert [ago(seconds) for seconds in (-5, 0, 119, 120, 7200, 172800)] == [
        "5 s in the future",
        "0 s ago",
        "119 s ago",
        "2 min ago",
        "2 h ago",
        "2 days ago",
    ]


# Mirror and cache


def test_mirrors(run: Path, tmp_path: Path) -> None:
    shutil.copytree(run, tmp_path / "mirror")

    def asked() -> Finding:
        return look(run, size=0, options=StoreOptions(mirror=str(tmp_path / "mirror")))["mirror"]

    good = asked()
    assert good.verdict == "ok"
    file = tmp_path / "mirror" / good.figures["key"]
    data = file.read_bytes()
    file.write_bytes(data[:-1] + b"?")
    bad = asked()
    assert bad.error is not None
    assert bad.error.kind == "digest"
    file.unlink()
    assert asked().verdict == "warning"
    file.mkdir()
    file.rmdir()
    file.symlink_to("/etc/passwd")
    broken_link = asked()
    assert broken_link.error is not None
    assert broken_link.error.kind == "store"


def test_a_mirror_of_nothing(tmp_path: Path) -> None:
    found = look(tmp_path, size=0, options=StoreOptions(mirror=str(tmp_path / "mirror")))
    assert found["mirror"].verdict == "skipped"


def test_caches(tmp_path: Path) -> None:
    def asked(folder: Path, limit: int = 1000) -> Finding:
        return look(tmp_path / "run", size=0, cache=(folder, limit))["cache"]

    made = asked(tmp_path / "new" / "cache")
    assert made.verdict == "ok"
    assert made.figures["free_bytes"] > 0
    assert not (tmp_path / "new").exists()
    assert asked(tmp_path, 1 << 60).verdict == "warning"
    (tmp_path / "file").write_bytes(b"x")
    for folder in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/cache")):
        found = asked(folder)
        assert found.error is not None
        assert found.error.kind == "settings"


# Libraries


def test_libraries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def asked(url: str, version: str | None) -> dict[str, Finding]:
        monkeypatch.setattr(doctor_door, "_version", lambda name: version)
        return look(url, size=0)

    missing = asked("s3://bucket/run", None)
    assert missing["url"].verdict == "ok"
    assert "needs obstore" in missing["library"].said
    assert "pip install" in missing["library"].mend
    assert missing["put"].verdict == "skipped"
    old = asked("memory://old", "0.11.9")["library"]
    assert old.error is not None
    assert "too old" in old.said
    assert asked("s3://bad bucket/run", None)["url"].verdict == "failed"
    assert asked(str(tmp_path), None)["library"].verdict == "ok"


def test_least_versions_are_those_of_the_project() -> None:
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = dict(line.split(">=") for line in [*extras["hub"], *extras["object-stores"]])
    assert extras["stores"] == ["vllm-delta-sync[hub,object-stores]"]
    assert {name: ".".join(map(str, least)) for name, least in doctor_door.LEAST.items()} == wanted


# How checks are carried out


def test_bounded() -> None:
    assert bounded(lambda: 7, 5) == 7
    with pytest.raises(NotFoundError):
        bounded(lambda: open_bucket("/nowhere").get("a"), 5)

    def late() -> None:
        raise TimeoutError("of the call itself")

    with pytest.raises(TimeoutError, match="of the call itself"):
        bounded(late, 5)
    event = threading.Event()
    with pytest.raises(HungError):
        bounded(lambda: event.wait(120), 0.05)
    event.set()


def test_findings_are_told_at_once() -> None:
    told: list[str] = []
    exam = Examination(lambda finding: told.append(finding.check))
    exam.check("one", lambda: Finding("one", "ok", "well"), 5)
    assert told == ["one"]
    exam.skip("two", "not wanted")
    assert [finding.document()["verdict"] for finding in exam.findings] == ["ok", "skipped"]
