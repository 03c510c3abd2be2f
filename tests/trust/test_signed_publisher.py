"""A publisher with a key: everything it writes is signed, and who may go on with it."""

import json
import threading
from pathlib import Path

import pytest
from cryptography.exceptions import InvalidSignature

from tests.support.signed import (
    KINDS,
    Keys,
    assert_all_signed,
    assert_signed,
    head_of,
    list_keys,
    publish,
    refuse,
    sign_file,
    stored,
    unsign,
)
from tests.trainer.faults.hooks import Trainer, small_trainer
from trainer_side import Publisher
from trainer_side.renewal import THREAD_NAME
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.plan import path as way
from vllm_delta_sync.errors import ConflictError, SettingsError, SignatureError, UsageError
from vllm_delta_sync.upkeep.branching import branch
from vllm_delta_sync.upkeep.compaction import compact, make_anchor, make_fold, upkeep
from vllm_delta_sync.upkeep.tagging import set_tag
from vllm_delta_sync.wire.documents import (
    CLAIMS_PREFIX,
    KEYS_KEY,
    Anchor,
    FoldedRange,
    KeyEntry,
    LastWord,
    anchor_key,
    fold_key,
)
from vllm_delta_sync.wire.manifest import RUN_KEY, Document, Manifest, version_key


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path / "keys")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "run"


# What is written


def test_every_document_is_signed(folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path) -> None:
    key = keys.private("a")
    with Publisher(trainer.live, str(folder), signing_key=key, anchor_every=2) as publisher:
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
    make_fold(run, 2, 3)
    made = branch(run, "tag:best", str(tmp_path / "branch"))
    assert assert_all_signed(folder, keys.hex("a")) == {*KINDS, "tensors.json", "objects"} - {KEYS_KEY}
    assert assert_all_signed(tmp_path / "branch", keys.hex("a")) == {
        "run.json",
        "tensors.json",
        "HEAD.json",
        "versions",
    }
    readers = keys.readers("a")
    report = Run(open_bucket(str(folder)), readers).verify()
    assert (report.head, report.replayed) == (6, True)
    assert Run(open_bucket(made.bucket.url), readers).head().fingerprint == run.manifest(2).fingerprint
    newest, head = run.head(), head_of(folder)
    assert (head.version, head.manifest, head.epoch, head.parent) == (6, newest.digest, 1, newest.parent)


def test_base_is_referred_to_by_a_signed_version(folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    (tmp_path / "base").mkdir()
    save_file(trainer.live, tmp_path / "base" / "model.safetensors")
    Publisher(trainer.live, str(folder), tmp_path / "base", signing_key=keys.private("a")).close()
    assert Manifest.from_bytes((folder / version_key(0)).read_bytes()).kind == "reference"
    assert_all_signed(folder, keys.hex("a"))


def test_without_a_key_nothing_is_signed_and_head_has_no_end(folder: Path, trainer: Trainer) -> None:
    with Publisher(trainer.live, str(folder)) as publisher:
        publish(publisher, trainer)
        assert THREAD_NAME not in {thread.name for thread in threading.enumerate()}
    assert head_of(folder).expires_at is None
    documents = [json.loads(data) for key, data in stored(folder).items() if key.split("/")[0] in KINDS]
    assert len(documents) == 4
    assert all(document["signature"] is None for document in documents)


def has_fields(value: object) -> bool:
    return hasattr(value, "__dict__")


def test_no_secret_shows(folder: Path, keys: Keys, trainer: Trainer) -> None:
    key = keys.private("a")
    lines = [line for line in key.read_text().splitlines() if "KEY" not in line]
    with Publisher(trainer.live, str(folder), signing_key=key) as publisher:
        shown = repr(publisher) + repr([vars(publisher), *map(vars, filter(has_fields, vars(publisher).values()))])
        assert keys.hex("a") in shown
        assert [line for line in lines if line in shown] == []


# Which keys


def test_options_that_make_no_sense(folder: Path, keys: Keys, trainer: Trainer) -> None:
    refuse(folder, trainer, UsageError, "give both, or neither", trusted_keys=[keys.public("a")])
    for seconds in (0, -1, 1.5, True, 10**9):
        refuse(folder, trainer, UsageError, "head_seconds", signing_key=keys.private("a"), head_seconds=seconds)
    refuse(folder, trainer, SettingsError, "cannot be read", signing_key=folder / "none")
    refuse(
        folder, trainer, SignatureError, "cannot begin with signing_key",
        signing_key=keys.private("a"), trusted_keys=str(keys.public("root")),
    )  # fmt: skip


def test_unsigned_run_is_not_gone_on_with(folder: Path, keys: Keys, trainer: Trainer) -> None:
    with Publisher(trainer.live, str(folder)) as publisher:
        publish(publisher, trainer)
    refuse(folder, trainer, SignatureError, "not signed.*publish to a new run URL", signing_key=keys.private("a"))


def test_signed_run_is_not_gone_on_with_without_a_key(folder: Path, keys: Keys, trainer: Trainer) -> None:
    with Publisher(trainer.live, str(folder), signing_key=keys.private("a")) as publisher:
        publish(publisher, trainer)
    refuse(folder, trainer, SignatureError, "is signed.*signing_key=")
    # Nor if somebody has taken the signature of run.json away.
    unsign(folder, RUN_KEY)
    refuse(folder, trainer, SignatureError, "is signed.*signing_key=")


@pytest.mark.parametrize("state", ["retired", "revoked"])
def test_key_that_is_not_in_use_any_more(state: str, folder: Path, keys: Keys, trainer: Trainer) -> None:
    trusted = [keys.public("root"), keys.public("a")]
    publisher = Publisher(trainer.live, str(folder), signing_key=keys.private("a"), trusted_keys=trusted)
    publish(publisher, trainer, 2)
    run = Run(open_bucket(str(folder)))
    last = LastWord(version=2, manifest=run.manifest(2).digest)
    entries = [KeyEntry(key=keys.hex("a"), last=last, revoked=state == "revoked"), KeyEntry(key=keys.hex("b"))]
    list_keys(folder, keys.ring("root"), entries)
    # The publisher that runs with it stops by itself, rather than commit what no receiver takes.
    before = stored(folder)
    with pytest.raises(ConflictError, match=f"{keys.hex('a')[:16]} was {state}"):
        publish(publisher, trainer)
    with pytest.raises(ConflictError):
        publisher.close()
    after = stored(folder)
    assert {key for key in after if after[key] != before.get(key)} <= {
        key for key in after if key.startswith("objects/")
    }
    refuse(
        folder, trainer, SignatureError, f"{keys.hex('a')[:16]} was {state}",
        signing_key=keys.private("a"), trusted_keys=trusted,
    )  # fmt: skip
    refuse(
        folder, trainer, SignatureError, "neither among trusted_keys nor listed",
        signing_key=keys.private("c"), trusted_keys=trusted,
    )  # fmt: skip
    with Publisher(trainer.live, str(folder), signing_key=keys.private("b"), trusted_keys=trusted) as publisher:
        publish(publisher, trainer)
    head = head_of(folder)
    assert head.signature is not None
    assert (head.version, head.signature.key) == (3, keys.hex("b"))
    run = Run(open_bucket(str(folder)), keys.readers("root"))
    assert [manifest.version for manifest in run.log()] == [0, 1, 2, 3]


def test_leftover_list_of_keys_is_not_begun_beside(folder: Path, keys: Keys, trainer: Trainer) -> None:
    folder.mkdir()
    (folder / KEYS_KEY).write_bytes(b"{}")
    refuse(folder, trainer, ConflictError, "holds keys.json but no whole run", signing_key=keys.private("a"))


# What lies beside the chain


def signed_run(folder: Path, keys: Keys, trainer: Trainer, versions: int) -> Run:
    with Publisher(trainer.live, str(folder), signing_key=keys.private("a"), fold=False) as publisher:
        publish(publisher, trainer, versions)
    return Run(open_bucket(str(folder)), keys.ring("a"))


@pytest.mark.parametrize("forger", [None, "stranger"])
@pytest.mark.parametrize("by", ["compact", "upkeep"])
def test_what_nobody_trusted_has_signed_is_made_again(
    by: str, forger: str | None, folder: Path, keys: Keys, trainer: Trainer
) -> None:
    run = signed_run(folder, keys, trainer, 4)
    make_fold(run, 0, 4)
    make_anchor(run, 4)
    documents: list[tuple[str, type[Document]]] = [(fold_key(0, 4), FoldedRange), (anchor_key(4), Anchor)]
    for key, kind in documents:
        if forger is None:
            unsign(folder, key)
        else:
            sign_file(folder, key, kind, keys.ring(forger))
        with pytest.raises((SignatureError, KeyError, AssertionError, TypeError, InvalidSignature)):
            assert_signed((folder / key).read_bytes(), kind.KIND, {keys.hex("a")})
    # Readers pass them over.
    reader = Run(open_bucket(str(folder)), keys.readers("a"))
    assert [(step.start, step.end) for step in way(reader, 0, 4)] == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert reader.snapshot().fingerprint == run.head().model_fingerprint
    again = Run(open_bucket(str(folder)), keys.ring("a"))
    if by == "compact":
        report = compact(again, anchor="head")
        assert (report.present, report.folds, report.anchor_present) == (0, [(0, 4)], False)
        assert compact(again, anchor="head").anchor_present
    else:
        assert upkeep(again, again.head(), anchor_every=4) == [fold_key(0, 4), anchor_key(4)]
        assert upkeep(Run(open_bucket(str(folder)), keys.ring("a")), again.head(), anchor_every=4) == []
    assert_all_signed(folder, keys.hex("a"))
    reader = Run(open_bucket(str(folder)), keys.readers("a"))
    assert [(step.start, step.end) for step in way(reader, 0, 4)] == [(0, 4)]


def test_tag_of_a_stranger_names_nothing(folder: Path, keys: Keys, trainer: Trainer) -> None:
    run = signed_run(folder, keys, trainer, 2)
    set_tag(run, "best", 1)
    assert run.resolve("tag:best").version == 1
    unsign(folder, "tags/best.json")
    with pytest.raises(SignatureError, match=r"best\.json is not signed"):
        run.resolve("tag:best")
    set_tag(run, "best", 2)
    assert run.resolve("tag:best").version == 2


def test_branch_begins_with_a_key_that_readers_trust(
    folder: Path, keys: Keys, trainer: Trainer, tmp_path: Path
) -> None:
    run = signed_run(folder, keys, trainer, 2)
    list_keys(folder, keys.ring("a"), [KeyEntry(key=keys.hex("b"))])
    delegated = Run(run.bucket, keys.ring("b", "a"))
    before = stored(folder)
    with pytest.raises(SignatureError, match="cannot begin with signing_key"):
        branch(delegated, 1, str(tmp_path / "branch"))
    assert stored(folder) == before
    made = branch(run, 1, str(tmp_path / "branch"))
    with Publisher(trainer.live, made.bucket.url, signing_key=keys.private("a")) as publisher:
        publish(publisher, trainer)
    assert_all_signed(tmp_path / "branch", keys.hex("a"))
    assert Run(open_bucket(made.bucket.url), keys.readers("a")).verify().head == 1
    assert [item.key for item in run.bucket.list(CLAIMS_PREFIX)] == []
