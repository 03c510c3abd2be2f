"""What reading a run costs: prefetching, each manifest once, many at a time, and bounds on what strangers put there."""

import json
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest

from tests.support.chains import Chain
from tests.support.publishers import Hook, Hooked, nothing
from tests.support.trusted import keyring_at
from tests.support.written import Written
from vllm_delta_sync.bucket import StoreOptions
from vllm_delta_sync.bucket.middleware.usage import LimitedBucket, StoreUsage
from vllm_delta_sync.bucket.threads import PARALLEL
from vllm_delta_sync.cli.log import log_document
from vllm_delta_sync.client import Run, open_run
from vllm_delta_sync.engine.protocol import failed_step
from vllm_delta_sync.engine.staging.stage import PhaseTimer, open_steps
from vllm_delta_sync.errors import (
    ChainError,
    DataError,
    FormatError,
    LimitError,
    NotFoundError,
    SignatureError,
)
from vllm_delta_sync.format import documents as side
from vllm_delta_sync.format.base_document import dump_canonical
from vllm_delta_sync.format.documents import TAGS_PREFIX
from vllm_delta_sync.format.manifest import HEAD_KEY, OBJECTS_PREFIX, RUN_KEY, VERSIONS_PREFIX, Manifest, version_key
from vllm_delta_sync.maintenance import follow as follow_module
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.gc.collect import collect
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run import run_reader
from vllm_delta_sync.run.read_plan import ReadPlanner
from vllm_delta_sync.run.run_reader import MAX_BAD_DOCUMENTS, MAX_BAD_IN_A_ROW, RunReader
from vllm_delta_sync.trust import Keyring
from vllm_delta_sync.verify.verify import verify_run

VERSIONS = 40
PATIENCE_SECONDS = 60.0
"""Passes only where reads that should be under way together are not."""
HEAD = 3
"""Of a run that strangers put documents into."""

# Prefetching


class Far(Hooked):
    """A store that is far away by its URL, and the keys that are read from it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.url = "s3://far/run"
        self.asked: list[str] = []
        self.reading = self.asked.append


def test_what_a_poll_reads_first_is_asked_for_at_once(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.grow()
    bucket, together = Far(chain.folder), threading.Barrier(3)
    run = RunReader(bucket)
    known = run.manifest(0)
    bucket.asked.clear()

    def read(key: str) -> None:
        bucket.asked.append(key)
        together.wait(PATIENCE_SECONDS)

    bucket.reading = read
    with run.prefetching(0, expected=1):
        assert run.is_there()
        assert run.reachable_head(known)[0].version == 1
    # With the version after it, whose absence shows that there is none newer.
    assert sorted(bucket.asked) == sorted(["HEAD.json", version_key(1), version_key(2)])


@pytest.mark.parametrize("trusting", [False, True])
def test_a_poll_without_news_asks_for_the_head_and_the_version_that_may_follow(tmp_path: Path, trusting: bool) -> None:
    """Stores charge for each request, and the manifest of a snapshot may have megabytes. What keys must have signed is
    checked again."""
    keyring = keyring_at(tmp_path / "key") if trusting else None
    chain = Chain(tmp_path, keyring=keyring)
    bucket = Far(chain.folder)
    run = RunReader(bucket, keyring)
    known = run.head()
    bucket.asked.clear()
    with run.prefetching(known.version):
        assert run.is_there()
        assert run.reachable_head(known) == (known, None)
    again = [RUN_KEY, version_key(0)] if trusting else []
    assert sorted(bucket.asked) == sorted([HEAD_KEY, version_key(1), *again])


@pytest.mark.parametrize("trusting", [False, True])
def test_follow_polls_as_a_server_does(trusting: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keyring = keyring_at(tmp_path / "key") if trusting else None
    chain = Chain(tmp_path, keyring=keyring)
    bucket = Far(chain.folder)
    monkeypatch.setattr(follow_module, "open_run", lambda *_: Run(bucket, keyring))

    class Polls(threading.Event):
        asked: ClassVar[list[list[str]]] = []

        def wait(self, timeout: float | None = None) -> bool:
            self.asked.append(sorted(bucket.asked))
            bucket.asked.clear()
            if len(self.asked) == 2:
                chain.grow()
            if len(self.asked) == 4:
                self.set()
            return self.is_set()

    polls = Polls()
    assert [update.version for update in follow_module.follow(chain.url, tmp_path / "out", stop=polls)] == [0, 1]
    for head, poll in ((0, 1), (1, 3)):
        again = [RUN_KEY, version_key(head)] if trusting else []
        assert polls.asked[poll] == sorted([HEAD_KEY, version_key(head + 1), *again])


@pytest.mark.parametrize("trusting", [False, True])
@pytest.mark.parametrize("pointed", [None, 2])
def test_where_head_json_is_lost_or_far_behind_a_poll_begins_at_what_is_known(
    pointed: int | None, trusting: bool, tmp_path: Path
) -> None:
    keyring = keyring_at(tmp_path / "key") if trusting else None
    chain = Chain(tmp_path, keyring=keyring)
    chain.grow(8)
    bucket = Far(chain.folder)
    run = RunReader(bucket, keyring)
    known = run.head()
    bucket.delete(HEAD_KEY)
    if pointed is not None:
        chain.head(pointed)
    assert run.reachable_head(known) == (known, None)
    bucket.asked.clear()
    assert run.reachable_head(known) == (known, None)
    assert bucket.asked == [HEAD_KEY, version_key(8), version_key(9)]
    for version in (6, 7, 8):  # as by a backup that is restored
        bucket.delete(version_key(version))
    assert run.reachable_head(known)[0].version == 5


def test_a_poll_notices_another_run_in_the_place(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "first")
    run = RunReader(chain.bucket)
    other = Chain(tmp_path / "second", seed=1)
    for key in (RUN_KEY, HEAD_KEY):
        chain.bucket.put(key, other.bucket.get(key))
    assert not run.is_there()
    chain.bucket.delete(HEAD_KEY)
    assert not run.is_there()
    chain.bucket.delete(RUN_KEY)
    with pytest.raises(NotFoundError, match="no longer"):
        run.is_there()


def test_a_poll_that_found_a_newer_version_asks_for_none_after_it(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.grow()
    bucket = Far(chain.folder)
    run, behind = RunReader(bucket), bucket.get(HEAD_KEY)
    chain.grow(2)
    chain.bucket.put(HEAD_KEY, behind)
    known = run.manifest(1)
    for found in (2, 3, 3):
        bucket.asked.clear()
        with run.prefetching(known.version):
            before, known = known, run.reachable_head(known)[0]
        assert known.version == found
        # HEAD.json names version 1.
        assert sorted(key for key in bucket.asked if key.startswith(VERSIONS_PREFIX)) == [
            version_key(version) for version in range(before.version + (before.version == 1), before.version + 2)
        ]
    assert run.reachable_head()[0].version == 3


def test_what_was_missing_is_asked_for_again_and_nothing_outlives_the_poll(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    bucket = Far(chain.folder)
    run = RunReader(bucket)
    asked = threading.Event()
    with run.prefetching(0, expected=1):
        while version_key(1) not in bucket.asked:
            asked.wait(0.01)
        with pytest.raises(NotFoundError):
            run.manifest(1)
        chain.grow()
        assert run.head().version == 1
    with run.prefetching(0):
        assert run.is_current()
    chain.grow()
    assert run.head().version == 2


def test_a_head_with_a_fingerprint_of_each_tensor_is_parsed_once_and_its_damage_is_seen(tmp_path: Path) -> None:
    """Parsing it takes a third of a second for 36,000 tensors, and a server polls every two seconds."""
    chain = Chain(tmp_path)
    run = RunReader(chain.bucket)
    with mock.patch.object(Manifest, "from_bytes", wraps=Manifest.from_bytes) as parsed:
        for _ in range(3):
            assert run.head().version == 0
        assert parsed.call_count == 1
    stored = chain.bucket.get(version_key(0))
    chain.bucket.put(version_key(0), stored + b" ")
    with pytest.raises(FormatError, match="not in canonical form"):
        run.head()
    chain.bucket.put(version_key(0), stored)
    assert run.head().version == 0


# Several at once


def meeting(together: threading.Barrier, *prefixes: str) -> Hook:
    """A hook in which requests for such keys wait until enough are under way."""

    def hook(key: str) -> None:
        if key.startswith(prefixes):
            together.wait(PATIENCE_SECONDS)

    return hook


@pytest.mark.parametrize("where", ["restored", "staged"])
@pytest.mark.parametrize("missing", [None, 2])
def test_small_objects_of_several_steps_are_read_together(where: str, missing: int | None, tmp_path: Path) -> None:
    """Without merged deltas, a reader that is 1,000 versions behind needs as many, each of which takes a round trip."""
    chain = Chain(tmp_path)
    chain.grow(3)
    bucket, together = Far(chain.folder), threading.Barrier(3)
    keys = [ref.key for manifest in chain.manifests[1:] for ref in manifest.objects]
    bucket.reading = meeting(together, *keys)
    run = Run(bucket)
    steps = ReadPlanner(run).path(0, 3)
    if missing is not None:
        bucket.delete(chain.manifests[missing].objects[0].key)

    def read() -> object:
        if where == "restored":
            return run.snapshot()
        first = run.snapshot(0)
        return open_steps(steps, list(first.fingerprints), PhaseTimer(), first.base_tensor)

    if missing is None:
        read()
    else:
        with pytest.raises(DataError) as caught:
            read()
        assert where == "restored" or failed_step(caught.value) == missing - 1
    assert not together.broken


def test_tags_are_read_together_and_so_is_whether_what_a_new_one_needs_is_stored(tmp_path: Path) -> None:
    chain = Chain(tmp_path)
    chain.grow(2)
    for name in ("a", "b", "c"):
        set_tag(open_run(chain.url), name, 1)
    bucket, together = Far(chain.folder), threading.Barrier(3)
    bucket.reading = meeting(together, TAGS_PREFIX)
    run = RunReader(bucket)
    assert sorted(run.tags()) == ["a", "b", "c"]
    assert collect(run, dry_run=True).kept[1] == ["last", "tag a", "tag b", "tag c"]
    bucket.reading = nothing
    bucket.looking = meeting(together, OBJECTS_PREFIX)
    set_tag(run, "d", 2)
    assert not together.broken


# A long run


class Slow:
    """A directory whose first reads of manifests are answered only when so many of them are under way.

    Attributes:
        run: opened over it. metrics: of its requests. reads: of manifests, by key. most: of them at one time.
    """

    def __init__(self, folder: Path, together: int, keyring: Keyring | None = None) -> None:
        self.metrics = StoreUsage()
        bucket = Hooked(folder)
        self.run = Run(LimitedBucket(bucket, StoreOptions(), self.metrics), keyring)
        self.reads: Counter[str] = Counter()
        self.most = 0
        self._now = 0
        self._together = together
        self._changed = threading.Condition()
        bucket.reading = self._read
        self._before = self.metrics.snapshot()["calls"]

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
        return self.metrics.snapshot()["calls"] - self._before


def once(versions: range) -> dict[str, int]:
    return {version_key(version): 1 for version in versions}


def without_probe(reads: Counter[str], head: int = VERSIONS) -> dict[str, int]:
    """Without the read of the version after the head, which says that there is none."""
    return {key: count for key, count in reads.items() if key != version_key(head + 1)}


def numbers(document: dict[str, Any]) -> list[int]:
    return [row["version"] for row in document["versions"]]


@pytest.fixture(scope="module")
def long_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Written(tmp_path_factory.mktemp("long") / "run", VERSIONS).folder


@pytest.fixture
def folder(long_run: Path, tmp_path: Path) -> Path:
    """A run of one's own."""
    return shutil.copytree(long_run, tmp_path / "run")


def test_log_reads_what_it_shows_once_and_many_at_a_time(long_run: Path) -> None:
    slow = Slow(long_run, PARALLEL)
    whole, failure = log_document(slow.run, None)
    assert (failure, numbers(whole)) == (None, list(range(VERSIONS + 1)))
    assert without_probe(slow.reads) == once(range(VERSIONS + 1))
    assert (slow.most, slow.calls <= VERSIONS + 1 + 4) == (PARALLEL, True)
    # Of the last ones those, and the one before.
    slow = Slow(long_run, 5)
    document, failure = log_document(slow.run, 5)
    assert (failure, document["versions"]) == (None, whole["versions"][-5:])
    assert without_probe(slow.reads) == once(range(VERSIONS - 5, VERSIONS + 1))
    assert slow.calls <= 6 + 4
    assert log_document(open_run(str(long_run)), 1000) == (whole, None)


def rewrite(folder: Path, version: int) -> None:
    """Replace a manifest by another valid one, as an attacker with write access can."""
    file = folder / version_key(version)
    value = json.loads(file.read_bytes())
    file.write_bytes(dump_canonical({**value, "step": value["step"] + 1}))


@pytest.mark.parametrize(
    ("version", "last", "shown"),
    [
        *((VERSIONS, 5, range(35, 40)), (VERSIONS - 1, 5, range(36, 40)), (VERSIONS - 4, 5, range(36, 37))),
        *((VERSIONS - 5, 5, range(0)), (0, None, range(1)), (VERSIONS - 6, None, range(VERSIONS - 5))),
    ],
)
def test_log_finds_one_that_was_rewritten(folder: Path, version: int, last: int | None, shown: range) -> None:
    """Each version that is shown follows the one before it, and the newest is the one that HEAD.json names."""
    rewrite(folder, version)
    document, failure = log_document(open_run(str(folder)), last)
    assert isinstance(failure, ChainError)
    assert numbers(document) == list(shown)


def test_verify_reads_each_manifest_once_and_many_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(folder, PARALLEL)
    report = verify_run(slow.run)
    assert (report.head, report.versions, report.replayed) == (VERSIONS, VERSIONS + 1, True)
    assert slow.reads == once(range(VERSIONS + 1))
    assert slow.most == PARALLEL
    # What does not fit into memory is read again.
    sizes = [(folder / version_key(version)).stat().st_size for version in range(VERSIONS + 1)]
    monkeypatch.setattr(run_reader, "KEPT_BYTES", sum(sizes) // 4)
    again = Slow(folder, PARALLEL)
    assert verify_run(again.run).head == VERSIONS
    assert max(again.reads.values()) > 1
    run = Slow(folder, 1)
    with run.run.caching_manifests():
        for version in (*range(VERSIONS + 1), 0, 1, VERSIONS):
            run.run.manifest(version)
    assert run.reads == once(range(VERSIONS + 1)) | {version_key(VERSIONS): 2}
    # What a check has read does not outlive it.
    rewrite(folder, 7)
    with pytest.raises(ChainError):
        verify_run(slow.run)
    (folder / version_key(20)).unlink()
    (folder / version_key(30)).write_bytes(b"{")
    report = verify_run(open_run(str(folder)), findings=True)
    assert [finding.version for finding in report.findings if finding.key.startswith(VERSIONS_PREFIX)] == [7, 20, 30]


# Documents that strangers put into a bucket


@pytest.fixture
def ring(tmp_path: Path) -> Keyring:
    return keyring_at(tmp_path / "trainer.key")


@pytest.fixture
def chain(tmp_path: Path, ring: Keyring) -> Chain:
    chain = Chain(tmp_path, keyring=ring)
    chain.grow(HEAD)
    return chain


def junk(chain: Chain, version: int, size: int, key: str) -> bytes:
    """A canonical manifest of about so many bytes, with a signature that is none."""
    fields = chain.manifests[HEAD].model_dump(mode="json")
    signature = {"key": key, "value": "0" * 128}
    fields |= {"version": version, "base_version": version - 1, "signature": signature}
    return dump_canonical({**fields, "zzz": "@@"}).replace(b'"@@"', b"[" + b"0," * (size // 2) + b"0]")


def put(chain: Chain, data: bytes, *versions: int) -> None:
    for version in versions:
        (chain.folder / version_key(version)).write_bytes(data)


@contextmanager
def reading(run: Run) -> Iterator[list[int]]:
    """Sizes of what is read from the bucket."""
    sizes: list[int] = []
    good: Callable[..., bytes] = run.bucket.get

    def get(key: str, *, max_bytes: int | None = None) -> bytes:
        sizes.append(0)
        data = good(key, max_bytes=max_bytes)
        sizes[-1] = len(data)
        return data

    with mock.patch.object(run.bucket, "get", get):
        yield sizes


@pytest.mark.parametrize("whose", ["trainer", "stranger", "unsigned"])
def test_large_junk_behind_the_head_is_read_to_a_size(whose: str, chain: Chain, ring: Keyring, tmp_path: Path) -> None:
    run = open_run(chain.url, None if whose == "unsigned" else ring)
    run.document_limit = 200_000  # documents of its usual size take long to parse
    if whose == "unsigned":
        put(chain, b"[" + b" " * (run.document_limit - 10) + b"]", *range(HEAD + 1, HEAD + 20))
    else:
        key = ring.public if whose == "trainer" else keyring_at(tmp_path / "stranger.key").public
        for version in range(HEAD + 1, HEAD + 2 * MAX_BAD_DOCUMENTS + 8):
            put(chain, junk(chain, version, run.document_limit // 2 - 2000, key or ""), version)
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError if whose == "unsigned" else SignatureError)
    most = (MAX_BAD_DOCUMENTS + 1) * run.document_limit
    if whose == "unsigned":
        assert MAX_BAD_DOCUMENTS * run.document_limit < sum(read) < most + 8192
    else:
        assert sum(read) < most


def test_more_than_the_limit_is_not_read(chain: Chain, ring: Keyring) -> None:
    run = open_run(chain.url, ring)
    put(chain, b" " * (run.document_limit + 1), HEAD + 1)
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, LimitError)
    assert sum(read) < 8192
    for key, get in (
        (side.anchor_key(2), lambda: run.anchor(2)),
        (side.merged_delta_key(0, 2), lambda: run.merged_delta(0, 2)),
    ):
        (chain.folder / key).parent.mkdir()
        (chain.folder / key).write_bytes(b" " * (run.document_limit + 1))
        with pytest.raises(LimitError):
            get()


@pytest.mark.parametrize("count", [1, MAX_BAD_IN_A_ROW])
@pytest.mark.parametrize("far", [0, 2000])
def test_the_head_is_found_without_head_json(count: int, far: int, chain: Chain, ring: Keyring) -> None:
    put(chain, b"{}", *range(HEAD + 1, HEAD + 1 + count), *range(9_000_000_000, 9_000_000_000 + far))
    (chain.folder / HEAD_KEY).write_bytes(b"{}")
    run = open_run(chain.url, ring)
    with reading(run) as read:
        manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)
    assert error is not None
    assert HEAD_KEY in error.message
    assert len(read) < 4 * MAX_BAD_IN_A_ROW


def test_more_junk_than_is_passed_over(chain: Chain, ring: Keyring) -> None:
    put(chain, b"{}", *range(HEAD + 1, HEAD + 2 + MAX_BAD_IN_A_ROW))
    run = open_run(chain.url, ring)
    manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)
    (chain.folder / HEAD_KEY).write_bytes(b"{}")
    with reading(run) as read, pytest.raises(FormatError, match=HEAD_KEY):
        run.reachable_head()
    assert len(read) < 2 * MAX_BAD_IN_A_ROW
    # A lost manifest is none of them: it hides nothing beyond it.
    (chain.folder / version_key(HEAD + 1)).unlink()
    (chain.folder / version_key(1)).unlink()
    assert open_run(chain.url, ring).reachable_head()[0].version == HEAD


def test_a_large_version_behind_large_junk(tmp_path: Path) -> None:
    """Too large to be read after so much, and found from the one before it."""
    chain = Chain(tmp_path)
    chain.grow(HEAD)
    run = open_run(chain.url)
    last = json.loads((chain.folder / version_key(HEAD)).read_bytes())
    put(chain, dump_canonical({**last, "zzz": "x" * (run.document_limit // 2)}), HEAD)
    put(chain, b"x" * (run.document_limit * 15 // 16), *range(HEAD + 1, HEAD + 1 + MAX_BAD_DOCUMENTS))
    (chain.folder / HEAD_KEY).write_bytes(b"{}")
    manifest, error = run.reachable_head()
    assert (manifest.version, type(error)) == (HEAD, FormatError)


def test_writers_beside_the_history_keep_to_the_limit(chain: Chain, ring: Keyring) -> None:
    run = open_run(chain.url, ring)
    usual = run.document_limit

    def shrink() -> bool:
        """Once the manifests are read."""
        run.document_limit = 200
        return False

    for make in (lambda: make_anchor(run, HEAD, stop=shrink), lambda: make_merged_delta(run, 0, HEAD, stop=shrink)):
        run.document_limit = usual
        with pytest.raises(LimitError, match="document_limit"):
            make()
    assert not (chain.folder / "merged_deltas").exists()
    assert not (chain.folder / "anchors").exists()
