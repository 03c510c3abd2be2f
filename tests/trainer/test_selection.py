"""``include=``, ``exclude=`` and ``rename=``: modules that hold more than what servers load, under other names."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel, Qwen3MoeForCausalLM

from tests.support.architectures import Plain, qwen3, qwen3_moe, saved
from tests.support.publishers import left_unfinished
from tests.support.publishing import Tensors, assert_holds, snapshot
from tests.support.tiny import make_model
from tests.support.trainers import SIZES, trainer_of
from tests.trainer.sharded.nursery import Nursery
from trainer_side import DeltaSyncCallback, Publisher
from trainer_side.integrations.gathered import gathered_publisher
from trainer_side.integrations.trl import DeltaWeightTransfer
from vllm_delta_sync import open_run
from vllm_delta_sync.errors import ModelError, TensorMismatchError, UsageError


class ActorCritic(nn.Module):
    """What a trainer may hold in one module: the policy, a value head on it, and a critic of its own."""

    def __init__(self, actor: PreTrainedModel) -> None:
        super().__init__()
        self.actor = actor
        self.v_head = nn.Linear(32, 1)
        self.critic = qwen3()


POLICY: dict[str, Any] = {"exclude": ["v_head.*", "critic.*"], "rename": {"actor.": ""}}


def change(model: nn.Module, but: str = "none") -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if but not in name:
                parameter.add_(0.5)


@pytest.mark.parametrize(
    "chosen",
    [
        POLICY,
        {"include": "actor.*", "rename": lambda name: name.removeprefix("actor.")},
        {"include": ["actor.*", "v_*"], "exclude": "v_*", "rename": {"actor.": "", "actor.model.": "model."}},
        {"include": "actor.*", "rename": lambda name: name.partition(".")[2]},
    ],
    ids=["exclude", "include", "both", "prefixes"],
)
def test_policy_inside_a_larger_module_is_published_as_it_is_saved(
    chosen: dict[str, Any], url: str, tmp_path: Path
) -> None:
    """Its experts, which the module holds fused, have the names of the checkpoint."""
    actor = qwen3_moe()
    actor.save_pretrained(tmp_path / "base")
    model = ActorCritic(actor)
    with Publisher(nn.DataParallel(model), url, base=tmp_path / "base", **chosen) as publisher:
        change(model)
        publisher.publish(1, wait=True)
    assert open_run(url).manifest(0).kind == "reference"
    expected = saved(actor, tmp_path / "saved")
    assert_holds(open_run(url), 1, expected, tmp_path / "base")
    # Another publisher goes on with the run.
    with Publisher(model, url, base=tmp_path / "base", **chosen) as publisher:
        assert not publisher.began
        assert publisher.publish(2, wait=True).changed == 0


def test_what_the_base_has_is_left_out_only_while_it_is_the_same(url: str, tmp_path: Path) -> None:
    model = qwen3(tied=False)
    model.save_pretrained(tmp_path / "base")
    base = saved(model, tmp_path / "before")
    with Publisher(model, url, base=tmp_path / "base", exclude="lm_head.*") as publisher:
        change(model, but="lm_head")
        publisher.publish(1, wait=True)
        expected = saved(model, tmp_path / "saved")
        model.lm_head.weight.data[0, 0] += 1
        change(model, but="lm_head")
        for step in (2, 3):
            with pytest.raises(
                TensorMismatchError, match=r"tensor 'lm_head.weight' is left out .*; publish it too, or"
            ):
                publisher.publish(step, wait=True)
        model.lm_head.weight.data.copy_(base["lm_head.weight"])
        later = saved(model, tmp_path / "later")
        assert publisher.publish(4, wait=True).version == 2
    assert_holds(open_run(url), 1, expected, tmp_path / "base")
    assert_holds(open_run(url), 2, later, tmp_path / "base")


def test_what_is_left_out_may_change_and_need_not_be_readable(url: str, tmp_path: Path) -> None:
    actor = qwen3(tied=False)
    actor.save_pretrained(tmp_path / "base")
    model: Any = ActorCritic(actor)
    model.reference = nn.Linear(3, 3, device="meta")
    model.register_buffer("history", torch.eye(2).to_sparse())
    with Publisher(
        model, url, base=tmp_path / "base", include="actor.*", exclude="*.lm_head.*", rename={"actor.": ""}
    ) as publisher:
        head, changes = actor.lm_head, iter(range(1, 10))

        def expect_next() -> None:
            change(actor, but="lm_head")
            version = publisher.publish(next(changes), wait=True).version
            publisher.flush()
            assert version is not None
            assert_holds(open_run(url), version, saved(actor, tmp_path / str(version)), tmp_path / "base")

        expect_next()
        model.history = torch.zeros(5)
        model.reference.to_empty(device="cpu")
        model.late = nn.Linear(2, 2)
        del model.critic
        expect_next()
        # Offloaded; it is compared again once it is back.
        kept = head.weight
        head.weight = nn.Parameter(kept.detach().to("meta"))
        change(actor, but="lm_head")
        assert publisher.publish(next(changes), wait=True).version == 3
        head.weight = nn.Parameter(kept.detach() + 1)
        with pytest.raises(TensorMismatchError, match=r"'lm_head.weight' is left out"):
            publisher.publish(next(changes), wait=True)
        head.weight = kept
        expect_next()


def test_what_differs_from_the_base_at_once_is_refused_before_anything_is_written(url: str, tmp_path: Path) -> None:
    model = qwen3(tied=False)
    model.save_pretrained(tmp_path / "base")
    model.lm_head.weight.data[0, 0] += 1
    with pytest.raises(TensorMismatchError, match=r"tensor 'lm_head.weight' is left out by include= or exclude="):
        Publisher(model, url, base=tmp_path / "base", exclude="lm_head.*")
    assert not list(Path(url).glob("*"))
    with Publisher(model, url, base=tmp_path / "base"):
        pass
    # A publisher that takes the run over keeps what servers have.
    with left_unfinished(Publisher(model, url, exclude="lm_head.*")) as publisher:
        assert publisher.publish(1, wait=True).version == 1
        model.lm_head.weight.data[0, 0] += 1
        with pytest.raises(TensorMismatchError, match="lm_head"):
            publisher.publish(2, wait=True)


def test_tied_tensor_is_published_unless_all_its_names_are_left_out(url: str, tmp_path: Path) -> None:
    model = qwen3()
    with Publisher(model, url, exclude="lm_head.*") as publisher:
        change(model)
        publisher.publish(1, wait=True)
    assert_holds(open_run(url), 1, saved(model, tmp_path / "saved"))


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"exclude": "*"}, "has no tensor to publish that include= and exclude= leave"),
        ({"include": "actr.*"}, "include has 'actr.*', which matches no tensor of the model"),
        ({"include": ["norm.*", "actr.*"]}, "include has 'actr.*', which matches no tensor of the model"),
        ({"exclude": "v_heads.*"}, "exclude has 'v_heads.*', which matches no tensor of the model"),
        ({"rename": {"actr.": ""}}, "rename has 'actr.', which matches no tensor of the model"),
        ({"include": []}, r"include is \[\]; give a pattern"),
        ({"exclude": [1]}, r"exclude is \[1\]; give a pattern"),
        ({"exclude": ""}, "exclude is ''; give a pattern"),
        ({"rename": {"": "x"}}, "rename has '': 'x'; give prefixes"),
        ({"rename": "actor."}, "rename is a str; give a mapping of prefixes"),
        ({"rename": lambda name: None}, "rename returns None for"),
        ({"rename": lambda name: "x"}, "rename gives '[a-z_.]+' and '[a-z_.]+' the same name, 'x'; exclude one"),
        (
            {"rename": {"norm.": "a", "scale": "aweight"}},
            "rename gives 'scale' and 'norm.weight' the same name, 'aweight'",
        ),
    ],
)
def test_mistakes_are_named(chosen: dict[str, Any], message: str, url: str) -> None:
    model = Plain()
    with pytest.raises((UsageError, ModelError), match=message):
        Publisher(model, url, **chosen)
    assert not list(Path(url).glob("*"))


def test_only_modules_and_gathered_weights_are_selected(url: str) -> None:
    with pytest.raises(UsageError, match=r"the model is a dict; they are for a torch.nn.Module and for gathered"):
        Publisher({"a": torch.zeros(2)}, url, exclude="a")


def gathered(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, parameter.detach()) for name, parameter in model.named_parameters())


def test_gathered_weights(url: str, tmp_path: Path) -> None:
    actor = qwen3_moe()
    actor.save_pretrained(tmp_path / "base")
    model = ActorCritic(actor)
    with gathered_publisher(url, tmp_path / "base", **POLICY) as publisher:  # type: ignore[union-attr]
        change(model)
        publisher.publish(1, wait=True, weights=gathered(model))
        # Later versions may have some of the tensors only.
        publisher.publish(2, wait=True, weights=gathered_of(model, "actor.model.norm"))
        with pytest.raises(
            ModelError, match=r"rename gives 'actor.model.norm.weight' and 'model.norm.weight' the same"
        ):
            publisher.publish(3, wait=True, weights=[*gathered_of(model, "actor.model.norm"), *gathered(qwen3_moe())])
    assert_holds(open_run(url), 2, saved(actor, tmp_path / "saved"), tmp_path / "base")


def test_gathered_weights_that_are_left_out_give_way(url: str, tmp_path: Path) -> None:
    actor = qwen3_moe()
    actor.save_pretrained(tmp_path / "base")
    model = ActorCritic(actor)
    chosen: dict[str, Any] = {"include": "actor.*", "rename": lambda name: name.partition(".")[2]}
    with gathered_publisher(url, tmp_path / "base", **chosen) as publisher:  # type: ignore[union-attr]
        change(model)
        publisher.publish(1, wait=True, weights=gathered(model))
        publisher.flush()
        # Which names are published is known now.
        backwards = sorted(gathered(model), key=lambda pair: pair[0].startswith("actor."))
        assert publisher.publish(2, wait=True, weights=backwards).changed == 0
    assert_holds(open_run(url), 2, saved(actor, tmp_path / "saved"), tmp_path / "base")
    with gathered_publisher(url, tmp_path / "base", **chosen) as publisher:  # type: ignore[union-attr]
        with pytest.raises(ModelError, match=r"'critic.*', which is left out, and 'actor.* first, or let rename"):
            publisher.publish(3, weights=backwards)
        change(model)
        assert publisher.publish(3, wait=True, weights=gathered(model)).version == 3
    assert_holds(open_run(url), 3, saved(actor, tmp_path / "saved again"), tmp_path / "base")


def gathered_of(model: nn.Module, prefix: str) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor) for name, tensor in gathered(model) if name.startswith(prefix)]


def test_gathered_weights_that_are_left_out_keep_the_bits_of_the_base(url: str, tmp_path: Path) -> None:
    model = qwen3(tied=False)
    model.save_pretrained(tmp_path / "base")
    with gathered_publisher(url, tmp_path / "base", exclude=["lm_head.*", "extra"]) as publisher:  # type: ignore[union-attr]
        with pytest.raises(UsageError, match="exclude has 'extra', which matches no tensor"):
            publisher.publish(1, weights=gathered(model))
        change(model, but="lm_head")
        extra = ("extra", torch.zeros(3))
        assert publisher.publish(2, wait=True, weights=[extra, *gathered(model)]).version == 1
        change(model)
        with pytest.raises(TensorMismatchError, match=r"tensor 'lm_head.weight' is left out"):
            publisher.publish(3, wait=True, weights=gathered(model))


def test_integrations_pass_them_on(url: str, tmp_path: Path) -> None:
    model = make_model("qwen3", **SIZES, tie_word_embeddings=False)
    model.save_pretrained(tmp_path / "base")
    transfer = DeltaWeightTransfer(f"{url}-transfer", tmp_path / "base", rename={"wrapped.": ""}, exclude="value.*")
    transfer.init_weight_transfer()
    model.lm_head.requires_grad_(False)
    callback = DeltaSyncCallback(url, base=tmp_path / "base", exclude="lm_head.*")
    trainer_of(model, tmp_path, [callback], max_steps=1).train()
    expected = saved(model, tmp_path / "saved")
    assert open_run(url).manifest(0).kind == "reference"
    assert_holds(open_run(url), 1, expected, tmp_path / "base")
    given: Tensors = {f"wrapped.{name}": tensor for name, tensor in snapshot(dict(model.named_parameters())).items()}
    transfer.send_weights(iter([("value.weight", torch.zeros(2)), *given.items()]))
    transfer.destroy()
    assert_holds(open_run(f"{url}-transfer"), 1, expected, tmp_path / "base")


def publish_policy(rank: int, size: int, url: str, base: str) -> Any:
    """The policy inside a sharded module, and the refusals of a head that is left out, on each rank."""
    actor = Qwen3MoeForCausalLM.from_pretrained(base)
    torch.manual_seed(5)
    model = ActorCritic(actor)
    fully_shard(model.actor)
    fully_shard(model)
    with Publisher(model, url, base=base, **POLICY) as publisher:
        change(model)
        publisher.publish(1, wait=True)
    chosen = {**POLICY, "exclude": [*POLICY["exclude"], "actor.lm_head.*"]}
    refused = []
    with left_unfinished(Publisher(model, url, base=base, **chosen)) as publisher:
        change(model, but="lm_head")
        publisher.publish(2, wait=True)
        change(model)
        try:
            publisher.publish(3, wait=True)
        except TensorMismatchError as error:
            refused.append(error.message)
    return refused


def test_sharded_policy(url: str, tmp_path: Path, nursery: Nursery) -> None:
    actor = qwen3_moe(tie_word_embeddings=False)
    actor.save_pretrained(tmp_path / "base")
    refused = nursery.run(2, publish_policy, url=url, base=str(tmp_path / "base"))
    assert all("lm_head.weight" in message and "left out" in message for [message] in refused)
    run = open_run(url)
    assert run.manifest(0).kind == "reference"
    expected = {name: tensor + 0.5 for name, tensor in load_file(tmp_path / "base" / "model.safetensors").items()}
    assert_holds(run, 1, expected, tmp_path / "base")
    expected = {name: tensor if "lm_head" in name else tensor + 0.5 for name, tensor in expected.items()}
    assert_holds(run, 2, expected, tmp_path / "base")
    assert run.head().version == 2
