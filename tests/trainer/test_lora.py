"""PEFT models: published merged into their base, bit for bit as ``merge_and_unload`` of a copy; adapters as runs."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import AdaLoraConfig, LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from tests.support.adapters import TARGETS, adapted, randomize
from tests.support.architectures import qwen3, qwen3_moe, same_bits, saved, train
from tests.support.publishing import assert_holds, assert_same, snapshot
from trainer_side import Publisher
from trainer_side.integrations.peft import adapter_publisher
from trainer_side.model.live_tensors import Selection
from trainer_side.model.module import live_tensors
from vllm_delta_sync import follow, open_run
from vllm_delta_sync.errors import ModelError, UsageError
from vllm_delta_sync.maintenance.branch import branch
from vllm_delta_sync.maintenance.export import export

EXPERTS: dict[str, Any] = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}


def merged(model: PeftModel, folder: Path) -> dict[str, torch.Tensor]:
    """What PEFT merges and transformers saves, of a copy."""
    return saved(copy.deepcopy(model).merge_and_unload(), folder)


def two_adapters(model: PreTrainedModel) -> PeftModel:
    found = adapted(model)
    found.add_adapter("other", LoraConfig(r=2, target_modules=["q_proj", "k_proj"], task_type="CAUSAL_LM"))
    randomize(found, 1)
    # Both are merged, in this order; PeftModel itself activates only one.
    found.base_model.set_adapter(["other", "default"])
    return found


CASES: dict[str, Callable[[], PeftModel]] = {
    "float32": lambda: adapted(qwen3()),
    "bfloat16 under float32 adapters": lambda: adapted(qwen3().bfloat16()),
    "bfloat16": lambda: adapted(qwen3().bfloat16()).bfloat16(),
    "float16": lambda: adapted(qwen3().half()).half(),
    "rank-stabilized": lambda: adapted(qwen3(), use_rslora=True, rank_pattern={"down_proj": 3}),
    "embedding": lambda: adapted(qwen3(tied=False).bfloat16(), target_modules=["embed_tokens", "lm_head", "q_proj"]),
    "modules to save": lambda: adapted(qwen3(tied=False), modules_to_save=["lm_head", "norm"]),
    "biases": lambda: adapted(qwen3(attention_bias=True), bias="all"),
    "two adapters": lambda: two_adapters(qwen3().bfloat16()),
    "experts": lambda: adapted(qwen3_moe().bfloat16(), target_modules=["q_proj"], **EXPERTS),
}


@pytest.mark.parametrize("build", CASES.values(), ids=CASES.keys())
def test_tensors_are_those_of_merge_and_unload(build: Callable[[], PeftModel], tmp_path: Path) -> None:
    model = build()
    before = snapshot(model.state_dict())
    expected = merged(model, tmp_path)
    base = saved(copy.deepcopy(model).unload(), tmp_path / "base")
    assert_same(dict(live_tensors(model).read()), expected)
    changed = [name for name in expected if not same_bits(base[name], expected[name])]
    assert changed, "the adapter does too little to tell"
    assert_same(model.state_dict(), before)


def test_versions_follow_training(url: str, tmp_path: Path) -> None:
    model = adapted(qwen3())
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=1e-2)
    history = [merged(model, tmp_path / "0")]
    with Publisher(model, url) as publisher:
        for step in range(1, 4):
            train(model, optimizer)
            publisher.publish(step=step, wait=True)
            history.append(merged(model, tmp_path / str(step)))
    run = open_run(url)
    for version, weights in enumerate(history):
        assert_holds(run, version, weights)
    assert "config.json" in {file.name for file in run.info.files}
    moved = {name.split(".")[-2] for name in history[0] if not same_bits(history[0][name], history[3][name])}
    assert moved == set(TARGETS)


def test_adapters_that_transformers_adds_and_peft_has_merged(tmp_path: Path) -> None:
    model = qwen3()
    model.add_adapter(LoraConfig(r=4, target_modules=TARGETS, init_lora_weights=False))
    wrapped = adapted(qwen3())
    expected = merged(wrapped, tmp_path)
    assert model.peft_config
    assert dict(live_tensors(model).read()).keys() == expected.keys()
    wrapped.merge_adapter()
    assert_same(dict(live_tensors(nn.DataParallel(wrapped)).read()), expected)


def test_the_active_adapter_is_read(tmp_path: Path) -> None:
    model = two_adapters(qwen3())
    live = live_tensors(model)
    model.set_adapter("other")
    expected = merged(model, tmp_path)
    assert_same(dict(live.read()), expected)


@pytest.mark.parametrize("wrap", [torch.compile, checkpoint_wrapper], ids=["compile", "activation checkpoints"])
def test_wrappers_inside_the_model_change_nothing(wrap: Callable[[Any], nn.Module], url: str, tmp_path: Path) -> None:
    model = adapted(qwen3(tied=False), modules_to_save=["lm_head"])
    expected = merged(model, tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    layers = model.base_model.model.model.layers
    layers[0] = wrap(layers[0])
    layers[1].self_attn.q_proj = wrap(layers[1].self_attn.q_proj)
    model.base_model.model.lm_head = wrap(model.base_model.model.lm_head)
    assert_same(dict(live_tensors(model).read()), expected)
    inside = live_tensors(nn.ModuleDict({"actor": model}), Selection(rename={"actor.": ""}))
    assert_same(dict(inside.read()), expected)
    with adapter_publisher(model, url):
        assert_holds(open_run(url), 0, load_file(tmp_path / "adapter" / "adapter_model.safetensors"))


REFUSED: list[tuple[Callable[[], PeftModel], str]] = [
    (lambda: adapted(qwen3(), use_dora=True), r"q_proj' has adapter 'default', a variant of LoRA \(DoraLinear"),
    (
        lambda: adapted(qwen3(attention_bias=True), target_modules=["q_proj"], lora_bias=True),
        "q_proj' has adapter 'default', LoRA with a bias",
    ),
    (lambda: adapted(qwen3(), target_modules=["embed_tokens"]), "has a LoRA adapter and is tied to"),
    (lambda: adapted(qwen3(), trainable_token_indices=[1, 2]), "embed_tokens' is PEFT's TrainableTokensWrapper"),
    (
        lambda: get_peft_model(qwen3(), AdaLoraConfig(target_modules=TARGETS, total_step=10)),
        "carries PEFT adapters, of which 'default' is ADALORA, not LORA",
    ),
]


@pytest.mark.parametrize(("build", "message"), REFUSED)
def test_what_cannot_be_merged_is_refused_by_name(build: Callable[[], PeftModel], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        live_tensors(build())


def test_an_adapter_is_a_run_of_its_own(url: str, tmp_path: Path) -> None:
    model = two_adapters(qwen3())
    with adapter_publisher(nn.DataParallel(model), url) as publisher:
        model.save_pretrained(tmp_path / "0")
        randomize(model, 7)
        publisher.publish(step=1, wait=True)
        model.save_pretrained(tmp_path / "1")
    run = open_run(url)
    for version in (0, 1):
        assert_holds(run, version, load_file(tmp_path / str(version) / "adapter_model.safetensors"))
    config = json.loads((tmp_path / "1" / "adapter_config.json").read_text())
    assert json.loads(run.file("adapter_config.json")) == config
    assert model.peft_config["default"].inference_mode is False
    with adapter_publisher(model, f"{url}-other", adapter="other") as publisher:
        assert publisher.version == 0
    assert len(open_run(f"{url}-other").table) == len(load_file(tmp_path / "1" / "other" / "adapter_model.safetensors"))


@pytest.mark.usefixtures("process_group")
def test_an_adapter_that_is_sharded_in_a_world_of_one_is_published(url: str) -> None:
    model = adapted(qwen3())
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with adapter_publisher(model, url) as publisher, torch.no_grad():
        for weight in model.parameters():
            weight += int(weight.requires_grad)
        publisher.publish(step=1, wait=True)
    assert_holds(open_run(url), 1, {name: own.full_tensor() for name, own in get_peft_model_state_dict(model).items()})


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("sharded", [False, True])
def test_an_adapter_without_task_type_names_the_class_of_its_base_as_peft_does(
    url: str, tmp_path: Path, sharded: bool
) -> None:
    model = get_peft_model(qwen3(), LoraConfig(r=2, target_modules=["q_proj"]))
    model.save_pretrained(tmp_path)
    if sharded:
        fully_shard(model.base_model.model, mesh=init_device_mesh("cpu", (1,)))
    adapter_publisher(model, url).close()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["auto_mapping"]["base_model_class"] == "Qwen3ForCausalLM"
    assert json.loads(open_run(url).file("adapter_config.json")) == config


def test_a_branch_goes_on_with_deltas_between_related_adapters(url: str) -> None:
    model = adapted(qwen3())
    with adapter_publisher(model, url) as publisher:
        randomize(model, 1)
        publisher.publish(step=1, wait=True)
    branch(open_run(url), 1, f"{url}-branch")
    with adapter_publisher(model, f"{url}-branch") as publisher:
        randomize(model, 2)
        assert publisher.publish(step=2, wait=True).kind == "delta"
    assert_holds(open_run(f"{url}-branch"), 1, get_peft_model_state_dict(model))


def test_an_adapter_is_exported_and_followed_as_the_folder_that_peft_loads(url: str, tmp_path: Path) -> None:
    """``export`` and ``follow`` write the folder of an adapter, also once more and for the next version."""
    model = adapted(qwen3())
    base = copy.deepcopy(model).unload()
    followed, exported = tmp_path / "followed", tmp_path / "exported"

    def check(folder: Path) -> None:
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), str(folder))
        assert_same(get_peft_model_state_dict(loaded), get_peft_model_state_dict(model))

    with adapter_publisher(model, url) as publisher, open_run(url) as run:
        for step in (1, 2):
            randomize(model, step)
            publisher.publish(step=step)
            publisher.flush()
            report = export(run, exported, shard_bytes=1)
            assert report.files == ["adapter_config.json", "adapter_model.safetensors", "delta_sync_export.json"]
            assert (report.version, report.missing, report.present) == (step, [], False)
            assert export(run, exported).present
            check(exported)
            (version,) = follow(url, followed, once=True, shard_bytes=1)
            assert version.version == step
            check(followed / "current")
    with pytest.raises(UsageError, match="is the run of an adapter"):
        list(follow(url, tmp_path / "slime", once=True, format="slime"))


def test_another_scaling_is_refused_before_the_run_is_taken_from_its_publisher(url: str) -> None:
    model = adapted(qwen3())
    with adapter_publisher(model, url) as publisher:
        with pytest.raises(ModelError, match="was begun with lora_alpha = 6, and this adapter has 8"):
            adapter_publisher(adapted(qwen3(), lora_alpha=8), url)
        randomize(model, 1)
        publisher.publish(step=1, wait=True)
    assert_holds(open_run(url), 1, get_peft_model_state_dict(model))


def test_what_is_no_adapter_is_refused(url: str) -> None:
    with pytest.raises(ModelError, match="Qwen3ForCausalLM has no adapter 'default', but none"):
        adapter_publisher(qwen3(), url)
