"""A signed run that is taken over: nothing that a stranger has written is built upon."""

import logging
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from tests.support.forge import FORGERIES, forge
from tests.support.signed import Keys, assert_all_signed, head_of, list_keys, publish, refuse, sign_file, stored, unsign
from tests.trainer.faults.hooks import Hooked, Trainer, small_trainer
from trainer_side import Publisher
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.errors import ConflictError, DeltaSyncError, PublishError, SignatureError
from vllm_delta_sync.wire.documents import KeyEntry, LastWord, claim_key
from vllm_delta_sync.wire.manifest import HEAD_KEY, Head, Manifest, version_key


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


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


def not_json(folder: Path, keys: Keys) -> None:
    (folder / version_key(3)).write_bytes(b"not a manifest")


def newest_without_signature(folder: Path, keys: Keys) -> None:
    unsign(folder, version_key(2))


@pytest.mark.parametrize(
    ("write", "remove"),
    [
        (forged("unsigned"), 3),
        (forged("stranger"), 3),
        (forged("another document's"), 3),
        (forged_with_head, 3),
        (not_json, 3),
        (newest_without_signature, 2),
    ],
)
def test_newest_version_of_a_stranger_is_not_built_upon(
    write: Callable[[Path, Keys], None], remove: int, folder: Path, keys: Keys, trainer: Trainer
) -> None:
    key = keys.private("a")
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        publish(publisher, trainer, 2)
    write(folder, keys)
    last = remove - 1
    refuse(
        folder, trainer, SignatureError,
        rf"not published by anybody who is trusted.*remove {version_key(remove)} .*go on from version {last},",
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
    with Publisher(trainer.live, str(folder), signing_key=key, fold=False) as publisher:
        publish(publisher, trainer, 3)
    honest = (folder / version_key(base)).read_bytes()
    sign_file(folder, version_key(base), Manifest, keys.ring("stranger"))
    before = stored(folder)
    with pytest.raises(SignatureError, match=f"version 3 .*{keys.hex('stranger')[:16]}"):
        Publisher(trainer.live, str(folder), signing_key=key)
    # The weights are read after the claim.
    assert set(stored(folder)) - set(before) == {claim_key(1)}
    (folder / version_key(base)).write_bytes(honest)
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        assert publisher.version == 3


def test_lost_objects_of_a_signed_version_are_begun_anew_behind(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """That manifest is believed, and what is committed behind it are the trainer's own weights."""
    key = keys.private("a")
    with Publisher(trainer.live, str(folder), signing_key=key, fold=False) as publisher:
        publish(publisher, trainer, 2)
    newest = Run(open_bucket(str(folder))).head()
    (folder / newest.objects[0].key).unlink()
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        assert publisher.version == 3
    assert_all_signed(folder, keys.hex("a"))
    run = Run(open_bucket(str(folder)), keys.readers("a"))
    assert (run.head().kind, run.head().parent) == ("anchor", newest.digest)


def test_forged_head_is_written_again(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        publish(publisher, trainer, 2)
    for version in (0, 2, 7):
        manifest = sha256(b"?").hexdigest()
        (folder / HEAD_KEY).write_bytes(Head(run=publisher.run, version=version, manifest=manifest).to_bytes())
        sign_file(folder, HEAD_KEY, Head, keys.ring("stranger"))
        with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
            assert_all_signed(folder, keys.hex("a"))
            assert head_of(folder).version == publisher.version == 2


class Once:
    """Does something once, when a key is touched that begins as given."""

    def __init__(self, prefix: str, do: Callable[[], object]) -> None:
        self._prefix, self._do = prefix, do
        self.done = False

    def __call__(self, key: str) -> None:
        if not self.done and key.startswith(self._prefix):
            self.done = True
            self._do()


def test_last_commit_of_the_former_writer_is_adopted_if_it_is_signed(
    folder: Path, keys: Keys, trainer: Trainer
) -> None:
    bucket, key = Hooked(folder), keys.private("a")
    former = Publisher(trainer.live, bucket, signing_key=key)
    mine = trainer.copy()
    late: list[Publisher] = []
    bucket.before = Once("versions/", lambda: late.append(Publisher(mine, Hooked(folder), signing_key=key)))
    publish(former, trainer)
    (later,) = late
    mine["b"][0] += 1
    later.publish(step=2)
    with pytest.raises(PublishError, match="goes on from there"):
        later.flush()
    later.publish(step=3)
    later.close()
    with pytest.raises(ConflictError):
        publish(former, trainer)
    with pytest.raises(ConflictError):
        former.close()
    assert_all_signed(folder, keys.hex("a"))
    assert Run(bucket, keys.readers("a")).verify().head == 2


@pytest.mark.parametrize("signer", [None, "stranger"])
def test_forged_last_commit_is_not_adopted(signer: str | None, folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        publish(publisher, trainer)
    later = Publisher(trainer.live, str(folder), signing_key=key)
    forge(folder)
    if signer is not None:
        sign_file(folder, version_key(2), Manifest, keys.ring(signer))
    for _ in range(2):
        with pytest.raises(ConflictError, match=rf"find out who does, remove {version_key(2)}"):
            publish(later, trainer)
    with pytest.raises(ConflictError):
        later.close()
    assert later.version == 1
    assert head_of(folder).version == 1
    (folder / version_key(2)).unlink()
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        publish(publisher, trainer)
    assert Run(open_bucket(str(folder)), keys.readers("a")).verify().head == 2


def test_bucket_put_back_under_a_publisher(
    folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = Publisher(trainer.live, str(folder), signing_key=keys.private("a"), fold=False)
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


def test_head_put_back_is_pointed_forward(folder: Path, keys: Keys, trainer: Trainer, caplog: Any) -> None:
    with Publisher(trainer.live, str(folder), signing_key=keys.private("a")) as publisher:
        old = (folder / HEAD_KEY).read_bytes()
        publish(publisher, trainer, 2)
        (folder / HEAD_KEY).write_bytes(old)
        with caplog.at_level(logging.ERROR):
            publish(publisher, trainer)
        assert "it is pointed forward again" in caplog.text
        assert head_of(folder).version == 3


def test_goes_on_behind_what_a_stolen_key_has_published(folder: Path, keys: Keys, trainer: Trainer) -> None:
    """Receivers that believed it before the key was revoked follow what goes on behind it, and nothing else."""
    root, stolen = keys.private("root"), keys.private("stolen")
    with Publisher(trainer.live, str(folder), signing_key=root) as publisher:
        publish(publisher, trainer, 2)
    last = Run(open_bucket(str(folder))).head()
    entry = KeyEntry(key=keys.hex("stolen"))
    list_keys(folder, keys.ring("root"), [entry])
    with Publisher(trainer.live, str(folder), signing_key=stolen, trusted_keys=[keys.public("root")]) as publisher:
        publish(publisher, trainer, 2)
    word = LastWord(version=2, manifest=last.digest)
    list_keys(folder, keys.ring("root"), [KeyEntry(key=entry.key, revoked=True, last=word)], sequence=2)
    with Publisher(trainer.live, str(folder), signing_key=root) as publisher:
        assert publisher.version == 5
        publish(publisher, trainer)
    run = Run(open_bucket(str(folder)), keys.readers("root"))
    head = run.head()
    assert (head.version, run.manifest(5).kind) == (6, "anchor")
    assert run.authentic.ancestor(6, head.digest, 2) == last.digest
    with pytest.raises(SignatureError, match="revoked after version 2"):
        run.manifest(4)
