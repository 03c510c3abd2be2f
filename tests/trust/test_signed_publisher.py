"""A publisher with a key: all that it writes is signed, HEAD is renewed, and nothing of a stranger is built upon."""

import json
import logging
import shutil
import threading
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from tests.support.exporting import stored
from tests.support.forge import FORGERIES, forge
from tests.support.publishers import FailAt, Hooked, Trainer, publish, small_trainer
from tests.support.signed import KINDS, Keys, assert_all_signed, head_of, refuse, sign_file, unsign
from tests.support.written import find_steps as way
from trainer_side import Publisher
from trainer_side.maintenance import HEAD_THREAD_NAME, THREAD_NAME
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    PublishError,
    SettingsError,
    SignatureError,
    UsageError,
)
from vllm_delta_sync.format.base_document import Document
from vllm_delta_sync.format.documents import CLAIMS_PREFIX, Anchor, MergedDelta, anchor_key, merged_delta_key
from vllm_delta_sync.format.manifest import HEAD_KEY, RUN_KEY, Head, Manifest, version_key
from vllm_delta_sync.maintenance.anchor_writer import make_anchor
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.compact import compact, maintain
from vllm_delta_sync.maintenance.merge_writer import make_merged_delta
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.trust.keyring import UNPARSED_BYTES

_OTHERS: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def others() -> None:
    """Threads that earlier tests of this process left, for example of trainers that were killed."""
    _OTHERS.clear()
    _OTHERS.update(threading.enumerate())


def started(name: str) -> list[threading.Thread]:
    """Threads by a name that this test has started and that still run."""
    return [thread for thread in threading.enumerate() if thread.name == name and thread not in _OTHERS]


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


def signed_run(folder: Path, keys: Keys, trainer: Trainer, versions: int) -> Run:
    """A run with so many versions after version 0, whose publisher has ended."""
    with Publisher(trainer.live, str(folder), signing_key=keys.private("a"), merge=False, codec="plain") as publisher:
        publish(publisher, trainer, versions)
    return Run(open_bucket(str(folder)), keys.ring("a"))


# What is written


def test_a_signed_manifest_needs_no_other_to_be_tagged(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """Its signature shows that it was not altered; without trusted keys only the manifest after it does."""
    signed_run(folder, keys, trainer, 3)
    (folder / version_key(2)).write_bytes(b"{")
    with pytest.raises(ChainError, match="version 2"):
        set_tag(Run(open_bucket(str(folder))), "best", 1)
    run = Run(open_bucket(str(folder)), keys.ring("a", "a"))
    assert set_tag(run, "best", 1).version == 1


def test_every_document_is_signed(folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    save_file(trainer.live, tmp_path / "base" / "model.safetensors")
    key = keys.private("a")
    with Publisher(
        trainer.live, str(folder), tmp_path / "base", signing_key=key, anchor_every=2, codec="plain"
    ) as publisher:
        publish(publisher, trainer, 3)
        publisher.tag("best", 2, milestone=True)
        publisher.anchor()
        publisher.rebase(1)
        rebased = {json.loads(file.read_bytes())["version"] for file in (folder / "tags").iterdir()}
        assert rebased == {1, 2}
        assert_all_signed(folder, keys.hex("a"))
        publish(publisher, trainer, 2)
    with Publisher(trainer.live, str(folder), signing_key=str(key)) as publisher:
        publish(publisher, trainer)
    run = Run(open_bucket(str(folder)), keys.ring("a"))
    make_merged_delta(run, 2, 3)
    made = branch(run, "tag:best", str(tmp_path / "branch"))
    assert assert_all_signed(folder, keys.hex("a")) == {*KINDS, "tensors.json", "objects"}
    assert assert_all_signed(tmp_path / "branch", keys.hex("a")) == {
        "run.json",
        "tensors.json",
        "HEAD.json",
        "versions",
    }
    readers = keys.readers("a")
    report = Run(open_bucket(str(folder)), readers).verify()
    assert (report.head, report.replayed) == (6, True)
    assert run.manifest(0).kind == "reference"
    assert Run(open_bucket(made.bucket.url), readers).head().fingerprint == run.manifest(2).fingerprint
    newest, head = run.head(), head_of(folder)
    assert (head.version, head.manifest, head.epoch, head.parent) == (6, newest.digest, 1, newest.parent)


def test_without_a_key_nothing_is_signed_and_head_has_no_end(folder: Path, trainer: Trainer) -> None:
    with Publisher(trainer.live, str(folder)) as publisher:
        publish(publisher, trainer)
        assert not started(HEAD_THREAD_NAME)
    assert head_of(folder).expires_at is None
    documents = [json.loads(data) for key, data in stored(folder).items() if key.split("/")[0] in KINDS]
    assert len(documents) == 4
    assert all(document["signature"] is None for document in documents)


# Which keys


def test_options_that_make_no_sense(folder: Path, keys: Keys, trainer: Trainer) -> None:
    refuse(folder, trainer, UsageError, "give both, or neither", trusted_keys=[keys.public("a")])
    for seconds in (0, -1, 1.5, True, 10**9):
        refuse(folder, trainer, UsageError, "head_seconds", signing_key=keys.private("a"), head_seconds=seconds)
    refuse(folder, trainer, SettingsError, "cannot be read", signing_key=folder / "none")
    refuse(
        folder, trainer, SignatureError, "is not among trusted_keys",
        signing_key=keys.private("a"), trusted_keys=str(keys.public("root")),
    )  # fmt: skip


def test_unsigned_run_is_not_gone_on_with(folder: Path, keys: Keys, trainer: Trainer) -> None:
    with Publisher(trainer.live, str(folder)) as publisher:
        publish(publisher, trainer)
    refuse(folder, trainer, SignatureError, "not signed.*publish to a new run URL", signing_key=keys.private("a"))


def test_signed_run_is_not_gone_on_with_without_a_key(folder: Path, keys: Keys, trainer: Trainer) -> None:
    signed_run(folder, keys, trainer, 1)
    refuse(folder, trainer, SignatureError, "is signed.*signing_key=")
    # Nor without the signature of the newest version, or that of run.json.
    for key in (version_key(1), RUN_KEY):
        honest = (folder / key).read_bytes()
        unsign(folder, key)
        refuse(folder, trainer, SignatureError, "is signed.*signing_key=")
        (folder / key).write_bytes(honest)


def test_key_that_does_not_fit_takes_nothing_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    signed_run(folder, keys, trainer, 1)
    refuse(
        folder, trainer, SignatureError, f"signing_key {keys.hex('b')[:16]} is not among trusted_keys",
        signing_key=keys.private("b"), trusted_keys=[keys.public("a")],
    )  # fmt: skip
    for trusted in (None, [keys.public("b")]):
        refuse(
            folder, trainer, SignatureError, rf"run\.json is signed by key {keys.hex('a')[:16]}, which is not trusted",
            signing_key=keys.private("b"), trusted_keys=trusted,
        )  # fmt: skip


# What lies beside the chain


@pytest.mark.parametrize(("by", "forger"), [("compact", None), ("upkeep", "stranger")])
def test_what_nobody_trusted_has_signed_is_made_again(
    by: str, forger: str | None, folder: Path, keys: Keys, trainer: Trainer
) -> None:
    run = signed_run(folder, keys, trainer, 4)
    make_merged_delta(run, 0, 4)
    make_anchor(run, 4)
    documents: list[tuple[str, type[Document]]] = [(merged_delta_key(0, 4), MergedDelta), (anchor_key(4), Anchor)]
    for key, kind in documents:
        if forger is None:
            unsign(folder, key)
        else:
            sign_file(folder, key, kind, keys.ring(forger))
    # Readers pass them over.
    reader = Run(open_bucket(str(folder)), keys.readers("a"))
    assert [(step.start, step.end) for step in way(reader, 0, 4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert reader.snapshot().fingerprint == run.head().model_fingerprint
    again = Run(open_bucket(str(folder)), keys.ring("a"))
    if by == "compact":
        report = compact(again, anchor="head")
        assert (report.present, report.merged_deltas, report.anchor_present) == (0, [(0, 4)], False)
        assert compact(again, anchor="head").anchor_present
    else:
        assert maintain(again, again.head(), anchor_every=4) == [merged_delta_key(0, 4), anchor_key(4)]
        assert maintain(Run(open_bucket(str(folder)), keys.ring("a")), again.head(), anchor_every=4) == []
    assert_all_signed(folder, keys.hex("a"))
    reader = Run(open_bucket(str(folder)), keys.readers("a"))
    assert [(step.start, step.end) for step in way(reader, 0, 4)] == [(0, 4)]


def test_branch_begins_with_a_key_readers_trust(folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path) -> None:
    run = signed_run(folder, keys, trainer, 2)
    foreign = Run(run.bucket, keys.ring("b", "a"))
    before = stored(folder)
    with pytest.raises(SignatureError, match="is not among trusted_keys"):
        branch(foreign, 1, str(tmp_path / "branch"))
    assert stored(folder) == before
    made = branch(run, 1, str(tmp_path / "branch"))
    with Publisher(trainer.live, made.bucket.url, signing_key=keys.private("a")) as publisher:
        publish(publisher, trainer)
    assert_all_signed(tmp_path / "branch", keys.hex("a"))
    assert Run(open_bucket(made.bucket.url), keys.readers("a")).verify().head == 1
    assert [item.key for item in run.bucket.list(CLAIMS_PREFIX)] == []


# HEAD does not run out while its publisher lives, and is never moved back


class Heads(Hooked):
    """Notes each HEAD that is written, and by which thread."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.written: list[tuple[str, Head]] = []
        self.changed = threading.Condition()

    def put(self, key: str, data: bytes | Path, *, if_absent: bool = False) -> None:
        super().put(key, data, if_absent=if_absent)
        if key == HEAD_KEY:
            assert isinstance(data, bytes)
            with self.changed:
                self.written.append((threading.current_thread().name, Head.from_bytes(data)))
                self.changed.notify_all()

    def renewals(self) -> list[Head]:
        return [head for name, head in self.written if name == HEAD_THREAD_NAME]

    def wait(self, renewals: int) -> list[Head]:
        with self.changed:
            assert self.changed.wait_for(lambda: len(self.renewals()) >= renewals, 120)
        return self.renewals()


def test_head_is_renewed_while_nothing_is_published(folder: Path, keys: Keys, trainer: Trainer) -> None:
    # A machine that stands still for two seconds writes one late; for twenty it does not.
    assert renewed_in_time(folder, keys, trainer, 3) or renewed_in_time(folder / "again", keys, trainer, 30)
    assert not started(HEAD_THREAD_NAME)


def renewed_in_time(folder: Path, keys: Keys, trainer: Trainer, head_seconds: int) -> bool:
    """Whether each HEAD was written before the one before it had run out; all else must hold of them anyway."""
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=head_seconds) as publisher:
        publish(publisher, trainer)
        renewals = bucket.wait(3)
        assert_all_signed(folder, keys.hex("a"))
    ends = [head.expires_at or "" for _, head in bucket.written]
    assert ends == sorted(set(ends))
    versions = [head.version for head in renewals]
    assert (versions, versions[-1]) == (sorted(versions), 1)
    assert all(head.created_at is not None and head.created_at < (head.expires_at or "") for head in renewals)
    assert not started(HEAD_THREAD_NAME)
    starts = [head.created_at or "" for _, head in bucket.written]
    return all(start < end for start, end in zip(starts[1:], ends, strict=False))


@pytest.mark.parametrize("name", [THREAD_NAME, HEAD_THREAD_NAME])
def test_no_thread_is_left_where_one_cannot_be_started(
    folder: Path, keys: Keys, trainer: Trainer, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name == name:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        Publisher(trainer.live, str(folder), signing_key=keys.private("a"))
    assert not started(THREAD_NAME)
    assert not started(HEAD_THREAD_NAME)


def test_close_leaves_a_head_that_holds_for_all_its_time(folder: Path, keys: Keys, trainer: Trainer) -> None:
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a")) as publisher:
        publish(publisher, trainer)
        before = head_of(folder)
    # One that is young is not renewed meanwhile.
    assert bucket.renewals() == []
    after = head_of(folder)
    assert (after.version, after.manifest) == (before.version, before.manifest)
    assert (after.expires_at or "") > (before.expires_at or "")


def test_head_is_renewed_until_upkeep_has_ended(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """``close`` waits for what is under way there, and a large object may take longer than HEAD lives."""
    bucket = Heads(folder)
    begun, closing = threading.Event(), threading.Event()
    renewed: list[bool] = []

    def hold(key: str) -> None:
        if begun.is_set():
            return
        begun.set()
        assert closing.wait(120)
        with bucket.changed:
            wanted = len(bucket.renewals()) + 3
            renewed.append(bucket.changed.wait_for(lambda: len(bucket.renewals()) >= wanted, 20))

    bucket.upkeep = hold
    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1, anchor_every=1) as publisher:
        publish(publisher, trainer)
        assert begun.wait(120)
        closing.set()
    assert renewed == [True]
    assert not started(HEAD_THREAD_NAME)


def test_renewal_that_fails_is_tried_again(folder: Path, keys: Keys, trainer: Trainer, caplog: Any) -> None:
    bucket = Heads(folder)
    fail = FailAt(HEAD_KEY)
    with caplog.at_level(logging.WARNING):
        with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1):
            bucket.before = fail
            bucket.wait(2)
    assert fail.fired
    assert "HEAD.json could not be written again" in caplog.text


def test_renewal_does_not_move_head_back(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """It has decided to write the version of before; then a version is committed, and waits with its HEAD."""
    bucket = Heads(folder)
    renewing, committed, overtaken = threading.Event(), threading.Event(), threading.Event()
    waited: list[bool] = []

    def hold(key: str) -> None:
        if key == HEAD_KEY and threading.current_thread().name == HEAD_THREAD_NAME and not waited:
            renewing.set()
            # Nobody comes to HEAD in this second, or the test fails.
            waited.append(committed.wait(120) and not overtaken.wait(1))

    def look(key: str) -> None:
        if key == HEAD_KEY and threading.current_thread().name != HEAD_THREAD_NAME:
            overtaken.set()

    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1) as publisher:
        bucket.before = hold
        assert renewing.wait(120)
        bucket.reading = look
        bucket.after = lambda key: committed.set() if key == version_key(1) else None
        publish(publisher, trainer)
        assert waited == [True]
        assert head_of(folder).version == 1
    versions = [head.version for _, head in bucket.written]
    assert versions == sorted(versions)


def test_head_of_a_stranger_is_always_written_over(folder: Path, keys: Keys, trainer: Trainer, caplog: Any) -> None:
    """It points at a version that is there, but not of anybody who is trusted: that is no reason to leave it."""
    bucket = Heads(folder)
    with Publisher(trainer.live, bucket, signing_key=keys.private("a"), head_seconds=1) as publisher:
        publish(publisher, trainer)
        forge(folder)
        forged = Manifest.from_bytes((folder / version_key(2)).read_bytes())
        (folder / HEAD_KEY).write_bytes(Head(run=forged.run, version=2, manifest=forged.digest).to_bytes())
        sign_file(folder, HEAD_KEY, Head, keys.ring("stranger"))
        with caplog.at_level(logging.ERROR):
            # One may have looked at HEAD just before.
            bucket.wait(len(bucket.renewals()) + 2)
        assert "which another party has written to the bucket" in caplog.text
        assert head_of(folder).version == 1
        (folder / version_key(2)).unlink()
        assert_all_signed(folder, keys.hex("a"))
        publish(publisher, trainer)


def test_renewal_ends_when_another_takes_the_run_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    trusted = [keys.public("a"), keys.public("b")]
    former = Publisher(trainer.live, str(folder), signing_key=keys.private("a"), head_seconds=1)
    (renewing,) = started(HEAD_THREAD_NAME)
    publish(former, trainer)
    bucket = Heads(folder)
    with Publisher(
        trainer.copy(), bucket, signing_key=keys.private("b"), trusted_keys=trusted, head_seconds=1
    ) as later:
        assert (later.version, bucket.written[0][1].version) == (1, 1)
        renewing.join(120)
        assert not renewing.is_alive()
        bucket.wait(len(bucket.renewals()) + 1)
        head = head_of(folder)
        assert head.signature is not None
        assert head.signature.key == keys.hex("b")
        before = stored(folder)
        with pytest.raises(ConflictError, match="taken over"):
            publish(former, trainer)
        with pytest.raises(ConflictError):
            former.close()
        changed = {key for key, data in stored(folder).items() if before.get(key) != data}
        assert not any(key.startswith("versions/") for key in changed)
        publish(later, trainer)
    assert_all_signed(folder, keys.hex("a"), keys.hex("b"))
    assert [manifest.epoch for manifest in Run(bucket, keys.readers("a", "b")).log()] == [0, 0, 1]


def test_head_that_has_run_out_is_renewed_by_who_takes_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    Publisher(trainer.live, str(folder), signing_key=key, head_seconds=1).close()
    before = head_of(folder)
    with Publisher(trainer.live, str(folder), signing_key=key):
        assert (head_of(folder).expires_at or "") > (before.expires_at or "")
        assert_all_signed(folder, keys.hex("a"))


def test_close_does_not_write_over_the_head_of_who_took_over(folder: Path, keys: Keys, trainer: Trainer) -> None:
    former = Publisher(trainer.live, str(folder), signing_key=keys.private("a"))
    trusted = [keys.public("a"), keys.public("b")]
    with Publisher(trainer.copy(), str(folder), signing_key=keys.private("b"), trusted_keys=trusted):
        head = (folder / HEAD_KEY).read_bytes()
        former.close()
        assert (folder / HEAD_KEY).read_bytes() == head


# A run that is taken over: nothing that a stranger has written is built upon


def forged(forgery: str) -> Callable[[Path, Keys], None]:
    def write(folder: Path, keys: Keys) -> None:
        forge(folder)
        path = folder / version_key(3)
        unsigned = Manifest.from_bytes(path.read_bytes())
        path.write_bytes(FORGERIES[forgery](keys.ring("a").signed(unsigned), keys.ring("stranger")))

    return write


def forged_with_head(folder: Path, keys: Keys) -> None:
    forge(folder)
    manifest = Manifest.from_bytes((folder / version_key(3)).read_bytes())
    (folder / HEAD_KEY).write_bytes(Head(run=manifest.run, version=3, manifest=manifest.digest).to_bytes())


@pytest.mark.parametrize(
    ("write", "remove"),
    [
        (forged("unsigned"), 3),
        (forged("stranger"), 3),
        (forged("another document's"), 3),
        (forged_with_head, 3),
        (lambda folder, keys: (folder / version_key(3)).write_bytes(b"not a manifest"), 3),
        (lambda folder, keys: unsign(folder, version_key(2)), 2),
    ],
)
def test_newest_version_of_a_stranger_is_not_built_upon(
    write: Callable[[Path, Keys], object], remove: int, folder: Path, keys: Keys, trainer: Trainer
) -> None:
    key = keys.private("a")
    signed_run(folder, keys, trainer, 2)
    write(folder, keys)
    last = remove - 1
    refuse(
        folder, trainer, SignatureError,
        rf"is not signed by a trusted key.*remove {version_key(remove)} .*continue from version {last},",
        signing_key=key,
    )  # fmt: skip
    (folder / version_key(remove)).unlink()
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        assert publisher.version == last
        publish(publisher, trainer)
    assert_all_signed(folder, keys.hex("a"))
    assert Run(open_bucket(str(folder)), keys.readers("a")).verify().head == remove


@pytest.mark.parametrize("base", [0, 1])
def test_older_version_of_a_stranger_is_not_built_upon(base: int, folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    signed_run(folder, keys, trainer, 3)
    honest = (folder / version_key(base)).read_bytes()
    sign_file(folder, version_key(base), Manifest, keys.ring("stranger"))
    before = stored(folder)
    with pytest.raises(SignatureError, match=f"version 3 .*{keys.hex('stranger')[:16]}"):
        Publisher(trainer.live, str(folder), signing_key=key)
    assert set(stored(folder)) == set(before)
    (folder / version_key(base)).write_bytes(honest)
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        assert publisher.version == 3


def test_lost_objects_of_a_signed_version_are_begun_anew_behind(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """That manifest is believed, and what is committed behind it are the trainer's own weights."""
    key = keys.private("a")
    newest = signed_run(folder, keys, trainer, 2).head()
    (folder / newest.objects[0].key).unlink()
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        assert publisher.version == 3
    assert_all_signed(folder, keys.hex("a"))
    run = Run(open_bucket(str(folder)), keys.readers("a"))
    assert (run.head().kind, run.head().parent) == ("anchor", newest.digest)


def test_forged_head_is_written_again(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    run = signed_run(folder, keys, trainer, 2).info.run
    for version in (0, 2, 7):
        manifest = sha256(b"?").hexdigest()
        (folder / HEAD_KEY).write_bytes(Head(run=run, version=version, manifest=manifest).to_bytes())
        sign_file(folder, HEAD_KEY, Head, keys.ring("stranger"))
        with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
            assert_all_signed(folder, keys.hex("a"))
            assert head_of(folder).version == publisher.version == 2


def test_last_commit_of_the_former_writer_is_adopted_if_signed(folder: Path, keys: Keys, trainer: Trainer) -> None:
    bucket, key = Hooked(folder), keys.private("a")
    former = Publisher(trainer.live, bucket, signing_key=key)
    mine = trainer.copy()
    late: list[Publisher] = []

    def take_over(at: str) -> None:
        if at.startswith("versions/") and not late:
            late.append(Publisher(mine, Hooked(folder), signing_key=key))

    bucket.before = take_over
    publish(former, trainer)
    (later,) = late
    mine["b"][0] += 1
    later.publish(step=2)
    with pytest.raises(PublishError, match="continues from that version"):
        later.flush()
    later.publish(step=3)
    later.close()
    with pytest.raises(ConflictError):
        publish(former, trainer)
    with pytest.raises(ConflictError):
        former.close()
    assert_all_signed(folder, keys.hex("a"))
    assert Run(bucket, keys.readers("a")).verify().head == 2


def test_forged_last_commit_is_not_adopted(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    signed_run(folder, keys, trainer, 1)
    later = Publisher(trainer.live, str(folder), signing_key=key)
    forge(folder)
    sign_file(folder, version_key(2), Manifest, keys.ring("stranger"))
    for _ in range(2):
        with pytest.raises(ConflictError, match=rf"find out who else does, remove {version_key(2)}"):
            publish(later, trainer)
    with pytest.raises(ConflictError):
        later.close()
    assert later.version == head_of(folder).version == 1
    (folder / version_key(2)).unlink()
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        publish(publisher, trainer)
    assert Run(open_bucket(str(folder)), keys.readers("a")).verify().head == 2


def test_large_documents_of_a_stranger_are_not_parsed(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """That would take the training seconds, and many times their bytes of memory."""
    large = b"[" * (UNPARSED_BYTES + 1)
    signed_run(folder, keys, trainer, 1)
    publisher = Publisher(trainer.live, str(folder), signing_key=keys.private("a"))
    (folder / version_key(2)).write_bytes(large)
    with pytest.raises(ConflictError, match=rf"{version_key(2)} is not signed.* find out who else does, remove"):
        publish(publisher, trainer)
    with pytest.raises(ConflictError):
        publisher.close()
    (folder / RUN_KEY).write_bytes(large)
    with pytest.raises(SignatureError, match=f"{RUN_KEY} is not signed"):
        Publisher(trainer.live, str(folder), signing_key=keys.private("a"))


def test_bucket_put_back_under_a_publisher(
    folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(trainer.live, str(folder), signing_key=keys.private("a"), merge=False)
    publish(publisher, trainer)
    shutil.copytree(folder, tmp_path / "backup")
    publish(publisher, trainer, 3)
    newest = Run(open_bucket(str(folder))).head()
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "backup", folder)
    with caplog.at_level(logging.ERROR):
        publish(publisher, trainer)
    assert "HEAD.json points at version 1 and this publisher had pointed it at 4" in caplog.text
    assert f"{version_key(4)} is lost" in caplog.text
    run = Run(open_bucket(str(folder)), keys.readers("a"))
    # Whoever holds version 4 goes on; whoever does not needs the anchor.
    assert (run.head().version, run.head().parent) == (5, newest.digest)
    with pytest.raises(DeltaSyncError, match=r"version [234]"):
        run.snapshot()
    publisher.anchor()
    assert Run(open_bucket(str(folder)), keys.readers("a")).snapshot().fingerprint == run.head().model_fingerprint
    publisher.close()
