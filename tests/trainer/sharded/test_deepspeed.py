"""What real DeepSpeed engines publish from all ranks on the CPU, and take from a run: ZeRO-1, ZeRO-2 and ZeRO-3."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from tests.support.architectures import VOCABULARY
from tests.support.publishing import Tensors, assert_holds
from tests.trainer.sharded.models import built
from tests.trainer.sharded.nursery import Nursery
from tests.trainer.sharded.test_load_into import Net, table_of, write_run, wrong
from trainer_side import Publisher
from trainer_side.model.module import live_tensors
from trainer_side.ranks.shard_parts import needs_ranks
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError
from vllm_delta_sync.tensors.torch_sharding import is_sharded


def deepspeed_on_cpu() -> Any:
    """DeepSpeed; it would compile a faster all-reduce when it is used first, gloo's does."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


def prepare() -> Any:
    os.environ["LOCAL_RANK"] = "0"
    deepspeed = deepspeed_on_cpu()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    return deepspeed


def engine_of(stage: int, name: str, precision: str) -> Any:
    deepspeed, model = prepare(), built(name)
    settings = {
        "train_micro_batch_size_per_gpu": 2,
        # Small parameters stay gathered between steps, as they do by default.
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 100},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": precision == "bf16"},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def train(engine: Any, rank: int) -> None:
    torch.manual_seed(100 + rank)
    for _ in range(2):
        tokens = torch.randint(3, VOCABULARY, (2, 12))
        logits = engine(tokens).logits.reshape(-1, VOCABULARY)
        engine.backward(torch.nn.functional.cross_entropy(logits.float(), tokens.roll(-1, 1).reshape(-1)))
        engine.step()


def reference(name: str, engine: Any) -> Tensors:
    """Checkpoint tensors of an unsharded model with the gathered weights."""
    import deepspeed

    plain = built(name)
    with deepspeed.zero.GatheredParameters([p for p in engine.module.parameters() if is_sharded(p)]), torch.no_grad():
        own = dict(engine.module.named_parameters())
        for key, parameter in plain.named_parameters():
            parameter.data = own[key].detach().clone()
    return {key: tensor.clone() for key, tensor in live_tensors(plain).read()}


def publish(rank: int, size: int, folder: str, cases: list[list[Any]]) -> None:
    for stage, name, precision in cases:
        url = f"{folder}/{stage} {name}"
        engine = engine_of(stage, name, precision)
        assert needs_ranks(engine)
        assert any(map(is_sharded, engine.module.parameters())) == (stage == 3)
        for life in range(2):
            with Publisher(engine, url) as publisher:
                for step in (1, 2):
                    train(engine, rank)
                    expected = reference(name, engine)
                    publisher.publish(step, wait=True)
                    publisher.flush()
                    if rank == 0:
                        assert_holds(open_run(url), None, expected)
                    distributed.barrier()
                assert publisher.version == 2 * life + 2
        engine.destroy()


OTHERS = [[1, "qwen3 tied", "bf16"], [2, "qwen3 moe", "fp32"], [3, "qwen3 moe", "bf16"]]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "cases"), [(2, [[3, "llama tied", "fp32"]]), (2, OTHERS), (4, OTHERS)])
def test_engines_publish_their_partitions(size: int, cases: list[list[Any]], nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(size, publish, folder=str(tmp_path), cases=cases)
    for stage, name, _ in cases:
        run = open_run(str(tmp_path / f"{stage} {name}"))
        assert run.verify().head == 4
        assert {ref.rank for ref in run.manifest(4).objects} == (set(range(size)) if stage == 3 else {0})


def publish_pieces(rank: int, size: int, folder: str, name: str, kind: dict[str, Any]) -> str:
    """An engine whose ranks hold different weights under equal names and shapes → how it is refused."""
    deepspeed, model = prepare(), built(name)
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    settings = {"train_micro_batch_size_per_gpu": 2, "optimizer": optimizer, "zero_optimization": {"stage": 1}, **kind}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    with pytest.raises(ModelError) as refused:
        Publisher(engine, folder)
    return refused.value.message


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind", "found"),
    [
        ("qwen3", {"tensor_parallel": {"autotp_size": 2}}, "q_proj.weight' is this rank's part of a tensor, by tensor"),
        ("qwen3 moe", {"expert_parallel": {"enabled": True, "autoep_size": 2}}, "experts.w1' is this rank's part of"),
    ],
)
def test_pieces_that_do_not_say_which_are_refused(
    name: str, kind: dict[str, Any], found: str, nursery: Nursery, tmp_path: Path
) -> None:
    said = nursery.run(2, publish_pieces, folder=str(tmp_path), name=name, kind=kind)
    assert all(found in message for message in said)


ZERO = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_allow_untested_optimizer": True}


def load(rank: int, size: int, url: str) -> dict[str, Any]:
    deepspeed = prepare()
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


@pytest.mark.slow
def test_engines_are_filled_before_and_after_they_begin(nursery: Nursery, tmp_path: Path) -> None:
    url = write_run(tmp_path, table_of(Net(), kept=()), versions=3)
    for found in nursery.run(2, load, url=url):
        assert set(found) == {"1", "2", "3"}
        for stage, answers in found.items():
            assert len(answers) == 6
            assert not any(answers.values()), (stage, answers)
