"""Parts that ranks yield themselves: any layout publishes what one process would, and what does not fit is refused."""

import random
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from tests.support.checkpoints import write_checkpoint
from tests.support.publishing import Tensors, assert_holds, assert_versions, snapshot
from tests.support.tiny import make_model, save_checkpoint, train_steps
from tests.trainer.sharded.models import assert_same_runs
from tests.trainer.sharded.nursery import Nursery
from trainer_side import Budget, Gate, Part, Publisher
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import DeltaSyncError, GateError, TensorMismatchError, UsageError
from vllm_delta_sync.format.limits import MAX_TENSOR_NAME_BYTES
from vllm_delta_sync.tensors.boxes import Box

STEPS = 3
SIZES = {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "vocab_size": 300}
PADDED = 304


def megatron_of(whole: Any, tensor: int, stages: int, experts: int) -> Any:
    """Megatron-core's own model for the configuration of a transformers model: this rank's part of it."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    # It moves a tied head to a device, whatever ``use_cpu_initialization`` says.
    torch.Tensor.cuda = lambda own, *_, **__: own  # type: ignore[method-assign]
    parallel_state.initialize_model_parallel(tensor, stages, expert_model_parallel_size=experts)
    config, moe = whole.config, getattr(whole.config, "num_experts", None)
    return GPTModel(
        TransformerConfig(
            num_layers=config.num_hidden_layers, hidden_size=config.hidden_size, gated_linear_unit=True,
            num_attention_heads=config.num_attention_heads, num_query_groups=config.num_key_value_heads,
            kv_channels=config.head_dim, ffn_hidden_size=config.intermediate_size, num_moe_experts=moe,
            moe_ffn_hidden_size=config.moe_intermediate_size if moe else None, normalization="RMSNorm",
            add_bias_linear=False, use_cpu_initialization=True, tensor_model_parallel_size=tensor,
            pipeline_model_parallel_size=stages, expert_model_parallel_size=experts, pipeline_dtype=torch.float32,
            gradient_accumulation_fusion=False,
        ),
        get_gpt_layer_local_spec(moe, moe_grouped_gemm=False, qk_layernorm=True, normalization="RMSNorm"),
        PADDED, 64, parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=config.tie_word_embeddings, position_embedding_type="rope",
    )  # fmt: skip


def load(model: Any, whole: Any) -> None:
    """Write a transformers model's weights into this rank's Megatron model."""
    from megatron.core import parallel_state

    rank = parallel_state.get_tensor_model_parallel_rank()
    size = parallel_state.get_tensor_model_parallel_world_size()
    held = whole.state_dict()
    groups = whole.config.num_key_value_heads

    def rows(weight: torch.Tensor) -> torch.Tensor:
        return weight.chunk(size)[rank]

    def attention(layer: str) -> torch.Tensor:
        each = [held[f"{layer}.self_attn.{kind}_proj.weight"] for kind in "qkv"]
        fused = torch.cat([weight.view(groups, -1, weight.shape[1]) for weight in each], 1)
        return rows(fused.reshape(-1, fused.shape[2]))

    def own(name: str) -> torch.Tensor:
        if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
            head = name == "output_layer.weight" and not whole.config.tie_word_embeddings
            weight = held["lm_head.weight" if head else "model.embed_tokens.weight"]
            return rows(torch.cat([weight, torch.full((PADDED - len(weight), weight.shape[1]), 7.0)]))
        if name == "decoder.final_layernorm.weight":
            return held["model.norm.weight"]
        number, _, inner = name.removeprefix("decoder.layers.").partition(".")
        layer = f"model.layers.{model.decoder.layers[int(number)].layer_number - 1}"
        match inner.split("."):
            case ["input_layernorm", _]:
                return held[f"{layer}.input_layernorm.weight"]
            case ["pre_mlp_layernorm", _]:
                return held[f"{layer}.post_attention_layernorm.weight"]
            case ["self_attention", "q_layernorm" | "k_layernorm" as norm, _]:
                return held[f"{layer}.self_attn.{norm[0]}_norm.weight"]
            case ["self_attention", "linear_qkv", _]:
                return attention(layer)
            case ["self_attention", "linear_proj", _]:
                return held[f"{layer}.self_attn.o_proj.weight"].chunk(size, 1)[rank]
            case ["mlp", "router", _]:
                return held[f"{layer}.mlp.gate.weight"]
            case ["mlp", "linear_fc1", _]:
                return torch.cat([rows(held[f"{layer}.mlp.{kind}_proj.weight"]) for kind in ("gate", "up")])
            case ["mlp", "linear_fc2", _]:
                return held[f"{layer}.mlp.down_proj.weight"].chunk(size, 1)[rank]
            case ["mlp", "experts", "local_experts", j, linear, _]:
                expert = model.decoder.layers[int(number)].mlp.local_expert_indices[int(j)]
                # transformers holds gate and up of all experts in one tensor, and down in another.
                within = parallel_state.get_expert_tensor_parallel_rank()
                among = parallel_state.get_expert_tensor_parallel_world_size()
                if linear == "linear_fc2":
                    return held[f"{layer}.mlp.experts.down_proj"][expert].chunk(among, 1)[within]
                halves = held[f"{layer}.mlp.experts.gate_up_proj"][expert].chunk(2)
                return torch.cat([half.chunk(among)[within] for half in halves])
        raise AssertionError(name)

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(own(name))


def publish_megatron(rank: int, size: int, folder: str, family: str, layout: list[int]) -> Any:
    """Publish what each rank of a Megatron model holds, and on rank 0 the whole model as one process would."""
    from examples.recipes.megatron import megatron_parts

    gathered: list[str] = []
    for call in ("all_gather", "all_gather_into_tensor", "gather", "reduce_scatter", "all_to_all"):
        setattr(distributed, call, lambda *_, call=call, **__: gathered.append(call))
    whole = make_model(family, **SIZES)
    steps = train_steps(whole, lr=1e-3)
    model = megatron_of(whole, *layout)
    load(model, whole)
    alone = Publisher(whole, f"{folder}/alone", f"{folder}/base") if rank == 0 else None
    source = partial(megatron_parts, model, vocabulary=SIZES["vocab_size"])
    with Publisher(None, f"{folder}/run", f"{folder}/base", parts=source) as publisher:
        for step in range(1, STEPS + 1):
            next(steps)
            load(model, whole)
            publisher.publish(step, wait=True)
            if alone is not None:
                alone.publish(step, wait=True)
        publisher.flush()
        held = sum(part.tensor.numel() for part in source())
    if alone is not None:
        alone.close()
    return [gathered, held]


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed")
@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", [2, 2, 1]),
        ("qwen3", [4, 1, 1]),
        ("qwen3_moe", [1, 2, 2]),
        pytest.param("qwen3_moe", [2, 2, 1], marks=pytest.mark.slow),
    ],
    ids=["TP2-PP2", "TP4-of-2-groups", "PP2-EP2", "TP2-PP2-experts"],
)
def test_ranks_of_megatron_publish_as_one(family: str, layout: list[int], nursery: Nursery, tmp_path: Path) -> None:
    save_checkpoint(make_model(family, **SIZES), tmp_path / "base")
    said = nursery.run(4, publish_megatron, folder=str(tmp_path), family=family, layout=layout)
    assert [gathered for gathered, _ in said] == [[]] * 4
    run = assert_same_runs(str(tmp_path / "run"), str(tmp_path / "alone"))
    assert run.table.to_bytes() == open_run(str(tmp_path / "alone")).table.to_bytes()
    # Each rank sends what it holds, replicas once.
    assert {ref.rank for ref in run.head().objects} == {0, 1, 2, 3}
    assert run.head().version == STEPS
    assert max(held for _, held in said) < run.table.total


class Shards:
    """Tensors, and a way to cut them into parts: what ``parts=`` of a process yields."""

    def __init__(self, *parts: Part) -> None:
        self.parts = list(parts)

    def __call__(self) -> Iterator[Part]:
        yield from self.parts


def test_boxes_of_one_process_may_be_any_views_of_its_memory(tmp_path: Path) -> None:
    fused, wide, one = torch.randn(12, 6), torch.randn(8, 5), torch.tensor(3.0)
    longest = "transposed".ljust(MAX_TENSOR_NAME_BYTES, "d")
    shards = Shards(
        Part("gate", (6, 6), (0, 0), fused[:6]),
        Part("up", (6, 6), (3, 0), fused[9:]),
        Part("up", (6, 6), (0, 0), fused[6:9]),
        Part(longest, (5, 8), (0, 0), wide.t()[:, :3]),
        Part(longest, (5, 8), (0, 3), wide.t()[:, 3:]),
        Part("copy", (8, 5), (0, 0), wide),
        Part("copy", (8, 5), (0, 0), wide),
        Part("scalar", (), (), one),
        Part("empty", (0, 4), (0, 0), torch.empty(0, 4)),
    )

    def expected() -> Tensors:
        gate, up = fused.chunk(2)
        named = {"gate": gate, "up": up, longest: wide.t(), "copy": wide, "scalar": one}
        return snapshot({**named, "empty": torch.empty(0, 4)})

    url, seen = str(tmp_path / "run"), []
    with Publisher(parts=shards, bucket=url) as publisher:  # type: ignore[call-arg]  # a type cannot say "either"
        seen.append(expected())
        for step in range(1, 4):
            fused += torch.randn_like(fused) * (torch.rand_like(fused) < 0.2)
            wide[step] *= 1.5
            one += 1
            shards.parts.reverse()
            assert publisher.publish(step, wait=True).version == step
            seen.append(expected())
    assert_versions(url, seen)
    # Another process continues with whole tensors, and the first one's way of cutting continues after that.
    whole = expected()
    with Publisher(whole, url) as publisher:
        whole["gate"][0] = 7
        publisher.publish(4)
    fused[0] = 7
    with Publisher(None, url, parts=shards) as publisher:
        fused[1] = 8
        publisher.publish(5)
    with open_run(url) as run:
        assert_holds(run, 5, expected())
        assert run.verify().head == 5


SHAPES = {"a": (6, 8), "a.b": (5,), "b": (4, 3, 5), "c": (), "A": (2, 9)}


def divided(chance: random.Random, box: Box, most: int) -> list[Box]:
    """Some boxes that are this one together; a cut along any dimension, so that their elements lie between others'."""
    dimensions = [axis for axis, size in enumerate(box.shape) if size > 1]
    if not most or not dimensions:
        return [box]
    axis = chance.choice(dimensions)
    at = chance.randrange(1, box.shape[axis])

    def replaced(values: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (*values[:axis], value, *values[axis + 1 :])

    lower = Box(box.offsets, replaced(box.shape, at), box.whole)
    upper = Box(replaced(box.offsets, box.offsets[axis] + at), replaced(box.shape, box.shape[axis] - at), box.whole)
    return [*divided(chance, lower, most - 1), *divided(chance, upper, most - 1)]


@pytest.mark.parametrize("codec", ["plain", "raw"])
@pytest.mark.parametrize("seed", range(6))
def test_boxes_cut_anywhere_publish_what_the_whole_is(seed: int, codec: Any, url: str) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    dtypes = [torch.float32, torch.bfloat16]
    tensors = {name: torch.randn(shape).to(chance.choice(dtypes)) for name, shape in SHAPES.items()}
    shards = Shards(
        *(
            Part(name, shape, box.offsets, tensors[name][box.index])
            for name, shape in SHAPES.items()
            for box in divided(chance, Box.all_of(shape), chance.randrange(4))
        )
    )
    history = [snapshot(tensors)]
    with Publisher(None, url, parts=shards, codec=codec) as publisher:
        for step in (1, 2):
            chance.shuffle(shards.parts)
            for tensor in tensors.values():
                tensor[torch.rand(tensor.shape) < 0.2] += 1
            changed = sum(int((tensor != history[-1][name]).sum()) for name, tensor in tensors.items())
            assert publisher.publish(step, wait=True).changed == changed
            history.append(snapshot(tensors))
    assert_versions(url, history)


def publish_numbers_of_numpy(rank: int, size: int, folder: str) -> None:
    """Shapes, offsets and arguments are computed with numpy."""
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    own = whole.chunk(size)[rank]
    source = Shards(Part("w", np.array(whole.shape), np.array([2, 0]) * rank, own))  # type: ignore[arg-type]
    with Publisher(None, folder, parts=source, budget=Budget(max_share=0.5)) as publisher:
        own += 1
        publisher.publish(np.int64(1), wait=True, exact=np.bool_(False))  # type: ignore[arg-type]


def test_ranks_take_numbers_of_numpy(nursery: Nursery, tmp_path: Path) -> None:
    nursery.run(2, publish_numbers_of_numpy, folder=str(tmp_path))
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    assert_holds(open_run(str(tmp_path)), None, {"w": whole + 1})
    assert open_run(str(tmp_path)).manifest(1).held_back is not None


def refused(shards: Shards, url: str, **options: Any) -> str:
    with pytest.raises(DeltaSyncError) as caught, Publisher(None, url, parts=shards, **options) as publisher:
        publisher.publish(1)
    return caught.value.message


def test_what_does_not_fit_is_refused_by_name(tmp_path: Path) -> None:
    url, weight = str(tmp_path / "run"), torch.randn(4, 6)
    upper = Part("w", (4, 6), (0, 0), weight[:2])
    wrong: list[tuple[Any, str]] = [
        (Shards(upper), "ranks hold 12 of the 24 elements of tensor 'w'"),
        (Shards(upper, Part("w", (4, 6), (1, 0), weight[1:])), "share elements of tensor 'w'"),
        (Shards(upper, Part("w", (4, 6), (0, 0), weight[2:])), "part 'w[0:2,0:6]' is yielded more than once, with"),
        (Shards(Part("w", (4, 6), (3, 0), weight[:2])), "a part of tensor 'w'"),
        (Shards(Part("w", (4, 6), (0,), weight)), "a part of tensor 'w'"),
        (lambda: [Part("w", (4, 6), (0.0, 0), weight)], "has shape (4, 6) and offsets (0.0, 0); give integers"),  # type: ignore[arg-type]
        (lambda: ["w"], "parts= yields <class 'str'>"),
        ([upper], "parts= gives no parts"),
        (lambda: None, "parts= gives no parts"),
        (Shards(upper, Part("w", (5, 6), (2, 0), weight[2:])), "is F32 [5, 6] on rank 0, and F32 [4, 6] on rank 0"),
    ]
    for shards, message in wrong:
        assert message in refused(shards, url)
    base = write_checkpoint(tmp_path / "base", {"w": weight})
    padded = Part("w", (5, 6), (0, 0), torch.zeros(5, 6))
    assert "yield tensors under its names and in its shapes, without padding" in refused(Shards(padded), url, base=base)
    assert "parts=" in refused(Shards(upper), url, exclude="x")
    assert not Path(url).exists()
    with pytest.raises(UsageError, match="neither model nor parts= is given"):
        Publisher(None, url)
    with pytest.raises(UsageError, match="model and parts= are both given"):
        Publisher({"w": weight}, url, parts=Shards(upper))


def test_parts_that_change_later_are_refused_and_nothing_is_published(tmp_path: Path) -> None:
    url, weight = str(tmp_path / "run"), torch.randn(4, 6)
    halves = [Part("w", (4, 6), (0, 0), weight[:2]), Part("w", (4, 6), (2, 0), weight[2:])]
    shards = Shards(*halves)
    with Publisher(None, url, parts=shards) as publisher:
        for parts, complaint in (
            (halves[:1], "part 'w[2:4,0:6]' is no longer yielded"),
            ([halves[0], Part("w", (4, 6), (2, 0), weight[2:].double())], "'w[2:4,0:6]' is now torch.float64"),
            ([*halves, Part("v", (1,), (0,), weight[0, :1])], "part 'v' of shape [1] was not yielded"),
        ):
            shards.parts = list(parts)
            weight += 1
            with pytest.raises(TensorMismatchError) as caught:
                publisher.publish(1)
            assert complaint in caught.value.message
        with pytest.raises(UsageError, match="made with parts="):
            publisher.publish(1, weights=[("w", weight)])
        shards.parts = halves
        publisher.publish(1)
    with open_run(url) as run:
        assert_holds(run, 1, {"w": weight})


def test_a_gate_and_a_budget_judge_parts_as_the_whole(tmp_path: Path) -> None:
    url, weight = str(tmp_path / "run"), torch.randn(8, 10)
    shards = Shards(Part("w", (8, 10), (0, 0), weight[:, :4]), Part("w", (8, 10), (0, 4), weight[:, 4:]))
    with Publisher(None, url, parts=shards, gate=Gate(), budget=Budget(max_share=0.25)) as publisher:
        before = weight.clone()
        weight[:, ::2] *= torch.arange(2.0, 10.0)[:, None]
        publisher.publish(1, wait=True)
        publisher.flush()
        expected = before.clone()
        expected[4:, ::2] = weight[4:, ::2]  # the larger half of forty changes, of which twenty may go out
        assert_holds(open_run(url), 1, {"w": expected})
        weight[0, 9] = torch.nan
        publisher.publish(2, wait=True)
        with pytest.raises(GateError, match="NaN"):
            publisher.flush()
        weight[0, 9] = 1.0
        publisher.publish(3, exact=True)
    with open_run(url) as run:
        assert_holds(run, None, {"w": weight})
