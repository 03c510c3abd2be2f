"""A run that ranks publish together is the run that one process would publish of the gathered model."""

import json
import resource
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from benchmarks.common.timing import peak_extra_bytes
from tests.support.publishers import Hooked
from tests.support.tiny import make_tokenizer
from tests.trainer.sharded.models import WAYS, assert_same_runs, built, fsdp, gathered, move, steps
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import LimitError, StoreError, UsageError
from vllm_delta_sync.format.manifest import FILES_PREFIX

STEPS = 3


def publish_both(rank: int, size: int, url: str, way: str, name: str, codec: Literal["tiled", "raw"]) -> Any:
    """Publish from all ranks, and on rank 0 the gathered model too → what each rank said of its versions."""
    model, single = WAYS[way](built(name), size), built(name)
    alone = Publisher(single, f"{url}-alone", codec=codec) if rank == 0 else None
    said: list[Any] = []
    with Publisher(model, url, codec=codec) as publisher:
        for step in range(1, STEPS + 1):
            if name == "mixed":
                move(model)
            else:
                steps(model, rank, 1)
            whole = gathered(model)
            given = {"state": f"{rank} {step}".encode(), **({"alone": b""} if rank else {})}
            result = publisher.publish(step, wait=True, sidecars=given)
            assert publisher.table.total == result.total
            percent = result.metrics()["delta_sync/changed_percent"]
            said.append([result.version, result.total, result.changed, percent])
            if alone is not None:
                single.load_state_dict(whole)
                alone.publish(step, wait=True)
        publisher.flush()
        said.append(publisher.version)
    if alone is not None:
        alone.close()
    return said


CASES = [
    ("fsdp", "mixed", 2, "tiled"),
    pytest.param("fsdp", "mixed", 4, "raw", marks=pytest.mark.slow),
    *(
        pytest.param(way, name, 4, "tiled", marks=pytest.mark.slow)
        for way, name in (("fsdp", "qwen3"), ("fsdp", "llama tied"), ("fsdp tp", "qwen3"), ("columns", "qwen3 moe"))
    ),
    ("ddp", "llama tied", 2, "tiled"),
    pytest.param("hybrid", "qwen3 moe", 4, "tiled", marks=pytest.mark.slow),
    ("fsdp", "qwen3 moe", 2, "raw"),
    ("fsdp", "qwen3 moe", 4, "tiled"),
]


@pytest.mark.parametrize(("way", "name", "size", "codec"), CASES)
def test_ranks_publish_as_one(way: str, name: str, size: int, codec: str, nursery: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    said = nursery.run(size, publish_both, url=url, way=way, name=name, codec=codec)
    together = assert_same_runs(url, f"{url}-alone")
    assert together.table.to_bytes() == open_run(f"{url}-alone").table.to_bytes()
    assert [rows[-1] for rows in said] == [STEPS] * size
    for version in range(1, STEPS + 1):
        ours = together.manifest(version)
        writers = {ref.rank for ref in ours.objects}
        assert writers == ({0} if way == "ddp" else set(range(2 if way == "hybrid" else size)))
        found = sum(rows[version - 1][2] for rows in said)
        assert 0 < found <= ours.changed
        # On every rank that of all.
        assert {rows[version - 1][3] for rows in said} == {100 * found / ours.total}
    assert [item.name for item in together.manifest(STEPS).sidecars] == ["state"]
    assert together.sidecar(STEPS, "state") == f"0 {STEPS}".encode()
    assert together.head().version == STEPS


def go_on(rank: int, size: int, url: str, base: str | None) -> list[Any]:
    """Take the run over from what it holds, or begin it, and publish two versions."""
    model: Any = built("mixed")
    there = Path(url, "run.json").exists()
    distributed.barrier()
    if there:
        held = dict(open_run(url).tensors(base=base))
        model.load_state_dict({name: held[name] for name in model.state_dict()})
    model = fsdp(model) if size > 1 else model
    # No anchor beside the chain, from which a lost version could be rebuilt.
    with Publisher(model, url, base=base, shard_bytes=100, anchor_every=100, merge=False) as publisher:
        begun = publisher.version
        for step in range(begun + 1, begun + 3):
            move(model)
            publisher.publish(step, wait=True)
        publisher.flush()
        whole = gathered(model)
        if rank == 0:
            held = dict(open_run(url).tensors(base=base))
            assert [name for name in whole if not torch.equal(held[name], whole[name])] == []
    return [begun, publisher.version]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("anchor", [2, 3, 1]),
        pytest.param("anchor", [4, 2, 1, 4], marks=pytest.mark.slow),
        pytest.param("reference", [4, 2, 1, 4], marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_fewer_or_more_ranks(kind: str, sizes: list[int], nursery: Nursery, tmp_path: Path) -> None:
    url, base = str(tmp_path / "run"), tmp_path / "base"
    base.mkdir()
    tensors = built("mixed").state_dict()
    if kind == "anchor":
        tensors["last.weight"] = tensors["last.weight"] + 1
    tensors["vision.weight"] = torch.arange(6.0)
    save_file(tensors, base / "model.safetensors")
    for number, size in enumerate(sizes):
        said = nursery.run(size, go_on, url=url, base=str(base))
        assert said == [[2 * number, 2 * number + 2]] * size
    run = open_run(url)
    assert run.manifest(0).kind == kind
    assert {ref.rank for ref in run.manifest(0).objects} == (set(range(sizes[0])) if kind == "anchor" else set())
    assert run.manifest(3).epoch == 1
    # What the model does not hold keeps the base's bits through all of it.
    assert torch.equal(dict(run.tensors(base=base))["vision.weight"], tensors["vision.weight"])
    assert run.verify(base).head == 2 * len(sizes)


def publish_files(rank: int, size: int, url: str, files: str) -> list[str]:
    """Only rank 0 has the folder, as where ranks are on several machines; what each rank has put into the bucket."""
    bucket = Hooked(Path(url))
    put: list[str] = []
    bucket.before = put.append
    with Publisher(fsdp(built("llama tied")), bucket, files=files if rank == 0 else files + "-is-elsewhere"):
        pass
    return [key for key in put if key.startswith(FILES_PREFIX)]


def begin_badly(rank: int, size: int, url: str, files: str) -> str:
    with pytest.raises(UsageError) as caught:
        Publisher(fsdp(built("mixed")), url, files=files)
    return caught.value.message


def test_rank_0_writes_run_files_once(nursery: Nursery, tmp_path: Path) -> None:
    url = str(tmp_path / "run")
    make_tokenizer().save_pretrained(tmp_path / "tokenizer")
    put = nursery.run(2, publish_files, url=url, files=str(tmp_path / "tokenizer"))
    run = open_run(url)
    assert sorted(put[0]) == sorted(item.key for item in run.info.files)
    assert put[1] == []
    names = {item.name for item in run.info.files}
    assert names > {"config.json", "generation_config.json", "tokenizer.json"}
    # The class of a sharded module is not the one that others have to load.
    assert json.loads(run.file("config.json"))["architectures"] == ["LlamaForCausalLM"]
    assert run.verify().files == len(names)


def test_run_files_that_rank_0_cannot_keep_are_refused_on_every_rank(nursery: Nursery, tmp_path: Path) -> None:
    said = nursery.run(2, begin_badly, url=str(tmp_path / "run"), files=str(tmp_path / "never"))
    assert said[1] == f"rank 0: {said[0]}"
    assert "not a folder; give one that holds config.json" in said[0]
    assert not (tmp_path / "run").exists()


LARGEST = 64 << 20


class Large(nn.Module):
    """Two tensors of ``LARGEST`` bytes, more than an allocator keeps for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(LARGEST >> 13, 1 << 12, dtype=torch.bfloat16))
        self.second = nn.Parameter(torch.ones(LARGEST >> 13, 1 << 12, dtype=torch.bfloat16))


def opened(rank: int, size: int, folder: str) -> float:
    """The most memory that was taken for a moment, in largest tensors."""
    # What is loaded and compiled when something is published first.
    small: Any = fully_shard(nn.Linear(8, 8, dtype=torch.bfloat16))
    Publisher(small, f"{folder}/before").close()
    model: Any = fully_shard(Large())
    made: list[Publisher] = []
    peak = peak_extra_bytes(lambda: made.append(Publisher(model, f"{folder}/run")))
    made[0].close()
    return (peak - 2 * LARGEST / size) / LARGEST


def starved(rank: int, size: int, folder: str) -> None:
    model: Any = fully_shard(Large())
    with Publisher(model, f"{folder}/run", shard_bytes=1) as publisher:
        assert publisher.anchor() == 0
        unlimited = resource.getrlimit(resource.RLIMIT_AS)
        if rank == 1:
            # Too little for the second tensor, which this rank writes.
            taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (taken + LARGEST - (4 << 20), unlimited[1]))
        with pytest.raises(LimitError, match=rf"tensor 'second' has {LARGEST} bytes, for which rank 1 has no memory"):
            publisher.anchor()
        resource.setrlimit(resource.RLIMIT_AS, unlimited)
        # Or without a place for its file.
        if rank == 1:
            tempfile.tempdir = f"{folder}/nowhere"
        with pytest.raises(StoreError, match=r"no temporary folder can be made: .*nowhere"):
            publisher.anchor()
        tempfile.tempdir = None
        # The ranks are in step, and nothing of it stays.
        assert publisher.anchor() == 0
        with torch.no_grad():
            model.first.mul_(2)
        assert publisher.publish(1, wait=True).version == 1


@pytest.mark.slow
def test_a_rank_without_room_for_a_tensor_leaves_the_ranks_in_step(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, starved, folder=str(tmp_path))
    assert open_run(str(tmp_path / "run")).verify().head == 1


@pytest.mark.slow
def test_a_snapshot_takes_one_whole_tensor_on_the_rank_that_writes_it(nursery: Nursery, tmp_path: Path) -> None:
    writer, other = nursery.run(2, opened, folder=str(tmp_path))
    # Shards that are received into buffers of their own take another half or more, and so do those that are packed to
    # be sent; a tensor that is kept until the next one is there takes another whole.
    assert writer < 1.25
    assert other < 0.25
