"""Run files: the model's small files, kept by a run from its beginning, bound by run.json."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tests.support.commands import answer, kind, shown
from tests.support.publishers import FailAt, Hooked, Trainer, nothing
from tests.support.sidecars import bucket as bucket
from tests.support.sidecars import copy_of, edited, held, listed, spoil
from tests.support.sidecars import trainer as trainer
from tests.support.signed import Keys, assert_signed
from tests.support.store_faults import failing_put
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint
from tests.support.trainers import trainer_of
from trainer_side import Publisher, run_files
from trainer_side.checkpoint_folders import CheckpointPublisher
from trainer_side.integrations.transformers import DeltaSyncCallback
from vllm_delta_sync import open_run
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    ConflictError,
    DeltaSyncError,
    DigestError,
    FormatError,
    NotFoundError,
    PublishError,
    SignatureError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format.limits import MAX_RUN_FILE_BYTES, MAX_RUN_FILES, MAX_RUN_FILES_BYTES
from vllm_delta_sync.format.manifest import FILES_PREFIX, RUN_KEY, TABLE_KEY, RunInfo, file_key, version_key
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.repair.repair import repair
from vllm_delta_sync.run.model_files import write_files

CONFIG = b'{"model_type":"qwen3"}'
TOKENIZER = b'{"model":{"type":"BPE"}}'
SMALL = {"config.json": CONFIG, "tokenizer.json": TOKENIZER}
IN_CHECKPOINT = (
    *("chat_template.jinja", "config.json", "generation_config.json", "tokenizer.json"),
    "tokenizer_config.json",
)


def key_of(data: bytes) -> str:
    return file_key(sha256(data).hexdigest())


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a server would be started from, with things in it that are no part of the model."""
    folder = save_checkpoint(make_model("qwen3", hidden_size=32), tmp_path_factory.mktemp("base"))
    for name in (".cache.json", "trainer_state.json", "model.safetensors.index.txt", "modeling.py", "notes.md"):
        (folder / name).write_bytes(b"{}")
    (folder / "onnx").mkdir()
    (folder / "onnx" / "config.json").write_bytes(b"{}")
    return folder


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A folder that a trainer gives."""
    return folder_of(tmp_path / "own")


@pytest.fixture
def written(bucket: Hooked, trainer: Trainer, own: Path) -> Run:
    """A run with two files and a version."""
    with Publisher(trainer.live, bucket, files=own) as publisher:
        trainer.step()
        publisher.publish(1)
    return open_run(bucket.url)


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


def kept(run: Run | str) -> dict[str, bytes]:
    """Name → content of what a run keeps, as readers get it."""
    opened = open_run(run) if isinstance(run, str) else run
    return {item.name: opened.file(item.name) for item in opened.info.files}


def begin(live: Any, bucket: Any, **options: Any) -> dict[str, bytes]:
    """Begin a run, or go on with one; what it keeps."""
    with Publisher(live, bucket, **options) as publisher:
        return kept(publisher.url)


def small_files(folder: Path) -> dict[str, bytes]:
    """The files that ``checkpoint`` has beside its weights."""
    return {name: (folder / name).read_bytes() for name in IN_CHECKPOINT}


# Where they come from


def test_a_base_gives_its_own_and_wins_over_the_model(checkpoint: Path, url: str) -> None:
    model = make_model("qwen3", hidden_size=32)
    live = {name: tensor.bfloat16() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert begin(live, url, base=checkpoint) == small_files(checkpoint)
    run = open_run(url)
    assert run.head().kind == "reference"
    assert {item.key for item in run.info.files} == held(url, FILES_PREFIX)
    for item in run.info.files:
        data = run.file(item.name)
        assert (item.key, item.bytes, item.sha256) == (key_of(data), len(data), sha256(data).hexdigest())
    assert run.verify().files == 5
    model.config.max_position_embeddings = 7
    assert begin(model, url + "-2", base=checkpoint) == small_files(checkpoint)


def test_without_a_base_a_model_gives_its_configuration(url: str, tmp_path: Path) -> None:
    model = make_model("llama", hidden_size=32)
    model.generation_config.temperature = 0.5
    model.generation_config.do_sample = True
    del model.config.architectures
    found = begin(torch.nn.DataParallel(model), url)
    model.save_pretrained(tmp_path / "saved")
    assert {name: json.loads(data) for name, data in found.items()} == {
        name: json.loads((tmp_path / "saved" / name).read_bytes()) for name in ("config.json", "generation_config.json")
    }
    assert json.loads(found["config.json"])["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize(("configured", "served"), [(torch.bfloat16, "BF16"), (None, "F32")])
def test_the_configuration_has_the_dtype_that_is_served(configured: torch.dtype | None, served: str, url: str) -> None:
    model = make_model("qwen3", hidden_size=32)
    model.config.dtype = configured
    found = begin(model, url)
    assert {spec.dtype for spec in open_run(url).table} == {served}
    assert json.loads(found["config.json"])["dtype"] == {"BF16": "bfloat16", "F32": "float32"}[served]
    assert model.config.dtype == configured, "the model's own is left alone"


def test_a_configuration_that_cannot_be_saved_stops_nobody(url: str, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model("qwen3", hidden_size=32)
    model.generation_config.temperature = 0.3  # without do_sample, which transformers refuses to save
    assert list(begin(model, url)) == ["config.json"]
    model.config.num_hidden_layers = 1  # of which the list of layers' types says two; an error of no common class
    assert begin(model, url + "-2") == {}
    assert caplog.text.count("give files= with a folder that holds it") == 2


def test_files_win_over_those_of_the_base_and_the_model(checkpoint: Path, url: str, own: Path, tmp_path: Path) -> None:
    model = make_model("qwen3", hidden_size=32)
    other = folder_of(tmp_path / "o", {"config.json": CONFIG, "Generation_Config.json": b"{}", "merges.txt": b"a b"})
    expected = small_files(checkpoint) | {"config.json": CONFIG, "merges.txt": b"a b", "Generation_Config.json": b"{}"}
    # One file for a file system that takes both spellings for one.
    del expected["generation_config.json"]
    assert begin(model, url, base=checkpoint, files=other) == expected
    found = begin(model, url + "-2", files=str(own))
    assert found == SMALL | {"generation_config.json": found["generation_config.json"]}


def test_a_run_keeps_what_it_has(bucket: Hooked, trainer: Trainer, own: Path, tmp_path: Path) -> None:
    assert begin(trainer.live, bucket, files=own) == SMALL
    before = bucket.get(RUN_KEY)
    assert begin(trainer.live, bucket, files=folder_of(tmp_path / "other", {"config.json": b"other"})) == SMALL
    assert bucket.get(RUN_KEY) == before
    # Tensors alone give none, and the run is spelled as before there were files.
    bare = Hooked(tmp_path / "bare")
    assert begin(trainer.live, bare) == {}
    assert held(bare.url, FILES_PREFIX) == set()
    data = bare.get(RUN_KEY)
    assert "files" not in json.loads(data)
    assert RunInfo(**json.loads(data)).to_bytes() == RunInfo.from_bytes(data).to_bytes() == data
    # One that is there without files gets none.
    keys = {item.key for item in bare.list()}
    with pytest.raises((ConflictError, PublishError)):
        Publisher(trainer.live, bare, files=own, resume=False)
    assert {item.key for item in bare.list()} == keys


def test_order_of_the_first_keys_and_one_content_once(bucket: Hooked, trainer: Trainer, tmp_path: Path) -> None:
    """Who sees a file, an object or a version sees whose it is."""
    seen: list[str] = []
    bucket.before = seen.append
    contents = {"config.json": b"{}", "tokenizer.json": b"{}", "empty.txt": b""}
    assert begin(trainer.live, bucket, files=folder_of(tmp_path / "files", contents)) == contents
    assert [key for key in seen if key.startswith(FILES_PREFIX)] == [key_of(b"{}"), key_of(b"")]
    first = {key.split("/")[0]: place for place, key in reversed(list(enumerate(seen)))}
    assert first[RUN_KEY] < first[TABLE_KEY] < first["files"] < first["objects"] < first["versions"]


# The Trainer's callback


def test_the_callback_keeps_the_trainers_tokenizer(url: str, own: Path, tmp_path: Path) -> None:
    model, tokenizer = make_model("qwen3", hidden_size=32), make_tokenizer()
    for callback in (DeltaSyncCallback(url), DeltaSyncCallback(url + "-2", files=own)):
        trainer = trainer_of(model, tmp_path, [callback], max_steps=1)
        trainer.callback_handler.processing_class = tokenizer
        trainer.train()
    run = open_run(url)
    names = {item.name for item in run.info.files}
    assert names > {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    write_files(run, tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    # The callback's own options win.
    assert kept(url + "-2") == SMALL | {"generation_config.json": run.file("generation_config.json")}


@pytest.mark.parametrize("by_folder", [False, True])
def test_older_files_of_the_base_do_not_overrule_the_tokenizer_given(url: str, tmp_path: Path, by_folder: bool) -> None:
    """transformers reads special_tokens_map.json, if there is one, for what tokenizer_config.json says."""
    model = make_model("qwen3", hidden_size=32)
    base, own = save_checkpoint(model, tmp_path / "base"), save_checkpoint(model, tmp_path / "own")
    (base / "special_tokens_map.json").write_text('{"eos_token": "</s>", "pad_token": "<pad>"}')
    (base / "added_tokens.json").write_text('{"<old>": 200}')
    (base / "chat_template.json").write_text('{"chat_template": "of the base"}')
    tokenizer = AutoTokenizer.from_pretrained(own)
    tokenizer.eos_token, tokenizer.pad_token = "<unk>", "</s>"
    tokenizer.save_pretrained(own)
    if by_folder:
        with CheckpointPublisher(url, base=base) as publisher:
            publisher.publish(own, step=1)
    else:
        trainer = trainer_of(model, tmp_path, [DeltaSyncCallback(url, base=base)], max_steps=1)
        trainer.callback_handler.processing_class = tokenizer
        trainer.train()
    write_files(open_run(url), tmp_path / "model")
    again = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert (again.eos_token, again.pad_token, again.get_vocab()) == ("<unk>", "</s>", tokenizer.get_vocab())
    assert not (tmp_path / "model" / "chat_template.json").exists()


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
    with run_files.tokenizer_folder(Saves(sizes)) as folder:
        assert folder is not None
        assert {path.name for path in folder.iterdir()} == {"tokenizer.json", "other.bin"}
        run_files.check_folder(folder)
    assert not folder.exists()
    assert ("'large.json'" in caplog.text, "'a b.txt'" in caplog.text) == (True, True)
    caplog.clear()
    errors = (OSError(28, "No space left on device"), NotImplementedError("slow"), KeyError("vocab"))
    failing = [Saves({"tokenizer.json": 9}, error) for error in errors]
    for nothing_to_save in (*failing, None, object(), Saves({}), Saves({"other.bin": 5})):
        with run_files.tokenizer_folder(nothing_to_save) as folder:
            assert folder is None
    assert caplog.text.count("cannot be saved") == 3


# Limits


def large(name: str) -> Any:
    return lambda folder: sparse(folder / name, MAX_RUN_FILE_BYTES + 1)


def large_together(folder: Path) -> None:
    for number in range(MAX_RUN_FILES_BYTES // MAX_RUN_FILE_BYTES):
        sparse(folder / f"{number}.json", MAX_RUN_FILE_BYTES)


def too_many(folder: Path) -> None:
    for number in range(MAX_RUN_FILES - 1):
        (folder / f"{number}.json").write_bytes(b"%d" % number)


def unreadable(folder: Path) -> None:
    """Root may read everything but this: a page that is mapped nowhere."""
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to("/proc/self/mem")


NAMES = ("a b.json", "_first.json", "ü.json", "x" * 96 + ".json", "two\nlines.txt", "Config.json")
REFUSED: dict[str, tuple[Any, type[DeltaSyncError], str]] = {
    "too large": (large("tokenizer.model"), UsageError, "MAX_RUN_FILE_BYTES"),
    "too large together": (large_together, UsageError, "config.json"),
    "too many": (too_many, UsageError, "MAX_RUN_FILES"),
    "unreadable": (unreadable, StoreError, "tokenizer.json"),
    **{repr(name): (lambda folder, name=name: (folder / name).touch(), UsageError, "") for name in NAMES},
}


@pytest.mark.parametrize("name", REFUSED)
def test_folders_that_cannot_be_kept_are_refused(name: str, bucket: Hooked, trainer: Trainer, own: Path) -> None:
    """Before anything is put."""
    spoil, error, named = REFUSED[name]
    spoil(own)
    with pytest.raises(error) as caught:
        Publisher(trainer.live, bucket, files=own)
    assert named in caught.value.message
    assert list(bucket.list()) == []
    if name == "too many":
        next(own.iterdir()).unlink()
        assert len(begin(trainer.live, bucket, files=own)) == MAX_RUN_FILES
        assert open_run(bucket.url).verify().files == MAX_RUN_FILES


def test_what_is_no_folder_of_model_files_is_refused(bucket: Hooked, trainer: Trainer, own: Path) -> None:
    without = folder_of(own / "without", {"model.safetensors": b"", "modeling.py": b"", ".hidden.json": b""})
    for given in (own / "never", own / "config.json", "", 3, ["config.json"], without):
        with pytest.raises(UsageError, match="files is"):
            Publisher(trainer.live, bucket, files=given)  # type: ignore[arg-type]
    # Nor one of which a file grows between the first check and the beginning of the run.
    bucket.looking = lambda key: large("config.json")(own)
    with pytest.raises(UsageError, match="MAX_RUN_FILE_BYTES"):
        Publisher(trainer.live, bucket, files=own)
    assert list(bucket.list()) == []


def test_of_a_base_the_rest_stays(checkpoint: Path, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Nobody has named them, so that they end no training; what a server needs comes before all else."""
    base = folder_of(tmp_path / "base", small_files(checkpoint))
    (base / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    large("large.json")(base)
    (base / "a b.json").write_bytes(b"")
    for number in range(MAX_RUN_FILES):
        (base / f"a{number:02d}.json").write_bytes(b"%d" % number)
    model = make_model("qwen3", hidden_size=32)
    found = begin(model, url, base=base, files=folder_of(tmp_path / "own", {"z.json": b"z"}))
    assert len(found) == MAX_RUN_FILES
    assert found.keys() >= {"z.json", "config.json", "generation_config.json", "tokenizer.json", "a00.json"}
    for name in ("large.json", "a b.json", "a63.json"):
        assert name not in found
        assert f"does not keep the model's file '{name}'" in caplog.text


# A start that fails


@pytest.mark.parametrize(
    ("prefix", "moment", "error"),
    [
        *((key_of(TOKENIZER), "before", StoreError), (key_of(TOKENIZER), "after", StoreError)),
        *(("objects/", "before", StoreError), ("objects/", "after", StoreError)),
        *(("objects/", "before", KeyboardInterrupt), (version_key(0), "before", StoreError)),
    ],
)
def test_a_start_that_fails_takes_them_back(
    prefix: str, moment: str, error: type[BaseException], bucket: Hooked, trainer: Trainer, own: Path
) -> None:
    bucket.put(key_of(CONFIG), b"damaged, of an earlier start")
    fail = FailAt(prefix, error("injected"))
    setattr(bucket, moment, fail)
    with pytest.raises(error, match="injected"):
        Publisher(trainer.live, bucket, files=own)
    assert fail.fired
    # A weights' object whose put failed late is for a collection; of files nobody would look.
    assert [item.key for item in bucket.list() if not item.key.startswith("objects/")] == []
    bucket.before = bucket.after = nothing
    assert begin(trainer.live, bucket, files=own) == SMALL


def test_a_start_whose_version_came_through_after_all_keeps_them(bucket: Hooked, trainer: Trainer, own: Path) -> None:
    bucket.after = FailAt(version_key(0))
    assert begin(trainer.live, bucket, files=own) == SMALL


def test_a_start_cut_short_is_replaced_with_files(bucket: Hooked, trainer: Trainer, own: Path, tmp_path: Path) -> None:
    begin(trainer.live, bucket, files=folder_of(tmp_path / "one", {**SMALL, "old.txt": b"old"}))
    for key in (version_key(0), "HEAD.json"):
        bucket.delete(key)
    assert begin(trainer.live, bucket, files=own) == SMALL
    assert held(bucket.url, FILES_PREFIX) == {key_of(CONFIG), key_of(TOKENIZER)}


def test_a_start_that_is_late_keeps_its_files(bucket: Hooked, trainer: Trainer, own: Path, tmp_path: Path) -> None:
    """It does so while another one, which has taken it for cut short, removes what it has written."""
    (own / "lost.txt").write_bytes(b"lost before")
    begin(trainer.live, bucket, files=own)
    bucket.delete("HEAD.json")
    bucket.delete(key_of(b"lost before"))
    (bucket.folder / "versions").rename(tmp_path / "versions")
    looks: list[str] = []

    def commit(key: str) -> None:
        looks.append(key)
        if key == version_key(0) and looks.count(key) == 3:
            (tmp_path / "versions").rename(bucket.folder / "versions")

    bucket.looking = commit
    with pytest.raises(ConflictError):
        Publisher(trainer.live, bucket)
    run = open_run(bucket.url)
    assert (run.file("config.json"), run.file("tokenizer.json")) == (CONFIG, TOKENIZER)
    assert [finding.key for finding in run.verify(findings=True).findings] == [key_of(b"lost before")]


# Read


def test_names_that_are_not_there(written: Run) -> None:
    with pytest.raises(NotFoundError, match=r"'merges\.txt'"):
        written.file("merges.txt")
    written.bucket.put(RUN_KEY, edited(written.bucket, RUN_KEY, files=[]))
    with pytest.raises(NotFoundError, match=r"'config\.json'"):
        open_run(written.bucket.url).file("config.json")


def test_they_are_written_to_a_folder(written: Run, tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert write_files(written, folder) == ["config.json", "tokenizer.json"]
    before = (folder / "config.json").stat().st_mtime_ns
    (folder / "tokenizer.json").write_bytes(b"damaged")
    write_files(written, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == SMALL
    assert (folder / "config.json").stat().st_mtime_ns == before, "what is right is left alone"
    # A link to a file elsewhere is replaced, and what it points to stays.
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(CONFIG)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(elsewhere)
    write_files(written, folder)
    assert not (folder / "config.json").is_symlink()
    with pytest.raises(StoreError, match=r"config\.json"):
        write_files(written, elsewhere)


def relisted(written: Run, **changes: Any) -> Run:
    """The run as if its run.json listed one file, and that otherwise."""
    first = json.loads(written.bucket.get(RUN_KEY))["files"][0]
    written.bucket.put(RUN_KEY, edited(written.bucket, RUN_KEY, files=[{**first, **changes}]))
    return open_run(written.bucket.url)


def test_what_no_model_needs_is_not_written(written: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A bucket may be another's: neither code nor what leads to other weights comes out of it."""
    assert relisted(written, purpose="later").file("config.json") == CONFIG, "unknown members are ignored"
    (tmp_path / "out").mkdir()
    for name in (
        *("modeling.py", "model.safetensors", "model.safetensors.index.json", "model.safetensors.INDEX.json"),
        *("adapter_config.json", "Adapter_Config.json", "delta_sync_export.json", "run.sh"),
    ):
        run = relisted(written, name=name)
        assert run.file(name) == CONFIG
        assert write_files(run, tmp_path / "out") == []
        assert list((tmp_path / "out").iterdir()) == []
        assert f"lists file '{name}'" in caplog.text


def entry(name: str, size: int = 1, **changes: Any) -> dict[str, Any]:
    return {**listed(name.encode(), name, key_of(name.encode())), "bytes": size, **changes}


MALFORMED: dict[str, Any] = {
    "path": [entry("../config.json")],
    "hidden": [entry(".config.json")],
    "no name": [entry("")],
    "newline": [entry("config.json\n")],
    "elsewhere": [entry("config.json", key="run.json")],
    "not its digest": [entry("config.json", key=key_of(b"other"))],
    "too large": [entry("config.json", MAX_RUN_FILE_BYTES + 1)],
    "negative": [entry("config.json", -1)],
    "digest": [entry("config.json", sha256="0")],
    "twice": [entry("config.json"), entry("config.json")],
    "twice but for case": [entry("config.json"), entry("Config.JSON")],
    "too many": [entry(f"{n}.json") for n in range(MAX_RUN_FILES + 1)],
    "too large together": [entry(f"{n}.json", MAX_RUN_FILE_BYTES) for n in range(5)],
    "null": None,
    "no list": {},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_lists_are_refused(name: str, written: Run) -> None:
    with pytest.raises(FormatError, match="files"):
        RunInfo.from_bytes(edited(written.bucket, RUN_KEY, files=MALFORMED[name]), RUN_KEY)


# Bound by run.json


@pytest.mark.parametrize("way", ["damaged", "cut", "longer", "lost"])
def test_other_bytes_are_refused_and_come_back_from_a_mirror(way: str, written: Run, tmp_path: Path) -> None:
    bucket, key = written.bucket, key_of(TOKENIZER)
    mirror, spoilt = copy_of(bucket, tmp_path / "mirror"), copy_of(bucket, tmp_path / "spoilt")
    spoil(spoilt, key, "damaged")
    error = spoil(bucket, key, way)
    with pytest.raises(error, match=r"tokenizer\.json") as caught:
        written.file("tokenizer.json")
    assert key in caught.value.message
    with pytest.raises(error, match=r"tokenizer\.json"):
        written.verify()
    report = written.verify(findings=True)
    assert [(finding.key, finding.version) for finding in report.findings] == [(key, None)]
    # Weights and the other file are not touched by it.
    assert (report.files, report.replayed, report.head) == (1, True, 1)
    assert written.file("config.json") == CONFIG
    assert kind(1, "verify", "--bucket", bucket.url) == error.kind
    document = answer("verify", "--bucket", bucket.url, "--all", code=1)
    assert ([row["key"] for row in document["findings"]], document["files"]) == ([key], 1)
    for source in (None, spoilt):
        alone = repair(written, mirror=source)
        assert (alone.repaired, [line.split(":")[0] for line in alone.lost]) == ([], [key])
    report_of_repair = repair(written, mirror=mirror)
    assert (report_of_repair.repaired, report_of_repair.lost) == ([f"{key}: from the mirror"], [])
    assert kept(bucket.url) == SMALL


def test_a_signature_covers_them_in_branches_too(bucket: Hooked, trainer: Trainer, own: Path, tmp_path: Path) -> None:
    signers = Keys(tmp_path / "keys")
    with Publisher(trainer.live, bucket, files=own, signing_key=signers.private("trainer")):
        pass
    assert_signed(bucket.get(RUN_KEY), "run", {signers.hex("trainer")})
    readers = signers.readers("trainer")
    branch(open_run(bucket.url, signers.ring("trainer")), 0, str(tmp_path / "branch"))
    for url in (bucket.url, str(tmp_path / "branch")):
        run = open_run(url, readers)
        assert kept(run) == SMALL
        assert run.verify().files == 2
    with pytest.raises(SignatureError):
        open_run(bucket.url, signers.readers("somebody"))
    bucket.put(key_of(b"other"), b"other")
    bucket.put(RUN_KEY, edited(bucket, RUN_KEY, files=[listed(b"other", "config.json", key_of(b"other"))]))
    with pytest.raises(SignatureError):
        open_run(bucket.url, readers)


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


def test_a_branch_that_fails_takes_them_back(written: Run, tmp_path: Path) -> None:
    spoil(written.bucket, key_of(TOKENIZER), "damaged")
    with pytest.raises(DigestError, match=r"tokenizer\.json"):
        branch(written, 1, str(tmp_path / "branch"))
    assert not (tmp_path / "branch").exists()
    assert written.tags() == {}
    written.bucket.put(key_of(TOKENIZER), TOKENIZER)
    # A late error of version_key(0) would be no failure: the branch is there.
    for key, late in ((key_of(TOKENIZER), False), (key_of(TOKENIZER), True), (version_key(0), False)):
        with failing_put(key, late, StoreError("injected")), pytest.raises(StoreError, match="injected"):
            branch(written, 1, str(tmp_path / "branch"))
        assert [path for path in (tmp_path / "branch").rglob("*") if path.is_file()] == []
        assert written.tags() == {}
    assert branch(written, 1, str(tmp_path / "branch")).verify().files == 2


def test_commands_show_them(written: Run) -> None:
    url = written.bucket.url
    document = answer("inspect", "--bucket", url)
    assert [(item["name"], item["bytes"]) for item in document["files"]] == [
        (name, len(data)) for name, data in SMALL.items()
    ]
    lines = shown("inspect", "--bucket", url).splitlines()
    assert any(line.split() == ["tokenizer.json", str(len(TOKENIZER)), "B"] for line in lines)
    assert answer("verify", "--bucket", url)["files"] == 2
    assert any(line.split()[:2] == ["files", "2"] for line in shown("verify", "--bucket", url).splitlines())
    written.bucket.put(RUN_KEY, edited(written.bucket, RUN_KEY, files=[]))
    assert answer("inspect", "--bucket", url)["files"] == []
    assert "file" not in shown("inspect", "--bucket", url).split()
    assert "files" not in shown("verify", "--bucket", url).split()
