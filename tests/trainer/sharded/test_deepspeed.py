"""Parts of models that a real DeepSpeed engine trains on the CPU: ZeRO-1, 2 and 3."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.architectures import VOCABULARY, same_bits
from tests.trainer.sharded.models import Tensors, built, cut
from tests.trainer.sharded.world import World
from trainer_side.naming import live_tensors
from trainer_side.sharded.parts import ModuleParts, needs_ranks
from vllm_delta_sync.torch_shards import is_sharded, local_boxes, whole_shape

ENVIRONMENT = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
CASES = [[1, "qwen3 tied", "bf16"], [2, "qwen3 moe", "fp32"], [3, "qwen3 moe", "bf16"], [3, "llama tied", "fp32"]]


def compile_nothing() -> None:
    """DeepSpeed would compile a faster all-reduce when it is used first; gloo's does."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def engine_of(stage: int, name: str, precision: str) -> Any:
    import deepspeed

    compile_nothing()
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = built(name)
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


def published(rank: int, size: int, cases: list[list[Any]]) -> list[Any]:
    answers = []
    for stage, name, precision in cases:
        engine = engine_of(stage, name, precision)
        live = ModuleParts(engine)
        found = []
        for steps in (False, True):
            if steps:
                train(engine, rank)
            expected = reference(name, engine)
            for part, tensor in live.read():
                box = live.parts[part].box
                same = same_bits(tensor, expected[live.parts[part].name][box.index])
                found.append([live.parts[part].name, box.offsets, box.shape, same])
        whole = {key: [known.shape, str(known.dtype)] for key, known in live.whole.items()}
        form = {key: [list(tensor.shape), str(tensor.dtype)] for key, tensor in expected.items()}
        assert form == {key: [list(shape), dtype] for key, (shape, dtype) in whole.items()}
        sharded = [p for p in engine.module.parameters() if is_sharded(p)]
        held = sum(box.numel for p in sharded for box, _ in local_boxes(p))
        views = all(
            view.data_ptr() != 0 and box.whole == whole_shape(p) for p in sharded for box, view in local_boxes(p)
        )
        answers.append([whole, found, needs_ranks(engine), len(sharded), held, views])
        engine.destroy()
    return answers


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_zero_are_the_checkpoint_once(size: int) -> None:
    with World(size, published, ENVIRONMENT, cases=CASES) as world:
        ranks = world.results(timeout=600)
    for number, (stage, _, _) in enumerate(CASES):
        answers = [answer[number] for answer in ranks]
        assert all(answer[0] == answers[0][0] for answer in answers)
        assert [part for answer in answers for part in answer[1] if not part[3]] == []
        times = {name: np.zeros(shape, int) for name, (shape, _) in answers[0][0].items()}
        for name, offsets, shape, _ in (part for answer in answers for part in answer[1]):
            times[name][cut(offsets, shape)] += 1
        assert [name for name, count in times.items() if not (count == 2).all()] == [], CASES[number]
        assert all(answer[2] and answer[5] for answer in answers)
        assert [bool(answer[3]) for answer in answers] == [stage == 3] * size
        assert [bool(answer[1]) for answer in answers] == [True] + [stage == 3] * (size - 1)
        if stage == 3:
            assert sum(answer[4] for answer in answers) == sum(count.size for count in times.values())
