"""Export: any version as an ordinary checkpoint folder, every tensor as the trainer held it."""

import errno
import fcntl
import io
import json
import os
import pty
import shutil
import struct
import sys
import termios
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.support.chains import TABLE, Chain
from tests.support.commands import answer, delta_sync, shown
from tests.support.exporting import expected, file_size_limit, held, names, stored
from tests.support.marked import REASON, MarkedChain
from tests.support.publishers import Hooked
from tests.support.publishing import assert_same
from tests.support.running import run_python
from tests.support.samples import every_dtype_table
from tests.support.sidecars import spoil
from tests.support.signed import Keys
from tests.support.tiny import make_model, make_tokenizer, save_checkpoint, train_steps
from tests.support.written import Written, reference_run
from trainer_side import Publisher
from vllm_delta_sync import cli, open_run
from vllm_delta_sync.client import Run
from vllm_delta_sync.errors import (
    BaseUnavailableError,
    ChainError,
    ConflictError,
    DeltaSyncError,
    DigestError,
    LimitError,
    NotFoundError,
    SignatureError,
    StoreError,
    UsageError,
)
from vllm_delta_sync.format.manifest import version_key
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.export import WORK_NAME, ExportReport, export
from vllm_delta_sync.maintenance.tags import set_tag
from vllm_delta_sync.run.restore import restore
from vllm_delta_sync.tensors.checkpoint import EXPORT_NAME, INDEX_NAME, SINGLE_NAME

Published = tuple[Path, list[dict[str, torch.Tensor]], PreTrainedModel]
SHARD_BYTES = 2000
"""Some tensors of these models are larger, and most are smaller."""
LARGE, COUNT = 4 * 1024 * 1024, 56
"""Bytes of a tensor of the large model, and how many it has."""
MOST_ANONYMOUS = 2 * LARGE + 80 * 1024 * 1024
"""Memory that its export may take besides files: a tensor decoded and as it was, and what does not depend on it."""


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    """Version 0 is an anchor, 2 is coded by context, 4 is built on 1, and 5 changes nothing."""
    made = Chain(tmp_path)
    made.grow()
    made.grow(codec="tiled")
    made.grow(full=[1])
    made.grow(base=1)
    made.delta(made.bits[-1])
    return made


def exported(chain: Chain, folder: Path, version: int | str | None = None, **options: Any) -> ExportReport:
    """Export, and check that the folder has the very bits, and nothing but what the report names."""
    report = export(open_run(chain.url), folder, version, **options)
    assert held(folder) == expected(chain.table, chain.bits[report.version])
    assert names(folder) == report.files
    return report


# The weights


def test_every_version_is_what_the_trainer_held(chain: Chain, tmp_path: Path) -> None:
    """In one file, or in several with an index."""
    for version, manifest in enumerate(chain.manifests):
        out, in_one = tmp_path / "a" / f"out{version}", version in (0, 5)
        report = exported(chain, out, version, shard_bytes=10**9 if in_one else SHARD_BYTES)
        assert (report.version, report.step, report.manifest) == (version, manifest.step, manifest.digest)
        assert (report.bytes, report.folder, report.present) == (TABLE.full_bytes, out, False)
        said = {"run": chain.run, "version": version, "step": manifest.step, "manifest": manifest.digest}
        about = {"format_version": 1, **said, "fingerprint": manifest.fingerprint, "files": report.files}
        assert json.loads((out / EXPORT_NAME).read_bytes()) == about
        if in_one:
            assert report.files == [EXPORT_NAME, SINGLE_NAME]
            continue
        index = json.loads((out / INDEX_NAME).read_bytes())
        assert index["metadata"] == {"total_size": TABLE.full_bytes}
        shards = [name for name in report.files if name.endswith(".safetensors")]
        assert shards == [
            f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)
        ]
        assert set(index["weight_map"].values()) == set(shards)
        for name in shards:
            tensors = [spec for spec in TABLE if index["weight_map"][spec.name] == name]
            assert len(tensors) == 1 or sum(spec.nbytes for spec in tensors) <= SHARD_BYTES


def test_every_dtype_comes_out_bit_for_bit(tmp_path: Path) -> None:
    """Random bits: signalling NaNs, subnormals, an empty tensor, a scalar."""
    table = every_dtype_table(50)
    written = Written(tmp_path / "run", table=table)
    written.publish(0.3)
    for shard_bytes in (1, 500, 10**9):
        for version in (0, 1):
            report = export(written.run, tmp_path / f"{shard_bytes}", version, shard_bytes=shard_bytes)
            assert held(report.folder) == expected(table, written.writer.bits[version])
    assert len([name for name in names(tmp_path / "1") if name.endswith(".safetensors")]) == len(table)


@pytest.mark.parametrize("given", [False, True])
def test_a_run_whose_version_0_is_a_checkpoint(tmp_path: Path, given: bool) -> None:
    chain = Chain(tmp_path, base=True)
    chain.grow(2)
    if given:
        (tmp_path / "base").rename(tmp_path / "moved")
        with pytest.raises(BaseUnavailableError, match="which is not here; pass base="):
            export(open_run(chain.url), tmp_path / "out")
        assert not (tmp_path / "out").exists(), "nothing is left where nothing was fetched"
    for version in (0, 2):
        exported(chain, tmp_path / "out", version, base=tmp_path / "moved" if given else None)


def test_a_base_that_may_not_be_looked_at_is_one_that_is_not_here(tmp_path: Path) -> None:
    # The trainer's home, say. Looking at a name that is too long fails also for root.
    run, _ = reference_run(tmp_path / "run", str(tmp_path / ("long" * 100) / "base"))
    assert not run.verify().replayed
    with pytest.raises(BaseUnavailableError, match="which is not here; pass base="):
        export(run, tmp_path / "out")


def test_a_branch_and_a_branch_of_it(chain: Chain, tmp_path: Path) -> None:
    made = chain.branch("branch", 4, seed=7)
    made.grow(2)
    again = made.branch("again", 1, seed=8)
    again.grow()
    seen: list[tuple[int, int]] = []
    for source in (made, again):
        for version in range(len(source.manifests)):
            exported(source, tmp_path / f"out-{source.folder.name}", version, progress=lambda *at: seen.append(at))
    assert seen
    assert all(0 <= done <= total for done, total in seen)
    shutil.move(chain.folder, tmp_path / "moved")
    with pytest.raises(BaseUnavailableError, match="pass base= with its URL"):
        export(open_run(made.url), tmp_path / "out")
    exported(made, tmp_path / "out", 1, base=str(tmp_path / "moved"))


def test_progress_is_told_to_the_end(chain: Chain, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    exported(chain, tmp_path / "out", 4, progress=lambda done, total: seen.append((done, total)))
    work = TABLE.full_bytes + sum(chain.manifests[version].payload_bytes for version in (1, 4))
    assert seen[-1] == (work, work)
    assert seen == sorted(seen)
    assert len(seen) > len(TABLE)


# Which version


def test_the_head_is_the_default_and_tags_have_names(chain: Chain, tmp_path: Path) -> None:
    set_tag(open_run(chain.url), "best", 2)
    assert exported(chain, tmp_path / "out").version == 5
    assert exported(chain, tmp_path / "out", "tag:best").version == 2
    before = stored(tmp_path / "out")
    for version, error in ((6, NotFoundError), ("tag:worst", NotFoundError), ("best", DeltaSyncError)):
        with pytest.raises(error):
            export(open_run(chain.url), tmp_path / "out", version)
        with pytest.raises(error):
            export(open_run(chain.url), tmp_path / "new", version)
    assert stored(tmp_path / "out") == before
    assert not (tmp_path / "new").exists()


def test_a_quarantined_head_is_left_out_unless_it_is_named(tmp_path: Path) -> None:
    chain = MarkedChain(tmp_path)
    chain.play("..!.!!")
    report = exported(chain, tmp_path / "out")
    assert report.version == 4
    assert report.notes == [f"skipped version 6, which is quarantined: {REASON}"]
    report = exported(chain, tmp_path / "out", 5)
    assert (report.version, report.notes) == (5, [f"version 5 is quarantined: {REASON}"])
    set_tag(open_run(chain.url), "bad", 3)
    assert exported(chain, tmp_path / "out", "tag:bad").notes == [f"version 3 is quarantined: {REASON}"]
    other = MarkedChain(tmp_path, name="other")
    other.bad = True
    other.inside(other.fresh())
    other.play("!")
    # Where all are quarantined one has to be named.
    with pytest.raises(NotFoundError):
        export(open_run(other.url), tmp_path / "never")
    assert not (tmp_path / "never").exists()
    assert exported(other, tmp_path / "out", 1).version == 1


# Signed runs


def test_a_signed_run_and_a_branch_of_it(tmp_path: Path) -> None:
    signers = Keys(tmp_path / "keys")
    chain = Chain(tmp_path, keyring=signers.ring("trainer"))
    chain.grow(2)
    made = chain.branch("branch", 1, seed=4)
    made.grow()
    readers, others = signers.readers("trainer"), signers.readers("somebody")
    for source in (chain, made):
        report = export(open_run(source.url, readers), tmp_path / "out")
        assert held(report.folder) == expected(TABLE, source.bits[-1])
        with pytest.raises(SignatureError):
            export(open_run(source.url, others), tmp_path / "never")
        assert not (tmp_path / "never").exists()
    forged = Chain(tmp_path, "forged", keyring=signers.ring("somebody"))
    forged.run = chain.run
    for bits in chain.bits[:2]:
        forged.inside(bits)
    (chain.folder / version_key(1)).write_bytes((forged.folder / version_key(1)).read_bytes())
    with pytest.raises((SignatureError, ChainError)):
        export(open_run(chain.url, readers), tmp_path / "never", 1)
    assert not (tmp_path / "never").exists()


def test_a_version_that_is_falsely_called_sound_is_not_believed(tmp_path: Path) -> None:
    """As servers do: what the quarantined head names has to be what it comes from."""
    signers = Keys(tmp_path / "keys")
    ring = signers.ring("trainer")
    chain = MarkedChain(tmp_path, keyring=ring)
    chain.play("..!")
    other = MarkedChain(tmp_path, "other", seed=9, keyring=ring)
    other.run = chain.run
    other.inside(other.fresh())
    other.play("..")
    # Of the same run and signed by the same key, but no ancestor of the head.
    assert other.manifests[2].digest != chain.manifests[2].digest
    shutil.copytree(other.folder / "objects", chain.folder / "objects", dirs_exist_ok=True)
    (chain.folder / version_key(2)).write_bytes(other.manifests[2].to_bytes())
    with pytest.raises(ChainError):
        export(open_run(chain.url, signers.readers("trainer")), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# Into which folder


def refused(chain: Chain, folder: Path, error: type[DeltaSyncError] = UsageError, **options: Any) -> None:
    """Nothing of what lies there is touched, and nothing is left there."""
    before = stored(folder) if folder.is_dir() else {}
    with pytest.raises(error) as caught:
        export(open_run(chain.url), folder, **options)
    assert str(folder) in caught.value.message
    assert (stored(folder) if folder.is_dir() else {}) == before
    assert not (folder / WORK_NAME).exists()


def test_a_foreign_folder_is_refused_and_stays_as_it_is(chain: Chain, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    (foreign / "notes.txt").write_bytes(b"mine")
    (foreign / SINGLE_NAME).write_bytes(b"mine too")
    refused(chain, foreign)
    # As an export leaves it that was stopped while the folder was empty.
    (foreign / WORK_NAME / "objects").mkdir(parents=True)
    refused(chain, foreign)
    (foreign / SINGLE_NAME).unlink()
    (foreign / "notes.txt").unlink()
    exported(chain, foreign)
    # Weights that others put beside an export are not replaced, nor do files become ours by a list that makes no sense.
    exported(chain, foreign, 1, shard_bytes=SHARD_BYTES)
    (foreign / SINGLE_NAME).write_bytes(b"mine")
    refused(chain, foreign, version=2)
    (foreign / SINGLE_NAME).unlink()
    for listed in (b"{", b"[]", b'{"files": 3}', b'{"files": ["../run"]}', b'{"files": [""]}'):
        out = tmp_path / "out"
        exported(chain, out, 1)
        (out / EXPORT_NAME).write_bytes(listed)
        refused(chain, out, version=2)
        (out / SINGLE_NAME).unlink()
    exported(chain, out, 2)
    file = tmp_path / "file"
    file.write_bytes(b"mine")
    for below in ("", "out", "a/out"):
        with pytest.raises(UsageError, match="is a file, or lies below one"):
            export(open_run(chain.url), file / below)
    assert file.read_bytes() == b"mine"
    with pytest.raises(StoreError, match="cannot be written"):
        export(open_run(chain.url), "/proc/never/out")


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_file_system_without_locks_is_named(chain: Chain, tmp_path: Path, number: int) -> None:
    """As Lustre that is mounted without the option flock."""

    def refuse(file: int, operation: int) -> NoReturn:
        raise OSError(number, os.strerror(number))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fcntl, "flock", refuse)
        with pytest.raises(StoreError, match=r"no file can be locked there.* option flock"):
            export(open_run(chain.url), tmp_path / "out")
    exported(chain, tmp_path / "out")


def test_the_runs_own_base_is_not_replaced(tmp_path: Path) -> None:
    """It might be an export of another run, of which a training has gone on."""
    first = Chain(tmp_path, "first")
    first.inside(first.fresh())
    export(open_run(first.url), tmp_path / "base")
    chain = Chain(tmp_path, "second")
    chain.reference(chain.fresh(), str(tmp_path / "base"))
    chain.grow()
    for base in (None, tmp_path / "base"):
        refused(chain, tmp_path / "base", base=base)
    exported(chain, tmp_path / "out")


def test_another_version_takes_the_place_of_the_first(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(chain, out, 1, shard_bytes=SHARD_BYTES)
    (out / "README.md").write_bytes(b"mine")
    (out / "mine").mkdir()
    (out / "mine" / "a").write_bytes(b"a")
    for version, shard_bytes in ((2, 10**9), (3, SHARD_BYTES), (4, 3 * SHARD_BYTES)):
        report = export(open_run(chain.url), out, version, shard_bytes=shard_bytes)
        assert held(out) == expected(TABLE, chain.bits[version])
        assert names(out) == sorted(["README.md", "mine", "mine/a", *report.files])
        assert report.present is False
    assert (out / "README.md").read_bytes() == b"mine"


def test_what_is_there_is_checked_and_not_made_again(chain: Chain, tmp_path: Path) -> None:
    out = tmp_path / "out"
    exported(chain, out, 3, shard_bytes=SHARD_BYTES)
    before = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    seen: list[int] = []
    report = exported(chain, out, 3, shard_bytes=SHARD_BYTES, progress=lambda done, total: seen.append(done))
    assert (report.present, seen) == (True, [])
    assert {path.name: path.stat().st_mtime_ns for path in out.iterdir()} == before
    # Cut otherwise.
    assert exported(chain, out, 3).present is False
    # Damaged, cut short, or gone.
    for change in (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], lambda data: None):
        data = change((out / SINGLE_NAME).read_bytes())
        (out / SINGLE_NAME).unlink()
        if data is not None:
            (out / SINGLE_NAME).write_bytes(data)
        assert exported(chain, out, 3).present is False
        assert exported(chain, out, 3).present is True


def test_two_exports_into_one_folder(chain: Chain, tmp_path: Path) -> None:
    """The second is refused while the first is at work, and right after that it is not."""
    out = tmp_path / "out"
    seen: list[int] = []

    def meanwhile(done: int, total: int) -> None:
        with pytest.raises(ConflictError):
            export(open_run(chain.url), out, 1)
        seen.append(done)

    # Into a new folder, and over an export that is there.
    for version in (3, 2):
        exported(chain, out, version, progress=meanwhile)
        assert seen
        seen.clear()


# What is fetched


def test_a_store_that_fails_is_gone_on_with(chain: Chain, tmp_path: Path) -> None:
    bucket, out = Hooked(chain.folder), tmp_path / "out"
    read, fails = list[str](), {chain.manifests[4].objects[0].key}

    def reading(key: str) -> None:
        if key in fails:
            raise StoreError("injected")
        if key.startswith("objects/"):
            read.append(key)

    bucket.reading = reading
    exported(chain, out, 0)
    before = stored(out)
    with pytest.raises(StoreError, match="injected"):
        export(Run(bucket), out, 4)
    assert stored(out) == before
    assert not (out / WORK_NAME / "new").exists(), "room for weights is given back"
    fails.clear()
    report = export(Run(bucket), out, 4)
    assert held(out) == expected(TABLE, chain.bits[4])
    assert names(out) == report.files
    assert len(read) == len(set(read)), "nothing was fetched twice"


@pytest.mark.parametrize(("way", "error"), [("damaged", DigestError), ("lost", NotFoundError)])
def test_damage_makes_no_checkpoint(way: str, error: type[DeltaSyncError], chain: Chain, tmp_path: Path) -> None:
    (chain.damage if way == "damaged" else chain.remove)(chain.manifests[1])
    with pytest.raises(error):
        export(open_run(chain.url), tmp_path / "out", 3)
    assert stored(tmp_path / "out") == {}
    exported(chain, tmp_path / "out", 0)


# The model's small files


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Published:
    """A folder with a run of a model with a tied head and its tokenizer; its weights by version; the model."""
    folder = tmp_path_factory.mktemp("published")
    model = make_model("qwen3")
    model.generation_config.max_new_tokens = 9
    make_tokenizer().save_pretrained(folder / "tokenizer")
    states = []
    with Publisher(model, str(folder / "run"), files=folder / "tokenizer") as publisher:
        steps = train_steps(model, lr=1e-2)
        for step in range(3):
            states.append({name: value.clone() for name, value in model.state_dict().items()})
            next(steps)
            publisher.publish(step, wait=True)
        states.append({name: value.clone() for name, value in model.state_dict().items()})
    return folder, states, model


def test_transformers_loads_it_and_says_the_same(published: Published, tmp_path: Path) -> None:
    """The head is tied: it is published once, and transformers ties it again."""
    folder, states, model = published
    tokenizer = make_tokenizer()
    prompt = tokenizer("the quick brown", return_tensors="pt").input_ids
    said = set()
    for version, shard_bytes in ((0, 10**9), (3, 100_000)):
        report = export(open_run(str(folder / "run")), tmp_path / "out", version, shard_bytes=shard_bytes)
        assert report.missing == []
        assert "lm_head.weight" not in held(tmp_path / "out")
        model.load_state_dict(states[version])
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
        assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
        assert loaded.dtype == torch.float32
        assert_same(loaded.state_dict(), states[version])
        assert loaded.generation_config.max_new_tokens == 9
        greedy = [each.generate(prompt, do_sample=False, pad_token_id=2)[0].tolist() for each in (loaded, model)]
        assert greedy[0] == greedy[1]
        said.add(tuple(greedy[0]))
        again = AutoTokenizer.from_pretrained(tmp_path / "out")
        assert (again.get_vocab(), again.chat_template) == (tokenizer.get_vocab(), tokenizer.chat_template)
    assert len(said) == 2, "training has changed what the model says"


def test_a_base_that_transformers_wrote_with_tied_weights(tmp_path: Path) -> None:
    """It has the head under one name only, and what comes out has it under that name again."""
    model = make_model("gpt2")
    base = save_checkpoint(model, tmp_path / "base")
    with Publisher(model, str(tmp_path / "run"), base=base) as publisher:
        next(train_steps(model, lr=1e-2))
        publisher.publish(1, wait=True)
    saved = AutoModelForCausalLM.from_pretrained(save_checkpoint(model, tmp_path / "saved"))
    for version in (0, 1):
        report = export(open_run(str(tmp_path / "run")), tmp_path / "out", version)
        written = tmp_path / ("saved" if version else "base")
        assert held(report.folder) == held(written)
        for name in ("config.json", "generation_config.json", "tokenizer.json"):
            assert (report.folder / name).read_bytes() == (base / name).read_bytes()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    prompt = torch.tensor([[5, 6, 7]])
    greedy = [each.generate(prompt, do_sample=False, max_new_tokens=12, pad_token_id=2) for each in (loaded, saved)]
    assert torch.equal(*greedy)


def test_an_older_run_takes_them_from_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", hidden_size=32)
    base = save_checkpoint(model, tmp_path / "base")
    (base / "modeling.py").write_bytes(b"never")
    (base / "trainer_state.json").write_bytes(b"never")
    monkeypatch.setattr("trainer_side.publisher.collect_files", lambda *given: {})  # as older publishers
    with Publisher(model, str(tmp_path / "run"), base=base):
        pass
    made = branch(open_run(str(tmp_path / "run")), 0, str(tmp_path / "branch"))
    for run in (open_run(str(tmp_path / "run")), made):
        assert run.info.files == []
        report = export(run, tmp_path / "out" / run.info.run)
        assert report.missing == []
        assert not {"modeling.py", "trainer_state.json"} & set(report.files)
        for name in ("config.json", "tokenizer.json", "chat_template.jinja", "generation_config.json"):
            assert (report.folder / name).read_bytes() == (base / name).read_bytes()
    base.rename(tmp_path / "moved")
    report = export(made, tmp_path / "other", base=tmp_path / "moved")
    assert report.missing == []
    assert report.looked_in == [
        f"run {made.info.run}, which keeps no files",
        f"run {open_run(str(tmp_path / 'run')).info.run}, which keeps no files",
        f"base {str(tmp_path / 'moved')!r}",
    ]


def test_what_is_missing_is_named_with_the_places_that_were_looked_into(chain: Chain, tmp_path: Path) -> None:
    report = exported(chain, tmp_path / "out")
    assert report.missing == ["config.json", "tokenizer"]
    assert report.looked_in == [f"run {chain.run}, which keeps no files"]
    other = Chain(tmp_path, "other", base=True)
    shutil.move(tmp_path / "base", tmp_path / "away")
    report = exported(other, tmp_path / "away-out", base=tmp_path / "away")
    assert report.looked_in == [f"run {other.run}, which keeps no files", f"base {str(tmp_path / 'away')!r}"]
    other.grow()
    other.beside_it(1)
    report = exported(other, tmp_path / "gone-out", 1)
    assert report.looked_in[1:] == [f"base {str(tmp_path / 'base')!r}, which is not a checkpoint on this machine"]


def test_a_folder_of_this_machine_is_not_copied_because_a_run_names_it(chain: Chain, tmp_path: Path) -> None:
    """Such as the one with a user's logins: a bucket may be another's."""
    private = tmp_path / "private"
    private.mkdir()
    (private / "config.json").write_bytes(b"secret")
    other = Chain(tmp_path, "other")
    other.reference(other.fresh(), str(private))
    other.beside_it(0)
    report = exported(other, tmp_path / "out")
    assert "config.json" in report.missing


def test_files_that_users_put_there_stay(chain: Chain, tmp_path: Path) -> None:
    base, out = tmp_path / "given", tmp_path / "out"
    base.mkdir()
    exported(chain, out, 3)
    for folder, text in ((base, "theirs"), (out, "mine")):
        (folder / "config.json").write_text(text)
    for version in (1, 2):
        report = export(open_run(chain.url), out, version, base=base)
        assert any("config.json in the folder was not written by an export" in note for note in report.notes)
        assert (out / "config.json").read_text() == "mine"
        assert "config.json" not in report.files + report.missing


def test_base_supplies_them_later_too(chain: Chain, tmp_path: Path) -> None:
    """What the message asks for: the same command with --base, or files copied in by hand."""
    base, out = tmp_path / "given", tmp_path / "out"
    base.mkdir()
    (base / "config.json").write_bytes(b"{}")
    (base / "tokenizer.json").write_bytes(b'{"a":1}')
    exported(chain, out, 3)
    weights = (out / SINGLE_NAME).stat().st_mtime_ns
    report = exported(chain, out, 3, base=base)
    assert (report.present, report.missing) == (True, [])
    assert report.notes == ["the folder already held the weights; wrote only config.json, tokenizer.json"]
    assert report.files == ["config.json", EXPORT_NAME, SINGLE_NAME, "tokenizer.json"]
    assert (out / SINGLE_NAME).stat().st_mtime_ns == weights
    # They stay where nobody says otherwise, and come back as they were.
    (out / "config.json").write_bytes(b"spoilt")
    assert exported(chain, out, 3).files == report.files
    assert exported(chain, out, 3, base=base).notes == ["the folder already held the weights; wrote only config.json"]
    assert (out / "config.json").read_bytes() == b"{}"
    # Another version has its own, here none.
    assert exported(chain, out, 4).missing == ["config.json", "tokenizer"]
    (out / "config.json").write_bytes(b"by hand")
    (out / "vocab.json").write_bytes(b"by hand")
    for version in (4, 5):
        report = export(open_run(chain.url), out, version)
        assert report.missing == []
        assert held(out) == expected(TABLE, chain.bits[version])
        assert (out / "config.json").read_bytes() == (out / "vocab.json").read_bytes() == b"by hand"


@pytest.mark.parametrize("way", ["damaged", "longer", "lost"])
def test_a_damaged_file_of_the_run_is_left_out_and_said(way: str, published: Published, tmp_path: Path) -> None:
    shutil.copytree(published[0] / "run", tmp_path / "run")
    run = open_run(str(tmp_path / "run"))
    for item in run.info.files:
        if item.name in ("generation_config.json", "config.json"):
            spoil(run.bucket, item.key, way)
    report = export(run, tmp_path / "out")
    assert report.missing == ["config.json"]
    assert [note.split()[:6] for note in report.notes] == [
        [name, "of", "the", "run", "cannot", "be"] for name in ("config.json", "generation_config.json")
    ]
    assert "tokenizer.json" in report.files
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_bytes(b"{}")
    (base / "tokenizer.json").write_bytes(b"the run's own wins")
    report = export(run, tmp_path / "out", base=base)
    assert report.missing == []
    assert (tmp_path / "out" / "config.json").read_bytes() == b"{}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == run.file("tokenizer.json")


# Memory and disk


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    """URL of a run of many tensors: a snapshot, a change of few elements of each, and of every element of one."""
    url = str(tmp_path_factory.mktemp("large") / "run")
    tensors = {
        f"w{number:02d}": torch.full((LARGE // 2,), float(number), dtype=torch.bfloat16) for number in range(COUNT)
    }
    with Publisher(tensors, url, shard_bytes=LARGE) as publisher:
        for number in range(COUNT):
            tensors[f"w{number:02d}"].view(torch.int16)[::200] += 1
        publisher.publish(1, wait=True)
        tensors["w07"].view(torch.int16).random_(1, 100)
        publisher.publish(2, wait=True)
        publisher.flush()
        assert publisher.version == 2
    return url


@pytest.mark.parametrize("way", ["export", pytest.param("follow", marks=pytest.mark.slow)])
def test_memory_is_that_of_a_tensor_not_of_the_model(large: str, tmp_path: Path, way: str) -> None:
    """Also where a version takes the place of another; who follows decodes up to 4 million elements of 10 bytes."""
    out, most = tmp_path / "out", MOST_ANONYMOUS + (40 * 1024 * 1024 if way == "follow" else 0)
    assert open_run(large).table.full_bytes > 1.5 * most
    for version in (1, 2):
        taken = json.loads(run_python("-m", "tests.support.exporting", large, str(out), str(version), way).stdout)
        assert taken["version"] == version
        assert taken["anonymous"] < most
    shutil.rmtree(out)


def test_no_room_is_said_at_once_and_given_back(chain: Chain, tmp_path: Path) -> None:
    for before in (None, 2):
        if before is not None:
            exported(chain, tmp_path / "out", before)
        there = stored(tmp_path / "out")
        with file_size_limit(TABLE.full_bytes // 2), pytest.raises(StoreError, match="no room for"):
            export(open_run(chain.url), tmp_path / "out", 3)
        assert stored(tmp_path / "out") == there
        assert not (tmp_path / "out" / WORK_NAME / "new").exists()
    exported(chain, tmp_path / "out", 3)


def test_sizes_that_make_no_sense_are_refused(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="shard_bytes is 0"):
        export(open_run(chain.url), tmp_path / "out", shard_bytes=0)
    monkeypatch.setattr("vllm_delta_sync.format.limits.MAX_OBJECTS_PER_VERSION", 3)
    with pytest.raises(LimitError, match="shard_bytes is 1"):
        export(open_run(chain.url), tmp_path / "out", shard_bytes=1)
    assert not (tmp_path / "out").exists()


# The command


def test_the_command_says_what_it_wrote(published: Published, tmp_path: Path) -> None:
    url, out = published[0] / "run", tmp_path / "out"
    arguments = ("export", "--bucket", url, "--to", out, "--version", 2, "--shard-bytes", 100_000)
    lines = {line.split()[0]: line for line in shown(*arguments).splitlines()}
    assert lines["version"].endswith("2 (step 1)")
    assert lines["directory"].split() == ["directory", str(out)]
    assert " files" in lines["weights"]
    assert "tokenizer.json" in lines["files"]
    assert "already present" in shown(*arguments)
    run = open_run(str(url))
    assert answer("export", "--bucket", url, "--to", out) == {
        "run": run.info.run,
        "version": 3,
        "step": 2,
        "manifest": run.head().digest,
        "directory": str(out),
        "files": names(out),
        "bytes": run.table.full_bytes,
        "present": False,
        "missing": [],
        "looked_in": [f"run {run.info.run}, which keeps " + ", ".join(item.name for item in run.info.files)],
        "notes": [],
    }


def test_the_command_says_what_is_missing(chain: Chain, tmp_path: Path) -> None:
    export_to = ("export", "--to", tmp_path / "out")
    done = delta_sync(*export_to, DELTA_SYNC_BUCKET=chain.url)
    assert done.code == 0
    for part in ("missing: config.json and tokenizer", chain.run, "--base"):
        assert part in done.err


@pytest.mark.parametrize("size", [(24, 80), (0, 0)])
def test_progress_is_shown_on_a_terminal_and_removed(
    size: tuple[int, int],
    chain: Chain,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Some terminals, as in containers, say that they have no size."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", *size, 0, 0))
    shown = io.BytesIO()

    def drain() -> None:
        try:
            while data := os.read(reader, 4096):
                shown.write(data)
        except OSError:
            pass  # the other side is closed

    thread = threading.Thread(target=drain)
    thread.start()
    with open(writer, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        arguments = ["--bucket", chain.url, "--to", str(tmp_path / "out"), "--version", "4"]
        assert cli.run(["export", *arguments, "--json"]) == 0
    thread.join()
    os.close(reader)
    drawn = shown.getvalue().decode().split("\r")
    assert any("%" in part and "B/s" in part for part in drawn)
    assert drawn[-2].strip() == drawn[-1] == "", "nothing stays"
    assert json.loads(capsys.readouterr().out)["data"]["version"] == 4


def test_interrupted_command_says_how_to_go_on(chain: Chain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Any:
        restore(*arguments, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("vllm_delta_sync.maintenance.export.restore", interrupted)
        done = delta_sync("export", "--bucket", chain.url, "--to", tmp_path / "out")
    assert (done.code, "the same command continues from here" in done.err) == (130, True)
    assert stored(tmp_path / "out") == {}
    exported(chain, tmp_path / "out")
