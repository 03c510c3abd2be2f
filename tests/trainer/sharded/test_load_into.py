"""A version's weights into models whose tensors are shared by several processes: each rank fills its own part."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.support.architectures import qwen3_moe, same_bits
from tests.support.running import counted
from tests.support.samples import RunWriter, nudge
from tests.trainer.sharded.models import fsdp, tied_llama
from tests.trainer.sharded.nursery import Nursery
from trainer_side.model.module import live_tensors
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.client import open_run
from vllm_delta_sync.errors import DeltaSyncError, TensorMismatchError
from vllm_delta_sync.format.safetensors_file import write_anchor
from vllm_delta_sync.format.table import TensorSpec, TensorTable

WIDTH = 6
VERSIONS = 4


class Net(nn.Module):
    """Sizes that divide badly, stacked experts, a tied head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.up = nn.Linear(WIDTH, 12)
        self.down = nn.Linear(12, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.single = nn.Parameter(torch.zeros(1))
        self.experts = nn.Parameter(torch.zeros(3, 5, 2))
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.zeros(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(ids))
        hidden = hidden + self.down(torch.relu(self.up(hidden)))
        out: torch.Tensor = self.head(hidden) * self.single * self.experts.sum()
        return out


def table_of(model: nn.Module, kept: tuple[str, ...] = ("norm", "scale")) -> TensorTable:
    """Its state, in bf16 but for the norm and the buffer; the tied head goes by its first name."""
    state = model.state_dict()
    names = [name for name in state if name != "head.weight"]
    return TensorTable(
        TensorSpec(name, "F32" if name.startswith(kept) else "BF16", tuple(state[name].shape)) for name in names
    )


def write_run(folder: Path, table: TensorTable, versions: int = VERSIONS, share: float = 0.2) -> str:
    """A run with an anchor and deltas, of small weights → its URL."""
    random = np.random.default_rng(0)
    bits = []
    for spec in table:
        values = (0.1 * random.standard_normal(spec.numel)).astype(np.float32).view(np.uint32)
        bits.append(values if spec.dtype == "F32" else (values >> 16).astype(np.uint16))
    folder.mkdir(exist_ok=True)
    path = folder / "anchor.safetensors"
    write_anchor(path, table, ((spec.name, bits[tensor]) for tensor, spec in enumerate(table)))
    url = str(folder / "run")
    writer = RunWriter(open_bucket(url), table)
    writer.anchor(bits, path.read_bytes())
    for _ in range(versions - 1):
        writer.delta(nudge(writer.bits[-1], random, share))
    return url


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def wrong(tensors: dict[str, torch.Tensor], url: str, version: int) -> list[str]:
    """Names of tensors that are not those of a version; of a sharded one all ranks look at all of it."""
    right, held = dict(open_run(url).tensors(version)), {name: whole(tensor) for name, tensor in tensors.items()}
    odd = [name for name in held if name in right and not same_bits(held[name], right[name].to(held[name].dtype))]
    return odd + sorted(right.keys() - held.keys())


def refusal(work: Callable[[], object]) -> list[str]:
    """Kind and message of the error that a call raises."""
    try:
        work()
    except DeltaSyncError as error:
        return [error.kind, error.message]
    return []


# FSDP2


def rows(model: Net, size: int) -> None:
    fully_shard(model)


def mixed(model: Net, size: int) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for part in (model.up, model.down):
        fully_shard(part, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def replicated(model: Net, size: int) -> None:
    mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    fully_shard(model, mesh=mesh)


def tensor_parallel(model: Net, size: int) -> None:
    mesh = init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])


WAYS: dict[str, Callable[[Net, int], None]] = {
    "rows": rows, "mixed": mixed, "replicated": replicated, "tensor parallel": tensor_parallel
}  # fmt: skip


def load_fsdp(rank: int, size: int, url: str) -> dict[str, Any]:
    run = open_run(url)
    found: dict[str, Any] = {}
    ids = torch.tensor([[1, 2, 3]])
    for way, shard in WAYS.items():
        model, plain = Net(), Net()
        shard(model, size)
        for version in (2, VERSIONS - 1, 0):
            with torch.no_grad():
                # What is gathered for this stays so until somebody reshards it.
                model(ids)
            run.load_into(model, version)
            run.load_into(plain, version)
            same = torch.equal(model(ids), plain(ids)) or way in ("mixed", "tensor parallel")
            found[f"{way} {version}"] = wrong(model.state_dict(), url, version) + ([] if same else ["forward"])
            model(ids).sum().backward()
        found[f"{way} trained"] = wrong(model.state_dict(), url, 0)
    return found


def load_others(rank: int, size: int, url: str) -> dict[str, Any]:
    """Models that had no memory, as large ones are made; state dicts; targets that do not fit and are left alone."""
    run = open_run(url)
    found: dict[str, Any] = {}
    with torch.device("meta"):
        large: Any = Net()
    fully_shard(large)
    found["meta"] = refusal(lambda: run.load_into(large, 1))
    large.to_empty(device="cpu")
    run.load_into(large, 1)
    found["filled"] = wrong(large.state_dict(), url, 1)
    model = Net()
    fully_shard(model)
    state = model.state_dict()
    run.load_into(state, 1)
    found["state"] = wrong(model.state_dict(), url, 1)
    mesh = init_device_mesh("cpu", (size,))
    others: dict[str, dict[str, torch.Tensor]] = {
        "shape": state | {"up.weight": distribute_tensor(torch.zeros(WIDTH, 12), mesh)},
        "dtype": state | {"up.weight": distribute_tensor(torch.zeros(12, WIDTH, dtype=torch.float16), mesh)},
        "extra": state | {"more": distribute_tensor(torch.ones(12, WIDTH), mesh)},
        "absent": {name: tensor for name, tensor in state.items() if name != "up.weight"},
    }
    for name, target in others.items():
        found[name] = refusal(lambda: run.load_into(target, 2))  # noqa: B023 - called here
    found["untouched"] = wrong(model.state_dict(), url, 1)
    run.load_into({"up.weight": others["extra"]["up.weight"], "more": others["extra"]["more"]}, 2, strict=False)
    found["some"] = wrong({"up.weight": state["up.weight"]}, url, 2)
    found["more"] = float(whole(others["extra"]["more"]).sum())
    return found


# What it takes

LAYERS, SIDE = 12, 1024
"""24 MiB in bf16."""


def load_large(rank: int, size: int, url: str) -> dict[str, Any]:
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False, dtype=torch.bfloat16) for _ in range(LAYERS)))
    fully_shard(model)
    run = open_run(url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm_delta_sync.run.objects.MAPPED_BYTES", 1024 * 1024)
        # As small beside this model as the pieces of a download are beside a large one.
        patch.setattr("vllm_delta_sync.bucket.ranged.PIECE_BYTES", 128 * 1024)
        # Once before it is counted, for what is compiled and imported.
        run.load_into(model, 1)
        with counted() as most:
            run.load_into(model, 2)
    return {"most": most[0], "wrong": wrong(model.state_dict(), url, 2)}


# Models of transformers


def checkpoint_table(model: nn.Module) -> TensorTable:
    """What a publisher of it writes, all in bf16."""
    return TensorTable(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in live_tensors(model).read())


def load_real(rank: int, size: int, tied: str, experts: str) -> dict[str, Any]:
    model = fsdp(tied_llama())
    open_run(tied).load_into(model, 1)
    found: dict[str, Any] = {"tied": wrong(model.state_dict(), tied, 1)}
    for name, fused in (("sharded", fsdp(qwen3_moe())), ("plain", qwen3_moe())):
        found[name] = refusal(lambda: open_run(experts).load_into(fused))  # noqa: B023 - called here
    return found


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_run(tmp_path_factory.mktemp("run"), table_of(Net()))


SIZES = pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])


@SIZES
def test_sharded_modules_are_filled(size: int, nursery: Nursery, url: str) -> None:
    for found in nursery.run(size, load_fsdp, url=url):
        assert len(found) == 4 * len(WAYS)
        assert not any(found.values()), found


@SIZES
def test_models_without_memory_and_state_dicts_are_filled(size: int, nursery: Nursery, url: str) -> None:
    for found in nursery.run(size, load_others, url=url):
        kinds = {found[name][0] for name in ("meta", "shape", "dtype", "extra", "absent")}
        assert kinds == {TensorMismatchError.kind}
        assert found["filled"] == found["state"] == found["untouched"] == []
        assert "to_empty" in found["meta"][1]
        assert "[6, 12] in the target, [12, 6] in the run" in found["shape"][1]
        assert "torch.bfloat16 in the run; give the target" in found["dtype"][1]
        assert "'more' of the target is not in the run" in found["extra"][1]
        assert "'up.weight' of the run is not in the target" in found["absent"][1]
        assert found["more"] == 12 * WIDTH
        # Only this name was asked for.
        assert "up.weight" not in found["some"]


@SIZES
def test_real_models_are_filled_or_refused_by_name(size: int, nursery: Nursery, tmp_path: Path) -> None:
    tied = write_run(tmp_path / "tied", checkpoint_table(tied_llama()), versions=2)
    experts = write_run(tmp_path / "experts", checkpoint_table(qwen3_moe()), versions=1)
    for found in nursery.run(size, load_real, tied=tied, experts=experts):
        assert found["tied"] == []
        for way in ("sharded", "plain"):
            kind, message = found[way]
            assert kind == TensorMismatchError.kind
            assert "experts.0.down_proj.weight' of the run is not in the target" in message


@pytest.mark.slow
@SIZES
def test_no_rank_takes_the_memory_of_the_model(size: int, nursery: Nursery, tmp_path: Path) -> None:
    table = TensorTable(TensorSpec(f"{layer}.weight", "BF16", (SIDE, SIDE)) for layer in range(LAYERS))
    for found in nursery.run(size, load_large, url=write_run(tmp_path, table, versions=3, share=0.01)):
        assert found["wrong"] == []
        shard = 2 * SIDE * SIDE * LAYERS // size
        assert shard <= found["most"] < shard + 6 * 1024 * 1024


def test_plain_modules_without_memory_or_within_another_are_refused(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, table_of(Net()), versions=1))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(TensorMismatchError, match="to_empty"):
        run.load_into(model)
    wrapper = nn.ModuleDict({"module": Net()})
    with pytest.raises(TensorMismatchError, match=r"'module\.down\.bias': pass the module inside the wrapper"):
        run.load_into(wrapper)
