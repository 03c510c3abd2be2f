"""A run followed as slime's folders: each appears whole, and readers of that format have the run's bits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.chains import Chain
from tests.support.commands import answer, kind, shown
from tests.support.exporting import expected
from tests.support.marked import MarkedChain
from tests.support.running import run_python
from tests.support.slime_folders import deltas, folder_of, index_of, rebuilt, versions
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.support.written import Written
from trainer_side import Publisher
from vllm_delta_sync import FollowedVersion, follow, open_run
from vllm_delta_sync.errors import ChainError, UnsupportedError, UsageError
from vllm_delta_sync.format.table import DRAFT_PREFIX, TensorSpec, TensorTable
from vllm_delta_sync.maintenance import slime_folder
from vllm_delta_sync.maintenance.tags import set_tag

READERS = Path(".venv/slime-readers").resolve()


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    return Chain(tmp_path)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def once(chain: Chain, out: Path, **options: Any) -> FollowedVersion | None:
    """Follow once, as a process that starts anew; each version there then has the run's bits."""
    updates = list(follow(chain.url, out, once=True, **{"format": "slime", "shard_bytes": 2000, **options}))
    for version in versions(out):
        assert rebuilt(out, version) == expected(chain.table, chain.bits[version])
    assert len(updates) <= 1
    return updates[0] if updates else None


# Versions


def test_each_version_is_a_delta_on_the_one_before(chain: Chain, out: Path) -> None:
    first = once(chain, out)
    assert first is not None
    assert (first.version, first.folder) == (0, folder_of(out, 0))
    assert deltas(out) == []
    for growth in ({}, {"codec": "plain"}, {"full": [1]}, {"share": 0.0}, {"count": 3}):
        chain.grow(**growth)
        update = once(chain, out)
        assert update is not None
        assert update.version == len(chain.manifests) - 1
    assert versions(out) == list(range(8))
    assert deltas(out) == list(range(1, 8)), "those between are there, too"
    assert index_of(folder_of(out, 4))["weight_map"] == {}, "a version that changes nothing"
    assert once(chain, out) is None


def test_whole_checkpoints_only(chain: Chain, out: Path) -> None:
    for _ in range(3):
        once(chain, out, format="slime-full", keep=2)
        chain.grow(2)
    assert versions(out) == [2, 4]
    assert deltas(out) == []
    assert len(list(folder_of(out, 4).glob("*.safetensors"))) > 1


@pytest.mark.parametrize("base", [False, True])
def test_files_of_the_model_are_beside_whole_checkpoints(tmp_path: Path, out: Path, base: bool) -> None:
    """The engine can be started from one, also if it is in one file: Stitch reads the index, others the file."""
    chain = Chain(tmp_path, base=base)
    if base:
        (tmp_path / "base" / "config.json").write_text('{"model_type": "tiny"}')
    once(chain, out, shard_bytes=10**9)
    folder = folder_of(out, 0)
    assert set(index_of(folder)["weight_map"].values()) == {"model.safetensors"}
    assert (folder / "config.json").exists() == base


def test_weights_stay_between_versions(chain: Chain, out: Path) -> None:
    """A follower that goes on reads deltas, not the model."""
    read = []
    for update in follow(chain.url, out, format="slime", poll_seconds=0.01):
        read.append(update.read_bytes)
        if update.version == 4:
            break
        chain.grow()
    assert read[0] >= chain.table.full_bytes
    assert read[1:] == [chain.manifests[version].payload_bytes for version in range(1, 5)]
    assert rebuilt(out, 4) == expected(chain.table, chain.bits[4])


def test_each_folder_is_looked_at_once(chain: Chain, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There are hundreds of deltas after a whole checkpoint: reading all their indexes took seconds of each version."""
    read, original = list[Path](), slime_folder._delta_bytes

    def delta_bytes(folder: Path) -> int:
        read.append(folder)
        return original(folder)

    monkeypatch.setattr(slime_folder, "_delta_bytes", delta_bytes)
    for update in follow(chain.url, out, format="slime", poll_seconds=0.01):
        if update.version == 5:
            break
        chain.grow()
    assert sorted(read) == [folder_of(out, version) for version in range(5)]


def test_many_changes_in_files_that_readers_can_hold(chain: Chain, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slime_folder, "FILE_BYTES", 1)
    once(chain, out)
    chain.grow(full=[0, 2, 4])
    once(chain, out)
    assert deltas(out) == [1]
    assert len(set(index_of(folder_of(out, 1))["weight_map"].values())) > 2


# Whole checkpoints in between


def test_a_new_reader_reads_no_more_than_two_models(chain: Chain, out: Path) -> None:
    for _ in range(30):
        once(chain, out, keep=1000)
        chain.grow(share=0.1)
    whole = [version for version in versions(out) if version not in deltas(out)]
    assert 2 < len(whole) < 15
    for version in versions(out):
        seed = max(each for each in whole if each <= version)
        files = [path for each in range(seed + 1, version + 1) for path in folder_of(out, each).iterdir()]
        assert sum(path.stat().st_size for path in files) <= chain.table.full_bytes


@pytest.mark.parametrize(
    "grow",
    [
        lambda chain: chain.grow(slime_folder.MAX_BEHIND + 1, share=0.001),
        lambda chain: chain.anchor(chain.bits[0]),
        lambda chain: chain.grow(base=1),
    ],
    ids=["far-behind", "anchor", "rebased"],
)
def test_after_a_gap_comes_a_whole_checkpoint(chain: Chain, out: Path, grow: Callable[[Chain], None]) -> None:
    for _ in range(4):
        once(chain, out)
        chain.grow()
    once(chain, out)
    grow(chain)
    once(chain, out, keep=10)
    newest = len(chain.manifests) - 1
    assert versions(out) == [*range(5), newest]
    assert deltas(out) == [1, 2, 3, 4]


def test_what_the_newest_versions_need_is_kept(chain: Chain, out: Path) -> None:
    once(chain, out)
    for _ in range(4):
        chain.grow()
        once(chain, out)
    chain.anchor(chain.bits[0])
    once(chain, out, keep=2)
    assert 5 not in deltas(out)
    assert versions(out) == [0, 1, 2, 3, 4, 5], "version 4 needs the others"
    chain.grow()
    once(chain, out, keep=2)
    assert versions(out) == [5, 6]


def test_a_folder_that_has_lost_its_files_is_none(chain: Chain, out: Path) -> None:
    updates = follow(chain.url, out, poll_seconds=0.02, format="slime")
    assert next(updates).version == 0
    for path in (out / "weight_v000000").iterdir():
        path.unlink()
    chain.grow()
    assert next(updates).version == 1
    updates.close()
    assert rebuilt(out, 1) == expected(chain.table, chain.bits[1])


def test_a_version_that_the_gate_refused_is_never_offered(tmp_path: Path, out: Path) -> None:
    chain = MarkedChain(tmp_path)
    once(chain, out)
    chain.play("!")
    assert once(chain, out) is None
    chain.play(".")
    once(chain, out)
    assert versions(out) == [0, 2]
    assert deltas(out) == []


# Readers of others


@pytest.mark.slow
def test_modelexpress_follows(tmp_path: Path) -> None:
    """The receiver of modelexpress, from PyPI, over S3: from the beginning, and each time as a new one."""
    done = run_python("-m", "tests.tools.slime_reader", str(tmp_path), environment={"PYTHONPATH": str(READERS)})
    assert json.loads(done.stdout) == {"reader": "modelexpress", "deltas": 9, "whole": 15, "looks": 48}


def test_transformers_loads_whole_ones(tmp_path: Path, out: Path, one_thread: None) -> None:
    """In one file and in several, with the index that Stitch reads."""
    model = make_model("llama", hidden_size=32)
    base = save_checkpoint(model, tmp_path / "base")
    steps = train_steps(model, lr=1e-2)
    with Publisher(model, str(tmp_path / "run"), base=base) as publisher:
        for step, shard_bytes in ((1, 10**9), (2, 20_000)):
            next(steps)
            publisher.publish(step, wait=True)
            publisher.flush()
            for update in follow(str(tmp_path / "run"), out, once=True, format="slime-full", shard_bytes=shard_bytes):
                loaded = AutoModelForCausalLM.from_pretrained(update.folder).state_dict()
            saved = AutoModelForCausalLM.from_pretrained(save_checkpoint(model, tmp_path / f"saved{step}"))
            assert all(torch.equal(value, loaded[name]) for name, value in saved.state_dict().items())


# Back


def test_a_tag_that_moves_back_is_refused(chain: Chain, out: Path) -> None:
    chain.grow(3)
    run = open_run(chain.url)
    for version in (1, 3):
        set_tag(run, "best", version)
        once(chain, out, version="tag:best")
    set_tag(run, "best", 2)
    with pytest.raises(ChainError, match=r"leads back from version 3 to 2, .*Publisher\.rebase"):
        once(chain, out, version="tag:best")
    assert versions(out)[-1] == 3


# Refused


def test_one_folder_has_one_format(chain: Chain, out: Path, tmp_path: Path) -> None:
    once(chain, out)
    with pytest.raises(UsageError, match="holds 'weight_v000000', of another --format"):
        list(follow(chain.url, out, once=True))
    list(follow(chain.url, tmp_path / "other", once=True))
    with pytest.raises(UsageError, match="holds 'current', of another --format"):
        list(follow(chain.url, tmp_path / "other", once=True, format="slime"))
    with pytest.raises(UsageError, match="format is 'megatron'; give one of checkpoint, slime, slime-full"):
        follow(chain.url, out, format="megatron")


def test_a_run_with_a_draft_of_its_own_is_refused(tmp_path: Path, out: Path) -> None:
    table = TensorTable([TensorSpec("w", "BF16", (4,)), TensorSpec(f"{DRAFT_PREFIX}w", "BF16", (4,))])
    Written(tmp_path / "run", 0, 11, table)
    with pytest.raises(UnsupportedError, match=r"a draft of its own, .* --format checkpoint"):
        list(follow(str(tmp_path / "run"), out, once=True, format="slime"))
    assert versions(out) == []


# The command


def test_the_command(chain: Chain, out: Path, tmp_path: Path) -> None:
    arguments = ("follow", "--bucket", chain.url, "--to", out, "--format", "slime", "--once", "--on-update")
    note = f"sh -c 'echo $DELTA_SYNC_VERSION $DELTA_SYNC_FOLDER >> {tmp_path}/log'"
    assert shown(*arguments, note).startswith("version 0 (step 0) in ")
    chain.grow(2)
    document = answer(*arguments, note)
    assert [update["version"] for update in document["versions"]] == [2], "one, after those between"
    assert (tmp_path / "log").read_text().splitlines() == [f"{v} {folder_of(out, v)}" for v in (0, 2)]
    assert rebuilt(out, 2) == expected(chain.table, chain.bits[2])
    assert kind(2, "follow", "--bucket", chain.url, "--to", out, "--once") == "usage"
