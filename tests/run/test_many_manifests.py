"""A long run in a slow store: its manifests are read several at a time, and each once."""

import json
import shutil
import threading
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from tests.cli.test_cli_keys import answer
from tests.support.signed_runs import PUBLISHER, ROOT, Signed, name_of
from tests.support.written import Written
from tests.trainer.faults.hooks import Hooked
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.bucket.calls import PARALLEL, in_parallel
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.bucket.metered import MeteredBucket, Metrics
from vllm_delta_sync.chain import Run, ahead, open_run
from vllm_delta_sync.chain.verify import verify_run
from vllm_delta_sync.cli.views import log_document
from vllm_delta_sync.errors import ChainError, DeltaSyncError, SignatureError
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.wire.canonical import dump_canonical
from vllm_delta_sync.wire.documents import KeyEntry
from vllm_delta_sync.wire.manifest import VERSIONS_PREFIX, version_key

VERSIONS = 40
PATIENCE_SECONDS = 20.0
"""Passes only where reads that should be under way together are not."""


class Slow:
    """A directory whose first reads of manifests are answered only when so many of them are under way.

    Attributes:
        run: opened over it. metrics: of its requests. reads: of manifests, by key. most: of them at one time.
    """

    def __init__(self, folder: Path, together: int, keyring: Keyring | None = None) -> None:
        self.metrics = Metrics()
        bucket = Hooked(folder)
        self.run = Run(MeteredBucket(bucket, self.metrics), keyring)
        self.reads: Counter[str] = Counter()
        self.most = 0
        self._now = 0
        self._together = together
        self._changed = threading.Condition()
        bucket.reading = self._read
        self._before = self.metrics.snapshot()

    def _read(self, key: str) -> None:
        if not key.startswith(VERSIONS_PREFIX):
            return
        with self._changed:
            self.reads[key] += 1
            self._now += 1
            self.most = max(self.most, self._now)
            self._changed.notify_all()
            # The head is read first, by itself: so many are awaited from the second read on.
            if sum(self.reads.values()) > 2:
                assert self._changed.wait_for(lambda: self.most >= self._together, PATIENCE_SECONDS), self.reads
            self._now -= 1

    @property
    def calls(self) -> float:
        """Requests of any kind since it was opened."""
        return self.metrics.since(self._before)["calls"]


def opened(folder: Path) -> Run:
    return open_run(str(folder))


def once(versions: range) -> dict[str, int]:
    return {version_key(version): 1 for version in versions}


def manifests_of(reads: Counter[str]) -> dict[str, int]:
    """Without the look for a version after the head, which says that there is none."""
    return {key: count for key, count in reads.items() if key != version_key(VERSIONS + 1)}


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Written(tmp_path_factory.mktemp("long") / "run", VERSIONS).folder


@pytest.fixture
def folder(long_run: Path, tmp_path: Path) -> Path:
    """A run of one's own."""
    return shutil.copytree(long_run, tmp_path / "run")


def test_log_reads_all_manifests_once_and_many_at_a_time(folder: Path) -> None:
    slow = Slow(folder, PARALLEL)
    document, failure = log_document(slow.run, None)
    assert failure is None
    assert [row["version"] for row in document["versions"]] == list(range(VERSIONS + 1))
    assert manifests_of(slow.reads) == once(range(VERSIONS + 1))
    assert slow.most == PARALLEL
    assert slow.calls <= VERSIONS + 1 + 4


def test_log_of_the_last_versions_reads_those_and_the_one_before(folder: Path) -> None:
    slow = Slow(folder, 5)
    document, failure = log_document(slow.run, 5)
    assert failure is None
    assert [row["version"] for row in document["versions"]] == list(range(VERSIONS - 4, VERSIONS + 1))
    assert manifests_of(slow.reads) == once(range(VERSIONS - 5, VERSIONS + 1))
    assert slow.calls <= 6 + 4
    # The same rows as of the whole log.
    assert document["versions"] == log_document(opened(folder), None)[0]["versions"][-5:]
    assert log_document(opened(folder), 1000) == log_document(opened(folder), None)


def rewrite(folder: Path, version: int) -> None:
    """Replace a manifest by another valid one, as an attacker with write access can."""
    file = folder / version_key(version)
    value = json.loads(file.read_bytes())
    file.write_bytes(dump_canonical({**value, "step": value["step"] + 1}))


@pytest.mark.parametrize(
    ("version", "shown"),
    [(VERSIONS, 5), (VERSIONS - 1, 4), (VERSIONS - 4, 1), (VERSIONS - 5, 0)],
    ids=["head", "last", "first shown", "before"],
)
def test_log_of_the_last_versions_finds_one_that_was_rewritten(folder: Path, version: int, shown: int) -> None:
    """Each version that is shown follows the one before it, and the newest is the one that HEAD.json names."""
    rewrite(folder, version)
    document, failure = log_document(opened(folder), 5)
    assert isinstance(failure, ChainError)
    newest = VERSIONS - 1 if version == VERSIONS else VERSIONS
    assert [row["version"] for row in document["versions"]] == list(range(newest - 4, newest - 4 + shown))


@pytest.mark.parametrize("version", [0, 7, VERSIONS - 6])
def test_the_whole_log_finds_one_that_was_rewritten(folder: Path, version: int) -> None:
    rewrite(folder, version)
    document, failure = log_document(opened(folder), None)
    assert isinstance(failure, ChainError)
    assert [row["version"] for row in document["versions"]] == list(range(version + 1))


def test_verify_reads_each_manifest_once_and_many_at_a_time(folder: Path) -> None:
    slow = Slow(folder, PARALLEL)
    report = verify_run(slow.run)
    assert (report.head, report.versions, report.replayed) == (VERSIONS, VERSIONS + 1, True)
    assert slow.reads == once(range(VERSIONS + 1))
    assert slow.most == PARALLEL


def test_verify_of_a_long_signed_run_reads_each_manifest_once(tmp_path: Path) -> None:
    """That what a retired key signed holds is shown by the manifests up to its last word, which are read anyway."""
    signed = Signed(ROOT, open_bucket(tmp_path / "run"))
    signed.writer.keyring = PUBLISHER
    signed.deltas(*["packed"] * 25)
    signed.list_keys(1, KeyEntry(key=name_of(PUBLISHER), last=signed.last_word(25)))
    signed.writer.keyring = ROOT
    signed.deltas(*["packed"] * 5)
    slow = Slow(tmp_path / "run", 2, Keyring(ROOT.trusted))
    report = verify_run(slow.run)
    assert (report.head, report.checked, report.findings) == (30, True, [])
    assert slow.reads == once(range(31))
    slow = Slow(tmp_path / "run", 2, Keyring(ROOT.trusted))
    with slow.run.keeping():
        document, failure = log_document(slow.run, None)
    assert (failure, len(document["versions"])) == (None, 31)
    assert {key: count for key, count in slow.reads.items() if key != version_key(31)} == once(range(31))


def test_verify_finds_in_parallel_what_it_found_one_by_one(folder: Path) -> None:
    rewrite(folder, 7)
    (folder / version_key(20)).unlink()
    (folder / version_key(30)).write_bytes(b"{")
    report = verify_run(opened(folder), findings=True)
    assert [finding.version for finding in report.findings if finding.key.startswith(VERSIONS_PREFIX)] == [7, 20, 30]
    with pytest.raises(ChainError, match="version 8 names parent"):
        verify_run(opened(folder))


def test_what_does_not_fit_is_read_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded: then each manifest is read at most once for the documents, and once for the weights."""
    sizes = [(folder / version_key(version)).stat().st_size for version in range(VERSIONS + 1)]
    monkeypatch.setattr(ahead, "KEPT_BYTES", sum(sizes) // 4)
    slow = Slow(folder, PARALLEL)
    assert verify_run(slow.run).head == VERSIONS
    assert max(slow.reads.values()) == 2
    kept = [sizes[version] for version in range(VERSIONS + 1) if slow.reads[version_key(version)] == 1]
    assert 0 < sum(kept) <= sum(sizes) // 4


def test_what_a_check_has_read_does_not_outlive_it(folder: Path) -> None:
    run = opened(folder)
    assert verify_run(run).head == VERSIONS
    rewrite(folder, 7)
    with pytest.raises(ChainError):
        verify_run(run)


def test_nothing_is_kept_that_could_not_be_read(folder: Path) -> None:
    file = folder / version_key(7)
    data = file.read_bytes()
    run = opened(folder)
    with run.keeping():
        file.unlink()
        with pytest.raises(DeltaSyncError):
            run.manifest(7)
        file.write_bytes(data)
        assert run.manifest(7).version == 7
        file.unlink()
        assert run.manifest(7).version == 7


def test_the_commands_ask_for_no_more(folder: Path) -> None:
    asked: Counter[str] = Counter()
    get = LocalBucket.get

    def count(bucket: LocalBucket, key: str, *, max_bytes: int | None = None) -> bytes:
        if key.startswith(VERSIONS_PREFIX):
            asked[key] += 1
        return get(bucket, key, max_bytes=max_bytes)

    with mock.patch.object(LocalBucket, "get", count):
        rows = answer("log", "--bucket", str(folder), "--last", "5")["versions"]
        assert len(rows) == 5
        assert manifests_of(asked) == once(range(VERSIONS - 5, VERSIONS + 1))
        for command in ("log", "verify"):
            asked.clear()
            answer(command, "--bucket", str(folder))
            assert manifests_of(asked) == once(range(VERSIONS + 1))


def test_a_version_that_a_key_may_not_sign_is_refused_as_before(tmp_path: Path) -> None:
    signed = Signed(ROOT, open_bucket(tmp_path / "run"))
    signed.deltas(*["packed"] * 6)
    signed.writer.keyring = PUBLISHER
    signed.delta()
    signed.writer.keyring = ROOT
    signed.deltas(*["packed"] * 6)
    run = Run(open_bucket(tmp_path / "run"), Keyring(ROOT.trusted))
    document, failure = log_document(run, None)
    assert (len(document["versions"]), type(failure)) == (7, SignatureError)
    document, failure = log_document(run, 5)
    assert (len(document["versions"]), failure) == (5, None)
    document, failure = log_document(run, 6)
    assert (document["versions"], type(failure)) == ([], SignatureError)


def test_few_answers_wait_to_be_taken() -> None:
    called: list[int] = []

    def call(item: int) -> int:
        called.append(item)
        return item

    answers = in_parallel(call, range(1000), ahead=20)
    for number, found in enumerate(answers):
        assert found == number
        assert len(called) <= number + 1 + 20
    assert sorted(called) == list(range(1000))
    # A generator that is closed early leaves no thread behind.
    before = threading.active_count()
    answers = in_parallel(call, range(1000), ahead=20)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    deadline = threading.Event()
    while threading.active_count() > before:
        deadline.wait(0.01)
