"""Run files: the model's small files, kept by a run from its beginning, bound by run.json."""

import json
import logging
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.publishing import damage
from tests.support.sidecars import age, call
from tests.support.signed import Keys, assert_signed
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint
from tests.support.trainers import trainer_of
from tests.trainer.faults.hooks import FailAt, Hooked, Trainer, nothing, small_trainer
from trainer_side import Publisher, model_files
from trainer_side.integrations.transformers import DeltaSyncCallback
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.bucket import Bucket, open_bucket
from vllm_delta_sync.bucket.local import LocalBucket
from vllm_delta_sync.chain import Run
from vllm_delta_sync.chain.files import write_files
from vllm_delta_sync.errors import (
    ConflictError,
    DigestError,
    FormatError,
    LimitError,
    NotFoundError,
    PublishError,
    SignatureError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.upkeep.branching import branch
from vllm_delta_sync.upkeep.repair import repair
from vllm_delta_sync.upkeep.retention import Policy, collect
from vllm_delta_sync.wire.limits import MAX_RUN_FILE_BYTES, MAX_RUN_FILES, MAX_RUN_FILES_BYTES
from vllm_delta_sync.wire.manifest import FILES_PREFIX, RUN_KEY, TABLE_KEY, RunInfo, file_key, version_key

CONFIG = b'{"model_type":"qwen3"}'
TOKENIZER = b'{"model":{"type":"BPE"}}'
SMALL = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}


@pytest.fixture
def trainer() -> Trainer:
    return small_trainer()


@pytest.fixture
def bucket(tmp_path: Path) -> Hooked:
    return Hooked(tmp_path / "run")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server would be started from, with things in it that are no part of the model."""
    folder = save_checkpoint(make_model("qwen3"), tmp_path_factory.mktemp("base"))
    for name in (".cache.json", "trainer_state.json", "model.safetensors.index.txt", "modeling.py", "notes.md"):
        (folder / name).write_bytes(b"{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_bytes(b"{}")
    return folder


def folder_of(path: Path, contents: Mapping[str, bytes] = SMALL) -> Path:
    path.mkdir()
    for name, data in contents.items():
        (path / name).write_bytes(data)
    return path


def sparse(path: Path, size: int) -> Path:
    """A file of zeros that takes no room."""
    with path.open("wb") as file:
        file.truncate(size)
    return path


def key_of(data: bytes) -> str:
    return file_key(sha256(data).hexdigest())


def kept(run: Run | str) -> dict[str, bytes]:
    """Name → content of what a run keeps, as readers get it."""
    opened = open_run(run) if isinstance(run, str) else run
    return {item.name: opened.file(item.name) for item in opened.info.files}


def stored(bucket: Bucket) -> set[str]:
    """Keys below files/."""
    return {item.key for item in bucket.list(FILES_PREFIX)}


def small_files(folder: Path) -> dict[str, bytes]:
    """The files that ``checkpoint`` has beside its weights."""
    names = ["chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
    return {name: (folder / name).read_bytes() for name in names}


def copy_of(bucket: Bucket, folder: Path) -> Bucket:
    mirror = open_bucket(str(folder))
    for item in bucket.list():
        mirror.put(item.key, bucket.get(item.key))
    return mirror


# Where they come from


def test_a_base_gives_its_own(checkpoint: Path, url: str) -> None:
    live = dict(make_model("qwen3").state_dict())
    live = {name: tensor.to(torch.bfloat16) for name, tensor in live.items() if name != "lm_head.weight"}
    with Publisher(live, url, base=checkpoint):
        pass
    run = open_run(url)
    assert run.head().kind == "reference"
    assert kept(run) == small_files(checkpoint)
    assert {item.key for item in run.info.files} == stored(run.bucket)
    for item in run.info.files:
        data = run.file(item.name)
        assert (item.key, item.bytes, item.sha256) == (key_of(data), len(data), sha256(data).hexdigest())
    assert run.verify().files == 5


def test_a_base_wins_over_the_configuration_of_the_model(checkpoint: Path, url: str) -> None:
    model = make_model("qwen3")
    model.config.max_position_embeddings = 7
    with Publisher(model, url, base=checkpoint):
        pass
    assert kept(url) == small_files(checkpoint)


def test_without_a_base_a_model_gives_its_configuration(url: str, tmp_path: Path) -> None:
    model = make_model("llama")
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    del model.config.architectures
    before = model.config.to_dict()
    with Publisher(torch.nn.DataParallel(model), url):
        pass
    found = kept(url)
    model.save_pretrained(tmp_path / "saved")
    saved = {name: (tmp_path / "saved" / name).read_bytes() for name in ("config.json", "generation_config.json")}
    assert {name: json.loads(data) for name, data in found.items()} == {
        name: json.loads(data) for name, data in saved.items()
    }
    assert json.loads(found["config.json"])["architectures"] == ["LlamaForCausalLM"]
    assert before["max_position_embeddings"] == model.config.max_position_embeddings


@pytest.mark.parametrize(("configured", "served"), [(torch.bfloat16, "BF16"), (None, "F32")])
def test_the_configuration_has_the_dtype_that_is_served(configured: torch.dtype | None, served: str, url: str) -> None:
    model = make_model("qwen3", hidden_size=32)
    model.config.dtype = configured
    with Publisher(model, url):
        pass
    run = open_run(url)
    assert {spec.dtype for spec in run.table} == {served}
    assert json.loads(run.file("config.json"))["dtype"] == {"BF16": "bfloat16", "F32": "float32"}[served]
    assert model.config.dtype == configured, "the model's own is left alone"


def test_a_configuration_that_cannot_be_saved_stops_nobody(url: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("qwen3", hidden_size=32)
    model.generation_config.temperature = 0.3  # without do_sample, which transformers refuses to save
    with Publisher(model, url):
        pass
    assert list(kept(url)) == ["config.json"]
    assert "does not keep all of the model's configuration" in caplog.text
    model.config.num_hidden_layers = 1  # of which the list of layers' types says two; an error of no common class
    with Publisher(model, url + "-2"):
        pass
    assert kept(url + "-2") == {}
    assert caplog.text.count("give files= with a folder that holds it") == 2


def test_tensors_without_a_model_give_none(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket):
        pass
    assert open_run(bucket.url).info.files == []
    assert stored(bucket) == set()


def test_files_win_over_those_of_the_base(checkpoint: Path, url: str, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", {"config.json": CONFIG, "Generation_Config.json": b"{}", "merges.txt": b"a b"})
    with Publisher(make_model("qwen3"), url, base=checkpoint, files=own):
        pass
    expected = small_files(checkpoint) | {"config.json": CONFIG, "merges.txt": b"a b", "Generation_Config.json": b"{}"}
    # One file for a file system that takes both spellings for one.
    del expected["generation_config.json"]
    assert kept(url) == expected


def test_files_win_over_the_configuration_of_the_model(url: str, tmp_path: Path) -> None:
    with Publisher(make_model("qwen3"), url, files=str(folder_of(tmp_path / "own"))):
        pass
    found = kept(url)
    assert found.keys() == {"config.json", "generation_config.json", "tokenizer.json"}
    assert found["config.json"] == CONFIG


def test_a_run_that_is_there_keeps_what_it_has(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "one")):
        pass
    before = bucket.get(RUN_KEY)
    other = folder_of(tmp_path / "other", {"config.json": b"other"})
    with Publisher(trainer.live, bucket, files=other) as publisher:
        trainer.step()
        publisher.publish(1)
    assert bucket.get(RUN_KEY) == before
    assert kept(bucket.url) == SMALL


def test_one_content_under_two_names_is_stored_once(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    seen: list[str] = []
    bucket.before = seen.append
    own = folder_of(tmp_path / "own", {"config.json": b"{}", "tokenizer.json": b"{}", "empty.txt": b""})
    with Publisher(trainer.live, bucket, files=own):
        pass
    assert kept(bucket.url) == {"config.json": b"{}", "tokenizer.json": b"{}", "empty.txt": b""}
    assert [key for key in seen if key.startswith(FILES_PREFIX)] == [key_of(b"{}"), key_of(b"")]


# The Trainer's callback


def test_the_callback_keeps_the_trainers_tokenizer(url: str, tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen3", hidden_size=32), make_tokenizer()
    trainer = trainer_of(model, tmp_path, [DeltaSyncCallback(url)], max_steps=1)
    trainer.callback_handler.processing_class = tokenizer
    trainer.train()
    run = open_run(url)
    names = {item.name for item in run.info.files}
    assert names > {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    write_files(run, tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert again.get_vocab() == tokenizer.get_vocab()
    assert again.chat_template == tokenizer.chat_template


def test_files_of_the_callbacks_options_win(url: str, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own")
    model = make_model("qwen3", hidden_size=32)
    trainer = trainer_of(model, tmp_path, [DeltaSyncCallback(url, files=own)], max_steps=1)
    trainer.callback_handler.processing_class = make_tokenizer()
    trainer.train()
    assert kept(url) == SMALL | {"generation_config.json": kept(url)["generation_config.json"]}


class Saves:
    """A processor that writes what it is told, and may fail after that."""

    def __init__(self, sizes: dict[str, int], error: Exception | None = None) -> None:
        self._sizes, self._error = sizes, error

    def save_pretrained(self, folder: str) -> None:
        for name, size in self._sizes.items():
            sparse(Path(folder) / name, size)
        if self._error is not None:
            raise self._error


def test_what_a_tokenizer_cannot_give_is_left_out_and_said(caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"large.json": MAX_RUN_FILE_BYTES + 1, "tokenizer.json": 9, "a b.txt": 1, "other.bin": 5}
    with model_files.tokenizer_folder(Saves(sizes)) as folder:
        assert folder is not None
        assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "other.bin"}
        model_files.check_folder(folder)
    assert not folder.exists()
    assert "'large.json': it has 67,108,865 bytes" in caplog.text
    assert "'a b.txt': its name is not" in caplog.text
    caplog.clear()
    for error in (OSError(28, "No space left on device"), NotImplementedError("slow"), KeyError("vocab")):
        with model_files.tokenizer_folder(Saves({"tokenizer.json": 9}, error)) as folder:
            assert folder is None
    assert caplog.text.count("cannot be saved") == 3
    for nothing_to_save in (None, object(), Saves({}), Saves({"other.bin": 5})):
        with model_files.tokenizer_folder(nothing_to_save) as folder:
            assert folder is None


# Limits


def refused(bucket: Hooked, trainer: Trainer, files: Any, match: str) -> None:
    """Before anything is put."""
    with pytest.raises(UsageError, match=match):
        Publisher(trainer.live, bucket, files=files)
    assert list(bucket.list()) == []


def test_what_is_no_folder_of_model_files_is_refused(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_bytes(CONFIG)
    for given in (tmp_path / "never", file, "", 3, ["config.json"]):
        refused(bucket, trainer, given, r"files is .*, which is no folder; give one that holds config\.json")
    without = folder_of(tmp_path / "without", {"model.safetensors": b"", "modeling.py": b"", ".hidden.json": b""})
    refused(bucket, trainer, without, r"files is '.*without', a folder without any file that a run keeps \(\.json, ")


def test_a_file_that_is_too_large_is_refused(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own")
    sparse(own / "tokenizer.model", MAX_RUN_FILE_BYTES + 1)
    refused(
        bucket,
        trainer,
        own,
        r"files: '.*own/tokenizer\.model' cannot be kept: it has 67,108,865 bytes, and a file may have 67,108,864 "
        r"\(MAX_RUN_FILE_BYTES\); rename it or remove it",
    )


def test_files_that_are_too_large_together_are_refused(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own")
    for number in range(MAX_RUN_FILES_BYTES // MAX_RUN_FILE_BYTES):
        sparse(own / f"{number}.json", MAX_RUN_FILE_BYTES)
    refused(bucket, trainer, own, r"config\.json' cannot be kept: with it the files have 268,435,478 bytes")


def test_too_many_files_are_refused(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", {f"{number}.json": b"%d" % number for number in range(MAX_RUN_FILES + 1)})
    refused(bucket, trainer, own, r"cannot be kept: a run keeps at most 64 files \(MAX_RUN_FILES\); rename it or")
    next(own.iterdir()).unlink()
    with Publisher(trainer.live, bucket, files=own):
        pass
    assert open_run(bucket.url).verify().files == MAX_RUN_FILES


@pytest.mark.parametrize("name", ["a b.json", "_first.json", "ü.json", "x" * 96 + ".json", "two\nlines.txt"])
def test_names_that_a_run_cannot_list_are_refused(name: str, bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", {**SMALL, name: b""})
    refused(bucket, trainer, own, r"cannot be kept: its name is not 1 to 100 of A-Z a-z 0-9 \. _ -, beginning with")


def test_names_that_differ_in_case_only_are_refused(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own", {**SMALL, "Config.json": b""})
    refused(bucket, trainer, own, r"config\.json' cannot be kept: it differs from 'Config\.json' in upper and lower")


def test_a_file_that_grows_meanwhile_is_refused(
    bucket: Hooked, trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first check and the beginning of the run."""
    own = folder_of(tmp_path / "own")

    def grow(key: str) -> None:
        sparse(own / "config.json", MAX_RUN_FILE_BYTES + 1)

    bucket.looking = grow
    refused(bucket, trainer, own, "it has 67,108,865 bytes")


def test_of_a_base_the_rest_is_kept(
    checkpoint: Path, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody has named them, so that they end no training; what a server needs comes before all else."""
    base = tmp_path / "base"
    base.mkdir()
    for name, data in small_files(checkpoint).items():
        (base / name).write_bytes(data)
    (base / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    sparse(base / "large.json", MAX_RUN_FILE_BYTES + 1)
    (base / "a b.json").write_bytes(b"")
    for number in range(MAX_RUN_FILES):
        (base / f"a{number:02d}.json").write_bytes(b"%d" % number)
    caplog.set_level(logging.WARNING)
    with Publisher(make_model("qwen3"), url, base=base, files=folder_of(tmp_path / "own", {"z.json": b"z"})):
        pass
    found = kept(url)
    assert len(found) == MAX_RUN_FILES
    assert found.keys() >= {"z.json", "config.json", "generation_config.json", "tokenizer.json", "a00.json"}
    assert "a63.json" not in found
    assert "does not keep the model's file 'large.json': it has 67,108,865 bytes" in caplog.text
    assert "does not keep the model's file 'a b.json': its name" in caplog.text
    assert "does not keep the model's file 'a63.json': a run keeps at most 64 files" in caplog.text


def test_a_file_that_cannot_be_read_is_named(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    own = folder_of(tmp_path / "own")
    # Root may read everything but this: a page that is mapped nowhere.
    (own / "tokenizer.json").unlink()
    (own / "tokenizer.json").symlink_to("/proc/self/mem")
    with pytest.raises(StoreError, match=r"tokenizer\.json' (cannot be read|was changed)"):
        Publisher(trainer.live, bucket, files=own)
    assert list(bucket.list()) == []


# A start that fails


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prefix", [key_of(TOKENIZER), "objects/", version_key(0)])
def test_a_start_that_fails_takes_them_back(
    prefix: str, late: bool, bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    own = folder_of(tmp_path / "own")
    bucket.put(key_of(CONFIG), b"damaged, of an earlier start")
    fail = FailAt(prefix)
    setattr(bucket, "after" if late else "before", fail)
    if late and prefix == version_key(0):
        with Publisher(trainer.live, bucket, files=own):
            pass
        assert kept(bucket.url) == SMALL, "it came through after all"
        return
    with pytest.raises(StoreError, match="injected"):
        Publisher(trainer.live, bucket, files=own)
    assert fail.fired
    # A weights' object whose put failed late is for a collection; of files nobody would look.
    assert [item.key for item in bucket.list() if not item.key.startswith("objects/")] == []
    bucket.before = bucket.after = nothing
    with Publisher(trainer.live, bucket, files=own):
        pass
    assert kept(bucket.url) == SMALL


def test_an_interrupted_start_takes_them_back(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    bucket.before = FailAt("objects/", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own"))
    assert list(bucket.list()) == []


def test_files_that_go_up_damaged_begin_no_run(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    def spoil(key: str) -> None:
        if key == key_of(TOKENIZER):
            bucket.after = nothing
            damage(bucket.url, key)

    bucket.after = spoil
    with pytest.raises(StoreError, match="reads back with another SHA-256"):
        Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own"), read_back=True)
    assert list(bucket.list()) == []


def test_a_start_that_was_cut_short_is_replaced_with_its_files(
    bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "one", {**SMALL, "old.txt": b"old"})):
        pass
    for key in (version_key(0), "HEAD.json"):
        bucket.delete(key)
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "two")):
        pass
    assert kept(bucket.url) == SMALL
    assert stored(bucket) == {key_of(CONFIG), key_of(TOKENIZER)}


def test_a_start_that_comes_to_its_version_after_all_keeps_its_files(
    bucket: Hooked, trainer: Trainer, tmp_path: Path
) -> None:
    """It does so while another one, which has taken it for cut short, removes what it has written."""
    own = folder_of(tmp_path / "own", {**SMALL, "lost.txt": b"lost before"})
    with Publisher(trainer.live, bucket, files=own):
        pass
    bucket.delete("HEAD.json")
    bucket.delete(key_of(b"lost before"))
    (bucket.folder / "versions").rename(tmp_path / "versions")
    looks: list[str] = []

    def commit(key: str) -> None:
        looks.append(key)
        if key == version_key(0) and looks.count(key) == 3:
            (tmp_path / "versions").rename(bucket.folder / "versions")

    bucket.looking = commit
    with pytest.raises(ConflictError, match="begun by another publisher just now"):
        Publisher(trainer.live, bucket)
    run = open_run(bucket.url)
    assert (run.file("config.json"), run.file("tokenizer.json")) == (CONFIG, TOKENIZER)
    assert [finding.key for finding in run.verify(findings=True).findings] == [key_of(b"lost before")]


def test_a_url_of_another_run_gets_none(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    with Publisher(trainer.live, bucket):
        pass
    before = {item.key for item in bucket.list()}
    with pytest.raises((ConflictError, PublishError)):
        Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own"), resume=False)
    assert {item.key for item in bucket.list()} == before


# Read


@pytest.fixture
def written(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> Run:
    """A run with two files and a version."""
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own")) as publisher:
        trainer.step()
        publisher.publish(1)
    return open_run(bucket.url)


def test_names_that_are_not_there(written: Run, trainer: Trainer, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=r"the run has no file 'merges\.txt'; it has 'config\.json', 'tokenizer"):
        written.file("merges.txt")
    with Publisher(trainer.live, str(tmp_path / "bare")):
        pass
    with pytest.raises(NotFoundError, match=r"the run has no file 'config\.json'; it has none"):
        open_run(str(tmp_path / "bare")).file("config.json")


def test_they_are_written_to_a_folder(written: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert write_files(written, folder) == ["config.json", "tokenizer.json"]
    times = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == SMALL
    (folder / "tokenizer.json").write_bytes(b"damaged")
    (folder / "config.json").chmod(0o600)
    write_files(written, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == SMALL
    assert (folder / "config.json").stat().st_mtime_ns == times["config.json"], "what is right is left alone"
    # A link to a file elsewhere is replaced, and what it points to stays.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(CONFIG)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(elsewhere)
    write_files(written, folder)
    assert not (folder / "config.json").is_symlink()
    with pytest.raises(StoreError, match=r"config\.json' cannot be written: "):
        write_files(written, elsewhere)


def listed(written: Run, **changes: Any) -> Run:
    """The run as if its run.json listed other files."""
    value = json.loads(written.bucket.get(RUN_KEY))
    value["files"] = [{**value["files"][0], **changes}]
    written.bucket.put(RUN_KEY, json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
    return open_run(written.bucket.url)


@pytest.mark.parametrize(
    "name",
    [
        *("modeling.py", "model.safetensors", "model.safetensors.index.json", "model.safetensors.INDEX.json"),
        *("adapter_config.json", "Adapter_Config.json", "delta_sync_export.json", "run.sh"),
    ],
)
def test_what_no_model_folder_needs_is_not_written(
    name: str, written: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A bucket may be another's: neither code nor what leads to other weights comes out of it."""
    run = listed(written, name=name)
    assert run.file(name) == CONFIG
    (tmp_path / "out").mkdir()
    assert write_files(run, tmp_path / "out") == []
    assert list((tmp_path / "out").iterdir()) == []
    assert f"lists file '{name}', which no model folder needs" in caplog.text


MALFORMED: dict[str, Any] = {
    "path": {"name": "../config.json"},
    "hidden": {"name": ".config.json"},
    "no name": {"name": ""},
    "newline": {"name": "config.json\n"},
    "elsewhere": {"key": "run.json"},
    "not its digest": {"key": key_of(b"other")},
    "too large": {"bytes": MAX_RUN_FILE_BYTES + 1},
    "negative": {"bytes": -1},
    "digest": {"sha256": "0"},
}


@pytest.mark.parametrize("changes", MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_lists_are_refused(changes: dict[str, Any], written: Run) -> None:
    with pytest.raises(FormatError, match=r"run\.json: field 'files\.0"):
        listed(written, **changes)


def entry(name: str, size: int = 1) -> dict[str, Any]:
    digest = sha256(name.encode()).hexdigest()
    return {"name": name, "key": file_key(digest), "bytes": size, "sha256": digest}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([entry("config.json"), entry("config.json")], "two files have the same name"),
        ([entry("config.json"), entry("Config.JSON")], "two files have the same name"),
        ([entry(f"{n}.json") for n in range(MAX_RUN_FILES + 1)], "at most 64 items"),
        ([entry(f"{n}.json", MAX_RUN_FILE_BYTES) for n in range(5)], r"more than 268435456 bytes in all"),
        (None, "files"),
        ({}, "files"),
    ],
)
def test_lists_beyond_the_limits_are_refused(files: Any, message: str, written: Run) -> None:
    value = json.loads(written.bucket.get(RUN_KEY)) | {"files": files}
    with pytest.raises(FormatError, match=message):
        RunInfo.from_bytes(json.dumps(value, separators=(",", ":"), sort_keys=True).encode(), RUN_KEY)


def test_unknown_members_of_an_entry_are_ignored(written: Run) -> None:
    assert listed(written, purpose="later").file("config.json") == CONFIG


def test_a_run_without_files_is_spelled_as_before(bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket):
        pass
    data = bucket.get(RUN_KEY)
    assert "files" not in json.loads(data)
    assert RunInfo.from_bytes(data).to_bytes() == data
    assert RunInfo(**json.loads(data)).to_bytes() == data
    assert b'"files":' in RunInfo(**(json.loads(data) | {"files": [entry("config.json")]})).to_bytes()


# Bound by run.json


@pytest.mark.parametrize("way", ["damaged", "cut", "longer", "lost"])
def test_other_bytes_are_refused_and_verify_says_so(way: str, written: Run) -> None:
    bucket, key = written.bucket, key_of(TOKENIZER)
    error = {"damaged": DigestError, "cut": DigestError, "longer": LimitError, "lost": NotFoundError}[way]
    if way == "damaged":
        damage(bucket.url, key)
    elif way == "lost":
        bucket.delete(key)
    else:
        bucket.put(key, TOKENIZER[:-1] if way == "cut" else TOKENIZER + b" ")
    with pytest.raises(error, match=r"\(file 'tokenizer\.json' of the run\)") as caught:
        written.file("tokenizer.json")
    assert key in caught.value.message
    with pytest.raises(error, match=r"tokenizer\.json"):
        written.verify()
    report = written.verify(findings=True)
    assert [(finding.key, finding.version) for finding in report.findings] == [(key, None)]
    # Weights and the other file are not touched by it.
    assert (report.files, report.replayed, report.head) == (1, True, 1)
    assert written.file("config.json") == CONFIG


@pytest.mark.parametrize("way", ["damaged", "lost"])
def test_they_come_back_from_a_mirror(way: str, written: Run, tmp_path: Path) -> None:
    bucket = written.bucket
    mirror = copy_of(bucket, tmp_path / "mirror")
    spoilt = copy_of(bucket, tmp_path / "spoilt")
    for data in (CONFIG, TOKENIZER):
        damage(spoilt.url, key_of(data))
        if way == "damaged":
            damage(bucket.url, key_of(data))
        else:
            bucket.delete(key_of(data))
    both = {key_of(CONFIG), key_of(TOKENIZER)}
    for source in (None, spoilt):
        alone = repair(written, mirror=source)
        assert not alone.repaired
        assert {line.split(":")[0] for line in alone.lost} == both
    report = repair(written, mirror=mirror)
    assert sorted(report.repaired) == sorted(f"{key}: from the mirror" for key in both)
    assert report.lost == []
    assert kept(bucket.url) == SMALL
    assert open_run(bucket.url).verify().files == 2


def test_a_signature_covers_them(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    signers = Keys(tmp_path / "keys")
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own"), signing_key=signers.private("trainer")):
        pass
    assert_signed(bucket.get(RUN_KEY), "run", {signers.hex("trainer")})
    readers = signers.readers("trainer")
    run = open_run(bucket.url, readers)
    assert kept(run) == SMALL
    assert run.verify().files == 2
    for other in signers.readers("somebody"), readers:
        if other is readers:
            value = json.loads(bucket.get(RUN_KEY))
            value["files"][0] |= {"key": key_of(b"other"), "bytes": 5, "sha256": sha256(b"other").hexdigest()}
            bucket.put(key_of(b"other"), b"other")
            bucket.put(RUN_KEY, json.dumps(value, separators=(",", ":"), sort_keys=True).encode())
        with pytest.raises(SignatureError):
            open_run(bucket.url, other)


def test_a_collection_leaves_them(written: Run, bucket: Hooked, trainer: Trainer) -> None:
    with Publisher(trainer.live, bucket) as publisher:
        for step in range(2, 6):
            trainer.step()
            publisher.publish(step, wait=True)
        publisher.anchor()
    age(bucket.folder, 24 * 3600)
    report = collect(open_run(bucket.url), Policy(keep_last=1, min_age=0.0))
    assert report.objects, "there was something to collect"
    assert kept(bucket.url) == SMALL
    assert open_run(bucket.url).verify().files == 2


# Branches


def test_a_branch_has_them_too(written: Run, tmp_path: Path) -> None:
    made = branch(written, 1, str(tmp_path / "branch"))
    assert made.info.files == written.info.files
    again = branch(made, 0, str(tmp_path / "again"))
    # They are copies: the branch does not need the run's.
    for item in written.info.files:
        written.bucket.delete(item.key)
    for run in (made, again):
        assert kept(run.bucket.url) == SMALL
        assert run.verify().files == 2


def test_a_branch_of_a_signed_run_signs_them(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    signers = Keys(tmp_path / "keys")
    own = folder_of(tmp_path / "own")
    with Publisher(trainer.live, bucket, files=own, signing_key=signers.private("trainer")):
        pass
    branch(open_run(bucket.url, signers.ring("trainer")), 0, str(tmp_path / "branch"))
    made = open_run(str(tmp_path / "branch"), signers.readers("trainer"))
    assert kept(made) == SMALL


def test_a_branch_that_fails_takes_them_back(written: Run, tmp_path: Path) -> None:
    damage(written.bucket.url, key_of(TOKENIZER))
    with pytest.raises(DigestError, match=r"file 'tokenizer\.json' of the run"):
        branch(written, 1, str(tmp_path / "branch"))
    assert not (tmp_path / "branch").exists()
    assert written.tags() == {}
    written.bucket.put(key_of(TOKENIZER), TOKENIZER)
    for late in (False, True):
        for key in (key_of(TOKENIZER), version_key(0)):
            fail = Failing(key, late)
            with mock.patch.object(LocalBucket, "put", fail.put), pytest.raises(StoreError, match="injected"):
                branch(written, 1, str(tmp_path / "branch"))
            assert fail.fired
            assert [path for path in (tmp_path / "branch").rglob("*") if path.is_file()] == []
            assert written.tags() == {}
    assert branch(written, 1, str(tmp_path / "branch")).verify().files == 2


class Failing:
    """Fails the first put of one key: before it happens, or after."""

    def __init__(self, key: str, late: bool) -> None:
        self.fired = False
        real = LocalBucket.put

        def put(bucket: LocalBucket, at: str, data: bytes | Path, *, if_absent: bool = False) -> None:
            fails = at == key and not self.fired
            self.fired |= fails
            if late or not fails:
                real(bucket, at, data, if_absent=if_absent)
            if fails:
                raise StoreError("injected")

        self.put = put


# Shown


def test_commands_show_them(written: Run, bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    shown = json.loads(call("inspect", bucket.url, "--json"))
    assert [(item["name"], item["bytes"]) for item in shown["files"]] == [
        ("config.json", len(CONFIG)),
        ("tokenizer.json", len(TOKENIZER)),
    ]
    lines = call("inspect", bucket.url).splitlines()
    assert any(line.split() == ["tokenizer.json", str(len(TOKENIZER)), "B"] for line in lines)
    assert json.loads(call("verify", "--bucket", bucket.url, "--json"))["files"] == 2
    assert any(line.split()[:2] == ["files", "2"] for line in call("verify", "--bucket", bucket.url).splitlines())
    with Publisher(trainer.live, str(tmp_path / "bare")):
        pass
    bare = str(tmp_path / "bare")
    assert json.loads(call("inspect", bare, "--json"))["files"] == []
    assert "file" not in call("inspect", bare).split()
    assert "files" not in call("verify", "--bucket", bare).split()


def test_commands_fail_where_one_is_damaged(written: Run, capsys: pytest.CaptureFixture[str]) -> None:
    damage(written.bucket.url, key_of(CONFIG))
    assert cli.run(["verify", "--bucket", written.bucket.url]) == 1
    assert "file 'config.json' of the run" in capsys.readouterr().err
    assert cli.run(["verify", "--bucket", written.bucket.url, "--all", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [row["key"] for row in document["findings"]] == [key_of(CONFIG)]
    assert (document["files"], document["replayed"]) == (1, True)


def test_the_table_and_run_json_stay_the_first_of_a_run(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """Who sees a file, an object or a version sees whose it is."""
    seen: list[str] = []
    bucket.before = seen.append
    with Publisher(trainer.live, bucket, files=folder_of(tmp_path / "own")):
        pass
    first = {key.split("/")[0]: place for place, key in reversed(list(enumerate(seen)))}
    assert first[RUN_KEY] < first[TABLE_KEY] < first["files"] < first["objects"] < first["versions"]
