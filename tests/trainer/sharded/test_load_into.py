"""A version's weights into models whose tensors are shared by several processes: each rank fills its own part."""

import importlib
import tracemalloc
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

from tests.support.architectures import qwen3_moe
from tests.support.samples import RunWriter, nudge
from tests.trainer.sharded.models import fsdp, tied_llama
from tests.trainer.sharded.world import World, run_world
from trainer_side.naming import live_tensors
from vllm_delta_sync.bucket import open_bucket
from vllm_delta_sync.chain import open_run
from vllm_delta_sync.chain import read as chain_read
from vllm_delta_sync.errors import DeltaSyncError, TensorMismatchError
from vllm_delta_sync.wire.anchor import write_anchor
from vllm_delta_sync.wire.table import TensorSpec, TensorTable

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


def equal(tensor: torch.Tensor, right: torch.Tensor) -> bool:
    """Bit for bit, once in the dtype of the first."""
    held = whole(tensor)
    return torch.equal(held.contiguous().view(torch.uint8), right.to(held.dtype).view(torch.uint8))


def wrong(tensors: dict[str, torch.Tensor], url: str, version: int) -> list[str]:
    """Names of tensors that are not those of a version; of a sharded one all ranks look at all of it."""
    right = dict(open_run(url).tensors(version))
    odd = [name for name, tensor in tensors.items() if name in right and not equal(tensor, right[name])]
    return odd + sorted(right.keys() - tensors.keys())


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


def load_meta(rank: int, size: int, url: str) -> dict[str, Any]:
    """A model that had no memory before, as large ones are made."""
    run, found = open_run(url), {}
    with torch.device("meta"):
        model = Net()
    fully_shard(model)
    try:
        run.load_into(model, 1)
    except DeltaSyncError as error:
        found["meta"] = [error.kind, str(error)]
    model.to_empty(device="cpu")
    run.load_into(model, 1)
    found["wrong"] = wrong(model.state_dict(), url, 1)
    return found


def load_others(rank: int, size: int, url: str) -> dict[str, Any]:
    """State dicts, and targets that do not fit, which are left alone."""
    run = open_run(url)
    found: dict[str, Any] = {}
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
        try:
            run.load_into(target, 2)
        except DeltaSyncError as error:
            found[name] = [error.kind, str(error)]
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
        patch.setattr(chain_read, "MAPPED_BYTES", 1024 * 1024)
        # Once before it is counted, for what is compiled and imported.
        run.load_into(model, 1)
        tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        run.load_into(model, 2)
        most = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
    return {"most": most, "wrong": wrong(model.state_dict(), url, 2)}


# Models of transformers


def checkpoint_table(model: nn.Module) -> TensorTable:
    """What a publisher of it writes, all in bf16."""
    return TensorTable(TensorSpec(name, "BF16", tuple(tensor.shape)) for name, tensor in live_tensors(model).read())


def load_real(rank: int, size: int, tied: str, experts: str) -> dict[str, Any]:
    model = fsdp(tied_llama())
    open_run(tied).load_into(model, 1)
    found: dict[str, Any] = {"tied": wrong(model.state_dict(), tied, 1)}
    for name, fused in (("sharded", fsdp(qwen3_moe())), ("plain", qwen3_moe())):
        try:
            open_run(experts).load_into(fused)
        except DeltaSyncError as error:
            found[name] = [error.kind, str(error)]
    return found


def load_all(rank: int, size: int, url: str, large: str, **real: str) -> dict[str, Any]:
    """One world for all of it: to start one takes longer than what it does."""
    found = {"fsdp": load_fsdp(rank, size, url), "meta": load_meta(rank, size, url)}
    found |= {"others": load_others(rank, size, url), "real": load_real(rank, size, **real)}
    return found | {"large": load_large(rank, size, large)}


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank of a world found."""
    url = write_run(tmp_path_factory.mktemp("run"), table_of(Net()))
    table = TensorTable(TensorSpec(f"{layer}.weight", "BF16", (SIDE, SIDE)) for layer in range(LAYERS))
    large = write_run(tmp_path_factory.mktemp("large"), table, versions=3, share=0.01)
    tied = write_run(tmp_path_factory.mktemp("tied"), checkpoint_table(tied_llama()), versions=2)
    experts = write_run(tmp_path_factory.mktemp("experts"), checkpoint_table(qwen3_moe()), versions=1)
    return run_world(request.param, load_all, timeout=600, url=url, large=large, tied=tied, experts=experts)


def test_sharded_modules_are_filled(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert len(rank["fsdp"]) == 4 * len(WAYS)
        assert not any(rank["fsdp"].values()), rank["fsdp"]


def test_models_made_without_memory_are_filled(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        kind, message = rank["meta"]["meta"]
        assert kind == TensorMismatchError.kind
        assert "to_empty" in message
        assert rank["meta"]["wrong"] == []


def test_targets_that_do_not_fit_are_left_alone(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["others"]
        assert found["state"] == found["untouched"] == []
        assert {found[name][0] for name in ("shape", "dtype", "extra", "absent")} == {TensorMismatchError.kind}
        assert "[6, 12] in the target, [12, 6] in the run" in found["shape"][1]
        assert "cannot hold every" in found["dtype"][1]
        assert "'more' of the target is not in the run" in found["extra"][1]
        assert "'up.weight' of the run is not in the target" in found["absent"][1]
        assert found["more"] == 12 * WIDTH
        # Only this name was asked for.
        assert "up.weight" not in found["some"]


def test_real_models_are_filled_or_refused_by_name(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        found = rank["real"]
        assert found["tied"] == []
        for way in ("sharded", "plain"):
            kind, message = found[way]
            assert kind == TensorMismatchError.kind
            assert "experts.0.down_proj.weight' of the run is not in the target" in message


def test_no_rank_takes_the_memory_of_the_model(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["large"]["wrong"] == []
        shard = 2 * SIDE * SIDE * LAYERS // len(ranks)
        assert shard <= rank["large"]["most"] < shard + 6 * 1024 * 1024


def test_plain_modules_without_memory_or_within_another_are_refused(tmp_path: Path) -> None:
    run = open_run(write_run(tmp_path, table_of(Net()), versions=1))
    with torch.device("meta"):
        model = Net()
    with pytest.raises(TensorMismatchError, match="to_empty"):
        run.load_into(model)
    wrapper = nn.ModuleDict({"module": Net()})
    with pytest.raises(TensorMismatchError, match=r"'module\.down\.bias': pass the module inside the wrapper"):
        run.load_into(wrapper)


# DeepSpeed

ZERO = {
    "train_micro_batch_size_per_gpu": 1,
    "bf16": {"enabled": True},
    "zero_allow_untested_optimizer": True,
}


def load_deepspeed(rank: int, size: int, url: str) -> dict[str, Any]:
    deepspeed: Any = importlib.import_module("deepspeed")
    # It would compile a faster all-reduce when it is used first; gloo's does.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return {str(stage): load_stage(deepspeed, stage, url) for stage in (1, 2, 3)}


def load_stage(deepspeed: Any, stage: int, url: str) -> dict[str, Any]:
    run, found = open_run(url), {}
    # Parameters of up to 20 elements stay gathered on every rank.
    config = ZERO | {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 20}}
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=stage == 3):
        model = Net().bfloat16()
    run.load_into(model, 1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), config=config)

    def held() -> dict[str, torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), enabled=stage == 3):
            return {name: tensor.detach().clone() for name, tensor in model.state_dict(keep_vars=True).items()}

    def step() -> None:
        """A step of length 0 writes what the optimizer holds."""
        engine.backward(engine(torch.tensor([[1, 2, 3]])).float().sum())
        engine.step()

    found["before"] = wrong(held(), url, 1)
    step()
    found["stepped"] = wrong(held(), url, 1)
    step()
    run.load_into(model, 2)
    here = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if tensor.numel()}
    small = {"up.bias", "down.bias", "norm.weight", "norm.bias", "single", "scale"}
    found["kept whole"] = sorted(small - here.keys()) + [name for name in wrong(here, url, 2) if name in here]
    found["loaded"] = wrong(held(), url, 2)
    engine.optimizer.refresh_fp32_params()
    step()
    found["refreshed"] = wrong(held(), url, 2)
    run.load_into(model, 1)
    step()
    found["not refreshed"] = wrong(held(), url, 2)
    return found


def test_deepspeed_is_filled_before_and_after_it_begins(tmp_path: Path) -> None:
    url = write_run(tmp_path, table_of(Net(), kept=()), versions=3)
    with World(2, load_deepspeed, {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}, url=url) as world:
        for found in world.results(600):
            assert set(found) == {"1", "2", "3"}
            for stage, answers in found.items():
                assert len(answers) == 6
                assert not any(answers.values()), (stage, answers)
